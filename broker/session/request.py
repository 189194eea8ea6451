"""Pulsar's commands as the values that a topic takes, or the reason to refuse them."""

from __future__ import annotations

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
from magnetar.protos.names import Domain, TopicName


def topic_name(text: str) -> TopicName:
    """Raises InvalidTopicName, NotAllowed."""
    name = TopicName.parse(text)
    if name.domain is not Domain.PERSISTENT:
        raise NotAllowed(str(name), "non-persistent topics are not supported yet")
    return name


def producer(body: pb.CommandProducer, client: ClientInfo) -> tuple[TopicName, ProducerRequest]:
    """Raises InvalidTopicName, NotAllowed."""
    name = topic_name(body.topic)
    _require_no_schema("producer", body.schema if body.HasField("schema") else None)
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
    )


def subscribe(body: pb.CommandSubscribe, client: ClientInfo) -> tuple[TopicName, SubscribeRequest]:
    """Raises InvalidTopicName, NotAllowed."""
    name = topic_name(body.topic)
    _require_no_schema("consumer", body.schema if body.HasField("schema") else None)
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
        read_compacted=body.read_compacted,
        metadata={item.key: item.value for item in body.metadata},
        subscription_properties={item.key: item.value for item in body.subscription_properties},
    )


def position(item: pb.MessageIdData) -> Position:
    """Ids are signed numbers, sent as unsigned ones."""
    return Position(_signed(item.ledgerId), _signed(item.entryId))


def _key_shared(meta: pb.KeySharedMeta) -> KeySharedPolicy:
    return KeySharedPolicy(
        KeySharedMode(meta.keySharedMode),
        tuple(HashRange(it.start, it.end) for it in meta.hashRanges),
        meta.allowOutOfOrderDelivery,
    )


def _require_no_schema(what: str, schema: pb.Schema | None) -> None:
    """The broker does not check messages against a schema, so it must not accept one."""
    if schema is not None and schema.type not in (pb.Schema.Bytes, pb.Schema.AutoConsume):
        kind = pb.Schema.Type.Name(schema.type)
        raise NotAllowed(
            f"{what} with a {kind} schema", "schemas are not supported yet; send bytes"
        )


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
