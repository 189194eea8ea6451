"""The JSON bodies of the answers about the delivery of a subscription."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class ReasonShown(_Model):
    """One reason why a message is not delivered now."""

    why: str = Field(description="the kind of reason, for programs")
    consumer: str = Field(
        description="name of the consumer; empty: the reason is not about one consumer"
    )
    sentence: str = Field(description="what happens, with the numbers")
    facts: dict[str, Any] = Field(description="the numbers and names of the sentence")
    next_change_ms: int | None = Field(
        description="milliseconds until this changes by itself; null: only an event changes it"
    )


class Explanation(_Model):
    """The state of a subscription, and the reasons why it delivers no message now."""

    topic: str
    subscription: str
    type: str = Field(description='the text "None" while no consumer is connected')
    consumers: int
    backlog: int = Field(description="entries that are not acknowledged")
    unacked_messages: int = Field(description="messages that are delivered and not acknowledged")
    mark_delete_position: str | None = Field(description="null: the topic is not open")
    read_position: str | None = Field(
        description="null: no consumer has connected since the topic was opened, or since a seek"
    )
    reasons: list[ReasonShown]
    next_change_ms: int | None = Field(
        description="the earliest time of the reasons; null: no reason has a time"
    )


class PendingShown(_Model):
    """An entry that was delivered to a consumer and is not acknowledged."""

    message_id: str = Field(description="ledger:entry")
    consumer: str
    hash: int | None = Field(description="hash of the entry's key; null: not Key_Shared")
    unacked_messages: int | None = Field(
        description="unacknowledged messages of the entry; null: not counted (Exclusive, Failover)"
    )
    redelivery_count: int
    key: str | None = Field(description="null: the entry has no key, or see `problem`")
    key_is_base64: bool
    ordering_key: str | None = Field(description="base64; it decides the hash instead of the key")
    producer_name: str | None
    publish_time: int | None = Field(description="milliseconds since 1970-01-01 UTC")
    age_ms: int | None = Field(description="milliseconds since the broker appended the entry")
    problem: str | None = Field(
        description="the reason why the entry cannot be read; null: it can be read"
    )


class PendingPage(_Model):
    """Pending entries in the order of the topic."""

    entries: list[PendingShown]
    next_after: str | None = Field(
        description="`after` of the next page; null: this is the last page"
    )


class KeyShown(_Model):
    """The consumer of a key, and the reasons why its messages wait."""

    key: str
    hash: int = Field(description="the slot of the key")
    consumer: str | None = Field(description="the consumer of the key's new messages; null: none")
    draining_consumer: str | None = Field(
        description="the hash's former consumer, which still has messages of it; null: none"
    )
    pending: int = Field(description="delivered entries of the hash that are not acknowledged")
    waiting: int = Field(description="entries of the hash that the broker has read and that wait")
    blocked: bool = Field(
        description="true: the next message of the key would not be delivered now"
    )
    blocked_by: list[ReasonShown]
    oldest_pending: list[PendingShown] = Field(
        description="the oldest pending entries of the hash, up to ten"
    )
