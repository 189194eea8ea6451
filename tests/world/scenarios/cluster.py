"""The main scenario: a whole cluster, clients that compete, and all faults that the seed allows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from world.contender import Contender, Onlooker
from world.nemesis import Nemesis
from world.nodes import RepairNode
from world.scenario import scenario
from world.topic import Publisher, judge_topic

if TYPE_CHECKING:
    from world.cluster import World
    from world.nodes import ClientNode

STORM_S = 12.0  # the mean, in virtual time


@scenario("cluster", "clients compete for a log during all kinds of faults")
async def cluster(world: World) -> None:
    random = world.random
    bookies = random.randint(max(3, world.quorum.ensemble_size), 6)
    sync_s = random.choice((0.0003, 0.005, 0.05))
    for number in range(bookies):
        bookie = world.add_bookie(zone=random.choice(("", f"z{number % 3}")))
        bookie.disk.health.sync_s = sync_s
    world.network.weather.delay_s = random.choice((0.0002, 0.002, 0.02))
    world.meta.troubles.delay_s = random.choice((0.0005, 0.005, 0.05))
    await world.wait_registered()
    clients = [world.add_client() for _ in range(random.randint(2, 3))]
    pause_s = random.choice((0.3, 1.0, 3.0))
    burst_max = random.choice((2, 6, 12))

    repairers = [world.add_repairer() for _ in range(random.choice((0, 1, 1, 2)))]

    publishes = random.random() < 0.3

    def begin(client: ClientNode) -> None:
        if isinstance(client, RepairNode):
            return
        if publishes:
            Publisher(client, pause_s=pause_s).begin()
        Contender(client, pause_s=pause_s, burst_max=burst_max).begin()
        Onlooker(client).begin()

    world.on_client_restart = begin
    for client in clients:
        begin(client)
    nemesis = asyncio.get_running_loop().create_task(
        Nemesis(world, pause_s=random.choice((0.3, 1.0, 3.0))).run()
    )
    await asyncio.sleep(random.uniform(0.5, 2.0) * STORM_S)
    nemesis.cancel()
    await asyncio.wait({nemesis})
    if not nemesis.cancelled():
        nemesis.result()
    world.on_client_restart = lambda client: None
    await world.heal()
    for repairer in repairers:
        await repairer.restart()
    await asyncio.sleep(random.uniform(0.0, 3.0))
    for client in clients:
        client.crash()
    if publishes:
        await judge_topic(world)
    await world.judge()
    if not repairers:
        world.add_repairer()
    await world.wait_repaired()
    await world.judge()
