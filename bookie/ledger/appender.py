"""LedgerAppender: writes one ledger. It is the shell around the machine `writer.LedgerWriter`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, assert_never

from magnetar.bookie.ledger.budget import Account
from magnetar.bookie.ledger.errors import (
    EntryTooLarge,
    LedgerClosed,
    LedgerError,
    LedgerFenced,
    LedgerRefused,
    QuorumTimeout,
)
from magnetar.bookie.ledger.handle import LedgerReader
from magnetar.bookie.ledger.late_acks import LateAcks
from magnetar.bookie.ledger.quorum import quorum_of, seat_numbers, seats
from magnetar.bookie.ledger.verdict import ADD_VERDICTS, AddVerdict
from magnetar.bookie.ledger.writer import (
    Confirm,
    Fail,
    FindSpares,
    LedgerWriter,
    Missed,
    RecordEnsemble,
    SendAdd,
    WriterState,
)
from magnetar.metadata.errors import Contended, MetadataError, Unavailable
from magnetar.metadata.model import EntryId
from magnetar.protos.envelope import ENTRY_BYTES_MAX, BookieCode, encode_adds
from magnetar.runtime.frames import FRAME_BYTES_MAX
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.bookie.ledger.add_stream import AddStream
    from magnetar.bookie.ledger.reader import LedgerEntry
    from magnetar.bookie.ledger.services import Services
    from magnetar.bookie.ledger.writer import Action
    from magnetar.metadata.model import LedgerId, LedgerMetadata, Member
    from magnetar.runtime.frames import Buffer

log = get_logger(__name__)

REJOIN_S: Final = 1.0
"""The pause before the next attempt with a member that refused or was silent, if no spare can take
its seat. A member whose stream was lost is retried as soon as the stream is open again."""

SLOW_ADD_S: Final = 1.0
"""A bookie counts as slow when an add waits for this time. A busy disk takes a tenth of this
time."""

SPARES_S: Final = 2.0
"""The period in which the appender looks for spares again. It also looks for spares at each change
of the list of bookies. With the same period, `tick` checks a ledger that has failed members but
keeps no entries."""


class LedgerAppender:
    """The only writer of its ledger. All calls must come from one event loop.

    The appender calls `progress` on the loop, never inside `append_nowait`: after each event that
    moved `confirmed`, such as a frame of acks, and once when the ledger fails. The outcome of the
    entries beyond `confirmed` is then unknown. `close` and `abandon` may set `failure` without this
    call.
    """

    def __init__(
        self,
        metadata: LedgerMetadata,
        services: Services,
        *,
        on_busy: Callable[[LedgerAppender], None],
    ) -> None:
        """The appender calls `on_busy` when it needs calls of `tick` from now on, until `tick`
        returns False."""
        self.ledger: LedgerId = metadata.ledger
        self.metadata = metadata  # the metadata that this writer stored last
        self.failure: LedgerError | None = None  # None: open, or closed cleanly
        self.progress: Callable[[], None] = _nothing
        self._services = services
        self._loop = asyncio.get_running_loop()
        self._reader = LedgerReader(metadata, services)
        self._writer = LedgerWriter(
            quorum_of(metadata),
            metadata.last_segment.members,
            limits=services.limits,
            now=self._loop.time(),
        )
        self._on_busy = on_busy
        self._busy = False
        self._closing = False
        self._account = Account()
        self._room: list[asyncio.Future[None]] = []  # the futures of tasks in `wait_room`
        self._quiet: list[asyncio.Future[None]] = []  # the futures of tasks in `close`
        self._failed_at: dict[Member, float] = {}
        self._refusals: dict[Member, BookieCode] = {}  # the last refusal of each member
        self._spares_sought_at = float("-inf")
        self._rests_until = float("-inf")  # see `tick`
        self._seats: dict[AddStream, int] = {}
        self._streams: list[AddStream] = []  # one stream for each seat
        self._recorded = self._writer.ensemble  # the ensemble in durable metadata
        self._take_seats()
        self._carry_out(self._fail_seats_without_stream())

    # -- appending -------------------------------------------------------------------------------

    def append_nowait(self, payloads: Sequence[Sequence[Buffer]]) -> EntryId:
        """Take a run of entries, each given by its parts, and send them to their bookies. Returns
        the id of the first entry.

        Takes all entries, or takes none and raises EntryTooLarge, LedgerClosed or `failure`. Never
        blocks, so a caller with many entries must await `wait_room` between two calls.
        """
        self._raise_if_ended()
        sizes = [sum(map(len, payload)) for payload in payloads]
        if max(sizes) > ENTRY_BYTES_MAX:
            raise EntryTooLarge(max(sizes), ENTRY_BYTES_MAX)
        writer, now = self._writer, self._loop.time()
        first, alone = writer.appended + 1, writer.confirmed == writer.appended
        adds = encode_adds(
            ledger=self.ledger,
            first_entry=first,
            confirmed=writer.confirmed,
            length=writer.length,
            payloads=payloads,
            master_key=self.metadata.master_key,
        )
        by_seat: list[list[Buffer]] = [[] for _ in self._streams]
        entries = [0] * len(by_seat)
        unsent_bytes = 0
        for size, add in zip(sizes, adds, strict=True):
            for seat in writer.append(size, add, now):
                by_seat[seat] += add
                entries[seat] += 1
            unsent_bytes += size
            # Start a new item here: an outbox never splits an item, and a frame has a limit.
            if unsent_bytes >= FRAME_BYTES_MAX:
                self._put_out(by_seat, entries, alone=alone)
                unsent_bytes = 0
        self._put_out(by_seat, entries, alone=alone)
        if not self._busy:
            self._be_busy()
        return EntryId(first)

    def _put_out(self, by_seat: list[list[Buffer]], entries: list[int], *, alone: bool) -> None:
        for seat, parts in enumerate(by_seat):
            if parts:
                put = self._streams[seat].put
                # None: the stream is lost, and will call `on_stream`. These adds are dropped; the
                # seat then fails, and they go to its next member.
                if put is not None:
                    put(*parts, items=entries[seat], alone=alone)
                parts.clear()
                entries[seat] = 0

    def _raise_if_ended(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._closing:
            raise LedgerClosed(self.ledger)

    @property
    def has_room(self) -> bool:
        """True when `wait_room` would return at once."""
        self._settle_account()
        return not self._writer.writing or self._has_room()

    async def wait_room(self) -> None:
        """Wait until the ledger's bytes in flight and the process's retained bytes are below their
        limits, or until the ledger ends."""
        while not self.has_room:
            waiting = self._loop.create_future()
            self._room.append(waiting)
            self._services.budget.when_room(self, self._maybe_wake)
            await waiting

    # -- facts -----------------------------------------------------------------------------------

    @property
    def confirmed(self) -> EntryId:
        """All entries up to and including this one are durable. -1: no entry is."""
        return EntryId(self._writer.confirmed)

    @property
    def appended(self) -> EntryId:
        return EntryId(self._writer.appended)

    @property
    def length(self) -> int:
        """Payload bytes of the confirmed entries."""
        return self._writer.confirmed_length

    @property
    def in_flight_bytes(self) -> int:
        """The bytes of the unconfirmed entries, with the memory overhead of each entry."""
        return self._writer.in_flight_bytes

    @property
    def trouble(self) -> str:
        """The failed members and their last refusals, for logs. "": no member has failed."""
        failed = [self._writer.ensemble[seat] for seat in seat_numbers(self._writer.failed)]
        said = {
            member: self._refusals[member].name if member in self._refusals else "SILENT"
            for member in failed
        }
        return ", ".join(f"bookie {member.bookie}: {what}" for member, what in said.items())

    @property
    def degraded(self) -> bool:
        """True in three cases: entries get too few copies; the ledger may change its ensemble no
        more; or entries go to a bookie that is being drained or decommissioned. The owner should
        roll to a new ledger when enough bookies are available."""
        writer = self._writer
        draining = self._services.directory.draining
        return (
            self.metadata.under_replicated
            or bool(writer.failed)
            or writer.changes >= self._services.config.ensemble_changes_max
            or any(member.bookie in draining for member in writer.ensemble)
        )

    def describe(self) -> str:
        return f"ledger {self.ledger}, {self._writer.describe()}"

    # -- reading, closing ------------------------------------------------------------------------

    async def read(self, first: int, last: int, *, bytes_max: int) -> list[LedgerEntry]:
        """Read like `LedgerReader.read`. `last` must be confirmed."""
        assert last <= self._writer.confirmed, f"entry {last} is not confirmed"
        if self._reader.metadata.last_segment != self.metadata.last_segment:
            self._reader.metadata = self.metadata
        return await self._reader.read(first, last, bytes_max=bytes_max)

    async def close(self) -> LedgerMetadata:
        """Take no more entries, wait for the entries in flight, and record the end. Returns the
        metadata.

        A failed ledger ends at `confirmed`: after the close, the later entries are definitely not
        in it. Raises LedgerFenced if another process owns the ledger, LedgerClosed if `abandon`
        ended it, or the errors of the metadata store. After an error of the store the caller may
        call `close` again.
        """
        self._closing = True
        writer = self._writer
        while writer.writing and not writer.idle:
            waiting = self._loop.create_future()
            self._quiet.append(waiting)
            await waiting
        if isinstance(self.failure, LedgerFenced | LedgerClosed):
            raise self.failure
        if writer.state is not WriterState.SEALED:
            writer.seal()
            self._leave()
        try:
            self.metadata = await self._services.records.close(
                self.metadata, writer.confirmed, writer.confirmed_length
            )
        except LedgerFenced as error:
            self.failure = error
            raise
        return self.metadata

    def abandon(self) -> None:
        """Take no more entries and detach. A recovery must record the end of the ledger."""
        self._closing = True
        if self._writer.state is not WriterState.SEALED:
            self.failure = self.failure or LedgerClosed(self.ledger)
            self._writer.fail(BookieCode.CONNECTION_LOST)
            self._leave()
            self._wake_quiet()

    # -- what bookies say (AddSink) --------------------------------------------------------------

    def on_acks(self, stream: AddStream, entries: list[int]) -> None:
        # Every stream here has a seat: the appender has detached from all other members.
        self._carry_out(self._writer.on_acks(self._seats[stream], entries))

    def on_add_failed(self, stream: AddStream, entry: int, code: BookieCode) -> None:
        seat, member = self._seats[stream], stream.member
        self._refusals[member] = code
        is_bookies_fault = ADD_VERDICTS[code] is AddVerdict.BOOKIE_FAILED
        if is_bookies_fault and self._writer.failed >> seat & 1:
            return  # a full bookie refuses all entries in flight: thousands
        log.warning(
            "add refused", ledger=self.ledger, entry=entry, bookie=member.bookie, code=code.name
        )
        if is_bookies_fault:
            self._services.health.on_error(member, self._loop.time())
        self._carry_out(self._writer.on_add_failed(seat, code))

    def on_stream(self, stream: AddStream) -> None:
        seat = self._seats.get(stream)
        if seat is None:
            return  # the appender has detached from this stream
        if stream.put is None:
            self._refusals[stream.member] = BookieCode.CONNECTION_LOST
            self._services.health.on_error(stream.member, self._loop.time())
            self._carry_out(self._writer.on_add_failed(seat, BookieCode.CONNECTION_LOST))
        else:
            self._services.health.on_success(stream.member, self._loop.time())
            self._carry_out(self._writer.on_rejoin(seat, self._loop.time()))

    # -- time, and the list of bookies -----------------------------------------------------------

    def tick(self, now: float) -> bool:
        """Check timeouts. Returns False when no more ticks are needed until the next `on_busy`."""
        writer = self._writer
        failed = writer.failed
        if failed and writer.writing and not writer.kept and now < self._rests_until:
            return True  # save time: thousands of ledgers may be in this state at once
        actions = writer.on_tick(now)
        for seat in seat_numbers(writer.failed & ~failed):
            member = writer.ensemble[seat]
            log.warning("bookie silent", ledger=self.ledger, bookie=member.bookie)
            self._refusals.pop(member, None)
            self._services.health.on_error(member, now)
        for seat in seat_numbers(writer.overdue(now, SLOW_ADD_S)):
            self._services.health.on_slow(writer.ensemble[seat], now)
        self._carry_out(actions)
        if writer.failed and writer.writing:
            self._seek_help(now)
        self._rests_until = now + SPARES_S
        self._busy = writer.writing and (writer.kept or bool(writer.failed))
        return self._busy

    def on_bookies_changed(self) -> None:
        if self._writer.failed and self._writer.writing:
            self._carry_out(self._writer.on_spares())

    def _seek_help(self, now: float) -> None:
        """Look for spares again. Retry failed members that no spare can replace."""
        writer, services = self._writer, self._services
        listed = services.ensembles.has_spare(writer.ensemble)
        hopeless = writer.declined if listed else writer.failed
        for seat in seat_numbers(hopeless):
            member = writer.ensemble[seat]
            since = self._failed_at.get(member, now)
            # A draining or unlisted member may get its own seat back; a full one may not.
            registration = services.directory.listed.get(member)
            is_full = registration is not None and registration.read_only
            if self._streams[seat].keeps_up and not is_full and now - since >= REJOIN_S:
                log.info("bookie tried again", ledger=self.ledger, bookie=member.bookie)
                self._carry_out(writer.on_rejoin(seat, now))
        if listed and now - self._spares_sought_at >= SPARES_S:
            actions = writer.on_spares()
            if actions:
                self._spares_sought_at = now
                self._carry_out(actions)

    # -- carrying out ----------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        moved = False
        for action in actions:
            match action:
                case Confirm():
                    # Only acks of members in durable metadata confirm an entry.
                    assert self._writer.ensemble is self._recorded
                    moved = True
                case SendAdd(entry, seat):
                    put, parts = self._streams[seat].put, self._writer.parts(entry)
                    if put is not None and parts is not None:
                        put(*parts)
                case FindSpares(numbers):
                    self._services.spawn(self._find_spares(numbers))
                case RecordEnsemble(first, members):
                    self._services.spawn(self._record(first, members))
                case Missed():
                    self._note_missed(action)
                case Fail(code):
                    self._fail(self._failure_of(code))
                    moved = True
                case _:
                    assert_never(action)
        self._note_failed()
        self._settle_account()
        if self._quiet:
            self._wake_quiet()
        if moved:
            self.progress()

    async def _find_spares(self, numbers: tuple[int, ...]) -> None:
        writer = self._writer
        spares = await self._services.ensembles.spares(writer.quorum, writer.ensemble, numbers)
        if not spares:
            log.warning("no spare bookie", ledger=self.ledger, seats=numbers)
        self._carry_out(writer.on_spares_found(spares))

    async def _record(self, first: int, members: tuple[Member, ...]) -> None:
        writer = self._writer
        try:
            stored = await self._services.records.change_ensemble(
                self.metadata, first, members, wanted=lambda: writer.writing
            )
        except LedgerFenced as error:
            self._give_up(error)
        except (Unavailable, Contended) as error:
            log.warning("ensemble not changed", ledger=self.ledger, error=str(error))
            self._carry_out(writer.on_not_recorded())
        except MetadataError as error:
            self._give_up(LedgerRefused(self.ledger, str(error)))
        else:
            self._on_recorded(stored)

    def _on_recorded(self, stored: LedgerMetadata) -> None:
        """Change metadata, machine, seats and streams in one step without an await."""
        writer = self._writer
        if not writer.writing:
            return
        self.metadata = stored
        actions = writer.on_recorded(self._loop.time())
        assert stored.last_segment.members == writer.ensemble
        assert stored.last_segment.first_entry == writer.segment_first
        self._recorded = writer.ensemble
        self._take_seats()
        log.info(
            "ensemble changed",
            ledger=self.ledger,
            first=writer.segment_first,
            members=[member.bookie for member in writer.ensemble],
        )
        self._carry_out([*actions, *self._fail_seats_without_stream()])

    def _take_seats(self) -> None:
        """Attach to the streams of the present members, and detach from all others."""
        before = self._streams
        self._streams = [self._services.pool.adds(member) for member in self._writer.ensemble]
        self._seats = {stream: seat for seat, stream in enumerate(self._streams)}
        for stream in before:
            if stream not in self._seats:
                stream.detach(self.ledger)
        for stream in self._streams:
            if stream not in before:
                stream.attach(self.ledger, self)

    def _fail_seats_without_stream(self) -> list[Action]:
        lost = [seat for seat, stream in enumerate(self._streams) if stream.put is None]
        code = BookieCode.CONNECTION_LOST
        return [action for seat in lost for action in self._writer.on_add_failed(seat, code)]

    def _note_failed(self) -> None:
        writer = self._writer
        if not writer.failed and not self._failed_at:
            return
        failed = [writer.ensemble[seat] for seat in seat_numbers(writer.failed)]
        now = self._loop.time()
        self._failed_at = {member: self._failed_at.get(member, now) for member in failed}
        if failed and writer.writing and not self._busy:
            self._be_busy()

    def _be_busy(self) -> None:
        self._busy = True
        self._on_busy(self)

    # -- memory ----------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        limit = self._services.config.unconfirmed_bytes_max
        return self._writer.in_flight_bytes < limit and not self._services.budget.exhausted

    def _settle_account(self) -> None:
        """Report the retained bytes to the budget. Fail the bookies that are too far behind, and
        wake the tasks in `wait_room`."""
        writer, budget = self._writer, self._services.budget
        lag, account = writer.lag_bytes, self._account
        retained = writer.in_flight_bytes + lag
        if not lag and (account.retained, account.lag) == (retained, 0):  # nothing to report
            if self._room:
                self._maybe_wake()
            return
        laggards = [self._streams[seat] for seat in seat_numbers(writer.laggards)] if lag else []
        budget.account(account, retained=retained, lag=lag, laggards=laggards)
        slow = [stream for stream in laggards if budget.lags(stream)]
        if slow:
            actions = writer.on_lagging(seats(self._seats[stream] for stream in slow))
            if actions:
                names = [stream.member.bookie for stream in slow]
                log.warning("bookies lag", ledger=self.ledger, bookies=names)
                self._carry_out(actions)
        if self._room:
            self._maybe_wake()

    def _maybe_wake(self) -> None:
        if self._has_room() or not self._writer.writing:
            waiting, self._room = self._room, []
            _wake(waiting)
        elif self._room:
            self._services.budget.when_room(self, self._maybe_wake)

    def _wake_quiet(self) -> None:
        waiting, self._quiet = self._quiet, []
        _wake(waiting)

    # -- the end ---------------------------------------------------------------------------------

    def _give_up(self, error: LedgerError) -> None:
        if self._writer.writing:
            self._writer.fail(BookieCode.FENCED)
            self._fail(error)
            self._wake_quiet()
            self.progress()

    def _fail(self, error: LedgerError) -> None:
        self.failure = error
        log.warning("ledger failed", ledger=self.ledger, error=str(error))
        self._leave()

    def _failure_of(self, code: BookieCode) -> LedgerError:
        if code is BookieCode.TIMEOUT:
            waited_s = self._services.config.quorum_timeout_s
            return QuorumTimeout(self.ledger, self._writer.confirmed + 1, waited_s)
        if ADD_VERDICTS[code] is AddVerdict.LEDGER_LOST:
            return LedgerFenced(self.ledger, f"a bookie answered {code.name}")
        return LedgerRefused(self.ledger, f"a bookie answered {code.name}")

    def _note_missed(self, missed: Missed) -> None:
        """Note confirmed entries that the member may lack, so that a repair copies them."""
        self._services.bad_copies.note(self.ledger, missed.member, missed.first, missed.last)

    def _leave(self) -> None:
        """Detach from all streams, note missed entries, begin to collect late acks. Idempotent."""
        if not self._seats:
            return
        for missed in self._writer.missed:
            self._note_missed(missed)
        for stream in self._seats:
            stream.detach(self.ledger)
        self._seats = {}
        for seat, entries in self._writer.owed.items():
            LateAcks(
                self.ledger,
                self._streams[seat],
                entries,
                self._services.bad_copies,
                timeout_s=self._services.config.add_timeout_s,
            )
        self._settle_account()


def _wake(waiting: Sequence[asyncio.Future[None]]) -> None:
    for each in waiting:
        if not each.done():  # done: cancelled
            each.set_result(None)


def _nothing() -> None:
    """The default of `progress`."""
