"""The files of a bookie's data directory, its lock, and its identity file (FORMAT.md)."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import DirectoryLocked, DirectoryUnusable
from magnetar.bookie.storage.format import FormatDamaged, decode_identity, encode_identity
from magnetar.bookie.storage.identity import Found

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from magnetar.bookie.storage.format import Identity

LOCK: Final = "lock"
IDENTITY: Final = "identity"
IDENTITY_NEW: Final = "identity.new"
WATERMARK: Final = "watermark"
STORE: Final = "store"
FORMER: Final = "former"
VIEWS: Final = "views"
RESERVE: Final = "reserve"
RESERVE_NEW: Final = "reserve.new"
RECLAIMING: Final = "reclaiming"
ROTTEN: Final = "rotten"

# Files that may exist in a directory without a store.
_IGNORED: Final = frozenset(
    {LOCK, IDENTITY, IDENTITY_NEW, RESERVE, RESERVE_NEW, RECLAIMING, ROTTEN, "lost+found"}
)

# Errors caused by the process or the disk, not by the store.
_ENVIRONMENT: Final = {
    errno.ENOSPC: "The disk is full: free some space, then start again.",
    errno.EDQUOT: "The quota is used up: raise it, then start again.",
    errno.EROFS: "The file system is mounted read-only: check the kernel log, then remount it.",
    errno.EACCES: "Give the bookie's user permission to read and write.",
    errno.EPERM: "Give the bookie's user permission to read and write.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n), then start again.",
    errno.ENFILE: "This machine has too many files open; start again later.",
    errno.ENOMEM: "This machine is out of memory; free some, then start again.",
    errno.EAGAIN: "Another process has the store open: end it, then start again.",
}


def unusable(path: Path, error: OSError) -> DirectoryUnusable:
    number = error.errno or 0
    return DirectoryUnusable(
        path,
        found=os.strerror(number),
        expected="a writable directory",
        remedy=_ENVIRONMENT.get(number, "Set data_dir to a writable directory."),
    )


def environment_error(reason: str) -> OSError | None:
    """Return the error of the process or of the disk that `reason`, a message of RocksDB, names.
    None: it names no such error, so the store itself may be damaged."""
    for number in _ENVIRONMENT:
        if os.strerror(number) in reason:
            return OSError(number, reason)
    return None


def sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def lock_directory(path: Path, *, sync: Callable[[Path], None] = sync_directory) -> int:
    """Make the directory if needed, and lock it against other processes. Returns the descriptor to
    close."""
    try:
        _make_directory(path, sync)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unusable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        refused = in_use(path, lock)
        os.close(lock)
        raise refused from None
    except OSError as error:
        os.close(lock)
        raise unusable(path, error) from error
    return lock


def _make_directory(path: Path, sync: Callable[[Path], None]) -> None:
    """Make the directory and its missing parents, durably."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync(each.parent)


def in_use(path: Path, lock: int) -> DirectoryLocked:
    holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
    return DirectoryLocked(
        path,
        found=f"process {holder} using it",
        expected="no other process",
        remedy="Stop that process, or give this bookie a directory of its own.",
    )


def find(path: Path) -> Found:
    others: tuple[str, ...] = ()
    try:
        others = tuple(sorted(set(os.listdir(path)) - _IGNORED))
        text = (path / IDENTITY).read_bytes()
    except FileNotFoundError:  # no identity, or no directory
        return Found(None, others)
    except OSError as error:
        raise unusable(path, error) from error
    try:
        return Found(decode_identity(text), others)
    except FormatDamaged as damage:
        return Found(damage, others)


def write_identity(path: Path, identity: Identity) -> None:
    """Replace the identity file durably. After a crash it has the old or the new identity."""
    try:
        with open(path / IDENTITY_NEW, "wb") as file:
            file.write(encode_identity(identity))
            file.flush()
            os.fsync(file.fileno())
        os.replace(path / IDENTITY_NEW, path / IDENTITY)
        sync_directory(path)
    except OSError as error:
        raise unusable(path, error) from error
