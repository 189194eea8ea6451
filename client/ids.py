"""Ids and sets of acknowledged messages, as they are on the wire."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from magnetar.client.message import MessageId
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

Key = tuple[int, int]
"""Ledger and entry."""

_U64 = 0xFFFFFFFFFFFFFFFF


def key_of(data: pb.MessageIdData) -> Key:
    """Ledger and entry, signed as they are meant."""
    return _signed(data.ledgerId), _signed(data.entryId)


def message_id_of(data: pb.MessageIdData) -> MessageId:
    return MessageId(
        data.partition,
        _signed(data.ledgerId),
        _signed(data.entryId),
        data.batch_index,
        data.batch_size,
    )


def id_data(key: Key, unacked: int = 0) -> pb.MessageIdData:
    """An entry; with the bits of its messages that are not acknowledged, unless all are."""
    data = pb.MessageIdData(ledgerId=key[0] & _U64, entryId=key[1] & _U64)
    if unacked:
        data.ack_set.extend(words_of(unacked))
    return data


def bits_of(ack_set: Sequence[int]) -> int:
    """Signed 64-bit words, the lowest first, as one number."""
    return int.from_bytes(struct.pack(f"<{len(ack_set)}q", *ack_set), "little")


def words_of(bits: int) -> tuple[int, ...]:
    """The inverse; as many words as the highest bit needs."""
    count = -(-bits.bit_length() // 64)
    return struct.unpack(f"<{count}q", bits.to_bytes(count * 8, "little"))


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
