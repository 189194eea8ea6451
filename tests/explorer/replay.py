"""The same steps on the real machines: the specification is that of the code.

`Replay` drives `LedgerWriter` and `LedgerRecovery` along a run that `protocol.py` found. After each
step it compares the state of the machines and of the bookies with the specification's state. If the
states differ, or a machine does not do the step, it raises `Diverged`. On a run of the right
protocol that is a fault of the code or of the specification. On the run to a planted bug's
violation it must happen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from explorer.protocol import Protocol
from explorer.state import NOWHERE, Attempt, Case, State, Step, tell
from fakes.adds import encode_add
from fakes.ledger_rig import (
    KEY,
    LEDGER,
    RigBookie,
    member,
    open_metadata,
    payload_bytes,
    payload_of,
)

from magnetar.bookie.ledger import recovery as recovering
from magnetar.bookie.ledger import writer as writing
from magnetar.bookie.ledger.quorum import Quorum
from magnetar.bookie.ledger.recovery import LedgerRecovery, RecoveryState
from magnetar.bookie.ledger.writer import LedgerWriter, WriterLimits
from magnetar.metadata.model import EntryId, LedgerState
from magnetar.protos.envelope import BookieCode, ReadAnswer, decode_envelope

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

LIMITS = WriterLimits(add_timeout_s=1e9, quorum_timeout_s=1e9, changes_max=9)


class Diverged(Exception):
    """A real machine does something other than the specification."""


class Replay:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.quorum = Quorum(*case.sizes)
        self.bookies = [
            RigBookie(member(n)) for n in range(self.quorum.ensemble_size + case.spares)
        ]
        seats = [bookie.member for bookie in self.bookies[: self.quorum.ensemble_size]]
        self.metadata = open_metadata(self.quorum, seats)
        self.writer = LedgerWriter(self.quorum, seats, limits=LIMITS, now=0.0)
        self.recoverers: dict[int, _Recoverer] = {}
        self._sent: dict[tuple[int, int], writing.Parts] = {}  # keyed by bookie, entry
        self._acks: dict[tuple[int, int], None] = {}  # the acks that the writer lacks yet

    def take(self, step: Step, after: State) -> None:
        """Raises Diverged."""
        try:
            self._take(step)
        except Diverged as error:
            raise Diverged(f"{tell(step)}: {error}") from None
        self.writer.check()
        for recoverer in self.recoverers.values():
            recoverer.machine.check()
        self._compare(step, after)

    def close(self, who: int | None, last: int) -> None:
        """Raises Diverged unless the ledger is closed just there, with the right length."""
        if who is None:
            self._hear(last)
            if not self.writer.idle:
                self.writer.fail(BookieCode.TIMEOUT)
            end = self.writer.seal()
            closed = replace(
                self.metadata, state=LedgerState.CLOSED, last_entry=EntryId(end[0]), length=end[1]
            )
        else:
            recoverer = self.recoverers[who]
            recoverer.finish()
            if recoverer.end is None:
                raise Diverged("the recoverer does not close")
            closed = recoverer.machine.close_metadata(self.metadata, recoverer.end)
        if closed.last_entry != last:
            raise Diverged(f"closed at {closed.last_entry} instead of {last}")
        assert closed.length == payload_bytes(range(last + 1))
        for entry in range(last + 1):
            members = closed.segment_of(EntryId(entry)).members
            holders = [members[seat] for seat in self.quorum.write_order(entry)]
            copies = sum(entry in b.entries for b in self.bookies if b.member in holders)
            assert copies >= self.quorum.ack_quorum, (entry, copies)

    # -- steps -----------------------------------------------------------------------------------

    def _take(self, step: Step) -> None:
        match step:
            case ("append", int(entry), int(told)):
                self._append(entry, told)
            case ("add", int(entry), int(number)):
                self._add(entry, number)
            case ("change", int(out), int(into), int(first)):
                self._change(out, into, first)
            case ("record",):
                pass  # done with the ensemble change
            case ("claim",):
                self.metadata = replace(self.metadata, state=LedgerState.IN_RECOVERY)
                for who in range(self.case.recoverers):
                    self.recoverers[who] = _Recoverer(self)
            case ("crash", int(number)):
                self.bookies[number].up = False  # the content of the bookie is durable
            case ("begin", int(who)):
                self.recoverers[who] = _Recoverer(self)
            case (str(verb), int(who), *numbers):
                self.recoverers[who].take(verb, *(int(number) for number in numbers))

    def _append(self, entry: int, told: int) -> None:
        self._hear(told)
        payload = payload_of(entry)
        parts = encode_add(
            ledger=LEDGER,
            entry=entry,
            confirmed=self.writer.confirmed,
            length=self.writer.length + len(payload),
            payload=[payload],
            master_key=KEY,
        )
        for seat in self.writer.append(len(payload), parts, 0.0):
            self._send(entry, seat)

    def _send(self, entry: int, seat: int) -> None:
        parts = self.writer.parts(entry)
        assert parts is not None
        self._sent[self.number(self.writer.ensemble[seat]), entry] = parts

    def _add(self, entry: int, number: int) -> None:
        if (number, entry) not in self._sent:
            raise Diverged("it was not sent")
        if self.bookies[number].add(self._sent[number, entry]) is not BookieCode.OK:
            raise Diverged("it is refused")
        self._acks[number, entry] = None

    def _hear(self, told: int) -> None:
        """All acks so far of entries up to `told`."""
        for number, entry in list(self._acks):
            if entry <= told:
                del self._acks[number, entry]
                seat = self.writer.ensemble.index(self.bookies[number].member)
                self.writer.on_acks(seat, [entry])

    def _change(self, out: int, into: int, first: int) -> None:
        self._hear(first - 1)
        writer = self.writer
        seat = writer.ensemble.index(self.bookies[out].member)
        actions = writer.on_add_failed(seat, BookieCode.TIMEOUT)
        if actions != [writing.FindSpares((seat,))]:
            raise Diverged(f"the writer wants {actions}")
        [record] = writer.on_spares_found({seat: self.bookies[into].member})
        assert isinstance(record, writing.RecordEnsemble)
        self.metadata = self.metadata.with_ensemble(EntryId(record.first), record.members)
        self._sent = {key: parts for key, parts in self._sent.items() if key[0] != out}
        self._acks = {key: None for key in self._acks if key[0] != out}
        for action in writer.on_recorded(0.0):
            if isinstance(action, writing.SendAdd):
                self._send(action.entry, action.seat)

    # -- comparing -------------------------------------------------------------------------------

    def _compare(self, step: Step, state: State) -> None:
        def same(what: str, real: object, specified: object) -> None:
            if real != specified:
                raise Diverged(f"{tell(step)}: {what} is {real} instead of {specified}")

        for number, (real, bookie) in enumerate(zip(self.bookies, state.bookies, strict=True)):
            same(f"what b{number} holds", mask(real.entries), bookie.stored)
            same(f"whether b{number} is fenced", real.fenced, bookie.fenced)
            told = (
                decode_envelope(real.entries[max(real.entries)]).confirmed if bookie.stored else -1
            )
            same(f"what b{number} calls confirmed", told, bookie.tells)
        segment = self.metadata.last_segment
        seats = {bookie.listed for bookie in state.bookies} - {NOWHERE}
        assert seats
        same("the stored ensemble", self._seated(segment.members), self._seats(state, "listed"))
        same(
            "the writer's ensemble",
            self._seated(self.writer.ensemble),
            self._seats(state, "writes"),
        )
        same("the last segment's first entry", segment.first_entry, state.first)
        same("what was confirmed", self.writer.confirmed, state.told)
        for who, recoverer in self.recoverers.items():
            if not state.attempts[who].begun:
                continue
            self._compare_attempt(who, recoverer.machine, state.attempts[who], same)
            working = [bookie.views[who].working for bookie in state.bookies]
            same("the private ensemble", self._seated(recoverer.machine.ensemble), working)

    def _compare_attempt(
        self, who: int, machine: LedgerRecovery, attempt: Attempt, same: object
    ) -> None:
        assert callable(same)
        same("the start", machine.start, attempt.start)
        reading = machine.state in (
            RecoveryState.READING,
            RecoveryState.MEASURING,
            RecoveryState.DECIDED,
        )
        same(f"whether recoverer {who} reads", reading, attempt.reading)
        if attempt.reading:
            same("the next entry", machine.next, attempt.next)
        if attempt.next < self.case.entries:  # (the specification does not ask beyond the last)
            same(f"whether recoverer {who} knows the end", machine.end is not None, attempt.ended)

    def _seated(self, members: Iterable[object]) -> list[int]:
        """By bookie: its seat, as the specification counts them."""
        seats = list(members)
        return [
            NOWHERE
            if bookie.member not in seats
            else 0
            if self.case.alike
            else seats.index(bookie.member)
            for bookie in self.bookies
        ]

    def _seats(self, state: State, name: str) -> list[int]:
        return [getattr(bookie, name) for bookie in state.bookies]

    def number(self, who: object) -> int:
        return next(n for n, bookie in enumerate(self.bookies) if bookie.member == who)


class _Recoverer:
    """Requests that were sent, by bookie; answered when the specification says so."""

    def __init__(self, world: Replay) -> None:
        self.world = world
        self.machine = LedgerRecovery(world.metadata, limits=LIMITS)
        self.end: recovering.Close | None = None
        self._fences: set[int] = set()
        self._reads: dict[int, recovering.ReadRange] = {}
        self._write_backs: dict[tuple[int, int], writing.Parts] = {}  # keyed by bookie, entry
        self._acks: dict[tuple[int, int], None] = {}
        self._spares_for: tuple[int, ...] = ()
        self._carry_out(self.machine.begin())

    def take(self, verb: str, *numbers: int) -> None:
        match verb, numbers:
            case "fence", (number,):
                code, told = self._bookie(number).last_confirmed(fence=True)
                self._answer_fence(number, code, told)
            case "silent", (number,):
                self._answer_fence(number, BookieCode.TIMEOUT, -1)
            case (("found" | "lacks"), (entry, number)):
                self._read(entry, number)
            case "mute", (entry, number):
                seat = self._asked_seat(number)
                self._carry_out(self.machine.on_read_end(seat, BookieCode.TIMEOUT, 0.0))
            case "back", (entry, number):
                self._write_back(entry, number)
            case "private", (out, into, first):
                self._change(out, into, first)

    def finish(self) -> None:
        """All answers that are still missing: to write-backs whose bookie holds the entry already,
        and "no" to the entry after the last one."""
        for (number, entry), parts in list(self._write_backs.items()):
            bookie = self._bookie(number)
            if entry in bookie.entries and bookie.fenced and bookie.up:
                assert bookie.add(parts) is BookieCode.OK
                self._acks[number, entry] = None
        self._hear(self.machine.next)
        for number, bookie in enumerate(self.world.bookies):
            if self.machine.end is None and bookie.up and bookie.member in self.machine.asked:
                holders = self.world.quorum.write_order(self.machine.next)
                if self.machine.asked.index(bookie.member) in holders:
                    self._read(self.machine.next, number)

    def _bookie(self, number: int) -> RigBookie:
        return self.world.bookies[number]

    def _asked_seat(self, number: int) -> int:
        return self.machine.asked.index(self._bookie(number).member)

    def _answer_fence(self, number: int, code: BookieCode, told: int) -> None:
        seat = self._asked_seat(number)
        if seat not in self._fences:
            raise Diverged("it was not asked for")
        self._fences.discard(seat)
        self._carry_out(self.machine.on_fence_answer(seat, code, told, 0.0))

    def _read(self, entry: int, number: int) -> None:
        """The seat answers up to this entry; earlier entries have their conclusions."""
        seat = self._asked_seat(number)
        while True:
            request = self._reads.pop(seat, None)
            if request is None or request.first > entry:
                raise Diverged(f"the read under way is {request}")
            answers: list[ReadAnswer] = []
            for each in range(request.first, min(request.last, entry) + 1):
                answers.append(self._bookie(number).read(each, fence=True))
                if answers[-1].code is not BookieCode.OK:
                    break
            self._carry_out(self.machine.on_answers(seat, answers, 0.0))
            self._carry_out(self.machine.on_read_end(seat, BookieCode.OK, 0.0))
            if answers[-1].entry == entry:
                return

    def _write_back(self, entry: int, number: int) -> None:
        parts = self._write_backs.get((number, entry))
        if parts is None:
            raise Diverged("it was not sent")
        if self._bookie(number).add(parts) is not BookieCode.OK:
            raise Diverged("it is refused")
        self._acks[number, entry] = None

    def _hear(self, last: int) -> None:
        for number, entry in list(self._acks):
            if entry <= last:
                del self._acks[number, entry]
                who = self._bookie(number).member
                if who in self.machine.ensemble:
                    seat = self.machine.ensemble.index(who)
                    self._carry_out(self.machine.on_acks(seat, [entry], 0.0))

    def _change(self, out: int, into: int, first: int) -> None:
        for (number, entry), parts in self._write_backs.items():
            bookie = self._bookie(number)
            if entry < first and entry in bookie.entries and bookie.fenced:
                assert bookie.add(parts) is BookieCode.OK
                self._acks[number, entry] = None
        self._hear(first - 1)
        seat = self.machine.ensemble.index(self._bookie(out).member)
        self._write_backs = {k: parts for k, parts in self._write_backs.items() if k[0] != out}
        self._acks = {key: None for key in self._acks if key[0] != out}
        self._carry_out(self.machine.on_add_failed(seat, BookieCode.TIMEOUT, 0.0))
        if self._spares_for != (seat,):
            raise Diverged(f"spares are sought for seats {self._spares_for}")
        self._carry_out(self.machine.on_spares_found({seat: self._bookie(into).member}, 0.0))

    def _carry_out(self, actions: Iterable[recovering.Action]) -> None:
        for action in actions:
            match action:
                case recovering.Fence(seat):
                    self._fences.add(seat)
                case recovering.ReadRange(seat, _, _):
                    self._reads[seat] = action
                case recovering.ReadLength(entry):
                    holders = (b for b in self.world.bookies if entry in b.entries)
                    length = decode_envelope(next(holders).entries[entry]).length
                    self._carry_out(self.machine.on_length(length))
                case writing.SendAdd(entry, seat):
                    parts = self.machine.parts(entry)
                    assert parts is not None
                    number = self.world.number(self.machine.ensemble[seat])
                    self._write_backs[number, entry] = parts
                case writing.FindSpares(seats):
                    self._spares_for = seats
                case recovering.Close():
                    self.end = action
                case recovering.Abort(why):
                    raise Diverged(f"the recovery aborts: {why}")


def mask(entries: Iterable[int]) -> int:
    return sum(1 << entry for entry in entries)


def walk(case: Case, random: Random) -> tuple[list[Step], int | None]:
    """Take a random run through the specification and the machines, until a close or until no step
    is left. Returns the steps and the last entry of the close (None: not closed)."""
    protocol, real = Protocol(case), Replay(case)
    state, steps = protocol.begin(), list[Step]()
    while True:
        able = [who for who in range(case.recoverers) if not state.open]
        able = [who for who in able if protocol.may_close(state, who)]
        if able and random.random() < 0.2:
            who = random.choice(able)
            last = state.attempts[who].next - 1
            real.close(who, last)
            return steps, last
        choices = [each for each in protocol.steps(state) if _usual(state, each[0])]
        if not choices:
            return steps, None
        step, state = random.choice(choices)
        steps.append(step)
        real.take(step, state)


def _usual(state: State, step: Step) -> bool:
    """True if the machines can do this step: they look for spares only while entries are
    pending."""
    match step:
        case ("change", _, _, int(first)):
            return first < state.appended
        case ("private", int(who), _, _, int(first)):
            return first < state.attempts[who].next
    return True
