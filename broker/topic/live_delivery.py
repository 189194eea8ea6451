"""Delivers the entries of a non-persistent topic to its subscriptions.

With at most SUBSCRIPTIONS_PER_STEP subscriptions, the topic delivers in the step of the publish.
With more subscriptions it queues the entries, and delivers them in several steps of the event loop,
for about STEP_US each. Every subscription gets the entries in the order of the publishes.

The queue is bounded: a connection reads no more commands until the queue is empty, so it has the
entries of one slice of commands there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.runtime.event import Event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.topic.live_subscription import LiveSubscription

SUBSCRIPTIONS_PER_STEP: Final = 50
"""A connection publishes up to 100 single entries in one step of the loop, or a run of 250 entries:
with this many subscriptions the deliveries take 25 ms or 13 ms."""

STEP_US: Final = 10_000

SUBSCRIPTION_US: Final = 4
"""The time of a delivery to one subscription, besides about 1 us for each entry."""


@dataclass(slots=True)
class _Queued:
    entries: Sequence[StoredEntry]
    subscriptions: list[LiveSubscription]
    delivered: int = 0  # the subscriptions that have the entries


class LiveDelivery:
    """Belongs to the loop. `subscriptions`: those of the topic, which may change."""

    __slots__ = ("_idle", "_loop", "_queue", "_subscriptions")

    def __init__(self, subscriptions: Mapping[str, LiveSubscription]) -> None:
        self._loop = asyncio.get_running_loop()
        self._subscriptions = subscriptions
        # While entries are queued, a call of `_deliver_some` is scheduled.
        self._queue: deque[_Queued] = deque()
        self._idle = Event()

    def deliver(self, entries: Sequence[StoredEntry], now: float) -> None:
        """Deliver the entries to the subscriptions that exist now, after all earlier entries."""
        subscriptions = list(self._subscriptions.values())
        if len(subscriptions) <= SUBSCRIPTIONS_PER_STEP and not self._queue:
            for subscription in subscriptions:
                subscription.on_published(entries, now)
            return
        if not self._queue:
            self._loop.call_soon(self._deliver_some)
        self._queue.append(_Queued(entries, subscriptions))

    @property
    def is_idle(self) -> bool:
        """True when all entries are delivered or dropped."""
        return not self._queue

    async def wait_idle(self) -> None:
        """Return when all entries were delivered or dropped once."""
        if self._queue:
            self._idle.clear()
            await self._idle.wait()

    def _deliver_some(self) -> None:
        now, left_us = self._loop.time(), STEP_US
        try:
            while self._queue and left_us > 0:
                head = self._queue[0]
                each_us = SUBSCRIPTION_US + len(head.entries)
                begin = head.delivered
                part = head.subscriptions[begin : begin + max(1, left_us // each_us)]
                head.delivered += len(part)
                left_us -= len(part) * each_us
                if head.delivered == len(head.subscriptions):
                    self._queue.popleft()
                for subscription in part:
                    subscription.on_published(head.entries, now)
        finally:
            if self._queue:
                self._loop.call_soon(self._deliver_some)
            else:
                self._idle.set()
