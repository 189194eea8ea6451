"""The choice of trimmed ledgers: retention by time and size, cursors, and the open ledger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.log.position import Position
from magnetar.broker.log.trimming import trim_through
from magnetar.metadata.model import LedgerId, TopicLedger
from magnetar.metadata.policies import UNLIMITED, Retention

NOW_MS = 1_000_000
CLOSED = [
    TopicLedger(LedgerId(3), 0, entries=5, length=100, closed_ms=100_000),
    TopicLedger(LedgerId(5), 5, entries=5, length=100, closed_ms=500_000),
    TopicLedger(LedgerId(8), 10, entries=2, length=100, closed_ms=900_000),
]
OPEN = TopicLedger(LedgerId(9), 12)
AT_ONCE, NEVER = Retention(0, 0), Retention(UNLIMITED, UNLIMITED)


def through(
    retention: Retention,
    slowest: Position | None = None,
    *,
    ledgers: list[TopicLedger] | None = None,
    total: int = 350,
) -> Position | None:
    return trim_through(
        [*CLOSED, OPEN] if ledgers is None else ledgers,
        slowest=slowest,
        total_bytes=total,
        retention=retention,
        now_ms=NOW_MS,
    )


@pytest.mark.parametrize(
    ("slowest", "expected"),
    [
        (None, Position(8, 1)),  # no durable cursor holds a ledger
        (Position(-1, -1), None),
        (Position(3, 3), None),
        # A cursor at the end of a ledger does not hold the ledger.
        (Position(3, 4), Position(3, 4)),
        (Position(5, -1), Position(3, 4)),
        (Position(4, 7), Position(3, 4)),  # a cursor in a deleted ledger
        (Position(8, 0), Position(5, 4)),
        (Position(8, 1), Position(8, 1)),
        (Position(9, 5), Position(8, 1)),
    ],
)
def test_the_slowest_cursor_holds_its_ledger(
    slowest: Position | None, expected: Position | None
) -> None:
    assert through(AT_ONCE, slowest) == expected
    assert through(NEVER, slowest) is None


@pytest.mark.parametrize(
    ("time_s", "size", "expected"),
    [
        (UNLIMITED, UNLIMITED, None),
        (0, UNLIMITED, Position(8, 1)),
        (100, UNLIMITED, Position(8, 1)),
        (101, UNLIMITED, Position(5, 4)),
        (500, UNLIMITED, Position(5, 4)),
        (501, UNLIMITED, Position(3, 4)),
        (901, UNLIMITED, None),
        (UNLIMITED, 0, Position(8, 1)),
        (UNLIMITED, 50, Position(8, 1)),
        (UNLIMITED, 51, Position(5, 4)),
        (UNLIMITED, 150, Position(5, 4)),
        (UNLIMITED, 250, Position(3, 4)),
        (UNLIMITED, 251, None),
        (600, 300, Position(3, 4)),  # the limit that is reached first decides
        (600, 150, Position(5, 4)),
    ],
)
def test_retention_by_time_and_size(time_s: int, size: int, expected: Position | None) -> None:
    assert through(Retention(time_s, size)) == expected


def test_the_open_ledger_is_never_trimmed() -> None:
    assert through(AT_ONCE, ledgers=[OPEN]) is None
    assert through(AT_ONCE, ledgers=[]) is None


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    age_s=st.integers(UNLIMITED, 900),
    size=st.integers(UNLIMITED, 400),
    slowest=st.none() | st.builds(Position, st.integers(-1, 30), st.integers(-1, 3)),
    opened=st.integers(0, 50),
)
def test_trimming_drops_a_prefix_that_is_not_needed(
    lengths: list[int], age_s: int, size: int, slowest: Position | None, opened: int
) -> None:
    """The result is compared with the rule, ledger by ledger."""
    ledgers = [
        TopicLedger(LedgerId(2 * at), at, entries=3, length=length, closed_ms=100_000 * (at + 1))
        for at, length in enumerate(lengths)
    ]
    total = sum(lengths) + opened
    found = through(Retention(age_s, size), slowest, ledgers=ledgers, total=total)
    going = [] if found is None else [each for each in ledgers if (each.ledger, 2) <= found]
    left = total
    for each in ledgers:
        left -= each.length
        is_acked = slowest is None or slowest >= (each.ledger, 2)
        is_old = age_s >= 0 and NOW_MS - each.closed_ms >= 1_000 * age_s
        goes = is_acked and (is_old or (0 <= size <= left))
        assert (each in going) == goes
        if not goes:
            assert going == [other for other in ledgers if other.ledger < each.ledger]
            break
