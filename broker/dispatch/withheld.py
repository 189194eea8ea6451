"""The negatively acknowledged entries of a Key_Shared subscription that keeps the order of keys.

Theory of operation. A negatively acknowledged entry is redelivered after a delay. By default, the
later entries of its key are delivered meanwhile. With `ordered_nacks`, the dispatcher withholds the
entries of the slot that are *later* than the earliest negatively acknowledged entry. It still
delivers this entry and earlier ones. Otherwise an earlier entry that returns from another consumer
would wait without end.

A slot is released when the entry is acknowledged or no longer exists, or when the last consumer
leaves. A redelivery, or the end of one of several consumers, does not release the slot, because the
entry must still be processed.

The dispatcher keeps at most `KeySharedSettings.withheld_max` negatively acknowledged entries. A
consumer whose negative acknowledgements would exceed the limit is disconnected instead. Then all
its entries wait, and are redelivered in order within each slot. So the limit costs redeliveries,
but the order is kept.

Positions are stored as integers, which the garbage collector does not visit.

Invariants (`check`):
    1. Each tracked position is in the heap of its slot. Each heap begins with a tracked position.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRY_BITS: Final = 64
_ENTRY_MASK: Final = (1 << _ENTRY_BITS) - 1


class Withheld:
    __slots__ = ("_by_slot", "_slots")

    def __init__(self) -> None:
        self._by_slot: dict[int, list[int]] = {}  # heaps; the first position is not acknowledged
        self._slots: dict[int, int] = {}  # position -> slot

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __len__(self) -> int:
        """The number of negatively acknowledged entries."""
        return len(self._slots)

    def __contains__(self, position: Position) -> bool:
        """True when the entry is negatively acknowledged."""
        return _packed(position) in self._slots

    def has(self, slot: int) -> bool:
        """Returns True when entries of the slot are negatively acknowledged."""
        return slot in self._by_slot

    def slots(self) -> Iterator[int]:
        return iter(self._by_slot)

    def earliest(self, slot: int) -> Position | None:
        """The earliest negatively acknowledged entry of the slot. None: there is none."""
        heap = self._by_slot.get(slot)
        return None if heap is None else Position(heap[0] >> _ENTRY_BITS, heap[0] & _ENTRY_MASK)

    def add(self, position: Position, slot: int) -> None:
        """The entry is negatively acknowledged. A second call for an entry has no effect."""
        packed = _packed(position)
        if packed not in self._slots:
            self._slots[packed] = slot
            heappush(self._by_slot.setdefault(slot, []), packed)

    def withholds(self, slot: int, position: Position) -> bool:
        """Returns True when the entry must wait for an earlier one of its slot."""
        heap = self._by_slot.get(slot)
        return heap is not None and _packed(position) > heap[0]

    def on_acked(self, position: Position) -> int:
        """The entry is acknowledged, or does not exist any more. Returns its slot, whose later
        entries may be delivered now; 0: the entry was not negatively acknowledged."""
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
        slots = set(map(self._slots.pop, gone))
        left = self._slots
        for slot in slots:
            heap = self._by_slot.pop(slot)
            if len(heap) > 1 and (heap := [packed for packed in heap if packed in left]):
                heapify(heap)
                self._by_slot[slot] = heap
        return slots

    def clear(self) -> None:
        self._by_slot.clear()
        self._slots.clear()

    def check(self) -> None:
        """Assert the invariants of the module's docstring."""
        for packed, slot in self._slots.items():
            assert packed in self._by_slot[slot], "1"
        for heap in self._by_slot.values():
            assert heap[0] in self._slots, "1"
            assert min(heap) == heap[0], "1"


def _packed(position: Position) -> int:
    return position[0] << _ENTRY_BITS | position[1]
