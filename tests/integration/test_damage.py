"""A bookie's files, damaged in every way: the bookie starts with all entries, or as a new
incarnation that answers "unknown" for the former one. It never returns a wrong entry, and never
answers a false "no"."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import KEY, crash_image, envelope
from fakes.directories import (
    ENTRIES,
    DirectoryCluster,
    content,
    cut_log,
    empty_store,
    fill,
    flip_payload,
    given,
    grow_length_field,
    identity_of,
    killed_directory,
    later_watermark,
)
from support import run

from magnetar.bookie import errors
from magnetar.bookie.damaged_store import FormerStores
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import (
    DirectoryState,
    LedgerRecord,
    encode_ledger_record,
    entry_key,
    ledger_key,
)
from magnetar.bookie.storage.former import FORMERS_MAX, former_incarnations
from magnetar.bookie.storage.layout import FORMER, STORE, VIEWS, WATERMARK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from magnetar.bookie.storage.store import Storage
    from magnetar.metadata.model import BookieCookie

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop]


@pytest.fixture
def cluster() -> DirectoryCluster:
    return DirectoryCluster()


@pytest.fixture
def used(cluster: DirectoryCluster, tmp_path: Path) -> Path:
    run(killed_directory(cluster, tmp_path / "used"))
    return tmp_path / "used"


# The damage, and how many entries the store still has; None: the store does not open.
DAMAGES: dict[str, tuple[Callable[[Path], object], int | None]] = {
    "the log lost its end": (cut_log, 0),
    "a length field of the log": (grow_length_field, 0),
    "a record of the log": (flip_payload, 0),  # RocksDB skips the rest of its block of 32 KiB
    "another store, of no bookie": (empty_store, 0),
    "no store": (lambda path: shutil.rmtree(path / STORE), None),
    "no CURRENT": (lambda path: (path / STORE / "CURRENT").unlink(), None),
    "no watermark": (lambda path: (path / WATERMARK).unlink(), ENTRIES),
    "an empty watermark": (lambda path: (path / WATERMARK).write_bytes(b""), ENTRIES),
    "a watermark of another start": (later_watermark, ENTRIES),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_damaged_store_is_kept_for_a_former_incarnation(
    cluster: DirectoryCluster, used: Path, name: str
) -> None:
    damage, entries = DAMAGES[name]
    former = identity_of(used).incarnation
    damage(used)
    found = content(used / STORE) if (used / STORE).exists() else {}
    directory = await cluster.start(used)

    identity, cookie = directory.identity, await cluster.cookie()
    assert identity_of(used) == identity
    assert (identity.state, identity.former) == (DirectoryState.READY, former)
    assert identity.incarnation != former
    assert cookie is not None
    assert (cookie.incarnation, cookie.boot_epoch) == (identity.incarnation, 2)
    assert directory.storage.owner() == identity.incarnation.encode()
    assert directory.storage.ledgers(-1, ledgers_max=9) == []
    if entries is None:
        assert directory.formers == {former: None}
    else:
        assert len(given(directory, former)) == entries
    fill(directory, ledger=2)
    directory.close()

    # Later starts change neither the incarnation nor the former store.
    kept = content(used / FORMER)
    if damage in (
        cut_log,
        flip_payload,
    ):  # the bookie notices these damages before it writes to the store
        assert {key: kept[f"{former}/{STORE}/{key}"] for key in found if key.endswith("log")} == {
            key: value for key, value in found.items() if key.endswith("log")
        }
    again = await cluster.start(used)
    assert again.identity.incarnation == identity.incarnation
    assert list(again.formers) == [former]
    assert len(again.storage.entry_ids(2, 0, entries_max=100)) == ENTRIES
    again.close()
    assert content(used / FORMER) == kept


async def test_a_start_is_refused_at_the_limit_of_former_stores(
    cluster: DirectoryCluster, used: Path
) -> None:
    incarnations = []
    for turn in range(FORMERS_MAX):
        incarnations.append(identity_of(used).incarnation)
        (used / WATERMARK).unlink()
        directory = await cluster.start(used)
        assert sorted(directory.formers) == sorted(incarnations)
        fill(directory, ledger=10 + turn)
        directory.close()
    assert len(set(incarnations)) == FORMERS_MAX

    cookie = await cluster.cookie()
    mark = (used / WATERMARK).read_bytes()
    (used / WATERMARK).unlink()
    for _ in range(2):
        with pytest.raises(
            errors.TooManyFormers, match=r"watermark is missing.*stores of 4 former"
        ):
            await cluster.start(used)
    assert await cluster.cookie() == cookie
    (used / WATERMARK).write_bytes(mark)

    directory = await cluster.start(used)
    directory.remove_former(incarnations[0])
    assert incarnations[0] not in directory.formers
    assert former_incarnations(used) == sorted(incarnations[1:])
    assert sorted(os.listdir(used / VIEWS)) == sorted(incarnations[1:])
    directory.remove_former(incarnations[0])  # repeats the removal, as after a crash during it
    directory.close()
    (used / WATERMARK).unlink()
    directory = await cluster.start(used)
    assert len(directory.formers) == FORMERS_MAX
    directory.close()


# -- Killed on the way ---------------------------------------------------------------------------


# -- Byte by byte ----------------------------------------------------------------------------------

TABLES, LOG = 40, 20  # entries in tables and blob files, and those that only the log has
SIZES = (10, 600, 5000, 20_000)  # from 4,096 bytes on, values lie in blob files


def payload_of(entry: int) -> bytes:
    return random.Random(entry).randbytes(SIZES[entry % len(SIZES)])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[DirectoryCluster, Path, Path]:
    """A cluster, and two states of a directory with tables, blobs and a log: killed, and closed."""
    path = tmp_path_factory.mktemp("base")
    cluster = DirectoryCluster()
    directory = run(cluster.start(path / "live"))
    storage = directory.storage
    record = encode_ledger_record(LedgerRecord(KEY, fenced=False, created_ms=0))
    storage.write([(ledger_key(1), record)])
    for entry in range(TABLES + LOG):
        # No check would notice that the table of the second flush is missing.
        if entry in (TABLES // 2, TABLES):
            storage.flush()
        storage.write([(entry_key(1, entry), envelope(1, entry, payload_of(entry)))])
        storage.sync()
        directory.watermark.advance(storage.sequence())
    crash_image(path / "live", path / "killed")
    directory.close()
    return cluster, path / "killed", path / "live"


def file_of(path: Path, pattern: str) -> Path:
    """The largest file that matches: a store also has small tables of its own housekeeping."""
    return max(path.glob(pattern), key=lambda file: file.stat().st_size)


def records(data: bytes) -> list[int]:
    """The places where the fragments of a file in RocksDB's log format begin."""
    found, at = [], 0
    while at + 7 < len(data) and data[at : at + 7] != bytes(7):
        found.append(at)
        at += 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
    return found


FIELDS = {"checksum": 0, "length": 4, "length, high byte": 5, "type": 6, "content": 11}

WATERMARK_FIELDS = {
    "checksum": 0,
    "version": 4,
    "flags": 5,
    "epoch": 13,
    "sequence": 21,
    "manifest": 30,
    "flushed": 49,
}

# The place of the damaged byte, computed from the content of the file.
PLACES: dict[str, dict[str, Callable[[bytes], int]]] = {
    "store/*.log": {
        f"{field} of the {which} record": partial(
            lambda data, at, place: records(data)[place] + at, at=at, place=place
        )
        for field, at in FIELDS.items()
        for which, place in (("first", 0), ("middle", 9), ("last", -1))
    },
    "store/MANIFEST-*": {
        f"{field} of the {which} record": partial(
            lambda data, at, place: records(data)[place] + at, at=at, place=place
        )
        for field, at in FIELDS.items()
        for which, place in (
            ("first", 0),
            ("table's", -3),
            ("table's, continued", -2),
            ("last", -1),
        )
    },
    "store/CURRENT": {"name": lambda data: 2, "number": lambda data: len(data) - 2},
    "store/OPTIONS-*": {"text": lambda data: len(data) // 2},
    "store/*.sst": {
        "first block": lambda data: 30,
        "middle": lambda data: len(data) // 2,
        "index": lambda data: len(data) - 400,
        "footer": lambda data: len(data) - 30,
        "magic number": lambda data: len(data) - 1,
    },
    "store/*.blob": {
        "header": lambda data: 2,
        "record's header": lambda data: 33,
        "record": lambda data: 1000,
        "middle": lambda data: len(data) // 2,
        "footer": lambda data: len(data) - 10,
    },
    "watermark": {
        f"{field} of slot {slot}": partial(lambda data, at: at, at=slot * 4096 + at)
        for slot in (0, 1)
        for field, at in WATERMARK_FIELDS.items()
    },
}


def state_after(cluster: DirectoryCluster, path: Path, cookie: BookieCookie) -> str:
    """Start a bookie on the directory and read everything.

    Returns "whole", "unknown" (for some entries) or "damaged". A wrong entry and a false "no" fail
    the test.
    """
    run(cluster.set_cookie(cookie))
    directory = run(cluster.start(path))
    try:
        if directory.identity.incarnation != cookie.incarnation:
            assert list(directory.formers) == [cookie.incarnation]
            store = FormerStores(directory.formers)
            for entry in range(TABLES + LOG):
                found = store.run(
                    cookie.incarnation, 1, KEY, entry, entry, bytes_max=1 << 20, entries_max=1
                )
                assert found in ([], [envelope(1, entry, payload_of(entry))])
            return "damaged"
        return present_state(directory.storage)
    finally:
        directory.close()


def present_state(storage: Storage) -> str:
    state = "whole"
    with suppress(StorageFailed):
        assert storage.ledger_record(1) is not None, "a false no such ledger"
    with suppress(StorageFailed):
        last = storage.last_entry(1)
        assert last is not None
        assert last[0] == TABLES + LOG - 1, "a false end"
    for entry in range(TABLES + LOG):
        try:
            found = storage.run(1, entry, entry, bytes_max=1 << 20, entries_max=1)
        except StorageFailed:
            state = "unknown"
        else:
            assert found, f"a false no such entry {entry}"
            assert found == [envelope(1, entry, payload_of(entry))], "a wrong entry"
    return state


def cuts(pattern: str, name: str) -> bool:
    """Return whether the test also truncates the file at this place: not at each header field."""
    if pattern == "watermark":
        return False
    return pattern not in ("store/*.log", "store/MANIFEST-*") or name.startswith("checksum")


def changed(data: bytes, at: int, *, cut: bool, bit: int) -> bytes:
    return data[:at] if cut else data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


@pytest.mark.parametrize("pattern", PLACES)
def test_damage_of_any_field_never_gives_a_false_no(
    base: tuple[DirectoryCluster, Path, Path], tmp_path: Path, pattern: str
) -> None:
    cluster, killed, closed = base
    states = set()
    for source in (killed, closed):
        cookie = cookie_of(cluster, source)
        for name, place in PLACES[pattern].items():
            for cut in (False, True) if cuts(pattern, name) else (False,):
                if source is closed and pattern == "store/*.log":
                    continue  # the file is empty
                path = tmp_path / "damaged"
                shutil.copytree(source, path)
                file = file_of(path, pattern)
                data = file.read_bytes()
                at = place(data) % len(data)
                file.write_bytes(changed(data, at, cut=cut, bit=0x40))
                try:
                    states.add(state_after(cluster, path, cookie))
                except AssertionError as wrong:
                    raise AssertionError(f"{pattern}: {name} at {at}, {cut=}: {wrong}") from wrong
                shutil.rmtree(path)
    assert states <= {"whole", "unknown", "damaged"}
    # A store opens without its OPTIONS. The other slot of the watermark is whole.
    harmless = ("store/OPTIONS-*", "watermark")
    assert pattern in harmless or states & {"unknown", "damaged"}


def cookie_of(cluster: DirectoryCluster, path: Path) -> BookieCookie:
    cookie = run(cluster.cookie())
    assert cookie is not None
    identity = identity_of(path)
    return replace(
        cookie,
        incarnation=identity.incarnation,
        boot_epoch=identity.boot_epoch,
        start=identity.start,
    )


@pytest.mark.parametrize("seed", range(int(os.environ.get("DAMAGE_SEEDS", "12"))))
def test_damage_at_random_bytes_never_gives_a_false_no(
    base: tuple[DirectoryCluster, Path, Path], tmp_path: Path, seed: int
) -> None:
    cluster, *sources = base
    chance = random.Random(seed)
    source = chance.choice(sources)
    cookie = cookie_of(cluster, source)
    shutil.copytree(source, tmp_path / "damaged")
    files = [
        file
        for file in sorted((tmp_path / "damaged").rglob("*"))
        if file.is_file() and file.name not in ("identity", "lock") and file.stat().st_size
    ]
    file = chance.choice(files)
    data = file.read_bytes()
    at = chance.randrange(len(data))
    damaged = changed(data, at, cut=chance.random() < 0.3, bit=1 << chance.randrange(8))
    file.write_bytes(damaged)
    assert state_after(cluster, tmp_path / "damaged", cookie) in ("whole", "unknown", "damaged"), (
        f"{file.name} at {at}"
    )


@pytest.mark.parametrize("cut", [False, True])
async def test_the_identity_file_is_refused_by_name(
    base: tuple[DirectoryCluster, Path, Path], tmp_path: Path, cut: bool
) -> None:
    cluster, killed, _ = base
    data = (killed / "identity").read_bytes()
    shutil.copytree(killed, tmp_path / "damaged")
    for at in range(0, len(data), 9):
        (tmp_path / "damaged" / "identity").write_bytes(changed(data, at, cut=cut, bit=2))
        with pytest.raises(errors.IdentityDamaged):
            await cluster.start(tmp_path / "damaged")
