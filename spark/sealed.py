"""The sealed ledgers that a task reads from their bookies, as the plan names them.

A sealed ledger never changes. Only its copies may move. So an executor needs no metadata store: if
the copies have moved, or no bookie can be reached, the executor reads from the topic's owner.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from magnetar.metadata.model import LedgerMetadata, Member
    from magnetar.spark.planner import Span
    from magnetar.spark.topic_state import TopicState

DIRECT_BYTES_MIN: Final = 1 << 20
"""A ledger is read from its bookies only if one task reads at least this many bytes of it. An
answer of 1 MiB takes some milliseconds of the owner's CPU; a connection to a bookie costs more."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Ledgers with their members, and the data addresses of these bookies ("host:port")."""

    ledgers: Mapping[int, LedgerMetadata] = field(default_factory=dict)
    addresses: Mapping[Member, str] = field(default_factory=dict)

    def only(self, ledgers: Iterable[int]) -> Sealed:
        """The part of this object with these ledgers. Unknown ledgers are left out."""
        kept = {it: self.ledgers[it] for it in ledgers if it in self.ledgers}
        members = {
            member for it in kept.values() for segment in it.segments for member in segment.members
        }
        addresses = {it: address for it, address in self.addresses.items() if it in members}
        return Sealed(kept, addresses)

    def merged(self, other: Sealed) -> Sealed:
        """The ledgers of this object and of `other`."""
        return Sealed({**self.ledgers, **other.ledgers}, {**self.addresses, **other.addresses})


def worth_reading_directly(
    tasks: Iterable[Iterable[Span]], states: Mapping[str, TopicState]
) -> dict[str, list[int]]:
    """The sealed ledgers from which some task reads at least DIRECT_BYTES_MIN, keyed by topic."""
    sealed = {
        (topic, ledger.id)
        for topic, state in states.items()
        for ledger in state.ledgers
        if ledger.sealed
    }
    found: dict[str, dict[int, None]] = {}
    for spans in tasks:
        sizes: dict[tuple[str, int], int] = {}
        for span in spans:
            key = span.topic, span.ledger
            sizes[key] = sizes.get(key, 0) + span.bytes
        for (topic, ledger), size in sizes.items():
            if size >= DIRECT_BYTES_MIN and (topic, ledger) in sealed:
                found.setdefault(topic, {})[ledger] = None
    return {topic: list(ledgers) for topic, ledgers in found.items()}
