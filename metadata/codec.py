"""Records (`model.py`, `under_replication.py`, `policies.py`) to stored bytes and back.

The layout is `protos/metadata.proto`. Each kind of record has a table of its fields. A field has
the same name in the record and in the message.

Decoding raises CorruptRecord for bytes that cannot be parsed, UnsupportedFormat for a record of
another format (which this version must not rewrite), and InvalidRecord for a record that breaks an
invariant of its kind. Fields that a newer version added within the format survive: decode keeps
them in `unknown`, at each level, and encode puts them back. Equal records with equal `unknown`
encode to equal bytes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from magnetar.metadata.errors import CorruptRecord, UnsupportedFormat
from magnetar.metadata.model import (
    BookieAddress,
    BookieCookie,
    BookieRegistration,
    BrokerRegistration,
    DroppedHead,
    EntryPlace,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    NamespaceBundles,
    Ownership,
    PartitionedTopic,
    SchemaRecord,
    SchemaVersion,
    Segment,
    SubscriptionRecord,
    TopicLedger,
    TopicRecord,
    TopicTombstone,
    check_incarnation,
)
from magnetar.metadata.policies import (
    AutoTopicCreation,
    BacklogAction,
    BacklogQuota,
    DelayedDelivery,
    InactiveMode,
    InactiveTopicDeletion,
    NamespaceRecord,
    Persistence,
    Policies,
    Rate,
    Retention,
    SchemaCompatibility,
    SubscribeRate,
    SubscriptionType,
    TenantRecord,
    TopicPolicies,
)
from magnetar.metadata.under_replication import (
    BadCopy,
    BookieDrain,
    CheckProgress,
    RepairPause,
    UnderReplication,
)
from magnetar.protos import metadata_pb2 as pb

FORMAT: Final = 1
"""The format version of every stored record."""


class _Record(Protocol):
    @property
    def unknown(self) -> bytes: ...


R = TypeVar("R", bound=_Record)
M = TypeVar("M", bound=Message)


# ---- kinds of fields -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    """The conversion of one field between record and message. `to_wire` never gets None: the
    message leaves out a field that is None."""

    name: str
    to_wire: Callable[[Any], Any] | None = None  # None: the value is the same in both
    from_wire: Callable[[Any], Any] | None = None
    optional: bool = False  # True: the record has None for a field that the message leaves out


class _Table(Generic[R]):
    """The fields of one kind of record, or of a part of a record."""

    def __init__(
        self, kind: str, message: type[Message], make: Callable[..., R], *rows: _Field
    ) -> None:
        """`kind` names the record in errors."""
        self.kind = kind
        self.message = message
        self.names = frozenset(row.name for row in rows)
        self._make = make
        self._to_wire = [(row.name, row.to_wire) for row in rows]
        self._from_wire = [(row.name, row.from_wire, row.optional) for row in rows]

    def to_wire(self, record: R) -> Message:
        wire: dict[str, Any] = {}
        for name, convert in self._to_wire:
            value = getattr(record, name)
            if value is not None:
                wire[name] = value if convert is None else convert(value)
        return _with_unknown(self.message(**wire), record.unknown)

    def from_wire(self, message: Message) -> R:
        """Convert a message to a record. The message must not be used afterwards."""
        values: dict[str, Any] = {}
        for name, convert, optional in self._from_wire:
            if not optional or message.HasField(name):
                value = getattr(message, name)
                values[name] = value if convert is None else convert(value)
        return self._make(**values, unknown=_unknown(message))

    def encode(self, record: R) -> bytes:
        return _stored(self.to_wire(record))

    def decode(self, data: bytes) -> R:
        return self.from_wire(_parse(self.message(), self.kind, data))


def _plain(*names: str) -> tuple[_Field, ...]:
    """Fields with numbers, texts, bytes or booleans."""
    return tuple(_Field(name) for name in names)


def _optional(*names: str) -> tuple[_Field, ...]:
    """Fields like those of `_plain` that may be None."""
    return tuple(_Field(name, optional=True) for name in names)


def _tuple(name: str) -> _Field:
    return _Field(name, from_wire=tuple)


def _set(name: str) -> _Field:
    return _Field(name, sorted, frozenset)


def _map(name: str) -> _Field:
    return _Field(name, dict, dict)


def _part(name: str, table: _Table[Any], *, optional: bool = False) -> _Field:
    """A field with a record inside the record."""
    return _Field(name, table.to_wire, table.from_wire, optional)


def _parts(name: str, table: _Table[Any]) -> _Field:
    def to_wire(parts: Iterable[Any]) -> list[Message]:
        return [table.to_wire(part) for part in parts]

    def from_wire(messages: Iterable[Message]) -> tuple[Any, ...]:
        return tuple(map(table.from_wire, messages))

    return _Field(name, to_wire, from_wire)


def _parts_by_key(name: str, table: _Table[Any]) -> _Field:
    def to_wire(parts: Mapping[str, Any]) -> dict[str, Message]:
        return {key: table.to_wire(part) for key, part in parts.items()}

    def from_wire(messages: Mapping[str, Message]) -> dict[str, Any]:
        return {key: table.from_wire(message) for key, message in messages.items()}

    return _Field(name, to_wire, from_wire)


def _enum(kind: str, name: str, wire_of: Mapping[Any, int], *, optional: bool = False) -> _Field:
    from_wire = _enum_value(kind, name, wire_of)
    return _Field(name, wire_of.__getitem__, from_wire, optional)


def _enum_set(kind: str, name: str, wire_of: Mapping[Any, int]) -> _Field:
    """A field with a set of enum values, or with None. The set is not empty."""
    value_of = _enum_value(kind, name, wire_of)

    def to_wire(values: Iterable[Any]) -> list[int]:
        return sorted(wire_of[value] for value in values)

    def from_wire(numbers: Iterable[int]) -> frozenset[Any] | None:
        return frozenset(map(value_of, numbers)) or None

    return _Field(name, to_wire, from_wire)


def _enum_value(kind: str, name: str, wire_of: Mapping[Any, int]) -> Callable[[int], Enum]:
    by_number = {number: value for value, number in wire_of.items()}

    def value_of(number: int) -> Enum:
        if number not in by_number:
            raise CorruptRecord(kind, f"{name} {number}")
        value: Enum = by_number[number]
        return value

    return value_of


# ---- ledgers -------------------------------------------------------------------------------------

_LEDGER_STATES: Final = {
    LedgerState.OPEN: pb.LEDGER_STATE_OPEN,
    LedgerState.IN_RECOVERY: pb.LEDGER_STATE_IN_RECOVERY,
    LedgerState.CLOSED: pb.LEDGER_STATE_CLOSED,
}

_MEMBER: Final = _Table("member", pb.Member, Member, *_plain("bookie", "incarnation"))

_SEGMENT: Final = _Table(
    "segment", pb.Segment, Segment, *_plain("first_entry"), _parts("members", _MEMBER)
)

_LEDGER: Final = _Table(
    "ledger metadata",
    pb.LedgerMetadata,
    LedgerMetadata,
    *_plain("ledger", "ensemble_size", "write_quorum", "ack_quorum"),
    _enum("ledger metadata", "state", _LEDGER_STATES),
    _parts("segments", _SEGMENT),
    *_plain("master_key", "creator_token", "created_ms", "under_replicated"),
    *_optional("last_entry", "length"),
    _map("custom"),
)
encode_ledger: Final = _LEDGER.encode
decode_ledger: Final = _LEDGER.decode

_COUNTER: Final = "ledger counter"


def encode_ledger_counter(next_ledger: LedgerId, *, replaced: bytes | None = None) -> bytes:
    """Encode the ledger counter. `replaced`: the stored counter that the new one replaces, whose
    unknown fields are kept; None: no counter is stored."""
    before = None if replaced is None else _parse(pb.LedgerCounter(), _COUNTER, replaced)
    message = pb.LedgerCounter(next=next_ledger)
    return _stored(_with_unknown(message, b"" if before is None else _unknown(before)))


def decode_ledger_counter(data: bytes) -> LedgerId:
    message = _parse(pb.LedgerCounter(), _COUNTER, data)
    if message.next < 0:
        raise CorruptRecord(_COUNTER, f"next ledger {message.next}")
    return LedgerId(message.next)


# ---- repair --------------------------------------------------------------------------------------


def _members_to_wire(members: Iterable[Member]) -> list[Message]:
    ordered = sorted(members, key=lambda member: (member.bookie, member.incarnation))
    return [_MEMBER.to_wire(member) for member in ordered]


def _members_from_wire(messages: Iterable[Message]) -> frozenset[Member]:
    return frozenset(map(_MEMBER.from_wire, messages))


_BAD_COPY: Final = _Table(
    "bad copy", pb.BadCopy, BadCopy, _part("member", _MEMBER), *_plain("first_entry", "last_entry")
)

_UNDER_REPLICATION: Final = _Table(
    "under-replication record",
    pb.UnderReplication,
    UnderReplication,
    _Field("lost", _members_to_wire, _members_from_wire),
    _parts("bad", _BAD_COPY),
    *_plain("created_ms", "narrow", "failure", "failed_ms"),
)
encode_under_replication: Final = _UNDER_REPLICATION.encode
decode_under_replication: Final = _UNDER_REPLICATION.decode

_CHECK_PROGRESS: Final = _Table(
    "check progress", pb.CheckProgress, CheckProgress, *_plain("began_ms", "after", "finished_ms")
)
encode_check_progress: Final = _CHECK_PROGRESS.encode
decode_check_progress: Final = _CHECK_PROGRESS.decode

_REPAIR_PAUSE: Final = _Table(
    "pause of repair", pb.RepairPause, RepairPause, *_plain("since_ms", "reason")
)
encode_repair_pause: Final = _REPAIR_PAUSE.encode
decode_repair_pause: Final = _REPAIR_PAUSE.decode


# ---- servers -------------------------------------------------------------------------------------


def encode_cluster(cluster: str) -> bytes:
    return _stored(pb.Cluster(id=cluster))


def decode_cluster(data: bytes) -> str:
    kind = "cluster id"
    message = _parse(pb.Cluster(), kind, data)
    check_incarnation(kind, message.id)
    return message.id


_BOOKIE_ADDRESS: Final = _Table(
    "bookie address", pb.BookieAddress, BookieAddress, *_plain("data", "grpc")
)

_BOOKIE_REGISTRATION: Final = _Table(
    "bookie registration",
    pb.BookieRegistration,
    BookieRegistration,
    *_plain("bookie", "incarnation", "boot_epoch"),
    _part("address", _BOOKIE_ADDRESS),
    *_plain("http_address", "zone", "read_only"),
)
encode_bookie_registration: Final = _BOOKIE_REGISTRATION.encode
decode_bookie_registration: Final = _BOOKIE_REGISTRATION.decode

_BOOKIE_COOKIE: Final = _Table(
    "bookie cookie",
    pb.BookieCookie,
    BookieCookie,
    *_plain("bookie", "incarnation", "boot_epoch", "cluster", "start"),
)
encode_bookie_cookie: Final = _BOOKIE_COOKIE.encode
decode_bookie_cookie: Final = _BOOKIE_COOKIE.decode

_BOOKIE_DRAIN: Final = _Table(
    "bookie drain", pb.BookieDrain, BookieDrain, *_plain("bookie", "since_ms", "decommission")
)
encode_bookie_drain: Final = _BOOKIE_DRAIN.encode
decode_bookie_drain: Final = _BOOKIE_DRAIN.decode

_BROKER_REGISTRATION: Final = _Table(
    "broker registration",
    pb.BrokerRegistration,
    BrokerRegistration,
    *_plain("broker", "incarnation", "grpc_url", "pulsar_url", "http_url"),
)
encode_broker_registration: Final = _BROKER_REGISTRATION.encode
decode_broker_registration: Final = _BROKER_REGISTRATION.decode


# ---- topics --------------------------------------------------------------------------------------

_OWNERSHIP: Final = _Table(
    "ownership", pb.Ownership, Ownership, *_plain("owner", "incarnation", "epoch")
)
encode_ownership: Final = _OWNERSHIP.encode
decode_ownership: Final = _OWNERSHIP.decode

_TOPIC_LEDGER: Final = _Table(
    "topic ledger",
    pb.TopicLedger,
    TopicLedger,
    *_plain("ledger", "first_index", "entries", "length", "closed_ms"),
)

_SUBSCRIPTION: Final = _Table(
    "subscription record",
    pb.SubscriptionRecord,
    SubscriptionRecord,
    _map("properties"),
    *_plain("inline"),
)

_DROPPED_HEAD: Final = _Table(
    "dropped head", pb.DroppedHead, DroppedHead, *_plain("ledger", "entry", "next_index")
)

_ENTRY_PLACE: Final = _Table("entry place", pb.EntryPlace, EntryPlace, *_plain("ledger", "entry"))

_TOPIC: Final = _Table(
    "topic record",
    pb.TopicRecord,
    TopicRecord,
    *_plain("epoch"),
    _parts("ledgers", _TOPIC_LEDGER),
    _tuple("cursor_ledgers"),
    _parts_by_key("subscriptions", _SUBSCRIPTION),
    _tuple("deleting"),
    _map("properties"),
    _part("dropped", _DROPPED_HEAD, optional=True),
    *_plain("incarnation", "deleted"),
    _part("terminated", _ENTRY_PLACE, optional=True),
    _tuple("delayed_ledgers"),
    *_plain("ledger_min"),
)
encode_topic: Final = _TOPIC.encode
decode_topic: Final = _TOPIC.decode

_TOMBSTONE: Final = _Table(
    "topic tombstone",
    pb.TopicTombstone,
    TopicTombstone,
    *_plain("incarnation", "epoch", "deleted_ms", "version", "ledger_min"),
    _map("brokers"),
    _set("clients"),
)
encode_tombstone: Final = _TOMBSTONE.encode
decode_tombstone: Final = _TOMBSTONE.decode

_PARTITIONED_TOPIC: Final = _Table(
    "partitioned topic",
    pb.PartitionedTopic,
    PartitionedTopic,
    *_plain("partitions", "created_ms", "deleting"),
    _map("properties"),
)
encode_partitioned_topic: Final = _PARTITIONED_TOPIC.encode
decode_partitioned_topic: Final = _PARTITIONED_TOPIC.decode


# ---- schemas -------------------------------------------------------------------------------------

_SCHEMA_VERSION: Final = _Table(
    "schema version",
    pb.SchemaVersion,
    SchemaVersion,
    *_plain("version", "deleted", "type", "name", "data", "created_ms", "fingerprint"),
    _map("properties"),
)
_SCHEMA: Final = _Table(
    "schema record", pb.SchemaRecord, SchemaRecord, _parts("versions", _SCHEMA_VERSION)
)
encode_schema: Final = _SCHEMA.encode
decode_schema: Final = _SCHEMA.decode


# ---- tenants, namespaces and policies ------------------------------------------------------------

_BACKLOG_ACTIONS: Final = {
    BacklogAction.HOLD_PRODUCERS: pb.BACKLOG_ACTION_HOLD_PRODUCERS,
    BacklogAction.REFUSE_PRODUCERS: pb.BACKLOG_ACTION_REFUSE_PRODUCERS,
    BacklogAction.EVICT_BACKLOG: pb.BACKLOG_ACTION_EVICT_BACKLOG,
}
_INACTIVE_MODES: Final = {
    InactiveMode.NO_SUBSCRIPTIONS: pb.INACTIVE_MODE_NO_SUBSCRIPTIONS,
    InactiveMode.SUBSCRIPTIONS_CAUGHT_UP: pb.INACTIVE_MODE_SUBSCRIPTIONS_CAUGHT_UP,
}
_SUBSCRIPTION_TYPES: Final = {
    SubscriptionType.EXCLUSIVE: pb.SUBSCRIPTION_TYPE_EXCLUSIVE,
    SubscriptionType.SHARED: pb.SUBSCRIPTION_TYPE_SHARED,
    SubscriptionType.FAILOVER: pb.SUBSCRIPTION_TYPE_FAILOVER,
    SubscriptionType.KEY_SHARED: pb.SUBSCRIPTION_TYPE_KEY_SHARED,
}

_SCHEMA_COMPATIBILITIES: Final = {
    it: pb.SchemaCompatibility.Value(f"SCHEMA_COMPATIBILITY_{it.name}")
    for it in SchemaCompatibility
}

_RETENTION: Final = _Table("retention", pb.Retention, Retention, *_plain("time_s", "size_bytes"))
_BACKLOG_QUOTA: Final = _Table(
    "backlog quota",
    pb.BacklogQuota,
    BacklogQuota,
    *_plain("limit"),
    _enum("backlog quota", "action", _BACKLOG_ACTIONS),
)
_PERSISTENCE: Final = _Table(
    "persistence policy",
    pb.Persistence,
    Persistence,
    *_plain("ensemble_size", "write_quorum", "ack_quorum", "mark_delete_rate"),
)
_DELAYED_DELIVERY: Final = _Table(
    "delayed delivery policy",
    pb.DelayedDelivery,
    DelayedDelivery,
    *_plain("enabled", "tick_ms", "delay_ms_max"),
)
_AUTO_TOPIC_CREATION: Final = _Table(
    "topic creation policy",
    pb.AutoTopicCreation,
    AutoTopicCreation,
    *_plain("enabled", "partitions"),
)
_RATE: Final = _Table("rate", pb.Rate, Rate, *_plain("messages_max", "bytes_max", "period_s"))
_SUBSCRIBE_RATE: Final = _Table(
    "subscribe rate", pb.SubscribeRate, SubscribeRate, *_plain("subscribes_max", "period_s")
)
_INACTIVE_TOPIC_DELETION: Final = _Table(
    "inactive topic policy",
    pb.InactiveTopicDeletion,
    InactiveTopicDeletion,
    *_plain("enabled", "after_s"),
    _enum("inactive topic policy", "mode", _INACTIVE_MODES),
)

_POLICIES: Final = _Table(
    "policies",
    pb.Policies,
    Policies,
    *_plain("version"),
    _part("retention", _RETENTION, optional=True),
    *_optional("message_ttl_s"),
    _part("backlog_quota_bytes", _BACKLOG_QUOTA, optional=True),
    _part("backlog_quota_age_s", _BACKLOG_QUOTA, optional=True),
    _part("persistence", _PERSISTENCE, optional=True),
    *_optional("deduplication"),
    _part("delayed_delivery", _DELAYED_DELIVERY, optional=True),
    _part("auto_topic_creation", _AUTO_TOPIC_CREATION, optional=True),
    *_optional("auto_subscription_creation"),
    *_optional("producers_max", "consumers_max", "consumers_per_subscription_max"),
    *_optional("subscriptions_max", "unacked_per_consumer_max", "unacked_per_subscription_max"),
    _part("publish_rate", _RATE, optional=True),
    _part("dispatch_rate", _RATE, optional=True),
    _part("subscription_dispatch_rate", _RATE, optional=True),
    _part("subscribe_rate", _SUBSCRIBE_RATE, optional=True),
    _enum_set("policies", "subscription_types", _SUBSCRIPTION_TYPES),
    _part("inactive_topic_deletion", _INACTIVE_TOPIC_DELETION, optional=True),
    *_optional("subscription_expiration_time_minutes"),
    *_optional("max_message_bytes"),
    _enum("policies", "schema_compatibility", _SCHEMA_COMPATIBILITIES, optional=True),
    *_optional("schema_auto_update", "schema_validation"),
)

_TENANT: Final = _Table(
    "tenant record", pb.TenantRecord, TenantRecord, _set("allowed_clusters"), _set("admin_roles")
)
encode_tenant: Final = _TENANT.encode
decode_tenant: Final = _TENANT.decode

_BUNDLES: Final = _Table(
    "namespace bundles", pb.NamespaceBundles, NamespaceBundles, _tuple("boundaries")
)

_NAMESPACE: Final = _Table(
    "namespace record",
    pb.NamespaceRecord,
    NamespaceRecord,
    _part("bundles", _BUNDLES),
    _part("policies", _POLICIES),
)
encode_namespace: Final = _NAMESPACE.encode
decode_namespace: Final = _NAMESPACE.decode

_TOPIC_POLICIES: Final = _Table(
    "topic policies", pb.TopicPolicies, TopicPolicies, _part("policies", _POLICIES)
)
encode_topic_policies: Final = _TOPIC_POLICIES.encode
decode_topic_policies: Final = _TOPIC_POLICIES.decode


# ---- bytes ---------------------------------------------------------------------------------------


def _stored(message: Message) -> bytes:
    message.format = FORMAT  # type: ignore[attr-defined]
    # Deterministic: maps in order of key, so that equal records can be compared as bytes.
    return message.SerializeToString(deterministic=True)


def _parse(message: M, kind: str, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise CorruptRecord(kind, str(error) or "not parsable") from None
    version: int = message.format  # type: ignore[attr-defined]
    if version == 0:
        raise CorruptRecord(kind, "no format version")
    if version != FORMAT:
        raise UnsupportedFormat(kind, version)
    return message


def _unknown(message: Message) -> bytes:
    """The unknown fields of a message. Clears its known fields: call it last."""
    if len(UnknownFieldSet(message)) == 0:
        return b""
    for field in message.DESCRIPTOR.fields:
        message.ClearField(field.name)
    return message.SerializeToString()


def _with_unknown(message: M, unknown: bytes) -> M:
    if unknown:
        message.MergeFromString(unknown)
    return message
