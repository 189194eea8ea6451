"""The records that are stored as metadata and shared by bookies, brokers and tools.

The records are frozen values. Their constructors validate them. The records do no I/O and do not
depend on their stored form (`codec.py`). `unknown` carries the fields that a newer version of
Magnetar wrote and this version does not know. Comparisons ignore `unknown`, and the next write
stores it again.

An entry id of -1 (`NO_ENTRY`) means that there is no entry. Comments say what None and other
special values mean.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Final, NewType

from magnetar.metadata.errors import InvalidLedgerMetadata, InvalidRecord

LedgerId = NewType("LedgerId", int)
EntryId = NewType("EntryId", int)
BookieId = NewType("BookieId", str)
BrokerId = NewType("BrokerId", str)

NO_LEDGER: Final = LedgerId(-1)
NO_ENTRY: Final = EntryId(-1)
LEDGER_ID_MAX: Final = (1 << 63) - 1
"""Positions carry ledger ids as signed 64-bit numbers."""

_INCARNATION_DIGITS: Final = 32
_U64_MAX: Final = (1 << 64) - 1


# ---- ledgers -------------------------------------------------------------------------------------


class LedgerState(IntEnum):
    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


@dataclass(frozen=True, slots=True)
class Member:
    """One formatted data directory of a bookie. A bookie that lost its disk is another member."""

    bookie: BookieId
    incarnation: str  # 32 hex digits, made when the data directory was formatted
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("member", "bookie", self.bookie)
        check_incarnation("member", self.incarnation)


@dataclass(frozen=True, slots=True)
class Segment:
    """The ensemble that holds the entries from `first_entry` up to the next segment."""

    first_entry: EntryId
    members: tuple[Member, ...]  # a member's index is its seat
    unknown: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """The metadata of one ledger. The constructor raises InvalidLedgerMetadata for invalid values.

    1. 1 <= ack_quorum <= write_quorum <= ensemble_size. The numbers never change, with one
       exception: in a CLOSED ledger whose bookies each hold all entries (write_quorum =
       ensemble_size), write_quorum and ensemble_size may grow together.
    2. The ledger has at least one segment. The first segment starts at entry 0, and the starts
       strictly increase.
    3. Each segment has ensemble_size members. No bookie occurs twice in a segment, because its ack
       would count for two members.
    4. last_entry and length are set if and only if the ledger is CLOSED. In an empty ledger they
       are -1 and 0.
    5. In a CLOSED ledger, last_entry is at least the last segment's first_entry - 1, because all
       earlier entries were confirmed. It is equal when no entry was confirmed after the last change
       of the ensemble.
    """

    ledger: LedgerId
    state: LedgerState
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    segments: tuple[Segment, ...]
    master_key: int  # u64; bookies take adds only from a client that knows it
    creator_token: int  # u64; identifies the creator, also after a lost reply
    created_ms: int
    last_entry: EntryId | None = None  # None: not closed
    length: int | None = None  # payload bytes of all entries; None: not closed
    under_replicated: bool = False  # True: created with fewer bookies than configured
    custom: Mapping[str, bytes] = field(default_factory=dict)
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _require(0 <= self.ledger <= LEDGER_ID_MAX, f"ledger id {self.ledger}")
        _require(
            1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size,
            f"quorums {self.ensemble_size}/{self.write_quorum}/{self.ack_quorum}",
        )
        _require(0 <= self.master_key <= _U64_MAX, f"master key {self.master_key}")
        _require(0 <= self.creator_token <= _U64_MAX, f"creator token {self.creator_token}")
        _require(self.created_ms >= 0, f"created at {self.created_ms} ms")
        self._check_segments()
        self._check_end()

    @property
    def last_segment(self) -> Segment:
        return self.segments[-1]

    def segment_of(self, entry: EntryId) -> Segment:
        """Return the segment that holds `entry`. An id after the last entry belongs to the last
        segment."""
        assert entry >= 0, entry
        return next(part for part in reversed(self.segments) if part.first_entry <= entry)

    def with_ensemble(self, first_entry: EntryId, members: Sequence[Member]) -> "LedgerMetadata":
        """Return the metadata in which `members` hold the entries from `first_entry` on. If the
        last segment starts at `first_entry`, none of its entries was confirmed, and the new segment
        replaces it. Otherwise the method appends the new segment."""
        assert self.state is LedgerState.OPEN, self.state
        last = self.last_segment
        _require(first_entry >= last.first_entry, f"segment at {first_entry} goes backwards")
        kept = self.segments[:-1] if first_entry == last.first_entry else self.segments
        unknown = last.unknown if first_entry == last.first_entry else b""
        return replace(self, segments=(*kept, Segment(first_entry, tuple(members), unknown)))

    def _check_segments(self) -> None:
        _require(bool(self.segments), "no segments")
        _require(self.segments[0].first_entry == 0, "the first segment does not start at entry 0")
        for before, after in pairwise(self.segments):
            _require(before.first_entry < after.first_entry, "segments do not increase")
        for part in self.segments:
            bookies = [member.bookie for member in part.members]
            _require(
                len(bookies) == self.ensemble_size,
                f"segment at {part.first_entry} has {len(bookies)} members"
                f" instead of {self.ensemble_size}",
            )
            _require(
                len(set(bookies)) == len(bookies),
                f"segment at {part.first_entry} lists a bookie twice: {bookies}",
            )

    def _check_end(self) -> None:
        if self.state is not LedgerState.CLOSED:
            _require(self.last_entry is None, f"{self.state.name} but has a last entry")
            _require(self.length is None, f"{self.state.name} but has a length")
            return
        _require(self.last_entry is not None, "CLOSED without a last entry")
        _require(self.length is not None, "CLOSED without a length")
        assert self.last_entry is not None
        assert self.length is not None
        confirmed = self.last_segment.first_entry - 1
        _require(
            self.last_entry >= confirmed,
            f"closed at {self.last_entry}, but entries up to {confirmed} were confirmed",
        )
        _require(self.length >= 0, f"length {self.length}")
        if self.last_entry == NO_ENTRY:
            _require(self.length == 0, f"empty, with {self.length} bytes")


# ---- registered servers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BookieAddress:
    """The two ports of a bookie, each as "host:port"."""

    data: str  # framed TCP: adds and reads
    grpc: str  # all other calls
    unknown: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BookieRegistration:
    """The record of a running bookie, stored in an ephemeral node."""

    bookie: BookieId
    incarnation: str
    boot_epoch: int  # the bookie's current boot epoch
    address: BookieAddress
    http_address: str  # "host:port"; "": no HTTP port
    zone: str  # "": not configured
    read_only: bool
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("bookie registration", "bookie", self.bookie)
        _check_name("bookie registration", "data address", self.address.data)
        _check_name("bookie registration", "gRPC address", self.address.grpc)
        check_incarnation("bookie registration", self.incarnation)
        _check_count("bookie registration", "boot epoch", self.boot_epoch)

    @property
    def member(self) -> Member:
        return Member(self.bookie, self.incarnation)


@dataclass(frozen=True, slots=True)
class BookieCookie:
    """The persistent record of the data directory that belongs to a bookie's id. The directory has
    a copy of the record."""

    bookie: BookieId
    incarnation: str
    boot_epoch: int
    cluster: str  # the cluster's id, so that a bookie cannot join another cluster
    # A random value for each boot epoch, which distinguishes copies of a directory; "": no value.
    start: str = ""
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("bookie cookie", "bookie", self.bookie)
        _check_name("bookie cookie", "cluster", self.cluster)
        check_incarnation("bookie cookie", self.incarnation)
        if self.start:
            check_incarnation("bookie cookie", self.start)
        _check_count("bookie cookie", "boot epoch", self.boot_epoch)


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """The record of a running broker, stored in an ephemeral node."""

    broker: BrokerId
    incarnation: str  # the incarnation of this start of the process
    grpc_url: str
    pulsar_url: str  # "": not served
    http_url: str  # "": not served
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("broker registration", "broker", self.broker)
        _check_name("broker registration", "gRPC URL", self.grpc_url)
        check_incarnation("broker registration", self.incarnation)


# ---- topics --------------------------------------------------------------------------------------

HASH_SPACE: Final = 1 << 32
"""The number of hash values of topics. The hash is the CRC32 of the full name: 0 .. 2^32 - 1."""

BUNDLES_DEFAULT: Final = 4


@dataclass(frozen=True, slots=True)
class Ownership:
    """The persistent record of the broker that serves a bundle. A takeover changes the record by
    compare-and-set."""

    owner: BrokerId
    incarnation: str
    epoch: int  # grows with each change of owner
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("ownership", "owner", self.owner)
        check_incarnation("ownership", self.incarnation)
        _check_count("ownership", "epoch", self.epoch)


@dataclass(frozen=True, slots=True)
class NamespaceBundles:
    """The division of a namespace's hash space: bundle i is [boundaries[i], boundaries[i + 1])."""

    boundaries: tuple[int, ...] = tuple(
        HASH_SPACE // BUNDLES_DEFAULT * number for number in range(BUNDLES_DEFAULT + 1)
    )
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        kind = "namespace bundles"
        if len(self.boundaries) < 2 or self.boundaries[0] != 0:
            raise InvalidRecord(kind, f"the first boundary is not 0: {self.boundaries}")
        if self.boundaries[-1] != HASH_SPACE:
            raise InvalidRecord(kind, f"the last boundary is not 2^32: {self.boundaries}")
        if any(after <= before for before, after in pairwise(self.boundaries)):
            raise InvalidRecord(kind, f"boundaries do not increase: {self.boundaries}")

    @classmethod
    def divided(cls, count: int) -> "NamespaceBundles":
        """Return `count` bundles of equal size. The last bundle takes the remainder, as in
        Pulsar."""
        assert count >= 1, count
        return cls((*(HASH_SPACE // count * number for number in range(count)), HASH_SPACE))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the bundles in Pulsar's form, such as "0x00000000_0x40000000". The last name
        ends in "0xffffffff"."""
        return tuple(self._name(index) for index in range(len(self.boundaries) - 1))

    def bundle_of(self, topic_hash: int) -> str:
        """Return the name of the bundle that holds the topics with this hash."""
        assert 0 <= topic_hash < HASH_SPACE, topic_hash
        return self._name(bisect_right(self.boundaries, topic_hash) - 1)

    def _name(self, index: int) -> str:
        start, end = self.boundaries[index : index + 2]
        return f"0x{start:08x}_0x{min(end, HASH_SPACE - 1):08x}"


@dataclass(frozen=True, slots=True)
class TopicLedger:
    """A data ledger of a topic. entries, length and closed_ms are 0 while the ledger is open."""

    ledger: LedgerId
    first_index: int  # the index of the ledger's first message
    entries: int = 0
    length: int = 0
    closed_ms: int = 0
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("ledger", "first_index", "entries", "length", "closed_ms"):
            _check_count("topic ledger", name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class DroppedHead:
    """The newest ledger that a topic dropped from its head. The topic's record keeps its id and its
    end, so that new ledgers get larger ids and new messages get larger indexes."""

    ledger: LedgerId
    entry: EntryId  # the last entry of the ledger
    next_index: int  # the index of the first message after the ledger
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("ledger", "entry", "next_index"):
            _check_count("dropped head", name, getattr(self, name))

    @property
    def last(self) -> tuple[int, int]:
        """The position of the ledger's last entry."""
        return self.ledger, self.entry


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """The position of an entry. Both numbers are -1 when there is no entry."""

    ledger: int
    entry: int
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("ledger", "entry"):
            if getattr(self, name) < -1:
                raise InvalidRecord("entry place", f"{name} {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    properties: Mapping[str, str] = field(default_factory=dict)
    inline: bytes = b""  # a snapshot of the cursor; b"": the cursor ledger has its state
    unknown: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """The record of one topic, changed by compare-and-set only.

    A broker that takes the topic over first increments `epoch`. When a broker finds an epoch other
    than its own, it has lost the topic. A topic that is deleted and created again has another
    `incarnation`; brokers compare the epoch and the incarnation. Positions order by ledger id, so
    the ids in `ledgers` strictly increase.
    """

    epoch: int
    ledgers: tuple[TopicLedger, ...] = ()
    cursor_ledgers: tuple[LedgerId, ...] = ()
    subscriptions: Mapping[str, SubscriptionRecord] = field(default_factory=dict)
    deleting: tuple[
        LedgerId, ...
    ] = ()  # ledgers that the topic no longer uses; the broker still has to delete them
    properties: Mapping[str, str] = field(default_factory=dict)
    dropped: DroppedHead | None = None  # None: no ledger was dropped from the head
    # A random value for each creation. "": only releases without incarnations opened the topic.
    incarnation: str = ""
    deleted: bool = False  # True: the topic is being deleted; `deleting` has all its ledgers
    terminated: EntryPlace | None = None  # the final entry; None: not terminated
    delayed_ledgers: tuple[LedgerId, ...] = ()  # they hold index segments of delayed messages
    ledger_min: int = 0  # least id of new data ledgers: above those of a deleted topic of this name
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        kind = "topic record"
        _check_count(kind, "epoch", self.epoch)
        _check_count(kind, "ledger_min", self.ledger_min)
        for before, after in pairwise(self.ledgers):
            if before.ledger >= after.ledger:
                raise InvalidRecord(kind, f"ledger {after.ledger} follows {before.ledger}")
            if before.first_index > after.first_index:
                raise InvalidRecord(kind, f"message indexes go backwards at ledger {after.ledger}")
        oldest = self.ledgers[0].ledger if self.ledgers else None
        if self.dropped is not None and oldest is not None and oldest <= self.dropped.ledger:
            raise InvalidRecord(kind, f"ledger {oldest} was dropped")
        used = [part.ledger for part in self.ledgers]
        used += [*self.cursor_ledgers, *self.delayed_ledgers]
        both = set(used) & set(self.deleting)
        if both:
            raise InvalidRecord(kind, f"ledgers {sorted(both)} are in use and being deleted")
        if self.incarnation:
            check_incarnation(kind, self.incarnation)
        if self.deleted and used:
            raise InvalidRecord(kind, f"deleted, but uses ledgers {used}")


@dataclass(frozen=True, slots=True)
class TopicTombstone:
    """The record of a deleted topic. The tombstone stays while a broker may still believe that it
    owns the topic, or while a client may still reconnect to the topic."""

    incarnation: str  # the incarnation of the deleted topic
    epoch: int  # the topic's last epoch; a new topic of the name begins above it
    deleted_ms: int
    # The incarnations of the brokers that were registered at the deletion, by broker id.
    brokers: Mapping[str, str] = field(default_factory=dict)
    clients: frozenset[str] = frozenset()  # the clients that were connected at the deletion
    version: int = 0  # the version of the topic's record when it was removed
    ledger_min: int = 0  # above all ledger ids of the deleted topic; 0: not known
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        check_incarnation("topic tombstone", self.incarnation)
        _check_count("topic tombstone", "epoch", self.epoch)
        _check_count("topic tombstone", "deleted_ms", self.deleted_ms)
        _check_count("topic tombstone", "version", self.version)
        _check_count("topic tombstone", "ledger_min", self.ledger_min)


@dataclass(frozen=True, slots=True)
class PartitionedTopic:
    """A topic that consists of partitions. Each partition is a topic of its own. The number of
    partitions never decreases."""

    partitions: int
    properties: Mapping[str, str] = field(default_factory=dict)
    created_ms: int = 0
    deleting: bool = False  # its partitions are being deleted; the record is deleted last
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        kind = "partitioned topic"
        if self.partitions < 1:
            raise InvalidRecord(kind, f"{self.partitions} partitions")
        _check_count(kind, "created_ms", self.created_ms)


# ---- checks --------------------------------------------------------------------------------------


def check_incarnation(kind: str, incarnation: str) -> None:
    """Raise InvalidRecord unless `incarnation` has 32 lower-case hex digits."""
    if len(incarnation) != _INCARNATION_DIGITS or not set(incarnation) <= set("0123456789abcdef"):
        raise InvalidRecord(kind, f"incarnation {incarnation!r} is not 32 hex digits")


def _check_name(kind: str, what: str, name: str) -> None:
    if not name:
        raise InvalidRecord(kind, f"empty {what}")


def _check_count(kind: str, what: str, number: int) -> None:
    if number < 0:
        raise InvalidRecord(kind, f"negative {what}: {number}")


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise InvalidLedgerMetadata(reason)


# ---- schemas -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """One version of a topic's schema, or the mark that the schema was deleted."""

    version: int
    deleted: bool = False  # True: the mark; earlier versions only decode older messages
    type: int = 0  # a number of Pulsar's Schema.Type
    name: str = ""
    data: bytes = b""
    properties: Mapping[str, str] = field(default_factory=dict)
    created_ms: int = 0
    fingerprint: bytes = b""  # equal for equal schemas
    unknown: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SchemaRecord:
    """All versions of a topic's schema, oldest first. All partitions of a topic share the record,
    and so do the persistent and the non-persistent topic of the same name."""

    versions: tuple[SchemaVersion, ...] = ()
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        numbers = [it.version for it in self.versions]
        if any(number < 0 for number in numbers) or sorted(set(numbers)) != numbers:
            raise InvalidRecord("schema record", f"versions {numbers[:20]}")
