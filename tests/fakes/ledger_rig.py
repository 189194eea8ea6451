"""Ledger machines on a test rig: bookies, one metadata record, and messages that are delayed,
reordered and lost. The rig needs no asyncio: a run of 300 steps takes a few milliseconds.

Every request and every reply is a *delivery* in `LedgerRig.flying`. Each step delivers one of them,
chosen by the seed, or loses it; the sender of a lost one gets TIMEOUT, whether or not the bookie
handled the request. A rig is one part of the product with fakes around it; `World` means only the
simulated cluster. The oracle checks every confirmation against the content of bookies and metadata
at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fakes.adds import encode_add

from magnetar.bookie.ledger import recovery as recovering
from magnetar.bookie.ledger import writer as writing
from magnetar.bookie.ledger.placement import Candidate, choose_ensemble, choose_replacements
from magnetar.bookie.ledger.quorum import Quorum, seat_numbers
from magnetar.bookie.ledger.recovery import LedgerRecovery, RecoveryState
from magnetar.bookie.ledger.writer import LedgerWriter, WriterLimits, WriterState
from magnetar.metadata.model import (
    BookieId,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    Segment,
)
from magnetar.protos.envelope import (
    ADD,
    RECOVERY,
    BookieCode,
    ReadAnswer,
    add_envelope,
    decode_envelope,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

LEDGER = 7
KEY = 0x1234
LIMITS = WriterLimits(add_timeout_s=5.0, quorum_timeout_s=1e9, changes_max=40)


def member(number: int, incarnation: int = 0) -> Member:
    return Member(BookieId(f"b{number}"), f"{incarnation:032x}")


def payload_of(entry: int) -> bytes:
    return b"entry %d " % entry + b"x" * (entry % 5)


def payload_bytes(entries: range) -> int:
    return sum(len(payload_of(entry)) for entry in entries)


def open_metadata(quorum: Quorum, members: Sequence[Member]) -> LedgerMetadata:
    return LedgerMetadata(
        ledger=LedgerId(LEDGER),
        state=LedgerState.OPEN,
        ensemble_size=quorum.ensemble_size,
        write_quorum=quorum.write_quorum,
        ack_quorum=quorum.ack_quorum,
        segments=(Segment(EntryId(0), tuple(members)),),
        master_key=KEY,
        creator_token=1,
        created_ms=0,
    )


@dataclass
class RigBookie:
    """The simplest correct bookie. Its writes are durable at once; `up` says whether it answers."""

    member: Member
    entries: dict[int, bytes] = field(default_factory=dict)  # envelopes
    fenced: bool = False
    up: bool = True
    read_only: bool = False
    # by entry: the answer to give instead
    lies: dict[int, BookieCode] = field(default_factory=dict)

    def add(self, parts: writing.Parts) -> BookieCode:
        flags, _, key = ADD.unpack_from(parts[0])
        envelope = decode_envelope(add_envelope(parts))
        assert key == KEY
        assert envelope.ledger == LEDGER
        if flags & RECOVERY:
            self.fenced = True
        elif self.fenced:
            return BookieCode.FENCED
        elif self.read_only:
            return BookieCode.READ_ONLY
        stored = self.entries.setdefault(envelope.entry, add_envelope(parts))
        return BookieCode.OK if stored == add_envelope(parts) else BookieCode.CONFLICT

    def read(self, entry: int, *, fence: bool) -> ReadAnswer:
        self.fenced |= fence
        if entry in self.lies:
            return ReadAnswer(entry, self.lies[entry], b"")
        if entry not in self.entries:
            return ReadAnswer(entry, BookieCode.NO_SUCH_ENTRY, b"")
        return ReadAnswer(entry, BookieCode.OK, self.entries[entry])

    def last_confirmed(self, *, fence: bool) -> tuple[BookieCode, int]:
        self.fenced |= fence
        if not self.entries:
            return BookieCode.NO_SUCH_LEDGER, -1
        return BookieCode.OK, decode_envelope(self.entries[max(self.entries)]).confirmed


@dataclass
class LedgerRig:
    """The bookies, the metadata and the messages of one ledger, and the oracle over them."""

    quorum: Quorum
    random: Random
    bookies: dict[Member, RigBookie]
    metadata: LedgerMetadata
    version: int = 0
    loss: float = 0.0
    flying: list[Callable[[bool], None]] = field(default_factory=list)  # called with "delivered?"
    confirmed: int = -1  # the oracle: the last entry that the writer reported to its owner
    seen: int = -1  # the oracle: the highest "confirmed" that was read from a bookie
    now: float = 0.0

    @classmethod
    def build(cls, quorum: Quorum, bookies: int, random: Random, *, loss: float = 0.0) -> LedgerRig:
        bookies_by_member = {member(number): RigBookie(member(number)) for number in range(bookies)}
        candidates = [Candidate(each) for each in bookies_by_member]
        ensemble = choose_ensemble(candidates, quorum, random)
        assert ensemble is not None
        return cls(quorum, random, bookies_by_member, open_metadata(quorum, ensemble), loss=loss)

    def call(
        self, to: Member, request: Callable[[RigBookie], object], reply: Callable[[object], None]
    ) -> None:
        """Send a request to a bookie. `reply` gets its answer, or BookieCode.TIMEOUT if request or
        answer was lost."""

        def arrive(delivered: bool) -> None:
            bookie = self.bookies[to]
            if not delivered or not bookie.up:
                reply(BookieCode.TIMEOUT)
                return
            answer = request(bookie)
            self.flying.append(lambda safe: reply(answer if safe else BookieCode.TIMEOUT))

        self.flying.append(arrive)

    def store(self, expected: int, value: LedgerMetadata, reply: Callable[[bool], None]) -> None:
        """Compare-and-set the metadata. False: refused, or the reply was lost."""

        def arrive(delivered: bool) -> None:
            applied = delivered and self.version == expected
            if applied:
                self._check_transition(value)
                self.metadata, self.version = value, self.version + 1
            self.flying.append(lambda safe: reply(applied and safe))

        self.flying.append(arrive)

    def step(self) -> bool:
        """Deliver or lose one message. False: no message is under way."""
        if not self.flying:
            return False
        self.now += 0.001
        delivery = self.flying.pop(self.random.randrange(len(self.flying)))
        delivery(self.random.random() >= self.loss)
        return True

    def find_spares(
        self,
        ensemble: Sequence[Member],
        failed: Sequence[int],
        reply: Callable[[dict[int, Member]], None],
    ) -> None:
        """Choose among the bookies that are up when the search begins. The answer arrives later."""
        chosen = choose_replacements(
            [Candidate(each) for each in ensemble],
            failed,
            [Candidate(each) for each, bookie in self.bookies.items() if bookie.up],
            self.quorum,
            self.random,
        )
        changed = {
            seat: after
            for seat, (before, after) in enumerate(zip(ensemble, chosen or ensemble, strict=True))
            if before != after
        }
        self.flying.append(lambda _: reply(changed))

    def note_confirmed(self, through: int) -> None:
        """Oracle of W4, I5 and I7: called at every confirmation."""
        assert through > self.confirmed
        for entry in range(self.confirmed + 1, through + 1):
            assert self.copies(entry) >= self.quorum.ack_quorum, entry
        if self.metadata.state is LedgerState.CLOSED:
            assert self.metadata.last_entry is not None
            assert through <= self.metadata.last_entry
        self.confirmed = through

    def copies(self, entry: int) -> int:
        """The number of the entry's members in the stored metadata that hold it."""
        ensemble = self.metadata.segment_of(EntryId(entry)).members
        order = self.quorum.write_order(entry)
        return sum(entry in self.bookies[ensemble[seat]].entries for seat in order)

    def peek(self) -> None:
        """A reader asks a bookie for the confirmed entry, without fencing (G2)."""
        bookie = self.bookies[self.random.choice(self.metadata.last_segment.members)]
        code, confirmed = bookie.last_confirmed(fence=False)
        if code is BookieCode.OK:
            self.seen = max(self.seen, confirmed)

    def check_closed(self) -> None:
        """Oracles I1, I3, I4, I12 and G2, at the end."""
        last, length = self.metadata.last_entry, self.metadata.length
        assert self.metadata.state is LedgerState.CLOSED
        assert last is not None
        assert last >= self.confirmed, "the close lost a confirmed entry"
        assert last >= self.seen, "the close lost a readable entry"
        assert length == payload_bytes(range(last + 1))
        for entry in range(last + 1):
            assert self.copies(entry) >= self.quorum.ack_quorum, entry
            held = {b.entries[entry] for b in self.bookies.values() if entry in b.entries}
            assert len(held) == 1, "copies of one entry differ"
            assert bytes(decode_envelope(held.pop()).payload) == payload_of(entry)

    def _check_transition(self, value: LedgerMetadata) -> None:
        """Oracles I2 and I13: states only go forward, and closed ledgers and sealed segments do not
        change."""
        before = self.metadata
        assert value.state >= before.state
        if before.state is LedgerState.CLOSED:
            assert (value.last_entry, value.length) == (before.last_entry, before.length)
        assert value.segments[: len(before.segments) - 1] == before.segments[:-1]


class WriterActor:
    """The needed part of a writer's shell: it executes actions, loses replies, and closes."""

    def __init__(self, world: LedgerRig, limits: WriterLimits = LIMITS) -> None:
        self.world = world
        self.metadata, self.version = world.metadata, world.version
        self.closed = False
        self.missed: list[writing.Missed] = []
        self.machine = LedgerWriter(
            world.quorum, world.metadata.last_segment.members, limits=limits, now=world.now
        )

    def append(self) -> None:
        machine = self.machine
        if not machine.writing:
            return
        entry = machine.appended + 1
        payload = payload_of(entry)
        parts = encode_add(
            ledger=LEDGER,
            entry=entry,
            confirmed=machine.confirmed,
            length=machine.length + len(payload),
            payload=[payload],
            master_key=KEY,
        )
        for seat in machine.append(len(payload), parts, self.world.now):
            self._send(entry, seat)
        machine.check()

    def tick(self) -> None:
        """Look for replacements of failed members again, or keep the members if there is no other
        bookie."""
        machine = self.machine
        self.carry_out(machine.on_spares())
        for seat in seat_numbers(machine.failed):
            if self.world.bookies[machine.ensemble[seat]].up and self.world.random.random() < 0.5:
                self.carry_out(machine.on_rejoin(seat, self.world.now))

    def close(self) -> None:
        machine = self.machine
        if machine.state is WriterState.OPEN and machine.idle:
            self.missed += machine.missed
            last, length = machine.seal()
            self._store(
                replace(
                    self.metadata,
                    state=LedgerState.CLOSED,
                    last_entry=EntryId(last),
                    length=length,
                ),
                self._closed,
            )

    def carry_out(self, actions: Sequence[writing.Action]) -> None:
        self.machine.check()
        for action in actions:
            match action:
                case writing.SendAdd(entry, seat):
                    self._send(entry, seat)
                case writing.Confirm(through):
                    self.world.note_confirmed(through)
                case writing.FindSpares(seats):
                    self.world.find_spares(self.machine.ensemble, seats, self._found)
                case writing.RecordEnsemble(first, members):
                    assert first == self.machine.confirmed + 1
                    self._store(
                        self.metadata.with_ensemble(EntryId(first), members),
                        lambda: self.carry_out(self.machine.on_recorded(self.world.now)),
                    )
                case writing.Missed():
                    self.missed.append(action)
                case writing.Fail():
                    assert not self.machine.writing

    def _send(self, entry: int, seat: int) -> None:
        parts = self.machine.parts(entry)
        to = self.machine.ensemble[seat]
        assert parts is not None
        self.world.call(
            to, lambda bookie: bookie.add(parts), lambda code: self._added(to, entry, code)
        )

    def _added(self, who: Member, entry: int, code: object) -> None:
        assert isinstance(code, BookieCode)
        if who not in self.machine.ensemble:
            return  # replaced meanwhile: its ack no longer counts (T13)
        seat = self.machine.ensemble.index(who)
        if code is BookieCode.OK:
            self.carry_out(self.machine.on_acks(seat, [entry]))
        else:
            self.carry_out(self.machine.on_add_failed(seat, code))

    def _found(self, spares: dict[int, Member]) -> None:
        self.carry_out(self.machine.on_spares_found(spares))

    def _store(self, value: LedgerMetadata, stored: Callable[[], None]) -> None:
        expected = self.version

        def reply(applied: bool) -> None:
            nonlocal expected
            world = self.world
            if applied or world.metadata == value:  # (read again after a lost reply)
                self.metadata = value
                self.version = expected + 1 if applied else world.version
                stored()
            elif world.metadata.state is not LedgerState.OPEN:
                self.carry_out(self.machine.on_add_failed(0, BookieCode.FENCED))
            else:
                expected = world.version
                world.store(expected, value, reply)

        self.world.store(expected, value, reply)

    def _closed(self) -> None:
        self.closed = True


class RecoveryActor:
    """A recoverer's shell: one attempt."""

    def __init__(self, world: LedgerRig, limits: WriterLimits = LIMITS) -> None:
        self.world = world
        self.machine: LedgerRecovery | None = None  # None: not begun, or nothing to recover
        self.done = False
        self.result: LedgerMetadata | None = None  # None: not closed by this attempt
        self.why = ""
        self.dead = False
        self._limits = limits

    def begin(self) -> None:
        """R0 and R1."""
        stored = self.world.metadata
        match stored.state:
            case LedgerState.CLOSED:
                self._end(stored)
            case LedgerState.IN_RECOVERY:
                self._freeze(stored)
            case LedgerState.OPEN:
                claimed = replace(stored, state=LedgerState.IN_RECOVERY)
                self.world.store(self.world.version, claimed, lambda _: self._again())

    def _again(self) -> None:
        if not self.dead:
            self.begin()

    def _freeze(self, stored: LedgerMetadata) -> None:
        self.machine = LedgerRecovery(stored, limits=self._limits)
        self.carry_out(self.machine.begin())

    def carry_out(self, actions: Sequence[recovering.Action]) -> None:
        machine = self.machine
        assert machine is not None
        machine.check()
        for action in actions:
            match action:
                case recovering.Fence(seat):
                    self._fence(seat)
                case recovering.ReadRange(seat, first, last):
                    self._read(seat, first, last)
                case recovering.ReadLength(entry):
                    self._measure(entry)
                case writing.SendAdd(entry, seat):
                    self._send(entry, seat)
                case writing.FindSpares(seats):
                    self.world.find_spares(machine.ensemble, seats, self._found)
                case recovering.Close():
                    self._close(action)
                case recovering.Abort(why):
                    self.done, self.why = True, why

    def _found(self, spares: dict[int, Member]) -> None:
        if self.machine is not None and not self.dead:
            self.carry_out(self.machine.on_spares_found(spares, self.world.now))

    def _ask(
        self, to: Member, request: Callable[[RigBookie], object], reply: Callable[[object], None]
    ) -> None:
        self.world.call(to, request, lambda answer: None if self.dead else reply(answer))

    def _fence(self, seat: int) -> None:
        machine = self.machine
        assert machine is not None

        def reply(answer: object) -> None:
            code, confirmed = answer if isinstance(answer, tuple) else (answer, -1)
            self.carry_out(machine.on_fence_answer(seat, code, confirmed, self.world.now))

        self._ask(machine.asked[seat], lambda bookie: bookie.last_confirmed(fence=True), reply)

    def _read(self, seat: int, first: int, last: int) -> None:
        machine, now = self.machine, self.world.now
        assert machine is not None
        limit = min(last, first + self.world.random.randrange(4))  # a bookie's own limit

        def run(bookie: RigBookie) -> object:
            answers = []
            for entry in range(first, limit + 1):
                answers.append(bookie.read(entry, fence=True))
                if answers[-1].code is not BookieCode.OK:
                    break
            return answers

        def reply(answer: object) -> None:
            if isinstance(answer, list):
                cut = self.world.random.randrange(len(answer) + 1)
                self.carry_out(machine.on_answers(seat, answer[:cut], now))
                self.carry_out(machine.on_answers(seat, answer[cut:], now))
                self.carry_out(machine.on_read_end(seat, BookieCode.OK, now))
            else:
                assert isinstance(answer, BookieCode)
                self.carry_out(machine.on_read_end(seat, answer, now))

        self._ask(machine.asked[seat], run, reply)

    def _measure(self, entry: int) -> None:
        machine = self.machine
        assert machine is not None
        order = self.world.quorum.write_order(entry)
        replicas = [machine.metadata.segment_of(EntryId(entry)).members[seat] for seat in order]

        def reply(answer: object) -> None:
            if isinstance(answer, ReadAnswer) and answer.code is BookieCode.OK:
                self.carry_out(machine.on_length(decode_envelope(answer.envelope).length))
            elif replicas:
                self._ask(replicas.pop(0), lambda bookie: bookie.read(entry, fence=True), reply)
            else:
                self.carry_out(machine.on_length(None))

        reply(None)

    def _send(self, entry: int, seat: int) -> None:
        machine = self.machine
        assert machine is not None
        parts, to = machine.parts(entry), machine.ensemble[seat]
        assert parts is not None

        def reply(code: object) -> None:
            assert isinstance(code, BookieCode)
            if to not in machine.ensemble:
                return
            seat_now, now = machine.ensemble.index(to), self.world.now
            if code is BookieCode.OK:
                self.carry_out(machine.on_acks(seat_now, [entry], now))
            else:
                self.carry_out(machine.on_add_failed(seat_now, code, now))

        self._ask(to, lambda bookie: bookie.add(parts), reply)

    def _close(self, close: recovering.Close) -> None:
        """R7: merge with what is stored, by compare-and-set."""
        machine, world = self.machine, self.world
        assert machine is not None
        if world.metadata.state is LedgerState.CLOSED:
            self._end(world.metadata)
            return
        value = machine.close_metadata(world.metadata, close)
        world.store(world.version, value, lambda _: None if self.dead else self._close(close))

    def _end(self, stored: LedgerMetadata) -> None:
        self.done, self.result = True, stored


def recover_fully(world: LedgerRig, attempts: int = 20) -> None:
    """Heal all bookies: a recoverer must then be able to close the ledger."""
    world.loss = 0.0
    for bookie in world.bookies.values():
        bookie.up = True
        bookie.read_only = False
        bookie.lies.clear()
    for _ in range(attempts):
        actor = RecoveryActor(world)
        actor.begin()
        while not actor.done and world.step():
            pass
        if world.metadata.state is LedgerState.CLOSED:
            break
    while world.step():
        pass
    assert world.metadata.state is LedgerState.CLOSED, actor.why


__all__ = [
    "RigBookie",
    "RecoveryActor",
    "RecoveryState",
    "LedgerRig",
    "WriterActor",
    "member",
    "open_metadata",
    "payload_bytes",
    "payload_of",
    "recover_fully",
]
