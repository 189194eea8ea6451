"""The cluster's id: all brokers use the id of the first broker that stores one."""

from __future__ import annotations

import asyncio
import random

import pytest

from magnetar.metadata import paths
from magnetar.metadata.cluster import cluster_id
from magnetar.metadata.errors import CorruptRecord
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.store import ABSENT


async def test_processes_that_start_together_get_the_same_id() -> None:
    tree = MemoryTree()
    chance = random.Random(1)

    def faults(operation: str, path: str) -> Fault | None:
        return chance.choice([None, *Fault])

    async def member(seed: int) -> str:
        store = MemoryStore(tree, delay_s=lambda: chance.expovariate(10), faults=faults)
        deadline = asyncio.get_running_loop().time() + 1000
        return await cluster_id(store, chance=random.Random(seed), deadline=deadline)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(member(seed)) for seed in range(5)]
    found = {task.result() for task in tasks}
    assert len(found) == 1
    assert len(found.pop()) == 32


async def test_a_damaged_id_is_not_replaced() -> None:
    store = MemoryStore()
    await store.put(paths.CLUSTER, b"what is this", expected=ABSENT)
    deadline = asyncio.get_running_loop().time() + 1
    with pytest.raises(CorruptRecord):
        await cluster_id(store, chance=random.Random(1), deadline=deadline)
