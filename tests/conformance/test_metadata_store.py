"""What every MetadataStore must do, run against all of them.

The ZooKeeper ones talk to a real server, started once per session from the jars in pyspark's wheel.
Each test gets a folder of its own in the tree and two stores, which are two sessions where the
implementation has sessions (an embedded store is its only client).
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

    OpenWorld = Callable[[], AbstractAsyncContextManager["World"]]

pytestmark = pytest.mark.real_loop

_numbers = itertools.count()


@dataclass
class World:
    """Two clients of one store, and a folder that nobody else uses."""

    one: MetadataStore
    two: MetadataStore
    folder: str


@pytest.fixture(
    params=["memory", "embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_world(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> OpenWorld:
    """Opens a fresh world."""
    server: ZooKeeperEnsemble | None = None
    if kind == "zookeeper":
        server = request.getfixturevalue("zookeeper")
    return lambda: _world(kind, tmp_path, server)


@contextlib.asynccontextmanager
async def _world(
    kind: str, tmp_path: Path, server: ZooKeeperEnsemble | None
) -> AsyncIterator[World]:
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
        yield World(one, two, f"/t{next(_numbers)}")
    finally:
        await one.close()
        await two.close()


# ---- values and versions -------------------------------------------------------------------------


async def test_what_was_put_is_got_with_its_version(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/a"
        assert await world.one.get(path) is None
        assert await world.one.put(path, b"first", expected=ABSENT) == 0
        assert await world.one.get(path) == Versioned(b"first", 0)
        assert await world.one.put(path, b"second", expected=0) == 1
        assert await world.one.put(path, b"", expected=1) == 2
        assert await world.one.get(path) == Versioned(b"", 2)


async def test_parents_are_made_empty_and_persistent(open_world: OpenWorld) -> None:
    async with open_world() as world:
        await world.one.put(f"{world.folder}/a/b/c", b"x", expected=ABSENT)
        assert await world.one.get(f"{world.folder}/a") == Versioned(b"", 0)
        assert await world.one.get(f"{world.folder}/a/b") == Versioned(b"", 0)
        with pytest.raises(NodeExists):
            await world.one.put(f"{world.folder}/a", b"", expected=ABSENT)


async def test_a_put_at_another_version_changes_nothing(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/a"
        with pytest.raises(BadVersion) as absent:
            await world.one.put(path, b"x", expected=0)
        assert (absent.value.path, absent.value.expected) == (path, 0)
        assert not isinstance(absent.value, NodeExists)
        await world.one.put(path, b"x", expected=ABSENT)
        with pytest.raises(NodeExists) as exists:
            await world.one.put(path, b"y", expected=ABSENT)
        assert exists.value.path == path
        for wrong in (1, 7):
            with pytest.raises(BadVersion):
                await world.one.put(path, b"y", expected=wrong)
        assert await world.one.get(path) == Versioned(b"x", 0)


async def test_a_delete_compares_and_needs_an_empty_node(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/a"
        with pytest.raises(NoNode):
            await world.one.delete(path, expected=0)
        await world.one.put(f"{path}/child", b"", expected=ABSENT)
        await world.one.put(path, b"x", expected=0)
        with pytest.raises(BadVersion):
            await world.one.delete(path, expected=0)
        with pytest.raises(NotEmpty):
            await world.one.delete(path, expected=1)
        await world.one.delete(f"{path}/child", expected=0)
        await world.one.delete(path, expected=1)
        assert await world.one.get(path) is None
        assert await world.one.put(path, b"again", expected=ABSENT) == 0


async def test_one_of_many_racing_writers_wins_each_version(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/counter"
        await world.one.put(path, b"0", expected=ABSENT)
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
                store = world.one if number % 2 else world.two
                group.create_task(race(store, str(number)))
        assert wins == 1
        stored = await world.one.get(path)
        assert stored is not None
        assert stored.version == 1


async def test_requests_of_one_store_keep_their_order(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/a"
        await world.one.put(path, b"", expected=ABSENT)
        async with asyncio.TaskGroup() as group:
            puts = [
                group.create_task(world.one.put(path, str(n).encode(), expected=n))
                for n in range(50)
            ]
            last = group.create_task(world.one.get(path))
        assert [put.result() for put in puts] == list(range(1, 51))
        assert last.result() == Versioned(b"49", 50)


async def test_requests_that_travel_together_see_each_other_in_order(open_world: OpenWorld) -> None:
    async with open_world() as world:
        await world.one.put(f"{world.folder}/old", b"", expected=ABSENT)
        async with asyncio.TaskGroup() as group:
            run = group.create_task
            run(world.one.put(f"{world.folder}/new", b"", expected=ABSENT))
            run(world.one.delete(f"{world.folder}/old", expected=0))
            between = run(world.one.children(world.folder))
            run(world.one.delete(f"{world.folder}/new", expected=0))
            gone = run(world.one.get(f"{world.folder}/new"))
            empty = run(world.one.children(world.folder))
            run(world.one.delete(world.folder, expected=0))
            after = run(world.one.get(world.folder))
        assert between.result() == ["new"]
        assert gone.result() is None
        assert empty.result() == []
        assert after.result() is None


async def test_a_large_value_fits_and_a_larger_one_is_refused_by_name(
    open_world: OpenWorld,
) -> None:
    async with open_world() as world:
        path = f"{world.folder}/a"
        largest = b"v" * VALUE_BYTES_MAX
        await world.one.put(path, largest, expected=ABSENT)
        stored = await world.two.get(path)
        assert stored is not None
        assert stored.value == largest
        await world.one.put(path, largest, expected=0)
        for refused in (
            world.one.put(path, largest + b"v", expected=1),
            world.one.create_ephemeral(f"{path}e", largest + b"v"),
            world.one.create_sequential(f"{path}s", largest + b"v", ephemeral=False),
        ):
            with pytest.raises(ValueTooLarge) as error:
                await refused
            assert (error.value.size, error.value.limit) == (VALUE_BYTES_MAX + 1, VALUE_BYTES_MAX)
        assert await world.one.children(world.folder) == ["a"]


async def test_names_are_any_printable_text(open_world: OpenWorld) -> None:
    async with open_world() as world:
        names = sorted(["a b", "%2F", "ä", "你好", "x" * 200, "0x00_0xff", "-", "~"])
        for name in names:
            await world.one.put(f"{world.folder}/{name}", name.encode(), expected=ABSENT)
        assert await world.one.children(world.folder) == names
        for name in names:
            assert await world.two.get(f"{world.folder}/{name}") == Versioned(name.encode(), 0)


# ---- children ------------------------------------------------------------------------------------


async def test_children_are_the_names_just_below_and_sorted(open_world: OpenWorld) -> None:
    async with open_world() as world:
        assert await world.one.children(world.folder) == []
        for name in ("b", "a/x/y", "a/z", "ab", "B"):
            await world.one.put(f"{world.folder}/{name}", b"", expected=ABSENT)
        assert await world.one.children(world.folder) == ["B", "a", "ab", "b"]
        assert await world.one.children(f"{world.folder}/a") == ["x", "z"]
        assert await world.one.children(f"{world.folder}/b") == []
        assert world.folder[1:] in await world.one.children("/")
        await world.one.delete(f"{world.folder}/ab", expected=0)
        assert await world.one.children(world.folder) == ["B", "a", "b"]


# ---- sessions ------------------------------------------------------------------------------------


async def test_an_ephemeral_node_says_whose_it_is(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/up/a"
        assert world.one.session_id != 0
        assert world.one.session_state is SessionState.CONNECTED
        assert await world.one.create_ephemeral(path, b"x") == 0
        assert await world.two.get(path) == Versioned(b"x", 0, world.one.session_id)
        with pytest.raises(NodeExists):
            await world.two.create_ephemeral(path, b"y")
        with pytest.raises(NodeExists):
            await world.two.put(path, b"y", expected=ABSENT)
        assert await world.two.put(path, b"y", expected=0) == 1
        assert await world.one.get(path) == Versioned(b"y", 1, world.one.session_id)
        assert await world.one.children(f"{world.folder}/up") == ["a"]
        with pytest.raises(BadVersion):
            await world.two.delete(path, expected=0)
        await world.two.delete(path, expected=1)
        assert await world.one.get(path) is None
        assert await world.one.get(f"{world.folder}/up") == Versioned(b"", 0)


async def test_an_ephemeral_node_has_no_children(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/a"
        await world.one.create_ephemeral(path, b"")
        with pytest.raises(ParentIsEphemeral):
            await world.one.put(f"{path}/b", b"", expected=ABSENT)
        with pytest.raises(ParentIsEphemeral):
            await world.one.put(f"{path}/b/c", b"", expected=ABSENT)
        with pytest.raises(ParentIsEphemeral):
            await world.one.create_sequential(f"{path}/b", b"", ephemeral=False)
        assert await world.one.children(path) == []


async def test_closing_ends_the_session_and_only_that(open_world: OpenWorld, kind: str) -> None:
    if kind == "embedded":
        pytest.skip("its only client is the one that closes; see the unit tests")

    async with open_world() as world:
        await world.one.put(f"{world.folder}/stays", b"", expected=ABSENT)
        await world.two.create_ephemeral(f"{world.folder}/two", b"")
        await world.one.create_ephemeral(f"{world.folder}/one", b"")
        sequential = f"{world.folder}/n-"
        name = await world.one.create_sequential(sequential, b"", ephemeral=True)
        assert await world.two.get(name) == Versioned(b"", 0, world.one.session_id)
        gone = asyncio.Event()
        world.two.watch(f"{world.folder}/one", gone.set)
        await settle()
        gone.clear()
        await world.one.close()
        async with asyncio.timeout(30):
            while await world.two.get(f"{world.folder}/one") is not None:
                await gone.wait()
                gone.clear()
        await world.two.sync(world.folder)
        assert await world.two.children(world.folder) == ["stays", "two"]


async def test_a_closed_store_refuses_and_says_so(open_world: OpenWorld) -> None:
    async with open_world() as world:
        states: list[SessionState] = []
        world.one.watch_session(states.append)
        await world.one.close()
        await world.one.close()
        assert world.one.session_state is SessionState.CLOSED
        assert states == [SessionState.CLOSED]
        for request in (
            world.one.get("/a"),
            world.one.children("/a"),
            world.one.put("/a", b"", expected=ABSENT),
            world.one.delete("/a", expected=0),
            world.one.create_ephemeral("/a", b""),
            world.one.create_sequential("/a", b"", ephemeral=False),
            world.one.sync("/a"),
        ):
            with pytest.raises(StoreClosed):
                await request


# ---- sequences -----------------------------------------------------------------------------------


async def test_sequential_names_grow_and_are_never_reused(open_world: OpenWorld) -> None:
    async with open_world() as world:
        prefix = f"{world.folder}/queue/n-"
        paths = []
        for number in range(6):
            store = world.one if number % 2 else world.two
            path = await store.create_sequential(prefix, b"v", ephemeral=number % 3 == 0)
            paths.append(path)
            if number == 3:
                await store.delete(path, expected=0)
        numbers = [int(path.removeprefix(prefix)) for path in paths]
        assert all(len(path) == len(prefix) + 10 for path in paths)
        assert numbers == sorted(set(numbers))
        assert await world.one.get(paths[5]) == Versioned(b"v", 0)
        survivors = [path for index, path in enumerate(paths) if index != 3]
        assert [
            f"{world.folder}/queue/{name}"
            for name in await world.one.children(f"{world.folder}/queue")
        ] == survivors


# ---- sync and watches ----------------------------------------------------------------------------


async def test_after_sync_the_others_changes_are_seen(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/a"
        for number in range(20):
            await world.one.put(path, str(number).encode(), expected=number - 1)
            await world.two.sync(path)
            assert await world.two.get(path) == Versioned(str(number).encode(), number)
        await world.two.sync(f"{world.folder}/absent")


@pytest.mark.parametrize("by", ["one", "two"])
async def test_a_watch_reports_creation_change_deletion_and_children(
    open_world: OpenWorld, by: str
) -> None:
    async with open_world() as world:
        path = f"{world.folder}/watched"
        child = f"{path}/c"
        writer: MetadataStore = getattr(world, by)
        called = asyncio.Event()
        seen: list[object] = []
        world.one.watch(path, called.set)

        async def follow() -> None:
            """Reads when called, and at no other time."""
            while True:
                await called.wait()
                called.clear()
                stored = await world.one.get(path)
                seen.append((stored and stored.value, await world.one.children(path)))

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
            for _ in range(2):  # the second round finds one-shot watches that were not armed again
                for change, result in changes:
                    await _quiet(world.one, called)
                    await change()
                    await wait_until(lambda: seen and seen[-1] == result)  # noqa: B023
            follower.cancel()


async def _quiet(store: MetadataStore, called: asyncio.Event) -> None:
    """Let calls that are still on their way arrive, so that none of them passes for the next."""
    for _ in range(3):
        await store.sync("/")
        await settle()
    assert not called.is_set()


async def test_a_change_while_the_watcher_reads_is_not_lost(open_world: OpenWorld) -> None:
    """Who reads only when called ends at the last value, however the calls interleave."""

    async with open_world() as world:
        path = f"{world.folder}/a"
        called = asyncio.Event()
        seen = b""
        changes = 60
        world.one.watch(path, called.set)

        async def follow() -> None:
            nonlocal seen
            while seen != str(changes - 1).encode():
                await called.wait()
                called.clear()
                stored = await world.one.get(path)
                seen = b"" if stored is None else stored.value

        async def write() -> None:
            for number in range(changes):
                await world.two.put(path, str(number).encode(), expected=number - 1)

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(follow())
            group.create_task(write())


async def test_watches_are_independent_and_end_when_told(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/a"
        calls = {"first": 0, "second": 0, "elsewhere": 0}

        def counter(name: str) -> Callable[[], None]:
            def count() -> None:
                calls[name] += 1

            return count

        end_first = world.one.watch(path, counter("first"))
        world.one.watch(path, counter("second"))
        world.one.watch(f"{world.folder}/b", counter("elsewhere"))
        await world.one.put(path, b"", expected=ABSENT)
        await wait_until(lambda: calls["first"] and calls["second"])
        await world.one.sync(path)
        await settle()
        elsewhere = calls["elsewhere"]
        end_first()
        end_first()
        first, second = calls["first"], calls["second"]
        await world.one.put(path, b"1", expected=0)
        await wait_until(lambda: calls["second"] > second)
        await settle()
        assert calls["first"] == first
        assert calls["elsewhere"] == elsewhere


# ---- update --------------------------------------------------------------------------------------


async def test_update_changes_keeps_and_deletes(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/a"
        deadline = asyncio.get_running_loop().time() + 30

        def replacement(answer: bytes | Verdict) -> Callable[[bytes | None], bytes | Verdict]:
            return lambda stored: answer

        async def change(answer: bytes | Verdict) -> Versioned | None:
            return await update(world.one, path, replacement(answer), deadline=deadline)

        assert await change(KEEP) is None
        assert await change(DELETE) is None
        assert await change(b"x") == Versioned(b"x", 0)
        assert await change(b"y") == Versioned(b"y", 1)
        assert await change(KEEP) == Versioned(b"y", 1)
        assert await change(DELETE) is None
        assert await world.one.get(path) is None


async def test_concurrent_updates_all_take_effect_once(open_world: OpenWorld) -> None:
    async with open_world() as world:
        path = f"{world.folder}/counter"
        deadline = asyncio.get_running_loop().time() + 30

        def increment(stored: bytes | None) -> bytes:
            return str(int(stored or b"0") + 1).encode()

        async def worker(store: MetadataStore) -> None:
            for _ in range(10):
                await update(store, path, increment, deadline=deadline)

        async with asyncio.TaskGroup() as group:
            for store in (world.one, world.two, world.one, world.two):
                group.create_task(worker(store))
        stored = await world.one.get(path)
        assert stored == Versioned(b"40", 39)
