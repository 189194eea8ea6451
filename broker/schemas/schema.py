"""A schema that a client or an administrator presents: checked, bounded, comparable. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import InvalidSchema
from magnetar.broker.schemas import avro, key_value, protobuf
from magnetar.broker.schemas.definition import json_tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.metadata.model import SchemaVersion

SCHEMA_BYTES_MAX: Final = 128 << 10
"""The maximum size of a definition with its name and properties. All versions of a schema share one
record of 1,000 KiB."""

PROPERTIES_MAX: Final = 256
"""The maximum number of properties of a schema. Each property takes some microseconds whenever the
record is read."""


class SchemaType(IntEnum):
    """The numbers are those of the protocol, the names those of Pulsar's admin API. The client has
    a list of its own, with types that never reach a broker."""

    NONE = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    BOOLEAN = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FLOAT = 10
    DOUBLE = 11
    DATE = 12
    TIME = 13
    TIMESTAMP = 14
    KEY_VALUE = 15
    INSTANT = 16
    LOCAL_DATE = 17
    LOCAL_TIME = 18
    LOCAL_DATE_TIME = 19
    PROTOBUF_NATIVE = 20
    AUTO_CONSUME = 21
    EXTERNAL = 22


AVRO_TYPES: Final = frozenset((SchemaType.AVRO, SchemaType.JSON, SchemaType.PROTOBUF))
"""The types whose definitions are Avro schemas."""

_JSON_SCHEMA_TYPES: Final = frozenset(
    ("any", "array", "boolean", "integer", "null", "number", "object", "string")
)
"""The values of "type" in a JSON schema, which old clients send for SchemaType.JSON."""

_UNKNOWN: Final = frozenset((SchemaType.NONE, SchemaType.AUTO_CONSUME, SchemaType.EXTERNAL))


@dataclass(frozen=True, slots=True)
class Schema:
    """A definition that is valid for its type."""

    type: SchemaType
    data: bytes
    name: str
    properties: Mapping[str, str]
    fingerprint: bytes  # equal for equal schemas


def parse(kind: int, data: bytes, name: str, properties: Mapping[str, str]) -> Schema:
    """Check a schema that a client or an administrator sent. Raises InvalidSchema."""
    try:
        type_ = SchemaType(kind)
    except ValueError:
        raise InvalidSchema(f"type {kind} is unknown") from None
    if type_ in _UNKNOWN:
        raise InvalidSchema(f"type {type_.name} cannot be stored")
    if len(properties) > PROPERTIES_MAX:
        raise InvalidSchema(f"it has {len(properties)} properties; the limit is {PROPERTIES_MAX}")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in properties.items())
    size += len(data) + len(name.encode())
    if size > SCHEMA_BYTES_MAX:
        raise InvalidSchema(f"it has {size} bytes; the limit is {SCHEMA_BYTES_MAX}")
    if type_ in AVRO_TYPES or type_ in (SchemaType.PROTOBUF_NATIVE, SchemaType.KEY_VALUE):
        canonical = _canonical(type_, data, properties)
    else:  # Apache's Python client sends "null" as the definition of a string, the Java client b""
        data = canonical = b""
    digest = hashlib.sha256(type_.name.encode() + b"\0" + canonical).digest()
    return Schema(type_, data, name, dict(properties), digest)


def of_version(stored: SchemaVersion) -> Schema:
    """The schema of a stored version, which was checked when it was stored."""
    return Schema(
        SchemaType(stored.type), stored.data, stored.name, stored.properties, stored.fingerprint
    )


def _canonical(kind: SchemaType, data: bytes, properties: Mapping[str, str]) -> bytes:
    try:
        match kind:
            case SchemaType.JSON:
                return _canonical_json(data)
            case SchemaType.PROTOBUF_NATIVE:
                return protobuf.parse(data).canonical
            case SchemaType.KEY_VALUE:
                parts = key_value.parse(data, properties)
                return b"".join(
                    parse(SchemaType[it.type], it.data, "", {}).fingerprint
                    if it.type in SchemaType.__members__ and SchemaType[it.type] not in _UNKNOWN
                    else hashlib.sha256(it.type.encode() + b"\0" + it.data).digest()
                    for it in parts
                )
            case _:
                return avro.parse(data).canonical.encode()
    except (avro.NotAvro, protobuf.NotProtobuf, key_value.NotKeyValue) as error:
        raise InvalidSchema(f"not a valid {kind.name} schema: {error}") from None


def _canonical_json(data: bytes) -> bytes:
    """The canonical form of a definition of type JSON. Old clients send a JSON schema, new clients
    an Avro schema. Raises NotAvro."""
    try:
        return avro.parse(data).canonical.encode()
    except avro.NotAvro:
        if _is_json_schema(data):
            return data
        raise


def _is_json_schema(data: bytes) -> bool:
    """Return whether Pulsar accepts the definition as a JSON schema. Such a schema is compatible
    with every other one, so an invalid Avro schema must not pass for it."""
    try:
        match json_tree(data):
            case {"type": str(kind)}:
                return kind in _JSON_SCHEMA_TYPES
    except ValueError:
        pass
    return False
