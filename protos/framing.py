"""Pulsar's framing: commands as bytes, and a stream of bytes as commands.

    simple command    u32 total | u32 size | BaseCommand                total = 4 + size
    payload command   u32 total | u32 size | BaseCommand | entry        total = 4 + size + entry

All sizes are big-endian; the total does not count itself. Only SEND and MESSAGE carry an entry
(entry.py). Over TCP these frames follow each other; over gRPC one message of the session's stream
is a concatenation of whole ones. In this module a *frame* is what follows the total.

Two kinds of error: after a FrameError nobody knows where the next frame begins, so the connection
has to end; after a CommandError the next frame can be read.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import ENTRY_BYTES_MAX, varint
from magnetar.protos.errors import (
    CommandError,
    FrameTooLarge,
    MalformedCommand,
    MalformedFrame,
    UnknownCommand,
)

# The largest command: the acknowledgement bits of a batch of a million messages are 16,384 words,
# which take at most 11 bytes each; a list of topics may take the room of the entry too.
COMMAND_BYTES_MAX: Final = 256 * 1024
# A whole frame with both its sizes.
COMMAND_FRAME_BYTES_MAX: Final = 8 + COMMAND_BYTES_MAX + ENTRY_BYTES_MAX


@dataclass(slots=True)
class Command:
    """One command, checked: the type is known, the body there and complete, all text is UTF-8.

    A value, never changed once made; not frozen for speed.
    """

    type: pb.BaseCommand.Type.ValueType
    body: Message  # the sub-message of that type; match it by its class
    entry: memoryview | None  # None: neither SEND nor MESSAGE


def parse_command(frame: memoryview) -> Command:
    """The command in a frame. Its entry is a view of `frame`.

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
        reason = "the entry is missing" if shape.carries_entry else "it cannot carry an entry"
        raise MalformedCommand(_name(kind), reason, _request_id(body))
    return Command(kind, body, frame[end:] if shape.carries_entry else None)


def encode_command(body: Message) -> bytes:
    """The whole frame of a simple command, sizes included; the class of `body` gives the type.

    Raises FrameTooLarge.
    """
    command = _encode_base(body)
    return _sizes(len(command), 0) + command


def encode_payload_command(
    body: pb.CommandSend | pb.CommandMessage, parts: Sequence[bytes | memoryview]
) -> list[bytes | memoryview]:
    """The whole frame of a command with an entry, whose parts are passed on uncopied.

    Raises FrameTooLarge.
    """
    command = _encode_base(body)
    return [_sizes(len(command), sum(map(len, parts))) + command, *parts]


class FrameDecoder:
    """Cuts a stream of bytes, fed in pieces of any size, into frames.

    Keeps at most one incomplete frame, so less than COMMAND_FRAME_BYTES_MAX. After an error it must
    not be fed again.
    """

    def __init__(self) -> None:
        self._pending = bytearray()  # the beginning of a frame

    @property
    def pending_bytes(self) -> int:
        """How much of an incomplete frame has arrived; 0 when the stream may end cleanly."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[memoryview]:
        """The frames that `data` completes, as views of it or of a buffer of their own.

        Raises FrameTooLarge as soon as a size says so, and MalformedFrame. Frames that `data` held
        before the bad one are lost with the connection: none of them was answered.
        """
        if not self._pending:
            view = memoryview(data)
            frames, end = _split(view)
            self._pending = bytearray(view[end:])
            return frames
        self._pending += data
        view = memoryview(self._pending)
        frames, end = _split(view)
        if frames:  # they keep the buffer, what follows them gets a new one
            self._pending = bytearray(view[end:])
        return frames


def split_frames(buffer: bytes | memoryview) -> list[memoryview]:
    """The frames of which `buffer` is the concatenation, as views of it.

    Raises FrameTooLarge and MalformedFrame, also when the last frame is not whole.
    """
    view = memoryview(buffer)
    frames, end = _split(view)
    if end != len(view):
        raise MalformedFrame(f"the last frame is truncated after {len(view) - end} bytes")
    return frames


def first_frame(buffer: memoryview, at: int) -> tuple[memoryview, int]:
    """The frame whose total is at `at`, as a view, and where the next one begins.

    Raises FrameTooLarge and MalformedFrame, also when it is not whole.
    """
    if len(buffer) - at >= 4:
        end = at + 4 + _total(buffer, at)
        if end <= len(buffer):
            return buffer[at + 4 : end], end
    raise MalformedFrame(f"the last frame is truncated after {len(buffer) - at} bytes")


# The hot commands, encoded by hand to the bytes that protobuf would write, in half its time.
# Ids may be negative: -1 is 2^64-1 on the wire.


def message_header(
    *,
    consumer_id: int,
    ledger_id: int,
    entry_id: int,
    partition: int = -1,  # -1: the topic has no partitions
    redelivery_count: int = 0,
    ack_set: Sequence[int] = (),  # signed 64-bit words; (): no message of it is acknowledged
    entry_size: int,
) -> bytes:
    """What comes before the entry in the frame of a MESSAGE."""
    message_id = b"\x08" + varint(ledger_id) + b"\x10" + varint(entry_id)
    if partition >= 0:
        message_id += b"\x18" + varint(partition)
    body = b"\x08" + varint(consumer_id) + b"\x12" + varint(len(message_id)) + message_id
    if redelivery_count:
        body += b"\x18" + varint(redelivery_count)
    if ack_set:
        body += b"".join([b"\x20" + varint(word) for word in ack_set])
    return _hot_frame(b"\x08\x09\x4a", body, entry_size=entry_size)


def send_header(
    *,
    producer_id: int,
    sequence_id: int,
    num_messages: int = 1,
    highest_sequence_id: int = 0,  # 0: not said
    is_chunk: bool = False,
    entry_size: int,
) -> bytes:
    """What comes before the entry in the frame of a SEND."""
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
_PLAIN_SEND = struct.Struct(">II3sB3s")  # both sizes, type and tag, body, producer and next tag
_NEXT_TO_PRODUCER = [bytes([8, producer_id, 0x10]) for producer_id in range(0x80)]


def _split(view: memoryview) -> tuple[list[memoryview], int]:
    """The whole frames at the beginning of `view`, and where they end."""
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


def _total(view: memoryview, at: int) -> int:
    """Of the frame at `at`, when it is a possible one."""
    total: int = _U32.unpack_from(view, at)[0]
    if total + 4 > COMMAND_FRAME_BYTES_MAX:
        raise FrameTooLarge(total + 4, COMMAND_FRAME_BYTES_MAX)
    if total < 4:
        raise MalformedFrame(f"a frame of {total} bytes has no room for its command's size")
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

_TextFields = tuple[tuple[str, "_TextFields"], ...]  # a name, and the same for a sub-message


class _Shape(NamedTuple):
    field: str  # of BaseCommand
    text_fields: _TextFields
    carries_entry: bool


def _find_text_fields(message: Descriptor, outer: tuple[str, ...] = ()) -> _TextFields:
    """The fields that are strings or lead to strings."""
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
# What precedes the body's size in a BaseCommand, by the body's name: type and tag.
_BODY_TAGS = {
    message.full_name: b"\x08" + varint(number) + varint(number << 3 | 2)
    for number, _, message in _BODIES
}

_Body = tuple[pb.BaseCommand.Type.ValueType, Message, int]  # type, body, end of the command
_HOT_HEAD = struct.Struct(">IBBBB")  # size, tag and value of the type, tag and size of the body
_SINGLE = (bytes, Message)  # a value that is not repeated
# The stubs of protobuf do not know that parsing takes any buffer.
_HOT_BODIES: "dict[int, Callable[[memoryview], Message]]" = {
    pb.BaseCommand.SEND: cast("Any", pb.CommandSend.FromString),
    pb.BaseCommand.SEND_RECEIPT: cast("Any", pb.CommandSendReceipt.FromString),
    pb.BaseCommand.MESSAGE: cast("Any", pb.CommandMessage.FromString),
    pb.BaseCommand.ACK: cast("Any", pb.CommandAck.FromString),
    pb.BaseCommand.FLOW: cast("Any", pb.CommandFlow.FromString),
}
_base_command_from: "Callable[[memoryview], pb.BaseCommand]" = cast(
    "Any", pb.BaseCommand.FromString
)


def _body(frame: memoryview) -> _Body:
    """The body of any command."""
    (size,) = _U32.unpack_from(frame)
    end = 4 + size
    if end > len(frame):
        raise MalformedCommand("unknown", f"its {size} bytes exceed the frame's {len(frame)}")
    try:
        command = _base_command_from(frame[4:end])
    except DecodeError as error:
        raise MalformedCommand("unknown", f"it cannot be parsed: {error}") from None
    if not command.HasField("type"):
        raise _typeless(command)
    kind = command.type
    field = _SHAPES[kind].field
    if not command.HasField(cast("Any", field)):
        raise MalformedCommand(_name(kind), f"the field {field} is missing")
    return kind, getattr(command, field), end


def _hot_body(frame: memoryview) -> _Body | None:
    """The body of a short hot command that is encoded as every client does: type, body, no more.

    It spares making the BaseCommand. None: this is not one, or not a good one.
    """
    if len(frame) < _HOT_HEAD.size:
        return None
    size, type_tag, kind, body_tag, body_size = _HOT_HEAD.unpack_from(frame)
    # All are single bytes: body_size is below 128 when the rest of the command is as long.
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
    """A type that protobuf does not know is kept among the unknown fields."""
    unknown = UnknownFieldSet(command)
    for index in range(len(unknown)):
        if unknown[index].field_number == pb.BaseCommand.TYPE_FIELD_NUMBER:
            return UnknownCommand(unknown[index].data)
    return MalformedCommand("unknown", "the type is missing")


def _invalid_text(message: Message, fields: _TextFields) -> str | None:
    """The name of a string that is not UTF-8, which protobuf hands out as bytes. None: all are."""
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
