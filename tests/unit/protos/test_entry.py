"""The stored entry as a broker reads it: against protobuf itself, golden bytes, and damage."""

import struct
from typing import Any

import google_crc32c
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import Compression
from magnetar.protos.entry import (
    BROKER_METADATA_BYTES_MAX,
    ENTRY_BYTES_MAX,
    ENTRY_SENT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    BrokerMetadata,
    Chunk,
    EntryView,
    broker_metadata_prefix,
    broker_metadata_prefixes,
    parse_entry,
    parse_stored_entry,
    strip_broker_metadata,
    varint,
    varints,
    with_broker_metadata,
)
from magnetar.protos.errors import ChecksumMismatch, EntryTooLarge, MalformedEntry, ProtocolError

U64_MAX = 2**64 - 1
uint64 = st.integers(0, U64_MAX)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

PROPERTIES = [pb.KeyValue(key="a", value="b")]
metadata_fields = st.fixed_dictionaries(
    {"producer_name": texts, "sequence_id": uint64, "publish_time": uint64},
    optional={
        "properties": st.just(PROPERTIES),
        "replicated_from": texts,
        "partition_key": texts,
        "partition_key_b64_encoded": st.booleans(),
        "null_partition_key": st.booleans(),
        "compression": st.sampled_from(pb.CompressionType.values()),
        "event_time": uint64,
        "ordering_key": st.binary(max_size=8),
        "deliver_at_time": st.integers(-(2**63), 2**63 - 1),
        "marker_type": st.integers(-(2**31), 2**31 - 1),
        "highest_sequence_id": uint64,
        "null_value": st.booleans(),
        "schema_version": st.binary(max_size=8),
    },
)


def sealed(metadata: bytes, payload: bytes) -> bytes:
    """The layout, written a second time."""
    body = struct.pack(">I", len(metadata)) + metadata + payload
    return b"\x0e\x01" + struct.pack(">I", google_crc32c.value(body)) + body


def entry_of(payload: bytes = b"payload", **fields: Any) -> bytes:
    given_fields = {"producer_name": "p", "sequence_id": 1, "publish_time": 2, **fields}
    return sealed(pb.MessageMetadata(**given_fields).SerializeToString(), payload)


def field(metadata: pb.MessageMetadata, name: Any) -> Any:
    return getattr(metadata, name) if metadata.HasField(name) else None


@given(metadata_fields, st.binary(max_size=50), st.booleans())
def test_view_equals_protobuf(fields: dict[str, Any], payload: bytes, with_checksum: bool) -> None:
    data = entry_of(payload, **fields)[0 if with_checksum else 6 :]
    twin = pb.MessageMetadata(**fields)
    view = parse_entry(data)
    assert view.data is data
    assert view.payload_bytes == len(payload)
    assert view.producer_name == twin.producer_name
    assert view.sequence_id == twin.sequence_id
    assert view.highest_sequence_id == max(twin.sequence_id, twin.highest_sequence_id)
    assert view.publish_time_ms == twin.publish_time
    assert (view.num_messages, view.is_batch, view.chunk) == (1, False, None)
    assert view.partition_key == field(twin, "partition_key")
    key_is_bytes = twin.HasField("partition_key") and twin.partition_key_b64_encoded
    assert view.partition_key_b64 == key_is_bytes
    assert view.null_partition_key == twin.null_partition_key
    assert view.ordering_key == field(twin, "ordering_key")
    assert view.event_time_ms == twin.event_time
    assert view.deliver_at_ms == field(twin, "deliver_at_time")
    assert view.marker_type == field(twin, "marker_type")
    assert view.compression.value == twin.compression
    assert view.null_value == twin.null_value
    assert parse_entry(memoryview(data)) == view
    assert parse_stored_entry(data) == view


# A checksum, metadata {producer "p", sequence id 1, time 2}, payload "payload".
GOLDEN = bytes.fromhex("0e01 0099cb47 00000007 0a0170 1001 1802".replace(" ", "")) + b"payload"


def crc32c_by_the_bit(data: bytes) -> int:
    """CRC-32C as its definition has it: the reflected polynomial 0x82f63b78, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


key_fields = st.builds(
    lambda key, stretch, rest: b"\x32" + bytes([max(0, len(key) + stretch)]) + key + rest,
    st.binary(max_size=8) | st.text(max_size=4).map(str.encode),
    st.sampled_from([0, 0, 0, 1, -1]),
    st.sampled_from(
        [b"", b"\x48\x05", b"\x88\x01\x00", b"\x88\x01\x01", b"\x82\x01\x01v\x88\x01\x00"]
    ),
)


@given(
    st.binary(max_size=8),
    st.integers(0, 2**70),
    st.integers(0, 2**70) | st.integers(2**35 - 1, 2**42),
    st.binary(max_size=4) | st.just(b"") | key_fields,
    st.integers(-1, 1),
)
@example(b"p", 1, 2**41, b"\x32\x03key\x48\x05\x88\x01\x00", 0)
def test_plain_view_equals_protobuf(
    name: bytes, sequence_id: int, publish_time: int, rest: bytes, stretch: int
) -> None:
    """Valid and invalid metadata of the simplest shape: both parsers agree on value or error."""
    metadata = (
        b"\x0a" + bytes([max(0, len(name) + stretch)]) + name
        + b"\x10" + long_varint(sequence_id) + b"\x18" + long_varint(publish_time) + rest
    )  # fmt: skip
    body = struct.pack(">I", len(metadata)) + metadata + b"payload"
    plain = struct.pack(">HI", 0x0E01, google_crc32c.value(body)) + body
    # `parse_entry` passes an entry without a checksum to protobuf.
    by_hand, by_protobuf = outcome(plain), outcome(body)
    if isinstance(by_hand, EntryView) and isinstance(by_protobuf, EntryView):
        assert bytes(by_hand.data) == plain
        by_protobuf.data = by_hand.data
    assert by_hand == by_protobuf


def outcome(entry: bytes) -> EntryView | str:
    try:
        return parse_entry(entry)
    except ProtocolError as error:
        return f"{error!r}"


def long_varint(number: int) -> bytes:
    """Like `varint`, but also for numbers that are too large."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def test_golden_bytes_of_an_entry() -> None:
    assert crc32c_by_the_bit(b"123456789") == 0xE3069283  # the check value of its standard
    assert crc32c_by_the_bit(GOLDEN[6:]) == 0x0099CB47
    assert entry_of() == GOLDEN
    view = parse_entry(GOLDEN)
    assert (view.producer_name, view.sequence_id, view.publish_time_ms) == ("p", 1, 2)


# Batches and chunks


@pytest.mark.parametrize(
    ("count", "payload_bytes", "fields"),
    [
        (1, 6, {}),
        (3, 18, {}),
        (3, 5, {"compression": pb.ZSTD, "uncompressed_size": 18}),
    ],
)
def test_a_batch_size_that_fits_the_payload_is_accepted(
    count: int, payload_bytes: int, fields: dict[str, Any]
) -> None:
    view = parse_entry(entry_of(bytes(payload_bytes), num_messages_in_batch=count, **fields))
    assert (view.is_batch, view.num_messages) == (True, count)


@pytest.mark.parametrize(
    ("count", "payload_bytes", "fields"),
    [
        (0, 100, {}),
        (-1, 100, {}),
        (2**31 - 1, 100, {}),
        (1, 5, {}),
        (4, 23, {}),
        (4, 100, {"compression": pb.ZSTD, "uncompressed_size": 23}),
        (1, 100, {"compression": pb.ZSTD}),
    ],
)
def test_impossible_batch_size_is_refused(
    count: int, payload_bytes: int, fields: dict[str, Any]
) -> None:
    data = entry_of(bytes(payload_bytes), num_messages_in_batch=count, **fields)
    with pytest.raises(MalformedEntry, match=f"{count} messages cannot be in a batch"):
        parse_entry(data)


def test_the_metadata_of_a_chunk_is_parsed() -> None:
    fields = {"uuid": "u", "num_chunks_from_msg": 3, "total_chunk_msg_size": 20, "chunk_id": 2}
    view = parse_entry(entry_of(**fields))
    assert view.chunk == Chunk(uuid="u", index=2, count=3, total_bytes=20)
    assert (view.is_batch, view.num_messages) == (False, 1)
    assert (
        parse_entry(entry_of(**{**fields, "num_chunks_from_msg": 1, "chunk_id": 0})).chunk is None
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"num_chunks_from_msg": 2, "chunk_id": 2},
        {"num_chunks_from_msg": 2, "chunk_id": -1},
        {"num_chunks_from_msg": -1, "chunk_id": 0},
        {"num_chunks_from_msg": 2, "chunk_id": 0, "num_messages_in_batch": 1},
    ],
)
def test_impossible_chunk_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedEntry, match="chunk"):
        parse_entry(entry_of(**fields))


# Damage


@pytest.mark.parametrize("data", [GOLDEN, GOLDEN[6:]], ids=["checksum", "no checksum"])
def test_an_entry_truncated_in_its_metadata_is_refused(data: bytes) -> None:
    metadata_end = len(data) - len(b"payload")
    for end in range(len(data)):
        if data is GOLDEN or end < metadata_end:
            with pytest.raises((MalformedEntry, ChecksumMismatch)):
                parse_entry(data[:end])
        else:  # without a checksum a short payload cannot be noticed
            assert parse_entry(data[:end]).payload_bytes == end - metadata_end


@pytest.mark.parametrize("beyond", [1, 2, 2**31])
def test_a_metadata_size_beyond_the_end_is_refused(beyond: int) -> None:
    metadata = GOLDEN[10:-7]
    with pytest.raises(MalformedEntry, match="is truncated"):
        parse_entry(struct.pack(">I", len(metadata) + beyond) + metadata)


def test_every_flipped_bit_is_noticed() -> None:
    for position in range(len(GOLDEN) * 8):
        damaged = bytearray(GOLDEN)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises((MalformedEntry, ChecksumMismatch)):
            parse_entry(bytes(damaged))


@given(st.binary(max_size=60))
def test_noise_is_refused_with_a_typed_error(noise: bytes) -> None:
    for parse in (parse_entry, parse_stored_entry, strip_broker_metadata):
        try:
            parse(noise)
        except ProtocolError as error:
            assert error.definite  # noqa: PT017 - both outcomes are right


def test_a_checksum_error_names_both_values() -> None:
    damaged = GOLDEN[:2] + bytes(4) + GOLDEN[6:]
    with pytest.raises(ChecksumMismatch, match="0x00000000") as caught:
        parse_entry(damaged)
    assert (caught.value.expected, caught.value.actual) == (0, 0x0099CB47)
    assert parse_stored_entry(damaged).sequence_id == 1


@pytest.mark.parametrize("missing", ["producer_name", "sequence_id", "publish_time"])
def test_metadata_without_a_required_field_is_refused(missing: str) -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2, event_time=9)
    metadata.ClearField(missing)  # type: ignore[arg-type]
    with pytest.raises(MalformedEntry, match="lacks the producer's name"):
        parse_entry(sealed(metadata.SerializePartialToString(), b""))


@pytest.mark.parametrize("tag", [b"\x0a", b"\x32"], ids=["producer_name", "partition_key"])
def test_text_that_is_not_utf8_is_refused(tag: bytes) -> None:
    good = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2).SerializeToString()
    with pytest.raises(MalformedEntry, match="not UTF-8"):
        parse_entry(sealed(good + tag + b"\x02\xff\xfe", b""))


def test_unknown_codec_is_refused() -> None:
    good = pb.MessageMetadata(producer_name="@", sequence_id=1, publish_time=2).SerializeToString()
    assert parse_entry(sealed(good, b"")).compression is Compression.NONE
    with pytest.raises(MalformedEntry, match="unknown compression type 9"):
        parse_entry(sealed(good + b"\x40\x09", b"payload"))


# Limits


def test_a_payload_at_the_limit_is_accepted_and_a_larger_one_refused() -> None:
    assert MESSAGE_BYTES_MAX == 5_242_880
    assert parse_entry(entry_of(bytes(MESSAGE_BYTES_MAX))).payload_bytes == MESSAGE_BYTES_MAX
    with pytest.raises(EntryTooLarge, match="payload of 5242881 bytes"):
        parse_entry(entry_of(bytes(MESSAGE_BYTES_MAX + 1)))


def test_an_entry_at_the_limit_is_accepted_and_a_larger_one_refused() -> None:
    assert ENTRY_BYTES_MAX == 5_253_120
    front = len(entry_of(b"", replicated_from="x" * 9_000))
    largest = entry_of(bytes(MESSAGE_BYTES_MAX), replicated_from="x" * 9_000)
    room = ENTRY_SENT_BYTES_MAX - len(largest)
    largest = entry_of(bytes(MESSAGE_BYTES_MAX), replicated_from="x" * (9_000 + room))
    assert front < ENTRY_SENT_BYTES_MAX - MESSAGE_BYTES_MAX
    assert len(largest) == ENTRY_SENT_BYTES_MAX
    stored = with_broker_metadata(largest, broker_timestamp_ms=U64_MAX, index=U64_MAX)
    assert len(stored) == ENTRY_BYTES_MAX
    assert parse_entry(largest).payload_bytes == MESSAGE_BYTES_MAX
    with pytest.raises(EntryTooLarge, match="entry of 5253093 bytes"):
        parse_entry(largest + b"x")


# Broker entry metadata


@given(uint64, uint64)
def test_the_prefix_is_what_protobuf_writes(timestamp_ms: int, index: int) -> None:
    twin = pb.BrokerEntryMetadata(broker_timestamp=timestamp_ms, index=index).SerializeToString()
    prefix = broker_metadata_prefix(broker_timestamp_ms=timestamp_ms, index=index)
    assert prefix == b"\x0e\x02" + struct.pack(">I", len(twin)) + twin
    assert len(prefix) <= BROKER_METADATA_BYTES_MAX
    stored = with_broker_metadata(GOLDEN, broker_timestamp_ms=timestamp_ms, index=index)
    assert strip_broker_metadata(stored) == (BrokerMetadata(timestamp_ms, index), GOLDEN)
    assert strip_broker_metadata(memoryview(stored))[1].obj is stored  # not copied


def test_golden_bytes_of_the_prefix() -> None:
    prefix = broker_metadata_prefix(broker_timestamp_ms=300, index=7)
    assert prefix == bytes.fromhex("0e02 00000005 08ac02 1007".replace(" ", ""))


def test_entry_without_prefix_is_returned_whole() -> None:
    for data in (GOLDEN, GOLDEN[6:]):
        assert strip_broker_metadata(data) == (None, data)


def test_a_producer_may_not_write_the_prefix() -> None:
    stored = with_broker_metadata(GOLDEN, broker_timestamp_ms=1, index=2)
    with pytest.raises(MalformedEntry, match="only a broker writes"):
        parse_entry(stored)


def test_a_truncated_or_incomplete_prefix_is_refused() -> None:
    prefix = broker_metadata_prefix(broker_timestamp_ms=2**63, index=2**63)
    for end in range(2, len(prefix)):
        with pytest.raises(MalformedEntry):
            strip_broker_metadata(prefix[:end])
    for metadata in (b"\x08\x01", b"\x10\x01", b"", b"\x08\x80"):
        stored = b"\x0e\x02" + struct.pack(">I", len(metadata)) + metadata + GOLDEN
        with pytest.raises(MalformedEntry, match="broker entry metadata"):
            strip_broker_metadata(stored)


@given(st.integers(-(2**63), U64_MAX))
def test_varints_equal_those_of_protobuf(number: int) -> None:
    twin = pb.BrokerEntryMetadata(index=number & U64_MAX).SerializeToString()[1:]
    assert varint(number) == twin


@given(
    st.integers(0, 2**62), st.integers(0, 2**63 - 400) | st.integers(0, 400), st.integers(0, 300)
)
def test_prefixes_of_a_run_equal_single_prefixes(timestamp_ms: int, first: int, count: int) -> None:
    expected = [
        broker_metadata_prefix(broker_timestamp_ms=timestamp_ms, index=first + number)
        for number in range(count)
    ]
    assert expected == broker_metadata_prefixes(
        broker_timestamp_ms=timestamp_ms, indexes=range(first, first + count)
    )


@given(st.lists(st.integers(-(1 << 63), (1 << 64) - 1), max_size=5), st.integers(0, 300))
def test_varints_of_a_list_equal_those_of_single_numbers(starts: list[int], count: int) -> None:
    numbers = [start + step for start in starts for step in range(count)]
    numbers = [number for number in numbers if number < 1 << 64]
    assert varints(numbers) == [varint(number) for number in numbers]
