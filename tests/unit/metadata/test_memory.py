"""The faults of the memory store: lost replies, suspension, expiry, lag."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.metadata.errors import (
    BadVersion,
    NodeExists,
    OutcomeUnknown,
    SessionLost,
    Unavailable,
)
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.store import ABSENT, SessionState, Versioned


async def test_each_fault_applies_or_drops_the_change_and_raises_its_error() -> None:
    tree = MemoryTree()
    fault: Fault | None = None
    store = MemoryStore(tree, faults=lambda operation, path: fault)
    for fault, error, applied in [  # noqa: B007 - read by the store
        (Fault.NOT_SENT, Unavailable, False),
        (Fault.REQUEST_LOST, OutcomeUnknown, False),
        (Fault.REPLY_LOST, OutcomeUnknown, True),
    ]:
        path = f"/{applied}{error.__name__}"
        with pytest.raises(error):
            await store.put(path, b"", expected=ABSENT)
        assert (tree.tree.get(path) is not None) is applied


async def test_a_suspended_session_is_not_lost() -> None:
    tree = MemoryTree()
    store, other = MemoryStore(tree), MemoryStore(tree)
    states: list[SessionState] = []
    calls: list[str] = []
    store.watch_session(states.append)
    store.watch("/a", lambda: calls.append("called"))
    await store.create_ephemeral("/a", b"")
    session = store.session_id
    await asyncio.sleep(0)
    calls.clear()

    store.suspend()
    with pytest.raises(Unavailable):
        await store.get("/a")
    await other.put("/a", b"1", expected=0)
    await asyncio.sleep(0)
    assert calls == []
    store.reconnect()
    await asyncio.sleep(0)
    assert calls == ["called"]
    assert store.session_id == session
    assert await store.get("/a") == Versioned(b"1", 1, session)
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]


async def test_a_lost_session_loses_its_ephemerals_and_is_replaced() -> None:
    tree = MemoryTree()
    store, other = MemoryStore(tree), MemoryStore(tree)
    states: list[SessionState] = []
    gone = asyncio.Event()
    store.watch_session(states.append)
    await store.create_ephemeral("/a", b"")
    await store.put("/stays", b"", expected=ABSENT)
    other.watch("/a", gone.set)
    old = store.session_id
    store.expire()
    await gone.wait()
    assert await other.get("/a") is None
    assert await other.get("/stays") is not None
    with pytest.raises(Unavailable):
        await store.get("/a")
    store.reconnect()
    assert store.session_id != old
    assert states == [SessionState.LOST, SessionState.CONNECTED]
    assert await store.create_ephemeral("/a", b"") == 0


async def test_a_client_without_a_connection_learns_of_its_expiry_when_it_reconnects() -> None:
    tree = MemoryTree()
    store, other = MemoryStore(tree), MemoryStore(tree)
    states: list[SessionState] = []
    store.watch_session(states.append)
    await store.create_ephemeral("/a", b"")
    store.suspend()
    store.expire()
    assert store.session_state is SessionState.SUSPENDED
    assert await other.get("/a") is None
    store.reconnect()
    assert states == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]


async def test_requests_under_way_fail_with_their_connection() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree, delay_s=lambda: 1.0)

    async def put(path: str) -> None:
        await store.put(path, b"", expected=ABSENT)

    loop = asyncio.get_running_loop()
    first = loop.create_task(put("/a"))
    await asyncio.sleep(0.5)
    store.suspend()
    with pytest.raises(OutcomeUnknown) as suspended:
        await first
    assert not isinstance(suspended.value, SessionLost)
    store.reconnect()
    second = loop.create_task(put("/b"))
    await asyncio.sleep(0.5)
    session = store.session_id
    store.expire()
    with pytest.raises(SessionLost) as lost:
        await second
    assert lost.value.session_id == session
    await asyncio.sleep(5)
    assert tree.tree.children("/") == []


async def test_a_cancelled_caller_does_not_cancel_its_request() -> None:
    store = MemoryStore(delay_s=lambda: 1.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await store.put("/a", b"", expected=ABSENT)
    assert await store.get("/a") == Versioned(b"", 0)


async def test_requests_with_any_delays_are_served_in_order() -> None:
    delays = iter([3.0, 1.0, 2.0])
    store = MemoryStore(delay_s=lambda: next(delays, 0.0))
    async with asyncio.TaskGroup() as group:
        for version in range(3):
            expected = version - 1
            group.create_task(store.put("/a", str(version).encode(), expected=expected))
    assert await store.get("/a") == Versioned(b"2", 2)


async def test_a_lost_reply_shows_nothing_to_a_session_whose_follower_lags() -> None:
    store = MemoryStore(
        faults=lambda operation, _: None if operation == "get" else Fault.REPLY_LOST
    )
    store.fall_behind()
    for request in (store.put("/a", b"", expected=ABSENT), store.sync("/a")):
        with pytest.raises(OutcomeUnknown):
            await request
        assert await store.get("/a") is None
    store.catch_up()
    assert await store.get("/a") == Versioned(b"", 0)


async def test_a_follower_that_lags_returns_old_values_until_a_sync() -> None:
    tree = MemoryTree()
    store, other = MemoryStore(tree), MemoryStore(tree)
    calls: list[str] = []
    await other.put("/a", b"0", expected=ABSENT)
    store.watch("/a", lambda: calls.append("called"))

    store.fall_behind()
    await other.put("/a", b"1", expected=0)
    await other.put("/b", b"", expected=ABSENT)
    assert await store.get("/a") == Versioned(b"0", 0)
    assert await store.children("/") == ["a"]
    assert calls == []
    await store.sync("/a")
    assert await store.get("/a") == Versioned(b"1", 1)
    await asyncio.sleep(0)
    assert calls == ["called"]

    store.fall_behind()
    await other.put("/b", b"1", expected=0)
    store.suspend()
    store.reconnect()
    assert await store.get("/b") == Versioned(b"1", 1)

    store.fall_behind()
    await other.put("/a", b"2", expected=1)
    with pytest.raises(BadVersion):
        await store.put("/a", b"mine", expected=1)
    assert await store.get("/a") == Versioned(b"2", 2)

    store.fall_behind()
    await other.put("/c", b"", expected=ABSENT)
    assert await store.get("/c") is None
    with pytest.raises(NodeExists):
        await store.put("/c", b"", expected=ABSENT)
    assert await store.get("/c") is not None
