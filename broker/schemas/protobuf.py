"""Schemas of Protobuf messages, as Pulsar's PROTOBUF_NATIVE has them. Pure.

The definition is JSON: a base64 FileDescriptorSet, the name of its root message, and the file of
that message. Pulsar requires between two versions that the root message keeps its name. In addition
a field's number keeps its type: otherwise a reader gets wrong values without an error.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.descriptor_pb2 import DescriptorProto

MESSAGES_MAX: Final = 2_000
"""Messages that a definition holds, those within others and those of its imports included."""

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
class ProtobufSchema:
    root: str  # full name
    messages: Mapping[str, DescriptorProto]  # by full name
    canonical: bytes  # equal for equal schemas


def parse(text: bytes) -> ProtobufSchema:
    """Raises NotProtobuf."""
    try:
        tree = json.loads(text)
        encoded, root = tree["fileDescriptorSet"], tree["rootMessageTypeName"]
        files = FileDescriptorSet.FromString(base64.b64decode(encoded, validate=True))
    except (ValueError, RecursionError, KeyError, TypeError, DecodeError, binascii.Error) as error:
        raise NotProtobuf(f"{type(error).__name__}: {error}") from None
    messages: dict[str, DescriptorProto] = {}
    for file in files.file:
        for message in file.message_type:
            _collect(message, file.package, messages)
    if not isinstance(root, str) or root not in messages:
        raise NotProtobuf(f"the root message {str(root)[:80]!r} is not in the descriptors")
    ordered = FileDescriptorSet(file=sorted(files.file, key=lambda it: it.name))
    canonical = root.encode() + b"\0" + ordered.SerializeToString(deterministic=True)
    return ProtobufSchema(root, messages, canonical)


def unreadable(reader: ProtobufSchema, writer: ProtobufSchema) -> str:
    """Why the reader's schema does not fit what was written with the writer's; "": it fits."""
    if reader.root != writer.root:
        return f"the root message changed from {writer.root} to {reader.root}"
    seen = set()
    left = [(reader.root, writer.root)]
    while left:
        pair = left.pop()
        if pair in seen or pair[0] not in reader.messages or pair[1] not in writer.messages:
            continue
        seen.add(pair)
        written = {it.number: it for it in writer.messages[pair[1]].field}
        for field in reader.messages[pair[0]].field:
            source = written.get(field.number)
            if source is None:
                if field.label == _Type.LABEL_REQUIRED:
                    return f"field {field.name} of {pair[0]} is new and required"
                continue
            if not _fits(field.type, source.type):
                return f"field {field.number} of {pair[0]} ({field.name}) changed its type"
            if field.type == _Type.TYPE_MESSAGE:
                left.append((field.type_name.lstrip("."), source.type_name.lstrip(".")))
    return ""


def _fits(one: int, other: int) -> bool:
    return one == other or any(one in same and other in same for same in _SAME)


def _collect(message: DescriptorProto, prefix: str, into: dict[str, DescriptorProto]) -> None:
    name = f"{prefix}.{message.name}" if prefix else message.name
    into[name] = message
    if len(into) > MESSAGES_MAX:
        raise NotProtobuf(f"it has more than {MESSAGES_MAX} messages")
    for nested in message.nested_type:
        _collect(nested, name, into)
