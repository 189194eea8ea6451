"""The same specification with far fewer states and steps, and not one violation less.

Take any run of `protocol.py` from the beginning to a violation. Exchange by exchange it turns into
one of those that are left here, which ends in a violation as well. What the arguments rely on is
checked with each step (`check_premises`): whoever asks or writes leaves a fence, what a bookie
holds only grows, a crashed bookie is down. A protocol that does otherwise is not reduced.

- *The writer stops at the claim.* Since then its ensemble cannot change; entries are appended, and
  adds arrive. A recoverer's requests leave their bookie fenced, so an add that is taken comes
  before all that any recoverer does at that bookie, and before its crash; what happens at others
  does not concern it. Appends hang on acks alone. So each append and each add can be exchanged with
  what comes before it, down to the claim and beyond, and the run still leads to the same state.
  Hence what can be confirmed is known at the claim, and `_claimed` forgets what was kept for the
  writer's sake. An entry that would be acknowledged beyond the end was acknowledged before it.
- *One closes, the others help.* Recoverers are alike, so let recoverer 0 be the one that reads
  without fences, or closes where it must not. What reaches it of the others is only what they write
  back (fences are the writer's concern, and it has stopped). A "no" lets a helper come to an end,
  and no helper needs one: without, it can write back the same. So helpers hear none, and what holds
  for whoever reads or closes is checked for recoverer 0.
- *"Yes" is heard at once where nothing else can be concluded.* A helper hears it as soon as it can
  be had: later it can do all that it could do without. The closer does so if too few bookies that
  are up lack the entry, for they never become more. Where an end is possible as well, the closer
  may hear the "yes" and the "no" both now and at any later time.
- *The "no" of several bookies are heard at one moment*, that of the first. What lacks an entry has
  lacked it ever since the claim, so who says so later could have said it then, and nobody but the
  closer takes notice. Fewer than are needed conclude nothing and are left out; so are more, and the
  "no" about an entry that is found after all.

None of the states that are left out differs from one that is kept in what bookies hold or what is
acknowledged, so the other invariants lose nothing. `test_reduced.py` holds all this against the
full search: the same ledgers come out, closed at the same ends with the same copies, and reductions
that go too far are noticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from explorer.protocol import Protocol
from explorer.state import NEVER, NOWHERE, Attempt, Case, State, Step, sees, tell

if TYPE_CHECKING:
    from collections.abc import Iterator

CLOSER: Final = 0  # the recoverer whose reading and closing is judged


class NotReducible(Exception):
    """The protocol does what the reductions take for impossible."""


class Reduced(Protocol):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.judged = range(CLOSER, CLOSER + 1)

    def moves(self, state: State) -> Iterator[tuple[Step, State]]:
        """Raises Violation, NotReducible."""
        certain = self._certain(state)
        for step, after in [certain] if certain else super().moves(state):
            check_premises(state, step, after)
            yield step, after

    def _certain(self, state: State) -> tuple[Step, State] | None:
        """A "yes" to an entry about which nothing else can be concluded."""
        for who, attempt in enumerate(state.attempts):
            if attempt.reading:
                answers = dict(self._reads(state, who, attempt))
                for step, after in answers.items():
                    if step[0] == "found" and ("absent", *step[1:3]) not in answers:
                        return step, after
        return None

    def _claimed(self, state: State) -> State:
        held = 0
        for bookie in state.bookies:
            held |= bookie.stored
        stopped = state._replace(
            recorded=True,
            appended=self.case.entries,
            told=self.confirmable(state),
            carried=tuple(
                state.carried[entry] if held >> entry & 1 else -1
                for entry in range(self.case.entries)
            ),
            changes=0,
            bookies=tuple(
                bookie._replace(acked=0, since=NEVER, writes=NOWHERE) for bookie in state.bookies
            ),
        )
        return super()._claimed(stopped)

    def _reads(self, state: State, who: int, attempt: Attempt) -> Iterator[tuple[Step, State]]:
        """For each entry: somebody's "yes", and ("absent") as many "no" as there are."""
        yes: dict[int, tuple[Step, State]] = {}
        no: dict[int, list[int]] = {}
        for step, after in super()._reads(state, who, attempt):
            check_premises(state, step, after)
            verb, _, entry, number = step
            entry, number = int(entry), int(number)
            if verb != "found":
                no.setdefault(entry, []).append(number)
            elif entry not in yes or state.bookies[number] < state.bookies[int(yes[entry][0][3])]:
                yes[entry] = step, after  # (whoever is the same however bookies are sorted)
        yield from yes.values()
        if who == CLOSER:
            for entry, numbers in no.items():
                if len(numbers) >= self.negatives:
                    absent = self._absent(state, who, entry, numbers)
                    yield ("absent", who, entry), absent

    def _absent(self, state: State, who: int, entry: int, numbers: list[int]) -> State:
        """Nobody is asked about the entry any more."""
        bit = 1 << entry
        bookies = list(state.bookies)
        for number, bookie in enumerate(bookies):
            view = bookie.views[who]
            if view.asked in self.holders[entry]:
                asked = bookie._replace(fenced=True) if number in numbers else bookie
                bookies[number] = sees(asked, who, view._replace(lacks=view.lacks | bit))
        return self._concluded(state._replace(bookies=tuple(bookies)), who, state.attempts[who])

    def canonical(self, state: State) -> State:
        """(The closer and its helpers are not alike.)"""
        if not self.case.alike:
            return state
        return state._replace(bookies=tuple(sorted(state.bookies)))


def check_premises(before: State, step: Step, after: State) -> None:
    """Raises NotReducible."""
    verb, number = step[0], step[-1]
    if verb not in ("fence", "found", "lacks", "back", "crash"):
        return
    was, now = before.bookies[int(number)], after.bookies[int(number)]
    if was.stored & ~now.stored:
        raise NotReducible(f"b{number} forgets entries when {tell(step)}")
    if verb == "crash" and now.up:
        raise NotReducible(f"b{number} comes back when {tell(step)}")
    if verb != "crash" and not now.fenced:
        raise NotReducible(f"b{number} is not fenced when {tell(step)}")
