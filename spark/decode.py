"""Converts stored entries to Arrow. An executor calls it with the bytes of a range read.

The decoder works per entry where the format allows it: decompression, checksum, publish time,
index, message ids and constants do not look at single messages. The messages of a batch must be
read in turn, because each message tells where the next one begins. This costs one slice and one
parse per message. Only requested columns look into the parsed metadata. With entry-level columns
only, the decoder does not open the payload.

A message of 100 bytes in a batch of 1,000, on one core of CPython 3.11, costs 1.1 us for `value`
alone. It costs 2.8 us for all columns with a key, an event time and one property. For an unbatched
message, the costs are 8 and 18 us.

Pure.
"""

from __future__ import annotations

import base64
import binascii
import struct
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import decompress
from magnetar.protos.entry import varint
from magnetar.protos.errors import (
    BatchDeserializeError,
    MalformedEntry,
    ProtocolError,
)
from magnetar.protos.message import ReceivedEntry, read_entry
from magnetar.spark.errors import UnreadableEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.protos.names import TopicName

    Metadata = pb.MessageMetadata | pb.SingleMessageMetadata

# Spark keeps microseconds in 64 bits and shows years up to 9999; a later time is an error.
TIME_MS_MAX: Final = 253_402_300_799_999


class Rows:
    """Collects entries and builds one RecordBatch of exactly `schema` from them.

    `schema` is the schema that Spark expects: names from COLUMNS, and Spark's Arrow types.
    """

    def __init__(self, schema: pa.Schema, topic: TopicName) -> None:
        self._schema = schema
        self._topic = str(topic)
        self._columns = [COLUMNS[name](topic) for name in schema.names]
        self._messages = any(column.of_message for column in self._columns)
        self._payload = "value" in schema.names
        # (row, ledger, entry, batch index) of the first row of each entry, for errors
        self._starts: list[tuple[int, int, int, int]] = []
        self.rows = 0
        self.bytes = 0  # of the entries; with uncompressed payloads where the decoder opens them

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

        None: all from `first_index` on. Raises UnreadableEntry, and then adds no row.
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
        self._starts.append((self.rows, ledger, entry, opened.skipped))
        self.rows += opened.count
        self.bytes += opened.size

    def places(self) -> Callable[[int], tuple[int, int, int]]:
        """Return a function from a row to its ledger, entry and batch index. It stays valid for
        these rows after `take`."""
        starts = self._starts

        def place_of(row: int) -> tuple[int, int, int]:
            at = bisect_right(starts, row, key=lambda start: start[0]) - 1
            first, ledger, entry, skipped = starts[at]
            return ledger, entry, row - first + skipped

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
        """Open a stored entry. Returns None for a marker, which holds no message of a user."""
        received = read_entry(stored)
        metadata: pb.MessageMetadata = received.metadata
        if metadata.HasField("marker_type"):
            return None
        if received.chunk is not None:
            raise MalformedEntry("the entry is a chunk of a large message: not supported yet")
        opened = Opened(ledger, entry, received, received.num_messages, len(stored), (), ())
        if not self._messages:
            return opened
        plain = b""
        if received.is_batch or self._payload:
            plain = _plain(received)
            opened.size += len(plain) - len(received.payload)
        if received.is_batch:
            opened.metadata, opened.values = _walk(plain, received.num_messages)
        else:
            opened.metadata, opened.values = (metadata,), (plain,)
        return opened


@dataclass(slots=True)
class Opened:
    """An opened entry, and the parts of its messages that the columns need."""

    ledger: int
    entry: int
    received: ReceivedEntry
    count: int
    size: int  # bytes of the entry, with its payload uncompressed if it was opened
    metadata: Sequence[Metadata]
    values: Sequence[bytes]
    skipped: int = 0  # messages of the entry before the first of `count`
    whole: int = 0  # messages of the entry; 0: `count`

    @property
    def batch_size(self) -> int:
        """The messages of the entry, those that are left out too."""
        return self.whole or self.count

    @property
    def index(self) -> int:
        """Index of the first of the `count` messages. Raises MalformedEntry."""
        if self.received.broker is None:
            raise MalformedEntry("the broker entry metadata, which holds the index, is missing")
        return self.received.broker.index - self.batch_size + 1 + self.skipped


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
        opened.metadata = opened.metadata[skip : skip + count]
        opened.values = opened.values[skip : skip + count]
    return opened


def _plain(received: ReceivedEntry) -> bytes:
    return decompress(received.compression, received.payload, received.uncompressed_size)


def _walk(payload: bytes, count: int) -> tuple[list[pb.SingleMessageMetadata], list[bytes]]:
    """Return metadata and value of each message of a batch. Raises BatchDeserializeError.

    It works as `decode_messages` of magnetar.protos.message, but creates no objects for columns
    that may not be requested. A size that is too large shows at the next message or at the end.
    """
    metadata: list[pb.SingleMessageMetadata] = []
    values: list[bytes] = []
    size_at = _U32.unpack_from
    parse = pb.SingleMessageMetadata.FromString
    end = 0  # of the preceding message
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

        A column may keep what it found for `add`, which follows at once.
        """

    def add(self, opened: Opened) -> None:
        """Add the values of a checked entry."""

    def take(self, rows: int) -> pa.Array:
        """Return the `rows` values added since the last call."""


class _Value:
    of_message = True

    def __init__(self, topic: TopicName) -> None:
        self._values: list[bytes | None] = []

    def check(self, opened: Opened) -> None:
        pass

    def add(self, opened: Opened) -> None:
        if all(opened.values):
            self._values += opened.values
            return
        # Only an empty value may be null.
        for value, metadata in zip(opened.values, opened.metadata, strict=True):
            self._values.append(None if not value and metadata.null_value else value)

    def take(self, rows: int) -> pa.Array:
        array = pa.array(self._values, pa.binary())
        self._values = []
        return array


class _Key:
    """The key as bytes: UTF-8 of a text key, the decoded bytes of a key in base64."""

    of_message = True

    def __init__(self, topic: TopicName) -> None:
        self._keys: list[str | bytes | None] = []
        self._checked: list[str | bytes | None] = []

    def check(self, opened: Opened) -> None:
        keys: list[str | bytes | None] = [m.partition_key for m in opened.metadata]
        if not all(keys):
            for at, metadata in enumerate(opened.metadata):
                if not keys[at] and not metadata.HasField("partition_key"):
                    keys[at] = None
        encoded = [at for at, m in enumerate(opened.metadata) if m.partition_key_b64_encoded]
        for at in encoded:
            key = keys[at]
            keys[at] = None if key is None else _from_base64(key)
        self._checked = keys

    def add(self, opened: Opened) -> None:
        self._keys += self._checked

    def take(self, rows: int) -> pa.Array:
        array = pa.array(self._keys, pa.binary())
        self._keys = []
        return array


class _EventTime:
    """The event time; null if the producer gave none."""

    of_message = True

    def __init__(self, topic: TopicName) -> None:
        self._times_ms: list[int] = []
        self._checked: list[int] = []

    def check(self, opened: Opened) -> None:
        self._checked = [metadata.event_time for metadata in opened.metadata]
        _check_time("event time", max(self._checked))

    def add(self, opened: Opened) -> None:
        self._times_ms += self._checked

    def take(self, rows: int) -> pa.Array:
        times_ms = np.array(self._times_ms, dtype=np.int64)
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
        entry = b"\x08" + varint(opened.ledger) + b"\x10" + varint(opened.entry) + self._partition
        if opened.received.is_batch:
            places = _places(opened.batch_size)[opened.skipped : opened.skipped + opened.count]
            self._ids += [entry + place for place in places]
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


class _Index:
    """The index of the message in its topic. The broker stores that of an entry's last message."""

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
}

# Mechanics

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


@lru_cache(maxsize=64)  # batches of one producer tend to be of one size
def _places(count: int) -> tuple[bytes, ...]:
    """Return the fields batch_index and batch_size of MessageIdData for each message of a batch."""
    size = b"\x30" + varint(count)
    return tuple(b"\x20" + varint(index) + size for index in range(count))
