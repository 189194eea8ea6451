"""Administration of schemas. Any broker answers: schemas are in the metadata store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from magnetar.broker.errors import IncompatibleSchema, InvalidSchema, TopicNotFound
from magnetar.broker.operations.errors import InvalidArgument
from magnetar.broker.operations.policies import get_policy
from magnetar.broker.operations.schema_model import (
    Compatibility,
    SchemaBody,
    StoredSchema,
    StoredSchemas,
    Version,
)
from magnetar.broker.schemas import key_value
from magnetar.broker.schemas.schema import AVRO_TYPES, Schema, SchemaType
from magnetar.metadata.policies import SchemaCompatibility

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker
    from magnetar.metadata.model import SchemaVersion
    from magnetar.protos.names import TopicName


async def get_schema(broker: Broker, name: TopicName, version: int | None = None) -> StoredSchema:
    """Return a version of the schema; None: the newest version. Raises NoSchema."""
    return _shown(await broker.schemas.get(name, version))


async def list_schemas(broker: Broker, name: TopicName) -> StoredSchemas:
    """Return the versions since the last deletion, oldest first. Raises NoSchema."""
    await broker.schemas.get(name)
    found = await broker.schemas.versions(name)
    return StoredSchemas(getSchemaResponses=[_shown(it) for it in found])


async def upload_schema(broker: Broker, name: TopicName, body: SchemaBody) -> Version:
    """Add a version, unless an equal version exists. Returns the number of the version.

    Raises InvalidSchema, InvalidArgument, IncompatibleSchema, TooManySchemas.
    """
    compatibility = await _compatibility(broker, name)
    schema = await parsed_body(broker, body)
    return Version(version=await broker.schemas.put(name, schema, compatibility))


async def delete_schema(broker: Broker, name: TopicName, *, force: bool) -> Version:
    """Delete the schema, which adds a deletion mark to its versions. Returns the version number of
    the mark. Raises NoSchema.

    `force`: delete all versions and marks permanently. Returns the number of the newest of them.
    """
    return Version(version=await broker.schemas.delete(name, force=force))


async def check_schema(broker: Broker, name: TopicName, body: SchemaBody) -> Compatibility:
    """Check whether the schema could become a version. Raises InvalidSchema, InvalidArgument."""
    compatibility = await _compatibility(broker, name)
    schema = await parsed_body(broker, body)
    try:
        await broker.schemas.check(name, schema, compatibility)
    except IncompatibleSchema:
        return Compatibility(isCompatibility=False, schemaCompatibilityStrategy=compatibility)
    return Compatibility(isCompatibility=True, schemaCompatibilityStrategy=compatibility)


async def version_of_schema(broker: Broker, name: TopicName, body: SchemaBody) -> Version:
    """Return the number of the version that equals the body.

    Raises InvalidSchema, InvalidArgument, NoSchema.
    """
    schema = await parsed_body(broker, body)
    return Version(version=await broker.schemas.version_of(name, schema))


async def parsed_body(broker: Broker, body: SchemaBody) -> Schema:
    """Return the schema of the body. Raises InvalidSchema, InvalidArgument."""
    if body.type not in SchemaType.__members__:
        raise InvalidArgument("type", body.type, f"one of {', '.join(SchemaType.__members__)}")
    properties = "".join(map("".join, body.properties.items()))
    for what, text in (("schema", body.definition), ("properties", properties)):
        if not _is_unicode(text):
            raise InvalidArgument(what, text, "text of Unicode characters")
    kind, data = SchemaType[body.type], body.definition.encode()
    if kind is SchemaType.KEY_VALUE:
        data = _joined(data)
    return await broker.schemas.parsed(kind, data, body.type.title(), body.properties)


def _is_unicode(text: str) -> bool:
    """Return False if the text has half of a surrogate pair. A JSON escape can produce one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _compatibility(broker: Broker, name: TopicName) -> SchemaCompatibility:
    """Return the compatibility rule of a topic. The topic need not exist: its schema may exist
    first."""
    try:
        found = await get_policy(broker, name.base, "schema_compatibility", applied=True)
    except TopicNotFound:
        namespace = name.namespace_name
        found = await get_policy(broker, namespace, "schema_compatibility", applied=True)
    assert isinstance(found, SchemaCompatibility)
    return found


def _shown(stored: SchemaVersion) -> StoredSchema:
    kind = SchemaType(stored.type)
    data = stored.data.decode("utf-8", "replace")
    if kind is SchemaType.KEY_VALUE:
        data = _divided(stored)
    return StoredSchema(
        version=stored.version,
        type=kind.name,
        timestamp=stored.created_ms,
        data=data,
        properties=dict(stored.properties),
    )


def _divided(stored: SchemaVersion) -> str:
    """Return the definitions of a key and a value as one JSON object, as Pulsar shows them."""
    parts = key_value.parse(stored.data, stored.properties)
    names = {it.name for it in AVRO_TYPES}
    shown = [
        json.loads(it.data) if it.type in names else it.data.decode("utf-8", "replace")
        for it in parts
    ]
    return json.dumps({"key": shown[0], "value": shown[1]})


def _joined(text: bytes) -> bytes:
    try:
        tree = json.loads(text)
        parts = [tree["key"], tree["value"]]
        texts = [it if isinstance(it, str) else json.dumps(it) for it in parts]
        encoded = [it.encode() for it in texts]
    except (ValueError, RecursionError, KeyError, TypeError):
        expected = (
            "a KEY_VALUE schema must be a JSON object of Unicode text with the keys 'key' and"
            " 'value'"
        )
        raise InvalidSchema(expected) from None
    return b"".join(len(it).to_bytes(4) + it for it in encoded)
