"""Measures ledgers alone: a writer's process, bookies, a ZooKeeper (python -m benchmarks.ledgers).
The cluster's broker is idle.

Appends are compared with two minimal programs (reference.py). The targets refer to the first, whose
client sends to a broker. The client of the second writes to the bookies directly, as the writer of
a ledger does. CPU is given per entry for one writer and for one bookie. On a busy machine, CPU is
more reliable than the rates.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import limits, reference, slow_bookie
from benchmarks.figures import Figure, Shape, median
from benchmarks.processes import alone, cpu_s, own_peak_mb, run
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.connection import RemoteBookiePeer
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.local_cluster import LocalCluster
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.model import LedgerId
from magnetar.metadata.zookeeper import ZooKeeperStore
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from magnetar.bookie.ledger.appender import LedgerAppender
    from magnetar.bookie.ledger.handle import LedgerReader

WARM_UP = Shape(1024, 2_000, 64)
SHAPES = (
    Shape(1024, 2_000, 1),
    Shape(65_536, 3_000, 16),
    Shape(262_144, 800, 8),
    # Enough entries to fill memtables of 64 MiB several times in both programs. With 60,000, the
    # reference ended just before its first flush, and Magnetar just after. This shape is the last
    # because it leaves files to compact.
    Shape(1024, 240_000, 1_000),
)
WANTED = ("p50 <= 0.9", ">= 0.9", "", ">= 1.0")
REFERENCE_PORT = 31_850
READ_ENTRIES = {65_536: 4_096, 1024: 100_000}  # 268 MB and 102 MB
CACHED_BYTES = 40_000_000  # somewhat less than a bookie's read cache
READ_BYTES_MAX = 8 << 20  # the limit of one read: a bookie's limit for one request
RECOVERED_ENTRIES = 50_000
SLOW_ADD_S = 10.0
SLOW_S = 25.0
SLOW_ENTRY_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Cluster:
    """The addresses and processes of a cluster that a measuring process needs."""

    metadata_url: str
    bookie_pids: tuple[int, ...]

    @property
    def config(self) -> LedgerConfig:
        return config_on(len(self.bookie_pids))

    @classmethod
    def of(cls, cluster: LocalCluster) -> Cluster:
        pids = [process.pid for process in cluster.of_role("bookie")]
        return cls(f"zk://{cluster.zookeeper}/magnetar", tuple(pid for pid in pids if pid))


def config_on(bookies: int) -> LedgerConfig:
    """Return the quorum 3/3/2 for three bookies, 1/1/1 for one."""
    return LedgerConfig(ensemble_size=bookies, write_quorum=bookies, ack_quorum=bookies // 2 + 1)


@dataclass(frozen=True, slots=True)
class Appended:
    """The result of a load, and the CPU per entry."""

    figure: Figure
    writer_us: float
    bookie_us: float  # mean over the bookies


@asynccontextmanager
async def ledgers_of(cluster: Cluster) -> AsyncIterator[Ledgers]:
    """Open a ledger client of the cluster for the block."""
    store = await ZooKeeperStore.connect_url(cluster.metadata_url)
    chance = random.SystemRandom()
    directory = BookieRegistry(store)
    pool = PeerPool(
        directory,
        RemoteBookiePeer,
        client_name="benchmark",
        random=chance,
        connect_timeout_s=cluster.config.connect_timeout_s,
    )
    ledgers = Ledgers(
        store, directory, pool, LedgerIds(store), cluster.config, SystemClock(), chance
    )
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ledgers.run())
            await ledgers.wait_ready()
            yield ledgers
            running.cancel()
    finally:
        await store.close()


# -- appending -------------------------------------------------------------------------------------


async def fill(appender: LedgerAppender, shape: Shape) -> Figure:
    """Append with `shape.window` entries in flight until all are confirmed."""
    body = os.urandom(shape.bytes)
    appended_s: list[float] = []
    latencies: list[float] = []
    moved = asyncio.Event()

    def progress() -> None:
        now_s = time.perf_counter()
        confirmed = slice(len(latencies), appender.confirmed + 1)
        latencies.extend(now_s - then_s for then_s in appended_s[confirmed])
        moved.set()

    appender.progress = progress
    began_s = time.perf_counter()
    while appender.confirmed < shape.count - 1:
        assert appender.failure is None, appender.failure
        moved.clear()
        free = shape.window - (appender.appended - appender.confirmed)
        following = min(free, shape.count - 1 - appender.appended)
        if following:
            appended_s += [time.perf_counter()] * following
            appender.append_nowait([[body]] * following)
        await moved.wait()
    return Figure.of(shape, time.perf_counter() - began_s, latencies)


def append(cluster: Cluster, shapes: Sequence[Shape]) -> list[Appended]:
    """Append each shape to a new ledger, in one process."""

    async def one(ledgers: Ledgers, shape: Shape) -> Appended:
        appender = await ledgers.create(newer_than=LedgerId(-1), custom={})
        pids = (os.getpid(), *cluster.bookie_pids)
        before_s = [cpu_s(pid) for pid in pids]
        figure = await fill(appender, shape)
        writer_s, *bookies_s = (cpu_s(pid) - was for pid, was in zip(pids, before_s, strict=True))
        await appender.close()
        per_entry = 1e6 / shape.count
        return Appended(figure, writer_s * per_entry, statistics.mean(bookies_s) * per_entry)

    async def main() -> list[Appended]:
        async with ledgers_of(cluster) as ledgers:
            await one(ledgers, WARM_UP)
            return [await one(ledgers, shape) for shape in shapes]

    return run(main())


async def compare_appends(folder: Path, bookies: int, rounds: int) -> None:
    """Compare Magnetar with both references in turns, each with empty stores.

    In a store that was filled before, compaction would reduce the rate of small entries by a sixth.
    """
    quorum = config_on(bookies).quorum
    print(f"\nLedgers, E/Qw/Qa {quorum}, synced before acknowledged, medians of {rounds} runs")
    ours: list[list[Appended]] = []
    theirs: dict[bool, list[list[Figure]]] = {False: [], True: []}
    for number in range(rounds):
        for direct, runs in theirs.items():
            figures = await asyncio.to_thread(
                alone,
                reference.measure,
                list(SHAPES),
                bookies=bookies,
                ack_quorum=quorum.ack_quorum,
                port=REFERENCE_PORT,
                direct=direct,
            )
            runs.append(figures)
        async with LocalCluster(
            folder / f"{bookies}-{number}", zookeepers=1, bookies=bookies, brokers=1
        ) as cluster:
            ours.append(await asyncio.to_thread(alone, append, Cluster.of(cluster), SHAPES))
    for number, (shape, wanted) in enumerate(zip(SHAPES, WANTED, strict=True)):
        mine = median([run[number].figure for run in ours])
        by_broker, direct_ones = (
            median([run[number] for run in theirs[direct]]) for direct in (False, True)
        )
        writer_us = statistics.median(run[number].writer_us for run in ours)
        bookie_us = statistics.median(run[number].bookie_us for run in ours)
        print(
            f"{shape.bytes >> 10:>4} KB, {shape.window:>5} in flight"
            f" {mine.per_s:>8,.0f}/s {mine.mb_per_s:>6.1f} MB/s"
            f"  p50 {mine.p50_ms:.2f} p99 {mine.p99_ms:.2f} p99.9 {mine.p999_ms:.2f} ms"
            f"  CPU {writer_us:.0f} + {bookie_us:.0f} us\n"
            f"{'':>24}{_ratios(mine, by_broker, direct_ones)}"
            + (f"  (target: {wanted} of the first)" if wanted else ""),
            flush=True,
        )


def _ratios(mine: Figure, by_broker: Figure, direct: Figure) -> str:
    one = mine.shape.window == 1
    return "  ".join(
        f"{mine.p50_ms / theirs.p50_ms if one else mine.per_s / theirs.per_s:.2f} of {name}"
        f" ({f'{theirs.p50_ms:.2f} ms' if one else f'{theirs.per_s:,.0f}/s'})"
        for name, theirs in (("the reference", by_broker), ("its bookies alone", direct))
    )


# -- reading -------------------------------------------------------------------------------------


def write_ledger(cluster: Cluster, shape: Shape, *, close: bool) -> LedgerId:
    """Write a ledger with the entries of `shape`. Without `close`, leave the ledger open, as after
    a writer's crash."""

    async def main() -> LedgerId:
        async with ledgers_of(cluster) as ledgers:
            appender = await ledgers.create(newer_than=LedgerId(-1), custom={})
            await fill(appender, shape)
            if close:
                await appender.close()
            else:
                appender.abandon()
            return appender.ledger

    return run(main())


def read_ledger(
    cluster: Cluster, ledger: LedgerId, count: int, *, passes: int, readers: int
) -> list[float]:
    """Return the MB/s of each pass over the first `count` entries. Each of `readers` parallel
    readers reads one part."""

    async def read(reader: LedgerReader, first: int, last: int) -> int:
        read_bytes = 0
        while first <= last:
            entries = await reader.read(first, last, bytes_max=READ_BYTES_MAX)
            read_bytes += sum(len(entry.payload) for entry in entries)
            first += len(entries)
        return read_bytes

    async def one(ledgers: Ledgers, reader: LedgerReader) -> float:
        begins = [count * number // readers for number in range(readers + 1)]
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            parts = [
                group.create_task(read(ledgers.reader(reader.metadata), begin, following - 1))
                for begin, following in pairwise(begins)
            ]
        seconds = time.perf_counter() - began_s
        return sum(part.result() for part in parts) / seconds / 1e6

    async def main() -> list[float]:
        async with ledgers_of(cluster) as ledgers:
            metadata = await ledgers.metadata(ledger)
            assert metadata is not None
            reader = ledgers.reader(metadata)
            await reader.read(0, 0, bytes_max=1)  # opens the connection
            return [await one(ledgers, reader) for _ in range(passes)]

    return run(main())


async def compare_reads(cluster: LocalCluster, rounds: int) -> None:
    """Measure reads from one bookie.

    Cold: the bookie was restarted and its files are not in memory. Warm: the files are in memory
    and exceed the bookie's read cache. Cached: the entries are in the read cache.
    """
    wall = await asyncio.to_thread(alone, limits.frame_rates, [256 << 10])
    print(
        f"\nRange reads from one bookie, {READ_BYTES_MAX >> 20} MiB each, medians of {rounds};"
        f" gRPC alone carries {wall[256 << 10][1]:,.0f} MB/s in frames of 256 KiB"
    )
    for entry_bytes, count in READ_ENTRIES.items():
        known, shape = Cluster.of(cluster), Shape(entry_bytes, count, 64)
        ledger = await asyncio.to_thread(alone, write_ledger, known, shape, close=True)

        async def passes(first: int, count: int, readers: int, *, of: LedgerId = ledger) -> float:
            """Return the median of the passes from number `first` on."""
            rates = await asyncio.to_thread(
                alone,
                read_ledger,
                Cluster.of(cluster),
                of,
                count,
                passes=first + rounds,
                readers=readers,
            )
            return statistics.median(rates[first:])

        cold: list[float] = []
        for _ in range(rounds):
            await forget(cluster)
            cold += await asyncio.to_thread(
                alone, read_ledger, Cluster.of(cluster), ledger, count, passes=1, readers=1
            )
        print(
            f"{entry_bytes >> 10:>4} KB entries: cold {statistics.median(cold):,.0f} MB/s, warm"
            f" {await passes(1, count, 1):,.0f} MB/s, two readers {await passes(1, count, 2):,.0f}"
            f" MB/s, cached {await passes(1, CACHED_BYTES // entry_bytes, 1):,.0f} MB/s"
            " (target: >= 500)",
            flush=True,
        )


async def forget(cluster: LocalCluster) -> None:
    """Restart the first bookie and drop its files from the kernel's cache."""
    process = cluster.of_role("bookie")[0]
    await asyncio.to_thread(process.stop)
    for file in process.directory.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())  # the kernel drops only clean pages
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    await cluster.restart("bookie", process.id)


# -- recovery, restart, memory -------------------------------------------------------------------


def recover(cluster: Cluster, ledger: LedgerId) -> float:
    """Return the seconds in which a process without any state of the ledger recovers it."""

    async def main() -> float:
        async with ledgers_of(cluster) as ledgers:
            began_s = time.perf_counter()
            metadata = await ledgers.recover(ledger)
            assert metadata.last_entry == RECOVERED_ENTRIES - 1, metadata
            return time.perf_counter() - began_s

    return run(main())


async def report_recovery(cluster: LocalCluster, rounds: int) -> None:
    seconds: list[float] = []
    for _ in range(rounds):
        shape = Shape(1024, RECOVERED_ENTRIES, 1_000)
        known = Cluster.of(cluster)
        ledger = await asyncio.to_thread(alone, write_ledger, known, shape, close=False)
        seconds.append(await asyncio.to_thread(alone, recover, known, ledger))
    print(
        f"\nRecovery of a ledger of {RECOVERED_ENTRIES:,} entries of 1 KB after its writer's crash:"
        f" {statistics.median(seconds) * 1e3:.0f} ms",
        flush=True,
    )


async def report_restart(cluster: LocalCluster, stored_mb: int) -> None:
    """Measure the restart of a bookie that was killed with `stored_mb` stored."""
    shape = Shape(65_536, stored_mb * 1_000_000 // 65_536, 64)
    await asyncio.to_thread(alone, write_ledger, Cluster.of(cluster), shape, close=True)
    process = cluster.of_role("bookie")[0]
    await cluster.kill("bookie", process.id)
    store = process.directory / "data"
    log_mb = sum(file.stat().st_size for file in store.rglob("*.log")) / 1e6
    began_s = time.perf_counter()
    await cluster.restart("bookie", process.id)
    print(
        f"\nRestart of a bookie after kill -9 with {stored_mb / 1000:g} GB stored, of which"
        f" {log_mb:.0f} MB in its log: {time.perf_counter() - began_s:.2f} s until it serves",
        flush=True,
    )


def append_for(cluster: Cluster, seconds: float) -> tuple[float, float, float]:
    """Append as fast as back-pressure allows.

    Returns the peak megabytes of memory before and after, and the MB/s.
    """

    async def main() -> tuple[float, float, float]:
        async with ledgers_of(cluster) as ledgers:
            appender = await ledgers.create(newer_than=LedgerId(-1), custom={})
            body, before_mb = os.urandom(SLOW_ENTRY_BYTES), own_peak_mb()
            began_s = time.perf_counter()
            while time.perf_counter() - began_s < seconds:
                appender.append_nowait([[body]])
                await asyncio.sleep(0)
                await appender.wait_room()
            rate = appender.length / (time.perf_counter() - began_s) / 1e6
            appender.abandon()
            return before_mb, own_peak_mb(), rate

    return run(main())


async def report_memory(cluster: LocalCluster) -> None:
    """Measure a writer's memory while one of three bookies needs 10 s for each sync, so for each
    add."""
    process = cluster.of_role("bookie")[-1]
    known = Cluster.of(cluster)
    await asyncio.to_thread(process.stop)
    async with slow_bookie.running(process.directory / "bookie.toml", sync_s=SLOW_ADD_S):
        before_mb, after_mb, rate = await asyncio.to_thread(alone, append_for, known, SLOW_S)
    await cluster.restart("bookie", process.id)
    limit_mb = known.config.retained_bytes_max / 1e6
    print(
        f"\nA writer for {SLOW_S:g} s while one bookie needs {SLOW_ADD_S:g} s per add:"
        f" {rate:.0f} MB/s, {after_mb - before_mb:.0f} MB more resident than before"
        f" (limit of retained entries: {limit_mb:.0f} MB)",
        flush=True,
    )


# -- all of it -----------------------------------------------------------------------------------


async def report(*, rounds: int, stored_mb: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="magnetar-ledgers-"))
    try:
        for bookies in (3, 1):
            await compare_appends(folder, bookies, rounds)
        async with LocalCluster(folder / "3", zookeepers=1, bookies=3, brokers=1) as cluster:
            await report_recovery(cluster, rounds)
            await report_memory(cluster)
        async with LocalCluster(folder / "1", zookeepers=1, bookies=1, brokers=1) as cluster:
            await compare_reads(cluster, rounds)
            await report_restart(cluster, stored_mb)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of appends, recovery and reads")
    parser.add_argument(
        "--stored-mb", type=int, default=2000, help="MB stored by the bookie that restarts"
    )
    options = parser.parse_args()
    asyncio.run(report(rounds=options.rounds, stored_mb=options.stored_mb))
