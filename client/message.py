"""What a consumer receives, and the id by which a message is known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering
from typing import TYPE_CHECKING, ClassVar, Self

from google.protobuf.message import DecodeError

from magnetar.client.errors import InvalidMessage
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from magnetar.protos.message import ReceivedMessage

_U64 = 0xFFFFFFFFFFFFFFFF  # ids are unsigned on the wire and signed in meaning


@dataclass(slots=True)
class Delivery:
    """One entry as one broker delivered it: what its messages have in common. A value, never
    changed once made; not frozen for speed."""

    topic: str
    producer_name: str
    publish_time_ms: int
    schema_version: bytes  # b"": none
    redelivery_count: int
    last_index: int | None  # of its last message among the topic's; None: the broker does not say
    generation: int  # which filling of its consumer's queue it belongs to


class Message:
    """One message as it was received. Accessors as in Apache's client: absent texts are ""."""

    __slots__ = ("_delivery", "_message_id", "_received")

    def __init__(
        self, received: ReceivedMessage, message_id: MessageId, delivery: Delivery
    ) -> None:
        self._received = received
        self._message_id = message_id
        self._delivery = delivery

    def data(self) -> bytes:
        """The payload."""
        return self._received.payload

    def value(self) -> bytes:
        """The payload; schemas that would decode it are not supported yet."""
        return self._received.payload

    def message_id(self) -> MessageId:
        """By what to acknowledge it, and where it is stored."""
        return self._message_id

    def properties(self) -> dict[str, str]:
        """What the producer's application attached."""
        return dict(self._received.properties)

    def partition_key(self) -> str:
        """The key; base64 when the producer's key was bytes."""
        return self._received.partition_key or ""

    def ordering_key(self) -> str:
        """The key that goes before `partition_key` when messages are given out by key."""
        return (self._received.ordering_key or b"").decode("utf-8", "surrogateescape")

    def publish_timestamp(self) -> int:
        """When the producer sent it, in milliseconds since 1970."""
        return self._delivery.publish_time_ms

    def event_timestamp(self) -> int:
        """The application's own time in milliseconds; 0 when it gave none."""
        return self._received.event_time_ms

    def topic_name(self) -> str:
        """The full name of the topic."""
        return self._delivery.topic

    def index(self) -> int | None:
        """Its number among all messages of the topic, from 0. None: the broker does not say."""
        last = self._delivery.last_index
        behind = self._message_id.batch_size() - 1 - self._message_id.batch_index()
        return last if last is None or self._message_id.batch_index() < 0 else last - behind

    def redelivery_count(self) -> int:
        """How often it was delivered before and not acknowledged (Shared and Key_Shared)."""
        return self._delivery.redelivery_count

    def schema_version(self) -> bytes:
        """The version of the schema that it was written with."""
        return self._delivery.schema_version

    def producer_name(self) -> str:
        """Who sent it."""
        return self._delivery.producer_name

    def has_null_value(self) -> bool:
        """Whether it was sent with content None: the key's deletion, on compacted topics."""
        return self._received.null_value

    @property
    def delivery(self) -> Delivery:
        """What it shares with the messages that came with it; the client's own business."""
        return self._delivery

    def __repr__(self) -> str:
        return f"Message({self._message_id}, {len(self._received.payload)} bytes)"


@total_ordering
class MessageId:
    """Where a message is stored: ledger, entry, and place in its batch (-1: not in a batch).

    Ordered as the topic is. Compares with other ids of the same topic only.
    """

    __slots__ = ("_batch_index", "_batch_size", "_entry_id", "_ledger_id", "_partition")

    earliest: ClassVar[MessageId]
    latest: ClassVar[MessageId]

    def __init__(
        self,
        partition: int = -1,
        ledger_id: int = -1,
        entry_id: int = -1,
        batch_index: int = -1,
        batch_size: int = 0,
    ) -> None:
        self._partition = partition
        self._ledger_id = ledger_id
        self._entry_id = entry_id
        self._batch_index = batch_index
        self._batch_size = batch_size  # 0: unknown, or not in a batch

    def ledger_id(self) -> int:
        return self._ledger_id

    def entry_id(self) -> int:
        return self._entry_id

    def batch_index(self) -> int:
        return self._batch_index

    def batch_size(self) -> int:
        """Messages in the batch; 0 when it is not in a batch, or not known. Not in Apache's."""
        return self._batch_size

    def partition(self) -> int:
        return self._partition

    def serialize(self) -> bytes:
        """Bytes to store; Apache's clients write and read the same."""
        data = pb.MessageIdData(ledgerId=self._ledger_id & _U64, entryId=self._entry_id & _U64)
        if self._partition >= 0:
            data.partition = self._partition
        if self._batch_index >= 0:
            data.batch_index = self._batch_index
            if self._batch_size:
                data.batch_size = self._batch_size
        return data.SerializeToString()

    @classmethod
    def deserialize(cls, message_id_bytes: bytes) -> Self:
        """The id that was serialized. Raises InvalidMessage for anything else."""
        try:
            data = pb.MessageIdData.FromString(message_id_bytes)
        except DecodeError as error:
            raise InvalidMessage(f"not a serialized message id: {error}") from None
        if not data.IsInitialized():
            raise InvalidMessage("not a serialized message id: ledger or entry is missing")
        return cls(
            data.partition,
            _signed(data.ledgerId),
            _signed(data.entryId),
            data.batch_index,
            data.batch_size,
        )

    def __str__(self) -> str:
        return f"({self._ledger_id},{self._entry_id},{self._partition},{self._batch_index})"

    def __repr__(self) -> str:
        return f"MessageId{self}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageId):
            return NotImplemented
        return self._key() == other._key()

    def __lt__(self, other: MessageId) -> bool:
        return self._key() < other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, int, int, int]:
        return self._ledger_id, self._entry_id, self._batch_index, self._partition


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


MessageId.earliest = MessageId(-1, -1, -1)
MessageId.latest = MessageId(-1, 2**63 - 1, 2**63 - 1)
