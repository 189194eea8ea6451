"""Under-replication records: the copies of one ledger that need repair. Values, like `model.py`.

A process that detects a fault adds to the record. When a repair has replaced bad copies by sound
ones, it removes them from the record's list. At the end, the repair deletes the record. Both
changes succeed only if the record has not changed since the repair last read or wrote it, so later
additions survive. A record is a hint: the repair skips what the ledger's metadata shows to be
needless, and may write a sound copy again. So a needless record does no harm, and an incomplete
record delays a repair until the fault is detected again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from math import inf
from typing import Final

from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.model import BookieId, EntryId, Member

BAD_COPIES_MAX: Final = 256
"""The maximum number of ranges in one record, of all members together: 25 kB with long names, far
below the limit of a node. Beyond it, the closest ranges of one member are joined, with the entries
between them: writing a sound copy again does no harm."""

FAILURE_CHARS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class BadCopy:
    """A member's copies of these entries are damaged or missing. The range may include entries of
    which the member needs no copy."""

    member: Member
    first_entry: EntryId
    last_entry: EntryId  # inclusive
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.first_entry <= self.last_entry:
            raise InvalidRecord("bad copy", f"entries {self.first_entry} to {self.last_entry}")


@dataclass(frozen=True, slots=True)
class UnderReplication:
    """The copies of one ledger that need repair, with at most BAD_COPIES_MAX ranges: see `joined`.
    Raises InvalidRecord for invalid values."""

    created_ms: int  # when the ledger was first marked
    lost: frozenset[Member] = frozenset()  # the members to be replaced
    # Sorted by member and entry. The ranges of one member neither overlap nor touch.
    bad: tuple[BadCopy, ...] = ()
    narrow: bool = False  # the ledger was made with fewer copies than wanted
    failure: str = ""  # the reason why the last attempt to repair the ledger failed; "": none
    failed_ms: int = 0
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.created_ms < 0 or self.failed_ms < 0:
            raise InvalidRecord("under-replication record", "a negative time")

    def merged(self, other: "UnderReplication") -> "UnderReplication":
        """The faults of both records; creation time and last failure are this record's."""
        return replace(
            self,
            lost=self.lost | other.lost,
            bad=joined((*self.bad, *other.bad)),
            narrow=self.narrow or other.narrow,
        )

    def rewritten(self, member: Member, first: int, last: int) -> "UnderReplication":
        """The record after a repair of the member's copies of the entries `first` to `last`. If
        more than BAD_COPIES_MAX ranges would remain, the unchanged record."""
        left: list[BadCopy] = []
        for bad in self.bad:
            if bad.member != member or last < bad.first_entry or bad.last_entry < first:
                left.append(bad)
                continue
            if bad.first_entry < first:
                left.append(replace(bad, last_entry=EntryId(first - 1)))
            if last < bad.last_entry:
                left.append(replace(bad, first_entry=EntryId(last + 1)))
        return replace(self, bad=tuple(left)) if len(left) <= BAD_COPIES_MAX else self

    def failed(self, why: str, now_ms: int) -> "UnderReplication":
        return replace(self, failure=why[:FAILURE_CHARS_MAX], failed_ms=now_ms)


@dataclass(frozen=True, slots=True)
class BookieDrain:
    """Set by an operator: the bookie gets no new ledgers. With `decommission`, its copies are moved
    to other bookies as well. An open ledger stays until its writer rolls to a new one."""

    bookie: BookieId
    since_ms: int
    decommission: bool = False
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.bookie or self.since_ms < 0:
            raise InvalidRecord("bookie drain", f"{self.bookie!r} since {self.since_ms}")


@dataclass(frozen=True, slots=True)
class RepairPause:
    """Set by an operator. While this record exists, no bookie is recorded as lost, no copies are
    compared, and no copy is begun. Running copies are finished."""

    since_ms: int
    reason: str = ""
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.since_ms < 0 or len(self.reason) > FAILURE_CHARS_MAX:
            raise InvalidRecord(
                "pause of repair",
                f"since_ms={self.since_ms}, and a reason of {len(self.reason)} characters;"
                f" at most {FAILURE_CHARS_MAX} are allowed",
            )


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """The progress of the comparison of all replicas; the next auditor continues there."""

    began_ms: int
    after: int = -1  # ledgers up to this id were compared in this round; -1: none yet
    finished_ms: int = 0  # the last complete round; 0: none yet
    unknown: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.began_ms < 0 or self.finished_ms < 0 or self.after < -1:
            raise InvalidRecord("check progress", f"after {self.after}, began {self.began_ms}")


def joined(copies: Iterable[BadCopy]) -> tuple[BadCopy, ...]:
    """The copies as sorted ranges, at most BAD_COPIES_MAX. Ranges of one member that overlap or
    touch become one."""
    ordered = sorted(copies, key=lambda copy: (*_name(copy), copy.first_entry))
    runs: list[BadCopy] = []
    for _, ranges in groupby(ordered, key=_name):
        begin = len(runs)
        for copy in ranges:
            if len(runs) > begin and copy.first_entry <= runs[-1].last_entry + 1:
                runs[-1] = _spanning(runs[-1], copy)
            else:
                runs.append(copy)
    return tuple(runs if len(runs) <= BAD_COPIES_MAX else _joined_closest(runs))


def _joined_closest(runs: list[BadCopy]) -> list[BadCopy]:
    """Join ranges across the narrowest gaps until BAD_COPIES_MAX are left. Each member keeps at
    least one range: a cluster has fewer bookies than BAD_COPIES_MAX."""

    def gap(at: int) -> float:
        before, after = runs[at - 1], runs[at]
        same = before.member == after.member
        return after.first_entry - before.last_entry if same else inf

    widest = sorted(range(1, len(runs)), key=gap, reverse=True)
    starts = [at for rank, at in enumerate(widest) if rank < BAD_COPIES_MAX - 1 or gap(at) == inf]
    borders = [0, *sorted(starts), len(runs)]
    return [_spanning(runs[begin], runs[end - 1]) for begin, end in pairwise(borders)]


def _name(copy: BadCopy) -> tuple[str, str]:
    return copy.member.bookie, copy.member.incarnation


def _spanning(before: BadCopy, after: BadCopy) -> BadCopy:
    return replace(before, last_entry=max(before.last_entry, after.last_entry))
