"""Bundle ownership: the conditions under which a broker takes, releases or keeps a bundle."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.witnesses import FakeWitnesses
from support import settle, wait_until

from magnetar.bookie.contract import LastHeard
from magnetar.broker.errors import BundleUnavailable
from magnetar.broker.ownership import liveness as module
from magnetar.broker.ownership.brokers import BrokerDirectory
from magnetar.broker.ownership.bundle import Bundle, bundle_in
from magnetar.broker.ownership.census import Census, owner_of, read_owners
from magnetar.broker.ownership.liveness import Liveness
from magnetar.broker.ownership.owners import Owners
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import Unavailable
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BrokerId, BrokerRegistration, NamespaceBundles, Ownership
from magnetar.metadata.store import ABSENT
from magnetar.protos.names import TopicName
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from magnetar.metadata.store import Versioned

pytestmark = pytest.mark.real_loop

INCARNATION = "0" * 31
SILENT = LastHeard(heard_s=module.SILENCE_S, listening_s=60.0)
HEARD = LastHeard(heard_s=0.1, listening_s=60.0)


class Peer:
    """The ownership part of one broker, with a real listening port."""

    def __init__(self, tree: MemoryTree, number: int, port: int) -> None:
        self.tree = tree
        self.store = MemoryStore(tree)
        self.me = BrokerRegistration(
            BrokerId(f"b{number}"),
            f"{INCARNATION}{number}",
            f"grpc://127.0.0.1:{port}",
            f"pulsar://127.0.0.1:{port}",
            "",
        )
        self.lost: list[Bundle] = []
        self.connections = 0  # the number of connections to its port
        self.is_silent = False  # its port accepts connections and answers nothing
        self.close_port: Callable[[], None]
        self.directory = BrokerDirectory(self.store)
        self.witnesses = FakeWitnesses()
        self.owners = Owners(
            self.store,
            self.directory,
            self.me,
            liveness=Liveness(self.witnesses),
            on_lost=self._on_lost,
        )

    async def register(self) -> None:
        path = paths.broker_available(self.me.broker)
        await self.store.create_ephemeral(path, codec.encode_broker_registration(self.me))

    async def _on_lost(self, bundle: Bundle) -> None:
        self.lost.append(bundle)


@asynccontextmanager
async def brokers(count: int) -> AsyncIterator[list[Peer]]:
    tree = MemoryTree()

    async def accept(number: int, writer: asyncio.StreamWriter) -> None:
        peers[number].connections += 1
        if not peers[number].is_silent:
            writer.close()

    servers = [
        await asyncio.start_server(
            lambda _, writer, number=number: accept(number, writer), "127.0.0.1", 0
        )
        for number in range(count)
    ]
    peers = [
        Peer(tree, number, server.sockets[0].getsockname()[1])
        for number, server in enumerate(servers)
    ]
    async with asyncio.TaskGroup() as group:
        tasks = []
        for peer, server in zip(peers, servers, strict=True):
            peer.close_port = server.close
            await peer.register()
            backoff = Backoff(0.01, 0.1, random.Random(0))
            owning = supervise("owners", peer.owners.run, backoff=backoff)
            tasks += [group.create_task(owning)]
        yield peers
        for task in tasks:
            task.cancel()
    for server in servers:
        server.close()


def bundle_of(name: TopicName) -> Bundle:
    return bundle_in(name, NamespaceBundles())


def topic_of(peer: Peer, peers: list[Peer]) -> TopicName:
    """A topic whose free bundle prefers `peer`, while all own as many bundles."""
    live = {one.me.broker: one.me for one in peers}
    for number in range(1_000):
        name = TopicName.parse(f"public/n{number}/t")
        if Census().order(bundle_of(name), live)[0] == peer.me.broker:
            return name
    raise AssertionError("no topic prefers this broker")


async def record_of(peer: Peer, name: TopicName) -> Ownership | None:
    bundle = bundle_of(name)
    path = paths.ownership(bundle.tenant, bundle.namespace, bundle.range)
    stored = await peer.store.get(path)
    return None if stored is None else codec.decode_ownership(stored.value)


async def test_a_free_bundle_is_taken_by_the_preferred_broker_that_is_asked() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[0], peers)
        located = await peers[0].owners.locate(bundle_of(name), authoritative=False)
        assert located.serves
        assert located.broker == peers[0].me
        assert peers[0].owners.holds(bundle_of(name))
        record = await record_of(peers[0], name)
        assert record == Ownership(peers[0].me.broker, peers[0].me.incarnation, 0)


async def test_a_free_bundle_is_redirected_to_the_preferred_broker() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        located = await peers[0].owners.locate(bundle_of(name), authoritative=False)
        assert not located.serves
        assert located.broker == peers[1].me
        assert await record_of(peers[0], name) is None


async def test_an_authoritative_question_is_not_redirected_again() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        located = await peers[0].owners.locate(bundle_of(name), authoritative=True)
        assert located.serves
        assert located.broker == peers[0].me


async def test_the_owner_is_named_by_every_broker() -> None:
    async with brokers(3) as peers:
        name = topic_of(peers[1], peers)
        await peers[1].owners.locate(bundle_of(name), authoritative=True)
        for peer in peers:
            located = await peer.owners.locate(bundle_of(name), authoritative=False)
            assert located.serves
            assert located.broker == peers[1].me


async def test_racing_brokers_agree_on_one_owner() -> None:
    async with brokers(3) as peers:
        name = topic_of(peers[0], peers)
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(peer.owners.locate(bundle_of(name), authoritative=True))
                for peer in peers
            ]
        owners = {task.result().broker.broker for task in asked}
        holders = {peer.me.broker for peer in peers if peer.owners.holds(bundle_of(name))}
        assert len(owners) == 1
        assert holders == owners


async def test_the_bundle_of_a_broker_whose_registration_is_gone_is_taken() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        await peers[1].owners.locate(bundle_of(name), authoritative=False)
        peers[1].store.expire()
        located = await peers[0].owners.locate(bundle_of(name), authoritative=False)
        assert located.serves
        assert located.broker == peers[0].me
        record = await record_of(peers[0], name)
        assert record is not None
        assert record.epoch == 1


async def test_the_bundle_of_a_broker_whose_port_refuses_is_taken() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        await peers[1].owners.locate(bundle_of(name), authoritative=False)
        peers[1].close_port()
        started = asyncio.get_running_loop().time()
        located = await peers[0].owners.locate(bundle_of(name), authoritative=False)
        assert located.serves
        assert located.broker == peers[0].me
        waited = asyncio.get_running_loop().time() - started
        assert waited >= (module.REFUSALS - 1) * module.REFUSAL_PAUSE_S


async def test_the_bundle_of_a_silent_broker_that_no_bookie_hears_is_taken() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        await peers[1].owners.locate(bundle_of(name), authoritative=False)
        peers[1].is_silent = True
        peers[0].witnesses.answers = [SILENT, SILENT, None]
        located = await peers[0].owners.locate(bundle_of(name), authoritative=False)
        assert located.serves
        assert located.broker == peers[0].me
        assert set(peers[0].witnesses.asked) == {(peers[1].me.broker, peers[1].me.incarnation)}
        await wait_until(lambda: peers[1].lost == [bundle_of(name)])


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([SILENT, SILENT, HEARD], id="one bookie hears the owner"),
        pytest.param([SILENT, None, None], id="too few bookies answer"),
        pytest.param([], id="no bookie is registered"),
    ],
)
async def test_a_silent_broker_keeps_its_bundle_if(answers: list[LastHeard | None]) -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        await peers[1].owners.locate(bundle_of(name), authoritative=False)
        peers[1].is_silent = True
        peers[0].witnesses.answers = answers
        located = await peers[0].owners.locate(bundle_of(name), authoritative=False)
        assert located.serves
        assert located.broker == peers[1].me


async def test_a_broker_that_answers_keeps_its_bundle_although_no_bookie_hears_it() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        await peers[1].owners.locate(bundle_of(name), authoritative=False)
        peers[0].witnesses.answers = [SILENT, SILENT, SILENT]
        located = await peers[0].owners.locate(bundle_of(name), authoritative=False)
        assert located.broker == peers[1].me
        assert peers[0].witnesses.asked == []


async def test_a_free_bundle_does_not_go_to_a_silent_broker() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        peers[1].is_silent = True
        located = await peers[0].owners.locate(bundle_of(name), authoritative=False)
        assert located.serves
        assert located.broker == peers[0].me


async def test_a_thousand_concurrent_lookups_share_two_pings_and_two_questions_at_most() -> None:
    # All but the first lookup share the second decision. It uses the answers of the first one, if
    # they are still fresh then: on a busy machine they may not be.
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        await peers[1].owners.locate(bundle_of(name), authoritative=False)
        peers[1].is_silent, peers[1].connections = True, 0
        peers[0].witnesses.answers = [HEARD, HEARD, HEARD]
        async with asyncio.TaskGroup() as group:
            for _ in range(1_000):
                group.create_task(peers[0].owners.locate(bundle_of(name), authoritative=False))
        assert peers[1].connections in (1, 2)
        assert len(peers[0].witnesses.asked) in (1, 2)


@pytest.mark.parametrize("asked", [0, 1], ids=["the next owner", "another broker"])
async def test_a_thousand_concurrent_lookups_of_a_free_bundle_share_two_decisions(
    asked: int,
) -> None:
    async with brokers(2) as peers:
        bundle, peer, requests = bundle_of(topic_of(peers[0], peers)), peers[asked], 0
        get = peer.store.get

        async def counted_get(path: str) -> Versioned | None:
            nonlocal requests
            requests += 1
            return await get(path)

        peer.store.get = counted_get  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            first = group.create_task(peer.owners.locate(bundle, authoritative=False))
            others = [
                group.create_task(peer.owners.locate(bundle, authoritative=False))
                for _ in range(1_000)
            ]
            await asyncio.sleep(0)
            first.cancel()
        assert first.cancelled()
        assert {task.result().broker for task in others} == {peers[0].me}
        assert requests < 20


async def test_a_lookup_is_not_answered_by_a_decision_that_began_before_it() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        bundle, read, go_on = bundle_of(name), asyncio.Event(), asyncio.Event()
        get = peers[0].store.get

        async def get_late(path: str) -> Versioned | None:
            stored = await get(path)
            read.set()
            await go_on.wait()
            return stored

        await peers[1].owners.locate(bundle, authoritative=True)
        async with asyncio.TaskGroup() as group:
            peers[0].store.get = get_late  # type: ignore[method-assign]
            early = group.create_task(peers[0].owners.locate(bundle, authoritative=False))
            await read.wait()
            await peers[1].owners.release(bundle, peers[1]._on_lost, to=peers[0].me)
            late = group.create_task(peers[0].owners.locate(bundle, authoritative=False))
            await settle()
            go_on.set()
        assert early.result().broker == peers[1].me
        assert late.result().broker == peers[0].me


async def test_the_former_owner_learns_that_its_bundle_was_taken() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        await peers[1].owners.locate(bundle_of(name), authoritative=False)
        peers[1].close_port()
        await peers[0].owners.locate(bundle_of(name), authoritative=False)
        await wait_until(lambda: peers[1].lost == [bundle_of(name)])
        assert not peers[1].owners.holds(bundle_of(name))


async def test_a_bundle_that_is_taken_while_its_record_is_read_is_given_up() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        bundle = bundle_of(name)
        await peers[1].owners.locate(bundle, authoritative=False)
        await settle()
        replied, delivered = asyncio.Event(), asyncio.Event()
        get = peers[1].store.get

        async def get_late(path: str) -> Versioned | None:
            stored = await get(path)
            replied.set()
            await delivered.wait()
            return stored

        peers[1].store.get = get_late  # type: ignore[method-assign]
        peers[1].owners.doubt(bundle)
        await replied.wait()
        peers[1].close_port()
        await peers[0].owners.locate(bundle, authoritative=False)
        await settle()  # the watch of the former owner reports the change
        delivered.set()
        await wait_until(lambda: peers[1].lost == [bundle])


async def test_a_restarted_broker_does_not_inherit_the_bundles_of_its_former_run() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[1], peers)
        bundle = bundle_of(name)
        former = Ownership(peers[1].me.broker, "f" * 32, 4)
        path = paths.ownership(bundle.tenant, bundle.namespace, bundle.range)
        value = codec.encode_ownership(former)
        await peers[0].store.put(path, value, expected=ABSENT)
        assert not peers[1].owners.holds(bundle)
        located = await peers[1].owners.locate(bundle_of(name), authoritative=False)
        assert located.serves
        record = await record_of(peers[1], name)
        assert record == Ownership(peers[1].me.broker, peers[1].me.incarnation, 5)


async def test_no_bundle_is_taken_while_the_session_is_suspended() -> None:
    async with brokers(1) as peers:
        held, free = TopicName.parse("public/n0/t"), TopicName.parse("public/n1/t")
        await peers[0].owners.locate(bundle_of(held), authoritative=False)
        peers[0].store.suspend()
        located = await peers[0].owners.locate(bundle_of(held), authoritative=False)
        assert located.broker == peers[0].me, "suspended is not lost"
        with pytest.raises((BundleUnavailable, Unavailable)):
            await peers[0].owners.locate(bundle_of(free), authoritative=True)
        peers[0].store.reconnect()
        assert await record_of(peers[0], free) is None


async def test_a_bundle_whose_log_failed_is_not_served_blindly() -> None:
    """A suspended session and a fenced log: most likely another broker has replaced this broker."""

    async with brokers(1) as peers:
        owners, name = peers[0].owners, TopicName.parse("t")
        await owners.locate(bundle_of(name), authoritative=True)
        owners.doubt(bundle_of(name))
        assert (await owners.locate(bundle_of(name), authoritative=False)).serves, (
            "the broker can still read the ownership record"
        )
        peers[0].store.suspend()
        owners.doubt(bundle_of(name))
        with pytest.raises(BundleUnavailable, match="suspended"):
            await owners.locate(bundle_of(name), authoritative=False)
        peers[0].store.reconnect()
        assert (await owners.locate(bundle_of(name), authoritative=False)).serves
        await settle()
        assert peers[0].lost == []


async def test_releasing_unloads_and_names_the_next_owner() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[0], peers)
        bundle = bundle_of(name)
        await peers[0].owners.locate(bundle_of(name), authoritative=False)
        seen: list[object] = []

        async def unload(unloading: Bundle) -> None:
            assert not peers[0].owners.holds(unloading)
            seen.append(peers[0].owners.next_owner_of(unloading))
            with pytest.raises(BundleUnavailable):
                await peers[0].owners.locate(bundle_of(name), authoritative=False)

        peers[0].owners.begin_stop()
        await peers[0].owners.release(bundle, unload)
        assert seen == [peers[1].me]
        assert not peers[0].owners.holds(bundle)
        located = await peers[1].owners.locate(bundle_of(name), authoritative=False)
        assert located.serves
        assert located.broker == peers[1].me


async def test_fields_of_a_later_version_are_kept_when_a_bundle_moves() -> None:
    async with brokers(2) as peers:
        name, later = topic_of(peers[0], peers), b"\xc2\x3e\x05later"  # field 1000
        bundle = bundle_of(name)
        path = paths.ownership(bundle.tenant, bundle.namespace, bundle.range)
        await peers[0].owners.locate(bundle_of(name), authoritative=False)
        stored = await peers[0].store.get(path)
        assert stored is not None
        await peers[0].store.put(path, stored.value + later, expected=stored.version)

        async def unload(_: Bundle) -> None:
            await settle()

        await peers[0].owners.release(bundle, unload)
        given = await peers[0].store.get(path)
        assert given is not None
        assert codec.decode_ownership(given.value).owner == peers[1].me.broker
        assert given.value.endswith(later)


async def test_a_dead_broker_is_not_the_next_owner() -> None:
    async with brokers(3) as peers:
        name = topic_of(peers[0], peers)
        bundle = bundle_of(name)
        await peers[0].owners.locate(bundle_of(name), authoritative=False)
        order = Census().order(bundle, {peer.me.broker: peer.me for peer in peers[1:]})
        first, second = (next(it for it in peers if it.me.broker == id_) for id_ in order)
        first.close_port()  # registered until its session expires
        seen: list[object] = []

        async def unload(unloading: Bundle) -> None:
            seen.append(peers[0].owners.next_owner_of(unloading))

        peers[0].owners.begin_stop()
        await peers[0].owners.release(bundle, unload)
        assert seen == [second.me]
        record = await record_of(second, name)
        assert record is not None
        assert record.owner == second.me.broker


async def test_a_stopping_broker_does_not_serve_bundles_handed_to_it() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[0], peers)
        bundle = bundle_of(name)
        await peers[0].owners.locate(bundle_of(name), authoritative=False)

        async def unload(_: Bundle) -> None:
            await settle()

        for peer in peers:
            peer.owners.begin_stop()
        await peers[0].owners.release(bundle, unload)
        with pytest.raises(BundleUnavailable):
            await peers[1].owners.locate(bundle_of(name), authoritative=False)
        assert not peers[1].owners.holds(bundle)


class SlowStore(MemoryStore):
    """A store. Changes take effect, but their replies wait until the test releases them."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.changed, self.replies = asyncio.Event(), asyncio.Event()

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        version = await super().put(path, value, expected=expected)
        self.changed.set()
        await self.replies.wait()
        return version


async def test_a_bundle_taken_while_the_stop_begins_is_not_served() -> None:
    """No code would release the bundle any more. Its topics would be opened, and the stop would
    never end."""

    async def _refusal(owners: Owners, name: TopicName) -> BundleUnavailable | None:
        try:
            await owners.locate(bundle_of(name), authoritative=True)
        except BundleUnavailable as error:
            return error
        return None

    async with brokers(1) as peers:
        name, store = TopicName.parse("t"), SlowStore(peers[0].tree)
        owners = Owners(
            store,
            peers[0].directory,
            peers[0].me,
            liveness=Liveness(FakeWitnesses()),
            on_lost=peers[0]._on_lost,
        )
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(_refusal(owners, name))
            await store.changed.wait()
            owners.begin_stop()
            assert owners.held == frozenset()
            store.replies.set()
            assert await asked is not None
        assert not owners.holds(bundle_of(name))
        assert await record_of(peers[0], name) is None, "the bundle is free for other brokers"


async def test_without_the_metadata_store_a_bundle_is_still_unloaded() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[0], peers)
        await peers[0].owners.locate(bundle_of(name), authoritative=False)
        unloaded: list[Bundle] = []

        async def unload(unloading: Bundle) -> None:
            unloaded.append(unloading)

        peers[0].store.suspend()
        peers[0].owners.begin_stop()
        await peers[0].owners.release(bundle_of(name), unload)
        assert unloaded == [bundle_of(name)]
        assert not peers[0].owners.holds(bundle_of(name))
        peers[0].store.expire()
        located = await peers[1].owners.locate(bundle_of(name), authoritative=False)
        assert located.broker == peers[1].me


async def test_a_record_that_is_lost_is_noticed() -> None:
    async with brokers(2) as peers:
        name = topic_of(peers[0], peers)
        bundle = bundle_of(name)
        await peers[0].owners.locate(bundle_of(name), authoritative=False)
        path = paths.ownership(bundle.tenant, bundle.namespace, bundle.range)
        stored = await peers[1].store.get(path)
        assert stored is not None
        await peers[1].store.delete(path, expected=stored.version)
        await wait_until(lambda: peers[0].lost == [bundle])
        assert not peers[0].owners.holds(bundle)


class StoreWithRival(MemoryStore):
    """A store. Another broker writes a record just before this broker watches the record."""

    def __init__(self, tree: MemoryTree, rival: Ownership) -> None:
        super().__init__(tree)
        self._tree = tree
        self._rival = codec.encode_ownership(rival)

    def watch(self, path: str, callback: Callable[[], None]) -> Callable[[], None]:
        node = self._tree.tree.get(path)
        if node is not None and path.startswith("/ownership/"):
            self._tree.tree.put(path, self._rival, node.version)
            self._tree.publish()
        return super().watch(path, callback)


async def test_a_change_just_before_the_watch_is_noticed() -> None:
    async with brokers(2) as peers:
        name, rival = TopicName.parse("t"), Ownership(peers[1].me.broker, "f" * 32, 7)
        store, lost = StoreWithRival(peers[0].tree, rival), []

        async def on_lost(bundle: Bundle) -> None:
            lost.append(bundle)

        owners = Owners(
            store,
            BrokerDirectory(store),
            peers[0].me,
            liveness=Liveness(FakeWitnesses()),
            on_lost=on_lost,
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(owners.run())
            await owners.locate(bundle_of(name), authoritative=True)
            await wait_until(lambda: lost == [bundle_of(name)])
            task.cancel()
        assert not owners.holds(bundle_of(name))


async def test_the_last_broker_leaves_its_bundle_free() -> None:
    async with brokers(1) as peers:
        name = topic_of(peers[0], peers)
        await peers[0].owners.locate(bundle_of(name), authoritative=False)

        async def unload(_: Bundle) -> None:
            await settle()

        peers[0].owners.begin_stop()
        await peers[0].owners.release(bundle_of(name), unload)
        assert await record_of(peers[0], name) is None
        with pytest.raises(BundleUnavailable):
            await peers[0].owners.locate(bundle_of(name), authoritative=True)


def quarters() -> list[Bundle]:
    ranges = ("0x00000000_0x40000000", "0x40000000_0x80000000")
    ranges += ("0x80000000_0xc0000000", "0xc0000000_0xffffffff")
    return [Bundle("public", "default", part) for part in ranges]


async def test_the_bundles_of_a_namespace_are_spread_although_one_broker_is_asked() -> None:
    async with brokers(2) as peers:
        for bundle in quarters():
            located = await peers[0].owners.locate(bundle, authoritative=False)
            target = next(peer for peer in peers if peer.me == located.broker)
            await target.owners.locate(bundle, authoritative=not located.serves)
        assert [len(peer.owners.held) for peer in peers] == [2, 2]


async def test_the_bundles_of_a_dead_owner_are_spread_over_the_others() -> None:
    async with brokers(3) as peers:
        bundles = quarters()
        for bundle in bundles:
            await peers[0].owners.locate(bundle, authoritative=True)
        peers[0].store.expire()
        peers[0].close_port()
        found = [await peers[1].owners.locate(each, authoritative=False) for each in bundles]
        chosen = [located.broker.broker for located in found]
        assert sorted(chosen.count(peer.me.broker) for peer in peers) == [0, 2, 2]


async def test_a_broker_that_stops_spreads_its_bundles() -> None:
    async with brokers(3) as peers:
        for bundle in quarters():
            await peers[0].owners.locate(bundle, authoritative=True)

        async def unload(_: Bundle) -> None:
            await settle()

        peers[0].owners.begin_stop()
        async with asyncio.TaskGroup() as group:
            for bundle in peers[0].owners.held:
                group.create_task(peers[0].owners.release(bundle, unload))
            group.create_task(peers[0].owners.wait_released())
        for peer in peers[1:]:
            peer.owners.recount(await read_owners(peer.store))
            for other in peers[1:]:
                assert peer.owners.census.count(owner_of(other.me)) == 2


async def test_a_bundle_is_handed_to_the_named_broker() -> None:
    async with brokers(3) as peers:
        bundle = quarters()[0]
        await peers[0].owners.locate(bundle, authoritative=True)
        for peer in peers[1:]:
            seen: list[object] = []

            async def unload(unloading: Bundle, seen: list[object] = seen) -> None:
                seen.append(peers[0].owners.next_owner_of(unloading))

            await peers[0].owners.release(bundle, unload, to=peer.me)
            assert seen == [peer.me]
            assert (await peer.owners.locate(bundle, authoritative=False)).broker == peer.me
            await peer.owners.release(bundle, unload, to=peers[0].me)
            assert (await peers[0].owners.locate(bundle, authoritative=False)).serves


async def test_verify_releases_lost_bundles_before_it_returns() -> None:
    async with brokers(2) as peers:
        taken, kept = (bundle_of(TopicName.parse(f"public/n{number}/t")) for number in range(2))
        for bundle in (taken, kept):
            await peers[1].owners.locate(bundle, authoritative=True)
        await settle()
        peers[1].store.watch = lambda *_: lambda: None  # type: ignore[method-assign]
        path = paths.ownership(taken.tenant, taken.namespace, taken.range)
        stored = await peers[0].store.get(path)
        assert stored is not None
        other = Ownership(peers[0].me.broker, peers[0].me.incarnation, 7)
        value = codec.encode_ownership(other)
        await peers[0].store.put(path, value, expected=stored.version)
        await peers[1].owners.verify()
        assert peers[1].lost == [taken]
        assert peers[1].owners.held == {kept}


async def test_lost_bundles_are_given_up_at_once_although_an_unload_takes_long() -> None:
    async with brokers(2) as peers:
        bundles = {bundle_of(TopicName.parse(f"public/n{number}/t")) for number in range(3)}
        peers[1].store.watch = lambda *_: lambda: None  # type: ignore[method-assign]
        for bundle in bundles:
            await peers[1].owners.locate(bundle, authoritative=True)
        await settle()
        go_on = asyncio.Event()

        async def unload(bundle: Bundle) -> None:
            peers[1].lost.append(bundle)
            await go_on.wait()

        peers[1].owners._on_lost = unload
        other = codec.encode_ownership(Ownership(peers[0].me.broker, peers[0].me.incarnation, 7))
        for bundle in bundles:
            path = paths.ownership(bundle.tenant, bundle.namespace, bundle.range)
            stored = await peers[0].store.get(path)
            assert stored is not None
            await peers[0].store.put(path, other, expected=stored.version)
        async with asyncio.TaskGroup() as group:
            verifying = group.create_task(peers[1].owners.verify())
            await wait_until(lambda: set(peers[1].lost) == bundles)
            assert peers[1].owners.held == frozenset()
            assert not verifying.done()
            go_on.set()


async def test_bundles_found_lost_before_the_store_fails_are_unloaded() -> None:
    async with brokers(2) as peers:
        bundles = [bundle_of(TopicName.parse(f"public/n{number}/t")) for number in range(2)]
        first, second = sorted(bundles, key=str)
        peers[1].store.watch = lambda *_: lambda: None  # type: ignore[method-assign]
        for bundle in bundles:
            await peers[1].owners.locate(bundle, authoritative=True)
        await settle()
        path = paths.ownership(first.tenant, first.namespace, first.range)
        stored = await peers[0].store.get(path)
        assert stored is not None
        other = codec.encode_ownership(Ownership(peers[0].me.broker, peers[0].me.incarnation, 7))
        await peers[0].store.put(path, other, expected=stored.version)
        get = peers[1].store.get

        async def get_once(path: str) -> Versioned | None:
            if path == paths.ownership(second.tenant, second.namespace, second.range):
                peers[1].store.get = get  # type: ignore[method-assign]
                raise Unavailable("the session is suspended")
            return await get(path)

        peers[1].store.get = get_once  # type: ignore[method-assign]
        await peers[1].owners.verify()
        assert peers[1].lost == [first]
        assert peers[1].owners.held == {second}


async def test_verifying_without_the_store_fails() -> None:
    async with brokers(1) as peers:
        bundle = bundle_of(TopicName.parse("t"))
        await peers[0].owners.locate(bundle, authoritative=True)
        peers[0].store.suspend()
        with pytest.raises(Unavailable):
            await peers[0].owners.verify()
        assert peers[0].owners.held == {bundle}
        peers[0].store.reconnect()
