"""Reads of ranges, and tasks that wait: T46, T47."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from world.rot import Damage
from world.scenario import scenario
from world.scenarios.repairing import end_repaired
from world.stage import Stage

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.bookie.ledger.reader import WINDOWS_MAX
from magnetar.bookie.repair.reporting import REPORT_S
from magnetar.metadata.errors import MetadataError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from world.cluster import World

    from magnetar.bookie.ledger.appender import LedgerAppender
    from magnetar.bookie.ledger.handle import LedgerReader

TWO_ACKS = ("2/2/2", "3/3/2", "3/2/2", "5/3/2", "3/3/3")
SIZES = (30, 60, 400, 3_000)
CAPS = (1, 100, 1_000, 10_000, 1 << 20)
MIB = 1 << 20


@scenario(
    "T47",
    "ranges are read: with holes, and with size limits below one entry",
    TWO_ACKS,
)
async def ranges(world: World) -> None:
    stage = await Stage.set(world)
    random = world.random
    await stage.write(1)
    away = random.choice(stage.seated())
    if world.quorum.ack_quorum < world.quorum.write_quorum:
        # This bookie then lacks entries that the other bookies confirm.
        stage.cut_off([stage.writer_client], [away])
    for _ in range(random.randint(3, 12)):
        stage.writer.append(random.choice(SIZES))
    await stage.lull(1.5)
    world.network.heal_all()
    for _ in range(random.randint(0, 12)):
        stage.writer.append(random.choice(SIZES))
    await stage.writer.wait_confirmed()
    world.destroyed[away.name] = None
    for entry in range(stage.writer.appender.confirmed + 1):
        if random.random() < 0.2:
            away.disk.damage(stage.ledger, entry, random.choice(list(Damage)))
    reader: LedgerAppender | LedgerReader = stage.writer.appender
    if random.random() < 0.7:
        await stage.writer.close()
        reader = stage.ledgers(1).reader(stage.stored)
    for _ in range(12):
        first = random.randint(0, stage.writer.appender.confirmed)
        await _read(stage, reader, first, random.choice(CAPS))
    world.add_repairer()
    await asyncio.sleep(REPORT_S + 1.0)  # bad copies are recorded as under-replicated, and repaired
    await end_repaired(stage)


async def _read(stage: Stage, reader: LedgerAppender | LedgerReader, first: int, cap: int) -> None:
    """Read to the end, at most ten times."""
    oracle, last = stage.world.oracle, int(stage.writer.appender.confirmed)
    last = stage.random.randint(first, last)
    for _ in range(10):
        found = await reader.read(first, last, bytes_max=cap)
        ids = [entry.entry for entry in found]
        oracle.hold(
            ids == list(range(first, first + max(1, len(ids)))) and ids[-1] <= last,
            "T47",
            partial("read {}..{} and got {}".format, first, last, ids),
        )
        for entry in found:
            oracle.on_read(stage.ledger, entry.entry, bytes(entry.payload))
        striped = stage.world.quorum.ensemble_size > stage.world.quorum.write_quorum
        limit = 3 * cap + WINDOWS_MAX * max(SIZES) if striped else cap + max(SIZES)
        oracle.i17_within("read", sum(len(entry.payload) for entry in found), limit)
        first += len(found)
        if first > last:
            return


@scenario(
    "T46",
    "a task that waits for a writer wakes when its ledger is fenced, and no memory stays in use",
)
async def waiters(world: World) -> None:
    world.config = replace(world.config, unconfirmed_bytes_max=MIB, quorum_timeout_s=30.0)
    stage = await Stage.set(world)
    await stage.write(world.random.randint(0, 3))
    appender, services = stage.writer.appender, stage.ledgers(0).services
    for bookie in world.bookies.values():
        stage.cut([stage.writer_client], [bookie])
    while appender.in_flight_bytes < MIB:
        stage.writer.append(60_000)
    waiting = [stage.writer_client.host.spawn(_ended(appender.wait_room())) for _ in range(3)]
    await stage.lull(0.01)
    waiting[0].cancel()
    if world.random.random() < 0.5:
        waiting.append(stage.writer_client.host.spawn(_ended(appender.close())))
    await stage.lull(0.05)
    assert sum(task.done() for task in waiting) == 1
    kind = world.random.choice(("fenced", "fails", "abandoned"))
    if kind == "fenced":
        await stage.recover()
        world.network.heal_all()
    elif kind == "abandoned":
        stage.writer.abandon()
    await stage.until(lambda: all(task.done() for task in waiting))
    await asyncio.sleep(1.0)
    world.oracle.hold(
        appender.failure is not None, "T46", lambda: "the tasks woke, but the ledger has not failed"
    )
    streams = [services.pool.adds(member) for member in stage.stored.last_segment.members]
    left = [stream.member.bookie for stream in streams if stage.ledger in stream._sinks]
    kept = services.budget.retained
    world.oracle.hold(
        not left and not kept, "T46", lambda: f"{kept} bytes stay in use, and {left} hold places"
    )
    world.network.heal_all()
    await stage.recover()
    await stage.end()


async def _ended(waiting: Coroutine[object, object, object]) -> None:
    """Wait for the answer, whatever it is."""
    with suppress(LedgerError, MetadataError):
        await waiting
