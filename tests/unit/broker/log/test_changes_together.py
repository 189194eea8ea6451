"""Concurrent changes of a topic's record are made by few writes, in the order of the requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.gated_store import GatedStore
from fakes.topic_log import TOPIC, opened, opened_cursors
from support import settle

from magnetar.broker.errors import LogFenced, LogUnavailable, SubscriptionNotFound, TopicFull
from magnetar.broker.log.owned_record import CHANGES_MAX, METADATA_TIMEOUT_S, topic_path
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.log.record_limits import SUBSCRIPTIONS_BYTES_MAX
from magnetar.broker.log.topic_deletion import deleted
from magnetar.metadata.codec import decode_topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.log.owned_record import OwnedRecord
    from magnetar.metadata.model import TopicRecord

PUT = ("put", topic_path(TOPIC))


class Counting(GatedStore):
    puts = 0

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        self.puts += 1
        return await super().put(path, value, expected=expected)


def noting(key: str) -> Callable[[TopicRecord], TopicRecord]:
    return lambda record: replace(record, properties={**record.properties, key: "1"})


def refused(record: TopicRecord) -> TopicRecord:
    raise SubscriptionNotFound("gone")


async def keys_of(world: ClusterState) -> list[str]:
    found = await world.store().get(topic_path(TOPIC))
    assert found is not None
    return sorted(decode_topic(found.value).properties)


async def held_back(
    store: GatedStore, owned: OwnedRecord, *changes: Callable[[TopicRecord], TopicRecord]
) -> list[asyncio.Task[None]]:
    """Start these changes. The first change is being written, and the others wait."""
    store.gates[PUT] = asyncio.Event()
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(owned.change(each)) for each in changes]
    await settle()
    assert store.held == [PUT]
    return tasks


async def outcomes(tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
    await asyncio.wait(tasks)
    return [task.exception() if not task.cancelled() else None for task in tasks]


async def test_a_thousand_subscriptions_at_once_take_few_writes() -> None:
    world = ClusterState()
    store = Counting(world.tree)
    async with (
        opened(world, store=store) as topic,
        opened_cursors(topic.log) as cursors,
    ):
        before = store.puts
        async with asyncio.TaskGroup() as tasks:
            for number in range(1_000):
                tasks.create_task(cursors.ensure(f"s{number}", EARLIEST))
        assert store.puts - before <= 1_000 / CHANGES_MAX + 2
        async with asyncio.TaskGroup() as tasks:
            for number in range(1_000):
                tasks.create_task(cursors.delete(f"s{number}"))
        assert store.puts - before <= 2 * (1_000 / CHANGES_MAX + 2)
        assert topic.log.owned_record.record.subscriptions == {}


async def test_a_change_that_raises_does_not_block_the_others() -> None:
    world = ClusterState()
    store = GatedStore(world.tree)
    async with opened(world, store=store) as topic:
        changes = noting("a"), noting("b"), refused, noting("c")
        tasks = await held_back(store, topic.log.owned_record, *changes)
        store.gates[PUT].set()
        *made, refusal, last = await outcomes(tasks)
        assert made == [None, None]
        assert isinstance(refusal, SubscriptionNotFound)
        assert last is None
        assert await keys_of(world) == ["a", "b", "c"]


async def test_only_the_change_that_does_not_fit_is_refused() -> None:
    world = ClusterState()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        large = {"note": "x" * (SUBSCRIPTIONS_BYTES_MAX - 2_000)}
        await cursors.ensure("large", EARLIEST, large)
        names = [f"{number}" + "s" * 900 for number in range(4)]
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(cursors.ensure(name, EARLIEST)) for name in names]
        await asyncio.wait(tasks)
        full = [isinstance(task.exception(), TopicFull) for task in tasks]
        assert full == [False, False, True, True]
        assert cursors.names == (*names[:2], "large")


async def test_only_the_change_that_exceeds_the_store_limit_is_refused() -> None:
    world = ClusterState()
    store = GatedStore(world.tree)
    async with opened(world, store=store) as topic:

        def stuff(record: TopicRecord) -> TopicRecord:
            return replace(record, properties={**record.properties, "x": "x" * (1 << 20)})

        tasks = await held_back(store, topic.log.owned_record, noting("a"), stuff, noting("b"))
        store.gates[PUT].set()
        assert [type(it) for it in await outcomes(tasks)] == [type(None), TopicFull, type(None)]
        assert await keys_of(world) == ["a", "b"]


async def test_the_change_of_a_cancelled_caller_is_dropped() -> None:
    world = ClusterState()
    store = GatedStore(world.tree)
    async with opened(world, store=store) as topic:
        changes = [noting(key) for key in "abcd"]
        tasks = await held_back(store, topic.log.owned_record, *changes)
        tasks[2].cancel()
        await settle()
        store.gates[PUT].set()
        await outcomes(tasks)
        assert await keys_of(world) == ["a", "b", "d"]


async def test_a_write_of_a_cancelled_caller_is_made_by_the_next_caller() -> None:
    world = ClusterState()
    store = GatedStore(world.tree)
    async with opened(world, store=store) as topic:
        tasks = await held_back(store, topic.log.owned_record, noting("a"), noting("b"))
        del store.gates[PUT]
        tasks[0].cancel()
        assert await outcomes(tasks) == [None, None]
        assert "b" in await keys_of(world)
        assert topic.log.owned_record._waiting == []


async def test_changes_behind_a_deletion_are_fenced() -> None:
    world = ClusterState()
    store = GatedStore(world.tree)
    async with opened(world, store=store, close=False) as topic:
        owned = topic.log.owned_record
        tasks = await held_back(store, owned, noting("a"), deleted, noting("b"))
        store.gates[PUT].set()
        found = await outcomes(tasks)
        assert [type(it) for it in found] == [type(None), type(None), LogFenced]


async def test_without_the_store_all_waiting_changes_fail_together() -> None:
    world = ClusterState()
    store = GatedStore(world.tree)
    async with opened(world, store=store, close=False) as topic:
        loop = asyncio.get_running_loop()
        began = loop.time()
        changes = [noting(f"{number}") for number in range(10)]
        tasks = await held_back(store, topic.log.owned_record, *changes)
        found = await outcomes(tasks)
        assert {type(it) for it in found} == {LogUnavailable}
        assert loop.time() - began == pytest.approx(2 * METADATA_TIMEOUT_S)
