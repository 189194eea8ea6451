"""A consumer of a subscription, as the session of its client sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from magnetar.broker.dispatch.permits import Consumer
from magnetar.broker.errors import ConsumerNotFound, InvalidPermits, NotAllowed
from magnetar.broker.topic.activity import Activity
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

    Done = Callable[[BrokerError | None], None]


NEGATIVE_ACKS_MAX: Final = 10_000
"""The limit of message ids of one negative acknowledgement. At the limit it takes 16 to 37 ms of
CPU, parsing included, and longest if each returned entry has a key of its own. A step should take
less than 50 ms."""

PERMITS_MAX: Final = (1 << 31) - 1
"""The limit of permits of one consumer, as in Pulsar, which counts in 32 bits. Permits above this
limit are dropped."""


class ConsumerHandle:
    """A session's handle of a consumer, made by `Topic.subscribe`. Once the client or the broker
    has closed the consumer, the handle drops notices. Acknowledgements then get ConsumerNotFound,
    and requests other than `close` raise it."""

    def __init__(
        self,
        subscription: OwningSubscription,
        request: SubscribeRequest,
        events: ConsumerEvents,
        limits: Limits,
        *,
        join_number: int,
        connected_since: str,
        now: float,
        now_ms: Callable[[], int],
    ) -> None:
        self.subscription = subscription
        self.request = request
        self.events = events
        self.attached = True
        # The state that the client was told. None: the subscription type has no active consumer.
        self.active: bool | None = None
        self.epoch = request.consumer_epoch  # deliveries carry it; None: they carry none
        self.machine = Consumer(
            request.consumer_name,
            request.priority,
            events.writable,
            limits,
            join_number=join_number,
            properties=request.metadata,
            key_shared=request.key_shared,
        )
        self._knows_end = False  # True: the client was told the end of the topic, or will be soon
        self.activity = Activity()
        self.acks = Meter(now)  # the acknowledged messages
        self._acked = 0  # the messages that `acks` has counted
        self._now_ms = now_ms
        self.meter = Meter(now)
        self.redelivered = Meter(now)
        self.chunks = Meter(now)  # entries that are chunks
        self._connected_since = connected_since

    @property
    def consumer_id(self) -> int:
        return self.request.consumer_id

    @property
    def name(self) -> str:
        return self.request.consumer_name

    def begin_end(self) -> bool:
        """The subscription has acknowledged all messages of a terminated topic. Returns True if the
        caller must call `tell_end`, now or later: the client was not told, and no call is due."""
        if self._knows_end:
            return False
        self._knows_end = True
        return True

    def tell_end(self, *, still: bool) -> None:
        """Tell the client that it has reached the end. `still` False: the subscription has a
        backlog again; the client is told when `begin_end` returns True again."""
        self._knows_end = still
        if still and self.attached:
            self.events.reached_end()

    # ---- notices ---------------------------------------------------------------------------------

    def flow(self, permits: int) -> None:
        """The client grants permits for this many more messages, PERMITS_MAX in all. Raises
        InvalidPermits."""
        if permits < 1:
            raise InvalidPermits(permits)
        if self.attached:
            self.activity.on_flow(self._now_ms())
            permits = min(permits, PERMITS_MAX - self.machine.permits)
            self.subscription.on_flow(self, permits)

    def acknowledge(
        self,
        positions: Sequence[Position],
        partial: Sequence[tuple[Position, Sequence[int]]] = (),
        done: Done | None = None,
    ) -> None:
        """Acknowledge whole entries (`positions`), and single messages of batches (`partial`): the
        ack set of a batch holds its *unacknowledged* messages. `done` is called once: with None
        when all of it is durable, or with the first error. Raises InvalidAck, SubscriptionFenced,
        before any change."""
        if self.attached:
            self.subscription.acknowledge(self, positions, partial, done)
            self._on_acked()
        elif done is not None:
            done(ConsumerNotFound(self.consumer_id))

    def acknowledge_cumulative(
        self, position: Position, ack_set: Sequence[int] = (), done: Done | None = None
    ) -> None:
        """Acknowledge everything up to `position`. With `ack_set`, the messages of the set in the
        batch at `position` stay unacknowledged. Raises InvalidAck, SubscriptionFenced, and
        NotAllowed if the subscription type has no cumulative acknowledgements."""
        if self.attached:
            self.subscription.acknowledge_cumulative(position, ack_set, done)
            self._on_acked()
        elif done is not None:
            done(ConsumerNotFound(self.consumer_id))

    def redeliver(self, positions: Sequence[Position] | None, epoch: int | None = None) -> None:
        """Redeliver these entries. None: all unacknowledged entries of the consumer. Later
        deliveries carry the highest `epoch` so far."""
        if epoch is not None:
            self.epoch = max(epoch, self.epoch or 0)
        if self.attached:
            self.subscription.on_redeliver(self, positions)

    def negative_ack(self, positions: Sequence[Position], returned: Sequence[Position]) -> None:
        """For a Key_Shared subscription with `ordered_nacks`: withhold the later entries of the
        keys of `positions`, and take back `returned`, the later entries that the consumer has not
        processed. Closes the consumer if the subscription would withhold too many entries. Raises
        NotAllowed for other subscriptions, and for more than NEGATIVE_ACKS_MAX ids."""
        if len(positions) + len(returned) > NEGATIVE_ACKS_MAX:
            why = f"it names more than {NEGATIVE_ACKS_MAX} message ids"
            raise NotAllowed("an ordered negative acknowledgement", why)
        if self.attached:
            self.subscription.negative_ack(self, positions, returned)

    @property
    def peers(self) -> int:
        """The number of consumers of the subscription."""
        return len(self.subscription.consumers)

    def on_writable(self) -> None:
        """The connection is writable again. The session calls this for only one of the
        subscription's consumers on the connection, so the subscription goes on even if this
        consumer has left."""
        self.subscription.advance()

    # ---- requests --------------------------------------------------------------------------------

    async def seek(
        self, target: Position, *, batch_index: int = 0, ack_set: Sequence[int] = ()
    ) -> None:
        """Move the subscription: the entry at or after `target` is delivered next. See
        Subscription.seek."""
        await self._found().seek(target, batch_index=batch_index, ack_set=ack_set)

    async def seek_to_time(self, publish_time_ms: int) -> None:
        """Move the subscription to the first entry that was published at this time or later."""
        await self._found().seek_to_time(publish_time_ms)

    async def unsubscribe(self, *, force: bool = False) -> None:
        """Delete the subscription. Raises ConsumersConnected if it has other consumers, unless
        `force`."""
        await self._found().unsubscribe(self, force=force)

    async def drain(self) -> None:
        """The consumer will leave: it gets no more entries. Returns when it has acknowledged its
        entries, or is closed."""
        await self._found().drain(self)

    async def last_message_id(self) -> LastMessage:
        """The last message of the topic."""
        return await self._found().last_message()

    async def close(self) -> None:
        """The client closes the consumer. Returns when its acknowledgements are durable. Raises
        LogError if they may not be."""
        if self.attached:
            self.close_nowait()
            await self.subscription.flush()

    def close_nowait(self) -> None:
        """The connection of the client has closed."""
        if self.attached:
            self.subscription.detach(self)

    # ---- called by the subscription --------------------------------------------------------------

    def deliver(self, action: Deliver, *, size: int, redelivered: int, now: float) -> None:
        """Pass the entries to the session, and count them. `size`: their bytes. `redelivered`: the
        number of the messages with a redelivery count."""
        self.events.deliver(action.entries, action.details)
        self.activity.on_sent(self._now_ms())
        self.meter.count(action.messages, size, now)
        if redelivered:
            self.redelivered.count(redelivered, 0, now)
        chunks = sum([entry.view.chunk is not None for entry in action.entries])
        if chunks:
            self.chunks.count(chunks, 0, now)

    def evict(self, reason: CloseReason) -> None:
        """Close the consumer and tell its client the reason."""
        if self.attached:
            self.subscription.detach(self)
            self.events.closed(reason)

    def stats(self) -> dict[str, Any]:
        """The statistics in the form of Pulsar's ConsumerStats."""
        machine, now = self.machine, asyncio.get_running_loop().time()
        return {
            **self.meter.describe("Out", now),
            "msgRateRedeliver": self.redelivered.rates(now).messages,
            "messageAckRate": self.acks.rates(now).messages,
            "chunkedMessageRate": self.chunks.rates(now).messages,
            "consumerName": self.name,
            "type": self.request.type.title,
            "priorityLevel": self.request.priority,
            "availablePermits": machine.permits,
            "unackedMessages": machine.unacked,
            "blockedConsumerOnUnackedMsgs": machine.blocked,
            "avgMessagesPerEntry": round(machine.messages_per_entry) if self.meter.messages else 0,
            "address": self.request.client.address,
            "clientVersion": self.request.client.version,
            "connectedSince": self._connected_since,
            "metadata": dict(self.request.metadata),
            **self.activity.describe_consumer(),
        }

    def _on_acked(self) -> None:
        """Count an acknowledgement that the subscription has accepted."""
        self.activity.acked_ms = self._now_ms()
        acked = self.machine.acked - self._acked
        if acked:
            self._acked += acked
            self.acks.count(acked, 0, asyncio.get_running_loop().time())

    def _found(self) -> OwningSubscription:
        if not self.attached:
            raise ConsumerNotFound(self.consumer_id)
        return self.subscription


class OwningSubscription(Protocol):
    """The methods of a subscription that a handle calls, or a session through the handle.
    `Subscription` describes them."""

    consumers: dict[Consumer, ConsumerHandle]

    async def backlog_entries(self) -> int: ...

    def on_flow(self, handle: ConsumerHandle, permits: int) -> None: ...

    def on_redeliver(
        self, handle: ConsumerHandle, positions: Sequence[Position] | None
    ) -> None: ...

    def negative_ack(
        self, handle: ConsumerHandle, positions: Sequence[Position], returned: Sequence[Position]
    ) -> None: ...

    def acknowledge(
        self,
        handle: ConsumerHandle,
        positions: Sequence[Position],
        partial: Sequence[tuple[Position, Sequence[int]]],
        done: Done | None,
    ) -> None: ...

    def acknowledge_cumulative(
        self, position: Position, ack_set: Sequence[int], done: Done | None
    ) -> None: ...

    def advance(self) -> None: ...

    def detach(self, handle: ConsumerHandle) -> None: ...

    async def flush(self) -> None: ...

    async def seek(
        self, target: Position, *, batch_index: int = 0, ack_set: Sequence[int] = ()
    ) -> None: ...

    async def seek_to_time(self, publish_time_ms: int) -> None: ...

    async def unsubscribe(self, handle: ConsumerHandle | None, *, force: bool) -> None: ...

    async def drain(self, handle: ConsumerHandle) -> None: ...

    async def last_message(self) -> LastMessage: ...
