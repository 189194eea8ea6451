"""Topics that move from one broker to another: on a stop, and when the owner dies or is cut off.

Two brokers in this process share metadata and ledgers; the clients come over real ports.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState
from fakes.namespaces import SPREAD, create_namespaces
from fakes.wire import TRANSPORTS, wire_to
from support import wait_until

import magnetar.asyncio as magnetar
from magnetar.broker.balance import BalanceRules
from magnetar.broker.ownership.bundle import bundle_in
from magnetar.broker.ownership.census import Census
from magnetar.client.message import MessageId
from magnetar.client.options import InitialPosition
from magnetar.metadata.model import NamespaceBundles
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.real_loop

# An idle machine needs a tenth of these times. A client with a timeout would need 10 s or 30 s.
HANDOVER_S = 6.0
TAKEOVER_S = 8.0


@asynccontextmanager
async def pair() -> AsyncIterator[list[RunningBroker]]:
    """Two brokers."""
    cluster = ClusterState()
    await create_namespaces(cluster.store(), *SPREAD)
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(running_broker(cluster, number)) for number in range(2)
        ]


def topic_of(owner: RunningBroker, brokers: list[RunningBroker]) -> str:
    """A topic that prefers this broker, while both own as many bundles."""
    live = {it.registration.broker: it.registration for it in brokers}
    for namespace in SPREAD:
        name = f"persistent://{namespace}/t"
        bundle = bundle_in(TopicName.parse(name), NamespaceBundles())
        if Census().order(bundle, live)[0] == owner.registration.broker:
            return name
    raise AssertionError("no topic prefers this broker")


def both(first: RunningBroker, second: RunningBroker) -> str:
    """A service URL that names both brokers."""
    return f"{first.grpc_url},{second.grpc_url.removeprefix('grpc://')}"


def serves(broker: RunningBroker, topic: str) -> bool:
    return topic in {str(it.name) for it in broker.broker.topics}


@dataclass
class Workload:
    """Publishes numbers until it is told to stop, with up to 20 sends in flight.

    `acknowledged`: the numbers with a receipt. `gap_s`: the longest time between two receipts.
    """

    client: magnetar.Client
    topic: str
    acknowledged: list[int] = field(default_factory=list)
    gap_s: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        producer = await self.client.create_producer(self.topic, batching_enabled=False)
        last, sent = loop.time(), 0
        room = asyncio.Semaphore(20)

        def on_sent(number: int, result: Any) -> None:
            nonlocal last
            assert result.name == "Ok", result
            self.gap_s = max(self.gap_s, loop.time() - last)
            last = loop.time()
            self.acknowledged.append(number)
            room.release()

        while not self.done.is_set():
            await room.acquire()
            number = sent
            sent += 1
            producer.send_async(
                b"%d" % number, lambda result, _, number=number: on_sent(number, result)
            )
            await asyncio.sleep(0.001)
        await producer.flush()
        await producer.close()


async def stored(client: magnetar.Client, topic: str) -> list[int]:
    reader = await client.create_reader(topic, MessageId.earliest)
    numbers = []
    while await reader.has_message_available():
        numbers.append(int((await reader.read_next(timeout_millis=20_000)).data()))
    await reader.close()
    return numbers


def check(workload: Workload, numbers: list[int]) -> None:
    """Check that no acknowledged number is missing, and that all numbers are in order.

    A number counts at its first place, because a client may resend a block of numbers.
    """
    assert set(workload.acknowledged) <= set(numbers)
    assert workload.acknowledged == sorted(workload.acknowledged)
    first = list(dict.fromkeys(numbers))
    assert first == sorted(first)


async def after(workload: Workload, count: int) -> None:
    goal = len(workload.acknowledged) + count
    await wait_until(lambda: len(workload.acknowledged) >= goal)


async def test_a_stop_hands_over_at_once() -> None:
    async with pair() as (first, second):
        topic = topic_of(first, [first, second])
        async with magnetar.Client(both(first, second)) as client:
            workload = Workload(client, topic)
            async with asyncio.TaskGroup() as group:
                group.create_task(workload.run())
                await after(workload, 100)
                assert serves(first, topic)
                started = asyncio.get_running_loop().time()
                first.stop.set()
                await asyncio.wait([first.serving])
                assert asyncio.get_running_loop().time() - started < HANDOVER_S
                await first.ports.aclose()
                await after(workload, 100)
                workload.done.set()
            assert serves(second, topic)
            numbers = await stored(client, topic)
            check(workload, numbers)
            assert len(numbers) == len(set(numbers)), "a clean handover sends nothing twice"
            assert workload.gap_s < HANDOVER_S


async def test_a_broker_that_joins_gets_a_topic_and_its_clients_move_at_once() -> None:
    cluster = ClusterState()
    await create_namespaces(cluster.store(), "public/n0")
    balance = BalanceRules(period_s=0.1)
    async with (
        running_broker(cluster, 0, balance=balance) as first,
        magnetar.Client(first.grpc_url) as client,
    ):
        names = (f"persistent://public/n0/t{number}" for number in range(20))
        by_bundle = {bundle_in(TopicName.parse(each), NamespaceBundles()): each for each in names}
        topics = list(by_bundle.values())
        workloads = [Workload(client, topic) for topic in topics]
        async with asyncio.TaskGroup() as group:
            for workload in workloads:
                group.create_task(workload.run())
            for workload in workloads:
                await after(workload, 20)
            assert first.broker.bundles == 4
            async with running_broker(cluster, 1, balance=balance) as second:
                await wait_until(lambda: second.broker.bundles == 2)
                for workload in workloads:
                    await after(workload, 40)
                assert first.broker.bundles == 2
                assert first.broker.balancer.moved == 2
                moved = [topic for topic in topics if serves(second, topic)]
                assert len(moved) == 2
                assert not [topic for topic in moved if serves(first, topic)]
                assert max(workload.gap_s for workload in workloads) < HANDOVER_S
                for workload in workloads:
                    workload.done.set()
        for workload in workloads:
            numbers = await stored(client, workload.topic)
            check(workload, numbers)
            assert len(numbers) == len(set(numbers)), "a clean move sends nothing twice"


@pytest.mark.parametrize("registered", [True, False], ids=["port refuses", "session gone"])
async def test_a_dead_owner_is_replaced(registered: bool) -> None:
    async with pair() as (first, second):
        topic = topic_of(first, [first, second])
        async with magnetar.Client(both(first, second)) as client:
            consumer = await client.subscribe(topic, "s", initial_position=InitialPosition.Earliest)
            workload = Workload(client, topic)
            async with asyncio.TaskGroup() as group:
                group.create_task(workload.run())
                await after(workload, 100)
                assert serves(first, topic)
                if not registered:
                    first.store.expire()
                await first.kill()
                await after(workload, 100)
                workload.done.set()
            assert serves(second, topic)
            check(workload, await stored(client, topic))
            assert workload.gap_s < TAKEOVER_S
            wanted = set(workload.acknowledged)
            while wanted:
                message = await consumer.receive(timeout_millis=20_000)
                wanted.discard(int(message.data()))
                await consumer.acknowledge(message)


async def test_an_owner_that_lost_its_session_gives_way() -> None:
    """The owner keeps running, cut off from the metadata store, and its clients stay connected."""

    async with pair() as (first, second), wire_to(second, "pulsar") as other:
        topic = topic_of(first, [first, second])
        async with magnetar.Client(both(first, second)) as client:
            workload = Workload(client, topic)
            async with asyncio.TaskGroup() as group:
                group.create_task(workload.run())
                await after(workload, 100)
                first.store.expire()
                found = await other.ask(pb.CommandLookupTopic(topic=topic, request_id=0))
                assert found.brokerServiceUrl == second.pulsar_url
                await other.subscribe(topic)  # `second` opens the topic and fences `first`
                await after(workload, 100)
                workload.done.set()
            assert serves(second, topic)
            check(workload, await stored(client, topic))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_closing_broker_tells_its_clients_the_next_owner(transport: str) -> None:
    async with pair() as (first, second), wire_to(first, transport) as client:
        topic = topic_of(first, [first, second])
        url = second.pulsar_url if transport == "pulsar" else second.grpc_url
        await client.produce(topic)
        await client.subscribe(topic)
        first.stop.set()
        bodies: list[Any] = [(await client.receive()).body for _ in range(2)]
        assert {type(it) for it in bodies} == {pb.CommandCloseProducer, pb.CommandCloseConsumer}
        assert {it.assignedBrokerServiceUrl for it in bodies} == {url}
        await asyncio.wait([first.serving])
        async with wire_to(second, transport) as moved:
            found = await moved.ask(pb.CommandLookupTopic(topic=topic, request_id=0))
            assert found.response == pb.CommandLookupTopicResponse.Connect
            assert found.brokerServiceUrl == url
            await moved.produce(topic)
            await moved.publish("there")
            assert (await moved.expect(pb.CommandSendReceipt)).sequence_id == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_both_brokers_give_the_same_answer_to_a_lookup(transport: str) -> None:
    kinds = pb.CommandLookupTopicResponse
    async with (
        pair() as (first, second),
        wire_to(first, transport) as one,
        wire_to(second, transport) as other,
    ):
        topic = topic_of(first, [first, second])
        url = first.pulsar_url if transport == "pulsar" else first.grpc_url
        asked = await other.ask(pb.CommandLookupTopic(topic=topic, request_id=0))
        assert (asked.response, asked.brokerServiceUrl) == (kinds.Redirect, url)
        assert asked.authoritative
        found = await one.ask(pb.CommandLookupTopic(topic=topic, request_id=0, authoritative=True))
        assert (found.response, found.brokerServiceUrl) == (kinds.Connect, url)
        assert not found.authoritative
        again = await other.ask(pb.CommandLookupTopic(topic=topic, request_id=0))
        assert (again.response, again.brokerServiceUrl) == (kinds.Connect, url)
        refused = await other.produce(topic)
        assert refused.error == pb.ServiceNotReady
        assert "look it up again" in refused.message


async def test_an_unmodified_apache_client_follows_its_topic() -> None:
    """The client knows both brokers; the owner stops while the client publishes and consumes."""

    def work(urls: str, topic: str, stop_owner: Callable[[], None]) -> None:
        client = pulsar.Client(
            urls,
            operation_timeout_seconds=30,
            logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
        )
        consumer = client.subscribe(topic, "s", initial_position=pulsar.InitialPosition.Earliest)
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        producer = client.create_producer(topic)
        for number in range(300):
            if number == 100:
                stop_owner()
            producer.send(b"%d" % number)
        got = []
        while not got or got[-1] != b"299":
            message = consumer.receive(timeout_millis=20_000)
            consumer.acknowledge(message)
            got.append(message.data())
        assert list(dict.fromkeys(got)) == [b"%d" % number for number in range(300)]
        read = [reader.read_next(timeout_millis=20_000).data() for _ in range(300)]
        assert list(dict.fromkeys(read)) == read
        client.close()

    loop = asyncio.get_running_loop()
    async with pair() as (first, second):
        topic = topic_of(first, [first, second])

        async def retire() -> None:
            first.stop.set()
            await asyncio.wait([first.serving])
            await first.ports.aclose()

        def stop_owner() -> None:
            asyncio.run_coroutine_threadsafe(retire(), loop)

        urls = f"{first.pulsar_url},{second.pulsar_url.removeprefix('pulsar://')}"
        await asyncio.to_thread(work, urls, topic, stop_owner)
        assert serves(second, topic)


async def test_two_brokers_stop_at_the_same_time() -> None:
    async with pair() as (first, second), wire_to(first, "pulsar") as client:
        topic = topic_of(first, [first, second])
        await client.produce(topic)
        await client.publish("kept")
        await client.expect(pb.CommandSendReceipt)
        first.stop.set()
        second.stop.set()
        async with asyncio.timeout(HANDOVER_S):
            await asyncio.wait([first.serving, second.serving])
        assert not first.serving.cancelled()
