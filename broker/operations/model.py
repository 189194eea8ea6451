"""The JSON bodies of operations, with the names of Pulsar's admin API.

Models of statistics accept unknown fields. So a dispatcher, for example, can report a new statistic
without a change in this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from magnetar.broker.operations.arguments import INT32_MAX, INT64_MAX, NO_BOOLEAN

if TYPE_CHECKING:
    from collections.abc import Callable

PROPERTY_CHARACTERS_MAX: Final = 64 << 10
"""The limit of a key or a value of a property: the size of the largest request. pydantic checks
that a string with a limit is Unicode. Without a limit it accepts half of a surrogate pair, which a
JSON escape can produce."""

_Text = Annotated[str, Field(max_length=PROPERTY_CHARACTERS_MAX)]
Properties = Annotated[dict[_Text, _Text] | None, Field(description="null: none")]

_WHEN: Final = "milliseconds since 1970-01-01; 0: never"


def _documented_also(*forms: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Return a change of a model's JSON schema that adds other accepted forms of the body."""

    def change(schema: dict[str, Any]) -> None:
        form = dict(schema)
        schema.clear()
        for key in ("title", "description"):  # these describe all forms
            schema[key] = form.pop(key)
        schema["anyOf"] = [form, *forms]

    return change


class _Statistics(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True
    )


class PublisherStats(_Statistics):
    """A connected producer."""

    producer_name: str
    producer_id: int
    access_mode: str
    supports_partial_producer: bool = False
    chunked_message_rate: float = Field(
        default=0.0, description="entries that are chunks of a message, per second"
    )
    metadata: dict[str, str] = Field(default={}, description="the producer's properties")
    msg_rate_in: float = Field(description="messages per second")
    msg_throughput_in: float = Field(description="bytes per second")
    average_msg_size: float = Field(description="bytes")
    pending_publishes: int = Field(description="publishes that are not durable yet")
    address: str
    client_version: str
    connected_since: str


class DrainingHashStats(_Statistics):
    """A hash that moves to another consumer when its former consumer has acknowledged its
    messages."""

    hash: int
    unack_msgs: int = Field(description="unacknowledged messages of the hash")
    blocked_attempts: int = Field(description="deliveries of the hash that had to wait")


class ConsumerStats(_Statistics):
    """A connected consumer."""

    consumer_name: str
    type: str
    msg_rate_out: float = Field(description="messages per second")
    msg_throughput_out: float = Field(description="bytes per second")
    msg_out_counter: int
    bytes_out_counter: int
    available_permits: int
    unacked_messages: int
    msg_rate_redeliver: float = Field(default=0.0, description="messages per second")
    message_ack_rate: float = Field(
        default=0.0,
        description="messages per second; Exclusive and Failover: estimated from the average batch",
    )
    chunked_message_rate: float = Field(
        default=0.0, description="entries that are chunks of a message, per second"
    )
    avg_messages_per_entry: int = Field(default=0, description="0: nothing was delivered")
    blocked_consumer_on_unacked_msgs: bool = Field(
        default=False,
        description="true: too many unacknowledged messages; deliveries resume at half the limit",
    )
    draining_hashes_count: int = Field(
        default=0,
        description="hashes that move away when this consumer has acknowledged their messages",
    )
    draining_hashes_cleared_total: int = Field(
        default=0, description="drained hashes since the consumer connected"
    )
    draining_hashes_unacked_messages: int = 0
    draining_hashes: list[DrainingHashStats] = []
    key_hash_range_arrays: list[list[int]] | None = Field(
        default=None,
        description="the consumer's hash ranges; both ends are included; null: not Key_Shared",
    )
    address: str = ""
    client_version: str = ""
    connected_since: str = ""
    first_messages_sent_timestamp: int = Field(default=0, description=_WHEN)
    first_consumed_flow_timestamp: int = Field(default=0, description=_WHEN)
    last_acked_timestamp: int = Field(default=0, description=_WHEN)
    last_consumed_timestamp: int = Field(default=0, description=_WHEN)
    last_consumed_flow_timestamp: int = Field(
        default=0, description=f"last grant of permits, in {_WHEN}"
    )
    last_acked_time: str = ""
    last_consumed_time: str = ""
    metadata: dict[str, str] = Field(default={}, description="the consumer's properties")


class SubscriptionStats(_Statistics):
    """A subscription."""

    msg_rate_expired: float = Field(default=0.0, description="entries per second")
    total_msg_expired: int = Field(default=0, description="entries that the broker expired")
    last_expire_timestamp: int = Field(
        default=0, description="milliseconds since 1970-01-01; 0: never"
    )
    type: str = Field(description="None while no consumer is connected")
    is_durable: bool
    msg_backlog: int = Field(description="entries that are not acknowledged")
    msg_backlog_messages: int = Field(description="messages that are not acknowledged")
    backlog_size: int = Field(default=0, description="bytes that are not acknowledged, estimated")
    earliest_msg_publish_time_in_backlog: int = Field(
        default=0,
        description="publish time of the oldest unacknowledged message, in ms; 0: none",
    )
    unacked_messages: int = Field(description="messages that are delivered and not acknowledged")
    msg_rate_out: float = Field(description="messages per second")
    msg_throughput_out: float = Field(description="bytes per second")
    msg_rate_redeliver: float = Field(description="messages per second")
    msg_out_counter: int
    bytes_out_counter: int
    mark_delete_position: str | None = Field(
        default=None, description="every entry up to this position is acknowledged; null: no cursor"
    )
    read_position: str | None = Field(
        default=None,
        description="null: no consumer has connected since the topic was opened, or since a seek",
    )
    waiting_for: list[str] = Field(
        default_factory=list, description="the reasons why nothing is dispatched"
    )
    msg_drop_rate: float = Field(
        default=0.0, description="messages of a non-persistent topic dropped per second"
    )
    active_consumer_name: str = Field(
        default="", description="empty: no consumer is active, or all consumers are active"
    )
    message_ack_rate: float = Field(default=0.0, description="messages per second")
    chunked_message_rate: float = 0.0
    blocked_subscription_on_unacked_msgs: bool = Field(
        default=False,
        description="true: too many unacknowledged messages; only redelivery continues",
    )
    msg_delayed: int = Field(default=0, description="entries whose delivery time has not come")
    msg_backlog_no_delayed: int = Field(
        default=0, description="the backlog without delayed entries"
    )
    msg_in_replay: int = Field(
        default=0, description="entries in the replay queue, which wait for a consumer"
    )
    key_shared_mode: str | None = Field(default=None, description="null: not Key_Shared")
    allow_out_of_order_delivery: bool = False
    draining_hashes_count: int = Field(default=0, description="draining hashes of all consumers")
    draining_hashes_cleared_total: int = 0
    draining_hashes_unacked_messages: int = 0
    non_contiguous_deleted_messages_ranges: int = Field(
        default=0, description="acknowledged ranges beyond the mark-delete position"
    )
    non_contiguous_deleted_messages_ranges_serialized_size: int = Field(
        default=0, description="bytes of these ranges in the stored cursor"
    )
    last_acked_timestamp: int = Field(default=0, description=_WHEN)
    last_consumed_timestamp: int = Field(default=0, description=_WHEN)
    last_consumed_flow_timestamp: int = Field(default=0, description=_WHEN)
    last_mark_delete_advanced_timestamp: int = Field(default=0, description=_WHEN)
    is_replicated: bool = Field(default=False, description="always false")
    subscription_properties: dict[str, str]
    consumers: list[ConsumerStats]


class TopicStats(_Statistics):
    """Statistics of a topic. Counters begin when its broker opens it."""

    msg_rate_in: float = Field(description="messages per second")
    msg_throughput_in: float = Field(description="bytes per second")
    msg_in_counter: int
    bytes_in_counter: int
    msg_rate_out: float = Field(description="messages per second")
    msg_throughput_out: float = Field(description="bytes per second")
    msg_out_counter: int
    bytes_out_counter: int
    average_msg_size: float = Field(description="bytes")
    earliest_msg_publish_time_in_backlogs: int = Field(
        default=0,
        description="publish time of the oldest unacknowledged message, in ms; 0: none",
    )
    oldest_backlog_message_age_seconds: int = Field(
        default=-1,
        description="seconds since the broker appended the oldest unacknowledged message; -1: none",
    )
    oldest_backlog_message_subscription_name: str = ""
    backlog_size: int = Field(default=0, description="bytes of the largest backlog, estimated")
    storage_size: int = Field(default=0, description="bytes in all ledgers, one copy")
    msg_count: int = Field(default=0, description="messages in all ledgers")
    topic_epoch: str | None = Field(
        default=None, description="epoch of the last exclusive producer; null: none so far"
    )
    msg_drop_rate: float = Field(
        default=0.0, description="messages of a non-persistent topic dropped per second"
    )
    publishers: list[PublisherStats]
    subscriptions: dict[str, SubscriptionStats]
    hidden_subscriptions: dict[str, SubscriptionStats] = Field(
        default_factory=dict, description="non-durable subscriptions with the name of a durable one"
    )
    managed_ledger: dict[str, Any] | None = Field(
        default=None, description="null: the topic's messages are not stored"
    )
    recent_failures: list[str] = Field(
        default_factory=list,
        description="last failures by unexpected exceptions, each with its age and its reason",
    )


class PartitionedMetadata(BaseModel):
    """The number of partitions of a topic."""

    model_config = ConfigDict(frozen=True)

    partitions: int = Field(description="0: the topic is not partitioned", ge=0, le=INT64_MAX)
    properties: dict[str, str] = Field(default_factory=dict)
    deleted: bool = Field(
        default=False, description="always false: a topic that is being deleted is not found"
    )


class WantedPartitions(BaseModel):
    """The number of partitions of a new topic. The number alone is a body, too."""

    model_config = ConfigDict(frozen=True, json_schema_extra=_documented_also({"type": "integer"}))

    partitions: Annotated[int, NO_BOOLEAN]  # the broker's settings limit it
    properties: Properties = None

    @model_validator(mode="before")
    @classmethod
    def _of_number(cls, found: object) -> object:
        return found if isinstance(found, dict) else {"partitions": found}


class PartitionedStats(TopicStats):
    """The merged statistics of all partitions of a topic. Counters, rates and sizes are sums;
    `averageMsgSize` is the average."""

    metadata: PartitionedMetadata
    partitions: dict[str, TopicStats] = Field(
        description="keyed by full name; empty if not asked for"
    )


class LedgerInfo(_Statistics):
    """One ledger of a topic."""

    ledger_id: int
    entries: int
    size: int = Field(description="bytes, one copy")
    offloaded: bool = Field(default=False, description="always false: there is no offloading")
    first_index: int = Field(description="index of the ledger's first message")
    closed_at: int = Field(description="milliseconds since 1970-01-01 UTC; 0: the ledger is open")


class CursorStats(_Statistics):
    """The cursor of one durable subscription."""

    mark_delete_position: str
    durable_mark_delete_position: str = Field(
        description="the mark-delete position that a crash cannot undo"
    )
    read_position: str | None
    number_of_entries_in_backlog: int
    individually_deleted_messages: list[str] = Field(
        description="acknowledged ranges beyond the mark-delete position, as ledger:first-last"
    )
    individually_deleted_messages_complete: bool = Field(
        description="false: there are more ranges than shown"
    )
    properties: dict[str, str]


class InternalStats(_Statistics):
    """The ledgers and cursors of a topic."""

    state: str
    epoch: int = Field(description="grows each time that a broker opens the topic")
    number_of_entries: int
    total_size: int = Field(description="bytes in all ledgers, one copy")
    current_ledger_entries: int
    current_ledger_size: int = Field(description="bytes, one copy")
    pending_add_entries_count: int = Field(description="entries that are not durable yet")
    last_confirmed_entry: str
    terminated: str | None = Field(
        description="position of the last message of a terminated topic; null: not terminated"
    )
    cursor_ledgers: list[int] = Field(description="ledgers that all cursors of the topic share")
    delayed_ledgers: list[int] = Field(description="ledgers with the indexes of delayed messages")
    ledgers_to_delete: int = Field(description="dropped ledgers whose deletion is not complete")
    lost: list[str] = Field(description="skipped entries, which all bookies had lost")
    ledgers: list[LedgerInfo]
    cursors: dict[str, CursorStats]


class MessagePosition(BaseModel):
    """A message id, as Pulsar's tools send it, or one of the words `earliest` and `latest`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        json_schema_extra=_documented_also({"type": "string", "enum": ["earliest", "latest"]}),
    )

    ledger_id: Annotated[int, Field(ge=-1, le=INT64_MAX), NO_BOOLEAN]
    entry_id: Annotated[int, Field(ge=-1, le=INT64_MAX), NO_BOOLEAN]
    batch_index: Annotated[
        int,
        Field(ge=-1, le=INT32_MAX, description="index in the batch; -1: the whole entry"),
        NO_BOOLEAN,
    ] = -1
    is_excluded: bool = Field(
        default=False,
        # Pulsar's Java tools send the first name.
        validation_alias=AliasChoices("excluded", "isExcluded"),
        description="true: the operation does not include this message; also named isExcluded",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_word(cls, found: object) -> object:
        if not isinstance(found, str):
            return found
        if found not in _ENDS:
            raise ValueError("expected earliest, latest, or an object with ledgerId and entryId")
        return {"ledgerId": _ENDS[found], "entryId": _ENDS[found]}


_ENDS: Final = {"earliest": -1, "latest": INT64_MAX}


class SubscriptionStart(MessagePosition):
    """The first message of a new subscription, and the subscription's properties."""

    properties: Properties = None


class OrphanedLedger(_Statistics):
    """A ledger that belongs to no topic."""

    ledger_id: int
    topic: str = Field(description="the topic for which a broker created it")
    kind: str = Field(description="data, cursor or delayed")
    created_at: int = Field(description="milliseconds since 1970-01-01 UTC")


class OrphanPage(_Statistics):
    """A part of a search for orphaned ledgers."""

    examined: int
    unreadable: int = Field(
        description="ledgers that stay because their metadata or the record of their topic cannot"
        " be read; `kept` does not count them"
    )
    deleted: int
    kept: dict[str, int] = Field(description="number of kept ledgers, by reason")
    orphans: list[OrphanedLedger]
    next_after: int | None = Field(
        description="`after` of the next page; null: this is the last page"
    )


class TerminatedAt(BaseModel):
    """The last message of a terminated topic. Both ids are -1 if the topic is empty."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    ledger_id: int
    entry_id: int
    partition_index: int = -1


class PeekedMessage(BaseModel):
    """One message of a subscription's backlog."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    message_id: str = Field(description="ledger:entry, in a batch ledger:entry:index")
    producer_name: str
    sequence_id: int
    publish_time: int = Field(description="milliseconds since 1970-01-01 UTC")
    event_time: int | None = Field(description="milliseconds since 1970-01-01 UTC; null: none")
    key: str | None
    key_is_base64: bool = Field(description="true: the key is bytes, encoded as base64")
    properties: dict[str, str]
    payload: str | None = Field(
        description="base64; null: the payload cannot be shown, see `problem`"
    )
    problem: str | None = Field(
        description="the reason why the payload cannot be shown; null: it is shown"
    )


class Refusal(BaseModel):
    """The body of an answer that is not a success."""

    reason: str = Field(description="what happened, to what")
    error: str = Field(description="the kind of failure, for programs")
    advice: str = Field(default="", description="what to do")
