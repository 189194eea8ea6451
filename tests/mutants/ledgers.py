"""Bugs of writers, recoverers and readers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mutants.plant import Mutant, enter
from mutants.scenes import (
    CHANGES,
    CLUSTER,
    DARK,
    LONELY,
    NARROW,
    RELAY,
    STRIPED,
    TAKEOVER,
    UNFENCED,
)
from world.scenarios import SCENARIOS

from magnetar.bookie.contract import LastConfirmedRequest
from magnetar.bookie.ledger.errors import BookieUnavailable, LedgerFenced
from magnetar.bookie.ledger.reader import NEGATIVE
from magnetar.bookie.ledger.recovery import RecoveryState
from magnetar.bookie.ledger.writer import WriterState
from magnetar.metadata.errors import Contended, MetadataError, OutcomeUnknown, Unavailable
from magnetar.metadata.model import LedgerState
from magnetar.metadata.store import KEEP
from magnetar.protos.envelope import (
    ENVELOPE,
    BookieCode,
    Envelope,
    decode_envelope,
    encode_envelope,
)

if TYPE_CHECKING:
    from mutants.plant import Fired

    from magnetar.bookie.ledger.quorum import Quorum

LOST = frozenset({"I1", "I7", "I9", "I18"})
"""An acknowledged entry is not in the ledger, or cannot be read."""

WRITER = "magnetar.bookie.ledger.writer:LedgerWriter."
RECOVERY = "magnetar.bookie.ledger.recovery:LedgerRecovery."
RECOVERER = "magnetar.bookie.ledger.recovery_driver:_Recoverer."


# -- fencing and reading ---------------------------------------------------------------------------


def _reads_without_fence(right: Any, fired: Fired) -> Any:
    def request(**fields: Any) -> Any:
        fired()
        return right(**{**fields, "fence": False})

    return request


enter(
    Mutant(
        name="recovery reads do not fence",
        breaks="R4: an unfenced member may store an entry after it has denied having it",
        wrong={"magnetar.bookie.ledger.recovery_driver:ReadRequest": _reads_without_fence},
        caught_by=LOST,
        scene=UNFENCED,
        seeds=400,
    )
)


def _silence_is_fenced(right: Any, fired: Fired) -> Any:
    def on_fence_answer(self: Any, seat: int, code: BookieCode, *rest: Any) -> Any:
        if not code.definite:
            fired()
            code = BookieCode.NO_SUCH_LEDGER
        return right(self, seat, code, *rest)

    return on_fence_answer


enter(
    Mutant(
        name="unknown counts as fenced",
        breaks="R2: only bookies that answered after a durable fence count",
        wrong={RECOVERY + "on_fence_answer": _silence_is_fenced},
        caught_by=frozenset({"R2"}),
        scene=NARROW,
        seeds=100,
    )
)


def _unknown_is_absent(right: Any, fired: Fired) -> Any:
    def _verify(self: Any, entry: int, answer: Any) -> tuple[BookieCode, int]:
        code, length = right(self, entry, answer)
        if code is BookieCode.OK or code in NEGATIVE:
            return code, length
        fired()
        return BookieCode.NO_SUCH_ENTRY, 0

    return _verify


enter(
    Mutant(
        name="unknown counts as absent",
        breaks="§4.3: silence, errors and damage prove nothing",
        wrong={RECOVERY + "_verify": _unknown_is_absent},
        caught_by=LOST,
        scene=DARK,
        seeds=100,
    )
)


def _damage_is_absence(right: Any, fired: Fired) -> Any:
    def _verify(self: Any, entry: int, answer: Any) -> tuple[BookieCode, int]:
        code, length = right(self, entry, answer)
        if code in (BookieCode.CORRUPT, BookieCode.IO_ERROR):
            fired()
            code = BookieCode.NO_SUCH_ENTRY
        return code, length

    return _verify


enter(
    Mutant(
        name="a damaged copy counts as absent",
        breaks="§4.3: a bad checksum or an unreadable block is not a negative answer",
        wrong={RECOVERY + "_verify": _damage_is_absence},
        caught_by=LOST,
        scene=SCENARIOS["T36"],
        seeds=60,
    )
)


def _one_is_enough(right: Any, fired: Fired) -> Any:
    def absent(self: Quorum, negatives: int, entry: int) -> bool:
        if negatives & self.write_set(entry) and not right(self, negatives, entry):
            fired()
            return True
        return bool(right(self, negatives, entry))

    return absent


enter(
    Mutant(
        name="one negative answer ends a ledger",
        breaks="§4.3: Qw - Qa + 1 members of the write set must say no",
        wrong={"magnetar.bookie.ledger.quorum:Quorum.absent": _one_is_enough},
        caught_by=LOST,
        scene=NARROW,
        seeds=50,
    )
)


def _from_what_was_told(right: Any, fired: Fired) -> Any:
    def __init__(self: Any, metadata: Any, **rest: Any) -> None:
        right(self, metadata, **rest)
        if self.start >= 0:
            fired()
        self.start, self.next = -1, 0

    return __init__


def _nothing_assumed(right: Any, fired: Fired) -> Any:
    """Without this, the machine's assertion about the start of its segment would fail first."""

    def _begin_reading(self: Any, now: float) -> Any:
        stored = self.metadata
        if self.start + 1 < stored.last_segment.first_entry:
            self.metadata = replace(stored, segments=(replace(stored.last_segment, first_entry=0),))
        actions = right(self, now)
        self.metadata = stored
        return actions

    return _begin_reading


enter(
    Mutant(
        name="recovery starts at what bookies tell",
        breaks="R3: everything before the last segment was confirmed",
        wrong={
            RECOVERY + "__init__": _from_what_was_told,
            RECOVERY + "_begin_reading": _nothing_assumed,
        },
        caught_by=LOST | {"bug", "I4", "I12"},
        scene=TAKEOVER,
        seeds=200,
    )
)


# -- writing back, closing -------------------------------------------------------------------------


def _own_progress(right: Any, fired: Fired) -> Any:
    def _write_back(self: Any, entry: int, envelope: bytes, length: int, now: float) -> Any:
        found = decode_envelope(envelope)
        progress = self._writer.confirmed
        if progress > found.confirmed:
            fired()
            envelope = encode_envelope(
                ledger=found.ledger,
                entry=entry,
                confirmed=progress,
                length=length,
                payload=[found.payload],
            )
        return right(self, entry, envelope, length, now)

    return _write_back


enter(
    Mutant(
        name="write-backs call the recoverer's progress confirmed",
        breaks="R5, D15: entries that a recoverer wrote back are not confirmed before the close",
        wrong={RECOVERY + "_write_back": _own_progress},
        caught_by=frozenset({"I8", "I9"}),
        scene=STRIPED,
        seeds=300,
    )
)


def _without_waiting(right: Any, fired: Fired) -> Any:
    def _maybe_close(self: Any) -> Any:
        writer = self._writer
        if self.state is RecoveryState.READING and self.end not in (None, writer.confirmed):
            fired()
            writer.confirmed = self.end
        return right(self)

    return _maybe_close


enter(
    Mutant(
        name="recovery closes before its write-backs are stored",
        breaks="R7: first, Qa bookies hold everything up to the end",
        wrong={RECOVERY + "_maybe_close": _without_waiting},
        caught_by=LOST | {"I4"},
        scene=NARROW,
        seeds=100,
    )
)


def _told_length(right: Any, fired: Fired) -> Any:
    async def _read_length(self: Any, entry: int) -> None:
        best, length = -2, None
        for member in self.machine.asked:
            request = LastConfirmedRequest(
                incarnation=member.incarnation,
                ledger=self._metadata.ledger,
                master_key=self._metadata.master_key,
                fence=True,
            )
            try:
                answer = await self._services.pool.peer(member).last_confirmed(request)
            except BookieUnavailable:
                continue
            if answer.code is BookieCode.OK and answer.confirmed > best:
                best, length = answer.confirmed, answer.length
                if answer.last_entry != entry:
                    fired()
        if length is None:
            await right(self, entry)
        else:
            self._carry_out(self.machine.on_length(length))

    return _read_length


enter(
    Mutant(
        name="the length is that of the last confirmed answer",
        breaks="R7, D16: the length is that of the last entry itself",
        wrong={RECOVERER + "_read_length": _told_length},
        caught_by=frozenset({"I12"}),
        scene=NARROW,
        seeds=300,
    )
)


def _recorded_at_once(right: Any, fired: Fired) -> Any:
    async def _find_spares(self: Any, seats: tuple[int, ...]) -> None:
        machine = self.machine
        before = machine._segments[-1]
        await right(self, seats)
        private = machine._segments[-1]
        if private == before:
            return

        def change(stored: Any) -> Any:
            kept = [part for part in stored.segments if part.first_entry < private.first_entry]
            return replace(stored, segments=(*kept, private))

        fired()
        records = self._services.records
        with suppress(MetadataError):
            await records._update(
                self._metadata.ledger,
                lambda stored: change(stored) if stored.state is LedgerState.IN_RECOVERY else KEEP,
            )

    return _find_spares


def _merged(right: Any, fired: Fired) -> Any:
    def close_metadata(self: Any, stored: Any, close: Any) -> Any:
        first = close.segments[0].first_entry
        kept = [part for part in stored.segments if part.first_entry < first]
        return replace(
            stored,
            state=LedgerState.CLOSED,
            segments=(*kept, *close.segments),
            last_entry=close.last,
            length=close.length,
        )

    return close_metadata


enter(
    Mutant(
        name="a recoverer records its ensemble change",
        breaks="R6: the next recoverer would ask bookies that never held the data",
        wrong={
            RECOVERER + "_find_spares": _recorded_at_once,
            RECOVERY + "close_metadata": _merged,
        },
        caught_by=LOST | {"I4", "I6", "R2"},
        scene=RELAY,
        seeds=600,
    )
)


def _at_what_was_appended(right: Any, fired: Fired) -> Any:
    def seal(self: Any) -> Any:
        if self.appended > self.confirmed:
            fired()
        self.confirmed, self.confirmed_length = self.appended, self.length
        return right(self)

    return seal


enter(
    Mutant(
        name="the writer closes at the last entry that it appended",
        breaks="§2.5: the end is the last confirmed entry",
        wrong={WRITER + "seal": _at_what_was_appended},
        caught_by=LOST | {"I4"},
        scene=LONELY,
        seeds=200,
    )
)


# -- ensemble changes ------------------------------------------------------------------------------


def _used_before_recorded(right: Any, fired: Fired) -> Any:
    async def _record(self: Any, first: int, members: Any) -> None:
        known, writer = self.metadata, self._writer
        self._on_recorded(known.with_ensemble(first, members))
        fired()
        try:
            with suppress(Unavailable, Contended, OutcomeUnknown):
                await self._services.records.change_ensemble(
                    known, first, members, wanted=lambda: writer.writing
                )
        except LedgerFenced as error:
            self._give_up(error)

    return _record


enter(
    Mutant(
        name="an ensemble is used before it is recorded",
        breaks="W1: a recoverer would ask the old ensemble",
        wrong={"magnetar.bookie.ledger.appender:LedgerAppender._record": _used_before_recorded},
        caught_by=LOST | {"I6"},
        scene=TAKEOVER,
        seeds=100,
    )
)


def _completed_midway(right: Any, fired: Fired) -> Any:
    def on_recorded(self: Any, now: float) -> Any:
        first = self.confirmed + 1
        self.state = WriterState.OPEN
        early = self._advance()  # before the acks of replaced members were dropped
        self.state = WriterState.CHANGING
        if early:
            fired()
        actions = right(self, now)
        self.segment_first = first
        return [*early, *actions]

    return on_recorded


enter(
    Mutant(
        name="entries are confirmed in the middle of an ensemble change",
        breaks="W3: first all acks of replaced members are dropped, then entries are confirmed",
        wrong={WRITER + "on_recorded": _completed_midway},
        caught_by=LOST | {"I4", "I6"},
        scene=CHANGES,
        seeds=400,
    )
)


def _confirms_during_change(right: Any, fired: Fired) -> Any:
    def _advance(self: Any) -> Any:
        if self.state is not WriterState.CHANGING:
            return right(self)
        before = self.confirmed
        self.state = WriterState.OPEN
        actions = right(self)
        self.state = WriterState.CHANGING
        if self.confirmed > before:
            fired()
        return actions

    return _advance


def _keeps_its_first(right: Any, fired: Fired) -> Any:
    """Without this, the shell would notice that the segment begins elsewhere."""

    def on_recorded(self: Any, now: float) -> Any:
        actions = right(self, now)
        self.segment_first = self.first_proposed
        return actions

    return on_recorded


def _notes_its_first(right: Any, fired: Fired) -> Any:
    def on_spares_found(self: Any, spares: Any) -> Any:
        self.first_proposed = self.confirmed + 1
        return right(self, spares)

    return on_spares_found


enter(
    Mutant(
        name="entries are confirmed during an ensemble change",
        breaks="W2: the new segment begins after the last entry that was confirmed before",
        wrong={
            WRITER + "_advance": _confirms_during_change,
            WRITER + "on_recorded": _keeps_its_first,
            WRITER + "on_spares_found": _notes_its_first,
        },
        caught_by=LOST | {"I4", "I6"},
        scene=CHANGES,
        seeds=400,
    )
)


def _listens_to_the_replaced(right: Any, fired: Fired) -> Any:
    def _take_seats(self: Any) -> None:
        before = dict(self._seats)
        for stream in before:
            if stream not in self._streams:
                stream.detach(self.ledger)
        right(self)
        for stream, seat in before.items():
            if stream not in self._seats:
                stream.attach(self.ledger, self)
                self._seats[stream] = seat
                fired()

    return _take_seats


enter(
    Mutant(
        name="acks of replaced bookies count",
        breaks="T13: acks of bookies without a seat are ignored",
        wrong={
            "magnetar.bookie.ledger.appender:LedgerAppender._take_seats": _listens_to_the_replaced
        },
        caught_by=LOST | {"I4", "I6", "bug"},
        scene=TAKEOVER,
        seeds=200,
    )
)


def _keeps_acks_of_the_seat(right: Any, fired: Fired) -> Any:
    def on_recorded(self: Any, now: float) -> Any:
        acked = {entry: add.acked for entry, add in self._pending.items()}
        if any(bits & self._wanted for bits in acked.values()):
            fired()
        self._send_missing, send = list, self._send_missing
        actions = right(self, now)
        self._send_missing = send
        for entry, bits in acked.items():
            if entry in self._pending:
                self._pending[entry].acked = bits
        return [*actions, *self._send_missing(), *self._advance()]

    return on_recorded


enter(
    Mutant(
        name="acks count for the seat, not for the member",
        breaks="W3: an ack counts only for the member that sent it, not for a later member",
        wrong={WRITER + "on_recorded": _keeps_acks_of_the_seat},
        caught_by=LOST | {"I4", "I6"},
        scene=CHANGES,
        seeds=400,
    )
)


def _forgets_to_send(right: Any, fired: Fired) -> Any:
    def _send_missing(self: Any) -> Any:
        if self.confirmed < self.appended:
            fired()
        return []

    return _send_missing


enter(
    Mutant(
        name="pending entries are not sent to a new member",
        breaks="W5: an entry is sent to each member that has neither its ack nor an add pending",
        wrong={WRITER + "_send_missing": _forgets_to_send},
        caught_by=frozenset({"bug"}),  # only the machine's own check notices: no entry is lost
        scene=TAKEOVER,
        seeds=50,
    )
)


def _one_ack_fewer(right: Any, fired: Fired) -> Any:
    def __init__(self: Any, quorum: Quorum, *rest: Any, **named: Any) -> None:
        if quorum.ack_quorum > 1:
            fired()
            quorum = replace(quorum, ack_quorum=quorum.ack_quorum - 1)
        right(self, quorum, *rest, **named)

    return __init__


enter(
    Mutant(
        name="an entry is confirmed with one ack fewer than Qa",
        breaks="G1: Qa bookies have the entry on disk",
        wrong={WRITER + "__init__": _one_ack_fewer},
        caught_by=frozenset({"I6"}),
        scene=NARROW,
        seeds=20,
    )
)


# -- reading, ids ----------------------------------------------------------------------------------


def _unverified(right: Any, fired: Fired) -> Any:
    def decode(envelope: bytes) -> Envelope:
        try:
            return decode_envelope(envelope)
        except ValueError:
            fired()
            _, ledger, entry, confirmed, length = ENVELOPE.unpack_from(envelope)
            return Envelope(ledger, entry, confirmed, length, memoryview(envelope)[ENVELOPE.size :])

    return decode


enter(
    Mutant(
        name="checksums are not verified",
        breaks="§3.1: a damaged copy does not count as a copy",
        wrong={
            "magnetar.bookie.ledger.reader:decode_envelope": _unverified,
            "magnetar.bookie.ledger.recovery:decode_envelope": _unverified,
        },
        caught_by=frozenset({"I3"}),
        scene=CLUSTER,
        seeds=200,
    )
)


def _takes_the_block_anyway(right: Any, fired: Fired) -> Any:
    async def _fetch(self: Any, newer_than: int) -> None:
        store = self._store
        put = store.put

        async def careless(path: str, value: bytes, *, expected: int) -> Any:
            try:
                return await put(path, value, expected=expected)
            except MetadataError:
                fired()
                return expected + 1

        store.put = careless
        try:
            await right(self, newer_than)
        finally:
            del store.put

    return _fetch


enter(
    Mutant(
        name="a block of ids is used although another process took it",
        breaks="§7: an id is never issued twice",
        wrong={"magnetar.metadata.ids:LedgerIds._fetch": _takes_the_block_anyway},
        caught_by=frozenset({"bug", "I5", "I2"}),
        scene=CLUSTER,
        seeds=300,
    )
)
