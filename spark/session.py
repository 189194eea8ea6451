"""A Spark session on this machine for our own jobs, with what Spark needs to be told.

Python workers take `python3` from the PATH unless told which; Spark asks the host's name for an
address, which many machines cannot resolve. Both are settled here, once.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from magnetar.spark.errors import JavaMissing, SparkMissing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Our jobs hold no data in the JVM: rows pass through, aggregates are small.
DRIVER_MEMORY: Final = "1g"


def spark_session(name: str, *, master: str = "local[*]", **settings: str) -> SparkSession:
    """Start Spark, or join the session of this process. Under `spark-submit` its settings win.

    `settings` are Spark's, with "_" for ".". Raises JavaMissing, SparkMissing.
    """
    require_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkMissing(str(error)) from None
    builder: SparkSession.Builder = SparkSession.builder.appName(name)
    if "SPARK_ENV_LOADED" not in os.environ:  # not under spark-submit
        builder = builder.master(master).config("spark.driver.memory", DRIVER_MEMORY)
    for key, value in (_QUICK | {k.replace("_", "."): v for k, v in settings.items()}).items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def fork_plainly() -> None:
    """Call before gRPC is imported in a process that will start Spark.

    PySpark forks to start Java. In the fork gRPC looks after its threads, which are not there, and
    aborts it one time in thirty: "Java gateway process exited". Told not to, it leaves it alone.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def require_java() -> None:
    """Raises JavaMissing."""
    home = os.environ.get("JAVA_HOME")
    if home and os.access(Path(home, "bin", "java"), os.X_OK):
        return
    if shutil.which("java") is None:
        raise JavaMissing


_QUICK = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    # What every Parquet reader understands; Spark's default is INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A task of few rows costs 21 ms instead of 36.
    "spark.python.unix.domain.socket.enabled": "true",
}
