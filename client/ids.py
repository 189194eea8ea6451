"""Message ids and ack sets (bit sets of unacknowledged messages) in their wire form."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from magnetar.client.message import MessageId
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Sequence

Key = tuple[int, int]
"""The ledger's id and the entry's id."""

_U64 = 0xFFFFFFFFFFFFFFFF
_SIGN = 2**63


def key_of(data: pb.MessageIdData) -> Key:
    """Return the ids of ledger and entry as signed numbers. They are unsigned on the wire."""
    ledger_id, entry_id = data.ledgerId, data.entryId
    if ledger_id < _SIGN and entry_id < _SIGN:  # every stored entry has such ids
        return ledger_id, entry_id
    return _signed(ledger_id), _signed(entry_id)


def partition_of(topic: str) -> int:
    """Return the number of a partition, or -1 if the topic is not a partition."""
    partition = TopicName.parse(topic).partition
    return -1 if partition is None else partition


def message_id_of(data: pb.MessageIdData, topic: str = "") -> MessageId:
    return MessageId(
        data.partition,
        _signed(data.ledgerId),
        _signed(data.entryId),
        data.batch_index,
        data.batch_size,
        topic,
    )


def id_data(key: Key, unacked: int = 0) -> pb.MessageIdData:
    """Return the wire form of an entry's id.

    `unacked`: a bitmap of the entry's unacknowledged messages. 0: the id means the whole entry.
    """
    data = pb.MessageIdData()
    write_id(data, key, unacked)
    return data


def write_id(data: pb.MessageIdData, key: Key, unacked: int = 0) -> None:
    """Write the wire form of an entry's id into the empty protobuf message `data`.

    Writing into a field of a command takes half the time of copying the result of `id_data`.
    """
    data.ledgerId = key[0] & _U64
    data.entryId = key[1] & _U64
    if unacked:
        data.ack_set.extend(words_of(unacked))


def bits_of(ack_set: Sequence[int]) -> int:
    """Convert signed 64-bit words, the lowest first, to one number."""
    return int.from_bytes(struct.pack(f"<{len(ack_set)}q", *ack_set), "little")


def words_of(bits: int) -> tuple[int, ...]:
    """Convert a number to signed 64-bit words, the inverse of `bits_of`."""
    count = -(-bits.bit_length() // 64)
    return struct.unpack(f"<{count}q", bits.to_bytes(count * 8, "little"))


def _signed(number: int) -> int:
    return number - 2**64 if number >= _SIGN else number
