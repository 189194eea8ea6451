from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import crash_image
from fakes.directories import COOKIE, DirectoryCluster, flip, foreign_store, killed_directory
from support import run

from magnetar.bookie import errors
from magnetar.bookie.storage.directory import open_directory
from magnetar.bookie.storage.format import (
    DirectoryState,
    decode_identity,
    encode_identity,
)
from magnetar.bookie.storage.layout import (
    IDENTITY,
    IDENTITY_NEW,
    LOCK,
    STORE,
    WATERMARK,
    Found,
    find,
    lock_directory,
)
from magnetar.bookie.storage.watermark import read_watermark
from magnetar.metadata.codec import decode_bookie_cookie, encode_bookie_cookie
from magnetar.metadata.memory import Fault, MemoryStore
from magnetar.metadata.model import BookieCookie, BookieId
from magnetar.metadata.store import ABSENT, Versioned

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


def entries(directory: DataDirectory) -> list[int]:
    return directory.storage.entry_ids(1, 0, entries_max=100)


async def test_an_empty_directory_is_formatted(cluster: DirectoryCluster, tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep"
    directory = await cluster.start(path)
    identity = directory.identity
    assert (identity.bookie, identity.boot_epoch, identity.state) == (
        "b1",
        1,
        DirectoryState.READY,
    )
    assert sorted(os.listdir(path)) == [IDENTITY, LOCK, STORE, WATERMARK]
    assert decode_identity((path / IDENTITY).read_bytes()) == identity
    assert directory.storage.owner() == identity.incarnation.encode()
    cookie = await cluster.cookie()
    assert cookie is not None
    assert (cookie.incarnation, cookie.boot_epoch) == (identity.incarnation, 1)
    assert cookie.cluster == identity.cluster
    directory.close()


def test_a_directory_that_was_made_is_durable_in_its_parents(tmp_path: Path) -> None:
    synced: list[Path] = []
    os.close(lock_directory(tmp_path / "disk" / "bookie", sync=synced.append))
    assert synced == [tmp_path, tmp_path / "disk"]
    os.close(lock_directory(tmp_path / "disk" / "bookie", sync=synced.append))
    assert synced == [tmp_path, tmp_path / "disk"]


async def test_a_mount_point_counts_as_empty(cluster: DirectoryCluster, tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (await cluster.start(tmp_path)).close()


async def test_each_start_is_a_new_epoch_of_the_same_incarnation(
    cluster: DirectoryCluster, tmp_path: Path
) -> None:
    incarnations = set()
    for epoch in range(1, 5):
        directory = await cluster.start(tmp_path)
        cookie = await cluster.cookie()
        assert cookie is not None
        assert directory.identity.boot_epoch == cookie.boot_epoch == epoch
        incarnations.add(directory.identity.incarnation)
        noted = read_watermark(tmp_path / WATERMARK)
        assert noted is not None
        assert (noted.boot_epoch, noted.closed) == (epoch, False)
        directory.close()
        noted = read_watermark(tmp_path / WATERMARK)
        assert noted is not None
        assert noted.closed
    assert len(incarnations) == 1


async def test_two_directories_have_two_incarnations(
    cluster: DirectoryCluster, tmp_path: Path
) -> None:
    one = await cluster.start(tmp_path / "1", bookie="b1")
    other = await cluster.start(tmp_path / "2", bookie="b2")
    assert one.identity.incarnation != other.identity.incarnation
    assert one.identity.cluster == other.identity.cluster
    one.close()
    other.close()


async def test_after_a_kill_everything_synced_is_there(
    cluster: DirectoryCluster, used: Path
) -> None:
    directory = await cluster.start(used)
    assert entries(directory) == list(range(20))
    directory.close()


# -- Crashes on the way --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [Fault.NOT_SENT, Fault.REQUEST_LOST, Fault.REPLY_LOST], ids=lambda f: f.name
)
async def test_a_lost_reply_of_the_metadata_is_cleared_up(tmp_path: Path, fault: Fault) -> None:
    faults = [fault]

    store = MemoryStore(
        faults=lambda operation, path: (
            faults.pop() if faults and operation == "put" and path == COOKIE else None
        )
    )
    for epoch in (1, 2):
        faults[:] = [fault]
        directory = await open_directory(
            tmp_path, bookie="b1", metadata=store, chance=random.Random(1)
        )
        assert not faults
        stored = await store.get(COOKIE)
        assert stored is not None
        assert decode_bookie_cookie(stored.value).boot_epoch == epoch
        directory.close()


async def test_formatting_continues_after_a_crash_at_any_step(
    cluster: DirectoryCluster, tmp_path: Path
) -> None:
    path = tmp_path / "b1"
    directory = await cluster.start(path)
    begun = replace(directory.identity, state=DirectoryState.FORMATTING)
    crash_image(path, tmp_path / "whole")
    directory.close()
    cookie = await cluster.cookie()
    assert cookie is not None
    for keep in ([IDENTITY_NEW], [IDENTITY], [IDENTITY, STORE], [IDENTITY, STORE, WATERMARK]):
        for known in (False, True):
            if known != (keep != [IDENTITY_NEW]) and keep != [IDENTITY]:
                continue  # the cookie comes between identity and store
            again = DirectoryCluster()
            again.tree, step = cluster.tree, tmp_path / f"{len(keep)}-{keep[0]}-{known}"
            shutil.copytree(tmp_path / "whole", step)
            (step / IDENTITY_NEW).write_bytes(b"half a")
            (step / IDENTITY).write_bytes(encode_identity(begun))
            for name in os.listdir(step):
                if name not in keep:
                    (shutil.rmtree if name == STORE else os.unlink)(step / name)
            await cluster.set_cookie(cookie if known else None)
            directory = await again.start(step)
            assert directory.identity.state is DirectoryState.READY
            assert directory.identity.boot_epoch == 1
            assert await cluster.cookie() is not None
            directory.close()
            await cluster.set_cookie(cookie)


async def test_a_crash_between_intent_and_cookie_is_made_good(
    cluster: DirectoryCluster, used: Path
) -> None:
    identity = decode_identity((used / IDENTITY).read_bytes())
    intent = replace(identity, boot_epoch=2, start="7" * 32)
    (used / IDENTITY).write_bytes(encode_identity(intent))
    directory = await cluster.start(used)
    assert directory.identity.boot_epoch == 2
    directory.close()


# -- Refusals ------------------------------------------------------------------------------------


REFUSALS: list[tuple[Callable[[Path], object], type[errors.StartRefused], str]] = [
    (foreign_store, errors.WrongIncarnation, "store of incarnation eeee"),
    (lambda path: flip(path / IDENTITY, 30), errors.IdentityDamaged, "damaged identity"),
    (lambda path: (path / IDENTITY).write_bytes(b""), errors.IdentityDamaged, "damaged identity"),
    (lambda path: (path / IDENTITY).unlink(), errors.DirectoryForeign, "no identity"),
    (lambda path: shutil.rmtree(path), errors.DirectoryEmpty, "found nothing"),
]


@pytest.mark.parametrize(("damage", "error", "words"), REFUSALS)
async def test_an_invalid_directory_is_refused_and_left_unchanged(
    cluster: DirectoryCluster,
    used: Path,
    damage: Callable[[Path], object],
    error: type[errors.StartRefused],
    words: str,
) -> None:
    damage(used)
    before = await cluster.cookie()
    for _ in range(2):  # a second attempt is refused, too
        with pytest.raises(error, match=words) as refused:
            await cluster.start(used)
        assert str(used) in str(refused.value)
    assert await cluster.cookie() == before


async def test_another_name_or_another_cluster_is_refused(
    cluster: DirectoryCluster, used: Path
) -> None:
    with pytest.raises(errors.WrongBookie, match="bookie b1; expected the data of bookie b2"):
        await cluster.start(used, bookie="b2")
    with pytest.raises(errors.WrongCluster):
        await DirectoryCluster(seed=2).start(used)


async def test_a_second_directory_under_the_same_name_is_refused(
    cluster: DirectoryCluster, used: Path, tmp_path: Path
) -> None:
    with pytest.raises(errors.DirectoryEmpty):
        await cluster.start(tmp_path / "second")
    cookie = await cluster.cookie()
    assert cookie is not None
    await cluster.set_cookie(replace(cookie, incarnation="d" * 32))
    with pytest.raises(errors.WrongIncarnation):
        await cluster.start(used)


async def test_of_two_starts_of_one_bookie_at_once_the_second_is_refused(tmp_path: Path) -> None:
    """The other start stores its cookie between our read and our compare-and-set."""
    theirs = BookieCookie(
        bookie=BookieId("b1"), incarnation="d" * 32, boot_epoch=1, cluster="c", start="5" * 32
    )

    class Raced(MemoryStore):
        looks = 0

        async def get(self, path: str) -> Versioned | None:
            found = await super().get(path)
            if path == COOKIE:
                self.looks += 1
                if self.looks == 2:
                    await self.put(COOKIE, encode_bookie_cookie(theirs), expected=ABSENT)
            return found

    store = Raced()
    with pytest.raises(errors.WrongIncarnation, match="process of this bookie; the metadata names"):
        await open_directory(tmp_path, bookie="b1", metadata=store, chance=random.Random(1))
    stored = await store.get(COOKIE)
    assert stored is not None
    assert decode_bookie_cookie(stored.value) == theirs


async def test_a_directory_in_use_is_refused_with_the_process_that_uses_it(
    cluster: DirectoryCluster, tmp_path: Path
) -> None:
    directory = await cluster.start(tmp_path)
    with pytest.raises(errors.DirectoryLocked, match=f"process {os.getpid()} using it"):
        await cluster.start(tmp_path)
    directory.close()
    (await cluster.start(tmp_path)).close()


async def test_a_refused_start_releases_the_lock(cluster: DirectoryCluster, used: Path) -> None:
    with pytest.raises(errors.WrongBookie):
        await cluster.start(used, bookie="b2")
    (await cluster.start(used)).close()


async def test_a_path_that_is_no_directory_is_refused(
    cluster: DirectoryCluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(errors.DirectoryUnusable, match=r"File exists|Not a directory"):
            await cluster.start(path)


def test_a_directory_that_is_missing_has_no_identity_and_no_files(tmp_path: Path) -> None:
    assert find(tmp_path / "missing") == Found(None, ())
