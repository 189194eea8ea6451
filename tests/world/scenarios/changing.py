"""Ensembles that change while entries are in flight: T12 to T14, T33 to T35."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from world.scenario import scenario
from world.stage import Stage

from magnetar.bookie.ledger.errors import EntryTooLarge
from magnetar.protos.envelope import ENTRY_BYTES_MAX

if TYPE_CHECKING:
    from world.cluster import World
    from world.contender import Writer

REPLICATED = ("2/2/2", "3/3/2", "3/2/2", "5/3/2", "3/3/3")


@scenario(
    "T12", "members fail one after the other, amid changes, and replies of the store are lost"
)
async def changes_amid_changes(world: World) -> None:
    stage = await Stage.set(world, spares=world.random.randint(1, 4))
    await stage.write(world.random.randint(0, 2))
    stage.meanwhile(stage.keep_appending(0.01, entries=150))
    troubles = world.meta.troubles
    troubles.delay_s = world.random.choice((0.0008, 0.02, 0.1))
    troubles.reply_lost = world.random.choice((0.0, 0.3))
    for _ in range(world.random.randint(1, 5)):
        bookie = world.random.choice([*stage.seated(), *stage.spares()])
        if not bookie.alive:
            continue
        if world.random.random() < 0.5:
            bookie.crash(power=world.random.random() < 0.5)
            stage.restart_later(bookie, 0.4)
        else:
            stage.cut_off([stage.writer_client], [bookie])
        await stage.lull(0.15)
        if world.random.random() < 0.4:
            world.network.heal_all()
    if world.random.random() < 0.4:
        await stage.try_recover()
    await stage.lull(0.5)
    await stage.end()


@scenario("T13", "a late ack of a bookie that another one has replaced", REPLICATED)
async def late_ack(world: World) -> None:
    stage = await Stage.set(world)
    await stage.write(world.random.randint(0, 2))
    slow = world.random.choice(stage.seated())
    stage.cut([slow], [stage.writer_client])  # the acks of this bookie wait
    stage.append(world.random.randint(1, 4))
    world.network.weather.notice_s = 30.0  # no process notices
    await stage.lull(1.5)
    world.network.heal_all()
    stage.append(2)
    if world.random.random() < 0.5:
        slow.crash(power=True)
        await slow.restart()
    await stage.keep_appending(0.02, entries=5)
    await stage.lull(0.5)
    await stage.end()


@scenario(
    "T14", "no spare: the other members continue, or the ledger fails in time; a spare joins later"
)
async def no_spare(world: World) -> None:
    stage = await Stage.set(world, spares=0)
    await stage.write(world.random.randint(0, 2))
    for bookie in stage.some(stage.seated(), world.random.randint(1, 2)):
        bookie.crash()
    stage.meanwhile(stage.keep_appending(0.05, entries=100))
    await stage.lull(2.0)
    world.add_bookie()
    await stage.lull(4.0)
    await stage.until(
        lambda: (
            stage.writer.appender.failure is not None
            or stage.writer.appender.confirmed == stage.writer.appender.appended
        )
    )
    await stage.end()


@scenario("T33", "a bookie takes ten seconds for each add: memory stays bounded", REPLICATED)
async def slow_bookie(world: World) -> None:
    mib = 1 << 20
    world.config = replace(world.config, unconfirmed_bytes_max=mib, lag_bytes_max=mib)
    stage = await Stage.set(world, spares=world.random.randint(0, 1), clients=3)
    writers = [await stage.write(1, client=client) for client in range(3)]
    world.random.choice(stage.seated()).disk.health.sync_s = 10.0
    for writer in writers:
        stage.meanwhile(_write_much(writer))
    await stage.until(lambda: all(_written(writer) for writer in writers))
    await stage.end()


async def _write_much(writer: Writer) -> None:
    """Append a hundred entries; fifty of them reach the limit of bytes in flight."""
    for _ in range(100):
        async with asyncio.timeout(60.0):
            await writer.appender.wait_room()
        if writer.appender.failure is not None:
            return
        writer.append(20_000)


def _written(writer: Writer) -> bool:
    appender = writer.appender
    return appender.failure is not None or (appender.confirmed == appender.appended == 100)


@scenario("T34", "an entry that is too large is refused at once and changes nothing")
async def oversized(world: World) -> None:
    stage = await Stage.set(world)
    await stage.write(2)
    appended, versions = stage.writer.appender.appended, len(_versions(stage))
    try:
        stage.writer.append(ENTRY_BYTES_MAX + 1)
    except EntryTooLarge:
        pass
    else:
        raise world.oracle.broken("T34", "an oversized entry was taken")
    stage.append(3)
    await stage.writer.wait_confirmed()
    assert stage.writer.appender.appended == appended + 3
    world.oracle.hold(
        len(_versions(stage)) == versions, "T34", lambda: "the ensemble was changed for it"
    )
    await stage.end()


def _versions(stage: Stage) -> list[object]:
    return list(stage.world.oracle.life(stage.ledger).versions)


@scenario(
    "T35",
    "a certain entry ends each bookie that gets it: ensemble changes are bounded",
    REPLICATED,
)
async def poison(world: World) -> None:
    stage = await Stage.set(world, spares=3)
    await stage.write(2)

    async def die() -> None:
        while stage.writer.appender.failure is None:
            for bookie in stage.seated():
                image = bookie.disk.image
                if bookie.alive and image and image.entry(stage.ledger, 2) is not None:
                    bookie.crash()
                    stage.restart_later(bookie, 0.2)
            await asyncio.sleep(0.01)

    for bookie in world.bookies.values():
        bookie.disk.health.sync_s = 0.05  # no bookie acks it before dying
    stage.meanwhile(die())
    stage.append()
    await stage.until(lambda: stage.writer.appender.failure is not None or _confirmed(stage))
    world.oracle.hold(
        len(_versions(stage)) < 40, "T35", lambda: f"{len(_versions(stage))} versions of metadata"
    )
    await stage.end()


def _failed(stage: Stage) -> bool:
    return stage.writer.appender.failure is not None


def _confirmed(stage: Stage) -> bool:
    return int(stage.writer.appender.confirmed) == int(stage.writer.appender.appended)
