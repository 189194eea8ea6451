"""The negatively acknowledged entries of a Key_Shared subscription that keeps the order of keys.

Theory of operation. A negatively acknowledged entry is redelivered after a delay. By default, the
later entries of its key are delivered meanwhile. A subscription may ask for order: from a negative
acknowledgement on, the dispatcher withholds the entries of the slot that are *later* than the
earliest negatively acknowledged entry. It delivers this entry and earlier ones. If it withheld them
too, an earlier entry that returns from another consumer would wait without end.

Only an acknowledgement releases a slot. The redelivery does not, and neither does the end of the
consumer: the entry is then still to be processed.

The dispatcher keeps at most `KeySharedSettings.withheld_max` negatively acknowledged entries. A
consumer whose negative acknowledgements would exceed the limit is disconnected instead. So all its
entries wait, and are delivered again in the order of their slots: the limit costs redeliveries, not
the order.

Positions are stored as integers, which the garbage collector does not visit.

Invariants (`check`):
    1. Each tracked position is in the heap of its slot, and no heap is empty or begins with a
       position that is not tracked.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRY_BITS: Final = 64
_ENTRY_MASK: Final = (1 << _ENTRY_BITS) - 1


class Withheld:
    __slots__ = ("_by_slot", "_slots")

    def __init__(self) -> None:
        self._by_slot: dict[int, list[int]] = {}  # heaps; may hold released positions, not first
        self._slots: dict[int, int] = {}  # position -> slot

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __len__(self) -> int:
        """The negatively acknowledged entries."""
        return len(self._slots)

    def __contains__(self, position: Position) -> bool:
        """Whether the entry is negatively acknowledged."""
        return _packed(position) in self._slots

    def has(self, slot: int) -> bool:
        """Whether entries of the slot are negatively acknowledged."""
        return slot in self._by_slot

    def slots(self) -> Iterator[int]:
        return iter(self._by_slot)

    def earliest(self, slot: int) -> Position | None:
        """None: no entry of the slot is negatively acknowledged."""
        heap = self._by_slot.get(slot)
        return None if heap is None else Position(heap[0] >> _ENTRY_BITS, heap[0] & _ENTRY_MASK)

    def add(self, position: Position, slot: int) -> None:
        """The entry is negatively acknowledged. Again: no effect."""
        packed = _packed(position)
        if packed not in self._slots:
            self._slots[packed] = slot
            heappush(self._by_slot.setdefault(slot, []), packed)

    def withholds(self, slot: int, position: Position) -> bool:
        """Whether the entry must wait for an earlier one of its slot."""
        heap = self._by_slot.get(slot)
        return heap is not None and _packed(position) > heap[0]

    def on_acked(self, position: Position) -> int:
        """The entry is acknowledged, or does not exist any more. Returns its slot, whose later
        entries may go now; 0: it was not negatively acknowledged."""
        slot = self._slots.pop(_packed(position), 0)
        if slot:
            heap = self._by_slot[slot]
            while heap and heap[0] not in self._slots:
                heappop(heap)
            if not heap:
                del self._by_slot[slot]
        return slot

    def on_acked_through(self, position: Position) -> set[int]:
        """Like `on_acked`, for every entry up to this one. Returns the slots."""
        last = _packed(position)
        gone = [packed for packed in self._slots if packed <= last]
        return {self.on_acked(Position(at >> _ENTRY_BITS, at & _ENTRY_MASK)) for at in gone}

    def clear(self) -> None:
        self._by_slot.clear()
        self._slots.clear()

    def check(self) -> None:
        """Assert the invariants of the docstring."""
        for packed, slot in self._slots.items():
            assert packed in self._by_slot[slot], "1"
        for heap in self._by_slot.values():
            assert heap[0] in self._slots, "1"
            assert min(heap) == heap[0], "1"


def _packed(position: Position) -> int:
    return position[0] << _ENTRY_BITS | position[1]
