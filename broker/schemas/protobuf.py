"""Schemas of Protobuf messages, as Pulsar's PROTOBUF_NATIVE has them. Pure.

The definition is JSON: a base64 FileDescriptorSet, the name of its root message, and the file of
that message. Pulsar requires only that the root message has the same name in all versions. Magnetar
also compares the fields of all messages, by the rules of Protobuf's language guide ("Updating A
Message Type"). A reader's schema fits a writer's schema if these rules hold:

- The root messages have the same name. Other names may differ: fields are matched by number.
- A field that the reader requires is required by the writer, too. So BACKWARD refuses a new
  required field, and an optional field that becomes required. FORWARD refuses the opposite changes.
- The two types of a field share an encoding: int32, int64, uint32, uint64, bool and enums; sint32
  and sint64; fixed32 and sfixed32; fixed64 and sfixed64; string and bytes. As in Protobuf, a number
  that is too large is truncated. Other types only fit themselves: a group does not fit a message.
- A numeric field of the reader is repeated if the writer packs it. Otherwise a field may be
  repeated on one side only: a reader of single values takes the last value.
- Fields that both sides have, and that share a oneof at the reader, share a oneof at the writer.
  Otherwise the writer may set several fields, and the reader loses all but the last.
- If the reader requires a field of a closed enum (of proto2), it knows all values of the writer. An
  unknown value would count as a missing field. For other fields an unknown value is no problem: a
  closed enum then has its default, and an open enum keeps the number.

Extensions are not compared.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.descriptor_pb2 import FeatureSet, FieldDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

from magnetar.broker.schemas.definition import json_tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto

TYPES_MAX: Final = 2_000
"""The maximum number of messages and enums in a definition, including nested types and imports."""

NAME_CHARS_MAX: Final = 512
"""The maximum length of a field's name, and of a type's name with its package. The name of a nested
type contains the name of the outer message."""

STEPS_MAX: Final = 20_000
"""The maximum number of steps of one comparison, 20 ms of CPU. Pairs of messages, and their fields,
are steps. Messages that refer to each other in two cycles of 2,000 and 1,999 make 4 million
pairs."""

VALUES_PER_STEP: Final = 16
"""The number of values of an enum whose comparison takes as long as a step."""

_Type = FieldDescriptorProto
_SAME: Final = (  # types with one encoding: either reads the other
    {_Type.TYPE_INT32, _Type.TYPE_INT64, _Type.TYPE_UINT32, _Type.TYPE_UINT64, _Type.TYPE_BOOL}
    | {_Type.TYPE_ENUM},
    {_Type.TYPE_SINT32, _Type.TYPE_SINT64},
    {_Type.TYPE_STRING, _Type.TYPE_BYTES},
    {_Type.TYPE_FIXED32, _Type.TYPE_SFIXED32},
    {_Type.TYPE_FIXED64, _Type.TYPE_SFIXED64},
)
_MESSAGES: Final = frozenset((_Type.TYPE_MESSAGE, _Type.TYPE_GROUP))
_NEVER_PACKED: Final = _MESSAGES | {_Type.TYPE_STRING, _Type.TYPE_BYTES}


class NotProtobuf(ValueError):
    """The text is no definition of a Protobuf message."""


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: int
    type_name: str  # full name of the message or enum; "": the type has no name
    required: bool
    repeated: bool
    packed: bool  # True: repeated, and its numbers follow one length, without tags between them
    oneof: int  # -1: none


@dataclass(frozen=True, slots=True)
class Enum:
    values: frozenset[int]
    closed: bool  # True: a field of this enum never has a value that is not in `values`


@dataclass(frozen=True, slots=True)
class ProtobufSchema:
    root: str  # full name
    messages: Mapping[str, Mapping[int, Field]]  # keyed by full name; fields by number
    enums: Mapping[str, Enum]  # keyed by full name
    canonical: bytes  # equal for equal schemas


def parse(text: bytes) -> ProtobufSchema:
    """Parse a definition. Raises NotProtobuf."""
    try:
        tree = json_tree(text)
        encoded, root = tree["fileDescriptorSet"], tree["rootMessageTypeName"]
        files = FileDescriptorSet.FromString(base64.b64decode(encoded, validate=True))
        types = _Types()
        for file in files.file:
            of_syntax = _PROTO2 if file.syntax in ("", "proto2") else _PROTO3
            features = of_syntax.within(file.options.features)
            for message in file.message_type:
                types.add_message(message, file.package, features)
            for enum in file.enum_type:
                types.add_enum(enum, file.package, features)
    except NotProtobuf:
        raise
    except (ValueError, KeyError, TypeError, DecodeError) as error:
        raise NotProtobuf(f"{type(error).__name__}: {error}") from None
    if not isinstance(root, str) or root not in types.messages:
        raise NotProtobuf("the root message is not in the descriptors")
    ordered = FileDescriptorSet(file=sorted(files.file, key=lambda it: it.name))
    canonical = root.encode() + b"\0" + ordered.SerializeToString(deterministic=True)
    return ProtobufSchema(root, types.messages, types.enums, canonical)


def unreadable(reader: ProtobufSchema, writer: ProtobufSchema) -> str:
    """The reason why the reader's schema does not fit data of the writer's schema; "": it fits."""
    if reader.root != writer.root:
        return f"the root message is {reader.root}, in the messages {writer.root}"
    try:
        return _Comparison(reader, writer).problem()
    except _TooManySteps:
        return f"the comparison takes more than {STEPS_MAX} steps"


class _TooManySteps(Exception):
    """The comparison takes more than STEPS_MAX."""


class _Comparison:
    def __init__(self, reader: ProtobufSchema, writer: ProtobufSchema) -> None:
        self._reader = reader
        self._writer = writer
        self._steps = 0

    def problem(self) -> str:
        """Compare each pair of messages once. Raises _TooManySteps."""
        seen = set()
        left = [(self._reader.root, self._writer.root)]
        while left:
            pair = left.pop()
            wanted = self._reader.messages.get(pair[0])
            written = self._writer.messages.get(pair[1])
            if pair in seen or wanted is None or written is None:
                continue
            seen.add(pair)
            self._spend(1 + len(wanted))
            problem = self._fields_problem(wanted, written)
            if problem:
                return f"message {pair[0]}: {problem}"
            left += [
                (field.type_name, written[number].type_name)
                for number, field in wanted.items()
                if field.type in _MESSAGES and number in written
            ]
        return ""

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > STEPS_MAX:
            raise _TooManySteps

    def _fields_problem(self, wanted: Mapping[int, Field], written: Mapping[int, Field]) -> str:
        first_of: dict[int, Field] = {}  # oneof of the reader -> the writer's first field of it
        for number, field in wanted.items():
            source = written.get(number)
            if source is None:
                if field.required:
                    return f"field {field.name} is required, and the messages lack it"
                continue
            problem = self._field_problem(field, source)
            if not problem and field.oneof >= 0:
                first = first_of.setdefault(field.oneof, source)
                if first is not source and not first.oneof == source.oneof >= 0:
                    problem = "the messages may have another field of its oneof, too"
            if problem:
                return f"field {number} ({field.name}): {problem}"
        return ""

    def _field_problem(self, field: Field, source: Field) -> str:
        if not _fits(field.type, source.type):
            return f"type {_shown(field.type)} does not read {_shown(source.type)}"
        if source.packed and not field.repeated:
            return "it is not repeated, and packed in the messages"
        if not field.required:
            return ""
        if not source.required:
            return "it is required, and the messages may lack it"
        known = self._reader.enums.get(field.type_name)
        if known is not None and known.closed:
            return self._values_problem(known, self._writer.enums.get(source.type_name))
        return ""

    def _values_problem(self, known: Enum, written: Enum | None) -> str:
        if written is None:
            return "its enum may lack a value of the messages"
        self._spend(len(written.values) // VALUES_PER_STEP)
        missing = written.values - known.values
        return f"its enum lacks the value {min(missing)}" if missing else ""


def _fits(one: int, other: int) -> bool:
    return one == other or any(one in same and other in same for same in _SAME)


def _shown(kind: int) -> str:
    return _Type.Type.Name(_Type.Type.ValueType(kind)).removeprefix("TYPE_").lower()


class _Features(NamedTuple):
    """Protobuf's features of a file, or of a type or field in the file. Files without an edition
    have the features of their syntax."""

    required: bool
    closed: bool  # for enums
    packed: bool
    delimited: bool  # messages are encoded as groups

    def within(self, own: FeatureSet) -> _Features:
        """The features of an inner element that has features of its own."""
        return _Features(
            _own(own.field_presence, FeatureSet.LEGACY_REQUIRED, self.required),
            _own(own.enum_type, FeatureSet.CLOSED, self.closed),
            _own(own.repeated_field_encoding, FeatureSet.PACKED, self.packed),
            _own(own.message_encoding, FeatureSet.DELIMITED, self.delimited),
        )


_PROTO2: Final = _Features(required=False, closed=True, packed=False, delimited=False)
_PROTO3: Final = _Features(required=False, closed=False, packed=True, delimited=False)
"""Also the default features of a file with an edition."""


def _own(value: int, sought: int, inherited: bool) -> bool:
    return value == sought if value else inherited  # 0: the element has no such feature


class _Types:
    """The messages and enums of a definition."""

    def __init__(self) -> None:
        self.messages: dict[str, Mapping[int, Field]] = {}
        self.enums: dict[str, Enum] = {}

    def add_message(self, message: DescriptorProto, prefix: str, outer: _Features) -> None:
        name = _full_name(message.name, prefix)
        features = outer.within(message.options.features)
        if message.options.map_entry:
            features = features._replace(delimited=False)
        maps = {f".{name}.{it.name}" for it in message.nested_type if it.options.map_entry}
        self.messages[name] = {it.number: _field(it, features, maps) for it in message.field}
        self._check_number()
        for nested in message.nested_type:
            self.add_message(nested, name, features)
        for enum in message.enum_type:
            self.add_enum(enum, name, features)

    def add_enum(self, enum: EnumDescriptorProto, prefix: str, outer: _Features) -> None:
        closed = outer.within(enum.options.features).closed
        values = frozenset(it.number for it in enum.value)
        self.enums[_full_name(enum.name, prefix)] = Enum(values, closed)
        self._check_number()

    def _check_number(self) -> None:
        if len(self.messages) + len(self.enums) > TYPES_MAX:
            raise NotProtobuf(f"it has more than {TYPES_MAX} messages and enums")


def _full_name(name: str, prefix: str) -> str:
    full = f"{prefix}.{name}" if prefix else name
    if len(full) > NAME_CHARS_MAX:
        raise NotProtobuf(f"the name of a type has more than {NAME_CHARS_MAX} characters")
    return full


def _field(found: FieldDescriptorProto, outer: _Features, maps: set[str]) -> Field:
    if len(found.name) > NAME_CHARS_MAX:
        raise NotProtobuf(f"a field's name has more than {NAME_CHARS_MAX} characters")
    options = found.options
    features = outer.within(options.features) if found.HasField("options") else outer
    repeated = found.label == _Type.LABEL_REPEATED
    kind = found.type
    if kind == _Type.TYPE_MESSAGE and features.delimited and found.type_name not in maps:
        kind = _Type.TYPE_GROUP
    packed = options.packed if options.HasField("packed") else features.packed
    oneof = found.oneof_index if found.HasField("oneof_index") else -1
    return Field(
        name=found.name,
        type=kind,
        type_name=found.type_name.lstrip("."),
        required=found.label == _Type.LABEL_REQUIRED
        or (features.required and not repeated and oneof < 0),
        repeated=repeated,
        packed=repeated and packed and kind not in _NEVER_PACKED,
        oneof=oneof,
    )
