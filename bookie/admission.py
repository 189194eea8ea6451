"""Admission of adds and fences: each is decided and written in one synchronous step.

Theory. A fence must stop every later add. The read that requested the fence must see every add that
the bookie admitted before the fence. Both hold because neither `admit` nor `fence` contains an
await. Each reads the ledger's state, decides, and writes to the store before other code can run.
The write makes the change visible to reads. The change becomes durable later. Adds and fences go
through the same log, so they become durable in the order of their writes.

A bookie admits the first ordinary add of a ledger only after the metadata confirmed that this
bookie belongs to the ledger. Otherwise an outdated writer could bring back a deleted ledger, or
write to a bookie that did not see a fence. The check needs an await, so this module does not make
it. `Admitted.unverified` returns the unchecked adds to the caller, which makes the check and offers
the adds again. The ledger may be fenced meanwhile. Adds of recoverers and replicators need no
check, and do not replace the check of later ordinary adds.

For each ledger, `Admission` keeps the record and the highest stored entry id in memory. A higher id
cannot be a duplicate, so only ids up to the highest need a read of the store. The states are a
cache of the store with a limit on their number. The oldest state is dropped first, and is read
again on its next use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import (
    ID_MAX,
    FormatDamaged,
    LedgerRecord,
    Tombstone,
    decode_ledger_record,
    decode_tombstone,
    encode_ledger_record,
    encode_tombstone,
    entry_key,
    ledger_key,
)
from magnetar.protos.envelope import (
    COPY,
    ENVELOPE,
    RECOVERY,
    Add,
    BookieCode,
    EnvelopeDamaged,
    decode_envelope_of,
    encode_ack,
)
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from magnetar.bookie.storage.store import Put, Storage
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

# A state takes about 400 bytes: 40 MB in all. A ledger that is not cached costs two lookups at its
# next write.
LEDGERS_CACHED_MAX: Final = 100_000


class Intake(Enum):
    """The kinds of adds that the bookie admits. It always admits fences."""

    ALL = "all"
    REPAIRS = "repairs"  # the disk is nearly full: only recoverers and replicators may add
    NONE = "none"  # the remaining space is kept for fences and deletions


@dataclass(slots=True)
class LedgerAdmission:
    """A ledger's state in the store, including writes that are not durable yet."""

    record: LedgerRecord | None  # None: the store has no record of the ledger
    highest: int  # the highest stored entry id (`_highest`); -1: no entry is stored
    fence_durable: bool = False  # False: not durable, or not known
    deleted: bool = False  # the store has a tombstone, and so no record
    alarmed: bool = False  # a conflict was logged: one line per ledger, not one per add


@dataclass(slots=True)
class Admitted:
    """The result of one call of `admit`."""

    stored: list[bytes]  # acks to send when all writes so far are durable
    refused: list[bytes]  # acks to send at once, each for one entry
    unverified: list[Add] = field(default_factory=list)  # the caller must check their ledgers
    entries_stored: int = 0


@dataclass(slots=True)
class _Stretch:
    """Consecutive admitted entries of one ledger, from `first` to `following - 1`."""

    state: LedgerAdmission
    ledger: int
    master_key: int
    first: int
    following: int

    def end(self, admitted: Admitted) -> None:
        count = self.following - self.first
        if count:
            self.state.highest = max(self.state.highest, self.following - 1)
            admitted.stored.append(encode_ack(self.ledger, self.first, BookieCode.OK, count=count))
            admitted.entries_stored += count


_NOTHING: Final = _Stretch(LedgerAdmission(None, -1), -1, -1, -1, -1)


def refusal(add: Add, state: LedgerAdmission, intake: Intake) -> BookieCode | None:
    """Return the reason why the ledger's state or the intake forbids the bookie to store `add`.
    None: the bookie may store it."""
    record = state.record
    if record is None:
        if state.deleted:
            return BookieCode.DELETED
    elif record.master_key != add.master_key:
        return BookieCode.UNAUTHORIZED
    elif record.fenced and not add.flags & (RECOVERY | COPY):
        return BookieCode.FENCED
    if intake is not Intake.ALL and (intake is Intake.NONE or not add.flags & (RECOVERY | COPY)):
        return BookieCode.READ_ONLY
    return None


def same_entry(stored: bytes, offered: bytes) -> bool:
    """Return whether two envelopes of one entry id carry the same entry.

    The comparison ignores `confirmed` and the checksum: they are no part of the entry's content.
    Raises EnvelopeDamaged when the stored envelope is not intact or belongs to another entry.
    """
    if stored == offered:
        return True
    _, ledger, entry, _, length = ENVELOPE.unpack_from(offered)
    decoded = decode_envelope_of(ledger, entry, stored)
    same_length: bool = decoded.length == length
    return same_length and decoded.payload == offered[ENVELOPE.size :]


class Admission:
    """Admits adds and fences. Only the event loop's thread uses it; every method is synchronous."""

    def __init__(
        self,
        storage: Storage,
        *,
        write: Callable[[Sequence[Put]], None],
        delete: Callable[[int, bytes | None], None],
        clock: Clock,
        ledgers_cached_max: int = LEDGERS_CACHED_MAX,
    ) -> None:
        """`write` and `delete` (`Storage.delete_ledger`) change `storage` before they return. They
        may raise StorageFailed."""
        self.intake = Intake.ALL
        self._storage = storage
        self._write = write
        self._delete = delete
        self._clock = clock
        self._ledgers_cached_max = ledgers_cached_max
        self._states: dict[int, LedgerAdmission] = {}
        self._removal_watchers: list[Callable[[int], None]] = []
        self.conflicts = 0  # entries offered with other content than the stored entry

    def watch_removals(self, tell: Callable[[int], None]) -> None:
        """Call `tell` with the id of each ledger whose stored entries are deleted or replaced."""
        self._removal_watchers.append(tell)

    def state(self, ledger: int) -> LedgerAdmission:
        """Return the ledger's state. Raises StorageFailed when its record or tombstone cannot be
        read or decoded."""
        state = self._states.get(ledger)
        return self._load(ledger) if state is None else state

    def admit(self, adds: Iterable[Add], *, verified: bool = False) -> Admitted:
        """Store the adds that the ledgers' states and the intake allow. `verified`: the metadata
        confirmed that this bookie belongs to the ledgers. Raises StorageFailed when a write failed;
        the outcome of all adds is then unknown.

        Most adds are ordinary, and follow the previous add in the same ledger. If the first add of
        such a sequence is admitted, the whole sequence is. So the sequence forms a `_Stretch` and
        gets one ack.
        """
        admitted = Admitted([], [])
        puts: list[Put] = []
        stretch = _NOTHING
        for add in adds:
            ledger, entry, flags, master_key, envelope, fault = add
            if (
                entry == stretch.following
                and ledger == stretch.ledger
                and master_key == stretch.master_key
                and not flags
                and fault is None
            ):
                puts.append((entry_key(ledger, entry), envelope))
                stretch.following = entry + 1
                continue
            stretch.end(admitted)
            stretch = _NOTHING
            code = fault
            if code is None:
                code = self._admit_one(add, puts, verified=verified)
            if code is None:
                admitted.unverified.append(add)
            elif code is not BookieCode.OK:
                admitted.refused.append(encode_ack(ledger, entry, code))
            else:
                stretch = _Stretch(self._states[ledger], ledger, master_key, entry, entry + 1)
                if flags or entry != stretch.state.highest:
                    stretch.end(admitted)
                    stretch = _NOTHING
        stretch.end(admitted)
        self._write_out(puts)
        return admitted

    def fence(self, ledger: int, master_key: int) -> BookieCode:
        """Fence the ledger, even if the store has no record of it. OK: the ledger is fenced, but
        the fence may not be durable yet.

        UNAUTHORIZED, DELETED: not fenced. Raises StorageFailed.
        """
        state = self.state(ledger)
        if state.deleted:
            return BookieCode.DELETED
        if state.record is not None and state.record.master_key != master_key:
            return BookieCode.UNAUTHORIZED
        if state.record is None or not state.record.fenced:
            puts: list[Put] = []
            self._record(ledger, state, self._recorded(state, master_key).fence(), puts)
            self._write_out(puts)
            log.info("ledger fenced", ledger=ledger, highest=state.highest)
        return BookieCode.OK

    def delete(self, ledger: int, *, for_good: bool) -> None:
        """Delete the ledger's record and all its entries. `for_good`: the metadata no longer has
        the ledger, so the bookie answers its later adds and reads with DELETED. Raises
        StorageFailed."""
        stone = encode_tombstone(Tombstone(self._clock.now_ms())) if for_good else None
        self._delete(ledger, stone)
        self._states.pop(ledger, None)
        self._tell_removed(ledger)

    def _admit_one(self, add: Add, puts: list[Put], *, verified: bool) -> BookieCode | None:
        """Append the writes of the add to `puts` and return OK, or return the reason for the
        refusal. None: the caller must check the metadata first."""
        state = self._states.get(add.ledger)
        if state is None:
            self._write_out(puts)  # the store must show every earlier decision
            try:
                state = self._load(add.ledger)
            except StorageFailed as error:
                log.error("ledger unreadable", ledger=add.ledger, error=str(error))
                return BookieCode.IO_ERROR
        code = refusal(add, state, self.intake)
        if code is not None:
            return code
        before = state.record
        if not add.flags:
            if before is None or not before.verified:
                if not verified:
                    return None
                record = self._recorded(state, add.master_key).verify()
                self._record(add.ledger, state, record, puts)
        elif before is None or (add.flags & RECOVERY and not before.fenced):
            record = self._recorded(state, add.master_key)
            fences = add.flags & RECOVERY
            self._record(add.ledger, state, record.fence() if fences else record, puts)
        if add.entry <= state.highest:
            self._write_out(puts)
            code = self._compare(add, state)
            if code is not None:
                return code
        puts.append((entry_key(add.ledger, add.entry), add.envelope))
        if add.entry > state.highest:
            state.highest = add.entry
        return BookieCode.OK

    def _compare(self, add: Add, state: LedgerAdmission) -> BookieCode | None:
        """Return the answer for an add whose entry id may be stored already. None: store the
        add."""
        try:
            stored = self._storage.entry(add.ledger, add.entry)
            if stored is None:
                return None
            if same_entry(stored, add.envelope):
                return BookieCode.OK
        except (StorageFailed, EnvelopeDamaged) as error:
            log.error("entry unreadable", ledger=add.ledger, entry=add.entry, error=str(error))
            # Replace an unreadable entry by the copy of a replicator or recoverer, which read a
            # sound copy from other bookies. This copy has the content of the lost entry: a ledger
            # has one writer, and an envelope names its entry. If the bookie refused the copy, a
            # ledger without a spare bookie could never be recovered.
            if not add.flags & (COPY | RECOVERY):
                return BookieCode.IO_ERROR
            self._tell_removed(add.ledger)
            return None
        # Either two writers wrote to one ledger, or the data is corrupt: a bug in both cases.
        self.conflicts += 1
        if not state.alarmed:
            state.alarmed = True
            log.error(
                "entry offered with other content than stored", ledger=add.ledger, entry=add.entry
            )
        return BookieCode.CONFLICT

    def _tell_removed(self, ledger: int) -> None:
        for tell in self._removal_watchers:
            tell(ledger)

    def _load(self, ledger: int) -> LedgerAdmission:
        value = self._storage.ledger_record(ledger)
        if value is None:
            return self._load_absent(ledger)
        try:
            record = decode_ledger_record(value)
        except FormatDamaged as damage:
            raise StorageFailed(f"read the record of ledger {ledger}", damage.reason) from damage
        state = LedgerAdmission(record, self._highest(ledger))
        self._keep(ledger, state)
        return state

    def _highest(self, ledger: int) -> int:
        """Return the highest stored entry id; ID_MAX: the end of the ledger is damaged. With ID_MAX
        the bookie looks every id up in the store, so the damage does not prevent a repair of the
        ledger."""
        try:
            last = self._storage.last_entry(ledger)
        except StorageFailed as error:
            log.error("last entry unreadable", ledger=ledger, error=str(error))
            return ID_MAX
        return -1 if last is None else last[0]

    def _load_absent(self, ledger: int) -> LedgerAdmission:
        stone = self._storage.tombstone(ledger)
        if stone is None:
            return LedgerAdmission(None, -1)
        try:
            decode_tombstone(stone)
        except FormatDamaged as damage:
            raise StorageFailed(f"read the tombstone of ledger {ledger}", damage.reason) from damage
        return LedgerAdmission(None, -1, deleted=True)

    def _keep(self, ledger: int, state: LedgerAdmission) -> None:
        if len(self._states) >= self._ledgers_cached_max:
            del self._states[next(iter(self._states))]
        self._states[ledger] = state

    def _recorded(self, state: LedgerAdmission, master_key: int) -> LedgerRecord:
        """Return the ledger's record, or a new one. The first add or fence sets the master key."""
        if state.record is not None:
            return state.record
        return LedgerRecord(master_key, fenced=False, created_ms=self._clock.now_ms())

    def _record(
        self, ledger: int, state: LedgerAdmission, record: LedgerRecord, puts: list[Put]
    ) -> None:
        if state.record is None:
            self._keep(ledger, state)
        state.record = record
        puts.append((ledger_key(ledger), encode_ledger_record(record)))

    def _write_out(self, puts: list[Put]) -> None:
        if puts:
            self._write(puts)
            puts.clear()
