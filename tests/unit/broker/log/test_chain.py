"""The chain, compared with a model that is a plain list of every position."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.log.chain import Chain
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.metadata.model import DroppedHead, EntryId, LedgerId, TopicLedger


def closed(ledger: int, first_index: int, entries: int) -> TopicLedger:
    return TopicLedger(LedgerId(ledger), first_index, entries, length=entries, closed_ms=1)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    ids = sorted(draw(st.sets(st.integers(2, 30), max_size=5)))
    chain = Chain()
    index = 0
    for place, ledger in enumerate(ids):
        is_last = place + 1 == len(ids)
        entries = draw(st.integers(0 if is_last else 1, 4))
        chain.open_ledger(TopicLedger(LedgerId(ledger), index))
        index += 2 * entries
        chain.grow(entries, next_index=index)
        if not is_last or (entries > 0 and draw(st.booleans())):
            chain.close_ledger(length=7, closed_ms=1)
    chain.check()
    return chain


def all_entries(chain: Chain) -> list[Position]:
    return [
        Position(record.ledger, entry)
        for record in chain.records
        for entry in range(chain.counts[record.ledger])
    ]


positions = st.builds(Position, st.integers(-1, 32), st.integers(-1, 5)) | st.sampled_from(
    [EARLIEST, LATEST]
)


@given(chains(), positions, positions)
def test_every_answer_agrees_with_the_list_of_entries(
    chain: Chain, one: Position, other: Position
) -> None:
    entries = all_entries(chain)
    place = bisect_left(entries, one)

    assert chain.entry_count == len(entries)
    assert chain.messages == 2 * len(entries)
    assert chain.is_entry(one) == (one in entries)
    assert chain.rank(one) == sum(position <= one for position in entries)
    assert chain.entries(after=one, through=other) == sum(one < p <= other for p in entries)
    assert chain.ceiling(one) == (entries[place] if place < len(entries) else chain.end)
    assert chain.confirmed.entry == -1 or chain.confirmed == entries[-1]
    following = [position for position in entries if position > one]
    if following:
        assert chain.next_position(one) == following[0]
    else:
        # A position beyond the last entry is no entry, and later reads from there miss no entry.
        beyond = chain.next_position(one)
        assert not chain.is_entry(beyond)
        assert not entries or beyond > entries[-1]
    before = entries[:place]
    if one != LATEST:
        expected = before[-1] if before else Position(one.ledger, -1)
        assert chain.previous_position(one) == expected


@given(chains())
def test_ranks_and_entries_are_one_to_one(chain: Chain) -> None:
    entries = all_entries(chain)
    assert [chain.at_rank(rank + 1) for rank in range(len(entries))] == entries
    assert [chain.rank(position) for position in entries] == list(range(1, len(entries) + 1))


def test_a_log_without_ledgers_has_no_entries() -> None:
    chain = Chain(next_index=5)
    assert chain.confirmed == EARLIEST
    assert chain.first == chain.end == Position(-1, 0)
    assert chain.ceiling(EARLIEST) == chain.ceiling(LATEST) == chain.end
    assert chain.previous_position(chain.end) == EARLIEST
    assert chain.first_index == chain.next_index == 5


def test_reading_continues_in_a_ledger_that_is_newer_than_the_place() -> None:
    chain = Chain()
    start = chain.end
    chain.open_ledger(TopicLedger(LedgerId(4), 0))
    assert chain.ceiling(start) == Position(4, 0)
    assert chain.confirmed == Position(4, -1)
    chain.grow(3, next_index=3)
    chain.close_ledger(length=10, closed_ms=99)
    tail = chain.end
    assert tail == Position(4, 3)
    chain.open_ledger(TopicLedger(LedgerId(9), 3))
    assert chain.confirmed == Position(4, 2)
    assert chain.ceiling(tail) == chain.next_position(chain.confirmed) == Position(9, 0)


def test_an_empty_ledger_is_dropped_when_it_closes() -> None:
    chain = Chain([closed(3, 0, 2)], next_index=2)
    chain.open_ledger(TopicLedger(LedgerId(8), 2))
    assert chain.close_ledger(length=0, closed_ms=1) is None
    chain.check()
    assert chain.newest == 3
    assert chain.confirmed == Position(3, 1)


def test_a_position_in_a_ledger_that_was_trimmed_counts_as_before_everything() -> None:
    chain = Chain([closed(5, 10, 4), closed(9, 14, 1)], next_index=15)
    gone = Position(2, 77)
    assert chain.entries(after=gone, through=chain.confirmed) == 5
    assert chain.next_position(gone) == Position(5, 0)
    assert chain.previous_position(gone) == Position(2, -1)
    assert chain.index_bounds(5) == (10, 14)
    assert chain.index_bounds(9) == (14, 15)


def test_positions_order_print_and_compare() -> None:
    assert EARLIEST < Position(0, -1) < Position(0, 0) < Position(1, -1) < LATEST
    assert str(Position(12, 3)) == "12:3"


@given(chains(), positions)
def test_dropping_the_head_leaves_the_rest_as_it_was(chain: Chain, through: Position) -> None:
    entries, indexes = all_entries(chain), [record.first_index for record in chain.records]
    next_index, confirmed, newest = chain.next_index, chain.confirmed, chain.newest
    counts = dict(chain.counts)
    goes = []
    for record in chain.records:
        last = Position(record.ledger, counts[record.ledger] - 1)
        if record.closed_ms == 0 or last > through:
            break
        goes.append(record.ledger)

    assert chain.drop_head(chain.droppable(through)) == tuple(goes)
    chain.check()
    kept = [position for position in entries if position.ledger not in goes]
    assert all_entries(chain) == kept
    assert chain.entry_count == len(kept)
    assert [record.first_index for record in chain.records] == indexes[len(goes) :]
    assert chain.next_index == next_index
    assert chain.newest == newest
    if not chain.records or chain.entry_count:
        assert chain.confirmed == confirmed, "what is confirmed stays confirmed"
    assert chain.first_index == [*indexes, next_index][len(goes)]
    for ledger in goes:
        assert not chain.is_entry(Position(ledger, 0))
        assert chain.ceiling(Position(ledger, 0)) == (kept[0] if kept else chain.end)
    assert chain.drop_head(chain.droppable(through)) == ()


def test_a_log_continues_after_everything_was_dropped() -> None:
    chain = Chain([closed(3, 0, 2), closed(8, 4, 3)], next_index=10)
    assert chain.drop_head(chain.droppable(LATEST)) == (3, 8)
    assert chain.records == ()
    assert chain.dropped == DroppedHead(LedgerId(8), EntryId(2), 10)
    assert chain.confirmed == Position(8, 2)
    assert chain.end == Position(8, 3)
    assert chain.messages == 0
    assert chain.entries(after=Position(8, 2), through=chain.confirmed) == 0
    chain.open_ledger(TopicLedger(LedgerId(9), 10))
    chain.grow(1, next_index=11)
    chain.check()
    assert chain.ceiling(Position(8, 3)) == chain.next_position(Position(8, 2)) == Position(9, 0)
    assert chain.entries(after=Position(8, 2), through=chain.confirmed) == 1


def test_the_open_ledger_is_never_dropped() -> None:
    chain = Chain([closed(3, 0, 2)], next_index=2)
    chain.open_ledger(TopicLedger(LedgerId(8), 2))
    chain.grow(4, next_index=6)
    assert chain.drop_head(chain.droppable(LATEST)) == (3,)
    assert chain.drop_head(chain.droppable(LATEST)) == ()
    assert [record.ledger for record in chain.records] == [8]
