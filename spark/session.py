"""Starts a Spark session for Magnetar's own jobs, with the settings that Spark needs.

Without these settings, Python workers run the `python3` of the PATH. Spark also resolves the host's
name to an address, which fails on many machines.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from magnetar.spark.errors import JavaMissing, SparkMissing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Magnetar's jobs need little memory: aggregates are small, and Spark moves cached rows to the disk.
DRIVER_MEMORY: Final = "1g"
# The longest wait for a child's exec. An exec takes milliseconds, unless the machine is overloaded.
EXEC_S_MAX: Final = 5.0

_ENDED: Final = (FileNotFoundError, ProcessLookupError)
"""The errors of a call about a process or thread that has ended meanwhile."""


def spark_session(name: str, *, master: str = "local[*]", **settings: str) -> SparkSession:
    """Start Spark, or return the session of this process.

    `settings` are Spark's settings, with "_" for ".". Settings of `spark-submit` take precedence.
    Raises JavaMissing, SparkMissing.
    """
    require_java()
    for variable, value in environment_for(master).items():
        os.environ.setdefault(variable, value)
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkMissing(str(error)) from None
    builder: SparkSession.Builder = SparkSession.builder.appName(name)
    wanted = _QUICK | {key.replace("_", "."): value for key, value in settings.items()}
    if "SPARK_ENV_LOADED" in os.environ:  # under spark-submit
        SparkContext._ensure_initialized()  # otherwise SparkConf lacks spark-submit's settings
        told = SparkConf()
        wanted = {key: value for key, value in wanted.items() if not told.contains(key)}
    else:
        builder = builder.master(master).config("spark.driver.memory", DRIVER_MEMORY)
    for key, value in wanted.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def environment_for(master: str) -> dict[str, str]:
    """Return the environment variables to set if they are unset.

    They name the workers' Python and, for a local master, the loopback address. With another
    master, executors on other machines must reach the driver, so Spark chooses the address.
    """
    python = {"PYSPARK_PYTHON": sys.executable}
    return python | ({"SPARK_LOCAL_IP": "127.0.0.1"} if master.startswith("local") else {})


def fork_plainly() -> None:
    """Turn gRPC's fork support off. Call it before gRPC is imported in a process that starts Spark.

    PySpark forks to start Java. In the fork, gRPC's fork support handles threads that do not exist
    there. It aborts the fork once in thirty starts: "Java gateway process exited".
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def end_java() -> None:
    """Kill the Java process that this process has started.

    Call this function after Ctrl-C, because PySpark makes Java ignore the signal. A Java process
    that is still starting would run on for seconds and then print an error.
    """
    for children in Path("/proc/self/task").glob("*/children"):
        pids: list[str] = []
        with suppress(*_ENDED):  # threads end at any time
            pids = children.read_text().split()
        for pid in map(int, pids):
            # This also finds a child that still runs the script bin/spark-submit.
            if b"spark" in _command_of(pid):
                with suppress(*_ENDED):
                    os.kill(pid, signal.SIGKILL)


def _command_of(child: int) -> bytes:
    """Wait until a child has its own command line, and return it; empty if the child has ended.

    Right after the fork, a child still has the command line of this process. During its exec, it
    has none.
    """
    own, give_up_s = Path("/proc/self/cmdline").read_bytes(), time.monotonic() + EXEC_S_MAX
    while True:
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            state = Path(f"/proc/{child}/stat").read_bytes().rpartition(b") ")[2][:1]
        except _ENDED:
            return b""
        if command not in (b"", own) or state == b"Z" or time.monotonic() > give_up_s:
            return command
        time.sleep(0.001)


def require_java() -> None:
    """Raise JavaMissing if Spark would find no Java. If JAVA_HOME is set, Spark uses only it."""
    home = os.environ.get("JAVA_HOME")
    if home and not os.access(Path(home, "bin", "java"), os.X_OK):
        raise JavaMissing(home)
    if not home and shutil.which("java") is None:
        raise JavaMissing


_QUICK = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    # With a Unix socket, a task of few rows costs 21 ms instead of 36.
    "spark.python.unix.domain.socket.enabled": "true",
}
