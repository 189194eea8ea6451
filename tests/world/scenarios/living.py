"""The whole life of a topic: trims, deletion, unloading, sequence ids, cursor ledgers: `life`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from world.nodes import ClientNode
from world.owner import Clients, Owner, Sweeper, judge_life
from world.scenario import scenario
from world.stage import Stage

from magnetar.metadata import paths

if TYPE_CHECKING:
    from world.cluster import World
    from world.net import Host
    from world.nodes import Process

STEPS = {
    paths.TOPICS: "a topic's record",
    paths.DELETED_TOPICS: "a tombstone",
    paths.LEDGERS: "a ledger's record",
}
WRITES = ("create", "put", "delete")


class Fuse:
    """Kills an owner at one of its next writes to the metadata store, before or after the write
    takes effect."""

    def __init__(self, world: World, stage: Stage, owners: list[ClientNode]) -> None:
        self._world = world
        self._stage = stage
        self._owners = {owner.host: owner for owner in owners}
        self._random = world.draw("fuse")
        self._left = 0
        self._part = ""
        self.rearm()
        world.meta.on_request = self._on_request

    def rearm(self) -> None:
        self._part = self._random.choice(tuple(STEPS))
        self._left = self._random.randint(1, 8)

    def _on_request(self, host: Host, operation: str, path: str) -> None:
        owner = self._owners.get(host)
        if owner is None or operation not in WRITES or not path.startswith(self._part + "/"):
            return
        self._left -= 1
        if self._left == 0:
            delay_s = self._random.expovariate(1 / self._world.meta.troubles.delay_s)
            self._world.loop.later(delay_s, self._blow, owner, operation)

    def _blow(self, owner: ClientNode, operation: str) -> None:
        if owner.alive:
            self._world.trace.fault(owner.name, f"killed at {operation} of {STEPS[self._part]}")
            owner.crash()
            self._stage.meanwhile(_come_back(self._stage, owner))
        self.rearm()


@scenario("life", "owners trim, delete, unload and create a topic again, and die at any step")
async def life(world: World) -> None:
    stage = await Stage.set(world, spares=world.random.randint(0, 2), clients=3)
    random, troubles = world.random, world.meta.troubles
    owners, clients = stage.clients[: random.choice((1, 2, 3))], Clients.draw(world)
    pause_s = random.choice((0.3, 1.0))

    def begin(client: ClientNode) -> None:
        if client in owners:
            Owner(client, clients, pause_s=pause_s).begin()
        elif client is sweeper:
            Sweeper(client).begin()

    sweeper = world.add_client("sweeper")
    await sweeper.wait_running()
    world.on_client_restart = begin
    for client in (*owners, sweeper):
        begin(client)
    troubles.delay_s = random.choice((0.0008, 0.02))
    Fuse(world, stage, owners)
    for _ in range(random.randint(3, 10)):
        await stage.lull(0.7)
        troubles.reply_lost = random.choice((0.0, 0.0, 0.2))
        victim = random.choice([*owners, *world.bookies.values()])
        kind = random.choice(("dies", "is stopped", "is cut off", "reads old records", "nothing"))
        if kind == "dies" and victim.alive:
            victim.crash(power=random.random() < 0.5)
            stage.meanwhile(_come_back(stage, victim))
        elif kind == "is stopped" and victim in owners:
            victim.pause()
            stage.meanwhile(_go_on(stage, victim))
        elif kind == "is cut off":
            stage.cut_off([random.choice(owners)], stage.some(list(world.bookies.values()), 2))
            await stage.lull(0.5)
            world.network.heal_all()
        elif kind == "reads old records" and victim.alive and victim.store is not None:
            world.meta.fall_behind(victim.host, victim.store, random.expovariate(1 / 0.5))
    await stage.lull(1.0)
    world.meta.on_request = lambda host, operation, path: None
    clients.leave()
    await stage.end()
    await judge_life(world, clients)


async def _come_back(stage: Stage, process: Process) -> None:
    await stage.lull(0.5)
    await process.restart()
    if isinstance(process, ClientNode):
        stage.world.on_client_restart(process)


async def _go_on(stage: Stage, process: Process) -> None:
    await stage.lull(1.5)
    process.resume()
