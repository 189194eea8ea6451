"""Owners that are stopped, cut off, or wrongly called silent: `silent`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from world.owner import Clients, judge_life
from world.scenario import scenario
from world.silent import Cluster, SilentOwner, keep_asking
from world.stage import Stage

if TYPE_CHECKING:
    from world.cluster import World
    from world.nodes import ClientNode, Process

FAULTS = (
    "is stopped",
    "is cut off from all",
    "is cut off from the bookies",
    "is cut off from the brokers",
    "is heard by one bookie",
    "dies",
    "lies",
    "a bookie is stopped",
)


@scenario(
    "silent", "owners are stopped, cut off, or wrongly called silent, and replaced by the rule"
)
async def silent(world: World) -> None:
    stage = await Stage.set(world, spares=world.random.randint(0, 2), clients=3)
    random, clients, cluster = world.random, Clients.draw(world), Cluster()
    nodes = stage.clients[: random.choice((2, 2, 3))]
    asker = world.add_client("asker")

    def begin(client: ClientNode) -> None:
        if client in nodes:
            SilentOwner(client, clients, cluster).begin()

    world.on_client_restart = begin
    for node in nodes:
        begin(node)
    stage.meanwhile(keep_asking(asker, cluster, pause_s=random.choice((0.1, 0.4))))
    await stage.until(lambda: cluster.owners)
    for _ in range(random.randint(2, 6)):
        await stage.lull(1.5)
        owners = [it.client for it in cluster.owners]
        victim = random.choice(owners or nodes)
        await _befall(stage, cluster, victim, nodes, random.choice(FAULTS))
    cluster.lies = False
    world.network.heal_all()
    for node in nodes:
        node.resume()
    await stage.until(lambda: cluster.owners)
    clients.leave()
    await stage.end()
    await judge_life(world, clients)


async def _befall(
    stage: Stage, cluster: Cluster, victim: ClientNode, nodes: list[ClientNode], fault: str
) -> None:
    world, random = stage.world, stage.random
    bookies, others = list(world.bookies.values()), [it for it in nodes if it is not victim]
    world.trace.note(victim.name, fault)
    lasts_s = random.uniform(1.0, 6.0)
    match fault:
        case "is stopped":
            victim.pause()
        case "is cut off from all":
            stage.cut_off([victim], [*bookies, *others])
        case "is cut off from the bookies":
            stage.cut([victim], bookies)
        case "is cut off from the brokers":
            stage.cut_off([victim], others)
        case "is heard by one bookie":
            stage.cut_off([victim], [*stage.some(bookies, len(bookies) - 1), *others])
        case "dies":
            victim.crash(power=random.random() < 0.5)
            stage.meanwhile(_come_back(stage, victim))
        case "lies":
            cluster.lies = True
        case "a bookie is stopped":
            stopped: Process = random.choice(bookies)
            stopped.pause()
            await asyncio.sleep(lasts_s)
            stopped.resume()
            return
    await asyncio.sleep(lasts_s)
    cluster.lies = False
    world.network.heal_all()
    victim.resume()


async def _come_back(stage: Stage, node: ClientNode) -> None:
    await stage.lull(0.5)
    await node.restart()
    stage.world.on_client_restart(node)
