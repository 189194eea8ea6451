"""Deletion, collection and repair during other work: T24 to T31, T53."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from world.contender import Contender
from world.loop import until
from world.rot import Damage
from world.scenario import scenario
from world.stage import PATIENCE_S, Stage

from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_cluster
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import EntryId
from magnetar.metadata.under_replication import BadCopy

if TYPE_CHECKING:
    from world.cluster import World
    from world.nodes import BookieNode

    from magnetar.metadata.model import Member
    from magnetar.metadata.tree import Tree

TWO_ACKS = ("2/2/2", "3/3/2", "3/2/2", "5/3/2", "3/3/3")


@scenario("T24", "a ledger is deleted while a broker writes it: adds fail, no entry returns")
async def deleted_while_written(world: World) -> None:
    if world.random.random() < 0.5:
        await _write_backs_come_late(world)
    else:
        await _writer_lives_on(world)


async def _write_backs_come_late(world: World) -> None:
    """A recoverer's adds are under way while the ledger is deleted and collected."""
    stage = await Stage.set(world, clients=3)
    await stage.write(world.random.randint(1, 3))
    stage.append(world.random.randint(1, 3))
    await stage.lull(0.02)
    world.network.weather.notice_s = 60.0
    recoverer, right = stage.clients[1], world.oracle.r2_reads_behind_fences

    def cut_when_read(ledger: int) -> None:
        right(ledger)
        stage.cut([recoverer], world.bookies.values())  # the bookies have answered the requests

    world.oracle.r2_reads_behind_fences = cut_when_read  # type: ignore[method-assign]
    recoverer.host.spawn(_try(stage, 1))
    await stage.lull(0.2)
    await stage.ledgers(2).delete(stage.ledger)
    await asyncio.sleep(10.0)
    world.network.heal_all()
    await asyncio.sleep(10.0)
    _check_collected(stage)
    await stage.end()


async def _writer_lives_on(world: World) -> None:
    stage = await Stage.set(world)
    await stage.write(world.random.randint(0, 3))
    stage.meanwhile(stage.keep_appending(0.05, entries=400))
    await stage.lull(0.2)
    await stage.ledgers(1).delete(stage.ledger)
    await asyncio.sleep(10.0)  # several rounds of collection
    if world.random.random() < 0.5:
        victim = world.random.choice(list(world.bookies.values()))
        victim.crash(power=True)
        await victim.restart()
        await stage.until(lambda: victim.registered)
    stage.append(2)
    await asyncio.sleep(10.0)
    world.oracle.hold(_failed(stage), "T24", lambda: "adds to a deleted ledger never fail")
    _check_collected(stage)
    await stage.end()


def _check_collected(stage: Stage) -> None:
    for bookie in stage.world.bookies.values():
        image = bookie.disk.image
        assert image is not None
        stage.world.oracle.hold(
            image.ledger_record(stage.ledger) is None,
            "T24",
            partial("{} has the deleted ledger again".format, bookie.name),
        )


def _failed(stage: Stage) -> bool:
    return stage.writer.appender.failure is not None


@scenario("T25", "bookies collect while the metadata fails, lags and loses replies")
async def collected_in_a_storm(world: World) -> None:
    stage = await Stage.set(world, clients=3)
    for client in stage.clients:
        Contender(client, pause_s=0.2).begin()
    troubles = world.meta.troubles
    for bookie in world.bookies.values():
        bookie.disk.health.read_s = world.random.choice((0.0001, 0.0001, 0.3))
    for _ in range(10):
        troubles.names_lost = world.random.choice((0.0, 0.2))
        troubles.reply_lost = world.random.choice((0.0, 0.2))
        troubles.not_sent = world.random.choice((0.0, 0.2))
        bookie = world.random.choice(list(world.bookies.values()))
        if bookie.alive and bookie.store is not None:
            if world.random.random() < 0.5:
                world.meta.fall_behind(bookie.host, bookie.store, 4.0)
            else:
                world.meta.expire(bookie.host, bookie.store)
        await stage.lull(1.0)
    await stage.end()


@scenario("wrong store", "bookies get old metadata, or another cluster's: they remove nothing")
async def wrong_metadata(world: World) -> None:
    """A bookie recognises an old image by ledgers whose ids the image has not issued yet."""
    stage = await Stage.set(world, clients=3)
    random, meta = world.random, world.meta
    before = meta.image()
    await _write_and_close(stage, client=0)
    image = random.choice((before, meta.image()))
    await _write_and_close(stage, client=1)
    if random.random() < 0.5:
        image = meta.image()
        for path in [path for path in map(paths.ledger, world.oracle.lives) if image.get(path)]:
            image.delete(path, expected=_version(image, path))
        image.put(paths.CLUSTER, encode_cluster("c2" * 16), _version(image, paths.CLUSTER))
    bookies = list(world.bookies.values())
    for bookie in stage.some(bookies, random.randint(1, len(bookies))):
        assert bookie.store is not None
        meta.show(bookie.host, bookie.store, image)
    await stage.lull(10.0)  # some rounds of collection
    await stage.end()


async def _write_and_close(stage: Stage, *, client: int) -> None:
    for _ in range(stage.random.randint(1, 3)):
        writer = await stage.write(stage.random.randint(1, 3), client=client)
        await writer.close()


def _version(tree: Tree, path: str) -> int:
    stored = tree.get(path)
    assert stored is not None
    return stored.version


async def _closed_and_hurt(world: World, *, clients: int = 2) -> tuple[Stage, BookieNode]:
    """A closed ledger one of whose bookies is gone; a replicator begins to repair it."""
    stage = await Stage.set(world, spares=2, clients=clients)
    writer = await stage.write(world.random.randint(2, 12))
    await writer.close()
    victim = world.random.choice(stage.seated())
    victim.crash(power=True)
    return stage, victim


def _names(stage: Stage, member: Member) -> bool:
    return any(member in part.members for part in stage.stored.segments)


@scenario(
    "T26",
    "several replicators repair one ledger; one is stopped meanwhile and loses its session",
    TWO_ACKS,
)
async def stale_lock(world: World) -> None:
    stage, victim = await _closed_and_hurt(world)
    lost = victim.member
    repairers = [world.add_repairer() for _ in range(2)]
    for _ in range(world.random.randint(1, 3)):
        await stage.lull(1.5)
        frozen = world.random.choice(repairers)
        frozen.pause()
        await stage.lull(6.0)
        frozen.resume()
    if world.random.random() < 0.5:
        await victim.restart()
    else:
        await stage.until(lambda: not _names(stage, lost))
    await end_repaired(stage)


@scenario("T27", "the target of a copy loses power before, during or after the copy", TWO_ACKS)
async def target_fails(world: World) -> None:
    stage, _ = await _closed_and_hurt(world)
    spares = stage.spares()
    for bookie in world.bookies.values():
        bookie.disk.health.sync_s = 0.02
    world.add_repairer()
    for _ in range(4):
        await stage.until(
            lambda: any(each.alive and _unsynced(each) for each in spares) or _repaired(stage)
        )
        for bookie in spares:
            if bookie.alive and _unsynced(bookie):
                bookie.crash(power=True)
                stage.restart_later(bookie, 1.0)
        if _repaired(stage):
            break
    await end_repaired(stage)


def _unsynced(bookie: BookieNode) -> bool:
    return bookie.disk.image is not None and bookie.disk.image.unsynced > 0


def _repaired(stage: Stage) -> bool:
    return all(bookie.alive for bookie in stage.seated())


@scenario("T28", "a member is not replaced if no bookie can read its entries", TWO_ACKS)
async def unreadable_source(world: World) -> None:
    stage, victim = await _closed_and_hurt(world)
    for bookie in stage.seated():
        bookie.disk.health.read_errors = 1.0
    lost = victim.member
    world.add_repairer()
    await asyncio.sleep(15.0)
    had = any(of == stage.ledger for of, _ in world.oracle.stored_by.get(lost, ()))
    world.oracle.hold(  # a seat without entries is replaced without reading
        _names(stage, lost) or not had,
        "T28",
        lambda: f"{lost.bookie} was replaced though no bookie can be read",
    )
    for bookie in world.bookies.values():
        bookie.disk.health.read_errors = 0.0
    await end_repaired(stage)


@scenario(
    "T29",
    "no copies move after a short absence, or after the absence of many bookies at once",
    TWO_ACKS,
)
async def short_absence(world: World) -> None:
    stage, victim = await _closed_and_hurt(world)
    versions = len(world.oracle.life(stage.ledger).versions)
    if world.random.random() < 0.5:
        world.add_repairer()
        await asyncio.sleep(1.0)
    else:
        for bookie in stage.some([b for b in world.bookies.values() if b.alive], 2):
            bookie.crash()
        await asyncio.sleep(5.0)  # all their sessions have ended
        world.add_repairer()
        await asyncio.sleep(12.0)
    world.oracle.hold(
        len(world.oracle.life(stage.ledger).versions) == versions,
        "T29",
        lambda: "copies were moved before the delay of an absent bookie was over",
    )
    for bookie in world.bookies.values():
        await bookie.restart()
    await stage.until(lambda: victim.registered)
    await end_repaired(stage)


@scenario(
    "T30", "an open ledger with a dead member: its writer writes, is idle, or is dead", TWO_ACKS
)
async def open_ledger(world: World) -> None:
    stage = await Stage.set(world, spares=2)
    await stage.write(world.random.randint(0, 4))
    victim = world.random.choice(stage.seated())
    victim.crash(power=True)
    world.add_repairer()
    kind = world.random.choice(("writes", "idles", "is dead"))
    if kind == "writes":
        stage.meanwhile(stage.keep_appending(0.1, entries=100))
    elif kind == "is dead":
        stage.writer_client.crash()
    await asyncio.sleep(20.0)
    if kind == "writes":
        world.oracle.hold(
            not _failed(stage), "T30", lambda: f"a live writer was stopped: {stage.writer}"
        )
    await stage.recover()
    await end_repaired(stage)


@scenario("T31", "ranges added to an under-replication record during the repair are kept", TWO_ACKS)
async def marked_again(world: World) -> None:
    if world.random.random() < 0.5:
        await _bad_copies_marked_again(world)
    else:
        await _lost_member_marked_again(world)


async def _bad_copies_marked_again(world: World) -> None:
    """No auditor runs, and no bookie scrubs: nothing finds the damage again if the record loses
    it."""
    world.scrubs = False
    stage = await Stage.set(world)
    writer = await stage.write(world.random.randint(2, 12))
    await stage.wait_everywhere()
    await writer.close()
    for bookie in world.bookies.values():
        bookie.disk.health.sync_s = 0.1
    one, other = stage.some(stage.seated(), 2)
    assert stage.clients[1].store is not None
    marks = UnderReplicationRecords(stage.clients[1].store, stage.clients[1].clock)
    world.add_repairer(audits=False)
    await _damage(stage, marks, one, 0)
    locked = paths.repair_lock(stage.ledger)
    await stage.until(lambda: world.meta.tree.tree.get(locked))
    await stage.lull(0.05)
    await _damage(stage, marks, other, 1)
    disks = [one.disk, other.disk]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: not any(disk.damaged for disk in disks))
    except TimeoutError:
        left = [(disk.name, sorted(disk.damaged)) for disk in disks]
        raise world.oracle.broken(
            "T31", f"recorded as under-replicated, and not repaired: {left}"
        ) from None
    await end_repaired(stage)


async def _damage(
    stage: Stage, marks: UnderReplicationRecords, bookie: BookieNode, first: int
) -> None:
    """A reader noticed that every other entry is bad. Another bookie has sound copies of these."""
    last, image = stage.stored.last_entry, bookie.disk.image
    assert last is not None
    assert image is not None
    bad = [
        entry for entry in range(first, last + 1, 2) if image.entry(stage.ledger, entry) is not None
    ]
    for entry in bad:
        bookie.disk.damage(stage.ledger, entry, Damage.UNREADABLE)
    member = bookie.member
    await marks.add_bad_copies(
        stage.ledger, [BadCopy(member, EntryId(entry), EntryId(entry)) for entry in bad]
    )


async def _lost_member_marked_again(world: World) -> None:
    stage, _ = await _closed_and_hurt(world)
    for bookie in world.bookies.values():
        bookie.disk.health.sync_s = 0.1
    world.add_repairer()
    await stage.until(lambda: world.meta.tree.tree.get(paths.under_replicated(stage.ledger)))
    await stage.lull(0.2)
    other = world.random.choice([each for each in stage.seated() if each.alive])
    if world.may_destroy(other):
        world.destroyed[other.name] = None
        other.crash(power=True)
        other.disk.opens = False
        await other.restart()
    await stage.lull(3.0)
    await end_repaired(stage)


@scenario(
    "T53", "sealed segments are repaired while the last one is recovered: both stay", TWO_ACKS
)
async def repaired_while_recovered(world: World) -> None:
    stage = await Stage.set(world, spares=3, clients=3)
    await stage.write(world.random.randint(1, 4))
    first = world.random.choice(stage.seated())
    first.crash(power=True)  # a second segment begins without it
    stage.meanwhile(stage.keep_appending(0.2, entries=30))
    await stage.until(lambda: len(stage.stored.segments) > 1 or _failed(stage))
    stage.append(2)
    await stage.lull(0.01)
    stage.writer_client.crash()
    world.add_repairer()
    await stage.lull(1.5)
    for client in (1, 2):
        stage.meanwhile(_try(stage, client))
        await stage.lull(0.5)
    await stage.recover()
    await end_repaired(stage)


async def _try(stage: Stage, client: int) -> None:
    try:
        await stage.try_recover(client)
    except MetadataError:
        return


async def end_repaired(stage: Stage) -> None:
    world = stage.world
    await stage.end(keep=tuple(name for name in world.clients if name.startswith("r")))
    await world.wait_repaired()
    await world.judge()
