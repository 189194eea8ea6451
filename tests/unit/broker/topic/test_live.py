"""Non-persistent topics: immediate receipts, delivery or drop, caps, idleness."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from fakes.entries import entry_of, sends_of
from fakes.policies import SettablePolicies
from fakes.sessions import FakeConsumerSession, FakeProducerSession
from support import settle

from magnetar.broker.errors import (
    ConsumerBusy,
    ConsumersConnected,
    NotAllowed,
    ProducerBusy,
    SubscriptionNotFound,
    TopicClosing,
    TopicFailed,
)
from magnetar.broker.guard import Failures, Guard
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.topic import live_delivery
from magnetar.broker.topic.contract import (
    AccessMode,
    ClientInfo,
    CloseReason,
    ProducerRequest,
    SubscribeRequest,
    SubscriptionType,
)
from magnetar.broker.topic.live import CLOSED_PER_TURN, IDLE_S, NonPersistentTopic
from magnetar.broker.topic.live_delivery import SUBSCRIPTION_US, LiveDelivery
from magnetar.broker.topic.live_producer import Cap, LiveProducer
from magnetar.metadata.policies import Rate, SubscribeRate
from magnetar.metadata.policies import SubscriptionType as Allowed
from magnetar.protos.names import TopicName
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from magnetar.broker.errors import BrokerError
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.live_subscription import LiveSubscription

NAME = TopicName.parse("non-persistent://public/default/t")
CLIENT = ClientInfo("1.2.3.4:5", "test")
EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
FAILOVER = SubscriptionType.FAILOVER


class World:
    def __init__(self, *, cap: int = 1_000, turns: Turns | None = None) -> None:
        self.idle: list[TopicName] = []
        self.failures: list[BrokerError] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.policies = SettablePolicies()
        numbers = iter(range(100))
        loop = asyncio.get_running_loop()
        self.topic = NonPersistentTopic(
            NAME,
            policies=self.policies,
            clock=SystemClock(),
            next_name=lambda: f"made-{next(numbers)}",
            cap=Cap(cap, loop.call_soon),
            on_idle=self.idle.append,
            on_failed=lambda _, error: self.failures.append(error),
            spawn=self._spawn,
            guard=lambda on_bug: Guard("t", failures=Failures(), on_failure=on_bug),
            turns=turns,
        )

    def _spawn(
        self, run: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> asyncio.Task[None] | None:
        task = asyncio.get_running_loop().create_task(run(), name=name)
        self._tasks.add(task)
        return task

    async def produce(self, name: str = "") -> tuple[LiveProducer, FakeProducerSession]:
        session = FakeProducerSession()
        request = ProducerRequest(1, name, CLIENT)
        return await self.topic.add_producer(request, session), session

    async def consume(
        self,
        subscription: str = "s",
        kind: SubscriptionType = SHARED,
        *,
        permits: int = 10,
        durable: bool = True,
        room: bool = True,
        alive: bool = True,
        priority: int = 0,
    ) -> tuple[ConsumerHandle, FakeConsumerSession]:
        session = FakeConsumerSession(room=room, alive=alive)
        request = SubscribeRequest(
            1, subscription, kind, CLIENT, durable=durable, priority=priority
        )
        handle = await self.topic.subscribe(request, session)
        if permits:
            handle.flow(permits)
        return handle, session

    def send(self, producer: LiveProducer, *texts: str, first: int = 0) -> None:
        views = [entry_of(text) for text in texts]
        producer.publish(sends_of(*views, first=first), 0.0)


async def test_a_message_reaches_every_subscription_and_is_receipted_at_once() -> None:
    world = World()
    one, two = await world.consume("a"), await world.consume("b", EXCLUSIVE)
    producer, session = await world.produce()
    world.send(producer, "x", "y")
    assert session.receipted == [0, 1]
    assert one[1].texts == two[1].texts == ["x", "y"]
    assert set(one[1].positions) == {Position(0, 0)}
    assert world.topic.dropped_total == 0


async def test_many_subscriptions_get_entries_in_several_steps_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_delivery, "SUBSCRIPTIONS_PER_STEP", 2)
    monkeypatch.setattr(live_delivery, "STEP_US", 2 * (SUBSCRIPTION_US + 1))
    world = World()
    sessions = [(await world.consume(f"s{number}"))[1] for number in range(5)]
    (one, receipts), (two, _) = await world.produce(), await world.produce()
    world.send(one, "a")
    world.send(two, "b")
    assert receipts.receipted == [0]
    assert not one.has_room
    assert not two.has_room
    late = (await world.consume("late"))[1]
    for name in ("s1", "s2", "s3", "late"):
        await world.topic.unsubscribe(name, force=True)
    world.send(one, "c")  # few subscriptions are left, and earlier entries wait
    counts = [0]
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(two.wait_room())
        while not one.has_room:
            assert not waiting.done()
            await asyncio.sleep(0)
            counts.append(sum(session.deliveries for session in sessions))
    assert counts == [0, 0, 1, 1, 3, 3, 4, 6]
    assert sessions[0].texts == sessions[4].texts == ["a", "b", "c"]
    assert late.texts == []
    assert two.has_room
    world.send(two, "d")
    assert sessions[0].texts == sessions[4].texts == ["a", "b", "c", "d"]


async def test_one_topic_of_all_delivers_queued_entries_in_a_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_delivery, "SUBSCRIPTIONS_PER_STEP", 1)
    monkeypatch.setattr(live_delivery, "STEP_US", SUBSCRIPTION_US + 1)
    turns = Turns()
    worlds = [World(turns=turns) for _ in range(3)]
    sessions, producers = [], []
    for world in worlds:
        sessions += [(await world.consume(name))[1] for name in ("a", "b")]
        producers.append((await world.produce())[0])
        world.send(producers[-1], "x")
    counts = [0]
    while not all(producer.has_room for producer in producers):
        await asyncio.sleep(0)
        counts.append(sum(session.deliveries for session in sessions))
    assert counts[-1] == 6
    assert max(after - before for before, after in pairwise(counts)) == 1


async def test_a_bug_in_a_queued_delivery_fails_the_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_delivery, "SUBSCRIPTIONS_PER_STEP", 1)
    world = World()
    await world.consume("a")
    await world.consume("b")
    producer, _ = await world.produce()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.topic.subscriptions["a"], "on_published", fail)
    world.send(producer, "x")
    await producer.wait_room()
    assert producer.has_room
    await settle()
    [failure] = world.failures
    assert isinstance(failure, TopicFailed)


class CountedSubscriptions(dict[str, "LiveSubscription"]):
    copies = 0

    def values(self) -> Any:
        self.copies += 1
        return super().values()


async def test_queued_entries_share_one_list_of_the_subscriptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_delivery, "SUBSCRIPTIONS_PER_STEP", 1)
    world = World()
    await world.consume("a")
    await world.consume("b")
    subscriptions = CountedSubscriptions(world.topic.subscriptions)
    delivery = LiveDelivery(subscriptions, Turns(), lambda run, name: None)
    for _ in range(3):
        delivery.deliver([], 0.0)
    assert subscriptions.copies == 1
    delivery.on_changed()
    delivery.deliver([], 0.0)
    assert subscriptions.copies == 2


async def test_receipts_come_without_a_consumer() -> None:
    world = World()
    producer, session = await world.produce()
    world.send(producer, "x")
    assert session.receipted == [0]
    assert world.topic.published.messages == 1


async def test_a_generated_name_differs_from_the_names_of_clients() -> None:
    world = World()
    brought, _ = await world.produce("made-0")
    made, session = await world.produce()
    assert made.name != brought.name
    made.close_nowait()
    assert list(world.topic.producers.values()) == [brought]
    brought.close_nowait()
    assert session.reason is None
    assert world.topic.producers == {}


async def test_a_shared_subscription_takes_turns() -> None:
    world = World()
    one, two = await world.consume(), await world.consume()
    producer, _ = await world.produce()
    world.send(producer, "a", "b", "c", "d")
    assert one[1].texts == ["a", "c"]
    assert two[1].texts == ["b", "d"]


@pytest.mark.parametrize("why", ["no consumer", "no permits", "not writable"])
async def test_undeliverable_messages_are_dropped_and_counted(why: str) -> None:
    world = World()
    handle, session = await world.consume(
        permits=1 if why == "no permits" else 10, room=why != "not writable"
    )
    if why == "no consumer":
        handle.close_nowait()
    producer, receipts = await world.produce()
    world.send(producer, "a", "b", "c")
    delivered = 1 if why == "no permits" else 0
    assert len(session.texts) == delivered
    assert receipts.receipted == [0, 1, 2]
    stats = await world.topic.stats()
    assert stats["subscriptions"]["s"]["msgDropCount"] == 3 - delivered
    assert stats["msgDropCount"] == 3 - delivered
    assert stats["msgDropRate"] > 0


async def test_more_than_the_cap_of_a_connection_is_dropped_until_the_next_step() -> None:
    world = World(cap=3)
    _, consumer = await world.consume()
    producer, session = await world.produce()
    world.send(producer, "a", "b")
    world.send(producer, "c", "d", first=2)
    assert session.receipted == [0, 1, 2, 3]
    assert consumer.texts == ["a", "b", "c"]
    assert producer.dropped.messages == 1
    await settle()
    world.send(producer, "e", first=4)
    assert consumer.texts == ["a", "b", "c", "e"]


async def test_an_exclusive_subscription_has_one_consumer() -> None:
    world = World()
    await world.consume(kind=EXCLUSIVE)
    with pytest.raises(ConsumerBusy):
        await world.consume(kind=EXCLUSIVE)
    with pytest.raises(ConsumerBusy):
        await world.consume(kind=SHARED)


async def test_a_dead_consumer_is_replaced() -> None:
    world = World()
    await world.consume(kind=EXCLUSIVE, alive=False)
    _, session = await world.consume(kind=EXCLUSIVE)
    producer, _ = await world.produce()
    world.send(producer, "x")
    assert session.texts == ["x"]


async def test_a_producer_name_is_taken_once() -> None:
    world = World()
    await world.produce("me")
    with pytest.raises(ProducerBusy):
        await world.produce("me")


async def test_exclusive_producers_are_refused_by_name() -> None:
    world = World()
    request = ProducerRequest(1, "", CLIENT, access_mode=AccessMode.EXCLUSIVE)
    with pytest.raises(NotAllowed, match="access mode Exclusive"):
        await world.topic.add_producer(request, FakeProducerSession())


async def test_a_seek_is_refused_and_an_acknowledgement_changes_nothing() -> None:
    world = World()
    handle, _ = await world.consume()
    answers: list[object] = []
    handle.acknowledge([Position(0, 0)], done=answers.append)
    handle.acknowledge_cumulative(Position(0, 0), done=answers.append)
    assert answers == [None, None]
    with pytest.raises(NotAllowed, match="seek"):
        await handle.seek(EARLIEST)
    assert (await handle.last_message_id()).position == EARLIEST


@pytest.mark.parametrize("name", ["", " "])
async def test_a_subscription_without_a_name_is_refused(name: str) -> None:
    world = World()
    with pytest.raises(NotAllowed, match="a subscription"):
        await world.consume(name)
    with pytest.raises(NotAllowed, match="a subscription"):
        await world.topic.ensure_subscription(name, EARLIEST)
    assert world.topic.subscriptions == {}


async def test_a_subscription_is_deleted_or_goes_with_its_reader() -> None:
    world = World()
    reader, _ = await world.consume("reader", durable=False)
    handle, _ = await world.consume("s")
    reader.close_nowait()
    assert list(world.topic.subscriptions) == ["s"]
    with pytest.raises(ConsumersConnected):
        await world.topic.unsubscribe("s")
    await world.topic.unsubscribe("s", force=True)
    assert not handle.attached
    with pytest.raises(SubscriptionNotFound):
        await world.topic.unsubscribe("s")


async def test_a_topic_without_clients_asks_to_be_closed() -> None:
    world = World()
    producer, _ = await world.produce()
    await asyncio.sleep(2 * IDLE_S)
    assert world.idle == []
    producer.close_nowait()
    await asyncio.sleep(IDLE_S - 1)
    handle, _ = await world.consume()
    await asyncio.sleep(2 * IDLE_S)
    assert world.idle == []
    handle.close_nowait()
    await asyncio.sleep(IDLE_S + 1)
    assert world.idle == [NAME]


async def test_a_closed_topic_disconnects_its_clients_and_takes_no_more() -> None:
    world = World()
    _, producing = await world.produce()
    _, consuming = await world.consume()
    await world.topic.close()
    assert producing.reason is CloseReason.UNLOADED
    assert consuming.reason is CloseReason.UNLOADED
    with pytest.raises(TopicClosing):
        await world.produce()
    with pytest.raises(TopicClosing):
        await world.consume()
    await asyncio.sleep(2 * IDLE_S)
    assert world.idle == []


async def test_a_topic_closes_many_clients_in_several_turns_of_the_loop() -> None:
    world = World()
    number = 2 * CLOSED_PER_TURN + 5
    sessions = [(await world.produce())[1] for _ in range(number)]
    sessions += [(await world.consume())[1] for _ in range(number)]
    told = [0]
    async with asyncio.TaskGroup() as tasks:
        closing = [tasks.create_task(world.topic.close()) for _ in range(2)]
        while told[-1] < len(sessions):
            assert not any(task.done() for task in closing), (
                "the close ended before all clients were told"
            )
            await asyncio.sleep(0)
            told.append(sum(session.reason is not None for session in sessions))
            with pytest.raises(TopicClosing):
                await world.consume()
    assert max(after - before for before, after in pairwise(told)) == CLOSED_PER_TURN
    assert world.topic.users == 0


async def test_a_cancelled_close_disconnects_every_client() -> None:
    world = World()
    sessions = [(await world.consume())[1] for _ in range(2 * CLOSED_PER_TURN)]
    async with asyncio.TaskGroup() as tasks:
        closing = tasks.create_task(world.topic.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sum(session.reason is not None for session in sessions) == CLOSED_PER_TURN
        closing.cancel()
    assert all(session.reason is CloseReason.UNLOADED for session in sessions)
    assert world.topic.users == 0


async def test_only_the_active_consumer_of_a_failover_subscription_gets_messages() -> None:
    world = World()
    one, first = await world.consume(kind=FAILOVER)
    _, second = await world.consume(kind=FAILOVER)
    producer, _ = await world.produce()
    world.send(producer, "a")
    assert (first.texts, second.texts) == (["a"], [])
    assert (first.active, second.active) == ([True], [False])
    one.close_nowait()
    assert second.active == [False, True]
    world.send(producer, "b", first=1)
    assert second.texts == ["b"]
    _, third = await world.consume(kind=FAILOVER, priority=-1)
    assert (second.active, third.active) == ([False, True, False], [True])
    with pytest.raises(ConsumerBusy):
        await world.consume(kind=SHARED)


async def test_a_draining_active_consumer_is_replaced_at_once() -> None:
    world = World()
    one, first = await world.consume(kind=FAILOVER)
    _, second = await world.consume(kind=FAILOVER)
    producer, _ = await world.produce()
    await one.drain()
    world.send(producer, "a")
    assert (first.active, second.active) == ([True, False], [False, True])
    assert (first.texts, second.texts) == ([], ["a"])


async def test_the_limits_of_the_policies_count() -> None:
    world = World()
    world.policies.set(
        producers_max=2,
        subscriptions_max=2,
        consumers_max=3,
        consumers_per_subscription_max=2,
        subscription_types=frozenset({Allowed.SHARED, Allowed.EXCLUSIVE}),
    )
    await world.produce("a")
    await world.produce("b")
    with pytest.raises(ProducerBusy, match="2 producers"):
        await world.produce("c")
    await world.consume("s")
    await world.consume("s")
    with pytest.raises(ConsumerBusy, match="it has 2 consumers"):
        await world.consume("s")
    await world.consume("t")
    with pytest.raises(ConsumerBusy, match="its topic has 3 consumers"):
        await world.consume("t")
    with pytest.raises(NotAllowed, match="2 subscriptions"):
        await world.consume("u")
    with pytest.raises(NotAllowed, match="2 subscriptions"):
        await world.topic.ensure_subscription("u", EARLIEST)
    with pytest.raises(NotAllowed, match="allow only Exclusive, Shared"):
        await world.consume("s", FAILOVER)
    world.policies.set(subscriptions_max=0)
    with pytest.raises(ConsumerBusy, match="'r': its topic has 3 consumers"):
        await world.consume("r", durable=False)
    assert sorted(world.topic.subscriptions) == ["s", "t"]
    await world.topic.ensure_subscription("u", EARLIEST)
    await world.topic.close()
    world.policies.set(subscriptions_max=1)  # a closed topic is not called


async def test_a_consumer_that_subscribes_too_often_is_refused() -> None:
    world = World()
    world.policies.set(subscribe_rate=SubscribeRate(2, 30))
    for _ in range(2):
        handle, _ = await world.consume()
        handle.close_nowait()
    with pytest.raises(NotAllowed, match="more than 2 times"):
        await world.consume()


async def test_the_publish_rate_stops_the_reading_and_drops_nothing() -> None:
    world = World()
    world.policies.set(publish_rate=Rate(2, 0, 1))
    _, consumer = await world.consume()
    producer, session = await world.produce()
    world.send(producer, "a", "b", "c", "d")
    assert consumer.texts == ["a", "b", "c", "d"]
    began = asyncio.get_running_loop().time()
    assert not producer.has_room
    await producer.wait_room()
    assert producer.has_room
    assert 1.0 < asyncio.get_running_loop().time() - began < 2.0
    assert session.receipted == [0, 1, 2, 3]


async def test_a_message_beyond_the_topics_size_is_refused() -> None:
    world = World()
    world.policies.set(max_message_bytes=100)
    _, consumer = await world.consume()
    producer, session = await world.produce()
    world.send(producer, "small", "x" * 200)
    assert consumer.texts == ["small"]
    assert session.receipted == [0]
