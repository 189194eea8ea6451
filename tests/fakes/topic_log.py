"""A running topic log on fake ledgers, with a record of its reports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, cast

from fakes.entries import entry_of, texts_of
from fakes.ledgers import FakeLedgers, Steps
from support import wait_until

from magnetar.broker.cursor.cursors import Cursors
from magnetar.broker.cursor.journal import CursorConfig
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.log import Log, LogConfig
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.protos.names import TopicName
from magnetar.runtime.on_demand import spawner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from fakes.cluster_state import ClusterState

    from magnetar.broker.errors import LogError
    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.broker.log.outstanding import Appended, AppendRun
    from magnetar.metadata.store import MetadataStore, Versioned
    from magnetar.protos.entry import EntryView

TOPIC = TopicName.parse("persistent://public/default/orders")

SMALL = LogConfig(
    ledger_entries_max=5,
    ledger_age_s_min=0.0,
    degraded_age_s_min=0.0,
    check_interval_s=0.01,
    retry_s_first=0.001,
    retry_s_max=0.01,
)
"""Ledgers of five entries, and short timeouts."""


class TopicLog:
    """An open log, and what it reported: `appended` in order, `failed` with the error."""

    def __init__(self, log: Log, cache: EntryCache) -> None:
        self.log = log
        self.cache = cache
        self.appended: list[tuple[object, Position]] = []
        self.batches: list[int] = []
        self.failed: list[object] = []
        self.error: LogError | None = None
        log.on_appended = self._on_appended
        log.on_failed = self._on_failed

    def _on_appended(self, done: Sequence[Appended]) -> None:
        self.appended += reported(done)
        self.batches.append(sum(part.count for part in done))

    def _on_failed(self, unknown: Sequence[AppendRun], error: LogError) -> None:
        assert self.error is None, "reported twice"
        for run in unknown:
            self.failed.extend(_names(run.context)[run.confirmed :])
        self.error = error

    def append(self, *names: str) -> None:
        """Entries of one message, each in a call of its own; the text is also what is reported."""
        for name in names:
            self.append_view(entry_of(name), name)

    def append_view(self, view: EntryView, name: object = None) -> None:
        """Any entry."""
        now = asyncio.get_running_loop().time()
        self.log.append([bytes(view.data)], {0: view}, [name], now=now)
        self.log.check()

    def append_run(self, *names: str) -> None:
        """Entries of one message in one call."""
        entries = [bytes(entry_of(name).data) for name in names]
        self.log.append(entries, {}, names, now=asyncio.get_running_loop().time())
        self.log.check()

    async def append_and_wait(self, *names: str) -> None:
        expected = len(self.appended) + len(names)
        self.append(*names)
        await wait_until(lambda: len(self.appended) >= expected, what="appended")

    async def contents(self, first: Position = EARLIEST) -> list[str]:
        """The texts of all messages from `first` on, read in small steps."""
        texts: list[str] = []
        while entries := await self.log.read(first, entries_max=3, bytes_max=1 << 20):
            for entry in entries:
                texts += texts_of(entry.data)
            first = self.log.chain.next_position(entries[-1].position)
        return texts


def reported(parts: Sequence[Appended]) -> list[tuple[object, Position]]:
    """The texts that a `TopicLog` appended, with their positions."""
    return [
        (name, Position(part.ledger, part.first_entry + number))
        for part in parts
        for number, name in enumerate(_names(part.context)[part.start : part.stop])
    ]


def _names(context: object) -> Sequence[object]:
    return cast("Sequence[object]", context)


_drawn = itertools.count(1)


def drawn_incarnation() -> str:
    """Return a new incarnation with each call."""
    return f"{next(_drawn):032x}"


async def _tend(log: Log) -> None:
    while True:
        await asyncio.sleep(log.config.check_interval_s)
        log.tend()


@contextlib.asynccontextmanager
async def opened(
    world: ClusterState,
    *,
    config: LogConfig = SMALL,
    steps: Steps | None = None,
    store: MetadataStore | None = None,
    ledgers: LedgerStore | None = None,
    cache_bytes: int = 1 << 20,
    close: bool = True,
    version_min: int = -1,
) -> AsyncIterator[TopicLog]:
    """A broker that owns the topic. `ledgers`: instead of the ledgers of the world. `close=False`:
    the broker dies at the end instead of closing the log. `version_min`: from the tombstone of a
    deleted topic."""
    cache = EntryCache(cache_bytes)
    log = await Log.open(
        TOPIC,
        store=store if store is not None else world.store(),
        ledgers=ledgers if ledgers is not None else FakeLedgers(world.ledgers, steps),
        config=config,
        clock=world.clock,
        cache=cache,
        incarnation=drawn_incarnation(),
        version_min=version_min,
    )
    async with asyncio.TaskGroup() as tasks:
        log.start(spawner(tasks))
        tending = tasks.create_task(_tend(log))
        topic = TopicLog(log, cache)
        try:
            yield topic
            if close:
                await log.close()
        finally:
            tending.cancel()
            log.abandon()
    log.check()
    cache.check()


QUICK = CursorConfig(gather_s=0.002)


@contextlib.asynccontextmanager
async def opened_cursors(
    log: Log, *, config: CursorConfig = QUICK, close: bool = True
) -> AsyncIterator[Cursors]:
    """The cursors of an open log. `close=False`: the broker dies at the end."""
    cursors = await Cursors.open(log, config)
    async with asyncio.TaskGroup() as tasks:
        cursors.start(spawner(tasks))
        try:
            yield cursors
            if close:
                await cursors.close()
        finally:
            cursors.abandon()
    cursors.check()


class SteppingStore(MemoryStore):
    """A broker's session to the metadata, each call of which is one of its `Steps`."""

    def __init__(self, tree: MemoryTree, steps: Steps) -> None:
        super().__init__(tree)
        self._steps = steps

    async def get(self, path: str) -> Versioned | None:
        bites = self._steps.before("metadata.get")
        found = await super().get(path)
        if bites:
            self._steps.bite("metadata.get")
        return found

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        bites = self._steps.before("metadata.put")
        try:
            return await super().put(path, value, expected=expected)
        finally:
            if bites:
                self._steps.bite("metadata.put")
