"""Entries of one log that all bookies have lost, as far as subscriptions came across them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import EntryUnreadable, LedgerNotFound
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from magnetar.broker.errors import ReadFailed
    from magnetar.broker.log.chain import Chain

RANGES_MAX: Final = 100
"""Lost ranges that are kept for operators to read; the number of lost entries counts all."""


@dataclass(frozen=True, slots=True)
class LostRange:
    """Entries first..last of one ledger, both ends included."""

    ledger: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.ledger}:{self.first}-{self.last}"


class Losses:
    """The skipped ranges. Each range counts once, also if several subscriptions skip it."""

    __slots__ = ("_ranges", "entries")

    def __init__(self) -> None:
        self.entries = 0
        self._ranges: dict[LostRange, None] = {}  # oldest first

    @property
    def ranges(self) -> list[LostRange]:
        """The newest ones."""
        return list(self._ranges)

    def note(self, lost: LostRange) -> bool:
        """Returns whether it is news."""
        if lost in self._ranges:
            return False
        self.entries += lost.last - lost.first + 1
        self._ranges[lost] = None
        if len(self._ranges) > RANGES_MAX:
            del self._ranges[next(iter(self._ranges))]
        return True


def lost_by(error: ReadFailed, chain: Chain) -> LostRange | None:
    """The range that is lost permanently if a read failed in this way. None: nothing is lost, or
    the entries may come back.

    Lost is the rest of a ledger whose metadata is gone, and an entry of which every replica said
    definitely that it does not have it. A bookie that does not answer may still have the entry. A
    ledger that the log has dropped meanwhile is no loss.
    """
    position, count = Position(*error.position), chain.counts.get(error.position[0], 0)
    if not chain.is_closed(position.ledger):
        return None
    match error.cause:
        case LedgerNotFound():
            return LostRange(position.ledger, position.entry, count - 1)
        case EntryUnreadable(missing=True, deleted=False, entry=entry) if entry < count:
            return LostRange(position.ledger, entry, entry)
        case _:
            return None
