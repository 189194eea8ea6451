"""Frames of Apache's own client (tests/golden/entry), read and written again by our codecs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.batch import ReceivedMessage
from magnetar.protos.compression import Compression
from magnetar.protos.entry import parse_entry
from magnetar.protos.framing import FrameDecoder, parse_command, send_header, split_frames
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    ReceivedEntry,
    decode_messages,
    encode_batch,
    encode_chunks,
    encode_message,
    read_entry,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "entry"
RECORDS = {path.stem: json.loads(path.read_text("utf-8")) for path in GOLDEN.glob("*.json")}
CODECS = {"none": 0, "lz4": 1, "zlib": 2, "zstd": 3, "snappy": 4}


def frames(name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in RECORDS[name]["frames"]]


def sends(name: str) -> list[tuple[pb.CommandSend, bytes]]:
    found = []
    for frame in split_frames(b"".join(frames(name))):
        command = parse_command(frame)
        assert isinstance(command.body, pb.CommandSend)
        assert command.entry is not None
        found.append((command.body, bytes(command.entry)))
    return found


def received(name: str) -> Iterator[tuple[ReceivedEntry, ReceivedMessage]]:
    """All messages of a recording, chunks put together."""
    chunks = b""
    for _, data in sends(name):
        entry = read_entry(data)
        if entry.chunk is None:
            yield from ((entry, message) for message in decode_messages(entry))
            continue
        chunks += entry.payload
        if entry.chunk.index == entry.chunk.count - 1:
            assert len(chunks) == entry.chunk.total_bytes
            yield from ((entry, message) for message in decode_messages(entry, chunks))
            chunks = b""


def described(given: dict[str, Any]) -> tuple[Any, ...]:
    return (
        given["text"].encode(),
        given["properties"],
        given["partition_key"] or None,
        given["ordering_key"].encode() or None,
        given["event_timestamp"],
    )


def outgoing(message: ReceivedMessage, entry: ReceivedEntry) -> OutgoingMessage:
    return OutgoingMessage(
        message.payload,
        message.sequence_id,
        properties=message.properties,
        partition_key=message.partition_key,
        ordering_key=message.ordering_key,
        event_time_ms=message.event_time_ms,
        deliver_at_ms=entry.deliver_at_ms,
    )


def header_of(entry: ReceivedEntry) -> EntryHeader:
    return EntryHeader(entry.producer_name, entry.publish_time_ms, entry.compression)


def without_checksum(entry: bytes) -> bytes:
    return entry[6:]


def test_there_are_recordings_of_every_kind() -> None:
    kinds = {f"{codec}-{kind}" for codec in CODECS for kind in ("single", "batch", "chunks")}
    assert kinds | {"key-based-batch", "delayed"} == set(RECORDS)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_every_message_reads_as_it_was_given(name: str) -> None:
    given = [described(message) for message in RECORDS[name]["messages"]]
    got = [
        (m.payload, dict(m.properties), m.partition_key, m.ordering_key, m.event_time_ms)
        for _, m in received(name)
    ]
    if name == "key-based-batch":  # batches by key are not in the order of sending
        given.sort(key=lambda message: message[0])
        got.sort(key=lambda message: message[0])
    assert got == given


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_broker_sees_what_the_client_sees(name: str) -> None:
    for send, data in sends(name):
        view = parse_entry(data)
        entry = read_entry(data)
        assert view.data is data
        assert view.payload_bytes == len(entry.payload)
        assert view.num_messages == send.num_messages == entry.num_messages
        assert view.sequence_id == send.sequence_id == entry.sequence_id
        assert view.is_batch == entry.is_batch == name.endswith("batch")
        assert view.chunk == entry.chunk
        assert (view.chunk is not None) == send.is_chunk
        codec = name.split("-", maxsplit=1)[0]
        assert view.compression == CODECS.get(codec, Compression.SNAPPY)
        assert view.publish_time_ms == entry.publish_time_ms
        assert view.deliver_at_ms == (1_900_000_000_000 if name == "delayed" else None)


def test_explicit_sequence_ids_and_keys_of_batches() -> None:
    (_, first), (_, second) = sends("zstd-batch")
    assert [m.sequence_id for m in decode_messages(read_entry(first))] == [0, 1, 2]
    assert [m.sequence_id for m in decode_messages(read_entry(second))] == [3, 4, 77]
    # Apache's engine gives a batch of mixed keys the key of its first message.
    assert parse_entry(second).partition_key == "key-1"
    assert [parse_entry(data).partition_key for _, data in sends("key-based-batch")] == [
        "key-0",
        "key-1",
    ]


@pytest.mark.parametrize("name", ["none-single", "delayed"])
def test_a_single_message_is_written_byte_for_byte_as_apache_does(name: str) -> None:
    for send, data in sends(name):
        entry = read_entry(data)
        (message,) = decode_messages(entry)
        parts = encode_message(outgoing(message, entry), header_of(entry))
        assert b"".join(parts) == data
        header = send_header(
            producer_id=send.producer_id, sequence_id=send.sequence_id, entry_size=len(data)
        )
        assert header + data in frames(name)


def test_a_batch_is_laid_out_byte_for_byte_as_apache_does() -> None:
    for _, data in sends("none-batch"):
        entry = read_entry(data)
        messages = [outgoing(message, entry) for message in decode_messages(entry)]
        assert encode_batch(messages, header_of(entry))[1] == entry.payload


def test_chunks_are_written_byte_for_byte_as_apache_does() -> None:
    recorded = [data for _, data in sends("none-chunks")]
    ((entry, message),) = received("none-chunks")
    assert entry.chunk is not None
    chunk_bytes_max = len(read_entry(recorded[0]).payload)
    chunks = encode_chunks(
        outgoing(message, entry),
        header_of(entry),
        uuid=entry.chunk.uuid,
        chunk_bytes_max=chunk_bytes_max,
    )
    assert [b"".join(parts) for parts in chunks] == recorded


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_metadata_of_compressed_messages_is_that_of_apache(codec: str) -> None:
    for _, data in sends(f"{codec}-single"):
        entry = read_entry(data)
        (message,) = decode_messages(entry)
        head, payload = encode_message(outgoing(message, entry), header_of(entry))
        if not message.payload:  # Apache's client compresses even nothing: see encode_message
            assert read_entry(head + payload).compression is Compression.NONE
            continue
        # The compressed bytes of two library versions may differ; the decompressed bytes may not.
        assert without_checksum(head) == without_checksum(data)[: len(head) - 6]
        again = read_entry(head + payload)
        assert decode_messages(again) == [message]


@pytest.mark.parametrize("piece_bytes", [1, 3, 7, 64, 4096])
def test_the_decoder_cuts_a_recorded_stream_fed_in_pieces(piece_bytes: int) -> None:
    stream = b"".join(frames("zlib-single") + frames("lz4-batch") + frames("zstd-chunks"))
    decoder = FrameDecoder()
    found = []
    for at in range(0, len(stream), piece_bytes):
        found += decoder.feed(stream[at : at + piece_bytes])
    assert found == split_frames(stream)
    assert decoder.pending_bytes == 0
