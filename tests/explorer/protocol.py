"""The ledger protocol as a small transition system: one writer, recoverers, bookies, one metadata
record. Everything that can happen next is a step; `search.py` takes all steps.

The model has only what safety depends on. Each omission is harmless, because the model already
contains its effect:

- *Loss, delay, repetition.* There are no queues: a request that was sent once may arrive at any
  later time, or never. So any number of messages may be lost, and the model stores no message that
  is under way. The next two points cover a request that arrives and whose reply is lost.
- *The writer receives acks in batches*, just before it acts (appends, changes its ensemble,
  closes). Only the writer's owner could notice an earlier ack. `confirmable` is what the writer
  could have confirmed by now, and every invariant about confirmed entries is checked against it.
- *A recoverer receives a reply at once, or never.* A late reply equals a late request, because the
  set of entries of a fenced bookie only grows. A lost reply to a fence only fences one bookie more,
  which hinders only the writer, as the loss of its add would.
- *The bookies that answered a write-back* are not stored: a recoverer that wrote an entry back can
  get the answer of every bookie that holds it by one more request. So it may close when Qa hold it.
- *Closing* ends a run. `_check_end` checks what must hold then, and what the writer could still
  confirm afterwards, from adds that are under way or still to be sent to unfenced bookies.
- *Sync.* Bookies answer only what is durable. So a crash that a bookie returns from loses only data
  that no process knows of: the same as losing the request. A bookie that does not return from its
  crash (`crashes`) loses its disk. Two planted bugs answer too early, and lose the data.
- *A second recoverer* begins when the first does: until it asks a bookie it has done nothing. The
  death of a recoverer needs no step of its own, because no step has to be taken.

With E = Qw the seats are alike, so bookies differ only by their entries and their seats: states are
kept with their bookies sorted (`canonical`). Recoverers are alike as well. `reduced.py` and
`forgetting.py` say which other states are not searched, and why.

`Bug` names what can be done wrong; the right protocol does none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from explorer.invariants import (
    Violation,
    acked_entries_are_readable,
    closed_entries_are_readable,
    closed_entries_have_copies,
    nothing_is_acked_beyond,
    told_entries_stay,
)
from explorer.state import (
    NEVER,
    NOWHERE,
    Attempt,
    Bookie,
    Bug,
    Case,
    State,
    Step,
    View,
    put,
    sees,
    stores,
    swap,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class Protocol:
    """The steps of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.bugs = case.bugs
        self.size, self.write_quorum, self.ack_quorum = case.sizes
        self.absence = self.write_quorum - self.ack_quorum + 1
        self.negatives = 1 if Bug.ONE_NEGATIVE_ENDS in self.bugs else self.absence
        self.judged = range(case.recoverers)  # recoverers whose reads and closes are checked
        # With E = Qw every member counts as sitting on seat 0.
        self.holders = [  # for each entry: the seats of its write set
            frozenset(
                {0}
                if case.alike
                else {(entry + step) % self.size for step in range(self.write_quorum)}
            )
            for entry in range(case.entries)
        ]
        self.windows = [
            frozenset((begin + step) % self.size for step in range(self.write_quorum))
            for begin in range(self.size)
        ]

    def begin(self) -> State:
        case = self.case
        views = (View(),) * case.recoverers
        seats = [0 if case.alike else seat for seat in range(self.size)]
        bookies = [Bookie(writes=seat, listed=seat, views=views) for seat in seats]
        bookies += [Bookie(views=views)] * case.spares
        return State(
            open=True,
            recorded=True,
            appended=0,
            told=-1,
            first=0,
            carried=(),
            seen=-1,
            changes=case.writer_changes,
            crashes=case.crashes,
            attempts=(Attempt(),) * case.recoverers,
            bookies=tuple(bookies),
        )

    # -- steps -----------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        """Each step that can happen next, with the state after it. Raises Violation."""
        self.check(state)
        yield from self.moves(state)

    def check(self, state: State) -> None:
        """The writer or recoverer that can close may do it now. Raises Violation."""
        if state.open:
            self._writer_closes(state, self.confirmable(state))
        for who in self.judged:
            if state.attempts[who].reading:
                self._check_fenced(state, who)
                self._recoverer_closes(state, who, state.attempts[who])
        if self.case.crashes and not self.bugs:
            self._check_recoverable(state)

    def moves(self, state: State) -> Iterator[tuple[Step, State]]:
        """Raises Violation."""
        confirmable = self.confirmable(state)
        yield from self._writer_appends(state, confirmable)
        yield from self._adds_arrive(state)
        if state.open:
            yield from self._writer_changes(state, confirmable)
            yield ("claim",), self._claimed(state)
        else:
            for who, attempt in enumerate(state.attempts):
                if not attempt.begun:
                    yield ("begin", who), self._begun(state, who)
                elif not attempt.reading:
                    yield from self._fences(state, who, attempt)
                else:
                    yield from self._reads(state, who, attempt)
                    yield from self._writes_back(state, who, attempt)
                    yield from self._recoverer_changes(state, who, attempt)
        if state.crashes:
            yield from self._crashes(state)

    def _writer_appends(self, state: State, confirmable: int) -> Iterator[tuple[Step, State]]:
        if state.appended == self.case.entries:
            return
        for told in range(state.told, confirmable + 1):
            yield (
                ("append", state.appended, told),
                self._tell(
                    state._replace(appended=state.appended + 1, carried=(*state.carried, told)),
                    told,
                ),
            )

    def _adds_arrive(self, state: State) -> Iterator[tuple[Step, State]]:
        for number, bookie in enumerate(state.bookies):
            if bookie.fenced or not bookie.up or bookie.writes == NOWHERE:
                continue
            for entry in range(bookie.since, state.appended):
                bit = 1 << entry
                if bookie.writes not in self.holders[entry]:
                    continue
                if not bookie.stored & bit or (entry > state.told and not bookie.acked & bit):
                    acked = bookie.acked | bit if entry > state.told else bookie.acked
                    after = stores(bookie, entry, state.carried[entry])._replace(acked=acked)
                    yield ("add", entry, number), self._with(state, number, after)

    def _writer_changes(self, state: State, confirmable: int) -> Iterator[tuple[Step, State]]:
        """One member makes room for a spare; find, record and adopt are one step (W1 to W3)."""
        if not state.recorded:
            yield ("record",), self._recorded(state)
            return
        if not state.changes:
            return
        for out, outgoing in enumerate(state.bookies):
            if outgoing.writes == NOWHERE:
                continue
            for into, incoming in enumerate(state.bookies):
                if incoming.writes != NOWHERE or not incoming.up:
                    continue
                for told in range(state.told, confirmable + 1):
                    known = confirmable if Bug.CONFIRMS_DURING_CHANGE in self.bugs else told
                    changed = self._replaced(state, out, into, told, known)
                    yield ("change", out, into, told + 1), changed

    def _replaced(self, state: State, out: int, into: int, told: int, known: int) -> State:
        self._check_sealed(state, told)
        bookies = list(state.bookies)
        outgoing, incoming = bookies[out], bookies[into]
        seat = outgoing.writes
        inherited = outgoing.acked if Bug.ACKS_OF_REPLACED_COUNT in self.bugs else 0
        early = Bug.USED_BEFORE_RECORDED in self.bugs
        bookies[out] = outgoing._replace(
            writes=NOWHERE, acked=0, listed=outgoing.listed if early else NOWHERE
        )
        bookies[into] = incoming._replace(
            writes=seat, acked=inherited, since=known + 1, listed=NOWHERE if early else seat
        )
        changed = state._replace(
            recorded=not early,
            first=state.first if early else told + 1,
            changes=state.changes - 1,
            bookies=tuple(bookies),
        )
        return self._tell(changed, known)

    def _recorded(self, state: State) -> State:
        """The second half of a bug."""
        bookies = tuple(bookie._replace(listed=bookie.writes) for bookie in state.bookies)
        return state._replace(recorded=True, first=state.told + 1, bookies=bookies)

    def _writer_closes(self, state: State, confirmable: int) -> None:
        for last in range(state.told, confirmable + 1):
            told = last
            if Bug.CLOSES_AT_APPENDED in self.bugs:
                last = state.appended - 1
            self._check_end(state, None, last, told)

    def _claimed(self, state: State) -> State:
        claimed = state._replace(open=False)
        if Bug.CHANGE_OF_RECOVERER_RECORDED in self.bugs:
            return claimed  # with this bug the order in which recoverers begin matters
        for who in range(self.case.recoverers):
            claimed = self._begun(claimed, who)
        return claimed

    def _begun(self, state: State, who: int) -> State:
        bookies = tuple(
            sees(bookie, who, View(asked=bookie.listed, working=bookie.listed))
            for bookie in state.bookies
        )
        attempt = Attempt(begun=True, start=self.start_of(state))
        return state._replace(bookies=bookies, attempts=put(state.attempts, who, attempt))

    def start_of(self, state: State) -> int:
        return -1 if Bug.STARTS_AT_ANSWERED in self.bugs else state.first - 1

    def _fences(self, state: State, who: int, attempt: Attempt) -> Iterator[tuple[Step, State]]:
        for number, bookie in enumerate(state.bookies):
            view = bookie.views[who]
            if view.asked == NOWHERE or view.fenced:
                continue
            if Bug.UNKNOWN_IS_FENCED in self.bugs:
                after = sees(bookie, who, view._replace(fenced=True))
                yield (
                    ("silent", who, number),
                    self._maybe_covered(self._with(state, number, after), who),
                )
            if bookie.up:
                after = sees(bookie._replace(fenced=True), who, view._replace(fenced=True))
                start = max(attempt.start, bookie.tells)
                told = attempt._replace(start=start)
                fenced = self._with(state, number, after)._replace(
                    attempts=put(state.attempts, who, told)
                )
                yield ("fence", who, number), self._maybe_covered(fenced, who)

    def covers(self, seats: list[int]) -> bool:
        if self.case.alike:
            return len(seats) >= self.absence
        return all(len(window.intersection(seats)) >= self.absence for window in self.windows)

    def _maybe_covered(self, state: State, who: int) -> State:
        """Begin to read once no Qa members of any write set can be unfenced."""
        if not self.covers([b.views[who].asked for b in state.bookies if b.views[who].fenced]):
            return state
        bookies = tuple(sees(b, who, b.views[who]._replace(fenced=False)) for b in state.bookies)
        attempt = state.attempts[who]
        attempt = attempt._replace(reading=True, next=attempt.start + 1)
        return self._concluded(state._replace(bookies=bookies), who, attempt)

    def _reads(self, state: State, who: int, attempt: Attempt) -> Iterator[tuple[Step, State]]:
        if attempt.ended:
            return
        limit = self.case.entries if self.case.read_ahead else attempt.next + 1
        for entry in range(attempt.next, limit):
            bit = 1 << entry
            if attempt.found & bit:
                continue
            for number, bookie in enumerate(state.bookies):
                view = bookie.views[who]
                if view.asked not in self.holders[entry] or view.lacks & bit:
                    continue
                lacking = view._replace(lacks=view.lacks | bit)
                if Bug.UNKNOWN_IS_ABSENT in self.bugs and bookie.stored & bit:
                    after = sees(bookie, who, lacking)
                    unknown = self._concluded(self._with(state, number, after), who, attempt)
                    yield ("mute", who, entry, number), unknown
                if not bookie.up:
                    continue
                fenced = bookie.fenced or Bug.READS_DO_NOT_FENCE not in self.bugs
                if bookie.stored & bit:
                    found = attempt._replace(found=attempt.found | bit)
                    read = self._with(state, number, bookie._replace(fenced=fenced))
                    yield ("found", who, entry, number), self._concluded(read, who, found)
                else:
                    after = sees(bookie._replace(fenced=fenced), who, lacking)
                    read = self._with(state, number, after)
                    yield ("lacks", who, entry, number), self._concluded(read, who, attempt)

    def _concluded(self, state: State, who: int, attempt: Attempt) -> State:
        """Conclude about entries in order, and forget the facts that only the conclusions
        needed."""
        while attempt.next < self.case.entries and not attempt.ended:
            bit = 1 << attempt.next
            if attempt.found & bit:
                attempt = attempt._replace(next=attempt.next + 1, found=attempt.found & ~bit)
            elif sum(bool(b.views[who].lacks & bit) for b in state.bookies) >= self.negatives:
                attempt = attempt._replace(ended=True, found=0)
            else:
                break
        if attempt.next == self.case.entries:
            attempt = attempt._replace(ended=True)
        known = (1 << attempt.next) - 1 if not attempt.ended else -1
        bookies = tuple(
            sees(b, who, b.views[who]._replace(lacks=b.views[who].lacks & ~known))
            for b in state.bookies
        )
        return state._replace(bookies=bookies, attempts=put(state.attempts, who, attempt))

    def _writes_back(
        self, state: State, who: int, attempt: Attempt
    ) -> Iterator[tuple[Step, State]]:
        for entry in range(attempt.start + 1, attempt.next):
            bit = 1 << entry
            tells = state.carried[entry]
            if Bug.TELLS_OWN_PROGRESS in self.bugs:
                tells = self._written_back(state, who, attempt, entry)
            for number, bookie in enumerate(state.bookies):
                view = bookie.views[who]
                if not bookie.up or view.working not in self.holders[entry]:
                    continue
                if bookie.stored & bit and bookie.fenced:
                    continue  # the answer at once would be its only effect
                if entry < attempt.change and view.asked == NOWHERE:
                    continue  # the spare gets the entries from its segment's first one on
                if not bookie.stored & bit:
                    bookie = stores(bookie, entry, tells)
                after = bookie._replace(fenced=True)
                written = self._with(state, number, after)
                yield ("back", who, entry, number), written._replace(seen=max(state.seen, tells))

    def _written_back(self, state: State, who: int, attempt: Attempt, before: int) -> int:
        """The last entry below `before` such that Qa fenced bookies hold it and all entries before
        it. A bookie that stores a write-back is fenced."""
        fenced = state._replace(bookies=tuple(b for b in state.bookies if b.fenced))
        entry = attempt.start
        while entry + 1 < before:
            if self._copies(fenced, entry + 1, attempt.change, who) < self.ack_quorum:
                break
            entry += 1
        return entry

    def _recoverer_changes(
        self, state: State, who: int, attempt: Attempt
    ) -> Iterator[tuple[Step, State]]:
        if attempt.change != NEVER or not self.case.recoverer_changes:
            return
        written = self._written_back(state, who, attempt, attempt.next)
        for first in range(attempt.start + 1, written + 2):
            for out, outgoing in enumerate(state.bookies):
                view = outgoing.views[who]
                if view.working == NOWHERE:
                    continue
                for into, incoming in enumerate(state.bookies):
                    if incoming.views[who].working != NOWHERE or not incoming.up:
                        continue
                    bookies = list(state.bookies)
                    bookies[out] = sees(outgoing, who, view._replace(working=NOWHERE))
                    newcomer = incoming.views[who]._replace(working=view.working)
                    bookies[into] = sees(incoming, who, newcomer)
                    changed = state._replace(
                        bookies=tuple(bookies),
                        attempts=put(state.attempts, who, attempt._replace(change=first)),
                    )
                    if Bug.CHANGE_OF_RECOVERER_RECORDED in self.bugs:
                        changed = changed._replace(
                            first=first,
                            bookies=tuple(b._replace(listed=b.views[who].working) for b in bookies),
                        )
                    yield ("private", who, out, into, first), changed

    def _recoverer_closes(self, state: State, who: int, attempt: Attempt) -> None:
        if not self.may_close(state, who):
            return
        self._check_end(state, who, attempt.next - 1, self.confirmable(state))

    def may_close(self, state: State, who: int) -> bool:
        attempt = state.attempts[who]
        if not attempt.ended:
            return False
        written = self._written_back(state, who, attempt, attempt.next)
        return written == attempt.next - 1 or Bug.CLOSES_UNWRITTEN in self.bugs

    def _crashes(self, state: State) -> Iterator[tuple[Step, State]]:
        for number, bookie in enumerate(state.bookies):
            if not bookie.up:
                continue
            if Bug.FENCE_NOT_DURABLE in self.bugs:
                after = bookie._replace(fenced=False)
            elif Bug.ADD_NOT_DURABLE in self.bugs:
                after = bookie._replace(stored=0, tells=-1)
            else:
                after = bookie._replace(up=False)
            crashed = self._with(state, number, after)
            yield ("crash", number), crashed._replace(crashes=state.crashes - 1)

    # -- derived facts ----------------------------------------------------------------------------

    def confirmable(self, state: State) -> int:
        """The last entry that the writer can have confirmed by now."""
        entry = state.told
        while entry + 1 < state.appended and self._acks(state, entry + 1) >= self.ack_quorum:
            entry += 1
        return entry

    def _acks(self, state: State, entry: int) -> int:
        holders, bit = self.holders[entry], 1 << entry
        return sum(bool(b.acked & bit) and b.writes in holders for b in state.bookies)

    def _copies(self, state: State, entry: int, change: int, who: int | None) -> int:
        """The number of members that hold the entry, of those that should: the write set in the
        last segment as stored, or in a recoverer's continuation of it."""
        holders, bit = self.holders[entry], 1 << entry
        count = 0
        for bookie in state.bookies:
            if who is None:
                seat = bookie.listed
            else:
                view = bookie.views[who]
                seat = view.asked if entry < change else view.working
            count += bool(bookie.stored & bit) and seat in holders
        return count

    def _tell(self, state: State, told: int) -> State:
        """The writer confirms up to `told`; acks up to there are forgotten."""
        if told == state.told:
            return state
        kept = ~((1 << told + 1) - 1)
        bookies = tuple(
            bookie._replace(acked=bookie.acked & kept) if bookie.acked & ~kept else bookie
            for bookie in state.bookies
        )
        return state._replace(told=told, bookies=bookies)

    def _with(self, state: State, number: int, bookie: Bookie) -> State:
        seen = max(state.seen, bookie.tells)
        return state._replace(bookies=put(state.bookies, number, bookie), seen=seen)

    # -- invariants ------------------------------------------------------------------------------

    def _check_fenced(self, state: State, who: int) -> None:
        """A recoverer reads only behind fences: in no write set are Qa members unfenced. (Reads
        fence as well, which replaces missing fences: see the tests.)"""
        if not self.case.fences_checked:
            return
        seats = [(b.views[who].asked, b.fenced) for b in state.bookies]
        for window in [{0}] if self.case.alike else self.windows:
            if sum(seat in window and not fenced for seat, fenced in seats) >= self.ack_quorum:
                raise Violation("a recoverer reads only behind fences", [f"recoverer {who} reads"])

    def _check_sealed(self, state: State, told: int) -> None:
        """Entries before a new segment are durable at Qa members of the old one."""
        for entry in range(state.first, told + 1):
            if self._copies(state, entry, NEVER, None) < self.ack_quorum:
                raise Violation(
                    "closed entries have Qa copies", [f"entry {entry} is sealed too early"]
                )

    def _check_end(self, state: State, who: int | None, last: int, told: int) -> None:
        """The ledger is closed at `last`: by recoverer `who`, or (None) by the writer, which has
        confirmed `told` and confirms nothing any more. Raises Violation."""
        what = (
            f"the writer closes at {last}" if who is None else f"recoverer {who} closes at {last}"
        )
        change = NEVER if who is None else state.attempts[who].change
        held = [self._copies(state, e, change, who) for e in range(state.first, last + 1)]
        try:
            acked_entries_are_readable(last, max(told, state.first - 1), what)
            told_entries_stay(last, state.seen, what)
            closed_entries_have_copies(state.first, held, self.ack_quorum, what)
            if self.case.crashes:
                live = state._replace(bookies=tuple(b for b in state.bookies if b.up))
                left = [self._copies(live, e, change, who) for e in range(state.first, last + 1)]
                closed_entries_are_readable(state.first, left, what)
            if who is not None:
                nothing_is_acked_beyond(last, self._confirmable_later(state), what)
        except Violation as violation:
            violation.closing = who, last
            raise

    def _confirmable_later(self, state: State) -> int:
        """The last entry that the writer could still confirm if it appended all entries and all
        adds arrived."""
        entry = state.told
        while entry + 1 < self.case.entries:
            bit, holders = 1 << entry + 1, self.holders[entry + 1]
            acks = sum(
                b.writes in holders
                and (bool(b.acked & bit) or (b.up and not b.fenced and b.since <= entry + 1))
                for b in state.bookies
            )
            if acks < self.ack_quorum:
                break
            entry += 1
        return entry

    def _check_recoverable(self, state: State) -> None:
        """A recoverer that asks all bookies that are up comes to a conclusion about each entry.
        Raises Violation."""
        asked = [b for b in state.bookies if b.listed != NOWHERE and b.up]
        start = max([state.first - 1, *(b.tells for b in asked)])
        for entry in range(start + 1, self.case.entries):
            holders = [b for b in asked if b.listed in self.holders[entry]]
            held = any(b.stored >> entry & 1 for b in holders)
            if not held and len(holders) < self.absence:
                raise Violation("recovery is possible", [f"entry {entry} remains unknown"])

    # -- symmetry --------------------------------------------------------------------------------

    def canonical(self, state: State) -> State:
        """The state that is kept for all states equivalent to this one."""
        if not self.case.alike:
            return state
        state = state._replace(bookies=tuple(sorted(state.bookies)))
        if len(state.attempts) < 2 or state.open:
            return state
        one, other = state.attempts
        if Bug.CHANGE_OF_RECOVERER_RECORDED in self.bugs or one < other:
            return state
        swapped = state._replace(
            attempts=(other, one), bookies=tuple(sorted(swap(b) for b in state.bookies))
        )
        return swapped if other < one else min(state, swapped)
