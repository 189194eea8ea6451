"""The position of an entry in a topic's log.

Positions order by ledger, then by entry: a topic's ledgers have increasing ids, and entries are
dense within a ledger. Never add to `entry` across a ledger's end; `Chain` does the arithmetic.
"""

from typing import Final, NamedTuple


class Position(NamedTuple):
    """`(L, -1)` stands before the first entry of ledger L."""

    ledger: int
    entry: int

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}"


EARLIEST: Final = Position(-1, -1)
"""A position before every entry. On the wire both ids are 2^64 - 1."""

LATEST: Final = Position((1 << 63) - 1, (1 << 63) - 1)
"""A position after every entry."""


def run_of_positions(ledger: int, first: int, last: int) -> list[Position]:
    """Positions of the entries first..last, both ends included. This takes a third of the time of
    calling the class for each."""
    new = tuple.__new__
    return [new(Position, (ledger, entry)) for entry in range(first, last + 1)]
