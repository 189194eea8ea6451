"""Short functions that encode entries as producers send them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.protos.entry import checksums_of, parse_entry
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
