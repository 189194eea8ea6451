from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from fakes.earlier_entries import EarlierEntries
from pyspark.sql.pandas.types import to_arrow_schema

from magnetar.client.message import ChunkedMessageId, MessageId
from magnetar.protos.compression import Compression
from magnetar.protos.entry import with_broker_metadata
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    encode_chunks,
    encode_message,
    read_entry,
)
from magnetar.protos.names import TopicName
from magnetar.spark.chunks import Chunks, Joined
from magnetar.spark.decode import Rows
from magnetar.spark.errors import UnreadableEntry
from magnetar.spark.source.schema import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

TOPIC = TopicName.parse("flights-partition-3")
ARROW: pa.Schema = to_arrow_schema(SCHEMA, timezone="UTC")


def chunks_of(
    payload: bytes, uuid: str, *, size: int = 2, compression: Compression = Compression.NONE
) -> list[bytes]:
    header = EntryHeader("producer", 1_700_000_000_123, compression)
    message = OutgoingMessage(payload, 1, partition_key="k", properties={"a": uuid})
    return [b"".join(it) for it in encode_chunks(message, header, uuid=uuid, chunk_bytes_max=size)]


def stored(entries: Sequence[bytes]) -> list[bytes]:
    return [
        with_broker_metadata(entry, broker_timestamp_ms=5, index=index)
        for index, entry in enumerate(entries)
    ]


def joined(entries: Sequence[bytes], first: int, end: int, earlier: EarlierEntries) -> list[int]:
    """The last chunks of the messages of a range of entries."""
    machine = Chunks(earlier)
    found = []
    for number in range(first, end):
        message = machine.on_chunk(7, number, read_entry(entries[number]))
        machine.check()
        if message is not None:
            found.append(number)
    return found


def expected(entries: Sequence[bytes], first: int) -> tuple[list[int], list[int]]:
    """Whole and lost messages by their last chunks: a simple model that searches all entries."""
    whole, lost = [], []
    for number in range(first, len(entries)):
        last = read_entry(entries[number]).chunk
        assert last is not None
        if last.index < last.count - 1:
            continue
        missing = set(range(last.count - 1))
        for other in map(read_entry, reversed(entries[first:number])):
            assert other.chunk is not None
            if other.chunk.uuid != last.uuid:
                continue
            if other.chunk.index == last.count - 1:
                break
            missing.discard(other.chunk.index)
            if not missing:
                whole.append(number)
                break
        else:
            lost.append(number)
    return whole, lost


def random_topic(draw: random.Random) -> list[bytes]:
    """Four producers send one chunked message each. Their chunks interleave; a producer sometimes
    sends its last chunks again."""
    left = [chunks_of(bytes(range(draw.randint(3, 9))), f"u{it}") for it in range(4)]
    topic: list[bytes] = []
    at = [0] * len(left)
    while any(sent < len(parts) for sent, parts in zip(at, left, strict=True)):
        who = draw.choice([it for it, parts in enumerate(left) if at[it] < len(parts)])
        topic.append(left[who][at[who]])
        at[who] += 1
        if draw.random() < 0.2:
            at[who] -= draw.randint(0, at[who])
        elif draw.random() < 0.05:
            at[who] = len(left[who])  # the producer dies
        if len(topic) > 60:
            break
    return topic


@pytest.mark.parametrize("seed", range(40))
def test_ranges_have_the_same_messages_however_a_topic_is_divided(seed: int) -> None:
    draw = random.Random(seed)
    entries = random_topic(draw)
    first = draw.choice([0, 0, len(entries) // 4])  # the entries before it were deleted
    whole, lost = expected(entries, first)
    for parts in (1, 2, 5, len(entries)):
        cuts = sorted(draw.randint(first, len(entries)) for _ in range(parts - 1))
        earlier = EarlierEntries(entries, first)
        found: list[int] = []
        for begin, end in zip([first, *cuts], [*cuts, len(entries)], strict=True):
            found += joined(entries, begin, end, earlier)
        assert found == whole
        assert earlier.lost == lost


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.ZSTD])
@pytest.mark.parametrize("first", [0, 1])
def test_a_joined_message_is_a_row_with_all_its_parts(compression: Compression, first: int) -> None:
    payload = b"abcdefghij" * 10
    entries = stored(chunks_of(payload, "u", size=9, compression=compression))
    rows = Rows(ARROW, TOPIC, EarlierEntries(entries))
    last = len(entries) - 1
    added = 0
    group: list[tuple[int, int, bytes | memoryview]] = [
        (7, it, entries[it]) for it in range(len(entries))
    ]
    while added < len(group[first:]):
        added += rows.add_all(group[first + added :], bytes_max=1 << 20)
    [row] = rows.take().to_pylist()
    assert row["value"] == payload
    assert row["__key"] == b"k"
    assert row["__messageProperties"] == [("a", "u")]
    assert row["__index"] == last
    chunked = ChunkedMessageId(MessageId(3, 7, 0), MessageId(3, 7, last))
    assert row["__messageId"] == chunked.serialize()


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.ZSTD])
def test_all_bytes_of_a_joined_message_count_toward_the_limit_of_a_batch(
    compression: Compression,
) -> None:
    messages = [
        chunks_of(bytes([65 + it]) * 1_000, f"u{it}", size=9, compression=compression)
        for it in range(3)
    ]
    entries = stored([chunk for message in messages for chunk in message])
    rows = Rows(ARROW, TOPIC, EarlierEntries(entries))
    group: list[tuple[int, int, bytes | memoryview]] = [
        (7, it, entries[it]) for it in range(len(entries))
    ]
    added = rows.add_all(group, bytes_max=1_500)
    assert added == len(messages[0]) + len(messages[1])
    assert rows.bytes == 2_000


def test_the_oldest_message_is_read_again_when_too_much_is_pending() -> None:
    one, two = chunks_of(b"abcdef", "u1"), chunks_of(b"ghijkl", "u2")
    entries = [*one[:2], *two, one[2]]
    earlier = EarlierEntries(entries)
    machine = Chunks(earlier, pending_bytes_max=6)
    found = [machine.on_chunk(7, it, read_entry(entries[it])) for it in range(len(entries))]
    machine.check()
    assert found[4:] == [Joined((7, 2), b"ghijkl"), Joined((7, 0), b"abcdef")]
    assert earlier.searches == 1


def test_chunks_of_another_size_than_they_say_are_refused() -> None:
    entries = stored([*chunks_of(b"abcdef", "u")[:2], chunks_of(b"abcdefghi", "u", size=3)[2]])
    rows = Rows(ARROW, TOPIC, EarlierEntries(entries))
    for number in (0, 1):
        rows.add(7, number, entries[number])
    with pytest.raises(UnreadableEntry, match="7 bytes, not 9"):
        rows.add(7, 2, entries[2])


def test_a_message_that_ended_before_the_range_is_no_row_of_it() -> None:
    parts = chunks_of(b"abcdef", "u")
    entries = [*parts, parts[1], parts[2]]
    earlier = EarlierEntries(entries)
    machine = Chunks(earlier)
    assert machine.on_chunk(7, 3, read_entry(parts[1])) is None
    assert machine.on_chunk(7, 4, read_entry(parts[2])) is None
    assert (earlier.searches, earlier.lost) == (1, [])
    assert machine.on_chunk(7, 5, read_entry(parts[0])) is None
    assert machine.on_chunk(7, 6, read_entry(parts[1])) is None
    assert machine.on_chunk(7, 7, read_entry(parts[2])) == Joined((7, 5), b"abcdef")


def test_a_search_passes_over_entries_that_cannot_be_read() -> None:
    """A query begins within a message. An entry of another producer before it is corrupt."""
    first, second = stored(chunks_of(b"abcd", "u"))
    other = stored([b"".join(encode_message(OutgoingMessage(b"x", 1), EntryHeader("q", 1)))])[0]
    entries = [first, other[:-1] + b"?", second]
    earlier = EarlierEntries(entries, first=0)
    assert joined(entries, 2, 3, earlier) == [2]
    assert earlier.lost == []
