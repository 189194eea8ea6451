"""Data directories of bookies: starts on them with a cluster's metadata, and damage to them."""

from __future__ import annotations

import hashlib
import random
import shutil
from typing import TYPE_CHECKING

from fakes.bookies import KEY, crash_image, envelope

from magnetar.bookie.damaged_store import FormerStores
from magnetar.bookie.storage.directory import DataDirectory, open_directory
from magnetar.bookie.storage.format import (
    IDENTITY_KEY,
    WATERMARK_SLOT_BYTES,
    Identity,
    LedgerRecord,
    Watermark,
    decode_identity,
    encode_ledger_record,
    encode_watermark,
    entry_key,
    ledger_key,
)
from magnetar.bookie.storage.layout import IDENTITY, STORE, WATERMARK
from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_cookie, encode_bookie_cookie
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BookieCookie, BookieId

if TYPE_CHECKING:
    from pathlib import Path

COOKIE = paths.bookie_cookie(BookieId("b1"))
ENTRIES = 20  # the entries of ledger 1 in a directory that `fill` made


class DirectoryCluster:
    """A cluster's metadata, and starts of bookies on directories with this metadata."""

    def __init__(self, seed: int = 1) -> None:
        self.tree = MemoryTree()
        self.chance = random.Random(seed)

    async def start(
        self,
        path: Path,
        *,
        bookie: str = "b1",
        open_deadline_s: float = 20.0,
        new_incarnation: bool = False,
    ) -> DataDirectory:
        store = MemoryStore(self.tree)
        try:
            return await open_directory(
                path,
                bookie=bookie,
                metadata=store,
                chance=self.chance,
                open_deadline_s=open_deadline_s,
                new_incarnation=new_incarnation,
            )
        finally:
            await store.close()

    async def cookie(self) -> BookieCookie | None:
        store = MemoryStore(self.tree)
        stored = await store.get(COOKIE)
        await store.close()
        return None if stored is None else decode_bookie_cookie(stored.value)

    async def set_cookie(self, cookie: BookieCookie | None) -> None:
        store = MemoryStore(self.tree)
        stored = await store.get(COOKIE)
        assert stored is not None
        if cookie is None:
            await store.delete(COOKIE, expected=stored.version)
        else:
            await store.put(COOKIE, encode_bookie_cookie(cookie), expected=stored.version)
        await store.close()


def fill(directory: DataDirectory, *, ledger: int = 1) -> None:
    """Store ENTRIES entries and sync each, as a bookie with one slow writer would."""
    record = encode_ledger_record(LedgerRecord(KEY, fenced=False, created_ms=0))
    directory.storage.write([(ledger_key(ledger), record)])
    for entry in range(ENTRIES):
        directory.storage.write(
            [(entry_key(ledger, entry), envelope(ledger, entry, b"%d" % entry * 600))]
        )
        directory.storage.sync()
        directory.watermark.advance(directory.storage.sequence())


async def killed_directory(cluster: DirectoryCluster, path: Path) -> None:
    """A filled directory as a killed process leaves it, in its first boot epoch."""
    live = path.with_name(path.name + ".live")
    directory = await cluster.start(live)
    fill(directory)
    crash_image(live, path)
    directory.close()
    shutil.rmtree(live)


def identity_of(path: Path) -> Identity:
    return decode_identity((path / IDENTITY).read_bytes())


def given(directory: DataDirectory, incarnation: str, *, key: int = KEY) -> list[int]:
    """The entries that a reader gets from a former incarnation. Checks the bytes of each."""
    found = []
    store = FormerStores(directory.formers)
    for entry in range(ENTRIES):
        limits = {"bytes_max": 1 << 20, "entries_max": 1}
        for value in store.run(incarnation, 1, key, entry, entry, **limits):
            assert value == envelope(1, entry, b"%d" % entry * 600)
            found.append(entry)
    return found


def content(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file()
    }


# -- Damage ----------------------------------------------------------------------------------------


def flip(path: Path, at: int, *, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(bytes(content))


def last_log(path: Path) -> Path:
    return max((path / STORE).glob("*.log"))


def second_record(log: bytes) -> int:
    return 7 + int.from_bytes(log[4:6], "little")


def cut_log(path: Path) -> None:
    log = last_log(path).read_bytes()
    last_log(path).write_bytes(log[: second_record(log)])


def grow_length_field(path: Path) -> None:
    log = last_log(path)
    flip(log, second_record(log.read_bytes()) + 5, bit=0x40)


def flip_payload(path: Path) -> None:
    log = last_log(path)
    flip(log, second_record(log.read_bytes()) + 60)


def empty_store(path: Path) -> None:
    shutil.rmtree(path / STORE)
    RocksStorage(path / STORE, create=True).close()


def later_watermark(path: Path) -> None:
    mark = encode_watermark(Watermark(9, 1)).ljust(WATERMARK_SLOT_BYTES, b"\0")
    (path / WATERMARK).write_bytes(mark * 2)


def foreign_store(path: Path) -> None:
    shutil.rmtree(path / STORE)
    storage = RocksStorage(path / STORE, create=True)
    storage.write([(IDENTITY_KEY, b"e" * 32)] * 100)
    storage.close()
