from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import crash_image
from support import run

from magnetar.bookie import errors
from magnetar.bookie.storage.directory import (
    IDENTITY,
    IDENTITY_NEW,
    LOCK,
    STORE,
    WATERMARK,
    DataDirectory,
    open_directory,
)
from magnetar.bookie.storage.format import (
    IDENTITY_KEY,
    WATERMARK_SLOT_BYTES,
    Watermark,
    decode_identity,
    encode_identity,
    encode_watermark,
    entry_key,
)
from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.bookie.storage.watermark import read_watermark
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_cookie, encode_bookie_cookie
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.model import BookieCookie, BookieId
from magnetar.metadata.store import ABSENT, Versioned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COOKIE = paths.bookie_cookie(BookieId("b1"))


class Cluster:
    """A cluster's metadata, and starts on directories against it. One test, several loops."""

    def __init__(self, seed: int = 1) -> None:
        self.tree = MemoryTree()
        self.chance = random.Random(seed)

    def start(
        self, path: Path, *, bookie: str = "b1", open_deadline_s: float = 20.0
    ) -> DataDirectory:
        async def main() -> DataDirectory:
            store = MemoryStore(self.tree)
            try:
                return await open_directory(
                    path,
                    bookie=bookie,
                    metadata=store,
                    chance=self.chance,
                    open_deadline_s=open_deadline_s,
                )
            finally:
                await store.close()

        return run(main())

    def cookie(self) -> BookieCookie | None:
        async def main() -> BookieCookie | None:
            store = MemoryStore(self.tree)
            stored = await store.get(COOKIE)
            await store.close()
            return None if stored is None else decode_bookie_cookie(stored.value)

        return run(main())

    def set_cookie(self, cookie: BookieCookie | None) -> None:
        async def main() -> None:
            store = MemoryStore(self.tree)
            stored = await store.get(COOKIE)
            assert stored is not None
            if cookie is None:
                await store.delete(COOKIE, expected=stored.version)
            else:
                await store.put(COOKIE, encode_bookie_cookie(cookie), expected=stored.version)
            await store.close()

        run(main())


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def used(cluster: Cluster, tmp_path: Path) -> Path:
    """A directory with 20 synced entries, as a killed process leaves it; boot epoch 1."""
    directory = cluster.start(tmp_path / "live")
    for entry in range(20):
        directory.storage.write([(entry_key(1, entry), b"v" * 600)])
    directory.storage.sync()
    directory.watermark.advance(directory.storage.sequence())
    crash_image(tmp_path / "live", tmp_path / "used")
    directory.close()
    return tmp_path / "used"


def entries(directory: DataDirectory) -> list[int]:
    return directory.storage.entry_ids(1, 0, entries_max=100)


def test_an_empty_directory_is_formatted(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep"
    directory = cluster.start(path)
    identity = directory.identity
    assert (identity.bookie, identity.boot_epoch, identity.ready) == ("b1", 1, True)
    assert sorted(os.listdir(path)) == [IDENTITY, LOCK, STORE, WATERMARK]
    assert decode_identity((path / IDENTITY).read_bytes()) == identity
    assert directory.storage.owner() == identity.incarnation.encode()
    cookie = cluster.cookie()
    assert cookie is not None
    assert (cookie.incarnation, cookie.boot_epoch) == (identity.incarnation, 1)
    assert cookie.cluster == identity.cluster
    directory.close()


def test_a_mount_point_counts_as_empty(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    cluster.start(tmp_path).close()


def test_each_start_is_a_new_epoch_of_the_same_incarnation(
    cluster: Cluster, tmp_path: Path
) -> None:
    incarnations = set()
    for epoch in range(1, 5):
        directory = cluster.start(tmp_path)
        cookie = cluster.cookie()
        assert cookie is not None
        assert directory.identity.boot_epoch == cookie.boot_epoch == epoch
        incarnations.add(directory.identity.incarnation)
        mark = read_watermark(tmp_path / WATERMARK)
        assert mark is not None
        assert (mark.boot_epoch, mark.closed) == (epoch, False)
        directory.close()
        mark = read_watermark(tmp_path / WATERMARK)
        assert mark is not None
        assert mark.closed
    assert len(incarnations) == 1


def test_two_directories_have_two_incarnations(cluster: Cluster, tmp_path: Path) -> None:
    one = cluster.start(tmp_path / "1", bookie="b1")
    other = cluster.start(tmp_path / "2", bookie="b2")
    assert one.identity.incarnation != other.identity.incarnation
    assert one.identity.cluster == other.identity.cluster
    one.close()
    other.close()


def test_after_a_kill_everything_synced_is_there(cluster: Cluster, used: Path) -> None:
    directory = cluster.start(used)
    assert entries(directory) == list(range(20))
    directory.close()


# -- Crashes on the way --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [Fault.NOT_SENT, Fault.REQUEST_LOST, Fault.REPLY_LOST], ids=lambda f: f.name
)
def test_a_lost_reply_of_the_metadata_is_cleared_up(tmp_path: Path, fault: Fault) -> None:
    faults = [fault]

    async def main() -> None:
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

    run(main())


def test_formatting_goes_on_after_a_crash_at_any_step(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "b1"
    directory = cluster.start(path)
    begun = replace(directory.identity, ready=False)
    crash_image(path, tmp_path / "whole")
    directory.close()
    cookie = cluster.cookie()
    assert cookie is not None
    for keep in ([IDENTITY_NEW], [IDENTITY], [IDENTITY, STORE], [IDENTITY, STORE, WATERMARK]):
        for known in (False, True):
            if known and keep in ([IDENTITY_NEW], [IDENTITY]):
                continue  # the cookie comes after the store
            again = Cluster()
            again.tree, step = cluster.tree, tmp_path / f"{len(keep)}-{keep[0]}-{known}"
            shutil.copytree(tmp_path / "whole", step)
            (step / IDENTITY_NEW).write_bytes(b"half a")
            (step / IDENTITY).write_bytes(encode_identity(begun))
            for name in os.listdir(step):
                if name not in keep:
                    (shutil.rmtree if name == STORE else os.unlink)(step / name)
            cluster.set_cookie(cookie if known else None)
            directory = again.start(step)
            assert directory.identity.ready
            assert directory.identity.boot_epoch == 1
            assert cluster.cookie() is not None
            directory.close()
            cluster.set_cookie(cookie)


def test_a_crash_between_intent_and_cookie_is_made_good(cluster: Cluster, used: Path) -> None:
    identity = decode_identity((used / IDENTITY).read_bytes())
    (used / IDENTITY).write_bytes(encode_identity(replace(identity, boot_epoch=2)))
    directory = cluster.start(used)
    assert directory.identity.boot_epoch == 2
    directory.close()


# -- Refusals ------------------------------------------------------------------------------------


def flip(path: Path, at: int, *, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(bytes(content))


def first_log(path: Path) -> Path:
    return max((path / STORE).glob("*.log"))


def second_record(log: bytes) -> int:
    return 7 + int.from_bytes(log[4:6], "little")


def cut_log(path: Path) -> None:
    log = first_log(path).read_bytes()
    first_log(path).write_bytes(log[: second_record(log)])


def grow_length_field(path: Path) -> None:
    log = first_log(path)
    flip(log, second_record(log.read_bytes()) + 5, bit=0x40)


def flip_payload(path: Path) -> None:
    log = first_log(path)
    flip(log, second_record(log.read_bytes()) + 20)


def empty_store(path: Path) -> None:
    shutil.rmtree(path / STORE)
    RocksStorage(path / STORE, create=True).close()


def foreign_store(path: Path) -> None:
    shutil.rmtree(path / STORE)
    storage = RocksStorage(path / STORE, create=True)
    storage.write([(IDENTITY_KEY, b"e" * 32)] * 100)
    storage.close()


def later_watermark(path: Path) -> None:
    mark = encode_watermark(Watermark(9, 1)).ljust(WATERMARK_SLOT_BYTES, b"\0")
    (path / WATERMARK).write_bytes(mark * 2)


REFUSALS: list[tuple[Callable[[Path], object], type[errors.StartRefused], str]] = [
    (cut_log, errors.DamagedStore, "its log has lost its end"),
    (grow_length_field, errors.DamagedStore, "its log has lost its end"),
    (flip_payload, errors.DamagedStore, "does not open"),
    (empty_store, errors.WrongIncarnation, "store of incarnation none"),
    (foreign_store, errors.WrongIncarnation, "store of incarnation eeee"),
    (lambda path: shutil.rmtree(path / STORE), errors.DamagedStore, "no store"),
    (lambda path: (path / STORE / "CURRENT").unlink(), errors.DamagedStore, "does not open"),
    (lambda path: (path / WATERMARK).unlink(), errors.DamagedStore, "no watermark"),
    (lambda path: (path / WATERMARK).write_bytes(b""), errors.DamagedStore, "damaged watermark"),
    (later_watermark, errors.DamagedStore, "boot epoch 9"),
    (lambda path: flip(path / IDENTITY, 30), errors.IdentityDamaged, "damaged identity"),
    (lambda path: (path / IDENTITY).write_bytes(b""), errors.IdentityDamaged, "damaged identity"),
    (lambda path: (path / IDENTITY).unlink(), errors.DirectoryForeign, "no identity"),
    (lambda path: shutil.rmtree(path), errors.DirectoryEmpty, "found nothing"),
]


@pytest.mark.parametrize(("damage", "error", "words"), REFUSALS)
def test_a_damaged_or_foreign_directory_is_refused_and_left_alone(
    cluster: Cluster,
    used: Path,
    damage: Callable[[Path], object],
    error: type[errors.StartRefused],
    words: str,
) -> None:
    damage(used)
    before = cluster.cookie()
    for _ in range(2):  # nor does a second attempt get through
        with pytest.raises(error, match=words) as refused:
            cluster.start(used)
        assert str(used) in str(refused.value)
    assert cluster.cookie() == before


def test_an_older_image_is_refused(cluster: Cluster, used: Path, tmp_path: Path) -> None:
    shutil.copytree(used, tmp_path / "image")
    cluster.start(used).close()
    with pytest.raises(errors.DirectoryRolledBack, match="boot epoch 1; expected 2 or one more"):
        cluster.start(tmp_path / "image")


def test_another_name_or_another_cluster_is_refused(cluster: Cluster, used: Path) -> None:
    with pytest.raises(errors.WrongBookie, match="bookie b1; expected that of bookie b2"):
        cluster.start(used, bookie="b2")
    with pytest.raises(errors.WrongCluster):
        Cluster(seed=2).start(used)


def test_a_second_directory_under_the_same_name_is_refused(
    cluster: Cluster, used: Path, tmp_path: Path
) -> None:
    with pytest.raises(errors.DirectoryEmpty):
        cluster.start(tmp_path / "second")
    cookie = cluster.cookie()
    assert cookie is not None
    cluster.set_cookie(replace(cookie, incarnation="d" * 32))
    with pytest.raises(errors.WrongIncarnation):
        cluster.start(used)


def test_two_that_start_at_once_as_the_same_bookie(tmp_path: Path) -> None:
    """The other one gets its cookie in between our look and our compare-and-set."""
    theirs = BookieCookie(bookie=BookieId("b1"), incarnation="d" * 32, boot_epoch=1, cluster="c")

    class Raced(MemoryStore):
        looks = 0

        async def get(self, path: str) -> Versioned | None:
            found = await super().get(path)
            if path == COOKIE:
                self.looks += 1
                if self.looks == 2:
                    await self.put(COOKIE, encode_bookie_cookie(theirs), expected=ABSENT)
            return found

    async def main() -> None:
        store = Raced()
        with pytest.raises(errors.WrongIncarnation, match="meanwhile the metadata names"):
            await open_directory(tmp_path, bookie="b1", metadata=store, chance=random.Random(1))
        stored = await store.get(COOKIE)
        assert stored is not None
        assert decode_bookie_cookie(stored.value) == theirs

    run(main())


def test_a_directory_in_use_is_refused_with_the_process_that_uses_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    directory = cluster.start(tmp_path)
    with pytest.raises(errors.DirectoryLocked, match=f"process {os.getpid()} uses it"):
        cluster.start(tmp_path)
    directory.close()
    cluster.start(tmp_path).close()


def test_a_refused_start_lets_go_of_the_lock(cluster: Cluster, used: Path) -> None:
    with pytest.raises(errors.WrongBookie):
        cluster.start(used, bookie="b2")
    cluster.start(used).close()


def test_a_path_that_is_no_directory(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(errors.DirectoryUnusable, match=r"File exists|Not a directory"):
            cluster.start(path)
