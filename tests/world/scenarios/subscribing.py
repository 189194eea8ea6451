"""Subscriptions over failovers of brokers: one scenario for each type, one for ordered negative
acks, and one for consumers that allow delivery out of order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from world.nodes import ClientNode
from world.scenario import scenario
from world.serving import Director
from world.stage import Stage

from magnetar.broker.log.position import Position
from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.broker.topic.contract import SubscriptionType

if TYPE_CHECKING:
    from world.cluster import World
    from world.nodes import Process
    from world.serving import Serving

QUORUMS = ("2/2/2", "3/3/2", "3/2/2", "1/1/1")
SUBSCRIPTIONS = ("exclusive", "failover", "shared", "key_shared", "ordered nacks", "relaxed keys")
"""The scenarios of this module."""
CONSUMERS_MAX = {SubscriptionType.EXCLUSIVE: 2}  # 4 of the other types


@scenario("exclusive", "consumers take turns at a subscription while brokers fail", QUORUMS)
async def exclusive(world: World) -> None:
    await _play(world, SubscriptionType.EXCLUSIVE)


@scenario("failover", "active consumers change while brokers fail", QUORUMS)
async def failover(world: World) -> None:
    await _play(world, SubscriptionType.FAILOVER)


@scenario("shared", "many consumers share entries while brokers fail", QUORUMS)
async def shared(world: World) -> None:
    await _play(world, SubscriptionType.SHARED)


@scenario("key_shared", "keys move between consumers while brokers fail", QUORUMS)
async def key_shared(world: World) -> None:
    await _play(world, SubscriptionType.KEY_SHARED)


@scenario("ordered nacks", "keys are withheld in order while brokers fail", QUORUMS)
async def ordered_nacks(world: World) -> None:
    await _play(world, SubscriptionType.KEY_SHARED, ordered=True)


@scenario("relaxed keys", "consumers that allow delivery out of order join and leave", QUORUMS)
async def relaxed_keys(world: World) -> None:
    await _play(world, SubscriptionType.KEY_SHARED, relaxed_share=0.75)


async def _play(
    world: World, kind: SubscriptionType, *, ordered: bool = False, relaxed_share: float = 0
) -> None:
    stage = await Stage.set(world, spares=1, clients=2)
    director = Director(world, stage.clients, kind, ordered=ordered, relaxed_share=relaxed_share)
    world.on_client_restart = director.begin
    for broker in stage.clients:
        director.begin(broker)
    for _ in range(world.random.randint(1, 3)):
        director.join()
    await stage.lull(1.0)
    for _ in range(world.random.randint(4, 10)):
        for _ in range(world.random.randint(1, 3)):
            _let_consumers(stage, director)
            await stage.lull(0.3)
        _let_fail(stage, director)
        await stage.lull(0.5)
    await _end(stage, director)


def _let_consumers(stage: Stage, director: Director) -> None:
    """Let a consumer or an administrator act."""
    random, world = stage.random, stage.world
    present = [it for it in director.consumers if not it.gone]
    kind = random.choice(
        (
            *("joins", "joins", "joins", "leaves", "drains", "crashes", "loses its connection"),
            *("nothing", "nothing", "is expired", "is moved"),
        )
    )
    consumer = random.choice(present) if present else None
    if kind == "joins" and len(present) < CONSUMERS_MAX.get(director.deliveries.kind, 4):
        director.join()
    elif kind in ("is expired", "is moved") and random.random() < 0.5:
        serving = director.find()
        if serving is not None:
            serving.broker.host.spawn(_administer(director, serving, kind))
    elif consumer is None:
        return
    elif kind == "leaves" or kind == "drains":
        world.loop.create_task(consumer.leave(drain=kind == "drains"))
    elif kind == "crashes":
        world.trace.fault(consumer.name, "consumer crashed")
        consumer.crash()
    elif kind == "loses its connection":
        consumer.lose_connection()


async def _administer(director: Director, serving: Serving, kind: str) -> None:
    """Skip old messages, or move the subscription. The outcome may stay unknown."""
    topic, random = serving.reign.topic, director.world.random
    subscription, deliveries = serving.reign.subscription, director.deliveries
    entries = sorted(deliveries.receipts)
    if not entries:
        return
    position = Position(*entries[random.randrange(len(entries))])
    try:
        if kind == "is moved":
            deliveries.on_seek(position)
            await subscription.seek(position)
            deliveries.met("subscription moved")
        else:
            deliveries.on_skip(position)
            await topic.expire_through(subscription, position)
            deliveries.met("entries expired")
    except OPERATING_ERRORS as error:
        director.world.trace.tell(serving.broker.name, kind, "failed:", error)


def _let_fail(stage: Stage, director: Director) -> None:
    random, world = stage.random, stage.world
    troubles = world.meta.troubles
    troubles.reply_lost = random.choice((0.0, 0.0, 0.1))
    broker = director.wanted
    kind = random.choice(
        ("killed", "killed", "stopped", "unloaded", "taken over", "cut off", "bookie", "nothing")
    )
    if kind == "killed" and broker.alive:
        broker.crash(power=random.random() < 0.5)
        director.name_another(unload=False)
        stage.meanwhile(_come_back(stage, broker))
    elif kind == "stopped" and broker.alive:
        broker.pause()
        director.name_another(unload=False)
        stage.meanwhile(_go_on(stage, broker))
    elif kind == "unloaded":
        director.name_another(unload=True)
    elif kind == "taken over":
        director.name_another(unload=False)
    elif kind == "cut off":
        bookies = list(world.bookies.values())
        stage.cut_off([broker], stage.some(bookies, random.randint(1, len(bookies))))
        stage.meanwhile(_heal(stage, director))
    elif kind == "bookie":
        bookie = random.choice(list(world.bookies.values()))
        if bookie.alive:
            bookie.crash(power=random.random() < 0.3)
            stage.meanwhile(_come_back(stage, bookie))


async def _come_back(stage: Stage, process: Process) -> None:
    await stage.lull(0.7)
    await process.restart()
    if isinstance(process, ClientNode):
        stage.world.on_client_restart(process)


async def _go_on(stage: Stage, process: Process) -> None:
    await stage.lull(1.5)
    process.resume()


async def _heal(stage: Stage, director: Director) -> None:
    await stage.lull(0.5)
    if stage.random.random() < 0.5:
        director.name_another(unload=False)
    await stage.lull(0.5)
    stage.world.network.heal_all()


async def _end(stage: Stage, director: Director) -> None:
    """Heal all faults, let willing consumers take all entries, and check the ledgers."""
    await stage.quiet()
    for broker in stage.clients:
        await broker.restart()
        director.begin(broker)
    await director.drain()
    for consumer in director.consumers:
        consumer.crash()
    await stage.end()
