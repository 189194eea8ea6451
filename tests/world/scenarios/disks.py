"""Disks that fail, lie, fill up or are replaced: T8 to T11, T21 to T23, T36 to T39."""

from __future__ import annotations

from typing import TYPE_CHECKING

from world.contender import Onlooker
from world.disk import DISK_BYTES
from world.rot import Damage
from world.scenario import scenario
from world.stage import PATIENCE_S, Stage

from magnetar.bookie.ledger.appender import LedgerAppender
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_registration
from magnetar.metadata.model import BookieId

if TYPE_CHECKING:
    from world.cluster import World
    from world.nodes import BookieNode

TWO_ACKS = ("2/2/2", "3/3/2", "3/2/2", "5/3/2", "3/3/3")


@scenario("T8", "a bookie loses everything and returns empty at the same address", TWO_ACKS)
async def wiped(world: World) -> None:
    await _lose_copies(world, "wipe")


@scenario("T9", "a disk is rolled back to an older image of the same incarnation", TWO_ACKS)
async def rolled_back(world: World) -> None:
    await _lose_copies(world, "roll back")


@scenario("T10", "a log with damage in the middle or a lost end is never answered 'no'", TWO_ACKS)
async def damaged_log(world: World) -> None:
    await _lose_copies(world, world.random.choice(("break", "lose the end")))


async def _lose_copies(world: World, how: str) -> None:
    """One bookie of the ensemble loses copies: while its ledger is written, during the takeover, or
    afterwards."""
    stage = await Stage.set(world, clients=3)
    await stage.write(world.random.randint(0, 2))
    victim = world.random.choice(stage.seated())
    if how == "roll back":
        victim.disk.take_image()
        victim.crash()
        await victim.restart()
        await stage.until(lambda: victim.registered)
    stage.append(world.random.randint(1, 6))
    await stage.lull(0.02)
    zombie = world.random.random() < 0.5
    if zombie:
        stage.writer_client.pause()
    if world.random.random() < 0.5:
        await stage.try_recover()
    world.destroyed[victim.name] = None
    victim.crash(power=True)
    _destroy(victim, how)
    victim.may_format_anew = how == "wipe"
    await victim.restart()
    await stage.until(lambda: victim.registered)
    if zombie:
        stage.writer_client.resume()
    stage.append(3)
    await stage.lull(0.1)
    await stage.recover(client=2)
    await stage.end()


def _destroy(victim: BookieNode, how: str) -> None:
    disk = victim.disk
    if how == "wipe":
        disk.wipe()
    elif how == "roll back":
        disk.restore_image()
        victim.world.trace.fault(victim.name, "older image restored")
    elif how == "break":
        disk.opens = False
    else:
        disk.lose_tail(victim.random.randint(1, 10))


@scenario(
    "T11",
    "blocks of a store cannot be read: clients read another replica, and no entry is lost",
    TWO_ACKS,
)
async def unreadable_blocks(world: World) -> None:
    await _damaged_copies(world, Damage.UNREADABLE)


@scenario(
    "T37",
    "a bookie returns another entry than the requested one: clients read another replica",
    TWO_ACKS,
)
async def wrong_entry(world: World) -> None:
    await _damaged_copies(world, Damage.SWAPPED)


@scenario("T36", "one replica's bytes are wrong: clients read another one", TWO_ACKS)
async def wrong_bytes(world: World) -> None:
    await _damaged_copies(world, Damage.FLIPPED)


async def _damaged_copies(world: World, kind: Damage) -> None:
    stage = await Stage.set(world, clients=3)
    await stage.write(world.random.randint(2, 8))
    stage.append(2)
    await stage.lull(0.003)
    victim = world.random.choice(stage.seated())
    world.destroyed[victim.name] = None
    for entry in range(10):
        if world.random.random() < 0.5:
            victim.disk.damage(stage.ledger, entry, kind)
    Onlooker(stage.clients[1], pause_s=0.05).begin()
    await stage.lull(0.3)
    await stage.recover(client=2)
    await stage.lull(0.3)
    await stage.end()


@scenario(
    "T21", "disks fill: fences and write-backs pass while there is space, no bookie leaves the list"
)
async def full_disk(world: World) -> None:
    if world.random.random() < 0.4:
        await _fill_at_once(world)
    else:
        await _fill_slowly(world)


async def _fill_at_once(world: World) -> None:
    stage = await Stage.set(world)
    await stage.write(world.random.randint(0, 3))
    stage.meanwhile(stage.keep_appending(0.02))
    victim = world.random.choice(stage.seated())
    victim.disk.health.full = True
    await stage.lull(0.5)
    await stage.try_recover()
    victim.disk.health.full = False
    await victim.restart()
    await stage.recover()
    await stage.end()


async def _fill_slowly(world: World) -> None:
    """Any number of bookies refuse ordinary adds and report it. A ledger can still be recovered,
    even if all bookies refuse. When they have space again, they accept adds again."""
    stage = await Stage.set(world)
    await stage.write(world.random.randint(0, 3))
    stage.meanwhile(stage.keep_appending(0.02))
    bookies = list(world.bookies.values())
    victims = stage.some(bookies, world.random.randint(1, len(bookies)))
    for victim in victims:
        victim.disk.leave_free(int(world.random.uniform(0.02, 0.049) * DISK_BYTES))
    await stage.until(lambda: all(_listed(world, victim, read_only=True) for victim in victims))
    if world.random.random() < 0.3:
        victims[0].crash(power=True)
        await victims[0].restart()
        await stage.until(lambda: _listed(world, victims[0], read_only=True))
    await stage.lull(0.3)
    await stage.recover()
    for victim in victims:
        if world.random.random() < 0.5:  # the reserve is used up, so all other adds fail, too
            victim.disk.leave_free(world.random.choice((0, 3_000)))
            await stage.until(lambda who=victim: not (who.alive and who.disk.reserve.held))
        victim.disk.health.taken = 0
        if not victim.alive:  # the bookie was writing when the disk became full
            await victim.restart()
    await stage.until(lambda: all(_listed(world, victim, read_only=False) for victim in victims))
    await stage.write(2)
    await stage.end()


def _listed(world: World, bookie: BookieNode, *, read_only: bool) -> bool:
    """Return whether the registration says that the bookie accepts (or refuses) ordinary adds."""
    stored = world.meta.tree.tree.get(paths.bookie_available(BookieId(bookie.name)))
    return stored is not None and decode_bookie_registration(stored.value).read_only is read_only


@scenario("T22", "a sync fails: no add of its group is acked, the process ends and starts again")
async def failing_sync(world: World) -> None:
    await _failing(world, "sync_fails")


@scenario("T23", "the disk becomes full during a write")
async def failing_write(world: World) -> None:
    await _failing(world, "write_fails")


async def _failing(world: World, what: str) -> None:
    stage = await Stage.set(world)
    for bookie in world.bookies.values():
        bookie.disk.health.sync_s = 0.003
    await stage.write(world.random.randint(0, 3))
    stage.meanwhile(stage.keep_appending(0.003))
    await stage.lull(0.03)
    for victim in stage.some(stage.seated(), world.random.randint(1, 2)):
        setattr(victim.disk.health, what, True)
        await stage.until(lambda who=victim: not who.alive or _failed(stage))
        setattr(victim.disk.health, what, False)
        await victim.restart()
    if world.random.random() < 0.5:
        await stage.recover()
    await stage.lull(0.1)
    await stage.end()


def _failed(stage: Stage) -> bool:
    return stage.writer.appender.failure is not None


@scenario("T38", "calls and adds are delivered twice: nothing changes, no early ack")
async def twice(world: World) -> None:
    stage = await Stage.set(world)
    weather = world.network.weather
    weather.duplicate, weather.reset, weather.spike = 0.5, 0.05, 0.1
    await stage.write()
    await stage.keep_appending(0.02, entries=20)
    if world.random.random() < 0.5:
        await stage.recover()
    await stage.lull(0.2)
    await stage.end()


@scenario("T39", "other bytes for used ids: each bookie refuses them and logs an alarm")
async def conflicting(world: World) -> None:
    """A copy of a writing process. The copy has the key, knows the ledger, and is some entries
    behind."""
    stage = await Stage.set(world)
    entries = world.random.randint(2, 8)
    await stage.write(entries)
    await stage.wait_everywhere()
    if world.random.random() < 0.5:  # the bookie reads its state of the ledger again
        victim = world.random.choice(stage.seated())
        victim.crash(power=world.random.random() < 0.5)
        await victim.restart()
        await stage.until(lambda: victim.registered)
    ledgers = stage.ledgers(1)
    for member in stage.stored.last_segment.members:
        assert await ledgers.services.pool.adds(member).connect(PATIENCE_S)
    twin = LedgerAppender(stage.stored, ledgers.services, on_busy=ledgers._on_busy)
    for entry in range(world.random.randint(1, entries)):
        payload = f"forged {entry}".encode() + b"." * world.random.choice((0, 30))
        twin.append_nowait([[payload]])
    await stage.until(lambda: twin.failure is not None or twin.confirmed >= 0)
    conflicts = sum(each.admission.conflicts for each in stage.seated() if each.admission)
    world.oracle.hold(
        twin.confirmed < 0 and conflicts > 0,
        "T39",
        lambda: f"forged entries: {twin.confirmed} confirmed, {conflicts} alarms",
    )
    world.trace.fault("twin", "conflicting add refused", conflicts)
    twin.abandon()
    if world.random.random() < 0.5:
        stage.append(3)
    await stage.recover()
    await stage.end()
