"""The entries of a Key_Shared subscription that wait for their consumer, ordered within each slot.

Theory of operation. The entries of a slot wait in a heap, lowest position first. Each consumer has
a queue of the slots whose entries it may get now, ordered by the lowest waiting position. A slot
that has to wait (such as a slot that drains at another consumer, or that no consumer has) has no
valid item in a queue. The dispatcher queues the slot again when it no longer has to wait.

An item of a queue is valid only while its position is the lowest of its slot and the consumer may
get entries of the slot. `take` drops invalid items, so a move of a slot does not search the queues.

200,000 entries may wait: the pending entries of four consumers that have left. If they expire, the
dispatcher removes them in parts. Meanwhile `take` leaves out the expired positions that it meets.

Positions are stored as integers, which the garbage collector does not visit.

Invariants (`check`):
    1. No heap is empty, and `len` is the number of positions in them.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from magnetar.broker.dispatch.acks import Acks
    from magnetar.broker.dispatch.permits import Consumer

_ENTRY_BITS: Final = 64
_ENTRY_MASK: Final = (1 << _ENTRY_BITS) - 1
_SLOT_BITS: Final = 16
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1


class KeyedReplay:
    __slots__ = ("_by_slot", "_count", "_expired", "_queues")

    def __init__(self) -> None:
        self._by_slot: dict[int, list[int]] = {}
        self._queues: dict[Consumer, list[int]] = {}  # heaps; an item is lowest position and slot
        self._count = 0
        self._expired = -1  # every position up to this one is acknowledged

    def __bool__(self) -> bool:
        return bool(self._by_slot)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: object) -> bool:
        """True when entries of the slot wait."""
        return slot in self._by_slot

    def __iter__(self) -> Iterator[Position]:
        for heap in self._by_slot.values():
            yield from map(_position, heap)

    def slots(self) -> Iterator[int]:
        return iter(self._by_slot)

    def waiting(self, slot: int) -> int:
        """The number of entries of the slot that wait."""
        return len(self._by_slot.get(slot, ()))

    def lowest(self, slot: int) -> Position:
        """The lowest waiting position of the slot, which must have one."""
        return _position(self._by_slot[slot][0])

    def has_queued(self, consumer: Consumer) -> bool:
        """Returns True when `take` may find positions for the consumer."""
        return bool(self._queues.get(consumer))

    def add(self, position: Position, slot: int) -> bool:
        """Add a position, which must not wait already. Returns True when it is the lowest of its
        slot: the caller must then queue the slot."""
        packed = position[0] << _ENTRY_BITS | position[1]
        heap = self._by_slot.get(slot)
        self._count += 1
        if heap is None:
            self._by_slot[slot] = [packed]
            return True
        heappush(heap, packed)
        return heap[0] == packed

    def add_all(self, ledger: int, entries: Iterable[tuple[int, int]]) -> set[int]:
        """Add entries of a ledger with their slots. Returns the slots, which the caller must
        queue."""
        start, grown, by_slot, count = ledger << _ENTRY_BITS, set(), self._by_slot, 0
        for entry, slot in entries:
            heap = by_slot.get(slot)
            if heap is None:
                heap = by_slot[slot] = []
            heap.append(start | entry)
            grown.add(slot)
            count += 1
        for slot in grown:
            heapify(by_slot[slot])
        self._count += count
        return grown

    def expire(self, position: Position) -> list[int]:
        """Every position up to this one is acknowledged. Returns the slots with such positions. For
        these slots the caller must call `drop_expired`, and then queue them. It does so in parts,
        because there may be 65,535 slots."""
        last = self._expired = position[0] << _ENTRY_BITS | position[1]
        last_item = last << _SLOT_BITS | _SLOT_MASK
        for consumer, queue in self._queues.items():
            self._queues[consumer] = [item for item in queue if item > last_item]
            heapify(self._queues[consumer])
        return [slot for slot, heap in self._by_slot.items() if heap[0] <= last]

    def drop_expired(self, slots: Iterable[int]) -> None:
        """Remove the expired positions of these slots. Costs O(positions of the slots)."""
        last = self._expired
        for slot in slots:
            heap = self._by_slot.get(slot)
            if heap is None or heap[0] > last:
                continue
            later = [packed for packed in heap if packed > last]
            self._count -= len(heap) - len(later)
            if later:
                heapify(later)
                self._by_slot[slot] = later
            else:
                del self._by_slot[slot]

    def is_queued(self, slot: int, consumer: Consumer) -> bool:
        """Returns True when the slot is queued for the consumer. Costs O(queue), for checks."""
        item = self._by_slot[slot][0] << _SLOT_BITS | slot
        return item in self._queues.get(consumer, ())

    def queue(self, slot: int, consumer: Consumer) -> None:
        """Queue the slot for the consumer, which may get its entries now. The slot must have
        waiting entries."""
        item = self._by_slot[slot][0] << _SLOT_BITS | slot
        queue = self._queues.get(consumer)
        if queue is None:
            self._queues[consumer] = [item]
        else:
            heappush(queue, item)

    def on_left(self, consumer: Consumer) -> None:
        self._queues.pop(consumer, None)

    def take(
        self,
        consumer: Consumer,
        count: int,
        acks: Acks,
        allowed: Callable[[int], bool],
        dropped_max: int,
    ) -> tuple[list[tuple[Position, int]], int]:
        """Remove the lowest `count` unacknowledged positions that wait for the consumer, with their
        slots. `allowed` says whether the consumer may get entries of a slot; if not, the slot
        leaves the queue. Returns also the number of invalid items and acknowledged positions that
        the call dropped. The call ends when this number is `dropped_max`."""
        queue = self._queues.get(consumer)
        taken: list[tuple[Position, int]] = []
        highest_acked = acks.highest_acked
        dropped = 0
        while queue and len(taken) < count and dropped < dropped_max:
            item = heappop(queue)
            slot = item & _SLOT_MASK
            heap = self._by_slot.get(slot)
            if heap is None or heap[0] != item >> _SLOT_BITS or not allowed(slot):
                dropped += 1
                continue
            position = _position(heappop(heap))
            self._count -= 1
            if position > highest_acked or not acks.is_acked(position):
                taken.append((position, slot))
            else:
                dropped += 1
            if heap:
                heappush(queue, heap[0] << _SLOT_BITS | slot)
            else:
                del self._by_slot[slot]
        if queue is not None and not queue:
            del self._queues[consumer]
        return taken, dropped

    def check(self) -> None:
        """Assert the invariants of the module's docstring."""
        assert all(self._by_slot.values()), "1"
        assert self._count == sum(map(len, self._by_slot.values())), "1"


def _position(packed: int) -> Position:
    return Position(packed >> _ENTRY_BITS, packed & _ENTRY_MASK)
