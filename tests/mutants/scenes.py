"""Scenarios that repeatedly reach the code of the planted bugs. Most steps of a whole cluster under
all kinds of faults do not concern a single bug."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from world.contender import Onlooker, Writer
from world.loop import until
from world.oracle import Violation
from world.scenario import Scenario
from world.scenarios import SCENARIOS

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import LedgerId
from magnetar.protos.envelope import decode_envelope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from world.cluster import World
    from world.nodes import BookieNode, ClientNode

    from magnetar.bookie.ledger.ledgers import Ledgers

ALONE_S = 1.0  # mean: how long the writer is left alone
PEEK_S = 0.01


class Takeover:
    """One client writes. Others take its ledger over at the same time, over links that are cut and
    healed, with bookies that stop answering. The writer continues unaware."""

    def __init__(
        self,
        world: World,
        *,
        takers: bool = True,
        spares: int = 0,
        power: float = 0.0,
        lasts_s: Sequence[float] = (0.3, 0.7, 2.0),
        goes_on_s: float = 3.0,
        sync_s: Sequence[float] = (0.0003, 0.01, 0.05),
        metadata_s: float = 0.0005,
    ) -> None:
        """`power`: the share of power cuts among the faults. `lasts_s`: the range of the mean
        duration of a fault. `metadata_s`: how long the metadata store takes to answer."""
        self.world = world
        self.random = world.draw("takeover")
        self.takers = takers
        self.spares = spares
        self.power = power
        self.lasts_s = self.random.choice(lasts_s)
        self.goes_on_s = goes_on_s
        self.sync_s = sync_s
        self.metadata_s = metadata_s
        self.ledger = LedgerId(-1)

    async def play(self) -> None:
        world, random = self.world, self.random
        for _ in range(world.quorum.ensemble_size + self.spares):
            bookie = world.add_bookie()
            bookie.disk.health.sync_s = random.choice(self.sync_s)
        world.network.weather.delay_s = random.choice((0.0005, 0.01))
        world.meta.troubles.delay_s = self.metadata_s
        await world.wait_registered()
        clients = [world.add_client() for _ in range(random.choice((2, 3)))]
        await asyncio.sleep(0.5)
        clients[0].host.spawn(self._peek())
        try:
            await self._compete(clients)
        except BaseExceptionGroup as group:
            if world.oracle.first is None and group.subgroup(Violation) is None:
                world.oracle.broken("bug", f"{group.exceptions}")  # a check in the real code
            raise (world.oracle.first or group) from None
        await world.heal()
        await asyncio.sleep(random.uniform(0.0, 2.0))
        for client in clients:
            client.crash()
        await world.judge()

    async def _compete(self, clients: list[ClientNode]) -> None:
        random = self.random
        async with asyncio.TaskGroup() as group:
            troubles = group.create_task(self._trouble(clients))
            writing = group.create_task(self._write(clients[0]))
            await asyncio.sleep(random.expovariate(1 / ALONE_S))
            for client in clients[1:] if self.takers else []:
                Onlooker(client, pause_s=0.2).begin()
                group.create_task(self._take_over(client))
            await asyncio.sleep(self.goes_on_s + random.expovariate(1 / 3.0))
            writing.cancel()
            troubles.cancel()

    async def _write(self, client: ClientNode) -> None:
        """Play one ledger after the other, until cancelled."""
        random = self.random
        ledgers = await client.wait_running()
        while True:
            try:
                appender = await ledgers.create(newer_than=self.ledger, custom={})
            except (LedgerError, MetadataError):
                await asyncio.sleep(0.1)
                continue
            self.ledger = appender.ledger
            writer = Writer(client, appender)
            end = random.randint(3, 60)
            try:
                while appender.appended < end:
                    for _ in range(random.randint(1, 3)):
                        writer.append(random.choice((10, 40)))
                    if random.random() < 0.4:
                        await writer.wait_confirmed()
                    await asyncio.sleep(random.expovariate(1 / 0.05))
                await writer.close()
            except (LedgerError, MetadataError):
                await self._maybe_close(writer)

    async def _maybe_close(self, writer: Writer) -> None:
        try:
            await writer.close()
        except (LedgerError, MetadataError):
            writer.abandon()

    async def _take_over(self, client: ClientNode) -> None:
        random = self.random
        ledgers = await client.wait_running()
        for _ in range(random.randint(1, 4)):
            await asyncio.sleep(random.expovariate(1 / 0.5))
            try:
                async with asyncio.timeout(random.choice((0.5, 2.0, 10.0))):
                    await ledgers.recover(max(self.ledger, LedgerId(0)))
            except (LedgerError, MetadataError, TimeoutError):
                continue

    async def _peek(self) -> None:
        """A reader often asks bookies for the confirmed entry."""
        while True:
            await asyncio.sleep(PEEK_S)
            for bookie in self.world.bookies.values():
                image = bookie.disk.image
                for ledger in range(self.ledger - 2, self.ledger + 1):
                    last = None if image is None else image.last_entry(ledger)
                    if last is not None:
                        named = decode_envelope(last[1]).confirmed
                        self.world.oracle.on_named(ledger, named)

    async def _trouble(self, clients: list[ClientNode]) -> None:
        world, random = self.world, self.random
        bookies = list(world.bookies.values())
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(random.expovariate(1 / 0.15))
                bookie = random.choice(bookies)
                if random.random() < self.power:
                    group.create_task(self._cut_power(bookie))
                elif random.random() < 0.75:
                    group.create_task(self._cut(random.choice(clients), bookie))
                else:
                    group.create_task(self._fall_silent(bookie))

    async def _cut(self, client: ClientNode, bookie: BookieNode) -> None:
        ends = [client.host, bookie.host]
        self.random.shuffle(ends)
        network = self.world.network
        network.cut(*ends)
        await asyncio.sleep(self.random.expovariate(1 / self.lasts_s))
        network.heal(*ends)

    async def _fall_silent(self, bookie: BookieNode) -> None:
        if bookie.alive and not bookie.host.paused:
            bookie.pause()
            await asyncio.sleep(self.random.expovariate(1 / self.lasts_s))
            bookie.resume()

    async def _cut_power(self, bookie: BookieNode) -> None:
        for _ in range(100):
            if bookie.disk.image is not None and bookie.disk.image.unsynced:
                break
            await asyncio.sleep(0.002)
        bookie.crash(power=True)
        await asyncio.sleep(self.random.expovariate(1 / 0.2))
        await bookie.restart()


async def _unfenced(world: World) -> None:
    """A bookie that was down when the others were fenced returns in time to be read (T2). An add
    that only one other bookie has is under way to it."""
    network, random = world.network, world.draw("unfenced")
    bookies = [world.add_bookie() for _ in range(3)]
    await world.wait_registered()
    writing, recovering = world.add_client(), world.add_client()
    ledgers, others = await writing.wait_running(), await recovering.wait_running()
    writer = Writer(writing, await ledgers.create(newer_than=LedgerId(-1), custom={}))
    for _ in range(random.randint(1, 3)):
        writer.append(10)
    await writer.wait_confirmed()
    await asyncio.sleep(0.2)  # so that all bookies have it
    has, lacks, down = random.sample(bookies, 3)
    for bookie in (lacks, down):
        network.cut(writing.host, bookie.host)
    writer.append(10)
    down.crash()
    await asyncio.sleep(0.05)
    for bookie in (has, lacks):
        network.cut(bookie.host, recovering.host)
    recovery = recovering.host.spawn(_recover(others, writer.ledger))
    await asyncio.sleep(0.1)
    await down.restart()
    await until(lambda: down.registered)
    await asyncio.sleep(0.02)
    network.heal(has.host, recovering.host)  # its fence was answered; later adds are too late
    await asyncio.sleep(0.01)
    network.cut(recovering.host, has.host)
    network.heal(lacks.host, recovering.host)
    await asyncio.wait({recovery}, timeout=5.0)
    network.heal(writing.host, down.host)
    with suppress(LedgerError):
        await writer.wait_confirmed()
    await world.heal()
    for client in (writing, recovering):
        client.crash()
    await world.judge()


async def _rollback(world: World) -> None:
    """An older image of a disk is restored, and the ledger is taken over while another bookie is
    down."""
    random = world.draw("rollback")
    bookies = [world.add_bookie() for _ in range(3)]
    await world.wait_registered()
    client = world.add_client()
    ledgers = await client.wait_running()
    writer = Writer(client, await ledgers.create(newer_than=LedgerId(-1), custom={}))
    victim, other = random.sample(bookies, 2)

    async def append() -> None:
        for _ in range(random.randint(1, 4)):
            writer.append(10)
        with suppress(LedgerError):
            await writer.wait_confirmed()

    await append()
    victim.disk.take_image()
    victim.crash()
    await victim.restart()
    await until(lambda: victim.registered)
    await asyncio.sleep(0.5)
    await append()
    await asyncio.sleep(random.choice((0.0, 0.5)))
    world.destroyed[victim.name] = None
    victim.crash(power=True)
    victim.disk.restore_image()
    await victim.restart()
    await until(lambda: victim.registered or victim.refused is not None)
    if random.random() < 0.5:
        other.crash()
    usurper = world.add_client()
    await _recover(await usurper.wait_running(), writer.ledger)
    await world.heal()
    client.crash()
    usurper.crash()
    await world.judge()


async def _recover(ledgers: Ledgers, ledger: LedgerId) -> None:
    with suppress(LedgerError, MetadataError):
        await ledgers.recover(ledger)


async def _takeover(world: World) -> None:
    await Takeover(world, spares=1).play()


async def _narrow(world: World) -> None:
    await Takeover(world).play()


async def _dark(world: World) -> None:
    await Takeover(world, power=0.1).play()


async def _relay(world: World) -> None:
    await Takeover(world, spares=1, power=0.3, sync_s=(0.01, 0.4)).play()


async def _lonely(world: World) -> None:
    await Takeover(world, takers=False, lasts_s=(6.0,), goes_on_s=15.0).play()


async def _changes(world: World) -> None:
    await Takeover(
        world, takers=False, spares=2, lasts_s=(1.0, 2.0), goes_on_s=10.0, metadata_s=0.3
    ).play()


_ALIKE = ("3/3/2", "2/2/2", "3/3/3")
_ALL = (*_ALIKE, "5/3/2")
CLUSTER = SCENARIOS["cluster"]
TAKEOVER = Scenario("takeover", "a ledger is taken from its writer", _ALL, _takeover)
NARROW = Scenario("narrow", "a ledger is taken over, without spares", _ALL, _narrow)
STRIPED = Scenario("striped", "a striped ledger is taken over", ("5/3/2", "3/2/2"), _narrow)
DARK = Scenario("dark", "a ledger is taken over amid power cuts", _ALL, _dark)
RELAY = Scenario("relay", "several recoverers give up in turn", _ALL, _relay)
LONELY = Scenario("lonely", "bookies are away for long", _ALIKE, _lonely)
CHANGES = Scenario("changes", "members are replaced, and recording it takes long", _ALIKE, _changes)
UNFENCED = Scenario("unfenced", "an unfenced bookie is read", ("3/3/2",), _unfenced)
ROLLBACK = Scenario("rollback", "an older disk image is restored", ("3/3/2", "2/2/2"), _rollback)
