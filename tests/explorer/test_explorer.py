"""The protocol holds in every reachable state, each planted bug breaks it, and the machines follow
it."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from explorer.cases import PLANTED, QUICK
from explorer.protocol import Protocol
from explorer.replay import Diverged, Replay, walk
from explorer.search import explore, search
from explorer.state import Bug, Case, Step

WALKS = 50


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_t15_no_interleaving_breaks_an_invariant(case: Case) -> None:
    result = explore(case)
    print(result.describe())
    assert result.violation is None, result.describe()
    assert result.reduced
    assert result.states > 300


def test_every_bug_is_planted() -> None:
    assert set(PLANTED) == set(Bug)


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name.lower())
def test_a_planted_bug_is_found(bug: Bug) -> None:
    planted = PLANTED[bug]
    result = explore(planted.case)
    print(f"{bug.value}\n{result.describe()}")
    assert planted.caught_by(result)


@pytest.mark.parametrize(
    "sizes", [(3, 3, 2), pytest.param((4, 3, 2), marks=pytest.mark.night)], ids=str
)
def test_reads_that_do_not_fence_are_found_among_three_entries(sizes: tuple[int, int, int]) -> None:
    result = explore(Case(sizes=sizes, entries=3, bugs=frozenset({Bug.READS_DO_NOT_FENCE})))
    print(result.describe())
    assert not result.reduced
    assert result.violation is not None
    assert result.violation.invariant == "nothing is acknowledged beyond the end"


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name.lower())
def test_the_machines_diverge_from_a_planted_bug(bug: Bug) -> None:
    case = PLANTED[bug].case
    result = search(Protocol(case))
    assert result.violation is not None
    with pytest.raises(Diverged):
        follow(case, result.trace, result.violation.closing)


def follow(case: Case, trace: Sequence[Step], closing: tuple[int | None, int] | None) -> None:
    protocol, real = Protocol(case), Replay(case)
    state = protocol.begin()
    for step in trace:
        state = dict(protocol.steps(state))[step]
        real.take(step, state)
    if closing is not None:
        real.close(*closing)


@pytest.mark.parametrize(
    "case",
    [
        Case(sizes=(3, 3, 2), entries=3),
        Case(sizes=(3, 3, 2), entries=3, spares=1, writer_changes=1, recoverer_changes=1),
        Case(sizes=(3, 3, 2), entries=3, spares=2, writer_changes=2, recoverer_changes=1),
        Case(sizes=(4, 3, 2), entries=3),
        Case(sizes=(4, 3, 2), entries=3, spares=1, writer_changes=1, recoverer_changes=1),
        Case(sizes=(3, 2, 2), entries=3, spares=1, writer_changes=1),
        Case(sizes=(5, 3, 2), entries=3, crashes=1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(WALKS * part, marks=pytest.mark.night) for part in (1, 2))]
)
def test_the_machines_follow_every_run_of_the_specification(case: Case, first: int) -> None:
    closed = [walk(case, Random(seed))[1] for seed in range(first, first + WALKS)]
    assert len(set(closed) - {None}) >= 3, "too few walks ended with a close"


@pytest.mark.night
def test_missing_fences_lose_entries_only_if_reads_do_not_fence_either() -> None:
    """A bug that counts no answer as fenced breaks nothing alone, because each "no" of a read
    fences as well. Together with reads that do not fence, it loses entries."""
    case = Case(sizes=(3, 3, 2), entries=2, fences_checked=False)
    careless = replace(case, bugs=frozenset({Bug.UNKNOWN_IS_FENCED}))
    both = replace(case, bugs=frozenset({Bug.UNKNOWN_IS_FENCED, Bug.READS_DO_NOT_FENCE}))
    assert search(Protocol(careless)).violation is None
    assert search(Protocol(both)).violation is not None


@pytest.mark.night
def test_states_that_are_kept_stand_for_all_others() -> None:
    """A search that does not sort bookies and recoverers finds more states, but no different
    ones."""
    protocol = Protocol(Case(sizes=(3, 3, 2), entries=1, spares=1, writer_changes=1))
    todo = [protocol.begin()]
    everything = set(todo)
    while todo:
        for _, after in protocol.steps(todo.pop()):
            if after not in everything:
                everything.add(after)
                todo.append(after)
    kept = {protocol.canonical(state) for state in everything}
    assert search(protocol).states == len(kept) < len(everything) / 4
