"""Runs of plain SENDs, read by hand: what a producer sends all day without batching.

A SEND is plain when its command has a producer and a sequence id and nothing else, and its entry is
one message with a checksum whose metadata says only who sent it, its number and when. Consecutive
ones of a producer differ in little: each is compared with what the one before leads to expect, in a
third of the time that parsing takes. Whatever is unusual or wrong ends the run before it, and is
for `parse_command` and `parse_entry`, which know everything and say what is wrong.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import google_crc32c

from magnetar.protos.entry import (
    CHECKED_HEAD_BYTES,
    MESSAGE_BYTES_MAX,
    PLAIN_METADATA_BYTES_MAX,
    plain_name,
    plain_time,
)


@dataclass(slots=True)
class SendRun:
    """SENDs of one producer, in order; `parse_entry` would accept every entry."""

    producer_id: int
    sequence_ids: list[int]
    entries: list[bytes]  # memory of their own, one message each
    end: int  # where the frame after the last one begins


def read_plain_sends(buffer: memoryview, at: int) -> SendRun | None:
    """The longest run of plain SENDs whose first frame begins, with its total size, at `at`. None:
    what is there is not a plain SEND."""
    size = len(buffer)
    ids = rest = name_field = time_field = b""  # what the next one is expected to have
    high = carry = 0  # the number's bits above `rest`'s first byte, and whether that has followers
    sequence_ids: list[int] = []
    entries: list[bytes] = []
    while size - at >= _HEAD.size:  # hot: about 2 us an entry, a third of it for the checksum
        total, command_size, send, body_size, own_ids = _HEAD.unpack_from(buffer, at)
        number_at, start, end = at + _HEAD.size, at + 8 + command_size, at + 4 + total
        if send != _SEND or command_size != body_size + 4 or not number_at < start < end <= size:
            break
        if own_ids != ids:
            if sequence_ids or not _are_ids(own_ids):
                break
            ids = own_ids
        number = bytes(buffer[number_at:start])
        if number[1:] != rest or not sequence_ids:
            found = _high_bits(number)
            if found is None:
                break
            rest, high, carry = number[1:], found, 0x80 if len(number) > 1 else 0
        entry = bytes(buffer[start:end])
        if number[0] & 0x80 != carry or len(entry) < CHECKED_HEAD_BYTES:
            break
        magic, checksum, metadata_size = _ENTRY_HEAD.unpack_from(entry)
        payload_at = CHECKED_HEAD_BYTES + metadata_size
        if magic != _CHECKED or not 0 <= len(entry) - payload_at <= MESSAGE_BYTES_MAX:
            break
        metadata = entry[CHECKED_HEAD_BYTES:payload_at]
        if metadata != name_field + number + time_field or not sequence_ids:
            fields = _plain_fields(metadata, number)
            if fields is None:
                break
            name_field, time_field = fields
        if _crc32c(entry[_CHECKSUM_END:]) != checksum:
            break
        sequence_ids.append(high | number[0] & 0x7F)
        entries.append(entry)
        at = end
    return SendRun(ids[1], sequence_ids, entries, at) if sequence_ids else None


# Mechanics

_HEAD: Final = struct.Struct(">II3sB3s")  # total, command, its type and tag, body, producer and tag
_ENTRY_HEAD: Final = struct.Struct(">HII")
_SEND: Final = b"\x08\x06\x32"
_CHECKED: Final = 0x0E01
_CHECKSUM_END: Final = 6
_crc32c: Callable[[bytes], int] = google_crc32c.value


def _are_ids(ids: bytes) -> bool:
    """Whether these are a producer's id of one byte and the tag of a sequence id."""
    return ids[0] == 0x08 and ids[1] < 0x80 and ids[2] == 0x10


def _high_bits(number: bytes) -> int | None:
    """What a varint says but for its lowest seven bits. None: it is not one, or not alone."""
    if not number or len(number) > 9:  # below 2^63
        return None
    value = 0
    for place, byte in enumerate(number[1:], 1):
        if byte < 0x80 and place != len(number) - 1:
            return None
        value |= (byte & 0x7F) << 7 * place
    return value if number[-1] < 0x80 else None


def _plain_fields(metadata: bytes, number: bytes) -> tuple[bytes, bytes] | None:
    """The field of the producer's name with the tag after it, and that of the time of publishing,
    if there is only the sequence id `number` between them."""
    if not 2 <= len(metadata) <= PLAIN_METADATA_BYTES_MAX:
        return None
    name_end = 2 + metadata[1]
    time_at = name_end + 1 + len(number)
    if metadata[name_end:time_at] != b"\x10" + number:
        return None
    name, time = metadata[:name_end], metadata[time_at:]
    if plain_name(name) is None or plain_time(time) is None:
        return None
    return name + b"\x10", time
