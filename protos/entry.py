"""The stored entry: what a ledger keeps for one message or one batch, and how a broker reads it.

    [0x0e02 | u32 size | BrokerEntryMetadata]    put in front by the broker, stripped for delivery
    [0x0e01 | u32 CRC32C]                        of everything after it; a producer may leave it out
    u32 size | MessageMetadata                   never compressed
    payload                                      one message, a batch or a chunk: message.py

Sizes are big-endian. A broker never rewrites what the producer sent: it parses the metadata once,
on arrival, keeps the few fields that dispatch needs (EntryView), and passes the bytes through. The
two byte pairs cannot be taken for a metadata size, which would have to be 234 MB.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

import google_crc32c
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import Compression
from magnetar.protos.errors import ChecksumMismatch, EntryTooLarge, MalformedEntry

# What a SEND may carry as payload, after compression: Pulsar's limit, announced at CONNECT.
MESSAGE_BYTES_MAX: Final = 5 * 1024 * 1024
# A whole stored entry: a payload, and Pulsar's 10 KiB for everything in front of it.
ENTRY_BYTES_MAX: Final = MESSAGE_BYTES_MAX + 10 * 1024
# What the broker puts in front: magic and size, then twice a tag and a varint of ten bytes at most.
BROKER_METADATA_BYTES_MAX: Final = 6 + 2 * (1 + 10)
# So this is what a producer may send.
ENTRY_SENT_BYTES_MAX: Final = ENTRY_BYTES_MAX - BROKER_METADATA_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Chunk:
    """Which part of a large message an entry holds."""

    uuid: str  # common to all chunks of the message
    index: int
    count: int
    total_bytes: int  # of all chunks together


@dataclass(slots=True)
class EntryView:
    """What a broker knows of an entry without opening its payload.

    A value, never changed once made; not frozen, because that alone would cost 2 us an entry.
    """

    # What was parsed, not copied: starts at the checksum, or at the metadata size if there is none.
    data: bytes | memoryview
    payload_bytes: int  # as sent
    producer_name: str
    sequence_id: int  # of the first message
    highest_sequence_id: int  # of the last message; sequence_id when the producer does not say
    publish_time_ms: int
    num_messages: int
    is_batch: bool  # the layout of the payload; a batch may hold one message
    partition_key: str | None
    partition_key_b64: bool  # partition_key is base64 of bytes
    null_partition_key: bool
    ordering_key: bytes | None
    event_time_ms: int  # 0: none
    deliver_at_ms: int | None  # None: at once
    marker_type: int | None  # None: it holds messages of users
    compression: Compression
    uncompressed_size: int
    chunk: Chunk | None  # None: it holds whole messages
    null_value: bool


def parse_entry(data: bytes | memoryview) -> EntryView:
    """Read an entry as a producer sent it. The view keeps `data`: pass bytes that may live long.

    Raises EntryTooLarge, ChecksumMismatch, and MalformedEntry also for broker entry metadata, which
    is not a producer's to write.
    """
    if len(data) > ENTRY_SENT_BYTES_MAX:
        raise EntryTooLarge("entry", len(data), ENTRY_SENT_BYTES_MAX)
    head = _head(data)
    _verify(data, head)
    view = _plain_view(data, head) or _view(data, head)
    if view.payload_bytes > MESSAGE_BYTES_MAX:
        raise EntryTooLarge("payload", view.payload_bytes, MESSAGE_BYTES_MAX)
    return view


def parse_stored_entry(data: bytes | memoryview) -> EntryView:
    """Read an entry whose bytes are known to be whole, such as those under a ledger's digest.

    As `parse_entry` without computing the checksum; `data` comes from `strip_broker_metadata`.
    """
    head = _head(data)
    return _plain_view(data, head) or _view(data, head)


def checksum_in(data: bytes) -> int:
    """The CRC32C that an entry states of itself; NO_CHECKSUM: its producer left it out."""
    if len(data) < _PREFIX.size:
        return NO_CHECKSUM
    magic, checksum = _PREFIX.unpack_from(data)
    return checksum if magic == _MAGIC_CHECKSUM else NO_CHECKSUM


def checksums_of(entries: Iterable[bytes]) -> list[int]:
    """The CRC32C of what follows the place of the checksum in each of these entries."""
    at = _PREFIX.size
    return [_crc32c(entry[at:]) for entry in entries]


def payload_bytes_of(data: bytes) -> int:
    """Size of the payload behind metadata of the stated size; 0 where that cannot be."""
    if len(data) < _HEAD.size:
        return 0
    magic, _, size = _unpack_head(data)
    return max(len(data) - _HEAD.size - size, 0) if magic == _MAGIC_CHECKSUM else 0


# Broker entry metadata


@dataclass(frozen=True, slots=True)
class BrokerMetadata:
    """What the broker adds to an entry."""

    broker_timestamp_ms: int  # the broker's clock when the entry was appended
    index: int  # of the entry's last message among all messages of the topic, from 0


def broker_metadata_prefix(*, broker_timestamp_ms: int, index: int) -> bytes:
    """The bytes that turn an entry as sent into an entry as stored, when put in front of it."""
    metadata = _timestamp_field(broker_timestamp_ms) + b"\x10" + varint(index)
    return _PREFIX.pack(_MAGIC_BROKER_METADATA, len(metadata)) + metadata


def broker_metadata_prefixes(*, broker_timestamp_ms: int, indexes: Iterable[int]) -> list[bytes]:
    """Those of entries with these indexes: what they have in common is encoded once."""
    timestamp = _timestamp_field(broker_timestamp_ms)
    prefixes: list[bytes] = []
    head = high = b""
    known = -1  # bits of the index above the lowest seven, for which `head` and `high` are
    for index in indexes:
        if index >> 7 != known:
            known = index >> 7
            high = varint(known) if known else b""
            size = len(timestamp) + 2 + len(high)
            head = _PREFIX.pack(_MAGIC_BROKER_METADATA, size) + timestamp + b"\x10"
        low = index & 0x7F
        prefixes.append(head + _MORE[low] + high if high else head + _ONE_BYTE[low])
    return prefixes


def with_broker_metadata(entry: bytes, *, broker_timestamp_ms: int, index: int) -> bytes:
    """The stored form of an entry."""
    return broker_metadata_prefix(broker_timestamp_ms=broker_timestamp_ms, index=index) + entry


def strip_broker_metadata(
    stored: bytes | memoryview,
) -> tuple[BrokerMetadata | None, memoryview]:
    """The broker's part and the rest, as a view. None: there is no such part, all is the rest.

    Raises MalformedEntry.
    """
    view = memoryview(stored)
    magic, size, _ = _head(view)
    if magic != _MAGIC_BROKER_METADATA:
        return None, view
    end = _PREFIX.size + size
    if end > len(view):
        raise MalformedEntry(f"the broker entry metadata of {size} bytes is truncated")
    try:
        parsed = _broker_metadata_from(view[_PREFIX.size : end])
    except DecodeError as error:
        raise MalformedEntry(f"the broker entry metadata cannot be parsed: {error}") from None
    if not (parsed.HasField("broker_timestamp") and parsed.HasField("index")):
        raise MalformedEntry("the broker entry metadata lacks its time or index")
    return BrokerMetadata(parsed.broker_timestamp, parsed.index), view[end:]


# The layers of an entry, also for message.py


def open_entry(data: bytes | memoryview) -> tuple[pb.MessageMetadata, int]:
    """The metadata and where the payload begins, after the CRC32C was checked, if there is one.

    Raises ChecksumMismatch, and MalformedEntry as `parse_entry`.
    """
    head = _head(data)
    _verify(data, head)
    return _parse_metadata(data, head)


def checked_text(text: str) -> str:
    """A string of protobuf, which hands out invalid UTF-8 as bytes. Raises MalformedEntry."""
    if type(text) is not str:
        raise MalformedEntry("a string in the metadata is not UTF-8")
    return text


def chunk_of(metadata: pb.MessageMetadata) -> Chunk | None:
    """Which chunk the entry is. None: it is whole. Raises MalformedEntry."""
    count = metadata.num_chunks_from_msg
    if count in (0, 1):
        return None
    if not 0 <= metadata.chunk_id < count or metadata.HasField("num_messages_in_batch"):
        raise MalformedEntry(f"chunk {metadata.chunk_id} of {count} is not possible")
    return Chunk(
        uuid=checked_text(metadata.uuid),
        index=metadata.chunk_id,
        count=count,
        total_bytes=metadata.total_chunk_msg_size,
    )


def batch_size_of(metadata: pb.MessageMetadata, payload_bytes: int) -> int:
    """How many messages the batch holds. Raises MalformedEntry.

    A count that cannot fit into the payload is refused, because permits, backlogs and the index of
    every later message are computed from it.
    """
    count = metadata.num_messages_in_batch
    plain_bytes = metadata.uncompressed_size if metadata.compression else payload_bytes
    if not 1 <= count <= plain_bytes // BATCHED_MESSAGE_BYTES_MIN:
        raise MalformedEntry(f"{count} messages cannot be in a batch of {plain_bytes} bytes")
    return count


def varint(number: int) -> bytes:
    """A protobuf varint of an unsigned 64-bit number; -1 and other negative ones as 2^64 - n."""
    number &= 0xFFFFFFFFFFFFFFFF
    if number < 0x80:
        return _ONE_BYTE[number]
    if number < 0x4000:
        return _MORE[number & 0x7F] + _ONE_BYTE[number >> 7]
    if number < 0x200000:
        return _MORE[number & 0x7F] + _MORE[number >> 7 & 0x7F] + _ONE_BYTE[number >> 14]
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


# Mechanics

# In a batch: a u32 and a SingleMessageMetadata, of which the payload size takes two bytes at least.
BATCHED_MESSAGE_BYTES_MIN: Final = 6

_MAGIC_CHECKSUM = 0x0E01
_MAGIC_BROKER_METADATA = 0x0E02
_PREFIX = struct.Struct(">HI")  # magic, checksum or size
_HEAD = struct.Struct(">HII")  # and the metadata size behind a checksum
CHECKED_HEAD_BYTES: Final = _HEAD.size
_ONE_BYTE = [bytes([number]) for number in range(0x80)]
_MORE = [bytes([number | 0x80]) for number in range(0x80)]  # another byte follows
_COMPRESSIONS = tuple(Compression)
# A name of 127 bytes, two numbers, the size before compression, a schema version, and their tags.
PLAIN_METADATA_BYTES_MAX: Final = 180
NO_CHECKSUM: Final = -1
_PLAIN_SCHEMA_BYTES_MAX = 16  # Apache's Java client sends none or eight
_COMPRESSION_TAG = pb.MessageMetadata.COMPRESSION_FIELD_NUMBER << 3

_Head = tuple[int, int, int]
# Looking these up costs as much as a field of the metadata does. The stubs of protobuf do not know
# that parsing takes any buffer.
_unpack_head = _HEAD.unpack_from
_crc32c: Callable[[bytes], int] = google_crc32c.value
_metadata_from: "Callable[[bytes | memoryview], pb.MessageMetadata]" = cast(
    "Any", pb.MessageMetadata.FromString
)
_broker_metadata_from: "Callable[[bytes | memoryview], pb.BrokerEntryMetadata]" = cast(
    "Any", pb.BrokerEntryMetadata.FromString
)


def _head(data: bytes | memoryview) -> _Head:
    """The first ten bytes. The shortest metadata has six and its size four, so none has fewer."""
    try:
        return _unpack_head(data)
    except struct.error:
        raise MalformedEntry(f"an entry of {len(data)} bytes is truncated") from None


def _verify(data: bytes | memoryview, head: _Head) -> None:
    magic, expected, _ = head
    if magic == _MAGIC_CHECKSUM:
        actual = _crc32c(bytes(data[_PREFIX.size :]))  # it takes nothing but bytes
        if actual != expected:
            raise ChecksumMismatch(expected, actual)
    elif magic == _MAGIC_BROKER_METADATA:
        raise MalformedEntry("it begins with broker entry metadata, which only a broker writes")


def _parse_metadata(data: bytes | memoryview, head: _Head) -> tuple[pb.MessageMetadata, int]:
    magic, following, size = head
    start = _HEAD.size
    if magic != _MAGIC_CHECKSUM:
        size = magic << 16 | following >> 16
        start = 4
    end = start + size
    if end > len(data):
        raise MalformedEntry(f"the metadata of {size} bytes is truncated")
    encoded = data[start:end]
    try:
        metadata = _metadata_from(encoded)
    except DecodeError as error:
        raise MalformedEntry(f"the metadata cannot be parsed: {error}") from None
    has = metadata.HasField
    if not (has("producer_name") and has("sequence_id") and has("publish_time")):
        raise MalformedEntry("the metadata lacks the producer's name, sequence id or publish time")
    # protobuf reads an unknown codec as none at all. The search is cheap and seldom finds anything.
    if _COMPRESSION_TAG in encoded and not has("compression"):
        _refuse_unknown_compression(metadata)
    return metadata, end


def _view(data: bytes | memoryview, head: _Head) -> EntryView:
    metadata, payload_at = _parse_metadata(data, head)
    has = metadata.HasField  # bound once: a broker's hottest lines
    sequence_id = metadata.sequence_id
    is_batch = has("num_messages_in_batch")
    has_key = has("partition_key")
    payload_bytes = len(data) - payload_at
    return EntryView(
        data,
        payload_bytes,
        checked_text(metadata.producer_name),
        sequence_id,
        max(sequence_id, metadata.highest_sequence_id),
        metadata.publish_time,
        batch_size_of(metadata, payload_bytes) if is_batch else 1,
        is_batch,
        checked_text(metadata.partition_key) if has_key else None,
        has_key and metadata.partition_key_b64_encoded,
        metadata.null_partition_key,
        metadata.ordering_key if has("ordering_key") else None,
        metadata.event_time,
        metadata.deliver_at_time if has("deliver_at_time") else None,
        metadata.marker_type if has("marker_type") else None,
        _COMPRESSIONS[metadata.compression],
        metadata.uncompressed_size,
        chunk_of(metadata) if metadata.num_chunks_from_msg else None,
        metadata.null_value,
    )


def _plain_view(data: bytes | memoryview, head: _Head) -> EntryView | None:
    """The view of a message with nothing but what clients write into each one: see `plain_rest`.

    Reads it by hand in a third of the time. None: there is more, or something is wrong.
    """
    magic, _, size = head
    end = _HEAD.size + size
    if magic != _MAGIC_CHECKSUM or size > PLAIN_METADATA_BYTES_MAX or end > len(data):
        return None
    metadata = bytes(data[_HEAD.size : end])
    try:
        at = 2 + metadata[1]
        # Producer and time repeat from one entry to the next, and are taken from a cache.
        producer_name = plain_name(metadata[:at])
        if producer_name is None or metadata[at] != 0x10:
            return None
        at += 1
        byte = metadata[at]
        sequence_id = byte & 0x7F
        shift = 7
        while byte > 0x7F:
            at += 1
            byte = metadata[at]
            sequence_id |= (byte & 0x7F) << shift
            shift += 7
    except IndexError:
        return None
    rest = plain_rest(metadata[at + 1 :])
    if rest is None or shift > 63:
        return None
    publish_time_ms, uncompressed_size = rest
    return EntryView(
        data,
        len(data) - end,
        producer_name,
        sequence_id,
        sequence_id,
        publish_time_ms,
        1,
        False,
        None,
        False,
        False,
        None,
        0,
        None,
        None,
        Compression.NONE,
        uncompressed_size,
        None,
        False,
    )


@lru_cache(maxsize=1024)  # at most 130 bytes each
def plain_name(field: bytes) -> str | None:
    """The producer's name, from a field with a size of one byte. None: it is not that."""
    if field[0] != 0x0A or field[1] > 0x7F or len(field) != 2 + field[1]:
        return None
    try:
        return field[2:].decode()
    except UnicodeDecodeError:
        return None


@lru_cache(maxsize=256)  # clocks and sizes of producers differ a little; at most 40 bytes each
def plain_rest(fields: bytes) -> tuple[int, int] | None:
    """The publish time and the uncompressed size (0: not said) from the end of plain metadata.

    The publish time comes first and is below 2^63. Apache's Java client then adds the uncompressed
    size, also to a message that is not compressed, and the version of its schema. None: the fields
    are others, or in another order.
    """
    time_ms, at = _plain_number(fields, 0x18, 0, 9)
    size = 0
    if at < len(fields) and fields[at] == 0x48:
        size, at = _plain_number(fields, 0x48, at, 5)
    if fields[at : at + 2] == b"\x82\x01" and len(fields) > at + 2:
        schema_bytes = fields[at + 2]
        at += 3 + schema_bytes if schema_bytes <= _PLAIN_SCHEMA_BYTES_MAX else 0
    return (time_ms, size) if at == len(fields) and size < 1 << 32 else None


def _plain_number(fields: bytes, tag: int, at: int, bytes_max: int) -> tuple[int, int]:
    """A field of a varint of so many bytes, and where the next field begins. If it is not that, the
    place is beyond the end."""
    number = 0
    if fields[at : at + 1] == bytes([tag]):
        for place, byte in enumerate(fields[at + 1 : at + 1 + bytes_max]):
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return number, at + 2 + place
    return 0, len(fields) + 1


@lru_cache(maxsize=8)  # a broker appends many entries within one millisecond
def _timestamp_field(timestamp_ms: int) -> bytes:
    return b"\x08" + varint(timestamp_ms)


def _refuse_unknown_compression(metadata: pb.MessageMetadata) -> None:
    unknown = UnknownFieldSet(metadata)
    for index in range(len(unknown)):
        if unknown[index].field_number == pb.MessageMetadata.COMPRESSION_FIELD_NUMBER:
            raise MalformedEntry(f"unknown compression type {unknown[index].data}")
