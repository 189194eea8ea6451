"""The settings that a process changes before it starts Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from magnetar.spark.errors import JavaMissing
from magnetar.spark.session import environment_for, require_java

if TYPE_CHECKING:
    from pathlib import Path

# PySpark's use of `preexec_fn`, in a process that has used gRPC. Each fork is aborted with a
# probability of 1/30 unless gRPC's fork support is off.
FORKS = """
import contextlib
import subprocess
import sys
import {module}
from magnetar.spark.session import fork_plainly
assert "grpc" not in sys.modules, "it reads the variable when it is imported"
fork_plainly()
import grpc
from concurrent.futures import ThreadPoolExecutor
server = grpc.server(ThreadPoolExecutor(2))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
for _ in range(150):
    with grpc.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        with contextlib.suppress(grpc.RpcError):
            channel.unary_unary("/no/server")(b"")
    assert subprocess.run(["true"], preexec_fn=lambda: None).returncode == 0
"""

# The test runs in a process of its own: `end_java` kills every Java process of its process, also
# the one that Spark's tests share.
ENDS_A_CHILD = """
import os
import signal
import threading
from pathlib import Path
from magnetar.spark.session import end_java
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.read(reading, 1)
    os.execvp("sleep", ["bin/spark-submit", "60"])


def with_ended_threads(self, pattern, glob=Path.glob):
    yield Path("/proc/self/task/1/children")  # a thread that has ended after the listing
    yield from glob(self, pattern)


Path.glob = with_ended_threads
ending = threading.Thread(target=end_java)
ending.start()
ending.join(0.1)  # without the wait it has looked, and passed over the child
os.write(writing, b"x")
ending.join()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
"""


def run(module: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    code = FORKS.format(module=module)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100)


def test_the_archive_command_can_fork() -> None:
    run("magnetar.cli.spark")


def test_the_demo_can_fork() -> None:
    run("magnetar.demo.__main__")


def test_a_child_that_is_ended_before_its_exec_does_not_become_java() -> None:
    """Before the exec, the child's command line is that of its parent, and for a moment it is
    empty."""
    done = subprocess.run([sys.executable, "-c", ENDS_A_CHILD], check=False, timeout=60)
    assert done.returncode == 0


def test_a_java_home_without_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A java on the PATH does not help: with JAVA_HOME set, Spark does not use the PATH."""
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(java.parent))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    with pytest.raises(JavaMissing, match=r"JAVA_HOME is .*old"):
        require_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    require_java()
    monkeypatch.delenv("JAVA_HOME")
    require_java()
    java.unlink()
    with pytest.raises(JavaMissing, match="PATH"):
        require_java()


def test_driver_with_remote_executors_is_not_on_loopback() -> None:
    assert environment_for("local[*]")["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert "SPARK_LOCAL_IP" not in environment_for("spark://host:7077")
