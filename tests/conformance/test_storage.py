"""The contract of every `Storage` implementation: what a bookie expects of its disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest
from fakes.bookies import crash_image
from fakes.memory_storage import MemoryStorage
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.bookie.storage.format import ID_MAX, entry_key, ledger_key
from magnetar.bookie.storage.rocks import RocksStorage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from magnetar.bookie.storage.store import Storage

BIG = 100_000  # RocksDB stores values of this size in a blob file


class Disk(Protocol):
    """A store that a test can close or kill, and open again."""

    def open(self) -> Storage: ...
    def reopen(self, storage: Storage) -> Storage:
        """Open the store again after a clean close."""
        ...

    def crash(self, storage: Storage) -> Storage:
        """Open the store again after a kill, without a close."""
        ...


class MemoryDisk:
    def open(self) -> MemoryStorage:
        return MemoryStorage()

    def reopen(self, storage: MemoryStorage) -> MemoryStorage:
        storage.close()
        return storage.crash()

    def crash(self, storage: MemoryStorage) -> MemoryStorage:
        return storage.crash()


class RocksDisk:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._images = 0

    def open(self) -> RocksStorage:
        return RocksStorage(self._path / "0", create=True)

    def reopen(self, storage: RocksStorage) -> RocksStorage:
        storage.close()
        return RocksStorage(self._path / str(self._images), create=False)

    def crash(self, storage: RocksStorage) -> RocksStorage:
        image = self._path / str(self._images + 1)
        crash_image(self._path / str(self._images), image)
        storage.close()
        self._images += 1
        return RocksStorage(image, create=False)


@pytest.fixture(params=["memory", "rocks"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return MemoryDisk() if request.param == "memory" else RocksDisk(tmp_path)


@pytest.fixture
def storage(disk: Disk) -> Iterator[Storage]:
    storage = disk.open()
    yield storage
    storage.close()


def put_entries(storage: Storage, ledger: int, entries: Iterator[int] | range | list[int]) -> None:
    storage.write([(ledger_key(ledger), b"record%d" % ledger)])
    storage.write([(entry_key(ledger, entry), b"%d:%d" % (ledger, entry)) for entry in entries])


def test_an_empty_store_returns_no_entries_and_no_ledgers(storage: Storage) -> None:
    assert storage.ledger_record(1) is None
    assert storage.entry(1, 0) is None
    assert storage.last_entry(1) is None
    assert storage.run(1, 0, ID_MAX, bytes_max=100, entries_max=10) == []
    assert storage.entry_ids(1, 0, entries_max=10) == []
    assert storage.ledgers(-1, ledgers_max=10) == []


def test_a_write_can_be_read_at_once(storage: Storage) -> None:
    big = b"v" * BIG
    storage.write([(ledger_key(7), b"r"), (entry_key(7, 0), b"small"), (entry_key(7, 1), big)])
    assert storage.ledger_record(7) == b"r"
    assert storage.entry(7, 0) == b"small"
    assert storage.entry(7, 1) == big
    assert storage.last_entry(7) == (1, big)


def test_a_later_put_replaces_an_earlier_one_also_within_a_batch(storage: Storage) -> None:
    storage.write([(ledger_key(7), b"1"), (ledger_key(7), b"2")])
    assert storage.ledger_record(7) == b"2"
    storage.write([(ledger_key(7), b"3")])
    assert storage.ledger_record(7) == b"3"


def test_ledgers_do_not_see_each_other(storage: Storage) -> None:
    put_entries(storage, 1, [0, 1, 5])
    put_entries(storage, 2, [])
    put_entries(storage, 3, [4])
    assert storage.last_entry(1) == (5, b"1:5")
    assert storage.last_entry(2) is None
    assert storage.last_entry(3) == (4, b"3:4")
    assert storage.last_entry(0) is None
    assert storage.run(2, 0, ID_MAX, bytes_max=100, entries_max=10) == []
    assert storage.entry_ids(1, 0, entries_max=10) == [0, 1, 5]
    assert storage.run(1, 5, ID_MAX, bytes_max=100, entries_max=10) == [b"1:5"]


def test_the_greatest_ids_are_stored_listed_and_deleted(storage: Storage) -> None:
    put_entries(storage, ID_MAX, [ID_MAX - 1, ID_MAX])
    assert storage.last_entry(ID_MAX) == (ID_MAX, b"%d:%d" % (ID_MAX, ID_MAX))
    run = storage.run(ID_MAX, ID_MAX - 1, ID_MAX, bytes_max=10**6, entries_max=10)
    assert len(run) == 2
    assert storage.ledgers(ID_MAX - 1, ledgers_max=10) == [ID_MAX]
    assert storage.ledgers(ID_MAX, ledgers_max=10) == []
    storage.delete_ledger(ID_MAX, None)
    assert storage.entry_ids(ID_MAX, 0, entries_max=10) == []


def test_a_run_ends_at_the_first_gap_at_last_and_at_its_limits(storage: Storage) -> None:
    put_entries(storage, 1, [0, 1, 2, 3, 4, 6, 7])
    everything = [b"1:0", b"1:1", b"1:2", b"1:3", b"1:4"]
    assert storage.run(1, 0, ID_MAX, bytes_max=10**6, entries_max=100) == everything
    assert storage.run(1, 0, 4, bytes_max=10**6, entries_max=100) == everything
    assert storage.run(1, 1, 2, bytes_max=10**6, entries_max=100) == everything[1:3]
    assert storage.run(1, 0, 10, bytes_max=10**6, entries_max=2) == everything[:2]
    assert storage.run(1, 5, 10, bytes_max=10**6, entries_max=100) == []
    assert storage.run(1, 6, 10, bytes_max=10**6, entries_max=100) == [b"1:6", b"1:7"]
    # Entries have three bytes: the run reaches the limit with its first, second or third entry.
    assert len(storage.run(1, 0, 4, bytes_max=1, entries_max=100)) == 1
    assert len(storage.run(1, 0, 4, bytes_max=3, entries_max=100)) == 1
    assert len(storage.run(1, 0, 4, bytes_max=4, entries_max=100)) == 2
    assert len(storage.run(1, 0, 4, bytes_max=7, entries_max=100)) == 3


def test_ledgers_are_listed_in_pages(storage: Storage) -> None:
    for ledger in [5, 0, 300, 70_000]:
        put_entries(storage, ledger, [0])
    assert storage.ledgers(-1, ledgers_max=10) == [0, 5, 300, 70_000]
    assert storage.ledgers(-1, ledgers_max=2) == [0, 5]
    assert storage.ledgers(5, ledgers_max=2) == [300, 70_000]
    assert storage.ledgers(70_000, ledgers_max=2) == []


def test_deleting_a_ledger_keeps_its_neighbours(disk: Disk) -> None:
    storage = disk.open()
    for ledger in [1, 2, 3]:
        put_entries(storage, ledger, [0, 1, 2])
    storage.delete_ledger(2, b"stone")
    storage.sync()
    storage = disk.crash(storage)
    assert storage.ledgers(-1, ledgers_max=10) == [1, 3]
    assert storage.ledger_record(2) is None
    assert storage.tombstone(2) == b"stone"
    assert storage.last_entry(2) is None
    assert storage.entry_ids(2, 0, entries_max=10) == []
    assert storage.entry_ids(1, 0, entries_max=10) == [0, 1, 2]
    assert storage.entry_ids(3, 0, entries_max=10) == [0, 1, 2]
    storage.close()


def test_tombstones_survive_a_crash_and_can_be_removed(disk: Disk) -> None:
    def stones(after: int, ledgers_max: int) -> list[int]:
        found = storage.tombstones(after, ledgers_max=ledgers_max)
        assert all(storage.tombstone(ledger) == stone for ledger, stone in found)
        return [ledger for ledger, _ in found]

    storage = disk.open()
    for ledger in [0, 1, 2, ID_MAX]:
        put_entries(storage, ledger, [0])
    assert stones(-1, 10) == []
    for ledger in [0, 2, ID_MAX]:
        storage.delete_ledger(ledger, b"stone%d" % ledger)
    storage.delete_ledger(1, None)
    storage.sync()
    storage = disk.crash(storage)
    assert stones(-1, 10) == [0, 2, ID_MAX]
    assert stones(-1, 2) == [0, 2]
    assert stones(0, 10) == [2, ID_MAX]
    assert stones(2, 1) == [ID_MAX]
    assert stones(ID_MAX, 1) == []
    assert storage.tombstone(2) == b"stone2"
    assert storage.tombstone(1) is None
    assert storage.ledgers(-1, ledgers_max=10) == []
    put_entries(storage, 1, [7])
    assert storage.entry_ids(1, 0, entries_max=10) == [7]
    storage.reclaim(0, 2)
    assert storage.entry_ids(1, 0, entries_max=10) == [7]
    storage.delete_tombstones([0, ID_MAX])
    assert stones(-1, 10) == [2]
    storage.close()


def test_the_sequence_grows_by_one_with_each_put_and_survives(disk: Disk) -> None:
    storage = disk.open()
    before = storage.sequence()
    put_entries(storage, 1, range(10))
    assert storage.sequence() == before + 11
    storage.sync()
    storage = disk.crash(storage)
    assert storage.sequence() >= before + 11
    put_entries(storage, 2, range(10))
    after = storage.sequence()
    storage = disk.reopen(storage)
    assert storage.sequence() >= after
    storage.close()


def test_synced_writes_survive_a_crash(disk: Disk) -> None:
    storage = disk.open()
    put_entries(storage, 1, range(100))
    storage.write([(entry_key(1, 100), b"x" * BIG)])
    storage.sync()
    storage = disk.crash(storage)
    assert storage.entry_ids(1, 0, entries_max=1000) == list(range(101))
    assert storage.entry(1, 100) == b"x" * BIG
    assert storage.ledger_record(1) == b"record1"
    storage.close()


def test_a_clean_close_keeps_unsynced_writes(disk: Disk) -> None:
    storage = disk.open()
    put_entries(storage, 1, range(10))
    storage = disk.reopen(storage)
    assert storage.entry_ids(1, 0, entries_max=100) == list(range(10))
    storage.close()


# After a power cut, a prefix of the unsynced writes survives.
# tests/unit/bookie/storage/test_rocks.py cuts RocksDB's log at each byte.


@given(
    batches=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=3), max_size=8),
    synced=st.integers(0, 8),
    kept=st.integers(0, 8),
)
@settings(max_examples=100, deadline=None)
def test_memory_storage_keeps_a_prefix_of_whole_batches_after_a_crash(
    batches: list[list[int]], synced: int, kept: int
) -> None:
    storage = MemoryStorage()
    for at, batch in enumerate(batches):
        if at == synced:
            storage.sync()
        storage.write([(entry_key(1, entry), b"%d" % at) for entry in batch])
    survivors = min(synced, len(batches)) if synced < len(batches) else 0
    kept = min(kept, storage.unsynced)
    crashed = storage.crash(kept=kept)
    expected: dict[int, bytes] = {}
    for at, batch in enumerate(batches[: survivors + kept]):
        expected.update(dict.fromkeys(batch, b"%d" % at))
    assert crashed.entry_ids(1, 0, entries_max=100) == sorted(expected)
    assert all(crashed.entry(1, entry) == value for entry, value in expected.items())


# The two implementations against each other.

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"),
            st.integers(0, 3),
            st.lists(st.integers(0, 12), max_size=4),
            st.integers(0, 50),
        ),
        st.tuples(st.just("delete"), st.integers(0, 3)),
        st.tuples(st.just("sync")),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("run"), st.integers(0, 3), st.integers(0, 12), st.integers(1, 200)),
    ),
    max_size=25,
)


@given(operations=OPERATIONS)
@settings(max_examples=25, deadline=None)
def test_rocks_and_memory_storage_return_the_same_results(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple]
) -> None:
    memory_disk, rocks_disk = MemoryDisk(), RocksDisk(tmp_path_factory.mktemp("store"))
    memory, rocks = memory_disk.open(), rocks_disk.open()
    for operation in operations:
        match operation:
            case ("write", ledger, entries, size):
                puts = [(ledger_key(ledger), b"r%d" % size)]
                puts += [(entry_key(ledger, entry), b"v" * size) for entry in entries]
                memory.write(puts)
                rocks.write(puts)
            case ("delete", ledger):
                memory.delete_ledger(ledger, b"stone")
                rocks.delete_ledger(ledger, b"stone")
            case ("sync",):
                memory.sync()
                rocks.sync()
            case ("reopen",):
                memory, rocks = memory_disk.reopen(memory), rocks_disk.reopen(rocks)
            case ("run", ledger, first, size):
                ours = memory.run(ledger, first, 12, bytes_max=size, entries_max=5)
                assert rocks.run(ledger, first, 12, bytes_max=size, entries_max=5) == ours
        assert rocks.ledgers(-1, ledgers_max=9) == memory.ledgers(-1, ledgers_max=9)
        for ledger in range(4):
            assert rocks.ledger_record(ledger) == memory.ledger_record(ledger)
            assert rocks.last_entry(ledger) == memory.last_entry(ledger)
            ours = memory.entry_ids(ledger, 0, entries_max=99)
            assert rocks.entry_ids(ledger, 0, entries_max=99) == ours
    rocks.close()
