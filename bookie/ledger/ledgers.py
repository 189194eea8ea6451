"""Ledgers: the ledger package's interface for brokers. Create, recover, read and delete ledgers."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from magnetar.bookie.ledger.appender import LedgerAppender
from magnetar.bookie.ledger.bad_copies import BadCopies
from magnetar.bookie.ledger.budget import ByteBudget
from magnetar.bookie.ledger.ensembles import Ensembles
from magnetar.bookie.ledger.errors import LedgerError, RecoveryIncomplete
from magnetar.bookie.ledger.handle import LedgerReader
from magnetar.bookie.ledger.health import BookieHealth
from magnetar.bookie.ledger.records import LedgerRecords
from magnetar.bookie.ledger.recovery_driver import recover_ledger
from magnetar.bookie.ledger.services import Services
from magnetar.metadata.errors import MetadataError, Unavailable
from magnetar.metadata.model import EntryId, LedgerMetadata, LedgerState, Segment
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from random import Random

    from magnetar.bookie.ledger.bookie_registry import BookieRegistry
    from magnetar.bookie.ledger.config import LedgerConfig
    from magnetar.bookie.ledger.pool import PeerPool
    from magnetar.bookie.ledger.quorum import Quorum
    from magnetar.metadata.ids import LedgerIds
    from magnetar.metadata.model import LedgerId, Member
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

STOPPING: Final = "this process is stopping"

TICK_S: Final = 0.1
"""The period of ticks. A timeout is noticed at the next tick. One tick serves all ledgers with
pending work."""

TICKS_PER_TURN: Final = 500
"""Ledgers that are ticked, or told of a change of the list of bookies, in one step of the loop:
20 us each."""

STOOD_STILL_S: Final = 0.5
"""If a tick is this late, this process stood still. The bookies may have answered: their acks may
wait unread."""


class Ledgers:
    """The ledgers of one process. `run` must be running; it also runs `bookies` and `peers`."""

    def __init__(
        self,
        store: MetadataStore,
        bookies: BookieRegistry,
        peers: PeerPool,
        ids: LedgerIds,
        config: LedgerConfig,
        clock: Clock,
        random: Random,
    ) -> None:
        self._config = config
        self._directory = bookies
        self._pool = peers
        self._ids = ids
        self._clock = clock
        self._random = random
        self.bad_copies = BadCopies()  # drain these notes into under-replication records
        health = BookieHealth(half_life_s=config.health_half_life_s)
        self.services = Services(
            config=config,
            records=LedgerRecords(store, timeout_s=config.metadata_timeout_s),
            directory=bookies,
            pool=peers,
            health=health,
            bad_copies=self.bad_copies,
            ensembles=Ensembles(bookies, peers, config, health, random),
            budget=ByteBudget(
                retained_bytes_max=config.retained_bytes_max, lag_bytes_max=config.lag_bytes_max
            ),
            random=random,
            spawn=self._spawn,
        )
        self._group: asyncio.TaskGroup | None = None  # None: not running
        # appenders that need ticks, in the order of their requests
        self._busy: dict[LedgerAppender, None] = {}
        # appenders that have not learned of the last change of the list of bookies
        self._untold: dict[LedgerAppender, None] = {}
        self._boots: dict[Member, int] = {}  # the boot epoch of the last registration
        self._recovering: dict[LedgerId, asyncio.Future[LedgerMetadata]] = {}

    async def run(self) -> None:
        """Keep connections, notice timeouts and change ensembles, until cancelled."""
        unwatch = self._directory.watch(self._on_bookies_changed)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    group.create_task(self._directory.run())
                    group.create_task(self._pool.run())
                    await self._tick()
                finally:
                    self._group = None
                    self._untold.clear()
                    unwatch()
        finally:
            for ledger, answer in self._recovering.items():
                _answer_stopping(ledger, answer)  # its task was cancelled before its first step
            self._recovering.clear()

    def held_bytes(self, unconfirmed: int) -> int:
        """Return the memory of the `unconfirmed` bytes and of the confirmed entries that slow
        bookies still lack. The result is at least the size of the longest outbox: the outbox of a
        replaced bookie is kept until its connection ends."""
        return max(unconfirmed + self.services.budget.lagging, self._pool.longest_outbox)

    async def wait_ready(self) -> None:
        """Return when the list of bookies was read once; `create` and `recover` call it themselves.
        Raises Unavailable when that takes too long."""
        try:
            async with asyncio.timeout(self._config.metadata_timeout_s):
                await self._directory.wait_ready()
        except TimeoutError:
            raise Unavailable("the bookie list could not be read") from None

    async def create(
        self, *, newer_than: LedgerId, custom: Mapping[str, bytes], quorum: Quorum | None = None
    ) -> LedgerAppender:
        """Create an empty ledger with an id above `newer_than`, on bookies that answer. With too
        few bookies it gets fewer copies, and its metadata says so. `quorum` None: the configured
        quorum. Raises NotEnoughBookies and the errors of the metadata store."""
        wanted = quorum or self._config.quorum
        loop = asyncio.get_running_loop()
        await self.wait_ready()
        deadline = loop.time() + self._config.metadata_timeout_s
        ledger = await self._ids.next(newer_than, deadline=deadline)
        quorum, members = await self.services.ensembles.found(quorum)
        metadata = LedgerMetadata(
            ledger=ledger,
            state=LedgerState.OPEN,
            ensemble_size=quorum.ensemble_size,
            write_quorum=quorum.write_quorum,
            ack_quorum=quorum.ack_quorum,
            segments=(Segment(EntryId(0), members),),
            master_key=self._random.getrandbits(64),
            creator_token=self._random.getrandbits(64),
            created_ms=self._clock.now_ms(),
            under_replicated=quorum.write_quorum < wanted.write_quorum,
            custom=dict(custom),
        )
        await self.services.records.create(metadata)
        log.info(
            "ledger created",
            ledger=ledger,
            quorum=str(quorum),
            members=[member.bookie for member in members],
        )
        return LedgerAppender(metadata, self.services, on_busy=self._on_busy)

    def full_ensemble_possible(self, quorum: Quorum | None = None) -> bool:
        """Return whether a ledger created now would probably get a whole ensemble, judged by the
        list of bookies and their recent errors. A broker asks this to decide when to roll a
        degraded ledger."""
        return self.services.ensembles.full_ensemble_possible(quorum)

    async def recover(self, ledger: LedgerId) -> LedgerMetadata:
        """Take the ledger over from its writer, close it, and return its metadata, CLOSED. Returns
        at once if the ledger is closed already. Concurrent callers for the same ledger share one
        recovery. A cancelled caller does not stop the recovery.

        Raises LedgerNotFound, RecoveryIncomplete and the errors of the metadata store. After an
        error other than LedgerNotFound the caller may try again.
        """
        await self.wait_ready()
        if self._group is None:
            raise RecoveryIncomplete(ledger, STOPPING)
        running = self._recovering.get(ledger)
        if running is None:
            running = asyncio.get_running_loop().create_future()
            running.add_done_callback(_look_at)
            self._recovering[ledger] = running
            self._spawn(self._recover(ledger, running))
        return await asyncio.shield(running)

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        """Return the ledger's metadata. None: there is no such ledger. Raises the errors of the
        metadata store."""
        return await self.services.records.get(ledger)

    def reader(self, metadata: LedgerMetadata) -> LedgerReader:
        """Return a reader of a CLOSED ledger."""
        assert metadata.state is LedgerState.CLOSED, metadata.state
        return LedgerReader(metadata, self.services)

    async def delete(self, ledger: LedgerId) -> None:
        """Delete the ledger's metadata; bookies delete its entries later. Succeeds when the ledger
        is absent already. Raises the errors of the metadata store."""
        await self.services.records.delete(ledger)

    async def _recover(self, ledger: LedgerId, answer: asyncio.Future[LedgerMetadata]) -> None:
        try:
            closed = await recover_ledger(ledger, self.services)
        except (LedgerError, MetadataError) as error:
            answer.set_exception(error)
        else:
            answer.set_result(closed)
        finally:
            del self._recovering[ledger]
            _answer_stopping(ledger, answer)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        stood_still = False
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            now = loop.time()
            # Process the bookies' waiting answers first, but skip only one tick.
            stood_still = not stood_still and now - due >= STOOD_STILL_S
            if stood_still:
                log.warning("process was suspended", seconds=round(now - due, 1))
                continue
            for number, appender in enumerate(list(self._busy), 1):
                if appender in self._busy and not appender.tick(now):
                    del self._busy[appender]
                if number % TICKS_PER_TURN == 0:
                    await asyncio.sleep(0)

    def _on_busy(self, appender: LedgerAppender) -> None:
        self._busy[appender] = None

    def _on_bookies_changed(self) -> None:
        now = asyncio.get_running_loop().time()
        for member, registration in self._directory.listed.items():
            if self._boots.get(member) != registration.boot_epoch:
                self._boots[member] = registration.boot_epoch
                self.services.health.on_success(member, now)  # the bookie has just started
        is_telling = bool(self._untold)
        self._untold |= self._busy
        if not is_telling:
            self._spawn(self._tell_busy())

    async def _tell_busy(self) -> None:
        """Tell the appenders that have not learned of the last change."""
        while self._untold:
            for appender in list(islice(self._untold, TICKS_PER_TURN)):
                del self._untold[appender]
                appender.on_bookies_changed()
            if self._untold:
                await asyncio.sleep(0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that ends with `run`. Does nothing when `run` has ended."""
        if self._group is None:
            work.close()
        else:
            self._group.create_task(work)


def _answer_stopping(ledger: LedgerId, answer: asyncio.Future[LedgerMetadata]) -> None:
    """Fail an unanswered recovery. Its callers were not cancelled, so they get an error."""
    if not answer.done():
        answer.set_exception(RecoveryIncomplete(ledger, STOPPING))


def _look_at(answer: asyncio.Future[LedgerMetadata]) -> None:
    """Retrieve the error, so that asyncio does not warn when no caller waits for it any more."""
    if not answer.cancelled():
        answer.exception()
