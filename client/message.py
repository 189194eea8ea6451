"""A received message, and the id of a message."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import total_ordering
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from google.protobuf.message import DecodeError

from magnetar.client.errors import InvalidMessage, WrongType
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.client.encryption import EncryptionContext
    from magnetar.protos.batch import Batch, ReceivedMessage

_U64 = 0xFFFFFFFFFFFFFFFF  # ids are unsigned on the wire and signed in the client


@dataclass(slots=True)
class Delivery:
    """The common data of the messages of one delivered entry.

    The client does not change a Delivery after the creation of its first message, except `decode`.
    The class is not frozen, for speed.
    """

    topic: str
    partition: int  # -1: the topic is not a partition
    producer_name: str
    publish_time_ms: int
    schema_version: bytes  # b"": none
    redelivery_count: int
    last_index: int | None  # index of the entry's last message; None: the broker does not send it
    generation: int  # the generation of the consumer's queue at the time of delivery
    encryption: EncryptionContext | None = None  # None: the entry was not encrypted
    decoder: Decoder | None = None  # None: the consumer has no schema
    # Decodes the messages with their schema version. None: no message was decoded or taken yet, or
    # the messages have no version.
    decode: Callable[[Message], Any] | None = field(default=None, compare=False)
    # The number of times that the client had moved to another cluster before the delivery.
    # None: the program made the message.
    cluster: int | None = None
    key: tuple[int, int] | None = None  # ledger and entry. None: the program made the message
    batch: Batch | None = None  # None: the entry holds one message
    payload_bytes: int = 0  # without a batch: the size of the message's payload
    batch_size: int = field(init=False)  # 0: there is no batch

    def __post_init__(self) -> None:
        self.batch_size = 0 if self.batch is None else len(self.batch)

    def bytes_of(self, first: int, end: int) -> int:
        """Return the size of the payloads of the messages `first` to `end - 1`."""
        return self.payload_bytes if self.batch is None else self.batch.payload_bytes(first, end)

    def id_of(self, index: int) -> MessageId:
        """Return the id of the message at `index` in the batch. `index` -1: the entry is not a
        batch."""
        assert self.key is not None
        return MessageId(self.partition, *self.key, index, self.batch_size, self.topic)


class Decoder(Protocol):
    """Decodes payloads into values (decoding.py)."""

    def decode(self, message: Message) -> Any: ...


class Message:
    """A received message. A method that returns a text returns "" if the message has no such text.

    A message of a batch holds the whole batch in memory until the program drops the message. With
    the default batches, that is 125 KB for a message of 1 KB. A program that keeps the content of
    many messages should keep the results of `data` or `value`, which are copies.
    """

    __slots__ = ("_message_id", "_received", "delivery", "place")

    # `delivery` and `place` are internal to the client. They are plain attributes for speed: the
    # client reads them several times for each message.
    delivery: Delivery
    """The data that the message shares with the others of its entry."""
    place: int
    """The index in the delivered batch; -1: the message is in no batch."""

    def __init__(
        self,
        received: ReceivedMessage | None,
        message_id: MessageId | None,
        delivery: Delivery,
        place: int = -1,
    ) -> None:
        """If `received` or `message_id` is None, the message makes it from `delivery` when
        needed."""
        self._received = received
        self._message_id = message_id
        self.delivery = delivery
        self.place = place

    def data(self) -> bytes:
        """Return the payload."""
        if self._received is None:
            assert self.delivery.batch is not None
            return self.delivery.batch.payload(self.place)
        return self._received.payload

    def value(self) -> Any:
        """Return the payload, decoded with the consumer's schema if it has one.

        With a schema, a message whose content was None has the value None. With a SEPARATED
        KeyValueSchema, this value is a KeyValue whose `value` is None. The schema raises ValueError
        or TypeError for a payload that it cannot decode. Raises InvalidMessage if the
        broker does not know the schema version of the message. In the synchronous client, the call
        asks the broker for a version that the client lacks, and raises the errors of this request.
        """
        decoder = self.delivery.decoder
        return self.data() if decoder is None else decoder.decode(self)

    def message_id(self) -> MessageId:
        """Return the id, which names the place of the message in its topic."""
        if self._message_id is None:
            self._message_id = self.delivery.id_of(self.place)
        return self._message_id

    def properties(self) -> dict[str, str]:
        """Return the properties that the sending application attached."""
        return dict(self.received.properties)

    def partition_key(self) -> str:
        """Return the key, in base64 if the producer's key was bytes."""
        return self.received.partition_key or ""

    def ordering_key(self) -> str:
        """Return the ordering key. A Key_Shared subscription uses it instead of `partition_key`."""
        return (self.received.ordering_key or b"").decode("utf-8", "surrogateescape")

    def publish_timestamp(self) -> int:
        """Return the time when the producer sent the message, in milliseconds since 1970."""
        return self.delivery.publish_time_ms

    def event_timestamp(self) -> int:
        """Return the event time that the sending application set, in milliseconds since 1970, or 0
        if it set none."""
        return self.received.event_time_ms

    def topic_name(self) -> str:
        """Return the full name of the topic."""
        return self.delivery.topic

    def index(self) -> int | None:
        """Return the message's number in its topic, from 0; None if the broker does not send it."""
        last = self.delivery.last_index
        message_id = self.message_id()
        behind = message_id.batch_size() - 1 - message_id.batch_index()
        return last if last is None or message_id.batch_index() < 0 else last - behind

    def redelivery_count(self) -> int:
        """Return the number of earlier deliveries.

        The broker counts deliveries on Shared and Key_Shared subscriptions only.
        """
        return self.delivery.redelivery_count

    def schema_version(self) -> str:
        """Return the version of the schema with which the producer encoded the message; "" if none.

        The characters are the bytes of the version on the wire, as in Apache's client.
        """
        return self.delivery.schema_version.decode("latin-1")

    def producer_name(self) -> str:
        """Return the name of the producer."""
        return self.delivery.producer_name

    def has_null_value(self) -> bool:
        """Return whether the content was None. Such a message deletes its key on a compacted
        topic."""
        return self.received.null_value

    def encryption_context(self) -> EncryptionContext | None:
        """Return the parameters of the encryption. None: the message was not encrypted."""
        return self.delivery.encryption

    @property
    def received(self) -> ReceivedMessage:
        """The decoded message. Internal to the client."""
        if self._received is None:
            assert self.delivery.batch is not None
            self._received = self.delivery.batch.message(self.place)
        return self._received

    @property
    def was_delivered(self) -> bool:
        """True when a consumer received the message, False when the program made it. Internal to
        the client."""
        return self.delivery.key is not None

    @property
    def run(self) -> tuple[Delivery, int, int]:
        """The run (steps.py) of this message alone. Internal to the client."""
        return self.delivery, self.place, self.place + 1

    @property
    def payload_bytes(self) -> int:
        """The size of the payload. Internal to the client."""
        if self._received is None:
            return self.delivery.bytes_of(self.place, self.place + 1)
        return len(self._received.payload)

    def is_of(self, cluster: int) -> bool:
        """Return whether the message's id is valid in the client's present cluster. Internal to the
        client.

        `cluster`: how often the client has moved to another cluster. In another cluster, the id
        names another message.
        """
        return self.delivery.cluster is None or self.delivery.cluster == cluster

    def __repr__(self) -> str:
        return f"Message({self.message_id()}, {self.payload_bytes} bytes)"


@total_ordering
class MessageId:
    """The place where a message is stored: ledger, entry, and index in its batch.

    The batch index is -1 for a message that is not in a batch. Ids are ordered like the messages in
    the topic. The order of ids of different topics has no meaning.
    """

    __slots__ = ("_batch_index", "_batch_size", "_entry_id", "_ledger_id", "_partition", "_topic")

    earliest: ClassVar[MessageId]
    """The place before the first message of every topic."""
    latest: ClassVar[MessageId]
    """The place after the last message of every topic."""

    def __init__(
        self,
        partition: int = -1,
        ledger_id: int = -1,
        entry_id: int = -1,
        batch_index: int = -1,
        batch_size: int = 0,
        topic: str = "",
    ) -> None:
        self._partition = partition
        self._ledger_id = ledger_id
        self._entry_id = entry_id
        self._batch_index = batch_index
        self._batch_size = batch_size  # 0: unknown, or not in a batch
        self._topic = topic  # full name, with the number of a partition; "": unknown

    def ledger_id(self) -> int:
        """Return the number of the ledger."""
        return self._ledger_id

    def entry_id(self) -> int:
        """Return the number of the entry in its ledger."""
        return self._entry_id

    def batch_index(self) -> int:
        """Return the index in the batch, or -1 for a message that is not in a batch."""
        return self._batch_index

    def batch_size(self) -> int:
        """Return the number of messages in the batch; 0 if it is unknown or there is no batch.

        Apache's client does not have this method.
        """
        return self._batch_size

    def partition(self) -> int:
        """Return the number of the partition, or -1 if the topic has no partitions."""
        return self._partition

    def topic_name(self) -> str:
        """Return the full name of the message's topic, or "" if it is unknown.

        A consumer of several topics needs this name to acknowledge a message by its id. The ids of
        received messages have it.
        """
        return self._topic

    def serialize(self) -> bytes:
        """Return the id as bytes to store, in the format of Apache's clients."""
        data = pb.MessageIdData(ledgerId=self._ledger_id & _U64, entryId=self._entry_id & _U64)
        if self._partition >= 0:
            data.partition = self._partition
        first = self.first_chunk
        if first is not None:
            data.first_chunk_message_id.ledgerId = first.ledger_id() & _U64
            data.first_chunk_message_id.entryId = first.entry_id() & _U64
            if first.partition() >= 0:
                data.first_chunk_message_id.partition = first.partition()
        if self._batch_index >= 0:
            data.batch_index = self._batch_index
            if self._batch_size:
                data.batch_size = self._batch_size
        return data.SerializeToString()

    @classmethod
    def wrap(cls, msg_id: MessageId) -> MessageId:
        """Return the argument. In Apache's client, this method converts an id of another class."""
        return msg_id

    @classmethod
    def deserialize(cls, message_id_bytes: bytes, topic: str | None = None) -> MessageId:
        """Return the id that `serialize` wrote. Raises InvalidMessage for any other bytes.

        `topic`: the message's `topic_name()`, which the bytes do not contain. A consumer of several
        topics needs ids with a topic.
        """
        _expect("message_id_bytes", message_id_bytes, bytes)
        _expect("topic", topic, str, type(None))
        try:
            data = pb.MessageIdData.FromString(message_id_bytes)
        except DecodeError as error:
            raise InvalidMessage(f"not a serialized message id: {error}") from None
        if not data.IsInitialized():
            raise InvalidMessage("not a serialized message id: ledger or entry is missing")
        message_id = cls(
            data.partition,
            _signed(data.ledgerId),
            _signed(data.entryId),
            data.batch_index,
            data.batch_size,
            topic or "",
        )
        if not data.HasField("first_chunk_message_id"):
            return message_id
        first = data.first_chunk_message_id
        first_id = MessageId(
            first.partition, _signed(first.ledgerId), _signed(first.entryId), topic=topic or ""
        )
        return ChunkedMessageId(first_id, message_id)

    @property
    def first_chunk(self) -> MessageId | None:
        """The id of the first chunk. None: unknown, or the message was not sent in chunks."""
        return None

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


class ChunkedMessageId(MessageId):
    """The id of a message that was sent in chunks: the place of its last chunk.

    This id equals a MessageId of the same place. A seek that includes the message begins at
    `first_chunk`.
    """

    __slots__ = ("_first_chunk",)

    def __init__(self, first: MessageId, last: MessageId) -> None:
        super().__init__(
            last.partition(), last.ledger_id(), last.entry_id(), -1, 0, last.topic_name()
        )
        self._first_chunk = first

    @property
    def first_chunk(self) -> MessageId:
        return self._first_chunk


def _expect(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        raise WrongType(f"{name} must be {kinds[0].__name__}, not {type(value).__name__}")


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


MessageId.earliest = MessageId(-1, -1, -1)
MessageId.latest = MessageId(-1, 2**63 - 1, 2**63 - 1)
