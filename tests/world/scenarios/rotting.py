"""Stored data goes bad that no client reads: the bookies find it by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from world.nemesis import rot_entries, rot_records
from world.scenario import scenario
from world.scenarios.repairing import end_repaired
from world.stage import Stage

from magnetar.metadata.errors import MetadataError

if TYPE_CHECKING:
    from world.cluster import World

    from magnetar.metadata.model import LedgerId

TWO_ACKS = ("2/2/2", "3/3/2", "3/2/2", "5/3/2", "3/3/3")


@scenario(
    "scrub",
    "copies that no client reads go bad: scrubs or compactions find them, repair replaces them",
    TWO_ACKS,
)
async def rotting(world: World) -> None:
    random = world.random
    stage = await Stage.set(world, spares=random.choice((0, 1, 2)))
    ledgers: list[LedgerId] = []
    for _ in range(random.randint(3, 6)):
        writer = await stage.write(random.randint(0, 12))
        await stage.wait_everywhere()
        await writer.close()
        ledgers.append(writer.ledger)
    world.add_repairer()
    for _ in range(random.randint(2, 4)):
        bookie = random.choice(list(world.bookies.values()))
        if random.random() < 0.7:
            rot_entries(world, bookie, random)
        elif world.may_destroy(bookie):
            rot_records(world, bookie, random)
        if random.random() < 0.8 and len(ledgers) > 1:
            await _try_delete(stage, ledgers.pop(random.randrange(len(ledgers))))
        await stage.lull(4.0)
        kind = random.choice(("continues", "power", "killed", "compacts"))
        if kind == "compacts":
            bookie.meet_rot()
        elif kind != "continues":
            bookie.crash(power=kind == "power")
        await stage.lull(1.0)
        await bookie.restart()
    await end_repaired(stage)


@scenario(
    "holes",
    "a member lacks entries confirmed during its absence; each bookie that has them goes down",
    ("3/3/2", "5/3/2"),
)
async def holes(world: World) -> None:
    """Readers and scrubs do not notice a missing copy: only the comparison of copies does."""
    stage = await Stage.set(world, clients=2)
    await stage.write(world.random.randint(1, 3))
    stage.cut_off([stage.writer_client], [world.random.choice(stage.seated())])
    stage.append(world.random.randint(1, 12))
    await stage.lull(0.3)
    world.network.heal_all()
    stage.append(world.random.randint(0, 3))
    await stage.lull(0.1)
    stage.writer_client.crash()
    await stage.recover()
    stage.clients[1].crash()
    world.add_repairer()
    await end_repaired(stage)


async def _try_delete(stage: Stage, ledger: LedgerId) -> None:
    """A compaction of neighbouring data frees its space."""
    try:
        await stage.ledgers(1).delete(ledger)
    except MetadataError as error:
        stage.world.trace.tell(stage.clients[1].name, "not deleted:", error)
