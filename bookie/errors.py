"""The operating errors of a bookie. `definite`: the failed operation certainly had no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path


class BookieError(Exception):
    definite: ClassVar[bool]


class StorageFailed(BookieError):
    """The store failed at `operation`. The failure never proves that an entry is absent.

    After a failed write or sync the process ends, because the state of the disk is unknown.
    """

    definite = False

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation = operation
        self.reason = reason


class ReadsOverloaded(BookieError):
    """Too many reads wait already."""

    definite = False

    def __init__(self, waiting_max: int) -> None:
        super().__init__(f"{waiting_max} reads wait already")
        self.waiting_max = waiting_max


class CollectionAborted(BookieError):
    """A round of the collector ended early, because the metadata or the store cannot be trusted.
    The round may have deleted ledgers before."""

    definite = False


class StartRefused(BookieError):
    """The bookie does not start on this directory. The message says what was found, what was
    expected, and what to do."""

    definite = True

    def __init__(self, directory: Path, *, found: str, expected: str, remedy: str) -> None:
        super().__init__(f"{directory}: found {found}; expected {expected}. {remedy}")
        self.directory = directory
        self.found = found
        self.expected = expected
        self.remedy = remedy


class DirectoryUnusable(StartRefused):
    """The directory, the disk or the machine does not let the bookie start: for example, a full
    disk, a missing permission, too little memory. This says nothing about the store."""


class OpenTooSlow(StartRefused):
    """The store did not open in time, and nothing indicates damage."""


class DirectoryLocked(StartRefused):
    """Another process uses the directory."""


class DirectoryForeign(StartRefused):
    """The directory contains files that are not a bookie's."""


class DirectoryEmpty(StartRefused):
    """The directory is empty, but the cluster has a bookie of this name: the disk was wiped or is
    not mounted."""


class IdentityDamaged(StartRefused):
    """The identity file is damaged."""


class WrongBookie(StartRefused):
    """The directory belongs to another bookie."""


class WrongCluster(StartRefused):
    """The directory belongs to a bookie of another cluster."""


class WrongIncarnation(StartRefused):
    """The cluster's record of this bookie names another incarnation or start, or the store has
    another owner: two directories or processes have one id, or a store was copied."""


class CookieMissing(StartRefused):
    """The directory was used before, but the cluster has no record of the bookie."""


class DirectoryRolledBack(StartRefused):
    """The cluster saw a later state of this directory: an older image was restored."""


class DirectoryCloned(StartRefused):
    """A copy of this directory was started as this bookie."""


class MetadataRolledBack(StartRefused):
    """The directory is more than one boot epoch ahead of the cluster's metadata: an older state of
    the metadata was restored."""


class TooManyFormers(StartRefused):
    """The store is damaged, and too many stores of former incarnations are still needed: the disk
    is probably faulty."""


class DamagedStore(BookieError):
    """The store does not open, makes RocksDB compute without end, lost data that was on disk, or
    has a table that RocksDB could not read.

    An entry that this store lacks is "unknown", never "no". The bookie continues as a new
    incarnation and serves this store read-only for the former one.
    """

    definite = False

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(f"{directory}: {reason}")
        self.directory = directory
        self.reason = reason
