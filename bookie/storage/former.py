"""The stores of former incarnations: damaged ones, kept as they were, opened for reading only.

    former/<incarnation>/     store and watermark as they were found, moved there, never written to
    views/<incarnation>/      links to the files of such a store, made anew at each start

What such a store still has is true: each entry carries a checksum over its content and its ids.
What it does not have is unknown. So it is opened with whatever can be read of it: damaged records
of the log are skipped, and tables that are gone are missed only where they are read.

NOTE: what only its log had is kept in memory while it is open, up to what eight memtables hold, 512
MiB. RocksDB reads a log no other way without writing.

A view is what RocksDB opens, since rocksdict writes a file of its own into each store it opens.
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

# Each keeps its space until its ledgers are restored elsewhere, which takes hours. A disk that
# damages a fifth store before that is to be replaced.
FORMERS_MAX: Final = 4

# Every start waits for them: one that hangs must not keep the bookie away for long.
OPEN_DEADLINE_S: Final = 15.0

# RocksDB's own text log, rocksdict's settings, and the options of the last opening, which may be
# damaged themselves: opening needs none of them.
_NOT_VIEWED: Final = ("LOG", "LOCK", "OPTIONS", "rocksdict-config.json")


def former_incarnations(path: Path) -> list[str]:
    """Those whose stores are kept in the data directory `path`."""
    try:
        return sorted(filter(is_incarnation, os.listdir(path / FORMER)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unusable(path, error) from error


def move_to_former(path: Path, incarnation: str) -> None:
    """Put store and watermark aside, whatever there is of them; durable on return. May be called
    again after a crash."""
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
    """By incarnation; None: nothing can be read of it, or not within the shorter deadline."""
    deadline_s = min(deadline_s, OPEN_DEADLINE_S)
    formers: dict[str, RocksStorage | None] = {}
    for incarnation in former_incarnations(path):
        try:
            formers[incarnation] = await _open(path, incarnation, deadline_s)
        except (StorageFailed, StartRefused, OSError) as error:
            formers[incarnation] = None
            log.error("former store does not open", incarnation=incarnation, reason=str(error))
        else:
            log.warning(
                "former store opened: what it still has is given to readers, until no ledger "
                "needs it any more",
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
    """A directory of links to what RocksDB needs of a store. Raises OSError."""
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
        raise StorageFailed("open", f"it is the store of {owner!r}")
    return storage
