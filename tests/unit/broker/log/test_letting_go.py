"""A created ledger that is not recorded in the topic is released when its creation ends for any
reason."""

from __future__ import annotations

import asyncio

import pytest
from fakes.cluster_state import ClusterState
from fakes.topic_log import opened, opened_cursors
from support import settle, wait_until

from magnetar.broker.log.position import EARLIEST
from magnetar.metadata.memory import MemoryStore


class Silent(MemoryStore):
    """While `silent` is set, changes take effect and the store sends no reply."""

    silent = False

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        version = await super().put(path, value, expected=expected)
        if self.silent:
            await asyncio.Event().wait()
        return version


async def test_a_log_that_ends_while_its_ledger_is_recorded_releases_the_ledger() -> None:
    world = ClusterState()
    store = Silent(world.tree)
    async with opened(world, store=store, close=False) as topic:
        store.silent = True
        topic.append("a")
        await wait_until(lambda: world.ledgers.appenders != [])
        await settle()
        [appender] = world.ledgers.appenders
        assert not appender.closed
    assert appender.closed
    assert topic.failed == ["a"]


@pytest.mark.parametrize("where", ["bookies", "metadata"])
async def test_cursors_that_end_while_their_ledger_is_created_release_the_ledger(
    where: str,
) -> None:
    world = ClusterState()
    store = Silent(world.tree)
    async with opened(world, store=store, close=False) as topic:
        await topic.append_and_wait("a", "b")
        async with opened_cursors(topic.log, close=False) as cursors:
            cursor = await cursors.ensure("s", EARLIEST)
            world.ledgers.held = where == "bookies"
            store.silent = where == "metadata"
            cursor.acknowledge([topic.appended[0][1]])
            await wait_until(lambda: len(world.ledgers.appenders) == 2)
            await settle()
            appender = world.ledgers.appenders[1]
            assert not appender.closed
        assert appender.closed
