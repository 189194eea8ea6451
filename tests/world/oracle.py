"""Rules that hold whatever happens: the oracles I1 to I18, each a function with its name.

The oracle receives everything that crosses an edge of the real code: what a writer learns, what a
bookie answers, each version of a ledger's metadata at the moment it is stored, each read. It checks
at those moments, and again at the end, when all faults are healed and every ledger is closed. It
raises a `Violation` at the place where a rule is broken.

Data that the world destroys on purpose is no violation: the world never destroys more than Qa - 1
copies of an entry (`World.may_destroy`), and a copy that was once durable on a disk counts as a
copy (I4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from world.logs import Logs

from magnetar.bookie.ledger.quorum import Quorum, seats
from magnetar.metadata.codec import decode_ledger
from magnetar.metadata.model import EntryId, LedgerId, LedgerState
from magnetar.protos.envelope import BookieCode, decode_acks, decode_envelope_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from world.trace import Trace

    from magnetar.bookie.contract import EntryPage
    from magnetar.metadata.model import LedgerMetadata, Member


class Violation(AssertionError):
    """`oracle`: the name of the rule that was broken."""

    def __init__(self, oracle: str, why: str) -> None:
        super().__init__(f"{oracle}: {why}")
        self.oracle = oracle
        self.why = why


@dataclass
class Life:
    """The oracle's knowledge of one ledger."""

    payloads: dict[int, bytes] = field(default_factory=dict)  # appended, by entry
    confirmed: int = -1  # the last entry that its writer knows as confirmed
    failed: bool = False  # its writer was told that the ledger failed or is closed
    deleted: bool = False
    seen: dict[int, bytes] = field(default_factory=dict)  # entries that any process has read
    named: int = -1  # the highest entry that any bookie called confirmed
    versions: list[LedgerMetadata] = field(default_factory=list)


@dataclass
class Answers:
    """The answers of one incarnation of a bookie about one ledger."""

    acked: set[int] = field(default_factory=set)
    visible: set[int] | None = None  # entries stored at the fence; None: not fenced yet


class Oracle:
    def __init__(self, trace: Trace) -> None:
        self.lives: dict[LedgerId, Life] = {}
        self.first: Violation | None = None
        # The entries of each member that were ever durable.
        self.stored_by: dict[Member, set[tuple[int, int]]] = {}
        self.reads = 0
        self.when_broken: Callable[[Violation], None] = lambda violation: None
        self.when_fenced: Callable[[Member, int], None] = lambda member, ledger: None
        self.logs = Logs(self)
        self._trace = trace
        self._answers: dict[tuple[Member, int], Answers] = {}
        self._removed: dict[Member, set[int]] = {}  # deleted ledgers that the member removed
        self._left: dict[Member, set[int]] = {}  # ledgers whose left-over copies the member removed
        self._had: dict[Member, set[tuple[int, int]]] = {}  # entries when it became read-only

    def life(self, ledger: int) -> Life:
        return self.lives.setdefault(LedgerId(ledger), Life())

    def broken(self, oracle: str, why: str) -> Violation:
        """The violation to raise. The first one counts: later ones may be its consequences."""
        violation = Violation(oracle, why)
        if self.first is None:
            self.first = violation
            self.when_broken(violation)
            self._trace.note("oracle", "VIOLATION", str(violation))
        return violation

    def note(self, who: str, what: str, *facts: object) -> None:
        """Count an event that a run must meet, like its faults."""
        self._trace.fault(who, what, *facts)

    def hold(self, truth: bool, oracle: str, why: Callable[[], str]) -> None:
        if not truth:
            raise self.broken(oracle, why())

    # -- writers -----------------------------------------------------------------------------------

    def on_append(self, ledger: int, entry: int, payload: bytes) -> None:
        life = self.life(ledger)
        self.hold(
            entry == len(life.payloads), "I5", lambda: f"ledger {ledger}: id {entry} out of order"
        )
        life.payloads[entry] = payload

    def on_confirm(self, ledger: int, through: int) -> None:
        """The writer was told that all entries up to this one are durable."""
        life = self.life(ledger)
        self._trace.note(f"L{ledger}", "confirmed", through)
        self.i5_confirmations_in_order(ledger, through)
        for entry in range(life.confirmed + 1, through + 1):
            self.i6_acks_of_listed_members(ledger, entry)
        self.i7_nothing_confirmed_beyond_the_end(ledger, through)
        life.confirmed = through

    def on_failure(self, ledger: int) -> None:
        self._trace.note(f"L{ledger}", "failed")
        self.life(ledger).failed = True

    def i5_confirmations_in_order(self, ledger: int, through: int) -> None:
        """I5: strictly increasing, nothing that was not appended, none after an error."""
        life = self.lives[LedgerId(ledger)]
        self.hold(not life.failed, "I5", lambda: f"{ledger}:{through} confirmed after a failure")
        self.hold(
            life.confirmed < through < len(life.payloads),
            "I5",
            lambda: (
                f"{ledger}: confirmed {through} after {life.confirmed},"
                f" {len(life.payloads)} appended"
            ),
        )

    def i6_acks_of_listed_members(self, ledger: int, entry: int) -> None:
        """I6: at that moment, Qa of the entry's members in metadata hold it durably."""
        life = self.lives[LedgerId(ledger)]
        if life.deleted:
            return
        holders = self._holders(life.versions[-1], entry)
        needed = life.versions[-1].ack_quorum
        self.hold(
            len(holders) >= needed,
            "I6",
            lambda: f"{ledger}:{entry} confirmed with {len(holders)} of {needed} copies",
        )

    def i7_nothing_confirmed_beyond_the_end(self, ledger: int, through: int) -> None:
        """I7: no writer is told of an entry beyond the end of a CLOSED ledger."""
        last = self.lives[LedgerId(ledger)].versions[-1].last_entry
        self.hold(
            last is None or through <= last,
            "I7",
            lambda: f"{ledger}:{through} confirmed, but the ledger is closed at {last}",
        )

    # -- metadata ----------------------------------------------------------------------------------

    def on_metadata(self, path: str, value: bytes | None, known: Iterable[Member]) -> None:
        """A ledger's record was stored, or deleted."""
        ledger = LedgerId(int(path.rpartition("/")[2]))
        life = self.life(ledger)
        if value is None:
            life.deleted = True
            self.logs.lives.on_ledger_deleted(ledger)
            return
        after = decode_ledger(value)
        self._trace.note(f"L{ledger}", "metadata", after.state.name, _drawn(after))
        self.i13_ensembles_make_sense(after, set(known))
        if not life.versions:
            self.logs.on_ledger(after)
        else:
            self.i2_states_go_forward(life.versions[-1], after)
            self.i4_copied_before_named(life.versions[-1], after)
        if after.state is LedgerState.CLOSED:
            assert after.last_entry is not None
            self.hold(
                after.last_entry >= life.confirmed,
                "I1",
                lambda: (
                    f"{ledger} closed at {after.last_entry}, but {life.confirmed} was confirmed"
                ),
            )
            self.hold(
                after.last_entry >= life.named,
                "I9",
                lambda: f"{ledger} closed at {after.last_entry}, but {life.named} was readable",
            )
            self.i12_exact_length(after)
        life.versions.append(after)

    def i2_states_go_forward(self, before: LedgerMetadata, after: LedgerMetadata) -> None:
        """I2: no state goes back. The end of a CLOSED ledger and the starts of segments never
        change."""
        self.hold(
            after.state >= before.state,
            "I2",
            lambda: f"ledger {after.ledger} went from {before.state.name} to {after.state.name}",
        )
        if before.state is LedgerState.CLOSED:
            self.hold(
                (after.last_entry, after.length) == (before.last_entry, before.length),
                "I2",
                lambda: (
                    f"the end of ledger {after.ledger} was {before.last_entry} and is now"
                    f" {after.last_entry}"
                ),
            )
        starts = [part.first_entry for part in before.segments][:-1]
        self.hold(
            [part.first_entry for part in after.segments][: len(starts)] == starts,
            "I2",
            lambda: f"sealed segments of ledger {after.ledger} changed: {_drawn(after)}",
        )

    def i4_copied_before_named(self, before: LedgerMetadata, after: LedgerMetadata) -> None:
        """I4: a bookie that takes a seat of a sealed segment has all entries of the seat by
        then."""
        quorum = Quorum(after.ensemble_size, after.write_quorum, after.ack_quorum)
        for number, part in enumerate(before.segments):
            if number + 1 < len(before.segments):
                end = int(before.segments[number + 1].first_entry) - 1
            elif before.last_entry is not None:
                end = int(before.last_entry)
            else:
                break
            for seat, member in enumerate(after.segments[number].members):
                if member in part.members:
                    continue
                for entry in range(part.first_entry, end + 1):
                    self.hold(
                        not quorum.write_set(entry) >> seat & 1
                        or (after.ledger, entry) in self.stored_by.get(member, ()),
                        "I4",
                        partial(
                            "{} took a seat of {} without entry {}".format,
                            member.bookie,
                            after.ledger,
                            entry,
                        ),
                    )

    def i12_exact_length(self, closed: LedgerMetadata) -> None:
        """I12: the length at the close is the total length of the entries."""
        life = self.lives[closed.ledger]
        last = closed.last_entry
        assert last is not None
        self.hold(
            last < len(life.payloads),
            "I3",
            lambda: f"{closed.ledger} closed at {last}, {len(life.payloads)} were appended",
        )
        length = sum(len(life.payloads[entry]) for entry in range(last + 1))
        self.hold(
            length == closed.length,
            "I12",
            lambda: f"ledger {closed.ledger}: length {closed.length} instead of {length}",
        )

    def i13_ensembles_make_sense(self, metadata: LedgerMetadata, known: set[Member]) -> None:
        """I13: distinct members, increasing starts, and incarnations that were formatted once."""
        for part in metadata.segments:
            bookies = [member.bookie for member in part.members]
            self.hold(len(set(bookies)) == len(bookies), "I13", partial(_drawn, metadata))
            for member in part.members:
                self.hold(member in known, "I13", partial("{} never existed".format, member))

    # -- bookies -----------------------------------------------------------------------------------

    def on_durable(self, member: Member, ledger: int, entry: int, envelope: bytes) -> None:
        self.i3_stored_as_appended(member, ledger, entry, envelope)
        self.stored_by.setdefault(member, set()).add((ledger, entry))
        self._left.get(member, set()).discard(ledger)
        self.logs.i14_nothing_outside_the_list(ledger, entry)
        self.hold(
            ledger not in self._removed.get(member, ()),
            "T24",
            lambda: f"{member.bookie} stores {ledger}:{entry}, a ledger that it had removed",
        )

    def i3_stored_as_appended(
        self, member: Member, ledger: int, entry: int, envelope: bytes
    ) -> None:
        """I3: each copy that a writer, a recoverer or a repair sent is what was appended."""
        expected = self.life(ledger).payloads.get(entry)
        found = decode_envelope_of(ledger, entry, envelope).payload
        self.hold(
            expected is None or bytes(found) == expected,
            "I3",
            lambda: f"{member.bookie} stores {bytes(found)!r} as {ledger}:{entry}",
        )

    def reclaims_once(self, member: Member) -> None:
        """T11: a compaction that meets damage ends the bookie. The next compaction waits until a
        scrub finds all stored data sound, and does not meet the repaired data."""
        raise self.broken("T11", f"{member.bookie} ends again over damage that it has met before")

    def on_delete(self, member: Member, ledger: int, *, for_good: bool) -> None:
        """A bookie removes a ledger: as deleted, `for_good`, or as a copy that is left over."""
        self._trace.note(member.bookie, "removes", ledger, for_good)
        life = self.life(ledger)
        self.i15_nothing_needed_is_removed(member, ledger, for_good=for_good)
        if life.deleted:
            self._removed.setdefault(member, set()).add(ledger)
        else:
            held = self.stored_by.setdefault(member, set())
            held.difference_update({each for each in held if each[0] == ledger})
            self._left.setdefault(member, set()).add(ledger)
            self._answers.setdefault((member, ledger), Answers()).acked.clear()

    def on_reopened(self, member: Member, has: Callable[[int], bool]) -> None:
        """A power cut may have undone the latest removals."""
        removed = self._removed.get(member, set())
        removed.difference_update([ledger for ledger in removed if has(ledger)])

    def i15_nothing_needed_is_removed(self, member: Member, ledger: int, *, for_good: bool) -> None:
        """I15: no bookie removes a ledger whose metadata exists and lists it."""
        life = self.lives[LedgerId(ledger)]
        if life.deleted:
            return
        self.hold(
            not for_good, "I15", lambda: f"{member.bookie} removes {ledger}, which was not deleted"
        )
        stored = life.versions[-1]
        listed = any(member in part.members for part in stored.segments)
        self.hold(
            not listed and stored.state is LedgerState.CLOSED,
            "I15",
            lambda: f"{member.bookie} removes its copy of {ledger}: {_drawn(stored)}",
        )

    def on_acks(self, member: Member, frame: bytes, *, normal: bool, durable: Any) -> None:
        """A frame of acks leaves a bookie. `normal`: for a writer, not for a recoverer."""
        for ledger, entry, code in decode_acks(frame):
            if code is BookieCode.READ_ONLY:
                self._trace.bitten["add refused by a nearly full disk"] += 1
            if code is not BookieCode.OK:
                continue
            self.durable_before_ack(member, ledger, entry, durable)
            answers = self._answers.setdefault((member, ledger), Answers())
            if normal:
                self.i11_no_add_after_a_fence(member, ledger, entry, answers)
                self.t21_no_add_when_nearly_full(member, ledger, entry)
            if ledger not in self._left.get(member, ()):
                answers.acked.add(entry)

    def durable_before_ack(self, member: Member, ledger: int, entry: int, durable: Any) -> None:
        """I1 depends on this: an entry that a bookie acked survives its crash. Exceptions: the
        ledger was deleted, or the copy was left over, and the bookie removed it before it could
        report that."""
        gone = ledger in self._removed.get(member, ()) or ledger in self._left.get(member, ())
        self.hold(
            durable(ledger, entry) or gone,
            "I1",
            lambda: f"{member.bookie} acked {ledger}:{entry}, which a power cut would remove",
        )

    def on_intake(self, member: Member, stored: set[tuple[int, int]] | None) -> None:
        """A bookie has checked its disk space. `stored`: its entries when it begins to refuse
        ordinary adds; None: it accepts all adds."""
        if stored is None:
            self._had.pop(member, None)
        else:
            self._had.setdefault(member, stored)

    def t21_no_add_when_nearly_full(self, member: Member, ledger: int, entry: int) -> None:
        """T21: the rest of the disk is reserved for fences, repairs and deletions."""
        had = self._had.get(member)
        self.hold(
            had is None or (ledger, entry) in had,
            "T21",
            lambda: f"{member.bookie} takes {ledger}:{entry} with its disk nearly full",
        )

    def i11_no_add_after_a_fence(
        self, member: Member, ledger: int, entry: int, answers: Answers
    ) -> None:
        """I11: after its answer to a fencing read, a bookie acks no add that the answer did not
        include."""
        self.hold(
            answers.visible is None or entry in answers.visible,
            "I11",
            lambda: f"{member.bookie} acked {ledger}:{entry} after it had said that it is fenced",
        )

    def on_fence_answer(
        self, member: Member, ledger: int, visible: set[int], *, durable: bool
    ) -> None:
        """A bookie answers a fencing read with something other than "unknown". `visible`: the
        entries that it stores. `durable`: its fence would survive a power cut."""
        self.hold(
            durable,
            "I11",
            lambda: f"{member.bookie} says that it fenced {ledger}, but a power cut would undo it",
        )
        answers = self._answers.setdefault((member, ledger), Answers())
        if answers.visible is None:
            answers.visible = visible
        self._trace.note(member.bookie, "is fenced", ledger)
        self.when_fenced(member, ledger)

    def acked(self, member: Member, ledger: int) -> set[int]:
        """The entries that this incarnation has acked so far."""
        answers = self._answers.get((member, ledger))
        return set() if answers is None else set(answers.acked)

    def r2_reads_behind_fences(self, ledger: int) -> None:
        """R2: a recoverer reads only when each write set has fewer than Qa unfenced members."""
        metadata = self.life(ledger).versions[-1]
        if metadata.state is LedgerState.CLOSED:
            return  # a late request
        known = [self._answers.get((who, ledger)) for who in metadata.last_segment.members]
        fenced = [seat for seat, each in enumerate(known) if each and each.visible is not None]
        quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self.hold(
            quorum.covered(seats(fenced)),
            "R2",
            lambda: f"ledger {ledger} is read for its recovery with only seats {fenced} fenced",
        )

    def i10_no_false_negative(
        self, member: Member, ledger: int, entry: int, code: BookieCode, acked: set[int]
    ) -> None:
        """I10: no "no such entry" for an entry that this incarnation had `acked` before the
        request. (A write-back may overtake a read, and so may the removal of a left-over copy,
        which I15 checks.)"""
        if code not in (BookieCode.NO_SUCH_ENTRY, BookieCode.NO_SUCH_LEDGER):
            return
        self.hold(
            entry not in acked & self.acked(member, ledger) or self.life(ledger).deleted,
            "I10",
            lambda: f"{member.bookie} denies {ledger}:{entry}, which it has acked",
        )

    def i10_no_false_gap(
        self, member: Member, ledger: int, first: int, page: EntryPage, acked: set[int]
    ) -> None:
        """I10 for a list of stored entries: an entry that it omits is not stored."""
        if page.code is BookieCode.OK:
            listed = {at for run in page.runs for at in range(run.first, run.first + run.count)}
            end = max(listed, default=first) if page.more else max(acked, default=first)
        elif page.code is BookieCode.NO_SUCH_LEDGER:
            listed, end = set(), max(acked, default=first)
        else:
            return
        left_out = {at for at in acked & self.acked(member, ledger) if first <= at <= end} - listed
        self.hold(
            not left_out or self.life(ledger).deleted,
            "I10",
            lambda: f"{member.bookie} does not list {sorted(left_out)} of {ledger}",
        )

    def i17_within(self, whose: str, held: int, limit: int) -> None:
        """I17: the memory for bytes in flight is bounded: of a ledger, a process, a bookie, a
        topic, a read. Checked where it grows. Each limit is the configured one plus one entry or
        frame, the last that was admitted."""
        self.hold(held <= limit, "I17", lambda: f"{whose}: {held} bytes in flight, not {limit}")

    # -- readers -----------------------------------------------------------------------------------

    def on_named(self, ledger: int, confirmed: int) -> None:
        """A bookie has called this entry confirmed: from now on it is readable."""
        life = self.life(ledger)
        self.i8_named_is_confirmed(ledger, confirmed)
        life.named = max(life.named, confirmed)

    def i8_named_is_confirmed(self, ledger: int, confirmed: int) -> None:
        """I8: what entries call confirmed never exceeds what their writer has confirmed."""
        life = self.life(ledger)
        self.hold(
            confirmed <= life.confirmed,
            "I8",
            lambda: f"{ledger}: a bookie names {confirmed}, confirmed is {life.confirmed}",
        )

    def on_read(self, ledger: int, entry: int, payload: bytes) -> None:
        self.reads += 1
        self.i3_one_sequence(ledger, entry, payload)

    def i3_one_sequence(self, ledger: int, entry: int, payload: bytes) -> None:
        """I3: all reads of an entry give the same bytes, those that were appended."""
        life = self.life(ledger)
        self.hold(
            life.payloads.get(entry) == payload,
            "I3",
            lambda: (
                f"{ledger}:{entry} reads as {payload!r}, appended was {life.payloads.get(entry)!r}"
            ),
        )
        life.seen[entry] = payload

    # -- the end -----------------------------------------------------------------------------------

    def on_closed_read(self, closed: LedgerMetadata, found: list[bytes]) -> None:
        """At the end: the ledger as every process can read it now. I1, I3, I4, I9."""
        ledger, last = closed.ledger, closed.last_entry
        life = self.lives[ledger]
        assert last is not None
        self.hold(
            len(found) == last + 1, "I1", lambda: f"{ledger}: {len(found)} of {last + 1} read"
        )
        for entry, payload in enumerate(found):
            self.i3_one_sequence(ledger, entry, payload)
        self.hold(
            max(life.seen, default=-1) <= last,
            "I9",
            lambda: f"{ledger}: {max(life.seen)} was read once, the end is {last}",
        )
        self.i4_enough_copies(closed)

    def i4_enough_copies(self, closed: LedgerMetadata) -> None:
        """I4: each entry of a closed ledger has Qa copies on the members that metadata names."""
        assert closed.last_entry is not None
        for entry in range(closed.last_entry + 1):
            holders = self._holders(closed, entry)
            self.hold(
                len(holders) >= closed.ack_quorum,
                "I4",
                partial("{}:{} has copies on {} only".format, closed.ledger, entry, holders),
            )

    def _holders(self, metadata: LedgerMetadata, entry: int) -> list[str]:
        quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        members = metadata.segment_of(EntryId(entry)).members
        held = (metadata.ledger, entry)
        listed = [members[seat] for seat in quorum.write_order(entry)]
        return [who.bookie for who in listed if held in self.stored_by.get(who, ())]


def _drawn(metadata: LedgerMetadata) -> str:
    parts = [
        f"{part.first_entry}:" + ",".join(f"{m.bookie}/{m.incarnation[:4]}" for m in part.members)
        for part in metadata.segments
    ]
    end = "" if metadata.last_entry is None else f" end {metadata.last_entry}"
    return " ".join(parts) + end
