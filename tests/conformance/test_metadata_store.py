"""The contract of every MetadataStore, tested over each implementation.

The ZooKeeper stores talk to a real server. The server is started once per test session, from the
jars in pyspark's wheel. Each test gets its own folder in the tree, and two stores. The two stores
have two sessions if the implementation has sessions. An embedded store has only one client.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from support import settle, wait_until

from magnetar.metadata.embedded import EmbeddedStore
from magnetar.metadata.errors import (
    BadVersion,
    NodeExists,
    NoNode,
    NotEmpty,
    ParentIsEphemeral,
    StoreClosed,
    ValueTooLarge,
)
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.store import (
    ABSENT,
    DELETE,
    KEEP,
    VALUE_BYTES_MAX,
    MetadataStore,
    SessionState,
    Verdict,
    Versioned,
    update,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from magnetar.zookeeper_server import ZooKeeperEnsemble

    OpenClients = Callable[[], AbstractAsyncContextManager["TwoClients"]]

pytestmark = pytest.mark.real_loop

_numbers = itertools.count()


@dataclass
class TwoClients:
    """Two clients of one store, and a folder that no other test uses."""

    one: MetadataStore
    two: MetadataStore
    folder: str


@pytest.fixture(
    params=["memory", "embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_clients(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> OpenClients:
    """Opens a fresh pair of clients."""
    server: ZooKeeperEnsemble | None = None
    if kind == "zookeeper":
        server = request.getfixturevalue("zookeeper")
    return lambda: _clients(kind, tmp_path, server)


@contextlib.asynccontextmanager
async def _clients(
    kind: str, tmp_path: Path, server: ZooKeeperEnsemble | None
) -> AsyncIterator[TwoClients]:
    one: MetadataStore
    two: MetadataStore
    if kind == "memory":
        tree = MemoryTree()
        one, two = MemoryStore(tree), MemoryStore(tree)
    elif kind == "embedded":
        one = two = await EmbeddedStore.open(tmp_path / "metadata")
    else:
        from magnetar.metadata.zookeeper import ZooKeeperStore

        assert server is not None
        one = await ZooKeeperStore.connect(server.hosts)
        two = await ZooKeeperStore.connect(server.hosts)
    try:
        yield TwoClients(one, two, f"/t{next(_numbers)}")
    finally:
        await one.close()
        await two.close()


# ---- values and versions -------------------------------------------------------------------------


async def test_get_returns_the_value_that_was_put_with_its_version(
    open_clients: OpenClients,
) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        assert await clients.one.get(path) is None
        assert await clients.one.put(path, b"first", expected=ABSENT) == 0
        assert await clients.one.get(path) == Versioned(b"first", 0)
        assert await clients.one.put(path, b"second", expected=0) == 1
        assert await clients.one.put(path, b"", expected=1) == 2
        assert await clients.one.get(path) == Versioned(b"", 2)


async def test_put_creates_missing_parents_empty_and_persistent(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        await clients.one.put(f"{clients.folder}/a/b/c", b"x", expected=ABSENT)
        assert await clients.one.get(f"{clients.folder}/a") == Versioned(b"", 0)
        assert await clients.one.get(f"{clients.folder}/a/b") == Versioned(b"", 0)
        with pytest.raises(NodeExists):
            await clients.one.put(f"{clients.folder}/a", b"", expected=ABSENT)


async def test_a_put_at_another_version_changes_nothing(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        with pytest.raises(BadVersion) as absent:
            await clients.one.put(path, b"x", expected=0)
        assert (absent.value.path, absent.value.expected) == (path, 0)
        assert not isinstance(absent.value, NodeExists)
        await clients.one.put(path, b"x", expected=ABSENT)
        with pytest.raises(NodeExists) as exists:
            await clients.one.put(path, b"y", expected=ABSENT)
        assert exists.value.path == path
        for wrong in (1, 7):
            with pytest.raises(BadVersion):
                await clients.one.put(path, b"y", expected=wrong)
        assert await clients.one.get(path) == Versioned(b"x", 0)


async def test_a_delete_needs_the_right_version_and_no_children(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        with pytest.raises(NoNode):
            await clients.one.delete(path, expected=0)
        await clients.one.put(f"{path}/child", b"", expected=ABSENT)
        await clients.one.put(path, b"x", expected=0)
        with pytest.raises(BadVersion):
            await clients.one.delete(path, expected=0)
        with pytest.raises(NotEmpty):
            await clients.one.delete(path, expected=1)
        await clients.one.delete(f"{path}/child", expected=0)
        await clients.one.delete(path, expected=1)
        assert await clients.one.get(path) is None
        assert await clients.one.put(path, b"again", expected=ABSENT) == 0


async def test_one_of_many_racing_writers_wins_each_version(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/counter"
        await clients.one.put(path, b"0", expected=ABSENT)
        wins = 0

        async def race(store: MetadataStore, name: str) -> None:
            nonlocal wins
            try:
                await store.put(path, name.encode(), expected=0)
                wins += 1
            except BadVersion:
                pass

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                store = clients.one if number % 2 else clients.two
                group.create_task(race(store, str(number)))
        assert wins == 1
        stored = await clients.one.get(path)
        assert stored is not None
        assert stored.version == 1


async def test_requests_of_one_store_keep_their_order(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        await clients.one.put(path, b"", expected=ABSENT)
        async with asyncio.TaskGroup() as group:
            puts = [
                group.create_task(clients.one.put(path, str(n).encode(), expected=n))
                for n in range(50)
            ]
            last = group.create_task(clients.one.get(path))
        assert [put.result() for put in puts] == list(range(1, 51))
        assert last.result() == Versioned(b"49", 50)


async def test_requests_in_one_packet_are_applied_in_order(
    open_clients: OpenClients,
) -> None:
    async with open_clients() as clients:
        await clients.one.put(f"{clients.folder}/old", b"", expected=ABSENT)
        async with asyncio.TaskGroup() as group:
            run = group.create_task
            run(clients.one.put(f"{clients.folder}/new", b"", expected=ABSENT))
            run(clients.one.delete(f"{clients.folder}/old", expected=0))
            between = run(clients.one.children(clients.folder))
            run(clients.one.delete(f"{clients.folder}/new", expected=0))
            gone = run(clients.one.get(f"{clients.folder}/new"))
            empty = run(clients.one.children(clients.folder))
            run(clients.one.delete(clients.folder, expected=0))
            after = run(clients.one.get(clients.folder))
        assert between.result() == ["new"]
        assert gone.result() is None
        assert empty.result() == []
        assert after.result() is None


async def test_a_value_above_the_limit_is_refused_with_its_path(
    open_clients: OpenClients,
) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        largest = b"v" * VALUE_BYTES_MAX
        await clients.one.put(path, largest, expected=ABSENT)
        stored = await clients.two.get(path)
        assert stored is not None
        assert stored.value == largest
        await clients.one.put(path, largest, expected=0)
        for refused in (
            clients.one.put(path, largest + b"v", expected=1),
            clients.one.create_ephemeral(f"{path}e", largest + b"v"),
            clients.one.create_sequential(f"{path}s", largest + b"v", ephemeral=False),
        ):
            with pytest.raises(ValueTooLarge) as error:
                await refused
            assert (error.value.size, error.value.limit) == (VALUE_BYTES_MAX + 1, VALUE_BYTES_MAX)
        assert await clients.one.children(clients.folder) == ["a"]


async def test_a_name_can_be_any_printable_text(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        names = sorted(["a b", "%2F", "ä", "你好", "x" * 200, "0x00_0xff", "-", "~"])
        for name in names:
            await clients.one.put(f"{clients.folder}/{name}", name.encode(), expected=ABSENT)
        assert await clients.one.children(clients.folder) == names
        for name in names:
            assert await clients.two.get(f"{clients.folder}/{name}") == Versioned(name.encode(), 0)


# ---- children ------------------------------------------------------------------------------------


async def test_children_returns_the_names_directly_below_sorted(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        assert await clients.one.children(clients.folder) == []
        for name in ("b", "a/x/y", "a/z", "ab", "B"):
            await clients.one.put(f"{clients.folder}/{name}", b"", expected=ABSENT)
        assert await clients.one.children(clients.folder) == ["B", "a", "ab", "b"]
        assert await clients.one.children(f"{clients.folder}/a") == ["x", "z"]
        assert await clients.one.children(f"{clients.folder}/b") == []
        assert clients.folder[1:] in await clients.one.children("/")
        await clients.one.delete(f"{clients.folder}/ab", expected=0)
        assert await clients.one.children(clients.folder) == ["B", "a", "b"]


# ---- sessions ------------------------------------------------------------------------------------


async def test_get_says_whether_an_ephemeral_node_belongs_to_this_session(
    open_clients: OpenClients,
) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/up/a"
        assert clients.one.session_id != 0
        assert clients.one.session_state is SessionState.CONNECTED
        assert await clients.one.create_ephemeral(path, b"x") == 0
        assert await clients.two.get(path) == Versioned(b"x", 0, clients.one.session_id)
        with pytest.raises(NodeExists):
            await clients.two.create_ephemeral(path, b"y")
        with pytest.raises(NodeExists):
            await clients.two.put(path, b"y", expected=ABSENT)
        assert await clients.two.put(path, b"y", expected=0) == 1
        assert await clients.one.get(path) == Versioned(b"y", 1, clients.one.session_id)
        assert await clients.one.children(f"{clients.folder}/up") == ["a"]
        with pytest.raises(BadVersion):
            await clients.two.delete(path, expected=0)
        await clients.two.delete(path, expected=1)
        assert await clients.one.get(path) is None
        assert await clients.one.get(f"{clients.folder}/up") == Versioned(b"", 0)


async def test_an_ephemeral_node_has_no_children(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        await clients.one.create_ephemeral(path, b"")
        with pytest.raises(ParentIsEphemeral):
            await clients.one.put(f"{path}/b", b"", expected=ABSENT)
        with pytest.raises(ParentIsEphemeral):
            await clients.one.put(f"{path}/b/c", b"", expected=ABSENT)
        with pytest.raises(ParentIsEphemeral):
            await clients.one.create_sequential(f"{path}/b", b"", ephemeral=False)
        assert await clients.one.children(path) == []


async def test_close_ends_only_the_session_of_that_store(
    open_clients: OpenClients, kind: str
) -> None:
    if kind == "embedded":
        pytest.skip("the store that closes is the only client; see the unit tests")

    async with open_clients() as clients:
        await clients.one.put(f"{clients.folder}/stays", b"", expected=ABSENT)
        await clients.two.create_ephemeral(f"{clients.folder}/two", b"")
        await clients.one.create_ephemeral(f"{clients.folder}/one", b"")
        sequential = f"{clients.folder}/n-"
        name = await clients.one.create_sequential(sequential, b"", ephemeral=True)
        assert await clients.two.get(name) == Versioned(b"", 0, clients.one.session_id)
        gone = asyncio.Event()
        clients.two.watch(f"{clients.folder}/one", gone.set)
        await settle()
        gone.clear()
        await clients.one.close()
        async with asyncio.timeout(30):
            while await clients.two.get(f"{clients.folder}/one") is not None:
                await gone.wait()
                gone.clear()
        await clients.two.sync(clients.folder)
        assert await clients.two.children(clients.folder) == ["stays", "two"]


async def test_a_closed_store_raises_the_error_of_a_closed_store(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        states: list[SessionState] = []
        clients.one.watch_session(states.append)
        await clients.one.close()
        await clients.one.close()
        assert clients.one.session_state is SessionState.CLOSED
        assert states == [SessionState.CLOSED]
        for request in (
            clients.one.get("/a"),
            clients.one.children("/a"),
            clients.one.put("/a", b"", expected=ABSENT),
            clients.one.delete("/a", expected=0),
            clients.one.create_ephemeral("/a", b""),
            clients.one.create_sequential("/a", b"", ephemeral=False),
            clients.one.sync("/a"),
        ):
            with pytest.raises(StoreClosed):
                await request


# ---- sequences -----------------------------------------------------------------------------------


async def test_sequential_names_grow_and_are_never_reused(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        prefix = f"{clients.folder}/queue/n-"
        paths = []
        for number in range(6):
            store = clients.one if number % 2 else clients.two
            path = await store.create_sequential(prefix, b"v", ephemeral=number % 3 == 0)
            paths.append(path)
            if number == 3:
                await store.delete(path, expected=0)
        numbers = [int(path.removeprefix(prefix)) for path in paths]
        assert all(len(path) == len(prefix) + 10 for path in paths)
        assert numbers == sorted(set(numbers))
        assert await clients.one.get(paths[5]) == Versioned(b"v", 0)
        survivors = [path for index, path in enumerate(paths) if index != 3]
        assert [
            f"{clients.folder}/queue/{name}"
            for name in await clients.one.children(f"{clients.folder}/queue")
        ] == survivors


# ---- sync and watches ----------------------------------------------------------------------------


async def test_a_read_after_sync_sees_the_changes_of_other_clients(
    open_clients: OpenClients,
) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        for number in range(20):
            await clients.one.put(path, str(number).encode(), expected=number - 1)
            await clients.two.sync(path)
            assert await clients.two.get(path) == Versioned(str(number).encode(), number)
        await clients.two.sync(f"{clients.folder}/absent")


@pytest.mark.parametrize("by", ["one", "two"])
async def test_a_watch_reports_creation_change_deletion_and_children(
    open_clients: OpenClients, by: str
) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/watched"
        child = f"{path}/c"
        writer: MetadataStore = getattr(clients, by)
        called = asyncio.Event()
        seen: list[object] = []
        clients.one.watch(path, called.set)

        async def follow() -> None:
            """Read the node when the watch calls, and at no other time."""
            while True:
                await called.wait()
                called.clear()
                stored = await clients.one.get(path)
                seen.append((stored and stored.value, await clients.one.children(path)))

        changes: list[tuple[Callable[[], Awaitable[object]], object]] = [
            (lambda: writer.put(path, b"0", expected=ABSENT), (b"0", [])),
            (lambda: writer.put(path, b"1", expected=0), (b"1", [])),
            (lambda: writer.put(path, b"2", expected=1), (b"2", [])),
            (lambda: writer.create_ephemeral(child, b""), (b"2", ["c"])),
            (lambda: writer.delete(child, expected=0), (b"2", [])),
            (lambda: writer.put(child, b"", expected=ABSENT), (b"2", ["c"])),
            (lambda: writer.delete(child, expected=0), (b"2", [])),
            (lambda: writer.delete(path, expected=2), (None, [])),
        ]
        async with asyncio.TaskGroup() as group:
            follower = group.create_task(follow())
            for _ in range(2):  # the second round fails if a one-shot watch was not armed again
                for change, result in changes:
                    await _quiet(clients.one, called)
                    await change()
                    await wait_until(lambda: seen and seen[-1] == result)  # noqa: B023
            follower.cancel()


async def _quiet(store: MetadataStore, called: asyncio.Event) -> None:
    """Wait for the watch calls of earlier changes. The test then takes none of them for the call of
    the next change."""
    for _ in range(3):
        await store.sync("/")
        await settle()
    assert not called.is_set()


async def test_a_change_while_the_watcher_reads_is_not_lost(open_clients: OpenClients) -> None:
    """A watcher that reads only when the watch calls still reads the last value."""

    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        called = asyncio.Event()
        seen = b""
        changes = 60
        clients.one.watch(path, called.set)

        async def follow() -> None:
            nonlocal seen
            while seen != str(changes - 1).encode():
                await called.wait()
                called.clear()
                stored = await clients.one.get(path)
                seen = b"" if stored is None else stored.value

        async def write() -> None:
            for number in range(changes):
                await clients.two.put(path, str(number).encode(), expected=number - 1)

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(follow())
            group.create_task(write())


async def test_watches_are_independent_and_end_when_they_are_stopped(
    open_clients: OpenClients,
) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        calls = {"first": 0, "second": 0, "elsewhere": 0}

        def counter(name: str) -> Callable[[], None]:
            def count() -> None:
                calls[name] += 1

            return count

        end_first = clients.one.watch(path, counter("first"))
        clients.one.watch(path, counter("second"))
        clients.one.watch(f"{clients.folder}/b", counter("elsewhere"))
        await clients.one.put(path, b"", expected=ABSENT)
        await wait_until(lambda: calls["first"] and calls["second"])
        await clients.one.sync(path)
        await settle()
        elsewhere = calls["elsewhere"]
        end_first()
        end_first()
        first, second = calls["first"], calls["second"]
        await clients.one.put(path, b"1", expected=0)
        await wait_until(lambda: calls["second"] > second)
        await settle()
        assert calls["first"] == first
        assert calls["elsewhere"] == elsewhere


# ---- update --------------------------------------------------------------------------------------


async def test_update_changes_keeps_and_deletes(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/a"
        deadline = asyncio.get_running_loop().time() + 30

        def replacement(answer: bytes | Verdict) -> Callable[[bytes | None], bytes | Verdict]:
            return lambda stored: answer

        async def change(answer: bytes | Verdict) -> Versioned | None:
            return await update(clients.one, path, replacement(answer), deadline=deadline)

        assert await change(KEEP) is None
        assert await change(DELETE) is None
        assert await change(b"x") == Versioned(b"x", 0)
        assert await change(b"y") == Versioned(b"y", 1)
        assert await change(KEEP) == Versioned(b"y", 1)
        assert await change(DELETE) is None
        assert await clients.one.get(path) is None


async def test_concurrent_updates_all_take_effect_once(open_clients: OpenClients) -> None:
    async with open_clients() as clients:
        path = f"{clients.folder}/counter"
        deadline = asyncio.get_running_loop().time() + 30

        def increment(stored: bytes | None) -> bytes:
            return str(int(stored or b"0") + 1).encode()

        async def worker(store: MetadataStore) -> None:
            for _ in range(10):
                await update(store, path, increment, deadline=deadline)

        async with asyncio.TaskGroup() as group:
            for store in (clients.one, clients.two, clients.one, clients.two):
                group.create_task(worker(store))
        stored = await clients.one.get(path)
        assert stored == Versioned(b"40", 39)
