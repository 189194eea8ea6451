"""Read-ahead returns the same entries as plain reads, within the budget."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import texts_of
from fakes.topic_log import opened
from support import settle

from magnetar.broker.errors import ReadFailed
from magnetar.broker.log.budget import AHEAD_SHARE
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.topic.read_ahead import ReadAhead

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from typing import Any

    from fakes.topic_log import TopicLog

    from magnetar.broker.log.entry import StoredEntry

TEXTS = [f"m{number}" for number in range(30)]
BYTES = 10_000


class World:
    def __init__(self, it: TopicLog, cluster: ClusterState, tasks: asyncio.TaskGroup) -> None:
        self.log = it.log
        self.cluster = cluster
        self.reads = 0
        self.spawned = 0
        self._tasks = tasks
        self.ahead = ReadAhead(it.log, self._spawn, entries_min=3)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.spawned += 1
        return self._tasks.create_task(work)

    async def read(self, first: object, count: int, size: int = BYTES) -> list[StoredEntry]:
        found = await self.ahead.read(first, entries_max=count, bytes_max=size)  # type: ignore[arg-type]
        self.log.budget.check()
        return found


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    cluster = ClusterState()
    async with opened(cluster, cache_bytes=1) as it:
        await it.append_and_wait(*TEXTS)
        async with asyncio.TaskGroup() as tasks:
            made = World(it, cluster, tasks)
            yield made
            made.ahead.drop()
        assert it.log.budget.ahead == 0


def texts(entries: list[StoredEntry]) -> list[str]:
    return [text for entry in entries for text in texts_of(entry.data)]


async def test_successive_reads_are_answered_from_the_read_ahead_entries() -> None:
    async with world() as it:
        first, found = EARLIEST, []
        while entries := await it.read(first, 4):
            found += texts(entries)
            await settle()
            first = it.log.chain.next_position(entries[-1].position)
        assert found == TEXTS
        assert it.spawned >= 6
        assert it.ahead.held_bytes == 0, "nothing follows the end"


async def test_a_smaller_read_leaves_the_rest_for_the_next_one() -> None:
    async with world() as it:
        entries = await it.read(EARLIEST, 4)
        await settle()
        following = it.log.chain.next_position(entries[-1].position)
        assert texts(await it.read(following, 1)) == ["m4"]
        spawned = it.spawned
        following = it.log.chain.next_position(following)
        assert texts(await it.read(following, 9)) == ["m5", "m6", "m7"]
        assert spawned == 1


async def test_a_read_at_another_position_drops_the_read_ahead_entries() -> None:
    async with world() as it:
        await it.read(EARLIEST, 4)
        await settle()
        assert it.ahead.held_bytes > 0
        last = it.log.confirmed
        assert texts(await it.read(last, 4)) == ["m29"]
        assert it.ahead.held_bytes == it.log.budget.ahead == 0


async def test_a_failed_read_ahead_is_left_to_the_read_that_is_asked_for() -> None:
    async with world() as it:
        entries = await it.read(EARLIEST, 5)
        await settle()
        following = it.log.chain.next_position(entries[-1].position)
        entries = await it.read(following, 5)
        following = it.log.chain.next_position(entries[-1].position)
        it.ahead.drop()
        it.cluster.ledgers.unreadable.add((following.ledger, following.entry))
        await it.read(entries[0].position, 5)
        await settle()
        assert it.ahead.held_bytes == 0
        with pytest.raises(ReadFailed):
            await it.read(following, 5)
        it.cluster.ledgers.unreadable.clear()
        assert texts(await it.read(following, 1)) == ["m10"]


async def test_read_ahead_stays_within_its_share_of_the_budget() -> None:
    async with world() as it:
        budget = it.log.budget
        share = budget.bytes_max // AHEAD_SHARE
        budget.hold_ahead(share - BYTES + 1)
        await it.read(EARLIEST, 4)
        assert it.spawned == 0
        budget.hold_ahead(-1)
        await it.read(EARLIEST, 4)
        assert it.spawned == 1
        assert budget.ahead == share
        it.ahead.drop()
        budget.hold_ahead(BYTES - share)
        budget.hold(budget.bytes_max // 2)  # producers need it
        await it.read(EARLIEST, 4)
        assert it.spawned == 1
        budget.hold(-budget.bytes_max // 2)


@pytest.mark.parametrize("seed", range(20))
async def test_random_reads_return_the_same_entries_as_plain_reads(seed: int) -> None:
    chance = random.Random(seed)
    async with world() as it:
        first = EARLIEST
        for _ in range(40):
            count, size = chance.randint(1, 8), chance.choice([1, 100, 300, BYTES])
            plain = await it.log.read(first, entries_max=count, bytes_max=size)
            entries = await it.read(first, count, size)
            if entries and plain:
                assert entries[0].position == plain[0].position
                assert texts(entries) == texts(plain)[: len(entries)]
            assert bool(entries) == bool(plain)
            if chance.random() < 0.5:
                await settle()
            if not entries or chance.random() < 0.2:
                first = it.log.chain.at_rank(chance.randint(1, it.log.chain.entry_count))
            else:
                first = it.log.chain.next_position(entries[-1].position)


async def test_an_entry_that_is_larger_than_its_reservation_is_kept_only_if_there_is_room() -> None:
    async with world() as it:
        budget = it.log.budget
        share = budget.bytes_max // AHEAD_SHARE
        budget.hold_ahead(share - 1)
        entries = await it.read(EARLIEST, 4, size=1)
        await settle()
        assert it.spawned == 1
        assert (it.ahead.held_bytes, budget.ahead) == (0, share - 1)
        following = it.log.chain.next_position(entries[-1].position)
        assert texts(await it.read(following, 4, size=1)) == ["m1"]
        it.ahead.drop()
        budget.hold_ahead(1 - share)
