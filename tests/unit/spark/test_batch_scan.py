"""The scan finds what the plain decoder finds, or leaves the batch to it."""

from __future__ import annotations

import base64
import random
import struct

import pyarrow as pa
import pytest
from fakes.earlier_entries import EarlierEntries
from pyspark.sql.pandas.types import to_arrow_schema

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import Compression
from magnetar.protos.entry import with_broker_metadata
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch, encode_message
from magnetar.protos.names import TopicName
from magnetar.spark.batch_scan import MESSAGES_MIN, scan
from magnetar.spark.decode import Rows
from magnetar.spark.errors import UnreadableEntry
from magnetar.spark.source.schema import SCHEMA

TOPIC = TopicName.parse("t")
HEADER = EntryHeader("p", 1_700_000_000_000)
WHOLE = to_arrow_schema(SCHEMA, timezone="UTC")
COLUMNS = [WHOLE.field(name) for name in WHOLE.names if name != "__messageProperties"]
NAMES = pa.schema(COLUMNS)

# Payloads that look like the beginning of a message, and plain ones.
PAYLOADS = [b"", b"\0" * 9, b"\0\0\0\x02\x18\0", b"\0\0\0\x03\x12\x01a", b"plain", b"\xff" * 300]
KEY_OF_BYTES = base64.b64encode(b"\xff\0").decode()


def messages(chance: random.Random) -> list[OutgoingMessage]:
    """MESSAGES_MIN messages or more, with every kind of metadata."""
    payloads = [
        chance.choice([*PAYLOADS, chance.randbytes(chance.randrange(200))])
        for _ in range(MESSAGES_MIN + chance.randrange(5))
    ]
    return [
        OutgoingMessage(
            payload,
            chance.randrange(1 << 40),
            chance.choice([{}, {"a": "b"}]),
            *chance.choice([(None, False), ("", False), ("é", False), (KEY_OF_BYTES, True)]),
            event_time_ms=chance.choice([0, 5, 1_356_998_400_000]),
            null_value=not payload and chance.random() < 0.5,
        )
        for payload in payloads
    ]


def entry_of(batch: list[OutgoingMessage], index: int) -> bytes:
    return with_broker_metadata(
        b"".join(encode_batch(batch, HEADER)), broker_timestamp_ms=5, index=index
    )


@pytest.mark.parametrize("seed", range(8))
def test_scanned_entries_have_the_rows_of_plain_ones(seed: int) -> None:
    chance = random.Random(seed)
    one, two = messages(chance), messages(chance)
    first, end = chance.choice([(0, 0), (0, 0), (3, 0), (0, 400), (259, 262), (270, 290)])
    entries = [
        (7, 0, entry_of(one, len(one) - 1)),
        (7, 1, entry_of(two[:9], len(one) + 8)),  # too few messages for a scan of their own
        (7, 2, entry_of(two, len(one) + 8 + len(two))),
    ]
    together, single, unscanned = (
        Rows(NAMES, TOPIC, EarlierEntries()),
        Rows(NAMES, TOPIC, EarlierEntries()),
        Rows(WHOLE, TOPIC, EarlierEntries()),
    )
    for stored in entries:
        for rows in (single, unscanned):  # properties are never scanned
            rows.add(*stored, first_index=first, end_index=end or None)
    together.add_all(entries, first_index=first, end_index=end or None, bytes_max=1 << 30)
    expected = unscanned.take().select(NAMES.names)
    assert together.rows == single.rows == expected.num_rows
    place_of = together.places()
    if expected.num_rows:
        assert place_of(0) == single.places()(0)
    assert together.take().equals(expected)
    assert single.take().equals(expected)


def test_only_messages_of_batches_have_a_batch_index() -> None:
    batch = [OutgoingMessage(b"v", n) for n in range(2)]
    single = b"".join(encode_message(batch[0], HEADER))
    rows = Rows(NAMES, TOPIC, EarlierEntries())
    rows.add(7, 0, with_broker_metadata(single, broker_timestamp_ms=5, index=0))
    rows.add(7, 1, entry_of(batch, 2))
    assert list(map(rows.places(), range(3))) == [(7, 0, -1), (7, 1, 0), (7, 1, 1)]


def test_large_metadata_and_damage_are_left_to_the_plain_decoder() -> None:
    batch = [OutgoingMessage(b"v", n) for n in range(MESSAGES_MIN)]
    large = [*batch[:-1], OutgoingMessage(b"v", 1, partition_key="k" * 200)]
    payload = b"".join(encode_batch(batch, HEADER))
    assert scan(payload, MESSAGES_MIN) is None  # begins with the entry's header
    rows = Rows(NAMES, TOPIC, EarlierEntries())
    rows.add_all([(1, 0, entry_of(large, 300)), (1, 1, entry_of(large, 600))], bytes_max=1 << 30)
    assert rows.take().column("__key")[MESSAGES_MIN - 1].as_py() == b"k" * 200
    assert scan(b"", 1) is None
    assert scan(b"\0\0\0\x02\x18", 1) is None


def test_entries_that_are_large_when_uncompressed_fill_a_batch_one_by_one() -> None:
    header = EntryHeader("p", 1_700_000_000_000, Compression.ZSTD)
    batch = [OutgoingMessage(bytes(10_000), n) for n in range(MESSAGES_MIN)]
    parts = b"".join(encode_batch(batch, header))
    entries = [
        (1, at, with_broker_metadata(parts, broker_timestamp_ms=5, index=255 + 256 * at))
        for at in range(8)
    ]
    rows = Rows(NAMES, TOPIC, EarlierEntries())
    assert rows.add_all(entries, bytes_max=6_000_000) == 3
    assert rows.rows == 3 * MESSAGES_MIN
    rows.take()
    assert rows.add_all(entries[3:], bytes_max=1) == 1


def test_a_key_of_a_wrong_type_is_no_key() -> None:
    """A number in the field of the key: its value is not a size."""
    plain = pb.SingleMessageMetadata(payload_size=1).SerializeToString()
    batch = b"".join(
        struct.pack(">I", len(metadata)) + metadata + b"v"
        for metadata in [plain + b"\x10\xff\xff\xff\x07"] * MESSAGES_MIN
    )
    found = scan(batch, MESSAGES_MIN)
    assert found is not None
    assert set(found.key_start.tolist()) == {-1}


@pytest.mark.parametrize("cut", [1, 5, 300])
def test_a_damaged_entry_is_named_among_sound_ones(cut: int) -> None:
    sound = entry_of([OutgoingMessage(b"v", n) for n in range(MESSAGES_MIN)], 255)
    rows = Rows(NAMES, TOPIC, EarlierEntries())
    with pytest.raises(UnreadableEntry, match=r"entry 1:1:"):
        rows.add_all([(1, 0, sound), (1, 1, sound[:-cut]), (1, 2, sound)], bytes_max=1 << 30)
