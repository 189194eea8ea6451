"""`magnetar spark`: jobs that run on Spark."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path  # noqa: TC003 (Typer needs it at run time)
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from magnetar.cli.client import DEFAULT_SERVICE_URL, fail, require_reachable
from magnetar.cli.help import App
from magnetar.cli.interrupt import INTERRUPTED
from magnetar.cli.spark_progress import task_progress
from magnetar.runtime.log import configure_logging
from magnetar.runtime.process import ExitCode
from magnetar.spark.errors import JobFailed, SparkError, SparkMissing
from magnetar.spark.session import end_java, fork_plainly, require_java, spark_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.spark.pipelines.archive import Compared

# Enough for a year of days. An archive by key can have many more; then the sum matters.
ROWS_SHOWN_MAX: Final = 400

jobs = App(help="Jobs that run on Spark (they need Java).", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    app.add_typer(jobs, name="spark")


@jobs.callback()
def root() -> None:
    pass  # without a callback, Typer would make the only job the command `magnetar spark` itself


@jobs.command()
def archive(
    topic: Annotated[str, typer.Option(help="the topic to archive")],
    path: Annotated[
        Path, typer.Option(help="directory of the archive; created if it does not exist")
    ],
    service_url: Annotated[
        str,
        typer.Option(
            envvar="MAGNETAR_SERVICE_URL",
            help="URL of the brokers: grpc://host:port[,host2:port]",
        ),
    ] = DEFAULT_SERVICE_URL,
    partition_by: Annotated[
        str,
        typer.Option(help="directories: publish-date, publish-hour, event-date, key or none"),
    ] = "publish-date",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an existing archive")
    ] = False,
    master: Annotated[str, typer.Option(help="the master URL of Spark")] = "local[*]",
) -> None:
    """Write a topic to partitioned Parquet files, and compare them with the topic.

    If the archive holds every message with its id, value and metadata, the command moves the
    archive to PATH and exits with 0. Otherwise PATH is unchanged. The archive does not include
    messages that are published during the job.
    """
    configure_logging()
    fork_plainly()
    try:
        compared = _archive(service_url, topic, path, partition_by, overwrite, master)
    except SparkError as error:
        fail(str(error))
    except OSError as error:  # about the target or about Spark's temporary files
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        end_java()
        raise typer.Exit(INTERRUPTED) from None
    show(compared, path)
    if not all(part.equal for part in compared):
        raise typer.Exit(ExitCode.FAILED)
    typer.echo(f"To read the archive: spark.read.parquet({str(path.absolute())!r})")


def _archive(
    service_url: str, topic: str, path: Path, partition_by: str, overwrite: bool, master: str
) -> list[Compared]:
    """Check all that can be checked before Spark starts, then archive. Raises SparkError."""
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        from magnetar.spark.pipelines.archive import PartitionBy, archive
        from magnetar.spark.pipelines.target import check_target
        from magnetar.spark.source.driver import plan_frame
        from magnetar.spark.source.options import parse_options
    except ImportError as error:
        raise SparkMissing(str(error)) from None
    if partition_by not in set(PartitionBy):
        raise typer.BadParameter(
            f"{partition_by!r} is not one of {', '.join(PartitionBy)}", param_hint="--partition-by"
        )
    require_java()
    path = path.absolute()
    check_target(path, overwrite=overwrite)
    options = parse_options({"service.url": service_url, "topic": topic})
    asyncio.run(require_reachable(service_url))
    plan_frame(options)
    session = spark_session(f"magnetar archive {topic}", master=master)
    try:
        tracker = session.sparkContext.statusTracker()
        with task_progress(tracker, f"archiving {topic}", Console(stderr=True)):
            return archive(
                session,
                service_url=service_url,
                topic=topic,
                path=path,
                partition_by=PartitionBy(partition_by),
                overwrite=overwrite,
            )
    except (PySparkException, Py4JError) as error:
        raise JobFailed(reason_in(str(error))) from error
    finally:
        session.stop()


def reason_in(text: str) -> str:
    """Return the cause in the text of a Spark error: Magnetar's error in a worker's traceback, or
    the first line."""
    ours = re.search(r"^magnetar\.\S+\.(\w+): (.*)$", text, re.MULTILINE)
    return f"{ours[1]}: {ours[2]}" if ours else text.strip().partition("\n")[0]


def show(compared: Sequence[Compared], path: Path) -> None:
    """Print the comparison by partition. With too many partitions, show the unequal ones first."""
    table = Table("partition", title=f"archive {path}")
    for name in ("in the topic", "in the archive"):
        table.add_column(name, justify="right")
    table.add_column("equal")
    shown = sorted(compared, key=lambda part: part.equal)[:ROWS_SHOWN_MAX]
    for part in sorted(shown, key=lambda part: part.partition):
        table.add_row(
            part.partition or "(all)",
            f"{part.in_topic:,}",
            f"{part.in_archive:,}",
            "yes" if part.equal else "NO",
        )
    if len(compared) > len(shown):
        table.add_row(f"{len(compared) - len(shown):,} more", "", "", "yes")
    table.add_section()
    table.add_row(
        f"{len(compared):,} partitions",
        f"{sum(part.in_topic for part in compared):,}",
        f"{sum(part.in_archive for part in compared):,}",
        "yes" if all(part.equal for part in compared) else "NO",
    )
    Console().print(table)
