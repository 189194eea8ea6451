"""Decodes Avro's binary encoding by the writer's schema alone, without an Avro library.

The decoder reads all types of Avro 1.11. It knows the logical types date, timestamp-millis and
timestamp-micros, and reads other logical types as their base types (uuid as string). A union must
be of null and one other type. The parser refuses a recursive schema. Types in Spark: record ->
struct, enum -> string, map -> map, fixed -> binary.

A value must fill its payload. Bytes after the value, lengths beyond the payload and invalid indexes
are errors (ValueError).

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

ITEMS_MAX: Final = 1_000_000
"""The maximum number of items of one array or map. The payload's size does not limit the number,
because an item can have 0 bytes."""

DEPTH_MAX: Final = 64  # the depth of nested definitions


class InvalidAvroSchema(ValueError):
    """The schema is not an Avro schema that the decoder can read."""


@dataclass(frozen=True, slots=True)
class AvroType:
    """One type of a schema: how to read it, and its type in Spark. Raises InvalidAvroSchema if the
    type exceeds a limit of `type_limits`."""

    read: Callable[[bytes, int], tuple[Any, int]]
    spark: DataType
    levels: int = 1
    fields: int = 0

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
        decoded = [None if it is None else _whole(avro, it) for it in values.to_pylist()]
        try:
            return pa.array(decoded, kind)
        except (OverflowError, TypeError) as error:  # such as a time too large for Arrow
            raise ValueError(str(error)) from None

    return decode


def _whole(avro: AvroType, payload: bytes) -> Any:
    try:
        value, end = avro.read(payload, 0)
    except (IndexError, struct.error):
        raise ValueError("the payload ends within a value") from None
    if end != len(payload):
        raise ValueError(f"{len(payload) - end} bytes are left after the value")
    return value


def _read_long(data: bytes, at: int) -> tuple[int, int]:
    value, at = read_varint(data, at)
    if value >= 1 << 64:
        raise ValueError("a number has more than 64 bits")
    return (value >> 1) ^ -(value & 1), at


def _read_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _read_long(data, at)
    if not 0 <= size <= len(data) - at:
        raise ValueError(f"the size of a value, {size}, is negative or longer than the payload")
    return data[at : at + size], at + size


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    text, at = _read_bytes(data, at)
    return text.decode(), at


def _read_boolean(data: bytes, at: int) -> tuple[bool, int]:
    if data[at] > 1:
        raise ValueError(f"{data[at]} is not a boolean")
    return data[at] == 1, at + 1


def _read_float(data: bytes, at: int) -> tuple[float, int]:
    return _FLOAT.unpack_from(data, at)[0], at + 4


def _read_double(data: bytes, at: int) -> tuple[float, int]:
    return _DOUBLE.unpack_from(data, at)[0], at + 8


def _read_millis(data: bytes, at: int) -> tuple[int, int]:
    value, at = _read_long(data, at)
    return value * 1_000, at


_FLOAT = struct.Struct("<f")
_DOUBLE = struct.Struct("<d")
_PRIMITIVE: Final = {
    "null": AvroType(lambda _, at: (None, at), NullType()),
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
            case str(name) if (name, schema.get("logicalType")) in self._logical:
                return self._logical[name, schema["logicalType"]]
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
            (str(it.get("name")), self.type_of(it.get("type"), inner, depth + 1)) for it in fields
        ]
        reads = [(field, part.read) for field, part in parts]

        def read(data: bytes, at: int) -> tuple[dict[str, Any], int]:
            record = {}
            for field, read_field in reads:
                record[field], at = read_field(data, at)
            return record, at

        spark = StructType([StructField(field, part.spark) for field, part in parts])
        levels = 1 + max((part.levels for _, part in parts), default=0)
        fields_count = len(parts) + sum(part.fields for _, part in parts)
        defined = AvroType(read, spark, levels, fields_count)
        self._named[name] = defined
        return defined

    def _union(self, schema: list[Any], namespace: str, depth: int) -> AvroType:
        branches = [self.type_of(branch, namespace, depth + 1) for branch in schema]
        others = [it for it in branches if not isinstance(it.spark, NullType)]
        if len(others) > 1 or not branches:
            raise InvalidAvroSchema("a union must be of null and one other type")
        reads = [branch.read for branch in branches]

        def read(data: bytes, at: int) -> tuple[Any, int]:
            branch, at = _read_long(data, at)
            if not 0 <= branch < len(reads):
                raise ValueError(f"the union has no branch {branch}")
            return reads[branch](data, at)

        if not others:
            return AvroType(read, NullType())
        (other,) = others
        return AvroType(read, other.spark, other.levels, other.fields)


def _array(item: AvroType) -> AvroType:
    def read(data: bytes, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while True:
            count, at = _count(data, at, len(items))
            if not count:
                return items, at
            for _ in range(count):
                value, at = item.read(data, at)
                items.append(value)

    return AvroType(read, ArrayType(item.spark), item.levels + 1, item.fields)


def _map(item: AvroType) -> AvroType:
    def read(data: bytes, at: int) -> tuple[list[tuple[str, Any]], int]:
        items: dict[str, Any] = {}
        total = 0
        while True:
            count, at = _count(data, at, total)
            if not count:
                return list(items.items()), at
            total += count
            for _ in range(count):
                key, at = _read_text(data, at)
                items[key], at = item.read(data, at)

    return AvroType(read, MapType(StringType(), item.spark), item.levels + 2, item.fields)


def _count(data: bytes, at: int, before: int) -> tuple[int, int]:
    """The number of items in the next block; 0: there is none."""
    count, at = _read_long(data, at)
    if count < 0:  # the size of the block in bytes follows
        count = -count
        _, at = _read_long(data, at)
    if before + count > ITEMS_MAX:
        raise ValueError(f"an array or map has more than {ITEMS_MAX} items")
    return count, at


def _enum(schema: dict[str, Any]) -> AvroType:
    symbols = schema.get("symbols")
    if not isinstance(symbols, list) or not all(isinstance(it, str) for it in symbols):
        raise InvalidAvroSchema("an enum has no list of symbols")

    def read(data: bytes, at: int) -> tuple[str, int]:
        index, at = _read_long(data, at)
        if not 0 <= index < len(symbols):
            raise ValueError(f"the enum has no symbol {index}")
        return symbols[index], at

    return AvroType(read, StringType())


def _fixed(schema: dict[str, Any]) -> AvroType:
    size = schema.get("size")
    if type(size) is not int or size < 0:
        raise InvalidAvroSchema(f"a fixed type has the size {size!r}")

    def read(data: bytes, at: int) -> tuple[bytes, int]:
        if size > len(data) - at:
            raise ValueError(f"a value of {size} bytes is longer than the payload")
        return data[at : at + size], at + size

    return AvroType(read, BinaryType())


def _name_of(schema: dict[str, Any], namespace: str) -> str:
    name = schema.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidAvroSchema("a named type has no name")
    return _full(name, str(schema.get("namespace", namespace)))


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"
