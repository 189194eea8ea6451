"""`magnetar spark`: jobs that run on Spark."""

from __future__ import annotations

import asyncio
from pathlib import Path  # noqa: TC003 (Typer needs it at run time)
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table

from magnetar.cli import spark_pipelines
from magnetar.cli.client import require_reachable
from magnetar.cli.help import App
from magnetar.cli.output import plain_console
from magnetar.cli.spark_connection import Connection, connects
from magnetar.cli.spark_job import (
    DEFAULT_MASTER,
    Master,
    job_errors,
    require_spark,
    run_job,
)
from magnetar.runtime.process import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.spark.pipelines.archive import Compared
    from magnetar.spark.pipelines.incremental import Archived

# Enough for the days of a year. An archive by key can have many more partitions; then the last row,
# the sum, matters.
ROWS_SHOWN_MAX: Final = 400

jobs = App(help="Run jobs on Spark (needs Java).", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    app.add_typer(jobs, name="spark")


@jobs.command()
@connects
def archive(
    topic: Annotated[
        list[str], typer.Option(help="the topic to archive; with --incremental, several")
    ],
    path: Annotated[
        Path, typer.Option(help="directory of the archive; created if it does not exist")
    ],
    partition_by: Annotated[
        str,
        typer.Option(help="directories: publish-date, publish-hour, event-date, key or none"),
    ] = "publish-date",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an existing archive")
    ] = False,
    incremental: Annotated[
        bool,
        typer.Option("--incremental", help="add the messages published since the last run"),
    ] = False,
    subscription: Annotated[
        str,
        typer.Option(
            help="with --incremental: a subscription that keeps messages until they are archived"
        ),
    ] = "",
    skip_lost: Annotated[
        bool,
        typer.Option(
            "--skip-lost",
            help="with --incremental: continue if a topic deleted messages that no run archived",
        ),
    ] = False,
    master: Master = DEFAULT_MASTER,
    *,
    connection: Connection,
) -> None:
    """Write a topic to partitioned Parquet files, and compare them with the topic.

    If the archive holds every message with its id, value and metadata, the command moves the
    archive to PATH and exits with 0. Otherwise PATH is unchanged. The archive does not include
    messages that are published during the job.

    With --incremental, the archive at PATH holds several topics. Each run adds the messages that
    were published since the last run. Every message is in the archive once, even if a run was
    killed. The archive has a directory for each topic and publish date.
    """
    if incremental and (overwrite or partition_by != "publish-date"):
        raise typer.BadParameter(
            "cannot be combined with --overwrite or --partition-by", param_hint="--incremental"
        )
    for given, name in (
        (len(topic) > 1, "--topic (more than one)"),
        (subscription, "--subscription"),
        (skip_lost, "--skip-lost"),
    ):
        if given and not incremental:
            raise typer.BadParameter("needs --incremental", param_hint=name)
    with job_errors():
        require_spark()
        if incremental:
            done = _archive_new(connection, topic, path, subscription, skip_lost, master)
            compared = done.compared
        else:
            compared = _archive(connection, topic[0], path, partition_by, overwrite, master)
    show(compared, path)
    if incremental:
        typer.echo(f"This run added {done.new:,} messages")
        for name, count in done.earlier.items():
            typer.echo(
                f"{name}: the archive also holds {count:,} messages of an earlier topic of this"
                " name, which was deleted; they are not compared"
            )
    if not all(part.equal for part in compared):
        raise typer.Exit(ExitCode.FAILED)
    typer.echo(f"To read the archive: spark.read.parquet({str(path.absolute())!r})")


def _archive(
    connection: Connection, topic: str, path: Path, partition_by: str, overwrite: bool, master: str
) -> list[Compared]:
    """Make all checks that do not need Spark, then archive. Raises SparkError."""
    from magnetar.spark.pipelines.archive import PartitionBy, archive
    from magnetar.spark.pipelines.target import check_target

    if partition_by not in set(PartitionBy):
        raise typer.BadParameter(
            f"{partition_by!r} is not one of {', '.join(PartitionBy)}", param_hint="--partition-by"
        )
    path = path.absolute()
    check_target(path, overwrite=overwrite)
    _require_topics(connection, [topic])
    return run_job(
        f"archive {topic}",
        connection,
        master,
        lambda spark: archive(
            spark,
            connection=connection,
            topic=topic,
            path=path,
            partition_by=PartitionBy(partition_by),
            overwrite=overwrite,
        ),
    )


def _archive_new(
    connection: Connection,
    topics: list[str],
    path: Path,
    subscription: str,
    skip_lost: bool,
    master: str,
) -> Archived:
    from magnetar.spark.pipelines.incremental import archive_new

    for topic in topics:
        _require_topics(connection, [topic])
    return run_job(
        f"archive {', '.join(topics)}",
        connection,
        master,
        lambda spark: archive_new(
            spark,
            connection=connection,
            topics=topics,
            path=path.absolute(),
            subscription=subscription,
            skip_lost=skip_lost,
        ),
    )


def _require_topics(connection: Connection, topics: list[str]) -> None:
    """Raise SparkError, before Spark starts, if the topics cannot be read."""
    from magnetar.spark.source.driver import plan_frame
    from magnetar.spark.source.options import parse_options

    options = parse_options(connection | {"topics": ",".join(topics)})
    asyncio.run(require_reachable(connection["service.url"]))
    plan_frame(options)


def show(compared: Sequence[Compared], path: Path) -> None:
    """Print the comparison by partition, in at most ROWS_SHOWN_MAX rows. Leaves out equal
    partitions first."""
    table = Table("partition", title=f"archive {path}")
    for name in ("in the topic", "in the archive"):
        table.add_column(name, justify="right")
    table.add_column("equal")
    by_equal = sorted(compared, key=lambda part: part.equal)
    shown, left_out = by_equal[:ROWS_SHOWN_MAX], by_equal[ROWS_SHOWN_MAX:]
    for part in sorted(shown, key=lambda part: part.partition):
        table.add_row(
            part.partition or "(all)",
            f"{part.in_topic:,}",
            f"{part.in_archive:,}",
            _equal([part]),
        )
    if left_out:
        table.add_row(f"{len(left_out):,} more", "", "", _equal(left_out))
    table.add_section()
    table.add_row(
        f"{len(compared):,} partitions",
        f"{sum(part.in_topic for part in compared):,}",
        f"{sum(part.in_archive for part in compared):,}",
        _equal(compared),
    )
    plain_console().print(table)


def _equal(compared: Sequence[Compared]) -> str:
    return "yes" if all(part.equal for part in compared) else "NO"


spark_pipelines.add_to(jobs)
