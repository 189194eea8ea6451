"""Each operation of the client, cancelled at each of its awaits: no task and no object stays.

Each test repeats an operation. In the n-th run, its task is cancelled at its n-th await, or some
turns of the loop later, when the awaited event may have happened. Afterwards the client must work,
and its close must leave no task.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import EARLIEST, TOPIC, A, B, client_among, publish, receive, subscription
from support import settle

from magnetar.client.asyncio import Client, Consumer, Producer
from magnetar.client.errors import AlreadyClosed, PulsarException
from magnetar.client.message import MessageId
from magnetar.client.options import ConsumerBatchReceivePolicy, ConsumerType
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.message import decode_messages, read_entry
from magnetar.schema import AutoConsumeSchema, StringSchema

if TYPE_CHECKING:
    from fakes.session_broker import FakeBrokers

SHARED = ConsumerType.Shared
AWAITS_MAX = 200
LARGE_BYTES = 11 << 20  # three chunks
TURNS_LATER = (0, 1, 2, 3, 5, 8)


class CancelledAt(Awaitable[Any]):
    """Runs a coroutine, and cancels its task `later` turns after it awaits for the n-th time."""

    def __init__(self, work: Coroutine[Any, Any, Any], nth: int, later: int) -> None:
        self._work = work
        self._nth = nth
        self._later = later
        self.awaits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        steps = self._work.__await__()
        while True:
            try:
                waits_for = steps.send(None)
            except StopIteration as end:
                return end.value
            self.awaits += 1
            if self.awaits == self._nth:
                self._cancel(task, self._later)
            try:
                yield waits_for
            except BaseException as error:
                try:
                    waits_for = steps.throw(error)
                except StopIteration as end:
                    return end.value
                yield waits_for

    def _cancel(self, task: asyncio.Task[Any], turns: int) -> None:
        if task.done():
            return
        if turns == 0:
            task.cancel()
        else:
            asyncio.get_running_loop().call_soon(self._cancel, task, turns - 1)


@dataclass
class World:
    client: Client
    cluster: FakeBrokers
    consumer: Consumer | None = None
    producer: Producer | None = None
    result: Any = None  # result of the operation; None: cancelled, or no result

    def stored(self) -> list[bytes]:
        """All messages of the topic, in order."""
        found = []
        for entry in self.cluster.topic(TOPIC).entries.values():
            received = read_entry(memoryview(entry))
            found += [bytes(it.payload) for it in decode_messages(received)]
        return found


Work = Callable[[World], Coroutine[Any, Any, Any]]


def tasks_of_clients() -> list[str]:
    found = []
    for task in asyncio.all_tasks():
        code: Any = getattr(task.get_coro(), "cr_code", None)
        if (
            code is not None
            and "/client/" in code.co_filename
            and "/tests/" not in code.co_filename
        ):
            found.append(repr(task))
    return found


async def cancel_everywhere(work: Work, *, before: Work, after: Work) -> None:
    for nth in itertools.count(1):
        assert nth < AWAITS_MAX
        reached = False
        for later in TURNS_LATER:
            async with client_among(operation_timeout_seconds=5) as (client, cluster):
                world = World(client, cluster)
                await before(world)
                cancelled = CancelledAt(work(world), nth, later)

                async def main(world: World = world, what: CancelledAt = cancelled) -> None:
                    world.result = await what

                async with asyncio.TaskGroup() as group:
                    task = group.create_task(main())
                reached = reached or cancelled.awaits >= nth
                assert task.done()
                try:
                    async with asyncio.timeout(60):
                        await after(world)
                        with suppress(AlreadyClosed):
                            await client.close()
                except (TimeoutError, PulsarException, AssertionError) as error:
                    pytest.fail(f"cancelled at await {nth}, {later} turns later: {error!r} {error}")
                await settle()
                left = tasks_of_clients()
                assert not left, f"cancelled at await {nth}, {later} turns later: {left}"
        if not reached:
            return


async def nothing(_: World) -> None:
    pass


async def with_producer(world: World) -> None:
    world.producer = await world.client.create_producer(
        "t", batching_max_messages=3, batching_max_publish_delay_ms=5
    )


async def with_messages(world: World) -> None:
    world.consumer = await world.client.subscribe("t", "s", initial_position=EARLIEST)
    await publish(world.client, 6, batch=2)


async def with_received(world: World) -> None:
    await with_messages(world)
    assert world.consumer is not None
    await receive(world.consumer, 6)


async def sends_again(world: World) -> None:
    """A cancelled message is stored once or not at all; the later messages are stored once, in
    order."""
    assert world.producer is not None
    for value in (b"1", b"2", b"3", b"4"):
        await world.producer.send(value)
    stored = world.stored()
    assert stored in ([b"1", b"2", b"3", b"4"], [b"x", b"1", b"2", b"3", b"4"]), stored


async def receives_all(world: World) -> None:
    assert world.consumer is not None
    got = [int((await world.consumer.receive(5000)).data()) for _ in range(6)]
    assert got == list(range(6)), got


async def is_gone_from_the_broker(world: World) -> None:
    """Neither the client nor a broker holds a producer or consumer that its caller never got."""
    await world.client.close()
    for broker in world.cluster.brokers.values():
        for session in broker.sessions:
            assert not session.producers
            assert not session.consumers
    assert not world.client.parts.live


async def can_subscribe(world: World) -> None:
    """The subscription has no consumer that its caller never got."""
    if isinstance(world.result, Consumer):
        await world.result.close()
    consumer = await world.client.subscribe("t", "s")
    await consumer.close()


async def sends(world: World) -> None:
    assert world.producer is not None
    await world.producer.send(b"x")


async def sends_and_flushes(world: World) -> None:
    assert world.producer is not None
    world.producer.send_async(b"x", None)
    await world.producer.flush()


async def test_a_cancelled_send_leaves_the_producer_usable() -> None:
    await cancel_everywhere(sends, before=with_producer, after=sends_again)


async def test_a_cancelled_flush_leaves_the_producer_usable() -> None:
    await cancel_everywhere(sends_and_flushes, before=with_producer, after=sends_again)


async def test_a_cancelled_close_of_a_producer_can_be_repeated() -> None:
    async def closes(world: World) -> None:
        assert world.producer is not None
        world.producer.send_async(b"x", None)
        await world.producer.close()

    async def another_sends(world: World) -> None:
        await with_producer(world)
        await sends_again(world)

    await cancel_everywhere(closes, before=with_producer, after=another_sends)


async def test_a_cancelled_create_producer_leaves_nothing_behind() -> None:
    await cancel_everywhere(
        lambda world: world.client.create_producer("t"),
        before=nothing,
        after=is_gone_from_the_broker,
    )


async def test_a_cancelled_subscribe_leaves_nothing_behind() -> None:
    await cancel_everywhere(
        lambda world: world.client.subscribe("t", "s"), before=nothing, after=can_subscribe
    )


@pytest.mark.parametrize(
    "kind",
    ["producer", "consumer", "reader", "list", "retry", "table", "pattern", "retry of a pattern"],
)
async def test_a_cancelled_create_on_partitions_leaves_nothing_behind(kind: str) -> None:
    async def creates(world: World) -> None:
        world.cluster.partitions[TOPIC] = 2
        match kind:
            case "producer":
                await world.client.create_producer("t")
            case "consumer":
                await world.client.subscribe("t", "s")
            case "reader":
                await world.client.create_reader("t", MessageId.earliest)
            case "retry":
                await world.client.subscribe(["t", "u"], "s", enable_retry=True)
            case "pattern":
                await world.client.subscribe(re.compile("public/default/.*"), "s")
            case "retry of a pattern":
                pattern = re.compile("public/default/.*")
                await world.client.subscribe(pattern, "s", enable_retry=True)
            case "table":
                await world.client.create_table_view("t")
            case _:
                await world.client.subscribe(["t", "u"], "s")

    await cancel_everywhere(creates, before=nothing, after=is_gone_from_the_broker)


async def test_a_cancelled_receive_loses_at_most_one_message() -> None:
    async def receives(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.receive(5000)

    async def receives_the_rest(world: World) -> None:
        """The first message may be missing, if the receive had taken it before it was cancelled."""
        assert world.consumer is not None
        first = int((await world.consumer.receive(5000)).data())
        rest = [int((await world.consumer.receive(5000)).data()) for _ in range(5 - first)]
        assert first in (0, 1)
        assert [first, *rest] == list(range(first, 6))

    await cancel_everywhere(receives, before=with_messages, after=receives_the_rest)


async def test_a_cancelled_receive_of_an_empty_queue_loses_no_message() -> None:
    async def before(world: World) -> None:
        world.consumer = await world.client.subscribe("t", "s", initial_position=EARLIEST)

    async def receives(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.receive(50)

    async def after(world: World) -> None:
        await publish(world.client, 6, batch=2)
        await receives_all(world)

    async def work(world: World) -> None:
        try:
            await receives(world)
        except PulsarException:
            return

    await cancel_everywhere(work, before=before, after=after)


async def test_a_cancelled_batch_receive_leaves_the_consumer_usable() -> None:
    async def receives(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.batch_receive()

    async def closes(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.close()
        world.consumer = await world.client.subscribe("t", "s")
        await receives_all(world)

    await cancel_everywhere(receives, before=with_messages, after=closes)


async def test_a_cancelled_acknowledge_leaves_the_consumer_usable() -> None:
    async def acknowledges(world: World) -> None:
        assert world.consumer is not None
        for message in await receive(world.consumer, 6):
            await world.consumer.acknowledge(message)

    async def closes(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.close()
        world.consumer = await world.client.subscribe("t", "s")
        left = sum(bits.bit_count() for bits in subscription(world.cluster).unacked.values())
        for number in range(6 - left, 6):
            assert int((await world.consumer.receive(5000)).data()) == number

    await cancel_everywhere(acknowledges, before=with_messages, after=closes)


async def test_a_cancelled_seek_can_be_repeated() -> None:
    async def seeks(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.seek(MessageId.earliest)

    async def seeks_again(world: World) -> None:
        await seeks(world)
        await receives_all(world)

    await cancel_everywhere(seeks, before=with_received, after=seeks_again)


@pytest.mark.parametrize(
    "name", ["close", "unsubscribe", "get_last_message_id", "get_last_message_ids"]
)
async def test_other_cancelled_calls_leave_the_consumer_usable(name: str) -> None:
    async def calls(world: World) -> None:
        await getattr(world.consumer, name)()

    async def subscribes(world: World) -> None:
        assert world.consumer is not None
        with suppress(PulsarException):
            await world.consumer.close()
        await can_subscribe(world)

    await cancel_everywhere(calls, before=with_received, after=subscribes)


async def test_a_cancelled_reconsume_later_leaves_the_consumer_usable() -> None:
    """A message is never lost: the copy, the original, or both exist."""

    async def before(world: World) -> None:
        world.consumer = await world.client.subscribe(
            ["t", "u"], "s", SHARED, initial_position=EARLIEST, enable_retry=True
        )
        await publish(world.client, 6, batch=2)

    async def postpones(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.reconsume_later(await world.consumer.receive(5000), timedelta(0))

    async def closes(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.close()
        await before(world)
        got = [int((await world.consumer.receive(5000)).data()) for _ in range(12)]
        assert set(got) == set(range(6)), got

    await cancel_everywhere(postpones, before=before, after=closes)


@pytest.mark.parametrize("name", ["batch_receive", "drain", "negative_acknowledge"])
async def test_cancelled_calls_leave_a_shared_consumer_usable(name: str) -> None:
    async def before(world: World) -> None:
        world.cluster.brokers[A].drains_consumers = True
        world.cluster.brokers[A].script(pb.CommandDrainConsumer, pb.CommandSuccess())
        world.consumer = await world.client.subscribe(
            "t",
            "s",
            SHARED,
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=10,
            batch_receive_policy=ConsumerBatchReceivePolicy(10, -1, 20),
        )
        await publish(world.client, 6, batch=2)

    async def calls(world: World) -> None:
        assert world.consumer is not None
        match name:
            case "batch_receive":
                await world.consumer.batch_receive()
            case "negative_acknowledge":
                await world.consumer.negative_acknowledge(await world.consumer.receive(5000))
            case _:
                await world.consumer.close(drain=True)

    async def receives_again(world: World) -> None:
        assert world.consumer is not None
        with suppress(AlreadyClosed):
            await world.consumer.close()
        await world.client.create_producer("t")
        world.consumer = await world.client.subscribe("t", "s", SHARED)
        got = {int((await world.consumer.receive(5000)).data()) for _ in range(6)}
        assert got == set(range(6)), got

    await cancel_everywhere(calls, before=before, after=receives_again)


@pytest.mark.parametrize("name", ["read_next", "has_message_available", "seek", "close"])
async def test_cancelled_calls_leave_a_reader_usable(name: str) -> None:
    readers: list[Any] = []

    async def before(world: World) -> None:
        await publish(world.client, 6, batch=2)
        readers[:] = [await world.client.create_reader("t", MessageId.earliest)]

    async def calls(world: World) -> None:
        arguments = [MessageId.earliest] if name == "seek" else []
        await getattr(readers[0], name)(*arguments)

    async def reads_again(world: World) -> None:
        with suppress(AlreadyClosed):
            await readers[0].close()
        async with await world.client.create_reader("t", MessageId.earliest) as reader:
            got = [int((await reader.read_next(5000)).data()) for _ in range(6)]
        assert got == list(range(6))

    await cancel_everywhere(calls, before=before, after=reads_again)


async def test_a_cancelled_receive_with_a_schema_leaves_the_consumer_usable() -> None:
    """The asyncio client asks for the schema's version before `receive` returns."""

    async def before(world: World) -> None:
        world.consumer = await world.client.subscribe(
            "t", "s", SHARED, initial_position=EARLIEST, schema=AutoConsumeSchema()
        )
        async with await world.client.create_producer("t", schema=StringSchema()) as producer:
            for number in range(3):
                await producer.send(str(number))

    async def receives(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.receive(5000)

    async def receives_again(world: World) -> None:
        assert world.consumer is not None
        await world.consumer.close()
        consumer = await world.client.subscribe("t", "s", SHARED, schema=AutoConsumeSchema())
        got = {(await consumer.receive(5000)).value() for _ in range(3)}
        assert got == {"0", "1", "2"}

    await cancel_everywhere(receives, before=before, after=receives_again)


@pytest.mark.parametrize("lost", ["before", "after"])
async def test_a_reader_that_loses_its_broker_during_a_cancelled_read_skips_nothing(
    lost: str,
) -> None:
    """The read is cancelled while it asks for the schema of the first message."""
    async with client_among(operation_timeout_seconds=5) as (client, cluster):
        async with await client.create_producer("t", schema=StringSchema()) as producer:
            for number in range(3):
                await producer.send(str(number))
        first = cluster.brokers[A]
        first.script(pb.CommandGetSchema, None)  # no answer
        reader = await client.create_reader("t", MessageId.earliest, schema=AutoConsumeSchema())
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(reader.read_next())
            await settle()
            assert first.commands(pb.CommandGetSchema)
            if lost == "before":
                first.kill()
                await settle()
            assert reading.cancel()
            await settle()
        first.kill()
        cluster.take_over(B)
        await settle()
        got = [(await reader.read_next(5000)).value() for _ in range(3)]
    assert got == ["0", "1", "2"]


async def test_a_cancelled_get_topic_partitions_leaves_the_client_usable() -> None:
    async def asks(world: World) -> None:
        await world.client.get_topic_partitions("t")

    await cancel_everywhere(asks, before=nothing, after=is_gone_from_the_broker)


async def test_a_cancelled_send_of_a_chunked_message_sends_all_chunks_or_none() -> None:
    """Each consumer would wait for the rest of a message that was sent in part."""
    payload = bytes(LARGE_BYTES)

    async def before(world: World) -> None:
        world.producer = await world.client.create_producer("t", chunking_enabled=True)

    async def sends_large(world: World) -> None:
        assert world.producer is not None
        await world.producer.send(payload)

    async def sends_more(world: World) -> None:
        assert world.producer is not None
        await world.producer.send(b"1")
        consumer = await world.client.subscribe("t", "s", initial_position=EARLIEST)
        first = await consumer.receive(5000)
        if first.data() != b"1":
            assert first.data() == payload
            assert (await consumer.receive(5000)).data() == b"1"
        assert consumer.get_stats().chunked_given_up == 0

    await cancel_everywhere(sends_large, before=before, after=sends_more)


async def test_a_cancelled_send_that_waits_for_room_gives_its_place_up() -> None:
    """With `block_if_queue_full`, the next send gets the place of a cancelled one."""

    async def before(world: World) -> None:
        world.producer = await world.client.create_producer(
            "t", max_pending_messages=1, block_if_queue_full=True, batching_enabled=False
        )

    async def sends_behind_another(world: World) -> None:
        assert world.producer is not None
        world.producer.send_async(b"0", None)
        await world.producer.send(b"x")

    async def sends_more(world: World) -> None:
        assert world.producer is not None
        for value in (b"1", b"2"):
            await world.producer.send(value)
        assert world.stored() in ([b"0", b"1", b"2"], [b"0", b"x", b"1", b"2"])

    await cancel_everywhere(sends_behind_another, before=before, after=sends_more)


async def test_a_cancelled_close_of_the_client_can_be_repeated() -> None:
    async def opened(world: World) -> None:
        await with_producer(world)
        await with_received(world)

    await cancel_everywhere(lambda world: world.client.close(), before=opened, after=nothing)
