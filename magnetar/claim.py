"""A directory held by one server on this machine.

The file that says whose it is, named after its owner, is on disk before anything else is, and is
locked (flock) by the process that uses the directory. So what is not ours is never written to, and
two servers never share one.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class DirectoryRefused(Exception):
    """The server does not start on this directory. Nothing in it was changed."""

    definite = True

    def __init__(self, directory: Path, reason: str, remedy: str) -> None:
        super().__init__(f"directory {directory}: {reason}. {remedy}")
        self.directory = directory
        self.reason = reason


@contextmanager
def claimed(directory: Path, owner: str) -> Iterator[None]:
    """Make the directory if need be, and hold it while inside. Raises DirectoryRefused."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        others = sorted(set(os.listdir(directory)) - {owner, "lost+found"})
        if others and not (directory / owner).exists():
            raise _foreign(directory, owner, f"it holds {', '.join(others[:3])}")
        mark = os.open(directory / owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        _lock(directory, mark)
        _check(directory, owner, mark, others)
        yield
    finally:
        os.close(mark)


def _lock(directory: Path, mark: int) -> None:
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DirectoryRefused(
            directory,
            "another process uses it",
            "Stop that one first, or give a directory of its own",
        ) from None


def _check(directory: Path, owner: str, mark: int, others: list[str]) -> None:
    line = f"magnetar {owner} 1\n".encode()
    found = os.pread(mark, 80, 0)
    if found == line:
        return
    if found or others:
        raise _foreign(directory, owner, f"its file {owner} does not say {line.decode().strip()!r}")
    try:
        os.write(mark, line)
        os.fsync(mark)
        listing = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(listing)
        finally:
            os.close(listing)
    except OSError as error:
        raise _unusable(directory, error) from error


def _foreign(directory: Path, owner: str, found: str) -> DirectoryRefused:
    return DirectoryRefused(
        directory,
        f"it is not, or not only, one of `magnetar {owner}`: {found}",
        f"Give an empty directory, or one that `magnetar {owner}` has made",
    )


def _unusable(directory: Path, error: OSError) -> DirectoryRefused:
    number = error.errno or 0
    remedy = {
        errno.ENOSPC: "Free some space, then start again",
        errno.EDQUOT: "Raise the quota, then start again",
        errno.EROFS: "Give a directory on a file system that can be written",
        errno.EACCES: "Give a directory that this user can write",
        errno.EPERM: "Give a directory that this user can write",
    }.get(number, "Give a directory that can be written")
    reason = "it is a file" if number in (errno.EEXIST, errno.ENOTDIR) else os.strerror(number)
    return DirectoryRefused(directory, reason, remedy)
