"""Other code cancels a future that a topic's task awaits. The task must not end silently."""

from __future__ import annotations

import asyncio

import pytest
from fakes.cluster_state import ClusterState
from fakes.topics import opened_topic
from support import settle, wait_until

from magnetar.broker.log.position import EARLIEST
from magnetar.broker.topic.contract import CloseReason, SubscriptionType


@pytest.mark.parametrize("work", ["log", "cursors"])
async def test_the_topic_fails_and_all_clients_reconnect(work: str) -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        [position] = await it.publish("a")
        consumer, session = await it.subscribe()
        if work == "log":
            world.ledgers.strays.add("close")
            it.topic.log._retire()
        else:
            world.ledgers.strays.add("create")
            consumer.acknowledge([position])
        await wait_until(lambda: it.failures != [], what="a failed topic")
        assert session.reason is CloseReason.TOPIC_FAILED


@pytest.mark.parametrize("again", [False, True])
async def test_a_cancelled_read_is_repeated(again: bool) -> None:
    world = ClusterState()
    async with opened_topic(world, cache_bytes=0) as it:
        await it.publish("a", "b")
        consumer, session = await it.subscribe(kind=SubscriptionType.SHARED)
        if again:  # the delivered entries are read again
            await wait_until(lambda: session.texts == ["a", "b"])
        world.ledgers.strays.add("read")
        if again:
            consumer.redeliver(None)
        expected = ["a", "b"] * (1 + again)
        await wait_until(lambda: session.texts == expected, what="the entries")
        assert world.ledgers.strays == set()
        assert it.failures == []


async def test_a_topic_that_closes_cancels_its_work() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish("a")
        await it.topic.close()
        await settle()
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert [name for name in names if name.startswith(("log ", "cursors "))] == []
        assert it.failures == []


async def test_an_idle_topic_has_no_task() -> None:
    before = asyncio.all_tasks()
    async with opened_topic(ClusterState()) as it:
        await it.topic.ensure_subscription("s", EARLIEST)
        await it.publish("a", "b")
        await settle()
        assert asyncio.all_tasks() == before
