"""BadCopies: what readers found missing or damaged, until somebody marks it for repair.

No I/O, no clock, no tasks. A reader that is refused a confirmed entry goes on with another replica;
the bad copy would stay, and the entry be one loss nearer to its end. So it is noted here, and the
process takes the notes out from time to time (`drain`) and marks the ledgers in the metadata store.

Notes of one ledger and one member are merged into few ranges, so that a member that lost a ledger
costs one note and not one for each entry. A note is a hint: whoever repairs looks for himself what
the member lacks, and whether it still is a member.

A queue of bounded length loses its oldest notes when nobody drains it; they are counted. What is
lost is found again by the next read, or by the comparison of all replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.metadata.model import EntryId
from magnetar.metadata.under_replication import BadCopy
from magnetar.protos.envelope import BookieCode

if TYPE_CHECKING:
    from magnetar.metadata.model import LedgerId, Member

NOTES_MAX: Final = 4_096
"""Pairs of ledger and member: about 500 bytes each, 2 MiB."""

RANGES_MAX: Final = 8
"""Of one pair; beyond, all of them become one range that covers them."""

_DAMAGED: Final = frozenset({BookieCode.CORRUPT, BookieCode.IO_ERROR})
_ABSENT: Final = frozenset({BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER})


def is_bad_copy(code: BookieCode, *, sealed: bool) -> bool:
    """Whether a member that answers a read of a confirmed entry so has a bad copy of it. `sealed`:
    its segment takes no more entries. In the open one a member may lack what is confirmed, because
    it was away; its writer knows that, and tells when it gives the member up."""
    return code in _DAMAGED or (sealed and code in _ABSENT)


class BadCopies:
    def __init__(self, *, notes_max: int = NOTES_MAX) -> None:
        assert notes_max > 0
        self.dropped = 0  # notes that were lost
        self._notes_max = notes_max
        self._notes: dict[tuple[LedgerId, Member], list[tuple[int, int]]] = {}  # oldest first

    def on_bad_copy(self, ledger: LedgerId, entry: EntryId, member: Member) -> None:
        """The member should have a sound copy of the entry and has not."""
        self.note(ledger, member, entry, entry)

    def note(self, ledger: LedgerId, member: Member, first: int, last: int) -> None:
        """The member lacks sound copies of some of the entries `first` to `last`."""
        assert 0 <= first <= last
        key = ledger, member
        ranges = self._notes.get(key, [])
        if any(low <= first and last <= high for low, high in ranges):
            return
        if key not in self._notes and len(self._notes) >= self._notes_max:
            del self._notes[next(iter(self._notes))]
            self.dropped += 1
        merged = merge([*ranges, (first, last)])
        self._notes[key] = merged if len(merged) <= RANGES_MAX else [(merged[0][0], merged[-1][1])]

    def drain(self) -> list[tuple[LedgerId, BadCopy]]:
        """Take out everything, oldest first. Whoever cannot mark it hands it in again (`note`)."""
        notes, self._notes = self._notes, {}
        return [
            (ledger, BadCopy(member, EntryId(first), EntryId(last)))
            for (ledger, member), ranges in notes.items()
            for first, last in ranges
        ]

    def __len__(self) -> int:
        """Pairs of ledger and member that something is noted of."""
        return len(self._notes)

    def check(self) -> None:
        assert len(self._notes) <= self._notes_max
        for ranges in self._notes.values():
            assert 0 < len(ranges) <= RANGES_MAX
            assert ranges == merge(ranges)


def merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same numbers in as few ranges as possible, ascending."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged
