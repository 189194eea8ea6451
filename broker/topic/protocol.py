"""The interface of every kind of topic for sessions, the broker and the admin calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from magnetar.broker.cursor.cursors import Cursors
    from magnetar.broker.dispatch.explain import Reason
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position
    from magnetar.broker.policies.source import PolicySource
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.contract import (
        CloseReason,
        ConsumerEvents,
        ProducerEvents,
        ProducerRequest,
        SubscribeRequest,
    )
    from magnetar.broker.topic.delayed_store import DelayedStore
    from magnetar.broker.topic.meter import Meter
    from magnetar.broker.topic.subscription import Subscription
    from magnetar.protos.names import TopicName
    from magnetar.protos.sends import SendRun


class Producer(Protocol):
    """A session's handle of a producer."""

    @property
    def name(self) -> str: ...

    @property
    def topic_epoch(self) -> int | None: ...  # None: not exclusive

    @property
    def last_sequence_id(self) -> int: ...

    @property
    def request(self) -> ProducerRequest: ...

    @property
    def events(self) -> ProducerEvents: ...

    @property
    def is_waiting(self) -> bool: ...  # whether it waits for exclusive access

    def publish(self, sends: SendRun, now: float) -> None:
        """Take what the client sent. The outcome comes by the events."""

    @property
    def has_room(self) -> bool:
        """True: `wait_room` would return at once."""

    async def wait_room(self) -> None:
        """Return when the topic takes more, or at once when the producer has ended."""

    async def close(self) -> None:
        """The client closes. What it sent is answered first."""

    def close_nowait(self) -> None:
        """The connection is gone: nothing is answered any more."""


class ServedTopic(Protocol):
    """A topic that this broker serves, of either kind. Everything is called on the loop."""

    @property
    def name(self) -> TopicName: ...

    @property
    def producers(self) -> Mapping[str, Producer]:
        """The connected producers, by name."""

    @property
    def subscription_names(self) -> Collection[str]: ...

    @property
    def published(self) -> Meter:
        """The messages that producers have published since the topic was opened."""

    @property
    def delivered_total(self) -> tuple[int, int]:
        """Messages and bytes that were delivered since the topic was opened."""

    async def add_producer(self, request: ProducerRequest, events: ProducerEvents) -> Producer:
        """Let a producer in. A producer that is in its way is probed first, and evicted if its
        client does not answer. One that asks to wait for exclusive access may be queued: its state
        is WAITING then, and `ready` or `refused` of its events follows.

        Raises ProducerBusy, ProducerFenced, NotAllowed, TopicClosing, TopicFull; BacklogQuotaHeld,
        BacklogQuotaRefused; LogFenced and LogUnavailable while recording the epoch of an exclusive
        one.
        """

    async def subscribe(self, request: SubscribeRequest, events: ConsumerEvents) -> ConsumerHandle:
        """Let a consumer in. Makes the subscription if there is none of that name.

        Raises ConsumerBusy, NotAllowed, SubscriptionFenced, TopicClosing; LogError.
        """

    async def ensure_subscription(
        self, name: str, start: Position, properties: Mapping[str, str] | None = None
    ) -> None:
        """A durable subscription of this name, beginning with the entry at or after `start` if it
        is new. Durable on return. Raises TopicClosing, LogError."""

    async def unsubscribe(self, name: str, *, force: bool = False) -> None:
        """Delete a subscription. Raises SubscriptionNotFound, ConsumersConnected (unless `force`),
        SubscriptionFenced, TopicClosing, LogError."""

    async def stats(self) -> dict[str, Any]:
        """Pulsar's TopicStats, as the admin call gives it. Raises ReadFailed."""

    async def close(self, reason: CloseReason = ...) -> None:
        """Serve no more. Returns within a few seconds, and never raises operating errors. May be
        called more than once."""


class Topic(ServedTopic, Protocol):
    """A persistent topic: its entries are stored, and its subscriptions have cursors."""

    @property
    def log(self) -> Log:
        """The places of the topic's entries, to be read by range."""

    @property
    def cursors(self) -> Cursors: ...

    @property
    def delayed(self) -> DelayedStore: ...

    @property
    def policies(self) -> PolicySource: ...

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """The subscriptions by name. A name means the durable subscription if there is one."""

    @property
    def backlog_age_s(self) -> int:
        """How long ago the oldest entry that a durable subscription has not acknowledged was
        appended, as far as its time is known without a read. -1: there is none."""

    @property
    def all_subscriptions(self) -> Sequence[Subscription]:
        """The durable ones and the others, also two of one name."""

    async def expire(self, subscription: Subscription, *, older_than_s: int) -> int:
        """Skip what was appended longer ago than that. Returns how many entries. Raises
        SubscriptionFenced, ReadFailed, LogError."""

    async def expire_through(self, subscription: Subscription, position: Position) -> int:
        """Skip every entry up to this one, as `expire` does."""

    def trim(self) -> None:
        """Drop the ledgers that no subscription needs and retention does not keep."""

    async def truncate(self) -> None:
        """Drop every message published before this call, acknowledged or not, whatever retention
        says. Consumers are disconnected and come back. Raises TopicClosing, SubscriptionFenced,
        LogError."""

    async def terminate(self) -> Position:
        """Take no more messages, permanently. Returns the last one, EARLIEST if there is none; a
        topic that is terminated already gives the same answer. Raises TopicClosing, LogError."""

    def now_ms(self) -> int:
        """The wall clock."""

    def explain(self, name: str) -> list[Reason]:
        """The reasons why a subscription dispatches nothing. Raises SubscriptionNotFound."""

    def begin_deletion(self, *, force: bool) -> frozenset[str]:
        """Disconnect all clients and let none in any more. Returns their names, as tombstones keep
        them. Raises TopicInUse (unless `force`), TopicClosing."""

    async def wait_released(self) -> None:
        """Call it after `begin_deletion`. Returns when nothing holds the topic any more."""

    @property
    def idle_since(self) -> float | None:
        """Since when (in the loop's time) the topic has had no clients and no work. None: it has
        some."""

    def end_deletion(self) -> None:
        """Call it after `begin_deletion`: the topic is deleted, or the broker does not know whether
        it is."""
