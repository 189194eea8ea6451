"""The calls of the bookie contract as values: what protos/bookie.proto says, for both ends.

The Write stream and the answers of a read are bytes: magnetar.protos.envelope. Incarnations are 32
hex digits. A call that names a former incarnation of the bookie is answered LIMBO, but for reads of
entries that are still there; one that names any other is answered WRONG_INCARNATION. Both are
unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from magnetar.protos.envelope import BookieCode


STRIDE_MAX: Final = 32
"""The largest ensemble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Entries first..last. The answer has at least the first of them, whatever `bytes_max` says."""

    incarnation: str
    ledger: int
    master_key: int
    first: int
    last: int
    bytes_max: int | None = None  # None: the bookie's own limit
    entries_max: int | None = None  # None: the bookie's own limit
    # No answer before the ledger is fenced, durably. (A former incarnation says yes only.)
    fence: bool = False
    # Only the first `run` entries of each `stride`, counted from `first`. 0 and 0: all.
    run: int = 0
    stride: int = 0

    @property
    def well_formed(self) -> bool:
        striped = 0 < self.run <= self.stride <= STRIDE_MAX
        return 0 <= self.first <= self.last and (striped or self.run == self.stride == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastConfirmedRequest:
    incarnation: str
    ledger: int
    master_key: int
    fence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LastConfirmed:
    """With a code other than OK the numbers mean nothing: -1, -1, 0. Nor do they in an OK to a
    fence where the last entry cannot be read."""

    code: BookieCode
    confirmed: int = -1  # which the last stored entry's envelope names; -1: none
    last_entry: int = -1  # the last stored entry; -1: none
    length: int = 0  # payload bytes of entries 0..last_entry, from its envelope


@dataclass(frozen=True, slots=True)
class LedgerPage:
    code: BookieCode
    ledgers: tuple[int, ...] = ()  # ascending
    more: bool = False  # ask again after the last one


@dataclass(frozen=True, slots=True)
class EntryRun:
    """The entries first .. first + count - 1."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class EntryPage:
    code: BookieCode
    runs: tuple[EntryRun, ...] = ()  # ascending, neither overlapping nor touching within a page
    more: bool = False  # ask again from one past the last run


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieInfo:
    bookie: str
    incarnation: str
    boot_epoch: int
    cluster: str
    state: str  # "starting", "serving", "stopping"
    read_only: bool
    disk_total_bytes: int
    disk_free_bytes: int
