"""The draining hashes of a Key_Shared subscription (PIP-379).

Theory of operation. A slot *drains* if it moved to another consumer while entries of it are pending
at the previous one. Until the last of them is acknowledged or returned, no other consumer gets an
entry of the slot. So the entries of a key are unacknowledged at one consumer at a time.

The dispatcher registers the pending entries of the slots that moved. It reports each entry that is
no longer pending. While nothing drains, this holds nothing, and the dispatcher does not ask it.

The state is integers in a dict and in two arrays with an element for each slot, 3 MB for 65,535
hashes. The arrays exist while something drains. An object for each hash would take 8 MB, and the
time to make them would stop the other keys when a consumer joins.

Invariants (`check`):
    1. `references` is the number of pending entries of the slot at the draining consumer, above 0.
    2. The counts by consumer are those of its slots.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.sticky_hash import SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from magnetar.broker.dispatch.permits import Consumer

_ZEROS: Final = bytes(4 * SLOTS)
_NONE: Final = array("I")


@dataclass(frozen=True, slots=True)
class DrainingHash:
    consumer: Consumer  # has the pending entries
    references: int
    blocked_attempts: int  # deliveries of the slot that had to wait


class DrainingHashes:
    __slots__ = (
        "_blocked",
        "_cleared",
        "_consumers",
        "_counts",
        "_next_number",
        "_numbers",
        "_owners",
        "_references",
        "blocked_attempts",
    )

    def __init__(self) -> None:
        self._references: dict[int, int] = {}  # by slot; no zero
        self._blocked = self._owners = _NONE  # by slot; empty while nothing drains
        self._consumers: dict[int, Consumer] = {}  # by the number in `_owners`
        self._numbers: dict[Consumer, int] = {}
        self._next_number = 0
        self._counts: dict[Consumer, int] = {}  # how many slots each drains, above 0
        self._cleared: dict[Consumer, int] = {}  # slots that have drained, by connected consumer
        self.blocked_attempts = 0  # of all slots, also those that have drained

    def __bool__(self) -> bool:
        return bool(self._references)

    def __len__(self) -> int:
        return len(self._references)

    def __iter__(self) -> Iterator[int]:
        return iter(self._references)

    def get(self, slot: int) -> DrainingHash | None:
        references = self._references.get(slot)
        if references is None:
            return None
        consumer = self._consumers[self._owners[slot]]
        return DrainingHash(consumer, references, self._blocked[slot])

    def of(self, consumer: Consumer) -> dict[int, DrainingHash]:
        """What drains at a consumer, by slot."""
        if consumer not in self._counts:
            return {}
        number = self._numbers[consumer]
        return {
            slot: DrainingHash(consumer, references, self._blocked[slot])
            for slot, references in self._references.items()
            if self._owners[slot] == number
        }

    def by_consumer(self) -> dict[Consumer, dict[int, int]]:
        """The blocked attempts of each slot, by the consumer that drains it."""
        found: dict[Consumer, dict[int, int]] = {consumer: {} for consumer in self._counts}
        of_number = {self._numbers[consumer]: slots for consumer, slots in found.items()}
        for slot in self._references:
            of_number[self._owners[slot]][slot] = self._blocked[slot]
        return found

    def cleared(self, consumer: Consumer) -> int:
        """Slots that have drained at the consumer since it connected."""
        return self._cleared.get(consumer, 0)

    def register(self, consumer: Consumer, references: Mapping[int, int]) -> None:
        """These slots moved away from the consumer. So many entries of each are pending, at the
        consumer or at the one that drains the slot already. Hot: a join registers 30,000 slots."""
        if not references:
            return
        if not self._references:
            self._blocked, self._owners = array("I", _ZEROS), array("I", _ZEROS)
        number = self._numbers.get(consumer)
        if number is None:
            number = self._numbers[consumer] = self._next_number
            self._consumers[number] = consumer
            self._next_number += 1
        known, owners = self._references, self._owners
        if known and not known.keys().isdisjoint(references):
            both = [slot for slot in references if slot in known]
            assert all(known[slot] == references[slot] for slot in both), "not the pending entries"
            references = {slot: n for slot, n in references.items() if slot not in known}
        for slot in references:
            owners[slot] = number
        known.update(references)
        if references:
            self._counts[consumer] = self._counts.get(consumer, 0) + len(references)

    def blocks(self, slot: int, consumer: Consumer | None) -> bool:
        """Whether the consumer that has the slot now must wait. If it is the draining one again,
        the slot does not drain any more."""
        if slot not in self._references:
            return False
        if self._consumers[self._owners[slot]] is consumer:
            self._end(slot)
            return False
        self._blocked[slot] += 1
        self.blocked_attempts += 1
        return True

    def on_gone(self, slot: int, consumer: Consumer) -> bool:
        """One entry of the slot is no longer pending at the consumer. Returns whether it was the
        last one: deliveries of the slot may go on."""
        if slot not in self._references:
            return False
        if self._consumers[self._owners[slot]] is not consumer:
            return False
        if self._references[slot] > 1:
            self._references[slot] -= 1
            return False
        self._end(slot)
        self._cleared[consumer] = self._cleared.get(consumer, 0) + 1
        return True

    def on_left(self, consumer: Consumer) -> list[int]:
        """The consumer has left, and nothing is pending at it. Returns the slots it drained."""
        slots: list[int] = []
        if consumer in self._counts:
            number = self._numbers[consumer]
            slots = [slot for slot in self._references if self._owners[slot] == number]
        for slot in slots:
            self._end(slot)
        if (left := self._numbers.pop(consumer, None)) is not None:
            del self._consumers[left]
        self._cleared.pop(consumer, None)
        return slots

    def check(self) -> None:
        """Assert the second invariant of the docstring; the dispatcher knows the first."""
        for consumer, count in self._counts.items():
            assert count == len(self.of(consumer)) > 0, "2"

    def _end(self, slot: int) -> None:
        """The slot drains no more. With the last one the arrays go."""
        consumer = self._consumers[self._owners[slot]]
        del self._references[slot]
        self._blocked[slot] = 0
        self._counts[consumer] -= 1
        if not self._counts[consumer]:
            del self._counts[consumer]
        if not self._references:
            self._references = {}  # the memory, too
            self._blocked = self._owners = _NONE
            self._consumers, self._numbers, self._next_number = {}, {}, 0
