"""Faults that only a real ensemble has: lost replies, expired sessions, dead and silent servers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest
from fakes.zookeeper_proxy import Mode, proxied
from kazoo.client import KazooClient
from support import free_port, settle, wait_until

from magnetar.metadata.election import Election
from magnetar.metadata.errors import (
    BadVersion,
    LeaseTaken,
    MetadataError,
    OutcomeUnknown,
    Unavailable,
)
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.lease import Lease
from magnetar.metadata.model import NO_LEDGER
from magnetar.metadata.store import ABSENT, KEEP, SessionState, Verdict, Versioned, update
from magnetar.metadata.zookeeper import ZooKeeperStore
from magnetar.zookeeper_server import ZooKeeperEnsemble, address, mode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from magnetar.local_process import LocalProcess

pytestmark = [pytest.mark.zookeeper, pytest.mark.usefixtures("zookeeper"), pytest.mark.real_loop]

_numbers = itertools.count()


def fresh() -> str:
    return f"/z{next(_numbers)}"


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


@contextlib.asynccontextmanager
async def connected(
    hosts: str, *, session_timeout_s: float = 10.0
) -> AsyncIterator[ZooKeeperStore]:
    store = await ZooKeeperStore.connect(hosts, session_timeout_s=session_timeout_s)
    try:
        yield store
    finally:
        await store.close()


async def wait_applied(witness: ZooKeeperStore, path: str, expected: Versioned) -> None:
    """Wait until the server of `witness` has applied the change. Other servers may apply it
    earlier."""
    applied = asyncio.Event()
    unwatch = witness.watch(path, applied.set)
    async with asyncio.timeout(30):
        while await witness.get(path) != expected:
            await applied.wait()
            applied.clear()
    unwatch()


def end_session_of(store: ZooKeeperStore, hosts: str) -> None:
    """Expire the session of a client: a second client with the same session closes it."""
    twin = KazooClient(hosts=hosts, client_id=store._client.client_id)
    twin.start()
    twin.stop()
    twin.close()


# ---- connecting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.REFUSE, Mode.SILENT])
async def test_an_unreachable_ensemble_is_named_within_the_deadline(
    mode: Mode, zookeeper: ZooKeeperEnsemble
) -> None:
    async with proxied(zookeeper) as proxy:
        proxy.mode = mode
        started_s = time.monotonic()
        hosts = f"{proxy.address},127.0.0.1:{free_port()}"
        with pytest.raises(Unavailable, match=proxy.address) as error:
            await ZooKeeperStore.connect(hosts, connect_timeout_s=0.5)
        assert error.value.hosts == tuple(hosts.split(","))
        assert error.value.definite
        assert time.monotonic() - started_s < 20


@pytest.mark.parametrize("hosts", ["", "host:port", "host:1/path", ":2181"])
async def test_a_malformed_host_list_is_refused(hosts: str) -> None:
    with pytest.raises(Unavailable):
        await ZooKeeperStore.connect(hosts, connect_timeout_s=0.5)


async def test_stores_with_different_chroots_share_no_nodes(zookeeper: ZooKeeperEnsemble) -> None:
    one = await ZooKeeperStore.connect(zookeeper.hosts, chroot="/one/deep")
    two = await ZooKeeperStore.connect(zookeeper.hosts, chroot="/two")
    top = await ZooKeeperStore.connect(zookeeper.hosts, chroot="/")
    await one.put("/a", b"1", expected=ABSENT)
    await one.sync("/a")
    assert await two.get("/a") is None
    await top.sync("/")
    assert await top.get("/one/deep/a") == Versioned(b"1", 0)
    assert await one.children("/") == ["a"]
    assert await one.create_sequential("/n-", b"", ephemeral=False) == "/n-0000000001"
    for store in (one, two, top):
        await store.close()


# ---- requests and replies ------------------------------------------------------------------------


async def test_a_lost_reply_raises_unknown_and_an_unsent_request_unavailable(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    path = fresh()
    async with (
        proxied(zookeeper) as proxy,
        connected(zookeeper.hosts) as witness,
        connected(proxy.address) as store,
    ):
        await store.put(path, b"0", expected=ABSENT)
        proxy.mode = Mode.SWALLOW_REPLIES
        put = asyncio.get_running_loop().create_task(store.put(path, b"1", expected=0))
        await wait_applied(witness, path, Versioned(b"1", 1))
        proxy.mode = Mode.REFUSE
        proxy.cut()
        with pytest.raises(OutcomeUnknown) as unknown:
            await put
        assert not unknown.value.definite
        assert unknown.value.path == path
        await wait_until(lambda: store.session_state is SessionState.SUSPENDED)
        for request in (
            store.get(path),
            store.put(path, b"2", expected=1),
            store.delete(path, expected=1),
            store.create_ephemeral(f"{path}/e", b""),
            store.children(path),
            store.sync(path),
        ):
            with pytest.raises(Unavailable) as unsent:
                await request
            assert unsent.value.definite
        proxy.mode = Mode.PASS
        await wait_until(lambda: store.session_state is SessionState.CONNECTED)
        assert await store.get(path) == Versioned(b"1", 1)
        assert await witness.children(path) == []


async def test_update_succeeds_although_replies_are_lost(zookeeper: ZooKeeperEnsemble) -> None:
    path = fresh()
    async with proxied(zookeeper) as proxy, connected(proxy.address) as store:

        async def disturb() -> None:
            for _ in range(6):
                await asyncio.sleep(0.05)
                proxy.mode = Mode.SWALLOW_REPLIES
                await asyncio.sleep(0.02)
                proxy.cut()
                proxy.mode = Mode.PASS

        async with asyncio.TaskGroup() as group:
            group.create_task(disturb())
            for number in range(30):
                word = str(number)

                def change(stored: bytes | None, word: str = word) -> bytes | Verdict:
                    words = (stored or b"").decode().split()
                    return KEEP if word in words else " ".join([*words, word]).encode()

                await update(store, path, change, deadline=later(30))
                await asyncio.sleep(0.01)
        # The last cut may have come after the last change.
        stored = await update(store, path, lambda stored: KEEP, deadline=later(30))
        assert stored is not None
        assert stored.value.decode().split() == [str(number) for number in range(30)]
        assert stored.version == 29


async def test_the_store_stays_usable_after_a_caller_is_cancelled(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    path = fresh()
    async with (
        proxied(zookeeper) as proxy,
        connected(zookeeper.hosts) as witness,
        connected(proxy.address) as store,
        asyncio.TaskGroup() as group,
    ):
        await store.put(path, b"0", expected=ABSENT)
        proxy.mode = Mode.SWALLOW_REPLIES
        put = group.create_task(store.put(path, b"1", expected=0))
        await wait_applied(witness, path, Versioned(b"1", 1))
        put.cancel()
        await asyncio.wait([put])
        assert put.cancelled()
        proxy.cut()
        proxy.mode = Mode.PASS
        assert await update(store, path, lambda stored: KEEP, deadline=later(30)) == Versioned(
            b"1", 1
        )


async def test_a_reply_that_stops_midway_does_not_stop_the_loop(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    """kazoo's thread waits for the rest of the reply, and sends no requests in the meantime."""

    path = fresh()
    async with proxied(zookeeper) as proxy, connected(proxy.address) as store:
        await store.put(path, b"", expected=ABSENT)
        proxy.mode = Mode.TEAR_REPLIES
        loop = asyncio.get_running_loop()
        first = loop.create_task(store.get(path))
        await wait_until(lambda: proxy.mode is Mode.SWALLOW_REPLIES)
        stuck, turned = threading.Event(), threading.Event()

        def free() -> None:
            while not turned.wait(30):
                stuck.set()
                store._client._connection._read_sock.recv(65536)

        rescue = threading.Thread(target=free)
        rescue.start()
        requests = [loop.create_task(store.get(path)) for _ in range(1_000)]
        await settle()
        turned.set()
        rescue.join()
        assert not stuck.is_set()
        proxy.mode = Mode.REFUSE
        proxy.cut()
        await asyncio.wait([first, *requests])
        for task in (first, *requests):
            assert isinstance(task.exception(), OutcomeUnknown | Unavailable)
        proxy.mode = Mode.PASS
        await wait_until(lambda: store.session_state is SessionState.CONNECTED)
        assert await store.get(path) == Versioned(b"", 0)


# ---- sessions ------------------------------------------------------------------------------------


async def test_a_short_break_suspends_and_loses_nothing(zookeeper: ZooKeeperEnsemble) -> None:
    path = fresh()
    async with (
        proxied(zookeeper) as proxy,
        connected(zookeeper.hosts) as witness,
        connected(proxy.address) as store,
    ):
        states: list[SessionState] = []
        called = asyncio.Event()
        store.watch_session(states.append)
        await store.create_ephemeral(f"{path}/e", b"")
        store.watch(f"{path}/w", called.set)
        session = store.session_id
        await asyncio.wait_for(called.wait(), 30)  # the watch is armed now
        called.clear()
        proxy.mode = Mode.REFUSE
        proxy.cut()
        await wait_until(lambda: states == [SessionState.SUSPENDED])
        await witness.put(f"{path}/w", b"1", expected=ABSENT)
        proxy.mode = Mode.PASS
        await asyncio.wait_for(called.wait(), 30)
        assert await store.get(f"{path}/w") == Versioned(b"1", 0)
        assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
        assert store.session_id == session
        assert await store.get(f"{path}/e") == Versioned(b"", 0, session)
        called.clear()
        await witness.put(f"{path}/w", b"2", expected=0)
        await asyncio.wait_for(called.wait(), 30)


async def test_an_expired_session_is_lost_then_replaced_and_watches_stay(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    path = fresh()
    async with connected(zookeeper.hosts) as store, connected(zookeeper.hosts) as witness:
        states: list[SessionState] = []
        called = asyncio.Event()
        store.watch_session(states.append)
        store.watch(f"{path}/w", called.set)
        await store.create_ephemeral(f"{path}/e", b"")
        old = store.session_id
        await asyncio.to_thread(end_session_of, store, zookeeper.hosts)
        await wait_until(lambda: SessionState.LOST in states)
        await wait_until(lambda: store.session_state is SessionState.CONNECTED)
        assert states == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
        assert store.session_id not in (0, old)
        assert await witness.get(f"{path}/e") is None
        assert await store.create_ephemeral(f"{path}/e", b"") == 0
        await store.sync(path)
        called.clear()
        await witness.put(f"{path}/w", b"", expected=ABSENT)
        await asyncio.wait_for(called.wait(), 30)


async def test_a_client_that_is_cut_off_learns_of_its_expired_session_when_it_reconnects(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    path = fresh()
    async with (
        proxied(zookeeper) as proxy,
        connected(zookeeper.hosts) as witness,
        connected(proxy.address, session_timeout_s=3.0) as store,
    ):
        states: list[SessionState] = []
        gone = asyncio.Event()
        store.watch_session(states.append)
        await store.create_ephemeral(path, b"")
        witness.watch(path, gone.set)
        proxy.mode = Mode.REFUSE
        proxy.cut()
        async with asyncio.timeout(30):
            while await witness.get(path) is not None:
                await gone.wait()
                gone.clear()
        assert states == [SessionState.SUSPENDED]
        proxy.mode = Mode.PASS
        await wait_until(lambda: store.session_state is SessionState.CONNECTED)
        assert states == [
            SessionState.SUSPENDED,
            SessionState.LOST,
            SessionState.CONNECTED,
        ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_connection_thread_that_dies_is_replaced(zookeeper: ZooKeeperEnsemble) -> None:
    path = fresh()
    async with proxied(zookeeper) as proxy, connected(proxy.address) as store:
        called = asyncio.Event()
        store.watch(path, called.set)
        await store.put(path, b"0", expected=ABSENT)
        # A reply without a request: kazoo raises an exception that it does not catch.
        proxy.garbage = struct.pack(">iiqi", 16, 12345, 1, 0)
        with pytest.raises(MetadataError):
            await store.get(path)
        await wait_until(lambda: store.session_state is SessionState.LOST)
        await wait_until(lambda: store.session_state is SessionState.CONNECTED)
        assert await store.get(path) == Versioned(b"0", 0)
        await store.sync(path)
        called.clear()
        await store.put(path, b"1", expected=0)
        await asyncio.wait_for(called.wait(), 30)


async def test_requests_to_an_unresponsive_server_fail_in_time(tmp_path: Path) -> None:
    with ZooKeeperEnsemble(tmp_path, force_sync=False) as server:
        async with connected(server.hosts, session_timeout_s=3.0) as store:
            await store.put("/a", b"", expected=ABSENT)
            server.nodes[0].pause()
            started_s = time.monotonic()
            with pytest.raises(OutcomeUnknown):
                await store.get("/a")
            assert time.monotonic() - started_s < 20
            server.nodes[0].resume()
            await wait_until(lambda: store.session_state is SessionState.CONNECTED)
            assert await update(store, "/a", lambda stored: KEEP, deadline=later(30)) == (
                Versioned(b"", 0)
            )


# ---- leases and elections ------------------------------------------------------------------------


async def test_a_lease_follows_its_owner_into_a_new_session(zookeeper: ZooKeeperEnsemble) -> None:
    path = fresh()
    async with connected(zookeeper.hosts) as store, connected(zookeeper.hosts) as other:
        told: list[bool] = []
        lease = Lease(store, path, b"me", replaces=lambda stored: False, on_change=told.append)
        # A node of an earlier session of this client, which still exists at the server.
        await other.create_ephemeral(path, b"me")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(lease.run())
            await wait_until(lambda: told == [True])
            old = store.session_id
            await asyncio.to_thread(end_session_of, store, zookeeper.hosts)
            await wait_until(lambda: told == [True, False, True])
            node = await other.get(path)
            assert node is not None
            assert node.ephemeral_session == store.session_id != old
            running.cancel()


async def test_of_two_leases_with_one_path_the_newer_owner_takes_the_lease(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    path = fresh()
    async with connected(zookeeper.hosts) as one, connected(zookeeper.hosts) as two:
        told: list[bool] = []
        old = Lease(one, path, b"4", replaces=lambda stored: stored < b"4", on_change=print)
        new = Lease(two, path, b"5", replaces=lambda stored: stored < b"5", on_change=told.append)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(_taken(old))
            await wait_until(lambda: old.held)
            second = group.create_task(new.run())
            assert await first == b"5"
            await wait_until(lambda: told == [True])
            assert not old.held
            second.cancel()


async def _taken(lease: Lease) -> bytes:
    try:
        await lease.run()
    except LeaseTaken as taken:
        return taken.holder
    raise AssertionError("the lease never ends")


async def test_one_candidate_leads_and_the_next_follows(zookeeper: ZooKeeperEnsemble) -> None:
    path = fresh()
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(connected(zookeeper.hosts)) for _ in range(3)]
        elections = [
            Election(store, path, str(number).encode(), on_change=lambda leads: None)
            for number, store in enumerate(stores)
        ]

        def leaders() -> list[int]:
            return [number for number in range(3) if elections[number].is_leader]

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(election.run()) for election in elections]
            await wait_until(lambda: len(leaders()) == 1)
            (first,) = leaders()
            await wait_until(lambda: {election.leader for election in elections} == {b"%d" % first})
            await asyncio.to_thread(end_session_of, stores[first], zookeeper.hosts)
            await wait_until(lambda: len(leaders()) == 1 and leaders() != [first])
            (second,) = leaders()
            await stores[second].close()
            await wait_until(lambda: len(leaders()) == 1 and leaders() != [second])
            for task in running:
                task.cancel()


# ---- an ensemble ---------------------------------------------------------------------------------


async def leader_of(ensemble: ZooKeeperEnsemble) -> LocalProcess:
    """Wait for a server that leads; a lone server leads itself."""
    while True:
        for node in ensemble.nodes:
            if await asyncio.to_thread(mode, node) in ("leader", "standalone"):
                return node
        await asyncio.sleep(0.02)


@pytest.mark.real_loop(deadline_s=240)
async def test_an_ensemble_of_three_survives_a_kill_of_its_leader(tmp_path: Path) -> None:
    """Writers continue, and no acknowledged write is lost. Sessions and their ephemeral nodes
    survive. Reads after a sync are fresh at any server."""

    with ZooKeeperEnsemble(tmp_path, size=3, force_sync=False) as ensemble:
        async with contextlib.AsyncExitStack() as stack:
            writer = await stack.enter_async_context(connected(ensemble.hosts))
            each = [
                await stack.enter_async_context(connected(address(node))) for node in ensemble.nodes
            ]
            await writer.create_ephemeral("/writer", b"")
            session = writer.session_id
            await _write(writer, range(50))
            for store in each:
                await store.sync("/log")
                assert await store.get("/log") == Versioned(b"49", 49)

            leader = await leader_of(ensemble)
            leader.kill()
            started_s = time.monotonic()
            await _write(writer, range(50, 100))
            assert time.monotonic() - started_s < 30
            ids = LedgerIds(writer)
            assert await ids.next(NO_LEDGER, deadline=later(30)) == 0

            survivors = [
                store
                for store, node in zip(each, ensemble.nodes, strict=True)
                if node is not leader
            ]
            for store in survivors:
                await wait_until(lambda: store.session_state is SessionState.CONNECTED)  # noqa: B023
                await store.sync("/log")
                assert await store.get("/log") == Versioned(b"99", 99)
            assert writer.session_id == session
            assert await survivors[0].get("/writer") == Versioned(b"", 0, session)

            await asyncio.to_thread(leader.start)
            back = each[ensemble.nodes.index(leader)]
            await wait_until(lambda: back.session_state is SessionState.CONNECTED)
            await back.sync("/log")
            assert await back.get("/log") == Versioned(b"99", 99)


@pytest.mark.real_loop(deadline_s=240)
async def test_a_read_after_sync_is_fresh_on_a_follower_that_lags(tmp_path: Path) -> None:
    with ZooKeeperEnsemble(tmp_path, size=3, force_sync=False) as ensemble:
        leader = await leader_of(ensemble)
        follower = next(node for node in ensemble.nodes if node is not leader)
        async with connected(address(leader)) as writer, connected(address(follower)) as reader:
            await writer.put("/a", b"0", expected=ABSENT)
            await reader.sync("/a")
            for round_number in range(2):
                follower.pause()
                first = round_number * 30  # write soon, before the leader drops the follower
                for number in range(first, first + 30):
                    await writer.put("/a", str(number + 1).encode(), expected=number)
                # Both requests reach the follower before the changes that it missed.
                sync = asyncio.get_running_loop().create_task(reader.sync("/a"))
                await asyncio.sleep(0.05)
                follower.resume()
                await sync
                stored = await reader.get("/a")
                assert stored is not None
                assert stored.version == first + 30


async def _write(store: ZooKeeperStore, numbers: range) -> None:
    """Write the numbers. Assert that each is stored once and in order, also after lost replies."""
    for number in numbers:

        def change(stored: bytes | None, number: int = number) -> bytes | Verdict:
            last = -1 if stored is None else int(stored)
            assert last in (number - 1, number), (last, number)
            return KEEP if last == number else str(number).encode()

        await update(store, "/log", change, deadline=later(30))


@pytest.mark.real_loop(deadline_s=240)
async def test_without_a_majority_requests_fail_and_never_return_a_wrong_answer(
    tmp_path: Path,
) -> None:
    with ZooKeeperEnsemble(tmp_path, size=3, force_sync=False) as ensemble:
        async with connected(ensemble.hosts) as store:
            await store.put("/a", b"0", expected=ABSENT)
            for node in ensemble.nodes[:2]:
                node.kill()
            with pytest.raises((Unavailable, OutcomeUnknown)):
                await update(store, "/a", lambda stored: b"1", deadline=later(1.5))
            for node in ensemble.nodes[:2]:
                node.launch()
            await leader_of(ensemble)

            def again(stored: bytes | None) -> bytes | Verdict:
                return KEEP if stored == b"1" else b"1"

            result = await update(store, "/a", again, deadline=later(30))
            assert result == Versioned(b"1", 1)
            with pytest.raises(BadVersion):
                await store.put("/a", b"2", expected=0)
