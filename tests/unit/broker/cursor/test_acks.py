"""AckState compared with a Python set of acknowledged messages."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from magnetar.broker.cursor.acks import (
    AckedRange,
    AckState,
    Start,
    ack_set_bits,
    ack_set_words,
)
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.metadata.model import LedgerId, TopicLedger
from magnetar.protos.entry import BATCH_MESSAGES_MAX

BATCH = 5  # messages of each entry, for the acknowledgements of parts


def chain_of(*counts: int) -> Chain:
    """Ledgers 10, 20, … with these numbers of entries. The last one stays open."""
    chain = Chain()
    for number, count in enumerate(counts, start=1):
        if number > 1:
            chain.close_ledger(length=1, closed_ms=1)
        chain.open_ledger(TopicLedger(LedgerId(10 * number), chain.next_index))
        chain.grow(count, next_index=chain.next_index + count)
    return chain


def entries_of(chain: Chain) -> list[Position]:
    return [
        Position(record.ledger, entry)
        for record in chain.records
        for entry in range(chain.counts[record.ledger])
    ]


class AgainstASet(RuleBasedStateMachine):
    """Compare with a simple model: a set of (position, message) pairs, without marks, bitmaps or
    ledger ends."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = chain_of(3)
        self.state = AckState(self.chain, EARLIEST)
        self.acked: set[tuple[Position, int]] = set()
        self.ids = 1

    @rule(more=st.integers(1, 20))
    def log_grows(self, more: int) -> None:
        count = self.chain.counts[self.chain.newest] + more
        self.chain.grow(count, next_index=self.chain.next_index + more)

    @precondition(lambda self: self.chain.counts[self.chain.newest] > 0)
    @rule()
    def ledger_rolls(self) -> None:
        self.chain.close_ledger(length=1, closed_ms=1)
        self.ids += 1
        self.chain.open_ledger(TopicLedger(LedgerId(10 * self.ids), self.chain.next_index))

    @rule(data=st.data())
    def ack_one(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(entries_of(self.chain)))
        newly = self.state.on_ack(position)
        assert newly == (not self.whole(position))
        self.acked.update((position, message) for message in range(BATCH))

    @rule(data=st.data(), count=st.integers(1, 30))
    def ack_many_at_random(self, data: st.DataObject, count: int) -> None:
        order = data.draw(st.permutations(entries_of(self.chain)))
        for position in order[:count]:
            self.state.on_ack(position)
            self.acked.update((position, message) for message in range(BATCH))

    @rule(data=st.data(), remaining=st.sets(st.integers(0, BATCH - 1)))
    def ack_part(self, data: st.DataObject, remaining: set[int]) -> None:
        position = data.draw(st.sampled_from(entries_of(self.chain)))
        before = len(self.acked)
        was_partial = self.state.remaining(position) is not None
        changed = self.state.on_ack_batch_index(position, sum(1 << m for m in remaining))
        self.acked.update((position, m) for m in range(BATCH) if m not in remaining)
        assert changed == (len(self.acked) > before) or not was_partial

    @rule(data=st.data())
    def ack_all_up_to(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(entries_of(self.chain)))
        self.state.on_ack_cumulative(position)
        for earlier in entries_of(self.chain):
            if earlier <= position:
                self.acked.update((earlier, message) for message in range(BATCH))

    @rule(ledger=st.integers(0, 60), ahead=st.integers(0, 50))
    def acks_of_what_is_not_there_do_nothing(self, ledger: int, ahead: int) -> None:
        position = Position(ledger, self.chain.counts.get(ledger, 0) + ahead)
        assert not self.state.on_ack(position)
        assert not self.state.on_ack_batch_index(position, 0)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from([*entries_of(self.chain), self.chain.end]))
        self.state.reset(Start(self.chain.previous_position(start)))
        self.acked = {
            (p, message) for p in entries_of(self.chain) if p < start for message in range(BATCH)
        }

    @rule()
    def store_and_restore(self) -> None:
        restored = AckState(self.chain, self.state.mark_delete)
        for ledger, first, bits in self.state.bitmap_slices():
            restored.on_acked_bits(ledger, first, bits)
        for position, remaining in self.state.partial.items():
            restored.on_ack_batch_index(position, remaining)
        assert list(restored.ranges()) == list(self.state.ranges())
        assert restored.partial == self.state.partial
        self.state = restored

    def whole(self, position: Position) -> bool:
        return all((position, message) in self.acked for message in range(BATCH))

    @invariant()
    def agrees(self) -> None:
        self.state.check()
        entries = entries_of(self.chain)
        whole = [position for position in entries if self.whole(position)]
        assert [p for p in entries if self.state.is_acked(p)] == whole
        mark = self.state.mark_delete
        assert all(position in whole for position in entries if position <= mark)
        beyond = sum(count for _, count in self.state.acked_beyond_mark())
        assert beyond == sum(position > mark for position in whole)
        derived = [
            Position(part.ledger, entry)
            for part in self.state.ranges()
            for entry in range(part.first, part.last + 1)
        ]
        assert derived == [position for position in whole if position > mark]
        for position in entries:
            acked = {message for message in range(BATCH) if (position, message) in self.acked}
            remaining = self.state.remaining(position)
            if remaining is not None:
                assert {m for m in range(BATCH) if not remaining >> m & 1} == acked
            elif not self.whole(position):
                assert not acked
        unacked = [position for position in entries if position not in whole]
        found_all = [self.state.nth_unacked(number + 1) for number in range(len(unacked) + 1)]
        assert found_all == [*unacked, None]
        for start in (*entries, EARLIEST):
            left = [p for p in entries if p >= start and p not in whole]
            found = self.state.first_unacked(start)
            assert found == left[0] if left else not self.chain.is_entry(found)


AgainstASet.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestAgainstASet = AgainstASet.TestCase


def test_acks_in_order_use_no_bitmap() -> None:
    state = AckState(chain_of(1000), EARLIEST)
    for entry in range(1000):
        assert state.on_ack(Position(10, entry)) is True
    assert state.mark_delete == Position(10, 999)
    assert list(state.bitmap_slices()) == []


def test_mark_crosses_ledgers_when_the_gap_closes() -> None:
    state = AckState(chain_of(2, 2, 2), EARLIEST)
    for position in ((20, 0), (20, 1), (30, 0), (10, 1)):
        state.on_ack(Position(*position))
    assert state.mark_delete == EARLIEST
    assert list(state.ranges()) == [
        AckedRange(10, 1, 1),
        AckedRange(20, 0, 1),
        AckedRange(30, 0, 0),
    ]
    state.on_ack(Position(10, 0))
    assert state.mark_delete == Position(30, 0)


def test_cumulative_ack_beyond_the_end_stops_at_last_confirmed_entry() -> None:
    state = AckState(chain_of(2, 3), EARLIEST)
    assert state.on_ack_cumulative(Position(10, 77))
    assert state.mark_delete == Position(10, 1)
    assert state.on_ack_cumulative(LATEST)
    assert state.mark_delete == Position(20, 2)
    assert not state.on_ack_cumulative(Position(20, -1))


def test_stored_bits_beyond_the_end_of_the_log_are_ignored() -> None:
    state = AckState(chain_of(4), EARLIEST)
    state.on_acked_bits(10, 0, b"\xfc\xff")
    state.on_acked_bits(11, 0, b"\xff")
    state.check()
    assert list(state.ranges()) == [AckedRange(10, 2, 3)]


@given(st.integers(0, (1 << 200) - 1))
def test_ack_set_words_convert_back_to_the_same_bits(bits: int) -> None:
    words = ack_set_words(bits)
    assert ack_set_bits(words) == bits
    assert all(-(1 << 63) <= word < 1 << 63 for word in words)
    assert not words or words[-1] != 0
    assert ack_set_bits([word % (1 << 64) for word in words]) == bits


@pytest.mark.usefixtures("no_collection")
@pytest.mark.usefixtures("no_collection")
def test_long_ack_set_converts_in_linear_time() -> None:
    words = [-1] * 400_000  # the largest command that fits into a frame
    began_s = time.process_time()
    bits = ack_set_bits(words)
    assert ack_set_words(bits) == tuple(words)
    assert time.process_time() - began_s < 0.5  # 0.02 s; the quadratic form took 20 minutes


def test_replayed_ack_set_is_cut_at_the_largest_batch() -> None:
    state = AckState(chain_of(4), EARLIEST)
    state.on_ack_batch_index(Position(10, 1), (1 << 2_560_000) - 1)
    assert state.remaining(Position(10, 1)) == (1 << BATCH_MESSAGES_MAX) - 1
    state.on_ack_batch_index(Position(10, 2), 1 << BATCH_MESSAGES_MAX)
    assert state.is_acked(Position(10, 2))


def test_size_of_a_batch_cuts_its_ack_set() -> None:
    state = AckState(chain_of(4), EARLIEST)
    state.on_ack_batch_index(Position(10, 1), 0b11101)
    state.on_ack_batch_index(Position(10, 2), 0b100)
    assert state.on_batch_size(Position(10, 1), 3)
    assert state.remaining(Position(10, 1)) == 0b101
    assert not state.on_batch_size(Position(10, 1), 3)
    assert state.on_batch_size(Position(10, 2), 2)
    assert state.is_acked(Position(10, 2))
    assert not state.on_batch_size(Position(10, 3), 2)
    state.check()
