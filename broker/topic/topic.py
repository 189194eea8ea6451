"""A persistent topic as its owner serves it: a log, its cursors, the producers and subscriptions.

Theory of operation. The session reads a publish. In the same step of the event loop, the publish
passes the stages (pipeline.py) and the log appends it, unless a stage holds it. The log reports
which entries are durable, and the producers get receipts in the order of their sends.

If the log fails or is fenced, the outcome of the outstanding publishes is unknown. The topic then
sends no more receipts and disconnects all producers and consumers. Their clients look the topic up
again, and send the messages without a receipt again, in order, to the next owner. The topic calls
`on_failed` once, and the broker closes the topic.

A clean close takes these steps in order, within CLOSE_TIMEOUT_S: accept no more publishes, send the
outstanding receipts, disconnect all clients, make the cursors durable, store the index of delayed
messages, close the ledgers.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self, cast

from magnetar.broker.cursor.cursors import Cursors
from magnetar.broker.cursor.journal import CursorConfig
from magnetar.broker.cursor.sequences import DEDUPLICATION
from magnetar.broker.dispatch.delayed import DelayPolicy, Delays
from magnetar.broker.dispatch.dispatcher import ConsumerRefused
from magnetar.broker.dispatch.permits import UNLIMITED, Limits
from magnetar.broker.errors import (
    BrokerError,
    LogClosed,
    LogError,
    NotAllowed,
    PoliciesUnavailable,
    SubscriptionFenced,
    SubscriptionNotFound,
    TopicClosing,
    TopicFailed,
    TopicInUse,
    TopicTerminated,
)
from magnetar.broker.guard import Guard
from magnetar.broker.log.log import Log
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.broker.log.topic_deletion import CLIENTS_MAX, client_key
from magnetar.broker.topic.consumer_admission import ConsumerAdmission, require_name
from magnetar.broker.topic.contract import (
    CloseReason,
    InitialPosition,
    SubscriptionType,
)
from magnetar.broker.topic.deduplication import Deduplication, DeduplicationConfig
from magnetar.broker.topic.delayed_store import DelayedStore
from magnetar.broker.topic.description import describe_all
from magnetar.broker.topic.disconnector import Disconnector
from magnetar.broker.topic.dispatch_rate import DispatchRate
from magnetar.broker.topic.explanation import SubscriptionState
from magnetar.broker.topic.meter import CLIENTS_PER_TURN, Meter
from magnetar.broker.topic.persistence import quorum_of
from magnetar.broker.topic.pipeline import (
    AccessModeStage,
    ChecksumStage,
    DelayStage,
    FormatStage,
    Pipeline,
    SizeStage,
)
from magnetar.broker.topic.producer_admission import EPOCH_PROPERTY, ProducerAdmission
from magnetar.broker.topic.quota import BacklogQuotas
from magnetar.broker.topic.retention import Trimmer
from magnetar.broker.topic.subscription import DISPATCHERS, Subscription
from magnetar.broker.topic.throttle import RateStage, TopicSizeStage
from magnetar.runtime.event import Event
from magnetar.runtime.log import get_logger
from magnetar.runtime.on_demand import spawn_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence

    from magnetar.broker.cursor.cursor import Cursor
    from magnetar.broker.dispatch.explain import Reason
    from magnetar.broker.log.outstanding import Appended, AppendRun
    from magnetar.broker.policies.source import PolicySource
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.contract import (
        ConsumerEvents,
        ProducerEvents,
        ProducerRequest,
        SubscribeRequest,
    )
    from magnetar.broker.topic.environment import TopicEnvironment
    from magnetar.broker.topic.oldest import Oldest
    from magnetar.broker.topic.pipeline import Publish, Publisher
    from magnetar.broker.topic.producer import ProducerHandle
    from magnetar.protos.names import TopicName

CLOSE_TIMEOUT_S: Final = 5.0
"""The time limit of a close in seconds. It is enough for two slow writes to bookies and two to the
metadata store. The next owner recovers the ledgers that are still open at the limit."""

DELAYED_TIMEOUT_S: Final = 1.0
"""The part of CLOSE_TIMEOUT_S for storing the index of delayed messages. The close of the data
ledger comes afterwards, and is more important. Without a stored index, the next owner only reads
more of the log. While the next owner recovers an open data ledger, the clients wait."""

_Key = tuple[str, bool]
"""The key of a subscription: its name, and whether it is durable. A durable and a non-durable
subscription may have the same name."""

_NO_KEYS: Final[frozenset[_Key]] = frozenset()
"""The empty set that all topics share: each empty set takes 216 bytes."""

_log = get_logger(__name__)


@lru_cache(8)
def _cursor_config(producers_max: int) -> CursorConfig:
    """Return the cursor configuration for this limit. All topics with the same limit share it."""
    return CursorConfig(producers_max=producers_max)


_WITHOUT_STATE: Final = (ChecksumStage(), FormatStage())
"""Stages that the topics share."""


class TopicState(Enum):
    OPEN = "open"
    CLOSING = "closing"
    FAILED = "failed"  # the topic disconnects all clients, and the broker closes the topic
    CLOSED = "closed"


class PersistentTopic:
    """A `Topic` whose entries are in ledgers. Create it with `open`."""

    __slots__ = (
        "_chunks",
        "_clock",
        "_closed",
        "_consumer_admission",
        "_creating",
        "_delay_policy",
        "_delay_stage",
        "_disconnector",
        "_failover",
        "_holds",
        "_idle_since",
        "_in",
        "_key_shared",
        "_limits",
        "_on_failed",
        "_publish_rate",
        "_rate",
        "_rate_timer",
        "_released",
        "_removed_bytes",
        "_removed_messages",
        "_size",
        "_subscriptions",
        "_tasks",
        "_text",
        "_turns",
        "_unfollow",
        "admission",
        "cursors",
        "deduplication",
        "delayed",
        "guard",
        "log",
        "name",
        "pipeline",
        "policies",
        "quotas",
        "state",
        "trimmer",
    )

    @classmethod
    async def open(
        cls,
        name: TopicName,
        environment: TopicEnvironment,
        *,
        policies: PolicySource,
        incarnation: str,
        create: bool = True,
        epoch_min: int = 0,
        ledger_min: int = 0,
        version_min: int = -1,
        holds: Callable[[], bool] = lambda: True,
        guard: Callable[[Callable[[Exception], None]], Guard] | None = None,
    ) -> Self:
        """Take the topic over and fence its previous owner. See OwnedRecord.take for `incarnation`,
        `create`, `epoch_min`, `ledger_min`, `version_min` and `holds`. `guard` makes the guard
        around the topic's callbacks and tasks; its argument is the function that fails the topic.
        None: the topic does not catch unexpected exceptions.

        Raises NotOwner, LogFenced, LogUnavailable, LogDamaged, TopicFull, TopicDeleted,
        TopicNotFound, PoliciesUnavailable; ReadFailed while restoring sequence ids.
        """
        log = await Log.open(
            name,
            store=environment.store,
            ledgers=environment.ledgers,
            config=environment.log_config,
            clock=environment.clock,
            cache=environment.cache,
            incarnation=incarnation,
            create=create,
            epoch_min=epoch_min,
            ledger_min=ledger_min,
            quorum=partial(quorum_of, policies),
            version_min=version_min,
            holds=holds,
        )
        if environment.latency is not None:
            log.latency = environment.latency
        if environment.budget is not None:
            log.budget = environment.budget
        dedup = environment.deduplication or DeduplicationConfig()
        cursors = await Cursors.open(log, _cursor_config(dedup.producers_max))
        delayed = await DelayedStore.open(log, cursors)
        restored = await Deduplication.open(log, cursors, policies, environment.clock, dedup)
        record = log.owned_record.record
        if record.ledgers or record.cursor_ledgers:
            # A later owner may have confirmed acknowledgements that these cursors do not have.
            await log.owned_record.verify()
        return cls(name, log, cursors, restored, delayed, environment, policies, guard)

    def __init__(
        self,
        name: TopicName,
        log: Log,
        cursors: Cursors,
        deduplication: Deduplication,
        delayed: DelayedStore,
        environment: TopicEnvironment,
        policies: PolicySource,
        guard: Callable[[Callable[[Exception], None]], Guard] | None = None,
    ) -> None:
        now = asyncio.get_running_loop().time()
        text = str(name)  # one string, which all parts of the topic share
        self.name = name
        self.log = log
        self.cursors = cursors
        self.policies = policies
        self.state = TopicState.OPEN
        self._subscriptions: dict[_Key, Subscription] = {}
        self._clock = clock = environment.clock
        self._turns = environment.turns
        self._tasks = environment.tasks
        self._on_failed = environment.on_failed
        self._limits = environment.limits or Limits()
        self._failover = environment.failover
        self._key_shared = environment.key_shared
        self._rate = DispatchRate("topic")
        self._consumer_admission = ConsumerAdmission(text)
        self._creating = _NO_KEYS  # subscriptions that are being created
        self._text = text
        self.guard = Guard(text) if guard is None else guard(self._on_bug)
        self._disconnector = Disconnector(self._turns, self._tasks, self.guard)
        self._in = Meter(now)
        self._chunks = Meter(now)
        self.deduplication = deduplication
        self.delayed = delayed
        self._size = TopicSizeStage()
        self._publish_rate = RateStage(self._wake_at, log.budget)
        self._rate_timer: asyncio.TimerHandle | None = None  # None: no timer was needed yet
        self._delay_stage = DelayStage(clock.now_ms)
        self._delay_policy = DelayPolicy(
            strict=environment.strict_delays, fixed_look_ahead=environment.fixed_delay_look_ahead
        )
        self.pipeline = Pipeline(
            [
                SizeStage(environment.message_bytes_max),
                *_WITHOUT_STATE,
                self._delay_stage,
                AccessModeStage(text, self._producer_epoch),
                self._size,
                self._publish_rate,
                deduplication.stage,
            ]
        )
        self.admission = ProducerAdmission(
            text,
            log,
            self.pipeline,
            policies,
            environment.names,
            time_stamp=self._time_stamp,
            require_open=self._require_takes,
            log_failed=self._fail,
            exceeds_rate=self._exceeds_rate,
            last_sequence_id=deduplication.last_sequence_id,
            spawn=self._spawn_call,
            disconnector=self._disconnector,
            turns=self._turns,
        )
        self.quotas = BacklogQuotas(
            log,
            policies,
            clock,
            self._list_subscriptions,
            partial(self.admission.disconnect_all, CloseReason.QUOTA),
        )
        self._removed_messages = 0  # delivered by deleted subscriptions
        self._removed_bytes = 0
        self._holds = 0  # the open `held` blocks and the disconnections in progress
        self._released = Event()  # set when `_holds` becomes 0
        self._closed = Event()
        self.trimmer = Trimmer(log, cursors, policies, clock)
        log.on_head_dropped = self._on_head_dropped
        log.on_terminated = self._on_terminated
        self._idle_since: float | None = now
        log.on_appended = self._on_appended
        log.on_failed = self._on_log_failed
        log.protect = partial(self.guard.call, "log")
        spawn = self._spawn  # one bound method for all three
        log.start(spawn)
        cursors.start(spawn)
        self.delayed.start(spawn)
        for subscription in cursors.names:
            self._add_durable(subscription)
        self._unfollow = policies.subscribe(self._on_policies)
        self._apply_policies(unacked=environment.limits is None)

    # ---- producers -------------------------------------------------------------------------------

    async def add_producer(
        self, request: ProducerRequest, events: ProducerEvents
    ) -> ProducerHandle:
        """See Topic.add_producer."""
        self._require_open()
        await self.quotas.require()
        return await self.admission.add(request, events)

    def _require_takes(self) -> None:
        """Raise TopicClosing or TopicTerminated unless the topic accepts publishes."""
        self._require_open()
        if self.log.terminated is not None:
            raise TopicTerminated(str(self.name))
        if self.log.is_terminating:  # the client tries again until the outcome is known
            raise TopicClosing(str(self.name))
        self._idle_since = None

    def _producer_epoch(self) -> int:
        return self.admission.epoch

    def _exceeds_rate(self) -> bool:
        return self._publish_rate.is_exceeded

    def _list_subscriptions(self) -> list[Subscription]:
        return self.all_subscriptions

    def _wake_at(self, due: float) -> None:
        """Resume the producers at the loop's time `due`, when the publish rate admits more."""
        if self._rate_timer is not None:  # the timer of an earlier rate
            self._rate_timer.cancel()
        self._rate_timer = asyncio.get_running_loop().call_at(due, self._on_rate)

    def _on_rate(self) -> None:
        self._publish_rate.open()
        self.admission.resume(asyncio.get_running_loop().time())

    # ---- the log's answers -----------------------------------------------------------------------

    def _on_appended(self, appended: Sequence[Appended]) -> None:
        now = asyncio.get_running_loop().time()
        groups: dict[Publisher, list[Appended]] = {}
        messages = size = 0
        for part in appended:
            publish = cast("Publish", part.context)
            publisher = publish.publisher
            publish.on_outcome(part.count)
            publisher.meter.count(part.messages, part.bytes, now)
            self.deduplication.on_appended(part, publish)
            if publish.sends.views:
                self._count_chunks(publish, part, now)
            messages += part.messages
            size += part.bytes
            if publisher in groups:
                groups[publisher].append(part)
            else:
                groups[publisher] = [part]
        self._in.count(messages, size, now)
        for publisher, parts in groups.items():
            publisher.on_appended(parts)
        self.admission.resume(now)

    def _count_chunks(self, publish: Publish, part: Appended, now: float) -> None:
        places = range(part.start, part.stop)
        views = [publish.sends.views.get(place) for place in places]
        chunks = sum([view is not None and view.chunk is not None for view in views])
        if chunks:
            self._chunks.count(chunks, 0, now)
            publish.publisher.chunks.count(chunks, 0, now)

    def _on_log_failed(self, unknown: Sequence[AppendRun], error: BrokerError) -> None:
        self._fail(error)

    def _spawn(
        self, run: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> asyncio.Task[None] | None:
        work = self.guard.run("task", partial(self._keep, run))
        return spawn_in(self._tasks, work, name)

    async def _keep(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run work of the log, the cursors or the delayed-message index. The topic fails if the log
        has ended when the work ends, or if an operation that the work waited for was cancelled. A
        cancellation of the work itself does not fail the topic here."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await run()
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            _log.warning("work ended: what it waited for was cancelled", task=task.get_name())
            self._fail(self.log.owned_record.lost or LogClosed(str(self.name)))
        if self.log.has_ended:
            self._fail(self.log.owned_record.lost or LogClosed(str(self.name)))

    def _spawn_call(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task for short work, such as a read. An unexpected exception in the task fails
        the topic."""
        task = self._tasks.create_task(self.guard.run("task", lambda: work))
        task.add_done_callback(lambda _: work.close())  # the task may end before its first step
        return task

    def _on_bug(self, error: Exception) -> None:
        """Fail the topic, because its state in memory may be wrong after the unexpected
        exception."""
        self._fail(TopicFailed(str(self.name), error))

    def _fail(self, error: BrokerError) -> None:
        """Fail the topic and disconnect all clients: the outcome of the outstanding publishes is
        unknown, so their producers get no more receipts."""
        if self.state is TopicState.CLOSED or self.state is TopicState.FAILED:
            return
        closing = self.state is TopicState.CLOSING
        if closing and isinstance(error, LogClosed):
            return  # the close of the topic closes the log
        _log.warning("topic failed", topic=str(self.name), error=str(error))
        if not closing:
            self.state = TopicState.FAILED
        self.log.on_appended = _ignore
        self._disconnect(CloseReason.TOPIC_FAILED)
        if not closing:
            self._on_failed(self, error)

    def _disconnect(self, reason: CloseReason) -> None:
        """Disconnect all clients of a topic that admits no more. `wait_released` returns after the
        last disconnection."""
        task = self._disconnector.start(self._stopped_clients(), lambda it: it.evict(reason))
        if task is not None:
            self._holds += 1
            task.add_done_callback(self._on_released)

    def _stopped_clients(self) -> list[ProducerHandle | ConsumerHandle]:
        """Stop the work of all clients, and return the clients. Until their disconnection, the
        topic drops their publishes, delivers nothing, and refuses acknowledgements."""
        clients: list[ProducerHandle | ConsumerHandle] = [*self.admission.stop()]
        for subscription in self.all_subscriptions:
            clients += subscription.end()
        return clients

    # ---- subscriptions ---------------------------------------------------------------------------

    @property
    def subscription_names(self) -> Collection[str]:
        return self.subscriptions.keys()

    @property
    def all_subscriptions(self) -> list[Subscription]:
        """All subscriptions. A durable and a non-durable subscription may have the same name."""
        return list(self._subscriptions.values())

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """The subscriptions by name. A name means the durable subscription if there is one."""
        found: dict[str, Subscription] = {}
        for (name, durable), subscription in self._subscriptions.items():
            if durable or name not in found:
                found[name] = subscription
        return found

    @property
    def hidden_subscriptions(self) -> Mapping[str, Subscription]:
        """The non-durable subscriptions that have the name of a durable subscription."""
        return {
            name: subscription
            for (name, durable), subscription in self._subscriptions.items()
            if not durable and (name, True) in self._subscriptions
        }

    def _named(self, name: str) -> Subscription | None:
        """Return the durable subscription of this name, or else the non-durable subscription, or
        else None."""
        return self._subscriptions.get((name, True)) or self._subscriptions.get((name, False))

    async def subscribe(self, request: SubscribeRequest, events: ConsumerEvents) -> ConsumerHandle:
        """Admit a consumer. Creates the subscription if it does not exist.

        Raises ConsumerBusy, NotAllowed, SubscriptionNotFound, SubscriptionFenced, TopicClosing,
        PoliciesUnavailable; LogError.
        """
        _require_supported(request)
        admission, policies = self._consumer_admission, self.policies.effective
        admission.require_rate(request, policies, asyncio.get_running_loop().time())
        admission.require_type(request, policies)
        is_new = False  # True: this call has created the non-durable subscription
        while True:
            self._require_open()
            self._idle_since = None
            subscription = self._subscriptions.get((request.subscription, request.durable))
            if subscription is None:
                admission.require_auto_creation(request, policies)
                is_new = await self._create_subscription(request)
                continue
            try:
                admission.require_room(subscription, self._subscriptions.values(), policies)
                return subscription.attach(request, events, connected_since=self._time_stamp())
            except ConsumerRefused as refused:
                await subscription.evict_dead(refused)
            finally:
                if is_new and not subscription.consumers:
                    self._forget_subscription(subscription)

    async def ensure_subscription(
        self, name: str, start: Position, properties: Mapping[str, str] | None = None
    ) -> None:
        """Create the durable subscription of this name if it does not exist. A new subscription
        begins with the first entry at or after `start`, and is stored on return. Raises
        TopicClosing, NotAllowed (the topic has too many subscriptions), PoliciesUnavailable,
        LogError."""
        self._require_open()
        _require_free_name(name)
        key = name, True
        if key not in self._subscriptions:
            self._require_new(key)
            self._creating |= {key}
            try:
                await self.cursors.ensure(name, start, properties or {})
            finally:
                self._creating = self._creating - {key} or _NO_KEYS
            self._require_open()
            if (name, True) not in self._subscriptions:
                self._add_durable(name)

    async def unsubscribe(self, name: str, *, force: bool = False) -> None:
        """Delete a subscription. Raises SubscriptionNotFound, ConsumersConnected (unless `force`),
        SubscriptionFenced, TopicClosing, LogError."""
        self._require_open()
        subscription = self._named(name)
        if subscription is None:
            raise SubscriptionNotFound(name)
        await subscription.unsubscribe(None, force=force)

    async def expire(self, subscription: Subscription, *, older_than_s: int) -> int:
        """Acknowledge the entries of the subscription that were appended more than `older_than_s`
        seconds ago. Returns their number. Raises SubscriptionFenced, ReadFailed, LogError."""
        now_ms = self._clock.now_ms()
        return await subscription.expire_before(now_ms - older_than_s * 1_000, now_ms=now_ms)

    async def expire_through(self, subscription: Subscription, position: Position) -> int:
        """Acknowledge every entry up to and including `position`. Returns and raises as `expire`
        does."""
        return await subscription.expire_through(position, now_ms=self._clock.now_ms())

    async def _create_subscription(self, request: SubscribeRequest) -> bool:
        """Create a subscription if there is none. Returns True if this call has created a
        non-durable one, which must not stay without a consumer."""
        name = request.subscription
        start = await self._start_of(request)
        if request.durable:
            await self.ensure_subscription(name, start, request.subscription_properties)
        elif (name, False) not in self._subscriptions:
            self._require_open()
            self._require_new((name, False))
            self._add_subscription(self.cursors.open_non_durable(name, start))
            return True
        return False

    async def _start_of(self, request: SubscribeRequest) -> Position:
        """Return the position of the first entry of a new subscription. A non-durable subscription
        begins with the entry of the requested message id. If that message is inside a batch, the
        client drops the earlier messages of the same batch."""
        if request.start_rollback_s > 0:
            since_ms = self._clock.now_ms() - request.start_rollback_s * 1_000
            return await self.log.search(lambda entry: entry.view.publish_time_ms >= since_ms)
        if not request.durable and request.start is not None:
            return request.start
        earliest = request.initial_position is InitialPosition.EARLIEST
        return EARLIEST if earliest else LATEST

    def _require_new(self, key: _Key) -> None:
        """Raise NotAllowed unless the policies allow one more subscription. Raises
        PoliciesUnavailable if the policies are not known."""
        present = len(self._subscriptions.keys() | self._creating - {key})
        self._consumer_admission.require_new(key[0], present, self.policies.effective)

    def _on_policies(self) -> None:
        self._apply_policies(unacked=True)
        self._disconnector.start(
            self.all_subscriptions, lambda subscription: subscription.on_policies(self._limits)
        )

    def _apply_policies(self, *, unacked: bool) -> None:
        """Take limits and rates from the policies. `unacked` True: also the limits of
        unacknowledged messages."""
        try:
            policies = self.policies.effective
        except PoliciesUnavailable:
            return  # the last known policies stay in force
        if unacked:
            limits = self._limits
            limits.unacked_per_consumer = policies.unacked_per_consumer_max or UNLIMITED
            limits.unacked_per_subscription = policies.unacked_per_subscription_max or UNLIMITED
        now = asyncio.get_running_loop().time()
        self._rate.set(policies.dispatch_rate, now)
        for subscription in self.all_subscriptions:
            subscription.rate.set(policies.subscription_dispatch_rate, now)
        self._publish_rate.set_rate(policies.publish_rate, now)
        self._size.bytes_max = policies.max_message_bytes
        delay, delays = policies.delayed_delivery, self._delay_policy
        delays.enabled, delays.tick_ms = delay.enabled, delay.tick_ms
        self._delay_stage.delay_ms_max = delay.delay_ms_max if delay.enabled else 0
        self.admission.resume(now)
        if not self.deduplication.is_settled and self.state is TopicState.OPEN:
            self._spawn_call(self.deduplication.switch())

    def _wall_ms(self, now: float) -> int:
        """Return the wall-clock time in milliseconds at a time of the event loop."""
        return self._clock.now_ms() + int((now - asyncio.get_running_loop().time()) * 1_000)

    def _add_durable(self, name: str) -> None:
        cursor = self.cursors.get(name)
        assert cursor is not None
        self._add_subscription(cursor)

    def _add_subscription(self, cursor: Cursor) -> None:
        subscription = Subscription(
            self._text,
            cursor,
            self.cursors,
            self.log,
            limits=self._limits,
            rate=self._rate,
            spawn=self._spawn_call,
            guard=self.guard,
            disconnector=self._disconnector,
            delays=Delays(
                self._delay_policy,
                self._wall_ms,
                indexes=self.delayed if cursor.durable else None,
                subscription=cursor.name,
            ),
            now_ms=self._clock.now_ms,
            abandoned=self._forget_subscription,
            partition=self.name.partition,
            failover=self._failover,
            key_shared=self._key_shared,
        )
        self._subscriptions[cursor.name, cursor.durable] = subscription
        with suppress(PoliciesUnavailable):
            rate = self.policies.effective.subscription_dispatch_rate
            subscription.rate.set(rate, asyncio.get_running_loop().time())

    def _forget_subscription(self, subscription: Subscription) -> None:
        subscription.close(CloseReason.UNSUBSCRIBED)
        if subscription.cursor.durable:
            self.delayed.forget(subscription.name)
        key = subscription.name, subscription.cursor.durable
        if self._subscriptions.get(key) is subscription:
            del self._subscriptions[key]
            self._removed_messages += subscription.delivered.messages
            self._removed_bytes += subscription.delivered.bytes

    # ---- trimming and ending ---------------------------------------------------------------------

    def trim(self) -> None:
        """Drop the ledgers that no durable subscription needs and retention does not keep."""
        if self.state is TopicState.OPEN:
            self.trimmer.trim()

    async def truncate(self) -> None:
        """Drop every message published before this call, acknowledged or not, even if retention
        would keep it. The topic disconnects the consumers, which reconnect. Raises TopicClosing,
        SubscriptionFenced (a seek is in progress), TooManyReceipts, LogError."""
        self._require_open()
        through = await self.log.roll()
        if self.log.chain.droppable(through) > 0:
            # A later owner cannot read the sequence ids of the dropped entries. The subscriptions
            # move afterwards: if this fails, they keep their messages.
            await self.deduplication.flush()
        target = self.log.chain.next_position(through)
        for subscription in self.all_subscriptions:
            if subscription.cursor.mark_delete < through:
                await self._move_past(subscription, target)
        self._require_open()
        self.log.drop_through(through)
        await self.log.wait_dropped(through)

    async def _move_past(self, subscription: Subscription, target: Position) -> None:
        """Move a subscription to `target`. A subscription that is deleted meanwhile needs none of
        the entries before it."""
        try:
            await subscription.seek(target)
        except SubscriptionFenced:
            if subscription.state not in (SubscriptionState.DELETING, SubscriptionState.CLOSED):
                raise

    async def terminate(self) -> Position:
        """Accept no more messages, permanently. Returns the position of the last message; EARLIEST:
        there is none. A second call returns the same position. Raises TopicClosing, LogError."""
        self._require_open()
        if self.log.terminated is None:
            for handle in self.producers.values():
                handle.stop_taking()  # their clients send all later publishes again
            try:
                await self.log.terminate()
            except LogError:
                self.admission.disconnect_all(CloseReason.TERMINATED)
                raise
        assert self.log.terminated is not None
        return self.log.terminated

    def _on_terminated(self) -> None:
        """Disconnect the producers and tell the consumers, also if the caller of `terminate` was
        cancelled. The producers have their receipts."""
        self.admission.disconnect_all(CloseReason.TERMINATED)
        self._disconnector.start(self.all_subscriptions, Subscription.tell_end)

    def _on_head_dropped(self) -> None:
        self.deduplication.snapshot()  # a recovery cannot read the dropped entries' sequence ids
        for subscription in self.all_subscriptions:
            subscription.cursor.on_head_dropped()
            if self.log.terminated is not None:
                subscription.tell_end()

    # ---- asking ----------------------------------------------------------------------------------

    @property
    def producers(self) -> Mapping[str, ProducerHandle]:
        """The connected producers, by name. Excludes producers that wait for exclusive access."""
        return self.admission.connected

    @property
    def published(self) -> Meter:
        """The messages and bytes that the log has made durable since this broker opened the
        topic."""
        return self._in

    @property
    def delivered_total(self) -> tuple[int, int]:
        """The numbers of messages and bytes delivered since this broker opened the topic. They
        include deleted subscriptions, so they never decrease."""
        meters = [subscription.delivered for subscription in self._subscriptions.values()]
        return (
            self._removed_messages + sum(meter.messages for meter in meters),
            self._removed_bytes + sum(meter.bytes for meter in meters),
        )

    def now_ms(self) -> int:
        """Return the wall-clock time in milliseconds."""
        return self._clock.now_ms()

    def explain(self, name: str) -> list[Reason]:
        """Return the reasons why a subscription delivers nothing now. Raises
        SubscriptionNotFound."""
        subscription = self._named(name)
        if subscription is None:
            raise SubscriptionNotFound(name)
        return subscription.explain()

    async def stats(self) -> dict[str, Any]:
        """Return the statistics in the form of Pulsar's TopicStats. Raises ReadFailed."""
        loop, turns = asyncio.get_running_loop(), self._turns
        subscriptions = await describe_all(self.subscriptions, turns)
        hidden = await describe_all(self.hidden_subscriptions, turns)
        publishers = await turns.each(
            self.producers.values(),
            lambda handle: handle.describe(loop.time()),
            slice_items=CLIENTS_PER_TURN,
        )
        now = loop.time()
        both = [*subscriptions.values(), *hidden.values()]
        meter = self._in
        messages_out, bytes_out = self.delivered_total
        return {
            **meter.describe("In", now),
            "msgRateOut": sum(each["msgRateOut"] for each in both),
            "msgThroughputOut": sum(each["msgThroughputOut"] for each in both),
            "msgOutCounter": messages_out,
            "bytesOutCounter": bytes_out,
            "averageMsgSize": meter.bytes / meter.messages if meter.messages else 0.0,
            **self._oldest_backlog(),
            "backlogSize": max((each["backlogSize"] for each in both), default=0),
            "delayedMessageIndexSizeInBytes": sum(
                each["delayedMessageIndexSizeInBytes"] for each in both
            ),
            "chunkedMessageRate": self._chunks.rates(now).messages,
            "waitingPublishers": len(self.admission.waiting),
            "deduplicationStatus": "Enabled" if self.deduplication.enabled else "Disabled",
            "backlogQuotaEvictedEntries": self.quotas.evicted,
            "storageSize": self.log.stored_bytes,
            "msgCount": self.log.chain.messages,
            "topicEpoch": self.log.properties.get(EPOCH_PROPERTY),
            "publishers": publishers,
            "subscriptions": subscriptions,
            "hiddenSubscriptions": hidden,
            "managedLedger": self.log.describe(),
        }

    @property
    def backlog_age_s(self) -> int:
        """The age in seconds of the oldest entry that a durable subscription has not acknowledged.
        Uses only the times that are known without a read. -1: no time is known."""
        found = self._oldest_known()
        return -1 if found is None else self._age_s(found[1])

    def _oldest_known(self) -> tuple[Subscription, Oldest] | None:
        known = [
            (subscription, oldest)
            for subscription in self._subscriptions.values()
            if subscription.cursor.durable and (oldest := subscription.oldest.known()) is not None
        ]
        return min(known, key=lambda it: it[1].position, default=None)

    def _age_s(self, oldest: Oldest) -> int:
        return max(self._clock.now_ms() - oldest.appended_ms, 0) // 1_000

    def _oldest_backlog(self) -> dict[str, Any]:
        """Return the statistics of the durable subscription with the oldest backlog. Call it after
        `describe` of all subscriptions, which reads the times."""
        found = self._oldest_known()
        return {
            "earliestMsgPublishTimeInBacklogs": 0 if found is None else found[1].published_ms,
            "oldestBacklogMessageAgeSeconds": -1 if found is None else self._age_s(found[1]),
            "oldestBacklogMessageSubscriptionName": "" if found is None else found[0].name,
        }

    # ---- the end ---------------------------------------------------------------------------------

    @property
    def idle_since(self) -> float | None:
        """The loop's time since which the topic has had no clients and no work. None: it has
        clients or work."""
        producers = self.producers or self.admission.waiting
        busy = producers or any(it.consumers for it in self.all_subscriptions)
        settled = self.log.is_settled and self.cursors.is_settled and self.delayed.is_settled
        if busy or not settled:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = asyncio.get_running_loop().time()
        return self._idle_since

    def begin_deletion(self, *, force: bool) -> frozenset[str]:
        """Begin to disconnect all clients, and admit no more. Returns the names of at most
        CLIENTS_MAX clients, as a tombstone stores them. Raises TopicInUse (unless `force`),
        TopicClosing."""
        self._require_open()
        consumers = sum(len(it.consumers) for it in self.all_subscriptions)
        if not force and (self.producers or consumers):
            raise TopicInUse(str(self.name), len(self.producers), consumers)
        names = frozenset(islice(self._client_keys(), CLIENTS_MAX))
        self.state = TopicState.CLOSED  # a later failure of the log does not fail the topic
        self._disconnect(CloseReason.DELETED)
        return names

    def _client_keys(self) -> Iterator[str]:
        for subscription in self.all_subscriptions:
            for handle in subscription.consumers.values():
                yield client_key("consumer", subscription.name, handle.request.consumer_name)
        for name in self.producers:
            yield client_key("producer", name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay a deletion of the topic until the block ends. Use it to store data that a deletion
        of the topic must delete, too. Raises TopicClosing."""
        self._require_open()
        self._holds += 1
        try:
            yield
        finally:
            self._on_released()

    def _on_released(self, _: object = None) -> None:
        self._holds -= 1
        if self._holds == 0:
            self._released.set()

    async def wait_released(self) -> None:
        """Wait until no `held` block is open and all clients are disconnected. Call it after
        `begin_deletion`."""
        while self._holds:
            self._released.clear()
            await self._released.wait()

    def end_deletion(self) -> None:
        """End the topic after `begin_deletion`: the topic is deleted, or the outcome of its
        deletion is unknown."""
        self.cursors.abandon()
        self.delayed.abandon()
        self.log.abandon()
        self.state = TopicState.CLOSED
        self._closed.set()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    async def close(self, reason: CloseReason = CloseReason.UNLOADED) -> None:
        """Stop serving the topic. Returns within CLOSE_TIMEOUT_S plus the turns of the event loop
        that the disconnection of all clients takes. Never raises operating errors. May be called
        more than once."""
        if self.state is TopicState.CLOSING or self.state is TopicState.CLOSED:
            await self._closed.wait()
            return
        failed = self.state is TopicState.FAILED
        self.state = TopicState.CLOSING

        def evict(client: ProducerHandle | ConsumerHandle) -> None:
            client.evict(reason)

        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if not failed:
                    producers = self.producers.values()
                    for handle in producers:
                        handle.stop_taking()
                    for handle in [it for it in producers if it.outstanding]:
                        await handle.wait_drained()
                await self._disconnector.run(self._stopped_clients(), evict)
                self.deduplication.snapshot()
                await self.cursors.close()
                with suppress(TimeoutError):
                    async with asyncio.timeout(DELAYED_TIMEOUT_S):
                        await self.delayed.close()
                await self.log.close()
        except (TimeoutError, BrokerError) as error:
            # The next owner recovers the ledgers that are still open.
            _log.warning("topic not closed cleanly", topic=str(self.name), error=repr(error))
            await self._disconnector.run(self._stopped_clients(), evict)
        finally:
            self._disconnect(reason)  # clients are still connected if the close was cancelled
            self.trimmer.end()
            self.cursors.abandon()
            self.delayed.abandon()
            self.log.abandon()
            self._unfollow()
            if self._rate_timer is not None:
                self._rate_timer.cancel()
            self.state = TopicState.CLOSED
            self._closed.set()

    def _require_open(self) -> None:
        if self.state is not TopicState.OPEN:
            raise TopicClosing(str(self.name))

    def _time_stamp(self) -> str:
        return datetime.fromtimestamp(self._clock.now_ms() / 1_000, UTC).isoformat()


def _ignore(_: object) -> None:
    pass


def _require_supported(request: SubscribeRequest) -> None:
    what = f"subscription type {request.type.title}"
    if request.type not in DISPATCHERS:
        raise NotAllowed(what, "it is not supported yet")
    one_reads = request.type in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER)
    if request.read_compacted and not one_reads:
        raise NotAllowed(what, "a compacted topic is read by one consumer")
    _require_free_name(request.subscription)


def _require_free_name(subscription: str) -> None:
    require_name(subscription)
    if subscription == DEDUPLICATION:
        raise NotAllowed(f"subscription {subscription!r}", "the broker uses this name itself")
