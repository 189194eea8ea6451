"""Failures that kazoo does not survive or report, and that the store handles."""

from __future__ import annotations

import asyncio
import itertools
import struct
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from fakes.zookeeper_proxy import proxied
from support import wait_until

from magnetar.metadata.errors import Unavailable
from magnetar.metadata.store import ABSENT, SessionState, Versioned
from magnetar.metadata.zookeeper import ZooKeeperStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.zookeeper_server import ZooKeeperEnsemble

pytestmark = [
    pytest.mark.zookeeper,
    pytest.mark.usefixtures("zookeeper"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.real_loop,
]

_numbers = itertools.count()


def fresh() -> str:
    return f"/c{next(_numbers)}"


def reply(xid: int, error: int) -> bytes:
    """The bytes of a reply that consists of a header only."""
    return struct.pack(">iiqi", 16, xid, 1, error)


async def test_a_watch_whose_arming_gets_no_answer_is_armed_again(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    """An error code that kazoo does not know ends kazoo's thread. The request gets no answer."""

    path = fresh()
    async with proxied(zookeeper) as proxy:
        store = await ZooKeeperStore.connect(proxy.address, session_timeout_s=4.0)
        called = asyncio.Event()
        proxy.garbage = reply(store._client._connection._xid + 1, -999)
        store.watch(path, called.set)
        await wait_until(lambda: store.session_state is SessionState.LOST)
        await wait_until(lambda: store.session_state is SessionState.CONNECTED)
        await asyncio.wait_for(called.wait(), 30)
        called.clear()
        await store.put(path, b"", expected=ABSENT)
        await asyncio.wait_for(called.wait(), 30)
        await store.close()


async def test_a_path_that_is_watched_again_and_again_leaves_one_callback_with_kazoo(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    async with proxied(zookeeper) as proxy:
        store = await ZooKeeperStore.connect(proxy.address)
        path, called = fresh(), asyncio.Event()
        full, client = store._full(path), store._client
        await store.put(path, b"", expected=ABSENT)

        def kept() -> tuple[int, int]:
            return len(client._data_watchers[full]), len(client._child_watchers[full])

        for _ in range(5):
            unwatch = store.watch(path, called.set)
            await asyncio.wait_for(called.wait(), 30)
            called.clear()
            unwatch()
        store.watch(path, called.set)
        await asyncio.wait_for(called.wait(), 30)
        await store.get(path)  # kazoo adds a callback after it has passed on the answer
        assert kept() == (1, 1)
        proxy.cut()
        await wait_until(lambda: store.session_state is not SessionState.CONNECTED)
        called.clear()
        await asyncio.wait_for(called.wait(), 30)
        await wait_until(lambda: kept() == (1, 1))
        for change in (path, f"{path}/child"):
            called.clear()
            await store.put(change, b"x", expected=0 if change == path else ABSENT)
            await asyncio.wait_for(called.wait(), 30)
            await wait_until(lambda: kept() == (1, 1))
        await store.close()


async def test_many_watches_are_armed_again_in_several_steps_of_the_loop(
    zookeeper: ZooKeeperEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand in one step would stop the loop for two seconds."""

    async with proxied(zookeeper) as proxy:
        store = await ZooKeeperStore.connect(proxy.address)
        folder, called = fresh(), set[int]()
        for number in range(1_000):
            store.watch(f"{folder}/{number}", partial(called.add, number))
        await wait_until(lambda: len(called) == 1_000)
        called.clear()
        loop, send, step = asyncio.get_running_loop(), store._send, 0
        sent: Counter[int] = Counter()

        def tick() -> None:
            nonlocal step, ticking
            step += 1
            ticking = loop.call_soon(tick)

        def counting_send(request: Callable[[], Any]) -> asyncio.Future[Any]:
            sent[step] += 1
            return send(request)

        monkeypatch.setattr(store, "_send", counting_send)
        ticking = loop.call_soon(tick)
        proxy.cut()
        await wait_until(lambda: store.session_state is not SessionState.CONNECTED)
        await wait_until(lambda: len(called) == 1_000)
        ticking.cancel()
        assert sum(sent.values()) >= 2_000  # more if the new connection is lost, too
        assert max(sent.values()) <= 200
        await store.close()


async def test_a_failed_restart_of_kazoo_is_repeated(
    zookeeper: ZooKeeperEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(zookeeper) as proxy:
        store = await ZooKeeperStore.connect(proxy.address)
        failures = iter([OSError("no descriptors"), RuntimeError("no threads")])
        start = store._client.start_async

        def start_async() -> object:
            error = next(failures, None)
            if error is not None:
                raise error
            return start()

        monkeypatch.setattr(store._client, "start_async", start_async)
        own = threading.Thread.start
        refused = iter([RuntimeError("can't start new thread")])

        def start_thread(thread: threading.Thread) -> None:
            error = next(refused, None) if thread.name == "zookeeper" else None
            if error is not None:
                raise error
            own(thread)

        monkeypatch.setattr(threading.Thread, "start", start_thread)
        proxy.garbage = reply(store._client._connection._xid + 1, -999)
        states: list[SessionState] = []
        store.watch_session(states.append)
        asyncio.get_running_loop().create_task(store.sync("/")).add_done_callback(
            lambda done: done.exception()
        )
        await wait_until(lambda: SessionState.CONNECTED in states)
        assert next(failures, None) is None
        assert next(refused, None) is None
        await store.sync("/")
        await store.close()


async def test_an_unexpected_error_of_a_start_is_reported_and_the_start_repeated(
    zookeeper: ZooKeeperEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(zookeeper) as proxy:
        store = await ZooKeeperStore.connect(proxy.address)
        failures = iter([ValueError("no such option")])
        start = store._client.start_async

        def start_async() -> object:
            error = next(failures, None)
            if error is not None:
                raise error
            return start()

        monkeypatch.setattr(store._client, "start_async", start_async)
        loop = asyncio.get_running_loop()
        reported: list[object] = []
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        proxy.garbage = reply(store._client._connection._xid + 1, -999)
        states: list[SessionState] = []
        store.watch_session(states.append)
        loop.create_task(store.sync("/")).add_done_callback(lambda done: done.exception())
        await wait_until(lambda: SessionState.CONNECTED in states)
        assert [str(error) for error in reported] == ["no such option"]
        await store.close()


@pytest.mark.parametrize("chroot", ["/flat", "/very/deep"])
@pytest.mark.parametrize("replies", [2, 3])
async def test_creating_the_root_is_repeated_after_the_connection_breaks(
    chroot: str, replies: int, zookeeper: ZooKeeperEnsemble
) -> None:
    root = f"{fresh()}{chroot}"
    async with proxied(zookeeper) as proxy:
        proxy.cut_after = replies  # the first reply opens the session
        store = await ZooKeeperStore.connect(proxy.address, chroot=root)
        assert proxy.cut_after == 0
        assert await store.get("/") == Versioned(b"", 0)
        await store.close()


async def test_a_refused_root_is_reported_at_once(zookeeper: ZooKeeperEnsemble) -> None:
    with pytest.raises(Unavailable, match="NoAuth"):
        await ZooKeeperStore.connect(zookeeper.hosts, chroot="/zookeeper/config/magnetar")


async def test_the_next_change_creates_a_deleted_root_again(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    root = fresh()
    store = await ZooKeeperStore.connect(zookeeper.hosts, chroot=root)
    top = await ZooKeeperStore.connect(zookeeper.hosts, chroot="/")
    stored = await top.get(root)
    assert stored is not None
    await top.delete(root, expected=stored.version)
    await store.sync("/")
    assert await store.get("/a") is None
    await store.put("/a", b"", expected=ABSENT)
    assert await top.children(root) == ["a"]
    await store.close()
    await top.close()
