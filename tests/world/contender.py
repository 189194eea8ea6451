"""Clients that compete for one log of ledgers, as brokers compete for a topic, and clients that
only read it.

The log is a list of ledger ids in the metadata store. A client that wants to write closes the
earlier ledgers, creates a ledger, and adds it to the list by compare-and-set. Only then it writes.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from world.logs import LIST

from magnetar.bookie.contract import LastConfirmedRequest
from magnetar.bookie.ledger.errors import (
    EntryUnreadable,
    LedgerClosed,
    LedgerError,
    LedgerNotFound,
)
from magnetar.bookie.ledger.handle import LedgerReader
from magnetar.bookie.ledger.writer import ENTRY_OVERHEAD_BYTES
from magnetar.metadata.errors import BadVersion, MetadataError, NodeExists
from magnetar.metadata.model import LedgerId, LedgerState
from magnetar.metadata.store import ABSENT
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.errors import StreamClosed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from world.cluster import World
    from world.nodes import ClientNode

    from magnetar.bookie.ledger.appender import LedgerAppender
    from magnetar.bookie.ledger.ledgers import Ledgers

STUCK_S = 30.0  # beyond all timeouts of the configuration together, and all pauses


class Writer:
    """One ledger that is being written. Reports to the oracle whatever the writer reports."""

    def __init__(self, client: ClientNode, appender: LedgerAppender) -> None:
        self.appender = appender
        self.ledger = appender.ledger
        self._client = client
        self._oracle = client.world.oracle
        self._told = -1
        self._ended = False
        self._moved = asyncio.Event()
        appender.progress = self._on_progress

    def append(self, size: int) -> int:
        number = self.appender.appended + 1
        text = f"{self._client.name} {self.ledger}:{number} ".encode()
        payload = text + b"." * max(0, size - len(text))
        entry = self.appender.append_nowait([[payload]])
        self._oracle.on_append(self.ledger, entry, payload)
        self._check_memory(len(payload))
        return int(entry)

    def _check_memory(self, size: int) -> None:
        """Check I17 for a writer that waits for room before it appends."""
        assert self._client.ledgers is not None
        services = self._client.ledgers.services
        config, one = services.config, size + ENTRY_OVERHEAD_BYTES
        within = self._oracle.i17_within
        within("ledger", self.appender.in_flight_bytes, config.unconfirmed_bytes_max + one)
        within("process", services.budget.retained, config.retained_bytes_max + one)
        for lag in services.budget._lag.values():
            within("slow bookie", lag, config.lag_bytes_max + config.unconfirmed_bytes_max + one)

    async def wait_confirmed(self) -> None:
        """Wait until all appends are confirmed. Raises the error that the ledger failed with."""
        loop = asyncio.get_running_loop()
        since, begun_s = self._told, loop.time()
        while self._told < self.appender.appended and self.appender.failure is None:
            if self._told > since:
                since, begun_s = self._told, loop.time()
            stuck = loop.time() - begun_s > STUCK_S
            self._oracle.hold(
                not stuck, "I18", lambda: f"an add got no answer: {self.appender.describe()}"
            )
            self._moved.clear()
            try:
                async with asyncio.timeout(5.0):
                    await self._moved.wait()
            except TimeoutError:
                continue
        if self.appender.failure is not None:
            raise self.appender.failure

    async def close(self) -> None:
        await self.appender.close()

    def abandon(self) -> None:
        self._ended = True
        self.appender.abandon()

    def _on_progress(self) -> None:
        if not self._client.alive:
            return
        if self.appender.confirmed > self._told:
            self._told = self.appender.confirmed
            self._oracle.on_confirm(self.ledger, self._told)
        if self.appender.failure is not None and not self._ended:
            self._ended = True
            self._oracle.on_failure(self.ledger)
        self._moved.set()


class Contender:
    """Repeatedly takes the log over, writes for a while, and closes its ledger or abandons it."""

    def __init__(
        self,
        client: ClientNode,
        *,
        pause_s: float = 1.0,
        burst_max: int = 6,
        sizes: Sequence[int] = (8, 30, 200),
    ) -> None:
        self.world: World = client.world
        self.client = client
        self.sizes = sizes
        self.random = client.world.draw(f"{client.name} contends")
        self.pause_s = pause_s
        self.burst_max = burst_max

    def begin(self) -> None:
        self.client.host.spawn(self._contend())

    async def _contend(self) -> None:
        ledgers = await self.client.wait_running()
        while True:
            await asyncio.sleep(self.random.expovariate(1 / self.pause_s))
            try:
                await self._reign(ledgers)
            except (LedgerError, MetadataError) as error:
                self.world.trace.note(self.client.name, "reign over", type(error).__name__)
                self.world.trace.tell(self.client.name, "  because", error)

    async def _reign(self, ledgers: Ledgers) -> None:
        version, log = await self._read_log()
        for ledger in log[-2:]:
            await self._take_over(ledgers, ledger)
        if self.random.random() < 0.3:
            await self._read_back(ledgers, log)
        for _ in range(self.random.randint(1, 3)):
            entered = await self._enter(ledgers, version, log)
            if entered is None:
                return
            writer, version = entered
            log = [*log, writer.ledger]
            if not await self._write(writer):
                return
        if self.random.random() < 0.3 and len(log) > 3:
            await self._trim(ledgers, version, log)

    async def _take_over(self, ledgers: Ledgers, ledger: LedgerId) -> None:
        self.world.trace.note(self.client.name, "takes over", ledger)
        try:
            closed = await ledgers.recover(ledger)
        except LedgerNotFound:
            return  # trimmed meanwhile
        assert closed.state is LedgerState.CLOSED

    async def _read_back(self, ledgers: Ledgers, log: Sequence[LedgerId]) -> None:
        if not log:
            return
        metadata = await ledgers.metadata(self.random.choice(log))
        if metadata is None or metadata.state is not LedgerState.CLOSED:
            return
        assert metadata.last_entry is not None
        if metadata.last_entry < 0:
            return
        first = self.random.randint(0, metadata.last_entry)
        for entry in await ledgers.reader(metadata).read(
            first, metadata.last_entry, bytes_max=4_000
        ):
            self.world.oracle.on_read(metadata.ledger, entry.entry, bytes(entry.payload))

    async def _enter(
        self, ledgers: Ledgers, version: int, log: Sequence[LedgerId]
    ) -> tuple[Writer, int] | None:
        """Create a ledger and add it to the list. None: another client was faster."""
        newest = log[-1] if log else LedgerId(-1)
        appender = await ledgers.create(newer_than=newest, custom={"log": b""})
        assert self.client.store is not None
        value = json.dumps([*log, appender.ledger]).encode()
        try:
            version = await self.client.store.put(LIST, value, expected=version)
        except (BadVersion, NodeExists):
            appender.abandon()
            await ledgers.delete(appender.ledger)
            return None
        except MetadataError:
            appender.abandon()
            raise
        self.world.trace.note(self.client.name, "writes", appender.ledger)
        return Writer(self.client, appender), version

    async def _write(self, writer: Writer) -> bool:
        """Write to the ledger. Returns whether to continue with another ledger."""
        random = self.random
        for _ in range(random.randint(1, 5)):
            for _ in range(random.randint(1, self.burst_max)):
                try:
                    writer.append(random.choice(self.sizes))
                except LedgerClosed:
                    return False
                if random.random() < 0.2:
                    await asyncio.sleep(random.expovariate(1 / 0.002))
            if random.random() < 0.7:
                await writer.wait_confirmed()
            await asyncio.sleep(random.expovariate(1 / 0.2))
        end = random.random()
        if end < 0.6:
            await writer.close()
            return True
        if end < 0.8:
            writer.abandon()
        return False

    async def _trim(self, ledgers: Ledgers, version: int, log: Sequence[LedgerId]) -> None:
        assert self.client.store is not None
        await self.client.store.put(LIST, json.dumps(log[1:]).encode(), expected=version)
        self.world.trace.note(self.client.name, "deletes", log[0])
        await ledgers.delete(log[0])

    async def _read_log(self) -> tuple[int, list[LedgerId]]:
        assert self.client.store is not None
        stored = await self.client.store.get(LIST)
        if stored is None:
            return ABSENT, []
        return stored.version, [LedgerId(each) for each in json.loads(stored.value)]


class Onlooker:
    """Reads ledgers that other clients write: entries that a bookie calls confirmed (G2), and
    closed ledgers."""

    def __init__(self, client: ClientNode, *, pause_s: float = 0.5) -> None:
        self.world: World = client.world
        self.client = client
        self.random = client.world.draw(f"{client.name} reads")
        self.pause_s = pause_s

    def begin(self) -> None:
        self.client.host.spawn(self._look_on())

    async def _look_on(self) -> None:
        ledgers = await self.client.wait_running()
        while True:
            await asyncio.sleep(self.random.expovariate(1 / self.pause_s))
            lives = self.world.oracle.lives
            if not lives:
                continue
            try:
                await self._look(ledgers, self.random.choice(list(lives)[-6:]))
            except EntryUnreadable as error:
                self._check_missing(error)
            except (LedgerError, MetadataError, StreamClosed, TimeoutError) as error:
                self.world.trace.tell(self.client.name, "saw nothing:", error)

    async def _look(self, ledgers: Ledgers, ledger: LedgerId) -> None:
        metadata = await ledgers.metadata(ledger)
        if metadata is None:
            return
        last = -1 if metadata.last_entry is None else int(metadata.last_entry)
        if metadata.last_entry is None:
            member = self.random.choice(metadata.last_segment.members)
            request = LastConfirmedRequest(
                incarnation=member.incarnation, ledger=ledger, master_key=metadata.master_key
            )
            async with asyncio.timeout(1.0):
                answer = await ledgers.services.pool.peer(member).last_confirmed(request)
            if answer.code is not BookieCode.OK:
                return
            last = answer.confirmed
        if last < 0:
            return
        first = self.random.randint(0, last)
        reader = LedgerReader(metadata, ledgers.services)
        for entry in await reader.read(first, last, bytes_max=1_000):
            self.world.oracle.on_read(ledger, entry.entry, bytes(entry.payload))

    def _check_missing(self, error: EntryUnreadable) -> None:
        """A reader reports an entry as lost only if it is: never here (I9)."""
        self.world.trace.tell(self.client.name, "unreadable:", error)
        life = self.world.oracle.life(error.ledger)
        self.world.oracle.hold(not error.missing or life.deleted, "I9", lambda: str(error))
