"""The plan of a ledger's repair, compared with simple models that look at each entry."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.ledger.quorum import Quorum
from magnetar.bookie.repair.plan import (
    Move,
    Rewrite,
    Widen,
    is_narrow,
    missing,
    plan_repair,
    sealed,
    striped,
)
from magnetar.metadata.model import (
    BookieId,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    Segment,
)
from magnetar.metadata.under_replication import BadCopy, UnderReplication

B = [Member(BookieId(f"b{number}"), f"{number:032x}") for number in range(9)]
SIZES = [Quorum(3, 3, 2), Quorum(4, 3, 2), Quorum(5, 2, 2), Quorum(2, 2, 2), Quorum(1, 1, 1)]


def ledger(
    quorum: Quorum, starts: list[int], state: LedgerState, last: int | None
) -> LedgerMetadata:
    segments = tuple(
        Segment(EntryId(start), tuple(B[(n + step) % 9] for step in range(quorum.ensemble_size)))
        for n, start in enumerate(starts)
    )
    closed = state is LedgerState.CLOSED
    return LedgerMetadata(
        ledger=LedgerId(1),
        state=state,
        ensemble_size=quorum.ensemble_size,
        write_quorum=quorum.write_quorum,
        ack_quorum=quorum.ack_quorum,
        segments=segments,
        master_key=1,
        creator_token=1,
        created_ms=1,
        last_entry=EntryId(last) if closed and last is not None else None,
        length=(0 if last == -1 else 9) if closed else None,
    )


@st.composite
def ledgers(draw: st.DrawFn) -> LedgerMetadata:
    starts = [0, *sorted(draw(st.sets(st.integers(1, 30), max_size=3)))]
    last = draw(st.integers(starts[-1] - 1, 40))
    return ledger(draw(st.sampled_from(SIZES)), starts, draw(st.sampled_from(LedgerState)), last)


@given(ledgers(), st.sets(st.sampled_from(B)), st.booleans())
def test_the_plan_moves_exactly_the_sealed_copies_of_lost_members(
    metadata: LedgerMetadata, gone: set[Member], wide: bool
) -> None:
    record = UnderReplication(1, frozenset(gone))
    plan = plan_repair(metadata, record, frozenset(gone), copies_wanted=3)
    closed = metadata.state is LedgerState.CLOSED
    end = metadata.last_entry if closed else metadata.last_segment.first_entry - 1
    assert end is not None
    quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
    copies = {
        (entry, metadata.segment_of(EntryId(entry)).members[seat])
        for entry in range(end + 1)
        for seat in quorum.write_order(entry)
    }
    moved = {
        (entry, step.lost)
        for step in plan.steps
        if isinstance(step, Move)
        for run in striped(metadata, step.seat, step.first, step.last)
        for entry in run
    }
    assert moved == {(entry, member) for entry, member in copies if member in gone}
    # Each seat of a lost member in a sealed segment gets a new member, even without entries.
    parts = metadata.segments if closed else metadata.segments[:-1]
    seats = {(part.first_entry, each) for part in parts for each in part.members if each in gone}
    assert {(step.first, step.lost) for step in plan.steps if isinstance(step, Move)} == seats
    tail = () if closed else metadata.last_segment.members
    assert set(plan.unwritable) == gone & set(tail)
    assert (not plan.steps and not plan.unwritable) == (not seats and not plan.unwritable)


@given(ledgers(), st.sampled_from(B), st.integers(0, 40), st.integers(0, 20))
def test_bad_copies_are_rewritten_where_they_belong(
    metadata: LedgerMetadata, member: Member, first: int, count: int
) -> None:
    bad = BadCopy(member, EntryId(first), EntryId(first + count))
    plan = plan_repair(metadata, UnderReplication(1, bad=(bad,)), frozenset(), copies_wanted=3)
    rewritten = {
        entry
        for step in plan.steps
        if isinstance(step, Rewrite)
        for run in striped(metadata, step.seat, step.first, step.last)
        for entry in run
    }
    ranges = [(begin, end) for begin, end, _ in sealed(metadata)]
    quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)

    def belongs(entry: int) -> bool:
        members = metadata.segment_of(EntryId(entry)).members
        return any(members[seat] == member for seat in quorum.write_order(entry))

    assert rewritten == {
        entry
        for begin, end in ranges
        for entry in range(begin, end + 1)
        if first <= entry <= first + count and belongs(entry)
    }
    # No plan writes to a replaced member.
    gone = plan_repair(
        metadata, UnderReplication(1, bad=(bad,)), frozenset({member}), copies_wanted=3
    )
    assert not any(isinstance(step, Rewrite) for step in gone.steps)


def test_only_closed_ledgers_that_were_made_narrow_are_widened() -> None:
    narrow = replace(ledger(Quorum(2, 2, 2), [0], LedgerState.CLOSED, 5), under_replicated=True)
    assert is_narrow(narrow, 3)
    plan = plan_repair(narrow, UnderReplication(1, narrow=True), frozenset(), copies_wanted=3)
    assert plan.steps == (Widen(2),)
    assert not is_narrow(narrow, 2)
    assert not is_narrow(replace(narrow, under_replicated=False), 3)
    still_open = replace(narrow, state=LedgerState.OPEN, last_entry=None, length=None)
    assert not is_narrow(still_open, 3)


runs = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=8)


def as_runs(numbers: set[int]) -> list[range]:
    found: list[range] = []
    for number in sorted(numbers):
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_missing_is_the_difference_of_expected_and_held(expected: set[int], held: set[int]) -> None:
    found = missing(iter(as_runs(expected)), as_runs(held))
    assert {entry for run in found for entry in run} == expected - held
    assert sum(map(len, found)) == len(expected - held)
    assert all(found)
