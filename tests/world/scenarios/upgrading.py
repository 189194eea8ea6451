"""A cluster in which a later version runs beside ours: T49."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from world.scenario import scenario
from world.scenarios.repairing import end_repaired
from world.stage import Stage

from magnetar.bookie.ledger.errors import LedgerFenced
from magnetar.bookie.repair.decommission import drain, undrain
from magnetar.metadata import paths
from magnetar.metadata.errors import InvalidRecord, MetadataError
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.model import BookieId, LedgerId

if TYPE_CHECKING:
    from world.cluster import World
    from world.contender import Writer

TWO_ACKS = ("2/2/2", "3/3/2", "3/2/2", "5/3/2", "3/3/3")


@scenario(
    "T49", "a later version writes fields and a format that this version does not know", TWO_ACKS
)
async def later_version(world: World) -> None:
    stage = await Stage.set(world, spares=2, clients=3)
    random = world.random
    await stage.write(random.randint(0, 4))
    world.add_repairer()
    _extend(stage)
    stage.append(2)
    victim = random.choice(stage.seated())
    victim.crash(power=True)  # an ensemble change or an under-replication record, and a cookie
    stage.append(3)
    stage.meanwhile(_keep_extending(stage))
    await stage.lull(2.0)
    await _operate(stage)
    await victim.restart()
    await _in_a_later_format(stage)
    if random.random() < 0.5:
        await stage.recover()
    else:
        await _close(stage)
    await stage.lull(3.0)
    await end_repaired(stage)


def _extend(stage: Stage) -> None:
    """All records that more than one process writes."""
    world = stage.world
    members = [member.bookie for part in stage.stored.segments for member in part.members]
    for path in (
        paths.ledger(stage.ledger),
        paths.under_replicated(stage.ledger),
        paths.NEXT_LEDGER_ID,
        paths.CHECKED,
        *(paths.bookie_cookie(bookie) for bookie in members),
        *(paths.bookie_draining(bookie) for bookie in members),
    ):
        world.later.extend(path)


async def _keep_extending(stage: Stage) -> None:
    while True:
        await stage.lull(0.5)
        _extend(stage)


async def _operate(stage: Stage) -> None:
    """Changes that an operator and other brokers make meanwhile."""
    client = stage.clients[2]
    assert client.store is not None
    bookie = BookieId(stage.random.choice(stage.seated()).name)
    await drain(client.store, client.clock, bookie, decommission=False)
    _extend(stage)
    await drain(client.store, client.clock, bookie, decommission=True)
    await stage.lull(0.5)
    await undrain(client.store, bookie)
    deadline = stage.world.loop.time() + 5.0
    await LedgerIds(client.store).next(LedgerId(-1), deadline=deadline)


async def _in_a_later_format(stage: Stage) -> None:
    """The record and the ledger's entries stay unchanged until the record can be read again."""
    path = paths.ledger(stage.ledger)
    stage.world.later.take(path)
    stage.append(2)
    if stage.random.random() < 0.5:
        stage.random.choice(stage.seated()).crash()
    assert await stage.try_recover() is None
    try:
        await stage.ledgers(2).metadata(stage.ledger)
    except InvalidRecord:
        pass
    else:
        raise stage.world.oracle.broken("T49", f"{path} of a later format was understood")
    await asyncio.sleep(8.0)  # rounds of collectors, an audit, attempts to repair
    stage.world.later.give_back(path)


async def _close(stage: Stage) -> None:
    writer: Writer = stage.writer
    try:
        async with asyncio.timeout(20.0):
            await writer.close()
    except (MetadataError, TimeoutError, LedgerFenced):
        return  # fenced: a repair has closed the ledger, because its writer could not
