"""Restores, creates and deletes the cursors of one topic.

The topic's record lists the durable subscriptions and is changed by compare-and-set. The record
also holds the first state of a new subscription, inline. So the subscription is durable without a
cursor ledger.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.broker.cursor import format as stored
from magnetar.broker.cursor.acks import AckState
from magnetar.broker.cursor.cursor import Cursor, mark_before
from magnetar.broker.cursor.journal import CursorConfig, CursorJournal
from magnetar.broker.cursor.replay import CursorReplay, number_of
from magnetar.broker.cursor.sequences import DEDUPLICATION, Sequences, SequenceState
from magnetar.broker.errors import (
    InvalidCursorRecord,
    LogDamaged,
    LogUnavailable,
    SubscriptionNotFound,
    TopicFull,
)
from magnetar.broker.log.record_limits import with_subscription
from magnetar.broker.log.recovery import recover_ledger
from magnetar.metadata.errors import Contended, MetadataError, Unavailable
from magnetar.metadata.model import NO_LEDGER, EntryId, LedgerId, SubscriptionRecord, TopicRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position
    from magnetar.runtime.on_demand import Spawn

READ_BYTES_MAX: Final = 4 << 20
"""The maximum size of one read of a cursor ledger. A recovery usually needs fewer bytes."""

REPLAY_STEP_BYTES: Final = 16 << 10
"""A recovery lets the event loop run other tasks whenever it has replayed this many bytes. 16 KiB
hold some 400 deltas, and take 5 ms."""


class Cursors:
    """Made by `Cursors.open`, then started. Close the cursors before the log."""

    __slots__ = (
        "_adding",
        "_config",
        "_creating",
        "_cursors",
        "_journal",
        "_log",
        "_owned_record",
        "sequences",
    )

    def __init__(self, topic_log: Log, config: CursorConfig) -> None:
        self._log = topic_log
        self._owned_record = topic_log.owned_record
        self._config = config
        self._journal = CursorJournal(topic_log, config)
        self._cursors: dict[str, Cursor] = {}
        self._creating: list[Position] = []  # the marks of cursors that are being created
        self.sequences: Sequences | None = None  # None: the topic does not deduplicate
        # Sequence ids that `add_sequences` is storing, or may have stored: the outcome is unknown.
        self._adding: Sequences | None = None

    @classmethod
    async def open(cls, topic_log: Log, config: CursorConfig | None = None) -> Cursors:
        """Fence the topic's cursor ledger and restore the state from it and from the topic's
        record.

        Raises LogFenced, LogUnavailable, LogDamaged.
        """
        cursors = cls(topic_log, config if config is not None else CursorConfig())
        await cursors._restore()
        return cursors

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the durable cursors, sorted."""
        return tuple(sorted(self._cursors))

    @property
    def slowest_mark(self) -> Position | None:
        """The lowest durable mark-delete position of a durable cursor. None: there is no durable
        cursor, and there are no sequence ids.

        The marks of cursors and sequence ids that are being created, and the targets of resets,
        count too. The sequence ids count like a cursor, because a recovery reads the log after the
        position up to which they are durable. This position advances regularly, so the log keeps
        few entries for it.
        """
        marks = [cursor.durable_mark for cursor in self._cursors.values()]
        marks += [it.durable_mark for it in (self.sequences, self._adding) if it is not None]
        marks += [*self._creating, *self._journal.restarting]
        return min(marks, default=None)

    def on_ledger_left(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a cursor may no longer need a ledger that it needed before."""
        self._journal.on_ledger_left = callback

    def get(self, name: str) -> Cursor | None:
        """The durable cursor of this name. None: there is none."""
        return self._cursors.get(name)

    async def ensure(
        self, name: str, start: Position, properties: Mapping[str, str] | None = None
    ) -> Cursor:
        """The durable cursor of this name. If there is none, a new cursor starts with the first
        entry at or after `start` (EARLIEST, LATEST, or an entry). Durable on return.

        Raises LogFenced, LogUnavailable, LogDamaged, TopicFull.
        """
        if self._owned_record.lost is not None:
            raise self._owned_record.lost
        if name in self._cursors:
            return self._cursors[name]
        state = AckState(self._log.chain, mark_before(self._log.chain, start))
        inline = stored.inline(stored.snapshot(self._journal.next_number(), state))
        fresh = SubscriptionRecord(properties if properties is not None else {}, inline)

        def add(record: TopicRecord) -> TopicRecord:
            if name in record.subscriptions:
                return record
            return with_subscription(self._owned_record.name, record, name, fresh)

        mark = state.mark_delete
        self._creating.append(mark)
        try:
            while name not in self._cursors:
                await self._owned_record.change(add)
                made = self._owned_record.record.subscriptions.get(name)
                # None: a concurrent call has deleted the subscription since it was made.
                if made is not None and name not in self._cursors:
                    replay = CursorReplay(self._log.chain)
                    replay.on_entry(made.inline)
                    self._add(name, replay)
        finally:
            self._creating.remove(mark)
        return self._cursors[name]

    async def set_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Replace the properties of a durable cursor. Durable on return.

        Raises LogFenced, LogUnavailable, LogDamaged, TopicFull, SubscriptionNotFound.
        """

        def change(record: TopicRecord) -> TopicRecord:
            found = record.subscriptions.get(name)
            if found is None:
                raise SubscriptionNotFound(name)
            changed = replace(found, properties=properties)
            return with_subscription(self._owned_record.name, record, name, changed)

        await self._owned_record.change(change)
        made = self._owned_record.record.subscriptions.get(name)
        cursor = self._cursors.get(name)
        if made is not None and cursor is not None:  # None: it was deleted meanwhile
            cursor.properties = made.properties

    def open_non_durable(self, name: str, start: Position) -> Cursor:
        """Open a cursor in memory only. `names` does not list it."""
        state = AckState(self._log.chain, mark_before(self._log.chain, start))
        return Cursor(name, self._log, state, number=0, properties={}, journal=None)

    async def delete(self, name: str) -> None:
        """Delete a durable cursor. Durable on return. If the outcome stays unknown, the broker
        gives up the ownership of the topic.

        Raises LogFenced, LogUnavailable, LogDamaged, SubscriptionNotFound.
        """
        if name not in self._cursors:
            raise SubscriptionNotFound(name)

        try:
            await self._owned_record.change(lambda record: _without(record, name))
        except (LogUnavailable, asyncio.CancelledError) as error:
            cause = error.cause if isinstance(error, LogUnavailable) else error
            if not isinstance(cause, Unavailable | Contended):
                # The subscription may be deleted already, so later acknowledgements may not be
                # durable. The next owner reads the true outcome.
                self._owned_record.lose(f"subscription {name!r} may be deleted")
            raise
        cursor = self._cursors.pop(name, None)
        if cursor is not None:
            self._journal.drop(cursor.number)
            self._journal.on_ledger_left()

    def start(self, spawn: Spawn) -> None:
        """See CursorJournal.start."""
        self._journal.start(spawn)

    # ---- the sequence ids of producers -----------------------------------------------------------

    def new_sequences(self, through: Position) -> Sequences:
        """Begin sequence ids in memory. They cover the log up to `through` and hold no producer."""
        state = SequenceState()
        state.through = through
        return self._sequences_of(self._journal.next_number(), state)

    async def add_sequences(self, sequences: Sequences) -> None:
        """Journal `sequences` from now on. Their state at the call is durable on return. Raises
        LogFenced, LogUnavailable, LogDamaged, TopicFull."""
        inline = stored.inline(sequences.snapshot())
        fresh = SubscriptionRecord({}, inline)
        listed = False  # True: an earlier call, whose outcome was unknown, has stored them

        def add(record: TopicRecord) -> TopicRecord:
            nonlocal listed
            listed = DEDUPLICATION in record.subscriptions
            return with_subscription(self._owned_record.name, record, DEDUPLICATION, fresh)

        self._adding = sequences
        try:
            await self._owned_record.change(add)
        except TopicFull:
            if not listed:
                self._adding = None
            raise
        self.sequences, self._adding = sequences, None
        self._journal.add(sequences)
        self._journal.note(sequences, None)

    async def drop_sequences(self) -> None:
        """Delete the sequence ids. Durable on return. Raises LogFenced, LogUnavailable,
        LogDamaged."""
        self._adding = None
        await self._owned_record.change(lambda record: _without(record, DEDUPLICATION))
        if self.sequences is not None:
            self._journal.drop(self.sequences.number)
            self.sequences = None

    def note_sequences(self, receipt: Callable[[BrokerError | None], None] | None = None) -> None:
        """Journal the sequence ids soon, if there are any. `receipt`: see CursorJournal.note."""
        if self.sequences is not None:
            self._journal.note(self.sequences, receipt)

    def _sequences_of(self, number: int, state: SequenceState) -> Sequences:
        return Sequences(number, state, producers_max=self._config.producers_max)

    def tend(self) -> None:
        """See CursorJournal.tend."""
        self._journal.tend()

    async def close(self) -> None:
        """See CursorJournal.close."""
        await self._journal.close()

    def abandon(self) -> None:
        """See CursorJournal.abandon."""
        self._journal.abandon()

    @property
    def is_settled(self) -> bool:
        """See CursorJournal.is_settled."""
        return self._journal.is_settled

    def check(self) -> None:
        self._journal.check()

    # ---- mechanics -------------------------------------------------------------------------------

    def _add(self, name: str, replay: CursorReplay) -> None:
        record = self._owned_record.record.subscriptions[name]
        number = number_of(record.inline)
        cursor = Cursor(
            name,
            self._log,
            replay.state(number),
            number=number,
            properties=record.properties,
            journal=self._journal,
        )
        cursor.redeliveries.restore(replay.redeliveries(number))
        self._cursors[name] = cursor
        self._journal.add(cursor)

    async def _restore(self) -> None:
        replay = CursorReplay(self._log.chain)
        ledger = NO_LEDGER
        try:
            for subscription in self._owned_record.record.subscriptions.values():
                replay.on_entry(subscription.inline)
            for ledger in self._owned_record.record.cursor_ledgers:
                await self._replay_ledger(replay, ledger)
            self._journal.newest_number = replay.newest_number
            for name, record in self._owned_record.record.subscriptions.items():
                if name == DEDUPLICATION:
                    number = number_of(record.inline)
                    self.sequences = self._sequences_of(number, replay.sequences(number))
                    self._journal.add(self.sequences)
                else:
                    self._add(name, replay)
        except InvalidCursorRecord as error:
            raise LogDamaged(str(self._owned_record.name), ledger, error.reason) from error

    async def _replay_ledger(self, replay: CursorReplay, ledger: LedgerId) -> None:
        metadata = await recover_ledger(self._owned_record, self._log.ledgers, ledger)
        last = metadata.last_entry
        assert last is not None
        if last < 0:
            return
        reader = self._log.ledgers.reader(metadata)
        try:
            (newest,) = await reader.read(last, last, bytes_max=1)
            following = stored.read_header(newest.payload)
            while following <= last:
                part = await reader.read(EntryId(following), last, bytes_max=READ_BYTES_MAX)
                size = 0
                for entry in part:
                    replay.on_entry(entry.payload)
                    size += len(entry.payload)
                    if size >= REPLAY_STEP_BYTES:
                        size = 0
                        await asyncio.sleep(0)
                following = part[-1].entry + 1
        except (LedgerError, MetadataError) as error:
            doing = f"reading cursor ledger {ledger}"
            raise LogUnavailable(str(self._owned_record.name), doing, error) from error


def _without(record: TopicRecord, name: str) -> TopicRecord:
    left = {key: value for key, value in record.subscriptions.items() if key != name}
    return replace(record, subscriptions=left)
