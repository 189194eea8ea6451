from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import Bookie, FaultyStorage, GatedThread, add, running_bookie
from support import settle, wait_until

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.commit import HELD_S_MAX, PRESSURE_AGE_S, PRESSURE_LOOK_S, GroupCommit
from magnetar.bookie.storage.format import entry_key
from magnetar.bookie.storage.store import BATCH_BYTES_MAX
from magnetar.protos.envelope import BookieCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FAILURE = StorageFailed("sync", "Input/output error")


@dataclass
class CommitRig:
    """A group commit over a store and a thread that the test holds and breaks."""

    commit: GroupCommit
    storage: FaultyStorage
    thread: GatedThread
    noted: list[int]
    deaths: list[StorageFailed]
    done: list[str]

    def add(self, entry: int, name: str, *, size: int = 10) -> None:
        self.commit.write([(entry_key(1, entry), bytes(size))])
        self.commit.when_durable(lambda: self.done.append(name))


@asynccontextmanager
async def committing(*, pending_bytes_max: int = 1 << 20) -> AsyncIterator[CommitRig]:
    storage, thread = FaultyStorage(), GatedThread()
    noted: list[int] = []
    deaths: list[StorageFailed] = []
    commit = GroupCommit(
        storage,
        note_durable=noted.append,
        thread=thread,
        die=deaths.append,
        pending_bytes_max=pending_bytes_max,
    )
    built = CommitRig(commit, storage, thread, noted, deaths, [])

    async def commit_until_death() -> None:
        with suppress(StorageFailed):
            await commit.run()

    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(commit_until_death())
            yield built
            running.cancel()
    finally:
        thread.shutdown()


@pytest.mark.real_loop
async def test_waiters_are_called_only_after_the_sync_and_its_watermark() -> None:
    async with committing() as rig:
        rig.thread.open = False
        rig.add(0, "a")
        await wait_until(lambda: rig.thread.held)
        assert rig.storage.entry(1, 0) is not None  # readers see the entry at once
        assert (rig.done, rig.noted) == ([], [])
        rig.thread.release()
        await wait_until(lambda: rig.done == ["a"])
        assert rig.noted == [1]
        assert rig.storage.unsynced == 0


@pytest.mark.real_loop
async def test_writes_during_a_sync_form_one_group() -> None:
    async with committing() as rig:
        rig.thread.open = False
        rig.add(0, "a")
        await wait_until(lambda: rig.thread.held)
        for entry in range(1, 100):
            rig.add(entry, "b")
        await settle()
        assert rig.storage.syncs == 0
        rig.thread.release()
        await wait_until(lambda: rig.done == ["a"])
        await wait_until(lambda: rig.thread.held)
        rig.thread.release()
        await wait_until(lambda: len(rig.done) == 100)
        assert rig.storage.syncs == 2
        assert rig.noted == [1, 100]


@pytest.mark.real_loop
async def test_a_sync_covers_only_what_was_written_before_it_began() -> None:
    """A write must not be acknowledged by a sync that had begun before the write."""

    async with committing() as rig:
        rig.thread.open = False
        rig.add(0, "a")
        await wait_until(lambda: rig.thread.held)
        rig.add(1, "b")
        rig.thread.release()
        await wait_until(lambda: rig.done == ["a"])
        await settle()
        assert rig.done == ["a"]
        assert rig.noted == [1]


@pytest.mark.real_loop
async def test_a_wait_without_a_write_still_waits_for_a_sync() -> None:
    async with committing() as rig:
        await rig.commit.wait_durable()
        assert rig.storage.syncs == 1


@pytest.mark.real_loop
async def test_a_large_write_goes_in_batches_and_in_order() -> None:
    async with committing() as rig:
        puts = [(entry_key(1, entry), bytes(100_000)) for entry in range(7)]
        puts.insert(4, (entry_key(2, 0), bytes(BATCH_BYTES_MAX * 3)))
        rig.commit.write(puts)
        assert [put for batch in rig.storage.batches for put in batch] == puts
        assert [len(batch) for batch in rig.storage.batches] == [3, 2, 3]
        sizes = [sum(len(k) + len(v) for k, v in batch) for batch in rig.storage.batches]
        assert rig.commit.pending_bytes == sum(sizes)
        await rig.commit.wait_durable()
        assert rig.commit.pending_bytes == 0


@pytest.mark.real_loop
async def test_writers_wait_for_room_while_too_many_bytes_are_not_synced() -> None:
    async with committing(pending_bytes_max=1000) as rig:
        rig.thread.open = False
        rig.add(0, "a", size=600)
        await rig.commit.wait_room()
        await wait_until(lambda: rig.thread.held)
        rig.add(1, "b", size=600)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(rig.commit.wait_room())
            await settle()
            assert not waiting.done()
            rig.thread.release()  # the first group; the second is begun
        assert rig.commit.pending_bytes < 1000


@pytest.mark.real_loop
async def test_a_failed_sync_acknowledges_nothing_and_ends_the_commit() -> None:
    async with committing() as rig:
        rig.thread.open = False
        rig.add(0, "a")
        await wait_until(lambda: rig.thread.held)
        rig.add(1, "b")
        rig.storage.failing["sync"] = FAILURE
        rig.thread.release()
        await wait_until(lambda: rig.deaths)
        rig.storage.failing.clear()  # a second sync would succeed: it must not be tried
        rig.thread.open = True
        await settle()
        assert rig.deaths == [FAILURE]
        assert (rig.done, rig.noted, rig.storage.syncs) == ([], [], 0)
        with pytest.raises(StorageFailed):
            rig.commit.write([(entry_key(1, 2), b"v")])
        with pytest.raises(StorageFailed):
            await rig.commit.wait_durable()
        with pytest.raises(StorageFailed):
            await rig.commit.wait_room()


@pytest.mark.real_loop
async def test_a_failed_write_ends_the_commit() -> None:
    async with committing() as rig:
        rig.storage.failing["write"] = StorageFailed("write", "No space left on device")
        with pytest.raises(StorageFailed, match="No space left"):
            rig.add(0, "a")
        rig.storage.failing.clear()
        with pytest.raises(StorageFailed, match="No space left"):
            rig.add(1, "b")
        await settle()
        assert len(rig.deaths) == 1
        assert rig.done == []


@pytest.mark.real_loop
async def test_a_watermark_that_cannot_be_written_is_a_failed_sync() -> None:
    def refuse(_: int) -> None:
        raise StorageFailed("write the watermark", "Input/output error")

    deaths: list[StorageFailed] = []
    done: list[int] = []
    thread = GatedThread()
    commit = GroupCommit(
        FaultyStorage(),
        note_durable=refuse,
        thread=thread,
        die=deaths.append,
        pending_bytes_max=1000,
    )
    commit.write([(entry_key(1, 0), b"v")])
    commit.when_durable(lambda: done.append(1))
    with pytest.raises(StorageFailed, match="watermark"):
        await commit.run()
    assert len(deaths) == 1
    assert done == []
    thread.shutdown()


class BusyStorage(FaultyStorage):
    """A storage whose background work has the size that a test sets."""

    busy = 0.0
    asked = 0

    def pressure(self) -> float:
        self.asked += 1
        return self.busy


async def test_writers_wait_while_the_store_does_not_keep_up_and_at_last_are_refused() -> None:
    async def test(bookie: Bookie) -> None:
        assert isinstance(bookie.storage, BusyStorage)
        commit, loop = bookie.commit, asyncio.get_running_loop()
        writer = await bookie.connect()
        await commit.wait_room()
        bookie.storage.busy = 1.0
        assert await writer.add(add(1, 0)) == [BookieCode.OK]
        begun_s = loop.time()
        await writer.send(add(1, 1))  # the service had begun to receive this add
        await writer.send(add(1, 2))
        await writer.send(add(1, 3))
        codes = [code for _, _, code in await writer.acks(3)]
        assert codes == [BookieCode.OK, BookieCode.OVERLOADED, BookieCode.OVERLOADED]
        assert HELD_S_MAX <= loop.time() - begun_s < HELD_S_MAX + 1
        assert bookie.storage.entry(1, 2) is None
        bookie.storage.busy = 0.9
        await asyncio.sleep(2 * PRESSURE_LOOK_S)
        assert await writer.add(add(1, 2)) == [BookieCode.OK]
        bookie.storage.busy = 1.0
        await asyncio.sleep(PRESSURE_AGE_S)
        assert await writer.add(add(1, 3)) == [BookieCode.OK]
        begun_s = loop.time()
        loop.call_later(1.0, setattr, bookie.storage, "busy", 0.0)
        await writer.send(add(1, 4))
        await writer.send(add(1, 5))
        assert [code for _, _, code in await writer.acks(2)] == [BookieCode.OK] * 2
        assert 0.99 < loop.time() - begun_s < 1.2

    async with running_bookie(storage=BusyStorage(), inline=True) as bookie:
        await test(bookie)


async def test_a_store_that_keeps_up_is_not_asked_after_each_sync() -> None:
    storage = BusyStorage()
    async with running_bookie(storage=storage, inline=True) as bookie:
        writer = await bookie.connect()
        begun_s, asked = asyncio.get_running_loop().time(), storage.asked
        for entry in range(100):
            assert await writer.add(add(1, entry)) == [BookieCode.OK]
            await asyncio.sleep(PRESSURE_AGE_S / 10)
        seconds = asyncio.get_running_loop().time() - begun_s
        assert 9 <= storage.asked - asked <= 1 + seconds / PRESSURE_AGE_S
