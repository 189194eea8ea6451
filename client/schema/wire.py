"""Schemas in the commands of the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.client.schema.schema import SchemaInfo, SchemaType
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from magnetar.client.schema.schema import Schema

_WITH_DEFINITION: Final = frozenset(
    (
        SchemaType.JSON,
        SchemaType.AVRO,
        SchemaType.PROTOBUF,
        SchemaType.PROTOBUF_NATIVE,
        SchemaType.KEY_VALUE,
    )
)

VERSION_BYTES: Final = 8
"""The size of the schema version in a message. A producer can write a version of another size. The
client does not request such a version: the broker would refuse, and the client would ask again and
again."""


AUTO_CONSUME_SINCE: Final = pb.v21
"""The first version of the protocol in which SUBSCRIBE can carry AUTO_CONSUME_SCHEMA."""

AUTO_CONSUME_SCHEMA: Final = pb.Schema(
    name="AutoConsume", schema_data=b"", type=pb.Schema.AutoConsume
)


def wire_schema(schema: Schema | None) -> pb.Schema | None:
    """Return the schema for PRODUCER and SUBSCRIBE. None: the command has no schema.

    Returns None for the types NONE, BYTES and AUTO_CONSUME. For AUTO_CONSUME, the caller sends
    AUTO_CONSUME_SCHEMA if the broker knows it.
    """
    info = None if schema is None else schema.schema_info()
    if info is None or info.schema_type() <= SchemaType.NONE:
        return None
    kind = info.schema_type()
    return pb.Schema(
        name=info.name(),
        schema_data=info.data() if kind in _WITH_DEFINITION else b"",
        type=pb.Schema.Type.ValueType(kind),
        properties=[pb.KeyValue(key=key, value=it) for key, it in info.properties().items()],
    )


def schema_info(found: pb.Schema) -> SchemaInfo:
    """Return the schema that a broker answered. A type that the client does not know is NONE."""
    known = int(found.type) in set(SchemaType)
    return SchemaInfo(
        SchemaType(found.type) if known else SchemaType.NONE,
        found.name,
        found.schema_data,
        {item.key: item.value for item in found.properties},
    )
