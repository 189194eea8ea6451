"""Ledgers on real bookies: processes, RocksDB, gRPC on loopback, kill -9."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest
from fakes.bookie_process import BookieProcess
from support import wait_until

from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.connection import RemoteBookiePeer
from magnetar.bookie.ledger.errors import BookieUnavailable, LedgerError, LedgerFenced
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_bookie_registration
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BookieId, BookieRegistration, LedgerId, Member
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from magnetar.bookie.ledger.appender import LedgerAppender

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop]


@pytest.fixture
def bookies(tmp_path: Path) -> Iterator[list[BookieProcess]]:
    """Four bookies, started at the same time."""
    processes = [BookieProcess(tmp_path / f"b{n}", id=f"b{n}") for n in range(4)]
    try:
        for process in processes:
            process.launch()
        for process in processes:
            process.wait_ready()
        yield processes
    finally:
        for process in processes:
            process.end()


def member(process: BookieProcess) -> Member:
    return Member(BookieId(process.directory.name), process.incarnation)


def of(processes: list[BookieProcess], who: Member) -> BookieProcess:
    return next(each for each in processes if member(each) == who)


async def register(store: MemoryStore, process: BookieProcess) -> None:
    registration = BookieRegistration(
        bookie=member(process).bookie,
        incarnation=process.incarnation,
        boot_epoch=int(process.ready["boot_epoch"]),
        address=process.address,
        http_address="",
        zone="",
        read_only=False,
    )
    path = paths.bookie_available(registration.bookie)
    stored = await store.get(path)
    if stored is not None:
        await store.delete(path, expected=stored.version)
    await store.create_ephemeral(path, encode_bookie_registration(registration))


@asynccontextmanager
async def broker(tree: MemoryTree, seed: int) -> AsyncIterator[Ledgers]:
    store, random = MemoryStore(tree), Random(seed)
    directory = BookieRegistry(store)
    pool = PeerPool(
        directory,
        RemoteBookiePeer,
        client_name=f"broker-{seed}",
        random=random,
        connect_timeout_s=2.0,
    )
    ledgers = Ledgers(
        store, directory, pool, LedgerIds(store), LedgerConfig(), SystemClock(), random
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(ledgers.run())
        yield ledgers
        running.cancel()


@asynccontextmanager
async def cluster(processes: list[BookieProcess]) -> AsyncIterator[tuple[MemoryTree, MemoryStore]]:
    tree = MemoryTree()
    store = MemoryStore(tree)
    for process in processes:
        await register(store, process)
    yield tree, store


class Workload:
    """Appends numbered entries until it is stopped, and notes when each one was confirmed."""

    def __init__(self, appender: LedgerAppender) -> None:
        self.appender = appender
        self.confirmed_at: list[float] = []  # for each entry: the time of its confirmation
        self.stopped = False
        self._loop = asyncio.get_running_loop()
        appender.progress = self._progress

    def _progress(self) -> None:
        now = self._loop.time()
        new = self.appender.confirmed + 1 - len(self.confirmed_at)
        self.confirmed_at += [now] * new

    async def run(self) -> None:
        while not self.stopped and self.appender.failure is None:
            await self.appender.wait_room()
            try:
                for _ in range(20):
                    data = self.payload(self.appender.appended + 1)
                    self.appender.append_nowait([[data]])
            except LedgerError:
                return
            await self.until(self._few_in_flight)

    async def until(self, predicate: Callable[[], object]) -> None:
        """Wait until the predicate is true. A failure describes the ledger."""
        try:
            await wait_until(predicate)
        except AssertionError as error:
            raise AssertionError(
                f"{self.appender.failure!r}; {self.appender.describe()}"
            ) from error

    async def until_of_good(self, predicate: Callable[[], object]) -> None:
        """Append to a ledger that must not fail meanwhile."""
        await self.until(lambda: predicate() or self.appender.failure is not None)
        assert self.appender.failure is None, self.appender.describe()

    def _few_in_flight(self) -> bool:
        appender = self.appender
        return appender.appended - appender.confirmed < 200 or appender.failure is not None

    @staticmethod
    def payload(entry: int) -> bytes:
        return b"%d:" % entry + bytes(entry % 3000)

    def longest_pause(self, since: float) -> float:
        times = [since, *(t for t in self.confirmed_at if t >= since)]
        return max(after - before for before, after in itertools.pairwise(times))


async def check_content(ledgers: Ledgers, ledger: LedgerId) -> int:
    """Check that every entry up to the end is readable and has the appended bytes."""
    metadata = await ledgers.metadata(ledger)
    assert metadata is not None
    assert metadata.last_entry is not None
    reader, at = ledgers.reader(metadata), 0
    while at <= metadata.last_entry:
        for entry in await reader.read(at, metadata.last_entry, bytes_max=1 << 20):
            assert entry.entry == at
            assert bytes(entry.payload) == Workload.payload(at)
            at += 1
    assert metadata.length == sum(len(Workload.payload(n)) for n in range(at))
    return at - 1


@pytest.mark.real_loop(deadline_s=240)
@pytest.mark.parametrize("count", [3, 4])
async def test_a_kill_9_of_a_bookie_delays_no_append_and_loses_no_entry(
    bookies: list[BookieProcess], count: int
) -> None:
    """With a spare bookie, the ledger replaces the killed one; without a spare, it continues with
    two. In both cases no append waits for a timeout, and every confirmed entry is readable."""

    async with cluster(bookies[:count]) as (tree, _), broker(tree, 1) as ledgers:
        appender = await ledgers.create(newer_than=LedgerId(-1), custom={})
        work = Workload(appender)
        async with asyncio.TaskGroup() as group:
            group.create_task(work.run())
            await wait_until(lambda: appender.confirmed > 500)
            victim = of(bookies, appender.metadata.last_segment.members[1])
            now = asyncio.get_running_loop().time()
            victim.kill()

            def replaced() -> bool:
                return member(victim) not in appender.metadata.last_segment.members

            # Two of three acks confirm an entry. The kernel needs time to close the sockets of the
            # killed process. Until then, acks of the others may confirm thousands of entries.
            await work.until_of_good(lambda: appender.degraded if count == 3 else replaced())
            before = appender.confirmed
            await work.until_of_good(lambda: appender.confirmed > before + 2000)
            pause = work.longest_pause(now)
            print(f"\n{count} bookies: longest pause after kill -9 {pause * 1000:.0f} ms")
            assert pause < LedgerConfig().add_timeout_s - 1
            work.stopped = True
        assert replaced() == (count == 4)
        assert appender.degraded == (count == 3)
        metadata = await appender.close()
        assert metadata.last_entry == appender.appended
        assert await check_content(ledgers, appender.ledger) == metadata.last_entry


@pytest.mark.real_loop(deadline_s=240)
async def test_recovery_under_a_writer_loses_no_confirmed_entry_and_fences_it(
    bookies: list[BookieProcess],
) -> None:
    """One bookie is dead. The recovery loses no confirmed entry, and the first writer learns that
    it is fenced."""

    async with (
        cluster(bookies) as (tree, _),
        broker(tree, 1) as first,
        broker(tree, 2) as second,
    ):
        appender = await first.create(newer_than=LedgerId(-1), custom={})
        work = Workload(appender)
        async with asyncio.TaskGroup() as group:
            group.create_task(work.run())
            await wait_until(lambda: appender.confirmed > 500)
            of(bookies, appender.metadata.last_segment.members[0]).kill()
            began = asyncio.get_running_loop().time()
            metadata = await second.recover(appender.ledger)
            took = asyncio.get_running_loop().time() - began
            print(f"\nrecovered to entry {metadata.last_entry} in {took * 1000:.0f} ms")
            await wait_until(lambda: appender.failure)
        assert isinstance(appender.failure, LedgerFenced)
        assert metadata.last_entry is not None
        assert appender.confirmed <= metadata.last_entry
        assert await check_content(second, appender.ledger) == metadata.last_entry
        with pytest.raises(LedgerFenced):
            await appender.close()
        assert await first.recover(appender.ledger) == metadata


@pytest.mark.real_loop(deadline_s=240)
async def test_a_restarted_bookie_ends_the_degraded_state_of_a_ledger(
    bookies: list[BookieProcess],
) -> None:
    three = bookies[:3]
    async with cluster(three) as (tree, store), broker(tree, 1) as ledgers:
        appender = await ledgers.create(newer_than=LedgerId(-1), custom={})
        work = Workload(appender)
        async with asyncio.TaskGroup() as group:
            group.create_task(work.run())
            await work.until_of_good(lambda: appender.confirmed > 200)
            assert not appender.degraded, appender.metadata  # before the kill
            three[0].kill()
            await work.until_of_good(lambda: appender.degraded)
            await asyncio.to_thread(three[0].start)  # the bookie starts on another port
            await register(store, three[0])
            await work.until_of_good(lambda: not appender.degraded)
            # Now the ledger survives the death of another bookie.
            three[1].kill()
            before = appender.confirmed
            await work.until_of_good(lambda: appender.confirmed > before + 500)
            work.stopped = True
        await appender.close()
        await check_content(ledgers, appender.ledger)


async def test_another_incarnation_is_refused_by_name(bookies: list[BookieProcess]) -> None:
    peer = RemoteBookiePeer(Member(BookieId("b0"), "f" * 32), bookies[0].address)
    with pytest.raises(BookieUnavailable) as caught:
        await peer.open_write("test")
    assert caught.value.code is BookieCode.WRONG_INCARNATION
    info = await peer.info()
    assert info.incarnation == bookies[0].incarnation
    await peer.close()
