"""Decodes Avro's binary encoding by the writer's schema alone, without an Avro library.

The decoder knows the logical types date, timestamp-millis and timestamp-micros, and reads other
logical types as their base types (uuid as string). The parser refuses a recursive schema, and a
union with more than one type besides null. Types in Spark: record -> struct, enum -> string, map ->
map, fixed -> binary.

A value must fill its payload. Bytes after the value, lengths beyond the payload and invalid indexes
are errors (ValueError). More values without bytes than `EMPTY_FREE` and `EMPTY_PER_BYTE` permit are
an error, too. The size of the payload limits all other values.

Pure.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from magnetar.protos.entry import read_varint
from magnetar.spark.type_limits import FIELDS_MAX, LEVELS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

EMPTY_FREE: Final = 1_000
EMPTY_PER_BYTE: Final = 64
"""The maximum of values without bytes in one message is EMPTY_FREE plus EMPTY_PER_BYTE for each
byte of the payload. Such values are nulls outside of unions, values of a fixed type of size 0, and
records, whose bytes are those of their fields. Five bytes can state an array of 10**9 nulls, and an
array can hold many such arrays. At most LEVELS_MAX, 63, records begin at one byte. So a payload can
exceed the maximum only if a record has more than EMPTY_PER_BYTE fields without bytes, or if arrays
hold values without bytes."""

ROWS_MAX: Final = 1_024
"""The maximum number of rows that are Python objects at once. With EMPTY_FREE values of 8 bytes in
each row, this takes 8 MB."""

DEPTH_MAX: Final = 64  # the depth of nested definitions


class InvalidAvroSchema(ValueError):
    """The schema is not an Avro schema that the decoder can read."""


@dataclass(frozen=True, slots=True)
class AvroType:
    """One type of a schema: how to read it, and its type in Spark. Raises InvalidAvroSchema if the
    type exceeds a limit of `type_limits`."""

    read: Callable[[bytes, int, _Empties], tuple[Any, int]]
    spark: DataType
    levels: int = 1
    fields: int = 0
    empties: int = 0
    """The number of values without bytes in one value, except those in a union, array or map. That
    number depends on the payload, so the union, array or map counts them."""

    def __post_init__(self) -> None:
        if self.levels > LEVELS_MAX:
            raise InvalidAvroSchema(f"types are nested deeper than {LEVELS_MAX} levels")
        if self.fields > FIELDS_MAX:
            raise InvalidAvroSchema(f"the schema has more than {FIELDS_MAX} fields")


def parse_avro_schema(text: str, *, logical: bool = True) -> AvroType:
    """Parse a schema, as JSON. Without `logical`, logical types are read as their base types.
    Raises InvalidAvroSchema."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidAvroSchema(f"not JSON: {error}") from None
    return _Schema(logical=logical).type_of(schema, "", 0)


def avro_decoder(avro: AvroType, kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    """A decoder for `values.decode_values`. It decodes a null payload to null."""

    def decode(values: pa.Array) -> pa.Array:
        parts = [
            decode_some(values.slice(first, ROWS_MAX)) for first in range(0, len(values), ROWS_MAX)
        ]
        return parts[0] if len(parts) == 1 else pa.concat_arrays([pa.nulls(0, kind), *parts])

    def decode_some(values: pa.Array) -> pa.Array:
        decoded = [None if it is None else _whole(avro, it) for it in values.to_pylist()]
        try:
            return pa.array(decoded, kind)
        except (OverflowError, TypeError) as error:  # such as a time too large for Arrow
            raise ValueError(str(error)) from None

    return decode


class _Empties:
    """Counts the values without bytes in one message."""

    __slots__ = ("_left", "_limit")

    def __init__(self, payload: bytes) -> None:
        self._limit = self._left = EMPTY_FREE + EMPTY_PER_BYTE * len(payload)

    def add(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(f"the payload has more than {self._limit} values without bytes")


def _whole(avro: AvroType, payload: bytes) -> Any:
    try:
        value, end = avro.read(payload, 0, _Empties(payload))
    except (IndexError, struct.error):
        raise ValueError("the payload ends within a value") from None
    if end != len(payload):
        raise ValueError(f"{len(payload) - end} bytes are left after the value")
    return value


def _read_long(data: bytes, at: int, _: object = None) -> tuple[int, int]:
    value, at = read_varint(data, at)
    if value >= 1 << 64:
        raise ValueError("a number has more than 64 bits")
    return (value >> 1) ^ -(value & 1), at


def _read_bytes(data: bytes, at: int, _: object = None) -> tuple[bytes, int]:
    size, at = _read_long(data, at)
    if not 0 <= size <= len(data) - at:
        raise ValueError(f"the size of a value, {size}, is negative or longer than the payload")
    return data[at : at + size], at + size


def _read_text(data: bytes, at: int, _: object = None) -> tuple[str, int]:
    text, at = _read_bytes(data, at)
    return text.decode(), at


def _read_boolean(data: bytes, at: int, _: object = None) -> tuple[bool, int]:
    if data[at] > 1:
        raise ValueError(f"{data[at]} is not a boolean")
    return data[at] == 1, at + 1


def _read_float(data: bytes, at: int, _: object = None) -> tuple[float, int]:
    return _FLOAT.unpack_from(data, at)[0], at + 4


def _read_double(data: bytes, at: int, _: object = None) -> tuple[float, int]:
    return _DOUBLE.unpack_from(data, at)[0], at + 8


def _read_millis(data: bytes, at: int, _: object = None) -> tuple[int, int]:
    value, at = _read_long(data, at)
    return value * 1_000, at


_FLOAT = struct.Struct("<f")
_DOUBLE = struct.Struct("<d")
_PRIMITIVE: Final = {
    "null": AvroType(lambda _, at, __: (None, at), NullType(), empties=1),
    "boolean": AvroType(_read_boolean, BooleanType()),
    "int": AvroType(_read_long, IntegerType()),
    "long": AvroType(_read_long, LongType()),
    "float": AvroType(_read_float, FloatType()),
    "double": AvroType(_read_double, DoubleType()),
    "bytes": AvroType(_read_bytes, BinaryType()),
    "string": AvroType(_read_text, StringType()),
}
_LOGICAL: Final = {
    ("int", "date"): AvroType(_read_long, DateType()),
    ("long", "timestamp-millis"): AvroType(_read_millis, TimestampType()),
    ("long", "timestamp-micros"): AvroType(_read_long, TimestampType()),
}


class _Schema:
    """Resolves the names of one schema."""

    def __init__(self, *, logical: bool) -> None:
        self._logical = _LOGICAL if logical else {}
        self._named: dict[str, AvroType | None] = {}  # None: the type is being defined

    def type_of(self, schema: Any, namespace: str, depth: int) -> AvroType:
        if depth > DEPTH_MAX:
            raise InvalidAvroSchema(f"types are nested deeper than {DEPTH_MAX}")
        if isinstance(schema, str):
            return self._by_name(schema, namespace)
        if isinstance(schema, list):
            return self._union(schema, namespace, depth)
        if not isinstance(schema, dict):
            raise InvalidAvroSchema(f"{str(schema)[:100]!r} is not a type")
        match schema.get("type"):
            case "record" | "error":
                return self._record(schema, namespace, depth)
            case "enum":
                return self._define(schema, namespace, _enum(schema))
            case "fixed":
                return self._define(schema, namespace, _fixed(schema))
            case "array":
                return _array(self.type_of(schema.get("items"), namespace, depth + 1))
            case "map":
                return _map(self.type_of(schema.get("values"), namespace, depth + 1))
            case str(name) if isinstance(logical := schema.get("logicalType"), str):
                found = self._logical.get((name, logical))
                return found or self.type_of(name, namespace, depth + 1)
            case other:
                return self.type_of(other, namespace, depth + 1)

    def _by_name(self, name: str, namespace: str) -> AvroType:
        if name in _PRIMITIVE:
            return _PRIMITIVE[name]
        for full in (_full(name, namespace), name):
            if full in self._named:
                found = self._named[full]
                if found is None:
                    raise InvalidAvroSchema(f"the type {full!r} contains itself")
                return found
        raise InvalidAvroSchema(f"the type {name[:100]!r} is unknown")

    def _define(self, schema: dict[str, Any], namespace: str, defined: AvroType) -> AvroType:
        self._named[_name_of(schema, namespace)] = defined
        return defined

    def _record(self, schema: dict[str, Any], namespace: str, depth: int) -> AvroType:
        name = _name_of(schema, namespace)
        self._named[name] = None
        fields = schema.get("fields")
        if not isinstance(fields, list) or not all(isinstance(it, dict) for it in fields):
            raise InvalidAvroSchema(f"the record {name!r} has no list of fields")
        inner = name.rpartition(".")[0]
        parts = [
            (_field_name(it, name), self.type_of(it.get("type"), inner, depth + 1)) for it in fields
        ]
        if len({field for field, _ in parts}) < len(parts):
            raise InvalidAvroSchema(f"two fields of the record {name!r} have the same name")
        reads = [(field, part.read) for field, part in parts]

        def read(data: bytes, at: int, empties: _Empties) -> tuple[dict[str, Any], int]:
            record = {}
            for field, read_field in reads:
                record[field], at = read_field(data, at, empties)
            return record, at

        spark = StructType([StructField(field, part.spark) for field, part in parts])
        levels = 1 + max((part.levels for _, part in parts), default=0)
        fields_count = len(parts) + sum(part.fields for _, part in parts)
        empties = 1 + sum(part.empties for _, part in parts)
        defined = AvroType(read, spark, levels, fields_count, empties)
        self._named[name] = defined
        return defined

    def _union(self, schema: list[Any], namespace: str, depth: int) -> AvroType:
        branches = [self.type_of(branch, namespace, depth + 1) for branch in schema]
        others = [it for it in branches if not isinstance(it.spark, NullType)]
        if len(others) > 1 or not branches:
            raise InvalidAvroSchema("a union must be of null and one other type")
        # The number of the branch has bytes, so a union with null has no values without bytes.
        reads = [(it.read, 0 if isinstance(it.spark, NullType) else it.empties) for it in branches]

        def read(data: bytes, at: int, empties: _Empties) -> tuple[Any, int]:
            branch, at = _read_long(data, at)
            if not 0 <= branch < len(reads):
                raise ValueError(f"the union has no branch {branch}")
            read_branch, count = reads[branch]
            if count:
                empties.add(count)
            return read_branch(data, at, empties)

        if not others:
            return AvroType(read, NullType())
        (other,) = others
        return AvroType(read, other.spark, other.levels, other.fields)


def _array(item: AvroType) -> AvroType:
    read_item = item.read

    def read(data: bytes, at: int, empties: _Empties) -> tuple[list[Any], int]:
        items: list[Any] = []
        while True:
            count, at = _count(data, at)
            if not count:
                return items, at
            empties.add(count * item.empties)
            for _ in range(count):
                value, at = read_item(data, at, empties)
                items.append(value)

    return AvroType(read, ArrayType(item.spark), item.levels + 1, item.fields)


def _map(item: AvroType) -> AvroType:
    read_item = item.read

    def read(data: bytes, at: int, empties: _Empties) -> tuple[list[tuple[str, Any]], int]:
        items: dict[str, Any] = {}
        while True:
            count, at = _count(data, at)
            if not count:
                return list(items.items()), at
            empties.add(count * item.empties)
            for _ in range(count):
                key, at = _read_text(data, at)
                items[key], at = read_item(data, at, empties)

    return AvroType(read, MapType(StringType(), item.spark), item.levels + 2, item.fields)


def _count(data: bytes, at: int) -> tuple[int, int]:
    """The number of items in the next block; 0: there is none."""
    count, at = _read_long(data, at)
    if count < 0:  # the size of the block in bytes follows
        count = -count
        _, at = _read_long(data, at)
    return count, at


def _enum(schema: dict[str, Any]) -> AvroType:
    symbols = schema.get("symbols")
    if not isinstance(symbols, list) or not all(isinstance(it, str) for it in symbols):
        raise InvalidAvroSchema("an enum has no list of symbols")

    def read(data: bytes, at: int, _: object) -> tuple[str, int]:
        index, at = _read_long(data, at)
        if not 0 <= index < len(symbols):
            raise ValueError(f"the enum has no symbol {index}")
        return symbols[index], at

    return AvroType(read, StringType())


def _fixed(schema: dict[str, Any]) -> AvroType:
    size = schema.get("size")
    if type(size) is not int or size < 0:
        raise InvalidAvroSchema(f"a fixed type has the size {size!r}")

    def read(data: bytes, at: int, _: object) -> tuple[bytes, int]:
        if size > len(data) - at:
            raise ValueError(f"a value of {size} bytes is longer than the payload")
        return data[at : at + size], at + size

    return AvroType(read, BinaryType(), empties=0 if size else 1)


def _name_of(schema: dict[str, Any], namespace: str) -> str:
    name = schema.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidAvroSchema("a named type has no name")
    own = schema.get("namespace")
    if own is None:
        return _full(name, namespace)
    if not isinstance(own, str):
        raise InvalidAvroSchema(f"the namespace of the type {name!r} is not a string")
    return _full(name, own)


def _field_name(field: dict[str, Any], record: str) -> str:
    name = field.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidAvroSchema(f"a field of the record {record!r} has no name")
    try:
        name.encode()
    except UnicodeEncodeError:  # JSON can escape one half of a surrogate pair
        raise InvalidAvroSchema(f"the field name {name!r} is not Unicode text") from None
    return name


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"
