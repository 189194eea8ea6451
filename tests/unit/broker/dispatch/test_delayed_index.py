"""The index of delayed entries, compared with a plain dict."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from magnetar.broker.dispatch.delayed_index import DUE_MS_MAX, DelayedIndex
from magnetar.broker.log.position import LATEST, Position

POSITIONS = st.builds(Position, st.sampled_from([1, 2, 5]), st.integers(0, 30))
ANY = POSITIONS | st.sampled_from([Position(0, 5), Position(2, -1), Position(2, 1 << 40), LATEST])
TIMES = st.integers(0, 40)


class Model(RuleBasedStateMachine):
    """Runs of eight entries, so that every rule meets some."""

    def __init__(self) -> None:
        super().__init__()
        self.index = DelayedIndex(8)
        self.times: dict[Position, int] = {}

    @rule(position=POSITIONS, due_ms=TIMES)
    def add(self, position: Position, due_ms: int) -> None:
        self.index.add(position, due_ms)
        self.times.setdefault(position, due_ms)

    @rule(ledger=st.sampled_from([1, 2, 5]), first=st.integers(0, 20), due_ms=TIMES)
    def add_some(self, ledger: int, first: int, due_ms: int) -> None:
        for entry in range(first, first + 10):
            self.add(Position(ledger, entry), due_ms + entry % 3)

    @rule(until_ms=TIMES, count=st.integers(1, 20))
    def take(self, until_ms: int, count: int) -> None:
        due = sorted((due_ms, at) for at, due_ms in self.times.items() if due_ms <= until_ms)
        expected = [position for _, position in due[:count]]
        assert self.index.take_due(until_ms, count) == expected
        for position in expected:
            del self.times[position]

    @rule(position=ANY)
    def discard(self, position: Position) -> None:
        assert self.index.discard(position) == (self.times.pop(position, None) is not None)

    @rule(position=ANY)
    def discard_through(self, position: Position) -> None:
        self.index.discard_through(position)
        self.times = {at: due_ms for at, due_ms in self.times.items() if at > position}

    @rule(position=ANY)
    def first_absent(self, position: Position) -> None:
        expected = position
        while expected in self.times:
            expected = Position(expected.ledger, expected.entry + 1)
        assert self.index.first_absent(position) == expected

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.times.clear()

    @invariant()
    def same(self) -> None:
        self.index.check()
        assert dict(self.index) == self.times
        assert len(self.index) == len(self.times)
        assert self.index.next_due_ms == min(self.times.values(), default=None)
        assert all(position in self.index for position in self.times)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_absurd_delivery_times_are_bounded() -> None:
    index = DelayedIndex()
    index.add(Position(1, 0), (1 << 63) - 1)
    index.add(Position(1, 1), -(1 << 63))
    assert dict(index) == {Position(1, 0): DUE_MS_MAX, Position(1, 1): 0}


@pytest.mark.parametrize("order", ["fixed delay", "random delays"])
def test_an_entry_takes_less_than_forty_bytes(order: str) -> None:
    chance = random.Random(1)
    tracemalloc.start()
    index = DelayedIndex()
    for number in range(20_000):
        due_ms = 1_700_000_000_000 + (number if order == "fixed delay" else chance.getrandbits(30))
        index.add(Position(number // 5_000, number % 5_000), due_ms)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / 20_000 < 40
    assert 0.5 < index.memory_bytes / used < 1.5


def test_expired_entries_with_late_times_do_not_gather_behind_an_early_one() -> None:
    index = DelayedIndex(64)
    for entry in range(64):  # this run stays and is due first
        index.add(Position(9, entry), 1)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(500):
            for entry in range(64 * number, 64 * number + 64):
                index.add(Position(1, entry), 1_000_000 + entry)
            index.discard_through(Position(1, 64 * number + 63))
        index.check()
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 100_000
    finally:
        tracemalloc.stop()
    assert len(index) == 64


def test_only_the_removal_of_a_single_entry_searches_the_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of each run joins later entries, so runs overlap. A subscription with a million
    random delays has more than a thousand runs, and asks for each entry."""
    chance, index = random.Random(1), DelayedIndex(32)
    for number in range(3_000):
        index.add(Position(number // 1_000, number % 1_000), number + chance.randint(0, 2_000))
        index.take_due(number, 10)
    copies = [list(run.left()) for run in index._runs]
    wide = sum(items[-1][0] > other[0][0] for items in copies for other in copies)
    assert wide > len(copies) ** 2 / 2, "the runs overlap"
    expected = dict(index)
    monkeypatch.setattr(index, "_find", None)
    for number in range(3_000):
        position = Position(number // 1_000, number % 1_000)
        assert (position in index) == (position in expected)
        assert index.first_absent(position) not in expected
        if position not in expected:
            assert not index.discard(position)
    again = DelayedIndex(32)
    monkeypatch.setattr(again, "_find", None)
    for items in (*copies, *copies):  # an interrupted move has stored both copies
        again.restore(items)
    assert dict(again) == {at: due_ms for items in copies for at, due_ms in items}
    again.check()
