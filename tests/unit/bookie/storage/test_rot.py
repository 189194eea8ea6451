"""A compaction reads a table with a rotten block: the bookie ends once, not repeatedly."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import KEY, envelope
from fakes.directories import ENTRIES, DirectoryCluster, fill, flip, given
from prometheus_client import CollectorRegistry

from magnetar.bookie.bookie import open_bookie
from magnetar.bookie.contract import LastConfirmedRequest
from magnetar.bookie.errors import DirectoryUnusable, StorageFailed
from magnetar.bookie.scrub import ScrubConfig
from magnetar.bookie.storage.format import entry_key, ledger_key
from magnetar.bookie.storage.layout import ROTTEN, STORE
from magnetar.bookie.storage.rot import is_rot, note_rot, noted_rot
from magnetar.bookie.upkeep import UpkeepConfig
from magnetar.metadata.memory import MemoryStore
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real_loop

TABLE = StorageFailed(
    "write",
    "Corruption: block checksum mismatch: stored(context removed) = 1, computed = 2, type = 4  in"
    " /data/store/000009.sst offset 0 size 4128",
)


@pytest.mark.parametrize(
    ("reason", "rot"),
    [
        (TABLE.reason, True),
        ("Corruption: truncated block read from /d/000012.sst offset 5, in /d/000012.sst", True),
        ("Corruption: Error while reading blob, in /data/store/000010.blob offset 30", False),
        ("IO error: No space left on device: While appending to file: /d/000013.sst", False),
        ("IO error: Input/output error: While pread offset 0 len 4096: /d/000013.sst", False),
    ],
)
def test_only_an_unreadable_table_counts_as_rot(reason: str, rot: bool) -> None:
    assert is_rot(StorageFailed("write", reason)) is rot


def test_rot_is_noted_for_one_incarnation_only(tmp_path: Path) -> None:
    note_rot(tmp_path, "a" * 32, StorageFailed("sync", "Input/output error"))
    assert noted_rot(tmp_path, "a" * 32) is None
    note_rot(tmp_path, "a" * 32, TABLE)
    assert noted_rot(tmp_path, "a" * 32) == TABLE.reason
    assert noted_rot(tmp_path, "b" * 32) is None


def test_an_unreadable_note_of_rot_fails_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / ROTTEN).mkdir()
    with pytest.raises(DirectoryUnusable, match="a directory"):
        noted_rot(tmp_path, "a" * 32)
    note_rot(tmp_path, "a" * 32, TABLE)  # a failure to note rot is only logged


async def with_tables(cluster: DirectoryCluster, path: Path) -> str:
    """Make a store of four tables, enough for a compaction. The first table is rotten. Return the
    incarnation."""
    directory = await cluster.start(path)
    fill(directory)
    directory.storage.flush()
    for entry in (100, 200):
        directory.storage.write([(entry_key(1, entry), envelope(1, entry, bytes(500)))])
        directory.storage.flush()
    directory.close()
    flip(min((path / STORE).glob("*.sst")), 1_000)
    return directory.identity.incarnation


async def fence_until_dead(
    cluster: DirectoryCluster, path: Path, deaths: list[StorageFailed]
) -> None:
    """Fence new ledgers until the store fails. A fence is written at once, so the first fence after
    the compaction fails."""
    store = MemoryStore(cluster.tree)
    async with open_bookie(
        path,
        bookie="b1",
        metadata=store,
        clock=SystemClock(),
        chance=random.Random(1),
        registry=CollectorRegistry(),
        die=deaths.append,
    ) as service:
        storage = service._storage
        with suppress(StorageFailed):  # the compaction may have failed already
            storage.write([(entry_key(1, 300), envelope(1, 300, bytes(500)))])
            storage.flush()  # type: ignore[attr-defined]  # the fourth table: RocksDB compacts
        ledgers = count(1_000)
        while not deaths:
            await service.last_confirmed(
                LastConfirmedRequest(
                    incarnation=service.identity.incarnation,
                    ledger=next(ledgers),
                    master_key=KEY,
                    fence=True,
                )
            )
        await asyncio.Event().wait()  # the failure of the store ends the wait


async def test_a_bookie_that_ended_over_a_rotten_table_restarts_as_a_new_incarnation(
    tmp_path: Path,
) -> None:
    cluster, deaths = DirectoryCluster(), list[StorageFailed]()
    former = await with_tables(cluster, tmp_path)
    with pytest.raises(StorageFailed):
        await fence_until_dead(cluster, tmp_path, deaths)
    assert is_rot(deaths[0])
    assert noted_rot(tmp_path, former) == deaths[0].reason

    directory = await cluster.start(tmp_path)
    assert directory.identity.former == former
    assert directory.storage.ledgers(-1, ledgers_max=9) == []
    sound = given(directory, former)
    assert 0 < len(sound) < ENTRIES  # all entries except those in the rotten block
    directory.close()

    again = await cluster.start(tmp_path)  # the note of rot names the former incarnation
    assert again.identity.incarnation == directory.identity.incarnation
    again.close()


async def test_a_bookie_whose_scrub_cannot_list_ledgers_restarts_as_a_new_incarnation(
    tmp_path: Path,
) -> None:
    cluster = DirectoryCluster()
    directory = await cluster.start(tmp_path)
    fill(directory)
    directory.storage.flush()
    directory.storage.write([(ledger_key(ledger), bytes(23)) for ledger in range(2, 1_000)])
    directory.storage.flush()
    directory.close()
    records = max((tmp_path / STORE).glob("*.sst"))
    flip(records, records.stat().st_size // 2)

    async def wait_end() -> str:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def die(error: StorageFailed) -> None:  # not stored: a kept error keeps the store open
            if not ended.done():
                ended.set_result(error.reason)

        async with open_bookie(
            tmp_path,
            bookie="b1",
            metadata=MemoryStore(cluster.tree),
            clock=SystemClock(),
            chance=random.Random(1),
            registry=CollectorRegistry(),
            upkeep_config=UpkeepConfig(scrub=ScrubConfig(interval_s=0.01)),
            die=die,
        ):
            return await ended

    reason = await wait_end()
    assert noted_rot(tmp_path, directory.identity.incarnation) == reason
    again = await cluster.start(tmp_path)
    assert again.identity.former == directory.identity.incarnation
    assert len(given(again, directory.identity.incarnation)) == ENTRIES
    again.close()
