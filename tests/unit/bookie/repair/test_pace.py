"""A pace keeps to its rate for requests of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.repair.config import RepairConfig
from magnetar.bookie.repair.pace import Pace


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 3)), max_size=20))
def test_the_amount_taken_fits_into_the_elapsed_time(takes: list[tuple[float, float]]) -> None:
    pace, now, taken = Pace(10), 0.0, 0.0
    for amount, idle in takes:
        now += idle
        now += pace.delay_s(amount, now)
        assert taken <= 10 * now + 1e-6, "before this one is taken, the others have had their time"
        taken += amount


def test_idle_time_does_not_allow_a_later_burst() -> None:
    pace = Pace(10)
    assert pace.delay_s(10, 100.0) == 0
    assert pace.delay_s(10, 100.0) == 1
    assert pace.delay_s(10, 200.0) == 0
    assert pace.delay_s(10, 200.5) == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audit_period_s", 0),
        ("check_period_s", -1),
        ("scan_ledgers_per_s", 0),
        ("ledgers_at_once", 0),
        ("lost_bookie_delay_s", -1),
        ("lost_at_once_max", -1),
        ("open_grace_s", -1),
        ("copy_bytes_per_s", 1000),
    ],
)
def test_settings_that_make_no_sense_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        RepairConfig(**{name: value})  # type: ignore[arg-type]
