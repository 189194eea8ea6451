"""Under-replication records are merged, and removed only in the version that was read."""

from __future__ import annotations

import asyncio

import pytest
from support import ManualClock

from magnetar.bookie.repair.under_replication_records import UNLOCK_S, UnderReplicationRecords
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_under_replication
from magnetar.metadata.errors import OutcomeUnknown
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.model import BookieId, EntryId, LedgerId, Member
from magnetar.metadata.store import ABSENT
from magnetar.metadata.under_replication import BadCopy, UnderReplication

A, B, C = (Member(BookieId(name), f"{number:032x}") for number, name in enumerate("abc"))
LEDGER = LedgerId(12_345)


async def test_records_of_several_processes_are_merged() -> None:
    tree, clock = MemoryTree(), ManualClock(1000)
    first, second = (UnderReplicationRecords(MemoryStore(tree), clock) for _ in range(2))
    async with asyncio.TaskGroup() as group:
        group.create_task(first.add_lost(LEDGER, [A]))
        group.create_task(second.add_lost(LEDGER, [B]))
        group.create_task(second.add_bad(LEDGER, C, 5, 7))
        group.create_task(first.add_bad(LEDGER, C, 8, 9))
        group.create_task(first.add_narrow(LEDGER))
    record = await first.get(LEDGER)
    assert record is not None
    assert record.faults.lost == {A, B}
    assert record.faults.bad == (BadCopy(C, EntryId(5), EntryId(9)),)
    assert record.faults.narrow
    assert record.faults.created_ms == 1000
    clock.advance_ms(5)
    assert not await second.add_lost(LEDGER, [A])
    assert await second.get(LEDGER) == record


async def test_a_record_that_grew_during_the_repair_is_not_removed() -> None:
    records = UnderReplicationRecords(MemoryStore(), ManualClock())
    assert await records.add_lost(LEDGER, [A])
    record = await records.get(LEDGER)
    assert record is not None
    assert await records.add_lost(LEDGER, [B])
    assert not await records.clear(record)
    assert await records.replace(record, record.faults.failed("too late", 1)) is None
    now = await records.get(LEDGER)
    assert now is not None
    assert now.faults.lost == {A, B}
    failed = await records.replace(now, now.faults.failed("no copy found", 7))
    assert failed is not None
    assert not await records.clear(now)
    assert await records.clear(failed)
    assert await records.get(LEDGER) is None
    assert await records.clear(failed)  # the second clear finds no record


async def test_the_list_streams_records_and_empty_folders_are_removed() -> None:
    store = MemoryStore()
    records = UnderReplicationRecords(store, ManualClock())
    ledgers = [LedgerId(number) for number in (3, 20_000, 10**12)]
    for ledger in ledgers:
        await records.add_narrow(ledger)
    assert [each async for each in records.list()] == ledgers
    for ledger in ledgers:
        record = await records.get(ledger)
        assert record is not None
        await records.clear(record)
    assert [each async for each in records.list()] == []
    assert await store.children(paths.UNDER_REPLICATED) == []


async def test_adding_records_while_folders_are_removed_loses_none() -> None:
    tree = MemoryTree()
    here, there = (UnderReplicationRecords(MemoryStore(tree), ManualClock()) for _ in range(2))

    async def add(records: UnderReplicationRecords, numbers: range) -> None:
        for number in numbers:
            await records.add_narrow(LedgerId(number))

    async def clear(records: UnderReplicationRecords) -> None:
        async for ledger in records.list():
            found = await records.get(ledger)
            assert found is not None
            if ledger % 2:
                await records.clear(found)

    for begin in range(0, 40, 4):
        async with asyncio.TaskGroup() as group:
            group.create_task(add(here, range(begin, begin + 4)))
            group.create_task(clear(there))
    await clear(there)
    assert [each async for each in here.list()] == list(range(0, 40, 2))


async def test_one_replicator_at_a_time_holds_the_lock_until_its_session_is_lost() -> None:
    tree = MemoryTree()
    stores = [MemoryStore(tree) for _ in range(2)]
    first, second = (UnderReplicationRecords(store, ManualClock()) for store in stores)
    assert await first.lock(LEDGER, "one")
    assert not await second.lock(LEDGER, "two")
    await second.unlock(LEDGER, "one")  # `second` does not hold the lock, so nothing is released
    assert await second.locked(LEDGER)
    stores[0].expire()
    assert await second.lock(LEDGER, "two")
    await second.unlock(LEDGER, "two")
    assert not await second.locked(LEDGER)


async def test_a_lock_that_a_lost_reply_left_behind_is_ours_again() -> None:
    faults = iter([Fault.REPLY_LOST])  # of the creation
    tree = MemoryTree()
    store = MemoryStore(
        tree, faults=lambda operation, _: next(faults, None) if "create" in operation else None
    )
    records, others = (
        UnderReplicationRecords(each, ManualClock()) for each in (store, MemoryStore(tree))
    )
    with pytest.raises(OutcomeUnknown):
        await records.lock(LEDGER, "one")
    assert await records.locked(LEDGER)
    assert not await others.lock(LEDGER, "one")
    assert not await records.lock(LEDGER, "another owner of this session")
    assert await records.lock(LEDGER, "one")


async def test_releasing_a_lock_is_retried_while_the_store_is_away() -> None:
    faults = iter([Fault.NOT_SENT, Fault.REQUEST_LOST, Fault.REPLY_LOST])
    store = MemoryStore(
        faults=lambda operation, _: next(faults, None) if operation == "delete" else None
    )
    records = UnderReplicationRecords(store, ManualClock())
    assert await records.lock(LEDGER, "one")
    await records.unlock(LEDGER, "one")
    assert not await records.locked(LEDGER)


def flaky(away: list[str]) -> tuple[UnderReplicationRecords, UnderReplicationRecords]:
    """Records on a store that loses requests of the kinds in `away`, and others on its tree."""
    tree = MemoryTree()
    store = MemoryStore(
        tree, faults=lambda operation, _: Fault.REQUEST_LOST if operation in away else None
    )
    return UnderReplicationRecords(store, ManualClock()), UnderReplicationRecords(
        MemoryStore(tree), ManualClock()
    )


async def test_a_lock_stays_no_longer_than_the_store_is_away() -> None:
    away = ["delete"]
    records, others = flaky(away)

    async def repair() -> None:
        async with records.holding(LEDGER, "one") as locked:
            assert locked is not None
            assert locked()

    async with asyncio.TaskGroup() as group:
        repairing = group.create_task(repair())
        await asyncio.sleep(600)
        assert not repairing.done()
        assert await others.locked(LEDGER)
        away.clear()
    assert not await others.locked(LEDGER)


async def test_a_cancelled_holder_does_not_wait_to_release_its_lock() -> None:
    records, _ = flaky(["delete"])
    inside = asyncio.Event()

    async def repair() -> None:
        async with records.holding(LEDGER, "one"):
            inside.set()
            await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(UNLOCK_S + 1), asyncio.TaskGroup() as group:
        repairing = group.create_task(repair())
        await inside.wait()
        repairing.cancel()
    assert repairing.cancelled()


async def test_a_lock_with_an_unknown_outcome_is_released() -> None:
    faults = iter([Fault.REPLY_LOST])
    store = MemoryStore(
        faults=lambda operation, _: next(faults, None) if "create" in operation else None
    )
    records = UnderReplicationRecords(store, ManualClock())
    with pytest.raises(OutcomeUnknown):
        async with records.holding(LEDGER, "one"):
            pytest.fail("it is not known to be held")
    assert not await records.locked(LEDGER)


async def test_a_lock_unknown_to_the_next_server_is_released() -> None:
    faults = iter([Fault.REPLY_LOST])
    tree = MemoryTree()
    store = MemoryStore(
        tree, faults=lambda operation, _: next(faults, None) if "create" in operation else None
    )
    records, others = (
        UnderReplicationRecords(store, ManualClock()),
        UnderReplicationRecords(MemoryStore(tree), ManualClock()),
    )
    store.fall_behind()
    with pytest.raises(OutcomeUnknown):
        async with records.holding(LEDGER, "one"):
            pytest.fail("it is not known to be held")
    assert not await others.locked(LEDGER)


async def test_another_owners_lock_of_the_same_session_stays() -> None:
    store = MemoryStore()
    records = UnderReplicationRecords(store, ManualClock())
    assert await records.lock(LEDGER, "a bookie's collector")
    async with records.holding(LEDGER, "a replicator in the same process") as locked:
        assert locked is None
    await records.unlock(LEDGER, "a replicator in the same process")
    assert await records.locked(LEDGER)
    await store.close()
    await records.unlock(LEDGER, "a bookie's collector")  # the lock disappeared with its session


async def test_lost_replies_do_no_harm() -> None:
    faults = iter([Fault.REPLY_LOST, Fault.REQUEST_LOST])
    store = MemoryStore(
        faults=lambda operation, path: next(faults, None) if operation == "put" else None
    )
    records = UnderReplicationRecords(store, ManualClock())
    await records.add_lost(LEDGER, [A])
    await records.add_lost(LEDGER, [B])
    record = await records.get(LEDGER)
    assert record is not None
    assert record.faults.lost == {A, B}


async def test_a_stale_read_of_a_removed_record_adds_it_again() -> None:
    tree = MemoryTree()
    behind = MemoryStore(tree)
    here, there = (
        UnderReplicationRecords(MemoryStore(tree), ManualClock()),
        UnderReplicationRecords(behind, ManualClock()),
    )
    await here.add_lost(LEDGER, [A])
    behind.fall_behind()
    record = await here.get(LEDGER)
    assert record is not None
    await here.clear(record)
    assert await there.add_lost(LEDGER, [A])
    assert await here.get(LEDGER) is not None


async def test_an_addition_that_lost_a_race_against_the_same_addition_changes_nothing() -> None:
    tree = MemoryTree()
    first, second = (UnderReplicationRecords(MemoryStore(tree), ManualClock()) for _ in range(2))
    for addition in ([A], [B]):  # to a new record, then to an existing one
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(each.add_lost(LEDGER, addition)) for each in (first, second)]
        assert sorted(task.result() for task in both) == [False, True]


async def test_a_record_that_is_removed_after_a_lost_race_is_added_again() -> None:
    """The read after the lost race is stale: it shows the record of the other process."""
    tree = MemoryTree()
    value = encode_under_replication(UnderReplication(created_ms=0, lost=frozenset({A})))
    done: list[str] = []

    def meddle(operation: str, path: str) -> None:
        if operation == "put" and not done:
            tree.tree.put(path, value, expected=ABSENT)
            done.append("added")
        elif operation == "get" and done == ["added"]:
            store.fall_behind()
            tree.tree.delete(path, expected=0)
            done.append("removed")

    store = MemoryStore(tree, faults=meddle)
    assert await UnderReplicationRecords(store, ManualClock(5)).add_lost(LEDGER, [A])
    assert done == ["added", "removed"]
    record = await UnderReplicationRecords(MemoryStore(tree), ManualClock()).get(LEDGER)
    assert record is not None
    assert record.faults.created_ms == 5
