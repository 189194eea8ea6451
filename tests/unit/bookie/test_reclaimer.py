"""Space is reclaimed, and a compaction that fails does not end the bookie repeatedly."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import InlineThread
from fakes.directories import flip
from fakes.memory_storage import MemoryStorage
from support import wait_until

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.reclaimer import (
    REGION_LEDGERS_MAX,
    REGIONS_PER_STEP,
    Reclaimer,
    regions,
)
from magnetar.bookie.storage.format import entry_key
from magnetar.bookie.storage.rocks import RocksStorage

if TYPE_CHECKING:
    from pathlib import Path


def test_a_region_is_compacted_when_a_fifth_of_it_is_dead() -> None:
    ids = range(10 * REGION_LEDGERS_MAX)
    found = list(regions([at for at in ids if at % 20], [at for at in ids if at % 20 == 0]))
    assert len(found) == 10
    assert all(region.worth_it for region in found)
    assert [at for region in found for at in region.dead] == [at for at in ids if at % 20]
    found = list(regions([at for at in ids if at % 20 == 0], [at for at in ids if at % 20]))
    assert len(found) == 10
    assert not any(region.worth_it for region in found)
    assert list(regions([3, 5], [1, 7])) == [(1, 7, [3, 5], 2)]
    (region,) = regions([], [1])
    assert region == (1, 1, [], 1)
    assert not region.worth_it
    assert list(regions([], [])) == []


async def test_regions_of_many_ledgers_are_formed_in_several_steps_of_the_loop() -> None:
    ledgers = range(10 * REGIONS_PER_STEP * REGION_LEDGERS_MAX)
    dead, alive = ledgers[::20], [at for at in ledgers if at % 20]
    loop, steps = asyncio.get_running_loop(), 0

    def tick() -> None:
        nonlocal steps, ticking
        steps += 1
        ticking = loop.call_soon(tick)

    ticking = loop.call_soon(tick)
    reclaimer = Reclaimer(MemoryStorage(), thread=InlineThread())
    await reclaimer.reclaim(dead, alive)  # a twentieth is dead: too little for a compaction
    ticking.cancel()
    assert reclaimer.dead == len(dead)
    assert steps >= 10


def size_of(directory: Path) -> int:
    total = 0
    for file in directory.iterdir():
        with suppress(FileNotFoundError):  # RocksDB may be removing it
            total += file.stat().st_size
    return total


async def test_a_value_that_cannot_be_read_stops_compactions_until_a_scrub_is_clean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, marker = tmp_path / "store", tmp_path / "reclaiming"
    entries = [entry_key(ledger, entry) for ledger in range(10) for entry in range(10)]
    storage = RocksStorage(path, create=True)
    storage.write([(key, os.urandom(50_000)) for key in entries])
    storage.flush()
    storage.close()
    (blobs,) = path.glob("*.blob")
    flip(blobs, 5 * blobs.stat().st_size // 100 + 25_000)  # ledger 0, entry 5
    full = size_of(path)
    dead, alive = range(1, 10), [0]

    storage = RocksStorage(path, create=False)
    for ledger in dead:
        storage.delete_ledger(ledger, None)
    storage.sync()
    first = Reclaimer(storage, thread=InlineThread(), marker=marker)
    await first.reclaim(dead, alive)
    assert (first.failures, first.dead, marker.exists()) == (1, 9, True)
    with pytest.raises(StorageFailed):
        storage.write([(entry_key(20, 0), b"x")])  # the failed store ends the process here
    with pytest.raises(StorageFailed):
        storage.close()
    del storage, first

    storage = RocksStorage(path, create=False)
    again = Reclaimer(storage, thread=InlineThread(), marker=marker)
    assert again.suspended
    await again.reclaim(dead, alive)
    assert "space reclaim suspended until a scrub" in caplog.text
    storage.write([(entry_key(0, 5), os.urandom(50_000))])  # a repair
    again.resume()
    await again.reclaim([], alive)
    assert (again.failures, again.dead, marker.exists()) == (0, 0, False)
    # RocksDB removes unneeded files in its own thread.
    await wait_until(lambda: size_of(path) < 0.3 * full)
    assert len(storage.entry_ids(0, 0, entries_max=100)) == 10
    storage.close()


async def test_space_is_freed_although_another_compaction_came_first(tmp_path: Path) -> None:
    """Another compaction dropped the keys of the deleted entries and their deletion markers. The
    values stay in a file together with live entries. They are too few for RocksDB to rewrite the
    file by itself."""
    storage = RocksStorage(tmp_path, create=True)
    for ledger in range(10):
        storage.write([(entry_key(ledger, entry), os.urandom(50_000)) for entry in range(10)])
    storage.flush()
    full, dead, alive = size_of(tmp_path), [2, 3, 4], [0, 1, *range(5, 10)]
    for ledger in dead:
        storage.delete_ledger(ledger, None)
    storage.drop_replaced()
    assert size_of(tmp_path) > 0.9 * full
    await Reclaimer(storage, thread=InlineThread()).reclaim(dead, alive)
    await wait_until(lambda: size_of(tmp_path) < 0.8 * full)
    assert len(storage.run(9, 0, 9, bytes_max=1 << 20, entries_max=10)) == 10
    storage.close()
