"""A bookie with a damaged store continues as a new incarnation, and keeps its old store."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import KEY, InlineThread, crash_image, envelope
from fakes.directories import (
    ENTRIES,
    DirectoryCluster,
    content,
    fill,
    given,
    identity_of,
    killed_directory,
)
from support import run, wait_until

from magnetar.bookie import errors
from magnetar.bookie.damaged_store import FormerStores
from magnetar.bookie.storage.directory import open_directory
from magnetar.bookie.storage.format import DirectoryState, encode_identity, entry_key
from magnetar.bookie.storage.layout import IDENTITY, STORE, WATERMARK
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_bookie_registration
from magnetar.metadata.memory import Fault, MemoryStore
from magnetar.metadata.model import BookieAddress, BookieId, BookieRegistration

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from magnetar.bookie.storage.directory import DataDirectory

pytestmark = pytest.mark.real_loop


@pytest.fixture
def cluster() -> DirectoryCluster:
    return DirectoryCluster()


@pytest.fixture
def used(cluster: DirectoryCluster, tmp_path: Path) -> Path:
    run(killed_directory(cluster, tmp_path / "used"))
    return tmp_path / "used"


def remove_watermark(path: Path) -> None:
    (path / WATERMARK).unlink()


@pytest.mark.parametrize("damage", [remove_watermark, lambda path: shutil.rmtree(path / STORE)])
async def test_a_damaged_store_is_kept_for_a_former_incarnation(
    cluster: DirectoryCluster, used: Path, damage: Callable[[Path], object]
) -> None:
    former = identity_of(used).incarnation
    damage(used)
    directory = await cluster.start(used)
    identity, cookie = directory.identity, await cluster.cookie()
    assert identity_of(used) == identity
    assert (identity.state, identity.former) == (DirectoryState.READY, former)
    assert identity.incarnation != former
    assert cookie is not None
    assert (cookie.incarnation, cookie.boot_epoch) == (identity.incarnation, 2)
    assert directory.storage.owner() == identity.incarnation.encode()
    assert directory.storage.ledgers(-1, ledgers_max=9) == []
    assert given(directory, former) == list(range(ENTRIES) if damage is remove_watermark else [])
    directory.close()


async def test_a_former_incarnation_checks_the_master_key(
    cluster: DirectoryCluster, used: Path
) -> None:
    former = identity_of(used).incarnation
    (used / WATERMARK).unlink()
    directory = await cluster.start(used)
    store = FormerStores(directory.formers)
    given_run = partial(store.run, former, 1, KEY)
    assert given_run(0, 100, bytes_max=1 << 20, entries_max=7) == [
        envelope(1, entry, b"%d" % entry * 600) for entry in range(7)
    ]
    assert len(given_run(5, 100, bytes_max=1 << 20, entries_max=100)) == ENTRIES - 5
    assert len(given_run(5, 100, bytes_max=700, entries_max=100)) == 2
    assert len(given_run(5, 5, bytes_max=1 << 20, entries_max=100)) == 1
    assert given(directory, former, key=KEY + 1) == []
    assert store.run(former, 2, KEY, 0, 9, bytes_max=1 << 20, entries_max=100) == []
    assert store.run("e" * 32, 1, KEY, 0, 9, bytes_max=1 << 20, entries_max=100) == []
    directory.close()


async def test_a_damaged_or_misplaced_entry_is_not_returned(
    cluster: DirectoryCluster, tmp_path: Path
) -> None:
    live = await cluster.start(tmp_path / "live")
    fill(live)
    wrong = bytearray(envelope(1, 3))
    wrong[-1] ^= 1
    puts = [(3, bytes(wrong)), (4, envelope(1, 5)), (5, b""), (6, envelope(2, 6))]
    live.storage.write([(entry_key(1, entry), value) for entry, value in puts])
    live.close()
    (tmp_path / "live" / WATERMARK).unlink()
    directory = await cluster.start(tmp_path / "live")
    found = given(directory, live.identity.incarnation)
    assert found == [0, 1, 2, *range(7, ENTRIES)]
    directory.close()


async def test_an_older_image_starts_as_a_new_incarnation(
    cluster: DirectoryCluster, used: Path, tmp_path: Path
) -> None:
    former = identity_of(used).incarnation
    shutil.copytree(used, tmp_path / "image")
    (await cluster.start(used)).close()
    directory = await cluster.start(tmp_path / "image")
    assert directory.identity.former == former
    assert directory.identity.boot_epoch == 3
    assert given(directory, former) == list(range(ENTRIES))
    directory.close()
    with pytest.raises(errors.WrongIncarnation):  # the cluster knows the other of the two disks
        await cluster.start(used)


@pytest.mark.parametrize("left", [[], [STORE], [STORE, WATERMARK]])
async def test_an_image_from_the_time_of_formatting_starts_as_a_new_incarnation(
    cluster: DirectoryCluster, used: Path, tmp_path: Path, left: list[str]
) -> None:
    """The bookie has served since this image was made. If the formatting continued, the empty
    directory would take the identity of that bookie."""
    former, image = identity_of(used), tmp_path / "image"
    (await cluster.start(used)).close()
    image.mkdir()
    formatting = replace(former, state=DirectoryState.FORMATTING)
    (image / IDENTITY).write_bytes(encode_identity(formatting))
    fresh = DirectoryCluster()
    (await fresh.start(tmp_path / "fresh")).close()
    for name in left:
        os.rename(tmp_path / "fresh" / name, image / name)
    directory = await cluster.start(image)
    assert directory.identity.incarnation != former.incarnation
    assert directory.identity.former == former.incarnation
    assert directory.storage.ledgers(-1, ledgers_max=9) == []
    assert given(directory, former.incarnation) == []
    directory.close()
    (await cluster.start(image)).close()
    with pytest.raises(errors.WrongIncarnation, match="If the other one is lost"):
        await cluster.start(used)


async def test_an_older_image_does_not_stop_the_running_bookie(
    cluster: DirectoryCluster, used: Path, tmp_path: Path
) -> None:
    shutil.copytree(used, tmp_path / "image")
    live = await cluster.start(used)
    entry = BookieRegistration(
        BookieId("b1"), "a" * 32, 2, BookieAddress("h:1", "h:2"), "", "", read_only=False
    )

    store = MemoryStore(cluster.tree)
    await store.create_ephemeral(
        paths.bookie_available(entry.bookie), encode_bookie_registration(entry)
    )
    before = content(tmp_path / "image")
    with pytest.raises(errors.DirectoryRolledBack, match="the bookie is registered"):
        await open_directory(
            tmp_path / "image", bookie="b1", metadata=store, chance=random.Random(1)
        )
    assert content(tmp_path / "image").items() >= (before.items() - {("lock", before["lock"])})
    await store.close()
    live.close()
    (await cluster.start(used)).close()


async def test_only_one_of_two_copies_that_start_at_once_runs(
    cluster: DirectoryCluster, used: Path, tmp_path: Path
) -> None:
    """Both starts read the same cookie and begin the same epoch."""
    shutil.copytree(used, tmp_path / "copy")

    async def start(path: Path, seed: int) -> DataDirectory | errors.StartRefused:
        store = MemoryStore(cluster.tree)
        try:
            return await open_directory(
                path, bookie="b1", metadata=store, chance=random.Random(seed)
            )
        except errors.StartRefused as refused:
            return refused
        finally:
            await store.close()

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(start(path, seed))
            for seed, path in enumerate((used, tmp_path / "copy"))
        ]
    [one, other] = sorted((task.result() for task in tasks), key=lambda r: type(r).__name__)
    assert not isinstance(one, errors.StartRefused)
    assert isinstance(other, errors.WrongIncarnation)
    one.close()
    outcomes = []
    for path in (used, tmp_path / "copy"):
        try:
            (await cluster.start(path)).close()
            outcomes.append("starts")
        except errors.DirectoryCloned:
            outcomes.append("copy")
    # The loser is recognised as a copy until the winner has started again.
    assert sorted(outcomes) in (["copy", "starts"], ["starts", "starts"])


async def test_a_wiped_bookie_is_formatted_with_new_incarnation(
    cluster: DirectoryCluster, used: Path
) -> None:
    former = identity_of(used).incarnation
    shutil.rmtree(used)
    with pytest.raises(errors.DirectoryEmpty, match="--new-incarnation"):
        await cluster.start(used)
    directory = await cluster.start(used, new_incarnation=True)
    identity = directory.identity
    assert (identity.former, identity.boot_epoch) == (former, 2)
    assert directory.formers == {}
    directory.close()
    (
        await cluster.start(used, new_incarnation=True)
    ).close()  # the log does not mention a directory in use
    assert identity_of(used).incarnation == identity.incarnation


async def test_an_identity_file_from_the_time_of_formatting_erases_nothing(
    cluster: DirectoryCluster, used: Path
) -> None:
    before = replace(identity_of(used), state=DirectoryState.FORMATTING)
    (used / IDENTITY).write_bytes(encode_identity(before))
    with pytest.raises(errors.DirectoryRolledBack, match="an older identity file"):
        await cluster.start(used)


# -- The epoch counts up -------------------------------------------------------------------------


async def count_up(directory: DataDirectory, store: MemoryStore, chance: random.Random) -> None:
    await directory.count_up(store, chance=chance, thread=InlineThread())


async def test_the_epoch_of_a_running_bookie_counts_up(
    cluster: DirectoryCluster, used: Path, tmp_path: Path
) -> None:
    directory = await cluster.start(used)
    crash_image(used, tmp_path / "image")
    for epoch in (3, 4):
        await count_up(directory, MemoryStore(cluster.tree), cluster.chance)
        cookie = await cluster.cookie()
        assert cookie is not None
        assert cookie.boot_epoch == identity_of(used).boot_epoch == epoch
        assert cookie.start == identity_of(used).start
    fill(directory, ledger=7)
    directory.close()
    again = await cluster.start(used)
    assert again.identity.boot_epoch == 5
    assert again.identity.incarnation == directory.identity.incarnation
    again.close()
    # Within one start, an earlier image is recognised as an earlier image.
    assert (
        await cluster.start(tmp_path / "image")
    ).identity.former == directory.identity.incarnation


@pytest.mark.parametrize("fault", [Fault.REQUEST_LOST, Fault.REPLY_LOST], ids=lambda f: f.name)
async def test_a_count_whose_outcome_is_unknown_is_the_same_count_next_time(
    cluster: DirectoryCluster, used: Path, fault: Fault
) -> None:
    directory = await cluster.start(used)
    asked: list[str] = []

    def faults(operation: str, path: str) -> Fault | None:
        asked.append(operation)
        if "put" not in asked:
            return None
        return fault if operation == "put" else Fault.NOT_SENT

    store = MemoryStore(cluster.tree, faults=faults)
    counting = asyncio.get_running_loop().create_task(count_up(directory, store, cluster.chance))
    await wait_until(lambda: "put" in asked and asked[-1] != "put")  # it asks for the outcome
    counting.cancel()
    await asyncio.wait([counting])
    assert counting.cancelled()
    await count_up(directory, MemoryStore(cluster.tree), cluster.chance)
    cookie = await cluster.cookie()
    assert cookie is not None
    assert cookie.boot_epoch == identity_of(used).boot_epoch == 3
    assert cookie.start == identity_of(used).start
    directory.close()


async def test_a_bookie_whose_name_was_taken_is_refused_at_its_next_epoch(
    cluster: DirectoryCluster, used: Path, tmp_path: Path
) -> None:
    directory = await cluster.start(used)
    (await cluster.start(tmp_path / "other", new_incarnation=True)).close()
    with pytest.raises(errors.WrongIncarnation, match="process of this bookie; the metadata names"):
        await count_up(directory, MemoryStore(cluster.tree), cluster.chance)
    directory.close()


async def test_a_cancelled_start_at_a_former_store_releases_all_stores_and_locks(
    cluster: DirectoryCluster, used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_watermark(used)
    (await cluster.start(used)).close()
    sleeping = used.parent / "python"
    sleeping.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeping.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(sleeping))
        with pytest.raises(TimeoutError):
            await start_within(cluster, used, seconds=1)
    directory = await cluster.start(used)
    assert list(directory.formers)
    directory.close()


async def start_within(cluster: DirectoryCluster, path: Path, *, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        store = MemoryStore(cluster.tree)
        await open_directory(path, bookie="b1", metadata=store, chance=cluster.chance)
