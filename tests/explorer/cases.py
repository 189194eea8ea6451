"""The cases that are explored: the bounds of `make test`, those of `make explore`, and the planted
bugs. In each case, any number of messages may be lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from explorer.state import Bug, Case

if TYPE_CHECKING:
    from explorer.search import Result

QUICK: Final = (
    Case(sizes=(3, 3, 2), entries=3, crashes=1),
    Case(sizes=(3, 3, 2), entries=3, recoverers=1, crashes=1, read_ahead=True),
    Case(sizes=(3, 3, 2), entries=3, spares=1, writer_changes=1, crashes=1),
    Case(sizes=(3, 3, 2), entries=2, spares=1, writer_changes=1, recoverer_changes=1, crashes=1),
    Case(sizes=(2, 2, 2), entries=3),
)
"""These cases take some seconds."""

THOROUGH: Final = (
    Case(sizes=(4, 3, 2), entries=2, spares=1, writer_changes=1, recoverer_changes=1, crashes=1),
    Case(sizes=(4, 3, 2), entries=3, recoverers=1, crashes=1),
    Case(sizes=(3, 3, 2), entries=3, spares=1, writer_changes=1, recoverer_changes=1, crashes=1),
    Case(sizes=(3, 3, 2), entries=3, spares=2, writer_changes=2, recoverer_changes=1, crashes=1),
    Case(sizes=(4, 3, 2), entries=3, crashes=1),
    Case(sizes=(4, 3, 2), entries=3, spares=1, writer_changes=1, crashes=1),
    Case(sizes=(4, 3, 2), entries=3, spares=1, writer_changes=1, recoverer_changes=1, crashes=1),
    Case(sizes=(4, 3, 2), entries=4, crashes=1),
    Case(sizes=(5, 3, 2), entries=3, crashes=1),
)
"""0.9 million states with `QUICK`: 210 s of CPU."""

COMPARED: Final = (
    Case(sizes=(3, 3, 2), entries=2, read_ahead=True),
    Case(sizes=(3, 3, 2), entries=3),
    Case(sizes=(3, 3, 2), entries=2, spares=1, writer_changes=1, crashes=1),
    Case(sizes=(3, 3, 2), entries=2, spares=1, writer_changes=1, recoverer_changes=1),
    Case(sizes=(4, 3, 2), entries=1, spares=1, writer_changes=1, recoverer_changes=1),
    Case(sizes=(4, 3, 2), entries=2),
    Case(sizes=(4, 3, 2), entries=2, recoverers=1, spares=1, writer_changes=1, recoverer_changes=1),
    Case(sizes=(4, 3, 2), entries=3, recoverers=1, crashes=1),
)
"""These cases are also searched in full, and must give the same ledgers. They include 3/3/2 with
three entries. 290 s of CPU."""


@dataclass(frozen=True)
class Planted:
    case: Case
    invariant: str  # the invariant that must be violated

    def caught_by(self, result: Result) -> bool:
        """True if the result shows the violation. With the reductions, an entry that would be
        acknowledged after the close is acknowledged before it."""
        earlier = result.reduced and self.invariant == _BEYOND
        invariant = "acked entries are readable" if earlier else self.invariant
        return result.violation is not None and result.violation.invariant == invariant


def _planted(bug: Bug, invariant: str, case: Case) -> tuple[Bug, Planted]:
    small = Case(**{**vars(case), "bugs": frozenset({bug})})
    return bug, Planted(small, invariant)


_BEYOND: Final = "nothing is acknowledged beyond the end"
_COPIES: Final = "closed entries have Qa copies"

_ALONE: Final = Case(sizes=(3, 3, 2), entries=1, recoverers=1)
_CRASH: Final = Case(sizes=(3, 3, 2), entries=1, recoverers=1, crashes=1, fences_checked=False)
_CHANGE: Final = Case(sizes=(3, 3, 2), entries=1, recoverers=1, spares=1, writer_changes=1)
_TWO: Final = Case(sizes=(3, 3, 2), entries=2, recoverers=2)
_PRIVATE: Final = Case(sizes=(3, 3, 2), entries=1, recoverers=2, spares=1, recoverer_changes=1)

PLANTED: Final = dict(
    (
        _planted(Bug.READS_DO_NOT_FENCE, _BEYOND, _ALONE),
        _planted(Bug.UNKNOWN_IS_FENCED, "a recoverer reads only behind fences", _ALONE),
        _planted(Bug.UNKNOWN_IS_ABSENT, _BEYOND, _ALONE),
        _planted(Bug.ONE_NEGATIVE_ENDS, _BEYOND, _ALONE),
        _planted(Bug.USED_BEFORE_RECORDED, _COPIES, _CHANGE),
        _planted(Bug.CONFIRMS_DURING_CHANGE, _COPIES, _CHANGE),
        _planted(Bug.ACKS_OF_REPLACED_COUNT, _COPIES, _CHANGE),
        _planted(Bug.CHANGE_OF_RECOVERER_RECORDED, _BEYOND, _PRIVATE),
        _planted(Bug.STARTS_AT_ANSWERED, "acked entries are readable", _CHANGE),
        _planted(Bug.CLOSES_AT_APPENDED, _COPIES, _ALONE),
        _planted(Bug.CLOSES_UNWRITTEN, _COPIES, _ALONE),
        _planted(Bug.TELLS_OWN_PROGRESS, "entries that a reader was told of stay", _TWO),
        _planted(Bug.FENCE_NOT_DURABLE, _BEYOND, _CRASH),
        _planted(Bug.ADD_NOT_DURABLE, _COPIES, _CRASH),
    )
)
