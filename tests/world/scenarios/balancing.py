"""Bundles that are spread over brokers; the brokers die, return, stop and are cut off:
`balance`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from world.balance import BUNDLES, RULES, Balanced, counts, keep_looking_up, records
from world.scenario import scenario
from world.stage import Stage

if TYPE_CHECKING:
    from world.cluster import World
    from world.nodes import ClientNode

FAULTS = ("dies", "is stopped", "is cut off from the brokers", "is cut off from all")
SPREAD_ROUNDS = 12  # the rounds after the last fault in which all bundles are spread
STEADY_ROUNDS = 12  # the next rounds, in which no bundle moves


@scenario("balance", "bundles are spread over brokers that join and leave, and then none moves")
async def balance(world: World) -> None:
    stage = await Stage.set(world, clients=world.random.randint(2, 4))
    random, nodes = world.random, list(stage.clients)
    asker = world.add_client("asker")
    brokers: dict[str, Balanced] = {}
    late = nodes[-1] if random.random() < 0.5 else None

    def begin(client: ClientNode) -> None:
        if client in nodes:
            Balanced(client, brokers).begin()

    world.on_client_restart = begin
    for node in nodes:
        if node is not late:
            begin(node)
    stage.meanwhile(keep_looking_up(asker, brokers, pause_s=0.05))
    for _ in range(random.randint(1, 4)):
        await stage.lull(4 * RULES.period_s)
        await _befall(stage, random.choice(nodes), nodes, random.choice(FAULTS))
    if late is not None and late.name not in brokers:
        begin(late)
    world.network.heal_all()
    for node in nodes:
        node.resume()
    await _settle(stage, asker, [node.name for node in nodes])
    await stage.end()


async def _settle(stage: Stage, asker: ClientNode, names: list[str]) -> None:
    """After the last fault, all bundles are soon owned and spread evenly, and then none moves."""

    def is_spread() -> bool:
        found = counts(asker, names)
        return sum(found) == len(BUNDLES) and max(found) - min(found) <= 1

    oracle = stage.world.oracle
    await stage.until(is_spread)
    await asyncio.sleep(SPREAD_ROUNDS * RULES.period_s)
    oracle.hold(is_spread(), "SPREAD", lambda: f"{names} own {counts(asker, names)} bundles")
    before = records(asker)
    await asyncio.sleep(STEADY_ROUNDS * RULES.period_s)
    after = records(asker)
    moved = [str(bundle) for bundle in BUNDLES if before[bundle] != after[bundle]]
    oracle.hold(not moved, "STEADY", lambda: f"{moved} moved between healthy brokers")


async def _befall(stage: Stage, victim: ClientNode, nodes: list[ClientNode], fault: str) -> None:
    world, random = stage.world, stage.random
    others = [it for it in nodes if it is not victim]
    world.trace.note(victim.name, fault)
    match fault:
        case "dies":
            victim.crash(power=random.random() < 0.5)
            await stage.lull(1.0)
            await victim.restart()
            world.on_client_restart(victim)
        case "is stopped":
            victim.pause()
        case "is cut off from the brokers":
            stage.cut_off([victim], others)
        case "is cut off from all":
            stage.cut_off([victim], [*world.bookies.values(), *others])
    await asyncio.sleep(random.uniform(1.0, 6.0))
    world.network.heal_all()
    victim.resume()
