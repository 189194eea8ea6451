"""The world finds a few planted bugs quickly; `make mutants` plants all bugs."""

import pytest
from mutants.plant import MUTANTS, Firings, planted
from mutants.run import hunt

QUICK = (
    "adds are answered before the sync",
    "a fenced ledger takes adds",
    "recovery reads do not fence",
    "recovery closes before its write-backs are stored",
    "an entry is confirmed with one ack fewer than Qa",
    "acks count for the seat, not for the member",
    "pending entries are not sent to a new member",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_caught(name: str) -> None:
    verdict = hunt(MUTANTS[name])
    assert verdict.caught, verdict.describe()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_can_be_planted_and_taken_out_again(name: str) -> None:
    mutant = MUTANTS[name]
    with planted(mutant, Firings()), planted(mutant, Firings()):
        pass
    assert mutant.caught_by
    assert mutant.wrong
