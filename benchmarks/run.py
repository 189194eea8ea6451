"""All figures in one run, each beside its reference: `make bench`, or `python -m benchmarks.run`.

The reference (reference.py) and Magnetar take turns on the same machine, and medians are compared:
what counts is the ratio, the absolute figures change with the machine and the day.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import load, reference
from benchmarks.figures import Figure, Shape, median
from magnetar.local_cluster import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Callable

ONE_AT_A_TIME = Shape(1024, 1_500, 1)
UNBATCHED = Shape(1024, 30_000, 1_000)
LARGE = Shape(65_536, 1_500, 16)
BATCHED = Shape(1024, 100_000, 1_000)
REFERENCE_PORT = 31_800


def row(name: str, ours: Figure, theirs: Figure | None, ratio: float | None, want: str) -> None:
    beside = f"{theirs.per_s:>9,.0f}/s {theirs.mb_per_s:>6.1f} MB/s" if theirs else " " * 23
    compared = f"ratio {ratio:.2f} (want {want})" if ratio is not None else ""
    latency = f"p50 {ours.p50_ms:.2f} ms" if ours.p50_ms else ""
    print(
        f"{name:<34} {ours.per_s:>9,.0f}/s {ours.mb_per_s:>6.1f} MB/s {latency:<13}"
        f" | reference {beside} {compared}",
        flush=True,
    )


def of_cluster(bookies: int, rounds: int) -> None:
    quorum = f"{bookies}/{bookies}/{min(2, bookies)}"
    print(f"\nE/Qw/Qa {quorum}, fsync before every acknowledgement, medians of {rounds} runs")
    theirs: dict[Shape, list[Figure]] = {}
    ours: dict[str, list[Figure]] = {}
    folder = Path(tempfile.mkdtemp(prefix="magnetar-bench-"))
    try:
        for number in range(rounds):
            shapes = [ONE_AT_A_TIME, UNBATCHED, LARGE]
            figures = reference.measure(
                shapes, bookies=bookies, ack_quorum=min(2, bookies), port=REFERENCE_PORT
            )
            for figure in figures:
                theirs.setdefault(figure.shape, []).append(figure)
            asyncio.run(one_round(folder / str(number), bookies, ours))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(
        {name: median(runs) for name, runs in ours.items()},
        {shape: median(runs) for shape, runs in theirs.items()},
    )


async def one_round(folder: Path, bookies: int, ours: dict[str, list[Figure]]) -> None:
    async with LocalCluster(folder, zookeepers=1, bookies=bookies, brokers=1) as cluster:
        url = cluster.service_url

        async def run(name: str, measure: Callable[[], Figure]) -> None:
            ours.setdefault(name, []).append(await asyncio.to_thread(measure))

        await run("one at a time", lambda: load.publish_one_at_a_time(url, "one", ONE_AT_A_TIME))
        await run("unbatched", lambda: load.publish(url, "unbatched", UNBATCHED, batched=False))
        await run("large", lambda: load.publish(url, "large", LARGE, batched=False))
        await run("batched", lambda: load.publish(url, "batched", BATCHED, batched=True))
        await run("tail", lambda: load.tail(url, "tail", BATCHED, batched=True))
        await run("backlog", lambda: load.read_backlog(url, "batched", BATCHED))


def report(ours: dict[str, Figure], theirs: dict[Shape, Figure]) -> None:
    one, small, large = theirs[ONE_AT_A_TIME], theirs[UNBATCHED], theirs[LARGE]
    mine = ours["one at a time"]
    row("1 KB, one at a time", mine, one, mine.p50_ms / one.p50_ms, "<= 1.4, p50")
    print(
        f"{'':<34} p50 {mine.p50_ms:.2f} ms, p99 {mine.p99_ms:.2f} ms"
        f" | reference p50 {one.p50_ms:.2f} ms, p99 {one.p99_ms:.2f} ms"
    )
    mine = ours["unbatched"]
    row("1 KB, unbatched, 1,000 in flight", mine, small, mine.per_s / small.per_s, ">= 0.40")
    mine = ours["large"]
    row("64 KB, 16 in flight", mine, large, mine.mb_per_s / large.mb_per_s, ">= 0.80")
    mine = ours["batched"]
    # 45,000 messages/s were asked for where the reference writes 64 KB entries at 85 MB/s.
    share = (mine.per_s / 45_000) / (large.mb_per_s / 85)
    row("1 KB, batched", mine, large, share, ">= 1.00 of 45,000/s at 85 MB/s")
    row("1 KB, batched, tailed and acked", ours["tail"], None, None, "")
    row("1 KB, batched, backlog read", ours["backlog"], None, None, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bookies", type=int, nargs="*", default=[3])
    options = parser.parse_args()
    began_s = time.perf_counter()
    for bookies in options.bookies:
        of_cluster(bookies, options.rounds)
    print(f"\n{time.perf_counter() - began_s:.0f} s")


if __name__ == "__main__":
    main()
