"""Schemas of Protobuf messages, as Pulsar's PROTOBUF_NATIVE has them. Pure.

The definition is JSON: a base64 FileDescriptorSet, the name of its root message, and the file of
that message. Pulsar requires that the root message has the same name in all versions. Magnetar also
requires that a field's number keeps its type: otherwise a reader gets wrong values without an
error.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

from magnetar.broker.schemas.definition import json_tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.descriptor_pb2 import DescriptorProto

MESSAGES_MAX: Final = 2_000
"""The maximum number of messages in a definition, including nested messages and imports."""

NAME_CHARS_MAX: Final = 512
"""The maximum length of a field's name, and of a message's name with its package. The name of a
nested message contains the name of the outer message."""

STEPS_MAX: Final = 20_000
"""The maximum number of steps of one comparison, 20 ms of CPU. Pairs of messages, and their fields,
are steps. Messages that refer to each other in two cycles of 2,000 and 1,999 make 4 million
pairs."""

_Type = FieldDescriptorProto
_SAME: Final = (  # types with one encoding: either reads the other
    {_Type.TYPE_INT32, _Type.TYPE_INT64, _Type.TYPE_UINT32, _Type.TYPE_UINT64, _Type.TYPE_BOOL}
    | {_Type.TYPE_ENUM},
    {_Type.TYPE_SINT32, _Type.TYPE_SINT64},
    {_Type.TYPE_STRING, _Type.TYPE_BYTES},
    {_Type.TYPE_FIXED32, _Type.TYPE_SFIXED32},
    {_Type.TYPE_FIXED64, _Type.TYPE_SFIXED64},
)


class NotProtobuf(ValueError):
    """The text is no definition of a Protobuf message."""


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: int
    required: bool
    message: str  # full name of the message type; "": the field is not a message


@dataclass(frozen=True, slots=True)
class ProtobufSchema:
    root: str  # full name
    messages: Mapping[str, Mapping[int, Field]]  # keyed by full name; fields by number
    canonical: bytes  # equal for equal schemas


def parse(text: bytes) -> ProtobufSchema:
    """Parse a definition. Raises NotProtobuf."""
    try:
        tree = json_tree(text)
        encoded, root = tree["fileDescriptorSet"], tree["rootMessageTypeName"]
        files = FileDescriptorSet.FromString(base64.b64decode(encoded, validate=True))
        messages: dict[str, Mapping[int, Field]] = {}
        for file in files.file:
            for message in file.message_type:
                _collect(message, file.package, messages)
    except NotProtobuf:
        raise
    except (ValueError, KeyError, TypeError, DecodeError) as error:
        raise NotProtobuf(f"{type(error).__name__}: {error}") from None
    if not isinstance(root, str) or root not in messages:
        raise NotProtobuf("the root message is not in the descriptors")
    ordered = FileDescriptorSet(file=sorted(files.file, key=lambda it: it.name))
    canonical = root.encode() + b"\0" + ordered.SerializeToString(deterministic=True)
    return ProtobufSchema(root, messages, canonical)


def unreadable(reader: ProtobufSchema, writer: ProtobufSchema) -> str:
    """The reason why the reader's schema does not fit data of the writer's schema; "": it fits."""
    if reader.root != writer.root:
        return f"the root message changed from {writer.root} to {reader.root}"
    steps = 0
    seen = set()
    left = [(reader.root, writer.root)]
    while left:
        pair = left.pop()
        wanted, written = reader.messages.get(pair[0]), writer.messages.get(pair[1])
        if pair in seen or wanted is None or written is None:
            continue
        seen.add(pair)
        steps += 1 + len(wanted)
        if steps > STEPS_MAX:
            return f"the comparison takes more than {STEPS_MAX} steps"
        for number, field in wanted.items():
            source = written.get(number)
            if source is None:
                if field.required:
                    return f"field {field.name} of {pair[0]} is new and required"
                continue
            if not _fits(field.type, source.type):
                return f"field {number} of {pair[0]} ({field.name}) changed its type"
            if field.message:
                left.append((field.message, source.message))
    return ""


def _fits(one: int, other: int) -> bool:
    return one == other or any(one in same and other in same for same in _SAME)


def _collect(message: DescriptorProto, prefix: str, into: dict[str, Mapping[int, Field]]) -> None:
    name = f"{prefix}.{message.name}" if prefix else message.name
    if len(name) > NAME_CHARS_MAX:
        raise NotProtobuf(f"a message's name has more than {NAME_CHARS_MAX} characters")
    into[name] = {it.number: _field(it) for it in message.field}
    if len(into) > MESSAGES_MAX:
        raise NotProtobuf(f"it has more than {MESSAGES_MAX} messages")
    for nested in message.nested_type:
        _collect(nested, name, into)


def _field(found: FieldDescriptorProto) -> Field:
    if len(found.name) > NAME_CHARS_MAX:
        raise NotProtobuf(f"a field's name has more than {NAME_CHARS_MAX} characters")
    is_message = found.type == _Type.TYPE_MESSAGE
    return Field(
        found.name,
        found.type,
        found.label == _Type.LABEL_REQUIRED,
        found.type_name.lstrip(".") if is_message else "",
    )
