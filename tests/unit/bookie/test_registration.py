from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support import settle, wait_until

from magnetar.bookie.registration import Registration
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_registration
from magnetar.metadata.errors import LeaseTaken
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BookieAddress, BookieId, BookieRegistration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BOOKIE = BookieId("b1")
PATH = paths.bookie_available(BOOKIE)
OURS = BookieRegistration(
    bookie=BOOKIE,
    incarnation="a" * 32,
    boot_epoch=5,
    address=BookieAddress("127.0.0.1:3181", "127.0.0.1:3182"),
    http_address="127.0.0.1:8000",
    zone="z1",
    read_only=False,
)


@asynccontextmanager
async def registered(
    store: MemoryStore, registration: BookieRegistration = OURS
) -> AsyncIterator[Registration]:
    entry = Registration(store, registration)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(entry.run())
        yield entry
        running.cancel()


async def stored(store: MemoryStore) -> BookieRegistration | None:
    found = await store.get(PATH)
    if found is None:
        return None
    assert found.ephemeral_session
    return decode_bookie_registration(found.value)


async def test_a_registration_is_stored_and_disappears_with_the_session() -> None:
    tree = MemoryTree()
    store, other = MemoryStore(tree), MemoryStore(tree)
    async with registered(store) as entry:
        await entry.wait_held()
        assert entry.held
        assert await stored(other) == OURS
    await store.close()
    assert await stored(other) is None


async def test_a_registration_is_stored_again_after_the_session_was_lost() -> None:
    tree = MemoryTree()
    store, other = MemoryStore(tree), MemoryStore(tree)
    async with registered(store) as entry:
        await entry.wait_held()
        store.expire()
        await wait_until(lambda: not entry.held)
        assert await stored(other) is None
        store.reconnect()
        await entry.wait_held()
        assert await stored(other) == OURS


async def test_a_suspended_session_does_not_count_as_lost() -> None:
    store = MemoryStore(MemoryTree())
    async with registered(store) as entry:
        await entry.wait_held()
        store.suspend()
        await settle()
        assert entry.held
        store.reconnect()
        await settle()
        assert entry.held


@pytest.mark.parametrize("former", [OURS.incarnation, "b" * 32])
async def test_the_registration_of_an_earlier_start_is_replaced(former: str) -> None:
    tree = MemoryTree()
    before, now = MemoryStore(tree), MemoryStore(tree)
    async with registered(before, replace(OURS, incarnation=former, boot_epoch=4)) as entry:
        await entry.wait_held()
    async with registered(now) as entry:
        await entry.wait_held()
        assert await stored(now) == OURS


@pytest.mark.parametrize("other", [{"incarnation": "b" * 32, "boot_epoch": 5}, {"boot_epoch": 6}])
async def test_a_registration_of_another_process_is_awaited(other: dict[str, object]) -> None:
    tree = MemoryTree()
    before, now = MemoryStore(tree), MemoryStore(tree)
    theirs = replace(OURS, **other)  # type: ignore[arg-type]
    async with registered(before, theirs) as entry:
        await entry.wait_held()
    async with registered(now) as entry:
        await settle(100)
        assert not entry.held
        assert await stored(now) == theirs
        await before.close()
        await entry.wait_held()
        assert await stored(now) == OURS


async def test_a_later_start_of_the_same_directory_ends_the_earlier_process() -> None:
    tree = MemoryTree()
    ours, theirs = MemoryStore(tree), MemoryStore(tree)

    async def both() -> None:
        async with registered(ours) as entry:
            await entry.wait_held()
            async with registered(theirs, replace(OURS, boot_epoch=6)) as later:
                await later.wait_held()
                await asyncio.sleep(10)

    with pytest.raises(ExceptionGroup) as failed:
        await both()
    assert failed.group_contains(LeaseTaken)


async def test_the_registration_says_read_only_also_after_a_lost_session() -> None:
    tree = MemoryTree()
    store, other = MemoryStore(tree), MemoryStore(tree)
    async with registered(store) as entry:
        await entry.wait_held()
        before = await other.get(PATH)
        entry.set_read_only(True)
        await until_told(other, read_only=True)
        after = await other.get(PATH)
        assert before is not None
        assert after is not None
        assert after.ephemeral_session == before.ephemeral_session
        entry.set_read_only(False)
        await until_told(other, read_only=False)
        assert entry.held


async def until_told(store: MemoryStore, *, read_only: bool) -> None:
    changed = asyncio.Event()
    store.watch(PATH, changed.set)
    async with asyncio.timeout(5):
        while (entry := await stored(store)) is None or entry.read_only is not read_only:
            await changed.wait()
            changed.clear()
