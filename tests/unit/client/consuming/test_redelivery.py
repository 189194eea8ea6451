from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consuming.redelivery import REDELIVERY_TICK_S, Redeliveries

STEP = st.tuples(st.sampled_from(["add", "discard", "through", "due"]), st.integers(0, 9))


@given(st.lists(STEP, max_size=80))
def test_against_a_table_of_times(steps: list[tuple[str, int]]) -> None:
    machine = Redeliveries(delay_s=5.0)
    table: dict[tuple[int, int], float] = {}
    for now, (step, number) in enumerate(steps):
        key = (1, number)
        match step:
            case "add":
                machine.add(key, float(now))
                table[key] = now + 5.0
            case "discard":
                machine.discard(key)
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
