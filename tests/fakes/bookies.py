"""Bookies for tests: a service on a store in memory, clients of the contract, and copies of
directories as a crash leaves them."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fakes.adds import encode_add
from fakes.memory_storage import MemoryStorage
from support import ManualClock

from magnetar.bookie.admission import Admission
from magnetar.bookie.contract import LastConfirmedRequest, ReadRequest
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.service import BookieService
from magnetar.bookie.storage.commit import GroupCommit
from magnetar.bookie.storage.format import DirectoryState, Identity
from magnetar.protos.envelope import (
    BookieCode,
    ReadAnswer,
    decode_acks,
    decode_hello_reply,
    decode_read_answers,
    encode_envelope,
    encode_hello,
)
from magnetar.runtime.memory_stream import memory_stream_pair, serve_memory_stream
from magnetar.runtime.thread import WorkerThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from magnetar.bookie.storage.store import Put, Storage
    from magnetar.protos.envelope import HelloReply
    from magnetar.runtime.frames import FrameStream

T = TypeVar("T")

INCARNATION = "00112233445566778899aabbccddeeff"
IDENTITY = Identity(
    bookie="b1",
    cluster="c1",
    incarnation=INCARNATION,
    former=None,
    boot_epoch=3,
    start="5" * 32,
    state=DirectoryState.READY,
)
KEY = 0xA11CE  # a master key
OTHER = "f" * 32  # another incarnation


IMAGES_TRIED_MAX = 10


def crash_image(source: Path, target: Path) -> None:
    """Copy a live data directory as a killed process leaves it.

    RocksDB works in the background meanwhile. A removed old log file does not matter. If RocksDB
    replaces another file, the copy mixes two moments, and is made again.
    """

    def copy(name: str, to: str) -> None:
        try:
            shutil.copyfile(name, to)
        except FileNotFoundError:
            if not ("/LOG.old" in name or "/OPTIONS" in name or name.endswith(".dbtmp")):
                raise

    for _ in range(IMAGES_TRIED_MAX):
        try:
            shutil.copytree(source, target, copy_function=copy)
        except (shutil.Error, FileNotFoundError):
            shutil.rmtree(target)
        else:
            return
    raise AssertionError(f"{source} changed during each copy")


def envelope(ledger: int, entry: int, payload: bytes = b"payload", *, confirmed: int = -1) -> bytes:
    length = len(payload) * (entry + 1)
    return encode_envelope(
        ledger=ledger, entry=entry, confirmed=confirmed, length=length, payload=[payload]
    )


def add(
    ledger: int,
    entry: int,
    payload: bytes = b"payload",
    *,
    master_key: int = KEY,
    flags: int = 0,
    confirmed: int = -1,
) -> bytes:
    """The bytes of one add, with the envelope that `envelope` gives."""
    parts = encode_add(
        ledger=ledger,
        entry=entry,
        confirmed=confirmed,
        length=len(payload) * (entry + 1),
        payload=[payload],
        master_key=master_key,
        flags=flags,
    )
    return b"".join(parts)


class FaultyStorage(MemoryStorage):
    """A storage in memory. A test can make any operation fail."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0
        self.batches: list[Sequence[Put]] = []
        self.failing: dict[str, StorageFailed] = {}  # keyed by operation: write, sync, read

    def write(self, puts: Sequence[Put]) -> None:
        self._maybe_fail("write")
        self.batches.append(list(puts))
        super().write(puts)

    def sync(self) -> None:
        self._maybe_fail("sync")
        self.syncs += 1
        super().sync()

    def entry(self, ledger: int, entry: int) -> bytes | None:
        self._maybe_fail("read")
        return super().entry(ledger, entry)

    def last_entry(self, ledger: int) -> tuple[int, bytes] | None:
        self._maybe_fail("read")
        return super().last_entry(ledger)

    def ledger_record(self, ledger: int) -> bytes | None:
        self._maybe_fail("read")
        return super().ledger_record(ledger)

    def run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> list[bytes]:
        self._maybe_fail("read")
        return super().run(ledger, first, last, bytes_max=bytes_max, entries_max=entries_max)

    def _maybe_fail(self, operation: str) -> None:
        if operation in self.failing:
            raise self.failing[operation]


class GatedThread:
    """A thread that starts its work only while the gate is open: a disk as slow as the test needs,
    without real waits."""

    def __init__(self) -> None:
        self._thread = WorkerThread("gated")
        self._held: list[tuple[asyncio.Future[Any], Callable[[], Any]]] = []
        self.open = True

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        if self.open:
            return self._thread.do(work)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._held.append((future, work))
        return future

    @property
    def held(self) -> int:
        return len(self._held)

    def release(self) -> None:
        """Run the work that was held back on the caller's thread. Later work is held back again
        unless `open`."""
        held, self._held = self._held, []
        for future, work in held:
            if future.cancelled():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def shutdown(self) -> None:
        self._thread.shutdown()


class InlineThread(GatedThread):
    """Runs all work at once on the caller's thread, for loops in virtual time."""

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        opened, self.open = self.open, False
        future = super().do(work)
        self.release()
        self.open = opened
        return future


async def welcome(ledger: int) -> BookieCode:
    """Metadata that admits every ledger."""
    return BookieCode.OK


@dataclass
class Bookie:
    """A service on a store in memory, with methods that make it fail."""

    service: BookieService
    storage: FaultyStorage
    commit: GroupCommit
    sync_thread: GatedThread
    deaths: list[StorageFailed] = field(default_factory=list)
    streams: list[FrameStream] = field(default_factory=list)
    _group: asyncio.TaskGroup | None = None

    async def connect(
        self, *, incarnation: str = INCARNATION, name: str = "test", frames_max: int = 64
    ) -> Writer:
        writer = self.raw_stream(frames_max=frames_max)
        await writer.stream.send([encode_hello(incarnation, name)])
        writer.reply = decode_hello_reply(await writer.stream.receive())
        return writer

    def raw_stream(self, *, frames_max: int = 64) -> Writer:
        """A connected client that has sent nothing yet."""
        assert self._group is not None
        here, there = memory_stream_pair("client", "bookie", frames_max=frames_max)
        self._group.create_task(serve_memory_stream(there, self.service.handle_write))
        self.streams.append(here)
        return Writer(here)

    async def read(self, request: ReadRequest) -> list[ReadAnswer]:
        answers: list[ReadAnswer] = []
        async for parts in self.service.read(request):
            answers += decode_read_answers(b"".join(parts))
        return answers


class Writer:
    """A client's end of a Write stream."""

    def __init__(self, stream: FrameStream) -> None:
        self.stream = stream
        self.reply: HelloReply | None = None

    async def send(self, *adds: bytes) -> None:
        await self.stream.send(adds)

    async def acks(self, count: int) -> list[tuple[int, int, BookieCode]]:
        acks: list[tuple[int, int, BookieCode]] = []
        while len(acks) < count:
            acks += decode_acks(await self.stream.receive())
        return acks

    async def add(self, *adds: bytes) -> list[BookieCode]:
        """Send the adds as one frame. Returns the codes in the order of the adds' ids."""
        await self.send(*adds)
        return [code for _, _, code in sorted(await self.acks(len(adds)))]


@asynccontextmanager
async def running_bookie(
    *,
    storage: FaultyStorage | None = None,
    pending_bytes_max: int = 1 << 20,
    ledgers_cached_max: int = 1000,
    identity: Identity = IDENTITY,
    check_first_add: Callable[[int], Awaitable[BookieCode]] = welcome,
    inline: bool = False,
    formers: Mapping[str, Storage | None] | None = None,
) -> AsyncIterator[Bookie]:
    storage = FaultyStorage() if storage is None else storage
    sync_thread = InlineThread() if inline else GatedThread()
    read_thread = InlineThread() if inline else WorkerThread("read")
    deaths: list[StorageFailed] = []
    commit = GroupCommit(
        storage,
        note_durable=lambda _: None,
        thread=sync_thread,
        die=deaths.append,
        pending_bytes_max=pending_bytes_max,
    )
    service = BookieService(
        identity=identity,
        data_dir=None,
        storage=storage,
        commit=commit,
        admission=Admission(
            storage,
            write=commit.write,
            delete=commit.delete_ledger,
            clock=ManualClock(),
            ledgers_cached_max=ledgers_cached_max,
        ),
        read_thread=read_thread,
        check_first_add=check_first_add,
        formers=formers or {},
    )
    bookie = Bookie(service, storage, commit, sync_thread, deaths)
    try:
        async with asyncio.TaskGroup() as group:
            bookie._group = group
            running = group.create_task(_run(service))
            yield bookie
            for stream in bookie.streams:
                await stream.close()
            running.cancel()
    finally:
        sync_thread.release()
        sync_thread.shutdown()
        read_thread.shutdown()


async def _run(service: BookieService) -> None:
    try:
        await service.run()
    except StorageFailed:
        return  # `deaths` has it


def read_request(
    first: int = 0,
    last: int = 100,
    *,
    ledger: int = 1,
    incarnation: str = INCARNATION,
    master_key: int = KEY,
    fence: bool = False,
    bytes_max: int | None = None,
    entries_max: int | None = None,
) -> ReadRequest:
    return ReadRequest(
        incarnation=incarnation,
        ledger=ledger,
        master_key=master_key,
        first=first,
        last=last,
        fence=fence,
        bytes_max=bytes_max,
        entries_max=entries_max,
    )


def last_request(
    ledger: int = 1,
    *,
    incarnation: str = INCARNATION,
    master_key: int = KEY,
    fence: bool = False,
) -> LastConfirmedRequest:
    return LastConfirmedRequest(
        incarnation=incarnation, ledger=ledger, master_key=master_key, fence=fence
    )


def none(entry: int, code: BookieCode) -> ReadAnswer:
    return ReadAnswer(entry, code, b"")


def some(*entries: int, ledger: int = 1) -> list[ReadAnswer]:
    return [ReadAnswer(entry, BookieCode.OK, envelope(ledger, entry)) for entry in entries]
