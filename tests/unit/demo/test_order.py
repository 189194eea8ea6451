"""The demo's check that each carrier's flights are processed in order."""

from __future__ import annotations

import pytest

from magnetar.demo.traffic import Order

CARRIERS = ["AA", "UA", "AA", "UA", "AA"]


@pytest.mark.parametrize(
    ("rows", "violations"),
    [
        ([0, 1, 2, 3, 4], 0),
        ([1, 3, 0, 2, 4], 0),  # the flights of two carriers have no order
        ([0, 4, 2, 1, 3], 1),  # 4 came before 2
        ([0, 2, 4, 3, 1], 1),
        ([4, 2, 0], 2),
    ],
)
def test_only_the_order_within_a_carrier_counts(rows: list[int], violations: int) -> None:
    order = Order(CARRIERS)
    for row in rows:
        order.on_first_processed(row, consumer=row % 2)
    assert order.violations == violations


def test_order_notes_which_consumers_had_a_carrier() -> None:
    order = Order(CARRIERS)
    order.on_first_processed(0, consumer=2)
    order.on_first_processed(2, consumer=1)
    assert order.by_carrier == {"AA": {1, 2}, "UA": set()}
