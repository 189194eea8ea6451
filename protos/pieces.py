"""Divides long lists into pieces: an ACK or a request for redelivery with very many message ids.

A command of 5 MB holds 600,000 message ids. Parsing it and carrying it out at once would stop the
loop for seconds. So this module divides the list without parsing it. Each piece is a command of its
own, with at most PIECE_IDS ids and with all other fields of the long command. The caller gives the
loop a turn between two pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import read_varint
from magnetar.protos.errors import MalformedCommand
from magnetar.protos.framing import Command

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_BYTES: Final = 16 << 10
"""A shorter command is carried out at once: 1,500 ids take 5 ms."""

PIECE_IDS: Final = 1_000
"""The most message ids in a piece. They take about 3 ms: parsing, recording, and telling the
dispatcher."""

PIECE_BYTES: Final = 64 << 10
"""A piece also ends at this size: ids may carry the acknowledgement bits of batches."""

WALK_IDS: Final = 4_000
"""The most ids that `pieces` skips over between two turns of the loop: 1 us each."""


class LongList(NamedTuple):
    """A command with a long list: its type, and its encoded body."""

    kind: pb.BaseCommand.Type.ValueType
    body: memoryview


_BODIES: Final[dict[int, tuple[Any, int]]] = {  # class, and the tag of the repeated ids
    pb.BaseCommand.ACK: (pb.CommandAck, 3 << 3 | 2),
    pb.BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES: (
        pb.CommandRedeliverUnacknowledgedMessages,
        2 << 3 | 2,
    ),
}


def long_list(frame: memoryview) -> LongList | None:
    """Return the command in `frame` if it has a long list, to be read with `pieces`. `frame` begins
    after the total, as for `parse_command`. None: the list is short, the command has another type,
    or its form is one that no client writes."""
    if len(frame) < LONG_BYTES or int.from_bytes(frame[:4], "big") != len(frame) - 4:
        return None
    kind = frame[5]
    if frame[4] != 0x08 or kind not in _BODIES:
        return None
    try:
        tag, at = read_varint(frame, 6)
        size, at = read_varint(frame, at)
    except (IndexError, ValueError):
        return None
    if tag != kind << 3 | 2 or at + size != len(frame):
        return None
    return LongList(pb.BaseCommand.Type.ValueType(kind), frame[at:])


def pieces(command: LongList) -> Iterator[Command | None]:
    """Yield the commands to carry out, in order. None: give the loop a turn. Raises
    MalformedCommand, before the first command or at a later one."""
    name = pb.BaseCommand.Type.Name(command.kind)
    parse, ids_tag = _BODIES[command.kind]
    body = bytes(command.body)
    others = bytearray()
    ranges: list[tuple[int, int]] = []
    at = first = count = walked = 0
    size = len(body)
    try:
        while at < size:
            begin = at
            if body[at] == ids_tag:
                length = body[at + 1]
                if length < 0x80:
                    at += 2 + length
                else:
                    length, at = read_varint(body, at + 1)
                    at += length
                count += 1
                walked += 1
                if count >= PIECE_IDS or at - first >= PIECE_BYTES:
                    ranges.append((first, at))
                    first, count = at, 0
                if walked % WALK_IDS == 0:
                    yield None
                continue
            if count:
                ranges.append((first, begin))
            at = _skip(body, at)
            others += body[begin:at]
            first, count = at, 0
            walked += 1
            if walked % WALK_IDS == 0:
                yield None
    except (IndexError, ValueError):
        raise MalformedCommand(name, "the list is truncated") from None
    if at != size:
        raise MalformedCommand(name, "the list is truncated")
    if count:
        ranges.append((first, size))
    if len(others) > LONG_BYTES:
        raise MalformedCommand(name, f"{len(others)} bytes beside its message ids")
    for first, end in ranges or [(0, 0)]:
        try:
            message = parse.FromString(bytes(others) + body[first:end])
        except DecodeError as error:
            raise MalformedCommand(name, f"it cannot be parsed: {error}") from None
        if not message.IsInitialized():
            missing = ", ".join(message.FindInitializationErrors())
            raise MalformedCommand(name, f"missing {missing}")
        yield Command(command.kind, message, None)


def _skip(data: bytes, at: int) -> int:
    """Return the end of the field at `at`. Raises IndexError, ValueError."""
    tag, at = read_varint(data, at)
    match tag & 7:
        case 0:
            return read_varint(data, at)[1]
        case 1:
            return at + 8
        case 2:
            size, at = read_varint(data, at)
            return at + size
        case 5:
            return at + 4
    raise IndexError
