"""The messages of a delivered entry, and the permits that the broker counts for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.client.errors import ChecksumError, InvalidMessage, PulsarException
from magnetar.client.ids import bits_of
from magnetar.client.message import Delivery, Message
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import parse_stored_entry, strip_broker_metadata
from magnetar.protos.errors import (
    ChecksumMismatch,
    DecompressionError,
    EntryError,
    UncompressedSizeCorruption,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.client.ids import Key


def messages_of(delivery: Delivery, wanted: int) -> list[Message]:
    """Return the messages of a batch whose bits in `wanted` are set."""
    size = delivery.batch_size
    if wanted == (1 << size) - 1:
        return [Message(None, None, delivery, index) for index in range(size)]
    return [Message(None, None, delivery, index) for index in range(size) if wanted >> index & 1]


def permits_of(entry: memoryview, ack_set: Sequence[int]) -> int:
    """Return how many permits the broker counts for an entry that the client cannot read.

    The broker counts by the metadata alone. If the client counted fewer, it would grant too few
    permits, and the broker would stop sending.
    """
    try:
        size = parse_stored_entry(strip_broker_metadata(entry)[1]).num_messages
    except EntryError:
        return 1
    return (bits_of(ack_set) & ((1 << size) - 1)).bit_count() if ack_set else size


def corrupt_message(key: Key, error: EntryError, topic: str) -> PulsarException:
    """Return the error that the user gets for a corrupt entry."""
    kind = ChecksumError if isinstance(error, ChecksumMismatch) else InvalidMessage
    return kind(f"message ({key[0]},{key[1]}) cannot be read: {error}", topic=topic)


def incomplete_message(key: Key, reason: str, topic: str) -> PulsarException:
    """Return the error that the user gets for a message that lacks some of its chunks. `key`: the
    entry of a chunk that arrived."""
    return InvalidMessage(
        f"the chunked message with chunk ({key[0]},{key[1]}) was given up: {reason}", topic=topic
    )


def validation_error(error: EntryError) -> pb.CommandAck.ValidationError.ValueType:
    """Return the wire value for an error in an entry."""
    match error:
        case ChecksumMismatch():
            return pb.CommandAck.ChecksumMismatch
        case UncompressedSizeCorruption():
            return pb.CommandAck.UncompressedSizeCorruption
        case DecompressionError():
            return pb.CommandAck.DecompressionError
        case _:
            return pb.CommandAck.BatchDeSerializeError
