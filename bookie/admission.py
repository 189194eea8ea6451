"""What a bookie lets in: adds and fences, decided and written in one synchronous step.

Theory. A fence must stop every later add, and an add that was let in before must be visible to
the read that fenced. Both hold because neither `admit` nor `fence` contains an await: each reads
the ledger's state, decides, and writes to the store (which makes it visible) before anything else
can run. Durability comes afterwards, for both through the same log and so in the same order.

What is kept in memory per ledger is its record and the highest entry id stored. A higher id
cannot be a duplicate; only for one at or below it is the store asked. The states are a cache of
the store, bounded by count, oldest out first; one that has left is read again when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import (
    FormatDamaged,
    LedgerRecord,
    decode_ledger_record,
    encode_ledger_record,
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
    decode_envelope,
    encode_ack,
)
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from magnetar.bookie.storage.store import Put, Storage
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

# About 400 bytes each: 40 MB. A ledger beyond costs two lookups when it is next written to.
LEDGERS_CACHED_MAX: Final = 100_000


@dataclass(slots=True)
class LedgerState:
    """A ledger as the store has it, durable or not."""

    record: LedgerRecord | None  # None: the store knows nothing of the ledger
    highest: int  # highest id of a stored entry; -1: none
    fence_durable: bool = False  # False: also when nobody remembers
    alarmed: bool = False  # a conflict of this ledger was logged: one line, not one per add


@dataclass(slots=True)
class Admitted:
    """Acks of one frame of adds."""

    stored: list[bytes]  # to be sent once everything written so far is durable
    refused: list[bytes]  # to be sent at once


def refusal(add: Add, record: LedgerRecord | None) -> BookieCode | None:
    """Why `add` must not be stored, by what is known of its ledger. None: it may."""
    if record is None:
        return None
    if record.master_key != add.master_key:
        return BookieCode.UNAUTHORIZED
    if record.fenced and not add.flags & (RECOVERY | COPY):
        return BookieCode.FENCED
    return None


def same_entry(stored: bytes, offered: bytes) -> bool:
    """Whether two envelopes of one entry id carry the same entry.

    `confirmed`, and with it the checksum, differs rightfully when a recoverer writes back. Raises
    EnvelopeDamaged when the stored one is not intact.
    """
    if stored == offered:
        return True
    decoded = decode_envelope(stored)
    length: int = ENVELOPE.unpack_from(offered)[4]
    return decoded.length == length and decoded.payload == offered[ENVELOPE.size :]


class Admission:
    """Owned by the loop: every method is synchronous."""

    def __init__(
        self,
        storage: Storage,
        *,
        write: Callable[[Sequence[Put]], None],
        clock: Clock,
        ledgers_cached_max: int = LEDGERS_CACHED_MAX,
    ) -> None:
        """`write` makes puts visible in `storage` before it returns; it may raise StorageFailed."""
        self._storage = storage
        self._write = write
        self._clock = clock
        self._ledgers_cached_max = ledgers_cached_max
        self._states: dict[int, LedgerState] = {}
        self.conflicts = 0  # entries that were offered with other content than is stored

    def state(self, ledger: int) -> LedgerState:
        """Raises StorageFailed: the ledger's record cannot be read, or makes no sense."""
        state = self._states.get(ledger)
        return self._load(ledger) if state is None else state

    def admit(self, adds: Iterable[Add]) -> Admitted:
        """Store what may be stored. Raises StorageFailed when writing failed: nothing is known
        then."""
        admitted = Admitted([], [])
        puts: list[Put] = []
        for add in adds:
            code = add.fault if add.fault is not None else self._admit_one(add, puts)
            acks = admitted.stored if code is BookieCode.OK else admitted.refused
            acks.append(encode_ack(add.ledger, add.entry, code))
        self._write_out(puts)
        return admitted

    def fence(self, ledger: int, master_key: int) -> BookieCode:
        """Fence the ledger, also one that nobody has heard of. OK: fenced, durable only later.

        UNAUTHORIZED: not fenced. Raises StorageFailed.
        """
        state = self.state(ledger)
        if state.record is not None and state.record.master_key != master_key:
            return BookieCode.UNAUTHORIZED
        if state.record is None or not state.record.fenced:
            puts: list[Put] = []
            self._record(ledger, state, self._recorded(state, master_key).fence(), puts)
            self._write_out(puts)
            log.info("ledger fenced", ledger=ledger, highest=state.highest)
        return BookieCode.OK

    def _admit_one(self, add: Add, puts: list[Put]) -> BookieCode:
        """Append to `puts` what storing the add takes, or say why not."""
        state = self._states.get(add.ledger)
        if state is None:
            self._write_out(puts)  # the store must show all that is decided already
            try:
                state = self._load(add.ledger)
            except StorageFailed as error:
                log.error("ledger unreadable", ledger=add.ledger, error=str(error))
                return BookieCode.IO_ERROR
        code = refusal(add, state.record)
        if code is not None:
            return code
        if state.record is None or (add.flags & RECOVERY and not state.record.fenced):
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

    def _compare(self, add: Add, state: LedgerState) -> BookieCode | None:
        """The answer for an add whose id may be taken. None: it is free."""
        try:
            stored = self._storage.entry(add.ledger, add.entry)
            if stored is None:
                return None
            if same_entry(stored, add.envelope):
                return BookieCode.OK
        except (StorageFailed, EnvelopeDamaged) as error:
            log.error("entry unreadable", ledger=add.ledger, entry=add.entry, error=str(error))
            return BookieCode.IO_ERROR
        # Two writers of one ledger, or corruption: neither must ever happen.
        self.conflicts += 1
        if not state.alarmed:
            state.alarmed = True
            log.error("entry offered again with other content", ledger=add.ledger, entry=add.entry)
        return BookieCode.CONFLICT

    def _load(self, ledger: int) -> LedgerState:
        value = self._storage.ledger_record(ledger)
        if value is None:
            return LedgerState(None, -1)
        try:
            record = decode_ledger_record(value)
        except FormatDamaged as damage:
            raise StorageFailed(f"read the record of ledger {ledger}", damage.reason) from damage
        last = self._storage.last_entry(ledger)
        state = LedgerState(record, -1 if last is None else last[0])
        self._keep(ledger, state)
        return state

    def _keep(self, ledger: int, state: LedgerState) -> None:
        if len(self._states) >= self._ledgers_cached_max:
            del self._states[next(iter(self._states))]
        self._states[ledger] = state

    def _recorded(self, state: LedgerState, master_key: int) -> LedgerRecord:
        """The ledger's record, a new one if there is none. Whoever comes first sets the key."""
        if state.record is not None:
            return state.record
        return LedgerRecord(master_key, fenced=False, created_ms=self._clock.now_ms())

    def _record(
        self, ledger: int, state: LedgerState, record: LedgerRecord, puts: list[Put]
    ) -> None:
        if state.record is None:
            self._keep(ledger, state)
        state.record = record
        puts.append((ledger_key(ledger), encode_ledger_record(record)))

    def _write_out(self, puts: list[Put]) -> None:
        if puts:
            self._write(puts)
            puts.clear()
