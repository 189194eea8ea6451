"""The ways in which ledgers are closed. Two searches of one case are compared by them."""

from __future__ import annotations

from dataclasses import dataclass

from explorer.forgetting import Forgetting
from explorer.protocol import Protocol
from explorer.reduced import Reduced
from explorer.search import Result, search
from explorer.state import NEVER, NOWHERE, Case, State

Outcome = tuple[object, ...]


class Recording(Protocol):
    """Notes each close: the process that closes, the last entry, what the process knows, and what
    the bookies hold then. Two recoverers that are alike count as one."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.outcomes: set[Outcome] = set()  # outcomes with all facts of the state
        self.ledgers: set[Outcome] = set()  # outcomes with the facts of the ledger only

    def _check_end(self, state: State, who: int | None, last: int, told: int) -> None:
        super()._check_end(state, who, last, told)
        closer: Outcome | None = None
        first = state.first
        if who is not None:
            attempt = state.attempts[who]
            closer = attempt.start, attempt.change
            first = attempt.start + 1 if attempt.change == NEVER else attempt.change
        bookies, members = [], []
        for bookie in state.bookies:
            seat = bookie.listed if who is None else bookie.views[who].working
            bookies.append((bookie.stored, bookie.tells, bookie.up, bookie.listed, seat))
            if seat != NOWHERE:
                entries = (entry for entry in range(first, last + 1) if seat in self.holders[entry])
                held = sum(bookie.stored & 1 << entry for entry in entries)
                members.append((seat, held, bookie.up))
        self.outcomes.add((closer, last, told, state.first, state.seen, *sorted(bookies)))
        confirmed = max(told, first - 1)
        self.ledgers.add((closer is None, first, last, confirmed, *sorted(members)))


class RecordingReduced(Recording, Reduced):
    """Notes each close in the reduced search."""


class RecordingForgetting(Recording, Forgetting):
    """Notes each close in the search that also forgets. The notes have only the facts of the
    ledger."""


@dataclass(frozen=True)
class Comparison:
    """One case searched in three ways. A violation ends a search early: see `results`."""

    results: tuple[Result, Result, Result]
    outcomes: int  # the number of outcomes of the full search
    missing: int  # outcomes that the other searches lack
    added: int  # outcomes that only the other searches have

    @property
    def equal(self) -> bool:
        return not (self.missing or self.added or any(each.violation for each in self.results))

    def describe(self) -> str:
        full, reduced, forgetting = self.results
        verdict = "the same" if self.equal else f"{self.missing} MISSING, {self.added} ADDED"
        return (
            f"compared: {full.describe()}; reduced {reduced.states:,}, and with forgetting"
            f" {forgetting.states:,} states; {self.outcomes:,} ways to be closed, {verdict}"
        )


def compare(case: Case) -> Comparison:
    """Raises NotReducible."""
    full, reduced, forgetting = Recording(case), RecordingReduced(case), RecordingForgetting(case)
    results = search(full), search(reduced), search(forgetting)
    return Comparison(
        results,
        len(full.outcomes),
        len(full.outcomes - reduced.outcomes) + len(full.ledgers - forgetting.ledgers),
        len(reduced.outcomes - full.outcomes) + len(forgetting.ledgers - full.ledgers),
    )
