"""The directory of an archive, and the staging directory in which a run writes the archive.

    <path>                        the archive
    .<name of path>.archiving/    the staging directory of a run, locked by the run (flock)
        new/                      the archive that the run writes
        old/                      the former content of `path`, until the run ends

When the archive is complete, the run renames `path` to `old`, and then `new` to `path`. A run that
is killed between these two renames leaves nothing at `path`. The next run first renames `old` back
to `path`. This module does not import Spark.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from magnetar.spark.errors import TargetBusy, TargetForeign, TargetNotEmpty

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OF_AN_ARCHIVE: Final = re.compile(
    r"_SUCCESS|\._SUCCESS\.crc|\.?part-.*\.parquet(\.crc)?"
    r"|(publish_date|publish_hour|event_date|key)=.*"
)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise TargetNotEmpty or TargetForeign if an archive must not be written to `path`.

    Raises NotADirectoryError if a parent of `path` is a file.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return
    if not path.is_dir():
        raise TargetForeign(path, "it is a file, not a directory")
    names = sorted(child.name for child in path.iterdir())
    if not names:
        return
    if not overwrite:
        raise TargetNotEmpty(path)
    for name in names:
        if not _OF_AN_ARCHIVE.fullmatch(name):
            raise TargetForeign(path, f"it contains {name!r}, which is not part of an archive")


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Lock a staging directory, yield the path for `new`, and remove the directory afterwards.

    Raises TargetBusy if another run holds the lock.
    """
    staging = path.with_name(f".{path.name}.archiving")
    staging.mkdir(parents=True, exist_ok=True)
    held = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(held, staging, path)
        try:
            _put_back(staging, path)
            for left in ("new", "old"):
                shutil.rmtree(staging / left, ignore_errors=True)
            yield staging / "new"
        finally:
            _put_back(staging, path)
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(held)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Create the directory of an incremental archive, and hold its lock.

    Raises TargetBusy if another run holds the lock, and TargetForeign if the directory holds
    anything but an incremental archive.
    """
    if path.is_dir():
        names = {child.name for child in path.iterdir()}
        if names and "_checkpoint" not in names:
            raise TargetForeign(path, "it is not empty, and not an incremental archive")
    (path / "_checkpoint").mkdir(parents=True, exist_ok=True)
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(held, path, path)
        yield
    finally:
        os.close(held)


def put_in_place(new: Path, path: Path) -> None:
    """Sync `new`, then replace `path` with it. Call it inside of `staged`."""
    for folder, _, names in os.walk(new, topdown=False):
        for name in (*names, ""):
            _sync(os.path.join(folder, name))
    if path.exists():
        path.rename(new.with_name("old"))
    new.rename(path)
    _sync(path.parent)


def _put_back(staging: Path, path: Path) -> None:
    """Undo the first rename if the second one did not happen."""
    if (staging / "old").exists() and not path.exists():
        (staging / "old").rename(path)


def _lock(held: int, staging: Path, path: Path) -> None:
    """Lock `staging`: a staging directory, or the directory of an incremental archive. Raises
    TargetBusy.

    Another run may have ended, and removed its staging directory after this run opened the
    directory. This counts as busy, too.
    """
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(held), staging.stat()):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    raise TargetBusy(path)


def _sync(path: str | Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
