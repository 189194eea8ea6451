"""The replicator restores exactly the lost copies, and records them only when they are durable."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fakes.ledger_bookies import BookieCluster, FakeBookie, bookie_cluster
from fakes.repairs import held, lose, metadata_of, payload_of, replicating, written
from support import wait_until

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.errors import EntryUnreadable
from magnetar.bookie.repair import replicator
from magnetar.bookie.repair.config import RepairConfig
from magnetar.bookie.repair.plan import sealed, striped
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_ledger
from magnetar.metadata.model import (
    NO_LEDGER,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Segment,
)
from magnetar.metadata.store import ABSENT
from magnetar.protos.envelope import COPY, BookieCode
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.bookie.ledger.ledgers import Ledgers
    from magnetar.bookie.repair.replicator import Replicator
    from magnetar.protos.envelope import Add

STRIPED = LedgerConfig(ensemble_size=4, write_quorum=3, ack_quorum=2)


def records_of(nodes: BookieCluster) -> UnderReplicationRecords:
    return UnderReplicationRecords(nodes.store, SystemClock())


async def repaired(nodes: BookieCluster, ledger: LedgerId, *, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while await records_of(nodes).get(ledger) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def noted(nodes: BookieCluster, ledger: LedgerId, text: str) -> None:
    """Wait until the record of the ledger has this reason."""
    async with asyncio.timeout(60):
        while True:
            record = await records_of(nodes).get(ledger)
            if record is not None and text in record.faults.failure:
                return
            await asyncio.sleep(0.05)


async def one_lost(
    nodes: BookieCluster, ledgers: Ledgers
) -> tuple[LedgerMetadata, FakeBookie, FakeBookie]:
    """Write a ledger of 20 entries on four bookies and kill a member. Return the ledger, the dead
    bookie and the spare bookie."""
    before = await written(ledgers, 20)
    (spare,) = (b for b in nodes.bookies if b.member not in before.segments[0].members)
    dead = nodes.bookie(before.segments[0].members[0])
    await lose(nodes, dead)
    return before, dead, spare


def check_whole(nodes: BookieCluster, metadata: LedgerMetadata) -> None:
    """Check that every member has all entries of its seat, and that all copies of an entry are
    equal."""
    for first, last, segment in sealed(metadata):
        for seat, member in enumerate(segment.members):
            entries = held(nodes, metadata, member)
            for run in striped(metadata, seat, first, last):
                assert set(run) <= set(entries), (member.bookie, run)
        for entry in range(first, last + 1):
            copies = {
                bookie.ledgers[metadata.ledger].entries[entry]
                for bookie in nodes.bookies
                if entry in bookie.entries(metadata.ledger)
            }
            assert len(copies) == 1, entry


@pytest.mark.parametrize("sizes", [None, STRIPED])
async def test_the_copies_of_a_dead_bookie_are_restored_on_others(
    sizes: LedgerConfig | None,
) -> None:
    async with bookie_cluster(5) as nodes, nodes.process(sizes) as ledgers:
        before = await written(ledgers, 50)
        members = before.segments[0].members
        dead = nodes.bookie(members[1])
        await lose(nodes, dead)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes) as replicator:
            await repaired(nodes, before.ledger)
        after = await metadata_of(nodes, before.ledger)
        heir = after.segments[0].members[1]
        assert heir not in members
        assert after.segments[0].members == (members[0], heir, *members[2:])
        assert (after.last_entry, after.length) == (before.last_entry, before.length)
        check_whole(nodes, after)
        # The spare has exactly the entries of the seat, and received them as copies.
        expected = [entry for run in striped(after, 1, 0, 49) for entry in run]
        assert held(nodes, after, heir) == expected
        assert not nodes.bookie(heir).ledgers[before.ledger].fenced
        assert replicator.counts.members_replaced == 1
        assert replicator.counts.copied_bytes > 20 * len(expected)


async def test_every_segment_and_an_empty_tail_get_their_members_back() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        whole = await written(ledgers, 10)
        members = whole.segments[0].members
        # The ledger's writer had changed the ensemble and confirmed no later entry.
        tail = Segment(EntryId(10), (members[1], members[2], members[0]))
        before = replace(whole, segments=(*whole.segments, tail))
        await put_metadata(nodes, before)
        dead = nodes.bookie(members[1])
        await lose(nodes, dead)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes):
            await repaired(nodes, before.ledger)
        after = await metadata_of(nodes, before.ledger)
        assert [part.first_entry for part in after.segments] == [0, 10]
        assert all(dead.member not in part.members for part in after.segments)
        check_whole(nodes, after)


async def test_an_empty_ledger_is_moved_too() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 0)
        dead = nodes.bookie(before.segments[0].members[2])
        await lose(nodes, dead)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes):
            await repaired(nodes, before.ledger)
        after = await metadata_of(nodes, before.ledger)
        assert dead.member not in after.segments[0].members


async def test_both_lost_members_of_a_segment_are_replaced() -> None:
    async with bookie_cluster(5) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        dead = [nodes.bookie(member) for member in before.segments[0].members[:2]]
        for each in dead:
            await lose(nodes, each)
        await records_of(nodes).add_lost(before.ledger, [each.member for each in dead])
        async with replicating(nodes):
            await repaired(nodes, before.ledger)
        after = await metadata_of(nodes, before.ledger)
        assert not {each.member for each in dead} & set(after.segments[0].members)
        check_whole(nodes, after)


async def test_a_wiped_bookie_takes_its_seat_back_in_a_cluster_without_a_spare() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        wiped = nodes.bookies[1]
        await lose(nodes, wiped)
        await records_of(nodes).add_lost(before.ledger, [wiped.member])
        async with replicating(nodes), asyncio.TaskGroup() as group:
            await noted(nodes, before.ledger, "no other bookie")
            reborn = FakeBookie("b1", incarnation=2, group=group)
            nodes.bookies.append(reborn)
            await nodes.register(reborn)
            await repaired(nodes, before.ledger)
            after = await metadata_of(nodes, before.ledger)
            assert reborn.member in after.segments[0].members
            assert wiped.member not in after.segments[0].members
            check_whole(nodes, after)
            reborn.kill()


async def test_t28_an_unreadable_entry_leaves_the_metadata_unchanged() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        members = before.segments[0].members
        dead, *others = (nodes.bookie(member) for member in members)
        await lose(nodes, dead)
        for other in others:
            other.judge_read = lambda _, entry: BookieCode.IO_ERROR if entry == 13 else None
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes):
            await noted(nodes, before.ledger, f"entry {before.ledger}:13")
            assert await metadata_of(nodes, before.ledger) == before
            # The disk was sound: its bookie returns with the only copy.
            others[0].judge_read = lambda *_: None
            await repaired(nodes, before.ledger, within_s=700)
        after = await metadata_of(nodes, before.ledger)
        assert dead.member not in after.segments[0].members


async def test_an_unreadable_entry_of_another_stripe_stops_nothing() -> None:
    async with bookie_cluster(5) as nodes, nodes.process(STRIPED) as ledgers:
        before = await written(ledgers, 40)
        dead = nodes.bookie(before.segments[0].members[1])
        await lose(nodes, dead)
        # Entry 22 lies on seats 2, 3 and 0.
        for each in nodes.bookies:
            each.judge_read = lambda _, entry: BookieCode.IO_ERROR if entry == 22 else None
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes):
            await repaired(nodes, before.ledger)
        after = await metadata_of(nodes, before.ledger)
        assert dead.member not in after.segments[0].members
        check_whole(nodes, after)


def refuse(code: BookieCode) -> Callable[[Add], BookieCode | None]:
    return lambda add: code if add.flags & COPY and add.entry == 7 else None


@pytest.mark.parametrize("how", ["refuses", "dies", "silent"])
async def test_t27_no_member_is_replaced_before_the_copies_are_durable(how: str) -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        before, dead, spare = await one_lost(nodes, ledgers)

        def die(add: Add) -> None:
            if add.entry == 7:
                spare.kill()

        if how == "refuses":
            spare.judge_add = refuse(BookieCode.OVERLOADED)
        elif how == "dies":
            spare.judge_add = die
        else:
            spare.may_ack.clear()
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes):
            await noted(nodes, before.ledger, "did not store copies")
            assert await metadata_of(nodes, before.ledger) == before
            spare.judge_add = lambda _: None
            spare.may_ack.set()
            spare.restart()
            await repaired(nodes, before.ledger, within_s=700)
        check_whole(nodes, await metadata_of(nodes, before.ledger))


@pytest.mark.parametrize("deleted", [False, True], ids=["kept", "deleted"])
async def test_a_retry_continues_a_copy_with_the_entries_that_the_target_still_has(
    deleted: bool,
) -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        before, dead, spare = await one_lost(nodes, ledgers)
        received = count_copies(spare, refused=15)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes) as replicator:
            await wait_until(lambda: replicator.counts.repairs_failed >= 3, deadline_s=300)
            # The last entries of the seat are sent again, and then the entries without an ack.
            assert [entry for entry in received if entry < 12] == list(range(12))
            if deleted:  # by the spare's collector
                del spare.ledgers[before.ledger]
            received = count_copies(spare)
            await repaired(nodes, before.ledger, within_s=700)
        assert received == (list(range(20)) if deleted else list(range(12, 20)))
        check_whole(nodes, await metadata_of(nodes, before.ledger))


async def test_a_retry_continues_at_the_first_entry_that_the_target_lost() -> None:
    async with bookie_cluster(6) as nodes, nodes.process(STRIPED) as ledgers:
        before = await written(ledgers, 40)
        dead = nodes.bookie(before.segments[0].members[1])
        spares = [b for b in nodes.bookies if b.member not in before.segments[0].members]
        await lose(nodes, dead)
        for spare in spares:
            spare.entries_page = 2
            count_copies(spare, refused=33)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes) as replicator:
            await wait_until(lambda: replicator.counts.repairs_failed >= 1, deadline_s=300)
            (target,) = (spare for spare in spares if spare.entries(before.ledger))
            del target.ledgers[before.ledger].entries[21]
            received = count_copies(target)
            await repaired(nodes, before.ledger, within_s=700)
        after = await metadata_of(nodes, before.ledger)
        assert after.segments[0].members[1] == target.member
        seat = [entry for run in striped(after, 1, 0, 39) for entry in run]
        assert received == [entry for entry in seat if entry >= 17]
        check_whole(nodes, after)


async def test_a_copy_that_waits_for_its_source_stays_with_its_target() -> None:
    async with bookie_cluster(7) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 60, size=100_000)
        dead, *others = (nodes.bookie(member) for member in before.segments[0].members)
        spares = [b for b in nodes.bookies if b.member not in before.segments[0].members]
        await lose(nodes, dead)
        for other in others:
            other.judge_read = lambda _, entry: BookieCode.IO_ERROR if entry == 50 else None
        received = [count_copies(spare) for spare in spares]
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes) as replicator:
            await wait_until(lambda: replicator.counts.repairs_failed >= 4, deadline_s=300)
            (copied,) = (entries for entries in received if entries)
            assert copied.count(0) == 1
            for other in others:
                other.judge_read = lambda *_: None
            await repaired(nodes, before.ledger, within_s=700)
        assert sum(map(bool, received)) == 1
        assert copied.count(0) == 1
        check_whole(nodes, await metadata_of(nodes, before.ledger))


async def test_another_target_takes_over_from_one_that_makes_no_progress() -> None:
    async with bookie_cluster(7) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        dead = nodes.bookie(before.segments[0].members[0])
        spares = [b for b in nodes.bookies if b.member not in before.segments[0].members]
        await lose(nodes, dead)
        first: list[FakeBookie] = []

        def judge(spare: FakeBookie, add: Add) -> BookieCode | None:
            first[:] = first or [spare]
            return BookieCode.OVERLOADED if spare in first and add.entry == 7 else None

        for spare in spares:
            spare.judge_add = partial(judge, spare)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes):
            await repaired(nodes, before.ledger, within_s=700)
        after = await metadata_of(nodes, before.ledger)
        assert first[0].member not in after.segments[0].members
        check_whole(nodes, after)


async def test_another_target_takes_over_from_one_that_cannot_be_reached_any_more() -> None:
    async with bookie_cluster(5) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        dead = nodes.bookie(before.segments[0].members[0])
        spares = [b for b in nodes.bookies if b.member not in before.segments[0].members]
        await lose(nodes, dead)
        for spare in spares:
            count_copies(spare, refused=15)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes) as replicator:
            await wait_until(lambda: replicator.counts.repairs_failed >= 1, deadline_s=300)
            (target,) = (spare for spare in spares if spare.entries(before.ledger))
            (other,) = (spare for spare in spares if spare is not target)
            target.kill()  # it stays listed
            count_copies(other)
            await repaired(nodes, before.ledger, within_s=700)
        after = await metadata_of(nodes, before.ledger)
        assert after.segments[0].members[0] == other.member
        check_whole(nodes, after)


async def test_a_lone_spare_that_can_be_reached_again_continues_its_copy() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        before, dead, spare = await one_lost(nodes, ledgers)
        count_copies(spare, refused=15)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes) as replicator:
            await wait_until(lambda: replicator.counts.repairs_failed >= 1, deadline_s=300)
            spare.kill()  # it stays listed
            await wait_until(lambda: replicator.counts.repairs_failed >= 4, deadline_s=300)
            received = count_copies(spare)
            spare.restart()
            await repaired(nodes, before.ledger, within_s=700)
        assert received == list(range(12, 20))
        check_whole(nodes, await metadata_of(nodes, before.ledger))


async def test_a_repair_that_failed_during_membership_changes_is_retried_soon() -> None:
    """Each change of the list of bookies starts a new attempt. The failures of these attempts must
    not add up to a pause of minutes."""

    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        before, dead, spare = await one_lost(nodes, ledgers)
        spare.judge_add = refuse(BookieCode.OVERLOADED)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes) as replicator:
            await noted(nodes, before.ledger, "did not store copies")
            other = await nodes.add_bookie()
            other.judge_add = refuse(BookieCode.OVERLOADED)
            for change in [nodes.unregister, nodes.register] * 5:
                failed = replicator.counts.repairs_failed
                await change(other)
                await wait_until(lambda was=failed: replicator.counts.repairs_failed > was)
            spare.judge_add = other.judge_add = lambda _: None
            await repaired(nodes, before.ledger, within_s=20)
        check_whole(nodes, await metadata_of(nodes, before.ledger))


async def test_t31_an_addition_during_a_repair_survives_it() -> None:
    async with bookie_cluster(5) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        first, second = (nodes.bookie(member) for member in before.segments[0].members[:2])
        await lose(nodes, first)
        for each in nodes.bookies:
            each.may_ack.clear()
        await records_of(nodes).add_lost(before.ledger, [first.member])
        async with replicating(nodes) as replicator:
            spares = [b for b in nodes.bookies if b.member not in before.segments[0].members]
            await wait_until(lambda: any(each.entries(before.ledger) for each in spares))
            await lose(nodes, second)
            await records_of(nodes).add_lost(before.ledger, [second.member])
            for each in nodes.bookies:
                each.may_ack.set()
            await repaired(nodes, before.ledger)
            assert replicator.counts.members_replaced == 2
        after = await metadata_of(nodes, before.ledger)
        assert not {first.member, second.member} & set(after.segments[0].members)
        check_whole(nodes, after)


async def test_t26_a_replicator_that_lost_its_lock_names_no_member() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        before, dead, spare = await one_lost(nodes, ledgers)
        spare.may_ack.clear()
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes) as replicator:
            await wait_until(lambda: spare.entries(before.ledger) == list(range(20)))
            store = replicator._store
            store.expire()  # type: ignore[attr-defined]
            store.reconnect()  # type: ignore[attr-defined]
            # The spare's collector does this, because metadata does not name the spare.
            assert await records_of(nodes).lock(before.ledger, "collector")
            spare.may_ack.set()
            await asyncio.sleep(60)
            assert await metadata_of(nodes, before.ledger) == before
            del spare.ledgers[before.ledger]
            await records_of(nodes).unlock(before.ledger, "collector")
            await repaired(nodes, before.ledger, within_s=700)
        check_whole(nodes, await metadata_of(nodes, before.ledger))


async def test_a_bookie_that_came_back_needs_no_repair() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        member = before.segments[0].members[0]
        await records_of(nodes).add_lost(before.ledger, [member])
        async with replicating(nodes) as replicator:
            await repaired(nodes, before.ledger)
            assert replicator.counts.copied_bytes == 0
        assert await metadata_of(nodes, before.ledger) == before


async def test_the_record_of_a_deleted_ledger_is_removed() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 3)
        await records_of(nodes).add_lost(before.ledger, before.segments[0].members[:1])
        await ledgers.delete(before.ledger)
        async with replicating(nodes):
            await repaired(nodes, before.ledger)


async def test_bad_copies_are_written_again_where_they_were() -> None:
    async with bookie_cluster(4) as nodes, nodes.process(STRIPED) as ledgers:
        before = await written(ledgers, 40)
        member = before.segments[0].members[2]
        stored = nodes.bookie(member).ledgers[before.ledger].entries
        lost = [entry for entry in sorted(stored) if 10 <= entry <= 20]
        for entry in lost:
            del stored[entry]
        await records_of(nodes).add_bad(before.ledger, member, 10, 20)
        async with replicating(nodes):
            await repaired(nodes, before.ledger)
        assert await metadata_of(nodes, before.ledger) == before
        assert set(lost) <= set(stored)
        assert all(entry % 4 in (2, 1, 0) for entry in stored)
        check_whole(nodes, before)


async def open_again(nodes: BookieCluster, whole: LedgerMetadata) -> LedgerMetadata:
    """Make a closed ledger of 20 entries an open one: entries 10 to 19 belong to its writer."""
    first, *others = whole.segments[0].members
    tail = Segment(EntryId(10), (*others, first))
    segments = (*whole.segments, tail)
    now_open = replace(
        whole, state=LedgerState.OPEN, last_entry=None, length=None, segments=segments
    )
    await put_metadata(nodes, now_open)
    return now_open


async def put_metadata(nodes: BookieCluster, metadata: LedgerMetadata) -> None:
    path = paths.ledger(metadata.ledger)
    stored = await nodes.store.get(path)
    assert stored is not None
    await nodes.store.put(path, encode_ledger(metadata), expected=stored.version)


def count_copies(bookie: FakeBookie, *, refused: int = -1) -> list[int]:
    """Return a list that collects the entries that the bookie receives as copies. The bookie
    refuses the entry `refused`."""
    received: list[int] = []

    def on_add(add: Add) -> BookieCode | None:
        if add.flags & COPY:
            received.append(add.entry)
            if add.entry == refused:
                return BookieCode.OVERLOADED
        return None

    bookie.judge_add = on_add
    return received


async def bad_of(nodes: BookieCluster, ledger: LedgerId) -> list[tuple[int, int]]:
    record = await records_of(nodes).get(ledger)
    assert record is not None
    return [(bad.first_entry, bad.last_entry) for bad in record.faults.bad]


async def test_bad_copies_beside_a_segment_being_written_are_written_once() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        whole = await written(ledgers, 20)
        before = await open_again(nodes, whole)
        bookie = nodes.bookie(before.segments[0].members[0])
        stored = bookie.ledgers[before.ledger].entries
        for entry in range(15):
            del stored[entry]
        await records_of(nodes).add_bad(before.ledger, bookie.member, 0, 14)
        received = count_copies(bookie)
        async with replicating(nodes) as replicator:
            await noted(nodes, before.ledger, "waits for its writer")
            await asyncio.sleep(100)
            assert received == list(range(10))
            assert await bad_of(nodes, before.ledger) == [(10, 14)]
            assert replicator.counts.ledgers_repaired == 0
        async with replicating(
            nodes, seed=8
        ):  # the replicator of another process, or after a restart
            await asyncio.sleep(100)
            assert received == list(range(10))
            closed = replace(whole, segments=before.segments)
            await put_metadata(nodes, closed)
            await repaired(nodes, before.ledger)
        assert received == list(range(15))
        check_whole(nodes, closed)


async def test_bad_copies_beside_a_lost_member_without_a_target_are_written_once() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        dead, bookie, _ = (nodes.bookie(member) for member in before.segments[0].members)
        for entry in range(10):
            del bookie.ledgers[before.ledger].entries[entry]
        await lose(nodes, dead)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        await records_of(nodes).add_bad(before.ledger, bookie.member, 0, 9)
        received = count_copies(bookie)
        async with replicating(nodes) as replicator:
            await wait_until(lambda: replicator.counts.repairs_failed >= 5, deadline_s=300)
            assert received == list(range(10))
            await nodes.add_bookie()
            await repaired(nodes, before.ledger)
            assert received == list(range(10))
            assert replicator.counts.ledgers_repaired == 1
        check_whole(nodes, await metadata_of(nodes, before.ledger))


async def test_copies_that_a_bookie_did_not_store_stay_recorded() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        before = await open_again(nodes, await written(ledgers, 20))
        bookie = nodes.bookie(before.segments[0].members[0])
        received = count_copies(bookie, refused=7)
        await records_of(nodes).add_bad(before.ledger, bookie.member, 0, 12)
        async with replicating(nodes) as replicator:
            await noted(nodes, before.ledger, "did not store copies")
            await asyncio.sleep(20)
            assert replicator.counts.repairs_failed >= 3
            assert await bad_of(nodes, before.ledger) == [(7, 12)]
            assert [entry for entry in received if entry < 7] == list(range(7))
            count_copies(bookie)
            await noted(nodes, before.ledger, "waits for its writer")
            assert await bad_of(nodes, before.ledger) == [(10, 12)]


async def test_entries_that_no_bookie_has_do_not_stop_the_rewriting_of_others() -> None:
    """The bookie acknowledges late: the failed read of an entry does not cancel earlier copies."""
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        bookie = nodes.bookie(before.segments[0].members[0])
        stored = bookie.ledgers[before.ledger].entries
        stored.clear()
        lost = {7, 8, 13}
        for each in nodes.bookies:
            each.judge_read = lambda _, entry: BookieCode.IO_ERROR if entry in lost else None
        await records_of(nodes).add_bad(before.ledger, bookie.member, 0, 19)
        received = count_copies(bookie)
        bookie.may_ack.clear()
        async with replicating(nodes):
            await wait_until(lambda: received == list(range(7)))
            bookie.may_ack.set()
            await noted(nodes, before.ledger, f"entry {before.ledger}:7")
            assert sorted(stored) == [entry for entry in range(20) if entry not in lost]
            assert await bad_of(nodes, before.ledger) == [(7, 8), (13, 13)]
            lost.clear()
            await repaired(nodes, before.ledger, within_s=700)
        check_whole(nodes, before)


@pytest.mark.parametrize("sizes", [None, STRIPED])
async def test_a_stream_that_breaks_after_the_last_ack_fails_no_repair(
    sizes: LedgerConfig | None,
) -> None:
    async with bookie_cluster(4) as nodes, nodes.process(sizes) as ledgers:
        before = await written(ledgers, 20)
        bookie = nodes.bookie(before.segments[0].members[1])
        last = [entry for run in striped(before, 1, 0, 19) for entry in run][-1]
        received: list[int] = []

        def judge(add: Add) -> None:
            received.append(add.entry)
            if add.entry == last:  # the loop breaks the stream after the bookie has sent the ack
                (stream,) = (s for s in bookie._streams if s.peer.endswith("/copies"))
                asyncio.get_running_loop().call_soon(stream.abort, "connection reset by peer")

        await records_of(nodes).add_bad(before.ledger, bookie.member, 0, 19)
        bookie.judge_add = judge
        async with replicating(nodes) as replicator:
            await repaired(nodes, before.ledger)
            assert received.count(last) == 1
            assert replicator.counts.repairs_failed == 0
        check_whole(nodes, before)


async def test_a_rewrite_ends_when_too_many_entries_cannot_be_read() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 100)
        bookie = nodes.bookie(before.segments[0].members[0])
        for each in nodes.bookies:
            each.judge_read = lambda _, entry: BookieCode.IO_ERROR if entry % 2 else None
        await records_of(nodes).add_bad(before.ledger, bookie.member, 0, 99)
        received = count_copies(bookie)
        async with replicating(nodes):
            await noted(nodes, before.ledger, f"entry {before.ledger}:1 ")
        assert received == list(range(0, 2 * replicator.UNREADABLE_MAX + 1, 2))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"target": BookieCode.NO_SUCH_ENTRY, "other": BookieCode.IO_ERROR}, True),
        ({"dead": BookieCode.CONNECTION_LOST, "other": BookieCode.CORRUPT}, True),
        ({"other": BookieCode.NO_SUCH_ENTRY, "slow": BookieCode.TIMEOUT}, False),
        ({"target": BookieCode.NO_SUCH_ENTRY, "other": BookieCode.STARTING}, False),
        ({}, False),
    ],
)
def test_only_an_entry_that_a_serving_bookie_refuses_is_left_out_of_a_rewrite(
    answers: dict[str, BookieCode], expected: bool
) -> None:
    """Otherwise a rewrite would ask bookies that start for one entry after the other."""
    error = EntryUnreadable(1, 7, answers)
    assert replicator._concerns_one_entry(error, "target") is expected


async def test_t31_a_copy_found_bad_again_while_copies_are_written_is_written_again() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        before = await open_again(nodes, await written(ledgers, 20))
        bookie = nodes.bookie(before.segments[0].members[0])
        stored = bookie.ledgers[before.ledger].entries
        await records_of(nodes).add_bad(before.ledger, bookie.member, 0, 4)
        await records_of(nodes).add_bad(before.ledger, bookie.member, 15, 15)
        received = count_copies(bookie)
        bookie.may_ack.clear()
        async with replicating(nodes):
            await wait_until(lambda: received == list(range(5)))
            del stored[3]
            await records_of(nodes).add_bad(before.ledger, bookie.member, 3, 6)
            bookie.may_ack.set()
            await asyncio.sleep(60)
            assert received == [*range(5), *range(7)]
            assert await bad_of(nodes, before.ledger) == [(15, 15)]
        assert 3 in stored


@pytest.mark.parametrize("how", ["the copies are stored", "the bookie dies"])
async def test_t26_a_replicator_that_lost_its_lock_leaves_the_next_record_alone(
    how: str,
) -> None:
    """The next record of the ledger begins with version 0, too."""
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 20)
        bookie = nodes.bookie(before.segments[0].members[0])
        records = records_of(nodes)
        await records.add_bad(before.ledger, bookie.member, 0, 4)
        received = count_copies(bookie)
        bookie.may_ack.clear()
        async with replicating(nodes) as replicator:
            await wait_until(lambda: received == list(range(5)))
            store = replicator._store
            store.expire()  # type: ignore[attr-defined]
            store.reconnect()  # type: ignore[attr-defined]
            assert await records.lock(before.ledger, "another replicator")
            record = await records.get(before.ledger)
            assert record is not None
            assert await records.clear(record)
            await records.add_bad(before.ledger, bookie.member, 2, 3)
            if how == "the bookie dies":
                bookie.kill()
                bookie.restart()
            bookie.may_ack.set()
            await asyncio.sleep(60)
            assert await bad_of(nodes, before.ledger) == [(2, 3)]
            await records.unlock(before.ledger, "another replicator")
            await repaired(nodes, before.ledger)
            assert received == [*range(5), 2, 3]


async def narrow_ledger(nodes: BookieCluster) -> LedgerMetadata:
    """Create a ledger while one of three bookies is away."""
    await lose(nodes, nodes.bookies[2])
    async with nodes.process() as ledgers:
        metadata = await written(ledgers, 20)
    assert metadata.under_replicated
    assert metadata.write_quorum == 2
    nodes.bookies[2].restart()
    await nodes.register(nodes.bookies[2])
    return metadata


async def test_a_ledger_that_was_made_narrow_is_widened_and_readable_with_old_metadata() -> None:
    async with bookie_cluster(3) as nodes:
        before = await narrow_ledger(nodes)
        await records_of(nodes).add_narrow(before.ledger)
        async with replicating(nodes):
            await repaired(nodes, before.ledger)
        after = await metadata_of(nodes, before.ledger)
        assert (after.ensemble_size, after.write_quorum, after.ack_quorum) == (3, 3, 2)
        assert not after.under_replicated
        assert (after.last_entry, after.length) == (before.last_entry, before.length)
        check_whole(nodes, after)
        async with nodes.process() as ledgers:
            reader = ledgers.reader(before)
            for old in before.segments[0].members:
                await lose(nodes, nodes.bookie(old))
            # Both bookies that it knows are gone: the third is found by reading again.
            entries = await reader.read(0, 19, bytes_max=1 << 20)
            assert [bytes(each.payload) for each in entries] == [
                payload_of(entry) for entry in range(20)
            ]


async def test_a_retry_continues_to_widen_a_ledger() -> None:
    async with bookie_cluster(3) as nodes:
        before = await narrow_ledger(nodes)
        received = count_copies(nodes.bookies[2], refused=15)
        await records_of(nodes).add_narrow(before.ledger)
        async with replicating(nodes) as replicator:
            await wait_until(lambda: replicator.counts.repairs_failed >= 3, deadline_s=300)
            assert [entry for entry in received if entry < 13] == list(range(13))
            received = count_copies(nodes.bookies[2])
            await repaired(nodes, before.ledger, within_s=700)
        assert received == list(range(13, 20))
        check_whole(nodes, await metadata_of(nodes, before.ledger))


async def open_with_a_loss(nodes: BookieCluster) -> tuple[LedgerMetadata, FakeBookie]:
    """Write a ledger without closing it. The writer is dead, and one of the bookies is lost."""
    async with nodes.process() as ledgers:
        appender = await ledgers.create(newer_than=NO_LEDGER, custom={})
        for entry in range(5):
            appender.append_nowait([[payload_of(entry)]])
        await wait_until(lambda: appender.confirmed == 4)
        metadata = appender.metadata
    dead = nodes.bookie(metadata.segments[0].members[0])
    await lose(nodes, dead)
    return metadata, dead


async def test_t30_a_ledger_without_a_writer_is_taken_after_the_grace_and_no_sooner() -> None:
    async with bookie_cluster(4) as nodes:
        before, dead = await open_with_a_loss(nodes)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes, RepairConfig(open_grace_s=300)) as replicator:
            await noted(nodes, before.ledger, "waits for its writer")
            await asyncio.sleep(250)
            assert await metadata_of(nodes, before.ledger) == before
            await repaired(nodes, before.ledger, within_s=200)
            assert replicator.counts.ledgers_recovered == 1
        after = await metadata_of(nodes, before.ledger)
        assert after.state is LedgerState.CLOSED
        assert after.last_entry == 4
        assert dead.member not in after.last_segment.members
        check_whole(nodes, after)


async def test_t30_a_ledger_is_taken_soon_after_a_short_grace() -> None:
    async with bookie_cluster(4) as nodes:
        before, dead = await open_with_a_loss(nodes)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes, RepairConfig(open_grace_s=1)):
            await noted(nodes, before.ledger, "waits for its writer")
            await repaired(nodes, before.ledger, within_s=8)


async def test_t30_a_ledgers_grace_is_remembered_beyond_the_sample() -> None:
    async with bookie_cluster(4) as nodes:
        before, dead = await open_with_a_loss(nodes)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        await add_unreadable(nodes, 15)
        config = RepairConfig(open_grace_s=300)
        async with replicating(nodes, config, sample_max=1) as replicator:
            await asyncio.sleep(3000)
            assert replicator.under_replicated >= 15
            assert replicator.counts.ledgers_recovered == 1


async def add_unreadable(nodes: BookieCluster, count: int) -> None:
    """Record ledgers whose metadata is unreadable, so no repair is possible."""
    for number in range(1000, 1000 + count):
        path = paths.ledger(LedgerId(number))
        await nodes.store.put(path, b"what is this", expected=ABSENT)
        await records_of(nodes).add_narrow(LedgerId(number))


async def test_t30_a_ledgers_grace_continues_when_its_retry_time_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More ledgers fail than the replicator remembers."""
    monkeypatch.setattr(replicator, "TROUBLES_MAX", 2)
    async with bookie_cluster(4) as nodes:
        before, dead = await open_with_a_loss(nodes)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        await add_unreadable(nodes, 3)
        async with replicating(nodes, RepairConfig(open_grace_s=60)) as there:
            await asyncio.sleep(100)
            assert there.counts.ledgers_recovered == 1


async def test_t30_a_ledger_above_the_limit_of_graces_is_recovered_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicator, "TAILS_MAX", 1)
    async with bookie_cluster(4) as nodes:
        async with nodes.process() as ledgers:
            both = [await ledgers.create(newer_than=NO_LEDGER, custom={}) for _ in range(2)]
            for appender in both:
                appender.append_nowait([[payload_of(0)]])
            await wait_until(lambda: all(appender.confirmed == 0 for appender in both))
            one, other = (appender.metadata.last_segment.members for appender in both)
        dead = nodes.bookie(next(member for member in one if member in other))
        await lose(nodes, dead)
        for appender in both:
            await records_of(nodes).add_lost(appender.ledger, [dead.member])
        async with replicating(nodes, RepairConfig(open_grace_s=60)) as there:
            await asyncio.sleep(90)
            assert there.counts.ledgers_recovered == 1
            await asyncio.sleep(90)
            assert there.counts.ledgers_recovered == 2


async def test_t30_a_recovery_that_fails_is_retried_with_growing_pauses() -> None:
    async with bookie_cluster(4) as nodes:
        before, dead = await open_with_a_loss(nodes)
        other = nodes.bookie(before.segments[0].members[1])
        for each in nodes.bookies:
            each.judge_read = lambda _, entry: BookieCode.IO_ERROR if entry == 4 else None
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes, RepairConfig(open_grace_s=60)) as replicator:
            await asyncio.sleep(1800)
            assert replicator.counts.repairs_failed == len(other.fences)
            # Pauses of 20, 40, 80, 160 and then 300 s, each shortened to half at most.
            assert 6 <= len(other.fences) <= 15
            for each in nodes.bookies:
                each.judge_read = lambda *_: None
            await repaired(nodes, before.ledger, within_s=300)
            assert replicator.counts.ledgers_recovered == 1
        check_whole(nodes, await metadata_of(nodes, before.ledger))


async def test_t30_an_unreadable_sealed_segment_does_not_delay_the_recovery_of_the_tail() -> None:
    async with bookie_cluster(4) as nodes:
        async with nodes.process() as ledgers:
            before = await open_again(nodes, await written(ledgers, 20))
        bad, dead, _ = (nodes.bookie(member) for member in before.last_segment.members)
        for each in nodes.bookies:
            each.judge_read = lambda _, entry: BookieCode.IO_ERROR if entry == 4 else None
        await records_of(nodes).add_bad(before.ledger, bad.member, 4, 4)
        await lose(nodes, dead)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes, RepairConfig(open_grace_s=600)) as replicator:
            await noted(nodes, before.ledger, f"entry {before.ledger}:4")
            await asyncio.sleep(590)
            assert replicator.counts.repairs_failed >= 3
            assert (await metadata_of(nodes, before.ledger)).state is LedgerState.OPEN
            await asyncio.sleep(20)
            after = await metadata_of(nodes, before.ledger)
            assert (after.state, after.last_entry) == (LedgerState.CLOSED, 19)
            await wait_until(lambda: replicator.counts.members_replaced == 1, deadline_s=60)
            await noted(nodes, before.ledger, f"entry {before.ledger}:4")
            for each in nodes.bookies:
                each.judge_read = lambda *_: None
            await repaired(nodes, before.ledger, within_s=700)
        check_whole(nodes, await metadata_of(nodes, before.ledger))


async def test_t30_a_restart_of_a_bookie_with_an_old_bad_copy_leaves_the_writer_alone() -> None:
    """The writer is alive and idle."""
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        appender = await ledgers.create(newer_than=NO_LEDGER, custom={})
        appender.append_nowait([[payload_of(0)]])
        await wait_until(lambda: appender.confirmed == 0)
        bookie = nodes.bookie(appender.metadata.segments[0].members[0])
        # The record still names an earlier loss of the bookie.
        await records_of(nodes).add_lost(appender.ledger, [bookie.member])
        await records_of(nodes).add_bad(appender.ledger, bookie.member, 0, 0)
        async with replicating(nodes, RepairConfig(open_grace_s=60)) as replicator:
            await noted(nodes, appender.ledger, "waits for its writer")
            await asyncio.sleep(300)
            await nodes.unregister(bookie)
            await asyncio.sleep(30)
            await nodes.register(bookie, boot_epoch=2)
            await asyncio.sleep(300)
            assert (await metadata_of(nodes, appender.ledger)).state is LedgerState.OPEN
            await nodes.unregister(bookie)
            await wait_until(lambda: replicator.counts.ledgers_recovered == 1, deadline_s=90)


async def test_t30_a_bad_copy_on_a_bookie_that_is_not_declared_lost_leaves_the_writer_alone() -> (
    None
):
    async with bookie_cluster(4) as nodes:
        before, absent = await open_with_a_loss(nodes)
        await records_of(nodes).add_bad(before.ledger, absent.member, 0, 4)
        async with replicating(nodes, RepairConfig(open_grace_s=60)) as replicator:
            await noted(nodes, before.ledger, "waits for its writer")
            await asyncio.sleep(300)
            assert await metadata_of(nodes, before.ledger) == before
            await records_of(nodes).add_lost(before.ledger, [absent.member])
            await wait_until(lambda: replicator.counts.ledgers_recovered == 1, deadline_s=90)


async def test_t30_the_grace_begins_anew_when_the_bookie_was_listed_for_a_moment() -> None:
    async with bookie_cluster(4) as nodes:
        before, dead = await open_with_a_loss(nodes)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes, RepairConfig(open_grace_s=300)) as replicator:
            await noted(nodes, before.ledger, "waits for its writer")
            await asyncio.sleep(200)
            replicator._working.add(before.ledger)  # the repairs of other ledgers take all slots
            await nodes.register(dead)
            await wait_until(lambda: dead.member in replicator._services.directory.listed)
            await nodes.unregister(dead)
            await wait_until(lambda: dead.member not in replicator._services.directory.listed)
            replicator._working.clear()
            await asyncio.sleep(290)
            assert await metadata_of(nodes, before.ledger) == before
            await wait_until(lambda: replicator.counts.ledgers_recovered == 1, deadline_s=30)


async def test_t30_the_grace_begins_anew_when_the_bookie_returned_and_the_list_is_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bookie returned while the replicator could not reach the metadata store."""
    async with bookie_cluster(4) as nodes:
        before, dead = await open_with_a_loss(nodes)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes, RepairConfig(open_grace_s=60)) as replicator:
            await noted(nodes, before.ledger, "waits for its writer")
            directory = replicator._services.directory
            monkeypatch.setattr(directory, "_adopt", lambda *_: None)  # the list stays old
            await nodes.register(dead)
            await asyncio.sleep(300)
            assert dead.member not in directory.listed
            assert await metadata_of(nodes, before.ledger) == before
            await nodes.unregister(dead)
            await wait_until(lambda: replicator.counts.ledgers_recovered == 1, deadline_s=90)


async def test_t30_a_ledger_is_recovered_though_the_registration_of_a_bookie_is_unreadable() -> (
    None
):
    async with bookie_cluster(4) as nodes:
        before, dead = await open_with_a_loss(nodes)
        path = paths.bookie_available(dead.member.bookie)
        await nodes.store.put(path, b"what is this", expected=ABSENT)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes, RepairConfig(open_grace_s=60)) as replicator:
            await wait_until(lambda: replicator.counts.ledgers_recovered == 1, deadline_s=90)


async def test_a_ledger_keeps_its_writer_when_a_repair_could_not_help() -> None:
    async with bookie_cluster(3) as nodes:
        before, dead = await open_with_a_loss(nodes)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        async with replicating(nodes, RepairConfig(open_grace_s=60)):
            await asyncio.sleep(900)
            assert await metadata_of(nodes, before.ledger) == before


async def test_t30_a_writer_that_lives_replaces_the_bookie_and_keeps_its_ledger() -> None:
    async with bookie_cluster(5) as nodes, nodes.process() as ledgers, replicating(nodes) as there:
        appender = await ledgers.create(newer_than=NO_LEDGER, custom={})
        for entry in range(5):
            appender.append_nowait([[payload_of(entry)]])
        dead = nodes.bookie(appender.metadata.segments[0].members[0])
        await lose(nodes, dead)
        await records_of(nodes).add_lost(appender.ledger, [dead.member])
        appender.append_nowait([[payload_of(5)]])
        await repaired(nodes, appender.ledger)
        after = await appender.close()
        assert after.last_entry == 5
        assert all(dead.member not in part.members for part in after.segments)
        assert there.counts.ledgers_recovered == 0
        check_whole(nodes, after)


async def test_several_replicators_do_each_ledger_once() -> None:
    async with bookie_cluster(5) as nodes, nodes.process() as ledgers:
        made = [await written(ledgers, 5) for _ in range(40)]
        dead = nodes.bookies[0]
        await lose(nodes, dead)
        touched = [each for each in made if dead.member in each.segments[0].members]
        for each in touched:
            await records_of(nodes).add_lost(each.ledger, [dead.member])
        there: list[Replicator] = []
        async with replicating(nodes, seed=5) as one, replicating(nodes, seed=6) as two:
            there += [one, two]
            for each in touched:
                await repaired(nodes, each.ledger)
        for each in touched:
            check_whole(nodes, await metadata_of(nodes, each.ledger))
        replaced = [each.counts.members_replaced for each in there]
        assert sum(replaced) == len(touched)
        assert all(replaced), "both took part"


async def test_a_long_pass_ends_so_that_the_records_are_read_again() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers, asyncio.TaskGroup() as group:
        made = [await written(ledgers, 3) for _ in range(40)]
        dead, *others = nodes.bookies
        await lose(nodes, dead)
        touched = [each for each in made if dead.member in each.segments[0].members]
        for each in touched:
            await records_of(nodes).add_lost(each.ledger, [dead.member])

        async def store_slowly() -> None:
            while True:
                for bookie in others:
                    bookie.may_ack.clear()
                await asyncio.sleep(5.0)
                for bookie in others:
                    bookie.may_ack.set()
                await asyncio.sleep(0)

        slow = group.create_task(store_slowly())
        async with replicating(nodes, RepairConfig(ledgers_at_once=1)) as replicator:
            await asyncio.sleep(100)
            assert 10 < replicator.counts.ledgers_repaired < len(touched)
            assert 0 < replicator.under_replicated < len(touched)
            await asyncio.sleep(100)
            assert replicator.under_replicated == 0
        slow.cancel()


async def test_the_records_are_read_again_while_all_slots_copy_large_ledgers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicator, "PASS_S", 6.0)
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        *early, late = [await written(ledgers, 20, size=1_000_000) for _ in range(3)]
        await nodes.add_bookie()
        dead = nodes.bookies[0]
        await lose(nodes, dead)
        for each in early:
            await records_of(nodes).add_lost(each.ledger, [dead.member])
        config = RepairConfig(ledgers_at_once=1, copy_bytes_per_s=1 << 20)
        async with replicating(nodes, config) as running:
            await asyncio.sleep(1)
            assert running.under_replicated == 2
            await records_of(nodes).add_lost(late.ledger, [dead.member])
            await asyncio.sleep(10)
            assert running.under_replicated == 3
            assert running.counts.ledgers_repaired == 0
            for each in [*early, late]:
                await repaired(nodes, each.ledger)


async def test_copying_keeps_to_its_rate() -> None:
    loop = asyncio.get_running_loop()
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        before = await written(ledgers, 80, size=100_000)
        dead = nodes.bookie(before.segments[0].members[0])
        await lose(nodes, dead)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        began = loop.time()
        async with replicating(nodes, RepairConfig(copy_bytes_per_s=1 << 20)):
            await repaired(nodes, before.ledger)
        # 8 MB at 1 MiB/s; the last piece of 4 MiB may go at once.
        assert 3.0 <= loop.time() - began <= 12.0


async def test_entries_between_the_stripes_count_for_the_rate() -> None:
    loop = asyncio.get_running_loop()
    sizes = LedgerConfig(ensemble_size=5, write_quorum=2, ack_quorum=2)
    async with bookie_cluster(6) as nodes, nodes.process(sizes) as ledgers:
        before = await written(ledgers, 80, size=100_000)
        dead = nodes.bookie(before.segments[0].members[0])
        await lose(nodes, dead)
        await records_of(nodes).add_lost(before.ledger, [dead.member])
        began = loop.time()
        async with replicating(nodes, RepairConfig(copy_bytes_per_s=1 << 20)) as replicator:
            await repaired(nodes, before.ledger)
            assert replicator.counts.copied_bytes < 4_000_000
        # 8 MB are read at 1 MiB/s, for 3.2 MB of copies; the last piece of 2 MiB may go at once.
        assert 5.0 <= loop.time() - began <= 12.0
