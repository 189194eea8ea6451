"""Marks are merged, never lost, and removed only in the version that was read."""

from __future__ import annotations

import asyncio

import pytest
from support import ManualClock

from magnetar.bookie.repair.marks import UNLOCK_S, Marks
from magnetar.metadata import paths
from magnetar.metadata.errors import OutcomeUnknown
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.model import BookieId, EntryId, LedgerId, Member
from magnetar.metadata.under_replication import BadCopy

A, B, C = (Member(BookieId(name), f"{number:032x}") for number, name in enumerate("abc"))
LEDGER = LedgerId(12_345)


async def test_marks_of_several_processes_add_up() -> None:
    tree, clock = MemoryTree(), ManualClock(1000)
    first, second = (Marks(MemoryStore(tree), clock) for _ in range(2))
    async with asyncio.TaskGroup() as group:
        group.create_task(first.mark_lost(LEDGER, [A]))
        group.create_task(second.mark_lost(LEDGER, [B]))
        group.create_task(second.mark_bad(LEDGER, C, 5, 7))
        group.create_task(first.mark_bad(LEDGER, C, 8, 9))
        group.create_task(first.mark_narrow(LEDGER))
    mark = await first.get(LEDGER)
    assert mark is not None
    assert mark.what.lost == {A, B}
    assert mark.what.bad == (BadCopy(C, EntryId(5), EntryId(9)),)
    assert mark.what.narrow
    assert mark.what.created_ms == 1000
    clock.advance_ms(5)
    assert not await second.mark_lost(LEDGER, [A])
    assert await second.get(LEDGER) == mark


async def test_a_mark_that_grew_meanwhile_is_not_removed() -> None:
    marks = Marks(MemoryStore(), ManualClock())
    assert await marks.mark_lost(LEDGER, [A])
    mark = await marks.get(LEDGER)
    assert mark is not None
    assert await marks.mark_lost(LEDGER, [B])
    assert not await marks.clear(mark)
    assert await marks.replace(mark, mark.what.failed("too late", 1)) is None
    now = await marks.get(LEDGER)
    assert now is not None
    assert now.what.lost == {A, B}
    failed = await marks.replace(now, now.what.failed("nobody has it", 7))
    assert failed is not None
    assert not await marks.clear(now)
    assert await marks.clear(failed)
    assert await marks.get(LEDGER) is None
    assert await marks.clear(failed)  # again: it is gone already


async def test_the_list_streams_marks_and_empty_folders_go() -> None:
    store = MemoryStore()
    marks = Marks(store, ManualClock())
    ledgers = [LedgerId(number) for number in (3, 20_000, 10**12)]
    for ledger in ledgers:
        await marks.mark_narrow(ledger)
    assert [each async for each in marks.list()] == ledgers
    for ledger in ledgers:
        mark = await marks.get(ledger)
        assert mark is not None
        await marks.clear(mark)
    assert [each async for each in marks.list()] == []
    assert await store.children(paths.UNDER_REPLICATED) == []


async def test_marking_while_folders_are_removed() -> None:
    tree = MemoryTree()
    here, there = (Marks(MemoryStore(tree), ManualClock()) for _ in range(2))

    async def mark(marks: Marks, numbers: range) -> None:
        for number in numbers:
            await marks.mark_narrow(LedgerId(number))

    async def clear(marks: Marks) -> None:
        async for ledger in marks.list():
            found = await marks.get(ledger)
            assert found is not None
            if ledger % 2:
                await marks.clear(found)

    for begin in range(0, 40, 4):
        async with asyncio.TaskGroup() as group:
            group.create_task(mark(here, range(begin, begin + 4)))
            group.create_task(clear(there))
    await clear(there)
    assert [each async for each in here.list()] == list(range(0, 40, 2))


async def test_one_repairs_at_a_time_and_a_lost_session_lets_go() -> None:
    tree = MemoryTree()
    stores = [MemoryStore(tree) for _ in range(2)]
    first, second = (Marks(store, ManualClock()) for store in stores)
    assert await first.lock(LEDGER, "one")
    assert not await second.lock(LEDGER, "two")
    await second.unlock(LEDGER, "one")  # not of its session
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
    marks, others = (Marks(each, ManualClock()) for each in (store, MemoryStore(tree)))
    with pytest.raises(OutcomeUnknown):
        await marks.lock(LEDGER, "one")
    assert await marks.locked(LEDGER)
    assert not await others.lock(LEDGER, "one")
    assert not await marks.lock(LEDGER, "another owner of this session")
    assert await marks.lock(LEDGER, "one")


async def test_letting_go_of_a_lock_outlasts_a_store_that_is_away() -> None:
    faults = iter([Fault.NOT_SENT, Fault.REQUEST_LOST, Fault.REPLY_LOST])
    store = MemoryStore(
        faults=lambda operation, _: next(faults, None) if operation == "delete" else None
    )
    marks = Marks(store, ManualClock())
    assert await marks.lock(LEDGER, "one")
    await marks.unlock(LEDGER, "one")
    assert not await marks.locked(LEDGER)


def flaky(away: list[str]) -> tuple[Marks, Marks]:
    """Marks on a store that loses requests of the kinds in `away`, and others on the same tree."""
    tree = MemoryTree()
    store = MemoryStore(
        tree, faults=lambda operation, _: Fault.REQUEST_LOST if operation in away else None
    )
    return Marks(store, ManualClock()), Marks(MemoryStore(tree), ManualClock())


async def test_a_lock_stays_no_longer_than_the_store_is_away() -> None:
    away = ["delete"]
    marks, others = flaky(away)

    async def repair() -> None:
        async with marks.holding(LEDGER, "one") as locked:
            assert locked is not None
            assert locked()

    async with asyncio.TaskGroup() as group:
        repairing = group.create_task(repair())
        await asyncio.sleep(600)
        assert not repairing.done()
        assert await others.locked(LEDGER)
        away.clear()
    assert not await others.locked(LEDGER)


async def test_whoever_is_cancelled_while_the_store_is_away_waits_for_no_lock() -> None:
    marks, _ = flaky(["delete"])
    inside = asyncio.Event()

    async def repair() -> None:
        async with marks.holding(LEDGER, "one"):
            inside.set()
            await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(UNLOCK_S + 1), asyncio.TaskGroup() as group:
        repairing = group.create_task(repair())
        await inside.wait()
        repairing.cancel()
    assert repairing.cancelled()


async def test_a_lock_that_nobody_knows_whether_it_was_taken_is_let_go_of() -> None:
    faults = iter([Fault.REPLY_LOST])
    store = MemoryStore(
        faults=lambda operation, _: next(faults, None) if "create" in operation else None
    )
    marks = Marks(store, ManualClock())
    with pytest.raises(OutcomeUnknown):
        async with marks.holding(LEDGER, "one"):
            pytest.fail("it is not known to be held")
    assert not await marks.locked(LEDGER)


async def test_a_lock_whose_taking_the_next_server_has_not_seen_is_let_go_of() -> None:
    faults = iter([Fault.REPLY_LOST])
    tree = MemoryTree()
    store = MemoryStore(
        tree, faults=lambda operation, _: next(faults, None) if "create" in operation else None
    )
    marks, others = Marks(store, ManualClock()), Marks(MemoryStore(tree), ManualClock())
    store.fall_behind()
    with pytest.raises(OutcomeUnknown):
        async with marks.holding(LEDGER, "one"):
            pytest.fail("it is not known to be held")
    assert not await others.locked(LEDGER)


async def test_another_owners_lock_of_the_same_session_stays() -> None:
    store = MemoryStore()
    marks = Marks(store, ManualClock())
    assert await marks.lock(LEDGER, "a bookie's collector")
    async with marks.holding(LEDGER, "a replicator in the same process") as locked:
        assert locked is None
    await marks.unlock(LEDGER, "a replicator in the same process")
    assert await marks.locked(LEDGER)
    await store.close()
    await marks.unlock(LEDGER, "a bookie's collector")  # went with the session


async def test_lost_replies_do_no_harm() -> None:
    faults = iter([Fault.REPLY_LOST, Fault.REQUEST_LOST])
    store = MemoryStore(
        faults=lambda operation, path: next(faults, None) if operation == "put" else None
    )
    marks = Marks(store, ManualClock())
    await marks.mark_lost(LEDGER, [A])
    await marks.mark_lost(LEDGER, [B])
    mark = await marks.get(LEDGER)
    assert mark is not None
    assert mark.what.lost == {A, B}


async def test_a_stale_reader_does_not_take_a_removed_mark_for_present() -> None:
    tree = MemoryTree()
    behind = MemoryStore(tree)
    here, there = Marks(MemoryStore(tree), ManualClock()), Marks(behind, ManualClock())
    await here.mark_lost(LEDGER, [A])
    behind.fall_behind()
    mark = await here.get(LEDGER)
    assert mark is not None
    await here.clear(mark)
    assert await there.mark_lost(LEDGER, [A])
    assert await here.get(LEDGER) is not None
