"""Making acknowledgements durable: the cursor ledger of a topic, shared by its subscriptions.

Theory of operation. Cursors change in memory at once and *note* that here. `run`, one task, writes:
everything that was noted while the last write was under way goes as one entry of deltas; a note
with a receipt goes at once, others wait `gather_s` for company. One write is under way at a time,
so when it is confirmed, everything noted before it is durable, and the receipts are given.

What recovery replays is bounded by snapshots, one subscription at a time: once the *tail* (all that
was written since the oldest snapshot still needed) exceeds twice what is *live* (the snapshots
themselves), that oldest subscription is snapshotted anew, and `replay_from` moves on. The ledger
itself is bounded by *rolling*: a new one is begun with the snapshots of all, recorded, and the old
one deleted. That is also how a ledger begins in the first place, and what happens when one fails:
memory holds everything that was ever answered, so nothing needs to be read back.

A subscription whose state is inline in the topic's record has its snapshot there: it counts as one
at the place in the ledger where it came, and is cleared from the record when a ledger begins with
it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
)
from magnetar.broker.log.owned_record import dropping
from magnetar.broker.log.rolling import Rolling
from magnetar.metadata.model import LedgerId
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.broker.cursor.ledger import Journaled
    from magnetar.broker.errors import BrokerError
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position
    from magnetar.metadata.model import TopicRecord

    Receipt = Callable[[BrokerError | None], None]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorConfig:
    gather_s: float = 0.05
    """How long an acknowledgement without a receipt waits for others, so what a broker that dies
    may deliver twice; 20 writes/s of a topic instead of one for each acknowledgement."""
    tail_bytes_min: int = 256 << 10
    """Below this a long tail is not worth a snapshot: it is read back in one request."""
    ledger_bytes_max: int = 8 << 20
    """The ledger is rolled beyond this or four times the live bytes, whichever is more: the disk
    that dead records may take, times the write quorum, for each topic in use."""
    ledger_entries_max: int = 50_000
    inline_bytes_max: int = 64 << 10
    """All subscriptions of a topic together, when it closes; its record may have 1,000 KiB in
    all."""
    receipts_max: int = 100_000
    """Receipts of one topic that wait; some 20 MB. Beyond, the acknowledgement is noted and its
    receipt refused (TooManyReceipts)."""


class Waiting:
    """A receipt that somebody waits for."""

    def __init__(self) -> None:
        self._given: asyncio.Future[BrokerError | None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: BrokerError | None) -> None:
        if not self.abandoned:
            self._given.set_result(error)

    @property
    def abandoned(self) -> bool:
        """Whoever waited was cancelled."""
        return self._given.cancelled()

    async def wait(self) -> None:
        error = await self._given
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True)
class _Restart:
    cursor: Journaled
    mark: Position
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
        )
        self.newest_number = 0  # the last that was given to a subscription
        self._live: dict[int, Journaled] = {}
        self._dirty: dict[int, None] = {}  # numbers of those with something to write
        self._receipts: list[Receipt] = []  # wait for the next write
        self._writing: list[Receipt] = []  # wait for the one under way
        self._restarts: deque[_Restart] = deque()
        self._ledger: CursorLedger | None = None  # None: none is open
        self._newest = max((*topic_log.owned_record.record.cursor_ledgers, LedgerId(-1)))

        self._closing = False
        self._ended: LogError | None = None
        self._noted = asyncio.Event()  # there is something to write
        self._hurry = asyncio.Event()  # and it should not wait for company
        self._finished = asyncio.Event()
        topic_log.owned_record.watch(self._wake)

    def add(self, cursor: Journaled) -> None:
        """A subscription; all of its state is stored, in the topic's record or in its ledger."""
        assert cursor.number not in self._live
        self._live[cursor.number] = cursor
        if self._ledger is not None:
            self._ledger.begin(cursor.number)

    def drop(self, number: int) -> None:
        """A subscription that is deleted, or goes on under another number."""
        del self._live[number]
        self._dirty.pop(number, None)
        if self._ledger is not None:
            self._ledger.forget(number)

    def next_number(self) -> int:
        """For a subscription that begins, or begins again."""
        self.newest_number += 1
        return self.newest_number

    def restart(self, cursor: Journaled, mark: Position, receipt: Waiting) -> None:
        """Let a cursor begin again at `mark`. The receipt is given when that is durable (None), or
        with LogFenced, LogClosed, SubscriptionNotFound. One that is abandoned before its turn is
        dropped; once begun it is done whole."""
        if self._ended is not None:
            receipt(self._ended)
            return
        self._restarts.append(_Restart(cursor, mark, receipt))
        self._wake()

    def note(self, cursor: Journaled, receipt: Receipt | None) -> None:
        """Something was acknowledged. The receipt is given when all that was noted before is
        durable (None), or when it never will be (LogFenced, LogClosed, SubscriptionNotFound)."""
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
        self._noted.set()

    async def run(self) -> None:
        """Write until closed or fenced. Operating errors go to the receipts, and end the log as
        well. Cancelled, it ends."""
        try:
            while True:
                await self._gather()
                if not self._closing:
                    await self._write()
                while self._restarts:
                    await self._restart(self._restarts[0])
                    self._restarts.popleft()
                if self._closing:
                    break
            await self._finish()
        except LogError as error:
            self._end(error)
            # Without its cursors the topic cannot be served: whoever owns it next opens it anew.
            self._owned_record.lose(str(error))
        finally:
            self._end(LogClosed(str(self._owned_record.name)))
            self._finished.set()

    async def close(self) -> None:
        """Make durable what is noted, and bring small state into the topic's record: `run` does
        that, and returns then."""
        self._closing = True
        self._wake()
        await self._finished.wait()

    # ---- writing ---------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._hurry.set()
        self._noted.set()

    async def _gather(self) -> None:
        await self._noted.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.gather_s):
                await self._hurry.wait()
        self._noted.clear()
        self._hurry.clear()
        if self._owned_record.lost is not None:
            raise self._owned_record.lost

    async def _write(self) -> None:
        """Everything that was noted so far becomes durable."""
        self._writing, self._receipts = self._receipts, []
        changed = self._take_changed()
        if changed:
            ledger = self._ledger
            if ledger is None or self._is_full(ledger) or not await self._append(ledger, changed):
                await self._begin_ledger()
        self._give(None)

    def _is_full(self, ledger: CursorLedger) -> bool:
        appender = ledger.appender
        is_young = ledger.age_s < self._log.config.degraded_age_s_min
        if appender.degraded and not is_young and self._log.ledgers.full_ensemble_possible():
            return True
        if appender.appended >= self._config.ledger_entries_max:
            return True
        return ledger.bytes > max(self._config.ledger_bytes_max, 4 * ledger.live_bytes)

    async def _append(self, ledger: CursorLedger, changed: Sequence[Journaled]) -> bool:
        """Deltas, and a snapshot if one is due. Returns False when the ledger has failed."""
        deltas: list[bytes] = []
        for cursor in changed:
            deltas += cursor.take_delta()
        ledger.put(deltas)
        if ledger.tail_bytes > max(self._config.tail_bytes_min, 2 * ledger.live_bytes):
            ledger.put_snapshot(self._live[ledger.stalest])
        failure = await ledger.wait_confirmed()
        self._judge(ledger, failure)
        return failure is None

    async def _begin_ledger(self) -> None:
        """A new ledger with the snapshots of all, in the place of the one before. Raises
        LogFenced."""
        delays = self._rolling.delays()
        while True:
            newer_than = max(self._newest, LedgerId(self._log.chain.newest))
            ledger = CursorLedger(await self._rolling.create(newer_than=newer_than))
            self._newest = ledger.appender.ledger
            begun_with = tuple(self._live)
            try:
                for cursor in self._live.values():
                    ledger.put_snapshot(cursor)
                failure = await ledger.wait_confirmed()
                if failure is None:
                    await self._record(ledger, begun_with)
                    return
            except BaseException:  # also cancelled: nobody else knows of the appender
                ledger.appender.abandon()
                raise
            await self._rolling.discard(ledger.appender)
            self._judge(ledger, failure)
            await asyncio.sleep(next(delays))

    async def _record(self, ledger: CursorLedger, begun_with: tuple[int, ...]) -> None:
        """The ledger becomes the topic's; only now what is in it counts."""
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
            if number not in self._live:  # dropped meanwhile
                ledger.forget(number)
        for number in self._live:
            if not ledger.knows(number):  # came meanwhile, with its state in the record
                ledger.begin(number)

    async def _restart(self, restart: _Restart) -> None:
        """In the topic's record, under a new number: what the ledger holds under the old one means
        nothing from then on. Here and not at the caller's, who may give up half-way."""
        if restart.receipt.abandoned:
            return
        cursor, mark = restart.cursor, restart.mark
        number = self.next_number()
        state = AckState(self._log.chain, mark)
        inline = stored.inline(stored.snapshot(number, state))

        def move(record: TopicRecord) -> TopicRecord:
            if cursor.number not in self._live:  # deleted: what has the name now is another one
                raise SubscriptionNotFound(cursor.name)
            return _with_state(record, cursor.name, inline)

        try:
            await self._rolling.record(move)
        except SubscriptionNotFound as error:
            restart.receipt(error)
            return
        if cursor.number in self._live:
            self.drop(cursor.number)
            cursor.restart(mark, number)
            self.add(cursor)
        restart.receipt(None)

    def _take_changed(self) -> list[Journaled]:
        changed = [self._live[number] for number in self._dirty if self._live[number].changed]
        self._dirty.clear()
        return changed

    def _judge(self, ledger: CursorLedger, failure: Exception | None) -> None:
        """Raises when another ledger would fail the same."""
        if failure is None:
            return
        topic = str(self._owned_record.name)
        if isinstance(failure, LedgerRefused):
            raise LogUnavailable(topic, "storing acknowledgements", failure)
        number = ledger.appender.ledger
        log.warning("a cursor ledger failed", topic=topic, ledger=number, error=str(failure))

    # ---- the end ---------------------------------------------------------------------------------

    async def _finish(self) -> None:
        self._writing, self._receipts = self._receipts, []
        changed = self._take_changed()
        inline = {cursor.name: stored.inline(cursor.snapshot()) for cursor in self._live.values()}
        if sum(map(len, inline.values())) > self._config.inline_bytes_max:
            if changed:  # and the snapshots have taken the deltas
                await self._begin_ledger()
            if self._ledger is not None:
                await self._rolling.close(self._ledger.appender)
        elif changed or self._owned_record.record.cursor_ledgers:
            if self._ledger is not None:
                self._ledger.appender.abandon()
            await self._rolling.record(lambda record: _with_inline(record, inline))
        self._give(None)

    def _end(self, error: LogError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        if self._ledger is not None:
            self._ledger.appender.abandon()
        restarts = [restart.receipt for restart in self._restarts]
        self._writing += [*self._receipts, *restarts]
        self._receipts, self._restarts = [], deque()
        self._give(error)

    def _give(self, outcome: BrokerError | None) -> None:
        receipts, self._writing = self._writing, []
        for receipt in receipts:
            receipt(outcome)

    def check(self) -> None:
        assert all(number in self._live for number in self._dirty)
        if self._ledger is not None:
            self._ledger.check()
            assert all(self._ledger.knows(number) for number in self._live)


def _with_ledger(record: TopicRecord, ledger: LedgerId) -> TopicRecord:
    """The record with this cursor ledger in the place of all others."""
    dropped = [number for number in record.cursor_ledgers if number != ledger]
    return dropping(replace(record, cursor_ledgers=(ledger,)), dropped)


def _with_inline(record: TopicRecord, inline: Mapping[str, bytes]) -> TopicRecord:
    """The record with all state in it, and no cursor ledger."""
    subscriptions = {
        # One that is not known here was created by a call that was given up: it has its state.
        name: replace(subscription, inline=inline.get(name, subscription.inline))
        for name, subscription in record.subscriptions.items()
    }
    dropped = record.cursor_ledgers
    return dropping(replace(record, cursor_ledgers=(), subscriptions=subscriptions), dropped)


def _with_state(record: TopicRecord, name: str, inline: bytes) -> TopicRecord:
    """The record with this state of one subscription. Raises SubscriptionNotFound."""
    if name not in record.subscriptions:
        raise SubscriptionNotFound(name)
    moved = {name: replace(record.subscriptions[name], inline=inline)}
    return replace(record, subscriptions={**record.subscriptions, **moved})
