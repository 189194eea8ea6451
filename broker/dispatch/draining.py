"""The draining hashes of a Key_Shared subscription (PIP-379).

Theory of operation. A slot that moves to another consumer *drains* at its previous consumer, as
long as entries of the slot are pending there. Until the last of these entries is acknowledged or
returned, no other consumer gets an entry of the slot. So all unacknowledged entries of a key are at
one consumer.

The dispatcher registers the pending entries of a slot that moves, and reports entries that are no
longer pending. While no slot drains, `DrainingHashes` is empty, and a delivery only tests this.

A slot can drain at *several* consumers if the subscription delivered out of order before. Here the
owner of such a slot is `None`. No consumer gets an entry of the slot while any of its entries is
pending.

The state is integers: in a dict, and in two arrays with an element for each slot. It takes 3 MB for
65,535 draining slots. The arrays exist only while a slot drains. An object for each slot would take
8 MB. Making the objects when a consumer joins would block the deliveries of all keys.

Invariants (`check`):
    1. `references` maps each draining slot to the number of its pending entries, which is above 0.
       The entries are at the consumer that drains the slot, or at several consumers.
    2. `_counts` has the number of slots that drain at each consumer.
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
    consumer: Consumer | None  # has the pending entries; None: several consumers may have some
    references: int  # the number of pending entries of the slot
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
        "blocked_attempts",
        "references",
    )

    def __init__(self) -> None:
        self.references: dict[int, int] = {}  # keyed by slot; always above 0
        self._blocked = self._owners = _NONE  # indexed by slot; empty while nothing drains
        self._consumers: dict[int, Consumer | None] = {}  # keyed by the number in `_owners`
        self._numbers: dict[Consumer | None, int] = {}
        self._next_number = 0
        # The number of slots that each consumer drains, above 0.
        self._counts: dict[Consumer | None, int] = {}
        # The number of slots that have drained at each connected consumer.
        self._cleared: dict[Consumer, int] = {}
        self.blocked_attempts = 0  # of all slots, including slots that have drained

    def __bool__(self) -> bool:
        return bool(self.references)

    def __len__(self) -> int:
        return len(self.references)

    def __iter__(self) -> Iterator[int]:
        return iter(self.references)

    def get(self, slot: int) -> DrainingHash | None:
        references = self.references.get(slot)
        if references is None:
            return None
        consumer = self._consumers[self._owners[slot]]
        return DrainingHash(consumer, references, self._blocked[slot])

    def of(self, consumer: Consumer | None) -> dict[int, DrainingHash]:
        """Return the slots that drain only at this consumer. `consumer` None: return the slots that
        drain at several consumers."""
        if consumer not in self._counts:
            return {}
        number = self._numbers[consumer]
        return {
            slot: DrainingHash(consumer, references, self._blocked[slot])
            for slot, references in self.references.items()
            if self._owners[slot] == number
        }

    def by_consumer(self) -> dict[Consumer | None, dict[int, int]]:
        """Return the blocked attempts of each slot, by the consumer that drains the slot. None:
        several consumers drain it."""
        found: dict[Consumer | None, dict[int, int]] = {owner: {} for owner in self._counts}
        of_number = {self._numbers[consumer]: slots for consumer, slots in found.items()}
        for slot in self.references:
            of_number[self._owners[slot]][slot] = self._blocked[slot]
        return found

    def cleared(self, consumer: Consumer) -> int:
        """Return the number of slots that have drained at the consumer since it connected."""
        return self._cleared.get(consumer, 0)

    def register(self, consumer: Consumer | None, references: Mapping[int, int]) -> None:
        """Register slots that moved away from `consumer`. `references` has the number of pending
        entries of each slot. A slot that drains already keeps its owner. `consumer` None: the
        entries are at several consumers. Hot: a join may register 30,000 slots."""
        if not references:
            return
        if not self.references:
            self._blocked, self._owners = array("I", _ZEROS), array("I", _ZEROS)
        number = self._numbers.get(consumer)
        if number is None:
            number = self._numbers[consumer] = self._next_number
            self._consumers[number] = consumer
            self._next_number += 1
        known, owners = self.references, self._owners
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
        """Return True if a delivery of the slot must wait, and count the attempt. `consumer`: the
        present consumer of the slot. If this is the one that drains the slot, the draining ends."""
        if slot not in self.references:
            return False
        owner = self._consumers[self._owners[slot]]
        if owner is not None and owner is consumer:
            self._end(slot)
            return False
        self._blocked[slot] += 1
        self.blocked_attempts += 1
        return True

    def on_gone(self, slot: int, consumer: Consumer, count: int = 1) -> bool:
        """Note that `count` entries of the slot are no longer pending at the consumer. Returns True
        if they were the last ones: deliveries of the slot may continue."""
        references = self.references.get(slot)
        if references is None:
            return False
        owner = self._consumers[self._owners[slot]]
        if owner is not None and owner is not consumer:
            return False
        if references > count:
            self.references[slot] = references - count
            return False
        assert references == count, "not the pending entries"
        self._end(slot)
        self._cleared[consumer] = self._cleared.get(consumer, 0) + 1
        return True

    def on_gone_all(self, counts: Mapping[int, int], consumer: Consumer) -> list[int]:
        """Like `on_gone`, for the entries of many slots. Returns the slots that have drained."""
        if not self.references:
            return []
        references, owners = self.references, self._owners
        numbers = (self._numbers.get(consumer), self._numbers.get(None))
        drained: list[int] = []
        for slot in counts.keys() & references.keys():
            if owners[slot] in numbers:
                references[slot] -= counts[slot]
                assert references[slot] >= 0, "not the pending entries"
                if references[slot] == 0:
                    drained.append(slot)
        for slot in drained:
            self._end(slot)
        if drained:
            self._cleared[consumer] = self._cleared.get(consumer, 0) + len(drained)
        return drained

    def clear(self) -> None:
        """End the draining of all slots: the subscription may deliver out of order now."""
        self._forget()
        self._counts = {}

    def on_left(self, consumer: Consumer) -> list[int]:
        """Forget a consumer that has left and has no pending entries. Returns the slots that
        drained only at this consumer."""
        slots: list[int] = []
        if consumer in self._counts:
            number = self._numbers[consumer]
            slots = [slot for slot in self.references if self._owners[slot] == number]
        for slot in slots:
            self._end(slot)
        if (left := self._numbers.pop(consumer, None)) is not None:
            del self._consumers[left]
        self._cleared.pop(consumer, None)
        return slots

    def hand_over(self, consumer: Consumer, heir: Consumer) -> None:
        """Note that `heir`, which had no pending entries, now has all those of `consumer`."""
        number = self._numbers.pop(consumer, None)
        if number is not None:
            self._numbers[heir], self._consumers[number] = number, heir
            if consumer in self._counts:
                self._counts[heir] = self._counts.pop(consumer)

    def check(self) -> None:
        """Assert invariant 2 of the module's docstring. The dispatcher checks invariant 1."""
        for consumer, count in self._counts.items():
            assert count == len(self.of(consumer)) > 0, "2"

    def _end(self, slot: int) -> None:
        """End the draining of the slot. Free the memory if no other slot drains."""
        consumer = self._consumers[self._owners[slot]]
        del self.references[slot]
        self._blocked[slot] = 0
        self._counts[consumer] -= 1
        if not self._counts[consumer]:
            del self._counts[consumer]
        if not self.references:
            self._forget()

    def _forget(self) -> None:
        """Free the memory, because no slot drains."""
        self.references = {}
        self._blocked = self._owners = _NONE
        self._consumers, self._numbers, self._next_number = {}, {}, 0
