"""Dispatch without storage: an entry goes to a consumer at once, or to none.

Theory of operation. The entries of a non-persistent topic come from its producers, not from a log.
An entry goes to the next consumer that has permits, whose connection takes more. If there is none,
the entry is dropped and counted. Nothing is kept, so nothing is acknowledged or redelivered.

An Exclusive subscription has one consumer; a Shared one takes them in turn.

Invariants (`check`): an exclusive subscription has at most one consumer; no consumer has pending
entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.dispatch.dispatcher import ConsumerRefused, Deliver
from magnetar.broker.dispatch.rotation import Rotation
from magnetar.broker.errors import ConsumerBusy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.dispatch.permits import Consumer
    from magnetar.broker.log.entry import StoredEntry


class Live:
    def __init__(self, subscription: str, *, exclusive: bool) -> None:
        self._subscription = subscription
        self._exclusive = exclusive
        self._rotation = Rotation()

    def add_consumer(self, consumer: Consumer) -> None:
        """Raises ConsumerRefused, before any change."""
        if self._exclusive and self._rotation:
            busy = ConsumerBusy(self._subscription, "its only consumer is connected")
            raise ConsumerRefused(busy, list(self._rotation))
        self._rotation.add(consumer)

    def remove_consumer(self, consumer: Consumer) -> None:
        self._rotation.remove(consumer)

    def on_flow(self, consumer: Consumer, permits: int) -> None:
        """The consumer grants permits for this many more messages."""
        consumer.permits += permits

    def on_entries(self, entries: Sequence[StoredEntry]) -> tuple[list[Deliver], int]:
        """What each consumer gets, and the number of messages that are dropped."""
        given: dict[int, Deliver] = {}
        dropped = 0
        for entry in entries:
            consumer = self._rotation.next_available()
            if consumer is None:
                dropped += entry.messages
                continue
            consumer.on_given(1, entry.messages)
            delivery = given.get(id(consumer))
            if delivery is None:
                given[id(consumer)] = Deliver(consumer, [entry], {}, entry.messages)
            else:
                delivery.entries.append(entry)
                delivery.messages += entry.messages
        return list(given.values()), dropped

    def check(self) -> None:
        """Assert the invariants of the docstring."""
        self._rotation.check()
        assert not self._exclusive or len(list(self._rotation)) <= 1
        assert all(consumer.unacked == 0 for consumer in self._rotation)
