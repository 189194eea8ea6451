"""The bookie service: answers adds, reads and fences, over any transport.

Theory. Adds arrive in frames. One synchronous step decodes, checks and writes a frame's adds
(admission.py). The acks of stored adds enter the stream's outbox once their commit group is durable
(storage/commit.py). Reads run on a thread of their own, so no read waits behind a sync. The service
takes recently read entries from memory (read_cache.py). For a read that fences, the service writes
the fence first, and answers after the fence is durable.

Every answer is one of three: yes, an explicit no, or unknown (`BookieCode.definite`). The bookie
says "no such entry" only when its present store lacks the entry. This is safe because that store
opened undamaged and without gaps (storage/directory.py). After an error, with a full queue, and
while the bookie stops, the answer is unknown. It is also unknown for an entry that a former
incarnation has lost (damaged_store.py).
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.bookie.admission import Intake
from magnetar.bookie.contract import (
    BookieInfo,
    EntryPage,
    EntryRun,
    LastConfirmed,
    LastConfirmedRequest,
    LedgerPage,
    ReadRequest,
    may_read,
)
from magnetar.bookie.damaged_store import FormerStores
from magnetar.bookie.errors import ReadsOverloaded, StorageFailed
from magnetar.bookie.first_add_check import FirstAdds
from magnetar.bookie.read_cache import ReadCache, Run
from magnetar.bookie.stripes import read_stripes
from magnetar.bookie.witness import Witness
from magnetar.protos.envelope import (
    BEAT,
    BookieCode,
    EnvelopeDamaged,
    FrameDamaged,
    answered_entry,
    check_beat,
    decode_adds,
    decode_envelope_of,
    decode_hello,
    encode_ack,
    encode_hello_reply,
    encode_read_answer,
    encode_run,
)
from magnetar.runtime.frames import Outbox, StreamClosed
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from magnetar.bookie.admission import Admission, Admitted, LedgerAdmission
    from magnetar.bookie.contract import LastHeard
    from magnetar.bookie.storage.commit import GroupCommit
    from magnetar.bookie.storage.format import Identity
    from magnetar.bookie.storage.store import Storage
    from magnetar.protos.envelope import Add
    from magnetar.runtime.frames import Buffer, FrameStream
    from magnetar.runtime.thread import Worker

    _Source = Callable[..., tuple[list[bytes], BookieCode]]  # called on the read thread
    # A run of entries, and the code to answer if the bookie lacks the entry after the run.
    # None: the run came from memory, and nothing is known about the entry after it.
    _Answer = tuple[Run, BookieCode | None]

log = get_logger(__name__)
T = TypeVar("T")

# The limit of unsent acks of one stream: a client may send adds without reading its acks. Above the
# limit the bookie stops reading the client's adds. 1 MiB is 50,000 acks.
ACKS_PENDING_BYTES_MAX: Final = 1 << 20
# The limit of open streams of adds. A stream that waits for room holds a frame of up to 16 MiB. A
# cluster has dozens of brokers.
STREAMS_MAX: Final = 256
# The limit of reads that wait for the one read thread. If each takes 1 ms, the last read waits a
# quarter of a second.
READS_WAITING_MAX: Final = 256
# The limits of one read request. The request may set lower limits.
READ_BYTES_MAX: Final = 8 << 20
READ_ENTRIES_MAX: Final = 10_000
# A frame of a read's answer ends at this size. Compared with 256 KiB, this halves the thread hops
# and sends. Reading such a frame holds the interpreter's lock for 0.6 ms.
READ_FRAME_BYTES: Final = 512 << 10
# A reader at 8 MB/s finds here what another reader has read in the last 8 s.
READ_CACHE_BYTES: Final = 64 << 20
LEDGERS_PAGE_MAX: Final = 10_000
ENTRIES_PAGE_MAX: Final = 1_000  # listing reads each entry


class State(StrEnum):
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(slots=True)
class BookieCounts:
    """Work done since the start."""

    adds_stored: int = 0
    adds_refused: int = 0  # answered with any code but OK
    add_bytes: int = 0
    reads: int = 0
    entries_read: int = 0
    fences: int = 0  # fences that were made durable


class BookieService:
    """Serves requests while `run` is running. A failed write or sync ends the process (see `die` of
    GroupCommit)."""

    def __init__(
        self,
        *,
        identity: Identity,
        data_dir: Path | None,
        storage: Storage,
        commit: GroupCommit,
        admission: Admission,
        read_thread: Worker,
        check_first_add: Callable[[int], Awaitable[BookieCode]],
        formers: Mapping[str, Storage | None] = MappingProxyType({}),
        read_cache_bytes: int = READ_CACHE_BYTES,
    ) -> None:
        """`data_dir`: `info` reports the free space of its disk; None: there is no disk.
        `read_thread` has one worker. `admission` writes through `commit`. `check_first_add`: see
        first_add_check.py. `formers` maps each former incarnation to its store, or to None if the
        store cannot be read; the mapping may change."""
        self.identity = identity
        self.state = State.SERVING
        self.counts = BookieCounts()
        self.read_cache = ReadCache(read_cache_bytes)
        admission.watch_removals(self.read_cache.forget)
        self._data_dir = data_dir
        self._storage = storage
        self._commit = commit
        self._admission = admission
        self._first_adds = FirstAdds(check_first_add, self._settle)
        self._read_thread = read_thread
        self._damaged_store = FormerStores(formers)
        self._read_only_watchers: list[Callable[[bool], None]] = []
        self._reads_waiting = 0
        self._streams: dict[FrameStream, Outbox] = {}
        self._witness = Witness()

    async def run(self) -> None:
        """Commit writes and check first adds, until cancelled. Raises StorageFailed."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._commit.run())
                group.create_task(self._first_adds.run())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def set_intake(self, intake: Intake) -> None:
        """Admit only these kinds of adds from now on."""
        was = self.read_only
        self._admission.intake = intake
        if self.read_only != was:
            for tell in self._read_only_watchers:
                tell(self.read_only)

    @property
    def read_only(self) -> bool:
        return self._admission.intake is not Intake.ALL

    def watch_read_only(self, tell: Callable[[bool], None]) -> None:
        """Call `tell` now, and at each change."""
        self._read_only_watchers.append(tell)
        tell(self.read_only)

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new work, sync and acknowledge the adds that were written, and end the streams.
        The sync and the acks may take `grace_s`. The caller must keep `run` running."""
        self.state = State.STOPPING
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._commit.wait_durable()
                for outbox in list(self._streams.values()):
                    with suppress(StreamClosed):  # the client has left meanwhile
                        await outbox.wait_sent()
        for stream in list(self._streams):
            await stream.close()

    # -- Adds ----------------------------------------------------------------------------------

    async def handle_write(self, stream: FrameStream) -> None:
        """Serve one stream of adds to its end. Raises StreamClosed, FrameDamaged, StorageFailed."""
        if not await self._greet(stream):
            await stream.close()
            return
        outbox = Outbox(stream.send, pending_bytes_max=ACKS_PENDING_BYTES_MAX)
        self._streams[stream] = outbox
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(outbox.run())
                try:
                    await self._take_adds(stream, outbox)
                finally:
                    sending.cancel()
        except BaseExceptionGroup as errors:
            # There is only one error: `outbox.run` raises none.
            raise errors.exceptions[0] from None
        finally:
            del self._streams[stream]

    async def _greet(self, stream: FrameStream) -> bool:
        try:
            hello = decode_hello(await stream.receive())
        except FrameDamaged as damage:
            log.warning("hello refused", peer=stream.peer, reason=damage.what)
            code = BookieCode.BAD_REQUEST
        else:
            full = BookieCode.OVERLOADED if len(self._streams) >= STREAMS_MAX else BookieCode.OK
            code = self._refusal(hello.incarnation) or full
            if code is not BookieCode.OK:
                log.warning("writer refused", peer=stream.peer, client=hello.client_name, code=code)
        await stream.send(
            [encode_hello_reply(code, self.identity.incarnation, self.identity.boot_epoch)]
        )
        return code is BookieCode.OK

    async def _take_adds(self, stream: FrameStream, outbox: Outbox) -> None:
        """Take frames until the stream ends. While the disk or the peer falls behind, take no
        further frame."""
        while True:
            frame = await stream.receive()
            await self._first_adds.wait_settled(outbox)
            self._take_frame(frame, outbox)
            await self._commit.wait_room()
            await outbox.wait_room()

    def _take_frame(self, frame: Buffer, outbox: Outbox) -> None:
        adds = decode_adds(frame)  # a frame that is damaged anywhere has no effect
        if self.state is not State.SERVING:
            self._refuse(adds, BookieCode.STOPPING, outbox)
            return
        if self._commit.overloaded:
            self._refuse(adds, BookieCode.OVERLOADED, outbox)
            return
        self.counts.add_bytes += len(frame)
        self._answer(self._admission.admit(adds), outbox)

    def _settle(self, code: BookieCode | None, adds: Sequence[Add], outbox: Outbox) -> None:
        """Answer waiting adds of a ledger. `code`: the result of the ledger's metadata check; None:
        the ledger must be checked again if it is not verified any more."""
        if self.state is not State.SERVING:
            code = BookieCode.STOPPING
        if code is not None and code is not BookieCode.OK:
            self._refuse(adds, code, outbox)
            return
        with suppress(StorageFailed):  # `run` raises this error, too
            verified = code is BookieCode.OK
            self._answer(self._admission.admit(adds, verified=verified), outbox)

    def _answer(self, admitted: Admitted, outbox: Outbox) -> None:
        if admitted.unverified:
            beyond = self._first_adds.take(admitted.unverified, outbox)
            admitted.refused += _acks(beyond, BookieCode.OVERLOADED)
        self.counts.adds_stored += admitted.entries_stored
        self.counts.adds_refused += len(admitted.refused)
        if admitted.refused:
            outbox.put(b"".join(admitted.refused))
        if admitted.stored:
            self._commit.when_durable(partial(outbox.put, b"".join(admitted.stored)))

    def _refuse(self, adds: Sequence[Add], code: BookieCode, outbox: Outbox) -> None:
        self.counts.adds_refused += len(adds)
        outbox.put(b"".join(_acks(adds, code)))

    # -- Presence of brokers -------------------------------------------------------------------

    async def handle_presence(self, stream: FrameStream) -> None:
        """Serve a broker's presence connection to its end. Raises StreamClosed, FrameDamaged."""
        hello = decode_hello(await stream.receive())
        loop = asyncio.get_running_loop()
        while True:
            self._witness.on_beat(hello.client_name, hello.incarnation, loop.time())
            await stream.send([BEAT])
            check_beat(await stream.receive())

    def last_heard(
        self, incarnation: str, *, broker: str, broker_incarnation: str
    ) -> tuple[BookieCode, LastHeard | None]:
        """Return OK and when this bookie last heard the broker; None: the bookie cannot tell. For
        another incarnation of the bookie, return DAMAGED_STORE or WRONG_INCARNATION. A bookie that
        is stopping still answers."""
        if incarnation != self.identity.incarnation:
            return self._damaged_store.code(incarnation), None
        now = asyncio.get_running_loop().time()
        return BookieCode.OK, self._witness.last_heard(broker, broker_incarnation, now)

    # -- Reads ---------------------------------------------------------------------------------

    async def read(self, request: ReadRequest) -> AsyncGenerator[Sequence[Buffer], None]:
        """Yield the frames of the answer, each as a sequence of parts. The frames hold the entries
        from `first` on. If the read ends before `last` and before a limit, the last frame also has
        a code that gives the reason."""
        self.counts.reads += 1
        code = await self._open(request)
        if not request.well_formed:
            code = BookieCode.BAD_REQUEST
        former = code is BookieCode.DAMAGED_STORE
        if code is not BookieCode.OK and not former:
            yield encode_read_answer(max(request.first, -1), code)
            return
        source = (
            partial(self._run_of_former, request) if former else partial(self._run, request.ledger)
        )
        # A former incarnation needs no fence: it answers with an entry or unknown, never with no.
        fence = request.fence and not former
        # A read that fences belongs to a recovery. It must read from the disk, not from the cache.
        cached = None if former or fence else request.ledger
        async with aclosing(
            self._read_striped(request, source)
            if request.stride
            else self._read_runs(request, source, cached)
        ) as frames:
            async for parts in frames:
                if fence and (code := await self._open(request)) is not BookieCode.OK:
                    yield encode_read_answer(answered_entry(parts[0]), code)
                    return
                yield parts

    async def _read_runs(
        self, request: ReadRequest, source: _Source, cached: int | None
    ) -> AsyncGenerator[Sequence[Buffer], None]:
        """Yield the frames of a read of consecutive entries. `cached`: see `_begin_run`."""
        rest = _Rest(
            at=request.first,
            last=request.last,
            entries_left=min(request.entries_max or READ_ENTRIES_MAX, READ_ENTRIES_MAX),
            bytes_left=min(request.bytes_max or READ_BYTES_MAX, READ_BYTES_MAX),
        )
        reading = self._begin_run(source, rest, cached)
        try:
            while not rest.given:
                try:
                    found, why = await reading
                except ReadsOverloaded as error:
                    found, why = Run.of(rest.at, []), _unknown(error)
                self.counts.entries_read += found.count
                short = rest.take(found)
                if short and why is not None:
                    yield [*found.parts, *encode_read_answer(rest.at, why)]
                    return
                if not rest.given:  # the next frame is read while this one is being sent
                    reading = self._begin_run(source, rest, cached)
                yield found.parts
        finally:
            reading.cancel()

    async def _read_striped(
        self, request: ReadRequest, source: _Source
    ) -> AsyncGenerator[Sequence[Buffer], None]:
        """Yield frames like `_read_runs`, but only from disk, and across the gaps between
        stripes."""
        bytes_left = min(request.bytes_max or READ_BYTES_MAX, READ_BYTES_MAX)
        entries_left = min(request.entries_max or READ_ENTRIES_MAX, READ_ENTRIES_MAX)
        at, why = request.first, None
        while why is None and at <= request.last and entries_left > 0 and bytes_left > 0:
            frame_bytes = min(bytes_left, READ_FRAME_BYTES)
            limits = {"bytes_max": frame_bytes, "entries_max": entries_left}
            parts: list[Buffer] = []
            try:
                pieces, at, why = await self._on_read_thread(
                    partial(read_stripes, source, request, at, **limits)
                )
            except ReadsOverloaded as error:
                pieces, why = [], _unknown(error)
            for first, found in pieces:
                parts += encode_run(first, found)
                self.counts.entries_read += len(found)
                entries_left -= len(found)
                bytes_left -= sum(map(len, found))
            if why is not None:
                parts += encode_read_answer(at, why)
            yield parts

    def _begin_run(
        self, source: _Source, rest: _Rest, cached: int | None
    ) -> asyncio.Future[_Answer]:
        """Begin to read the next run. `cached`: the ledger whose runs may come from memory; None:
        read from the disk only."""
        at, last = rest.at, rest.last
        bytes_max, entries_max = rest.frame_bytes, rest.entries_left
        limits = {"bytes_max": bytes_max, "entries_max": entries_max}
        if cached is not None:
            held = self.read_cache.get(
                cached, at, last, bytes_max=bytes_max, entries_max=entries_max
            )
            if held is not None:
                answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
                answer.set_result((held, None))
                return answer
        reading = self._on_read_thread(partial(_read_run, source, at, last, **limits))
        if cached is not None:
            reading.add_done_callback(partial(self._keep, cached, self.read_cache.epoch))
        return reading

    def _keep(self, ledger: int, epoch: int, reading: asyncio.Future[_Answer]) -> None:
        if not reading.cancelled() and reading.exception() is None:
            self.read_cache.put(ledger, reading.result()[0], epoch)

    def _run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> tuple[list[bytes], BookieCode]:
        """Read like `Storage.run`, but stop before an unreadable entry instead of raising
        StorageFailed. Return the entries, and the code to answer if the reader needs more
        entries."""
        run, absent = self._storage.run, BookieCode.NO_SUCH_ENTRY
        with suppress(StorageFailed):
            return run(ledger, first, last, bytes_max=bytes_max, entries_max=entries_max), absent
        found: list[bytes] = []
        for entry in range(first, min(last, first + entries_max - 1) + 1):
            try:
                one = run(ledger, entry, entry, bytes_max=bytes_max, entries_max=1)
            except StorageFailed as error:
                return found, _unknown(error)
            found += one
            if not one or sum(map(len, found)) >= bytes_max:
                break
        return found, absent

    def _run_of_former(
        self, request: ReadRequest, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> tuple[list[bytes], BookieCode]:
        """Read like `_run`, but from the store of a former incarnation."""
        found = self._damaged_store.run(
            request.incarnation,
            request.ledger,
            request.master_key,
            first,
            last,
            bytes_max=bytes_max,
            entries_max=entries_max,
        )
        return found, BookieCode.DAMAGED_STORE

    async def last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        """Return the last stored entry and the "confirmed" in its envelope.

        With `fence`, the answer is OK even if the last entry is damaged: the ledger is fenced, and
        a recovery uses "confirmed" only as a lower bound.
        """
        code = await self._open(request)
        if code is not BookieCode.OK:
            return LastConfirmed(code=code)
        answer = await self._last_stored(request.ledger)
        if request.fence:
            if (code := await self._open(request)) is not BookieCode.OK:
                return LastConfirmed(code=code)
            if answer.code is BookieCode.IO_ERROR:
                return LastConfirmed(code=BookieCode.OK)
        return answer

    async def _last_stored(self, ledger: int) -> LastConfirmed:
        try:
            last = await self._on_read_thread(partial(self._storage.last_entry, ledger))
            if last is None:
                return LastConfirmed(code=BookieCode.NO_SUCH_ENTRY)
            envelope = decode_envelope_of(ledger, *last)
        except (StorageFailed, ReadsOverloaded, EnvelopeDamaged) as error:
            return LastConfirmed(code=_unknown(error))
        return LastConfirmed(
            code=BookieCode.OK,
            confirmed=envelope.confirmed,
            last_entry=last[0],
            length=envelope.length,
        )

    async def list_ledgers(self, incarnation: str, *, after: int, ledgers_max: int) -> LedgerPage:
        """Return a page of the ledgers that are stored here. `ledgers_max` 0: the page limit."""
        code = self._refusal(incarnation)
        if code is not None:
            return LedgerPage(code)
        limit = min(ledgers_max or LEDGERS_PAGE_MAX, LEDGERS_PAGE_MAX)
        read = partial(self._storage.ledgers, max(after, -1), ledgers_max=limit + 1)
        try:
            found = await self._on_read_thread(read)
        except (StorageFailed, ReadsOverloaded) as error:
            return LedgerPage(_unknown(error))
        return LedgerPage(BookieCode.OK, tuple(found[:limit]), more=len(found) > limit)

    async def list_entries(
        self, incarnation: str, *, ledger: int, first: int, entries_max: int
    ) -> EntryPage:
        """Return a page of a ledger's entries that are stored here. `entries_max` 0: the page
        limit."""
        code = self._refusal(incarnation)
        if code is None and (ledger < 0 or first < 0):
            code = BookieCode.BAD_REQUEST
        if code is not None:
            return EntryPage(code)
        limit = min(entries_max or ENTRIES_PAGE_MAX, ENTRIES_PAGE_MAX)
        read = partial(self._storage.entry_ids, ledger, first, entries_max=limit + 1)
        try:
            state = self._admission.state(ledger)
            if state.record is None:
                return EntryPage(_absent(state))
            found = await self._on_read_thread(read)
        except (StorageFailed, ReadsOverloaded) as error:
            return EntryPage(_unknown(error))
        return EntryPage(BookieCode.OK, _runs(found[:limit]), more=len(found) > limit)

    @property
    def conflicts(self) -> int:
        return self._admission.conflicts

    def info(self) -> BookieInfo:
        usage = None if self._data_dir is None else shutil.disk_usage(self._data_dir)
        return BookieInfo(
            bookie=self.identity.bookie,
            incarnation=self.identity.incarnation,
            boot_epoch=self.identity.boot_epoch,
            cluster=self.identity.cluster,
            state=self.state,
            read_only=self.read_only,
            disk_total_bytes=0 if usage is None else usage.total,
            disk_free_bytes=0 if usage is None else usage.free,
        )

    # -- Checks of every call --------------------------------------------------------------------

    async def _open(self, request: ReadRequest | LastConfirmedRequest) -> BookieCode:
        """Return OK if the client may read the ledger. For a request that fences, first fence the
        ledger durably. Call this again before each answer to such a request: the collector may have
        deleted a left-over copy of the ledger together with its fence."""
        code = self._refusal(request.incarnation)
        if code is not None:
            return code
        if request.ledger < 0:
            return BookieCode.BAD_REQUEST
        try:
            if request.fence:
                return await self._fence(request.ledger, request.master_key)
            state = self._admission.state(request.ledger)
        except StorageFailed as error:
            return _unknown(error)
        record = state.record
        if record is None:
            return _absent(state)
        reads = isinstance(request, ReadRequest)
        if record.master_key == request.master_key or (
            reads and may_read(record.master_key, request.ledger, request.master_key)
        ):
            return BookieCode.OK
        return BookieCode.UNAUTHORIZED

    async def _fence(self, ledger: int, master_key: int) -> BookieCode:
        code = self._admission.fence(ledger, master_key)
        if code is BookieCode.OK:
            state = self._admission.state(ledger)
            if not state.fence_durable:
                await self._commit.wait_durable()
                self.counts.fences += not state.fence_durable  # several requests may wait
                state.fence_durable = True
        return code

    def _refusal(self, incarnation: str) -> BookieCode | None:
        if self.state is not State.SERVING:
            return BookieCode.STOPPING
        if incarnation != self.identity.incarnation:
            return self._damaged_store.code(incarnation)
        return None

    def _on_read_thread(self, read: Callable[[], T]) -> asyncio.Future[T]:
        """Give `read` to the read thread. The future raises the errors of `read`, or
        ReadsOverloaded if too many reads wait."""
        if self._reads_waiting >= READS_WAITING_MAX:
            refused: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            refused.set_exception(ReadsOverloaded(READS_WAITING_MAX))
            refused.exception()  # marks the error as retrieved: the caller may be gone
            return refused
        self._reads_waiting += 1
        reading = self._read_thread.do(read)
        reading.add_done_callback(self._on_read_done)
        return reading

    def _on_read_done(self, reading: asyncio.Future[T]) -> None:
        self._reads_waiting -= 1
        if not reading.cancelled():
            reading.exception()  # marks an error as retrieved: the caller may be gone


@dataclass(slots=True)
class _Rest:
    """The part of a read that is not answered yet."""

    at: int
    last: int
    entries_left: int
    bytes_left: int  # the last entry may exceed this limit

    @property
    def frame_bytes(self) -> int:
        return min(self.bytes_left, READ_FRAME_BYTES)

    @property
    def given(self) -> bool:
        return self.at > self.last or self.entries_left <= 0 or self.bytes_left <= 0

    def take(self, found: Run) -> bool:
        """Count these entries as answered. Return whether they are fewer than the frame could
        hold, although the read is not at its end."""
        full = found.size >= self.frame_bytes or found.count == self.entries_left
        self.at += found.count
        self.entries_left -= found.count
        self.bytes_left -= found.size
        return not full and self.at <= self.last


def _read_run(source: _Source, at: int, last: int, **limits: int) -> _Answer:
    found, why = source(at, last, **limits)
    return Run.of(at, found), why


def _absent(state: LedgerAdmission) -> BookieCode:
    return BookieCode.DELETED if state.deleted else BookieCode.NO_SUCH_LEDGER


def _acks(adds: Sequence[Add], code: BookieCode) -> list[bytes]:
    return [encode_ack(add.ledger, add.entry, code) for add in adds]


def _unknown(error: StorageFailed | ReadsOverloaded | EnvelopeDamaged) -> BookieCode:
    if isinstance(error, ReadsOverloaded):
        return BookieCode.OVERLOADED
    log.error("read failed", error=str(error))
    return BookieCode.IO_ERROR


def _runs(entries: Sequence[int]) -> tuple[EntryRun, ...]:
    """Join ascending entry ids into runs."""
    runs: list[EntryRun] = []
    for entry in entries:
        if runs and runs[-1].first + runs[-1].count == entry:
            runs[-1] = EntryRun(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(EntryRun(entry, 1))
    return tuple(runs)
