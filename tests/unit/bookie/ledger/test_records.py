"""Ledger records: each step takes effect once, also when requests or replies are lost."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.ledger_rig import member, open_metadata
from support import wait_until

from magnetar.bookie.ledger.errors import LedgerFenced, LedgerNotFound
from magnetar.bookie.ledger.quorum import Quorum
from magnetar.bookie.ledger.records import LedgerRecords
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_ledger
from magnetar.metadata.errors import OutcomeUnknown, Unavailable
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.model import EntryId, LedgerId, LedgerMetadata, LedgerState

if TYPE_CHECKING:
    from collections.abc import Callable

B = [member(number) for number in range(6)]
NEW = open_metadata(Quorum(3, 3, 2), B[:3])
CLAIMED = replace(NEW, state=LedgerState.IN_RECOVERY)


def always() -> bool:
    return True


class RecordsRig:
    """Records over a store. `faults` holds the faults of the next requests, in order."""

    def __init__(self, *, timeout_s: float = 2.0) -> None:
        self.tree = MemoryTree()
        self.faults: list[Fault | None] = []
        self.store = MemoryStore(self.tree, faults=self._fault)
        self.records = LedgerRecords(self.store, timeout_s=timeout_s)
        self.elsewhere = LedgerRecords(MemoryStore(self.tree), timeout_s=2.0)

    async def go_away_after_the_faults(self) -> None:
        """Suspend the store after the faults, so that the outcome stays unknown."""
        await wait_until(lambda: not self.faults)
        self.store.suspend()

    def _fault(self, operation: str, path: str) -> Fault | None:
        return self.faults.pop(0) if self.faults else None


async def create(rig: RecordsRig) -> None:
    await rig.records.create(NEW)


async def change(rig: RecordsRig) -> None:
    await rig.records.change_ensemble(NEW, 5, B[1:4], wanted=always)


async def claim(rig: RecordsRig) -> None:
    assert (await rig.records.claim(NEW.ledger)).state is LedgerState.IN_RECOVERY


async def close(rig: RecordsRig) -> None:
    await rig.records.close(NEW, 4, 99)


async def delete(rig: RecordsRig) -> None:
    await rig.records.delete(NEW.ledger)


def closed(metadata: LedgerMetadata) -> LedgerMetadata:
    return replace(metadata, state=LedgerState.CLOSED, last_entry=EntryId(4), length=99)


MOVED = replace(closed(NEW), segments=(replace(NEW.segments[0], members=(B[0], B[3], B[2])),))
WIDE = replace(
    closed(NEW),
    ensemble_size=4,
    write_quorum=4,
    segments=(replace(NEW.segments[0], members=tuple(B[:4])),),
    under_replicated=True,
)


async def move(rig: RecordsRig) -> None:
    assert await rig.records.replace_member(NEW.ledger, 0, B[1], B[3], wanted=always) == MOVED


async def widen(rig: RecordsRig) -> None:
    assert await rig.records.widen(closed(NEW), [B[3]], write_quorum=5, wanted=always) == WIDE


STEPS = {
    "create": (None, create, NEW),
    "change": (NEW, change, NEW.with_ensemble(EntryId(5), B[1:4])),
    "claim": (NEW, claim, CLAIMED),
    "close": (NEW, close, closed(NEW)),
    "move": (closed(NEW), move, MOVED),
    "widen": (closed(NEW), widen, WIDE),
    "delete": (NEW, delete, None),
}


@pytest.mark.parametrize("step", list(STEPS))
async def test_t44_every_step_survives_faults_of_every_request(step: str) -> None:
    """Put faults at any of the first four requests. The step still takes effect exactly once."""
    before, act, after = STEPS[step]

    async def once(faults: list[Fault | None]) -> None:
        rig = RecordsRig()
        if before is not None:
            await rig.elsewhere.create(before)
        rig.faults = faults
        await act(rig)
        assert await rig.elsewhere.get(NEW.ledger) == after, faults

    for place in range(4):
        for fault in Fault:
            await once([None] * place + [fault])
    await once([Fault.REPLY_LOST] * 3)


async def test_create_under_an_id_of_another_creator_raises_an_assertion_error() -> None:
    rig = RecordsRig()
    await rig.records.create(replace(NEW, creator_token=99))
    with pytest.raises(AssertionError, match="twice"):
        await rig.records.create(NEW)


@pytest.mark.parametrize("state", ["claimed", "closed", "deleted", "other ensemble"])
async def test_t12_an_ensemble_change_is_refused_after_a_takeover(
    state: str,
) -> None:
    rig = RecordsRig()
    await rig.records.create(NEW)
    match state:
        case "claimed":
            await rig.elsewhere.claim(NEW.ledger)
        case "closed":
            await rig.elsewhere.close(NEW, -1, 0)
        case "deleted":
            await rig.elsewhere.delete(NEW.ledger)
        case _:
            await rig.elsewhere.change_ensemble(NEW, 3, B[2:5], wanted=always)
    before = await rig.elsewhere.get(NEW.ledger)
    with pytest.raises(LedgerFenced):
        await rig.records.change_ensemble(NEW, 5, B[1:4], wanted=always)
    assert await rig.elsewhere.get(NEW.ledger) == before


async def test_a_follower_that_lags_does_not_make_a_writer_believe_that_it_was_fenced() -> None:
    """The client reconnects to a follower that does not show the client's own change yet."""

    rig = RecordsRig()
    await rig.records.create(NEW)
    first = await rig.records.change_ensemble(NEW, 5, B[1:4], wanted=always)
    late = MemoryStore(rig.tree)
    await late.get(paths.ledger(NEW.ledger))
    late.fall_behind()
    records = LedgerRecords(late, timeout_s=2.0)
    second = await rig.records.change_ensemble(first, 7, B[2:5], wanted=always)
    third = await records.change_ensemble(second, 9, B[:3], wanted=always)
    assert [part.first_entry for part in third.segments] == [0, 5, 7, 9]


async def test_w1_an_old_equal_ensemble_does_not_count_as_the_wanted_change() -> None:
    """The writer changes its ensemble from A to B and back to A, without a confirmed entry. A
    lagging follower still shows the first A. The writer must not count this as its second
    change."""

    rig = RecordsRig()
    await rig.records.create(NEW)
    late = MemoryStore(rig.tree)
    await late.get(paths.ledger(NEW.ledger))
    late.fall_behind()
    away = await rig.records.change_ensemble(NEW, 0, B[1:4], wanted=always)
    records = LedgerRecords(late, timeout_s=2.0)
    back = await records.change_ensemble(away, 0, B[:3], wanted=always)
    assert back.last_segment == NEW.last_segment
    assert await rig.elsewhere.get(NEW.ledger) == back


async def test_sealed_segments_are_taken_from_the_store() -> None:
    """A replicator moved replicas of a sealed segment of an open ledger."""

    rig = RecordsRig()
    await rig.records.create(NEW)
    known = await rig.records.change_ensemble(NEW, 5, B[1:4], wanted=always)
    moved = replace(
        known, segments=(replace(known.segments[0], members=tuple(B[3:6])), known.segments[1])
    )
    await rig.store.put(paths.ledger(NEW.ledger), encode_ledger(moved), expected=1)
    after = await rig.records.change_ensemble(known, 8, B[:3], wanted=always)
    assert after.segments[:2] == moved.segments
    assert after.segments[2].first_entry == 8


async def test_a_wanted_change_is_awaited_until_its_outcome_is_known() -> None:
    rig = RecordsRig(timeout_s=0.15)
    await rig.records.create(NEW)
    rig.faults = [None, Fault.REPLY_LOST]
    looks = 0

    def wanted() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            rig.store.reconnect()
        return True

    async with asyncio.TaskGroup() as group:
        group.create_task(rig.go_away_after_the_faults())
        metadata = await rig.records.change_ensemble(NEW, 5, B[1:4], wanted=wanted)
    assert looks >= 2
    assert metadata.last_segment.members == tuple(B[1:4])


async def test_a_change_that_was_never_sent_raises_unavailable() -> None:
    rig = RecordsRig(timeout_s=0.1)
    await rig.records.create(NEW)
    rig.store.suspend()
    with pytest.raises(Unavailable):
        await rig.records.change_ensemble(NEW, 5, B[1:4], wanted=always)
    rig.store.reconnect()
    assert await rig.records.get(NEW.ledger) == NEW


async def test_an_unwanted_change_with_an_unknown_outcome_raises_outcome_unknown() -> None:
    rig = RecordsRig(timeout_s=0.1)
    await rig.records.create(NEW)
    rig.faults = [None, Fault.REQUEST_LOST]
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.go_away_after_the_faults())
        with pytest.raises(OutcomeUnknown):
            await rig.records.change_ensemble(NEW, 5, B[1:4], wanted=lambda: False)


async def test_a_writer_closes_only_a_ledger_that_is_open_or_closed_at_the_same_entry() -> None:
    rig = RecordsRig()
    await rig.records.create(NEW)
    first = await rig.records.close(NEW, 4, 99)
    assert await rig.records.close(NEW, 4, 99) == first
    with pytest.raises(LedgerFenced):
        await rig.records.close(NEW, 3, 80)
    await rig.records.delete(NEW.ledger)
    with pytest.raises(LedgerFenced):
        await rig.records.close(NEW, 4, 99)
    await rig.records.create(NEW)
    await rig.elsewhere.claim(NEW.ledger)
    with pytest.raises(LedgerFenced):
        await rig.records.close(NEW, 4, 99)


async def test_r7_a_recoverer_adopts_the_end_that_another_one_has_recorded() -> None:
    rig = RecordsRig()
    await rig.records.create(NEW)
    await rig.records.claim(NEW.ledger)
    one = await rig.elsewhere.close_recovered(NEW.ledger, closed)
    merge: Callable[[LedgerMetadata], LedgerMetadata] = lambda stored: replace(  # noqa: E731
        stored, state=LedgerState.CLOSED, last_entry=EntryId(7), length=1
    )
    assert await rig.records.close_recovered(NEW.ledger, merge) == one
    assert one.last_entry == 4


async def test_claim_and_close_of_an_unknown_ledger_raise_an_error() -> None:
    rig = RecordsRig()
    with pytest.raises(LedgerNotFound):
        await rig.records.claim(LedgerId(5))
    with pytest.raises(LedgerNotFound):
        await rig.records.close_recovered(LedgerId(5), closed)
    assert await rig.records.get(LedgerId(5)) is None


async def test_claim_finds_a_ledger_that_the_follower_does_not_show_yet() -> None:
    rig = RecordsRig()
    late = MemoryStore(rig.tree)
    await late.get(paths.ledger(NEW.ledger))
    late.fall_behind()
    await rig.records.create(NEW)
    claimed = await LedgerRecords(late, timeout_s=2.0).claim(NEW.ledger)
    assert claimed.state is LedgerState.IN_RECOVERY


async def test_t26_a_member_is_replaced_only_in_a_seat_that_it_still_has() -> None:
    rig = RecordsRig()
    grown = NEW.with_ensemble(EntryId(3), B[1:4])
    await rig.records.create(grown)
    replaced = await rig.records.replace_member(NEW.ledger, 0, B[0], B[4], wanted=always)
    assert replaced is not None
    assert [each.members for each in replaced.segments] == [(B[4], B[1], B[2]), tuple(B[1:4])]
    for first, old, new in (
        (0, B[0], B[5]),  # another process was first
        (0, B[1], B[2]),  # this member already has the seat
        (7, B[1], B[5]),  # no such segment
    ):
        assert await rig.records.replace_member(NEW.ledger, first, old, new, wanted=always) is None
    assert await rig.records.get(NEW.ledger) == replaced
    assert await rig.records.replace_member(LedgerId(99), 0, B[1], B[5], wanted=always) is None
    # Only the writer may change the last segment of an open ledger.
    with pytest.raises(AssertionError, match="being written"):
        await rig.records.replace_member(NEW.ledger, 3, B[1], B[5], wanted=always)


async def test_a_repair_that_has_lost_its_lock_changes_nothing() -> None:
    rig = RecordsRig()
    await rig.records.create(closed(NEW))
    lost = rig.records.replace_member(NEW.ledger, 0, B[0], B[4], wanted=lambda: False)
    assert await lost is None
    wide = rig.records.widen(closed(NEW), [B[3]], write_quorum=4, wanted=lambda: False)
    assert await wide is None
    assert await rig.records.get(NEW.ledger) == closed(NEW)


async def test_a_reborn_bookie_takes_its_own_seat_and_no_other() -> None:
    rig = RecordsRig()
    await rig.records.create(closed(NEW))
    reborn = member(1, incarnation=9)
    assert await rig.records.replace_member(NEW.ledger, 0, B[0], reborn, wanted=always) is None
    replaced = await rig.records.replace_member(NEW.ledger, 0, B[1], reborn, wanted=always)
    assert replaced is not None
    assert replaced.segments[0].members == (B[0], reborn, B[2])


async def test_a_ledger_that_changed_is_not_widened() -> None:
    rig = RecordsRig()
    await rig.records.create(closed(NEW))
    await rig.records.replace_member(NEW.ledger, 0, B[1], B[4], wanted=always)
    assert await rig.records.widen(closed(NEW), [B[3]], write_quorum=4, wanted=always) is None
    stored = await rig.records.get(NEW.ledger)
    assert stored is not None
    wide = await rig.records.widen(stored, [B[3]], write_quorum=4, wanted=always)
    assert wide is not None
    assert not wide.under_replicated
