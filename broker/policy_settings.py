"""The broker's default policies, under Pulsar's names, for namespaces and topics that set none.

Each setting is the default of one policy, or of a part of a policy. A namespace overrides the
default, and a topic overrides both.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from magnetar.metadata.policies import (
    UNLIMITED,
    AutoTopicCreation,
    BacklogAction,
    BacklogQuota,
    DelayedDelivery,
    EffectivePolicies,
    InactiveMode,
    InactiveTopicDeletion,
    Persistence,
    Rate,
    Retention,
    SchemaCompatibility,
    SubscribeRate,
    SubscriptionType,
)
from magnetar.runtime.config import RoleConfig

_INT32_MAX: Final = (1 << 31) - 1
_BYTES_MAX: Final = 1 << 53


class PolicySettings(RoleConfig):
    # ---- storage ----
    default_retention_time_in_minutes: int = Field(
        default=0,
        ge=UNLIMITED,
        le=_INT32_MAX,
        description="time for which acknowledged messages are kept; -1: no limit",
    )
    default_retention_size_in_mb: int = Field(
        default=0,
        ge=UNLIMITED,
        le=_INT32_MAX,
        description="acknowledged messages are kept while the whole topic, with its backlog, is"
        " smaller than this; -1: no limit",
    )
    ttl_duration_default_in_seconds: int = Field(
        default=0,
        ge=0,
        le=_INT32_MAX,
        description="age at which unacknowledged messages expire; 0: never",
    )
    subscription_expiration_time_minutes: int = Field(
        default=0,
        ge=0,
        le=_INT32_MAX,
        description="time after which an unused subscription is deleted; 0: never",
    )
    backlog_quota_default_limit_gb: float = Field(
        default=UNLIMITED,
        ge=UNLIMITED,
        le=1 << 32,
        allow_inf_nan=False,
        description="quota for the size of a topic's backlog; -1: no quota",
    )
    backlog_quota_default_limit_second: int = Field(
        default=UNLIMITED,
        ge=UNLIMITED,
        le=_INT32_MAX,
        description="quota for the age of a topic's backlog; -1: no quota",
    )
    backlog_quota_default_retention_policy: BacklogAction = Field(
        default=BacklogAction.HOLD_PRODUCERS,
        description="what the broker does when a backlog exceeds its quota",
    )
    managed_ledger_default_mark_delete_rate_limit: float = Field(
        default=1.0,
        ge=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="stored for tools of Pulsar, not applied: the broker groups cursor writes",
    )

    # ---- features ----
    broker_deduplication_enabled: bool = Field(
        default=False, description="drop messages that are stored already"
    )
    delayed_delivery_enabled: bool = Field(
        default=True, description="deliver messages later when their producers ask for it"
    )
    delayed_delivery_tick_time_millis: int = Field(
        default=1_000, ge=1, le=_INT32_MAX, description="precision of delayed delivery"
    )
    delayed_delivery_max_delay_in_millis: int = Field(
        default=0,
        ge=0,
        le=1 << 53,
        description="the longest delay that a producer may ask for; 0: no limit",
    )
    allow_auto_topic_creation: bool = Field(
        default=True, description="producers and consumers create the topics that they name"
    )
    allow_auto_topic_creation_type: Literal["non-partitioned", "partitioned"] = Field(
        default="non-partitioned", description="the type of an automatically created topic"
    )
    default_num_partitions: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="partitions of an automatically created partitioned topic",
    )
    allow_auto_subscription_creation: bool = Field(
        default=True, description="consumers create the subscriptions that they name"
    )
    subscription_types_enabled: frozenset[SubscriptionType] = Field(
        default=frozenset(SubscriptionType),
        min_length=1,
        description="the allowed subscription types",
    )
    broker_delete_inactive_topics_enabled: bool = Field(
        default=False, description="delete topics that are not used"
    )
    broker_delete_inactive_topics_mode: InactiveMode = Field(
        default=InactiveMode.NO_SUBSCRIPTIONS, description="the topics that count as unused"
    )
    broker_delete_inactive_topics_max_inactive_duration_in_seconds: int = Field(
        default=60, ge=1, le=_INT32_MAX, description="time after which an unused topic is deleted"
    )

    schema_compatibility_strategy: SchemaCompatibility = Field(
        default=SchemaCompatibility.FULL,
        description="the compatibility rule for a new version of a schema",
    )
    is_allow_auto_update_schema_enabled: bool = Field(
        default=True, description="clients may add versions of a schema"
    )
    is_schema_validation_enforced: bool = Field(
        default=False, description="refuse producers without a schema on a topic with a schema"
    )

    # ---- limits; 0: no limit ----
    max_producers_per_topic: int = Field(
        default=0, ge=0, le=_INT32_MAX, description="producers of a topic; 0: no limit"
    )
    max_consumers_per_topic: int = Field(
        default=0, ge=0, le=_INT32_MAX, description="consumers of a topic; 0: no limit"
    )
    max_consumers_per_subscription: int = Field(
        default=0, ge=0, le=_INT32_MAX, description="consumers of a subscription; 0: no limit"
    )
    max_subscriptions_per_topic: int = Field(
        default=0, ge=0, le=_INT32_MAX, description="subscriptions of a topic; 0: no limit"
    )
    max_unacked_messages_per_consumer: int = Field(
        default=50_000,
        ge=0,
        le=_INT32_MAX,
        description="unacknowledged messages of a consumer before dispatch stops; 0: no limit",
    )
    max_unacked_messages_per_subscription: int = Field(
        default=200_000,
        ge=0,
        le=_INT32_MAX,
        description="unacknowledged messages of a subscription before dispatch stops; 0: no limit",
    )
    max_publish_rate_per_topic_in_messages: int = Field(
        default=0,
        ge=0,
        le=_INT32_MAX,
        description="messages per second that a topic accepts; 0: no limit",
    )
    max_publish_rate_per_topic_in_bytes: int = Field(
        default=0,
        ge=0,
        le=_BYTES_MAX,
        description="bytes per second that a topic accepts; 0: no limit",
    )
    dispatch_throttling_rate_per_topic_in_msg: int = Field(
        default=0,
        ge=0,
        le=_INT32_MAX,
        description="messages per second that a topic delivers; 0: no limit",
    )
    dispatch_throttling_rate_per_topic_in_byte: int = Field(
        default=0,
        ge=0,
        le=_BYTES_MAX,
        description="bytes per second that a topic delivers; 0: no limit",
    )
    dispatch_throttling_rate_per_subscription_in_msg: int = Field(
        default=0,
        ge=0,
        le=_INT32_MAX,
        description="messages per second that a subscription delivers; 0: no limit",
    )
    dispatch_throttling_rate_per_subscription_in_byte: int = Field(
        default=0,
        ge=0,
        le=_BYTES_MAX,
        description="bytes per second that a subscription delivers; 0: no limit",
    )
    subscribe_throttling_rate_per_consumer: int = Field(
        default=0,
        ge=0,
        le=_INT32_MAX,
        description="subscribe requests of one consumer in a period; 0: no limit",
    )
    subscribe_rate_period_per_consumer_in_second: int = Field(
        default=30,
        ge=1,
        le=86_400,
        description="the period of `subscribe_throttling_rate_per_consumer`",
    )

    @field_validator("subscription_types_enabled", mode="before")
    @classmethod
    def split(cls, given: Any) -> Any:
        """Split the text of a flag or of the environment: names with commas between them."""
        return [name.strip() for name in given.split(",")] if isinstance(given, str) else given

    @model_validator(mode="after")
    def retention_is_whole(self) -> Self:
        time, size = self.default_retention_time_in_minutes, self.default_retention_size_in_mb
        if (time == 0) != (size == 0):
            raise ValueError(
                f"default_retention_time_in_minutes {time} and default_retention_size_in_mb"
                f" {size}: if one is 0, nothing is kept. Set both to 0, or replace the 0 with -1"
                " (no limit)"
            )
        return self

    def default_policies(
        self, *, ensemble_size: int, write_quorum: int, ack_quorum: int
    ) -> EffectivePolicies:
        """Return the policies of a topic that sets none, in a namespace that sets none."""
        minutes, megabytes = (
            self.default_retention_time_in_minutes,
            self.default_retention_size_in_mb,
        )
        gigabytes, action = (
            self.backlog_quota_default_limit_gb,
            self.backlog_quota_default_retention_policy,
        )
        return EffectivePolicies(
            retention=Retention(
                minutes * 60 if minutes > 0 else minutes,
                megabytes << 20 if megabytes > 0 else megabytes,
            ),
            message_ttl_s=self.ttl_duration_default_in_seconds,
            backlog_quota_bytes=BacklogQuota(
                UNLIMITED if gigabytes < 0 else int(gigabytes * (1 << 30)), action
            ),
            backlog_quota_age_s=BacklogQuota(self.backlog_quota_default_limit_second, action),
            persistence=Persistence(
                ensemble_size,
                write_quorum,
                ack_quorum,
                self.managed_ledger_default_mark_delete_rate_limit,
            ),
            deduplication=self.broker_deduplication_enabled,
            delayed_delivery=DelayedDelivery(
                self.delayed_delivery_enabled,
                self.delayed_delivery_tick_time_millis,
                self.delayed_delivery_max_delay_in_millis,
            ),
            auto_topic_creation=AutoTopicCreation(
                self.allow_auto_topic_creation,
                self.default_num_partitions
                if self.allow_auto_topic_creation_type == "partitioned"
                else 0,
            ),
            auto_subscription_creation=self.allow_auto_subscription_creation,
            producers_max=self.max_producers_per_topic,
            consumers_max=self.max_consumers_per_topic,
            consumers_per_subscription_max=self.max_consumers_per_subscription,
            subscriptions_max=self.max_subscriptions_per_topic,
            unacked_per_consumer_max=self.max_unacked_messages_per_consumer,
            unacked_per_subscription_max=self.max_unacked_messages_per_subscription,
            publish_rate=Rate(
                self.max_publish_rate_per_topic_in_messages,
                self.max_publish_rate_per_topic_in_bytes,
                1,
            ),
            dispatch_rate=Rate(
                self.dispatch_throttling_rate_per_topic_in_msg,
                self.dispatch_throttling_rate_per_topic_in_byte,
                1,
            ),
            subscription_dispatch_rate=Rate(
                self.dispatch_throttling_rate_per_subscription_in_msg,
                self.dispatch_throttling_rate_per_subscription_in_byte,
                1,
            ),
            subscribe_rate=SubscribeRate(
                self.subscribe_throttling_rate_per_consumer,
                self.subscribe_rate_period_per_consumer_in_second,
            ),
            subscription_types=self.subscription_types_enabled,
            inactive_topic_deletion=InactiveTopicDeletion(
                self.broker_delete_inactive_topics_enabled,
                self.broker_delete_inactive_topics_mode,
                self.broker_delete_inactive_topics_max_inactive_duration_in_seconds,
            ),
            subscription_expiration_time_minutes=self.subscription_expiration_time_minutes,
            schema_compatibility=self.schema_compatibility_strategy,
            schema_auto_update=self.is_allow_auto_update_schema_enabled,
            schema_validation=self.is_schema_validation_enforced,
        )
