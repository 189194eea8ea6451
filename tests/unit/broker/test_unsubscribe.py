"""A subscription is deleted while its topic closes. The client gets the outcome and no request to
reconnect: a client that reconnects would create the subscription again."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.topic_log import TOPIC
from fakes.topics import opened_topic, publish
from support import settle, wait_until

from magnetar.broker.errors import LogError, LogFenced
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.topic.contract import CloseReason
from magnetar.metadata.codec import decode_topic
from magnetar.metadata.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.sessions import FakeConsumerSession
    from fakes.topics import TopicRig

    from magnetar.broker.topic.consumer import ConsumerHandle


Asking = asyncio.Task[LogError | None]


class Slow(MemoryStore):
    """A store. A change waits before it takes effect, or before its answer."""

    before: asyncio.Event | None = None
    after: asyncio.Event | None = None

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        if self.before is not None:
            await self.before.wait()
        version = await super().put(path, value, expected=expected)
        if self.after is not None:
            await self.after.wait()
        return version


async def outcome(handle: ConsumerHandle) -> LogError | None:
    """Unsubscribe, and return the error. None: the subscription is deleted."""
    try:
        await handle.unsubscribe()
    except LogError as error:
        return error
    return None


async def subscriptions(world: ClusterState) -> set[str]:
    found = await world.store().get(topic_path(TOPIC))
    assert found is not None
    return set(decode_topic(found.value).subscriptions)


@asynccontextmanager
async def unsubscribing(
    world: ClusterState, *, applied: bool
) -> AsyncIterator[tuple[TopicRig, FakeConsumerSession, Asking, asyncio.Event]]:
    """Open a topic. The only consumer of its subscription "s" unsubscribes. The metadata store
    answers after the event is set. The change takes effect at once if `applied`, else after the
    event."""
    store, go_on = Slow(world.tree), asyncio.Event()
    async with opened_topic(world, store=store, close=False) as it, asyncio.TaskGroup() as tasks:
        await it.publish("a")
        handle, session = await it.subscribe()
        if applied:
            store.after = go_on
        else:
            store.before = go_on
        asking = tasks.create_task(outcome(handle))
        await settle()
        assert (await subscriptions(world) == set()) == applied
        yield it, session, asking, go_on


@pytest.mark.parametrize("applied", [False, True])
async def test_unsubscribe_while_the_bundle_moves_succeeds_without_a_reconnect(
    applied: bool,
) -> None:
    world = ClusterState()
    async with (
        unsubscribing(world, applied=applied) as (it, session, asking, go_on),
        asyncio.TaskGroup() as tasks,
    ):
        closing = tasks.create_task(it.topic.close())
        await settle()
        assert session.reason is None, "the client was told to reconnect"
        assert not asking.done()
        go_on.set()
        assert await asking is None
        await closing
        assert session.reason is None
        assert await subscriptions(world) == set()


@pytest.mark.parametrize("applied", [False, True])
async def test_unsubscribe_during_a_takeover_succeeds_only_if_the_change_was_applied(
    applied: bool,
) -> None:
    world = ClusterState()
    async with (
        unsubscribing(world, applied=applied) as (it, session, asking, go_on),
        opened_topic(world) as new,
    ):
        producer, _ = await it.produce("p")
        publish(producer, entry_of("b"), first=0)  # the ledger is fenced
        await settle()
        assert session.reason is None, "the client was told to reconnect"
        assert not asking.done()
        go_on.set()
        error = await asking
        await wait_until(lambda: it.failures != [], what="a fenced log")
        if applied:
            assert error is None
            assert session.reason is None
        else:
            assert isinstance(error, LogFenced)
            assert session.reason is CloseReason.UNLOADED
        left = set() if applied else {"s"}
        assert await subscriptions(world) == set(new.topic.subscriptions) == left
