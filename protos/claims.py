"""Checks the claims of an arriving SEND: the numbers that it states about itself.

The broker computes permits, backlogs and the index of every later message from the metadata of an
entry, and a consumer reserves memory by it. So the broker refuses numbers that cannot be true. It
also refuses markers, which only brokers write, and messages of transactions, which it does not
support. Otherwise it would deliver both as ordinary messages.

Encryption adds bytes to a payload and removes none, so these bounds hold for encrypted entries too,
except one: an encrypted chunk may be larger than the stated size of its message.
"""

from typing import Final

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import Compression
from magnetar.protos.entry import BATCH_MESSAGES_MAX, EntryView, parse_sent_entry
from magnetar.protos.errors import MalformedEntry, SendNotSupported

EXPANSION_MAX: Final = {
    Compression.NONE: 1,
    Compression.LZ4: 256,
    Compression.ZLIB: 1032,
    Compression.SNAPPY: 32,
    Compression.ZSTD: 1 << 16,
}
"""An upper bound of the bytes that a codec can decompress from one compressed byte.

LZ4: a length byte stands for 255 bytes. ZLIB: two bits stand for 258 bytes. SNAPPY: a copy takes
three bytes and stands for 64. ZSTD: a block takes at least three bytes and stands for 128 KiB.
The values of LZ4, SNAPPY and ZSTD are rounded up to powers of two.
"""

EXPANSION_SPARE_BYTES: Final = 64
"""Added to the compressed size before the bound is computed: a margin for small payloads."""

UUID_CHARACTERS_MAX: Final = 2_048
"""The longest uuid of a chunked message. Apache's clients make the uuid from the producer's name
and a number."""

_INT64: Final = 1 << 63


def parse_sent(send: pb.CommandSend, entry: bytes) -> EntryView:
    """Read an entry that arrives with this SEND, without computing its checksum.

    Raises MalformedEntry, SendNotSupported.
    """
    view = parse_sent_entry(entry, _check_metadata)
    has = send.HasField
    if has("txnid_least_bits") or has("txnid_most_bits"):
        raise SendNotSupported("a transaction id", "transactions are not supported")
    if send.marker:
        raise SendNotSupported("a marker", "only brokers write markers")
    if has("message_id"):
        raise SendNotSupported("a message id", "shadow topics are not supported")
    _check_sequence("SEND", send.sequence_id, send.highest_sequence_id)
    return view


def _check_metadata(metadata: pb.MessageMetadata, view: EntryView) -> None:
    has = metadata.HasField
    if has("txnid_least_bits") or has("txnid_most_bits"):
        raise SendNotSupported("a transaction id", "transactions are not supported")
    if has("marker_type"):
        raise SendNotSupported("a marker", "only brokers write markers")
    _check_sequence("metadata", metadata.sequence_id, metadata.highest_sequence_id)
    for name in ("publish_time", "event_time"):
        if getattr(metadata, name) >= _INT64:
            raise MalformedEntry(f"the {name} {getattr(metadata, name)} is not below 2^63")
    if view.is_batch and view.num_messages > BATCH_MESSAGES_MAX:
        raise MalformedEntry(
            f"a batch of {view.num_messages} messages; the limit is {BATCH_MESSAGES_MAX}"
        )
    payload_bytes = view.payload_bytes
    if view.chunk is not None:
        payload_bytes = _check_chunk(metadata, view)
    if view.compression is Compression.NONE:
        return  # uncompressed_size is then not used
    most = (payload_bytes + EXPANSION_SPARE_BYTES) * EXPANSION_MAX[view.compression]
    if view.uncompressed_size > most:
        raise MalformedEntry(
            f"{payload_bytes} bytes compressed with {view.compression.name} cannot expand to"
            f" {view.uncompressed_size} bytes; the most is {most}"
        )


def _check_sequence(what: str, first: int, highest: int) -> None:
    """Check the sequence ids. `highest`: 0 if the producer does not send it. Raises
    MalformedEntry."""
    if first >= _INT64:
        raise MalformedEntry(f"{what}: the sequence id {first} is not below 2^63")
    if highest >= _INT64:
        raise MalformedEntry(f"{what}: the highest sequence id {highest} is not below 2^63")
    if 0 < highest < first:
        raise MalformedEntry(f"{what}: highest sequence id {highest} is below sequence id {first}")


def _check_chunk(metadata: pb.MessageMetadata, view: EntryView) -> int:
    """Check a chunk. Returns the compressed size of all chunks together. Raises MalformedEntry."""
    chunk = view.chunk
    assert chunk is not None
    if not 0 < len(chunk.uuid) <= UUID_CHARACTERS_MAX:
        raise MalformedEntry(
            f"chunk {chunk.index} of {chunk.count} has a uuid of {len(chunk.uuid)} characters,"
            f" instead of 1 to {UUID_CHARACTERS_MAX}"
        )
    if chunk.total_bytes < chunk.count:
        raise MalformedEntry(f"{chunk.count} chunks cannot make {chunk.total_bytes} bytes")
    if chunk.total_bytes < view.payload_bytes and not metadata.encryption_keys:
        raise MalformedEntry(
            f"a chunk of {view.payload_bytes} bytes is larger than its message of"
            f" {chunk.total_bytes}"
        )
    return chunk.total_bytes
