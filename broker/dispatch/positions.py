"""Collections of positions, stored as integers: a subscription may hold a million positions.

A position object costs a tuple and two integers, and every full garbage collection visits it. The
collector does not visit a dict whose keys and values are integers. A list of integers is one
object.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from magnetar.broker.dispatch.acks import Acks


DROPPED_MAX: Final = 10_000
"""The maximum of acknowledged positions that one call of `ReplaySet.take` drops, which takes about
6 ms. A consumer without permits may acknowledge 50,000 entries that wait for redelivery."""


class PositionMap:
    """A map from positions to small positive numbers. 0 stands for an absent position."""

    __slots__ = ("_ledgers",)

    def __init__(self) -> None:
        self._ledgers: dict[int, dict[int, int]] = {}  # ledger -> entry -> number; no empty ledger

    def __bool__(self) -> bool:
        return bool(self._ledgers)

    def __len__(self) -> int:
        return sum(map(len, self._ledgers.values()))

    def __iter__(self) -> Iterator[Position]:
        for ledger, entries in self._ledgers.items():
            for entry in entries:
                yield Position(ledger, entry)

    def total(self) -> int:
        """The sum of all numbers. Costs O(positions)."""
        return sum(sum(entries.values()) for entries in self._ledgers.values())

    def get(self, position: Position) -> int:
        entries = self._ledgers.get(position[0])
        return 0 if entries is None else entries.get(position[1], 0)

    def set(self, position: Position, number: int) -> None:
        assert number > 0
        self.of_ledger(position[0])[position[1]] = number

    def of_ledger(self, ledger: int) -> dict[int, int]:
        """The entries of one ledger, for adding several. The caller must add at least one."""
        entries = self._ledgers.get(ledger)
        if entries is None:
            entries = self._ledgers[ledger] = {}
        return entries

    def count_again(self, ledger: int, entries: Iterable[int]) -> None:
        """Add one to the number of each of these entries."""
        numbers = self.of_ledger(ledger)
        for entry in entries:
            numbers[entry] = numbers.get(entry, 0) + 1

    def pop(self, position: Position) -> int:
        """Remove the position. Returns its number, 0 if it is absent."""
        entries = self._ledgers.get(position[0])
        if entries is None:
            return 0
        number = entries.pop(position[1], 0)
        if not entries:
            del self._ledgers[position[0]]
        return number

    def pop_through(self, position: Position) -> dict[int, dict[int, int]]:
        """Remove every position up to this one. Returns their numbers by ledger and entry. Costs
        O(positions in the ledger of `position`)."""
        removed: dict[int, dict[int, int]] = {}
        for ledger in [ledger for ledger in self._ledgers if ledger <= position[0]]:
            entries = self._ledgers[ledger]
            if ledger == position[0]:
                gone = [entry for entry in entries if entry <= position[1]]
                if len(gone) < len(entries):
                    if gone:
                        removed[ledger] = {entry: entries.pop(entry) for entry in gone}
                    continue
            removed[ledger] = self._ledgers.pop(ledger)
        return removed

    def ledgers(self) -> Mapping[int, Mapping[int, int]]:
        """The numbers by ledger and entry. The caller must not keep it over a change."""
        return self._ledgers

    def pop_entries(self, ledger: int, entries: Collection[int]) -> list[int]:
        """Remove these entries of one ledger, which the map must have. `entries` has no duplicates.
        Returns their numbers."""
        numbers = self._ledgers[ledger]
        if len(entries) < len(numbers):
            return [numbers.pop(entry) for entry in entries]
        del self._ledgers[ledger]
        return [numbers[entry] for entry in entries]

    def drain(self) -> dict[int, dict[int, int]]:
        """Remove everything. Returns the numbers by ledger and entry."""
        ledgers, self._ledgers = self._ledgers, {}
        return ledgers


class ReplaySet:
    """Positions to redeliver, lowest first. `take` leaves out the acknowledged ones. The owner must
    not add a position twice; this class does not check it."""

    __slots__ = ("_ledgers",)

    def __init__(self) -> None:
        self._ledgers: dict[int, list[int]] = {}  # ledger -> heap of entries, never empty

    def __bool__(self) -> bool:
        return bool(self._ledgers)

    def __len__(self) -> int:
        return sum(map(len, self._ledgers.values()))

    def __iter__(self) -> Iterator[Position]:
        for ledger, entries in self._ledgers.items():
            for entry in entries:
                yield Position(ledger, entry)

    def add(self, position: Position) -> None:
        heap = self._ledgers.get(position[0])
        if heap is None:
            self._ledgers[position[0]] = [position[1]]
        else:
            heappush(heap, position[1])

    def add_all(self, ledger: int, entries: Iterable[int]) -> None:
        """Add at least one entry of a ledger. Costs O(positions of that ledger)."""
        heap = self._ledgers.setdefault(ledger, [])
        heap.extend(entries)
        heapify(heap)

    def drop_through(self, position: Position) -> None:
        """Remove every position up to this one."""
        for ledger in [ledger for ledger in self._ledgers if ledger <= position[0]]:
            heap = self._ledgers.pop(ledger)
            if ledger == position[0] and (later := [it for it in heap if it > position[1]]):
                heapify(later)
                self._ledgers[ledger] = later

    def take(self, count: int, acks: Acks) -> list[Position]:
        """Remove and return the lowest `count` unacknowledged positions in ascending order. Drop
        the acknowledged positions before them. After DROPPED_MAX dropped positions, return the
        positions found so far."""
        taken: list[Position] = []
        highest_acked, dropped = acks.highest_acked, 0
        for ledger in sorted(self._ledgers):
            heap = self._ledgers[ledger]
            while heap and len(taken) < count and dropped < DROPPED_MAX:
                position = Position(ledger, heappop(heap))
                if position > highest_acked or not acks.is_acked(position):
                    taken.append(position)
                else:
                    dropped += 1
            if heap:
                break
            del self._ledgers[ledger]
        return taken


def runs(positions: Sequence[Position], gap_max: int) -> list[tuple[Position, Position]]:
    """Group ascending positions into ranges, so that one request can read a whole range. Two
    neighbouring positions are in the same range if they are in the same ledger and at most
    `gap_max` other entries lie between them. Returns the first and the last position of each
    range."""
    found: list[tuple[Position, Position]] = []
    for position in positions:
        if found:
            first, last = found[-1]
            if last.ledger == position.ledger and position.entry - last.entry <= gap_max + 1:
                found[-1] = (first, position)
                continue
        found.append((position, position))
    return found
