"""Messages in entries: a consumer reads what a producer writes, and refuses damaged entries."""

import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.batch import ReceivedMessage
from magnetar.protos.compression import Compression, compress
from magnetar.protos.entry import (
    ENTRY_SENT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    BrokerMetadata,
    open_entry,
    open_plain,
    parse_entry,
    with_broker_metadata,
)
from magnetar.protos.errors import (
    BatchDeserializeError,
    ChecksumMismatch,
    EntryEncrypted,
    EntryError,
    EntryTooLarge,
    MalformedEntry,
    UncompressedSizeCorruption,
)
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    decode_messages,
    encode_batch,
    encode_chunks,
    encode_message,
    plain_message,
    read_entry,
)

HEADER = EntryHeader("producer", 1_700_000_000_000)

uint64 = st.integers(0, 2**64 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
messages = st.builds(
    OutgoingMessage,
    st.binary(max_size=300),
    uint64,
    properties=st.dictionaries(texts, texts, max_size=3),
    partition_key=st.none() | texts,
    partition_key_b64=st.booleans(),
    ordering_key=st.none() | st.binary(max_size=5),
    event_time_ms=st.just(0) | uint64,
    deliver_at_ms=st.none(),
)
null_messages = st.builds(lambda m: replace(m, payload=b"", null_value=True), messages)
any_messages = messages | null_messages
headers = st.builds(
    EntryHeader,
    texts,
    uint64,
    st.sampled_from(Compression),
    st.none() | st.binary(max_size=8),
)


def expected(message: OutgoingMessage, batch_index: int) -> ReceivedMessage:
    return ReceivedMessage(
        message.payload,
        message.properties,
        message.partition_key,
        message.partition_key is not None and message.partition_key_b64,
        message.ordering_key,
        message.event_time_ms,
        message.sequence_id,
        message.null_value,
        batch_index,
    )


def sealed(metadata: pb.MessageMetadata, payload: bytes) -> bytes:
    encoded = metadata.SerializePartialToString()
    body = struct.pack(">I", len(encoded)) + encoded + payload
    return b"\x0e\x01" + struct.pack(">I", google_crc32c.value(body)) + body


def batch_of(payload: bytes, count: int, **fields: Any) -> bytes:
    return sealed(
        pb.MessageMetadata(
            producer_name="p",
            sequence_id=1,
            publish_time=2,
            num_messages_in_batch=count,
            **fields,
        ),
        payload,
    )


def single(payload: bytes, **fields: Any) -> bytes:
    """One message of a batch, written by protobuf."""
    metadata = pb.SingleMessageMetadata(payload_size=len(payload), **fields)
    encoded = metadata.SerializePartialToString()
    return struct.pack(">I", len(encoded)) + encoded + payload


# Round trips


@given(
    any_messages,
    headers,
    st.none() | st.integers(0, 2**63 - 1),
    st.none() | st.binary(max_size=8),
)
def test_a_single_message_survives_encoding(
    message: OutgoingMessage, header: EntryHeader, deliver_at: int | None, schema: bytes | None
) -> None:
    message = replace(message, deliver_at_ms=deliver_at, schema_version=schema)
    data = b"".join(encode_message(message, header))
    entry = read_entry(data)
    assert decode_messages(entry) == [expected(message, -1)]
    assert (entry.producer_name, entry.publish_time_ms) == (
        header.producer_name,
        header.publish_time_ms,
    )
    assert entry.schema_version == (header.schema_version if schema is None else schema or None)
    assert entry.deliver_at_ms == deliver_at
    assert entry.broker is None
    view = parse_entry(data)
    assert (view.is_batch, view.num_messages, view.deliver_at_ms) == (False, 1, deliver_at)


@given(st.lists(any_messages, min_size=1, max_size=5), headers)
def test_a_batch_survives_encoding(batch: list[OutgoingMessage], header: EntryHeader) -> None:
    data = b"".join(encode_batch(batch, header))
    entry = read_entry(memoryview(data))
    assert decode_messages(entry) == [expected(m, i) for i, m in enumerate(batch)]
    view = parse_entry(data)
    assert (view.is_batch, view.num_messages) == (True, len(batch))
    assert view.sequence_id == batch[0].sequence_id
    assert view.highest_sequence_id == max(batch[0].sequence_id, batch[-1].sequence_id)
    assert view.partition_key == shared(m.partition_key for m in batch)
    assert view.ordering_key == shared(m.ordering_key for m in batch)


def shared(keys: Iterable[str | bytes | None]) -> str | bytes | None:
    """The key of all messages, None if they differ."""
    found = set(keys)
    return found.pop() if len(found) == 1 else None


@given(st.lists(messages, min_size=1, max_size=4))
def test_the_payload_of_a_batch_is_what_protobuf_writes(batch: list[OutgoingMessage]) -> None:
    _, payload = encode_batch(batch, HEADER)
    twin = b""
    for message in batch:
        fields: dict[str, Any] = {"sequence_id": message.sequence_id}
        fields["properties"] = [
            pb.KeyValue(key=key, value=value) for key, value in message.properties.items()
        ]
        fields["partition_key"] = message.partition_key
        if message.partition_key is not None and message.partition_key_b64:
            fields["partition_key_b64_encoded"] = True
        fields["ordering_key"] = message.ordering_key
        fields["event_time"] = message.event_time_ms or None
        twin += single(message.payload, **fields)
    assert payload == twin


@given(any_messages, headers, st.integers(1, 100))
def test_chunks_survive_encoding(
    message: OutgoingMessage, header: EntryHeader, chunk_bytes_max: int
) -> None:
    chunks = encode_chunks(message, header, uuid="u-1", chunk_bytes_max=chunk_bytes_max)
    entries = [read_entry(b"".join(parts)) for parts in chunks]
    assert all(len(entry.payload) <= chunk_bytes_max for entry in entries)
    if len(entries) == 1:
        assert entries[0].chunk is None
        assert decode_messages(entries[0]) == [expected(message, -1)]
        return
    joined = b"".join(entry.payload for entry in entries)
    for index, entry in enumerate(entries):
        assert entry.chunk is not None
        assert (entry.chunk.index, entry.chunk.count) == (index, len(entries))
        assert (entry.chunk.uuid, entry.chunk.total_bytes) == ("u-1", len(joined))
    assert decode_messages(entries[-1], joined) == [expected(message, -1)]


def test_broker_metadata_is_read() -> None:
    data = b"".join(encode_message(OutgoingMessage(b"x", 1), HEADER))
    stored = with_broker_metadata(data, broker_timestamp_ms=5, index=6)
    entry = read_entry(stored)
    assert entry.broker == BrokerMetadata(broker_timestamp_ms=5, index=6)
    assert decode_messages(entry) == decode_messages(read_entry(data))


def test_golden_bytes_of_a_batch() -> None:
    batch = [
        OutgoingMessage(b"hi", 5),
        OutgoingMessage(b"", 300, properties={"a": "b"}, partition_key="k"),
    ]
    _, payload = encode_batch(batch, HEADER)
    assert payload.hex(" ", -4).replace(" ", "") == (
        "00000004" "1802" "4005" "6869" "00000010" "0a06" "0a0161" "120162" "12016b" "1800" "40ac02"
    )  # fmt: skip


def test_received_entry_does_not_refer_to_the_frame() -> None:
    frame = bytearray(b"".join(encode_message(OutgoingMessage(b"before", 1), HEADER)))
    entry = read_entry(memoryview(frame))
    frame[:] = bytes(len(frame))
    assert decode_messages(entry)[0].payload == b"before"
    frame.clear()  # would raise BufferError while a view of it is alive


def test_the_last_of_equal_properties_counts() -> None:
    pairs = [pb.KeyValue(key="a", value="1"), pb.KeyValue(key="a", value="2")]
    data = batch_of(single(b"x", properties=pairs), 1)
    assert decode_messages(read_entry(data))[0].properties == {"a": "2"}


def test_message_without_sequence_id_has_the_entrys() -> None:
    (message,) = decode_messages(read_entry(batch_of(single(b"x"), 1)))
    assert message.sequence_id == 1


# Damage


PLAIN = single(b"one", sequence_id=1) + single(b"two", sequence_id=2, partition_key="k")


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_batch_of_another_count_is_refused(count: int) -> None:
    with pytest.raises(BatchDeserializeError):
        decode_messages(read_entry(batch_of(PLAIN, count)))


def test_a_batch_truncated_anywhere_is_refused() -> None:
    assert len(decode_messages(read_entry(batch_of(PLAIN, 2)))) == 2
    for end in range(12, len(PLAIN)):
        entry = read_entry(batch_of(PLAIN[:end], 2))
        with pytest.raises(BatchDeserializeError):
            decode_messages(entry)


@pytest.mark.parametrize(
    "metadata",
    [
        pb.SingleMessageMetadata(sequence_id=7),
        pb.SingleMessageMetadata(payload_size=-1),
        pb.SingleMessageMetadata(payload_size=-(2**31)),
        pb.SingleMessageMetadata(payload_size=2**31 - 1),
    ],
)
def test_impossible_sizes_within_a_batch_are_refused(metadata: pb.SingleMessageMetadata) -> None:
    encoded = metadata.SerializePartialToString()
    payload = struct.pack(">I", len(encoded)) + encoded + bytes(20)
    with pytest.raises(BatchDeserializeError, match="message 0 does not fit"):
        decode_messages(read_entry(batch_of(payload, 1)))
    with pytest.raises(BatchDeserializeError):
        decode_messages(read_entry(batch_of(b"\xff" * 20, 1)))


@given(st.binary(min_size=6, max_size=60), st.integers(1, 3), st.sampled_from(Compression))
def test_noise_in_a_batch_is_refused_with_a_typed_error(
    noise: bytes, count: int, codec: Compression
) -> None:
    wire_codec = pb.CompressionType.values()[codec]
    data = batch_of(
        noise, min(count, len(noise) // 6), compression=wire_codec, uncompressed_size=60
    )
    try:
        decode_messages(read_entry(data))
    except EntryError as error:
        assert error.definite  # noqa: PT017 - both outcomes are right


def test_every_flipped_bit_is_noticed() -> None:
    data = b"".join(encode_batch([OutgoingMessage(b"x", 1)], HEADER))
    for position in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises((ChecksumMismatch, MalformedEntry)):
            read_entry(damaged)


def test_text_that_is_not_utf8_is_refused() -> None:
    bad = b"\x0a\x09\x0a\x01a\x12\x04\xff\xfe\xfd\xfc" + b"\x18\x01"
    payload = struct.pack(">I", len(bad)) + bad + b"x"
    with pytest.raises(MalformedEntry, match="not UTF-8"):
        decode_messages(read_entry(batch_of(payload, 1)))


def test_a_property_without_value_is_refused() -> None:
    payload = single(b"x", properties=[pb.KeyValue(key="a")])
    with pytest.raises(MalformedEntry, match="lacks its key or value"):
        decode_messages(read_entry(batch_of(payload, 1)))


def test_an_encrypted_entry_is_refused() -> None:
    keys = [pb.EncryptionKeys(key="k", value=b"v")]
    with pytest.raises(EntryEncrypted):
        read_entry(batch_of(PLAIN, 2, encryption_keys=keys))


@pytest.mark.parametrize("codec", [c for c in Compression if c is not Compression.NONE])
def test_the_stated_size_is_checked_before_anything_is_decompressed(codec: Compression) -> None:
    wire_codec = pb.CompressionType.values()[codec]
    payload = compress(codec, PLAIN)
    good = batch_of(payload, 2, compression=wire_codec, uncompressed_size=len(PLAIN))
    assert len(decode_messages(read_entry(good), bytes_max=len(PLAIN))) == 2
    with pytest.raises(UncompressedSizeCorruption, match="the limit is"):
        decode_messages(read_entry(good), bytes_max=len(PLAIN) - 1)
    huge = batch_of(payload, 2, compression=wire_codec, uncompressed_size=2**32 - 1)
    with pytest.raises(UncompressedSizeCorruption, match="the limit is"):
        decode_messages(read_entry(huge))


# Limits and misuse


def test_a_message_at_the_limit_is_encoded_and_a_larger_one_refused() -> None:
    largest = OutgoingMessage(bytes(MESSAGE_BYTES_MAX), 1)
    data = b"".join(encode_message(largest, HEADER))
    assert parse_entry(data).payload_bytes == MESSAGE_BYTES_MAX
    too_large = OutgoingMessage(bytes(MESSAGE_BYTES_MAX + 1), 1)
    with pytest.raises(EntryTooLarge) as caught:
        encode_message(too_large, HEADER)
    assert (caught.value.size, caught.value.limit) == (MESSAGE_BYTES_MAX + 1, MESSAGE_BYTES_MAX)
    with pytest.raises(EntryTooLarge):
        encode_batch([largest], HEADER)
    # The limit applies to the size after compression.
    squeezed = encode_message(too_large, replace(HEADER, compression=Compression.ZSTD))
    assert decode_messages(read_entry(b"".join(squeezed)))[0].payload == too_large.payload


def test_an_entry_at_the_limit_is_encoded_and_a_larger_one_refused() -> None:
    def entry_with(property_bytes: int) -> bytes:
        message = OutgoingMessage(bytes(MESSAGE_BYTES_MAX), 1, {"a": "x" * property_bytes})
        return b"".join(encode_message(message, HEADER))

    room = ENTRY_SENT_BYTES_MAX - len(entry_with(9_000))
    assert len(entry_with(9_000 + room)) == ENTRY_SENT_BYTES_MAX
    with pytest.raises(EntryTooLarge, match="the entry of"):
        entry_with(9_000 + room + 1)


def test_misuse_raises_assertion_error() -> None:
    with pytest.raises(AssertionError):
        encode_batch([OutgoingMessage(b"x", 1, deliver_at_ms=5)], HEADER)
    with pytest.raises(AssertionError):
        encode_batch([OutgoingMessage(b"x", 1, schema_version=b"")], HEADER)
    with pytest.raises(AssertionError):
        encode_message(OutgoingMessage(b"x", 1, null_value=True), HEADER)
    entry = read_entry(b"".join(encode_message(OutgoingMessage(b"x", 1), HEADER)))
    with pytest.raises(AssertionError):
        decode_messages(entry, b"x")


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), texts, st.binary())
def test_a_plain_message_by_hand_is_what_protobuf_would_write(
    sequence_id: int, time_ms: int, name: str, payload: bytes
) -> None:
    header = EntryHeader(name, time_ms)
    entry = b"".join(encode_message(OutgoingMessage(payload, sequence_id), header))
    twin = pb.MessageMetadata(producer_name=name, sequence_id=sequence_id, publish_time=time_ms)
    assert entry[10:] == twin.SerializeToString() + payload
    metadata, copy, payload_at = open_entry(memoryview(entry))
    assert (metadata, copy[payload_at:]) == (twin, payload)


# Plain entries


def plainly(data: bytes) -> tuple[ReceivedMessage, str, int, int | None] | None:
    """The result of `open_plain`. None: it leaves the entry to `read_entry`."""
    plain = open_plain(memoryview(data))
    if plain is None:
        return None
    return plain_message(plain), plain.producer_name, plain.publish_time_ms, plain.index


def at_length(data: bytes) -> tuple[ReceivedMessage, str, int, int | None]:
    entry = read_entry(data)
    assert (entry.is_batch, entry.schema_version, entry.deliver_at_ms) == (False, None, None)
    (message,) = decode_messages(entry)
    index = None if entry.broker is None else entry.broker.index
    return message, entry.producer_name, entry.publish_time_ms, index


below_2_63 = st.integers(0, 2**63 - 1)
stored = st.tuples(st.integers(1_000_000_000_000, 2_000_000_000_000), below_2_63)


@given(st.binary(max_size=40), below_2_63, texts, below_2_63, st.none() | stored)
def test_a_plain_entry_is_read_as_at_length(
    payload: bytes, number: int, name: str, time_ms: int, broker: tuple[int, int] | None
) -> None:
    header = EntryHeader(name, time_ms)
    data = b"".join(encode_message(OutgoingMessage(payload, number), header))
    if broker is not None:
        data = with_broker_metadata(data, broker_timestamp_ms=broker[0], index=broker[1])
    assert plainly(data) == at_length(data)


@given(any_messages, headers, st.none() | st.integers(0, 2**63 - 1), st.booleans())
def test_any_other_entry_is_left_to_be_read_at_length(
    message: OutgoingMessage, header: EntryHeader, deliver_at: int | None, batch: bool
) -> None:
    if batch:
        data = b"".join(encode_batch([message], header))
    else:
        data = b"".join(encode_message(replace(message, deliver_at_ms=deliver_at), header))
    found = plainly(data)
    assert found is None or found == at_length(data)
    assert not batch or found is None


@given(st.integers(0, 1 << 20), st.integers(0, 255))
def test_damage_of_a_plain_entry_is_refused_or_left_to_be_refused(place: int, byte: int) -> None:
    data = b"".join(encode_message(OutgoingMessage(b"payload", 20_000), HEADER))
    whole = with_broker_metadata(data, broker_timestamp_ms=1_700_000_000_000, index=300)
    damaged = bytearray(whole)
    damaged[place % len(whole)] = byte
    try:
        found = plainly(bytes(damaged))
    except ChecksumMismatch:
        with pytest.raises(ChecksumMismatch):
            read_entry(bytes(damaged))
    else:
        assert found is None or found == at_length(bytes(damaged))
    for end in range(len(whole)):
        with pytest.raises(EntryError):
            at_length(whole[:end])
        try:
            assert plainly(whole[:end]) is None
        except ChecksumMismatch:
            continue
