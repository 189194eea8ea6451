"""The journal that makes acknowledgements durable: a cursor ledger, shared by a topic's
subscriptions.

Theory of operation. A cursor changes in memory at once and *notes* the change in the journal. One
task writes the noted changes as deltas, usually in one entry; without changes there is no task. A
note with a receipt is written at once; other notes wait up to `gather_s` for further notes. One
write is in flight at a time. When the write is confirmed, all changes that were noted before the
write are durable. The journal then calls their receipts in the order of the notes, at most
RECEIPTS_PER_TURN in one turn of the loop.

Snapshots bound the replay of a recovery. A recovery needs the last snapshot of each subscription,
and the records after it. The *tail* begins with the oldest of these snapshots and ends with the
ledger. The *live* bytes are those of these snapshots. When the tail exceeds twice the live bytes
and `tail_bytes_min`, the journal writes a new snapshot of the subscription with the oldest one, and
`replay_from`, the first entry that a recovery needs, increases. *Rolling* bounds the size of the
ledger: the journal writes the snapshots of all subscriptions to a new ledger, replaces the old
ledger in the topic's record by the new one, and deletes the old one. The first ledger, and a ledger
that replaces a failed ledger, start in the same way. The journal reads no ledger to write a
snapshot, because memory holds the whole state.

The topic's record may hold the snapshot of a subscription inline. The replay of the ledger for this
subscription begins at the place where the journal added the subscription.

The journal also stores the sequence ids of the topic's producers (sequences.py), in the same way as
the cursor of one more subscription.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import LedgerRefused
from magnetar.broker.cursor import format as stored
from magnetar.broker.cursor.acks import AckState
from magnetar.broker.cursor.ledger import CursorLedger
from magnetar.broker.errors import (
    LogClosed,
    LogError,
    LogUnavailable,
    SubscriptionNotFound,
    TooManyReceipts,
    TopicFull,
)
from magnetar.broker.log.owned_record import dropping
from magnetar.broker.log.record_limits import with_subscription
from magnetar.broker.log.rolling import Rolling
from magnetar.metadata.model import LedgerId
from magnetar.runtime.event import Event
from magnetar.runtime.log import get_logger
from magnetar.runtime.on_demand import OnDemandTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.broker.cursor.acks import Start
    from magnetar.broker.cursor.ledger import Journaled
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position
    from magnetar.metadata.model import TopicRecord
    from magnetar.runtime.on_demand import Spawn

    Receipt = Callable[[BrokerError | None], None]

RECEIPTS_PER_TURN: Final = 5_000
"""The most receipts that the journal calls in one turn of the loop; they take 8 ms. During an
outage of the bookies, 100,000 receipts may wait for one write."""

STEP_BYTES: Final = 256 << 10
"""The journal gives the loop a turn after it has made this many bytes of deltas or snapshots. They
take some 8 ms: a consumer that leaves may return 50,000 entries, whose redelivery counts take
400 KB, and a client may have consumers of many subscriptions."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorConfig:
    gather_s: float = 0.05
    """The maximum time for which an acknowledgement without a receipt waits for others. If the
    broker dies meanwhile, the acknowledgement is lost, and its entry is redelivered. With 50 ms, a
    topic makes at most 20 such writes/s, instead of one for each acknowledgement."""
    tail_bytes_min: int = 256 << 10
    """A shorter tail causes no snapshot: a recovery reads such a tail with one request."""
    ledger_bytes_max: int = 8 << 20
    """The journal rolls the ledger beyond this size or four times the live bytes, whichever is
    more. The limit bounds the disk space of records that no recovery needs: for each active topic,
    this size times the write quorum."""
    ledger_entries_max: int = 50_000
    inline_bytes_max: int = 64 << 10
    """The limit of the inline state of all subscriptions when the topic closes. A larger state
    stays in the ledger: the topic's record is limited to 1,000 KiB."""
    producers_max: int = 10_000
    """The maximum number of producers whose sequence ids are kept. At the limit, the journal keeps
    the producers that stored an entry most recently."""
    receipts_max: int = 100_000
    """The maximum number of receipts of one topic that wait for a write: about 20 MB. At the limit
    the journal notes the acknowledgement and refuses its receipt (TooManyReceipts)."""


class Waiting:
    """A receipt that a caller awaits."""

    def __init__(self) -> None:
        self._given: asyncio.Future[BrokerError | None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: BrokerError | None) -> None:
        if not self.abandoned:
            self._given.set_result(error)

    @property
    def abandoned(self) -> bool:
        """True when the caller that waited was cancelled."""
        return self._given.cancelled()

    async def wait(self) -> None:
        error = await self._given
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True)
class _Restart:
    cursor: Journaled
    start: Start
    receipt: Waiting


class CursorJournal:
    def __init__(self, topic_log: Log, config: CursorConfig) -> None:
        self._log = topic_log
        self._owned_record = topic_log.owned_record
        self._config = config
        self._rolling = Rolling(
            topic_log.owned_record,
            topic_log.ledgers,
            kind="cursor",
            retry_s_first=topic_log.config.retry_s_first,
            retry_s_max=topic_log.config.retry_s_max,
            quorum=topic_log.quorum,
        )
        # Called when a cursor may no longer need one of the topic's own ledgers.
        self.on_ledger_left: Callable[[], None] = _ignore
        self.newest_number = 0  # the highest number that was replayed or given
        self._live: dict[int, Journaled] = {}
        self._dirty: dict[int, None] = {}  # numbers of subscriptions with changes to write
        self._receipts: list[Receipt] = []  # called after the next write
        self._writing: list[Receipt] = []  # called after the write in flight
        self._is_stored = False  # True: `_writing` is durable, and its receipts are being called
        self._restarts: list[_Restart] = []
        self._ledger: CursorLedger | None = None  # None: no ledger is open for writing
        self._newest = max((*topic_log.owned_record.record.cursor_ledgers, LedgerId(-1)))

        self._moving = False  # the next write replaces a degraded ledger, even if nothing changed
        self._closing = False
        self._ended: LogError | None = None
        self._work = OnDemandTask("cursors", self._settle, of=topic_log.name)
        self._hurry = Event()  # the next write must not wait for more changes
        self._finished = Event()
        topic_log.owned_record.watch(self._wake)

    __slots__ = (
        "_closing",
        "_config",
        "_dirty",
        "_ended",
        "_finished",
        "_hurry",
        "_is_stored",
        "_ledger",
        "_live",
        "_log",
        "_moving",
        "_newest",
        "_owned_record",
        "_receipts",
        "_restarts",
        "_rolling",
        "_work",
        "_writing",
        "newest_number",
        "on_ledger_left",
    )

    def add(self, cursor: Journaled) -> None:
        """Add a subscription. Its whole state must already be stored, in the topic's record or in a
        ledger that the caller has replayed."""
        assert cursor.number not in self._live
        self._live[cursor.number] = cursor
        if self._ledger is not None:
            self._ledger.begin(cursor.number)

    def drop(self, number: int) -> None:
        """Remove a subscription that is deleted or gets another number."""
        del self._live[number]
        self._dirty.pop(number, None)
        if self._ledger is not None:
            self._ledger.forget(number)

    def next_number(self) -> int:
        """Return the number for a new or reset subscription, higher than all that were replayed or
        given."""
        self.newest_number += 1
        return self.newest_number

    def restart(self, cursor: Journaled, start: Start, receipt: Waiting) -> None:
        """Reset a cursor to `start`. The journal calls the receipt with None when the reset is
        durable. Otherwise the receipt gets SubscriptionNotFound, TopicFull (the topic's record has
        no space for the ack set of the batch) or the error that ended the journal (LogFenced,
        LogClosed, or another LogError). If the receipt is abandoned before the journal starts the
        reset, the journal drops the reset. A later abandonment stops nothing."""
        if self._ended is not None:
            receipt(self._ended)
            return
        self._restarts.append(_Restart(cursor, start, receipt))
        self._wake()

    @property
    def restarting(self) -> list[Position]:
        """The marks of the resets that wait or that the journal is writing."""
        return [restart.start.mark for restart in self._restarts]

    def note(self, cursor: Journaled, receipt: Receipt | None) -> None:
        """Note that the cursor has changed. The journal calls the receipt with None when every
        change noted so far is durable. Otherwise the receipt gets one of these errors:

        - TooManyReceipts: the journal writes the change, but does not report the outcome.
        - SubscriptionNotFound: the journal does not have this cursor any more.
        - The error that ended the journal. It is unknown whether the changes are durable.
        """
        if self._ended is not None or cursor.number not in self._live:
            if receipt is not None:
                receipt(self._ended or SubscriptionNotFound(cursor.name))
            return
        self._dirty[cursor.number] = None
        if receipt is not None:
            self._hurry.set()
            if len(self._receipts) < self._config.receipts_max:
                self._receipts.append(receipt)
            else:
                receipt(TooManyReceipts(self._config.receipts_max))
        self._work.wake()

    def start(self, spawn: Spawn) -> None:
        """Write from now on, in tasks that `spawn` starts. If an error ends the journal, the
        receipts get the error, and the broker gives up the ownership of the topic."""
        self._work.start(spawn)

    async def _settle(self) -> None:
        """Write the noted changes, carry out the resets, and end the journal if it is closing."""
        if self._ended is not None:
            return
        try:
            try:
                await self._gather()
                if not self._closing:
                    await self._write()
                while self._restarts:
                    await self._restart(self._restarts[0])
                    del self._restarts[0]
                if self._closing:
                    await self._finish()
                    await self._end_in_turns(LogClosed(str(self._owned_record.name)))
            except LogError as error:
                await self._end_in_turns(error)
                # The broker cannot serve the topic without its cursors. The next owner opens it
                # again.
                self._owned_record.lose(str(error))
        except BaseException:
            self._end(LogClosed(str(self._owned_record.name)))
            raise

    async def close(self) -> None:
        """Make the noted changes durable, and move the state into the topic's record if it has at
        most `inline_bytes_max`. If this fails, the receipts get the error."""
        self._closing = True
        self._wake()
        await self._finished.wait()

    def abandon(self) -> None:
        """End at once, without writing the noted changes."""
        self._work.cancel()
        self._end(LogClosed(str(self._owned_record.name)))

    @property
    def is_settled(self) -> bool:
        """True when no write is due or in progress."""
        return self._work.is_idle

    # ---- writing ---------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._hurry.set()
        self._work.wake()

    async def _gather(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.gather_s):
                await self._hurry.wait()
        self._work.clear()
        self._hurry.clear()
        if self._owned_record.lost is not None:
            raise self._owned_record.lost

    def tend(self) -> None:
        """Replace the ledger if it is degraded, has the log's `degraded_age_s_min`, and enough
        bookies are available. A write of changes does the same, but an idle topic has no writes.
        The broker calls `tend` about every `check_interval_s` of the log's configuration."""
        if self._ledger is not None and not self._closing and self._is_worth_moving(self._ledger):
            self._moving = True
            self._wake()

    async def _write(self) -> None:
        """Make every change noted so far durable."""
        self._writing, self._receipts = self._receipts, []
        changed = self._take_changed()
        if changed:
            marks = [(cursor, cursor.mark_delete) for cursor in changed]
            ledger = self._ledger
            if ledger is None or self._is_full(ledger) or not await self._append(ledger, changed):
                await self._begin_ledger()
            self._on_stored(marks)
        elif self._moving and self._ledger is not None and self._is_worth_moving(self._ledger):
            log.info("moving a cursor ledger", topic=str(self._owned_record.name))
            await self._begin_ledger()
        self._moving = False
        await self._confirm()

    def _on_stored(self, marks: Sequence[tuple[Journaled, Position]]) -> None:
        left = [cursor.on_stored(mark) for cursor, mark in marks]
        if any(left):
            self.on_ledger_left()

    def _is_full(self, ledger: CursorLedger) -> bool:
        if self._is_worth_moving(ledger):
            return True
        if ledger.appender.appended >= self._config.ledger_entries_max:
            return True
        return ledger.bytes > max(self._config.ledger_bytes_max, 4 * ledger.live_bytes)

    def _is_worth_moving(self, ledger: CursorLedger) -> bool:
        is_young = ledger.age_s < self._log.config.degraded_age_s_min
        if is_young or not ledger.appender.degraded:
            return False
        return self._log.ledgers.full_ensemble_possible(self._log.quorum())

    async def _append(self, ledger: CursorLedger, changed: Sequence[Journaled]) -> bool:
        """Write deltas, and a snapshot if one is due. Returns False if the ledger has failed."""
        deltas: list[bytes] = []
        size = 0
        for cursor in changed:
            delta = cursor.take_delta()
            deltas += delta
            size += sum(map(len, delta))
            if size >= STEP_BYTES:
                size = 0
                await asyncio.sleep(0)
        ledger.put(deltas)
        if ledger.tail_bytes > max(self._config.tail_bytes_min, 2 * ledger.live_bytes):
            ledger.put_snapshot(self._live[ledger.stalest])
        failure = await ledger.wait_confirmed()
        self._judge(ledger, failure)
        return failure is None

    async def _begin_ledger(self) -> None:
        """Replace the ledger by a new one that starts with the snapshots of all subscriptions.
        Raises LogFenced, LogUnavailable, LogDamaged, TopicFull."""
        delays = self._rolling.delays()
        while True:
            newer_than = max(self._newest, LedgerId(self._log.chain.newest))
            ledger = CursorLedger(await self._rolling.create(newer_than=newer_than))
            self._newest = ledger.appender.ledger
            begun_with = tuple(self._live)
            try:
                await self._put_snapshots(ledger, begun_with)
                failure = await ledger.wait_confirmed()
                if failure is None:
                    await self._record(ledger, begun_with)
                    return
            except BaseException:  # also a cancellation: no other object has the appender
                ledger.appender.abandon()
                raise
            await self._rolling.discard(ledger.appender)
            self._judge(ledger, failure)
            await asyncio.sleep(next(delays))

    async def _put_snapshots(self, ledger: CursorLedger, numbers: tuple[int, ...]) -> None:
        """Append the snapshots of these subscriptions, without those that are dropped meanwhile."""
        before = ledger.bytes
        for number in numbers:
            if (cursor := self._live.get(number)) is None:
                continue
            ledger.put_snapshot(cursor)
            if ledger.bytes - before >= STEP_BYTES:
                before = ledger.bytes
                await asyncio.sleep(0)

    async def _record(self, ledger: CursorLedger, begun_with: tuple[int, ...]) -> None:
        """Record the ledger in the topic's record. Its content is valid from now on."""
        new = ledger.appender.ledger
        try:
            await self._rolling.record(lambda record: _with_ledger(record, new))
        except LogError:
            if not self._owned_record.may_be_recorded(new):
                await self._rolling.discard(ledger.appender)
            raise
        if self._ledger is not None:
            self._ledger.appender.abandon()
        self._ledger = ledger
        for number in begun_with:
            if number not in self._live:  # dropped during the write
                ledger.forget(number)
        for number in self._live:
            if not ledger.knows(number):  # added during the write, with its state in the record
                ledger.begin(number)

    async def _restart(self, restart: _Restart) -> None:
        """Write the new state into the topic's record, under a new number. A recovery then ignores
        the records of the old number in the ledger. The journal's task writes the state, because
        the caller may be cancelled half-way."""
        if restart.receipt.abandoned:
            return
        cursor, start = restart.cursor, restart.start
        number = self.next_number()
        state = AckState(self._log.chain, start.mark)
        state.reset(start)
        inline = stored.inline(stored.snapshot(number, state))

        def move(record: TopicRecord) -> TopicRecord:
            # The cursor was deleted. A new cursor may have its name now.
            if cursor.number not in self._live:
                raise SubscriptionNotFound(cursor.name)
            return self._with_state(record, cursor.name, inline)

        try:
            await self._rolling.record(move)
        except (SubscriptionNotFound, TopicFull) as error:
            restart.receipt(error)
            return
        if cursor.number in self._live:
            self.drop(cursor.number)
            cursor.restart(start, number)
            self.add(cursor)
            self.on_ledger_left()
        restart.receipt(None)

    def _with_state(self, record: TopicRecord, name: str, inline: bytes) -> TopicRecord:
        """The record with this inline state of one subscription. A state without an ack set always
        fits, because it is not larger than any former one. Raises SubscriptionNotFound,
        TopicFull."""
        found = record.subscriptions.get(name)
        if found is None:
            raise SubscriptionNotFound(name)
        moved = replace(found, inline=inline)
        return with_subscription(self._owned_record.name, record, name, moved)

    def _take_changed(self) -> list[Journaled]:
        changed = [self._live[number] for number in self._dirty if self._live[number].changed]
        self._dirty.clear()
        return changed

    def _judge(self, ledger: CursorLedger, failure: Exception | None) -> None:
        """Raise the failure if another ledger would fail in the same way; log it if not."""
        if failure is None:
            return
        topic = str(self._owned_record.name)
        if isinstance(failure, LedgerRefused):
            raise LogUnavailable(topic, "storing acknowledgements", failure)
        number = ledger.appender.ledger
        log.warning("cursor ledger failed", topic=topic, ledger=number, error=str(failure))

    # ---- the end ---------------------------------------------------------------------------------

    async def _finish(self) -> None:
        self._writing, self._receipts = self._receipts, []
        changed = self._take_changed()
        inline = {cursor.name: stored.inline(cursor.snapshot()) for cursor in self._live.values()}
        if sum(map(len, inline.values())) > self._config.inline_bytes_max:
            if changed:  # the snapshots above have consumed the deltas
                await self._begin_ledger()
            if self._ledger is not None:
                await self._rolling.close(self._ledger.appender)
        elif changed or self._owned_record.record.cursor_ledgers:
            if self._ledger is not None:
                self._ledger.appender.abandon()
            await self._rolling.record(lambda record: _with_inline(record, inline))
        await self._confirm()

    def _end(self, error: LogError) -> None:
        """End at once. If the journal is calling receipts in turns, call the remaining ones now."""
        if self._is_stored:
            self._give(None)
        self._stop(error)
        self._give(self._ended)
        self._finished.set()

    async def _end_in_turns(self, error: LogError) -> None:
        self._stop(error)
        await self._give_in_turns(error)
        self._finished.set()

    def _stop(self, error: LogError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        if self._ledger is not None:
            self._ledger.appender.abandon()
        restarts = [restart.receipt for restart in self._restarts]
        self._writing += [*self._receipts, *restarts]
        self._receipts, self._restarts = [], []

    # ---- receipts --------------------------------------------------------------------------------

    async def _confirm(self) -> None:
        """The write is durable: call its receipts. If `_end` runs meanwhile, it calls the rest."""
        self._is_stored = True
        await self._give_in_turns(None)
        self._is_stored = False

    async def _give_in_turns(self, outcome: BrokerError | None) -> None:
        while len(self._writing) > RECEIPTS_PER_TURN:
            some = self._writing[:RECEIPTS_PER_TURN]
            del self._writing[:RECEIPTS_PER_TURN]
            for receipt in some:
                receipt(outcome)
            await asyncio.sleep(0)
        self._give(outcome)

    def _give(self, outcome: BrokerError | None) -> None:
        receipts, self._writing = self._writing, []
        for receipt in receipts:
            receipt(outcome)

    def check(self) -> None:
        assert all(number in self._live for number in self._dirty)
        if self._ledger is not None:
            self._ledger.check()
            assert all(self._ledger.knows(number) for number in self._live)


def _ignore() -> None:
    """The default of `on_ledger_left`: the owner of the journal does not need the call."""


def _with_ledger(record: TopicRecord, ledger: LedgerId) -> TopicRecord:
    """The record with this cursor ledger instead of all others."""
    dropped = [number for number in record.cursor_ledgers if number != ledger]
    return dropping(replace(record, cursor_ledgers=(ledger,)), dropped)


def _with_inline(record: TopicRecord, inline: Mapping[str, bytes]) -> TopicRecord:
    """The record with the state of all cursors inline, and no cursor ledger."""
    subscriptions = {
        # A cancelled call may have created a subscription that the journal does not know. Such a
        # subscription keeps its state.
        name: replace(subscription, inline=inline.get(name, subscription.inline))
        for name, subscription in record.subscriptions.items()
    }
    dropped = record.cursor_ledgers
    return dropping(replace(record, cursor_ledgers=(), subscriptions=subscriptions), dropped)
