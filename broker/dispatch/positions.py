"""Positions in bulk: kept as plain integers, because a subscription may hold a million of them.

A position as an object costs a tuple and two integers and is visited by every full garbage
collection. A dict whose keys and values are integers is not visited at all, and a list of integers
is one object.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from magnetar.broker.dispatch.dispatcher import Acks


class PositionMap:
    """A small positive number for each of some positions; 0 stands for absent."""

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
        """The sum of all numbers. Costs a pass over all of them."""
        return sum(sum(entries.values()) for entries in self._ledgers.values())

    def get(self, position: Position) -> int:
        entries = self._ledgers.get(position[0])
        return 0 if entries is None else entries.get(position[1], 0)

    def set(self, position: Position, number: int) -> None:
        assert number > 0
        self.of_ledger(position[0])[position[1]] = number

    def of_ledger(self, ledger: int) -> dict[int, int]:
        """The entries of one ledger, to put several there at once: at least one."""
        entries = self._ledgers.get(ledger)
        if entries is None:
            entries = self._ledgers[ledger] = {}
        return entries

    def pop(self, position: Position) -> int:
        """Forget the position; its number, 0 if it had none."""
        entries = self._ledgers.get(position[0])
        if entries is None:
            return 0
        number = entries.pop(position[1], 0)
        if not entries:
            del self._ledgers[position[0]]
        return number

    def drain(self) -> dict[int, dict[int, int]]:
        """Forget everything; what there was, by ledger and entry."""
        ledgers, self._ledgers = self._ledgers, {}
        return ledgers


class ReplaySet:
    """Positions to be given out again, lowest first. What is acknowledged meanwhile is left out
    when it is taken. A position is in it at most once: its owner's invariant, not checked here."""

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
        """Several of one ledger, at least one: O(all of that ledger)."""
        heap = self._ledgers.setdefault(ledger, [])
        heap.extend(entries)
        heapify(heap)

    def take(self, count: int, acks: Acks) -> list[Position]:
        """The lowest `count` that are not acknowledged, ascending; fewer when there are no more."""
        taken: list[Position] = []
        highest_acked = acks.highest_acked
        for ledger in sorted(self._ledgers):
            heap = self._ledgers[ledger]
            while heap and len(taken) < count:
                position = Position(ledger, heappop(heap))
                if position > highest_acked or not acks.is_acked(position):
                    taken.append(position)
            if heap:
                break
            del self._ledgers[ledger]
        return taken


def runs(positions: Sequence[Position], gap_max: int) -> list[tuple[Position, Position]]:
    """First and last of what may be read in one go: neighbours in a ledger with at most `gap_max`
    entries that are not asked for between them. `positions` ascends."""
    found: list[tuple[Position, Position]] = []
    for position in positions:
        if found:
            first, last = found[-1]
            if last.ledger == position.ledger and position.entry - last.entry <= gap_max + 1:
                found[-1] = (first, position)
                continue
        found.append((position, position))
    return found
