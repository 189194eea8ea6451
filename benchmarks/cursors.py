"""Measures one cursor: a million random individual acknowledgements, stored and recovered.

The topic has two million entries. Half of them are acknowledged, in random order and in lists of
1,000. The benchmark waits until each list is durable (fsync) on one bookie in this process, with at
most ten lists in flight. Then another owner takes the topic over and recovers the cursor. The
benchmark can also run alone: `python -m benchmarks.cursors`.
"""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from magnetar.bookie.bookie import open_bookie, registration
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.bookie.local import LocalBookiePeer
from magnetar.bookie.registration import Registration
from magnetar.broker.cursor.cursors import Cursors
from magnetar.broker.cursor.journal import Waiting
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.log import Log, LogConfig
from magnetar.broker.log.owned_record import OwnedRecord
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.metadata.embedded import EmbeddedStore
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.model import BookieAddress, LedgerId, TopicLedger
from magnetar.protos.names import TopicName
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.on_demand import spawner

if TYPE_CHECKING:
    from magnetar.bookie.ledger.peer import BookiePeer
    from magnetar.metadata.model import Member
    from magnetar.metadata.store import MetadataStore

LEDGERS: Final = 40
LEDGER_ENTRIES: Final = 50_000
LIST: Final = 1_000
LISTS_IN_FLIGHT: Final = 10
IN_PROCESS: Final = BookieAddress(data="in-process:1", grpc="in-process:1")
TOPIC: Final = TopicName.parse("acknowledged")


@dataclass(frozen=True, slots=True)
class CursorFigure:
    acked: int
    persist_s: float
    persist_cpu_s: float  # the CPU time of the whole process, the bookie included
    recover_s: float
    lost: int  # entries that were acknowledged, but not after the recovery
    invented: int  # entries that were not acknowledged, but are so after the recovery


def chain() -> Chain:
    """A log of ledgers that no consumer reads."""
    return Chain(
        [
            TopicLedger(
                LedgerId(1_000_000 + number),
                number * LEDGER_ENTRIES,
                entries=LEDGER_ENTRIES,
                length=LEDGER_ENTRIES * 100,
                closed_ms=1,
            )
            for number in range(LEDGERS)
        ],
        next_index=LEDGERS * LEDGER_ENTRIES,
    )


async def cursors_of(store: MetadataStore, ledgers: Ledgers) -> Cursors:
    """Take the topic over, and return its cursors."""
    record = await OwnedRecord.take(TOPIC, store, incarnation="0" * 32)
    log = Log(
        record,
        chain(),
        ledgers=ledgers,
        config=LogConfig(),
        clock=SystemClock(),
        cache=EntryCache(1 << 20),
    )
    return await Cursors.open(log)


async def acknowledge(cursors: Cursors, chosen: list[Position]) -> float:
    """Acknowledge `chosen`. Return the seconds until all acknowledgements are durable."""
    cursor = await cursors.ensure("s", EARLIEST)
    began_s = time.perf_counter()
    waiting: list[Waiting] = []
    for start in range(0, len(chosen), LIST):
        durable = Waiting()
        cursor.acknowledge(chosen[start : start + LIST], durable)
        waiting.append(durable)
        if len(waiting) >= LISTS_IN_FLIGHT:
            await waiting.pop(0).wait()
    for durable in waiting:
        await durable.wait()
    return time.perf_counter() - began_s


async def measure(store: MetadataStore, ledgers: Ledgers, tasks: asyncio.TaskGroup) -> CursorFigure:
    chance = random.Random(1)
    entries = [
        Position(1_000_000 + number, entry)
        for number in range(LEDGERS)
        for entry in range(LEDGER_ENTRIES)
    ]
    chosen = chance.sample(entries, len(entries) // 2)
    gc.collect()
    gc.freeze()  # as a broker does, so that collections do not visit the entries of this program
    first = await cursors_of(store, ledgers)
    first.start(spawner(tasks))
    cpu_s = time.process_time()
    persist_s = await acknowledge(first, chosen)
    cpu_s = time.process_time() - cpu_s
    first.abandon()  # its broker dies
    began_s = time.perf_counter()
    second = await cursors_of(store, ledgers)
    recover_s = time.perf_counter() - began_s
    cursor = second.get("s")
    assert cursor is not None
    acked = set(chosen)
    found = {position for position in entries if cursor.is_acked(position)}
    return CursorFigure(
        len(acked),
        persist_s,
        cpu_s,
        recover_s,
        lost=len(acked - found),
        invented=len(found - acked),
    )


async def run() -> CursorFigure:
    folder = Path(tempfile.mkdtemp(prefix="magnetar-bench-"))
    store = await EmbeddedStore.open(folder / "metadata")
    try:
        async with (
            open_bookie(
                folder / "bookie",
                bookie="bench",
                metadata=store,
                clock=SystemClock(),
                chance=random.SystemRandom(),
                registry=CollectorRegistry(),
            ) as bookie,
            asyncio.TaskGroup() as group,
        ):

            def open_peer(member: Member, _: BookieAddress) -> BookiePeer:
                return LocalBookiePeer(member, bookie, group=group)

            entry = Registration(
                store,
                registration(
                    bookie, address=BookieAddress(data="in-process:1", grpc="in-process:1")
                ),
            )
            lasting = [group.create_task(entry.run())]
            await entry.wait_held()
            directory = BookieRegistry(store)
            peers = PeerPool(
                directory,
                open_peer,
                client_name="bench",
                random=random.Random(2),
                connect_timeout_s=5.0,
            )
            ledgers = Ledgers(
                store,
                directory,
                peers,
                LedgerIds(store),
                LedgerConfig(ensemble_size=1, write_quorum=1, ack_quorum=1),
                SystemClock(),
                random.Random(3),
            )
            lasting.append(group.create_task(ledgers.run()))
            await ledgers.wait_ready()
            figure = await measure(store, ledgers, group)
            for task in lasting:
                task.cancel()
        return figure
    finally:
        await store.close()
        shutil.rmtree(folder, ignore_errors=True)


def report() -> None:
    """Print the figure."""
    figure = asyncio.run(run())
    print(
        f"\n{figure.acked:,} random acknowledgements in lists of {LIST:,}: durable after"
        f" {figure.persist_s:.1f} s ({figure.persist_cpu_s:.1f} s of CPU), recovered in"
        f" {figure.recover_s:.1f} s (target: < 10 s together); {figure.lost} lost,"
        f" {figure.invented} invented",
        flush=True,
    )


if __name__ == "__main__":
    report()
