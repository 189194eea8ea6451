"""Runs one job of `magnetar spark`: checks before Spark starts, shows progress, reports errors."""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from magnetar.cli.client import fail, require_reachable
from magnetar.cli.interrupt import INTERRUPTED
from magnetar.cli.spark_progress import task_progress
from magnetar.runtime.log import configure_logging
from magnetar.spark.errors import JobFailed, SparkError, SparkMissing
from magnetar.spark.session import end_java, fork_plainly, require_java, spark_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from magnetar.cli.spark_connection import Connection

T = TypeVar("T")

Master = Annotated[str, typer.Option(help="the master URL of Spark")]
DEFAULT_MASTER = "local[*]"


@contextmanager
def job_errors() -> Iterator[None]:
    """End the command with one line if the block raises an operating error. At Ctrl-C, kill Java
    and end the command without a line."""
    configure_logging()
    fork_plainly()
    try:
        yield
    except SparkError as error:
        fail(str(error))
    except OSError as error:  # about the target or about Spark's temporary files
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        end_java()
        raise typer.Exit(INTERRUPTED) from None


def require_spark() -> None:
    """Raise SparkMissing or JavaMissing if the machine lacks PySpark or Java. Call this first."""
    try:
        import pyspark.sql  # noqa: F401
    except ImportError as error:
        raise SparkMissing(str(error)) from None
    require_java()


def run_job(name: str, connection: Connection, master: str, work: Callable[[SparkSession], T]) -> T:
    """Start Spark, run `work`, and show the progress on a terminal. Raises SparkError."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    asyncio.run(require_reachable(connection["service.url"]))
    try:
        session = spark_session(f"magnetar {name}", master=master)
        try:
            tracker: Any = session.sparkContext.statusTracker()
            with task_progress(tracker, name, Console(stderr=True)):
                return work(session)
        finally:
            session.stop()
    except (PySparkException, Py4JError) as error:
        raise JobFailed(reason_in(str(error))) from error


def reason_in(text: str) -> str:
    """Return the cause in the text of a Spark error: Magnetar's error in a worker's traceback, or
    the first line."""
    ours = re.search(r"^magnetar\.\S+\.(\w+): (.*)$", text, re.MULTILINE)
    return f"{ours[1]}: {ours[2]}" if ours else text.strip().partition("\n")[0]
