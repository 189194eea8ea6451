"""Converts stored entries to Arrow. An executor calls the decoder with the bytes of a range read.

The decoder works per entry where the format allows it: decompression, checksum, publish time,
index, message ids and constants do not need single messages. A scan finds many messages of batches
at once (batch_scan.py). The decoder reads the messages one after the other (`_walk`) if they are
few, if the scan gives up, or if a column needs properties. If no column needs single messages, the
decoder does not open the payload.

On one core, the scan decodes three times as many rows in a second as `_walk`. This was measured
with the column `value` alone, and messages of 100 bytes in batches of 100 or 1,000.

Pure.
"""

from __future__ import annotations

import base64
import binascii
import struct
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import (
    UNCOMPRESSED_BYTES_MAX,
    UNCOMPRESSED_FACTOR,
    Compression,
    decompress,
)
from magnetar.protos.entry import varint
from magnetar.protos.errors import (
    BatchDeserializeError,
    MalformedEntry,
    ProtocolError,
)
from magnetar.protos.message import ReceivedEntry, read_entry
from magnetar.spark.batch_scan import MESSAGES_MIN, Scan, scan, slices
from magnetar.spark.chunks import Chunks
from magnetar.spark.errors import UnreadableEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from magnetar.protos.names import TopicName
    from magnetar.spark.chunks import Earlier

    Metadata = pb.MessageMetadata | pb.SingleMessageMetadata

# Spark keeps microseconds in 64 bits and shows years up to 9999; a later time is an error.
TIME_MS_MAX: Final = 253_402_300_799_999


class Rows:
    """Collects entries and builds one RecordBatch of exactly `schema` from them.

    `schema` is the schema that Spark expects: names from COLUMNS, and Spark's Arrow types.
    """

    def __init__(
        self,
        schema: pa.Schema,
        topic: TopicName,
        earlier: Earlier,
        *,
        publish_ms: tuple[int, int] | None = None,
    ) -> None:
        """`earlier`: the entries before the first one that is added. `publish_ms`: first and last
        publish time of entries that add rows. None: entries of all times add rows."""
        self._schema = schema
        self._topic = str(topic)
        self._columns = [COLUMNS[name](topic) for name in schema.names]
        self._messages = any(column.of_message for column in self._columns)
        self._payload = "value" in schema.names
        self._properties = "__messageProperties" in schema.names
        # (row, ledger, entry, batch index) of the first row of each entry, for errors
        self._starts: list[tuple[int, int, int, int]] = []
        self._chunks = Chunks(earlier)
        self._publish_ms = publish_ms
        self.rows = 0
        # The size of the entries. If the decoder opens a payload, its uncompressed size counts.
        self.bytes = 0

    def add(
        self,
        ledger: int,
        entry: int,
        stored: bytes | memoryview,
        *,
        first_index: int = 0,
        end_index: int | None = None,
    ) -> None:
        """Add the messages of one stored entry whose index is in [first_index, end_index).

        `end_index` None: all messages from `first_index` on. A chunk adds a row if it is the last
        one of its message. Raises UnreadableEntry, and the errors of `earlier`. After an error, the
        entry has added no row.
        """
        try:
            opened = self._open(ledger, entry, stored)
            if opened is not None and (first_index or end_index is not None):
                opened = _within(opened, first_index, end_index)
            if opened is None:
                return
            for column in self._columns:
                column.check(opened)
        except ProtocolError as error:
            reason = f"{type(error).__name__}: {error}"
            raise UnreadableEntry(self._topic, ledger, entry, reason) from error
        for column in self._columns:
            column.add(opened)
        self._count(opened)

    def add_all(
        self,
        entries: Sequence[tuple[int, int, bytes | memoryview]],
        *,
        first_index: int = 0,
        end_index: int | None = None,
        bytes_max: int,
    ) -> int:
        """Add consecutive entries (ledger, entry, stored) as `add` does, at less cost: if all of
        them are batches, one scan finds the messages of all.

        Returns the number of added entries, at least one. The method stops when the rows hold
        `bytes_max`, because a small entry can be large when it is uncompressed.
        """
        if self._add_merged(entries, first_index, end_index, bytes_max):
            return len(entries)
        for added, (ledger, entry, stored) in enumerate(entries, 1):
            self.add(ledger, entry, stored, first_index=first_index, end_index=end_index)
            if self.bytes >= bytes_max:
                return added
        return len(entries)

    def _add_merged(
        self,
        entries: Sequence[tuple[int, int, bytes | memoryview]],
        first_index: int,
        end_index: int | None,
        bytes_max: int,
    ) -> bool:
        """Add entries with one scan. Returns whether they were added: all of them, or none."""
        if not self._messages or self._properties or len(entries) < 2:
            return False
        every: list[Opened] = []
        size = self.bytes
        try:
            for ledger, entry, stored in entries:
                received = read_entry(stored)
                if (
                    not received.is_batch
                    or received.metadata.HasField("marker_type")
                    or self._is_outside(received)
                ):
                    return False
                opened = self._opened(ledger, entry, received, len(stored))
                size += opened.size
                if size > bytes_max:
                    return False
                if first_index and opened.index < first_index:
                    return False
                if end_index is not None and opened.index + opened.count > end_index:
                    return False
                every.append(opened)
            merged = _merged(every)
            if merged is None:
                return False
            for column in self._columns:
                for opened in (merged,) if column.of_message else every:
                    column.check(opened)
        except ProtocolError:
            return False
        for column in self._columns:
            if column.of_message:
                column.add(merged)
        for opened in every:
            for column in self._columns:
                if not column.of_message:
                    # `add` may use what the last `check` found, so check this entry again first.
                    column.check(opened)
                    column.add(opened)
            self._count(opened)
        return True

    def _count(self, opened: Opened) -> None:
        index = opened.skipped if opened.received.is_batch else -1
        self._starts.append((self.rows, opened.ledger, opened.entry, index))
        self.rows += opened.count
        self.bytes += opened.size

    def places(self) -> Callable[[int], tuple[int, int, int]]:
        """Return a function from a row to its ledger, entry and batch index (-1: the message was
        not in a batch). It stays valid for these rows after `take`."""
        starts = self._starts

        def place_of(row: int) -> tuple[int, int, int]:
            at = bisect_right(starts, row, key=lambda start: start[0]) - 1
            first, ledger, entry, index = starts[at]
            return ledger, entry, index if index < 0 else row - first + index

        return place_of

    def take(self) -> pa.RecordBatch:
        """Return the rows added since the last call."""
        self._starts = []
        arrays = [
            column.take(self.rows).cast(field.type)
            for column, field in zip(self._columns, self._schema, strict=True)
        ]
        self.rows = self.bytes = 0
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _open(self, ledger: int, entry: int, stored: bytes | memoryview) -> Opened | None:
        """Open a stored entry. Returns None if the entry adds no row.

        Three kinds of entries add no row: markers, chunks that do not complete their message, and
        entries outside of `publish_ms`. A marker holds no message of a user.
        """
        received = read_entry(stored)
        if received.metadata.HasField("marker_type"):
            return None
        first_chunk, size = None, len(stored)
        if received.chunk is not None:
            joined = self._chunks.on_chunk(ledger, entry, received)
            if joined is None:
                return None
            received = replace(received, body=joined.payload, payload_at=0)
            first_chunk, size = joined.first, len(joined.payload)
        if self._is_outside(received):
            return None
        opened = self._opened(ledger, entry, received, size)
        opened.first_chunk = first_chunk
        if not self._messages:
            return opened
        if opened.received.is_batch:
            if opened.count >= MESSAGES_MIN and not self._properties:
                opened.scan = scan(opened.plain, opened.count)
            if opened.scan is None:
                opened.metadata, opened.values = _walk(bytes(opened.plain), opened.count)
        else:
            opened.metadata, opened.values = (opened.received.metadata,), (bytes(opened.plain),)
        return opened

    def _is_outside(self, received: ReceivedEntry) -> bool:
        if self._publish_ms is None:
            return False
        first, last = self._publish_ms
        return not first <= received.publish_time_ms <= last

    def _opened(self, ledger: int, entry: int, received: ReceivedEntry, size: int) -> Opened:
        """Uncompress the payload if a column needs it. `size`: the bytes of the stored entry, or of
        the joined payload of chunks."""
        opened = Opened(ledger, entry, received, received.num_messages, size, (), ())
        if self._messages and (received.is_batch or self._payload):
            opened.plain = _plain(received)
            opened.size += len(opened.plain) - received.payload_size
        return opened


@dataclass(slots=True)
class Opened:
    """An opened entry, and the parts of its messages that the columns need."""

    ledger: int
    entry: int
    received: ReceivedEntry
    count: int  # messages that add rows
    size: int  # bytes of the entry, with its payload uncompressed if it was opened
    metadata: Sequence[Metadata]
    values: Sequence[bytes]
    plain: bytes | memoryview = b""  # the uncompressed payload
    scan: Scan | None = None  # replaces metadata and values if the scan found the messages
    skipped: int = 0  # messages before the first one that adds a row
    whole: int = 0  # number of messages of the entry, if some are left out; otherwise 0
    first_chunk: tuple[int, int] | None = None  # ledger, entry; None: it was not sent in chunks

    @property
    def batch_size(self) -> int:
        """The number of messages of the entry, including those that are left out."""
        return self.whole or self.count

    @property
    def index(self) -> int:
        """Index of the first of the `count` messages. Raises MalformedEntry."""
        if self.received.broker is None:
            raise MalformedEntry("the broker entry metadata, which holds the index, is missing")
        return self.received.broker.index - self.batch_size + 1 + self.skipped


def _merged(every: Sequence[Opened]) -> Opened | None:
    """Return the messages of several batches as one batch.

    Returns None if the messages are too few for a scan, if the scan gives up, or if a batch does
    not have as many messages as it says.
    """
    counts = np.cumsum([opened.count for opened in every])
    count = int(counts[-1])
    if count < MESSAGES_MIN:
        return None
    plain = b"".join([opened.plain for opened in every])
    found = scan(plain, count)
    if found is None:
        return None
    ends = np.cumsum([len(opened.plain) for opened in every])
    if not np.array_equal((found.value_start + found.value_size)[counts - 1], ends):
        return None  # a batch does not have as many messages as it says
    first = every[0]
    merged = Opened(first.ledger, first.entry, first.received, count, 0, (), ())
    merged.plain, merged.scan = plain, found
    return merged


def _within(opened: Opened, first_index: int, end_index: int | None) -> Opened | None:
    """Leave out the messages outside of [first_index, end_index). None: none is left."""
    skip = max(first_index - opened.index, 0)
    count = opened.count - skip
    if end_index is not None:
        count = min(count, end_index - opened.index - skip)
    if count <= 0:
        return None
    if count < opened.count:
        opened.skipped, opened.whole, opened.count = skip, opened.count, count
        if opened.scan is not None:
            opened.scan = opened.scan.sliced(skip, skip + count)
        opened.metadata = opened.metadata[skip : skip + count]
        opened.values = opened.values[skip : skip + count]
    return opened


def _plain(received: ReceivedEntry) -> bytes | memoryview:
    if received.compression is Compression.NONE:
        return memoryview(received.body)[received.payload_at :]  # a copy costs as much as the scan
    sent = received.payload
    # A payload that was joined from chunks may be larger than an entry: the limit grows with it.
    limit = max(UNCOMPRESSED_BYTES_MAX, UNCOMPRESSED_FACTOR * len(sent))
    return decompress(received.compression, sent, received.uncompressed_size, bytes_max=limit)


def _walk(payload: bytes, count: int) -> tuple[list[pb.SingleMessageMetadata], list[bytes]]:
    """Return metadata and value of each message of a batch. Raises BatchDeserializeError.

    The function is like `decode_messages` of magnetar.protos.message, but creates no object for
    each message. If a message gives a size that is too large, the function detects this only when
    it reads the next message, or after the last one.
    """
    metadata: list[pb.SingleMessageMetadata] = []
    values: list[bytes] = []
    size_at = _U32.unpack_from
    parse = pb.SingleMessageMetadata.FromString
    end = 0  # the end of the preceding message
    try:
        for _ in range(count):
            start = end + 4 + size_at(payload, end)[0]
            message = parse(payload[end + 4 : start])
            size = message.payload_size
            if size < 0:
                raise BatchDeserializeError(f"message {len(values)} has the size {size} bytes")
            end = start + size
            metadata.append(message)
            values.append(payload[start:end])
    except (struct.error, DecodeError) as error:
        raise BatchDeserializeError(f"message {len(values)} of {count}: {error}") from None
    if end != len(payload):
        raise BatchDeserializeError(f"{count} messages end at byte {end} of {len(payload)}")
    return metadata, values


# Columns


class Column(Protocol):
    """Collects the values of one column."""

    of_message: bool  # whether the column looks at single messages

    def check(self, opened: Opened) -> None:
        """Raise ProtocolError if a value of the entry cannot be represented.

        A column may keep what it found until `add` is called. So `add` is called for the entry of
        the last `check`.
        """

    def add(self, opened: Opened) -> None:
        """Add the values of a checked entry."""

    def take(self, rows: int) -> pa.Array:
        """Return the `rows` values added since the last call."""


class _Chunks:
    """Arrays of one column, and the values that are not in an array yet, in order."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._arrays: list[pa.Array] = []
        self.pending: list[Any] = []

    def append(self, array: pa.Array) -> None:
        """Add an array after the pending values."""
        self._flush()
        self._arrays.append(array)

    def take(self) -> pa.Array:
        """Return everything that was added since the last call."""
        self._flush()
        arrays, self._arrays = self._arrays, []
        if len(arrays) == 1:
            return arrays[0]
        return pa.concat_arrays(arrays) if arrays else pa.array([], self._kind)

    def _flush(self) -> None:
        if self.pending:
            self._arrays.append(pa.array(self.pending, self._kind))
            self.pending = []


class _Value:
    of_message = True

    def __init__(self, topic: TopicName) -> None:
        self._values = _Chunks(pa.binary())

    def check(self, opened: Opened) -> None:
        pass

    def add(self, opened: Opened) -> None:
        found = opened.scan
        if found is not None:
            # Only an empty value may be null.
            null = (found.null_value != 0) & (found.value_size == 0)
            self._values.append(
                slices(opened.plain, found.value_start, found.value_size, null=null)
            )
        elif all(opened.values):
            self._values.pending += opened.values
        else:
            for value, metadata in zip(opened.values, opened.metadata, strict=True):
                self._values.pending.append(None if not value and metadata.null_value else value)

    def take(self, rows: int) -> pa.Array:
        return self._values.take()


class _Key:
    """The key as bytes: UTF-8 of a text key, the decoded bytes of a key in base64."""

    of_message = True

    def __init__(self, topic: TopicName) -> None:
        self._keys = _Chunks(pa.binary())
        self._checked: list[str | bytes | None] | pa.Array = []

    def check(self, opened: Opened) -> None:
        found = opened.scan
        if found is not None:
            none = found.key_start < 0
            start, size = np.where(none, 0, found.key_start), np.where(none, 0, found.key_size)
            array = slices(opened.plain, start, size, null=none)
            if found.key_is_base64.any():
                encoded = found.key_is_base64.tolist()
                keys = zip(array.to_pylist(), encoded, strict=True)
                decoded = [_from_base64(key) if key and flag else key for key, flag in keys]
                array = pa.array(decoded, pa.binary())
            self._checked = array
            return
        keys_of: list[str | bytes | None] = [m.partition_key for m in opened.metadata]
        if not all(keys_of):
            for at, metadata in enumerate(opened.metadata):
                if not keys_of[at] and not metadata.HasField("partition_key"):
                    keys_of[at] = None
        encoded = [at for at, m in enumerate(opened.metadata) if m.partition_key_b64_encoded]
        for at in encoded:
            key = keys_of[at]
            keys_of[at] = None if key is None else _from_base64(key)
        self._checked = keys_of

    def add(self, opened: Opened) -> None:
        if isinstance(self._checked, list):
            self._keys.pending += self._checked
        else:
            self._keys.append(self._checked)

    def take(self, rows: int) -> pa.Array:
        return self._keys.take()


class _EventTime:
    """The event time; null if the producer gave none."""

    of_message = True

    def __init__(self, topic: TopicName) -> None:
        self._times_ms: list[NDArray[np.int64]] = []
        self._checked: NDArray[np.int64] = _NO_TIMES

    def check(self, opened: Opened) -> None:
        if opened.scan is not None:
            times = opened.scan.event_time
            latest = times.view(np.uint64).max()  # Pulsar's event time is unsigned
        else:
            given = [metadata.event_time for metadata in opened.metadata]
            latest = max(given)
            times = np.array(given, dtype=np.uint64).view(np.int64)
        _check_time("event time", int(latest))
        self._checked = times

    def add(self, opened: Opened) -> None:
        self._times_ms.append(self._checked)

    def take(self, rows: int) -> pa.Array:
        times_ms = np.concatenate([_NO_TIMES, *self._times_ms])
        self._times_ms = []
        return pa.array(times_ms * 1_000, pa.timestamp("us", "UTC"), mask=times_ms == 0)


class _Properties:
    """The properties as a map, possibly empty. If a name occurs twice, the last value counts."""

    of_message = True

    def __init__(self, topic: TopicName) -> None:
        self._names: list[str] = []
        self._values: list[str] = []
        self._counts: list[int] = []
        self._checked: tuple[list[str], list[str], list[int]] = [], [], []

    def check(self, opened: Opened) -> None:
        # Whole lists instead of a loop over messages: this takes a quarter of the time.
        of_messages = [metadata.properties for metadata in opened.metadata]
        pairs = list(chain.from_iterable(of_messages))
        names = [pair.key for pair in pairs]
        values = [pair.value for pair in pairs]
        counts = list(map(len, of_messages))
        try:
            "".join(names)
            "".join(values)
        except TypeError:  # protobuf returns a string that is not UTF-8 as bytes
            raise MalformedEntry("a property is not UTF-8") from None
        if max(counts) > 1:
            self._checked = _last_of_each(names, values, counts)
        else:
            self._checked = names, values, counts

    def add(self, opened: Opened) -> None:
        names, values, counts = self._checked
        self._names += names
        self._values += values
        self._counts += counts

    def take(self, rows: int) -> pa.Array:
        ends = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(self._counts, out=ends[1:])
        array = pa.MapArray.from_arrays(
            pa.array(ends),
            pa.array(self._names, pa.string()),
            pa.array(self._values, pa.string()),
        )
        self._names, self._values, self._counts = [], [], []
        return array


class _MessageId:
    """The message id as Apache's clients serialize it: MessageIdData."""

    of_message = False

    def __init__(self, topic: TopicName) -> None:
        partition = topic.partition
        self._partition = b"" if partition is None else b"\x18" + varint(partition)
        self._ids: list[bytes] = []

    def check(self, opened: Opened) -> None:
        pass

    def add(self, opened: Opened) -> None:
        entry = _place(opened.ledger, opened.entry) + self._partition
        if opened.received.is_batch:
            places = _places(opened.batch_size)[opened.skipped : opened.skipped + opened.count]
            self._ids += [entry + place for place in places]
        elif opened.first_chunk is not None:
            first = _place(*opened.first_chunk) + self._partition
            self._ids.append(entry + b"\x3a" + varint(len(first)) + first)
        else:
            self._ids.append(entry)

    def take(self, rows: int) -> pa.Array:
        array = pa.array(self._ids, pa.binary())
        self._ids = []
        return array


class _PublishTime:
    of_message = False

    def __init__(self, topic: TopicName) -> None:
        self._runs: list[tuple[int, int]] = []  # time, rows

    def check(self, opened: Opened) -> None:
        _check_time("publish time", opened.received.publish_time_ms)

    def add(self, opened: Opened) -> None:
        self._runs.append((opened.received.publish_time_ms, opened.count))

    def take(self, rows: int) -> pa.Array:
        runs = np.array(self._runs, dtype=np.int64).reshape(-1, 2)
        self._runs = []
        return pa.array(np.repeat(runs[:, 0] * 1_000, runs[:, 1]), pa.timestamp("us", "UTC"))


class _SchemaVersion:
    """The version of the topic's schema with which the message was written; null: none."""

    of_message = False

    def __init__(self, topic: TopicName) -> None:
        self._runs: list[tuple[bytes | None, int]] = []  # version, rows

    def check(self, opened: Opened) -> None:
        pass

    def add(self, opened: Opened) -> None:
        version = opened.received.schema_version
        if self._runs and self._runs[-1][0] == version:
            self._runs[-1] = version, self._runs[-1][1] + opened.count
        else:
            self._runs.append((version, opened.count))

    def take(self, rows: int) -> pa.Array:
        runs, self._runs = self._runs, []
        arrays = [pa.repeat(pa.scalar(version, pa.binary()), count) for version, count in runs]
        return pa.concat_arrays(arrays) if arrays else pa.array([], pa.binary())


class _Index:
    """The index of the message in its topic. The broker stores only the index of an entry's last
    message."""

    of_message = False

    def __init__(self, topic: TopicName) -> None:
        self._runs: list[tuple[int, int]] = []  # first index, rows

    def check(self, opened: Opened) -> None:
        opened.index  # noqa: B018  (raises if there is none)

    def add(self, opened: Opened) -> None:
        self._runs.append((opened.index, opened.count))

    def take(self, rows: int) -> pa.Array:
        runs = np.array(self._runs, dtype=np.int64).reshape(-1, 2)
        self._runs = []
        counts = runs[:, 1]
        before = np.cumsum(counts) - counts  # rows before each run
        return pa.array(np.arange(rows, dtype=np.int64) + np.repeat(runs[:, 0] - before, counts))


class _Constant:
    of_message = False

    def __init__(self, scalar: pa.Scalar) -> None:
        self._scalar = scalar

    def check(self, opened: Opened) -> None:
        pass

    def add(self, opened: Opened) -> None:
        pass

    def take(self, rows: int) -> pa.Array:
        return pa.repeat(self._scalar, rows)


def _topic_column(topic: TopicName) -> Column:
    return _Constant(pa.scalar(str(topic), pa.string()))


def _partition_column(topic: TopicName) -> Column:
    """The number of the partition; -1, as in message ids, if the topic is not a partition."""
    return _Constant(pa.scalar(-1 if topic.partition is None else topic.partition, pa.int32()))


# The version with which value_stage.py decodes `value`. Users cannot read this column.
SCHEMA_VERSION: Final = "__schemaVersion"

COLUMNS: Final[dict[str, Callable[[TopicName], Column]]] = {
    "value": _Value,
    "__key": _Key,
    "__topic": _topic_column,
    "__partition": _partition_column,
    "__messageId": _MessageId,
    "__index": _Index,
    "__publishTime": _PublishTime,
    "__eventTime": _EventTime,
    "__messageProperties": _Properties,
    SCHEMA_VERSION: _SchemaVersion,
}

# Mechanics

_NO_TIMES = np.empty(0, dtype=np.int64)


_U32 = struct.Struct(">I")


def _check_time(what: str, time_ms: int) -> None:
    if time_ms > TIME_MS_MAX:
        raise MalformedEntry(f"the {what}, {time_ms} ms, is after the year 9999")


def _from_base64(key: Any) -> bytes:
    try:
        return base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        raise MalformedEntry("a key is flagged as base64 but is not base64") from None


def _last_of_each(
    names: list[str], values: list[str], counts: list[int]
) -> tuple[list[str], list[str], list[int]]:
    """Remove repeated names of a message, except for the last occurrence."""
    left: tuple[list[str], list[str], list[int]] = [], [], []
    end = 0
    for count in counts:
        start, end = end, end + count
        properties = dict(zip(names[start:end], values[start:end], strict=True))
        left[0].extend(properties)
        left[1].extend(properties.values())
        left[2].append(len(properties))
    return left


def _place(ledger: int, entry: int) -> bytes:
    """The first fields of MessageIdData."""
    return b"\x08" + varint(ledger) + b"\x10" + varint(entry)


@lru_cache(maxsize=64)  # batches of one producer tend to be of one size
def _places(count: int) -> tuple[bytes, ...]:
    """Return the fields batch_index and batch_size of MessageIdData for each message of a batch."""
    size = b"\x30" + varint(count)
    return tuple(b"\x20" + varint(index) + size for index in range(count))
