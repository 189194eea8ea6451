"""Leases when sessions are suspended, lost or replaced, and the elections that use leases."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.metadata.election import Election
from magnetar.metadata.errors import LeaseTaken
from magnetar.metadata.lease import Lease
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.store import ABSENT, SessionState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PATH = "/bookies/available/b1"


def never(stored: bytes) -> bool:
    return False


class Held:
    """A lease, and a record of the notices to its owner."""

    def __init__(
        self,
        store: MemoryStore,
        value: bytes,
        replaces: Callable[[bytes], bool] = never,
    ) -> None:
        self.told: list[bool] = []
        self.lease = Lease(store, PATH, value, replaces=replaces, on_change=self.told.append)


@contextlib.asynccontextmanager
async def running(*runs: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:

        async def run(call: Callable[[], Awaitable[None]]) -> None:
            await call()

        tasks = [group.create_task(run(call)) for call in runs]
        await asyncio.sleep(1)
        yield
        for task in tasks:
            task.cancel()


async def test_a_lease_is_taken_and_reports_that_to_its_owner() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree)
    held = Held(store, b"me")
    assert not held.lease.held
    async with running(held.lease.run):
        assert held.told == [True]
        assert held.lease.held
        assert held.lease.holder == b"me"
        node = tree.tree.get(PATH)
        assert node is not None
        assert node.ephemeral_session == store.session_id


async def test_a_suspended_session_keeps_its_lease() -> None:
    store = MemoryStore()
    held = Held(store, b"me")
    async with running(held.lease.run):
        store.suspend()
        await asyncio.sleep(5)
        assert held.lease.held
        store.reconnect()
        await asyncio.sleep(1)
    assert held.told == [True]


async def test_a_lost_session_is_reported_at_once_and_the_node_created_again() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree)
    held = Held(store, b"me")
    async with running(held.lease.run):
        store.expire()
        assert held.told == [True, False]
        assert not held.lease.held
        await asyncio.sleep(5)
        assert tree.tree.get(PATH) is None
        store.reconnect()
        await asyncio.sleep(1)
        assert held.told == [True, False, True]
        node = tree.tree.get(PATH)
        assert node is not None
        assert node.ephemeral_session == store.session_id


async def test_a_deleted_node_is_created_again() -> None:
    tree = MemoryTree()
    store, other = MemoryStore(tree), MemoryStore(tree)
    held = Held(store, b"me")
    async with running(held.lease.run):
        await other.delete(PATH, expected=0)
        await asyncio.sleep(1)
        assert held.told == [True, False, True]
        assert tree.tree.get(PATH) is not None


@pytest.mark.parametrize("ephemeral", [True, False])
async def test_the_node_of_an_earlier_run_is_replaced_by_a_node_of_this_session(
    ephemeral: bool,
) -> None:
    tree = MemoryTree()
    dead = MemoryStore(tree)  # a killed process whose session has not expired yet
    if ephemeral:
        await dead.create_ephemeral(PATH, b"b1 epoch 4")
    else:
        await dead.put(PATH, b"b1 epoch 4", expected=ABSENT)
    store = MemoryStore(tree)
    held = Held(store, b"b1 epoch 5", lambda stored: stored.startswith(b"b1 "))
    async with running(held.lease.run):
        assert held.told == [True]
        tree.end_session(dead.session_id)
        await asyncio.sleep(1)
        node = tree.tree.get(PATH)
        assert node is not None
        assert node.value == b"b1 epoch 5"
        assert node.ephemeral_session == store.session_id
        assert held.told == [True]


async def test_a_node_with_an_equal_value_of_another_session_is_replaced() -> None:
    tree = MemoryTree()
    dead = MemoryStore(tree)
    await dead.create_ephemeral(PATH, b"me")
    store = MemoryStore(tree)
    held = Held(store, b"me")
    async with running(held.lease.run):
        assert held.lease.held
        node = tree.tree.get(PATH)
        assert node is not None
        assert node.ephemeral_session == store.session_id


async def test_a_lease_waits_until_the_node_of_another_process_disappears() -> None:
    tree = MemoryTree()
    other = MemoryStore(tree)
    await other.create_ephemeral(PATH, b"them")
    held = Held(MemoryStore(tree), b"me")
    async with running(held.lease.run):
        await asyncio.sleep(60)
        assert held.told == []
        assert held.lease.holder == b"them"
        other.expire()
        await asyncio.sleep(1)
        assert held.told == [True]


@pytest.mark.parametrize("seed", range(20))
async def test_of_two_leases_of_one_owner_the_older_ends(seed: int) -> None:
    tree = MemoryTree()
    chance = random.Random(seed)

    def held_at(epoch: int) -> Held:
        store = MemoryStore(tree, delay_s=lambda: chance.expovariate(50))
        return Held(store, b"%d" % epoch, lambda stored: int(stored) < epoch)

    old, new = held_at(4), held_at(5)
    ended: list[LeaseTaken] = []

    async def run_old() -> None:
        try:
            await old.lease.run()
        except LeaseTaken as taken:
            ended.append(taken)

    async with running(run_old), running(new.lease.run):
        assert [taken.holder for taken in ended] == [b"5"]
        # The old lease may have seen only the deletion, and may have created its node again.
        assert old.told[-1] is False
        assert new.told[-1] is True
        node = tree.tree.get(PATH)
        assert node is not None
        assert node.value == b"5"


async def test_the_value_can_be_changed_without_releasing_the_lease() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree)
    held = Held(store, b"writable")
    async with running(held.lease.run):
        held.lease.set_value(b"read-only")
        await asyncio.sleep(1)
        node = tree.tree.get(PATH)
        assert node is not None
        assert (node.value, node.version) == (b"read-only", 1)
        assert held.lease.holder == b"read-only"
        assert held.told == [True]


async def test_a_closed_store_holds_no_lease() -> None:
    store = MemoryStore()
    held = Held(store, b"me")
    async with running(held.lease.run):
        await store.close()
        assert not held.lease.held
        assert held.told == [True, False]


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
async def test_after_random_faults_the_node_exists_and_belongs_to_the_lease(seed: int) -> None:
    chance = random.Random(seed)
    trouble = True

    def faults(operation: str, path: str) -> Fault | None:
        return chance.choice(list(Fault)) if trouble and chance.random() < 0.3 else None

    tree = MemoryTree()
    store = MemoryStore(tree, delay_s=lambda: chance.expovariate(20), faults=faults)
    vandal = MemoryStore(tree)
    held = Held(store, b"me")
    trouble = True
    async with running(held.lease.run):
        for _ in range(15):
            await asyncio.sleep(chance.expovariate(5))
            match chance.choice(["suspend", "expire", "reconnect", "lag", "delete"]):
                case "suspend" if store.session_state is SessionState.CONNECTED:
                    store.suspend()
                case "expire" if store.session_state is SessionState.CONNECTED:
                    store.expire()
                case "expire" if store.session_state is SessionState.SUSPENDED:
                    tree.end_session(store.session_id)
                case "reconnect" if store.session_state is not SessionState.CONNECTED:
                    store.reconnect()
                case "lag":
                    store.fall_behind()
                case "delete":
                    node = await vandal.get(PATH)
                    if node is not None:
                        await vandal.delete(PATH, expected=node.version)
        trouble = False
        if store.session_state is not SessionState.CONNECTED:
            store.reconnect()
        store.catch_up()
        await asyncio.sleep(10)
        node = tree.tree.get(PATH)
        assert node is not None
        assert (node.value, node.ephemeral_session) == (b"me", store.session_id)
        assert held.lease.held
    assert all(before is not after for before, after in zip(held.told, held.told[1:]))  # noqa: B905
    assert held.told[-1]


# ---- elections -----------------------------------------------------------------------------------


class Candidate:
    def __init__(self, tree: MemoryTree, name: str) -> None:
        self.store = MemoryStore(tree)
        self.told: list[bool] = []
        self.election = Election(
            self.store, "/brokers/leader", name.encode(), on_change=self.told.append
        )


async def test_one_candidate_leads_and_all_know_the_leader() -> None:
    tree = MemoryTree()
    candidates = [Candidate(tree, name) for name in "abc"]
    async with running(*(candidate.election.run for candidate in candidates)):
        leaders = [candidate for candidate in candidates if candidate.election.is_leader]
        assert len(leaders) == 1
        assert {candidate.election.leader for candidate in candidates} == {
            leaders[0].election.leader
        }
        leaders[0].store.expire()
        assert leaders[0].told == [True, False]
        await asyncio.sleep(1)
        successors = [candidate for candidate in candidates if candidate.election.is_leader]
        assert len(successors) == 1
        assert successors != leaders
        leaders[0].store.reconnect()
        await asyncio.sleep(1)
        assert leaders[0].election.leader == successors[0].election.leader
        assert not leaders[0].election.is_leader


async def test_a_leader_without_a_connection_does_not_act() -> None:
    tree = MemoryTree()
    one = Candidate(tree, "one")
    async with running(one.election.run):
        assert one.told == [True]
        one.store.suspend()
        assert one.told == [True, False]
        assert not one.election.is_leader
        one.store.reconnect()
        await asyncio.sleep(1)
        assert one.told == [True, False, True]


async def test_a_leader_whose_node_is_replaced_becomes_a_candidate_again() -> None:
    tree = MemoryTree()
    one, two = Candidate(tree, "one"), Candidate(tree, "two")
    async with running(one.election.run):
        assert one.election.is_leader
        # Another process creates the node before the first one can create it again.
        tree.tree.delete("/brokers/leader", 0)
        tree.tree.create("/brokers/leader", b"two", two.store.session_id)
        tree.publish()
        await asyncio.sleep(1)
        assert one.told == [True, False]
        assert one.election.leader == b"two"
        two.store.expire()
        await asyncio.sleep(1)
        assert one.told == [True, False, True]
