"""The Arrow decoder against the client's decoder, which creates an object for each message."""

from __future__ import annotations

import base64
from typing import Any

import pyarrow as pa
import pytest
from fakes.earlier_entries import EarlierEntries
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from magnetar.client.message import MessageId
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import Compression
from magnetar.protos.entry import with_broker_metadata
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    decode_messages,
    encode_batch,
    encode_message,
    read_entry,
)
from magnetar.protos.names import TopicName
from magnetar.spark.decode import COLUMNS, SCHEMA_VERSION, TIME_MS_MAX, Rows
from magnetar.spark.errors import UnreadableEntry
from magnetar.spark.source.schema import SCHEMA

TOPIC = TopicName.parse("flights-partition-3")
PLAIN_TOPIC = TopicName.parse("flights")
ARROW: pa.Schema = to_arrow_schema(SCHEMA, timezone="UTC")
HEADER = EntryHeader("producer", 1_700_000_000_123)


def only(*names: str) -> pa.Schema:
    return pa.schema([ARROW.field(name) for name in names])


def stored(parts: list[bytes], *, index: int = 0) -> bytes:
    return with_broker_metadata(b"".join(parts), broker_timestamp_ms=5, index=index)


def decoded(
    data: bytes, *names: str, ledger: int = 7, entry: int = 9, topic: TopicName = TOPIC
) -> pa.RecordBatch:
    rows = Rows(only(*names) if names else ARROW, topic, EarlierEntries())
    rows.add(ledger, entry, data)
    return rows.take()


def twin(data: bytes, ledger: int, entry: int) -> list[dict[str, Any]]:
    received = read_entry(data)
    assert received.broker is not None
    rows = []
    for at, message in enumerate(decode_messages(received)):
        key: bytes | None = None
        if message.partition_key is not None:
            key = message.partition_key.encode()
            if message.partition_key_b64:
                key = base64.b64decode(key)
        size = received.num_messages if received.is_batch else 0
        rows.append(
            {
                "value": None if message.null_value else message.payload,
                "__key": key,
                "__topic": str(TOPIC),
                "__partition": 3,
                "__messageId": MessageId(3, ledger, entry, message.batch_index, size).serialize(),
                "__index": received.broker.index - received.num_messages + 1 + at,
                "__publishTime": received.publish_time_ms * 1000,
                "__eventTime": message.event_time_ms * 1000 or None,
                "__messageProperties": list(message.properties.items()),
            }
        )
    return rows


def plain_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Times as microseconds, because datetime cannot represent every time."""
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in batch.columns
    ]
    rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
    return rows


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def messages(draw: st.DrawFn) -> OutgoingMessage:
    null = draw(st.booleans())
    key = draw(st.none() | texts | st.binary(max_size=5))
    return OutgoingMessage(
        b"" if null else draw(st.binary(max_size=40)),
        draw(st.integers(0, 1 << 40)),
        draw(st.dictionaries(texts, texts, max_size=3)),
        base64.b64encode(key).decode() if isinstance(key, bytes) else key,
        isinstance(key, bytes),
        draw(st.none() | st.binary(max_size=3)),
        draw(st.integers(0, TIME_MS_MAX)),
        None,
        null,
    )


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    header = EntryHeader("p", draw(st.integers(0, TIME_MS_MAX)), draw(st.sampled_from(Compression)))
    if draw(st.booleans()):
        return stored(encode_message(draw(messages()), header), index=draw(st.integers(0, 1 << 50)))
    batch = draw(st.lists(messages(), min_size=1, max_size=5))
    return stored(encode_batch(batch, header), index=draw(st.integers(5, 1 << 50)))


@settings(deadline=None)
@given(st.lists(entries(), max_size=5))
def test_every_column_equals_that_of_the_plain_decoder(topic: list[bytes]) -> None:
    rows = Rows(ARROW, TOPIC, EarlierEntries())
    expected = []
    for entry, data in enumerate(topic):
        rows.add(7, entry, data)
        expected += twin(data, 7, entry)
    assert rows.rows == len(expected)
    batch = rows.take()
    assert batch.schema == ARROW
    assert plain_rows(batch) == expected
    assert rows.take().num_rows == 0


@settings(deadline=None)
@given(entries(), st.sets(st.sampled_from(SCHEMA.names), min_size=1))
def test_a_smaller_schema_gives_the_same_in_its_columns(data: bytes, names: set[str]) -> None:
    batch = decoded(data, *sorted(names))
    assert plain_rows(batch) == [
        {name: row[name] for name in sorted(names)} for row in twin(data, 7, 9)
    ]


def test_the_schema_has_the_columns_that_can_be_decoded() -> None:
    assert [*SCHEMA.names, SCHEMA_VERSION] == list(COLUMNS)


def test_rows_of_a_plain_topic_have_partition_minus_1() -> None:
    data = stored(encode_message(OutgoingMessage(b"x", 1), HEADER))
    [row] = decoded(data, "__topic", "__partition", "__messageId", topic=PLAIN_TOPIC).to_pylist()
    assert row["__topic"] == "persistent://public/default/flights"
    assert row["__partition"] == -1
    assert row["__messageId"] == MessageId(-1, 7, 9).serialize()


def test_an_empty_value_is_not_a_null_one() -> None:
    batch = [OutgoingMessage(b"", 1), OutgoingMessage(b"", 2, null_value=True)]
    data = stored(encode_batch(batch, HEADER), index=1)
    assert decoded(data, "value").to_pylist() == [{"value": b""}, {"value": None}]


def test_an_empty_key_is_not_a_missing_one() -> None:
    batch = [OutgoingMessage(b"a", 1, partition_key=""), OutgoingMessage(b"b", 2)]
    data = stored(encode_batch(batch, HEADER), index=1)
    assert decoded(data, "__key").to_pylist() == [{"__key": b""}, {"__key": None}]


def test_a_key_in_the_metadata_of_a_batch_is_not_that_of_its_messages() -> None:
    # Apache's C++ client puts the first message's key there, also if other keys differ.
    batch = [OutgoingMessage(b"a", 1, partition_key="k"), OutgoingMessage(b"b", 2)]
    parts = encode_batch(batch, HEADER)
    received = read_entry(b"".join(parts))
    received.metadata.partition_key = "k"
    assert decoded(
        stored(_reassembled(received.metadata, parts[1]), index=1), "__key"
    ).to_pylist() == [
        {"__key": b"k"},
        {"__key": None},
    ]


def test_last_value_of_a_repeated_property_counts() -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2)
    for name, value in [("a", "1"), ("b", "2"), ("a", "3")]:
        metadata.properties.add(key=name, value=value)
    data = stored(_reassembled(metadata, b"x"))
    [row] = decoded(data, "__messageProperties").to_pylist()
    assert row["__messageProperties"] == [("a", "3"), ("b", "2")]


def test_marker_is_not_a_row() -> None:
    parts = encode_message(OutgoingMessage(b"x", 1), HEADER)
    received = read_entry(b"".join(parts))
    received.metadata.marker_type = 1
    rows = Rows(ARROW, TOPIC, EarlierEntries())
    rows.add(7, 9, stored(_reassembled(received.metadata, parts[1])))
    assert rows.rows == 0


def _reassembled(metadata: pb.MessageMetadata, payload: bytes) -> list[bytes]:
    """An entry without a checksum, which a producer may leave out."""
    encoded = metadata.SerializeToString()
    return [len(encoded).to_bytes(4, "big"), encoded, payload]


def _with(payload: bytes = b"x", **fields: Any) -> bytes:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2)
    for name, value in fields.items():
        setattr(metadata, name, value)
    return stored(_reassembled(metadata, payload))


def _encrypted() -> bytes:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2)
    metadata.encryption_keys.add(key="k", value=b"v")
    return stored(_reassembled(metadata, b"x"))


def _one_in_a_batch(payload_size: int, *, cut: int = 0) -> bytes:
    single = pb.SingleMessageMetadata(payload_size=payload_size).SerializeToString()
    payload = len(single).to_bytes(4, "big") + single + b"value"
    return _with(payload[: len(payload) - cut], num_messages_in_batch=1)


def _bad_property() -> bytes:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2)
    metadata.properties.add(key="name", value="valve")
    encoded = metadata.SerializeToString().replace(b"valve", b"va\xff\xfee")
    return stored([len(encoded).to_bytes(4, "big"), encoded, b"x"])


def _chunk(**fields: int) -> bytes:
    return _with(b"xy", uuid="u", num_chunks_from_msg=2, total_chunk_msg_size=4, **fields)


_GOOD = stored(encode_message(OutgoingMessage(b"x", 1), HEADER))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_GOOD[:-1] + b"y", "ChecksumMismatch"),
        (_GOOD[:9], "MalformedEntry"),
        (b"".join(encode_message(OutgoingMessage(b"x", 1), HEADER)), "index"),
        (_encrypted(), "EntryEncrypted"),
        (_chunk(chunk_id=2), "chunk 2 of 2 is invalid"),
        (_with(event_time=TIME_MS_MAX + 1), "event time"),
        (_with(event_time=2**64 - 1), "event time"),
        (_with(publish_time=2**64 - 1), "publish time"),
        (_with(partition_key="no base64", partition_key_b64_encoded=True), "base64"),
        (_bad_property(), "UTF-8"),
        (_with(compression=pb.CompressionType.LZ4, uncompressed_size=9), "LZ4"),
        (_with(compression=pb.CompressionType.ZLIB, uncompressed_size=1 << 31), "limit"),
        (_one_in_a_batch(-5), "-5 bytes"),
        (_one_in_a_batch(6), "byte 12 of 11"),
        (_one_in_a_batch(4), "byte 10 of 11"),
        (_one_in_a_batch(5, cut=1), "byte 11 of 10"),
        (_with(b"\0\0\0\x09abcdefgh", num_messages_in_batch=1), "message 0"),
    ],
)
def test_unreadable_entry_is_named_and_adds_no_row(data: bytes, reason: str) -> None:
    rows = Rows(ARROW, TOPIC, EarlierEntries())
    rows.add(7, 8, _GOOD)
    with pytest.raises(UnreadableEntry, match=reason) as caught:
        rows.add(7, 9, data)
    assert (caught.value.ledger, caught.value.entry) == (7, 9)
    assert str(TOPIC) in str(caught.value)
    assert rows.rows == 1
    rows.add(7, 10, _GOOD)
    assert plain_rows(rows.take()) == [*twin(_GOOD, 7, 8), *twin(_GOOD, 7, 10)]


def test_entry_level_columns_leave_the_payload_closed() -> None:
    broken = _with(b"not LZ4", compression=pb.CompressionType.LZ4, uncompressed_size=99)
    assert decoded(broken, "__index", "__publishTime").num_rows == 1


@pytest.mark.parametrize("names", [ARROW.names, ["__key"], ["__messageProperties"]])
@pytest.mark.parametrize("batched", [True, False])
def test_rows_know_how_many_bytes_they_hold(batched: bool, names: list[str]) -> None:
    """The limit counts all parts of an entry; otherwise a batch of rows would have no limit."""
    each = [
        OutgoingMessage(bytes(1_000), 1),
        OutgoingMessage(b"", 2, properties={"name": "p" * 1_000}),
        OutgoingMessage(b"", 3, partition_key="k" * 1_000),
    ]
    rows = Rows(only(*names), TOPIC, EarlierEntries())
    if batched:
        header = EntryHeader("p", 5, Compression.LZ4)
        rows.add(7, 9, stored(encode_batch(each, header), index=9))
        assert 3_000 <= rows.bytes < 3_200
        return
    for entry, message in enumerate(each, start=1):
        rows.add(7, entry, stored(encode_message(message, HEADER)))
        assert entry * 1_000 <= rows.bytes < entry * 1_100
