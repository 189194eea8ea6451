"""The contract between a session and a topic: requests to the topic, and events to the session.

This module has only values and protocols. The enums have the numbers of Pulsar's protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from magnetar.broker.dispatch.dispatcher import EntryDetail
    from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position


class SubscriptionType(IntEnum):
    """The way in which the consumers of a subscription share its entries."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3

    @property
    def title(self) -> str:
        """The name that Pulsar's tools print."""
        return {0: "Exclusive", 1: "Shared", 2: "Failover", 3: "Key_Shared"}[self]


class InitialPosition(IntEnum):
    """The position where a new subscription begins, unless its request gives a start."""

    LATEST = 0
    EARLIEST = 1


class AccessMode(IntEnum):
    """The right of other producers to produce to the topic at the same time as this producer."""

    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3

    @property
    def title(self) -> str:
        """The name that Pulsar's tools print."""
        return {0: "Shared", 1: "Exclusive", 2: "WaitForExclusive", 3: "ExclusiveWithFencing"}[self]


class CloseReason(Enum):
    """The reason why the broker closed a producer or consumer. For every reason, the client looks
    the topic up again and tries to reconnect. After DELETED the client finds no topic, and does not
    create it again."""

    UNLOADED = "the topic is not served here any more"
    TOPIC_FAILED = "the topic failed"
    ANSWERS_WAITING = "too many answers wait for the outcome of earlier messages"
    SEEK = "a seek moved the subscription"
    FENCED = "another producer has exclusive access now"
    QUOTA = "the topic's backlog exceeds its quota"
    REPLACED = "a newer connection has taken its place"
    UNSUBSCRIBED = "the subscription was deleted"
    TERMINATED = "the topic takes no more messages"
    NEGATIVE_ACKS = "the subscription withholds too many negatively acknowledged entries"
    DELETED = "the topic was deleted"


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """The client of a producer or consumer, for statistics and limits per host and connection."""

    address: str
    version: str
    # True: the client opens the producer of a partition only at the partition's first message.
    supports_partial_producer: bool = False


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """The content of a PRODUCER command."""

    producer_id: int
    name: str  # "": the broker makes a name
    client: ClientInfo
    user_provided_name: bool = True
    epoch: int = 0  # the number of reconnects of this producer
    access_mode: AccessMode = AccessMode.SHARED
    topic_epoch: int | None = None  # None: the producer has never been exclusive
    metadata: Mapping[str, str] = field(default_factory=dict)
    stops_at_refusal: bool = False  # True: the broker stores nothing after a refused publish


@dataclass(frozen=True, slots=True)
class SubscribeRequest:
    """The content of a SUBSCRIBE command."""

    consumer_id: int
    subscription: str
    type: SubscriptionType
    client: ClientInfo
    consumer_name: str = ""
    durable: bool = True
    initial_position: InitialPosition = InitialPosition.LATEST
    # The start of a non-durable subscription. None: `initial_position` applies.
    start: Position | None = None
    # A new subscription begins with the messages of the last `start_rollback_s` seconds; 0: off.
    start_rollback_s: int = 0
    priority: int = 0  # the dispatcher serves lower numbers first
    key_shared: KeySharedPolicy | None = None  # None: the client sent none
    # The epoch of the consumer's last redelivery request. None: the consumer sends no epochs.
    consumer_epoch: int | None = None
    read_compacted: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    subscription_properties: Mapping[str, str] = field(default_factory=dict)
    auto_consume: bool = False  # the consumer takes each schema that the topic has


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The answer to GET_LAST_MESSAGE_ID."""

    position: Position  # EARLIEST: the topic is empty
    batch_index: int  # the place of the last message in its batch; -1: the entry is not a batch
    mark_delete: Position
    partition: int = -1  # the partition in the ids of messages; -1: the topic is not a partition


class ReadyProducer(Protocol):
    """The facts about a producer that the session reports to its client."""

    name: str
    last_sequence_id: int
    topic_epoch: int | None


class ProducerEvents(Protocol):
    """The events of a producer, which its session handles. The topic calls the methods on the event
    loop. The methods must not call the topic synchronously."""

    def receipts(self, ledger: int, receipts: Iterable[tuple[int, int, int]]) -> None:
        """Send receipts. The entries of a persistent topic are durable in this ledger. `receipts`:
        the sequence id, the highest sequence id (0: the client sent none) and the entry id of each
        entry, in send order. Ledger and entry ids are -1 for duplicates of stored entries. A
        non-persistent topic stores nothing: both ids are 0, or -1 for an entry that it has dropped.
        """

    def send_error(self, sequence_id: int, error: Exception) -> None:
        """Tell the client that the broker refuses this entry. Receipts and refusals come in send
        order."""

    def ready(self, producer: ReadyProducer) -> None:
        """The producer waited for exclusive access and has it now: send the second answer to
        PRODUCER."""

    def refused(self, error: Exception) -> None:
        """The producer waited for exclusive access and will not get it: tell the client. No other
        event follows."""

    def closed(self, reason: CloseReason) -> None:
        """The broker has closed the producer: tell the client. No other event follows."""

    async def probe(self) -> bool:
        """Probe the client's connection, for a few seconds at most. Returns True when the client
        answers."""


class ConsumerEvents(Protocol):
    """The events of a consumer, which its session handles. The subscription calls the methods on
    the event loop. The methods must not call the subscription synchronously."""

    def writable(self) -> bool:
        """Return whether the connection accepts more bytes now. After False, the session calls
        `ConsumerHandle.on_writable` as soon as the connection accepts more bytes: once for all
        consumers of a subscription on the connection."""

    def deliver(self, entries: Sequence[StoredEntry], details: Mapping[int, EntryDetail]) -> None:
        """Send these entries. `details`: see `Deliver` in dispatch/dispatcher.py."""

    def reached_end(self) -> None:
        """Tell the client that its subscription has acknowledged all messages of a terminated
        topic."""

    def active_changed(self, active: bool) -> None:
        """Tell the client whether its consumer is the active consumer of an EXCLUSIVE or FAILOVER
        subscription."""

    def closed(self, reason: CloseReason) -> None:
        """The broker has closed the consumer: tell the client. No other event follows."""

    async def probe(self) -> bool:
        """Probe the client's connection, for a few seconds at most. Returns True when the client
        answers."""
