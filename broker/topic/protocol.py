"""The interface that topics of every kind offer to sessions, the broker and the admin calls."""

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
    def is_waiting(self) -> bool: ...  # True: the producer waits for exclusive access

    def publish(self, sends: SendRun, now: float) -> None:
        """Accept entries that the client sent. The producer reports their outcome through
        `events`."""

    @property
    def has_room(self) -> bool:
        """True when `wait_room` would return at once."""

    async def wait_room(self) -> None:
        """Return when the topic accepts more entries, or at once if the producer has ended."""

    async def close(self) -> None:
        """Close the producer for its client. Before it ends, it waits a few seconds at most for the
        answers of the outstanding publishes."""

    def close_nowait(self) -> None:
        """End the producer because its connection has closed. It answers nothing more."""


class ServedTopic(Protocol):
    """A topic that this broker serves, persistent or not. All methods are called on the loop."""

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
        """The numbers of messages and bytes delivered since the topic was opened."""

    async def add_producer(self, request: ProducerRequest, events: ProducerEvents) -> Producer:
        """Admit a producer. If another producer blocks it, the topic probes the client of the other
        producer, and evicts that producer if the client does not answer. A producer that asks for
        exclusive access with fencing ends the others without a probe. A producer that asks to
        wait for exclusive access may be queued. Then its `is_waiting` is True, and the topic later
        calls `ready` or `refused` of its events.

        Raises ProducerBusy, ProducerFenced, NotAllowed, PoliciesUnavailable, TopicClosing,
        TopicTerminated, TopicFull; BacklogQuotaHeld, BacklogQuotaRefused; LogError.
        """

    async def subscribe(self, request: SubscribeRequest, events: ConsumerEvents) -> ConsumerHandle:
        """Admit a consumer. Creates the subscription if it does not exist.

        Raises ConsumerBusy, NotAllowed, SubscriptionNotFound (the policies do not let consumers
        create it), SubscriptionFenced, TopicClosing, PoliciesUnavailable; LogError.
        """

    async def ensure_subscription(
        self, name: str, start: Position, properties: Mapping[str, str] | None = None
    ) -> None:
        """Create the durable subscription of this name if it does not exist. A new subscription
        begins with the entry at or after `start`, and is stored on return. Raises TopicClosing,
        NotAllowed (the topic has too many), PoliciesUnavailable, LogError."""

    async def unsubscribe(self, name: str, *, force: bool = False) -> None:
        """Delete a subscription. Raises SubscriptionNotFound, ConsumersConnected (unless `force`),
        SubscriptionFenced, TopicClosing, LogError."""

    async def stats(self) -> dict[str, Any]:
        """The statistics in the form of Pulsar's TopicStats. Raises ReadFailed."""

    @property
    def closed(self) -> bool:
        """True when the topic serves nothing more. While a persistent topic is being closed or
        deleted, this is still False, and another call of `close` waits for the end."""

    async def close(self, reason: CloseReason = ...) -> None:
        """Stop serving the topic. Returns within a few seconds, and never raises operating errors.
        May be called more than once."""


class Topic(ServedTopic, Protocol):
    """A persistent topic: its entries are stored, and its subscriptions have cursors."""

    @property
    def log(self) -> Log:
        """The log with the entries of the topic."""

    @property
    def cursors(self) -> Cursors: ...

    @property
    def delayed(self) -> DelayedStore: ...

    @property
    def policies(self) -> PolicySource: ...

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """The subscriptions by name. A non-durable subscription is left out if a durable one has
        the same name."""

    @property
    def backlog_age_s(self) -> int:
        """The age in seconds of the oldest entry that a durable subscription has not acknowledged.
        Uses only append times that the topic knows without a read. -1: it knows none."""

    @property
    def all_subscriptions(self) -> Sequence[Subscription]:
        """All subscriptions. A durable and a non-durable one may have the same name."""

    async def expire(self, subscription: Subscription, *, older_than_s: int) -> int:
        """Acknowledge the entries of the subscription that were appended more than `older_than_s`
        seconds ago. Returns their number. Raises SubscriptionFenced, ReadFailed, LogError."""

    async def expire_through(self, subscription: Subscription, position: Position) -> int:
        """Acknowledge every entry up to this one, as `expire` does."""

    def trim(self) -> None:
        """Drop the ledgers that no durable subscription needs and retention does not keep."""

    async def truncate(self) -> None:
        """Drop every message published before this call, even if it is not acknowledged or if
        retention would keep it. The topic disconnects the consumers; they reconnect. Raises
        TopicClosing, SubscriptionFenced (a seek is in progress), TooManyReceipts, LogError."""

    async def terminate(self) -> Position:
        """Accept no more messages, permanently. Returns the position of the last message; EARLIEST:
        there is none. A second call returns the same position. Raises TopicClosing, LogError."""

    def now_ms(self) -> int:
        """The wall-clock time in milliseconds."""

    def explain(self, name: str) -> list[Reason]:
        """The reasons why a subscription delivers nothing now. Raises SubscriptionNotFound."""

    def begin_deletion(self, *, force: bool) -> frozenset[str]:
        """Begin to disconnect all clients, and admit no more. Returns the names of at most
        CLIENTS_MAX clients, in the form in which the record of the deletion stores them
        (`client_key`). Raises TopicInUse (unless `force`), TopicClosing."""

    async def wait_released(self) -> None:
        """Return when all clients are disconnected, and no running work delays the deletion. Call
        it after `begin_deletion`."""

    @property
    def idle_since(self) -> float | None:
        """The time of the event loop since which the topic has had no clients and no work. None:
        the topic has clients or work."""

    def end_deletion(self) -> None:
        """End the topic after `begin_deletion`: the topic is deleted, or the outcome of its
        deletion is unknown."""
