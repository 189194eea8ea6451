"""A non-persistent topic: it sends messages to the connected consumers and does not store them.

The session reads a publish. In the same step of the event loop, the publish passes the stages
(pipeline.py), and the topic delivers it; with many subscriptions the delivery takes more steps
(live_delivery.py). The producer gets its receipt even if no consumer gets the message. A
subscription drops and counts a message that it cannot deliver (no consumer, no permits, a
connection that is not writable).

The topic has no record, and a task only while entries are queued. After an unexpected exception in
the task (guard.py), the topic calls `on_failed`, and the broker closes it. When no client has used
the topic for IDLE_S, it calls `on_idle`, and the broker closes it. Its durable subscriptions, which
hold no messages, end with it.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.dispatch.active import FAILOVER_DEFAULTS, Candidates, FailoverRules
from magnetar.broker.dispatch.dispatcher import ConsumerRefused
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.errors import (
    NotAllowed,
    PoliciesUnavailable,
    ProducerBusy,
    SubscriptionNotFound,
    TopicClosing,
    TopicFailed,
)
from magnetar.broker.guard import Guard
from magnetar.broker.topic.consumer_admission import ConsumerAdmission, require_name
from magnetar.broker.topic.contract import AccessMode, CloseReason
from magnetar.broker.topic.description import describe_all
from magnetar.broker.topic.live_delivery import LiveDelivery
from magnetar.broker.topic.live_producer import LiveProducer
from magnetar.broker.topic.live_subscription import LiveSubscription
from magnetar.broker.topic.meter import CLIENTS_PER_TURN, Meter
from magnetar.broker.topic.pausing_rate import PausingRate
from magnetar.broker.topic.pipeline import (
    ChecksumStage,
    FormatStage,
    Pipeline,
    SizeStage,
)
from magnetar.broker.topic.throttle import TopicSizeStage
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

    from magnetar.broker.errors import BrokerError
    from magnetar.broker.key_shared_settings import KeySharedSettings
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position
    from magnetar.broker.policies.source import PolicySource
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.contract import (
        ConsumerEvents,
        ProducerEvents,
        ProducerRequest,
        SubscribeRequest,
    )
    from magnetar.broker.topic.live_producer import Cap
    from magnetar.protos.names import TopicName
    from magnetar.runtime.clock import Clock
    from magnetar.runtime.on_demand import Spawn

IDLE_S: Final = 60.0
"""The time in seconds without clients after which the topic ends. A client that reconnects within
this time finds the counters of its durable subscription."""

CLOSED_PER_TURN: Final = 20
"""The number of clients that a closing topic disconnects in one turn of the loop. A Key_Shared
consumer takes up to 0.5 ms."""


class NonPersistentTopic:
    """A `ServedTopic`. `next_name` makes a name for a producer without one."""

    def __init__(
        self,
        name: TopicName,
        *,
        policies: PolicySource,
        clock: Clock,
        next_name: Callable[[], str],
        cap: Cap,
        on_idle: Callable[[TopicName], None],
        on_failed: Callable[[NonPersistentTopic, BrokerError], None],
        spawn: Spawn,
        guard: Callable[[Callable[[Exception], None]], Guard] | None = None,
        limits: Limits | None = None,
        key_shared: KeySharedSettings | None = None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        failover: FailoverRules = FAILOVER_DEFAULTS,
        turns: Turns | None = None,
    ) -> None:
        """`guard` makes the guard of the topic; None: it catches nothing. `turns`: the turns of the
        broker's long computations. None: the topic has turns of its own."""
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.producers: dict[str, LiveProducer] = {}
        self.subscriptions: dict[str, LiveSubscription] = {}
        self.published = Meter(self._loop.time())
        self.closed = False
        self._clock = clock
        self._next_name = next_name
        self._cap = cap
        self._on_idle = on_idle
        self._on_failed = on_failed
        self._spawn = spawn
        self._guard = Guard(str(name)) if guard is None else guard(self._on_bug)
        self._limits = limits or Limits()
        self._failover = failover
        self._key_shared = key_shared
        self._policies = policies
        self._turns = turns or Turns()
        self._admission = ConsumerAdmission(str(name))
        self._size = TopicSizeStage()
        self._rate = PausingRate()
        self._pipeline = Pipeline(
            [
                SizeStage(message_bytes_max),
                ChecksumStage(),
                FormatStage(),
                self._size,
                self._rate,
            ]
        )
        self._delivery = LiveDelivery(self.subscriptions, self._turns, self._spawn_guarded, of=name)
        self._removed = (0, 0)  # messages and bytes delivered by subscriptions that are gone
        self._dropped = 0  # messages dropped by producers and subscriptions that are gone
        self._idle_timer: asyncio.TimerHandle | None = None  # None: the topic is in use
        self._unfollow = policies.subscribe(self._apply_policies)
        self._apply_policies()
        self._maybe_idle()

    def _apply_policies(self) -> None:
        try:
            policies = self._policies.effective
        except PoliciesUnavailable:
            return  # the last known policies stay in force
        self._size.bytes_max = policies.max_message_bytes
        self._rate.set_rate(policies.publish_rate, self._loop.time())

    # ---- producers -------------------------------------------------------------------------------

    async def add_producer(self, request: ProducerRequest, events: ProducerEvents) -> LiveProducer:
        """Admit a producer. Raises ProducerBusy, NotAllowed, TopicClosing,
        PoliciesUnavailable."""
        if request.access_mode is not AccessMode.SHARED:
            what = f"access mode {request.access_mode.title}"
            raise NotAllowed(what, "a non-persistent topic keeps no epoch of a producer")
        while True:
            self._require_open()
            namesake = self.producers.get(request.name)
            if namesake is None:
                break
            if await namesake.events.probe():
                raise ProducerBusy(str(self.name), request.name, "the name is in use")
            namesake.evict(CloseReason.REPLACED)
        limit, count = self._policies.effective.producers_max, len(self.producers)
        if limit and count >= limit:
            why = f"the topic has {count} producers, and max_producers_per_topic allows {limit}"
            raise ProducerBusy(str(self.name), request.name, why)
        handle = LiveProducer(
            request,
            request.name or self._free_name(),
            events,
            self._pipeline,
            self._cap,
            connected_since=self._time_stamp(),
            deliver=self._deliver,
            leave=self._on_left,
            rate=self._rate,
            delivery=self._delivery,
            now_ms=self._clock.now_ms,
            now=self._loop.time(),
        )
        self.producers[handle.name] = handle
        self._maybe_idle()
        return handle

    def _free_name(self) -> str:
        """A new name. Clients may choose any name, also the next generated one."""
        while (name := self._next_name()) in self.producers:
            pass
        return name

    def _deliver(self, entries: Sequence[StoredEntry], now: float) -> None:
        size = sum([len(entry.view.data) for entry in entries])
        self.published.count(sum([entry.messages for entry in entries]), size, now)
        self._delivery.deliver(entries, now)

    def _spawn_guarded(
        self, run: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> asyncio.Task[None] | None:
        return self._spawn(partial(self._guard.run, "task", run), name)

    def _on_bug(self, error: Exception) -> None:
        if not self.closed:
            self._on_failed(self, TopicFailed(str(self.name), error))

    def _on_left(self, producer: LiveProducer) -> None:
        del self.producers[producer.name]
        self._dropped += producer.dropped.messages
        self._maybe_idle()

    # ---- subscriptions ---------------------------------------------------------------------------

    async def subscribe(self, request: SubscribeRequest, events: ConsumerEvents) -> ConsumerHandle:
        """Admit a consumer. Creates the subscription if it does not exist. Raises
        ConsumerBusy, NotAllowed, TopicClosing, PoliciesUnavailable."""
        require_name(request.subscription)
        admission, policies = self._admission, self._policies.effective
        admission.require_rate(request, policies, self._loop.time())
        admission.require_type(request, policies)
        while True:
            self._require_open()
            name = request.subscription
            is_new = name not in self.subscriptions
            if is_new:
                admission.require_new(name, len(self.subscriptions), policies)
                self._add(name, durable=request.durable, properties=request.subscription_properties)
            subscription = self.subscriptions[name]
            try:
                admission.require_room(subscription, self.subscriptions.values(), policies)
                handle = subscription.attach(request, events, connected_since=self._time_stamp())
            except ConsumerRefused as refused:
                await subscription.evict_dead(refused)
            else:
                self._maybe_idle()
                return handle
            finally:
                if is_new and not subscription.durable and not subscription.consumers:
                    self._forget(subscription)

    async def ensure_subscription(
        self, name: str, start: Position, properties: Mapping[str, str] | None = None
    ) -> None:
        """Create a durable subscription of this name if there is none. It begins with the next
        message, and ignores `start`. Raises TopicClosing, NotAllowed (the topic has too many),
        PoliciesUnavailable."""
        self._require_open()
        require_name(name)
        if name not in self.subscriptions:
            self._admission.require_new(name, len(self.subscriptions), self._policies.effective)
            self._add(name, durable=True, properties=properties or {})

    async def unsubscribe(self, name: str, *, force: bool = False) -> None:
        """Delete a subscription. Raises SubscriptionNotFound, ConsumersConnected (unless `force`),
        TopicClosing."""
        self._require_open()
        subscription = self.subscriptions.get(name)
        if subscription is None:
            raise SubscriptionNotFound(name)
        await subscription.unsubscribe(None, force=force)

    def _add(self, name: str, *, durable: bool, properties: Mapping[str, str]) -> None:
        self.subscriptions[name] = LiveSubscription(
            name,
            durable=durable,
            properties=properties,
            limits=self._limits,
            key_shared=self._key_shared,
            now_ms=self._clock.now_ms,
            left=self._maybe_idle,
            abandoned=self._forget,
            candidates=lambda: Candidates(
                str(self.name), self.name.partition, self._failover.non_partitioned
            ),
        )
        self._delivery.on_changed()

    def _forget(self, subscription: LiveSubscription) -> None:
        if self.subscriptions.get(subscription.name) is subscription:
            del self.subscriptions[subscription.name]
            self._delivery.on_changed()
            messages, size = self._removed
            delivered = subscription.delivered
            self._removed = messages + delivered.messages, size + delivered.bytes
            self._dropped += subscription.dropped.messages

    # ---- asking ----------------------------------------------------------------------------------

    @property
    def subscription_names(self) -> Collection[str]:
        return self.subscriptions.keys()

    @property
    def delivered_total(self) -> tuple[int, int]:
        """The numbers of messages and bytes that were delivered since the topic was opened."""
        meters = [subscription.delivered for subscription in self.subscriptions.values()]
        messages, size = self._removed
        return (
            messages + sum(meter.messages for meter in meters),
            size + sum(meter.bytes for meter in meters),
        )

    @property
    def users(self) -> int:
        """The number of connected producers and consumers."""
        consumers = sum(len(it.consumers) for it in self.subscriptions.values())
        return len(self.producers) + consumers

    @property
    def dropped_total(self) -> int:
        """The number of messages that were dropped since the topic was opened."""
        return self._dropped + sum(meter.messages for meter in self._drops())

    def _drops(self) -> list[Meter]:
        producers = [producer.dropped for producer in self.producers.values()]
        return producers + [subscription.dropped for subscription in self.subscriptions.values()]

    async def stats(self) -> dict[str, Any]:
        """The statistics in the form of Pulsar's NonPersistentTopicStats."""
        subscriptions = await describe_all(self.subscriptions, self._turns)
        publishers = await self._turns.each(
            self.producers.values(),
            lambda producer: producer.describe(self._loop.time()),
            slice_items=CLIENTS_PER_TURN,
        )
        now, meter = self._loop.time(), self.published
        messages_out, bytes_out = self.delivered_total
        return {
            **meter.describe("In", now),
            "msgRateOut": sum(each["msgRateOut"] for each in subscriptions.values()),
            "msgThroughputOut": sum(each["msgThroughputOut"] for each in subscriptions.values()),
            "msgOutCounter": messages_out,
            "bytesOutCounter": bytes_out,
            "msgDropRate": sum(drops.rates(now).messages for drops in self._drops()),
            "msgDropCount": self.dropped_total,
            "averageMsgSize": meter.bytes / meter.messages if meter.messages else 0.0,
            "publishers": publishers,
            "subscriptions": subscriptions,
        }

    # ---- the end ---------------------------------------------------------------------------------

    async def close(self, reason: CloseReason = CloseReason.UNLOADED) -> None:
        """Stop serving the topic. May be called more than once."""
        self.closed = True
        self._unfollow()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        clients: list[LiveProducer | ConsumerHandle] = list(self.producers.values())
        for subscription in self.subscriptions.values():
            clients += subscription.consumers.values()
        try:
            await self._turns.each(
                clients, lambda client: client.evict(reason), slice_items=CLOSED_PER_TURN
            )
        finally:
            for client in clients:  # some are still connected if the close was cancelled
                client.evict(reason)

    def _maybe_idle(self) -> None:
        """Keep a timer while there is neither a producer nor a consumer."""
        used = self.users > 0
        if (used or self.closed) and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        elif not (used or self.closed) and self._idle_timer is None:
            self._idle_timer = self._loop.call_later(IDLE_S, self._end_idle)

    def _end_idle(self) -> None:
        self._idle_timer = None
        self._on_idle(self.name)

    def _require_open(self) -> None:
        if self.closed:
            raise TopicClosing(str(self.name))

    def _time_stamp(self) -> str:
        return datetime.fromtimestamp(self._clock.now_ms() / 1_000, UTC).isoformat()
