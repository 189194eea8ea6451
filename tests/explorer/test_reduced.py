"""Searching less finds the same: with and without the reductions the same ledgers come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from explorer.cases import PLANTED
from explorer.protocol import Protocol
from explorer.reduced import CLOSER, NotReducible, Reduced, check_premises
from explorer.search import search
from explorer.state import Bug, Case, State, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from explorer.state import Attempt

SMALL = (
    Case(sizes=(3, 3, 2), entries=2),
    Case(sizes=(3, 3, 2), entries=2, recoverers=1, read_ahead=True),
    Case(sizes=(3, 3, 2), entries=1, read_ahead=True, crashes=1),
    Case(sizes=(3, 3, 2), entries=3, recoverers=1),
    Case(sizes=(3, 3, 2), entries=2, recoverers=1, crashes=1),
    Case(sizes=(3, 3, 2), entries=1, spares=1, writer_changes=1, crashes=1),
    Case(sizes=(3, 3, 2), entries=1, spares=1, writer_changes=1, recoverer_changes=1),
    Case(sizes=(4, 3, 2), entries=1),
    Case(sizes=(4, 3, 2), entries=2, recoverers=1, crashes=1),
    Case(sizes=(3, 2, 2), entries=2),
)
"""All of them searched in full."""

IRREDUCIBLE = (Bug.READS_DO_NOT_FENCE, Bug.FENCE_NOT_DURABLE, Bug.ADD_NOT_DURABLE)
"""Bugs that break what the reductions rely on."""

REDUCIBLE = tuple(bug for bug in Bug if bug not in IRREDUCIBLE)

Outcome = tuple[object, ...]


class Recording(Protocol):
    """Notes how ledgers come to be closed: who closes where, knowing what, and what bookies hold
    then. Of two recoverers that are alike it does not matter which."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.outcomes: set[Outcome] = set()

    def _check_end(self, state: State, who: int | None, last: int, told: int) -> None:
        super()._check_end(state, who, last, told)
        closer: Outcome | None = None
        if who is not None:
            attempt = state.attempts[who]
            closer = attempt.start, attempt.change
        bookies = [
            (b.stored, b.tells, b.up, b.listed, who is not None and b.views[who].working)
            for b in state.bookies
        ]
        if self.case.alike:
            bookies.sort()
        self.outcomes.add((closer, last, told, state.first, state.seen, tuple(bookies)))


class RecordingReduced(Recording, Reduced):
    """The same in the reduced search."""


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_same_ledgers_come_out_with_and_without_reductions(case: Case) -> None:
    full, reduced = Recording(case), RecordingReduced(case)
    whole, part = search(full), search(reduced)
    print(f"{whole.describe()}\n{part.describe()}\n{len(full.outcomes)} outcomes")
    assert whole.violation is None
    assert part.violation is None
    assert part.states < whole.states
    assert full.outcomes == reduced.outcomes


@pytest.mark.parametrize("bug", REDUCIBLE, ids=lambda bug: bug.name.lower())
def test_a_planted_bug_is_found_among_what_is_left(bug: Bug) -> None:
    planted = PLANTED[bug]
    result = search(Reduced(planted.case))
    assert planted.caught_by(result), result.describe()


@pytest.mark.parametrize("bug", IRREDUCIBLE, ids=lambda bug: bug.name.lower())
def test_what_breaks_the_premises_is_not_reduced(bug: Bug) -> None:
    with pytest.raises(NotReducible):
        search(Reduced(PLANTED[bug].case))


@pytest.mark.parametrize("case", SMALL[:5], ids=str)
def test_the_premises_hold_in_every_state(case: Case) -> None:
    """Not only in those that are left."""

    class Checked(Protocol):
        def moves(self, state: State) -> Iterator[tuple[Step, State]]:
            for step, after in super().moves(state):
                check_premises(state, step, after)
                yield step, after

    assert search(Checked(case)).violation is None


# -- reductions that go too far --------------------------------------------------------------------


class YesComesFirst(RecordingReduced):
    """Nobody hears "no" while somebody has the entry."""

    def _reads(self, state: State, who: int, attempt: Attempt) -> Iterator[tuple[Step, State]]:
        answers = dict(super()._reads(state, who, attempt))
        for step, after in answers.items():
            if step[0] == "found" or not any(b.stored >> int(step[2]) & 1 for b in state.bookies):
                yield step, after


class NoComesFirst(RecordingReduced):
    """Nobody hears "yes" while enough say "no"."""

    def _reads(self, state: State, who: int, attempt: Attempt) -> Iterator[tuple[Step, State]]:
        answers = dict(super()._reads(state, who, attempt))
        for step, after in answers.items():
            if step[0] == "absent" or ("absent", *step[1:3]) not in answers:
                yield step, after


class NobodyHelps(RecordingReduced):
    """What helpers write back is left out."""

    def _writes_back(
        self, state: State, who: int, attempt: Attempt
    ) -> Iterator[tuple[Step, State]]:
        if who == CLOSER:
            yield from super()._writes_back(state, who, attempt)


class AcksAreLost(RecordingReduced):
    """The writer never hears of acks that were under way when the ledger was claimed."""

    def _claimed(self, state: State) -> State:
        return super()._claimed(state)._replace(told=state.told)


class AllAreFenced(RecordingReduced):
    """A recoverer reads only when every bookie is fenced."""

    def _maybe_covered(self, state: State, who: int) -> State:
        if all(b.views[who].fenced or b.views[who].asked < 0 for b in state.bookies):
            return super()._maybe_covered(state, who)
        return state


@pytest.mark.parametrize(
    ("too_far", "case"),
    [
        (YesComesFirst, SMALL[0]),
        (NoComesFirst, SMALL[1]),
        (NobodyHelps, SMALL[0]),
        (AcksAreLost, SMALL[0]),
        (AllAreFenced, SMALL[0]),
    ],
)
def test_reductions_that_go_too_far_are_noticed(
    too_far: type[RecordingReduced], case: Case
) -> None:
    whole, part = RecordingReduced(case), too_far(case)
    assert search(whole).violation is None
    assert search(part).violation is None
    assert part.outcomes < whole.outcomes
