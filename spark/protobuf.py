"""Decodes Protobuf with the definition that Pulsar's registry keeps for PROTOBUF_NATIVE schemas.

The definition is JSON: `fileDescriptorSet` (base64), `rootMessageTypeName`, and
`rootFileDescriptorName`, which is not needed here. Types in Spark: message -> struct, repeated ->
array, map -> map, enum -> string (the number as text if it has no name), uint32 -> bigint, uint64
-> decimal(20,0), google.protobuf.Timestamp -> timestamp. A field that a payload lacks is null if
the field has presence: then Protobuf distinguishes a missing field from a default value. Otherwise
the field has its default value. The parser refuses a type that contains itself.

The columns are built field by field from all messages of an array, not message by message.

Pure.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from magnetar.protos.descriptors import pool_of
from magnetar.spark.type_limits import FIELDS_MAX, LEVELS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIMESTAMP: Final = "google.protobuf.Timestamp"


class InvalidProtobufSchema(ValueError):
    """The definition does not describe a Protobuf message that the decoder can read."""


@dataclass(frozen=True, slots=True)
class ProtobufType:
    """A message type: its generated class, and its type in Spark."""

    message: type[Message]
    descriptor: Descriptor
    spark: StructType


def parse_protobuf_schema(text: str) -> ProtobufType:
    """Parse a definition, as JSON. Raises InvalidProtobufSchema."""
    try:
        definition = json.loads(text)
        files = base64.b64decode(definition["fileDescriptorSet"], validate=True)
        root = definition["rootMessageTypeName"]
        described = descriptor_pb2.FileDescriptorSet.FromString(files)
        descriptor = pool_of(described).FindMessageTypeByName(root)
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error, DecodeError) as error:
        raise InvalidProtobufSchema(
            "not a definition of Pulsar's registry (JSON with fileDescriptorSet and"
            f" rootMessageTypeName): {error!r}"
        ) from None
    spark = _Types().struct_of(descriptor, (), 1)
    return ProtobufType(GetMessageClass(descriptor), descriptor, spark)


def protobuf_decoder(protobuf: ProtobufType, kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    """A decoder for `values.decode_values`. It decodes a null payload to null."""
    parse = protobuf.message.FromString
    descriptor = protobuf.descriptor
    has_required = _has_required(descriptor)

    def decode(values: pa.Array) -> pa.Array:
        try:
            messages = [None if it is None else parse(it) for it in values.to_pylist()]
        except DecodeError as error:
            raise ValueError(f"not a message of type {descriptor.full_name}: {error}") from None
        if has_required:
            for message in messages:
                if message is not None and not message.IsInitialized():
                    raise ValueError("a required field is missing")
        try:
            return _structs(messages, descriptor, kind)
        except (OverflowError, TypeError) as error:  # for example, a timestamp is out of range
            raise ValueError(str(error)) from None

    return decode


# Types


class _Types:
    """Converts the types of one definition, and counts their fields. `level`: the depth of the type
    in the value."""

    def __init__(self) -> None:
        self._fields = 0

    def struct_of(self, descriptor: Descriptor, within: tuple[str, ...], level: int) -> StructType:
        if descriptor.full_name in within:
            raise InvalidProtobufSchema(f"the type {descriptor.full_name!r} contains itself")
        if not descriptor.fields:
            raise InvalidProtobufSchema(f"the type {descriptor.full_name!r} has no fields")
        within = (*within, descriptor.full_name)
        struct = StructType()
        for field in descriptor.fields:
            self._fields += 1
            if self._fields > FIELDS_MAX:
                raise InvalidProtobufSchema(f"the definition has more than {FIELDS_MAX} fields")
            struct.add(StructField(field.name, self._type_of(field, within, level + 1)))
        return struct

    def _type_of(self, field: FieldDescriptor, within: tuple[str, ...], level: int) -> DataType:
        if _is_map(field):
            parts = _message_of(field).fields_by_name
            if set(parts.keys()) != {"key", "value"}:
                raise InvalidProtobufSchema(f"the map {field.full_name!r} has no key or no value")
            of_value = self._single(parts["value"], within, level + 2)
            return MapType(self._single(parts["key"], within, level + 2), of_value)
        if _is_repeated(field):
            return ArrayType(self._single(field, within, level + 1))
        return self._single(field, within, level)

    def _single(self, field: FieldDescriptor, within: tuple[str, ...], level: int) -> DataType:
        if level > LEVELS_MAX:
            raise InvalidProtobufSchema(f"types are nested deeper than {LEVELS_MAX} levels")
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if _message_of(field).full_name == TIMESTAMP:
                parts = [(it.name, it.type, it.is_repeated) for it in _message_of(field).fields]
                if parts != _TIMESTAMP_FIELDS:
                    raise InvalidProtobufSchema(f"the fields of {TIMESTAMP} are not Protobuf's")
                return TimestampType()
            return self.struct_of(_message_of(field), within, level)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return BinaryType()
        return _SINGLE[field.cpp_type]


_TIMESTAMP_FIELDS: Final = [
    ("seconds", FieldDescriptor.TYPE_INT64, False),
    ("nanos", FieldDescriptor.TYPE_INT32, False),
]

_SINGLE: Final[dict[int, DataType]] = {
    FieldDescriptor.CPPTYPE_BOOL: BooleanType(),
    FieldDescriptor.CPPTYPE_INT32: IntegerType(),
    FieldDescriptor.CPPTYPE_INT64: LongType(),
    FieldDescriptor.CPPTYPE_UINT32: LongType(),
    FieldDescriptor.CPPTYPE_UINT64: DecimalType(20, 0),
    FieldDescriptor.CPPTYPE_FLOAT: FloatType(),
    FieldDescriptor.CPPTYPE_DOUBLE: DoubleType(),
    FieldDescriptor.CPPTYPE_STRING: StringType(),
    FieldDescriptor.CPPTYPE_ENUM: StringType(),
}


def _message_of(field: FieldDescriptor) -> Descriptor:
    """The type of a field that holds messages."""
    assert field.message_type is not None
    return field.message_type


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def _is_map(field: FieldDescriptor) -> bool:
    return (
        field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        and _is_repeated(field)
        and bool(_message_of(field).GetOptions().map_entry)
    )


def _has_required(descriptor: Descriptor) -> bool:
    return any(
        field.is_required
        or (field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and _has_required(_message_of(field)))
        for field in descriptor.fields
    )


# Values


def _structs(
    messages: Sequence[Any], descriptor: Descriptor, kind: pa.StructType
) -> pa.StructArray:
    """One struct for each message; None is null. A field that the definition lacks is null."""
    own = descriptor.fields_by_name
    arrays = [
        _column(messages, own[field.name], field.type)
        if field.name in own
        else pa.nulls(len(messages), field.type)
        for field in kind
    ]
    mask = pa.array([message is None for message in messages], pa.bool_())
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=mask)


def _column(messages: Sequence[Any], field: FieldDescriptor, kind: pa.DataType) -> pa.Array:
    """The values of one field."""
    name = field.name
    if _is_map(field):
        return _maps([None if it is None else getattr(it, name) for it in messages], field, kind)
    if _is_repeated(field):
        lists = [None if it is None else getattr(it, name) for it in messages]
        every = [item for items in lists if items for item in items]
        return pa.ListArray.from_arrays(
            _ends(lists), _values(every, field, kind.value_type), type=kind
        )
    if field.has_presence:
        found = [
            getattr(it, name) if it is not None and it.HasField(name) else None for it in messages
        ]
    else:
        found = [None if it is None else getattr(it, name) for it in messages]
    return _values(found, field, kind)


def _maps(maps: Sequence[Any], field: FieldDescriptor, kind: pa.MapType) -> pa.Array:
    parts = _message_of(field).fields_by_name
    pairs = [pair for items in maps if items for pair in items.items()]
    keys = _values([key for key, _ in pairs], parts["key"], kind.key_type)
    values = _values([value for _, value in pairs], parts["value"], kind.item_type)
    return pa.MapArray.from_arrays(_ends(maps), keys, values, type=kind)


def _ends(lists: Sequence[Any]) -> pa.Array:
    """Offsets of lists; None marks a null list."""
    ends: list[int | None] = []
    end = 0
    for items in lists:
        ends.append(None if items is None else end)
        end += 0 if items is None else len(items)
    return pa.array([*ends, end], pa.int32())


def _values(found: list[Any], field: FieldDescriptor, kind: pa.DataType) -> pa.Array:
    """An array of single values; None is null."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE if _message_of(field).full_name == TIMESTAMP:
            times = [
                None if it is None else it.seconds * 1_000_000 + it.nanos // 1_000 for it in found
            ]
            return pa.array(times, pa.int64()).cast(kind)
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return _structs(found, _message_of(field), kind)
        case FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            names = {number: it.name for number, it in field.enum_type.values_by_number.items()}
            found = [None if it is None else names.get(it) or str(it) for it in found]
        case FieldDescriptor.CPPTYPE_UINT64:
            found = [None if it is None else Decimal(it) for it in found]
        case _:
            pass
    return pa.array(found, kind)
