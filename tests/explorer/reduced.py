"""The same specification with far fewer steps and states. It finds every violation that the full
search finds.

Take any run of `protocol.py` from the beginning to a violation. A series of exchanges turns it into
one of the runs that are left here, which ends in a violation as well. `check_premises` checks with
each step what these arguments rely on: each step that asks or writes leaves a fence, the set of
entries of a bookie only grows, a write-back brings the same bytes, a recoverer changes nothing but
bookies, a crashed bookie is down. A protocol that breaks one of these is not reduced.

- *Crashes come last.* Nothing happens at a bookie that is down, so a crash can be exchanged with
  each later step, down to the end of the run. In every state, `check` lets any bookies crash, as
  many as may, and checks what the others hold.
- *The writer stops at the claim.* After the claim its ensemble cannot change; it appends entries,
  and adds arrive. A recoverer's requests fence their bookie, so a stored add comes before
  everything that a recoverer does at that bookie; other bookies do not matter to it. Appends depend
  on acks only. So each append and each add can be exchanged with the step before it, to a place
  before the claim, and the run still leads to the same state. Hence what can be confirmed is known
  at the claim, and `_claimed` forgets the facts that only the writer needs. An entry that would be
  acknowledged beyond the end was acknowledged before the close.
- *One recoverer closes, one helps.* Recoverers are alike, so let recoverer 0 be the one that reads
  without fences, or closes where it must not. The others affect it only by their write-backs:
  their fences concern only the writer, which has stopped. Recoverer 1 can write back whatever any
  of them can write back at any time, if two things hold. It has fenced the bookies with the lowest
  "confirmed" as soon as the ledger was claimed, so it starts no later than the others. It has then
  got "yes" to all entries that members hold; members hold no entry that they did not hold at the
  claim, so no other recoverer gets further. Recoverer 1 starts in this state (`_helped`). If
  recoverers change their ensembles, one may bring a spare to one seat and another one to another
  seat, so each entry may be written to any spare, and to all members as well.
- *The closer reads at one moment*: the moment when it may begin to read. No other process notices
  which answers it receives. A member that lacks an entry later lacks it now; an entry that some
  member holds later is held by a member now. So the closer can conclude now whatever it can
  conclude later, and an earlier conclusion hinders no step. Reading ahead leads to no other
  conclusions. All "no" about an entry arrive in one step: fewer than the needed number conclude
  nothing.

`forgetting.py` reduces the states further. `test_reduced.py` compares both with the full search:
the same ledgers result, closed at the same ends with the same copies, and the tests notice
reductions that omit too much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from explorer.invariants import Violation
from explorer.protocol import Protocol
from explorer.state import NEVER, NOWHERE, Attempt, Case, State, Step, View, put, sees, stores, tell

if TYPE_CHECKING:
    from collections.abc import Iterator

CLOSER: Final = 0  # the recoverer whose reads and close are checked
HELPER: Final = 1  # stands for all others
ANYWHERE: Final = -2  # replaces a seat: the seat that the entry needs


class NotReducible(Exception):
    """The protocol does a step that the reductions assume to be impossible."""


class Reduced(Protocol):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.judged = range(CLOSER, CLOSER + 1)
        self.holders = [seats | {ANYWHERE} for seats in self.holders]

    def check(self, state: State) -> None:
        super().check(state)
        for step, crashed in super()._crashes(state) if state.crashes else ():
            check_premises(state, step, crashed)
            try:
                self.check(crashed)
            except Violation as violation:
                violation.then.insert(0, tell(step))
                raise

    def moves(self, state: State) -> Iterator[tuple[Step, State]]:
        """Raises Violation, NotReducible."""
        for step, after in super().moves(state) if state.open else self._recovery(state):
            check_premises(state, step, after)
            yield step, after

    def _crashes(self, state: State) -> Iterator[tuple[Step, State]]:
        return iter(())  # `check` does it

    def _recovery(self, state: State) -> Iterator[tuple[Step, State]]:
        closer = state.attempts[CLOSER]
        if closer.reading and not closer.ended:
            yield from self._reads(state, CLOSER, closer)
            return
        if not closer.reading:
            yield from self._fences(state, CLOSER, closer)
        else:
            yield from self._writes_back(state, CLOSER, closer)
            yield from self._recoverer_changes(state, CLOSER, closer)
        if self.case.recoverers > 1:
            yield from self._writes_back(state, HELPER, state.attempts[HELPER])

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
        claimed = super()._claimed(stopped)
        if not all(attempt.begun for attempt in claimed.attempts):
            raise NotReducible("the order in which recoverers begin matters")
        return self._helped(claimed) if self.case.recoverers > 1 else claimed

    def _helped(self, state: State) -> State:
        helper = state.attempts[HELPER]
        start = self.lowest_start(state, helper.start)
        after = start + 1
        while after < self.case.entries and self._is_held(state, after):
            after += 1
        if after <= state.told:
            raise NotReducible(f"entry {after} was confirmed, and no bookie that is asked has it")
        changes = bool(self.case.recoverer_changes)
        helper = Attempt(
            begun=True,
            reading=True,
            start=start,
            next=after,
            ended=True,
            change=start + 1 if changes else NEVER,
        )
        bookies = tuple(
            sees(bookie, HELPER, View(working=ANYWHERE))
            if changes and bookie.listed == NOWHERE
            else bookie
            for bookie in state.bookies
        )
        return state._replace(bookies=bookies, attempts=put(state.attempts, HELPER, helper))

    def lowest_start(self, state: State, least: int) -> int:
        """The start of a recovery that fences the bookies with the lowest "confirmed"."""
        members = [bookie for bookie in state.bookies if bookie.listed != NOWHERE]
        starts = sorted({least, *(bookie.tells for bookie in members if bookie.tells > least)})
        return next(
            start
            for start in starts
            if self.covers([bookie.listed for bookie in members if bookie.tells <= start])
        )

    def _is_held(self, state: State, entry: int) -> bool:
        holders = self.holders[entry]
        return any(b.stored >> entry & 1 and b.listed in holders for b in state.bookies)

    def _reads(self, state: State, who: int, attempt: Attempt) -> Iterator[tuple[Step, State]]:
        """The answers about the next entry: each "yes", and ("absent") all "no" in one step."""
        no: list[int] = []
        for step, after in super()._reads(state, who, attempt):
            check_premises(state, step, after)
            verb, _, entry, number = step
            if entry != attempt.next:
                continue
            if verb == "found":
                yield step, after
            else:
                no.append(int(number))
        if len(no) >= self.negatives:
            yield ("absent", who, attempt.next), self._absent(state, who, attempt, no)

    def _absent(self, state: State, who: int, attempt: Attempt, numbers: list[int]) -> State:
        bookies = list(state.bookies)
        for number in numbers:
            lacking = bookies[number].views[who]._replace(lacks=1 << attempt.next)
            bookies[number] = sees(bookies[number]._replace(fenced=True), who, lacking)
        return self._concluded(state._replace(bookies=tuple(bookies)), who, attempt)

    def canonical(self, state: State) -> State:
        """Closer and helper differ, so recoverers are not sorted. Bookies are compared by their
        entries and seats."""
        return state._replace(bookies=tuple(sorted(state.bookies)))


def check_premises(before: State, step: Step, after: State) -> None:
    """Raises NotReducible."""
    verb = step[0]
    if verb == "crash":
        if after.bookies[int(step[1])].up:
            raise NotReducible(f"b{step[1]} is up again after: {tell(step)}")
        return
    if verb not in ("silent", "fence", "mute", "found", "lacks", "absent", "back", "private"):
        return
    _check_unnoticed(before, step, after)
    if verb not in ("fence", "found", "lacks", "back"):
        return
    number = int(step[-1])
    was, now = before.bookies[number], after.bookies[number]
    if not now.fenced:
        raise NotReducible(f"b{number} is not fenced after: {tell(step)}")
    expected = was.stored, was.tells
    if verb == "back" and not was.stored >> int(step[2]) & 1:
        entry = int(step[2])
        full = stores(was, entry, before.carried[entry])
        expected = full.stored, full.tells
    if (now.stored, now.tells) != expected:
        raise NotReducible(f"b{number} holds something else after: {tell(step)}")


def _check_unnoticed(before: State, step: Step, after: State) -> None:
    """Other processes notice a recoverer's step only by what bookies hold."""
    who = int(step[1])
    public = before._replace(seen=after.seen, bookies=after.bookies, attempts=after.attempts)
    kept = all(
        (was.acked, was.since, was.writes, was.listed, was.up)
        == (now.acked, now.since, now.writes, now.listed, now.up)
        and not was.stored & ~now.stored
        for was, now in zip(before.bookies, after.bookies, strict=True)
    )
    others = all(
        one == other
        for number, (one, other) in enumerate(zip(before.attempts, after.attempts, strict=True))
        if number != who
    )
    if public != after or not kept or not others:
        raise NotReducible(f"other processes notice: {tell(step)}")
