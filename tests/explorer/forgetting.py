"""Treat states as one state when they differ only in facts that cannot matter any more.

`canonical` removes such facts. The argument is the same each time: no later step and no invariant
reads the fact.

- *Entries before the last segment*, and a "confirmed" before it. The search for the ledger's end
  begins at the last segment, and the writer had confirmed all earlier entries when it stored that
  segment. The copies in the old segment were checked when it was sealed.
- *Bookies that are in no ensemble*, when neither the writer nor the closer changes its ensemble
  any more.
- *Entries up to the place where the closer starts*: the closer does not ask for them. They are
  confirmed (checked here: bookies tell of no other entries), so at the claim the writer could have
  closed behind them, and their copies were checked for that close. Copies do not become fewer, and
  fewer than Qa bookies crash. The closer cannot start before `lowest_start`; if a bookie has told
  it a "confirmed", it starts there or later. So the last segment might as well begin there.
- *Entries before the closer's own segment*: they have Qa copies, or the segment could not begin
  there.
- *The "confirmed" that bookies tell*, once the closer may read: its start does not change any more.
- *Everything beyond the end*: the closer reads nothing there.
- *Seats*: a member holds what its seat is to hold. A bookie that lost its seat in the closer's
  ensemble, or cannot get one any more, holds nothing that counts.
- *Fences*, once the closer has ended. The writer has stopped. The bookies that the closer asks were
  checked when it began to read. A bookie that holds an entry unfenced would be fenced by a
  write-back of the entry.
- *The helper*: its only later effect is to write back the entries that the closer reads.
- *Recovery is possible* depends on which bookie holds which entry. These sets only grow after the
  claim.
"""

from __future__ import annotations

from functools import cache

from explorer.reduced import ANYWHERE, CLOSER, HELPER, NotReducible, Reduced
from explorer.state import NEVER, NOWHERE, Bookie, Case, State, View, put


class Forgetting(Reduced):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if case.crashes >= self.ack_quorum:
            raise NotReducible("all copies of an entry may be lost")

    # -- checked at once, because it is forgotten afterwards -------------------------------------

    def check(self, state: State) -> None:
        if state.open or state.attempts[CLOSER].ended:
            super().check(state)

    def _check_recoverable(self, state: State) -> None:
        if state.open:
            super()._check_recoverable(state)

    def _maybe_covered(self, state: State, who: int) -> State:
        after = super()._maybe_covered(state, who)
        if after.attempts[who].reading:
            self._check_fenced(after, who)
        return after

    def _claimed(self, state: State) -> State:
        claimed = super()._claimed(state)
        closer = claimed.attempts[CLOSER]
        closer = closer._replace(start=self.lowest_start(claimed, closer.start))
        return claimed._replace(attempts=put(claimed.attempts, CLOSER, closer))

    # -- forgetting ------------------------------------------------------------------------------

    def canonical(self, state: State) -> State:
        """Raises NotReducible."""
        if state.seen > state.told:
            raise NotReducible("a bookie calls confirmed what the writer did not confirm")
        state = state._replace(seen=-1)
        if state.open:
            state = self._while_open(state)
        else:
            state = self._from_closers_start(state)
            if state.attempts[CLOSER].reading:
                state = self._while_reading(state)
            else:
                state = self._while_fencing(state)
        return super().canonical(state)

    def _while_open(self, state: State) -> State:
        first = self.start_of(state) + 1
        final = not state.changes and not self.case.recoverer_changes
        bookies = tuple(
            _idle(bookie)
            if final and bookie.writes == NOWHERE == bookie.listed
            else _from(bookie, first)
            for bookie in state.bookies
        )
        return state._replace(bookies=bookies, carried=_told_from(state.carried, first))

    def _from_closers_start(self, state: State) -> State:
        closer = state.attempts[CLOSER]
        if closer.start > state.told:
            raise NotReducible("recovery starts beyond what the writer confirmed")
        if closer.change != NEVER:
            closer = closer._replace(start=closer.change - 1)
        attempts = put(state.attempts, CLOSER, closer)
        if self.case.recoverers > 1:
            helper = state.attempts[HELPER]
            helper = helper._replace(
                start=closer.start,
                next=closer.next if closer.ended else helper.next,
                change=NEVER if helper.change == NEVER else closer.start + 1,
            )
            attempts = put(attempts, HELPER, helper)
        return state._replace(
            first=closer.start + 1, told=max(state.told, closer.start), attempts=attempts
        )

    def _while_fencing(self, state: State) -> State:
        bookies = tuple(
            _idle(bookie)
            if bookie.listed == NOWHERE and not self.case.recoverer_changes
            else _from(bookie, state.first)
            for bookie in state.bookies
        )
        return state._replace(bookies=bookies, carried=_told_from(state.carried, state.first))

    def _while_reading(self, state: State) -> State:
        closer = state.attempts[CLOSER]
        final = closer.change != NEVER or not self.case.recoverer_changes
        entries = range(state.first, closer.next if closer.ended else self.case.entries)
        bookies = []
        for bookie in state.bookies:
            seat = bookie.views[CLOSER].working
            if final and seat == NOWHERE:
                bookies.append(Bookie(views=(View(),) * len(bookie.views)))
                continue
            if seat == NOWHERE:
                seat = ANYWHERE
            held = sum(1 << entry for entry in entries if seat in self.holders[entry])
            bookies.append(_read(bookie, held, closer.ended, closer.ended and final))
        return state._replace(bookies=tuple(bookies), carried=(-1,) * self.case.entries)


@cache
def _idle(bookie: Bookie) -> Bookie:
    return Bookie(views=bookie.views)


@cache
def _from(bookie: Bookie, first: int) -> Bookie:
    """The bookie with only its facts about entries from `first` on."""
    kept = -1 << first
    return bookie._replace(
        stored=bookie.stored & kept,
        acked=bookie.acked & kept,
        tells=bookie.tells if bookie.tells >= first else -1,
        since=max(bookie.since, first) if bookie.writes != NOWHERE else 0,
        fenced=bookie.fenced and bookie.views[CLOSER].fenced,
    )


@cache
def _read(bookie: Bookie, held: int, ended: bool, final: bool) -> Bookie:
    mine, *others = bookie.views
    if final:
        mine, others = mine._replace(asked=mine.working), [View()] * len(others)
    return bookie._replace(
        stored=bookie.stored & held,
        tells=-1,
        since=0,
        fenced=bookie.fenced or ended,
        listed=NOWHERE if ended else bookie.listed,
        views=(mine, *others),
    )


@cache
def _told_from(carried: tuple[int, ...], first: int) -> tuple[int, ...]:
    return tuple(
        told if entry >= first and told >= first else -1 for entry, told in enumerate(carried)
    )
