"""The choice of the active consumer of a Failover subscription.

Only the consumers of the best priority can be chosen: here called candidates. The others stand by.
The active consumer is:

    on a partition      the candidate at the index (partition index) modulo (number of candidates),
                        in the order of names
    on another topic    the candidate that subscribed first; with `Choice.HASH`, the candidate that
                        the ring (below) gives for the topic's name, so that topics spread

All rules are Pulsar's. With `Choice.HASH`, each consumer has POINTS points on a ring of hashes. The
consumer of the first point at or after the hash of the topic is chosen.
"""

from __future__ import annotations

from bisect import bisect_left, insort
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

_Key = tuple[bool, int, int, str, int]
"""The place of a consumer in the order: whether it is leaving, its priority, the distance on the
ring from the topic's hash to the consumer's next point (0: no ring), its name ("": no partition),
its join number."""


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
    """All connected consumers of a Failover subscription, also of worse priorities. A leaving
    consumer is chosen only if all consumers are leaving.

    The consumers are sorted, so that `chosen` visits none of thousands of standby consumers.
    """

    def __init__(self, topic: str, partition: int | None, choice: Choice) -> None:
        """`partition`: the index of the topic among its partitions; None: it is no partition."""
        self._partition = partition
        self._topic_hash = None
        if partition is None and choice is Choice.HASH:
            self._topic_hash = _hash(topic)
        self._keys: dict[Consumer, _Key] = {}
        self._sorted: list[tuple[_Key, Consumer]] = []  # no two keys are equal

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, consumer: Consumer) -> None:
        distance, name = 0, ""
        if self._partition is not None:
            name = consumer.name
        elif self._topic_hash is not None:
            points = (_hash(f"{consumer.name}{number}") for number in range(POINTS))
            distance = min((point - self._topic_hash) % _RING for point in points)
        key = consumer.leaving, consumer.priority, distance, name, consumer.join_number
        self._keys[consumer] = key
        insort(self._sorted, (key, consumer), key=_key)

    def remove(self, consumer: Consumer) -> None:
        key = self._keys.pop(consumer)
        del self._sorted[bisect_left(self._sorted, key, key=_key)]

    def on_leaving(self, consumer: Consumer) -> None:
        """The consumer will leave: `consumer.leaving` is True from now on."""
        key = self._keys[consumer]
        del self._sorted[bisect_left(self._sorted, key, key=_key)]
        self._keys[consumer] = key = True, *key[1:]
        insort(self._sorted, (key, consumer), key=_key)

    def chosen(self) -> Consumer:
        """The consumer that should be active. There must be a consumer."""
        index = 0
        if self._partition is not None:
            (leaving, priority, *_), _ = self._sorted[0]
            beyond = leaving, priority + 1, 0, "", 0
            index = self._partition % bisect_left(self._sorted, beyond, key=_key)
        return self._sorted[index][1]


def _key(item: tuple[_Key, Consumer]) -> _Key:
    return item[0]


def _hash(text: str) -> int:
    return murmur3_32(text.encode()) & (_RING - 1)
