from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consuming.redelivery import (
    DUE_AT_ONCE_MAX,
    REDELIVERY_TICK_S,
    STALE_TIMES_MAX,
    Redeliveries,
)
from magnetar.client.policies import MultiplierRedeliveryBackoff

STEP = st.tuples(st.sampled_from(["add", "discard", "through", "due"]), st.integers(0, 9))


@given(st.lists(STEP, max_size=80))
def test_due_entries_equal_those_of_a_table_of_times(steps: list[tuple[str, int]]) -> None:
    machine = Redeliveries(delay_s=5.0)
    table: dict[tuple[int, int], float] = {}
    for now, (step, number) in enumerate(steps):
        key = (1, number)
        match step:
            case "add":
                machine.add(key, float(now))
                table[key] = now + 5.0
            case "discard":
                machine.discard([key])
                table.pop(key, None)
            case "through":
                machine.discard_through(key)
                table = {one: at for one, at in table.items() if one > key}
            case _:
                due = {one for one, at in table.items() if at <= now}
                assert set(machine.due(float(now))) == due
                table = {one: at for one, at in table.items() if one not in due}
        machine.check()
        assert machine.timer_at() == min(table.values(), default=None)


def test_entries_due_within_a_tick_are_requested_together() -> None:
    machine = Redeliveries(delay_s=1.0)
    machine.add((1, 1), 0.0)
    machine.add((1, 2), REDELIVERY_TICK_S * 0.4)
    machine.add((1, 3), REDELIVERY_TICK_S * 0.6)
    assert machine.due(1.0) == [(1, 1), (1, 2)]
    assert machine.due(1.0) == []
    machine.clear()
    assert machine.timer_at() is None


def test_many_due_entries_are_returned_in_several_calls() -> None:
    machine = Redeliveries(delay_s=1.0)
    keys = [(1, number) for number in range(2 * DUE_AT_ONCE_MAX + 1)]
    for key in keys:
        machine.add(key, 0.0)
    for first in (0, DUE_AT_ONCE_MAX, 2 * DUE_AT_ONCE_MAX):
        assert machine.timer_at() == 1.0
        assert machine.due(1.0) == keys[first : first + DUE_AT_ONCE_MAX]
        machine.check()
    assert machine.timer_at() is None


def test_an_ack_timeout_with_backoff_adds_both() -> None:
    """The delays are those of Pulsar for a timeout of 10 s, and a backoff of 1 s to 60 s with the
    factor 2."""
    backoff = MultiplierRedeliveryBackoff(1000, 60_000, 2)
    delays: list[float | None] = []
    for count in range(8):
        machine = Redeliveries(10.0, backoff=backoff)
        machine.add((1, 1), 0.0, count)
        delays.append(machine.timer_at())
    assert delays == [11, 12, 14, 18, 26, 42, 70, 70]


def test_a_shorter_delay_overtakes_a_longer_one() -> None:
    machine = Redeliveries(0.0, backoff=MultiplierRedeliveryBackoff(1000, 60_000, 2))
    machine.add((1, 1), 0.0, 5)
    machine.add((1, 2), 1.0, 0)
    assert machine.due(2.0) == [(1, 2)]
    assert machine.timer_at() == 32.0


def test_ticks_gather_entries() -> None:
    machine = Redeliveries(10.0, period_s=1.0)
    machine.add((1, 1), 0.2)
    machine.add((1, 2), 0.9)
    assert machine.timer_at() == 11.0
    assert machine.due(11.0) == [(1, 1), (1, 2)]


def test_times_of_discarded_entries_do_not_accumulate() -> None:
    machine = Redeliveries(10.0)
    for number in range(10_000):
        machine.add((1, number), float(number))
        machine.discard([(1, number)])
        assert machine.stale_times <= STALE_TIMES_MAX
    machine.check()


def test_times_of_entries_added_again_with_the_same_due_time_do_not_accumulate() -> None:
    """The messages of one batch, received one by one within a tick, all add the same entry."""
    machine = Redeliveries(10.0, period_s=1.0)
    for number in range(3 * STALE_TIMES_MAX):
        if number == STALE_TIMES_MAX:
            machine.discard([(1, 1)])
        machine.add((1, 1), 5.5)
        assert machine.stale_times <= STALE_TIMES_MAX + 1
    machine.check()
    assert machine.due(16.0) == [(1, 1)]
    assert machine.due(16.0) == []


@pytest.mark.parametrize("way", ["discard", "through", "due"])
def test_stale_times_are_dropped_when_few_entries_are_left(way: str) -> None:
    machine = Redeliveries(0.0, backoff=MultiplierRedeliveryBackoff(1000, 60_000, 2))
    keys = [(1, number) for number in range(2 * STALE_TIMES_MAX)]
    for redelivery_count in (5, 0):  # the first times, which are later, become stale
        for key in keys:
            machine.add(key, 0.0, redelivery_count)
    machine.add((2, 0), 0.0, 3)
    assert machine.stale_times == len(keys)
    match way:
        case "discard":
            machine.discard(keys)
        case "through":
            machine.discard_through(keys[-1])
        case _:
            assert machine.due(1.0) == keys
    machine.check()
    assert machine.timer_at() == 8.0


class CountedKey(tuple[int, int]):
    """A key that counts its comparisons."""

    compared = 0

    def __lt__(self, other: tuple[int, ...]) -> bool:
        CountedKey.compared += 1
        return super().__lt__(other)

    def __le__(self, other: tuple[int, ...]) -> bool:
        CountedKey.compared += 1
        return super().__le__(other)


def test_cost_of_many_cumulative_discards_does_not_grow_with_the_waiting_entries() -> None:
    """A consumer receives many messages, and then acknowledges each of them cumulatively."""
    machine, count = Redeliveries(10.0), 4096
    keys = [CountedKey((1, number)) for number in range(count)]
    for key in keys:
        machine.add(key, 0.0)
    CountedKey.compared = 0
    for key in keys:
        machine.discard_through(key)
    assert machine.timer_at() is None
    assert CountedKey.compared < 40 * count


def test_keys_of_discarded_entries_do_not_accumulate() -> None:
    machine = Redeliveries(10.0)
    machine.discard_through((0, 0))
    for number in range(10_000):
        machine.add((1, number), 0.0)
        machine.discard([(1, number)])
        machine.check()
