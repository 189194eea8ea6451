"""`magnetar spark replay | compact | stats`: pipelines on Spark, and their reports."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (Typer needs it at run time)
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from magnetar.cli.output import plain_console
from magnetar.cli.spark_connection import Connection, connects
from magnetar.cli.spark_job import (
    DEFAULT_MASTER,
    Master,
    job_errors,
    require_spark,
    run_job,
)

if TYPE_CHECKING:
    from magnetar.spark.pipelines.stats import Statistics

DELIVERIES = ("dedup", "at-least-once")

Delivery = Annotated[
    str,
    typer.Option(
        help="at-least-once, or dedup: exactly once, if the target's namespace has deduplication"
    ),
]


def add_to(jobs: typer.Typer) -> None:
    for command in (replay, compact, stats):
        jobs.command()(connects(command))


def replay(
    path: Annotated[Path, typer.Option(help="Parquet file, or directory of Parquet files")],
    topic: Annotated[str, typer.Option(help="the topic to write to")],
    delivery: Delivery = "dedup",
    master: Master = DEFAULT_MASTER,
    *,
    connection: Connection,
) -> None:
    """Write Parquet files into a topic.

    Each row becomes a message. In files with a column `value`, such as an archive, a row is a whole
    message. Rows of other files become JSON objects. With `--delivery dedup` you can run the
    command again after a kill: it stores only the missing messages.
    """
    _check_delivery(delivery)
    with job_errors():
        require_spark()
        from magnetar.spark.pipelines.replay import parquet_files
        from magnetar.spark.pipelines.replay import replay as run
        from magnetar.spark.sink.options import topic_of

        topic_of(topic)
        if not parquet_files(path):
            from magnetar.spark.errors import NothingToReplay

            raise NothingToReplay(path)
        done = run_job(
            f"replay into {topic}",
            connection,
            master,
            lambda spark: run(
                spark,
                connection=connection,
                path=path.absolute(),
                topic=topic,
                guarantee=delivery,
            ),
        )
    typer.echo(f"{topic} has the {done.rows:,} rows of {done.files:,} files (job {done.job})")


def compact(
    topic: Annotated[str, typer.Option(help="the topic to read")],
    into: Annotated[str, typer.Option(help="the topic to write to")],
    delivery: Delivery = "dedup",
    master: Master = DEFAULT_MASTER,
    *,
    connection: Connection,
) -> None:
    """Write the newest message of each key into another topic.

    The command leaves out messages without a key, and keys whose newest message has no value.
    """
    _check_delivery(delivery)
    with job_errors():
        require_spark()
        from magnetar.spark.pipelines.compact import compact as run
        from magnetar.spark.sink.options import topic_of

        if topic_of(topic) == topic_of(into):
            raise typer.BadParameter("is the topic that is read", param_hint="--into")
        done = run_job(
            f"compact {topic}",
            connection,
            master,
            lambda spark: run(
                spark, connection=connection, topic=topic, into=into, guarantee=delivery
            ),
        )
    table = Table("", title=f"compact {topic} into {into}")
    table.add_column("messages", justify="right")
    table.add_row("in the topic", f"{done.messages:,}")
    table.add_row("without a key, left out", f"{done.without_key:,}")
    table.add_row("keys", f"{done.keys:,}")
    table.add_row("deleted keys, left out", f"{done.deleted:,}")
    table.add_row("written", f"{done.written:,}")
    plain_console().print(table)


def stats(
    topic: Annotated[list[str], typer.Option(help="a topic; may be given several times")],
    picture: Annotated[
        Path | None, typer.Option(help="write a picture (PNG) to this file; needs matplotlib")
    ] = None,
    master: Master = DEFAULT_MASTER,
    *,
    connection: Connection,
) -> None:
    """Count messages and bytes by topic and by key."""
    with job_errors():
        require_spark()
        from magnetar.spark.pipelines.stats import picture as draw
        from magnetar.spark.pipelines.stats import require_plot, statistics

        if picture is not None:
            require_plot()
        found = run_job(
            f"statistics of {', '.join(topic)}",
            connection,
            master,
            lambda spark: statistics(spark, connection=connection, topics=topic),
        )
        show(found)
        if picture is not None:
            draw(found, picture)
            typer.echo(f"picture: {picture.absolute()}")


def show(found: Statistics) -> None:
    """Print the statistics as tables."""
    topics = Table("topic", title="topics")
    keys = Table("topic", "key", title="keys with the most messages")
    for table in (topics, keys):
        for name in ("messages", "bytes"):
            table.add_column(name, justify="right")
    topics.add_column("keys", justify="right")
    for name in ("first (UTC)", "last (UTC)"):
        topics.add_column(name)
    for one in found.topics:
        moments = [
            f"{moment:%Y-%m-%d %H:%M:%S}" if moment else "-" for moment in (one.first, one.last)
        ]
        numbers = (f"{one.messages:,}", f"{one.bytes:,}", f"{found.keys_count[one.topic]:,}")
        topics.add_row(one.topic, *numbers, *moments)
    for one in found.keys:
        keys.add_row(one.topic, one.key, f"{one.messages:,}", f"{one.bytes:,}")
    console = plain_console()
    console.print(topics)
    if found.keys:
        console.print(keys)


def _check_delivery(delivery: str) -> None:
    if delivery not in DELIVERIES:
        raise typer.BadParameter(
            f"{delivery!r} is not one of {', '.join(DELIVERIES)}", param_hint="--delivery"
        )
