"""Batches are opened in three ways. Each must give the result of protobuf alone, or refuse the same
batches."""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from magnetar.protos import batch as batch_module
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.batch import Batch, open_batch
from magnetar.protos.errors import BatchDeserializeError, EntryError


def single(payload: bytes, **fields: object) -> bytes:
    metadata = pb.SingleMessageMetadata(payload_size=len(payload), **fields)  # type: ignore[arg-type]
    encoded = metadata.SerializeToString()
    return struct.pack(">I", len(encoded)) + encoded + payload


def by_protobuf(data: bytes, count: int) -> list[tuple[bytes, int]] | None:
    """Payload and sequence id of each message. None: the data is no batch of `count` messages."""
    found, at = [], 0
    for _ in range(count):
        if at + 4 > len(data):
            return None
        start = at + 4 + struct.unpack_from(">I", data, at)[0]
        try:
            metadata = pb.SingleMessageMetadata.FromString(data[at + 4 : start])
        except Exception:
            return None
        at = start + metadata.payload_size
        if not metadata.HasField("payload_size") or metadata.payload_size < 0 or at > len(data):
            return None
        number = metadata.sequence_id if metadata.HasField("sequence_id") else 7
        found.append((data[start:at], number))
    return found if at == len(data) else None


def found_in(opened: Batch) -> list[tuple[bytes, int]]:
    for index in range(len(opened)):
        assert opened.payload(index) == opened.message(index).payload
        assert opened.payload_bytes(index, index + 1) == len(opened.payload(index))
    messages = [opened.message(index) for index in range(len(opened))]
    assert [message.batch_index for message in messages] == list(range(len(opened)))
    assert opened.payload_bytes(0, len(opened)) == sum(len(one.payload) for one in messages)
    return [(message.payload, message.sequence_id) for message in messages]


sizes = st.sampled_from([0, 1, 127, 128, 1024, 16_383, 16_384])
numbers = st.sampled_from([0, 126, 127, 16_380, 16_384, 1 << 40, (1 << 63) - 3, (1 << 64) - 20])


@given(st.integers(1, 12), sizes, numbers, st.binary(max_size=9))
def test_messages_of_equal_sizes(count: int, size: int, first: int, before: bytes) -> None:
    payloads = [bytes([number]) * size for number in range(count)]
    data = b"".join(
        single(payload, sequence_id=first + number) for number, payload in enumerate(payloads)
    )
    opened = open_batch(before + data, len(before), count, sequence_id=7)
    assert found_in(opened) == [(payload, first + n) for n, payload in enumerate(payloads)]


@given(
    st.integers(4, 6),
    st.sampled_from([0, 5, 200]),
    st.integers(0, 20_000),
    st.integers(0, 1 << 30),
    st.integers(0, 255),
)
@example(4, 0, 0, 5, 0)
def test_a_changed_byte_is_seen_as_protobuf_sees_it(
    count: int, size: int, first: int, place: int, byte: int
) -> None:
    data = bytearray(b"".join(single(bytes(size), sequence_id=first + n) for n in range(count)))
    data[place % len(data)] = byte
    expected = by_protobuf(bytes(data), count)
    try:
        opened = open_batch(bytes(data), 0, count, sequence_id=7)
    except EntryError:
        assert expected is None
    else:
        assert found_in(opened) == expected


def test_a_batch_can_mix_plain_and_described_messages() -> None:
    data = single(b"a", sequence_id=1) + single(b"b", partition_key="k") + single(b"", event_time=3)
    opened = open_batch(data, 0, 3, sequence_id=7)
    assert found_in(opened) == [(b"a", 1), (b"b", 7), (b"", 7)]
    assert opened.message(1).partition_key == "k"
    assert opened.message(2).event_time_ms == 3


def test_equal_messages_are_opened_without_protobuf() -> None:
    data = b"".join(single(bytes(1024), sequence_id=20_000 + n) for n in range(100))
    found = batch_module._equal_bounds(data, 0, 100)
    assert found is not None
    assert batch_module._equal_bounds(data + bytes(100), 0, 100) is None


@pytest.mark.parametrize("count", [1, 4])
def test_bytes_after_the_last_message_are_refused(count: int) -> None:
    data = b"".join(single(b"x", sequence_id=n) for n in range(count))
    with pytest.raises(BatchDeserializeError, match="1 bytes follow"):
        open_batch(data + b"y", 0, count, sequence_id=7)
