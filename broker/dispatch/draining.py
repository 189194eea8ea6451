"""The draining hashes of a Key_Shared subscription (PIP-379).

Theory of operation. A slot *drains* if it moved to another consumer while entries of it are pending
at the previous one. Until the last of them is acknowledged or returned, no other consumer gets an
entry of the slot. So the entries of a key are unacknowledged at one consumer at a time.

The dispatcher registers the pending entries of the slots that moved. It reports each entry that is
no longer pending. While nothing drains, this holds nothing, and the dispatcher does not ask it.

Invariants (`check`):
    1. `references` is the number of pending entries of the slot at the draining consumer, above 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from magnetar.broker.dispatch.permits import Consumer


@dataclass(slots=True)
class DrainingHash:
    consumer: Consumer  # has the pending entries
    references: int
    blocked_attempts: int = 0  # deliveries of the slot that had to wait


class DrainingHashes:
    __slots__ = ("_by_slot", "_cleared", "blocked_attempts")

    def __init__(self) -> None:
        self._by_slot: dict[int, DrainingHash] = {}
        self._cleared: dict[Consumer, int] = {}  # slots that have drained, by connected consumer
        self.blocked_attempts = 0  # of all slots, also those that have drained

    def __bool__(self) -> bool:
        return bool(self._by_slot)

    def __len__(self) -> int:
        return len(self._by_slot)

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_slot)

    def get(self, slot: int) -> DrainingHash | None:
        return self._by_slot.get(slot)

    def of(self, consumer: Consumer) -> dict[int, DrainingHash]:
        """What drains at a consumer, by slot."""
        return {slot: it for slot, it in self._by_slot.items() if it.consumer is consumer}

    def cleared(self, consumer: Consumer) -> int:
        """Slots that have drained at the consumer since it connected."""
        return self._cleared.get(consumer, 0)

    def register(self, consumer: Consumer, references: Mapping[int, int]) -> None:
        """These slots moved away from the consumer, which has so many pending entries of each."""
        for slot, count in references.items():
            entry = self._by_slot.get(slot)
            if entry is None:
                self._by_slot[slot] = DrainingHash(consumer, count)
            else:
                assert entry.consumer is consumer, "two consumers drain one slot"
                assert entry.references == count, "the references are not the pending entries"

    def blocks(self, slot: int, consumer: Consumer | None) -> bool:
        """Whether the consumer that has the slot now must wait. If it is the draining one again,
        the slot does not drain any more."""
        entry = self._by_slot.get(slot)
        if entry is None:
            return False
        if entry.consumer is consumer:
            del self._by_slot[slot]
            return False
        entry.blocked_attempts += 1
        self.blocked_attempts += 1
        return True

    def on_gone(self, slot: int, consumer: Consumer) -> bool:
        """One entry of the slot is no longer pending at the consumer. Returns whether it was the
        last one: deliveries of the slot may go on."""
        entry = self._by_slot.get(slot)
        if entry is None or entry.consumer is not consumer:
            return False
        entry.references -= 1
        if entry.references:
            return False
        del self._by_slot[slot]
        self._cleared[consumer] = self._cleared.get(consumer, 0) + 1
        return True

    def on_left(self, consumer: Consumer) -> list[int]:
        """The consumer has left, and nothing is pending at it. Returns the slots it drained."""
        slots = list(self.of(consumer))
        for slot in slots:
            del self._by_slot[slot]
        self._cleared.pop(consumer, None)
        return slots
