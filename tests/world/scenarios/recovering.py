"""Several recoverers, and ledgers in unusual states: T3, T15 to T19, T44, T51, T52."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from world.contender import Onlooker
from world.scenario import scenario
from world.stage import Stage

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.metadata.errors import MetadataError

if TYPE_CHECKING:
    from world.cluster import World

REPLICATED = ("2/2/2", "3/3/2", "3/2/2", "5/3/2", "3/3/3")


@scenario("T3", "the last segment is empty: every last-confirmed answer is 'nothing'", REPLICATED)
async def empty_last_segment(world: World) -> None:
    await _empty_tail(world, more=False)


@scenario(
    "T52", "the last segment is empty, or its tail has a gap: the length is exact", REPLICATED
)
async def empty_or_gappy_tail(world: World) -> None:
    await _empty_tail(world, more=True)


async def _empty_tail(world: World, *, more: bool) -> None:
    """All members are replaced at once, and the writer dies before the new members have any
    entry."""
    stage = await Stage.set(world, spares=world.quorum.ensemble_size)
    await stage.write(world.random.randint(1, 5))
    stage.cut_off([stage.writer_client], stage.seated())
    stage.append(world.random.randint(1, 4))
    segments = len(stage.stored.segments)
    await stage.until(lambda: len(stage.stored.segments) > segments or _failed(stage))
    if more:
        stage.cut([stage.writer_client], stage.some(stage.seated(), 2))
        await stage.lull(0.003)
    stage.writer_client.crash()
    world.network.heal_all()
    closed = await stage.recover()
    assert closed.last_entry is not None
    assert closed.last_entry >= stage.stored.last_segment.first_entry - 1
    await stage.end()


def _failed(stage: Stage) -> bool:
    return stage.writer.appender.failure is not None


@scenario("T15", "recoverers side by side with a writer that closes and changes its ensemble")
async def all_at_once(world: World) -> None:
    stage = await Stage.set(world, clients=world.random.randint(3, 4))
    await stage.write(world.random.randint(0, 3))
    stage.append(world.random.randint(0, 3))
    victim = world.random.choice(stage.seated())
    if world.random.random() < 0.7:
        world.loop.later(world.random.uniform(0, 0.05), victim.crash_by, False)
        stage.restart_later(victim, 0.5)

    async def attempt(client: int) -> None:
        await stage.lull(0.02)
        await stage.try_recover(client)

    async def close() -> None:
        await stage.lull(0.02)
        try:
            await stage.writer.close()
        except (LedgerError, MetadataError) as error:
            world.trace.tell("c0", "not closed:", error)

    for client in range(1, len(stage.clients)):
        stage.meanwhile(attempt(client))
    stage.meanwhile(close())
    await stage.keep_appending(0.01, entries=5)
    await stage.recover()
    await stage.lull(0.2)
    await stage.end()


@scenario("T16", "a recoverer dies at any step, another one continues")
async def recoverer_dies(world: World) -> None:
    stage = await Stage.set(world, clients=4)
    await stage.write(world.random.randint(0, 4))
    stage.append(world.random.randint(1, 6))
    await stage.lull(0.001)
    stage.writer_client.crash()
    for client in (1, 2):
        process = stage.clients[client]
        process.host.spawn(_quietly(stage, client))
        await asyncio.sleep(world.random.uniform(0.0, 0.02))
        if world.random.random() < 0.3:
            bookie = world.random.choice(stage.seated())
            bookie.crash(power=True)
            stage.restart_later(bookie, 0.5)
        process.crash()
    await stage.recover(client=3)
    await stage.end()


async def _quietly(stage: Stage, client: int) -> None:
    await stage.try_recover(client)


@scenario(
    "T17", "bookies fail the write-backs: private ensembles, and a second recoverer", REPLICATED
)
async def failing_write_backs(world: World) -> None:
    stage = await Stage.set(world, spares=world.random.randint(1, 3), clients=3)
    await stage.write(world.random.randint(0, 3))
    stage.cut([stage.writer_client], stage.some(stage.seated(), 2))
    stage.append(world.random.randint(1, 5))
    await stage.lull(0.003)
    stage.writer_client.crash()
    world.network.heal_all()
    failing = stage.some(list(world.bookies.values()), world.random.randint(1, 2))
    for bookie in failing:
        bookie.disk.health.write_fails = True

    async def mend() -> None:
        await stage.lull(0.5)
        for bookie in failing:
            bookie.disk.health.write_fails = False
            await stage.lull(0.2)
            await bookie.restart()

    async def second() -> None:
        await stage.lull(0.05)
        await stage.try_recover(client=2)

    stage.meanwhile(mend())
    stage.meanwhile(second())
    await stage.try_recover()
    await stage.recover(client=2)
    await stage.end()


@scenario(
    "T18",
    "recovery with one unresponsive bookie decides at once; with too many it gives up in time",
)
async def hung_bookies(world: World) -> None:
    stage = await Stage.set(world, spares=world.quorum.ensemble_size)
    await stage.write(world.random.randint(0, 3))
    stage.writer_client.crash()
    quorum, seated = world.quorum, stage.seated()
    first = world.random.randrange(quorum.ensemble_size)
    window = [seated[(first + at) % len(seated)] for at in range(quorum.write_quorum)]
    begun_s = world.loop.time()
    for bookie in stage.some(window, quorum.ack_quorum):
        bookie.pause()
    await stage.must_not_close()
    took_s = world.loop.time() - begun_s
    world.oracle.hold(took_s < 5.0, "I18", lambda: f"gave up only after {took_s} s")
    window[0].resume()
    for bookie in seated:
        bookie.resume()
    if quorum.ack_quorum > 1:
        world.random.choice(seated).pause()
        await stage.recover()
    await stage.end()


@scenario(
    "T19",
    "an entry that only one bookie has: kept or dropped, but for all readers alike",
    REPLICATED,
)
async def lonely_entry(world: World) -> None:
    stage = await Stage.set(world, clients=4)
    await stage.write(world.random.randint(0, 3))
    holder, *others = stage.some(stage.seated(), world.quorum.ensemble_size)
    stage.cut([stage.writer_client], others)
    stage.append(world.random.randint(1, 3))
    await stage.lull(0.003)
    stage.writer_client.crash()
    world.network.heal_all()
    stage.cut_off([stage.clients[1]], stage.some([holder, *others], 1))
    ends = []
    for client in (1, 2, 3):
        closed = await stage.try_recover(client)
        if closed is not None:
            ends.append(closed.last_entry)
    world.oracle.hold(len(set(ends)) <= 1, "I3", lambda: f"several ends: {ends}")
    await stage.end()


@scenario("T44", "a close whose reply is lost is repeated: once, and with the right length")
async def close_again(world: World) -> None:
    stage = await Stage.set(world)
    await stage.write(world.random.randint(0, 6))
    troubles = world.meta.troubles
    troubles.reply_lost, troubles.request_lost = 0.4, 0.2
    while True:
        try:
            closed = await stage.writer.appender.close()
        except MetadataError:
            continue
        break
    world.oracle.hold(
        closed.last_entry == stage.writer.appender.confirmed,
        "I12",
        lambda: f"closed at {closed.last_entry}",
    )
    again = await stage.writer.appender.close()
    assert (again.last_entry, again.length) == (closed.last_entry, closed.length)
    await stage.end()


@scenario("T51", "recoverers overlap while readers poll the confirmed entry", REPLICATED)
async def overlapping(world: World) -> None:
    stage = await Stage.set(world, spares=2, clients=5)
    await stage.write(world.random.randint(0, 2))
    stage.cut([stage.writer_client], stage.some(stage.seated(), 2))
    stage.append(world.random.randint(1, 3))
    await stage.lull(0.003)
    stage.writer_client.crash()
    world.network.heal_all()
    Onlooker(stage.clients[4], pause_s=0.003).begin()
    for client in (1, 2, 3):
        process = stage.clients[client]
        stage.cut_off([process], stage.some(stage.seated(), world.random.randint(0, 1)))
        process.host.spawn(_quietly(stage, client))
        await stage.lull(0.005)
        if world.random.random() < 0.5:
            world.loop.later(world.random.uniform(0, 0.02), process.crash)
    await stage.lull(0.1)
    world.network.heal_all()
    await stage.lull(0.5)
    await stage.end()
