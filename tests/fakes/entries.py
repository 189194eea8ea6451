"""Short functions that encode entries as producers send them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import google_crc32c

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import BATCHED_MESSAGE_BYTES_MIN, checksums_of, parse_entry
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    decode_messages,
    encode_batch,
    encode_message,
    read_entry,
)
from magnetar.protos.sends import SendRun

if TYPE_CHECKING:
    from magnetar.protos.entry import EntryView


def entry_of(*texts: str, publish_time_ms: int = 1_700_000_000_000) -> EntryView:
    """One message for one text, a batch for several."""
    header = EntryHeader("producer", publish_time_ms)
    messages = [OutgoingMessage(text.encode(), sequence_id=n) for n, text in enumerate(texts)]
    parts = (
        encode_message(messages[0], header) if len(texts) == 1 else encode_batch(messages, header)
    )
    return parse_entry(b"".join(parts))


def claiming_entry(messages: int) -> EntryView:
    """A batch of a few bytes that claims this number of messages. The broker cannot tell: it does
    not decompress batches."""
    metadata = pb.MessageMetadata(
        producer_name="producer",
        sequence_id=0,
        publish_time=1_700_000_000_000,
        num_messages_in_batch=messages,
        compression=pb.ZSTD,
        uncompressed_size=BATCHED_MESSAGE_BYTES_MIN * messages,
    ).SerializeToString()
    body = struct.pack(">I", len(metadata)) + metadata + b"claimed"
    return parse_entry(b"\x0e\x01" + struct.pack(">I", google_crc32c.value(body)) + body)


def sends_of(*views: EntryView, first: int = 0, producer_id: int = 1) -> SendRun:
    """The entries of a producer, single messages or batches, with consecutive sequence ids."""
    entries = [bytes(view.data) for view in views]
    return SendRun(
        producer_id,
        sequence_ids=list(range(first, first + len(views))),
        highest_sequence_ids=[0] * len(views),
        entries=entries,
        checksums=checksums_of(entries),
        views=dict(enumerate(views)),
    )


def texts_of(data: bytes | memoryview) -> list[str]:
    """Return the texts that `entry_of` encoded."""
    return [message.payload.decode() for message in decode_messages(read_entry(data))]
