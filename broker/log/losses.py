"""The entries of one log that are lost at all bookies and that subscriptions have skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import EntryUnreadable, LedgerNotFound
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from magnetar.broker.errors import ReadFailed
    from magnetar.broker.log.chain import Chain

RANGES_MAX: Final = 100
"""The maximum number of ranges that are kept for operators. `Losses.entries` also counts the
entries of older ranges."""


@dataclass(frozen=True, slots=True)
class LostRange:
    """Entries first..last of one ledger, both ends included."""

    ledger: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.ledger}:{self.first}-{self.last}"


class Losses:
    """The skipped ranges. A range counts once, also if several subscriptions skip it, as long as it
    is among the newest RANGES_MAX."""

    __slots__ = ("_ranges", "entries")

    def __init__(self) -> None:
        self.entries = 0
        self._ranges: dict[LostRange, None] = {}  # oldest first

    @property
    def ranges(self) -> list[LostRange]:
        """The newest skipped ranges, at most RANGES_MAX, oldest first."""
        return list(self._ranges)

    def note(self, lost: LostRange) -> bool:
        """Add a range. Returns False if it is known already."""
        if lost in self._ranges:
            return False
        self.entries += lost.last - lost.first + 1
        self._ranges[lost] = None
        if len(self._ranges) > RANGES_MAX:
            del self._ranges[next(iter(self._ranges))]
        return True


def lost_by(error: ReadFailed, chain: Chain) -> LostRange | None:
    """The range that is permanently lost, from the error of a read. None: nothing is lost, or the
    entries may come back.

    Two things count as lost: the entries of a closed ledger from the read position on, if the
    metadata of the ledger is gone; and an entry of a closed ledger that every replica definitely
    does not have. A bookie that does not answer may still have the entry. A ledger that the log has
    dropped meanwhile does not count as lost.
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
