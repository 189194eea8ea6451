"""The real log of a topic, over ledgers that report to the oracle."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from magnetar.broker.errors import LogDamaged, LogError
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.log import Log, LogConfig
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.metadata.model import EntryId
from magnetar.protos.entry import parse_entry
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    decode_messages,
    encode_message,
    read_entry,
)
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from typing import Any

    from world.cluster import World
    from world.nodes import ClientNode
    from world.oracle import Oracle

    from magnetar.bookie.ledger.appender import LedgerAppender
    from magnetar.bookie.ledger.errors import LedgerError
    from magnetar.bookie.ledger.handle import LedgerReader
    from magnetar.bookie.ledger.ledgers import Ledgers
    from magnetar.bookie.ledger.quorum import Quorum
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.ledgers import Buffer, LedgerStore, ReadEntry
    from magnetar.broker.log.outstanding import Appended
    from magnetar.metadata.model import LedgerId, LedgerMetadata

TOPIC = TopicName.parse("persistent://public/default/orders")
HEADER = EntryHeader("producer", 1_700_000_000_000)
QUICK = LogConfig(
    ledger_entries_max=6,
    ledger_age_s_min=0.0,
    degraded_age_s_min=1.0,
    pending_bytes_max=20_000,
    check_interval_s=1.0,
    retry_s_max=0.5,
)
"""Ledgers of six entries."""

CLOSE_S = 5.0
READ_S = 90.0  # the time in which a new owner reads everything, after all faults are healed
SIZES = (10, 30, 300, 3_000)
BURST = 8  # entries between two checks for room
ENTRY_BYTES = 3_200  # the size of the largest message, with its envelope and metadata


class ToldLedgers:
    """A `LedgerStore` whose appenders report their confirmations to the oracle."""

    def __init__(self, ledgers: Ledgers, client: ClientNode) -> None:
        self._ledgers = ledgers
        self._client = client

    async def create(
        self, *, newer_than: LedgerId, custom: Mapping[str, bytes], quorum: Quorum | None = None
    ) -> ToldAppender:
        return ToldAppender(
            await self._ledgers.create(newer_than=newer_than, custom=custom, quorum=quorum),
            self._client,
        )

    async def recover(self, ledger: LedgerId) -> LedgerMetadata:
        return await self._ledgers.recover(ledger)

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        return await self._ledgers.metadata(ledger)

    def reader(self, metadata: LedgerMetadata) -> LedgerReader:
        return self._ledgers.reader(metadata)

    async def delete(self, ledger: LedgerId) -> None:
        await self._ledgers.delete(ledger)

    def full_ensemble_possible(self, quorum: Quorum | None = None) -> bool:
        return self._ledgers.full_ensemble_possible(quorum)


class ToldAppender:
    """An `Appender`."""

    def __init__(self, appender: LedgerAppender, client: ClientNode) -> None:
        self.progress: Callable[[], None] = lambda: None
        self._appender = appender
        self._client = client
        self._oracle: Oracle = client.world.oracle
        self._told = -1
        self._ended = False
        appender.progress = self._on_progress

    @property
    def ledger(self) -> LedgerId:
        return self._appender.ledger

    @property
    def confirmed(self) -> EntryId:
        return self._appender.confirmed

    @property
    def appended(self) -> EntryId:
        return self._appender.appended

    @property
    def failure(self) -> LedgerError | None:
        return self._appender.failure

    @property
    def degraded(self) -> bool:
        return self._appender.degraded

    @property
    def trouble(self) -> str:
        return self._appender.trouble

    def append_nowait(self, payloads: Sequence[Sequence[Buffer]]) -> EntryId:
        first = self._appender.append_nowait(payloads)
        for entry, parts in enumerate(payloads, first):
            self._oracle.on_append(self.ledger, EntryId(entry), b"".join(parts))
        return first

    @property
    def has_room(self) -> bool:
        return self._appender.has_room

    async def wait_room(self) -> None:
        await self._appender.wait_room()

    async def read(self, first: EntryId, last: EntryId, *, bytes_max: int) -> Sequence[ReadEntry]:
        return await self._appender.read(first, last, bytes_max=bytes_max)

    async def close(self) -> LedgerMetadata:
        return await self._appender.close()

    def abandon(self) -> None:
        self._ended = True
        self._appender.abandon()

    def _on_progress(self) -> None:
        if not self._client.alive:
            return
        if self._appender.confirmed > self._told:
            self._told = self._appender.confirmed
            self._oracle.on_confirm(self.ledger, self._told)
        if self._appender.failure is not None and not self._ended:
            self._ended = True
            self._oracle.on_failure(self.ledger)
        self.progress()


class Publisher:
    """Repeatedly takes the topic over, publishes for a while, reads back, and releases the topic.
    It does not check whether another broker owns the topic."""

    def __init__(self, client: ClientNode, *, pause_s: float = 1.0) -> None:
        self.world: World = client.world
        self.client = client
        self.random = client.world.draw(f"{client.name} publishes")
        self.pause_s = pause_s
        self._reigns = 0
        self._sent = 0

    def begin(self) -> None:
        self.client.host.spawn(self._publish())

    async def _publish(self) -> None:
        ledgers = await self.client.wait_running()
        while True:
            await asyncio.sleep(self.random.expovariate(1 / self.pause_s))
            try:
                await self._reign(ToldLedgers(ledgers, self.client))
            except LogError as error:
                self.world.trace.note(self.client.name, "topic lost", type(error).__name__)
                self.world.trace.tell(self.client.name, "  because", error)
                damaged = isinstance(error, LogDamaged)
                self.world.oracle.hold(not damaged, "I14", partial("{}".format, error))

    async def _reign(self, ledgers: LedgerStore) -> None:
        log = await open_log(self.client, ledgers)
        self._reigns += 1
        self.world.trace.note(self.client.name, "owns the topic", log.owned_record.epoch)
        logs = self.world.oracle.logs

        def on_appended(done: Sequence[Appended]) -> None:
            if self.client.alive:
                for part in done:
                    logs.on_acknowledged(str(part.context), Position(part.ledger, part.first_entry))

        log.on_appended = on_appended
        log.on_failed = lambda messages, error: None  # each of these messages may be stored or not
        log.start(self._spawn)
        tending = self.client.host.spawn(_tend(log))
        try:
            await self._use(log)
        finally:
            tending.cancel()
            log.abandon()

    def _spawn(self, run: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        return self.client.host.spawn(run())

    async def _use(self, log: Log) -> None:
        random = self.random
        for _ in range(random.randint(1, 12)):
            for _ in range(random.randint(1, BURST)):
                self._send(log)
            log.check()
            await asyncio.sleep(random.expovariate(1 / 0.1))
            await log.wait_room()
            if random.random() < 0.2:
                await read_log(self.world, log, stop=random.randint(1, 20))
        if random.random() < 0.6:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await log.close()
            except TimeoutError:
                self.world.trace.tell(self.client.name, "no longer waits for the close")

    def _send(self, log: Log) -> None:
        self._sent += 1
        name = f"{self.client.name}/{self.client.starts}/{self._reigns} {self._sent}"
        message = OutgoingMessage(
            name.encode() + b"." * self.random.choice(SIZES), sequence_id=self._sent
        )
        view = parse_entry(b"".join(encode_message(message, HEADER)))
        log.append([bytes(view.data)], {0: view}, name, now=asyncio.get_running_loop().time())
        self.world.oracle.logs.on_sent(name)
        held = log.describe()["outstanding_bytes"]
        assert isinstance(held, int)
        self.world.oracle.i17_within("topic", held, QUICK.pending_bytes_max + BURST * ENTRY_BYTES)


async def open_log(client: ClientNode, ledgers: LedgerStore) -> Log:
    """Open the log as a broker does when it takes the topic over. Raises LogError."""
    assert client.store is not None
    return await Log.open(
        TOPIC,
        store=client.store,
        ledgers=ledgers,
        config=QUICK,
        clock=client.clock,
        cache=EntryCache(20_000),
        incarnation=f"{client.world.draw(client.name).getrandbits(128):032x}",
    )


async def _tend(log: Log) -> None:
    while True:
        await asyncio.sleep(log.config.check_interval_s)
        log.tend()


async def read_log(
    world: World, log: Log, *, stop: int, first: Position = EARLIEST
) -> list[StoredEntry]:
    """Read some entries. Raises ReadFailed."""
    found = await log.read(first, entries_max=stop, bytes_max=1 << 20)
    for entry in found:
        world.oracle.logs.on_read(text_of(entry), entry.position)
    return found


def text_of(entry: StoredEntry) -> str:
    [message] = decode_messages(read_entry(entry.data))
    return message.payload.decode().rstrip(".")


async def judge_topic(world: World) -> None:
    """Take the topic a last time, and read everything: I14."""
    judge = world.add_client("topic judge")
    ledgers = ToldLedgers(await judge.wait_running(), judge)
    why = ""
    try:
        async with asyncio.timeout(READ_S):
            while True:
                try:
                    found = await _read_all(world, await open_log(judge, ledgers))
                except LogError as error:
                    why = str(error)
                    await asyncio.sleep(0.5)
                else:
                    break
    except TimeoutError:
        raise world.oracle.broken("I18", f"the topic after the healing: {why}") from None
    world.oracle.logs.on_all_read(
        [(entry.position, entry.index, text_of(entry)) for entry in found]
    )
    judge.crash()


async def _read_all(world: World, log: Log) -> list[StoredEntry]:
    found: list[StoredEntry] = []
    while log.last_index >= 0 and (not found or found[-1].position < log.confirmed):
        first = EARLIEST
        if found:
            ledger, entry = found[-1].position
            first = Position(ledger, entry + 1)
        found += await read_log(world, log, stop=50, first=first)
    return found
