"""A data directory that one server process owns.

The claim file has the name of the owner's role. The server writes the claim file before any other
file and locks it (flock) while it uses the directory. So a server never writes to a directory of
another owner, and two servers never share a directory.
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
    """The server refuses to start on this directory. The data in the directory is unchanged."""

    definite = True

    def __init__(self, directory: Path, reason: str, remedy: str) -> None:
        super().__init__(f"directory {directory}: {reason}. {remedy}")
        self.directory = directory
        self.reason = reason


@contextmanager
def claimed(directory: Path, owner: str) -> Iterator[None]:
    """Create the directory if it is missing, and own it while the context is open. Raises
    DirectoryRefused."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        others = sorted(set(os.listdir(directory)) - {owner, "lost+found"})
        if others and not (directory / owner).exists():
            raise _foreign(directory, owner, f"it holds {', '.join(others[:3])}")
        claim = os.open(directory / owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        _lock(directory, claim)
        _check(directory, owner, claim, others)
        yield
    finally:
        os.close(claim)


def _lock(directory: Path, claim: int) -> None:
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DirectoryRefused(
            directory,
            "another process uses it",
            "Stop that process first, or give another directory",
        ) from None


def _check(directory: Path, owner: str, claim: int, others: list[str]) -> None:
    line = f"magnetar {owner} 1\n".encode()
    found = os.pread(claim, 80, 0)
    if found == line:
        return
    if found or others:
        raise _foreign(
            directory, owner, f"its file {owner} does not contain {line.decode().strip()!r}"
        )
    try:
        os.write(claim, line)
        os.fsync(claim)
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
        f"it does not belong to `magnetar {owner}` alone: {found}",
        f"Give an empty directory, or one that `magnetar {owner}` created",
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
