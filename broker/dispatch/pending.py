"""Pages of the entries that consumers received but did not acknowledge, for operators. Pure.

A page costs O(pending entries of the ledgers that it touches). The caller visits the ledgers in
order, and can stop after any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.broker.dispatch.permits import Consumer


@dataclass(frozen=True, slots=True)
class PendingEntry:
    position: Position
    consumer: str  # its name
    messages: int  # the number of unacknowledged messages; 0: not counted
    slot: int  # the slot of the key; 0: the subscription type has no hashes


_NO_SLOTS: Mapping[int, Mapping[int, int]] = {}


def ledgers_of(consumers: Sequence[Consumer], after: Position) -> list[int]:
    """The ledgers with pending entries, in order, without those before `after.ledger`."""
    found = {ledger for consumer in consumers for ledger in consumer.pending.ledgers()}
    return sorted(ledger for ledger in found if ledger >= after.ledger)


def pending_in(
    ledger: int,
    consumers: Sequence[Consumer],
    slots: Mapping[int, Mapping[int, int]] = _NO_SLOTS,
    *,
    after: Position,
    slot: int | None = None,
) -> list[PendingEntry]:
    """The pending entries of one ledger after a position, in order. `slots`: the slots of all
    pending entries, by ledger and entry. With `slot`, only the entries of this slot."""
    found: list[PendingEntry] = []
    slot_of = slots.get(ledger, {})
    first = after.entry + 1 if ledger == after.ledger else 0
    for consumer in consumers:
        entries = consumer.pending.ledgers().get(ledger, {})
        found += [
            PendingEntry(Position(ledger, entry), consumer.name, messages, slot_of.get(entry, 0))
            for entry, messages in entries.items()
            if entry >= first and (slot is None or slot_of.get(entry, 0) == slot)
        ]
    found.sort(key=lambda it: it.position)
    return found
