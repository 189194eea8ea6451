"""Measures the repair of lost copies, with and without writes (python -m benchmarks.repair).

The cluster has four bookies and ledgers of 3/3/2 with 64 KB entries. The benchmark kills a bookie,
and one replicator without a rate limit copies its entries. The replicator repairs the first half of
the ledgers without a writer: this is its speed on two shared cores. During the second half, a
writer appends at a steady rate. Its latencies are compared with those of the same writer without
repair. The reference is a copy from file to file on this machine, synced every 4 MiB, without
network, checksums or a second process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.figures import Figure, Shape
from benchmarks.ledgers import Cluster, fill, ledgers_of
from benchmarks.processes import alone, cpu_s, run
from magnetar.bookie.repair.config import RepairConfig
from magnetar.bookie.repair.replicator import Replicator
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.local_cluster import LocalCluster
from magnetar.metadata.model import LedgerId, Member
from magnetar.metadata.zookeeper import ZooKeeperStore
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Sequence

ENTRY_BYTES: Final = 65_536
LEDGER_MB: Final = 32
WRITES_PER_S: Final = 160  # 10 MB/s, which three bookies store
BASELINE_S: Final = 5.0
SYNC_BYTES: Final = 4 << 20
REPAIR_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of one repair."""

    seconds: float
    copied_bytes: int
    replicator_cpu_s: float
    bookies_cpu_s: float  # includes their other work during the repair

    def against(self, raw_mb_per_s: float) -> str:
        megabytes = self.copied_bytes / 1e6
        rate = megabytes / self.seconds
        return (
            f"{rate:.0f} MB/s, ratio {rate / raw_mb_per_s:.2f}; CPU per MB"
            f" {self.replicator_cpu_s / megabytes * 1e3:.1f} ms of the replicator,"
            f" {self.bookies_cpu_s / megabytes * 1e3:.1f} ms of all bookies"
        )


def store(cluster: Cluster, ledgers: int) -> list[tuple[LedgerId, tuple[Member, ...]]]:
    """Write closed ledgers. Returns each with its members."""
    shape = Shape(ENTRY_BYTES, LEDGER_MB * 1_000_000 // ENTRY_BYTES, 64)

    async def main() -> list[tuple[LedgerId, tuple[Member, ...]]]:
        made = []
        async with ledgers_of(cluster) as here:
            for _ in range(ledgers):
                appender = await here.create(newer_than=LedgerId(-1), custom={})
                await fill(appender, shape)
                made.append((appender.ledger, (await appender.close()).segments[0].members))
        return made

    return run(main())


def write_steadily(cluster: Cluster, until: str | None) -> Figure:
    """Write at WRITES_PER_S for BASELINE_S, or until the file `until` exists."""

    async def main() -> Figure:
        body = os.urandom(ENTRY_BYTES)
        appended_s: list[float] = []
        latencies: list[float] = []
        async with ledgers_of(cluster) as ledgers:
            appender = await ledgers.create(newer_than=LedgerId(-1), custom={})

            def progress() -> None:
                now_s = time.perf_counter()
                confirmed = slice(len(latencies), appender.confirmed + 1)
                latencies.extend(now_s - then_s for then_s in appended_s[confirmed])

            appender.progress = progress
            began_s = time.perf_counter()
            while _goes_on(until, began_s):
                appended_s.append(time.perf_counter())
                appender.append_nowait([[body]])
                await appender.wait_room()
                due_s = began_s + len(appended_s) / WRITES_PER_S
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            seconds = time.perf_counter() - began_s
            await appender.close()
        return Figure.of(Shape(ENTRY_BYTES, len(appended_s), 1), seconds, latencies)

    return run(main())


def _goes_on(until: str | None, began_s: float) -> bool:
    if until is None:
        return time.perf_counter() - began_s < BASELINE_S
    return not Path(until).exists()


def repair(cluster: Cluster, lost: Member, ledgers: Sequence[LedgerId]) -> Repaired:
    """Record all ledgers as under-replicated, and repair them."""

    async def main() -> Repaired:
        metadata = await ZooKeeperStore.connect_url(cluster.metadata_url)
        records = UnderReplicationRecords(metadata, SystemClock())
        config = RepairConfig(copy_bytes_per_s=1 << 40)
        async with ledgers_of(cluster) as here, asyncio.TaskGroup() as group:
            while lost in here.services.directory.listed:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            for ledger in ledgers:
                await records.add_lost(ledger, [lost])
            replicator = Replicator(
                metadata,
                records,
                here.services,
                config,
                SystemClock(),
                random.SystemRandom(),
                name="benchmark",
                recover=here.recover,
            )
            living = cluster.bookie_pids
            began_s, own_s = time.perf_counter(), time.process_time()
            before_s = sum(map(cpu_s, living))
            running = group.create_task(replicator.run())
            async with asyncio.timeout(REPAIR_TIMEOUT_S):
                while replicator.counts.ledgers_repaired < len(ledgers):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            seconds = time.perf_counter() - began_s
            own_s = time.process_time() - own_s
            bookies_s = sum(map(cpu_s, living)) - before_s
            running.cancel()
        await metadata.close()
        return Repaired(seconds, replicator.counts.copied_bytes, own_s, bookies_s)

    return run(main())


def copy_rate_mb_s(folder: Path, megabytes: int) -> float:
    """Return the MB/s of a copy of a newly written file to another file."""
    source, target = folder / "source", folder / "target"
    source.write_bytes(os.urandom(1_000_000) * megabytes)
    began_s = time.perf_counter()
    with source.open("rb", buffering=0) as reading, target.open("wb", buffering=0) as writing:
        while part := reading.read(SYNC_BYTES):
            writing.write(part)
            os.fdatasync(writing.fileno())
    seconds = time.perf_counter() - began_s
    source.unlink()
    target.unlink()
    return megabytes / seconds


async def report(*, stored_mb: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="magnetar-repair-"))
    try:
        raw = copy_rate_mb_s(folder, stored_mb)
        async with LocalCluster(
            folder / "c", zookeepers=1, bookies=4, brokers=1, autorecoveries=0
        ) as running:
            four = Cluster.of(running)
            cluster = Cluster(four.metadata_url, four.bookie_pids[:3])  # ledgers of three copies
            made = await asyncio.to_thread(alone, store, cluster, -(-stored_mb // LEDGER_MB))
            before = await asyncio.to_thread(alone, write_steadily, cluster, None)
            lost = made[0][1][0]
            ledgers = [ledger for ledger, members in made if lost in members]
            await running.kill("bookie", lost.bookie)
            living = tuple(each.pid or 0 for each in running.of_role("bookie") if each.running)
            cluster = Cluster(four.metadata_url, living)
            halves = ledgers[::2], ledgers[1::2]
            undisturbed = await asyncio.to_thread(alone, repair, cluster, lost, halves[0])
            done = folder / "done"
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(
                    asyncio.to_thread(alone, write_steadily, cluster, str(done))
                )
                disturbed = await asyncio.to_thread(alone, repair, cluster, lost, halves[1])
                done.touch()
        print(
            f"\nRepair by one process (target: >= 100 MB/s); raw copy on this machine's disk:"
            f" {raw:.0f} MB/s\n  without writer   {undisturbed.against(raw)}"
            f"\n  with a writer    {disturbed.against(raw)} (includes its adds)"
            f"\n  writes before    {before}\n  writes during it {writing.result()}",
            flush=True,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stored-mb", type=int, default=400, help="MB stored before the repair")
    asyncio.run(report(stored_mb=parser.parse_args().stored_mb))
