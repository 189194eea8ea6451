"""Searches with and without the reductions find the same ledgers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from explorer.cases import PLANTED
from explorer.forgetting import Forgetting
from explorer.outcomes import RecordingForgetting, RecordingReduced, compare
from explorer.protocol import Protocol
from explorer.reduced import CLOSER, NotReducible, Reduced, check_premises
from explorer.search import search
from explorer.state import NOWHERE, Bug, Case, State, Step

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
    Case(sizes=(3, 3, 2), entries=1, spares=1, writer_changes=2),
    Case(sizes=(3, 3, 2), entries=1, spares=1, writer_changes=1, recoverer_changes=1),
    Case(sizes=(4, 3, 2), entries=1),
    Case(sizes=(4, 3, 2), entries=1, recoverers=1, spares=1, writer_changes=1, recoverer_changes=1),
    Case(sizes=(3, 2, 2), entries=2),
)
"""Cases that are also searched in full. `make explore` compares larger ones."""

QUICK_AND_NIGHT = tuple(
    pytest.param(case, marks=pytest.mark.night)
    if case in SMALL[:1] + SMALL[3:5] + SMALL[6:10]
    else case
    for case in SMALL
)

IRREDUCIBLE = (
    Bug.READS_DO_NOT_FENCE,
    Bug.CHANGE_OF_RECOVERER_RECORDED,
    Bug.TELLS_OWN_PROGRESS,
    Bug.FENCE_NOT_DURABLE,
    Bug.ADD_NOT_DURABLE,
)
"""Bugs that break the premises of the reductions."""

REDUCIBLE = tuple(bug for bug in Bug if bug not in IRREDUCIBLE)


@pytest.mark.parametrize("case", QUICK_AND_NIGHT, ids=str)
def test_searches_with_and_without_reductions_find_the_same_ledgers(case: Case) -> None:
    comparison = compare(case)
    print(comparison.describe())
    assert comparison.equal
    full, reduced, forgetting = comparison.results
    assert forgetting.states < reduced.states < full.states


@pytest.mark.parametrize("search_of", [Reduced, Forgetting])
@pytest.mark.parametrize("bug", REDUCIBLE, ids=lambda bug: bug.name.lower())
def test_the_reduced_search_finds_a_planted_bug(bug: Bug, search_of: type[Reduced]) -> None:
    planted = PLANTED[bug]
    result = search(search_of(planted.case))
    assert planted.caught_by(result), result.describe()


@pytest.mark.parametrize(
    "case",
    [
        Case(
            sizes=(3, 3, 2), entries=3, spares=1, writer_changes=1, recoverer_changes=1, crashes=1
        ),
        pytest.param(
            Case(sizes=(4, 3, 2), entries=3, spares=1, recoverers=1, writer_changes=1),
            marks=pytest.mark.night,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("bug", REDUCIBLE, ids=lambda bug: bug.name.lower())
def test_the_reduced_search_finds_a_planted_bug_with_three_entries(bug: Bug, case: Case) -> None:
    result = search(Forgetting(replace(case, bugs=frozenset({bug}))))
    print(result.describe())
    assert result.violation is not None


@pytest.mark.parametrize("search_of", [Reduced, Forgetting])
@pytest.mark.parametrize("bug", IRREDUCIBLE, ids=lambda bug: bug.name.lower())
def test_a_protocol_that_breaks_the_premises_is_not_reduced(
    bug: Bug, search_of: type[Reduced]
) -> None:
    with pytest.raises(NotReducible):
        search(search_of(PLANTED[bug].case))


def test_a_case_whose_crashes_lose_all_copies_is_not_reduced() -> None:
    with pytest.raises(NotReducible):
        Forgetting(Case(sizes=(3, 3, 2), entries=1, crashes=2))


@pytest.mark.parametrize("case", QUICK_AND_NIGHT[:5], ids=str)
def test_the_premises_hold_in_every_state(case: Case) -> None:
    """In all states, not only in the states of the reduced search."""

    class Checked(Protocol):
        def moves(self, state: State) -> Iterator[tuple[Step, State]]:
            for step, after in super().moves(state):
                check_premises(state, step, after)
                yield step, after

    assert search(Checked(case)).violation is None


# -- reductions that go too far --------------------------------------------------------------------


class YesComesFirst(RecordingReduced):
    """No recoverer receives "no" while a bookie has the entry."""

    def _reads(self, state: State, who: int, attempt: Attempt) -> Iterator[tuple[Step, State]]:
        answers = dict(super()._reads(state, who, attempt))
        for step, after in answers.items():
            if step[0] == "found" or not any(b.stored >> int(step[2]) & 1 for b in state.bookies):
                yield step, after


class NoComesFirst(RecordingReduced):
    """No recoverer receives "yes" while enough bookies say "no"."""

    def _reads(self, state: State, who: int, attempt: Attempt) -> Iterator[tuple[Step, State]]:
        answers = dict(super()._reads(state, who, attempt))
        for step, after in answers.items():
            if step[0] == "absent" or ("absent", *step[1:3]) not in answers:
                yield step, after


class NoHelp(RecordingReduced):
    """The write-backs of other recoverers are left out."""

    def _writes_back(
        self, state: State, who: int, attempt: Attempt
    ) -> Iterator[tuple[Step, State]]:
        if who == CLOSER:
            yield from super()._writes_back(state, who, attempt)


class HelpIsForMembers(RecordingReduced):
    """Other recoverers have no private ensembles."""

    def _writes_back(
        self, state: State, who: int, attempt: Attempt
    ) -> Iterator[tuple[Step, State]]:
        for step, after in super()._writes_back(state, who, attempt):
            if who == CLOSER or state.bookies[int(step[3])].listed != NOWHERE:
                yield step, after


class AcksAreLost(RecordingReduced):
    """The writer never receives acks that were under way when the ledger was claimed."""

    def _claimed(self, state: State) -> State:
        return super()._claimed(state)._replace(told=state.told)


class AllAreFenced(RecordingReduced):
    """A recoverer reads only when every bookie is fenced."""

    def _maybe_covered(self, state: State, who: int) -> State:
        if all(b.views[who].fenced or b.views[who].asked < 0 for b in state.bookies):
            return super()._maybe_covered(state, who)
        return state


class NoCrash(RecordingReduced):
    """`check` looks only at states without crashes."""

    def check(self, state: State) -> None:
        super().check(state._replace(crashes=0))


@pytest.mark.parametrize(
    ("too_far", "case"),
    [
        (YesComesFirst, SMALL[0]),
        (NoComesFirst, SMALL[1]),
        (NoHelp, SMALL[0]),
        (HelpIsForMembers, Case(sizes=(3, 3, 2), entries=1, spares=1, recoverer_changes=1)),
        (AcksAreLost, SMALL[0]),
        (AllAreFenced, SMALL[0]),
        (NoCrash, SMALL[4]),
    ],
)
def test_reductions_that_go_too_far_are_noticed(
    too_far: type[RecordingReduced], case: Case
) -> None:
    whole, part = RecordingReduced(case), too_far(case)
    assert search(whole).violation is None
    assert search(part).violation is None
    assert part.outcomes < whole.outcomes


class StartsAtTheConfirmed(RecordingForgetting):
    """Everything confirmed is forgotten, whichever bookie told of it."""

    def lowest_start(self, state: State, least: int) -> int:
        return max(least, state.told)


class NoTelling(RecordingForgetting):
    """A bookie's "confirmed" is forgotten before a recoverer has received it."""

    def _while_fencing(self, state: State) -> State:
        bookies = tuple(bookie._replace(tells=-1) for bookie in state.bookies)
        return super()._while_fencing(state._replace(bookies=bookies))


class TheLastIsForgotten(RecordingForgetting):
    """The last entry that was found counts as the end."""

    def _while_reading(self, state: State) -> State:
        kept = super()._while_reading(state)
        closer = kept.attempts[CLOSER]
        if not closer.ended or closer.next == kept.first:
            return kept
        gone = ~(1 << closer.next - 1)
        return kept._replace(
            bookies=tuple(b._replace(stored=b.stored & gone) for b in kept.bookies)
        )


@pytest.mark.parametrize(
    ("too_far", "case"),
    [
        (StartsAtTheConfirmed, SMALL[0]),
        (NoTelling, SMALL[0]),
        (TheLastIsForgotten, SMALL[0]),
    ],
)
def test_forgetting_too_much_is_noticed(too_far: type[RecordingForgetting], case: Case) -> None:
    whole, part = RecordingForgetting(case), too_far(case)
    assert search(whole).violation is None
    search(part)
    assert part.ledgers != whole.ledgers
