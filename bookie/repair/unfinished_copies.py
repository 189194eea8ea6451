"""UnfinishedCopies: failed copies of entries to new members. A retry continues the copy. Pure.

The metadata does not name the new member yet. So the member's collector may delete the copied
entries while no repair holds the ledger's lock. Before a retry continues, it asks the bookie which
of the entries are still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from magnetar.metadata.model import LedgerId, Member, Segment

COPIES_MAX: Final = 10_000
"""The limit of remembered copies: 5 MB. At the limit, the oldest copy is forgotten, and its retry
begins at the first entry."""


@dataclass(frozen=True, slots=True)
class UnfinishedCopy:
    segment: Segment  # at the time when the target was chosen
    target: Member
    following: int  # the target had, or listed, the seat's entries before this one
    target_fails: bool  # the last attempt failed at the target, without any progress

    def fits(self, segment: Segment) -> bool:
        """Return whether the target is still a good choice for the segment."""
        return not self.target_fails and self.segment == segment


class UnfinishedCopies:
    """The copies of one process."""

    def __init__(self, *, copies_max: int = COPIES_MAX) -> None:
        self._copies_max = copies_max
        # keyed by ledger, first entry of the segment, and seat
        self._copies: dict[tuple[LedgerId, int, int], UnfinishedCopy] = {}

    def find(self, ledger: LedgerId, first: int, seat: int) -> UnfinishedCopy | None:
        return self._copies.get((ledger, first, seat))

    def keep(self, ledger: LedgerId, first: int, seat: int, copy: UnfinishedCopy) -> None:
        """Remember the copy, instead of an earlier one for this seat."""
        self.drop(ledger, first, seat)
        if len(self._copies) >= self._copies_max:
            del self._copies[next(iter(self._copies))]
        self._copies[ledger, first, seat] = copy

    def drop(self, ledger: LedgerId, first: int, seat: int) -> None:
        self._copies.pop((ledger, first, seat), None)
