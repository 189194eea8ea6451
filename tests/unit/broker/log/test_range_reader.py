"""Reads of a log: limits, ranges, the cache, failures and searches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of, texts_of
from fakes.topic_log import SMALL, opened
from support import wait_until

from magnetar.broker.log.position import EARLIEST, Position

if TYPE_CHECKING:
    from magnetar.broker.log.entry import StoredEntry

NAMES = [f"m{number}" for number in range(23)]


@pytest.mark.parametrize("cached", [True, False])
async def test_reads_are_bounded_by_entries_and_bytes_but_return_one(cached: bool) -> None:
    world = ClusterState()
    async with opened(world) as topic:
        if cached:
            topic.log.watch(lambda: None, read_position=lambda: EARLIEST)
        await topic.append_and_wait(*NAMES)
        read = topic.log.read
        assert len(await read(EARLIEST, entries_max=7, bytes_max=1 << 20)) == 7
        size = len(entry_of("m0").data)
        for bytes_max in (1, size, 2 * size, 6 * size, 100 * size):
            entries = await read(EARLIEST, entries_max=100, bytes_max=bytes_max)
            total = sum(len(entry.data) for entry in entries)
            assert len(entries) == 1 or total <= bytes_max
            assert len(entries) >= min(bytes_max // (size + 1), len(NAMES), 1)
        assert await read(topic.log.chain.end, entries_max=5, bytes_max=100) == []
        assert (world.ledgers.reads == []) == cached


async def test_a_reader_that_catches_up_reads_ranges_from_bookies() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
        world.ledgers.reads.clear()
        entries = await topic.log.read(Position(1, 2), entries_max=100, bytes_max=1 << 20)
        assert [texts_of(entry.data)[0] for entry in entries] == NAMES[2:]
        assert world.ledgers.reads == [(1, 2, 4), (2, 0, 4), (3, 0, 4), (4, 0, 4), (5, 0, 2)]


async def test_readers_at_the_end_are_served_from_memory() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES[:10])
        assert len(topic.cache) == 0, "cached without a reader"
        place = topic.log.chain.end
        seen: list[str] = []
        wakes = 0

        def wake() -> None:
            nonlocal wakes
            wakes += 1

        unwatch = topic.log.watch(wake, read_position=lambda: place)
        world.ledgers.reads.clear()
        for name in NAMES[10:]:
            await topic.append_and_wait(name)
            for entry in await topic.log.read(place, entries_max=100, bytes_max=1 << 20):
                seen += texts_of(entry.data)
                place = topic.log.chain.next_position(entry.position)
        assert seen == NAMES[10:]
        assert wakes == 13
        assert world.ledgers.reads == []
        unwatch()
        cached = len(topic.cache)
        await topic.append_and_wait("more")
        assert len(topic.cache) == cached
        assert wakes == 13
        assert await topic.contents() == [*NAMES, "more"], "cache and ledgers mixed"


async def test_a_reader_far_behind_does_not_fill_the_cache() -> None:
    world = ClusterState()
    async with opened(world, config=replace(SMALL, ledger_entries_max=100_000)) as topic:
        for _ in range(1002):
            topic.append("x")
        await wait_until(lambda: len(topic.appended) == 1002)
        topic.log.watch(lambda: None, read_position=lambda: Position(1, 0))
        await topic.append_and_wait("y")
        assert len(topic.cache) == 0


async def test_entries_before_a_failure_are_returned_and_the_next_read_fails() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
        world.ledgers.unreadable.add((2, 1))
        entries = await topic.log.read(EARLIEST, entries_max=100, bytes_max=1 << 20)
        assert [texts_of(entry.data)[0] for entry in entries] == NAMES[:6]
        place = topic.log.chain.next_position(entries[-1].position)
        with pytest.raises(Exception, match="entry 2:1 cannot be read") as caught:
            await topic.log.read(place, entries_max=100, bytes_max=1 << 20)
        assert caught.value.definite is False
        world.ledgers.unreadable.clear()
        assert await topic.contents(place) == NAMES[6:]


async def test_search_finds_the_first_entry_past_a_time() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        for number, name in enumerate(NAMES):
            topic.append_view(entry_of(name, publish_time_ms=100 + 10 * number), name)
        await wait_until(lambda: len(topic.appended) == len(NAMES))
        for time_ms in (0, 100, 101, 155, 320, 321, 9999):
            found = await topic.log.search(
                lambda entry, limit=time_ms: entry.view.publish_time_ms >= limit
            )
            late = [p for n, (_, p) in enumerate(topic.appended) if 100 + 10 * n >= time_ms]
            assert found == (late[0] if late else topic.log.chain.end)


async def test_an_unused_log_reads_nothing() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        assert await topic.contents() == []
        assert topic.log.confirmed == EARLIEST
        assert topic.log.last_index == -1
        assert await topic.log.index_at(topic.log.confirmed) == -1


async def test_reads_continue_while_the_ledger_is_sealed_and_after_the_log_has_ended() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES[:5])
        await topic.log.close()
        assert await topic.contents() == NAMES[:5]
    async with opened(world, close=False) as topic:
        await topic.append_and_wait("x")
        async with opened(world):
            topic.append("zombie")
            await wait_until(lambda: topic.error is not None)
            assert await topic.contents() == [*NAMES[:5], "x"]


@pytest.mark.parametrize("dropped", [1, 2])
async def test_a_search_during_which_ledgers_are_trimmed_finds_the_entry(dropped: int) -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
        calls = 0

        def is_past(entry: StoredEntry) -> bool:
            nonlocal calls
            calls += 1
            if calls == 2:
                topic.log.chain.drop_head(dropped)
            return int(texts_of(entry.data)[0][1:]) >= 15  # ledgers have five entries

        assert await topic.log.search(is_past) == Position(4, 0)
