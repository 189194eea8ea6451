"""Delivers the entries of a non-persistent topic to its subscriptions.

With at most SUBSCRIPTIONS_PER_STEP subscriptions, the topic delivers in the step of the publish.
With more subscriptions, or while entries are queued, it queues the entries. A task delivers them in
several steps of the event loop, for about STEP_US each. Each step takes a turn (runtime/turns.py),
so only one topic has a step in a turn of the loop. Every subscription gets the entries in the order
of the publishes.

The queue is bounded: a connection reads no more commands until the queue is empty, so the queue has
at most the entries that each connection has published in one step.

A consumer that joins an existing subscription also gets the entries that were queued before.
When the topic closes, the queued entries are dropped, although their producers have receipts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.runtime.event import Event
from magnetar.runtime.on_demand import OnDemandTask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.topic.live_subscription import LiveSubscription
    from magnetar.runtime.on_demand import Spawn
    from magnetar.runtime.turns import Turns

SUBSCRIPTIONS_PER_STEP: Final = 50
"""The limit of subscriptions to which the topic delivers in the step of the publish. A connection
publishes up to 100 single entries in one step of the loop, or a run of 250 entries. At the limit,
their deliveries take 25 ms or 13 ms."""

STEP_US: Final = 10_000

SUBSCRIPTION_US: Final = 4
"""The time of a delivery to one subscription, besides about 1 us for each entry."""


@dataclass(slots=True)
class _Queued:
    entries: Sequence[StoredEntry]
    subscriptions: Sequence[LiveSubscription]
    delivered: int = 0  # the number of subscriptions that have the entries


class LiveDelivery:
    """Belongs to the loop. `subscriptions`: those of the topic, which calls `on_changed` after each
    change of them."""

    __slots__ = ("_idle", "_loop", "_queue", "_snapshot", "_subscriptions", "_turns", "_work")

    def __init__(
        self,
        subscriptions: Mapping[str, LiveSubscription],
        turns: Turns,
        spawn: Spawn,
        *,
        of: object = "",
    ) -> None:
        """`of`: the topic, for the names of tasks."""
        self._loop = asyncio.get_running_loop()
        self._subscriptions = subscriptions
        self._turns = turns
        self._snapshot: Sequence[LiveSubscription] | None = None  # None: to be made
        self._queue: deque[_Queued] = deque()
        self._idle = Event()
        self._work = OnDemandTask("delivery", self._deliver_all, of=of)
        self._work.start(spawn)

    def on_changed(self) -> None:
        """A subscription was added or removed."""
        self._snapshot = None

    def deliver(self, entries: Sequence[StoredEntry], now: float) -> None:
        """Deliver the entries to the subscriptions that exist now, after all earlier entries."""
        if self._snapshot is None:
            self._snapshot = tuple(self._subscriptions.values())
        subscriptions = self._snapshot
        if len(subscriptions) <= SUBSCRIPTIONS_PER_STEP and not self._queue:
            for subscription in subscriptions:
                subscription.on_published(entries, now)
            return
        self._queue.append(_Queued(entries, subscriptions))
        if len(self._queue) == 1:
            self._work.wake()

    @property
    def is_idle(self) -> bool:
        """True when all entries are delivered or dropped."""
        return not self._queue

    async def wait_idle(self) -> None:
        """Return when the queue is empty, or has been empty since the call."""
        if self._queue:
            self._idle.clear()
            await self._idle.wait()

    async def _deliver_all(self) -> None:
        try:
            while self._queue:
                await self._turns.take()
                self._deliver_some()
        finally:
            self._queue.clear()  # entries are left after a bug, or when the broker ends
            self._idle.set()

    def _deliver_some(self) -> None:
        now, left_us = self._loop.time(), STEP_US
        while self._queue and left_us > 0:
            head = self._queue[0]
            each_us = SUBSCRIPTION_US + len(head.entries)
            begin = head.delivered
            part = head.subscriptions[begin : begin + max(1, left_us // each_us)]
            head.delivered += len(part)
            left_us -= len(part) * each_us
            for subscription in part:
                subscription.on_published(head.entries, now)
            if head.delivered == len(head.subscriptions):
                self._queue.popleft()
