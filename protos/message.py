"""Encodes and decodes messages: the payload of an entry, as clients write and read it.

An entry (entry.py) holds one of three things:

- One message: the payload is its value, and the metadata describes the message.
- A batch: `num_messages_in_batch` is present, even if it is 1. The payload has, for each message,

      u32 size, big-endian | SingleMessageMetadata | value of payload_size bytes

- A chunk of one large message: `num_chunks_from_msg` is above 1. The payload is a piece of the
  compressed value, so a reader joins the pieces before it decompresses them.

Compression covers the whole payload and never the metadata. `uncompressed_size` is the size of the
payload before compression.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import google_crc32c

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.batch import (
    NO_PROPERTIES,
    Batch,
    ReceivedMessage,
    open_batch,
    received_message,
)
from magnetar.protos.compression import (
    UNCOMPRESSED_BYTES_MAX,
    Compression,
    compress,
    decompress,
)
from magnetar.protos.entry import (
    ENTRY_SENT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    BrokerMetadata,
    Chunk,
    PlainMessage,
    batch_size_of,
    checked_text,
    chunk_of,
    open_entry,
    strip_broker_metadata,
    varint,
    varints,
)
from magnetar.protos.errors import (
    EntryEncrypted,
    EntryTooLarge,
)

# Writing


@dataclass(slots=True)
class OutgoingMessage:
    """One message to publish. It is not frozen, for speed."""

    payload: bytes
    sequence_id: int
    properties: Mapping[str, str] = field(default_factory=lambda: NO_PROPERTIES)
    partition_key: str | None = None
    partition_key_b64: bool = False  # partition_key is base64 of bytes
    ordering_key: bytes | None = None
    event_time_ms: int = 0  # 0: no event time
    deliver_at_ms: int | None = None  # None: at once; a delayed message is never in a batch
    null_value: bool = False
    # None: the producer's version; b"": no version. In a batch, each message has None.
    schema_version: bytes | None = None

    @property
    def is_plain(self) -> bool:
        """True when the message has only a payload."""
        return not (
            self.properties
            or self.partition_key is not None
            or self.ordering_key is not None
            or self.event_time_ms
            or self.deliver_at_ms is not None
            or self.null_value
            or self.schema_version is not None
        )


@dataclass(frozen=True, slots=True)
class SealedKey:
    """A data key, encrypted with the public key that is named `name`."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """An encrypted payload, and the values that a reader needs to decrypt it."""

    keys: Sequence[SealedKey]
    param: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """The metadata that the entries of a producer have in common."""

    producer_name: str
    publish_time_ms: int
    compression: Compression = Compression.NONE
    schema_version: bytes | None = None
    seal: Callable[[bytes], Sealed] | None = None  # encrypts payloads; None: they are not encrypted
    # The encoded metadata of a plain entry before and after its sequence id.
    before: bytes = field(init=False, repr=False, compare=False)
    behind: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain = pb.MessageMetadata(producer_name=self.producer_name).SerializePartialToString()
        object.__setattr__(self, "before", plain + b"\x10")
        object.__setattr__(self, "behind", b"\x18" + varint(self.publish_time_ms))

    @property
    def is_plain(self) -> bool:
        """True when entries have neither compression nor a schema version nor encryption."""
        return (
            self.compression is Compression.NONE
            and self.schema_version is None
            and self.seal is None
        )


def encode_message(message: OutgoingMessage, header: EntryHeader) -> list[bytes]:
    """Encode the entry for one unbatched message: [everything before the payload, payload].

    Raises EntryTooLarge.
    """
    if header.is_plain and message.is_plain:  # this takes a third of protobuf's time
        number = varint(message.sequence_id)
        return _checked_entry(header.before + number + header.behind, message.payload)
    metadata = _message_metadata(message, header)
    return _entry(metadata, _compressed(message.payload, header), header)


def encode_batch(messages: Sequence[OutgoingMessage], header: EntryHeader) -> list[bytes]:
    """Encode the entry for a batch of at least one message.

    Returns [everything before the payload, payload].

    A key or an ordering key that all messages share is also in the entry's metadata. So a broker
    can dispatch by key without opening the batch. A delayed message cannot be in a batch. Raises
    EntryTooLarge.
    """
    payload = b"".join(_batched(messages))
    first = messages[0]
    metadata = _metadata(first.sequence_id, header, len(payload))
    metadata.num_messages_in_batch = len(messages)
    metadata.highest_sequence_id = messages[-1].sequence_id
    key, ordering_key = first.partition_key, first.ordering_key
    if key is not None and all(m.partition_key == key for m in messages):
        metadata.partition_key = key
        if first.partition_key_b64:
            metadata.partition_key_b64_encoded = True
    if ordering_key is not None and all(m.ordering_key == ordering_key for m in messages):
        metadata.ordering_key = ordering_key
    return _entry(metadata, _compressed(payload, header), header)


def encode_chunks(
    message: OutgoingMessage, header: EntryHeader, *, uuid: str, chunk_bytes_max: int
) -> Iterator[list[bytes]]:
    """Encode the entries for a message that is too large for one entry, in order.

    Each entry repeats the message's metadata. A message that fits becomes one ordinary entry.
    Raises EntryTooLarge if the metadata is too large.
    """
    assert 0 < chunk_bytes_max <= MESSAGE_BYTES_MAX
    payload = _compressed(message.payload, header)
    count = max(1, -(-len(payload) // chunk_bytes_max))
    metadata = _message_metadata(message, header)
    if count == 1:
        yield _entry(metadata, payload, header)
        return
    metadata.uuid = uuid
    metadata.num_chunks_from_msg = count
    metadata.total_chunk_msg_size = len(payload)
    for index in range(count):
        metadata.chunk_id = index
        piece = payload[index * chunk_bytes_max : (index + 1) * chunk_bytes_max]
        yield _entry(metadata, piece, header)


# Reading


@dataclass(slots=True)
class ReceivedEntry:
    """An entry as a consumer receives it. No code changes it, but for speed it is not frozen."""

    producer_name: str
    sequence_id: int
    publish_time_ms: int
    num_messages: int
    is_batch: bool
    chunk: Chunk | None  # None: the entry holds whole messages
    compression: Compression
    uncompressed_size: int
    schema_version: bytes | None
    deliver_at_ms: int | None
    broker: BrokerMetadata | None  # None: the broker sent no broker metadata
    metadata: pb.MessageMetadata  # the metadata for decode_messages
    # These bytes end with the payload, which is still compressed. The bytes before it are unused.
    body: bytes
    payload_at: int = 0

    @property
    def payload(self) -> bytes:
        """The payload, still compressed. A copy, unless the payload is all of `body`."""
        return self.body[self.payload_at :]

    @property
    def payload_size(self) -> int:
        """The size of `payload` in bytes."""
        return len(self.body) - self.payload_at

    @property
    def is_encrypted(self) -> bool:
        """True when the payload was encrypted in the received entry."""
        return bool(self.metadata.encryption_keys)


def read_entry(data: bytes | memoryview, *, encrypted_too: bool = False) -> ReceivedEntry:
    """Check and parse the entry of a MESSAGE command. The result does not refer to `data`.

    Raises ChecksumMismatch, MalformedEntry, and EntryEncrypted unless `encrypted_too`.
    """
    broker, rest = strip_broker_metadata(data)
    metadata, body, payload_at = open_entry(rest)
    if metadata.encryption_keys and not encrypted_too:
        raise EntryEncrypted
    has = metadata.HasField
    is_batch = has("num_messages_in_batch")
    return ReceivedEntry(
        producer_name=checked_text(metadata.producer_name),
        sequence_id=metadata.sequence_id,
        publish_time_ms=metadata.publish_time,
        num_messages=batch_size_of(metadata, len(body) - payload_at) if is_batch else 1,
        is_batch=is_batch,
        chunk=chunk_of(metadata),
        compression=_COMPRESSIONS[metadata.compression],
        uncompressed_size=metadata.uncompressed_size,
        schema_version=metadata.schema_version if has("schema_version") else None,
        deliver_at_ms=metadata.deliver_at_time if has("deliver_at_time") else None,
        broker=broker,
        metadata=metadata,
        body=body,
        payload_at=payload_at,
    )


def decode_messages(
    entry: ReceivedEntry,
    payload: bytes | None = None,
    *,
    bytes_max: int = UNCOMPRESSED_BYTES_MAX,
) -> list[ReceivedMessage]:
    """Return the messages of an entry, in order.

    For a chunked message, pass its last entry and the joined payloads of all its chunks. Raises
    DecompressionError, UncompressedSizeCorruption, BatchDeserializeError, MalformedEntry.
    """
    assert (payload is None) == (entry.chunk is None)
    if entry.is_batch:
        batch = open_messages(entry, bytes_max=bytes_max)
        return [batch.message(index) for index in range(len(batch))]
    sent = entry.payload if payload is None else payload
    plain = decompress(entry.compression, sent, entry.uncompressed_size, bytes_max=bytes_max)
    return [received_message(entry.metadata, plain, entry.sequence_id, -1)]


def open_messages(entry: ReceivedEntry, *, bytes_max: int = UNCOMPRESSED_BYTES_MAX) -> Batch:
    """Return the messages of an entry that is a batch. The result decodes each message on access.

    Raises the errors of `decode_messages`.
    """
    assert entry.is_batch
    body, at = entry.body, entry.payload_at
    if entry.compression is not Compression.NONE:
        size = entry.uncompressed_size
        body, at = decompress(entry.compression, entry.payload, size, bytes_max=bytes_max), 0
    return open_batch(body, at, entry.num_messages, sequence_id=entry.sequence_id)


def plain_message(plain: PlainMessage) -> ReceivedMessage:
    """Return the message of an entry that `open_plain` has read."""
    number = plain.sequence_id
    return ReceivedMessage(plain.payload, NO_PROPERTIES, None, False, None, 0, number, False, -1)


def undecoded_message(entry: ReceivedEntry) -> ReceivedMessage:
    """Return one message with the raw payload of `entry`. Use it if the payload cannot be decoded.

    Raises MalformedEntry.
    """
    return received_message(entry.metadata, entry.payload, entry.sequence_id, -1)


# Mechanics of writing

_U32 = struct.Struct(">I")
_CHECKED_HEAD = struct.Struct(">HII")  # 0x0e01, checksum, metadata size
_CHECKSUM = struct.Struct(">HI")  # 0x0e01, checksum
_crc32c: Callable[[bytes], int] = google_crc32c.value
_extend_crc32c: Callable[[int, bytes], int] = google_crc32c.extend


def _compression_for(header: EntryHeader, payload_bytes: int) -> Compression:
    """Return the compression for a payload. An empty payload is not compressed, because Apache's
    C++ engine cannot read an empty payload in ZLIB form."""
    return header.compression if payload_bytes else Compression.NONE


def _compressed(payload: bytes, header: EntryHeader) -> bytes:
    return compress(_compression_for(header, len(payload)), payload)


def _metadata(sequence_id: int, header: EntryHeader, uncompressed_size: int) -> pb.MessageMetadata:
    metadata = pb.MessageMetadata(
        producer_name=header.producer_name,
        sequence_id=sequence_id,
        publish_time=header.publish_time_ms,
    )
    compression = _compression_for(header, uncompressed_size)
    if compression:
        metadata.compression = _WIRE_COMPRESSIONS[compression]
        metadata.uncompressed_size = uncompressed_size
    if header.schema_version is not None:
        metadata.schema_version = header.schema_version
    return metadata


def _message_metadata(message: OutgoingMessage, header: EntryHeader) -> pb.MessageMetadata:
    metadata = _metadata(message.sequence_id, header, len(message.payload))
    _describe(metadata, message)
    if message.deliver_at_ms is not None:
        metadata.deliver_at_time = message.deliver_at_ms
    if message.schema_version:
        metadata.schema_version = message.schema_version
    elif message.schema_version is not None:
        metadata.ClearField("schema_version")
    return metadata


def _describe(
    metadata: pb.MessageMetadata | pb.SingleMessageMetadata, message: OutgoingMessage
) -> None:
    for key, value in message.properties.items():
        metadata.properties.add(key=key, value=value)
    _set_keys(metadata, message)
    if message.event_time_ms:
        metadata.event_time = message.event_time_ms
    if message.null_value:
        assert not message.payload
        metadata.null_value = True


def _set_keys(
    metadata: pb.MessageMetadata | pb.SingleMessageMetadata, message: OutgoingMessage
) -> None:
    if message.partition_key is not None:
        metadata.partition_key = message.partition_key
        if message.partition_key_b64:
            metadata.partition_key_b64_encoded = True
    if message.ordering_key is not None:
        metadata.ordering_key = message.ordering_key


def _batched(messages: Sequence[OutgoingMessage]) -> list[bytes]:
    """Return the parts of a batch's payload."""
    parts: list[bytes] = []
    fronts: dict[tuple[int, int], bytes] = {}  # keyed by the sizes of a payload and of an id
    ids = varints([message.sequence_id for message in messages])
    for message, encoded_id in zip(messages, ids, strict=True):
        assert message.deliver_at_ms is None
        assert message.schema_version is None
        payload = message.payload
        plain = not (message.properties or message.event_time_ms or message.null_value)
        if plain and message.partition_key is None and message.ordering_key is None:
            # The common case has only payload_size and sequence_id. This code encodes them in a
            # fifth of protobuf's time.
            sizes = len(payload), len(encoded_id)
            if sizes not in fronts:
                size = b"\x18" + varint(sizes[0]) + b"\x40"
                fronts[sizes] = _U32.pack(len(size) + sizes[1]) + size
            parts += (fronts[sizes], encoded_id, payload)
        else:
            metadata = _single_metadata(message)
            parts += (_U32.pack(len(metadata)), metadata, payload)
    return parts


def _single_metadata(message: OutgoingMessage) -> bytes:
    metadata = pb.SingleMessageMetadata(
        payload_size=len(message.payload), sequence_id=message.sequence_id
    )
    _describe(metadata, message)
    return metadata.SerializeToString()


def _entry(metadata: pb.MessageMetadata, payload: bytes, header: EntryHeader) -> list[bytes]:
    if header.seal is not None:
        sealed = header.seal(payload)
        del metadata.encryption_keys[:]  # removes the keys of the previous chunk
        for key in sealed.keys:
            metadata.encryption_keys.add(key=key.name, value=key.value)
        metadata.encryption_param = sealed.param
        payload = sealed.payload
    return _checked_entry(metadata.SerializeToString(), payload)


def _checked_entry(metadata: bytes, payload: bytes) -> list[bytes]:
    if len(payload) > MESSAGE_BYTES_MAX:
        raise EntryTooLarge("payload", len(payload), MESSAGE_BYTES_MAX)
    size = _CHECKED_HEAD.size + len(metadata) + len(payload)
    if size > ENTRY_SENT_BYTES_MAX:
        raise EntryTooLarge("entry", size, ENTRY_SENT_BYTES_MAX)
    sized = _U32.pack(len(metadata)) + metadata
    checksum = _extend_crc32c(_crc32c(sized), payload)
    return [_CHECKSUM.pack(0x0E01, checksum) + sized, payload]


# Mechanics of reading

_COMPRESSIONS = tuple(Compression)
_WIRE_COMPRESSIONS = tuple(pb.CompressionType.values())
