"""LedgerWriter: decides which bookies get an entry, what is durable, and which bookies to replace.

The machine has no I/O, no clock and no tasks. The caller feeds it events, and carries out the
returned actions in order. Recovery uses the same machine for its write-backs.

Theory. Each seat of the ensemble gets each entry whose write set includes the seat. A pending entry
knows the seats that *acked* it and the seats that are still *awaited*. The writer confirms entries
strictly in order: each when enough seats acked it. The writer releases a confirmed entry when it
awaits no seat for the entry any more. A seat *fails* when its member refuses an add, answers too
late, lags too far, or loses its connection. The writer neither sends to a failed seat nor waits for
it, and asks for a spare (`FindSpares`).

When a spare is found, the shell records the new ensemble in the metadata store (`RecordEnsemble`).
Until the outcome is known, the writer confirms nothing. The recorded segment begins directly after
the last confirmed entry. If the old members confirmed an entry during the change, readers would
look for that entry on the new members.

Without a spare, the ledger continues without the failed seats, as long as enough other members
answer. A failed member gets its seat back when the writer can write to it again. An idle ledger
does not look for spares: a broker has thousands of idle ledgers, and most failed members return
soon.

`change_delay_s` delays the change for active ledgers, too. After the loss of a connection, the
member then keeps its seat for this time. The writer looks for a spare at once if some entry could
not be confirmed without the failed seats.

The metadata lists a failed member also for entries that were confirmed without it. The member may
lack these entries. The writer reports them (`Missed`) when the member gets its seat back, when
another member gets the seat, or when the ledger ends. A replicator repairs them.

Invariants (see `check`):

1. Entries are confirmed in order and without gaps, and only in state OPEN.
2. An entry is confirmed only when `ack_quorum` seats of its write set acked it. All of these acks
   come from the members that durable metadata lists for the entry.
3. For each pending entry above `confirmed`, each seat of the write set has acked the entry, is
   awaited, or has failed. Only acks of the seat's present member count.
4. The writer never sends entries up to `confirmed` again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.quorum import Quorum, Seats, seat_numbers, seats
from magnetar.bookie.ledger.verdict import ADD_VERDICTS, AddVerdict
from magnetar.protos.envelope import BookieCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from magnetar.metadata.model import Member

ENTRY_OVERHEAD_BYTES: Final = 512
"""Memory of a pending entry besides its payload. Its two bytes objects hold headers of 36 and 17
bytes, and Python adds 33 bytes to each. `_Pending` takes 96 bytes, and its place in the dict about
100. References in outboxes take the rest."""

CHANGES_IN_VAIN_MAX: Final = 4
"""The limit of ensemble changes in a row without a confirmation in between. If four new ensembles
did not confirm the entry, the entry itself is probably the cause. The ledger then waits for its
members, and fails at the quorum timeout."""

Parts = tuple[bytes, bytes]
"""An encoded add: one element of the result of `magnetar.protos.envelope.encode_adds`."""


@dataclass(frozen=True, slots=True)
class SendAdd:
    """Send the entry (`LedgerWriter.parts`) to the member that has the seat now."""

    entry: int
    seat: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """Every entry up to and including this one is durable. The shell asserts that durable metadata
    lists the present ensemble."""

    through: int


@dataclass(frozen=True, slots=True)
class FindSpares:
    """Look for writable bookies for these seats; then call `on_spares_found`."""

    seats: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordEnsemble:
    """Record in the metadata that `members` hold the entries from `first` on. Call `on_recorded`
    only when the record is durable, and `on_not_recorded` only when it certainly was not
    written."""

    first: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Missed:
    """The seat of this member had failed. The member may lack some of these confirmed entries,
    although the metadata lists the member for them. A repair copies the entries."""

    member: Member
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The ledger takes no more entries and confirms none. `code` is TIMEOUT if an entry was not
    confirmed within the quorum timeout."""

    code: BookieCode


Action = SendAdd | Confirm | FindSpares | RecordEnsemble | Missed | Fail


class WriterState(Enum):
    OPEN = "open"
    CHANGING = "changing"  # a RecordEnsemble is running: nothing is confirmed
    FAILED = "failed"
    SEALED = "sealed"  # being closed: its end is decided


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    add_timeout_s: float  # a bookie that does not answer an add within this time has failed
    quorum_timeout_s: float  # an entry not confirmed within this time fails the ledger
    changes_max: int  # after this many ensemble changes, the ledger replaces no member
    change_delay_s: float = 0.0  # time for which the seat of a lost stream is kept


@dataclass(slots=True)
class _Pending:
    end: int  # payload bytes of this writer's entries up to and including this one
    parts: Parts
    appended_at: float
    awaited: Seats
    acked: Seats = 0


class LedgerWriter:
    """One ledger being written, from entry `confirmed + 1` on.

    `now` is in seconds of any clock that does not go backwards.
    """

    def __init__(
        self,
        quorum: Quorum,
        ensemble: Sequence[Member],
        *,
        limits: WriterLimits,
        segment_first: int = 0,
        confirmed: int = -1,
        now: float,
    ) -> None:
        assert len(ensemble) == quorum.ensemble_size
        assert segment_first <= confirmed + 1
        self.quorum = quorum
        self.ensemble = tuple(ensemble)
        self.segment_first = segment_first  # the first entry of the segment that records `ensemble`
        self.state = WriterState.OPEN
        self.confirmed = confirmed
        self.appended = confirmed
        self.length = 0  # payload bytes appended to this writer
        self.confirmed_length = 0  # payload bytes of those entries that are confirmed
        self.failed: Seats = 0
        self.changes = 0
        self._limits = limits
        self._pending: dict[int, _Pending] = {}  # released + 1 .. appended, in this order
        self._released = confirmed
        self._released_length = 0
        self._failed_since = confirmed  # `appended` at the failure of the first seat in `failed`
        self._wanted: Seats = 0  # seats for which spares are being sought or recorded
        self.declined: Seats = 0  # failed seats for which there was no spare
        # Keyed by seat: when `change_delay_s` began. None: the next tick sets it.
        self._kept_since: dict[int, float | None] = {}
        self._missed_from: dict[int, int] = {}  # keyed by failed seat: the first entry it may lack
        self._owed: dict[int, list[int]] = {}  # the value of `owed` when the ledger ended
        self._changes_in_vain = 0
        self._proposed: tuple[Member, ...] = ()  # being recorded; only in state CHANGING
        self._seated_at = [now] * quorum.ensemble_size
        self._targets = self._compute_targets()

    # -- events ----------------------------------------------------------------------------------

    def append(self, size: int, parts: Parts, now: float) -> tuple[int, ...]:
        """Append the next entry, `appended + 1`, of `size` payload bytes. Returns the seats to
        which to send the entry.

        May be called while members are being replaced. The caller limits the bytes in flight.
        """
        assert self.state is WriterState.OPEN or self.state is WriterState.CHANGING
        entry = self.appended + 1
        awaited, numbers = self._targets[entry % self.quorum.ensemble_size]
        self.appended = entry
        self.length += size
        self._pending[entry] = _Pending(self.length, parts, now, awaited)
        return numbers

    def on_acks(self, seat: int, entries: Iterable[int]) -> list[Action]:
        """The member on this seat holds these entries durably. Late and repeated acks are allowed.
        The acks of a failed seat count too."""
        bit = 1 << seat
        others = ~bit
        pending = self._pending
        for entry in entries:
            add = pending.get(entry)
            if add is not None:
                add.acked |= bit
                add.awaited &= others
        return self._advance()

    def on_add_failed(self, seat: int, code: BookieCode) -> list[Action]:
        """The member on this seat refused an add, or its connection was lost."""
        if ADD_VERDICTS[code] is AddVerdict.BOOKIE_FAILED:
            if code is not BookieCode.CONNECTION_LOST:
                self._kept_since.pop(seat, None)
            elif self._limits.change_delay_s > 0 and self.writing and not self.failed >> seat & 1:
                self._kept_since[seat] = None
            return [*self._fail_seats(1 << seat), *self.maybe_find()]
        return self.fail(code)

    def fail(self, code: BookieCode) -> list[Action]:
        """The ledger is lost or cannot be written: the outcome of pending entries is unknown."""
        if not self.writing:
            return []
        self.state = WriterState.FAILED
        self._drop_pending()
        return [Fail(code)]

    def on_lagging(self, laggards: Seats) -> list[Action]:
        """The writer keeps too many bytes only for these seats. It fails each of them, as long as
        every entry can be confirmed without the failed seats."""
        gone = self.failed
        for number in seat_numbers(laggards & ~gone):
            if self.quorum.writable(gone | 1 << number):
                gone |= 1 << number
        return self._fail_seats(gone)

    def on_tick(self, now: float) -> list[Action]:
        """Check the timeouts. Call this regularly."""
        shortest_s = min(self._limits.add_timeout_s, self._limits.quorum_timeout_s)
        oldest = self._pending.get(self._released + 1)
        if oldest is None or now - oldest.appended_at < shortest_s:
            return [*self._end_delays(now)]
        head = self._pending.get(self.confirmed + 1)
        if head is not None and now - head.appended_at >= self._limits.quorum_timeout_s:
            return self.fail(BookieCode.TIMEOUT)
        add_timeout_s = self._limits.add_timeout_s
        due = ~self.failed & seats(
            number for number, at in enumerate(self._seated_at) if now - at >= add_timeout_s
        )
        late = 0
        for add in self._pending.values():
            if late == due or now - add.appended_at < add_timeout_s:
                break
            late |= add.awaited & due
        return [*self._fail_seats(late), *self._end_delays(now)]

    def on_spares_found(self, spares: Mapping[int, Member]) -> list[Action]:
        """The answer to FindSpares: new members by seat, as many as were found.

        If a spare can be used, the writer confirms nothing until `on_recorded` or
        `on_not_recorded`.
        """
        if not self.writing:
            return []
        assert self.state is WriterState.OPEN
        # a failed member may have got its seat back during the search
        useful = self.failed & self._wanted & seats(spares)
        self.declined |= self.failed & self._wanted & ~useful
        self._wanted = useful
        if not useful:
            return [*self.maybe_find()]
        members = list(self.ensemble)
        for number in seat_numbers(useful):
            members[number] = spares[number]
        assert len({member.bookie for member in members}) == len(members), "a bookie has two seats"
        self.state = WriterState.CHANGING
        self._proposed = tuple(members)
        return [RecordEnsemble(self.confirmed + 1, self._proposed)]

    def on_recorded(self, now: float) -> list[Action]:
        """Durable metadata lists the proposed members from the first unconfirmed entry on.

        The writer handles all pending entries in one step without an `await`. It drops the acks of
        the changed seats and sends these seats the entries. Then it makes one pass of
        confirmations.
        """
        if not self.writing:
            return []
        assert self.state is WriterState.CHANGING
        changed = self._wanted
        missed = self._take_missed(changed)
        in_vain = self.segment_first == self.confirmed + 1
        self._changes_in_vain = self._changes_in_vain + 1 if in_vain else 0
        for number in seat_numbers(changed):
            self._seated_at[number] = now
        for add in self._pending.values():
            add.acked &= ~changed
            add.awaited &= ~changed
        self.ensemble, self._proposed = self._proposed, ()
        self.segment_first = self.confirmed + 1
        self.changes += 1
        self.failed &= ~changed
        return [*missed, *self._end_change()]

    def on_not_recorded(self) -> list[Action]:
        """The metadata certainly did not change. The ledger continues without the failed seats
        until `on_spares` or `on_rejoin`."""
        if not self.writing:
            return []
        assert self.state is WriterState.CHANGING
        self._proposed = ()
        self.declined |= self.failed & self._wanted
        return self._end_change()

    def on_spares(self) -> list[FindSpares]:
        """Look for spares for all failed seats. Call this when new bookies may be available, and
        after the first append to an idle ledger."""
        self.declined = 0
        return self.maybe_find()

    def maybe_find(self) -> list[FindSpares]:
        """Look for spares if a seat needs one. If all entries are confirmed, and none was appended
        since the first of the seats failed, the search waits for the next append. One search or
        change runs at a time; later failures wait for its end."""
        if self.state is not WriterState.OPEN or self._wanted:
            return []
        kept = seats(self._kept_since) if self.quorum.writable(self.failed) else 0
        looked_for = self.failed & ~kept
        if not looked_for & ~self.declined or self._changed_enough:
            return []
        if self.idle and self.appended == self._failed_since:
            return []  # a tick calls `on_spares` after the next append
        self._wanted, self.declined = looked_for, 0
        return [FindSpares(seat_numbers(self._wanted))]

    def on_rejoin(self, seat: int, now: float) -> list[Action]:
        """The shell can write to a failed member again. The member gets the unconfirmed entries. It
        does not get the entries that were confirmed in the meantime; other members hold them."""
        bit = 1 << seat
        if not self.failed & bit or not self.writing:
            return self._advance()
        missed = self._take_missed(bit)
        self.failed &= ~bit
        self.declined &= ~bit
        self._seated_at[seat] = now
        self._targets = self._compute_targets()
        return [*missed, *self._send_missing(), *self._advance()]

    def seal(self) -> tuple[int, int]:
        """Decide the end of the ledger. Returns `confirmed` and `confirmed_length`.

        Call this only when nothing is in flight, or when the ledger has failed and its entries in
        flight are given up. An unfinished ensemble change does not matter: its segment would begin
        after the last entry."""
        if self.state is not WriterState.FAILED:
            assert self.writing
            assert self.idle
        self.state = WriterState.SEALED
        self._drop_pending()
        return self.confirmed, self.confirmed_length

    # -- facts -----------------------------------------------------------------------------------

    @property
    def writing(self) -> bool:
        return self.state is WriterState.OPEN or self.state is WriterState.CHANGING

    @property
    def idle(self) -> bool:
        """True when no entry waits for a confirmation."""
        return self.confirmed == self.appended

    @property
    def kept(self) -> bool:
        """True when an entry is not confirmed, or a bookie has not answered a confirmed entry."""
        return bool(self._pending)

    @property
    def stuck(self) -> bool:
        """True when entries are unconfirmed, too few seats are left to confirm entries, and neither
        a search for spares nor a change is running."""
        return (
            self.state is WriterState.OPEN
            and not self._wanted
            and not self.idle
            and not self.quorum.writable(self.failed)
        )

    @property
    def missed(self) -> list[Missed]:
        """The confirmed entries that currently failed members may lack."""
        return [
            Missed(self.ensemble[seat], first, self.confirmed)
            for seat, first in sorted(self._missed_from.items())
            if first <= self.confirmed
        ]

    @property
    def owed(self) -> dict[int, list[int]]:
        """The confirmed entries for which the writer still awaits an ack, keyed by seat. Also valid
        after the end of the ledger."""
        if not self._pending:
            return self._owed
        owed: dict[int, list[int]] = {}
        for entry in range(self._released + 1, self.confirmed + 1):
            for seat in seat_numbers(self._pending[entry].awaited):
                owed.setdefault(seat, []).append(entry)
        return owed

    @property
    def in_flight_bytes(self) -> int:
        """Bytes appended but not confirmed, with the memory overhead of each entry."""
        if not self.writing:
            return 0
        entries = self.appended - self.confirmed
        return self.length - self.confirmed_length + entries * ENTRY_OVERHEAD_BYTES

    @property
    def lag_bytes(self) -> int:
        """Bytes of the confirmed entries that the writer keeps only for bookies that have not
        answered (`laggards`), with the memory overhead of each entry."""
        if not self._pending:
            return 0
        entries = self.confirmed - self._released
        return self.confirmed_length - self._released_length + entries * ENTRY_OVERHEAD_BYTES

    @property
    def laggards(self) -> Seats:
        """The seats for which the writer keeps the oldest confirmed entry."""
        if self._released == self.confirmed or not self._pending:
            return 0
        return self._pending[self._released + 1].awaited

    def overdue(self, now: float, after_s: float) -> Seats:
        """Return the seats that have been awaited for the oldest entry for at least `after_s`."""
        oldest = self._pending.get(self._released + 1)
        if oldest is None or now - oldest.appended_at < after_s:
            return 0
        return oldest.awaited & seats(
            number for number, at in enumerate(self._seated_at) if now - at >= after_s
        )

    def parts(self, entry: int) -> Parts | None:
        """Return the entry's encoded add. None: the writer has released it, because all its seats
        answered or failed, or because the ledger ended."""
        add = self._pending.get(entry)
        return None if add is None else add.parts

    def describe(self) -> str:
        """Return the state as text for people, with the acks of pending entries."""
        lines = [
            f"{self.state.value}: confirmed {self.confirmed}, appended {self.appended},"
            f" failed seats {list(seat_numbers(self.failed))}, {self.changes} changes"
        ]
        for entry, add in self._pending.items():
            acked, awaited = list(seat_numbers(add.acked)), list(seat_numbers(add.awaited))
            lines.append(f"  entry {entry}: acked by {acked}, awaited from {awaited}")
        return "\n".join(lines)

    def check(self) -> None:
        assert self.segment_first <= self.confirmed + 1
        assert self.confirmed <= self.appended
        assert self.confirmed_length <= self.length
        assert bool(self._proposed) == (self.state is WriterState.CHANGING)
        assert self._wanted or self.state is not WriterState.CHANGING
        assert not self.declined & ~self.failed
        assert seats(self._missed_from) == self.failed
        assert not seats(self._kept_since) & ~self.failed
        assert len({member.bookie for member in self.ensemble}) == len(self.ensemble)
        if not self.writing:
            assert not self._pending
            return
        assert self._released <= self.confirmed
        assert list(self._pending) == list(range(self._released + 1, self.appended + 1))
        for entry, add in self._pending.items():
            write_set = self.quorum.write_set(entry)
            assert not add.awaited & ~write_set
            assert not add.awaited & (add.acked | self.failed)
            if entry > self.confirmed:
                assert not write_set & ~(add.acked | add.awaited | self.failed)
        head = self._pending.get(self.confirmed + 1)
        if self.state is WriterState.OPEN and head is not None:
            assert not self.quorum.confirmable(head.acked, self.confirmed + 1)
        if self.confirmed > self._released:
            assert self._pending[self._released + 1].awaited

    # -- mechanics -------------------------------------------------------------------------------

    def _advance(self) -> list[Action]:
        """Make one pass of confirmations (none during a change). Then release the confirmed entries
        for which no seat is awaited."""
        if not self.writing:
            return []
        pending = self._pending
        before = confirmed = self.confirmed
        if self.state is WriterState.OPEN:
            windows, ack_quorum = self.quorum.windows, self.quorum.ack_quorum
            size = len(windows)
            while (add := pending.get(confirmed + 1)) is not None:
                if (add.acked & windows[(confirmed + 1) % size]).bit_count() < ack_quorum:
                    break
                confirmed += 1
                self.confirmed_length = add.end
            self.confirmed = confirmed
        released = self._released
        while released < confirmed and not (add := pending[released + 1]).awaited:
            released += 1
            self._released_length = add.end
            del pending[released]
        self._released = released
        return [Confirm(confirmed)] if confirmed > before else []

    def _fail_seats(self, gone: Seats) -> list[Action]:
        gone &= ~self.failed
        if not gone or not self.writing:
            return []
        if not self.failed:
            self._failed_since = self.appended
        self.failed |= gone
        unseen = gone
        for entry, add in self._pending.items():
            for number in seat_numbers(add.awaited & unseen):
                self._missed_from[number] = entry
            unseen &= ~add.awaited
            add.awaited &= ~gone
        self._missed_from |= dict.fromkeys(seat_numbers(unseen), self.appended + 1)
        self._targets = self._compute_targets()
        return [*self._advance(), *self.maybe_find()]

    def _take_missed(self, back: Seats) -> list[Action]:
        """Report which entries the present members of these seats may lack. The caller must remove
        the seats from `failed`, so that they get entries again."""
        missed: list[Action] = []
        for number in seat_numbers(back & self.failed):
            first = self._missed_from.pop(number)
            self._kept_since.pop(number, None)
            if first <= self.confirmed:
                missed.append(Missed(self.ensemble[number], first, self.confirmed))
        return missed

    def _end_delays(self, now: float) -> list[FindSpares]:
        """Stop keeping seats whose delay is over."""
        kept = len(self._kept_since)
        for seat, since in list(self._kept_since.items()):
            if since is None:
                self._kept_since[seat] = now
            elif now - since >= self._limits.change_delay_s:
                del self._kept_since[seat]
        return self.maybe_find() if len(self._kept_since) < kept else []

    @property
    def _changed_enough(self) -> bool:
        """True when a limit on ensemble changes is reached."""
        in_vain = self.confirmed < self.segment_first
        return self.changes >= self._limits.changes_max or (
            in_vain and self._changes_in_vain >= CHANGES_IN_VAIN_MAX
        )

    def _end_change(self) -> list[Action]:
        self._wanted = 0
        self.state = WriterState.OPEN
        self._targets = self._compute_targets()
        return [*self._send_missing(), *self._advance(), *self.maybe_find()]

    def _send_missing(self) -> list[Action]:
        """Send each unconfirmed entry to the seats of its write set that have not acked it, are not
        awaited, and have not failed. The entry's own state decides, not the last change."""
        sends: list[Action] = []
        for entry in range(self.confirmed + 1, self.appended + 1):
            add = self._pending[entry]
            missing = self.quorum.write_set(entry) & ~(add.acked | add.awaited | self.failed)
            add.awaited |= missing
            sends += [SendAdd(entry, number) for number in seat_numbers(missing)]
        return sends

    def _drop_pending(self) -> None:
        self._owed = self.owed
        self._pending.clear()
        self._released, self._released_length = self.appended, self.length
        self._wanted, self.declined, self._proposed = 0, 0, ()

    def _compute_targets(self) -> tuple[tuple[Seats, tuple[int, ...]], ...]:
        """Return for each window its seats that have not failed, as a set and as numbers."""
        live = (window & ~self.failed for window in self.quorum.windows)
        return tuple((mask, seat_numbers(mask)) for mask in live)
