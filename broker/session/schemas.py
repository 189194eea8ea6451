"""GET_SCHEMA, GET_OR_CREATE_SCHEMA, and the schemas that producers and consumers present."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from magnetar.broker.catalog.reserved import is_system
from magnetar.broker.errors import NotAllowed
from magnetar.broker.schemas import registry
from magnetar.broker.schemas.registry import SchemaRules
from magnetar.broker.session import reply, request
from magnetar.broker.topic.live import NonPersistentTopic
from magnetar.broker.topic.topic import PersistentTopic
from magnetar.metadata.policies import SchemaCompatibility

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from magnetar.broker.schemas.schema import Schema
    from magnetar.broker.session.context import Context
    from magnetar.broker.topic.protocol import ServedTopic
    from magnetar.protos import pulsar_pb2 as pb
    from magnetar.protos.names import TopicName

VERSION_BYTES = 8


async def get_schema(context: Context, body: pb.CommandGetSchema) -> bytes:
    """Answer with the requested version of the topic's schema, or with the newest one. Every broker
    can answer. Raises NotAllowed if the version in the request has not 8 bytes."""
    name = request.topic_name(body.topic)
    version: int | None = None
    if body.schema_version:
        if len(body.schema_version) != VERSION_BYTES:
            what = f"schema version of {len(body.schema_version)} bytes"
            raise NotAllowed(what, f"a version has {VERSION_BYTES} bytes")
        version = int.from_bytes(body.schema_version, signed=True)
    async with context.schemas:
        return reply.schema(body.request_id, await context.broker.schemas.get(name, version))


async def get_or_create_schema(context: Context, body: pb.CommandGetOrCreateSchema) -> bytes:
    """Answer with the version of a schema, and add the schema if it is new. Apache's Java client
    asks for the version of a schema of bytes, too, and expects an empty version. Its dead-letter
    producer asks before each message."""
    name = request.topic_name(body.topic)
    schema = await presented(context, body)
    topic = await context.broker.topic(name, create=False)
    return reply.schema_version(body.request_id, await admit_producer(context, topic, schema))


async def presented(
    context: Context, body: pb.CommandProducer | pb.CommandSubscribe | pb.CommandGetOrCreateSchema
) -> Schema | None:
    """Return the schema in a command. None: no schema, BYTES or AUTO_CONSUME. Raises
    InvalidSchema."""
    async with context.schemas:
        return await request.schema(context.broker.schemas, body)


async def admit_producer(context: Context, topic: ServedTopic, schema: Schema | None) -> bytes:
    """Return the schema version with which the producer writes; b"": it has no schema.

    Raises IncompatibleSchema, TooManySchemas, TopicClosing, PoliciesUnavailable, MetadataError."""
    rules = _rules_of(context, topic.name)
    with _held(topic):
        async with context.schemas:
            schemas = context.broker.schemas
            version = await registry.admit_producer(schemas, topic.name, schema, rules)
    return reply.encoded_version(version)


async def admit_consumer(context: Context, topic: ServedTopic, schema: Schema) -> None:
    """Check that a consumer with this schema can read the topic. On an unused topic, the schema
    becomes the first version. Raises IncompatibleSchema, TooManySchemas, TopicClosing,
    PoliciesUnavailable, MetadataError."""
    rules = _rules_of(context, topic.name)
    with _held(topic):
        async with context.schemas:
            await registry.admit_consumer(
                context.broker.schemas, topic.name, schema, rules, in_use=_in_use(topic)
            )


def _held(topic: ServedTopic) -> AbstractContextManager[None]:
    """Hold up the topic's deletion while a schema is stored. A schema stored after the deletion
    would be the first schema of the next topic of that name."""
    return topic.held() if isinstance(topic, PersistentTopic) else nullcontext()


def _rules_of(context: Context, name: TopicName) -> SchemaRules:
    """Return the rules for the topic's schemas. Raises PoliciesUnavailable."""
    if is_system(name):
        return SchemaRules(
            SchemaCompatibility.ALWAYS_COMPATIBLE, auto_update=True, validation=False
        )
    return SchemaRules.of(context.broker.policies.policies_of(name))


def _in_use(topic: ServedTopic) -> bool:
    """Return True if the topic has messages, producers, or consumers other than AUTO_CONSUME. On a
    topic without a schema, these use bytes."""
    if isinstance(topic, NonPersistentTopic):
        has_messages = topic.published.messages > 0
        found = [it.consumers.values() for it in topic.subscriptions.values()]
    else:
        assert isinstance(topic, PersistentTopic)
        has_messages = topic.log.stored_bytes > 0
        found = [it.consumers.values() for it in topic.all_subscriptions]
    takes_bytes = any(not it.request.auto_consume for consumers in found for it in consumers)
    return has_messages or bool(topic.producers) or takes_bytes
