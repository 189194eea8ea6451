"""An unexpected exception ends the producer or consumer in whose work it arose, and nothing else.

Code of the program that the client calls raises here: a backoff, a clock, a callback.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import EARLIEST, TOPIC, A, client_among, world_of
from fakes.session_broker import FakeBrokers
from support import ManualClock, settle, wait_for

import magnetar
from magnetar.client.asyncio import Client
from magnetar.client.environment import Environment
from magnetar.client.errors import PulsarException, UnknownError
from magnetar.client.guard import guarding
from magnetar.client.options import ClientOptions, ConsumerType, ProducerOptions
from magnetar.client.policies import ConsumerDeadLetterPolicy
from magnetar.client.producing.publisher import Publisher
from magnetar.client.sync import Client as SyncClient
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SHARED = ConsumerType.Shared
BUG = "internal error: ZeroDivisionError"


class Backoff:
    """A backoff of the program that raises from its call number `breaks_at` (from 1) on."""

    def __init__(self, breaks_at: int = 1) -> None:
        self._left = breaks_at - 1

    def next(self, _: int) -> int:
        self._left -= 1
        return 10 if self._left >= 0 else 1 // 0


class Clock(ManualClock):
    breaks = False

    def now_ms(self) -> int:
        return 1 // 0 if self.breaks else super().now_ms()


def first_chunk(number: int) -> bytes:
    message = OutgoingMessage(b"12345678", number)
    first, _ = encode_chunks(message, EntryHeader("p", 1), uuid=f"u{number}", chunk_bytes_max=4)
    return b"".join(first)


@asynccontextmanager
async def others_go_on(client: Client, caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """A producer and a consumer of the client work after the block, which logs a bug once."""
    consumer = await client.subscribe("other", "s", initial_position=EARLIEST)
    producer = await client.create_producer("other")
    yield
    await settle()
    await producer.send(b"x")
    message = await consumer.receive(5000)
    await consumer.acknowledge(message)
    await consumer.close()
    bugs = [record for record in caplog.records if record.exc_info is not None]
    assert len(bugs) == 1, bugs
    assert bugs[0].getMessage().startswith("internal error")


async def test_bug_in_the_handling_of_a_delivery_ends_its_consumer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At its limit, the consumer gives up a partial message. Its redelivery calls the backoff."""
    async with client_among() as (client, cluster), others_go_on(client, caplog):
        consumer = await client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            max_pending_chunked_message=1,
            negative_ack_redelivery_backoff=Backoff(),
        )
        for number in range(2):
            cluster.topic(TOPIC).append(first_chunk(number))
        with pytest.raises(UnknownError, match=BUG):
            await consumer.receive(5000)
        await settle()
        assert cluster.topic(TOPIC).subscriptions["s"].consumers == []


class Core:
    topic = "t"
    ended: PulsarException | None = None

    def shut_down(self, error: PulsarException) -> None:
        self.ended = error


async def test_bug_in_a_timer_ends_its_core() -> None:
    good, bad = Core(), Core()
    loop = asyncio.get_running_loop()
    loop.call_later(1, guarding(bad, lambda: Clock().advance_ms(1 // 0)))
    loop.call_later(1, guarding(good, lambda: None))
    await asyncio.sleep(2)
    assert good.ended is None
    assert BUG in str(bad.ended)


async def test_bug_in_a_task_ends_its_consumer(caplog: pytest.LogCaptureFixture) -> None:
    """The broker refuses the letter. The next attempt calls the backoff."""
    async with client_among() as (client, cluster), others_go_on(client, caplog):
        consumer = await client.subscribe(
            "t",
            "s",
            SHARED,
            initial_position=EARLIEST,
            negative_ack_redelivery_backoff=Backoff(breaks_at=3),
            dead_letter_policy=ConsumerDeadLetterPolicy(1),
        )
        cluster.topic(f"{TOPIC}-s-DLQ").send_errors.append(pb.NotAllowedError)
        async with await client.create_producer("t") as producer:
            await producer.send(b"bad")
        for _ in range(2):
            await consumer.negative_acknowledge(await consumer.receive(5000))
        with pytest.raises(UnknownError, match=BUG):
            await consumer.receive(5000)


async def test_bug_in_one_topic_of_many_ends_the_consumer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The consumer does not join the topic again: without the error, the user would not know."""
    async with client_among() as (client, cluster), others_go_on(client, caplog):
        consumer = await client.subscribe(
            ["t", "u"],
            "s",
            SHARED,
            initial_position=EARLIEST,
            max_pending_chunked_message=1,
            negative_ack_redelivery_backoff=Backoff(),
        )
        for number in range(2):
            cluster.topic(TOPIC).append(first_chunk(number))
        with pytest.raises(UnknownError, match=BUG):
            await consumer.receive(5000)
        async with await client.create_producer("u") as producer:
            await producer.send(b"x")
        await asyncio.sleep(200)  # longer than the pause between two checks of the topics
        with pytest.raises(UnknownError, match=BUG):
            await consumer.receive(5000)
        for topic in (TOPIC, TOPIC[:-1] + "u"):
            assert cluster.topic(topic).subscriptions["s"].consumers == []
        await consumer.close()


@asynccontextmanager
async def client_with(clock: Clock) -> AsyncIterator[Client]:
    async with FakeBrokers(A) as cluster:
        world = Environment(dialer=lambda: cluster, clock=clock, random=random.Random(1))
        client = Client.in_environment(ClientOptions(A), world)
        try:
            yield client
        finally:
            client.shutdown()


@pytest.mark.parametrize(
    ("size", "batched"), [(1, False), (1, True), (6 << 20, False)], ids=["one", "batch", "chunks"]
)
async def test_bug_while_an_entry_is_encoded_ends_its_producer(
    caplog: pytest.LogCaptureFixture, size: int, *, batched: bool
) -> None:
    """Each message gets an outcome and frees its place among the pending messages."""
    clock = Clock()
    async with client_with(clock) as client, others_go_on(client, caplog):
        producer = await client.create_producer(
            "t",
            batching_enabled=batched,
            chunking_enabled=size > 1,
            batching_max_messages=2,
            max_pending_messages=4,
        )
        outcomes: list[Any] = []
        clock.breaks = True
        for _ in range(3):
            producer.send_async(bytes(size), lambda result, _: outcomes.append(result))
        with pytest.raises(PulsarException):
            await producer.flush()
        clock.breaks = False
        assert outcomes == [magnetar.Result.UnknownError] * 3
        with pytest.raises(UnknownError, match=BUG):
            await producer.send(b"x")
        await producer.close()


class Owner:
    def on_released(self, *_: object) -> None: ...

    def on_burst_end(self) -> None: ...


async def test_large_early_message_after_a_bug_gets_an_outcome() -> None:
    """The first of two messages that wait for the first attachment ends the publisher."""
    clock = Clock()
    async with client_with(clock) as client:
        options = ProducerOptions("t", batching_enabled=False, chunking_enabled=True)
        publisher = await client.publisher(options)
        assert isinstance(publisher, Publisher)
        publisher.producer = Owner()
        publisher.begin()
        outcomes: list[PulsarException | None] = []

        def first_done(error: PulsarException | None, _: object) -> None:
            clock.breaks = False
            outcomes.append(error)

        clock.breaks = True
        publisher.submit(OutgoingMessage(b"x", -1), 1, first_done)
        size = 6 << 20
        publisher.submit(OutgoingMessage(bytes(size), -1), size, lambda it, _: outcomes.append(it))
        await settle()
        assert [type(error) for error in outcomes] == [UnknownError] * 2


async def test_bug_in_the_handling_of_an_answer_ends_the_session_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client_among() as (client, _), others_go_on(client, caplog):
        connection = await client.parts.lookup.any_broker()

        def breaks(_: object) -> None:
            raise ZeroDivisionError

        command = pb.CommandGetTopicsOfNamespace(namespace="public/default")
        connection.ask(command, breaks)
        await settle()
        assert connection.error is not None
        assert "internal error" in str(connection.error)


@contextmanager
def sync_client() -> Iterator[tuple[SyncClient, FakeBrokers]]:
    cluster = FakeBrokers(A)
    client = SyncClient.in_environment(ClientOptions(A), world_of(cluster))
    try:
        yield client, cluster
    finally:
        client.shutdown()


@pytest.mark.real_loop
def test_bug_in_a_call_of_the_synchronous_client_ends_its_consumer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The loop still carries out the calls that other threads passed to it in the same burst."""
    with sync_client() as (client, _):
        bad = client.subscribe("t", "s", SHARED, negative_ack_redelivery_backoff=Backoff())
        good = client.subscribe("t", "other", SHARED)
        with client.create_producer("t") as producer:
            producer.send(b"x")
        bad.negative_acknowledge(bad.receive(5000))
        with pytest.raises(UnknownError, match=BUG):
            bad.receive(5000)
        good.acknowledge(good.receive(5000))
        good.close()
    assert BUG.split(":")[0] in caplog.text


def test_listener_that_raises_gets_the_next_message(caplog: pytest.LogCaptureFixture) -> None:
    got: deque[bytes] = deque()

    def listen(_: object, message: magnetar.Message) -> None:
        got.append(message.data())
        raise ZeroDivisionError

    with sync_client() as (client, _):
        client.subscribe("t", "s", message_listener=listen)
        with client.create_producer("t") as producer:
            for value in (b"1", b"2"):
                producer.send(value)
        wait_for(lambda: len(got) == 2)
        client.close()  # waits until the listener has finished its message
    assert list(got) == [b"1", b"2"]
    assert caplog.text.count("a callback failed") == 2
