"""The conditions under which bundles move to brokers that own fewer bundles."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.witnesses import FakeWitnesses

from magnetar.broker.balance import BalanceRules
from magnetar.broker.ownership.balancer import MOVES_PER_ROUND_MAX, Balancer
from magnetar.broker.ownership.brokers import BrokerDirectory
from magnetar.broker.ownership.bundle import Bundle
from magnetar.broker.ownership.liveness import ANSWER_FRESH_S, Liveness, Port
from magnetar.broker.ownership.owners import Owners
from magnetar.metadata import codec, paths
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BrokerId, BrokerRegistration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RULES = BalanceRules(period_s=60.0, grace_s=600.0)


class Peer:
    """The ownership part of one broker."""

    def __init__(self, tree: MemoryTree, number: int, rules: BalanceRules) -> None:
        self.store = MemoryStore(tree)
        url = f"grpc://b{number}:1"
        self.me = BrokerRegistration(BrokerId(f"b{number}"), f"{number:032x}", url, "", "")
        self.silent: set[str] = set()  # brokers whose ports do not answer it
        self.unloaded: list[Bundle] = []
        self.gate = asyncio.Event()  # closing a bundle's topics waits for it
        self.gate.set()
        directory = BrokerDirectory(self.store)
        liveness = Liveness(FakeWitnesses(), look_at_port=self._look)
        self.owners = Owners(
            self.store, directory, self.me, liveness=liveness, on_lost=self._unload
        )
        self.balancer = Balancer(
            self.store,
            directory,
            self.owners,
            self.me,
            liveness=liveness,
            unload=self._unload,
            rules=rules,
        )

    async def register(self) -> None:
        path = paths.broker_available(self.me.broker)
        await self.store.create_ephemeral(path, codec.encode_broker_registration(self.me))

    async def take(self, count: int, namespace: str = "n") -> None:
        for number in range(count):
            bundle = Bundle("t", f"{namespace}{number}", "0x00000000_0x40000000")
            await self.owners.locate(bundle, authoritative=True)

    async def _unload(self, bundle: Bundle) -> None:
        self.unloaded.append(bundle)
        await self.gate.wait()

    async def _look(self, broker: BrokerRegistration) -> tuple[Port, float]:
        return (Port.SILENT if broker.broker in self.silent else Port.ANSWERS), ANSWER_FRESH_S


class Cluster:
    def __init__(self, group: asyncio.TaskGroup, rules: BalanceRules) -> None:
        self.tree = MemoryTree()
        self.peers: list[Peer] = []
        self.rules = rules
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> Peer:
        peer = Peer(self.tree, len(self.peers), self.rules)
        self.peers.append(peer)
        await peer.register()
        for run in (peer.owners.run, peer.balancer.run):
            self._tasks.append(self._group.create_task(run()))
        return peer

    async def rounds(self, count: int) -> None:
        await asyncio.sleep(count * self.rules.period_s + 1.0)

    async def numbers(self) -> list[int]:
        """The number of bundles that each broker owns by the records."""
        found = [0] * len(self.peers)
        for namespace in await self.peers[0].store.children(f"{paths.OWNERSHIP}/t"):
            folder = f"{paths.OWNERSHIP}/t/{namespace}"
            for part in await self.peers[0].store.children(folder):
                stored = await self.peers[0].store.get(f"{folder}/{part}")
                assert stored is not None
                found[int(codec.decode_ownership(stored.value).owner[1:])] += 1
        return found

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def cluster(rules: BalanceRules = RULES) -> AsyncIterator[Cluster]:
    async with asyncio.TaskGroup() as group:
        it = Cluster(group, rules)
        yield it
        it.end()


async def test_a_broker_that_joins_gets_its_share_after_a_round_that_saw_it() -> None:
    async with cluster() as it:
        first = await it.join()
        await first.take(4)
        await it.rounds(1)
        await it.join()
        await asyncio.sleep(RULES.period_s)
        assert await it.numbers() == [4, 0], "the round read a different set of brokers"
        await asyncio.sleep(RULES.period_s)
        assert await it.numbers() == [2, 2]
        assert first.balancer.moved == 2
        await it.rounds(10)
        assert await it.numbers() == [2, 2]
        assert [peer.balancer.moved for peer in it.peers] == [2, 0]


async def test_a_round_moves_no_more_than_the_limit() -> None:
    async with cluster() as it:
        first = await it.join()
        await first.take(60)
        await it.join()
        await it.rounds(2)
        assert await it.numbers() == [60 - MOVES_PER_ROUND_MAX, MOVES_PER_ROUND_MAX]
        await it.rounds(3)
        assert await it.numbers() == [30, 30]


async def test_a_round_takes_bundles_of_all_namespaces() -> None:
    async with cluster() as it:
        first = await it.join()
        bundles = [
            Bundle("t", namespace, f"0x{part:08x}_0x{part + 1:08x}")
            for namespace, count in (("a", 10), ("b", 9))
            for part in range(count)
        ]
        for bundle in bundles:
            await first.owners.locate(bundle, authoritative=True)
        await it.join()
        await it.rounds(2)
        assert Counter(bundle.namespace for bundle in first.unloaded) == {"a": 5, "b": 4}


async def test_two_brokers_with_too_many_give_their_parts() -> None:
    async with cluster() as it:
        for namespace in ("a", "b"):
            await (await it.join()).take(6, namespace)
        await it.rounds(1)
        await it.join()
        await it.rounds(3)
        assert await it.numbers() == [4, 4, 4]
        assert sum(peer.balancer.moved for peer in it.peers) == 4


@pytest.mark.parametrize("case", ["switched off", "a silent target"])
async def test_no_bundle_moves_with(case: str) -> None:
    rules = BalanceRules(enabled=case != "switched off", period_s=60.0)
    async with cluster(rules) as it:
        first = await it.join()
        await first.take(4)
        await it.join()
        if case == "a silent target":
            first.silent = {"b1"}
        await it.rounds(5)
        assert await it.numbers() == [4, 0]
        assert first.owners.census.count((first.me.broker, first.me.incarnation)) == 4


async def test_no_bundle_moves_while_brokers_join_and_leave() -> None:
    async with cluster() as it:
        first = await it.join()
        await first.take(4)
        for number in range(1, 5):
            await it.join()
            await asyncio.sleep(RULES.period_s)
            assert await it.numbers() == [4] + [0] * number


async def test_a_bundle_moves_once_within_the_grace_period() -> None:
    """The other broker ends each time after it has received its share."""
    async with cluster() as it:
        first = await it.join()
        await first.take(2)
        for _ in range(3):
            other = await it.join()
            await it.rounds(3)
            other.store.expire()
            for number in range(2):
                bundle = Bundle("t", f"n{number}", "0x00000000_0x40000000")
                await first.owners.locate(bundle, authoritative=True)
            await it.rounds(1)
        assert first.balancer.moved == 2, "each of the two bundles once"
        await it.join()
        await asyncio.sleep(RULES.grace_s)
        await it.rounds(2)
        assert first.balancer.moved == 3


async def test_a_stop_waits_for_a_move_that_is_under_way() -> None:
    async with cluster() as it:
        first = await it.join()
        await first.take(4)
        first.gate.clear()
        await it.join()
        await it.rounds(2)
        assert len(first.unloaded) == 1
        first.owners.begin_stop()
        async with asyncio.TaskGroup() as stop:
            for bundle in first.owners.held:
                stop.create_task(first.owners.release(bundle, first._unload))
            waiting = stop.create_task(first.owners.wait_released())
            await asyncio.sleep(1.0)
            assert not waiting.done()
            first.gate.set()
        assert await it.numbers() == [0, 4]


async def test_a_failing_metadata_store_ends_a_round_and_not_the_balancer() -> None:
    async with cluster() as it:
        first = await it.join()
        await first.take(4)
        await it.join()
        first.store.suspend()
        await asyncio.sleep(RULES.period_s * 2)
        first.store.reconnect()
        assert await it.numbers() == [4, 0]
        await it.rounds(2)
        assert await it.numbers() == [2, 2]
