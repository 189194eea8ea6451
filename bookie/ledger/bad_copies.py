"""BadCopies: missing or damaged copies that readers and writers found, until the process records
them for repair.

No I/O, no clock, no tasks. When a replica fails to return a confirmed entry, the reader asks
another replica. Without a repair, the entry would keep one sound copy less. So the reader notes the
bad copy here. The process takes the notes regularly (`drain`) and adds them to the ledgers'
under-replication records.

Notes for one ledger and one member are merged into a few ranges. So a member that lost a whole
ledger costs one note, not one note per entry. A note is a hint. The replicator itself checks which
entries the member lacks, and whether the ledger still names the member.

The number of notes is limited. When nothing drains them, the oldest notes are dropped and counted.
The next read, or the comparison of all replicas, finds the bad copies again.
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
"""Ranges of one pair. Beyond the limit they become one range that covers them all."""

_DAMAGED: Final = frozenset({BookieCode.CORRUPT, BookieCode.IO_ERROR})
_ABSENT: Final = frozenset({BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER})


def is_bad_copy(code: BookieCode, *, sealed: bool) -> bool:
    """Return whether this answer to a read of a confirmed entry means a bad copy. `sealed`: the
    segment takes no more entries. In the open segment a member may lack confirmed entries because
    it was away. The ledger's writer knows this, and notes the entries."""
    return code in _DAMAGED or (sealed and code in _ABSENT)


class BadCopies:
    def __init__(self, *, notes_max: int = NOTES_MAX) -> None:
        assert notes_max > 0
        self.dropped = 0  # notes lost at the limit
        self._notes_max = notes_max
        self._notes: dict[tuple[LedgerId, Member], list[tuple[int, int]]] = {}  # oldest first

    def on_bad_copy(self, ledger: LedgerId, entry: EntryId, member: Member) -> None:
        """The member should have a sound copy of the entry, but has none."""
        self.note(ledger, member, entry, entry)

    def note(self, ledger: LedgerId, member: Member, first: int, last: int) -> None:
        """Note that the member may lack sound copies of some of the entries `first` to `last`."""
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
        """Take all notes, oldest first. A caller that cannot record them adds them again."""
        notes, self._notes = self._notes, {}
        return [
            (ledger, BadCopy(member, EntryId(first), EntryId(last)))
            for (ledger, member), ranges in notes.items()
            for first, last in ranges
        ]

    def __len__(self) -> int:
        """Number of pairs of ledger and member with notes."""
        return len(self._notes)

    def check(self) -> None:
        assert len(self._notes) <= self._notes_max
        for ranges in self._notes.values():
            assert 0 < len(ranges) <= RANGES_MAX
            assert ranges == merge(ranges)


def merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same numbers in as few ranges as possible, ascending."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged
