"""The choice of the active consumer of a Failover subscription.

Only the consumers of the best priority are candidates. The others stand by. The active consumer is:

    on a partition      the candidate at the index (partition index) modulo (number of candidates),
                        in the order of names
    on another topic    the candidate that subscribed first; with `Choice.HASH`, the candidate whose
                        name hashes next to the name of the topic, so that topics spread

All rules are Pulsar's. With `Choice.HASH`, each consumer has POINTS points on a ring of hashes. The
consumer of the first point at or after the hash of the topic is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from magnetar.protos.murmur3 import murmur3_32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.broker.dispatch.permits import Consumer

POINTS: Final = 100
_RING: Final = 1 << 31
"""Hashes are 31 bits long: Pulsar clears the sign bit."""


class Choice(StrEnum):
    """The rule that chooses the active consumer of a topic that is no partition."""

    SUBSCRIBE_ORDER = "subscribe_order"
    HASH = "hash"


@dataclass(frozen=True, slots=True)
class FailoverRules:
    """The settings of the broker for Failover subscriptions."""

    non_partitioned: Choice = Choice.SUBSCRIBE_ORDER
    # The time in which a former active consumer may acknowledge its entries before the next one
    # becomes active. 0: the next one becomes active at once.
    delay_s: float = 1.0


FAILOVER_DEFAULTS: Final = FailoverRules()


class Candidates:
    """The connected consumers of a Failover subscription. A leaving consumer is chosen only if all
    consumers are leaving."""

    def __init__(self, topic: str, partition: int | None, choice: Choice) -> None:
        """`partition`: the index of the topic among its partitions; None: it is no partition."""
        self._partition = partition
        self._topic_hash = None
        if partition is None and choice is Choice.HASH:
            self._topic_hash = _hash(topic)
        # The distance on the ring from the topic to the next point of each consumer. 0: there is no
        # ring.
        self._consumers: dict[Consumer, int] = {}

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._consumers)

    def __len__(self) -> int:
        return len(self._consumers)

    def add(self, consumer: Consumer) -> None:
        distance = 0
        if self._topic_hash is not None:
            points = (_hash(f"{consumer.name}{number}") for number in range(POINTS))
            distance = min((point - self._topic_hash) % _RING for point in points)
        self._consumers[consumer] = distance

    def remove(self, consumer: Consumer) -> None:
        del self._consumers[consumer]

    def chosen(self) -> Consumer:
        """The consumer that should be active. There must be a consumer."""
        staying = [consumer for consumer in self._consumers if not consumer.leaving]
        group = staying or list(self._consumers)
        best = min(consumer.priority for consumer in group)
        group = [consumer for consumer in group if consumer.priority == best]
        if self._partition is not None:
            group.sort(key=lambda it: (it.name, it.join_number))
            return group[self._partition % len(group)]
        return min(group, key=lambda it: (self._consumers[it], it.join_number))


def _hash(text: str) -> int:
    return murmur3_32(text.encode()) & (_RING - 1)
