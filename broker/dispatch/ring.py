"""Consistent hashing (Pulsar's default): each consumer has points on a ring of 65535 slots.

Theory of operation. The point `i` of a consumer is a slot: the hash of name, name index and `i`,
joined by NUL. The name index is the lowest number that no other connected consumer of the same name
has. So equal names get different points, and a consumer that reconnects gets its points back. A
slot belongs to the first point at or after it; after the last point the ring begins again. If
several consumers have the same point, it belongs to the first of them, and to the next one after
the first has left.

Invariants (`check`):
    1. `_points` is ascending, and holds exactly the keys of `_owners`. No list of owners is empty.
    2. Each consumer is in the lists of owners of its points, once in each, and in no other list.
    3. Consumers of one name have different name indexes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.key_shared_policy import HashRange
from magnetar.broker.dispatch.selector import Moved, merged
from magnetar.broker.dispatch.sticky_hash import SLOTS, hash_of, ring_slot

if TYPE_CHECKING:
    from magnetar.broker.dispatch.permits import Consumer

POINTS_DEFAULT: Final = 100
"""Points per consumer. With more points the shares are more even, and a join is slower."""


class Ring:
    """A `Selector`."""

    def __init__(self, points: int = POINTS_DEFAULT) -> None:
        assert points > 0
        self._points_each = points
        self._points: list[int] = []
        self._owners: dict[int, list[Consumer]] = {}  # keyed by point; the first one has it
        self._indexes: dict[Consumer, int] = {}  # the name index

    slot_of = staticmethod(ring_slot)

    def select(self, slot: int) -> Consumer | None:
        points = self._points
        if not points:
            return None
        at = bisect_left(points, slot)
        return self._owners[points[at] if at < len(points) else points[0]][0]

    def add(self, consumer: Consumer) -> list[Moved]:
        taken = {index for it, index in self._indexes.items() if it.name == consumer.name}
        index = next(number for number in range(len(taken) + 1) if number not in taken)
        self._indexes[consumer] = index
        moved: list[Moved] = []
        for point in self._points_of(consumer):
            owners = self._owners.get(point)
            if owners is not None:
                owners.append(consumer)
                continue
            source = self.select(point)
            insort(self._points, point)
            self._owners[point] = [consumer]
            if source is not consumer:
                moved += [Moved(*piece, source) for piece in self._arc(point)]
        return moved

    def remove(self, consumer: Consumer) -> list[Moved]:
        moved: list[Moved] = []
        for point in self._points_of(consumer):
            owners = self._owners[point]
            if owners[0] is consumer:
                moved += [Moved(*piece, consumer) for piece in self._arc(point)]
            owners.remove(consumer)
            if not owners:
                del self._owners[point]
                del self._points[bisect_left(self._points, point)]
        del self._indexes[consumer]
        return moved

    def ranges(self, consumer: Consumer) -> list[HashRange]:
        pieces: list[tuple[int, int]] = []
        for point in self._points_of(consumer):
            if self._owners[point][0] is consumer:
                pieces += self._arc(point)
        return [HashRange(*piece) for piece in merged(sorted(pieces))]

    def check(self) -> None:
        assert self._points == sorted(self._owners), "1"
        assert all(self._owners.values()), "1"
        expected = [(point, it) for it in self._indexes for point in self._points_of(it)]
        found = [(point, it) for point, owners in self._owners.items() for it in owners]
        assert len(found) == len(set(found)) == len(expected), "2"
        assert set(found) == set(expected), "2"
        names = [(it.name, index) for it, index in self._indexes.items()]
        assert len(names) == len(set(names)), "3"

    def _points_of(self, consumer: Consumer) -> list[int]:
        """The consumer's points on the ring, each once."""
        start = f"{consumer.name}\0{self._indexes[consumer]}\0"
        numbers = range(self._points_each)
        return list(dict.fromkeys(ring_slot(hash_of(f"{start}{it}")) for it in numbers))

    def _arc(self, point: int) -> list[tuple[int, int]]:
        """The slots of the point: one range, or two for the first point of the ring."""
        at = bisect_left(self._points, point)
        if at:
            return [(self._points[at - 1] + 1, point)]
        last = self._points[-1]
        return [(1, point), (last + 1, SLOTS - 1)] if last < SLOTS - 1 else [(1, point)]
