"""The JSON bodies of the requests about the delivery of a subscription."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


class ReasonShown(_Model):
    """One reason why a message is not delivered now."""

    why: str = Field(description="the kind of reason, for programs")
    consumer: str = Field(description="its name; empty: the reason is not about one consumer")
    sentence: str = Field(description="what happens, with the numbers")
    facts: dict[str, Any] = Field(description="the numbers and names of the sentence")
    next_change_ms: int | None = Field(
        description="when it changes by itself, from now; null: only by an event"
    )


class Explanation(_Model):
    """Why a subscription delivers no message now."""

    topic: str
    subscription: str
    type: str = Field(description="None while no consumer is connected")
    consumers: int
    backlog: int = Field(description="entries that are not acknowledged")
    unacked_messages: int = Field(description="delivered and not acknowledged")
    mark_delete_position: str | None = Field(description="null: the topic is not open")
    read_position: str | None = Field(description="null while no consumer has connected")
    reasons: list[ReasonShown]
    next_change_ms: int | None = Field(
        description="the earliest of the reasons; null: no reason has one"
    )


class PendingShown(_Model):
    """An entry that a consumer has and has not acknowledged."""

    message_id: str = Field(description="ledger:entry")
    consumer: str
    hash: int | None = Field(description="of its key; null: not Key_Shared")
    unacked_messages: int | None = Field(
        description="of a batch, those that are not acknowledged; null: not counted (single-active)"
    )
    redelivery_count: int
    key: str | None = Field(description="null: it has none, or see `problem`")
    key_is_base64: bool
    ordering_key: str | None = Field(description="base64; it decides the hash instead of the key")
    producer_name: str | None
    publish_time: int | None = Field(description="milliseconds since 1970-01-01 UTC")
    age_ms: int | None = Field(description="since the broker appended it")
    problem: str | None = Field(description="why the entry cannot be read")


class PendingPage(_Model):
    """Pending entries in the order of the topic."""

    entries: list[PendingShown]
    next_after: str | None = Field(
        description="`after` of the next page; null: this is the last page"
    )


class KeyShown(_Model):
    """Where the messages of a key go, and what stops them."""

    key: str
    hash: int = Field(description="the slot of the key")
    consumer: str | None = Field(description="gets its new messages; null: no consumer does")
    draining_consumer: str | None = Field(
        description="had the hash before and has messages of it; null: none"
    )
    pending: int = Field(description="entries of the hash that are not acknowledged")
    waiting: int = Field(description="entries of the hash that were read and wait")
    blocked: bool = Field(description="the next message of the key would not be delivered now")
    blocked_by: list[ReasonShown]
    oldest_pending: list[PendingShown] = Field(description="of the hash, up to ten")
