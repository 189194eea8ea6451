"""Sessions, clocks, ids, owners of a topic, readers with old metadata: T40, T41, T43, T45, T48."""

from __future__ import annotations

from typing import TYPE_CHECKING

from world.contender import Contender, Onlooker
from world.nodes import ClientNode
from world.scenario import scenario
from world.stage import Stage
from world.topic import Publisher, judge_topic

from magnetar.metadata.errors import MetadataError
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.model import LedgerId, Member

if TYPE_CHECKING:
    from world.cluster import World
    from world.nodes import Process


@scenario("T40", "sessions of bookies and clients expire; old registrations stay for a while")
async def sessions_expire(world: World) -> None:
    stage = await Stage.set(world)
    await stage.write(2)
    stage.meanwhile(stage.keep_appending(0.05, entries=100))
    for _ in range(world.random.randint(2, 6)):
        process = world.random.choice([*world.bookies.values(), stage.writer_client])
        if process.alive and process.store is not None:
            if world.random.random() < 0.4 and process is not stage.writer_client:
                process.crash()
                await process.restart()  # before its last session has ended
            else:
                world.meta.expire(process.host, process.store)
        await stage.lull(0.5)
    await stage.until(lambda: all(bookie.registered for bookie in world.bookies.values()))
    await stage.recover()
    await stage.end()


@scenario("T41", "clocks jump an hour forwards or backwards: nothing depends on them")
async def clocks_jump(world: World) -> None:
    stage = await Stage.set(world, clients=2)
    for client in stage.clients:
        Contender(client, pause_s=0.3).begin()
    for _ in range(6):
        process = world.random.choice(world.processes)
        process.clock.skew_ms = world.random.choice((-3_600_000, 0, 3_600_000))
        world.trace.fault(process.name, "clock jumps", process.clock.skew_ms)
        await stage.lull(0.5)
    await stage.end()


@scenario("T45", "a reader opened its ledger before repair moved it; then both old bookies die")
async def stale_reader(world: World) -> None:
    stage = await Stage.set(world, spares=world.quorum.ensemble_size)
    writer = await stage.write(world.random.randint(1, 6))
    await writer.close()
    metadata = stage.stored
    reader = stage.ledgers(1).reader(metadata)
    victims = stage.some(stage.seated(), max(1, world.quorum.ack_quorum - 1))
    repairer = world.add_repairer()
    if world.quorum.ack_quorum > 1:
        for victim in victims:
            victim.crash()
            await stage.until(lambda who=victim: _is_free_of(stage, who.member))
    last = metadata.last_entry
    assert last is not None
    entries = await reader.read(0, last, bytes_max=1 << 20)
    for entry in entries:
        world.oracle.on_read(stage.ledger, entry.entry, bytes(entry.payload))
    repairer.crash()
    await stage.end()


def _is_free_of(stage: Stage, member: Member) -> bool:
    return all(member not in part.members for part in stage.stored.segments)


@scenario("T48", "a ledger id is never issued twice, whichever replies are lost")
async def ids(world: World) -> None:
    stage = await Stage.set(world, spares=0, clients=3)
    troubles = world.meta.troubles
    troubles.reply_lost, troubles.request_lost, troubles.not_sent = 0.3, 0.1, 0.1
    handed: list[LedgerId] = []

    async def take(client: int) -> None:
        store = stage.clients[client].store
        assert store is not None
        for _ in range(4):
            ids_of_process = LedgerIds(store)  # the same as after a restart
            try:
                for _ in range(3):
                    deadline = world.loop.time() + 5.0
                    handed.append(await ids_of_process.next(LedgerId(-1), deadline=deadline))
            except MetadataError as error:
                world.trace.tell(stage.clients[client].name, "no id:", error)

    for client in range(3):
        stage.meanwhile(take(client))
    await stage.lull(3.0)
    world.oracle.hold(len(set(handed)) == len(handed), "T48", lambda: f"twice in {handed}")
    Onlooker(stage.clients[0]).begin()
    await stage.end()


@scenario(
    "T43", "brokers take a topic over from each other, die during a roll, or are stale owners"
)
async def topic_rolls(world: World) -> None:
    stage = await Stage.set(world, spares=world.random.randint(0, 2), clients=3)
    random, troubles = world.random, world.meta.troubles
    owners = stage.clients if random.random() < 0.6 else stage.clients[:1]
    world.on_client_restart = lambda client: Publisher(client, pause_s=0.3).begin()
    for client in owners:
        Publisher(client, pause_s=0.3).begin()
    troubles.delay_s = random.choice((0.0008, 0.02))
    for _ in range(random.randint(3, 8)):
        await stage.lull(0.7)
        troubles.reply_lost = random.choice((0.0, 0.0, 0.3))
        victim = random.choice([*owners, *world.bookies.values()])
        kind = random.choice(("dies", "is stopped", "is cut off"))
        if kind == "dies" and victim.alive:
            victim.crash(power=random.random() < 0.5)
            stage.meanwhile(_come_back(stage, victim))
        elif kind == "is stopped" and victim in owners:
            victim.pause()
            stage.meanwhile(_go_on(stage, victim))
        elif kind == "is cut off":
            alone = len(owners) == 1  # the cut lasts until the ledger of the only owner fails
            others = stage.some(list(world.bookies.values()), 9 if alone else 2)
            stage.cut_off([random.choice(owners)], others)
            await stage.lull(5.0 if alone else 0.3)
            world.network.heal_all()
    await stage.lull(1.0)
    await stage.end()
    await judge_topic(world)


async def _come_back(stage: Stage, process: Process) -> None:
    await stage.lull(0.5)
    await process.restart()
    if isinstance(process, ClientNode):
        stage.world.on_client_restart(process)


async def _go_on(stage: Stage, process: Process) -> None:
    await stage.lull(2.0)
    process.resume()
