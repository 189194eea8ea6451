"""A broker sends beats to all listed bookies, and asks them about other brokers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

from fakes.ledger_bookies import BookieCluster, FakeBookie, bookie_cluster
from support import wait_until

from magnetar.bookie.contract import BEAT_S, LastHeard
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.bookie.ledger.presence import ANSWER_S, ASK_S, Presence
from magnetar.metadata.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ME, OTHER = ("a", "1" * 32), ("b", "2" * 32)
LAST = LastHeard(heard_s=1.0, listening_s=9.0)


@asynccontextmanager
async def present(world: BookieCluster) -> AsyncIterator[Presence]:
    directory, random = BookieRegistry(MemoryStore(world.tree)), Random(1)
    pool = PeerPool(
        directory,
        lambda member, _: world.peer(member),
        client_name="test",
        random=random,
        connect_timeout_s=1.0,
    )
    presence = Presence(directory, pool, broker=ME[0], incarnation=ME[1], random=random)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(it.run()) for it in (directory, pool, presence)]
        await directory.wait_ready()
        yield presence
        for task in tasks:
            task.cancel()


async def beats_in(bookie: FakeBookie, seconds: float) -> int:
    before = len(bookie.heard)
    await asyncio.sleep(seconds)
    return len(bookie.heard) - before


async def test_every_listed_bookie_gets_regular_beats() -> None:
    async with bookie_cluster(3) as world, present(world):
        await asyncio.sleep(1.0)
        for bookie in world.bookies:
            assert await beats_in(bookie, 10 * BEAT_S) in (9, 10, 11)
            assert set(bookie.heard) == {ME}


async def test_a_bookie_that_is_listed_later_gets_beats() -> None:
    async with bookie_cluster(1) as world, present(world):
        later = await world.add_bookie()
        await wait_until(lambda: later.heard)


async def test_a_bookie_that_returns_gets_beats_again() -> None:
    async with bookie_cluster(2) as world, present(world):
        bookie = world.bookies[0]
        await wait_until(lambda: bookie.heard)
        bookie.kill()
        assert await beats_in(bookie, 5.0) == 0
        assert await beats_in(world.bookies[1], 5.0) > 5
        bookie.restart()
        assert await beats_in(bookie, 5.0) > 5


async def test_a_connection_without_answers_is_replaced() -> None:
    async with bookie_cluster(1) as world, present(world):
        bookie = world.bookies[0]
        await wait_until(lambda: bookie.heard)
        connections = len(bookie._streams)
        bookie.may_ack.clear()
        await asyncio.sleep(BEAT_S + ANSWER_S + 1.0)
        assert len(bookie._streams) > connections
        bookie.may_ack.set()
        assert await beats_in(bookie, 10 * BEAT_S) > 5


async def test_presence_collects_the_answers_of_all_bookies_about_a_broker() -> None:
    async with bookie_cluster(3) as world, present(world) as presence:
        world.bookies[0].last = world.bookies[1].last = LAST
        assert await presence.ask(*OTHER) == [LAST, LAST, None]


async def test_unreachable_bookies_give_no_answer_and_delay_the_others_little() -> None:
    async with bookie_cluster(3) as world, present(world) as presence:
        for bookie in world.bookies:
            bookie.last = LAST
        world.bookies[0].kill()
        world.bookies[1].may_read.clear()
        began = asyncio.get_running_loop().time()
        assert await presence.ask(*OTHER) == [None, None, LAST]
        assert asyncio.get_running_loop().time() - began <= ASK_S + 0.01
