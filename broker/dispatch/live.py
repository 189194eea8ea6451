"""Dispatch without storage: an entry is delivered to a consumer at once, or dropped.

Theory of operation. The entries of a non-persistent topic come from its producers, not from a log.
The next consumer with permits and a writable connection gets the entry. If there is no such
consumer, the entry is dropped and counted. No entry is kept, so none is acknowledged or
redelivered.

An Exclusive subscription has one consumer. A Shared subscription delivers to its consumers in turn.
In a Failover subscription, only the active consumer gets entries. The active consumer changes at
once, because it has no entries to drain.

Invariants (`check`): an exclusive subscription has at most one consumer; no consumer has pending
entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.dispatch.dispatcher import Activate, ConsumerRefused, Deliver
from magnetar.broker.dispatch.rotation import Rotation
from magnetar.broker.errors import ConsumerBusy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.dispatch.active import Candidates
    from magnetar.broker.dispatch.permits import Consumer
    from magnetar.broker.log.entry import StoredEntry


class Live:
    def __init__(self, subscription: str, *, exclusive: bool) -> None:
        self._subscription = subscription
        self._exclusive = exclusive
        self._rotation = Rotation()

    def add_consumer(self, consumer: Consumer) -> list[Activate]:
        """A consumer joins. Returns an `Activate` for each consumer that becomes active or
        inactive. Raises ConsumerRefused before any change."""
        if self._exclusive and self._rotation:
            busy = ConsumerBusy(self._subscription, "its only consumer is connected")
            raise ConsumerRefused(busy, list(self._rotation))
        self._rotation.add(consumer)
        return [Activate(consumer, True)] if self._exclusive else []

    def remove_consumer(self, consumer: Consumer) -> list[Activate]:
        """A consumer leaves. Returns an `Activate` for each remaining consumer that becomes active
        or inactive."""
        self._rotation.remove(consumer)
        return []

    def on_leaving(self, consumer: Consumer) -> list[Activate]:
        """The consumer will leave: `consumer.leaving` is True from now on. Returns an `Activate`
        for each consumer that becomes active or inactive."""
        return []

    def on_flow(self, consumer: Consumer, permits: int) -> None:
        """The consumer grants permits for this many more messages."""
        consumer.permits += permits

    def on_entries(self, entries: Sequence[StoredEntry]) -> tuple[list[Deliver], int]:
        """Distribute the entries. Returns a delivery for each consumer that gets some, and the
        number of dropped messages."""
        given: dict[int, Deliver] = {}
        dropped = 0
        for entry in entries:
            consumer = self._next()
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

    def _next(self) -> Consumer | None:
        """The consumer that gets the next entry. None: no consumer is available."""
        return self._rotation.next_available()

    def check(self) -> None:
        """Assert the invariants of the module's docstring."""
        self._rotation.check()
        assert not self._exclusive or len(list(self._rotation)) <= 1
        assert all(consumer.unacked == 0 for consumer in self._rotation)


class LiveFailover(Live):
    def __init__(self, subscription: str, candidates: Candidates) -> None:
        super().__init__(subscription, exclusive=False)
        self._candidates = candidates
        self._active: Consumer | None = None  # None: no consumer is connected

    def add_consumer(self, consumer: Consumer) -> list[Activate]:
        super().add_consumer(consumer)
        self._candidates.add(consumer)
        changes = self._choose()
        return changes if self._active is consumer else [Activate(consumer, False), *changes]

    def remove_consumer(self, consumer: Consumer) -> list[Activate]:
        super().remove_consumer(consumer)
        self._candidates.remove(consumer)
        if self._active is consumer:
            self._active = None
        return self._choose()

    def on_leaving(self, consumer: Consumer) -> list[Activate]:
        self._candidates.on_leaving(consumer)
        return self._choose()

    def _choose(self) -> list[Activate]:
        former, self._active = self._active, self._candidates.chosen() if self._candidates else None
        if self._active is former or self._active is None:
            return []
        changes = [Activate(self._active, True)]
        return changes if former is None else [Activate(former, False), *changes]

    def _next(self) -> Consumer | None:
        active = self._active
        return active if active is not None and active.available else None

    def check(self) -> None:
        super().check()
        consumers = list(self._candidates)
        assert self._active is (self._candidates.chosen() if consumers else None)
