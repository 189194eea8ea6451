"""Takeovers of a ledger whose writer does not know it: T1, T2, T4 to T7, T20, T42, T54."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from world.scenario import scenario
from world.stage import Stage

if TYPE_CHECKING:
    from world.cluster import World

    from magnetar.metadata.model import Member

REPLICATED = ("2/2/2", "3/3/2", "3/2/2", "5/3/2", "3/3/3")


@scenario("T1", "a writer cut from metadata, not from its bookies, while another recovers")
async def writer_without_metadata(world: World) -> None:
    stage = await Stage.set(world)
    await stage.write(world.random.randint(0, 5))
    assert stage.writer_client.store is not None
    world.meta.cut(stage.writer_client.host, stage.writer_client.store)
    stage.meanwhile(stage.keep_appending())
    await stage.lull(0.1)
    await stage.recover()
    await stage.lull(0.2)
    await stage.end()


@scenario("T2", "adds are still on their way to bookies that have said 'no such entry'", REPLICATED)
async def adds_land_late(world: World) -> None:
    stage = await Stage.set(world, clients=3)
    await stage.write(world.random.randint(0, 3))
    late = stage.some(stage.seated(), world.random.randint(1, len(stage.seated())))
    stage.cut([stage.writer_client], late)
    stage.append(world.random.randint(1, 3))
    hidden = stage.some(late, world.random.randint(0, len(late) - 1))
    stage.cut([stage.clients[1]], hidden)

    async def land() -> None:
        await stage.lull(0.05)
        for bookie in late:
            world.network.heal(stage.writer_client.host, bookie.host)
            await stage.lull(0.02)

    stage.meanwhile(land())
    await stage.lull(0.05)
    await stage.try_recover()
    stage.append(2)
    await stage.recover(client=2)
    await stage.lull(0.1)
    await stage.end()


@scenario("T4", "an empty ledger; too few bookies to prove it empty")
async def empty_ledger(world: World) -> None:
    stage = await Stage.set(world, spares=0)
    await stage.write()
    quorum, seated = world.quorum, stage.seated()
    first = world.random.randrange(quorum.ensemble_size)
    window = [seated[(first + at) % len(seated)] for at in range(quorum.write_quorum)]
    for bookie in stage.some(window, quorum.ack_quorum):
        bookie.crash(power=True)
        stage.restart_later(bookie, 20.0)
    await stage.must_not_close()
    for bookie in seated:
        await bookie.restart()
    closed = await stage.recover()
    assert closed.last_entry == -1
    await stage.end()


@scenario("T5", "power fails right after a bookie has answered a fence")
async def power_cut_after_fence(world: World) -> None:
    await _fence_and_fail(world, entries=world.random.randint(0, 3), power=True)


@scenario("T6", "a fence of a ledger that is new to the bookie, and a crash", REPLICATED)
async def fence_of_unknown_ledger(world: World) -> None:
    await _fence_and_fail(world, entries=0, power=True)


@scenario("T7", "only a fence, then other ledgers' entries, then a crash")
async def fence_among_others(world: World) -> None:
    await _fence_and_fail(world, entries=0, power=world.random.random() < 0.5, others=True)


async def _fence_and_fail(world: World, *, entries: int, power: bool, others: bool = False) -> None:
    """Each bookie fails after the answer to its fence, the writer continues, and another broker
    recovers."""
    stage = await Stage.set(world, clients=3)
    await stage.write(entries)

    def fail(member: Member, ledger: int) -> None:
        bookie = stage.node(member)
        if ledger == stage.ledger and bookie.alive and bookie.starts < 3:
            stage.fall_later(bookie, world.random.choice((1e-6, 0.002)), power, mean_s=0.3)

    world.oracle.when_fenced = fail
    stage.cut([stage.writer_client], stage.seated())
    stage.append(world.random.randint(1, 3))  # the adds are under way until then
    attempt = asyncio.get_running_loop().create_task(stage.try_recover())
    if others:
        await stage.try_another_ledger(client=2)
    await stage.lull(0.5)
    world.network.heal_all()
    stage.append(3)
    await attempt
    await stage.recover(client=2)
    stage.append(2)
    await stage.lull(0.3)
    await stage.end()


@scenario("T20", "fence and add meet at one bookie while its disk is slow")
async def fence_race(world: World) -> None:
    stage = await Stage.set(world)
    for bookie in world.bookies.values():
        bookie.disk.health.sync_s = world.random.choice((0.005, 0.05))
    await stage.write(world.random.randint(0, 2))
    stage.meanwhile(stage.keep_appending(0.005))
    await stage.lull(0.05)
    if world.random.random() < 0.5:
        bookie = world.random.choice(stage.seated())
        stage.fall_later(bookie, world.random.uniform(0.0, 0.2), True)
    await stage.recover()
    await stage.lull(0.1)
    await stage.end()


@scenario("T42", "a writer is stopped for half a minute and continues unaware")
async def zombie(world: World) -> None:
    stage = await Stage.set(world)
    await stage.write(world.random.randint(0, 4))
    stage.append(world.random.randint(0, 3))
    await stage.lull(0.001)
    stage.writer_client.pause()
    closed = await stage.recover()
    if world.random.random() < 0.5:
        bookie = world.random.choice(stage.seated())
        bookie.crash()
        stage.restart_later(bookie, 5.0)
    await asyncio.sleep(30.0)
    stage.writer_client.resume()
    stage.append(3)
    versions = len(world.oracle.life(stage.ledger).versions)
    await stage.lull(3.0)
    world.oracle.hold(
        len(world.oracle.life(stage.ledger).versions) == versions,
        "I2",
        lambda: f"a zombie changed the metadata of a ledger closed at {closed.last_entry}",
    )
    await stage.end()


@scenario("T54", "the answer to a fence is lost, and the fence is sent again")
async def fence_answer_lost(world: World) -> None:
    stage = await Stage.set(world, clients=3)
    await stage.write(world.random.randint(0, 3))
    mute = stage.some(stage.seated(), world.random.randint(1, len(stage.seated())))
    stage.cut(mute, [stage.clients[1]])
    await stage.try_recover()
    stage.append(2)
    if world.random.random() < 0.5:
        bookie = world.random.choice(mute)
        bookie.crash(power=True)
        await bookie.restart()
    world.network.heal_all()
    await stage.recover(world.random.choice((1, 2)))
    await stage.end()
