"""A scrub reports each kind of damage with its entries, and reports no undamaged entry."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import InlineThread, envelope
from fakes.directories import flip
from fakes.memory_storage import MemoryStorage
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.scrub import Scrub, ScrubConfig
from magnetar.bookie.storage.format import entry_key, ledger_key
from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.bookie.storage.rot import is_rot
from magnetar.metadata.errors import Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from magnetar.bookie.storage.store import Storage


class Rotten(MemoryStorage):
    """A storage in which some entries, and all runs with one of these entries, are unreadable."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: set[tuple[int, int]] = set()

    def entry(self, ledger: int, entry: int) -> bytes | None:
        if (ledger, entry) in self.unreadable:
            raise StorageFailed("read", "block checksum mismatch")
        return super().entry(ledger, entry)

    def run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> list[bytes]:
        found = super().run(ledger, first, last, bytes_max=bytes_max, entries_max=entries_max)
        if any((ledger, first + at) in self.unreadable for at in range(len(found))):
            raise StorageFailed("read", "block checksum mismatch")
        return found


def filled(entries: set[tuple[int, int]]) -> Rotten:
    storage = Rotten()
    for ledger, entry in sorted(entries):
        storage.write(
            [(ledger_key(ledger), b"r"), (entry_key(ledger, entry), envelope(ledger, entry))]
        )
    return storage


def scrub(
    storage: Storage,
    found: list[tuple[int, int]],
    sound: list[bool] | None = None,
    **config: float,
) -> Scrub:
    sound = [] if sound is None else sound

    async def report(ledger: int, first: int, last: int) -> None:
        found.extend((ledger, entry) for entry in range(first, last + 1))

    return Scrub(
        storage,
        report=report,
        on_sound=lambda: sound.append(True),
        on_rot=pytest.fail,
        chance=Random(1),
        read_thread=InlineThread(),
        config=ScrubConfig(**config),
    )


PLACES = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60)


@given(entries=PLACES, unreadable=PLACES, flipped=PLACES, swapped=PLACES)
@settings(max_examples=100, deadline=None)
async def test_all_damage_and_nothing_else_is_found(
    entries: set[tuple[int, int]],
    unreadable: set[tuple[int, int]],
    flipped: set[tuple[int, int]],
    swapped: set[tuple[int, int]],
) -> None:
    storage = filled(entries)
    storage.unreadable = unreadable & entries
    for ledger, entry in flipped & entries:
        storage.write([(entry_key(ledger, entry), envelope(ledger, entry)[:-1] + b"?")])
    for ledger, entry in swapped & entries:
        storage.write([(entry_key(ledger, entry), envelope(ledger, entry + 1))])
    found: list[tuple[int, int]] = []
    sound: list[bool] = []
    walk = scrub(storage, found, sound)
    await walk.round()
    assert bool(sound) == (not found)
    assert sorted(found) == sorted((unreadable | flipped | swapped) & entries)
    assert walk.counts.entries == len(entries)
    assert walk.counts.bad == len(found)


async def test_an_unreadable_blob_on_a_disk_is_found(tmp_path: Path) -> None:
    storage = RocksStorage(tmp_path / "store", create=True)
    payload = bytes(50_000)
    storage.write([(ledger_key(1), b"r")])
    places = [*range(20), *range(30, 40)]
    storage.write([(entry_key(1, at), envelope(1, at, payload)) for at in places])
    storage.flush()
    storage.close()
    (blobs,) = (tmp_path / "store").glob("*.blob")
    with open(blobs, "r+b") as file:
        for at in (5, 12, 20, 25):  # positions among 30 values in sequence
            file.seek(at * blobs.stat().st_size // 30 + 25_000)
            file.write(b"?")
    storage = RocksStorage(tmp_path / "store", create=False)
    found: list[tuple[int, int]] = []
    walk = scrub(storage, found)
    await walk.round()
    assert found == [(1, 5), (1, 12), (1, 30), (1, 35)]
    assert walk.counts.entries == 30
    storage.close()


async def test_a_table_that_hides_which_ledgers_there_are_ends_the_bookie(tmp_path: Path) -> None:
    """Neither a scrub nor a garbage collection could get past the rotten table. No copy could be
    repaired if the table holds the record of its ledger."""
    storage = RocksStorage(tmp_path / "store", create=True)
    storage.write([(ledger_key(ledger), bytes(23)) for ledger in range(1_000)])
    storage.flush()
    storage.close()
    (table,) = (tmp_path / "store").glob("*.sst")
    flip(table, table.stat().st_size // 2)
    storage = RocksStorage(tmp_path / "store", create=False)
    ends: list[StorageFailed] = []
    walk = scrub(storage, [])
    walk._on_rot = ends.append
    await walk.round()
    assert ends
    assert all(map(is_rot, ends))
    storage.close()


async def test_a_disk_that_does_not_list_the_ledgers_ends_nothing() -> None:
    class Failing(MemoryStorage):
        def ledgers(self, after: int, *, ledgers_max: int) -> list[int]:
            raise StorageFailed("read", "IO error: Input/output error: /d/000013.sst")

    sound: list[bool] = []
    await scrub(Failing(), [], sound).round()  # a call of on_rot would fail the test
    assert not sound


async def test_neighbours_are_reported_as_one_range() -> None:
    storage = filled({(ledger, entry) for ledger in (1, 2) for entry in range(5000)})
    storage.unreadable = {(1, entry) for entry in [*range(998, 4000), 4001]} | {(2, 0)}
    told: list[tuple[int, int, int]] = []

    async def report(*bad: int) -> None:
        told.append(bad)  # type: ignore[arg-type]

    walk = scrub(storage, [])
    walk._report = report
    await walk.round()
    assert sorted(told) == [(1, 998, 3999), (1, 4001, 4001), (2, 0, 0)]
    assert walk.counts.bad == 3004


@pytest.mark.parametrize("ledgers", [[7], [0, 2**63 - 1], [3, 4, 5, 9_000_000]])
async def test_a_round_begins_anywhere_among_all_ledgers(ledgers: list[int]) -> None:
    storage = filled({(ledger, 0) for ledger in ledgers})
    walk = scrub(storage, [])
    assert walk._span() == (ledgers[0], ledgers[-1])
    for number in range(1, 20):
        await walk.round()
        assert walk.counts.entries == number * len(ledgers)


async def test_every_ledger_is_the_first_of_a_round_at_some_time() -> None:
    ledgers = range(0, 20_000, 5)
    walk = scrub(filled({(ledger, 0) for ledger in ledgers}), [])
    begun = [await walk._begin() for _ in range(200)]
    assert min(begun) < 2000
    assert max(begun) > 18_000


async def test_a_scrub_keeps_to_its_rate() -> None:
    storage = filled({(1, entry) for entry in range(100)})
    size = sum(len(envelope(1, entry)) for entry in range(100))
    walk = scrub(storage, [], bytes_per_s=size / 50)
    begun_s = asyncio.get_running_loop().time()
    for _ in range(3):
        await walk.round()
    assert asyncio.get_running_loop().time() - begun_s >= 90


async def test_a_report_that_fails_is_made_again_in_the_next_round() -> None:
    storage = filled({(1, 0), (1, 1)})
    storage.unreadable = {(1, 0)}
    told = 0

    async def report(ledger: int, first: int, last: int) -> None:
        nonlocal told
        told += 1
        raise Unavailable("away")

    walk = Scrub(
        storage,
        report=report,
        on_sound=pytest.fail,
        on_rot=pytest.fail,
        chance=Random(1),
        read_thread=InlineThread(),
        config=ScrubConfig(interval_s=100),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(walk.run())
        await asyncio.sleep(250)
        running.cancel()
    assert told == walk.counts.rounds >= 2
