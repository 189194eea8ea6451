"""The stores of former incarnations: damaged stores, kept unchanged and opened read-only.

    former/<incarnation>/     store and watermark as they were found, moved there, never written to
    views/<incarnation>/      links to the files of one store, made again at each start

An entry with a correct checksum is valid: the checksum covers its content and its ids. Any other
entry is unknown. So the bookie opens the store with all readable files. RocksDB skips damaged
records of the log, and a missing table matters only when it is read.

NOTE: while the store is open, RocksDB keeps the entries of its log in memory: up to eight
memtables, 512 MiB. It has no other way to read a log without writing.

RocksDB opens a view instead of the store, because rocksdict writes a file of its own into each
store that it opens.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import StartRefused, StorageFailed
from magnetar.bookie.storage.format import is_incarnation
from magnetar.bookie.storage.layout import (
    FORMER,
    STORE,
    VIEWS,
    WATERMARK,
    sync_directory,
    unusable,
)
from magnetar.bookie.storage.opening import probe
from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

log = get_logger(__name__)

# Each store keeps its space until its ledgers are restored elsewhere, which takes hours. A disk
# that damages a fifth store in that time must be replaced.
FORMERS_MAX: Final = 4

# A bookie opens these stores before it serves; a store that hangs must not delay it for long.
OPEN_DEADLINE_S: Final = 15.0

# RocksDB's text log and lock file, rocksdict's settings, and the options of the last opening, which
# may be damaged. Opening needs none of them.
_NOT_VIEWED: Final = ("LOG", "LOCK", "OPTIONS", "rocksdict-config.json")


def former_incarnations(path: Path) -> list[str]:
    """Return the incarnations whose stores are kept in the data directory `path`."""
    try:
        return sorted(filter(is_incarnation, os.listdir(path / FORMER)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unusable(path, error) from error


def move_to_former(path: Path, incarnation: str) -> None:
    """Move store and watermark aside, as far as they exist; durable on return. May be called again
    after a crash."""
    target = path / FORMER / incarnation
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in (STORE, WATERMARK):
            if os.path.lexists(path / name):
                os.rename(path / name, target / name)
        for directory in (target, path / FORMER, path):
            sync_directory(directory)
    except OSError as error:
        raise unusable(path, error) from error


async def open_formers(path: Path, *, deadline_s: float) -> dict[str, RocksStorage | None]:
    """Open the stores of former incarnations. Return them, keyed by incarnation. None: the store
    cannot be read, or does not open within `deadline_s`, at most OPEN_DEADLINE_S."""
    deadline_s = min(deadline_s, OPEN_DEADLINE_S)
    formers: dict[str, RocksStorage | None] = {}
    for incarnation in former_incarnations(path):
        try:
            formers[incarnation] = await _open(path, incarnation, deadline_s)
        except (StorageFailed, StartRefused, OSError) as error:
            formers[incarnation] = None
            log.error(
                "store of a former incarnation does not open",
                incarnation=incarnation,
                reason=str(error),
            )
        else:
            log.warning(
                "store of a former incarnation opened; it is served read-only until no ledger "
                "needs it",
                incarnation=incarnation,
            )
    return formers


def remove_former(path: Path, incarnation: str) -> None:
    """Delete the store, which must be closed. Raises OSError; may be called again."""
    assert is_incarnation(incarnation)
    for directory in (path / VIEWS / incarnation, path / FORMER / incarnation):
        if directory.exists():
            shutil.rmtree(directory)


def make_view(store: Path, view: Path) -> None:
    """Make a directory of links to the store's files that RocksDB needs. Raises OSError."""
    if view.exists():
        shutil.rmtree(view)
    view.mkdir(parents=True)
    for name in os.listdir(store):
        if not name.startswith(_NOT_VIEWED):
            (view / name).symlink_to((store / name).resolve())


async def _open(path: Path, incarnation: str, deadline_s: float) -> RocksStorage:
    store, view = path / FORMER / incarnation / STORE, path / VIEWS / incarnation
    make_view(store, view)
    reason = await probe(path, "salvage", view, deadline_s=deadline_s)
    if reason is not None:
        raise StorageFailed("open", reason)
    storage = RocksStorage.open_read_only(view, salvage=True)
    owner = storage.owner()
    if owner not in (None, incarnation.encode()):
        storage.close()
        raise StorageFailed("open", f"the store belongs to {owner!r}")
    return storage
