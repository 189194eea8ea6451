"""Records (`model.py`) to stored bytes and back; the layout is `protos/metadata.proto`.

Decoding raises CorruptRecord for bytes that are no such record, UnsupportedFormat for one of a
later format (which must not be rewritten by us), and InvalidRecord for one that breaks an invariant
of its kind. Fields that a newer version added within the format survive: decode keeps them in
`unknown`, at each level, and encode puts them back. Equal records encode to equal bytes.
"""

from typing import Final, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from magnetar.metadata.errors import CorruptRecord, UnsupportedFormat
from magnetar.metadata.model import (
    BookieCookie,
    BookieId,
    BookieRegistration,
    BrokerId,
    BrokerRegistration,
    DroppedHead,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    NamespaceBundles,
    Ownership,
    Segment,
    SubscriptionRecord,
    TopicLedger,
    TopicRecord,
    check_incarnation,
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
_COUNTER: Final = "ledger counter"


class _Record(Protocol):
    """A message that is stored by itself."""

    format: int

    def ParseFromString(self, serialized: bytes, /) -> int: ...


R = TypeVar("R", bound=_Record)
M = TypeVar("M", bound=Message)

# ---- ledgers -------------------------------------------------------------------------------------


def encode_ledger(metadata: LedgerMetadata) -> bytes:
    message = pb.LedgerMetadata(
        format=FORMAT,
        ledger=metadata.ledger,
        state=_STATE_TO_WIRE[metadata.state],
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
        segments=[_segment_to_wire(segment) for segment in metadata.segments],
        master_key=metadata.master_key,
        creator_token=metadata.creator_token,
        created_ms=metadata.created_ms,
        last_entry=metadata.last_entry,
        length=metadata.length,
        under_replicated=metadata.under_replicated,
        custom=metadata.custom,
    )
    return _bytes(message, metadata.unknown)


def decode_ledger(data: bytes) -> LedgerMetadata:
    kind = "ledger metadata"
    message = _parse(pb.LedgerMetadata(), kind, data)
    state = _STATE_FROM_WIRE.get(message.state)
    if state is None:
        raise CorruptRecord(kind, f"state {message.state}")
    return LedgerMetadata(
        ledger=LedgerId(message.ledger),
        state=state,
        ensemble_size=message.ensemble_size,
        write_quorum=message.write_quorum,
        ack_quorum=message.ack_quorum,
        segments=tuple(_segment_from_wire(segment) for segment in message.segments),
        master_key=message.master_key,
        creator_token=message.creator_token,
        created_ms=message.created_ms,
        last_entry=EntryId(message.last_entry) if message.HasField("last_entry") else None,
        length=message.length if message.HasField("length") else None,
        under_replicated=message.under_replicated,
        custom=dict(message.custom),
        unknown=_unknown(message),
    )


_STATE_TO_WIRE: Final = {
    LedgerState.OPEN: pb.LEDGER_STATE_OPEN,
    LedgerState.IN_RECOVERY: pb.LEDGER_STATE_IN_RECOVERY,
    LedgerState.CLOSED: pb.LEDGER_STATE_CLOSED,
}
_STATE_FROM_WIRE: Final = {wire: state for state, wire in _STATE_TO_WIRE.items()}


def _segment_to_wire(segment: Segment) -> pb.Segment:
    message = pb.Segment(
        first_entry=segment.first_entry,
        members=[_member_to_wire(member) for member in segment.members],
    )
    return _with_unknown(message, segment.unknown)


def _segment_from_wire(message: pb.Segment) -> Segment:
    members = tuple(map(_member_from_wire, message.members))
    return Segment(EntryId(message.first_entry), members, _unknown(message))


def _member_to_wire(member: Member) -> pb.Member:
    message = pb.Member(bookie=member.bookie, incarnation=member.incarnation)
    return _with_unknown(message, member.unknown)


def _member_from_wire(message: pb.Member) -> Member:
    return Member(BookieId(message.bookie), message.incarnation, _unknown(message))


def encode_ledger_counter(next_ledger: LedgerId, *, replaced: bytes | None = None) -> bytes:
    """`replaced`: the record in whose place it is put. None: there is none."""
    before = None if replaced is None else _parse(pb.LedgerCounter(), _COUNTER, replaced)
    unknown = b"" if before is None else _unknown(before)
    return _bytes(pb.LedgerCounter(format=FORMAT, next=next_ledger), unknown)


def decode_ledger_counter(data: bytes) -> LedgerId:
    kind = _COUNTER
    message = _parse(pb.LedgerCounter(), kind, data)
    if message.next < 0:
        raise CorruptRecord(kind, f"next ledger {message.next}")
    return LedgerId(message.next)


def encode_under_replication(mark: UnderReplication) -> bytes:
    message = pb.UnderReplication(
        format=FORMAT,
        created_ms=mark.created_ms,
        lost=[
            _member_to_wire(member)
            for member in sorted(mark.lost, key=lambda each: (each.bookie, each.incarnation))
        ],
        bad=[_bad_copy_to_wire(copy) for copy in mark.bad],
        narrow=mark.narrow,
        failure=mark.failure,
        failed_ms=mark.failed_ms,
    )
    return _bytes(message, mark.unknown)


def decode_under_replication(data: bytes) -> UnderReplication:
    message = _parse(pb.UnderReplication(), "under-replication mark", data)
    return UnderReplication(
        created_ms=message.created_ms,
        lost=frozenset(map(_member_from_wire, message.lost)),
        bad=tuple(map(_bad_copy_from_wire, message.bad)),
        narrow=message.narrow,
        failure=message.failure,
        failed_ms=message.failed_ms,
        unknown=_unknown(message),
    )


def _bad_copy_to_wire(copy: BadCopy) -> pb.BadCopy:
    message = pb.BadCopy(
        member=_member_to_wire(copy.member),
        first_entry=copy.first_entry,
        last_entry=copy.last_entry,
    )
    return _with_unknown(message, copy.unknown)


def _bad_copy_from_wire(message: pb.BadCopy) -> BadCopy:
    return BadCopy(
        member=_member_from_wire(message.member),
        first_entry=EntryId(message.first_entry),
        last_entry=EntryId(message.last_entry),
        unknown=_unknown(message),
    )


def encode_check_progress(progress: CheckProgress) -> bytes:
    message = pb.CheckProgress(
        format=FORMAT,
        began_ms=progress.began_ms,
        after=progress.after,
        finished_ms=progress.finished_ms,
    )
    return _bytes(message, progress.unknown)


def decode_check_progress(data: bytes) -> CheckProgress:
    message = _parse(pb.CheckProgress(), "check progress", data)
    return CheckProgress(
        began_ms=message.began_ms,
        after=message.after,
        finished_ms=message.finished_ms,
        unknown=_unknown(message),
    )


def encode_repair_pause(pause: RepairPause) -> bytes:
    message = pb.RepairPause(format=FORMAT, since_ms=pause.since_ms, reason=pause.reason)
    return _bytes(message, pause.unknown)


def decode_repair_pause(data: bytes) -> RepairPause:
    message = _parse(pb.RepairPause(), "pause of repair", data)
    return RepairPause(message.since_ms, message.reason, _unknown(message))


# ---- who is there --------------------------------------------------------------------------------


def encode_cluster(cluster: str) -> bytes:
    return _bytes(pb.Cluster(format=FORMAT, id=cluster))


def decode_cluster(data: bytes) -> str:
    kind = "cluster id"
    message = _parse(pb.Cluster(), kind, data)
    check_incarnation(kind, message.id)
    return message.id


def encode_bookie_registration(registration: BookieRegistration) -> bytes:
    message = pb.BookieRegistration(
        format=FORMAT,
        bookie=registration.bookie,
        incarnation=registration.incarnation,
        boot_epoch=registration.boot_epoch,
        address=registration.address,
        http_address=registration.http_address,
        zone=registration.zone,
        read_only=registration.read_only,
    )
    return _bytes(message, registration.unknown)


def decode_bookie_registration(data: bytes) -> BookieRegistration:
    message = _parse(pb.BookieRegistration(), "bookie registration", data)
    return BookieRegistration(
        bookie=BookieId(message.bookie),
        incarnation=message.incarnation,
        boot_epoch=message.boot_epoch,
        address=message.address,
        http_address=message.http_address,
        zone=message.zone,
        read_only=message.read_only,
        unknown=_unknown(message),
    )


def encode_bookie_cookie(cookie: BookieCookie) -> bytes:
    message = pb.BookieCookie(
        format=FORMAT,
        bookie=cookie.bookie,
        incarnation=cookie.incarnation,
        boot_epoch=cookie.boot_epoch,
        cluster=cookie.cluster,
        start=cookie.start,
    )
    return _bytes(message, cookie.unknown)


def decode_bookie_cookie(data: bytes) -> BookieCookie:
    message = _parse(pb.BookieCookie(), "bookie cookie", data)
    return BookieCookie(
        bookie=BookieId(message.bookie),
        incarnation=message.incarnation,
        boot_epoch=message.boot_epoch,
        cluster=message.cluster,
        start=message.start,
        unknown=_unknown(message),
    )


def encode_bookie_drain(drain: BookieDrain) -> bytes:
    message = pb.BookieDrain(
        format=FORMAT,
        bookie=drain.bookie,
        since_ms=drain.since_ms,
        decommission=drain.decommission,
    )
    return _bytes(message, drain.unknown)


def decode_bookie_drain(data: bytes) -> BookieDrain:
    message = _parse(pb.BookieDrain(), "bookie drain", data)
    return BookieDrain(
        bookie=BookieId(message.bookie),
        since_ms=message.since_ms,
        decommission=message.decommission,
        unknown=_unknown(message),
    )


def encode_broker_registration(registration: BrokerRegistration) -> bytes:
    message = pb.BrokerRegistration(
        format=FORMAT,
        broker=registration.broker,
        incarnation=registration.incarnation,
        grpc_url=registration.grpc_url,
        pulsar_url=registration.pulsar_url,
        http_url=registration.http_url,
    )
    return _bytes(message, registration.unknown)


def decode_broker_registration(data: bytes) -> BrokerRegistration:
    message = _parse(pb.BrokerRegistration(), "broker registration", data)
    return BrokerRegistration(
        broker=BrokerId(message.broker),
        incarnation=message.incarnation,
        grpc_url=message.grpc_url,
        pulsar_url=message.pulsar_url,
        http_url=message.http_url,
        unknown=_unknown(message),
    )


# ---- topics --------------------------------------------------------------------------------------


def encode_ownership(ownership: Ownership) -> bytes:
    message = pb.Ownership(
        format=FORMAT,
        owner=ownership.owner,
        incarnation=ownership.incarnation,
        epoch=ownership.epoch,
    )
    return _bytes(message, ownership.unknown)


def decode_ownership(data: bytes) -> Ownership:
    message = _parse(pb.Ownership(), "ownership", data)
    return Ownership(
        owner=BrokerId(message.owner),
        incarnation=message.incarnation,
        epoch=message.epoch,
        unknown=_unknown(message),
    )


def encode_bundles(bundles: NamespaceBundles) -> bytes:
    message = pb.NamespaceBundles(format=FORMAT, boundaries=bundles.boundaries)
    return _bytes(message, bundles.unknown)


def decode_bundles(data: bytes) -> NamespaceBundles:
    message = _parse(pb.NamespaceBundles(), "namespace bundles", data)
    return NamespaceBundles(tuple(message.boundaries), _unknown(message))


def encode_topic(topic: TopicRecord) -> bytes:
    message = pb.TopicRecord(
        format=FORMAT,
        epoch=topic.epoch,
        ledgers=[_topic_ledger_to_wire(ledger) for ledger in topic.ledgers],
        cursor_ledgers=topic.cursor_ledgers,
        subscriptions={
            name: _subscription_to_wire(record) for name, record in topic.subscriptions.items()
        },
        deleting=topic.deleting,
        properties=topic.properties,
    )
    if topic.dropped is not None:
        message.dropped.CopyFrom(_dropped_to_wire(topic.dropped))
    return _bytes(message, topic.unknown)


def decode_topic(data: bytes) -> TopicRecord:
    message = _parse(pb.TopicRecord(), "topic record", data)
    return TopicRecord(
        epoch=message.epoch,
        ledgers=tuple(_topic_ledger_from_wire(ledger) for ledger in message.ledgers),
        cursor_ledgers=tuple(LedgerId(ledger) for ledger in message.cursor_ledgers),
        subscriptions={
            name: SubscriptionRecord(dict(record.properties), record.inline, _unknown(record))
            for name, record in message.subscriptions.items()
        },
        deleting=tuple(LedgerId(ledger) for ledger in message.deleting),
        properties=dict(message.properties),
        dropped=_dropped_from_wire(message.dropped) if message.HasField("dropped") else None,
        unknown=_unknown(message),
    )


def _dropped_to_wire(dropped: DroppedHead) -> pb.DroppedHead:
    message = pb.DroppedHead(
        ledger=dropped.ledger, entry=dropped.entry, next_index=dropped.next_index
    )
    return _with_unknown(message, dropped.unknown)


def _dropped_from_wire(message: pb.DroppedHead) -> DroppedHead:
    return DroppedHead(
        LedgerId(message.ledger), EntryId(message.entry), message.next_index, _unknown(message)
    )


def _topic_ledger_to_wire(ledger: TopicLedger) -> pb.TopicLedger:
    message = pb.TopicLedger(
        ledger=ledger.ledger,
        first_index=ledger.first_index,
        entries=ledger.entries,
        length=ledger.length,
        closed_ms=ledger.closed_ms,
    )
    return _with_unknown(message, ledger.unknown)


def _topic_ledger_from_wire(message: pb.TopicLedger) -> TopicLedger:
    return TopicLedger(
        ledger=LedgerId(message.ledger),
        first_index=message.first_index,
        entries=message.entries,
        length=message.length,
        closed_ms=message.closed_ms,
        unknown=_unknown(message),
    )


def _subscription_to_wire(record: SubscriptionRecord) -> pb.SubscriptionRecord:
    message = pb.SubscriptionRecord(properties=record.properties, inline=record.inline)
    return _with_unknown(message, record.unknown)


# ---- bytes ---------------------------------------------------------------------------------------


def _bytes(message: Message, unknown: bytes = b"") -> bytes:
    # Deterministic: maps in order of key, so that equal records can be compared as bytes.
    return _with_unknown(message, unknown).SerializeToString(deterministic=True)


def _parse(message: R, kind: str, data: bytes) -> R:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise CorruptRecord(kind, str(error) or "not parsable") from None
    if message.format == 0:
        raise CorruptRecord(kind, "no format version")
    if message.format != FORMAT:
        raise UnsupportedFormat(kind, message.format)
    return message


def _unknown(message: Message) -> bytes:
    """What is left of a message when all known fields are cleared. Consumes it: call it last."""
    if len(UnknownFieldSet(message)) == 0:
        return b""
    for field in message.DESCRIPTOR.fields:
        message.ClearField(field.name)
    return message.SerializeToString()


def _with_unknown(message: M, unknown: bytes) -> M:
    if unknown:
        message.MergeFromString(unknown)
    return message
