"""The cursor of one subscription: its acknowledgements and its backlog.

Acknowledgements and redelivery counts take effect in memory at once. The journal then makes those
of a durable cursor durable. A reset of a durable cursor takes effect when it is durable.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from magnetar.broker.cursor import backlog
from magnetar.broker.cursor import format as stored
from magnetar.broker.cursor.acks import Start, ack_set_bits, ack_set_words
from magnetar.broker.cursor.journal import Waiting
from magnetar.broker.cursor.redeliveries import Redeliveries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from magnetar.broker.cursor.acks import AckedRange, AckState
    from magnetar.broker.cursor.backlog import Backlog
    from magnetar.broker.cursor.journal import CursorJournal, Receipt
    from magnetar.broker.log.chain import Chain
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position


class Cursor:
    """Made by `Cursors`.

    A parameter `done` of a method is called once, with one of these values:

    - None: the acknowledgement is durable.
    - LogFenced, LogClosed or another LogError: the acknowledgement may be durable or lost.
    - TooManyReceipts: the journal makes the acknowledgement durable, but does not report when.
    - SubscriptionNotFound: the subscription was deleted.

    For a non-durable cursor, the method calls `done(None)` before it returns.
    """

    __slots__ = (
        "_acked",
        "_journal",
        "_known_mark",
        "_log",
        "_partly",
        "_state",
        "durable_mark",
        "name",
        "number",
        "properties",
        "redeliveries",
    )

    def __init__(
        self,
        name: str,
        topic_log: Log,
        state: AckState,
        *,
        number: int,
        properties: Mapping[str, str],
        journal: CursorJournal | None,
    ) -> None:
        self.name = name
        self.properties = properties
        self.number = number  # the cursor's number in the journal's records; a reset changes it
        self._log = topic_log
        self._state = state
        self._journal = journal  # None: not durable
        self.redeliveries = Redeliveries(self._note)
        self.durable_mark = state.mark_delete  # the next owner finds this mark or a later one
        # The state at the last delta or snapshot for the journal, and the changes since then:
        self._known_mark = state.mark_delete
        self._acked: dict[int, array[int]] = {}  # acknowledged entries by ledger
        self._partly: dict[Position, None] = {}

    # ---- state -----------------------------------------------------------------------------------

    @property
    def durable(self) -> bool:
        return self._journal is not None

    @property
    def mark_delete(self) -> Position:
        """Everything up to and including this position is acknowledged. Some of these
        acknowledgements may not be durable yet."""
        return self._state.mark_delete

    def is_acked(self, position: Position) -> bool:
        return self._state.is_acked(position)

    def is_open(self, position: Position) -> bool:
        """Return whether `position` is an unacknowledged entry of the log."""
        return self._state.is_open(position)

    @property
    def has_partial(self) -> bool:
        """True when a batch is partly acknowledged."""
        return bool(self._state.partial)

    @property
    def partial_bytes(self) -> int:
        """The approximate memory in bytes of the ack sets of partly acknowledged batches."""
        return self._state.partial_bytes

    def is_partly_acked(self, position: Position) -> bool:
        """Return whether the cursor has an ack set for this batch."""
        return self._state.remaining(position) is not None

    def batch_ack_set(self, position: Position) -> tuple[int, ...] | None:
        """Return the unacknowledged messages of a batch, as signed 64-bit words. None: the cursor
        has no ack set for this batch."""
        remaining = self._state.remaining(position)
        return None if remaining is None else ack_set_words(remaining)

    def first_unacked(self, position: Position) -> Position:
        """Return the first unacknowledged entry at or after `position`. If there is no such entry,
        return the position after the last entry of the log."""
        return self._state.first_unacked(position)

    def nth_unacked(self, number: int) -> Position | None:
        """Return the unacknowledged entry with this number, counted from 1. None: there are
        fewer unacknowledged entries."""
        return self._state.nth_unacked(number)

    def ranges(self) -> Iterator[AckedRange]:
        """Return the ranges of acknowledged entries after the mark, in order."""
        return self._state.ranges()

    def holes(self) -> tuple[int, int]:
        """Return the number of `ranges`, and the size of their bitmaps in bytes. A snapshot of them
        may be smaller. Costs 50 us for a million bits."""
        count = size = 0
        for _, _, bits in self._state.bitmap_slices():
            number = int.from_bytes(bits, "little")
            count += (number & ~(number << 1)).bit_count()
            size += len(bits)
        return count, size

    @property
    def backlog_entries(self) -> int:
        """The number of unacknowledged entries."""
        return self.backlog_nowait().entries

    def backlog_nowait(self) -> Backlog:
        """Return the backlog without a read of entries. The number of messages may be an estimate:
        see `Backlog.exact`."""
        return backlog.estimate(self._log.chain, self._state)

    @property
    def backlog_bytes(self) -> int:
        """The bytes of the unacknowledged entries, estimated without a read."""
        log = self._log
        return backlog.size(log.chain, self._state, stored_bytes=log.stored_bytes)

    async def backlog(self) -> Backlog:
        """Return the exact backlog, or an estimate if an exact count takes more than 100 reads.
        Raises ReadFailed."""
        return await backlog.count(self._log, self._state)

    # ---- acknowledging ---------------------------------------------------------------------------

    def acknowledge(self, positions: Sequence[Position], done: Receipt | None = None) -> int:
        """Acknowledge whole entries. Ignores entries that are not in the log. Returns the number of
        newly acknowledged entries."""
        on_ack, durable, acked = self._state.on_ack, self.durable, self._acked
        count = 0
        for position in positions:
            if on_ack(position):
                count += 1
                if durable:  # as in `_note_entry`, without the cost of a call for each entry
                    entries = acked.get(position.ledger)
                    if entries is None:
                        entries = acked[position.ledger] = array("I")
                    entries.append(position.entry)
        if self.redeliveries:
            for position in positions:
                self.redeliveries.pop(position)
        self._note(done)
        return count

    def acknowledge_batch(
        self, position: Position, ack_set: Sequence[int], done: Receipt | None = None
    ) -> bool:
        """Acknowledge the messages of a batch that are not in `ack_set`. Returns whether the whole
        entry is acknowledged now."""
        self._acknowledge_part(position, ack_set)
        acked = self._state.is_acked(position)
        if acked:
            self.redeliveries.pop(position)
        self._note(done)
        return acked

    def acknowledge_cumulative(
        self, position: Position, ack_set: Sequence[int] = (), done: Receipt | None = None
    ) -> bool:
        """Acknowledge everything up to and including `position`, except the messages in `ack_set`,
        which belong to the batch at `position`. Returns whether the mark moved to `position` (with
        `ack_set`: to the entry before `position`)."""
        state = self._state
        if not any(ack_set):
            moved = state.on_ack_cumulative(position)
        else:
            moved = state.on_ack_cumulative(self._log.chain.previous_position(position))
            self._acknowledge_part(position, ack_set)
        if self.redeliveries:
            self.redeliveries.pop_through(state.mark_delete)
        self._note(done)
        return moved

    def limit_batch(self, position: Position, messages: int) -> None:
        """Clear the bits beyond the first `messages` bits in the ack set of a batch, because the
        batch has this number of messages."""
        if self._state.on_batch_size(position, messages):
            self._note_part(position)
            self._note()

    async def reset(self, start: Position, remaining: int = 0) -> None:
        """Move the cursor to the first entry at or after `start` (EARLIEST, LATEST, or an entry).
        All entries before this entry become acknowledged; this and all later entries become
        unacknowledged. `remaining`: the unacknowledged messages of the batch at `start`, as bits;
        0: all its messages are unacknowledged.

        When the call returns, the move of a durable cursor is durable. The reset overrides
        acknowledgements that arrive during the call. Raises SubscriptionNotFound, TopicFull (only
        with `remaining`), or the error that ended the journal (LogFenced, LogClosed, or another
        LogError).
        """
        target = Start(mark_before(self._log.chain, start), remaining)
        if self._journal is None:
            self.restart(target, 0)
            return
        moved = Waiting()
        self._journal.restart(self, target, moved)
        await moved.wait()

    async def flush(self) -> None:
        """Wait until all earlier acknowledgements are durable. Raises the errors that the class's
        docstring lists for `done`."""
        flushed = Waiting()
        self._note(flushed)
        await flushed.wait()

    def _acknowledge_part(self, position: Position, ack_set: Sequence[int]) -> None:
        # Check the position first, because parsing the bits costs more.
        state = self._state
        if state.is_open(position) and state.on_ack_batch_index(position, ack_set_bits(ack_set)):
            self._note_part(position)

    def _note_entry(self, position: Position) -> None:
        if self._journal is not None:
            entries = self._acked.get(position.ledger)
            if entries is None:
                entries = self._acked[position.ledger] = array("I")
            entries.append(position.entry)

    def _note_part(self, position: Position) -> None:
        if self._state.is_acked(position):  # the last messages of the entry are acknowledged now
            self._note_entry(position)
        elif self._journal is not None:
            self._partly[position] = None

    def _note(self, done: Receipt | None = None) -> None:
        if self._journal is not None:
            self._journal.note(self, done)
        elif done is not None:
            done(None)

    # ---- for the journal and the set of cursors --------------------------------------------------

    @property
    def changed(self) -> bool:
        """True when the cursor has changes for the journal."""
        moved = self._state.mark_delete != self._known_mark
        acked = bool(self._acked) or bool(self._partly)
        return moved or acked or self.redeliveries.has_unstored

    def take_delta(self) -> list[bytes]:
        mark = self._state.mark_delete
        acked = {}
        for ledger, entries in self._acked.items():
            if ledger == mark.ledger and min(entries) <= mark.entry:
                entries = array("I", [entry for entry in entries if entry > mark.entry])
            if entries and ledger >= mark.ledger:
                acked[ledger] = entries
        batches = [
            (position, remaining)
            for position in self._partly
            if (remaining := self._state.remaining(position)) is not None
        ]
        moved = None if mark == self._known_mark else mark
        self._forget_changes()
        return stored.delta(
            self.number,
            mark=moved,
            acked=acked,
            batches=batches,
            redeliveries=self.redeliveries.take_unstored(),
        )

    def snapshot(self) -> list[bytes]:
        self._forget_changes()
        return stored.snapshot(self.number, self._state, self.redeliveries.all_counts())

    def on_stored(self, mark: Position) -> bool:
        """Take note that `mark` is durable. Returns True if the cursor may no longer need one of
        the topic's ledgers that it needed before."""
        chain, before = self._log.chain, self.durable_mark
        self.durable_mark = mark
        at_end = mark.entry + 1 >= chain.counts.get(mark.ledger, 0) and chain.is_closed(mark.ledger)
        return mark > before and (mark.ledger != before.ledger or at_end)

    def on_head_dropped(self) -> None:
        """Take note that the log has dropped ledgers at its head."""
        self._state.on_head_dropped()

    def restart(self, start: Start, number: int) -> None:
        """Replace all acknowledgements by the state `start`. The journal stores the new state under
        `number`."""
        self._state.reset(start)
        self.durable_mark = self._state.mark_delete
        self.redeliveries.clear()
        self.number = number
        self._forget_changes()

    def _forget_changes(self) -> None:
        self._known_mark = self._state.mark_delete
        self._acked = {}
        self._partly = {}


def mark_before(chain: Chain, start: Position) -> Position:
    """Return the mark of a cursor whose next entry is the first entry at or after `start`."""
    return chain.previous_position(chain.ceiling(start))
