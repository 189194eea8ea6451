"""The contract between a session and a topic: requests to the topic, and events to the session.

Pure values and protocols; the numbers of the enums are those of Pulsar's protocol.
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
    """How the entries of a subscription are shared among its consumers."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3

    @property
    def title(self) -> str:
        """The name that Pulsar's tools print."""
        return {0: "Exclusive", 1: "Shared", 2: "Failover", 3: "Key_Shared"}[self]


class InitialPosition(IntEnum):
    """The position where a new durable subscription begins."""

    LATEST = 0
    EARLIEST = 1


class AccessMode(IntEnum):
    """Whether other producers may produce to the topic beside this one."""

    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3

    @property
    def title(self) -> str:
        """The name that Pulsar's tools print."""
        return {0: "Shared", 1: "Exclusive", 2: "WaitForExclusive", 3: "ExclusiveWithFencing"}[self]


class CloseReason(Enum):
    """The reason why the broker closed a producer or consumer. The client looks the topic up again
    and reconnects, whatever the reason; after DELETED it finds no topic and makes none."""

    UNLOADED = "the topic is not served here any more"
    LOG_FAILED = "an append failed; what was not acknowledged must be sent again"
    SEEK = "the subscription was moved"
    FENCED = "another producer has taken its place"
    QUOTA = "the topic's backlog exceeds its quota"
    REPLACED = "another connection of the same client took the place"
    UNSUBSCRIBED = "the subscription was deleted"
    TERMINATED = "the topic takes no more messages"
    NEGATIVE_ACKS = "the subscription withholds too many negatively acknowledged entries"
    DELETED = "the topic was deleted"


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """The client of a producer or consumer, for statistics."""

    address: str
    version: str
    supports_partial_producer: bool = False  # it opens a partition's producer at the first message


@dataclass(frozen=True, slots=True)
class ProducerRequest:
    """PRODUCER, as the topic wants it."""

    producer_id: int
    name: str  # "": the broker makes one
    client: ClientInfo
    user_provided_name: bool = True
    epoch: int = 0  # how often this producer has reconnected
    access_mode: AccessMode = AccessMode.SHARED
    topic_epoch: int | None = None  # None: has never been exclusive
    metadata: Mapping[str, str] = field(default_factory=dict)
    stops_at_refusal: bool = False  # nothing is stored after a publish that was refused


@dataclass(frozen=True, slots=True)
class SubscribeRequest:
    """SUBSCRIBE, as the topic wants it."""

    consumer_id: int
    subscription: str
    type: SubscriptionType
    client: ClientInfo
    consumer_name: str = ""
    durable: bool = True
    initial_position: InitialPosition = InitialPosition.LATEST
    # The start of a non-durable subscription; None: as `initial_position` says.
    start: Position | None = None
    start_rollback_s: int = 0  # a new subscription begins this long ago, by publish time; 0: off
    priority: int = 0  # lower is served first
    key_shared: KeySharedPolicy | None = None  # None: the client sent none
    # The epoch of its last redelivery request; None: it sends no epochs.
    consumer_epoch: int | None = None
    read_compacted: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    subscription_properties: Mapping[str, str] = field(default_factory=dict)
    auto_consume: bool = False  # the consumer takes each schema that the topic has


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The answer to GET_LAST_MESSAGE_ID."""

    position: Position  # EARLIEST: the topic is empty
    batch_index: int  # the index of the last message; -1: the entry is not a batch
    mark_delete: Position
    partition: int = -1  # as in the ids of delivered messages; -1: the topic is no partition


class ReadyProducer(Protocol):
    """The facts about a producer that its client is told."""

    name: str
    last_sequence_id: int
    topic_epoch: int | None


class ProducerEvents(Protocol):
    """A session's work for a producer. Called on the loop; must not call back synchronously."""

    def receipts(self, ledger: int, receipts: Iterable[tuple[int, int, int]]) -> None:
        """The sent entries are durable in this ledger. `receipts`: sequence id, highest sequence id
        (0: not said) and entry id of each, in send order. Ledger and entry ids are -1 for entries
        that the log held already."""

    def send_error(self, sequence_id: int, error: Exception) -> None:
        """This publish was refused. Refusals also arrive in send order."""

    def ready(self, producer: ReadyProducer) -> None:
        """The producer waited for exclusive access and has it now: answer PRODUCER again."""

    def refused(self, error: Exception) -> None:
        """The producer waited for exclusive access and will not get it: tell the client; nothing
        more is called."""

    def closed(self, reason: CloseReason) -> None:
        """Tell the client; nothing more is called."""

    async def probe(self) -> bool:
        """Whether the client's connection is alive, after asking it (a few seconds at most)."""


class ConsumerEvents(Protocol):
    """A session's work for a consumer. Called on the loop; must not call back synchronously."""

    def writable(self) -> bool:
        """Whether the connection takes more now. After False, `ConsumerHandle.on_writable` is
        called once it does."""

    def deliver(self, entries: Sequence[StoredEntry], details: Mapping[int, EntryDetail]) -> None:
        """Send these entries. `details` is sparse, by index in `entries`."""

    def reached_end(self) -> None:
        """Tell the client that its subscription has acknowledged all of a terminated topic."""

    def active_changed(self, active: bool) -> None:
        """Tell the client whether its consumer is the active one (single-active types)."""

    def closed(self, reason: CloseReason) -> None:
        """Tell the client; nothing more is called."""

    async def probe(self) -> bool:
        """Whether the client's connection is alive, after asking it (a few seconds at most)."""
