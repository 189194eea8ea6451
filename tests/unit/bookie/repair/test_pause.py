"""A pause stops repair; ledgers recorded during the pause are repaired afterwards."""

from __future__ import annotations

import asyncio

import pytest
from fakes.ledger_bookies import BookieCluster, bookie_cluster
from fakes.repairs import (
    auditing,
    bake_cookies,
    lose,
    metadata_of,
    replicating,
    written,
)
from support import ManualClock, wait_until

from magnetar.bookie.repair.config import RepairConfig
from magnetar.bookie.repair.errors import NoSuchCluster
from magnetar.bookie.repair.pause import PauseWatch, pause, paused, resume
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_cluster, encode_repair_pause
from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.store import ABSENT
from magnetar.metadata.under_replication import RepairPause

SOON = RepairConfig(lost_bookie_delay_s=60)


async def found(store: MemoryStore) -> None:
    await store.put(paths.CLUSTER, encode_cluster("c" * 32), expected=ABSENT)


async def records_of(nodes: BookieCluster) -> list[int]:
    return [ledger async for ledger in UnderReplicationRecords(nodes.store, ManualClock()).list()]


async def test_a_pause_lasts_with_its_reason_until_the_resume() -> None:
    store, clock = MemoryStore(), ManualClock(5)
    with pytest.raises(NoSuchCluster):
        await pause(store, clock, reason="")
    await found(store)
    assert await paused(store) is None
    await resume(store)
    await pause(store, clock, reason="disks")
    clock.advance_ms(10)
    await pause(store, clock, reason="disks")
    assert await paused(store) == RepairPause(5, "disks")
    await pause(store, clock, reason="more disks")
    assert await paused(store) == RepairPause(5, "more disks")
    with pytest.raises(InvalidRecord):
        await pause(store, clock, reason="x" * 501)
    await resume(store)
    assert await paused(store) is None


async def test_another_reason_keeps_unknown_fields() -> None:
    store = MemoryStore()
    await found(store)
    later = encode_repair_pause(RepairPause(5, "disks")) + b"\xc0\x3e\x01"  # field 1,000
    await store.put(paths.REPAIR_PAUSED, later, expected=ABSENT)
    await pause(store, ManualClock(9), reason="more disks")
    found_there = await paused(store)
    assert found_there == RepairPause(5, "more disks")
    assert found_there.unknown == b"\xc0\x3e\x01"


async def test_an_unknown_or_unreadable_pause_counts_as_paused() -> None:
    tree, away = MemoryTree(), [True]
    store = MemoryStore(tree, faults=lambda *_: Fault.REQUEST_LOST if away else None)
    other = MemoryStore(tree)
    changes = asyncio.Event()
    watch = PauseWatch(store, on_change=changes.set)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(watch.run())
        await asyncio.sleep(60)
        assert watch.paused
        away.clear()
        await changes.wait()
        assert not watch.paused
        await other.put(paths.REPAIR_PAUSED, b"\xff", expected=ABSENT)
        await wait_until(lambda: watch.paused)
        running.cancel()


async def test_no_bookie_is_declared_lost_during_a_pause_and_the_delay_restarts() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await found(nodes.store)
        await bake_cookies(nodes)
        for _ in range(4):
            await written(ledgers, 3)
        async with auditing(nodes, SOON) as auditor:
            await wait_until(lambda: auditor.findings.audits > 0)
            await pause(nodes.store, ManualClock(), reason="")
            await wait_until(lambda: auditor.paused)
            await lose(nodes, nodes.bookies[1])
            await asyncio.sleep(600)
            assert await records_of(nodes) == []
            assert auditor.is_leader
            await resume(nodes.store)
            await asyncio.sleep(50)
            assert await records_of(nodes) == []
            await asyncio.sleep(20)
            assert await records_of(nodes) != []


async def test_no_copy_is_begun_during_a_pause() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await found(nodes.store)
        before = await written(ledgers, 3)
        dead = nodes.bookie(before.segments[0].members[0])
        await lose(nodes, dead)
        await pause(nodes.store, ManualClock(), reason="")
        async with replicating(nodes) as replicator:
            await UnderReplicationRecords(nodes.store, ManualClock()).add_lost(
                before.ledger, [dead.member]
            )
            await asyncio.sleep(60)
            assert replicator.under_replicated == 1, "the record is still counted"
            assert replicator.counts.copied_bytes == 0
            assert await metadata_of(nodes, before.ledger) == before
            await resume(nodes.store)
            await wait_until(lambda: replicator.counts.ledgers_repaired == 1)
        assert dead.member not in (await metadata_of(nodes, before.ledger)).segments[0].members


async def test_a_repair_that_is_under_way_ends_with_the_copy_that_it_makes() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await found(nodes.store)
        before = [await written(ledgers, 3) for _ in range(8)]
        dead = nodes.bookies[0]
        touched = [each for each in before if dead.member in each.segments[0].members]
        assert len(touched) > 1
        await lose(nodes, dead)
        for each in nodes.bookies[1:]:
            each.may_ack.clear()
        for each in touched:
            await UnderReplicationRecords(nodes.store, ManualClock()).add_lost(
                each.ledger, [dead.member]
            )
        async with replicating(nodes, RepairConfig(ledgers_at_once=1)) as replicator:
            await wait_until(lambda: any(b.entries(touched[0].ledger) for b in nodes.bookies))
            await pause(nodes.store, ManualClock(), reason="")
            await wait_until(lambda: replicator._pause.paused)
            for each in nodes.bookies[1:]:
                each.may_ack.set()
            await asyncio.sleep(60)
            assert replicator.counts.members_replaced <= 1
            assert len(await records_of(nodes)) == len(touched), "records stay"
            await resume(nodes.store)
            await wait_until(lambda: replicator.counts.ledgers_repaired == len(touched))
