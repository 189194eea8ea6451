"""Recovery: closes a ledger in place of its writer. It decides which bookies to ask, and what their
answers prove.

No I/O, no clock, no tasks: feed events in, and carry out the returned actions in order.

Theory. The ledger's stored state is IN_RECOVERY before the recovery begins. So the former writer
can change neither the ensemble nor the end. The last stored ensemble is now *frozen*, and the
recovery asks its seats.

(1) *Fence* the frozen ensemble, until fewer than Qa members of every write set can be unfenced.
From then on no other writer can confirm an entry. Each answer names an entry that the seat knows
to be confirmed; the highest one counts. All entries before the last segment were confirmed too.

(2) *Read* from the next entry on; each read also fences. One valid copy is enough. The recovery
writes the entry back to a whole write set, and counts it as recovered once Qa members hold it. If
so many members answer "no" that fewer than Qa others remain, the entry was never confirmed. The
ledger then ends before this entry. If the whole write set has answered and neither holds, *abort*.
A later attempt loses nothing, but a wrong end loses data.

(3) *Close* at that end, with the length in the last entry's envelope.

A recovery can be repeated, and several can run at once. Each writes an entry back byte for byte. So
all copies stay equal, and the "confirmed" in the entry is still what the writer knew. The recovery
replaces members that fail meanwhile, but only in a private copy of the last segment. Other
processes do not see this copy before the close.

Invariants (see `check`):

1. Until enough seats are fenced, the recovery concludes nothing about any entry.
2. It concludes in the order of entries. It writes an entry back, or ends the ledger before the
   entry, only after it has sent all earlier entries from `start` + 1 on for write-back.
3. The end is at least `start`. `start` is at least the last segment's first entry - 1.
4. The close is requested once, when every entry up to the end has its ack quorum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.quorum import Quorum, Seats, seat_numbers
from magnetar.bookie.ledger.reader import NEGATIVE
from magnetar.bookie.ledger.writer import (
    Action as WriterAction,
)
from magnetar.bookie.ledger.writer import (
    Confirm,
    Fail,
    FindSpares,
    LedgerWriter,
    Missed,
    RecordEnsemble,
    SendAdd,
    WriterLimits,
)
from magnetar.metadata.model import EntryId, LedgerMetadata, LedgerState, Member, Segment
from magnetar.protos.envelope import (
    ADD,
    ENVELOPE,
    RECOVERY,
    BookieCode,
    EnvelopeDamaged,
    ReadAnswer,
    decode_envelope,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

READ_AHEAD_ENTRIES: Final = 2_048
"""The number of entries beyond the last conclusion that the recovery reads from a seat. A writer
leaves about 16 MiB of entries in flight: with entries of 1 KB, eight times this number."""

WRITE_BACK_BYTES_MAX: Final = 16 << 20
"""The limit of bytes in flight to bookies. At the limit the recovery begins no more reads. After a
broker's crash the recoveries of its topics run concurrently. A hundred recoveries fit into
memory."""

FOUND_BYTES_MAX: Final = 16 << 20
"""The limit of bytes found beyond the first entry without a conclusion. In a striped ledger some
seats continue with later entries while other seats are asked for this entry. At the limit the
recovery reads only this entry."""

_FENCED: Final = NEGATIVE | {BookieCode.OK}


@dataclass(frozen=True, slots=True)
class Fence:
    """Fence this seat of the frozen ensemble. Also ask the seat for the last entry that it knows to
    be confirmed."""

    seat: int


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Read these entries from this seat of the frozen ensemble, and fence the seat. Pass the
    answers to `on_answers`, then the end of the read to `on_read_end`. A seat has one read at a
    time."""

    seat: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ReadLength:
    """Read this confirmed entry from any replica, and pass the length in its envelope to
    `on_length`."""

    entry: int


@dataclass(frozen=True, slots=True)
class Close:
    """Record the end. `last`: the last entry; -1: the ledger is empty. `length`: the payload bytes
    of all entries. `segments`: the segments from the frozen last segment on."""

    last: int
    length: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Leave the ledger IN_RECOVERY and try again later."""

    why: str


Action = Fence | ReadRange | ReadLength | SendAdd | FindSpares | Close | Abort
"""The seats in SendAdd and FindSpares are seats of `LedgerRecovery.ensemble`."""


class RecoveryState(Enum):
    FENCING = "fencing"
    READING = "reading"  # entries are read and written back
    MEASURING = "measuring"  # the last entry is known, but not the ledger's length
    DECIDED = "decided"  # Close was returned
    ABORTED = "aborted"


@dataclass(slots=True)
class _SeatReads:
    """The reads of one seat of the frozen ensemble."""

    due: int  # the first entry without an answer
    asked: int | None = None  # first entry of the running read; None: none is running
    refused: int = -1  # the last entry that the seat did not provide


class LedgerRecovery:
    """One attempt to close one ledger. `metadata`: the stored metadata, in the state
    IN_RECOVERY."""

    def __init__(self, metadata: LedgerMetadata, *, limits: WriterLimits) -> None:
        assert metadata.state is LedgerState.IN_RECOVERY
        self.state = RecoveryState.FENCING
        self.metadata = metadata
        self.quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self.asked = metadata.last_segment.members  # frozen: the members to fence and read
        self.start = metadata.last_segment.first_entry - 1  # the last entry known to be confirmed
        self.next = self.start + 1  # the first entry without a conclusion
        self.end: int | None = None  # None: not decided yet
        self.fenced: Seats = 0
        self._limits = limits
        self._fence_answers: Seats = 0
        self._reads = [_SeatReads(0) for _ in self.asked]
        self._found: dict[int, tuple[bytes, int]] = {}  # envelope, length; from `next` on
        self._found_bytes = 0  # the size of these envelopes
        self._negatives: dict[int, Seats] = {}
        self._answers: dict[int, Seats] = {}  # the seats that gave any answer
        self._trouble: dict[Member, BookieCode] = {}  # the last failed answer
        # The length in the last entry that was written back; None: nothing was written back.
        self._length: int | None = None
        self._segments = [metadata.last_segment]  # the private continuation of the stored segments
        self._missed: list[Missed] = []
        self._writer: LedgerWriter | None = None  # None: still fencing

    # -- events ----------------------------------------------------------------------------------

    def begin(self) -> list[Action]:
        return [Fence(seat) for seat in range(len(self.asked))]

    def on_fence_answer(
        self, seat: int, code: BookieCode, confirmed: int, now: float
    ) -> list[Action]:
        """Take the answer to a Fence. `confirmed` counts only if the code is OK. The seat counts as
        fenced only if the code is OK or one of the two explicit negatives."""
        if self.state is not RecoveryState.FENCING:
            return []
        self._fence_answers |= 1 << seat
        if code in _FENCED:
            self.fenced |= 1 << seat
        else:
            self._trouble[self.asked[seat]] = code
        if code is BookieCode.OK:
            self.start = max(self.start, confirmed)
        if self.quorum.covered(self.fenced):
            return self._begin_reading(now)
        if self._fence_answers.bit_count() == len(self.asked):
            return self._abort("too few bookies could be fenced")
        return []

    def on_answers(self, seat: int, answers: Iterable[ReadAnswer], now: float) -> list[Action]:
        """Take a part of the seat's answer to its ReadRange."""
        if self.state is not RecoveryState.READING:
            return []
        for answer in answers:
            self._note(seat, answer)
        return self._go_on(now)

    def on_read_end(self, seat: int, code: BookieCode, now: float) -> list[Action]:
        """Take the end of the seat's read. `code`: OK, or the reason why the read broke off."""
        if self.state is not RecoveryState.READING:
            return []
        reads = self._reads[seat]
        if code is BookieCode.OK and reads.due == reads.asked:
            code = BookieCode.CORRUPT  # an answer has at least one entry
        reads.asked = None
        if code is not BookieCode.OK:
            self._note(seat, ReadAnswer(reads.due, code, b""))
        return self._go_on(now)

    def on_length(self, length: int | None) -> list[Action]:
        """Take the length in the entry that ReadLength named. None: no replica could be read."""
        if self.state is not RecoveryState.MEASURING:
            return []
        if length is None:
            return self._abort(f"no replica of the last entry {self.end} can be read")
        self._length = length
        return self._close()

    def on_acks(self, seat: int, entries: Iterable[int], now: float) -> list[Action]:
        writer = self._writer
        return [] if writer is None else self._go_on(now, writer.on_acks(seat, entries))

    def on_add_failed(self, seat: int, code: BookieCode, now: float) -> list[Action]:
        self._trouble[self.ensemble[seat]] = code
        writer = self._writer
        return [] if writer is None else self._go_on(now, writer.on_add_failed(seat, code))

    def on_spares_found(self, spares: Mapping[int, Member], now: float) -> list[Action]:
        """Take the answer to FindSpares. The new ensemble stays private until the close."""
        writer = self._writer
        return [] if writer is None else self._go_on(now, writer.on_spares_found(spares))

    def on_tick(self, now: float) -> list[Action]:
        if self._writer is None:
            return []
        return self._go_on(now, self._writer.on_tick(now))

    # -- facts -----------------------------------------------------------------------------------

    @property
    def ensemble(self) -> tuple[Member, ...]:
        """The members to which entries are written back."""
        return self.asked if self._writer is None else self._writer.ensemble

    @property
    def failed(self) -> Seats:
        """The seats of `ensemble` to which nothing is written any more."""
        return 0 if self._writer is None else self._writer.failed

    @property
    def recovered(self) -> int:
        """Number of entries that were sent for write-back."""
        return 0 if self._writer is None else self.next - self.start - 1

    @property
    def missed(self) -> list[Missed]:
        """The written-back entries that members of the closed ledger may lack."""
        return self._missed + ([] if self._writer is None else self._writer.missed)

    @property
    def owed(self) -> dict[Member, list[int]]:
        """The written-back entries whose acks are outstanding, keyed by member."""
        owed = {} if self._writer is None else self._writer.owed
        return {self.ensemble[seat]: entries for seat, entries in owed.items()}

    def parts(self, entry: int) -> tuple[bytes, bytes] | None:
        """Return the bytes to send for SendAdd. None: the entry was released."""
        return None if self._writer is None else self._writer.parts(entry)

    def close_metadata(self, stored: LedgerMetadata, close: Close) -> LedgerMetadata:
        """Return the metadata to store instead of `stored`, which is still IN_RECOVERY. The private
        segments replace the last segment of `stored`. The sealed segments of `stored` stay, because
        a repair may have moved their replicas."""
        assert stored.state is LedgerState.IN_RECOVERY
        assert stored.last_segment == self.metadata.last_segment, "the last segment was changed"
        return replace(
            stored,
            state=LedgerState.CLOSED,
            segments=(*stored.segments[:-1], *close.segments),
            last_entry=EntryId(close.last),
            length=close.length,
        )

    def describe(self) -> str:
        lines = [
            f"{self.state.value}: start {self.start}, next {self.next}, end {self.end},"
            f" fenced seats {list(seat_numbers(self.fenced))}"
        ]
        if self._writer is not None:
            lines.append(self._writer.describe())
        return "\n".join(lines)

    def check(self) -> None:
        assert self.start >= self.metadata.last_segment.first_entry - 1
        assert self.next >= self.start + 1 or self._writer is None
        if self._writer is None:
            assert self.state in (RecoveryState.FENCING, RecoveryState.ABORTED)
            return
        self._writer.check()
        assert self.quorum.covered(self.fenced)
        assert self.end is None or self.end == self.next - 1
        assert self._writer.appended == self.next - 1
        assert all(entry >= self.next for entry in self._found)
        assert self._found_bytes == sum(len(envelope) for envelope, _ in self._found.values())
        if self.state in (RecoveryState.MEASURING, RecoveryState.DECIDED):
            assert self.end == self._writer.confirmed

    # -- mechanics -------------------------------------------------------------------------------

    def _is_reading(self) -> bool:
        return self.state is RecoveryState.READING

    def _begin_reading(self, now: float) -> list[Action]:
        self.state = RecoveryState.READING
        self.next = self.start + 1
        self._reads = [_SeatReads(self.next) for _ in self.asked]
        self._writer = LedgerWriter(
            self.quorum,
            self.asked,
            limits=replace(self._limits, change_delay_s=0.0),
            segment_first=self.metadata.last_segment.first_entry,
            confirmed=self.start,
            now=now,
        )
        return self._go_on(now)

    def _note(self, seat: int, answer: ReadAnswer) -> None:
        """Record one answer about the entry that is due from this seat."""
        reads = self._reads[seat]
        entry = reads.due
        reads.due = entry + 1
        if entry < self.next:
            return  # already concluded
        code, length = self._verify(entry, answer)
        self._answers[entry] = self._answers.get(entry, 0) | 1 << seat
        if code is BookieCode.OK:
            if entry not in self._found:
                self._found[entry] = answer.envelope, length
                self._found_bytes += len(answer.envelope)
            return
        reads.refused = entry
        if code in NEGATIVE:
            self._negatives[entry] = self._negatives.get(entry, 0) | 1 << seat
        else:
            self._trouble[self.asked[seat]] = code

    def _verify(self, entry: int, answer: ReadAnswer) -> tuple[BookieCode, int]:
        """Return the answer's code and the length in the envelope. An OK without a sound envelope
        of `entry` becomes CORRUPT, and so does a refusal of another entry."""
        if answer.entry == entry and answer.code is not BookieCode.OK:
            return answer.code, 0
        try:
            envelope = decode_envelope(answer.envelope)
        except EnvelopeDamaged:
            return BookieCode.CORRUPT, 0
        if (envelope.ledger, envelope.entry) != (self.metadata.ledger, entry):
            return BookieCode.CORRUPT, 0
        return BookieCode.OK, envelope.length

    def _go_on(self, now: float, actions: Sequence[WriterAction] = ()) -> list[Action]:
        """Carry out or pass on the writer's `actions`, and return all actions that follow from the
        present state."""
        if not self._is_reading():
            return []
        assert self._writer is not None
        result: list[Action] = []
        for action in actions:
            match action:
                case Fail(code):
                    return self._abort(f"entries cannot be written back: {code.name}")
                case Confirm():
                    pass  # `_maybe_close` reads `writer.confirmed`
                case RecordEnsemble(first, members):
                    if self._segments[-1].first_entry == first:
                        self._segments.pop()
                    self._segments.append(Segment(EntryId(first), members))
                    return self._go_on(now, self._writer.on_recorded(now))
                case Missed():
                    self._missed.append(action)
                case SendAdd() | FindSpares():
                    result.append(action)
        result += self._conclude(now)
        if self._is_reading():
            result += self._writer.maybe_find()
            if self._writer.stuck:
                return self._abort("too few bookies accept the entries to write back")
        result += self._maybe_close() or self._ask()
        return result

    def _conclude(self, now: float) -> list[Action]:
        """Draw conclusions in order, as far as the answers allow."""
        sends: list[Action] = []
        while self.end is None:
            entry = self.next
            found = self._found.pop(entry, None)
            negatives, answers = self._negatives.get(entry, 0), self._answers.get(entry, 0)
            if found is not None:
                self._found_bytes -= len(found[0])
                sends += self._write_back(entry, *found, now)
                self._negatives.pop(entry, None)
                self._answers.pop(entry, None)
                self.next = entry + 1
            elif self.quorum.absent(negatives, entry):
                self.end = entry - 1
                self._found.clear()
                self._found_bytes = 0
            elif not self.quorum.write_set(entry) & ~answers:
                return self._abort(f"entry {entry} is neither found nor proven absent")
            else:
                break
        return sends

    def _write_back(self, entry: int, envelope: bytes, length: int, now: float) -> list[Action]:
        """Write the found bytes unchanged to the whole write set of `ensemble`."""
        assert self._writer is not None
        size = len(envelope) - ENVELOPE.size
        head = ADD.pack(RECOVERY, len(envelope), self.metadata.master_key)
        targets = self._writer.append(size, (head, envelope), now)
        assert self._writer.appended == entry
        self._length = length
        return [SendAdd(entry, seat) for seat in targets]

    def _ask(self) -> list[Action]:
        """Return a read for each idle seat that may know more entries."""
        assert self._writer is not None
        asks: list[Action] = []
        if self.end is not None or not self._is_reading():
            return asks
        if self._writer.in_flight_bytes >= WRITE_BACK_BYTES_MAX:
            return asks
        ahead = READ_AHEAD_ENTRIES if self._found_bytes < FOUND_BYTES_MAX else 1
        for seat, reads in enumerate(self._reads):
            if reads.asked is not None or reads.refused >= self.next:
                # A seat that did not provide an entry is asked for later entries once another seat
                # has provided that entry.
                continue
            run = self.quorum.run_of(seat, max(reads.due, self.next))
            limit = self.next + ahead
            if run.start < limit:
                reads.asked = reads.due = run.start
                asks.append(ReadRange(seat, run.start, min(run.stop, limit) - 1))
        return asks

    def _maybe_close(self) -> list[Action]:
        assert self._writer is not None
        if not self._is_reading() or self.end != self._writer.confirmed:
            return []
        if self.end == -1:
            self._length = 0
        if self._length is None:
            self.state = RecoveryState.MEASURING
            return [ReadLength(self.end)]
        return self._close()

    def _close(self) -> list[Action]:
        assert self.end is not None
        assert self._length is not None
        self.state = RecoveryState.DECIDED
        return [Close(self.end, self._length, tuple(self._segments))]

    def _abort(self, why: str) -> list[Action]:
        self.state = RecoveryState.ABORTED
        told = [f"{member.bookie}: {code.name}" for member, code in self._trouble.items()]
        return [Abort(f"{why} ({', '.join(told)})" if told else why)]
