"""Deleting a subscription when the reply of the metadata store is lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.topic_log import TOPIC, TopicLog, opened, opened_cursors
from support import wait_until

from magnetar.broker.errors import LogFenced, LogUnavailable
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.log.position import EARLIEST, LATEST
from magnetar.metadata.codec import decode_topic
from magnetar.metadata.errors import OutcomeUnknown, Unavailable
from magnetar.metadata.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.broker.cursor.cursor import Cursor
    from magnetar.broker.cursor.cursors import Cursors


class CutOff(MemoryStore):
    """A store. While `cut` is set, changes take effect and their replies are lost. While `early` is
    set, no change is sent."""

    cut = early = False

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        if self.early:
            raise Unavailable("cut off")
        version = await super().put(path, value, expected=expected)
        if self.cut:
            raise OutcomeUnknown(path)
        return version

    async def sync(self, path: str) -> None:
        if self.cut:
            raise Unavailable("cut off")
        await super().sync(path)


@asynccontextmanager
async def subscribed(
    world: ClusterState, store: CutOff
) -> AsyncIterator[tuple[TopicLog, Cursors, Cursor]]:
    """A topic of three entries with a subscription "s" that starts before them."""
    async with (
        opened(world, store=store, close=False) as topic,
        opened_cursors(topic.log, close=False) as cursors,
    ):
        await topic.append_and_wait("a", "b", "c")
        yield topic, cursors, await cursors.ensure("s", EARLIEST)


async def test_delete_with_unknown_outcome_refuses_later_acknowledgements() -> None:
    """The record may be deleted: the next owner would not know a later acknowledgement."""

    world = ClusterState()
    store = CutOff(world.tree)
    receipts: list[object] = []
    async with subscribed(world, store) as (topic, cursors, cursor):
        store.cut = True
        with pytest.raises(LogUnavailable):
            await cursors.delete("s")
        store.cut = False
        stored = await store.get(topic_path(TOPIC))
        assert stored is not None
        assert not decode_topic(stored.value).subscriptions
        cursor.acknowledge([position for _, position in topic.appended[:5]], receipts.append)
        await wait_until(lambda: bool(receipts))
        assert isinstance(receipts[0], LogFenced)
        with pytest.raises(LogFenced):
            await cursors.ensure("s", LATEST)


async def test_delete_that_definitely_failed_changes_nothing() -> None:
    world = ClusterState()
    store = CutOff(world.tree)
    receipts: list[object] = []
    async with subscribed(world, store) as (topic, cursors, cursor):
        store.early = True
        with pytest.raises(LogUnavailable):
            await cursors.delete("s")
        store.early = False
        cursor.acknowledge([position for _, position in topic.appended[:5]], receipts.append)
        await wait_until(lambda: bool(receipts))
        assert receipts == [None]
        assert await cursors.ensure("s", LATEST) is cursor


async def test_pending_reset_does_not_reach_a_recreated_subscription() -> None:
    """The new subscription would start at the target of the reset and skip the entries before."""

    world = ClusterState()
    store = CutOff(world.tree)
    async with subscribed(world, store) as (topic, cursors, cursor):
        store.early = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.025):  # the journal tries again every 0.05 s
                await cursor.reset(LATEST)
        store.early = False
        await cursors.delete("s")
        again = await cursors.ensure("s", EARLIEST)
        await again.flush()
        other = await cursors.ensure("other", EARLIEST)
        await other.reset(LATEST)  # this reset waits for the earlier reset
        assert again.backlog_entries == 3
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        restored = cursors.get("s")
        assert restored is not None
        assert restored.backlog_entries == 3
