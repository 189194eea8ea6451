"""The subscription that a consumer or reader asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.client.options import (
    ConsumerCryptoFailureAction,
    ConsumerKeySharedPolicy,
    ConsumerType,
    InitialPosition,
    KeySharedMode,
)
from magnetar.client.schema.schema import SchemaType
from magnetar.client.schema.wire import AUTO_CONSUME_SCHEMA, AUTO_CONSUME_SINCE, wire_schema
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.client.decoding import Decoder
    from magnetar.client.encryption import CryptoKeyReader
    from magnetar.client.message import MessageId
    from magnetar.client.policies import DeadLetterPolicy, RedeliveryBackoff
    from magnetar.client.schema.schema import Schema


@dataclass(frozen=True, slots=True)
class Subscription:
    """The subscription that a consumer or reader asks for, and the consumer's own limits."""

    name: str
    type: ConsumerType
    consumer_name: str | None
    priority_level: int  # the broker serves consumers with a lower number first
    properties: Mapping[str, str]
    initial_position: InitialPosition
    start: MessageId | None  # None: the subscription is durable; the broker knows its place
    inclusive: bool  # whether the message at `start`, or at the target of a seek, is included
    queue_messages_max: int
    batch_indexes: bool
    nack_delay_s: float
    unacked_timeout_s: float | None  # None: unacknowledged messages are not requested again
    key_shared: ConsumerKeySharedPolicy | None = None  # None: the default policy
    creates_topic: bool = True  # whether the broker may create the topic
    nack_backoff: RedeliveryBackoff | None = None  # None: `nack_delay_s`
    unacked_backoff: RedeliveryBackoff | None = None  # added to `unacked_timeout_s`; None: 0 s
    unacked_tick_s: float = 1.0
    chunked_max: int = 10  # incomplete chunked messages; 0: no limit
    chunked_expire_s: float = 60.0  # 0: incomplete chunked messages do not expire
    acknowledge_oldest_chunked: bool = False
    dead_letters: DeadLetterPolicy | None = None  # None: messages are redelivered without end
    fails_on_corrupt: bool = False  # whether the user gets the error of a corrupt entry
    key_reader: CryptoKeyReader | None = None  # None: encrypted entries cannot be decrypted
    crypto_failure: ConsumerCryptoFailureAction = ConsumerCryptoFailureAction.FAIL
    decoder: Decoder | None = None  # None: the values of messages are their payloads
    presents_schema: bool = True  # whether the broker gets the decoder's schema

    @property
    def schema(self) -> Schema | None:
        """The schema that the client presents to the broker. None: no schema."""
        if self.decoder is None or not self.presents_schema:
            return None
        return self.decoder.schema

    @property
    def is_durable(self) -> bool:
        return self.start is None

    @property
    def orders_negative_acks(self) -> bool:
        """Return whether a negative acknowledgement withholds the later messages of its key."""
        policy = self.key_shared
        is_keyed = self.type is ConsumerType.KeyShared
        return is_keyed and policy is not None and policy.ordered_negative_acks

    @property
    def is_ordered(self) -> bool:
        """Return whether one consumer at a time gets all messages in order.

        A redelivery of such a subscription starts again at the first unacknowledged message.
        """
        return self.type in (ConsumerType.Exclusive, ConsumerType.Failover)


def subscribe_command(
    topic: str, subscription: Subscription, protocol_version: int
) -> pb.CommandSubscribe:
    """Return the SUBSCRIBE command for one attachment. The caller adds the consumer id, the epoch,
    and the start message id of a subscription that is not durable.

    `protocol_version`: the version that the session has negotiated.
    """
    properties = subscription.properties
    return pb.CommandSubscribe(
        force_topic_creation=None if subscription.creates_topic else False,
        topic=topic,
        subscription=subscription.name,
        subType=_SUB_TYPES[subscription.type],
        consumer_name=subscription.consumer_name or None,
        priority_level=subscription.priority_level or None,
        durable=subscription.is_durable,
        metadata=[pb.KeyValue(key=key, value=value) for key, value in properties.items()],
        initialPosition=_INITIAL_POSITIONS[subscription.initial_position],
        keySharedMeta=_key_shared_meta(subscription),
        schema=_schema(subscription.schema, protocol_version),
    )


def _schema(schema: Schema | None, protocol_version: int) -> pb.Schema | None:
    if schema is not None and schema.schema_info().schema_type() is SchemaType.AUTO_CONSUME:
        return AUTO_CONSUME_SCHEMA if protocol_version >= AUTO_CONSUME_SINCE else None
    return wire_schema(schema)


def _key_shared_meta(subscription: Subscription) -> pb.KeySharedMeta | None:
    if subscription.type is not ConsumerType.KeyShared:
        return None
    policy = subscription.key_shared or ConsumerKeySharedPolicy()
    return pb.KeySharedMeta(
        keySharedMode=_KEY_SHARED_MODES[policy.key_shared_mode],
        hashRanges=[pb.IntRange(start=first, end=last) for first, last in policy.sticky_ranges],
        allowOutOfOrderDelivery=policy.allow_out_of_order_delivery,
        ordered_negative_acks=policy.ordered_negative_acks or None,
    )


_SUB_TYPES = {
    ConsumerType.Exclusive: pb.CommandSubscribe.Exclusive,
    ConsumerType.Shared: pb.CommandSubscribe.Shared,
    ConsumerType.Failover: pb.CommandSubscribe.Failover,
    ConsumerType.KeyShared: pb.CommandSubscribe.Key_Shared,
}
_KEY_SHARED_MODES = {
    KeySharedMode.AutoSplit: pb.AUTO_SPLIT,
    KeySharedMode.Sticky: pb.STICKY,
}
_INITIAL_POSITIONS = {
    InitialPosition.Latest: pb.CommandSubscribe.Latest,
    InitialPosition.Earliest: pb.CommandSubscribe.Earliest,
}
