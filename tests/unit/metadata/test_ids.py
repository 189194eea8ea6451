"""No ledger id is issued twice when requests or replies are lost. A new id exceeds the ids that a
topic has."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.metadata import paths
from magnetar.metadata.codec import decode_ledger_counter, encode_ledger_counter
from magnetar.metadata.errors import CorruptRecord, Unavailable
from magnetar.metadata.ids import BLOCK, LedgerIds
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.model import NO_LEDGER, LedgerId
from magnetar.metadata.store import ABSENT


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def take(ids: LedgerIds, newer_than: int = -1) -> int:
    return await ids.next(LedgerId(newer_than), deadline=later(100))


async def test_ids_start_at_zero_and_cost_one_write_per_block() -> None:
    writes = 0

    def count(operation: str, path: str) -> None:
        nonlocal writes
        writes += operation == "put"

    ids = LedgerIds(MemoryStore(faults=count))
    taken = [await take(ids) for _ in range(2 * BLOCK + 1)]
    assert taken == list(range(2 * BLOCK + 1))
    assert writes == 3


async def test_processes_take_turns_by_blocks() -> None:
    tree = MemoryTree()
    one, two = LedgerIds(MemoryStore(tree)), LedgerIds(MemoryStore(tree))
    assert [await take(one), await take(two), await take(one)] == [0, BLOCK, 1]
    again = LedgerIds(MemoryStore(tree))  # a restarted process does not continue the old block
    assert await take(again) == 2 * BLOCK


async def test_an_id_exceeds_what_the_topic_has() -> None:
    tree = MemoryTree()
    one, two = LedgerIds(MemoryStore(tree)), LedgerIds(MemoryStore(tree))
    assert await take(one) == 0
    moved = await take(two)  # the topic got this id from another broker and then moved here
    assert await take(one, moved - 1) == 2 * BLOCK
    assert await take(one, moved) == 2 * BLOCK + 1
    assert await take(one, 2 * BLOCK + 1) == 2 * BLOCK + 2
    assert await take(two, moved) == moved + 1  # the block of `two` has greater ids


async def test_an_id_from_a_foreign_counter_moves_the_counter_on() -> None:
    tree = MemoryTree()
    ids = LedgerIds(MemoryStore(tree))
    assert await take(ids, 5_000) == 5_001
    stored = tree.tree.get(paths.NEXT_LEDGER_ID)
    assert stored is not None
    assert decode_ledger_counter(stored.value) == 5_001 + BLOCK


async def test_fields_of_a_later_version_beside_the_counter_are_kept() -> None:
    tree, later = MemoryTree(), b"\xc2\x3e\x05later"  # field 1000
    store = MemoryStore(tree)
    value = encode_ledger_counter(LedgerId(7)) + later
    await store.put(paths.NEXT_LEDGER_ID, value, expected=ABSENT)
    assert await take(LedgerIds(store)) == 7
    stored = tree.tree.get(paths.NEXT_LEDGER_ID)
    assert stored is not None
    assert stored.value == encode_ledger_counter(LedgerId(7 + BLOCK)) + later


async def test_concurrent_requests_for_ids_share_one_write() -> None:
    puts: list[str] = []
    store = MemoryStore(
        delay_s=lambda: 0.1,
        faults=lambda operation, path: puts.append(path) if operation == "put" else None,
    )
    ids = LedgerIds(store)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(take(ids)) for _ in range(20)]
    assert sorted(task.result() for task in tasks) == list(range(20))
    assert len(puts) == 1


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
async def test_no_id_is_issued_twice_when_requests_or_replies_are_lost(seed: int) -> None:
    chance = random.Random(seed)

    def faults(operation: str, path: str) -> Fault | None:
        return chance.choice(list(Fault)) if chance.random() < 0.4 else None

    tree = MemoryTree()
    taken: list[int] = []

    async def process() -> None:
        store = MemoryStore(tree, delay_s=lambda: chance.expovariate(100), faults=faults)
        ids = LedgerIds(store)
        newest = -1
        for _ in range(8):
            if chance.random() < 0.4:
                newest = max([newest, *taken])  # another process has issued this id to the topic
            if chance.random() < 0.2:
                store.fall_behind()
            ledger = await take(ids, newest)
            assert ledger > newest
            newest = ledger
            taken.append(ledger)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(process())
    assert len(set(taken)) == len(taken) == 24


async def test_take_fails_at_its_deadline() -> None:
    ids = LedgerIds(MemoryStore(faults=lambda operation, path: Fault.NOT_SENT))
    with pytest.raises(Unavailable):
        await ids.next(NO_LEDGER, deadline=later(2))
    assert asyncio.get_running_loop().time() < 3


async def test_a_damaged_counter_is_not_started_over() -> None:
    store = MemoryStore()
    await store.put(paths.NEXT_LEDGER_ID, b"", expected=ABSENT)
    with pytest.raises(CorruptRecord):
        await take(LedgerIds(store))
