"""Many random acknowledgements of one cursor; `benchmarks/cursors.py` measures a million."""

from __future__ import annotations

import asyncio
import random

from fakes.cluster_state import ClusterState
from fakes.ledgers import FakeLedgers
from fakes.topic_log import TOPIC

from magnetar.broker.cursor.cursors import Cursors
from magnetar.broker.cursor.journal import CursorConfig, Waiting
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.log import Log, LogConfig
from magnetar.broker.log.owned_record import OwnedRecord
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.metadata.model import LedgerId, TopicLedger
from magnetar.runtime.on_demand import spawner

LEDGERS, ENTRIES = 4, 10_000


async def taken_over(world: ClusterState) -> Cursors:
    """The cursors of a new owner. Nothing reads the entries, so there are none."""
    chain = Chain(
        TopicLedger(
            LedgerId(10_000 + number),
            number * ENTRIES,
            entries=ENTRIES,
            length=ENTRIES,
            closed_ms=1,
        )
        for number in range(LEDGERS)
    )
    log = Log(
        await OwnedRecord.take(TOPIC, world.store(), incarnation="0" * 32),
        chain,
        ledgers=FakeLedgers(world.ledgers),
        config=LogConfig(),
        clock=world.clock,
        cache=EntryCache(1 << 20),
    )
    return await Cursors.open(log, CursorConfig(tail_bytes_min=16 << 10))


async def test_random_acks_in_lists_survive_a_crash_and_none_is_redelivered() -> None:
    world, chance = ClusterState(), random.Random(5)
    entries = [
        Position(10_000 + number, entry) for number in range(LEDGERS) for entry in range(ENTRIES)
    ]
    chosen = chance.sample(entries, len(entries) // 2)
    async with asyncio.TaskGroup() as tasks:
        first = await taken_over(world)
        first.start(spawner(tasks))
        cursor = await first.ensure("s", EARLIEST)
        for start in range(0, len(chosen), 1_000):
            durable = Waiting()
            assert cursor.acknowledge(chosen[start : start + 1_000], durable) == 1_000
            await durable.wait()
        first.check()
        first.abandon()
    second = await taken_over(world)
    restored = second.get("s")
    assert restored is not None
    acked = set(chosen)
    assert [it for it in entries if restored.is_acked(it)] == [it for it in entries if it in acked]
    assert restored.backlog_entries == len(entries) - len(chosen)
    assert restored.nth_unacked(len(chosen)) == max(set(entries) - acked)
