"""The entry cache: one budget, and the oldest entry is dropped first."""

from __future__ import annotations

from fakes.entries import entry_of
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.entry import OVERHEAD_BYTES, StoredEntry
from magnetar.broker.log.position import Position


def entry_at(ledger: int, number: int, size: int = 10) -> StoredEntry:
    return StoredEntry(Position(ledger, number), number, 0, entry_of("x" * size))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5000)), max_size=60))
def test_the_cache_holds_the_newest_entries_that_fit(sizes: list[tuple[int, int]]) -> None:
    cache = EntryCache(20_000)
    added: list[StoredEntry] = []
    for number, (ledger, size) in enumerate(sizes):
        added.append(entry_at(ledger, number, size))
        cache.put(added[-1])
        cache.check()
    kept: list[StoredEntry] = []
    for entry in reversed(added):
        if sum(other.held_bytes for other in kept) + entry.held_bytes > 20_000:
            break
        kept.append(entry)
    found = [e for ledger in (1, 2, 3) for e in cache.of_ledger(ledger).values()]
    assert sorted(found, key=lambda e: e.position.entry) == list(reversed(kept))


def test_an_entry_beyond_the_budget_evicts_nothing() -> None:
    cache = EntryCache(3 * OVERHEAD_BYTES)
    cache.put(entry_at(1, 0))
    cache.put(entry_at(1, 1, size=4 * OVERHEAD_BYTES))
    assert list(cache.of_ledger(1)) == [0]
    assert cache.of_ledger(2) == {}
    cache.check()
