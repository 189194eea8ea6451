"""The broker refuses a SEND whose claims cannot be true, and accepts those of honest producers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.claims import EXPANSION_MAX, parse_sent
from magnetar.protos.compression import Compression, compress
from magnetar.protos.entry import BATCH_MESSAGES_MAX, parse_entry
from magnetar.protos.errors import EntryError, MalformedEntry, SendNotSupported
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch, encode_chunks

GOLDEN = Path(__file__).parents[2] / "golden" / "entry"
CHUNK = {"uuid": "u", "num_chunks_from_msg": 3, "chunk_id": 1, "total_chunk_msg_size": 100}


def entry(payload: bytes = b"payload", **fields: Any) -> bytes:
    metadata = pb.MessageMetadata(
        **({"producer_name": "p", "sequence_id": 5, "publish_time": 1} | fields)
    )
    encoded = metadata.SerializeToString()
    return len(encoded).to_bytes(4) + encoded + payload


def send(**fields: Any) -> pb.CommandSend:
    return pb.CommandSend(**({"producer_id": 1, "sequence_id": 5} | fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_messages_in_batch": 0}, "0 messages"),
        ({"num_messages_in_batch": -1}, "-1 messages"),
        ({"num_messages_in_batch": 2}, "2 messages cannot be in a batch of 7 bytes"),
        ({"num_messages_in_batch": 715_827_882, "uncompressed_size": 2**32 - 1}, "of 7 bytes"),
        (
            {
                "num_messages_in_batch": 715_827_882,
                "uncompressed_size": 2**32 - 1,
                "compression": pb.ZSTD,
            },
            f"the limit is {BATCH_MESSAGES_MAX}",
        ),
        ({"uncompressed_size": 2**32 - 1, "compression": pb.ZSTD}, "cannot expand to 4294967295"),
        ({"uncompressed_size": 20_000, "compression": pb.LZ4}, "cannot expand to 20000 bytes"),
        ({"uncompressed_size": 80_000, "compression": pb.ZLIB}, "cannot expand to 80000 bytes"),
        ({"uncompressed_size": 20_000, "compression": pb.SNAPPY}, "cannot expand to 20000 bytes"),
        ({"highest_sequence_id": 4}, "metadata: highest sequence id 4 is below sequence id 5"),
        ({"highest_sequence_id": 2**63}, "not below 2^63"),
        ({"sequence_id": 2**64 - 1}, "not below 2^63"),
        ({"publish_time": 2**64 - 1}, "the publish_time 18446744073709551615"),
        ({"event_time": 2**63}, "the event_time 9223372036854775808"),
        (CHUNK | {"num_chunks_from_msg": -3}, "chunk 1 of -3"),
        (CHUNK | {"chunk_id": 3}, "chunk 3 of 3"),
        (CHUNK | {"chunk_id": -1}, "chunk -1 of 3"),
        (CHUNK | {"total_chunk_msg_size": -5}, "cannot make -5 bytes"),
        (CHUNK | {"total_chunk_msg_size": 6}, "larger than its message of 6"),
        (CHUNK | {"num_chunks_from_msg": 2**31 - 1}, "2147483647 chunks cannot make 100 bytes"),
        (CHUNK | {"uuid": ""}, "uuid of 0 characters"),
        (CHUNK | {"uuid": "u" * 2_049}, "uuid of 2049 characters"),
        (CHUNK | {"num_messages_in_batch": 1}, "chunk 1 of 3 is invalid"),
        (CHUNK | {"uncompressed_size": 2**31, "compression": pb.LZ4}, "cannot expand to"),
    ],
)
def test_impossible_metadata_is_refused_with_its_number(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(MalformedEntry) as caught:
        parse_sent(send(), entry(**fields))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"highest_sequence_id": 4}, "SEND: highest sequence id 4 is below sequence id 5"),
        ({"sequence_id": 2**64 - 1}, "SEND: the sequence id 18446744073709551615"),
        ({"highest_sequence_id": 2**64 - 1}, "SEND: the highest sequence id"),
    ],
)
def test_impossible_send_is_refused_with_its_number(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(MalformedEntry) as caught:
        parse_sent(send(**fields), entry(partition_key="not plain"))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("command", "metadata", "what"),
    [
        ({"txnid_least_bits": 0}, {}, "a transaction id"),
        ({"txnid_most_bits": 1}, {}, "a transaction id"),
        ({}, {"txnid_least_bits": 7}, "a transaction id"),
        ({}, {"txnid_most_bits": 0}, "a transaction id"),
        ({"marker": True}, {}, "a marker"),
        ({}, {"marker_type": 20}, "a marker"),
        ({"message_id": pb.MessageIdData(ledgerId=1, entryId=1)}, {}, "a message id"),
    ],
)
def test_unsupported_parts_are_refused_by_name(
    command: dict[str, Any], metadata: dict[str, Any], what: str
) -> None:
    with pytest.raises(SendNotSupported) as caught:
        parse_sent(send(**command), entry(**metadata))
    assert caught.value.what == what


@pytest.mark.parametrize("codec", Compression)
def test_bounds_admit_the_best_compression_of_each_codec(codec: Compression) -> None:
    header = EntryHeader("p", 1, codec)
    for size in (0, 1, 100, 10_000, 1 << 20, 16 << 20):
        plain = bytes(size)
        packed = compress(codec, plain)
        if codec is not Compression.NONE:
            assert size <= (len(packed) + 64) * EXPANSION_MAX[codec]
        fields = {"uncompressed_size": size, "compression": int(codec)}
        assert parse_sent(send(), entry(packed, **fields)).uncompressed_size == size
    messages = [OutgoingMessage(b"", n) for n in range(100_000)]
    batch = b"".join(encode_batch(messages, header))
    assert parse_sent(send(), batch).num_messages == 100_000
    chunks = encode_chunks(
        OutgoingMessage(bytes(1_000_000), 5), header, uuid="u", chunk_bytes_max=40
    )
    for chunk in list(chunks)[:3]:
        parse_sent(send(), b"".join(chunk))


def test_chunk_of_an_encrypted_message_may_be_larger_than_its_part() -> None:
    keys = [pb.EncryptionKeys(key="k", value=b"v")]
    parse_sent(send(), entry(bytes(116), encryption_keys=keys, **CHUNK))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_everything_that_apache_clients_send_is_accepted(path: Path) -> None:
    for frame in json.loads(path.read_text())["frames"]:
        command = framing.parse_command(memoryview(bytes.fromhex(frame))[4:])
        assert isinstance(command.body, pb.CommandSend)
        assert command.entry is not None
        data = bytes(command.entry)
        assert parse_sent(command.body, data) == parse_entry(data)


def test_damaged_metadata_ends_in_an_entry_error() -> None:
    whole = entry(partition_key="k", **CHUNK)
    for place in range(len(whole)):
        for byte in (0, 1, 0x7F, 0x80, 0xFF):
            damaged = whole[:place] + bytes([byte]) + whole[place + 1 :]
            with contextlib.suppress(EntryError):
                parse_sent(send(), damaged)
