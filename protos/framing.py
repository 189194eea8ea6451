"""Pulsar's framing: encodes commands as bytes, and divides a stream of bytes into commands.

    simple command    u32 total | u32 size | BaseCommand                total = 4 + size
    payload command   u32 total | u32 size | BaseCommand | entry        total = 4 + size + entry

All sizes are big-endian; the total does not count itself. Only SEND and MESSAGE carry an entry
(entry.py). In this module, a *frame* is what follows the total, and a *whole frame* includes the
total. Over TCP, whole frames follow each other. Over gRPC, one message of the session's stream is a
concatenation of whole frames.

There are two kinds of error. After a FrameError, the start of the next frame is unknown, so the
connection must end. After a CommandError, the next frame can be read.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import ENTRY_BYTES_MAX, MESSAGE_BYTES_MAX, varint
from magnetar.protos.errors import (
    CommandError,
    FrameTooLarge,
    MalformedCommand,
    MalformedFrame,
    UnknownCommand,
)

# The size of the largest command next to an entry. The acknowledgement bits of a batch of a million
# messages take 16,384 words of at most 11 bytes each. A command without an entry, such as a list of
# topics, may also use the bytes reserved for the entry.
COMMAND_BYTES_MAX: Final = 256 * 1024
# The size of the largest whole frame, including the 8 bytes of its two sizes.
COMMAND_FRAME_BYTES_MAX: Final = 8 + COMMAND_BYTES_MAX + ENTRY_BYTES_MAX


def frame_bytes_max(message_bytes_max: int) -> int:
    """Return the limit for a whole frame if a payload has at most `message_bytes_max` bytes. All
    other parts of the frame have the same limits as in COMMAND_FRAME_BYTES_MAX."""
    return COMMAND_FRAME_BYTES_MAX - MESSAGE_BYTES_MAX + message_bytes_max


@dataclass(slots=True)
class Command:
    """One checked command: its type is known, its body is complete, all its text is UTF-8.

    No code changes a Command after its creation. The class is not frozen, for speed.
    """

    type: pb.BaseCommand.Type.ValueType
    body: Message  # the sub-message of that type; match it by its class
    entry: memoryview | None  # None: the command is neither SEND nor MESSAGE


def parse_command(frame: memoryview) -> Command:
    """Parse the command in a frame. The command's entry is a view of `frame`.

    Raises MalformedCommand, or UnknownCommand for a type of a later version.
    """
    kind, body, end = _hot_body(frame) or _body(frame)
    shape = _SHAPES[kind]
    if shape.text_fields and (name := _invalid_text(body, shape.text_fields)) is not None:
        raise MalformedCommand(_name(kind), f"{name} is not UTF-8", _request_id(body))
    if not body.IsInitialized():
        missing = ", ".join(cast("Any", body).FindInitializationErrors())
        raise MalformedCommand(_name(kind), f"missing {missing}", _request_id(body))
    if shape.carries_entry == (end == len(frame)):
        reason = "the entry is missing" if shape.carries_entry else "an entry is not allowed"
        raise MalformedCommand(_name(kind), reason, _request_id(body))
    return Command(kind, body, frame[end:] if shape.carries_entry else None)


def encode_command(body: Message) -> bytes:
    """Encode the whole frame of a simple command, with sizes. The class of `body` gives the type.

    Raises FrameTooLarge.
    """
    command = _encode_base(body)
    return _sizes(len(command), 0) + command


def encode_payload_command(
    body: pb.CommandSend | pb.CommandMessage, parts: Sequence[bytes | memoryview]
) -> list[bytes | memoryview]:
    """Encode the whole frame of a command with an entry. The entry's parts are not copied.

    Raises FrameTooLarge.
    """
    command = _encode_base(body)
    return [_sizes(len(command), sum(map(len, parts))) + command, *parts]


class FrameDecoder:
    """Divides a stream of bytes, fed in pieces of any size, into frames.

    The decoder keeps at most one incomplete frame: fewer than COMMAND_FRAME_BYTES_MAX bytes. After
    an error, the caller must not call `feed` again.
    """

    def __init__(self) -> None:
        self._pending = bytearray()  # the beginning of a frame

    @property
    def pending_bytes(self) -> int:
        """The received bytes of an incomplete frame; 0 if the stream ends after a whole frame."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[memoryview]:
        """Return the frames that `data` completes, as views of `data` or of an internal buffer.

        Raises FrameTooLarge (as soon as it has read a frame's total) or MalformedFrame. The frames
        before the bad frame in `data` are then lost: the connection ends without an answer to them.
        """
        if not self._pending:
            view = memoryview(data)
            frames, end = _split(view)
            self._pending = bytearray(view[end:])
            return frames
        self._pending += data
        view = memoryview(self._pending)
        frames, end = _split(view)
        if frames:  # the frames refer to the buffer, so the rest gets a new one
            self._pending = bytearray(view[end:])
        return frames


def split_frames(buffer: bytes | memoryview) -> list[memoryview]:
    """Divide a concatenation of whole frames into views of `buffer`.

    Raises FrameTooLarge, and MalformedFrame also if the last frame is not whole.
    """
    view = memoryview(buffer)
    frames, end = _split(view)
    if end != len(view):
        raise MalformedFrame(f"the last frame is truncated after {len(view) - end} bytes")
    return frames


def first_frame(
    buffer: memoryview, at: int, *, bytes_max: int = COMMAND_FRAME_BYTES_MAX
) -> tuple[memoryview, int]:
    """Return the frame whose total is at offset `at`, as a view, and the offset of the next frame.

    Raises FrameTooLarge, and MalformedFrame also if the frame is not whole.
    """
    if len(buffer) - at >= 4:
        end = at + 4 + _total(buffer, at, bytes_max)
        if end <= len(buffer):
            return buffer[at + 4 : end], end
    raise MalformedFrame(f"the last frame is truncated after {len(buffer) - at} bytes")


def first_delivery(
    buffer: memoryview, at: int, *, bytes_max: int = COMMAND_FRAME_BYTES_MAX
) -> tuple[pb.CommandMessage, memoryview, int] | None:
    """Return the MESSAGE whose total is at offset `at`, its entry as a view, and the offset of the
    next frame. Does the work of `first_frame` and `parse_command` in half the time.

    None: the command is not a MESSAGE, is malformed, has a body of more than 127 bytes, or does not
    have the form that brokers write.
    """
    if len(buffer) - at < _DELIVERY_HEAD.size:
        return None
    total, size, kind, body_size = _DELIVERY_HEAD.unpack_from(buffer, at)
    entry_at, end = at + 8 + size, at + 4 + total
    if kind != _DELIVERY or size != 4 + body_size or body_size > 127:
        return None
    if not entry_at < end <= len(buffer) or total + 4 > bytes_max:
        return None
    try:
        body = _delivery_from(buffer[at + _DELIVERY_HEAD.size : entry_at])
    except DecodeError:
        return None
    if not body.IsInitialized():
        return None
    return body, buffer[entry_at:end], end


# These functions encode the most frequent commands without protobuf: the same bytes in half the
# time. Ids may be negative: -1 is 2^64-1 on the wire.


def message_header(
    *,
    consumer_id: int,
    ledger_id: int,
    entry_id: int,
    partition: int = -1,  # -1: the topic is not a partition
    redelivery_count: int = 0,
    ack_set: Sequence[int] = (),  # signed 64-bit words; (): no message of the entry is acknowledged
    consumer_epoch: int | None = None,  # None: absent
    entry_size: int,
) -> bytes:
    """Encode the part of a MESSAGE frame before the entry."""
    message_id = b"\x08" + varint(ledger_id) + b"\x10" + varint(entry_id)
    if partition >= 0:
        message_id += b"\x18" + varint(partition)
    body = b"\x08" + varint(consumer_id) + b"\x12" + varint(len(message_id)) + message_id
    if redelivery_count:
        body += b"\x18" + varint(redelivery_count)
    if ack_set:
        body += b"".join([b"\x20" + varint(word) for word in ack_set])
    if consumer_epoch is not None:
        body += b"\x28" + varint(consumer_epoch)
    return _hot_frame(b"\x08\x09\x4a", body, entry_size=entry_size)


def send_header(
    *,
    producer_id: int,
    sequence_id: int,
    num_messages: int = 1,
    highest_sequence_id: int = 0,  # 0: absent
    is_chunk: bool = False,
    entry_size: int,
) -> bytes:
    """Encode the part of a SEND frame before the entry."""
    if num_messages == 1 and 0 <= producer_id < 0x80 and not (highest_sequence_id or is_chunk):
        number = varint(sequence_id)
        size = 7 + len(number)
        if size + entry_size < COMMAND_FRAME_BYTES_MAX - 8:
            ids = _NEXT_TO_PRODUCER[producer_id]
            head = _PLAIN_SEND.pack(4 + size + entry_size, size, b"\x08\x06\x32", size - 4, ids)
            return head + number
    body = b"\x08" + varint(producer_id) + b"\x10" + varint(sequence_id)
    if num_messages != 1:
        body += b"\x18" + varint(num_messages)
    if highest_sequence_id:
        body += b"\x30" + varint(highest_sequence_id)
    if is_chunk:
        body += b"\x38\x01"
    return _hot_frame(b"\x08\x06\x32", body, entry_size=entry_size)


# Mechanics of frames

_U32 = struct.Struct(">I")
_SIZES = struct.Struct(">II")
_PLAIN_SEND = struct.Struct(">II3sB3s")  # both sizes, type and tag, body size, `ids`
_NEXT_TO_PRODUCER = [bytes([8, producer_id, 0x10]) for producer_id in range(0x80)]


def _split(view: memoryview) -> tuple[list[memoryview], int]:
    """Return the whole frames at the beginning of `view`, and the offset of their end."""
    frames = []
    size = len(view)
    at = 0
    while size - at >= 4:
        end = at + 4 + _total(view, at)
        if end > size:
            break
        frames.append(view[at + 4 : end])
        at = end
    return frames, at


def _total(view: memoryview, at: int, bytes_max: int = COMMAND_FRAME_BYTES_MAX) -> int:
    """Return the total of the frame at `at`. Raises FrameTooLarge, MalformedFrame."""
    total: int = _U32.unpack_from(view, at)[0]
    if total + 4 > bytes_max:
        raise FrameTooLarge(total + 4, bytes_max)
    if total < 4:
        raise MalformedFrame(f"a frame of {total} bytes is too short for its command's size")
    return total


def _sizes(command_size: int, entry_size: int) -> bytes:
    total = 4 + command_size + entry_size
    if total + 4 > COMMAND_FRAME_BYTES_MAX:
        raise FrameTooLarge(total + 4, COMMAND_FRAME_BYTES_MAX)
    return _SIZES.pack(total, command_size)


def _hot_frame(head: bytes, body: bytes, *, entry_size: int) -> bytes:
    command = head + varint(len(body)) + body
    return _sizes(len(command), entry_size) + command


# Mechanics of commands

_TextFields = tuple[tuple[str, "_TextFields"], ...]  # a field, and the fields of its sub-message


class _Shape(NamedTuple):
    field: str  # the name of a field of BaseCommand
    text_fields: _TextFields
    carries_entry: bool


def _find_text_fields(message: Descriptor, outer: tuple[str, ...] = ()) -> _TextFields:
    """Return the fields that are strings or contain strings."""
    found: list[tuple[str, _TextFields]] = []
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            found.append((field.name, ()))
        elif field.message_type is not None and field.message_type.full_name not in outer:
            inner = _find_text_fields(field.message_type, (*outer, message.full_name))
            if inner:
                found.append((field.name, inner))
    return tuple(found)


# A command's number is its type and also the number of its field.
_BODIES = [
    (field.number, field.name, field.message_type)
    for field in pb.BaseCommand.DESCRIPTOR.fields
    if field.message_type is not None
]
_SHAPES: dict[int, _Shape] = {
    number: _Shape(
        name,
        text_fields=_find_text_fields(message),
        carries_entry=number in (pb.BaseCommand.SEND, pb.BaseCommand.MESSAGE),
    )
    for number, name, message in _BODIES
}
# The bytes before the body's size in a BaseCommand (the type, and the body's tag), by the full name
# of the body's message type.
_BODY_TAGS = {
    message.full_name: b"\x08" + varint(number) + varint(number << 3 | 2)
    for number, _, message in _BODIES
}

_Body = tuple[pb.BaseCommand.Type.ValueType, Message, int]  # type, body, end of the command
_HOT_HEAD = struct.Struct(">IBBBB")  # size, tag and value of the type, tag and size of the body
_DELIVERY_HEAD = struct.Struct(">II3sB")  # total, size, type and tag, size of the body
_DELIVERY = b"\x08\x09\x4a"
_SINGLE = (bytes, Message)  # a value that is not repeated
# protobuf's type stubs do not say that parsing accepts any buffer, hence the casts.
_HOT_BODIES: "dict[int, Callable[[memoryview], Message]]" = {
    pb.BaseCommand.SEND: cast("Any", pb.CommandSend.FromString),
    pb.BaseCommand.SEND_RECEIPT: cast("Any", pb.CommandSendReceipt.FromString),
    pb.BaseCommand.MESSAGE: cast("Any", pb.CommandMessage.FromString),
    pb.BaseCommand.ACK: cast("Any", pb.CommandAck.FromString),
    pb.BaseCommand.FLOW: cast("Any", pb.CommandFlow.FromString),
}
_delivery_from: "Callable[[memoryview], pb.CommandMessage]" = cast(
    "Any", pb.CommandMessage.FromString
)
_base_command_from: "Callable[[memoryview], pb.BaseCommand]" = cast(
    "Any", pb.BaseCommand.FromString
)


def _body(frame: memoryview) -> _Body:
    """Parse the body of any command."""
    (size,) = _U32.unpack_from(frame)
    end = 4 + size
    if end > len(frame):
        reason = f"{size} bytes exceed the frame of {len(frame)} bytes"
        raise MalformedCommand("unknown", reason)
    try:
        command = _base_command_from(frame[4:end])
    except DecodeError as error:
        raise MalformedCommand("unknown", f"the command cannot be parsed: {error}") from None
    if not command.HasField("type"):
        raise _typeless(command)
    kind = command.type
    field = _SHAPES[kind].field
    if not command.HasField(cast("Any", field)):
        raise MalformedCommand(_name(kind), f"the field {field} is missing")
    return kind, getattr(command, field), end


def _hot_body(frame: memoryview) -> _Body | None:
    """Parse the body of a short, frequent command that holds only type and body.

    All clients encode these commands in this form, so the BaseCommand needs no parse. None: the
    command is not one of _HOT_BODIES, has another form, or is malformed.
    """
    if len(frame) < _HOT_HEAD.size:
        return None
    size, type_tag, kind, body_tag, body_size = _HOT_HEAD.unpack_from(frame)
    # These four numbers have one byte each. A body of more than 127 bytes has a longer size.
    if type_tag != 8 or body_tag != kind << 3 | 2 or size != 4 + body_size or body_size > 127:
        return None
    parse = _HOT_BODIES.get(kind)
    end = _HOT_HEAD.size + body_size
    if parse is None or end > len(frame):
        return None
    try:
        return kind, parse(frame[_HOT_HEAD.size : end]), end
    except DecodeError:
        return None


def _encode_base(body: Message) -> bytes:
    encoded = body.SerializeToString()
    return _BODY_TAGS[body.DESCRIPTOR.full_name] + varint(len(encoded)) + encoded


def _typeless(command: pb.BaseCommand) -> CommandError:
    """Return the error for a command without a type that protobuf knows.

    protobuf keeps the number of an unknown type among the unknown fields.
    """
    unknown = UnknownFieldSet(command)
    for index in range(len(unknown)):
        if unknown[index].field_number == pb.BaseCommand.TYPE_FIELD_NUMBER:
            return UnknownCommand(unknown[index].data)
    return MalformedCommand("unknown", "the type is missing")


def _invalid_text(message: Message, fields: _TextFields) -> str | None:
    """Return the name of a string that is not UTF-8 (protobuf returns it as bytes), or None."""
    for name, inner in fields:
        value = getattr(message, name)
        if isinstance(value, str):
            continue
        for item in (value,) if isinstance(value, _SINGLE) else value:
            if isinstance(item, bytes):
                return name
            if inner and (found := _invalid_text(item, inner)) is not None:
                return f"{name}.{found}"
    return None


def _name(kind: pb.BaseCommand.Type.ValueType) -> str:
    return pb.BaseCommand.Type.Name(kind)


def _request_id(body: Message) -> int | None:
    if "request_id" in body.DESCRIPTOR.fields_by_name and body.HasField("request_id"):
        request_id: int = getattr(body, "request_id")  # noqa: B009 - not every body has it
        return request_id
    return None
