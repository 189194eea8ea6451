"""Converts Pulsar's commands to the values that a topic accepts, or refuses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.key_shared_policy import HashRange, KeySharedMode, KeySharedPolicy
from magnetar.broker.errors import NotAllowed
from magnetar.broker.log.position import Position
from magnetar.broker.topic.contract import (
    AccessMode,
    ClientInfo,
    InitialPosition,
    ProducerRequest,
    SubscribeRequest,
    SubscriptionType,
)
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.schemas.registry import SchemaRegistry
    from magnetar.broker.schemas.schema import Schema

NAME_BYTES_MAX: Final = 1_024
"""The limit for the name of a subscription, producer or consumer. The name of a topic has the same
limit (protos/names.py). Names are part of the topic's record, of statistics and of metrics."""

_NO_SCHEMA: Final = (pb.Schema.Bytes, pb.Schema.AutoConsume)

METADATA_BYTES_MAX: Final = 64 << 10
"""The limit for the keys and values of all properties of a producer, consumer or subscription, in
UTF-8. The topic's record stores the properties of a subscription."""


def topic_name(text: str) -> TopicName:
    """Parse a topic's name. Raises InvalidTopicName."""
    return TopicName.parse(text)


def producer(body: pb.CommandProducer, client: ClientInfo) -> tuple[TopicName, ProducerRequest]:
    """Return the topic and the request of a PRODUCER. Raises InvalidTopicName, NotAllowed."""
    name = topic_name(body.topic)
    _require_short("producer name", body.producer_name)
    _require_short("initial subscription name", body.initial_subscription_name)
    _require_small("producer metadata", body.metadata)
    if body.txn_enabled:
        raise NotAllowed("producer with transactions", "transactions are not supported")
    return name, ProducerRequest(
        producer_id=body.producer_id,
        name=body.producer_name,
        client=client,
        user_provided_name=body.user_provided_producer_name,
        epoch=body.epoch,
        access_mode=AccessMode(body.producer_access_mode),
        topic_epoch=body.topic_epoch if body.HasField("topic_epoch") else None,
        metadata={item.key: item.value for item in body.metadata},
        stops_at_refusal=body.stops_at_refusal,
    )


def subscribe(body: pb.CommandSubscribe, client: ClientInfo) -> tuple[TopicName, SubscribeRequest]:
    """Return the topic and the request of a SUBSCRIBE. Raises InvalidTopicName, NotAllowed."""
    name = topic_name(body.topic)
    _require_short("subscription name", body.subscription)
    _require_short("consumer name", body.consumer_name)
    _require_small("consumer metadata", body.metadata)
    _require_small("subscription properties", body.subscription_properties)
    return name, SubscribeRequest(
        consumer_id=body.consumer_id,
        subscription=body.subscription,
        type=SubscriptionType(body.subType),
        client=client,
        consumer_name=body.consumer_name,
        durable=body.durable,
        initial_position=InitialPosition(body.initialPosition),
        start=position(body.start_message_id) if body.HasField("start_message_id") else None,
        start_rollback_s=body.start_message_rollback_duration_sec,
        priority=body.priority_level,
        key_shared=_key_shared(body.keySharedMeta) if body.HasField("keySharedMeta") else None,
        consumer_epoch=body.consumer_epoch if body.HasField("consumer_epoch") else None,
        read_compacted=body.read_compacted,
        metadata={item.key: item.value for item in body.metadata},
        subscription_properties={item.key: item.value for item in body.subscription_properties},
        auto_consume=body.schema.type == pb.Schema.AutoConsume,
    )


def position(item: pb.MessageIdData) -> Position:
    """Return the position. Ids are signed numbers that travel as unsigned ones."""
    return Position(_signed(item.ledgerId), _signed(item.entryId))


def _key_shared(meta: pb.KeySharedMeta) -> KeySharedPolicy:
    return KeySharedPolicy(
        KeySharedMode(meta.keySharedMode),
        tuple(HashRange(it.start, it.end) for it in meta.hashRanges),
        meta.allowOutOfOrderDelivery,
        meta.ordered_negative_acks,
    )


async def schema(
    registry: SchemaRegistry,
    body: pb.CommandProducer | pb.CommandSubscribe | pb.CommandGetOrCreateSchema,
) -> Schema | None:
    """Return the schema in a command. None: no schema, BYTES or AUTO_CONSUME. Raises
    InvalidSchema."""
    if not body.HasField("schema") or body.schema.type in _NO_SCHEMA:
        return None
    found = body.schema
    properties = {item.key: item.value for item in found.properties}
    return await registry.parsed(found.type, found.schema_data, found.name, properties)


def _require_short(what: str, name: str) -> None:
    size = len(name.encode())
    if size > NAME_BYTES_MAX:
        raise NotAllowed(what, f"it has {size} bytes; the limit is {NAME_BYTES_MAX}")


def _require_small(what: str, items: Sequence[pb.KeyValue]) -> None:
    size = sum([len(item.key.encode()) + len(item.value.encode()) for item in items])
    if size > METADATA_BYTES_MAX:
        raise NotAllowed(
            what, f"keys and values have {size} bytes; the limit is {METADATA_BYTES_MAX}"
        )


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
