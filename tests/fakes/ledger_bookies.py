"""Bookies in memory that implement BookiePeer. Tests kill them, slow them down and inject faults.

`BookieCluster` is a metadata tree in which these bookies are registered. It makes the `Ledgers` of
any number of processes. The entries of a bookie survive its death.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from magnetar.bookie.contract import (
    BookieInfo,
    EntryPage,
    EntryRun,
    LastConfirmed,
    LastConfirmedRequest,
    LastHeard,
    ReadRequest,
)
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_ledger, encode_bookie_registration, encode_ledger
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BookieAddress, BookieId, BookieRegistration, LedgerId, Member
from magnetar.protos.envelope import (
    BEAT,
    COPY,
    RECOVERY,
    Add,
    BookieCode,
    decode_adds,
    decode_envelope,
    encode_ack,
    encode_read_answer,
)
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.frames import StreamClosed
from magnetar.runtime.memory_stream import MemoryStream, memory_stream_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from magnetar.bookie.ledger.peer import BookiePeer
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.frames import Buffer, FrameStream


@dataclass
class StoredLedger:
    master_key: int
    entries: dict[int, bytes] = field(default_factory=dict)
    fenced: bool = False


class FakeBookie:
    """One incarnation of a bookie. Without the test's interference it answers at once."""

    def __init__(self, name: str, *, incarnation: int = 1, group: asyncio.TaskGroup) -> None:
        self.member = Member(BookieId(name), f"{incarnation:032x}")
        self.ledgers: dict[int, StoredLedger] = {}
        self.up = True
        self.entries_page = 1000  # the page size of list_entries
        self.opened = 0  # the number of write streams opened
        self.reads: list[ReadRequest] = []
        self.fences: list[LastConfirmedRequest] = []
        # Set by tests. None: the ordinary answer.
        self.judge_add: Callable[[Add], BookieCode | None] = lambda _: None
        self.judge_read: Callable[[int, int], BookieCode | None] = lambda _ledger, _entry: None
        self.heard: list[tuple[str, str]] = []  # the beats of brokers
        self.last: LastHeard | None = None  # its answer about every broker
        self.may_open = asyncio.Event()  # cleared: connecting clients wait
        self.may_take = asyncio.Event()  # cleared: writers' adds are not read
        self.may_ack = asyncio.Event()  # cleared: adds are stored but not answered
        self.may_read = asyncio.Event()  # cleared: reads and fences wait
        self.may_open.set()
        self.may_take.set()
        self.may_ack.set()
        self.may_read.set()
        self._group = group
        self._streams: list[MemoryStream] = []

    def kill(self) -> None:
        """Kill the bookie: its connections are reset, its stored entries stay."""
        self.up = False
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.abort("connection reset by peer")

    def restart(self) -> None:
        self.up = True

    def entries(self, ledger: int) -> list[int]:
        stored = self.ledgers.get(ledger)
        return [] if stored is None else sorted(stored.entries)

    # -- the peer (BookiePeer) -------------------------------------------------------------------

    async def open_write(self, client_name: str) -> FrameStream:
        self._check_up()
        await self.may_open.wait()
        here, there = memory_stream_pair(client_name, self.member.bookie, frames_max=64)
        self._streams += [here, there]
        self.opened += 1
        self._group.create_task(self._serve(there))
        return here

    async def read(self, request: ReadRequest) -> AsyncIterator[Buffer]:
        self._check_up()
        self.reads.append(request)
        await self.may_read.wait()
        self._check_up()
        stored = self.ledgers.get(request.ledger)
        if request.fence:
            stored = self._open(request.ledger, request.master_key)
            stored.fenced = True
        left = request.bytes_max or 1 << 20
        for entry in range(request.first, request.last + 1):
            if request.stride and (entry - request.first) % request.stride >= request.run:
                continue
            code = self.judge_read(request.ledger, entry)
            if code is None and stored is None:
                code = BookieCode.NO_SUCH_LEDGER
            if code is None and stored is not None and entry not in stored.entries:
                code = BookieCode.NO_SUCH_ENTRY
            if code is not None:
                yield b"".join(encode_read_answer(entry, code))
                return
            assert stored is not None
            yield b"".join(encode_read_answer(entry, BookieCode.OK, stored.entries[entry]))
            left -= len(stored.entries[entry])
            if left <= 0:
                return

    async def last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        self._check_up()
        self.fences.append(request)
        await self.may_read.wait()
        self._check_up()
        stored = self._open(request.ledger, request.master_key)
        stored.fenced |= request.fence
        if not stored.entries:
            return LastConfirmed(code=BookieCode.NO_SUCH_ENTRY)
        last = max(stored.entries)
        envelope = decode_envelope(stored.entries[last])
        return LastConfirmed(
            code=BookieCode.OK,
            confirmed=envelope.confirmed,
            last_entry=last,
            length=envelope.length,
        )

    async def list_entries(self, ledger: int, first: int) -> EntryPage:
        self._check_up()
        await self.may_read.wait()
        stored = self.ledgers.get(ledger)
        if stored is None:
            return EntryPage(BookieCode.NO_SUCH_LEDGER)
        entries = [entry for entry in sorted(stored.entries) if entry >= first]
        page = entries[: self.entries_page]
        runs: list[EntryRun] = []
        for entry in page:
            if runs and runs[-1].first + runs[-1].count == entry:
                runs[-1] = EntryRun(runs[-1].first, runs[-1].count + 1)
            else:
                runs.append(EntryRun(entry, 1))
        return EntryPage(BookieCode.OK, tuple(runs), more=len(entries) > len(page))

    async def info(self) -> BookieInfo:
        self._check_up()
        return BookieInfo(
            bookie=self.member.bookie,
            incarnation=self.member.incarnation,
            boot_epoch=1,
            cluster="test",
            state="serving",
            read_only=False,
            disk_total_bytes=0,
            disk_free_bytes=0,
        )

    async def open_presence(self, broker: str, incarnation: str) -> FrameStream:
        self._check_up()
        await self.may_open.wait()
        here, there = memory_stream_pair(broker, self.member.bookie, frames_max=64)
        self._streams += [here, there]
        self._group.create_task(self._hear(there, (broker, incarnation)))
        return here

    async def last_heard(self, broker: str, incarnation: str) -> LastHeard | None:
        self._check_up()
        await self.may_read.wait()
        self._check_up()
        return self.last

    async def close(self) -> None:
        """This peer holds no frames."""

    # -- mechanics -------------------------------------------------------------------------------

    def _check_up(self) -> None:
        if not self.up:
            raise BookieUnavailable(
                self.member.bookie, BookieCode.CONNECTION_LOST, "connection refused"
            )

    def _open(self, ledger: int, master_key: int) -> StoredLedger:
        stored = self.ledgers.setdefault(ledger, StoredLedger(master_key))
        assert stored.master_key == master_key
        return stored

    async def _serve(self, stream: MemoryStream) -> None:
        try:
            while True:
                frame = await stream.receive()
                if stream.peer.endswith("/adds"):
                    await self.may_take.wait()
                acks = [self._take(add) for add in decode_adds(frame)]
                await self.may_ack.wait()
                await stream.send(acks)
        except StreamClosed:
            return

    async def _hear(self, stream: MemoryStream, broker: tuple[str, str]) -> None:
        try:
            while True:
                self.heard.append(broker)
                await stream.receive()
                await self.may_ack.wait()
                await stream.send([BEAT])
        except StreamClosed:
            return

    def _take(self, add: Add) -> bytes:
        code = add.fault or self.judge_add(add)
        if code is None:
            stored = self._open(add.ledger, add.master_key)
            if add.flags & RECOVERY:
                stored.fenced = True
            elif stored.fenced and not add.flags & COPY:
                return encode_ack(add.ledger, add.entry, BookieCode.FENCED)
            before = stored.entries.setdefault(add.entry, add.envelope)
            same = before == add.envelope
            code = BookieCode.OK if same else BookieCode.CONFLICT
        return encode_ack(add.ledger, add.entry, code)


class FormerIncarnation:
    """A bookie that no longer has the incarnation that is asked for."""

    def __init__(self, member: Member) -> None:
        self.member = member

    async def open_write(self, client_name: str) -> FrameStream:
        raise self._refusal()

    async def read(self, request: ReadRequest) -> AsyncIterator[Buffer]:
        yield b"".join(encode_read_answer(request.first, BookieCode.WRONG_INCARNATION))

    async def last_confirmed(self, request: LastConfirmedRequest) -> LastConfirmed:
        return LastConfirmed(code=BookieCode.WRONG_INCARNATION)

    async def list_entries(self, ledger: int, first: int) -> EntryPage:
        return EntryPage(BookieCode.WRONG_INCARNATION)

    async def info(self) -> BookieInfo:
        raise self._refusal()

    async def open_presence(self, broker: str, incarnation: str) -> FrameStream:
        raise self._refusal()

    async def last_heard(self, broker: str, incarnation: str) -> LastHeard | None:
        raise self._refusal()

    async def close(self) -> None:
        """This peer holds no frames."""

    def _refusal(self) -> BookieUnavailable:
        return BookieUnavailable(self.member.bookie, BookieCode.WRONG_INCARNATION, "another one")


class BookieCluster:
    """Bookies b0, b1, … of one metadata tree, and the processes that use them."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.tree = MemoryTree()
        self.store = MemoryStore(self.tree)  # used by the bookies, and inspected by tests
        self.bookies: list[FakeBookie] = []
        self._group = group

    async def add_bookie(self, *, zone: str = "", incarnation: int = 1) -> FakeBookie:
        bookie = FakeBookie(f"b{len(self.bookies)}", incarnation=incarnation, group=self._group)
        self.bookies.append(bookie)
        await self.register(bookie, zone=zone)
        return bookie

    async def register(
        self, bookie: FakeBookie, *, zone: str = "", read_only: bool = False, boot_epoch: int = 1
    ) -> None:
        registration = BookieRegistration(
            bookie=bookie.member.bookie,
            incarnation=bookie.member.incarnation,
            boot_epoch=boot_epoch,
            address=BookieAddress(f"{bookie.member.bookie}:3181", f"{bookie.member.bookie}:3182"),
            http_address="",
            zone=zone,
            read_only=read_only,
        )
        path = paths.bookie_available(bookie.member.bookie)
        await self.unregister(bookie)
        await self.store.create_ephemeral(path, encode_bookie_registration(registration))

    async def unregister(self, bookie: FakeBookie) -> None:
        path = paths.bookie_available(bookie.member.bookie)
        stored = await self.store.get(path)
        if stored is not None:
            await self.store.delete(path, expected=stored.version)

    async def move(self, ledger: LedgerId, members: Sequence[Member]) -> None:
        """Move all segments of a closed ledger to these bookies, as auto-recovery does."""
        path = paths.ledger(ledger)
        stored = await self.store.get(path)
        assert stored is not None
        metadata = decode_ledger(stored.value)
        segments = tuple(replace(part, members=tuple(members)) for part in metadata.segments)
        value = encode_ledger(replace(metadata, segments=segments))
        await self.store.put(path, value, expected=stored.version)

    def bookie(self, member: Member) -> FakeBookie:
        return next(each for each in self.bookies if each.member == member)

    def peer(self, member: Member) -> BookiePeer:
        found = [each for each in self.bookies if each.member == member]
        return found[0] if found else FormerIncarnation(member)

    @asynccontextmanager
    async def process(
        self,
        config: LedgerConfig | None = None,
        *,
        seed: int = 1,
        store: MemoryStore | None = None,
        directory_of: Callable[[MetadataStore], BookieRegistry] = BookieRegistry,
    ) -> AsyncIterator[Ledgers]:
        """A broker's `Ledgers`, which runs inside the context."""
        store = store or MemoryStore(self.tree)
        random = Random(seed)
        directory = directory_of(store)
        config = config or LedgerConfig()
        pool = PeerPool(
            directory,
            lambda member, _: self.peer(member),
            client_name=f"broker-{seed}",
            random=random,
            connect_timeout_s=config.connect_timeout_s,
        )
        ledgers = Ledgers(store, directory, pool, LedgerIds(store), config, SystemClock(), random)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(ledgers.run())
            await ledgers.wait_ready()
            yield ledgers
            running.cancel()


@asynccontextmanager
async def bookie_cluster(bookies: int, *, zones: str = "") -> AsyncIterator[BookieCluster]:
    async with asyncio.TaskGroup() as group:
        world = BookieCluster(group)
        for number in range(bookies):
            await world.add_bookie(zone=zones[number : number + 1])
        yield world
        for bookie in world.bookies:
            bookie.kill()
            for gate in (bookie.may_open, bookie.may_take, bookie.may_ack, bookie.may_read):
                gate.set()
