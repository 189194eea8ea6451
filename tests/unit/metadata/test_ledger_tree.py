"""Ledger ids are streamed in order from any start, while ledgers are created and deleted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.metadata import paths
from magnetar.metadata.ledger_tree import ledger_ids
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import LedgerId
from magnetar.metadata.store import ABSENT

# Neighbouring ids at the edges of all folder levels, and ids that lie far apart.
ids = st.one_of(
    st.integers(0, 3),
    st.integers(9_998, 10_002),
    st.integers(10**8 - 2, 10**8 + 2),
    st.integers(10**12 - 2, 10**12 + 2),
    st.integers(10**16 - 2, 10**16 + 2),
    st.integers(0, 2**63 - 1),
)


@settings(max_examples=60)
@given(st.sets(ids, max_size=12), st.one_of(st.just(-1), ids))
async def test_all_ids_after_a_start_are_returned_in_order(ledgers: set[int], after: int) -> None:
    store = MemoryStore()
    for ledger in ledgers:
        await store.put(paths.ledger(LedgerId(ledger)), b"", expected=ABSENT)
    found = [each async for each in ledger_ids(store, paths.LEDGERS, after=after)]
    assert found == sorted(ledger for ledger in ledgers if ledger > after)


async def test_folders_before_the_first_wanted_id_are_not_read() -> None:
    asked: list[str] = []
    store = MemoryStore(faults=lambda operation, path: asked.append(path))  # type: ignore[func-returns-value]
    for ledger in (1, 10_001, 20_001):
        await store.put(paths.ledger(LedgerId(ledger)), b"", expected=ABSENT)
    asked.clear()
    assert [each async for each in ledger_ids(store, paths.LEDGERS, after=19_999)] == [20_001]
    assert f"{paths.LEDGERS}/0000/0000/0000" not in asked
    assert f"{paths.LEDGERS}/0000/0000/0001" not in asked


async def test_a_folder_that_vanishes_counts_as_empty() -> None:
    store = MemoryStore()
    for ledger in (1, 10_001):
        await store.put(paths.ledger(LedgerId(ledger)), b"", expected=ABSENT)
    found = []
    async for ledger in ledger_ids(store, paths.LEDGERS):
        found.append(ledger)
        if ledger == 1:
            await store.delete(paths.ledger(LedgerId(10_001)), expected=0)
            await store.delete(f"{paths.LEDGERS}/0000/0000/0001", expected=0)
    assert found == [1]
