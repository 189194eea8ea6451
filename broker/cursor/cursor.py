"""The cursor of one subscription: its acknowledgements and its backlog in a log.

Changes take effect in memory at once. The journal makes the changes of durable cursors durable.
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

    Methods call `done` once, with one of these values:

    - None: the acknowledgement is durable.
    - LogFenced, LogClosed or another LogError: it stays unknown whether the acknowledgement is
      durable.
    - TooManyReceipts: the journal makes the acknowledgement durable, but does not report when.
    - SubscriptionNotFound: the subscription was deleted.

    A non-durable cursor calls `done` before the method returns.
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
        self.number = number  # its number in the journal's records; a reset changes it
        self._log = topic_log
        self._state = state
        self._journal = journal  # None: not durable
        self.redeliveries = Redeliveries(self._note)
        self.durable_mark = state.mark_delete  # the next owner finds this mark or a later one
        # The changes since the last delta or snapshot for the journal:
        self._known_mark = state.mark_delete
        self._acked: dict[int, array[int]] = {}  # entries by ledger
        self._partly: dict[Position, None] = {}

    # ---- state -----------------------------------------------------------------------------------

    @property
    def durable(self) -> bool:
        return self._journal is not None

    @property
    def mark_delete(self) -> Position:
        """Everything up to and including this position is acknowledged. Not all of it may be
        durable yet."""
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

    def batch_ack_set(self, position: Position) -> tuple[int, ...] | None:
        """The unacknowledged messages of a batch, as signed 64-bit words. None: no ack set is known
        for it."""
        remaining = self._state.remaining(position)
        return None if remaining is None else ack_set_words(remaining)

    def first_unacked(self, position: Position) -> Position:
        """The first unacknowledged entry at or after `position`. If there is none: the position
        after the last entry of the log."""
        return self._state.first_unacked(position)

    def nth_unacked(self, number: int) -> Position | None:
        """The unacknowledged entry with this number, counted from 1. None: there are fewer."""
        return self._state.nth_unacked(number)

    def ranges(self) -> Iterator[AckedRange]:
        """The ranges of acknowledged entries after the mark, in order."""
        return self._state.ranges()

    def holes(self) -> tuple[int, int]:
        """The number of `ranges`, and the bytes of their bitmaps. A snapshot may take fewer bytes.
        Costs 50 us for a million bits."""
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
        """The backlog without a read. The number of messages may be an estimate: see
        `Backlog.exact`."""
        return backlog.estimate(self._log.chain, self._state)

    @property
    def backlog_bytes(self) -> int:
        """The bytes of the unacknowledged entries, estimated without a read."""
        log = self._log
        return backlog.size(log.chain, self._state, stored_bytes=log.stored_bytes)

    async def backlog(self) -> Backlog:
        """The exact backlog, or an estimate if the exact one takes more than 100 reads. Raises
        ReadFailed."""
        return await backlog.count(self._log, self._state)

    # ---- acknowledging ---------------------------------------------------------------------------

    def acknowledge(self, positions: Sequence[Position], done: Receipt | None = None) -> int:
        """Acknowledge whole entries. Returns the number of newly acknowledged entries. Entries that
        are not in the log are ignored."""
        on_ack, durable, acked = self._state.on_ack, self.durable, self._acked
        count = 0
        for position in positions:
            if on_ack(position):
                count += 1
                if durable:  # does the same as `_note_entry`, without a call for each entry
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
        """Acknowledge everything up to and including `position`, except the messages of that batch
        which are in `ack_set`. Returns whether the mark moved."""
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
        """The batch has `messages` messages: clear the bits beyond them in its ack set."""
        if self._state.on_batch_size(position, messages):
            self._note_part(position)
            self._note()

    async def reset(self, start: Position, remaining: int = 0) -> None:
        """Move the cursor: the first entry at or after `start` (EARLIEST, LATEST, or an entry) is
        delivered next. All entries before it become acknowledged, all others unacknowledged.
        `remaining`: the bits of the unacknowledged messages of this entry, which must be `start`
        itself; 0: all its messages are unacknowledged.

        Durable on return. The reset overrides acknowledgements that arrive during it. Raises
        SubscriptionNotFound, or the error that ended the journal (LogFenced, LogClosed, or another
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
        """Wait until all earlier acknowledgements are durable. Raises the errors that `done`
        gets."""
        flushed = Waiting()
        self._note(flushed)
        await flushed.wait()

    def _acknowledge_part(self, position: Position, ack_set: Sequence[int]) -> None:
        # Check the position first: parsing the bits costs more.
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
        """True when there are changes to store."""
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
        """`mark` is durable. Returns True if the cursor no longer needs one of the topic's ledgers
        that it needed before."""
        chain, before = self._log.chain, self.durable_mark
        self.durable_mark = mark
        at_end = mark.entry + 1 >= chain.counts.get(mark.ledger, 0) and chain.is_closed(mark.ledger)
        return mark > before and (mark.ledger != before.ledger or at_end)

    def on_head_dropped(self) -> None:
        """Ledgers at the head of the log were dropped."""
        self._state.on_head_dropped()

    def restart(self, start: Start, number: int) -> None:
        """Acknowledge the entries and messages before `start`, and take back all other
        acknowledgements. The journal stores this state under `number`."""
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
    """The mark of a cursor whose next entry is the first one at or after `start`."""
    return chain.previous_position(chain.ceiling(start))
