"""The bookie: what it answers to adds, reads and fences, whatever carries them.

Theory. Adds come in frames. A frame is decoded, decided upon and written in one synchronous step
(admission.py); its acks go into the stream's outbox once the group that it fell into is durable
(storage/commit.py). Reads run on a thread of their own, so that none waits behind a sync. A read
that fences writes the fence first and answers nothing, neither yes nor no, before the fence is
durable.

Every answer is one of three: yes, an explicit no, or unknown (`BookieCode.definite`). No is said
only when the store, which opened undamaged and without gaps (storage/directory.py), does not have
the thing. An error, a full queue, another incarnation, a bookie that is going down: all of these
are unknown.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.bookie.contract import (
    BookieInfo,
    EntryPage,
    EntryRun,
    LastConfirmed,
    LastConfirmedRequest,
    LedgerPage,
    ReadRequest,
)
from magnetar.bookie.errors import ReadsOverloaded, StorageFailed
from magnetar.protos.envelope import (
    BookieCode,
    EnvelopeDamaged,
    FrameDamaged,
    decode_adds,
    decode_envelope,
    decode_hello,
    encode_ack,
    encode_hello_reply,
    encode_read_answer,
)
from magnetar.runtime.frames import FRAME_BYTES_MAX, Outbox
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from magnetar.bookie.admission import Admission
    from magnetar.bookie.storage.commit import GroupCommit
    from magnetar.bookie.storage.format import Identity
    from magnetar.bookie.storage.store import Storage
    from magnetar.runtime.frames import Buffer, FrameStream

log = get_logger(__name__)
T = TypeVar("T")

# A client that sends adds and does not take its acks: 1 MiB is 60,000 of them.
ACKS_PENDING_BYTES_MAX: Final = 1 << 20
# Each holds a frame of up to 16 MiB while it waits for room: a cluster has some dozens of brokers.
STREAMS_MAX: Final = 256
# Waiting for the one read thread; at 1 ms each the last has waited a quarter of a second.
READS_WAITING_MAX: Final = 256
# The answer to one request when it names no limit, and the most it may name.
READ_BYTES_MAX: Final = 8 << 20
READ_ENTRIES_MAX: Final = 10_000
LEDGERS_PAGE_MAX: Final = 10_000
ENTRIES_PAGE_MAX: Final = 1_000  # listing costs a read of each entry


class State(StrEnum):
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(slots=True)
class Counts:
    """What was done since the start."""

    adds_stored: int = 0
    adds_refused: int = 0
    add_bytes: int = 0
    reads: int = 0
    entries_read: int = 0
    fences: int = 0


class BookieService:
    """`run` must be running. Errors of the store while writing end the process
    (GroupCommit.die)."""

    def __init__(
        self,
        *,
        identity: Identity,
        data_dir: Path | None,
        storage: Storage,
        commit: GroupCommit,
        admission: Admission,
        read_thread: Executor,
    ) -> None:
        """`data_dir` is asked for free space (None: nothing is on a disk). `read_thread` has one
        worker. `admission` writes through `commit`."""
        self.identity = identity
        self.state = State.SERVING
        self.counts = Counts()
        self._data_dir = data_dir
        self._storage = storage
        self._commit = commit
        self._admission = admission
        self._read_thread = read_thread
        self._reads_waiting = 0
        self._streams: dict[FrameStream, Outbox] = {}

    async def run(self) -> None:
        """Commit, until cancelled."""
        await self._commit.run()

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new work; what was written becomes durable and is acknowledged if that takes no
        longer than `grace_s`; end the streams. `run` must be running still."""
        self.state = State.STOPPING
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._commit.wait_durable()
                for outbox in list(self._streams.values()):
                    await outbox.wait_sent()
        for stream in list(self._streams):
            await stream.close()

    # -- Adds ----------------------------------------------------------------------------------

    async def handle_write(self, stream: FrameStream) -> None:
        """Serve one Write stream to its end. Raises StreamClosed, FrameDamaged, StorageFailed."""
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
            raise errors.exceptions[0] from None  # there is one: `outbox.run` has no errors
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
        """Take frames for as long as the peer sends them, no faster than the disk and the peer."""
        while True:
            frame = await stream.receive()
            self._take_frame(frame, outbox)
            await self._commit.wait_room()
            await outbox.wait_room()

    def _take_frame(self, frame: Buffer, outbox: Outbox) -> None:
        adds = list(decode_adds(frame))  # a frame that is damaged anywhere has no effect at all
        if self.state is not State.SERVING:
            outbox.put(*(encode_ack(a.ledger, a.entry, BookieCode.STOPPING) for a in adds))
            return
        admitted = self._admission.admit(adds)
        self.counts.add_bytes += len(frame)
        self.counts.adds_stored += len(admitted.stored)
        self.counts.adds_refused += len(admitted.refused)
        if admitted.refused:
            outbox.put(b"".join(admitted.refused))
        if admitted.stored:
            self._commit.when_durable(partial(outbox.put, b"".join(admitted.stored)))

    # -- Reads ---------------------------------------------------------------------------------

    async def read(self, request: ReadRequest) -> AsyncGenerator[Sequence[Buffer], None]:
        """Frames of read answers, each as its parts: the entries that are there from `first` on,
        then why the next one is not given, unless a limit or `last` was reached."""
        self.counts.reads += 1
        code = await self._open(
            request.incarnation, request.ledger, request.master_key, fence=request.fence
        )
        if not 0 <= request.first <= request.last:
            code = BookieCode.BAD_REQUEST
        if code is not BookieCode.OK:
            yield encode_read_answer(max(request.first, -1), code)
            return
        bytes_left = min(request.bytes_max or READ_BYTES_MAX, READ_BYTES_MAX)
        entries_left = min(request.entries_max or READ_ENTRIES_MAX, READ_ENTRIES_MAX)
        at = request.first
        while at <= request.last and entries_left > 0 and bytes_left > 0:
            limit = min(bytes_left, FRAME_BYTES_MAX)
            found, refused = await self._read_run(
                request.ledger, at, request.last, bytes_max=limit, entries_max=entries_left
            )
            parts: list[Buffer] = []
            for envelope in found:
                parts += encode_read_answer(at, BookieCode.OK, envelope)
                at += 1
            if refused is not None:
                parts += encode_read_answer(at, refused)
            yield parts
            if refused is not None:
                return
            self.counts.entries_read += len(found)
            entries_left -= len(found)
            bytes_left -= sum(map(len, found))

    async def _read_run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> tuple[list[bytes], BookieCode | None]:
        """Entries from `first` on, and why the run ends (None: at a limit or at `last`)."""
        try:
            found = await self._on_read_thread(
                partial(
                    self._storage.run,
                    ledger,
                    first,
                    last,
                    bytes_max=bytes_max,
                    entries_max=entries_max,
                )
            )
        except (StorageFailed, ReadsOverloaded) as error:
            return [], _unknown(error)
        full = sum(map(len, found)) >= bytes_max or len(found) == entries_max
        if full or first + len(found) > last:
            return found, None
        return found, BookieCode.NO_SUCH_ENTRY

    async def last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        """The last stored entry, and what it says is confirmed."""
        code = await self._open(
            request.incarnation, request.ledger, request.master_key, fence=request.fence
        )
        if code is not BookieCode.OK:
            return LastConfirmed(code=code)
        try:
            last = await self._on_read_thread(partial(self._storage.last_entry, request.ledger))
            if last is None:
                return LastConfirmed(code=BookieCode.NO_SUCH_ENTRY)
            envelope = decode_envelope(last[1])
        except (StorageFailed, ReadsOverloaded, EnvelopeDamaged) as error:
            return LastConfirmed(code=_unknown(error))
        return LastConfirmed(
            code=BookieCode.OK,
            confirmed=envelope.confirmed,
            last_entry=last[0],
            length=envelope.length,
        )

    async def list_ledgers(self, incarnation: str, *, after: int, ledgers_max: int) -> LedgerPage:
        """A page of the ledgers that are stored here; `ledgers_max` 0: as many as a page may
        have."""
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
        """A page of the entries of a ledger that are stored here; `entries_max` as above."""
        code = self._refusal(incarnation)
        if code is None and (ledger < 0 or first < 0):
            code = BookieCode.BAD_REQUEST
        if code is not None:
            return EntryPage(code)
        limit = min(entries_max or ENTRIES_PAGE_MAX, ENTRIES_PAGE_MAX)
        read = partial(self._storage.entry_ids, ledger, first, entries_max=limit + 1)
        try:
            if self._admission.state(ledger).record is None:
                return EntryPage(BookieCode.NO_SUCH_LEDGER)
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
            read_only=False,
            disk_total_bytes=0 if usage is None else usage.total,
            disk_free_bytes=0 if usage is None else usage.free,
        )

    # -- What every call passes ------------------------------------------------------------------

    async def _open(
        self, incarnation: str, ledger: int, master_key: int, *, fence: bool
    ) -> BookieCode:
        """OK: the ledger may be read, and is durably fenced if that was asked for."""
        code = self._refusal(incarnation)
        if code is not None:
            return code
        if ledger < 0:
            return BookieCode.BAD_REQUEST
        try:
            if fence:
                return await self._fence(ledger, master_key)
            record = self._admission.state(ledger).record
        except StorageFailed as error:
            return _unknown(error)
        if record is None:
            return BookieCode.NO_SUCH_LEDGER
        return BookieCode.OK if record.master_key == master_key else BookieCode.UNAUTHORIZED

    async def _fence(self, ledger: int, master_key: int) -> BookieCode:
        code = self._admission.fence(ledger, master_key)
        if code is BookieCode.OK:
            self.counts.fences += 1
            state = self._admission.state(ledger)
            if not state.fence_durable:
                await self._commit.wait_durable()
                state.fence_durable = True
        return code

    def _refusal(self, incarnation: str) -> BookieCode | None:
        if incarnation != self.identity.incarnation:
            return BookieCode.WRONG_INCARNATION
        if self.state is not State.SERVING:
            return BookieCode.STOPPING
        return None

    async def _on_read_thread(self, read: Callable[[], T]) -> T:
        """Raises ReadsOverloaded, or what `read` raises."""
        if self._reads_waiting >= READS_WAITING_MAX:
            raise ReadsOverloaded(READS_WAITING_MAX)
        self._reads_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._read_thread, read)
        finally:
            self._reads_waiting -= 1


def _unknown(error: StorageFailed | ReadsOverloaded | EnvelopeDamaged) -> BookieCode:
    if isinstance(error, ReadsOverloaded):
        return BookieCode.OVERLOADED
    log.error("read failed", error=str(error))
    return BookieCode.IO_ERROR


def _runs(entries: Sequence[int]) -> tuple[EntryRun, ...]:
    """Ascending ids as runs."""
    runs: list[EntryRun] = []
    for entry in entries:
        if runs and runs[-1].first + runs[-1].count == entry:
            runs[-1] = EntryRun(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(EntryRun(entry, 1))
    return tuple(runs)
