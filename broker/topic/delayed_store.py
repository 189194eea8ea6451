"""Stores a topic's indexes of delayed messages in ledgers. Format: dispatch/DELAYED_FORMAT.md.

Theory of operation. An index seals its entries in runs, to which it adds no entry later. The store
writes each run as a segment into the topic's delayed ledger. A segment is live while the index uses
its run; afterwards it is dead. The store counts the bytes of the live segments of each ledger, and
deletes the ledgers without live segments. When dead segments take more bytes than live segments and
than `garbage_bytes_min`, the store writes the live segments into a new ledger.

A stored segment is never wrong (delayed_segment.py), so no other part of the topic waits for the
store. Deliveries and acknowledgements continue while the store writes a segment. A lost segment
costs only reads of the log. The store replaces a failed ledger. The store ends when the broker
loses the topic, or when a new ledger would fail, too.

A topic without delayed messages has no delayed ledger and costs nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from magnetar.bookie.ledger.errors import LedgerError, LedgerRefused
from magnetar.broker.dispatch.delayed_index import RUN_ENTRIES, DelayedIndex
from magnetar.broker.dispatch.delayed_segment import (
    InvalidDelayedSegment,
    decode_segment,
    encode_segment,
    subscription_of,
)
from magnetar.broker.errors import LogDamaged, LogError, LogFenced, LogUnavailable
from magnetar.broker.log.owned_record import dropping
from magnetar.broker.log.recovery import recover_ledger
from magnetar.broker.log.rolling import Rolling
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import EntryId, LedgerId
from magnetar.runtime.event import Event
from magnetar.runtime.log import get_logger
from magnetar.runtime.on_demand import OnDemandTask

if TYPE_CHECKING:
    from collections.abc import Collection

    from magnetar.broker.cursor.cursors import Cursors
    from magnetar.broker.dispatch.delayed_index import Run
    from magnetar.broker.log.ledgers import Appender
    from magnetar.broker.log.log import Log
    from magnetar.metadata.model import TopicRecord
    from magnetar.runtime.on_demand import Spawn

READ_BYTES_MAX: Final = 4 << 20
"""The most bytes of one read of a delayed ledger: about 340 segments of 1,024 entries."""

WRITE_SEGMENTS_MAX: Final = 32
"""The limit of segments in flight: about 400 KB."""

LEDGERS_MAX: Final = 4
"""The limit of delayed ledgers of one topic. Each owner begins a ledger of its own. At the limit
the store writes the live segments into one ledger."""

RESTORE_TIMEOUT_S: Final = 20.0
"""The time limit in seconds for reading the delayed ledgers. At the limit the topic opens without
the segments that were not read."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DelayedStoreConfig:
    run_entries: int = RUN_ENTRIES
    """The number of entries of a full run, which is stored as one segment."""

    garbage_bytes_min: int = 1 << 20
    """To free space, the store writes the live segments again only above this many dead bytes."""

    close_entries_min: int = 100
    """A clean close stores the entries of an index that are in no run yet, if there are at least
    this many. The next owner then reads fewer entries from the log."""


_DEFAULTS: Final = DelayedStoreConfig()


@dataclass(slots=True)
class _Stored:
    """The place and size of a stored segment."""

    subscription: str
    ledger: LedgerId
    bytes: int


class DelayedStore:
    """The stored indexes of one topic. Create it by `open`, then start it. Close it before the
    log."""

    __slots__ = (
        "_appender",
        "_began_s",
        "_closing",
        "_config",
        "_ended",
        "_finished",
        "_indexes",
        "_live",
        "_log",
        "_made",
        "_moving",
        "_owned_record",
        "_progress",
        "_queue",
        "_size",
        "_stored",
        "_work",
    )

    def __init__(self, topic_log: Log, config: DelayedStoreConfig) -> None:
        self._log = topic_log
        self._config = config
        self._owned_record = topic_log.owned_record
        self._made: Rolling | None = None  # None: not needed yet; a Rolling takes a kilobyte
        self._indexes: dict[str, DelayedIndex] = {}
        self._queue: dict[Run, str] = {}  # runs to be written, with their subscriptions
        self._stored: dict[Run, _Stored] = {}  # live segments
        listed = topic_log.owned_record.record.delayed_ledgers
        self._size = dict.fromkeys(listed, 0)  # bytes of all segments of each ledger
        self._live = dict.fromkeys(listed, 0)  # bytes of the live segments of each ledger
        self._appender: Appender | None = None  # None: no ledger is open for writing
        self._began_s = 0.0  # the loop's time when `_appender` was created
        self._moving = False  # the live segments are being written into a new ledger
        self._progress = Event()
        self._closing = False
        self._ended = False
        self._finished = Event()
        self._work = OnDemandTask("delayed messages", self._settle, of=topic_log.name)

    # ---- opening ---------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls, topic_log: Log, cursors: Cursors, config: DelayedStoreConfig = _DEFAULTS
    ) -> Self:
        """Read the stored segments of the durable subscriptions. If the delayed ledgers are
        unreadable, the topic opens without them. Raises LogFenced."""
        store = cls(topic_log, config)
        if not store._live:
            return store
        try:
            async with asyncio.timeout(RESTORE_TIMEOUT_S):
                for ledger in tuple(store._live):
                    await store._restore_ledger(ledger, cursors)
        except TimeoutError:
            log.warning("delayed ledgers not read in time", topic=str(topic_log.name))
        store._work.wake()  # some ledgers may have no live segment
        return store

    async def _restore_ledger(self, ledger: LedgerId, cursors: Cursors) -> None:
        name = str(self._log.name)
        try:
            metadata = await recover_ledger(self._owned_record, self._log.ledgers, ledger)
            last, following = metadata.last_entry, EntryId(0)
            assert last is not None
            reader = self._log.ledgers.reader(metadata)
            while following <= last:
                part = await reader.read(following, last, bytes_max=READ_BYTES_MAX)
                for entry in part:
                    self._restore_segment(ledger, entry.payload, cursors)
                    await asyncio.sleep(0)
                following = EntryId(part[-1].entry + 1)
        except LogFenced:
            raise
        except (LogUnavailable, LogDamaged, LedgerError, MetadataError) as error:
            log.warning("delayed ledger not read", topic=name, ledger=ledger, error=str(error))

    def _restore_segment(self, ledger: LedgerId, payload: memoryview, cursors: Cursors) -> None:
        self._size[ledger] += len(payload)
        try:
            name = subscription_of(payload)
            cursor = cursors.get(name)
            if cursor is None:
                return
            items = decode_segment(payload).items
        except InvalidDelayedSegment as error:
            log.error("delayed segment unreadable", ledger=ledger, error=str(error))
            return
        is_entry, is_acked = self._log.chain.is_entry, cursor.is_acked
        left = [item for item in items if is_entry(item[0]) and not is_acked(item[0])]
        run = self.index_of(name).restore(left)
        if run is not None:
            self._stored[run] = _Stored(name, ledger, len(payload))
            self._live[ledger] += len(payload)

    def find(self, subscription: str) -> DelayedIndex | None:
        """See Indexes."""
        return self._indexes.get(subscription)

    def index_of(self, subscription: str) -> DelayedIndex:
        """Return the index of a durable subscription. Creates the index if the subscription has
        none yet. The store writes the runs of this index."""
        index = self._indexes.get(subscription)
        if index is None:
            index = self._indexes[subscription] = DelayedIndex(self._config.run_entries)
            index.on_sealed = partial(self._on_sealed, subscription)
            index.on_dropped = self._on_dropped
        return index

    def forget(self, subscription: str) -> None:
        """Drop the index of a deleted subscription. Its segments are then dead."""
        index = self._indexes.pop(subscription, None)
        if index is not None:
            index.clear()
            index.on_sealed = index.on_dropped = _ignore

    def start(self, spawn: Spawn) -> None:
        """Begin to write. `spawn` starts the tasks."""
        self._work.start(spawn)

    # ---- events ----------------------------------------------------------------------------------

    def _on_sealed(self, subscription: str, run: Run) -> None:
        if not self._ended:
            self._queue[run] = subscription
            self._work.wake()

    def _on_dropped(self, run: Run) -> None:
        self._queue.pop(run, None)
        stored = self._stored.pop(run, None)
        if stored is not None:
            self._live[stored.ledger] -= stored.bytes
            if self._is_wasteful:
                self._work.wake()

    def tend(self) -> None:
        """Replace the open ledger if it is degraded, has the log's `degraded_age_s_min`, and enough
        bookies are available. The broker calls this about every `check_interval_s` of the log."""
        if self._appender is not None and self._is_worth_moving(self._appender):
            self._moving = True
            self._work.wake()

    @property
    def _rolling(self) -> Rolling:
        if self._made is None:
            topic_log, config = self._log, self._log.config
            self._made = Rolling(
                topic_log.owned_record,
                topic_log.ledgers,
                kind="delayed",
                retry_s_first=config.retry_s_first,
                retry_s_max=config.retry_s_max,
                quorum=topic_log.quorum,
            )
        return self._made

    @property
    def is_settled(self) -> bool:
        return self._work.is_idle

    @property
    def _live_bytes(self) -> int:
        return sum(self._live.values())

    @property
    def _is_wasteful(self) -> bool:
        """True when the store must free ledgers: dead segments take more bytes than live segments
        and than `garbage_bytes_min`, or no segment is live and no ledger is open."""
        live = self._live_bytes
        garbage = sum(self._size.values()) - live
        return garbage > max(live, self._config.garbage_bytes_min) or (
            live == 0 and self._appender is None
        )

    def _is_worth_moving(self, appender: Appender) -> bool:
        age_s = asyncio.get_running_loop().time() - self._began_s
        if not appender.degraded or age_s < self._log.config.degraded_age_s_min:
            return False
        return self._log.ledgers.full_ensemble_possible(self._log.quorum())

    # ---- writing ---------------------------------------------------------------------------------

    async def _settle(self) -> None:
        if self._ended:
            return
        self._work.clear()
        try:
            await self._write_all()
            await self._drop_dead()
            if self._closing:
                await self._finish()
        except LogError as error:
            log.warning("delayed messages not stored", topic=str(self._log.name), error=str(error))
            self._end()
        except BaseException:
            self._end()
            raise

    async def _write_all(self) -> None:
        crowded = self._queue and self._appender is None and len(self._live) >= LEDGERS_MAX
        if self._live and (self._moving or crowded or self._is_wasteful):
            self._begin_move()
        delays = self._rolling.delays()
        while self._queue:
            if self._appender is None:
                await self._begin_ledger()
            if not await self._write_some():
                await asyncio.sleep(next(delays))

    def _begin_move(self) -> None:
        """Queue the live segments to write them again. The old ledgers then have no live
        segments."""
        self._moving = False
        self._abandon_ledger()
        for run, stored in self._stored.items():
            self._queue[run] = stored.subscription
        self._stored.clear()
        self._live = dict.fromkeys(self._live, 0)

    async def _write_some(self) -> bool:
        """Write the first runs of the queue. Returns False when the ledger has failed."""
        appender = self._appender
        assert appender is not None
        batch = [(run, self._queue[run]) for run in list(self._queue)[:WRITE_SEGMENTS_MAX]]
        payloads = []
        for run, name in batch:
            payloads.append(encode_segment(name, run.left()))
            if appender.failure is None:
                appender.append_nowait([[payloads[-1]]])
            await asyncio.sleep(0)  # encoding a segment takes a millisecond
        while appender.failure is None and appender.confirmed < appender.appended:
            self._progress.clear()
            await self._progress.wait()
        if appender.failure is not None:
            name, error = str(self._log.name), str(appender.failure)
            log.warning("a delayed ledger failed", topic=name, ledger=appender.ledger, error=error)
            self._abandon_ledger()
            if isinstance(appender.failure, LedgerRefused):
                # The bookies or the metadata store would refuse the next ledger, too.
                raise LogUnavailable(name, "storing delayed messages", appender.failure)
            return False
        for (run, name), payload in zip(batch, payloads, strict=True):
            self._size[appender.ledger] += len(payload)
            if self._queue.pop(run, None) is not None:  # otherwise the run was dropped meanwhile
                self._stored[run] = _Stored(name, appender.ledger, len(payload))
                self._live[appender.ledger] += len(payload)
        return True

    async def _begin_ledger(self) -> None:
        """Create a ledger and list it in the topic's record. Raises LogFenced, LogDamaged,
        TopicFull."""
        newest = max((*self._live, self._log.chain.newest), default=-1)
        # These ledgers failed before they stored a segment, or they could not be read. Without this
        # removal, the record would list more and more of them while writes fail.
        unused = [it for it, size in self._size.items() if size == 0]
        appender = await self._rolling.create(newer_than=LedgerId(newest))
        ledger = appender.ledger
        try:
            await self._rolling.record(
                lambda record: _with_ledger(_without_ledgers(record, unused), ledger)
            )
        except BaseException:
            if not self._owned_record.may_be_recorded(ledger):
                await self._rolling.discard(appender)
            appender.abandon()
            raise
        appender.progress = self._progress.set
        self._appender = appender
        self._began_s = asyncio.get_running_loop().time()
        for it in unused:
            del self._live[it], self._size[it]
        self._size[ledger] = self._live[ledger] = 0

    async def _drop_dead(self) -> None:
        """Delete the ledgers without live segments. Deletes the open ledger, too, if it has no live
        segments and `_is_wasteful` is true."""
        if self._appender is not None and self._live_bytes == 0 and self._is_wasteful:
            self._abandon_ledger()
        is_open = None if self._appender is None else self._appender.ledger
        dead = [it for it, live in self._live.items() if live == 0 and it != is_open]
        if not dead:
            return
        await self._rolling.record(lambda record: _without_ledgers(record, dead))
        for ledger in dead:
            del self._live[ledger], self._size[ledger]

    def _abandon_ledger(self) -> None:
        if self._appender is not None:
            self._appender.abandon()
            self._appender = None

    # ---- the end ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Store the entries that are in no run yet (see `close_entries_min`), and close the ledger.
        The caller sets a timeout."""
        if self._ended:
            return
        for index in list(self._indexes.values()):
            if index.buffered >= self._config.close_entries_min:
                index.seal()
                await asyncio.sleep(0)  # sealing 1,000 entries takes 0.7 ms
        if not (self._live or self._queue):
            self._end()
            return
        self._closing = True
        self._work.wake()
        await self._finished.wait()

    async def _finish(self) -> None:
        """Close the ledger, so that the next owner need not recover it, and end the store."""
        appender, self._appender = self._appender, None
        if appender is not None:
            await self._rolling.close(appender)
        await self._drop_dead()
        self._end()

    def abandon(self) -> None:
        """End at once. The next owner reads the log for the entries that are in no stored
        segment."""
        self._work.cancel()
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._abandon_ledger()
        self._queue.clear()
        self._finished.set()

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        assert not self._queue.keys() & self._stored.keys(), "a run is stored and waits"
        assert all(live >= 0 for live in self._live.values())
        counted = dict.fromkeys(self._live, 0)
        for stored in self._stored.values():
            counted[stored.ledger] += stored.bytes
        assert counted == self._live
        assert all(self._size[ledger] >= live for ledger, live in self._live.items())


def _ignore(_: Run) -> None:
    """Do nothing: the subscription is deleted."""


def _with_ledger(record: TopicRecord, ledger: LedgerId) -> TopicRecord:
    if ledger in record.delayed_ledgers:
        return record
    return replace(record, delayed_ledgers=(*record.delayed_ledgers, ledger))


def _without_ledgers(record: TopicRecord, ledgers: Collection[LedgerId]) -> TopicRecord:
    left = tuple(ledger for ledger in record.delayed_ledgers if ledger not in ledgers)
    gone = [ledger for ledger in record.delayed_ledgers if ledger in ledgers]
    return dropping(replace(record, delayed_ledgers=left), gone)
