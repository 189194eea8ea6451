"""Bookies on RocksDB are killed repeatedly: T50."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from world.contender import Contender, Onlooker
from world.real import RealBookie, probing_here
from world.scenario import scenario

if TYPE_CHECKING:
    from world.cluster import World

SHM = Path("/dev/shm")  # after a kill the kernel still has the data: no real disk is needed
ROUNDS = (4, 8)
SIZES = (8, 200, 5_000)  # the largest values are stored in blob files


@scenario("T50", "repeated kill -9: the real stores, opened as the real bookie opens them")
async def killed_for_good(world: World) -> None:
    shm = SHM if SHM.is_dir() else None
    bookies: list[RealBookie] = []
    with tempfile.TemporaryDirectory(prefix="world-", dir=shm) as directory, probing_here():
        try:
            await _play(world, Path(directory), bookies)
        finally:
            for bookie in bookies:
                bookie.disk.let_go()


async def _play(world: World, directory: Path, bookies: list[RealBookie]) -> None:
    random = world.random
    for number in range(world.quorum.ensemble_size):
        bookie = RealBookie(world, f"b{number}", directory / f"b{number}")
        bookie.disk.health.sync_s = random.choice((0.0003, 0.01))
        world.bookies[bookie.name] = bookie
        bookies.append(bookie)
        bookie.start()
    await world.wait_registered()
    clients = [world.add_client() for _ in range(2)]
    for client in clients:
        Contender(client, pause_s=0.2, sizes=SIZES).begin()
        Onlooker(client).begin()
    for _ in range(random.randint(*ROUNDS)):
        await _strike(world, bookies)
    await world.heal()
    for client in clients:
        client.crash()
    await world.judge()


async def _strike(world: World, bookies: list[RealBookie]) -> None:
    """Kill some bookies, mostly during a write, and start them again at once."""
    random = world.random
    victims = random.sample(bookies, random.choice((1, 1, len(bookies))))
    await _wait_unsynced(victims)
    how = random.choice(("kill", "kill", "power", "stop"))
    for victim in victims:
        if how == "stop":
            victim.stop()
        else:
            victim.crash(power=how == "power")
    for victim in victims:
        await victim.restart()
        if random.random() < 0.2:  # while it starts, or soon after
            world.loop.later(random.expovariate(1 / 0.02), victim.crash_by, random.random() < 0.5)
    await asyncio.sleep(random.expovariate(1.0))
    if random.random() < 0.7:
        while not all(each.registered for each in bookies):
            for each in bookies:
                await each.restart()
            await asyncio.sleep(0.02)


async def _wait_unsynced(victims: list[RealBookie]) -> None:
    for _ in range(500):
        if any(each.disk.image and each.disk.image.unsynced for each in victims):
            return
        await asyncio.sleep(0.002)
