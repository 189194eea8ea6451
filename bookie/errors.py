"""The operating errors of a bookie. `definite` says whether the failed thing certainly did not
happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path


class BookieError(Exception):
    definite: ClassVar[bool]


class StorageFailed(BookieError):
    """The store could not do `operation`. Never a proof that something is not there.

    From a write or a sync it ends the process: after a failed sync nobody knows what is on disk.
    """

    definite = False

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation = operation
        self.reason = reason


class ReadsOverloaded(BookieError):
    """Too many reads are waiting already."""

    definite = False

    def __init__(self, waiting_max: int) -> None:
        super().__init__(f"{waiting_max} reads are waiting already")
        self.waiting_max = waiting_max


class CollectionAborted(BookieError):
    """A round of the collector ended early, because what it is told cannot be trusted."""

    definite = True


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
    """It cannot be written: read-only, full, no permission, not a directory."""


class OpenTooSlow(StartRefused):
    """The store did not open in time, and nothing says that it is damaged."""


class DirectoryLocked(StartRefused):
    """Another process uses it."""


class DirectoryForeign(StartRefused):
    """Its content is not, or not all, a bookie's."""


class DirectoryEmpty(StartRefused):
    """It is empty, but the cluster knows a bookie of this name: the disk was wiped or not
    mounted."""


class IdentityDamaged(StartRefused):
    """The identity file cannot be believed."""


class WrongBookie(StartRefused):
    """The directory belongs to another bookie."""


class WrongCluster(StartRefused):
    """The directory belongs to a bookie of another cluster."""


class WrongIncarnation(StartRefused):
    """The cluster knows this bookie with another disk."""


class CookieMissing(StartRefused):
    """The directory has been in use, but the cluster does not know the bookie."""


class DirectoryRolledBack(StartRefused):
    """The cluster has seen a later state of this directory: an older image was restored."""


class DirectoryCloned(StartRefused):
    """A copy of this directory was started as this bookie."""


class MetadataRolledBack(StartRefused):
    """The directory has seen a later state of the cluster's metadata."""


class TooManyFormers(StartRefused):
    """The store is damaged, and the stores of so many former incarnations are still needed that the
    disk is to blame."""


class DamagedStore(BookieError):
    """The store does not open, makes whoever opens it compute without end, or has lost what was on
    disk already.

    What is missing from it is unknown, never "no": it is kept for a former incarnation.
    """

    definite = False

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(f"{directory}: {reason}")
        self.directory = directory
        self.reason = reason
