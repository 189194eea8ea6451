"""A subscription of a non-persistent topic: its consumers, and the counts of dropped messages.

The subscription lives in memory only. A durable one stays until it is deleted or its topic is
closed, and counts the dropped messages.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from magnetar.broker.dispatch.live import Live, LiveFailover
from magnetar.broker.dispatch.live_keyed import KeyedLive
from magnetar.broker.errors import ConsumerBusy, ConsumersConnected, NotAllowed
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.topic.consumer import ConsumerHandle
from magnetar.broker.topic.contract import CloseReason, LastMessage, SubscriptionType
from magnetar.broker.topic.meter import CLIENTS_PER_TURN, Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.broker.dispatch.active import Candidates
    from magnetar.broker.dispatch.dispatcher import Activate, ConsumerRefused
    from magnetar.broker.dispatch.permits import Consumer, Limits
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.contract import ConsumerEvents, SubscribeRequest
    from magnetar.runtime.turns import Turns

    Done = Callable[[BrokerError | None], None]


class LiveSubscription:
    """One subscription of a non-persistent topic. It calls `left` when a consumer has left. It
    calls `abandoned` when it is deleted, and when it is non-durable and has lost its last
    consumer."""

    def __init__(
        self,
        name: str,
        *,
        durable: bool,
        properties: Mapping[str, str],
        limits: Limits,
        key_shared: KeySharedSettings | None = None,
        now_ms: Callable[[], int],
        left: Callable[[], None],
        abandoned: Callable[[LiveSubscription], None],
        candidates: Callable[[], Candidates],
    ) -> None:
        """`candidates` makes the object that chooses the active consumer."""
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self.name = name
        self.durable = durable
        self.properties = dict(properties)
        self.consumers: dict[Consumer, ConsumerHandle] = {}  # in the order of joining
        self.delivered = Meter(now)
        self.dropped = Meter(now)
        self._limits = limits
        self._now_ms = now_ms
        self._left = left
        self._abandoned = abandoned
        self._candidates = candidates
        self._joined = 0
        self._type = SubscriptionType.EXCLUSIVE
        self._key_shared = key_shared or KeySharedSettings()
        self._machine: Live | KeyedLive = Live(name, exclusive=True)

    def attach(
        self, request: SubscribeRequest, events: ConsumerEvents, *, connected_since: str
    ) -> ConsumerHandle:
        """A consumer joins. Raises ConsumerBusy, ConsumerRefused, before any change."""
        if self.consumers and request.type is not self._type:
            raise ConsumerBusy(self.name, f"its consumers use type {self._type.title}")
        machine = self._machine if self.consumers else self._machine_for(request.type)
        handle = ConsumerHandle(
            self,
            request,
            events,
            self._limits,
            join_number=self._joined,
            connected_since=connected_since,
            now=self._loop.time(),
            now_ms=self._now_ms,
        )
        changes = machine.add_consumer(handle.machine)
        self._machine, self._type = machine, request.type
        self._joined += 1
        self.consumers[handle.machine] = handle
        self._tell(changes)
        return handle

    def _machine_for(self, kind: SubscriptionType) -> Live | KeyedLive:
        if kind is SubscriptionType.KEY_SHARED:
            return KeyedLive(self.name, self._key_shared)
        if kind is SubscriptionType.FAILOVER:
            return LiveFailover(self.name, self._candidates())
        return Live(self.name, exclusive=kind is SubscriptionType.EXCLUSIVE)

    def _tell(self, changes: Sequence[Activate]) -> None:
        for change in changes:
            handle = self.consumers[change.consumer]
            handle.active = change.active
            handle.events.active_changed(change.active)

    async def evict_dead(self, refused: ConsumerRefused) -> None:
        """Evict the incumbents of the refusal, the consumers that block the new one, if their
        clients do not answer a probe. Raises the error of the refusal if a client answers, or if
        there is no incumbent."""
        if not refused.incumbents:
            raise refused.error
        for machine in refused.incumbents:
            handle = self.consumers.get(machine)
            if handle is None:
                continue
            if await handle.events.probe():
                raise refused.error
            handle.evict(CloseReason.REPLACED)

    def detach(self, handle: ConsumerHandle) -> None:
        """A consumer leaves."""
        del self.consumers[handle.machine]
        handle.attached = False
        self._tell(self._machine.remove_consumer(handle.machine))
        if not self.consumers and not self.durable:
            self._abandoned(self)
        self._left()

    def on_published(self, entries: Sequence[StoredEntry], now: float) -> None:
        """Deliver the entries, or drop them."""
        deliveries, dropped = self._machine.on_entries(entries)
        for delivery in deliveries:
            size = sum([len(entry.view.data) for entry in delivery.entries])
            handle = self.consumers[delivery.consumer]
            handle.deliver(delivery, size=size, redelivered=0, now=now)
            self.delivered.count(delivery.messages, size, now)
        if dropped:
            self.dropped.count(dropped, 0, now)

    async def describe(self, turns: Turns) -> dict[str, Any]:
        """The statistics in the form of Pulsar's NonPersistentSubscriptionStats."""
        consumers = await turns.each(
            self.consumers.values(), ConsumerHandle.stats, slice_items=CLIENTS_PER_TURN
        )
        now = self._loop.time()
        return {
            **self.delivered.describe("Out", now),
            "msgRateRedeliver": 0.0,
            "msgDropRate": self.dropped.rates(now).messages,
            "msgDropCount": self.dropped.messages,
            "type": self._type.title if self.consumers else "None",
            "isDurable": self.durable,
            "msgBacklog": 0,
            "msgBacklogMessages": 0,
            "unackedMessages": 0,
            "subscriptionProperties": dict(self.properties),
            "consumers": consumers,
        }

    # ---- what its consumers ask (OwningSubscription) ---------------------------------------------

    def on_flow(self, handle: ConsumerHandle, permits: int) -> None:
        self._machine.on_flow(handle.machine, permits)

    def on_redeliver(self, handle: ConsumerHandle, positions: Sequence[Position] | None) -> None:
        """No effect: messages are not stored."""

    def negative_ack(
        self, handle: ConsumerHandle, positions: Sequence[Position], returned: Sequence[Position]
    ) -> None:
        """Raises NotAllowed."""
        raise NotAllowed("a negative acknowledgement", "a non-persistent topic keeps no messages")

    def acknowledge(
        self,
        handle: ConsumerHandle,
        positions: Sequence[Position],
        partial: Sequence[tuple[Position, Sequence[int]]],
        done: Done | None,
    ) -> None:
        """No effect: messages are not stored, so there is no state to keep."""
        if done is not None:
            done(None)

    def acknowledge_cumulative(
        self, position: Position, ack_set: Sequence[int], done: Done | None
    ) -> None:
        """Like `acknowledge`."""
        if done is not None:
            done(None)

    def advance(self) -> None:
        """No effect now: the consumer is writable again, and gets the next message."""

    async def flush(self) -> None:
        """No effect: messages are not stored."""

    async def seek(
        self, target: Position, *, batch_index: int = 0, ack_set: Sequence[int] = ()
    ) -> None:
        """Raises NotAllowed."""
        raise NotAllowed("seek", "a non-persistent topic keeps no messages")

    async def seek_to_time(self, publish_time_ms: int) -> None:
        """Raises NotAllowed."""
        raise NotAllowed("seek", "a non-persistent topic keeps no messages")

    async def unsubscribe(self, handle: ConsumerHandle | None, *, force: bool) -> None:
        """Delete the subscription. Raises ConsumersConnected if there are other consumers, unless
        `force`."""
        others = [it for it in self.consumers.values() if it is not handle]
        if others and not force:
            raise ConsumersConnected(self.name, len(self.consumers))
        for other in others:
            other.evict(CloseReason.UNSUBSCRIBED)
        if handle is not None and handle.attached:
            self.detach(handle)  # its client gets the answer to the request
        self._abandoned(self)

    async def drain(self, handle: ConsumerHandle) -> None:
        """The consumer gets no more messages. Returns at once: it has nothing to acknowledge."""
        handle.machine.leaving = True
        self._tell(self._machine.on_leaving(handle.machine))

    async def last_message(self) -> LastMessage:
        """Return the values of an empty topic: messages are not stored."""
        return LastMessage(EARLIEST, -1, EARLIEST)

    async def backlog_entries(self) -> int:
        """Return 0: messages are not stored."""
        return 0
