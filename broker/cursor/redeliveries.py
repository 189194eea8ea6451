"""The redelivery counts of the unacknowledged entries of a subscription.

The counts belong to the cursor: they survive a change of the subscription type and a failover, so
that a client finds a poison message after the same number of deliveries. The acknowledgement of an
entry removes its count. Positions are kept as plain integers: see `dispatch/positions.py`.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

COUNTS_MAX: Final = 400_000
"""The maximum number of entries with a count in one subscription; they take 40 MB. Further entries
get no count. The limit is twice the default limit of unacknowledged messages of a subscription."""

COUNT_MAX: Final = (1 << 32) - 1
"""The largest count: it is stored in four bytes. A count that reaches it no longer grows."""


class Redeliveries:
    """`changed` is called after counts were raised."""

    __slots__ = ("_changed", "_counts", "_size", "_unstored")

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._counts: dict[int, dict[int, int]] = {}  # ledger -> entry -> count; no empty ledger
        self._unstored: dict[int, set[int]] = {}  # entries with a count that is not stored yet
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Position]:
        for ledger, counts in self._counts.items():
            for entry in counts:
                yield Position(ledger, entry)

    @property
    def has_unstored(self) -> bool:
        return bool(self._unstored)

    def get(self, position: Position) -> int:
        counts = self._counts.get(position[0])
        return 0 if counts is None else counts.get(position[1], 0)

    def count_again(self, ledger: int, entries: Collection[int]) -> None:
        """Raise the counts of entries that will be redelivered. `entries` has no duplicates. The
        speed matters: a consumer that leaves may return 50,000 entries."""
        counts = self._counts.setdefault(ledger, {})
        unstored = self._unstored.setdefault(ledger, set())
        room, before = COUNTS_MAX - self._size, len(counts)
        if len(entries) > room:
            new = [entry for entry in entries if entry not in counts]
            entries = set(entries).difference(new[room:])
        if counts.keys().isdisjoint(entries):
            counts.update(dict.fromkeys(entries, 1))
        else:
            former = counts.get
            again = {entry: former(entry, 0) + 1 for entry in entries}
            if max(again.values()) > COUNT_MAX:
                again = {entry: min(count, COUNT_MAX) for entry, count in again.items()}
            counts.update(again)
        self._size += len(counts) - before
        unstored.update(entries)
        if not counts:
            del self._counts[ledger]
        if not unstored:
            del self._unstored[ledger]
        self._changed()

    def pop(self, position: Position) -> None:
        """Remove the count of an entry that was acknowledged."""
        ledger, entry = position
        counts = self._counts.get(ledger)
        if counts is None or counts.pop(entry, 0) == 0:
            return
        self._size -= 1
        if not counts:
            del self._counts[ledger]
        unstored = self._unstored.get(ledger)
        if unstored is not None:
            unstored.discard(entry)
            if not unstored:
                del self._unstored[ledger]

    def pop_through(self, position: Position) -> None:
        """Remove the counts of all entries up to `position`, which were acknowledged. Costs
        O(counts in the ledger of `position`)."""
        for ledger in [ledger for ledger in self._counts if ledger <= position.ledger]:
            counts, unstored = self._counts.pop(ledger), self._unstored.pop(ledger, None)
            self._size -= len(counts)
            if ledger < position.ledger:
                continue
            left = {entry: count for entry, count in counts.items() if entry > position.entry}
            if left:
                self._counts[ledger] = left
                self._size += len(left)
            if unstored and not unstored.isdisjoint(left):
                self._unstored[ledger] = unstored.intersection(left)

    def clear(self) -> None:
        self._counts, self._unstored, self._size = {}, {}, 0

    # ---- for the store ---------------------------------------------------------------------------

    def all_counts(self) -> Mapping[int, Mapping[int, int]]:
        """All counts by ledger and entry. From now on they are regarded as stored."""
        self._unstored = {}
        return self._counts

    def take_unstored(self) -> dict[int, dict[int, int]]:
        """The counts that have changed since the last call of `take_unstored` or `all_counts`."""
        unstored, self._unstored = self._unstored, {}
        return {
            ledger: {entry: self._counts[ledger][entry] for entry in sorted(entries)}
            for ledger, entries in unstored.items()
        }

    def restore(self, counts: Mapping[int, Mapping[int, int]]) -> None:
        """Set the counts that the previous owner has stored, by ledger and entry."""
        for ledger, of_ledger in counts.items():
            kept = dict(islice(of_ledger.items(), COUNTS_MAX - self._size))
            if kept:
                self._counts[ledger] = kept
                self._size += len(kept)

    def check(self) -> None:
        assert self._size == sum(map(len, self._counts.values()))
        assert all(self._counts.values()), "an empty ledger"
        for ledger, entries in self._unstored.items():
            assert entries, "an empty ledger"
            assert entries <= self._counts[ledger].keys()
