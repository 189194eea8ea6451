"""The entries of a topic before a range, for spark.chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass
class EarlierEntries:
    """The stored entries of one ledger; those before `first` were deleted."""

    entries: Sequence[bytes] = ()
    first: int = 0
    lost: list[int] = field(default_factory=list)  # the last chunks of lost messages
    searches: int = 0

    def before(self, ledger: int, entry: int) -> Iterator[tuple[int, int, bytes]]:
        self.searches += 1
        for number in range(min(entry, len(self.entries)) - 1, self.first - 1, -1):
            yield ledger, number, self.entries[number]

    def on_lost(self, ledger: int, entry: int, what: str) -> None:
        self.lost.append(entry)
