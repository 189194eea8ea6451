"""A topic's log: one sequence of entries over many ledgers, written by the topic's one owner.

Theory of operation. The log adds runs of entries to the open ledger. When that ledger is full, old,
degraded or failed, the log *rolls*: it retires the ledger, and new appends queue. `_settle` then
closes the retired ledger, creates the next one, lists it in the topic's record, and sends the queue
to it. `append` never waits: only `_settle` waits for bookies and the metadata store. So a roll
refuses no append; it only delays the new entries for a short time.

The log closes a failed ledger before it creates the next one. The close determines the last entry
of the failed ledger. The log reports the entries up to that entry as appended, and adds the later
ones to the next ledger, in the same order. So no entry is lost, and none is stored twice.

The log sends the first entry to a ledger only after the topic's record lists the ledger. If closing
a ledger fails, the log reads the record. If the record has another owner's epoch, the log ends, and
the outcome of the outstanding entries is unknown.

`drop_through` drops ledgers at the head up to a position. `trim` drops the ledgers that are still
`trimmable` when the log writes the record. In both cases `_settle` first lists the ledgers in the
topic's record as being deleted, then removes them from the log. Then deletion.py deletes them.

`_settle` runs in a task that exists only while `_settle` has a step to take. The broker calls
`tend` periodically; `tend` retires the open ledger when it is too old or degraded.

At most one ledger holds unconfirmed entries, because the log creates the next ledger only after it
has closed the previous one. `check` asserts two consequences:
    1. While the log has an appender, no entry is queued.
    2. The entries in flight belong to one ledger and follow its reported entries.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import LedgerError, LedgerRefused
from magnetar.broker.errors import (
    LogClosed,
    LogError,
    LogFenced,
    LogUnavailable,
    TopicTerminated,
)
from magnetar.broker.log.budget import PublishBudget
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.deletion import Deletion
from magnetar.broker.log.entry import StoredEntry
from magnetar.broker.log.latency import LatencyHistogram
from magnetar.broker.log.losses import Losses
from magnetar.broker.log.outstanding import Outstanding
from magnetar.broker.log.owned_record import OwnedRecord
from magnetar.broker.log.position import EARLIEST, Position, run_of_positions
from magnetar.broker.log.range_reader import LogReader
from magnetar.broker.log.record_limits import (
    DELETING_MAX,
    ledger_size_factor,
    require_ledger_capacity,
)
from magnetar.broker.log.recovery import recover_log
from magnetar.broker.log.rolling import Rolling, with_data_ledgers
from magnetar.broker.log.watchers import Watchers
from magnetar.metadata.model import EntryPlace, LedgerId, TopicLedger
from magnetar.protos.entry import parse_stored_entry
from magnetar.runtime.event import Event
from magnetar.runtime.log import get_logger
from magnetar.runtime.on_demand import OnDemandTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.bookie.ledger.quorum import Quorum
    from magnetar.broker.log.cache import EntryCache
    from magnetar.broker.log.ledgers import Appender, LedgerStore
    from magnetar.broker.log.outstanding import Appended, AppendRun
    from magnetar.metadata.model import TopicRecord
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.entry import EntryView
    from magnetar.protos.names import TopicName
    from magnetar.runtime.clock import Clock
    from magnetar.runtime.on_demand import Spawn

log = get_logger(__name__)


def _not_set(*_: object) -> None:
    raise AssertionError("set on_appended and on_failed before the first append")


def _ignore() -> None:
    """Do nothing: for the progress of an abandoned ledger, and for events without a listener."""


def _as_configured() -> None:
    """Return None: new ledgers have the quorum that is configured for this process."""


TAIL_ENTRIES_MAX: Final = 1000
"""The log caches new entries while a reader is at most this many entries behind the end: that
reader will soon read them. Pulsar has the same number for an active cursor. A fast topic appends
1,000 entries of 1 KB in some 20 ms."""


QUEUE_RUN_ENTRIES: Final = 1000
"""The maximum number of entries that the log sends to a ledger in one call. 1,000 entries of 1 KB
make four frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The settings of a log. The limits of a ledger are larger in a topic that has many ledgers:
    see record_limits.py."""

    ledger_entries_max: int = 50_000
    ledger_bytes_max: int = 2 << 30
    """The limit applies to a ledger of any age, because trim and repair handle whole ledgers. A
    topic that takes 100 MB/s fills 2 GiB in 20 s, and a roll costs about 20 ms."""
    ledger_age_s_max: float = 4 * 3600.0
    ledger_age_s_min: float = 600.0
    """The minimum age in seconds at which `ledger_entries_max` applies. Without it, a topic with
    50,000 entries/s would change its record each second."""
    degraded_age_s_min: float = 30.0
    """The minimum age in seconds at which the log retires a degraded ledger. Without it, a bookie
    that is registered but does not answer would cause a new ledger at each call of `tend`."""
    pending_bytes_max: int = 16 << 20
    """`wait_room` waits while this many bytes are queued or in flight. At 100 MB/s, a topic takes
    160 ms to append 16 MiB, which is longer than a roll. Three entries of the largest size fit into
    16 MiB."""
    auto_skip_non_recoverable_data: bool = False
    """True: subscriptions skip entries that are lost at all bookies. False: they wait."""
    check_interval_s: float = 10.0
    """The time between two calls of `tend`."""
    retry_s_first: float = 0.05
    retry_s_max: float = 5.0
    """The longest pause between attempts to close, create or record a ledger. The log does not give
    up, and appends wait in order."""


ENTRY_BYTES: Final = 256
"""The bytes of memory that an outstanding entry takes besides its own bytes: Python objects for the
entry, its prefix and its envelope, and its places in lists."""


class LogState(StrEnum):
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    TERMINATED = "terminated"
    FENCED = "fenced"
    FAILED = "failed"


class Log:
    """The log of one topic. Create it with `Log.open`, then call `start`. Before `start`, appends
    queue."""

    __slots__ = (
        "_appender",
        "_cache",
        "_clock",
        "_closing",
        "_deletion",
        "_drop_through",
        "_ended",
        "_finished",
        "_held_bytes",
        "_ledger_bytes",
        "_newest",
        "_opened_s",
        "_outstanding",
        "_reader",
        "_reported",
        "_rolling",
        "_room",
        "_size_factor",
        "_stepped",
        "_terminating",
        "_trims",
        "_watchers",
        "_work",
        "_writing",
        "budget",
        "chain",
        "config",
        "latency",
        "ledgers",
        "losses",
        "name",
        "on_appended",
        "on_failed",
        "on_head_dropped",
        "on_ledger_closed",
        "on_terminated",
        "owned_record",
        "protect",
        "quorum",
        "trimmable",
    )

    def __init__(
        self,
        owned_record: OwnedRecord,
        chain: Chain,
        *,
        ledgers: LedgerStore,
        config: LogConfig,
        clock: Clock,
        cache: EntryCache,
        quorum: Callable[[], Quorum | None] = _as_configured,
        timestamp_ms: int = 0,
    ) -> None:
        """`timestamp_ms` is the time that a broker gave to the last entry. 0: the log has no
        entry."""
        self.name = owned_record.name
        self.owned_record = owned_record
        self.chain = chain
        self.ledgers = ledgers
        self.on_appended: Callable[[Sequence[Appended]], None] = _not_set
        self.on_failed: Callable[[Sequence[AppendRun], LogError], None] = _not_set
        self.on_ledger_closed: Callable[[], None] = _ignore  # called after each close
        self.on_head_dropped: Callable[[], None] = _ignore
        self.on_terminated: Callable[[], None] = _ignore  # the termination is durable
        # Returns the position through which `trim` may drop ledgers now; None: `trim` drops none.
        self.trimmable: Callable[[], Position | None] = lambda: None
        self.losses = Losses()
        self.quorum = quorum  # returns the quorum of new ledgers; None: this process's quorum
        self.protect: Callable[[Callable[[], None]], None] = _plainly  # a topic sets its guard
        self.latency = LatencyHistogram()  # a broker's logs share one
        self.budget = PublishBudget()  # a broker's logs share one
        self._held_bytes = 0  # the bytes of this log that `budget` counts
        self.config = config
        self._clock = clock
        self._cache = cache
        self._reader = LogReader(chain, ledgers, cache, self._open_ledger)
        self._watchers = Watchers()

        self._outstanding = Outstanding(next_index=chain.next_index, timestamp_ms=timestamp_ms)
        self._rolling = Rolling(
            owned_record,
            ledgers,
            kind="data",
            retry_s_first=config.retry_s_first,
            retry_s_max=config.retry_s_max,
            quorum=quorum,
        )
        self._work = OnDemandTask("log", self._settle, of=self.name)
        wake = self._work.wake
        self._deletion = Deletion(owned_record, ledgers, wake)
        self._appender: Appender | None = None  # takes new appends; None: they queue
        self._writing: Appender | None = None  # writes the open or retired ledger
        self._reported = -1  # the last entry of `_writing` passed to `on_appended`; -1: none
        self._ledger_bytes = 0
        self._opened_s = 0.0
        self._size_factor = 1  # the factor of the open ledger, see record_limits.py
        record = owned_record.record
        self._newest = LedgerId(max(chain.newest, *record.deleting, record.ledger_min - 1))
        self._drop_through = EARLIEST  # the position through which the caller wants ledgers dropped
        self._trims = False  # True: `trim` was called, so `trimmable` ledgers are dropped

        self._closing = False
        self._terminating = False
        self._stepped = Event()  # set after a step of `_settle`; each step has a new event
        # The reason why the log takes no more entries; None: the log has not ended.
        self._ended: LogError | None = None
        self._room = Event()
        self._room.set()
        self._finished = Event()
        owned_record.watch(wake)

    @classmethod
    async def open(
        cls,
        name: TopicName,
        *,
        store: MetadataStore,
        ledgers: LedgerStore,
        config: LogConfig,
        clock: Clock,
        cache: EntryCache,
        incarnation: str,
        create: bool = True,
        epoch_min: int = 0,
        ledger_min: int = 0,
        quorum: Callable[[], Quorum | None] | None = None,
        version_min: int = -1,
        holds: Callable[[], bool] = lambda: True,
    ) -> Log:
        """Take the topic over: raise the epoch, then fence and close its last ledger. See
        OwnedRecord.take for `incarnation`, `create`, `epoch_min`, `ledger_min`, `version_min` and
        `holds`.

        No ledger is created before the first append. Raises NotOwner, LogFenced (another broker
        took the topic meanwhile), LogUnavailable, LogDamaged, TopicFull, TopicDeleted,
        TopicNotFound.
        """
        owned_record = await OwnedRecord.take(
            name,
            store,
            incarnation=incarnation,
            create=create,
            epoch_min=epoch_min,
            ledger_min=ledger_min,
            version_min=version_min,
            holds=holds,
        )
        recovered = await recover_log(owned_record, ledgers, clock)
        chain = Chain(
            recovered.ledgers, next_index=recovered.next_index, dropped=owned_record.record.dropped
        )
        if chain.records != owned_record.record.ledgers:
            await owned_record.change(
                lambda record: with_data_ledgers(record, chain.records, chain.dropped)
            )
        return cls(
            owned_record,
            chain,
            ledgers=ledgers,
            config=config,
            clock=clock,
            cache=cache,
            quorum=quorum or _as_configured,
            timestamp_ms=recovered.timestamp_ms,
        )

    # ---- appending -------------------------------------------------------------------------------

    def append(
        self,
        entries: Sequence[bytes],
        views: Mapping[int, EntryView],
        context: object,
        *,
        now: float,
    ) -> None:
        """Accept a run of entries and append them. When bookies confirm the entries, the log passes
        them with `context` to `on_appended`, in one or more parts. If the log ends, it passes the
        other entries to `on_failed`.

        `views` maps the place of an entry in the run to its view; an entry without a view must be
        one plain message. `entries` must be copies, not parts of a frame, and have sizes that a
        producer may send. `now` is the loop's time.

        Raises TopicTerminated, LogClosed, or the error that ended the log: LogFenced,
        LogUnavailable, LogDamaged, TopicFull. After an error, the log has accepted no entry of the
        run, and passes none to a callback.
        """
        if self._ended is not None:
            raise self._ended
        if self._closing:
            raise LogClosed(str(self.name))
        if self.terminated is not None or self._terminating:
            raise TopicTerminated(str(self.name))
        self._outstanding.take(entries, views, context, now_ms=self._clock.now_ms())
        self._account()
        if self._outstanding.bytes >= self.config.pending_bytes_max:
            self._room.clear()
        if self._appender is not None:
            self._send(self._appender, now)
        else:
            self._work.wake()

    def require_capacity(self) -> None:
        """Raise TopicFull if the next append needs a new ledger for which the topic's record has no
        space."""
        if self._writing is None:
            require_ledger_capacity(self.name, len(self.chain.records))

    @property
    def has_room(self) -> bool:
        """True when `wait_room` would return at once."""
        return self._room.is_set() and (self._appender is None or self._appender.has_room)

    async def wait_room(self) -> None:
        """Wait until less than `pending_bytes_max` is outstanding and the open ledger has room.
        Returns at once when the log has ended; `append` then raises the reason."""
        await self._room.wait()
        if self._appender is not None:
            await self._appender.wait_room()

    def _send(self, appender: Appender, now: float) -> None:
        """Send the queued entries to the open ledger. Retire the ledger when it is full or has
        failed."""
        outstanding = self._outstanding
        entries_max = QUEUE_RUN_ENTRIES
        is_of_age = now - self._opened_s >= self.config.ledger_age_s_min * self._size_factor
        ledger_entries_max = self.config.ledger_entries_max * self._size_factor
        ledger_bytes_max = self.config.ledger_bytes_max * self._size_factor
        while outstanding.queued > 0:
            if is_of_age:
                spare = ledger_entries_max - (appender.appended + 1)
                entries_max = min(max(spare, 1), QUEUE_RUN_ENTRIES)
            payloads = outstanding.unsent(
                entries_max=entries_max, bytes_max=ledger_bytes_max - self._ledger_bytes
            )
            try:
                appender.append_nowait(payloads)
            except LedgerError:
                assert appender.failure is not None, "a healthy ledger refused entries"
                self._retire()
                return
            self._ledger_bytes += outstanding.on_sent(len(payloads))
            is_full = is_of_age and appender.appended + 1 >= ledger_entries_max
            if is_full or self._ledger_bytes >= ledger_bytes_max:
                self._retire()
                return

    def _open_ledger(self) -> Appender | None:
        return self._writing

    @property
    def _age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._opened_s

    def _retire(self) -> None:
        """Send no more entries to the open ledger; `_settle` closes it."""
        self._appender = None
        self._work.wake()

    def _on_progress(self, appender: Appender) -> None:
        if appender is not self._writing:
            return
        self._report(appender.ledger, appender.confirmed)
        if appender.failure is not None:
            self._retire()

    def _report(self, ledger: LedgerId, through: int) -> None:
        """Pass the entries of `ledger` up to `through` to `on_appended`, each once and in order."""
        if through <= self._reported:
            return
        first_entry = self._reported + 1
        appended = self._outstanding.confirm(
            through - self._reported, ledger=ledger, first_entry=first_entry
        )
        if self._is_tailed():
            for part in appended:
                self._cache_entries(part)
        oldest = appended[0].run.timestamp_ms
        self.latency.observe(self._clock.now_ms() - oldest)
        self._reported = through
        last = appended[-1]
        self.chain.grow(through + 1, next_index=last.run.indexes[last.stop - 1] + 1)
        self._account()
        if self._outstanding.bytes < self.config.pending_bytes_max:
            self._room.set()
        self.on_appended(appended)
        self._notify()

    def _account(self) -> None:
        outstanding = self._outstanding
        held = outstanding.bytes + ENTRY_BYTES * (outstanding.queued + outstanding.in_flight)
        self.budget.change(held - self._held_bytes)
        self._held_bytes = held

    def _cache_entries(self, part: Appended) -> None:
        run, places = part.run, range(part.start, part.stop)
        last_entry = part.first_entry + part.count - 1
        positions = run_of_positions(part.ledger, part.first_entry, last_entry)
        for place, position in zip(places, positions, strict=True):
            view = run.views.get(place) or parse_stored_entry(run.entries[place])
            self._cache.put(StoredEntry(position, run.indexes[place], run.timestamp_ms, view))

    def _is_tailed(self) -> bool:
        confirmed = self.chain.confirmed
        return any(
            self.chain.entries(after=watcher.read_position(), through=confirmed) <= TAIL_ENTRIES_MAX
            for watcher in self._watchers
        )

    def _notify(self) -> None:
        self._watchers.call(self.protect)

    # ---- the life of ledgers ---------------------------------------------------------------------

    def start(self, spawn: Spawn) -> None:
        """Begin to close, create, record and delete ledgers, in tasks that `spawn` starts. When
        `_settle` fails or is cancelled, the log ends and passes the outstanding entries to
        `on_failed`."""
        self._deletion.start(spawn)
        self._work.start(spawn)

    async def _settle(self) -> None:
        """Take steps until none is left. End the log after an error, or after the last step of a
        closing log."""
        try:
            while self._ended is None and await self._step():
                self._stepped.set()
                self._stepped = Event()
            if self._ended is None and self._closing:
                await self._deletion.finish()
                self._end(LogClosed(str(self.name)))
        except LogError as error:
            self._end(error)
        except BaseException:
            self._end(LogClosed(str(self.name)))
            raise

    async def _step(self) -> bool:
        """Take the next step. Returns False when no step is left."""
        if self.owned_record.lost is not None:
            raise self.owned_record.lost
        if self._writing is not None and self._appender is None:
            await self._seal(self._writing)
        elif self._outstanding.queued > 0:
            await self._begin_ledger()
        elif self.chain.records != self.owned_record.record.ledgers:
            await self._record()
        elif self._drop_count > 0:
            await self._drop_head(self._drop_count)
        elif (self._closing or self._terminating) and self._appender is not None:
            self._retire()
        elif self._terminating and self.terminated is None:
            await self._record_end()
        else:
            return False
        return True

    def tend(self) -> None:
        """Retire the open ledger if it is too old, or if it is degraded and enough bookies are
        available for a new one. The broker calls `tend` about every `check_interval_s`."""
        appender = self._appender
        if appender is None:
            return
        # The maximum age is up to 5 % longer, depending on the ledger's id, so that not all topics
        # roll at once.
        age_s_max = self.config.ledger_age_s_max * (1 + appender.ledger * 40_503 % 1000 / 20_000)
        is_old = appender.appended >= 0 and self._age_s >= age_s_max
        if is_old or self._is_worth_moving(appender):
            self._retire()

    def _is_worth_moving(self, appender: Appender) -> bool:
        is_young = self._age_s < self.config.degraded_age_s_min * self._size_factor
        if not appender.degraded or is_young:
            return False
        return self.ledgers.full_ensemble_possible(self.quorum())

    async def _seal(self, appender: Appender) -> None:
        """Close the retired ledger. Report the entries in the closed ledger as appended, and put
        the others back into the queue."""
        metadata = await self._rolling.close(appender)
        assert metadata.last_entry is not None
        assert metadata.length is not None
        assert metadata.last_entry >= self._reported, "a ledger was closed before a reported entry"
        self._report(appender.ledger, metadata.last_entry)
        self.chain.close_ledger(length=metadata.length, closed_ms=max(self._clock.now_ms(), 1))
        self._reader.keep(appender.ledger, self.ledgers.reader(metadata))
        self._writing = None
        if self._outstanding.put_back() > 0:
            error = str(appender.failure)
            log.warning(
                "a ledger failed", topic=str(self.name), ledger=appender.ledger, error=error
            )
        if isinstance(appender.failure, LedgerRefused):
            # The next ledger would fail for the same reason.
            raise LogUnavailable(str(self.name), "appending", appender.failure)
        self.on_ledger_closed()

    async def _begin_ledger(self) -> None:
        """Create the next ledger, list it in the topic's record, then send the queue to it. Raises
        TopicFull."""
        require_ledger_capacity(self.name, len(self.chain.records))
        appender = await self._rolling.create(newer_than=self._newest)
        assert appender.ledger > self._newest, "positions would go backwards"
        self._newest = appender.ledger
        record = TopicLedger(appender.ledger, self._outstanding.first_queued_index)
        try:
            await self._record(record)
        except BaseException as error:  # also a cancellation: no other code has the appender
            appender.abandon()
            if isinstance(error, LogError) and not self.owned_record.may_be_recorded(
                appender.ledger
            ):
                await self._rolling.discard(appender)
            raise
        self.chain.open_ledger(record)
        self._writing = self._appender = appender
        self._reported = -1
        self._ledger_bytes = 0
        self._opened_s = asyncio.get_running_loop().time()
        self._size_factor = ledger_size_factor(len(self.chain.records))
        progress = partial(self._on_progress, appender)
        appender.progress = lambda: self.protect(progress)
        self._send(appender, self._opened_s)

    async def _record(self, *added: TopicLedger) -> None:
        """Write the chain's ledgers and the `added` ledgers into the topic's record."""
        chain = self.chain
        await self._rolling.record(
            lambda record: with_data_ledgers(record, (*chain.records, *added), chain.dropped)
        )

    def _end(self, error: LogError) -> None:
        """End the log. Pass the outstanding entries, which have an unknown outcome, to
        `on_failed`."""
        if self._ended is not None:
            return
        self._ended = error
        if self._writing is not None:
            self._writing.progress = _ignore
            self._writing.abandon()
        self._writing = self._appender = None
        unknown = self._outstanding.give_up()
        self._account()
        self._room.set()
        self._deletion.cancel()
        self._finished.set()
        self._stepped.set()
        if unknown:
            self.on_failed(unknown, error)
        self._notify()

    # ---- dropping the head -----------------------------------------------------------------------

    def drop_through(self, position: Position) -> int:
        """Request to drop the closed ledgers with no entry after `position`. Returns their number.

        Later `_settle` lists them in the topic's record as being deleted, and removes them from the
        log. Then deletion.py deletes them. If the broker crashes before the record lists them, the
        log keeps them.
        """
        count = self.chain.droppable(position)
        if count > 0:
            self._drop_through = max(self._drop_through, position)
            self._work.wake()
        return count

    def trim(self) -> None:
        """Request to drop the closed ledgers that are `trimmable`. When the log writes the topic's
        record, it calls `trimmable` again: meanwhile a subscription may have begun to need the
        entries."""
        self._trims = True
        if self._drop_count > 0:
            self._work.wake()

    async def wait_dropped(self, position: Position) -> None:
        """Wait until every closed ledger that ends at or before `position` is dropped. Raises the
        error that ended the log."""
        await self._wait_for(lambda: self.chain.droppable(position) == 0)

    @property
    def _drop_count(self) -> int:
        """The number of ledgers to drop now. It is limited by DELETING_MAX, the number of ledgers
        that the record may list as being deleted."""
        count = self._droppable
        room = DELETING_MAX - len(self.owned_record.record.deleting)
        return max(min(count, room), 0)

    @property
    def _droppable(self) -> int:
        trimmable = self.trimmable() if self._trims else None
        limit = max(self._drop_through, trimmable or EARLIEST)
        return 0 if limit == EARLIEST else self.chain.droppable(limit)

    async def _drop_head(self, count: int) -> None:
        """Drop the first `count` ledgers. The same ledgers are first after the write, because only
        `_settle` changes the list of ledgers."""
        left, head = self.chain.records[count:], self.chain.head_without(count)

        def drop(record: TopicRecord) -> TopicRecord:
            if self._droppable < count:
                return record
            return with_data_ledgers(record, left, head)

        await self._rolling.record(drop)
        if self.owned_record.record.ledgers != left:
            return  # a subscription needs these ledgers now
        dropped = self.chain.drop_head(count)
        for ledger in dropped:
            self._reader.forget(ledger)
        if self.chain.droppable(self._drop_through) == 0:
            self._drop_through = EARLIEST
        log.info("ledgers dropped", topic=str(self.name), ledgers=len(dropped), through=dropped[-1])
        self.on_head_dropped()
        self._notify()

    # ---- rolling and terminating on request ------------------------------------------------------

    async def roll(self) -> Position:
        """Close the open ledger if it has entries. Returns the position of the last entry in a
        closed ledger. Raises the error that ended the log."""
        rolled = self._writing
        if rolled is not None and (rolled.appended >= 0 or self._outstanding.queued > 0):
            if self._appender is rolled:
                self._retire()
            await self._wait_for(lambda: self._writing is not rolled)
        return self.chain.last_closed

    @property
    def terminated(self) -> Position | None:
        """The position of the final entry; EARLIEST: the log never had an entry; None: the log is
        not terminated."""
        place = self.owned_record.record.terminated
        return None if place is None else Position(place.ledger, place.entry)

    @property
    def is_terminating(self) -> bool:
        """True when the log is terminated or is being terminated."""
        return self._terminating or self.terminated is not None

    async def terminate(self) -> Position:
        """Refuse all later appends, permanently. On return the earlier appends are in the log, and
        the termination is durable. Returns the position of the last entry. Raises the error that
        ended the log."""
        self._terminating = True
        self._work.wake()
        await self._wait_for(lambda: self.terminated is not None)
        assert self.terminated is not None
        return self.terminated

    async def _record_end(self) -> None:
        end = EntryPlace(*self.chain.confirmed)
        await self._rolling.record(lambda record: replace(record, terminated=end))
        log.info("topic terminated", topic=str(self.name), last=str(self.chain.confirmed))
        self.on_terminated()

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a step of `_settle` makes `condition` true. Raises the error that ended the
        log."""
        while not condition():
            if self._ended is not None:
                raise self._ended
            await self._stepped.wait()

    # ---- asking ----------------------------------------------------------------------------------

    @property
    def state(self) -> LogState:
        match self._ended:
            case None if self._closing:
                return LogState.CLOSING
            case None:
                return LogState.OPEN if self.terminated is None else LogState.TERMINATED
            case LogClosed():
                return LogState.CLOSED
            case LogFenced():
                return LogState.FENCED
            case _:
                return LogState.FAILED

    @property
    def confirmed(self) -> Position:
        return self.chain.confirmed

    @property
    def first(self) -> Position:
        return self.chain.first

    @property
    def last_index(self) -> int:
        """The index of the last confirmed message; -1: the log never had a message."""
        return self.chain.next_index - 1

    @property
    def open_bytes(self) -> int:
        """The bytes sent to the open ledger; 0: there is no open ledger."""
        return 0 if self._writing is None else self._ledger_bytes

    @property
    def pending_appends(self) -> int:
        """The number of entries that are not confirmed yet."""
        return self._outstanding.queued + self._outstanding.in_flight

    @property
    def stored_bytes(self) -> int:
        """The bytes in all ledgers: the recorded length of closed ledgers, and the bytes sent to
        the open one."""
        return sum(part.length for part in self.chain.records) + self.open_bytes

    def ledger_sizes(self) -> list[tuple[int, int, int]]:
        """Return the id, the number of confirmed entries, and the bytes of each ledger, in order.
        The bytes of the open ledger include the entries in flight."""
        counts = self.chain.counts
        return [
            (it.ledger, counts[it.ledger], it.length if it.closed_ms else self._ledger_bytes)
            for it in self.chain.records
        ]

    @property
    def properties(self) -> Mapping[str, str]:
        """The properties in the topic's record."""
        return self.owned_record.record.properties

    async def set_property(self, key: str, value: str) -> None:
        """Set a property in the topic's record. The property is durable on return. Raises
        LogFenced, LogUnavailable, LogDamaged, TopicFull."""
        await self.change_properties(lambda properties: {**properties, key: value})

    async def change_properties(
        self, change: Callable[[Mapping[str, str]], Mapping[str, str]]
    ) -> None:
        """Change the properties in the topic's record. The properties are durable on return.
        `change` may be called several times. Raises LogFenced, LogUnavailable, LogDamaged,
        TopicFull."""
        await self.owned_record.change(
            lambda record: replace(record, properties=change(record.properties))
        )

    async def read(self, first: Position, *, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        """See LogReader.read."""
        return await self._reader.read(first, entries_max=entries_max, bytes_max=bytes_max)

    async def search(self, is_past: Callable[[StoredEntry], bool]) -> Position:
        """See LogReader.search."""
        return await self._reader.search(is_past)

    async def index_at(self, position: Position) -> int:
        """See LogReader.index_at."""
        return await self._reader.index_at(position)

    def watch(
        self, callback: Callable[[], None], *, read_position: Callable[[], Position]
    ) -> Callable[[], None]:
        """Call `callback` when `confirmed` has moved (once for many entries), when ledgers were
        dropped, and when the log has ended.

        `read_position` returns the position that the watcher reads next. While a watcher is near
        the end, the log puts new entries into the cache. Returns the function that ends the watch.
        """
        return self._watchers.add(callback, read_position).end

    async def close(self) -> None:
        """Refuse further appends, wait for the outstanding entries, close the ledger and record the
        close. `close` waits for the bookies without a limit: use a timeout, and call `abandon` when
        the timeout expires. Returns without an error also if the log fails meanwhile."""
        self._closing = True
        self._work.wake()
        await self._finished.wait()

    def abandon(self) -> None:
        """End the log at once, and pass the outstanding entries to `on_failed`. The next owner
        recovers the open ledger."""
        self._work.cancel()
        self._end(LogClosed(str(self.name)))

    @property
    def has_ended(self) -> bool:
        """True when the log was closed, abandoned or fenced, or has failed. A terminated log has
        not ended."""
        return self._ended is not None

    @property
    def has_open_ledger(self) -> bool:
        return self._writing is not None

    @property
    def is_settled(self) -> bool:
        """True when no entry is outstanding, no step is left to do, and no ledger is being
        deleted."""
        outstanding = self._outstanding.queued + self._outstanding.in_flight
        return outstanding == 0 and self._work.is_idle and self._deletion.is_idle

    @property
    def trouble(self) -> str:
        """The failing operation that the log retries, as a text for people. "": none fails."""
        return self._rolling.trouble or (self._writing.trouble if self._writing else "")

    def describe(self) -> dict[str, object]:
        """The state of the log, for people."""
        return {
            "state": self.state.value,
            "epoch": self.owned_record.epoch,
            "ledgers": len(self.chain.records),
            "open_ledger": None if self._writing is None else self._writing.ledger,
            "degraded": self._writing is not None and self._writing.degraded,
            "confirmed": str(self.confirmed),
            "last_index": self.last_index,
            "queued": self._outstanding.queued,
            "in_flight": self._outstanding.in_flight,
            "outstanding_bytes": self._outstanding.bytes,
            "trouble": self.trouble,
        }

    def check(self) -> None:
        self.chain.check()
        assert self._appender is None or self._appender is self._writing, "1: two ledgers"
        assert self._appender is None or self._outstanding.queued == 0, (
            "1: a queue beside an appender"
        )
        in_flight = self._outstanding.in_flight
        if self._writing is not None:
            assert in_flight == self._writing.appended - self._reported, "2: in flight"
            assert self.chain.counts[self._writing.ledger] == self._reported + 1, "2: reported"
        else:
            assert in_flight == 0, "2: in flight without a ledger"
        if self._ended is None:
            self._outstanding.check(confirmed_index=self.chain.next_index)


def _plainly(step: Callable[[], None]) -> None:
    step()
