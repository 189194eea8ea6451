"""Recovery of one ledger: the shell around `recovery.LedgerRecovery`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, assert_never

from magnetar.bookie.contract import LastConfirmed, LastConfirmedRequest, ReadRequest
from magnetar.bookie.ledger.errors import BookieUnavailable, EntryUnreadable, RecoveryIncomplete
from magnetar.bookie.ledger.handle import LedgerReader
from magnetar.bookie.ledger.late_acks import LateAcks
from magnetar.bookie.ledger.recovery import (
    Abort,
    Close,
    Fence,
    LedgerRecovery,
    ReadLength,
    ReadRange,
)
from magnetar.bookie.ledger.writer import FindSpares, Missed, SendAdd
from magnetar.metadata.model import LedgerState
from magnetar.protos.envelope import BookieCode, FrameDamaged, decode_read_answers
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from magnetar.bookie.ledger.add_stream import AddStream
    from magnetar.bookie.ledger.recovery import Action
    from magnetar.bookie.ledger.services import Services
    from magnetar.metadata.model import LedgerId, LedgerMetadata, Member
    from magnetar.runtime.frames import Buffer

log = get_logger(__name__)

READ_BYTES_MAX: Final = 1 << 20
"""Bytes of one read of one bookie: a thousand entries of 1 KB, well within the read timeout."""

TICK_S: Final = 0.25


async def recover_ledger(ledger: LedgerId, services: Services) -> LedgerMetadata:
    """Fence, recover and close the ledger. Returns the metadata, CLOSED; at once if the ledger is
    closed already.

    May run several times, also concurrently in different processes; all runs get the same end.
    Raises LedgerNotFound, RecoveryIncomplete and the errors of the metadata store. After an error
    other than LedgerNotFound the caller may try again.
    """
    metadata = await services.records.claim(ledger)
    if metadata.state is LedgerState.CLOSED:
        return metadata
    recoverer = _Recoverer(metadata, services)
    machine = recoverer.machine
    try:
        end = await recoverer.run()
        if isinstance(end, Abort):
            log.warning("ledger recovery incomplete", ledger=ledger, why=end.why)
            raise RecoveryIncomplete(ledger, end.why)
        closed = await services.records.close_recovered(
            ledger, lambda stored: machine.close_metadata(stored, end)
        )
    finally:
        recoverer.leave()
    for missed in (*machine.missed, *recoverer.unsent()):
        services.bad_copies.note(ledger, missed.member, missed.first, missed.last)
    recoverer.await_late_acks()
    log.info(
        "ledger recovered",
        ledger=ledger,
        last=closed.last_entry,
        length=closed.length,
        start=machine.start,
        written_back=machine.recovered,
    )
    return closed


class _Recoverer:
    """One attempt to recover a ledger. It is an AddSink of the streams for write-backs."""

    def __init__(self, metadata: LedgerMetadata, services: Services) -> None:
        self.machine = LedgerRecovery(metadata, limits=services.limits)
        self._metadata = metadata
        self._services = services
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Close | Abort] = self._loop.create_future()
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] | None = []  # None: no more tasks are started
        self._streams: dict[Member, AddStream] = {}  # attached streams
        self._held: dict[AddStream, list[int]] = {}  # entries that wait for the stream's connection

    async def run(self) -> Close | Abort:
        """Run the attempt. Acks of write-backs are still received afterwards, until `leave`."""
        async with self._group:  # none of its tasks fails
            try:
                self._start(self._tick())
                self._attach(self.machine.ensemble)
                self._carry_out(self.machine.begin())
                return await self._end
            finally:
                tasks, self._tasks = self._tasks, None
                for task in tasks or ():
                    task.cancel()

    def leave(self) -> None:
        for stream in self._streams.values():
            stream.detach(self._metadata.ledger)

    def await_late_acks(self) -> None:
        """Attach LateAcks for the members that were sent written-back entries and have not
        acknowledged all of them."""
        for member, entries in self.machine.owed.items():
            stream = self._streams[member]
            sent = set(entries).difference(self._held.get(stream, ()))
            if sent:
                LateAcks(
                    self._metadata.ledger,
                    stream,
                    sent,
                    self._services.bad_copies,
                    timeout_s=self._services.config.add_timeout_s,
                )

    def unsent(self) -> list[Missed]:
        """Return the entries that were not sent to members that stayed unreachable. An ack quorum
        has these entries."""
        return [Missed(each.member, part[0], part[-1]) for each, part in self._held.items()]

    # -- the bookies' answers (AddSink) ----------------------------------------------------------

    def on_acks(self, stream: AddStream, entries: list[int]) -> None:
        if stream.member in self.machine.ensemble:
            seat = self.machine.ensemble.index(stream.member)
            self._carry_out(self.machine.on_acks(seat, entries, self._now()))

    def on_add_failed(self, stream: AddStream, entry: int, code: BookieCode) -> None:
        log.warning(
            "write-back refused",
            ledger=self._metadata.ledger,
            entry=entry,
            bookie=stream.member.bookie,
            code=code.name,
        )
        self._fail(stream.member, code)

    def on_stream(self, stream: AddStream) -> None:
        if stream.put is None:
            self._fail(stream.member, BookieCode.CONNECTION_LOST)

    def _fail(self, member: Member, code: BookieCode) -> None:
        if member in self.machine.ensemble:
            seat = self.machine.ensemble.index(member)
            self._carry_out(self.machine.on_add_failed(seat, code, self._now()))

    # -- carrying out ----------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Fence(seat):
                    self._start(self._fence(seat))
                case ReadRange(seat, first, last):
                    self._start(self._read(seat, first, last))
                case ReadLength(entry):
                    self._start(self._read_length(entry))
                case SendAdd(entry, seat):
                    self._send(entry, self.machine.ensemble[seat])
                case FindSpares(seats):
                    self._start(self._find_spares(seats))
                case Close() | Abort():
                    if not self._end.done():
                        self._end.set_result(action)
                case _:
                    assert_never(action)

    async def _fence(self, seat: int) -> None:
        member = self.machine.asked[seat]
        request = LastConfirmedRequest(
            incarnation=member.incarnation,
            ledger=self._metadata.ledger,
            master_key=self._metadata.master_key,
            fence=True,
        )
        try:
            async with asyncio.timeout(self._services.config.read_timeout_s):
                answer = await self._services.pool.peer(member).last_confirmed(request)
        except TimeoutError:
            answer = LastConfirmed(code=BookieCode.TIMEOUT)
        except BookieUnavailable as error:
            answer = LastConfirmed(code=error.code)
        except StreamClosed:
            answer = LastConfirmed(code=BookieCode.CONNECTION_LOST)
        self._carry_out(
            self.machine.on_fence_answer(seat, answer.code, answer.confirmed, self._now())
        )

    async def _read(self, seat: int, first: int, last: int) -> None:
        member = self.machine.asked[seat]
        request = ReadRequest(
            incarnation=member.incarnation,
            ledger=self._metadata.ledger,
            master_key=self._metadata.master_key,
            first=first,
            last=last,
            bytes_max=READ_BYTES_MAX,
            fence=True,  # otherwise an add could arrive after the answer "no such entry"
        )
        code = BookieCode.OK
        try:
            async with asyncio.timeout(self._services.config.read_timeout_s):
                async for frame in self._services.pool.peer(member).read(request):
                    if code is BookieCode.OK:
                        code = self._take(seat, frame)
        except TimeoutError:
            code = BookieCode.TIMEOUT
        except BookieUnavailable as error:
            code = error.code
        except StreamClosed:
            code = BookieCode.CONNECTION_LOST
        self._carry_out(self.machine.on_read_end(seat, code, self._now()))

    def _take(self, seat: int, frame: Buffer) -> BookieCode:
        try:
            answers = list(decode_read_answers(frame))
        except FrameDamaged:
            return BookieCode.CORRUPT
        self._carry_out(self.machine.on_answers(seat, answers, self._now()))
        return BookieCode.OK

    async def _read_length(self, entry: int) -> None:
        reader = LedgerReader(self._metadata, self._services, fence=True)
        try:
            (found,) = await reader.read(entry, entry, bytes_max=1)
        except EntryUnreadable:
            self._carry_out(self.machine.on_length(None))
        else:
            self._carry_out(self.machine.on_length(found.length))

    async def _find_spares(self, seats: tuple[int, ...]) -> None:
        machine, ensembles = self.machine, self._services.ensembles
        spares = await ensembles.spares(machine.quorum, machine.ensemble, seats)
        self._attach(spares.values())
        self._carry_out(machine.on_spares_found(spares, self._now()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._carry_out(self.machine.on_tick(self._now()))

    # -- write-backs -----------------------------------------------------------------------------

    def _attach(self, members: Iterable[Member]) -> None:
        for member in members:
            if member not in self._streams:
                stream = self._services.pool.write_backs(member)
                stream.attach(self._metadata.ledger, self)
                self._streams[member] = stream

    def _send(self, entry: int, member: Member) -> None:
        stream, parts = self._streams[member], self.machine.parts(entry)
        if stream.put is not None:
            if parts is not None:
                stream.put(*parts)
        elif stream in self._held:
            self._held[stream].append(entry)
        else:
            self._held[stream] = [entry]
            self._start(self._send_held(stream))

    async def _send_held(self, stream: AddStream) -> None:
        """Send the held entries once the stream is connected. `_attach` has already requested the
        connection."""
        await stream.connect(self._services.config.connect_timeout_s)
        entries, put = self._held.pop(stream), stream.put
        if put is None:
            self._fail(stream.member, BookieCode.CONNECTION_LOST)
            return
        for entry in entries:
            parts = self.machine.parts(entry)
            if parts is not None:
                put(*parts)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            work.close()
        else:
            self._tasks.append(self._group.create_task(work))

    def _now(self) -> float:
        return self._loop.time()
