"""The JSON bodies of policies in Pulsar's admin API, and their conversion to stored records.

`record` returns the value to store, and `of` makes the body from a stored value. The units differ:
Pulsar's retention has minutes and MB, the record has seconds and bytes. "No limit" is -1 in
Pulsar's rates, and 0 in the record.

A model refuses unknown keys, so that a misspelt key causes an error.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from magnetar.broker.operations.arguments import INT32_MAX, INT64_MAX, NO_BOOLEAN
from magnetar.metadata.policies import (
    UNLIMITED,
    AutoTopicCreation,
    BacklogAction,
    BacklogQuota,
    DelayedDelivery,
    InactiveMode,
    InactiveTopicDeletion,
    Persistence,
    Rate,
    Retention,
    SubscribeRate,
    SubscriptionType,
)
from magnetar.protos.entry import MESSAGE_BYTES_MAX

QUORUM_MAX: Final = 5
"""The limit of bookies of a ledger, as in Pulsar."""

PARTITIONS_MAX: Final = 10_000
"""The limit of partitions of an automatically created topic: each partition costs a record."""

MB: Final = 1 << 20
SIZE_MB_MAX: Final = INT32_MAX
TIME_S_MAX: Final = INT32_MAX

_Minutes = Annotated[int, Field(ge=UNLIMITED, le=TIME_S_MAX // 60), NO_BOOLEAN]
_SizeMB = Annotated[int, Field(ge=UNLIMITED, le=SIZE_MB_MAX), NO_BOOLEAN]
_Bytes = Annotated[int, Field(ge=UNLIMITED, le=INT64_MAX), NO_BOOLEAN]
_Seconds = Annotated[int, Field(ge=UNLIMITED, le=TIME_S_MAX), NO_BOOLEAN]
_Quorum = Annotated[int, Field(ge=1, le=QUORUM_MAX), NO_BOOLEAN]
_Limit = Annotated[int, Field(ge=UNLIMITED, le=INT32_MAX, description="-1: no limit"), NO_BOOLEAN]
_ByteLimit = Annotated[
    int, Field(ge=UNLIMITED, le=(1 << 53), description="-1: no limit"), NO_BOOLEAN
]
_Period = Annotated[int, Field(ge=1, le=86_400, description="seconds"), NO_BOOLEAN]
_TickMs = Annotated[
    int,
    Field(ge=1, le=INT32_MAX, description="precision of the delay, in milliseconds"),
    NO_BOOLEAN,
]
_DelayMs = Annotated[int, Field(ge=0, le=INT64_MAX, description="0: no limit"), NO_BOOLEAN]
_Partitions = Annotated[int, Field(ge=0, le=PARTITIONS_MAX), NO_BOOLEAN]
_MarkDeleteRate = Annotated[
    float,
    Field(
        ge=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="stored for tools of Pulsar, not applied: the broker groups cursor writes",
    ),
    NO_BOOLEAN,
]
_InactiveS = Annotated[int, Field(ge=1, le=INT32_MAX), NO_BOOLEAN]

Count = Annotated[int, Field(ge=0, le=INT32_MAX), NO_BOOLEAN]
"""A limit; 0: no limit."""

MessageSize = Annotated[int, Field(ge=0, le=MESSAGE_BYTES_MAX), NO_BOOLEAN]

Types = Annotated[list[SubscriptionType], Field(min_length=1, max_length=16)]


class _Body(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )


class RetentionBody(_Body):
    """The limits of time and size for keeping acknowledged messages. 0: keep none; -1: no limit."""

    retention_time_in_minutes: _Minutes
    retention_size_in_mb: _SizeMB = Field(alias="retentionSizeInMB")

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        time, size = self.retention_time_in_minutes, self.retention_size_in_mb
        if (time == 0) != (size == 0):
            raise ValueError(
                f"retentionTimeInMinutes {time} and retentionSizeInMB {size}: if one is 0, nothing"
                " is kept. Set both to 0, or replace the 0 with -1 (no limit)"
            )
        return self

    def record(self) -> Retention:
        time, size = self.retention_time_in_minutes, self.retention_size_in_mb
        return Retention(
            time_s=time * 60 if time >= 0 else UNLIMITED,
            size_bytes=size * MB if size >= 0 else UNLIMITED,
        )

    @classmethod
    def of(cls, record: Retention) -> Self:
        """Round up: a retention of less than a minute or MB must not be shown as none."""
        time = -(-record.time_s // 60) if record.time_s >= 0 else UNLIMITED
        size = -(-record.size_bytes // MB) if record.size_bytes >= 0 else UNLIMITED
        return cls.model_construct(retention_time_in_minutes=time, retention_size_in_mb=size)


class BacklogQuotaBody(_Body):
    """The broker's action for a topic whose backlog exceeds a size or an age. -1: no quota."""

    limit_size: _Bytes | None = Field(default=None, description="bytes")
    limit_time: _Seconds | None = Field(default=None, description="seconds")
    limit: _Bytes | None = Field(default=None, description="older name of limitSize")
    policy: BacklogAction

    def size_record(self) -> BacklogQuota | None:
        """Return the quota by size. None: the body has no size."""
        size = self.limit if self.limit_size is None else self.limit_size
        return None if size is None else BacklogQuota(size, self.policy)

    def age_record(self) -> BacklogQuota | None:
        """Return the quota by age. None: the body has no age."""
        return None if self.limit_time is None else BacklogQuota(self.limit_time, self.policy)

    @classmethod
    def of_size(cls, record: BacklogQuota) -> Self:
        return cls(
            limit=record.limit,
            limit_size=record.limit,
            limit_time=UNLIMITED,
            policy=record.action,
        )

    @classmethod
    def of_age(cls, record: BacklogQuota) -> Self:
        return cls(
            limit=UNLIMITED, limit_size=UNLIMITED, limit_time=record.limit, policy=record.action
        )


class PersistenceBody(_Body):
    """The quorums of new ledgers, and Pulsar's limit for the writes of cursors. The limit is stored
    for tools of Pulsar. The broker does not apply it: it groups the writes of cursors."""

    bookkeeper_ensemble: _Quorum
    bookkeeper_write_quorum: _Quorum
    bookkeeper_ack_quorum: _Quorum
    managed_ledger_max_mark_delete_rate: _MarkDeleteRate = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        ensemble, write = self.bookkeeper_ensemble, self.bookkeeper_write_quorum
        if not self.bookkeeper_ack_quorum <= write <= ensemble:
            raise ValueError(
                f"bookkeeperEnsemble {ensemble}, bookkeeperWriteQuorum {write},"
                f" bookkeeperAckQuorum {self.bookkeeper_ack_quorum}:"
                " expected ensemble >= write quorum >= ack quorum"
            )
        return self

    def record(self) -> Persistence:
        return Persistence(
            self.bookkeeper_ensemble,
            self.bookkeeper_write_quorum,
            self.bookkeeper_ack_quorum,
            self.managed_ledger_max_mark_delete_rate,
        )

    @classmethod
    def of(cls, record: Persistence) -> Self:
        return cls.model_construct(
            bookkeeper_ensemble=record.ensemble_size,
            bookkeeper_write_quorum=record.write_quorum,
            bookkeeper_ack_quorum=record.ack_quorum,
            managed_ledger_max_mark_delete_rate=record.mark_delete_rate,
        )


class DelayedDeliveryBody(_Body):
    """Delayed delivery: consumers get a message later if its producer asks for that."""

    active: bool
    tick_time: _TickMs = 1_000
    max_delivery_delay_in_millis: _DelayMs = 0

    def record(self) -> DelayedDelivery:
        return DelayedDelivery(self.active, self.tick_time, self.max_delivery_delay_in_millis)

    @classmethod
    def of(cls, record: DelayedDelivery) -> Self:
        return cls(
            active=record.enabled,
            tick_time=record.tick_ms,
            max_delivery_delay_in_millis=record.delay_ms_max,
        )


class AutoTopicCreationBody(_Body):
    """The automatic creation of topics, by a producer or consumer that names a missing topic."""

    allow_auto_topic_creation: bool
    topic_type: Literal["non-partitioned", "partitioned"] = "non-partitioned"
    default_num_partitions: _Partitions | None = None

    @model_validator(mode="after")
    def _partitions_fit(self) -> Self:
        partitioned, count = self.topic_type == "partitioned", self.default_num_partitions
        # As in Pulsar, no number is needed if topics are not created automatically.
        is_missing = count is None and self.allow_auto_topic_creation
        if partitioned and (is_missing or count == 0):
            raise ValueError("defaultNumPartitions must be at least 1 if topicType is partitioned")
        if not partitioned and count:
            raise ValueError(
                f"defaultNumPartitions {count} needs topicType partitioned, not non-partitioned"
            )
        return self

    def record(self) -> AutoTopicCreation:
        return AutoTopicCreation(self.allow_auto_topic_creation, self.default_num_partitions or 0)

    @classmethod
    def of(cls, record: AutoTopicCreation) -> Self:
        return cls(
            allow_auto_topic_creation=record.enabled,
            topic_type="partitioned" if record.partitions else "non-partitioned",
            default_num_partitions=record.partitions or None,
        )


class AutoSubscriptionCreationBody(_Body):
    """The automatic creation of subscriptions, by a consumer that names a missing subscription."""

    allow_auto_subscription_creation: bool

    def record(self) -> bool:
        return self.allow_auto_subscription_creation

    @classmethod
    def of(cls, record: bool) -> Self:
        return cls(allow_auto_subscription_creation=record)


class PublishRateBody(_Body):
    """The limits of messages and bytes per second that all producers of a topic together may
    publish."""

    publish_throttling_rate_in_msg: _Limit = UNLIMITED
    publish_throttling_rate_in_byte: _ByteLimit = UNLIMITED

    def record(self) -> Rate:
        return Rate(
            _stored(self.publish_throttling_rate_in_msg),
            _stored(self.publish_throttling_rate_in_byte),
            1,
        )

    @classmethod
    def of(cls, record: Rate) -> Self:
        return cls(
            publish_throttling_rate_in_msg=_shown(record.messages_max),
            publish_throttling_rate_in_byte=_shown(record.bytes_max),
        )


class DispatchRateBody(_Body):
    """The limits of messages and bytes that consumers may get in each period."""

    dispatch_throttling_rate_in_msg: _Limit = UNLIMITED
    dispatch_throttling_rate_in_byte: _ByteLimit = UNLIMITED
    relative_to_publish_rate: Literal[False] = Field(
        default=False, description="a rate relative to the publish rate is not supported"
    )
    rate_period_in_second: _Period = 1

    def record(self) -> Rate:
        return Rate(
            _stored(self.dispatch_throttling_rate_in_msg),
            _stored(self.dispatch_throttling_rate_in_byte),
            self.rate_period_in_second,
        )

    @classmethod
    def of(cls, record: Rate) -> Self:
        return cls(
            dispatch_throttling_rate_in_msg=_shown(record.messages_max),
            dispatch_throttling_rate_in_byte=_shown(record.bytes_max),
            rate_period_in_second=record.period_s,
        )


class SubscribeRateBody(_Body):
    """The number of times that one consumer may subscribe in each period."""

    subscribe_throttling_rate_per_consumer: _Limit
    rate_period_in_second: _Period = 30

    def record(self) -> SubscribeRate:
        return SubscribeRate(
            _stored(self.subscribe_throttling_rate_per_consumer), self.rate_period_in_second
        )

    @classmethod
    def of(cls, record: SubscribeRate) -> Self:
        return cls(
            subscribe_throttling_rate_per_consumer=_shown(record.subscribes_max),
            rate_period_in_second=record.period_s,
        )


class InactiveTopicBody(_Body):
    """The deletion of topics that are not used."""

    inactive_topic_delete_mode: InactiveMode
    max_inactive_duration_seconds: _InactiveS
    delete_while_inactive: bool

    def record(self) -> InactiveTopicDeletion:
        return InactiveTopicDeletion(
            self.delete_while_inactive,
            self.inactive_topic_delete_mode,
            self.max_inactive_duration_seconds,
        )

    @classmethod
    def of(cls, record: InactiveTopicDeletion) -> Self:
        return cls(
            inactive_topic_delete_mode=record.mode,
            max_inactive_duration_seconds=record.after_s,
            delete_while_inactive=record.enabled,
        )


def _stored(limit: int) -> int:
    return max(limit, 0)


def _shown(limit: int) -> int:
    return limit or UNLIMITED
