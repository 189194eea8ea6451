"""The format of a stored entry, which holds one message, one batch or one chunk of a message.

    [0x0e02 | u32 size | BrokerEntryMetadata]    the broker's prefix
    [0x0e01 | u32 CRC32C]                        of all following bytes; a producer may omit it
    u32 size | MessageMetadata                   never compressed
    payload                                      see message.py

Sizes are big-endian. A broker never rewrites the bytes that the producer sent. It parses the
metadata once on arrival, keeps the few fields that dispatch needs (EntryView), and passes the bytes
on. A metadata size never begins with one of the two magic numbers: such metadata would have 234 MB.
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
from magnetar.protos.field_count import has_more_fields

# The largest payload of a SEND, after compression. It is Pulsar's limit. The broker announces it in
# CONNECTED.
MESSAGE_BYTES_MAX: Final = 5 * 1024 * 1024
# The largest stored entry: a payload, and Pulsar's 10 KiB for everything before the payload.
ENTRY_BYTES_MAX: Final = MESSAGE_BYTES_MAX + 10 * 1024
# The broker's prefix: magic and size, then two fields, each a tag and a varint of up to ten bytes.
BROKER_METADATA_BYTES_MAX: Final = 6 + 2 * (1 + 10)
# The largest entry that a producer may send.
ENTRY_SENT_BYTES_MAX: Final = ENTRY_BYTES_MAX - BROKER_METADATA_BYTES_MAX
# The maximum number of fields, including nested fields, in large metadata of an arriving entry.
# 5 MB can hold 2,500,000 fields, which take 250 ms to parse. Counting 10,000 fields takes up to
# 30 ms.
METADATA_FIELDS_MAX: Final = 10_000
# Metadata up to this size is not large: the broker parses it within 10 ms without counting fields.
METADATA_COUNTED_BYTES: Final = 128 << 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a large message that an entry holds."""

    uuid: str  # common to all chunks of the message
    index: int
    count: int
    total_bytes: int  # the size of all chunks together


@dataclass(slots=True)
class EntryView:
    """The metadata fields that a broker needs of an entry. The payload is not decoded.

    Do not change a view after its creation. The class is not frozen, because freezing would cost
    2 us per entry.
    """

    # The entry's bytes, not a copy. They begin with the checksum and its magic number; in an entry
    # without a checksum they begin with the metadata size.
    data: bytes | memoryview
    payload_bytes: int  # the size of the payload as sent
    producer_name: str
    sequence_id: int  # the id of the first message
    highest_sequence_id: int  # the id of the last message; sequence_id if the producer sends none
    publish_time_ms: int
    num_messages: int
    is_batch: bool  # True: the payload has a batch's layout; a batch may hold only one message
    partition_key: str | None
    partition_key_b64: bool  # True: partition_key is the base64 form of a key of bytes
    null_partition_key: bool
    ordering_key: bytes | None
    event_time_ms: int  # 0: none
    deliver_at_ms: int | None  # None: at once
    marker_type: int | None  # None: the entry holds messages of users
    compression: Compression
    uncompressed_size: int
    chunk: Chunk | None  # None: the entry holds whole messages
    null_value: bool


def parse_entry(data: bytes | memoryview) -> EntryView:
    """Read an entry as a producer sent it. The view refers to `data`, so `data` must stay valid.

    Raises EntryTooLarge, ChecksumMismatch and MalformedEntry. An entry that begins with broker
    entry metadata is malformed, too: only a broker writes this metadata.
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
    """Read an entry like `parse_entry`, but check neither its checksum nor its size.

    Call this function where another checksum protects the bytes, such as the checksum of a bookie's
    envelope, or where the caller does not read the payload. `data` must not begin with broker entry
    metadata (`strip_broker_metadata`). Raises MalformedEntry.
    """
    head = _head(data)
    return _plain_view(data, head) or _view(data, head)


def parse_sent_entry(
    data: bytes, check: Callable[[pb.MessageMetadata, EntryView], None]
) -> EntryView:
    """Read an arriving entry like `parse_stored_entry`, and call `check` with the metadata and the
    view. `check` raises an error if the metadata is wrong; plain metadata needs no check. Metadata
    of more than METADATA_COUNTED_BYTES is malformed if it has more than METADATA_FIELDS_MAX
    fields."""
    head = _head(data)
    plain = _plain_view(data, head)
    if plain is not None:
        return plain
    metadata, payload_at = _parse_metadata(data, head, fields_max=METADATA_FIELDS_MAX)
    view = _view_of(data, metadata, payload_at)
    check(metadata, view)
    return view


def checksum_in(data: bytes) -> int:
    """Return the CRC32C that an entry states. NO_CHECKSUM: the producer omitted the checksum."""
    if len(data) < _PREFIX.size:
        return NO_CHECKSUM
    magic, checksum = _PREFIX.unpack_from(data)
    return checksum if magic == _MAGIC_CHECKSUM else NO_CHECKSUM


def checksums_of(entries: Iterable[bytes]) -> list[int]:
    """Compute, for each of these entries, the CRC32C of the bytes after its checksum."""
    at = _PREFIX.size
    return [_crc32c(entry[at:]) for entry in entries]


def payload_bytes_of(data: bytes) -> int:
    """Return the payload's size, computed from the metadata size that the entry states. 0: the
    entry is malformed or has no checksum."""
    if len(data) < _HEAD.size:
        return 0
    magic, _, size = _unpack_head(data)
    return max(len(data) - _HEAD.size - size, 0) if magic == _MAGIC_CHECKSUM else 0


# Broker entry metadata


@dataclass(frozen=True, slots=True)
class BrokerMetadata:
    """The metadata that the broker adds to an entry."""

    broker_timestamp_ms: int  # the broker's clock when the entry was appended
    index: int  # the index of the entry's last message among all messages of the topic, from 0


def broker_metadata_prefix(*, broker_timestamp_ms: int, index: int) -> bytes:
    """Return the prefix that the broker stores before the bytes of a sent entry."""
    metadata = _timestamp_field(broker_timestamp_ms) + b"\x10" + varint(index)
    return _PREFIX.pack(_MAGIC_BROKER_METADATA, len(metadata)) + metadata


def broker_metadata_prefixes(*, broker_timestamp_ms: int, indexes: Iterable[int]) -> list[bytes]:
    """Return the prefixes of entries with these indexes. Common parts are encoded once."""
    timestamp = _timestamp_field(broker_timestamp_ms)
    prefixes: list[bytes] = []
    head = high = b""
    known = -1  # `head` and `high` are valid for each index with index >> 7 == known
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
    """Return the stored form of an entry."""
    return broker_metadata_prefix(broker_timestamp_ms=broker_timestamp_ms, index=index) + entry


def strip_broker_metadata(
    stored: bytes | memoryview,
) -> tuple[BrokerMetadata | None, memoryview]:
    """Return the broker's metadata, and the rest of the entry as a view.

    None: the entry has no broker metadata, and the view holds the whole entry. Raises
    MalformedEntry.
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
        raise MalformedEntry("the broker entry metadata lacks the timestamp or the index")
    return BrokerMetadata(parsed.broker_timestamp, parsed.index), view[end:]


# Functions that open an entry; message.py uses them, too


def open_entry(data: memoryview) -> tuple[pb.MessageMetadata, bytes, int]:
    """Check the CRC32C if there is one. Return the metadata, a copy of the entry from the metadata
    size to the end, and the offset of the payload in this copy.

    Raises ChecksumMismatch and MalformedEntry. Unlike `parse_entry`, it does not check the number
    of messages in a batch, the chunk and the encoding of texts.
    """
    head = _head(data)
    magic, expected, _ = head
    begin = _PREFIX.size if magic == _MAGIC_CHECKSUM else 0
    copy = bytes(data[begin:])  # the only copy: _crc32c accepts only bytes
    if begin and (actual := _crc32c(copy)) != expected:
        raise ChecksumMismatch(expected, actual)
    metadata, payload_at = _parse_metadata(data, head)
    return metadata, copy, payload_at - begin


@dataclass(slots=True)
class PlainMessage:
    """An entry with one uncompressed message that has no key, no properties and no schema version.
    Do not change the object after its creation. The class is not frozen, for speed."""

    producer_name: str
    sequence_id: int
    publish_time_ms: int
    index: int | None  # the index of the message in its topic; None: the broker did not send it
    payload: bytes


def open_plain(data: memoryview) -> PlainMessage | None:
    """Read an entry of a MESSAGE command without protobuf, in a third of protobuf's time.

    None: the entry holds more than a plain message, has no checksum, or is malformed. Raises
    ChecksumMismatch.
    """
    begin, index = 0, None
    try:
        magic, following, size = _unpack_head(data)
        if magic == _MAGIC_BROKER_METADATA:
            begin = _PREFIX.size + following
            index = _plain_index(bytes(data[_PREFIX.size : begin]))
            if index < 0:
                return None
            magic, following, size = _unpack_head(data, begin)
    except struct.error:
        return None
    if magic != _MAGIC_CHECKSUM or size > PLAIN_METADATA_BYTES_MAX:
        return None
    copy = bytes(data[begin + _PREFIX.size :])
    metadata = copy[4 : 4 + size]
    fields = _plain_fields(metadata)
    if fields is None:
        return None
    producer_name, sequence_id, at = fields
    publish_time_ms = _plain_publish_time(metadata[at:])
    if publish_time_ms < 0 or len(copy) < 4 + size:
        return None
    actual = _crc32c(copy)
    if actual != following:
        raise ChecksumMismatch(following, actual)
    return PlainMessage(producer_name, sequence_id, publish_time_ms, index, copy[4 + size :])


def checked_text(text: str) -> str:
    """Return `text`. Raises MalformedEntry for bytes: protobuf returns bytes if a string is not
    UTF-8."""
    if type(text) is not str:
        raise MalformedEntry("a string in the metadata is not UTF-8")
    return text


def chunk_of(metadata: pb.MessageMetadata) -> Chunk | None:
    """Return the chunk that the entry holds. None: the entry holds whole messages. Raises
    MalformedEntry."""
    count = metadata.num_chunks_from_msg
    if count in (0, 1):
        return None
    if not 0 <= metadata.chunk_id < count or metadata.HasField("num_messages_in_batch"):
        raise MalformedEntry(f"chunk {metadata.chunk_id} of {count} is invalid")
    return Chunk(
        uuid=checked_text(metadata.uuid),
        index=metadata.chunk_id,
        count=count,
        total_bytes=metadata.total_chunk_msg_size,
    )


def batch_size_of(metadata: pb.MessageMetadata, payload_bytes: int) -> int:
    """Return the number of messages in the batch.

    Raises MalformedEntry when the payload cannot hold this number of messages. The check is needed
    because the broker computes permits, backlogs and the index of every later message from this
    number.
    """
    count = metadata.num_messages_in_batch
    plain_bytes = metadata.uncompressed_size if metadata.compression else payload_bytes
    if not 1 <= count <= plain_bytes // BATCHED_MESSAGE_BYTES_MIN:
        raise MalformedEntry(f"{count} messages cannot be in a batch of {plain_bytes} bytes")
    return count


def varint(number: int) -> bytes:
    """Encode an unsigned 64-bit number as a protobuf varint. For a negative n, encode 2^64 + n."""
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


def varints(numbers: Iterable[int]) -> list[bytes]:
    """Encode numbers like `varint`. Numbers that increase by one, such as sequence ids, take a
    third of the time."""
    encoded: list[bytes] = []
    high = b""
    known = 0  # `high` is valid for each number with number >> 7 == known
    for number in numbers:
        if number >> 7 != known:
            known = number >> 7
            high = varint((number & 0xFFFFFFFFFFFFFFFF) >> 7)
        low = number & 0x7F
        encoded.append(_MORE[low] + high if known else _ONE_BYTE[low])
    return encoded


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number at offset `at`, and the offset after it. Raises IndexError if the data end
    within the number, and ValueError if the number has more than ten bytes. Ten bytes can hold 70
    bits, so the caller must refuse a number of more than 64 bits."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


# The maximum number of messages in a batch. The acknowledgement bits of this many messages fit into
# one command (framing.py).
BATCH_MESSAGES_MAX: Final = 1 << 20

# Mechanics

# The size of the smallest message in a batch: a u32 and a SingleMessageMetadata. The latter has at
# least two bytes, for the payload size.
BATCHED_MESSAGE_BYTES_MIN: Final = 6

_MAGIC_CHECKSUM = 0x0E01
_MAGIC_BROKER_METADATA = 0x0E02
_PREFIX = struct.Struct(">HI")  # magic, checksum or size
_HEAD = struct.Struct(">HII")  # magic, checksum, metadata size
CHECKED_HEAD_BYTES: Final = _HEAD.size
_ONE_BYTE = [bytes([number]) for number in range(0x80)]
_MORE = [bytes([number | 0x80]) for number in range(0x80)]  # another byte follows
_COMPRESSIONS = tuple(Compression)
# Enough for a producer name of 127 bytes, the sequence id, the publish time, the uncompressed size
# and a schema version.
PLAIN_METADATA_BYTES_MAX: Final = 180
NO_CHECKSUM: Final = -1
_SCHEMA_TAG = b"\x82\x01"
_PLAIN_KEY_AT = 7  # the offset after the publish time
_NOT_BASE64 = b"\x88\x01\x00"
_CONTINUED = bytes(range(0x80, 0x100))  # the bytes that can precede the last byte of a varint
_PLAIN_SCHEMA_BYTES_MAX = 16  # Apache's Java client sends no version or eight bytes
_COMPRESSION_TAG = pb.MessageMetadata.COMPRESSION_FIELD_NUMBER << 3

_Head = tuple[int, int, int]
# These names avoid attribute lookups: one lookup costs as much as parsing a field of the metadata.
# The casts are needed because protobuf's type stubs do not say that parsing accepts any buffer.
_unpack_head = _HEAD.unpack_from
_crc32c: Callable[[bytes], int] = google_crc32c.value
_metadata_from: "Callable[[bytes | memoryview], pb.MessageMetadata]" = cast(
    "Any", pb.MessageMetadata.FromString
)
_broker_metadata_from: "Callable[[bytes | memoryview], pb.BrokerEntryMetadata]" = cast(
    "Any", pb.BrokerEntryMetadata.FromString
)


def _head(data: bytes | memoryview) -> _Head:
    """Unpack the first ten bytes. Every entry has four bytes of metadata size and at least six
    bytes of metadata."""
    try:
        return _unpack_head(data)
    except struct.error:
        raise MalformedEntry(f"an entry of {len(data)} bytes is truncated") from None


def _verify(data: bytes | memoryview, head: _Head) -> None:
    magic, expected, _ = head
    if magic == _MAGIC_CHECKSUM:
        actual = _crc32c(bytes(data[_PREFIX.size :]))  # _crc32c accepts only bytes
        if actual != expected:
            raise ChecksumMismatch(expected, actual)


def _parse_metadata(
    data: bytes | memoryview, head: _Head, *, fields_max: int | None = None
) -> tuple[pb.MessageMetadata, int]:
    magic, following, size = head
    start = _HEAD.size
    if magic != _MAGIC_CHECKSUM:
        if magic == _MAGIC_BROKER_METADATA:
            raise MalformedEntry(
                "the entry begins with broker entry metadata: only a broker writes it"
            )
        size = magic << 16 | following >> 16
        start = 4
    end = start + size
    if end > len(data):
        raise MalformedEntry(f"the metadata of {size} bytes is truncated")
    encoded = bytes(data[start:end])
    if (
        fields_max is not None
        and size > METADATA_COUNTED_BYTES
        and has_more_fields(encoded, pb.MessageMetadata.DESCRIPTOR, fields_max)
    ):
        raise MalformedEntry(f"the metadata has more than {fields_max} fields")
    try:
        metadata = _metadata_from(encoded)
    except DecodeError as error:
        raise MalformedEntry(f"the metadata cannot be parsed: {error}") from None
    has = metadata.HasField
    if not (has("producer_name") and has("sequence_id") and has("publish_time")):
        raise MalformedEntry("the metadata lacks the producer's name, sequence id or publish time")
    # protobuf treats an unknown compression type as absent. The search for the tag's byte is cheap,
    # and in an entry without compression it seldom finds this byte.
    if _COMPRESSION_TAG in encoded and not has("compression"):
        _refuse_unknown_compression(metadata)
    return metadata, end


def _view(data: bytes | memoryview, head: _Head) -> EntryView:
    return _view_of(data, *_parse_metadata(data, head))


def _view_of(data: bytes | memoryview, metadata: pb.MessageMetadata, payload_at: int) -> EntryView:
    has = metadata.HasField  # saves attribute lookups: this function runs once per entry
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
    """Parse plain metadata: it holds the fields that clients always write, and perhaps a key.

    The function does not use protobuf and takes a third of the time. `plain_key` and `plain_rest`
    name the fields. None: the entry has other metadata or no checksum, or is malformed.
    """
    magic, _, size = head
    end = _HEAD.size + size
    if magic != _MAGIC_CHECKSUM or size > PLAIN_METADATA_BYTES_MAX or end > len(data):
        return None
    metadata = bytes(data[_HEAD.size : end])
    fields = _plain_fields(metadata)
    if fields is None:
        return None
    producer_name, sequence_id, at = fields
    keyed = plain_key(metadata[at:])
    rest = None if keyed is None else plain_rest(keyed[0])
    if keyed is None or rest is None:
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
        keyed[1],
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


def _plain_fields(metadata: bytes) -> tuple[str, int, int] | None:
    """Parse the producer's name and the sequence id at the beginning of plain metadata. Returns
    both, and the offset of the rest. None: the metadata is not plain."""
    try:
        at = 2 + metadata[1]
        # Consecutive entries often have the same producer name, so `plain_name` caches names.
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
    return None if shift > 63 else (producer_name, sequence_id, at + 1)


@lru_cache(maxsize=1024)  # each name has at most 130 bytes
def plain_name(field: bytes) -> str | None:
    """Parse the producer name's field. None: `field` is another field, its size does not fit into
    one byte, or the name is not UTF-8."""
    if field[0] != 0x0A or field[1] > 0x7F or len(field) != 2 + field[1]:
        return None
    try:
        return field[2:].decode()
    except UnicodeDecodeError:
        return None


def plain_key(fields: bytes) -> tuple[bytes, str | None] | None:
    """Take the partition key out of `fields`, which follow the sequence id of plain metadata.
    Returns the other fields, and the key (None: absent). Consecutive entries often have the same
    other fields, so `plain_rest` caches its results.

    The key has less than 128 bytes and follows the publish time, which has six bytes (until the
    year 2109). Apache's Java client then adds the field that says that the key is not base64. None:
    the key has another form.
    """
    if fields[_PLAIN_KEY_AT : _PLAIN_KEY_AT + 1] != b"\x32":
        return fields, None
    if fields[0] != 0x18 or fields[1:6].translate(None, _CONTINUED) or fields[6] > 0x7F:
        return None
    begin = _PLAIN_KEY_AT + 2
    end = begin + fields[begin - 1] if len(fields) >= begin else 0
    if not begin <= end <= len(fields) or end - begin > 0x7F:
        return None
    try:
        key = fields[begin:end].decode()
    except UnicodeDecodeError:
        return None
    return fields[:_PLAIN_KEY_AT] + fields[end:].removesuffix(_NOT_BASE64), key


@lru_cache(maxsize=256)  # the times and sizes of concurrent producers differ
def plain_rest(fields: bytes) -> tuple[int, int] | None:
    """Parse the publish time and the uncompressed size (0: absent) at the end of plain metadata.

    The publish time comes first and is below 2^63. Apache's Java client then adds the uncompressed
    size, even to an uncompressed message, and the version of its schema. None: `fields` has other
    fields, another order, or a size above MESSAGE_BYTES_MAX.
    """
    time_ms, at = _plain_number(fields, 0x18, 0, 9)
    size = 0
    if at < len(fields) and fields[at] == 0x48:
        size, at = _plain_number(fields, 0x48, at, 5)
    if fields[at : at + 2] == _SCHEMA_TAG and len(fields) > at + 2:
        schema_bytes = fields[at + 2]
        at += 3 + schema_bytes if schema_bytes <= _PLAIN_SCHEMA_BYTES_MAX else 0
    return (time_ms, size) if at == len(fields) and size <= MESSAGE_BYTES_MAX else None


@lru_cache(maxsize=256)  # sized as the cache of `plain_rest`
def _plain_publish_time(fields: bytes) -> int:
    """Parse the publish time where only the uncompressed size may follow. -1: `fields` has another
    form.

    `plain_rest` skips a schema version. This function does not: a consumer needs the version.
    """
    rest = plain_rest(fields)
    return -1 if rest is None or _SCHEMA_TAG in fields else rest[0]


def _plain_index(fields: bytes) -> int:
    """Parse the index in broker entry metadata of the form that brokers write: the time in six
    bytes (until the year 2109), then the index. -1: the metadata has another form."""
    if len(fields) < 9 or fields[0] != 0x08 or fields[6] > 0x7F or fields[7] != 0x10:
        return -1
    if fields[1:6].translate(None, _CONTINUED):
        return -1
    try:
        index, end = read_varint(fields, 8)
    except (IndexError, ValueError):
        return -1
    return index if end == len(fields) and index < 1 << 63 else -1


def _plain_number(fields: bytes, tag: int, at: int, bytes_max: int) -> tuple[int, int]:
    """Parse the varint field at `at`: `tag`, and a number of at most `bytes_max` bytes. Returns the
    number and the next offset.

    If there is no such field at `at`, the returned offset is beyond the end of `fields`.
    """
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
