"""A consumer of a subscription, as the session of its client sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from magnetar.broker.dispatch.permits import Consumer
from magnetar.broker.errors import ConsumerNotFound, InvalidPermits
from magnetar.broker.topic.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.dispatch.dispatcher import Deliver
    from magnetar.broker.dispatch.permits import Limits
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.contract import (
        CloseReason,
        ConsumerEvents,
        LastMessage,
        SubscribeRequest,
    )
    from magnetar.broker.topic.subscription import Subscription

    Done = Callable[[BrokerError | None], None]


class ConsumerHandle:
    """Made by `Topic.subscribe`. After the consumer was closed, by whichever side, notices are
    dropped and requests raise ConsumerNotFound."""

    def __init__(
        self,
        subscription: Subscription,
        request: SubscribeRequest,
        events: ConsumerEvents,
        limits: Limits,
        *,
        connected_since: str,
        now: float,
    ) -> None:
        self.subscription = subscription
        self.request = request
        self.events = events
        self.attached = True
        self.epoch: int | None = None  # of its last redelivery request; None: it does not count
        self.machine = Consumer(request.consumer_name, request.priority, events.writable, limits)
        self.meter = Meter(now)
        self.redelivered = Meter(now)
        self._connected_since = connected_since

    @property
    def consumer_id(self) -> int:
        return self.request.consumer_id

    @property
    def name(self) -> str:
        return self.request.consumer_name

    # ---- notices ---------------------------------------------------------------------------------

    def flow(self, permits: int) -> None:
        """The client takes this many more messages. Raises InvalidPermits."""
        if permits < 1:
            raise InvalidPermits(permits)
        if self.attached:
            self.subscription.on_flow(self, permits)

    def acknowledge(
        self,
        positions: Sequence[Position],
        partial: Sequence[tuple[Position, Sequence[int]]] = (),
        done: Done | None = None,
    ) -> None:
        """Individually; `partial`: batches with the set of what is *not* acknowledged. `done` is
        called once, when all of it is durable or will not be. Raises InvalidAck and
        SubscriptionFenced: then nothing was noted."""
        if self.attached:
            self.subscription.acknowledge(self, positions, partial, done)
        elif done is not None:
            done(ConsumerNotFound(self.consumer_id))

    def acknowledge_cumulative(
        self, position: Position, ack_set: Sequence[int] = (), done: Done | None = None
    ) -> None:
        """Everything up to `position`; with `ack_set`, of that batch what is not in the set.
        Raises NotAllowed where consumers share, InvalidAck, SubscriptionFenced."""
        if self.attached:
            self.subscription.acknowledge_cumulative(position, ack_set, done)
        elif done is not None:
            done(ConsumerNotFound(self.consumer_id))

    def redeliver(self, positions: Sequence[Position] | None, epoch: int | None = None) -> None:
        """Give these again; None: all that it has. What is delivered from now on bears `epoch`."""
        if epoch is not None:
            self.epoch = epoch
        if self.attached:
            self.subscription.on_redeliver(self, positions)

    def on_writable(self) -> None:
        """The connection has room again."""
        if self.attached:
            self.subscription.advance()

    # ---- requests --------------------------------------------------------------------------------

    async def seek(self, target: Position) -> None:
        """Move the subscription: `target` is the next to be delivered. See Subscription.seek."""
        await self._found().seek(target)

    async def seek_to_time(self, publish_time_ms: int) -> None:
        """Move the subscription to the first entry published then or later."""
        await self._found().seek_to_time(publish_time_ms)

    async def unsubscribe(self, *, force: bool = False) -> None:
        """Delete the subscription. Raises ConsumersConnected if it has other consumers, too."""
        await self._found().unsubscribe(self, force=force)

    async def last_message_id(self) -> LastMessage:
        """The end of the topic as it is now."""
        return await self._found().last_message()

    async def close(self) -> None:
        """The client closes. Returns when what it acknowledged before is durable; raises the error
        because of which it may not be."""
        if self.attached:
            self.close_nowait()
            await self.subscription.flush()

    def close_nowait(self) -> None:
        """The connection is gone."""
        if self.attached:
            self.subscription.detach(self)

    # ---- called by the subscription --------------------------------------------------------------

    def deliver(self, action: Deliver, now: float) -> int:
        """Hand over to the session; how many bytes of entries."""
        self.events.deliver(action.entries, action.marks)
        size = sum([len(entry.view.data) for entry in action.entries])
        self.meter.count(action.messages, size, now)
        if action.marks:
            again = sum(1 for mark in action.marks.values() if mark.redelivery_count)
            self.redelivered.count(again, 0, now)
        return size

    def evict(self, reason: CloseReason) -> None:
        """The broker closes it."""
        if self.attached:
            self.subscription.detach(self)
            self.events.closed(reason)

    def stats(self) -> dict[str, Any]:
        """Pulsar's ConsumerStats."""
        machine, now = self.machine, asyncio.get_running_loop().time()
        return {
            **self.meter.describe("Out", now),
            "msgRateRedeliver": self.redelivered.rates(now).messages,
            "consumerName": self.name,
            "type": self.request.type.title,
            "priorityLevel": self.request.priority,
            "availablePermits": machine.permits,
            "unackedMessages": machine.unacked,
            "blockedConsumerOnUnackedMsgs": machine.blocked,
            "avgMessagesPerEntry": round(machine.messages_per_entry),
            "address": self.request.client.address,
            "clientVersion": self.request.client.version,
            "connectedSince": self._connected_since,
            "metadata": dict(self.request.metadata),
        }

    def _found(self) -> Subscription:
        if not self.attached:
            raise ConsumerNotFound(self.consumer_id)
        return self.subscription
