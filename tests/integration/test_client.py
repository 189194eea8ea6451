"""Our client against real servers: through crashes, hand-overs and restarts, from both faces."""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.standalone_process import StandaloneProcess
from fakes.stepped_loop import SteppedLoop
from support import free_port, wait_until

import magnetar
import magnetar.asyncio

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop]

EARLIEST = magnetar.InitialPosition.Earliest
SHARED = magnetar.ConsumerType.Shared
TIMEOUT_MS = 60_000
HANDOVER_S = 8.0  # far less than any timeout: no client waits for one


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandaloneProcess]:
    """A server that keeps acknowledged messages, so that a test can read all stored messages."""
    kept = "--default-retention-time-in-minutes=-1", "--default-retention-size-in-mb=-1"
    process = StandaloneProcess(tmp_path, *kept)
    process.start()
    yield process
    process.end()


@pytest.fixture
def client(server: StandaloneProcess) -> Iterator[magnetar.Client]:
    client = magnetar.Client(server.service_url)
    yield client
    client.shutdown()


def publish(client: magnetar.Client, numbers: range, *, batch: int) -> list[magnetar.MessageId]:
    """Messages in entries of `batch`; their ids."""
    ids: dict[int, Any] = {}
    options: dict[str, Any] = {"batching_max_messages": batch, "max_pending_messages": 0}
    with client.create_producer("t", batching_max_publish_delay_ms=10_000, **options) as producer:
        for number in numbers:
            producer.send_async(b"%d" % number, lambda _, it, at=number: ids.update({at: it}))
        producer.flush()
    return [ids[number] for number in numbers]


def take(source: Any, count: int) -> list[magnetar.Message]:
    receive = source.receive if hasattr(source, "receive") else source.read_next
    return [receive(timeout_millis=TIMEOUT_MS) for _ in range(count)]


def data(messages: list[magnetar.Message]) -> list[int]:
    return [int(message.data()) for message in messages]


def expect_none(consumer: magnetar.Consumer) -> None:
    with pytest.raises(magnetar.Timeout):
        consumer.receive(timeout_millis=300)


def test_no_client_notices_that_the_server_was_killed(
    server: StandaloneProcess, client: magnetar.Client
) -> None:
    """The server is killed twice under a producer and a consumer. Every message with a receipt is
    stored in order, and no message that the consumer acknowledged is redelivered."""
    total = 3000
    consumer = client.subscribe("t", "s", initial_position=EARLIEST)
    producer = client.create_producer(
        "t", block_if_queue_full=True, max_pending_messages=200, send_timeout_millis=0
    )
    results: list[magnetar.Result] = []

    def send() -> None:
        for number in range(total):
            producer.send_async(b"%d" % number, lambda result, _: results.append(result))
            time.sleep(0.0002)
        producer.flush()

    sender = threading.Thread(target=send)
    sender.start()
    seen: list[int] = []
    last = magnetar.MessageId.earliest

    def take_one() -> None:
        nonlocal last
        message = consumer.receive(timeout_millis=TIMEOUT_MS)
        seen.append(int(message.data()))
        consumer.acknowledge(message)
        last = message.message_id()

    for kill_at in (total // 3, 2 * total // 3):
        while (seen[-1] if seen else -1) < kill_at - 1:
            take_one()
        server.kill()
        server.start()
    sender.join()
    assert results == [magnetar.Result.Ok] * total
    end = consumer.get_last_message_id()  # resent messages may be stored after the last number
    while last < end:
        take_one()
    assert set(seen) == set(range(total))
    consumer.close()
    expect_none(client.subscribe("t", "s"))
    reader = client.create_reader("t", magnetar.MessageId.earliest)
    stored = []
    while reader.has_message_available():
        stored.append(int(reader.read_next(TIMEOUT_MS).data()))
    firsts = list(dict.fromkeys(stored))  # a resent message may be stored twice
    assert firsts == list(range(total))


def test_messages_before_a_returned_close_survive_kill_9(server: StandaloneProcess) -> None:
    """Single messages of a batch count as well."""
    client = magnetar.Client(server.service_url)
    publish(client, range(20), batch=10)
    consumer = client.subscribe("t", "s", initial_position=EARLIEST)
    for message in take(consumer, 20)[:13]:
        consumer.acknowledge(message)
    client.close()
    server.kill()
    server.start()
    with magnetar.Client(server.service_url) as again:
        consumer = again.subscribe("t", "s")
        assert data(take(consumer, 7)) == list(range(13, 20))
        expect_none(consumer)


@pytest.mark.parametrize("batch", [1, 4])
def test_seek_moves_a_consumer_to_a_message_or_a_time(client: magnetar.Client, batch: int) -> None:
    ids = publish(client, range(8), batch=batch)
    time.sleep(0.02)
    later_ms = time.time_ns() // 1_000_000
    ids += publish(client, range(8, 12), batch=batch)
    consumer = client.subscribe("t", "s", initial_position=EARLIEST)
    for message in take(consumer, 12):
        consumer.acknowledge(message)
    consumer.seek(ids[5])
    assert data(take(consumer, 6)) == list(range(6, 12))
    consumer.seek(later_ms)
    assert data(take(consumer, 4)) == list(range(8, 12))
    consumer.seek(magnetar.MessageId.earliest)
    assert data(take(consumer, 12)) == list(range(12))
    consumer.seek(magnetar.MessageId.latest)
    expect_none(consumer)
    consumer.close()
    inclusive = client.subscribe("t", "s", start_message_id_inclusive=True)
    inclusive.seek(ids[5])
    assert data(take(inclusive, 7)) == list(range(5, 12))
    expect_none(inclusive)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_reader_begins_at_its_start_id_and_continues_after_a_kill(
    server: StandaloneProcess, client: magnetar.Client, batch: int
) -> None:
    ids = publish(client, range(8), batch=batch)
    for inclusive in (False, True):
        reader = client.create_reader("t", ids[5], start_message_id_inclusive=inclusive)
        assert data(take(reader, 2)) == ([5, 6] if inclusive else [6, 7])
        reader.close()
    last = client.create_reader("t", magnetar.MessageId.latest, start_message_id_inclusive=True)
    assert last.has_message_available()
    assert data(take(last, 1)) == [7]
    assert not last.has_message_available()
    latest = client.create_reader("t", magnetar.MessageId.latest)
    assert not latest.has_message_available()
    going = client.create_reader("t", magnetar.MessageId.earliest)
    assert data(take(going, 3)) == [0, 1, 2]
    server.kill()
    server.start()
    assert data(take(going, 5)) == [3, 4, 5, 6, 7]
    assert not going.has_message_available()
    time.sleep(0.02)
    now_ms = time.time_ns() // 1_000_000
    publish(client, range(8, 10), batch=2)
    assert latest.has_message_available()
    assert data(take(latest, 2)) == [8, 9]
    going.seek(ids[1])
    assert data(take(going, 2)) == [2, 3]
    going.seek(now_ms)
    assert going.has_message_available()
    assert data(take(going, 2)) == [8, 9]
    assert not going.has_message_available()


def test_negatively_acknowledged_messages_are_redelivered(client: magnetar.Client) -> None:
    publish(client, range(6), batch=1)
    options: dict[str, Any] = {"initial_position": EARLIEST, "negative_ack_redelivery_delay_ms": 50}
    shared = client.subscribe("t", "shared", SHARED, **options)
    messages = take(shared, 6)
    for message in messages:
        if message.data() != b"3":
            shared.acknowledge(message)
    shared.negative_acknowledge(messages[3])
    again = shared.receive(TIMEOUT_MS)
    assert (again.data(), again.redelivery_count()) == (b"3", 1)
    ordered = client.subscribe("t", "ordered", **options)
    messages = take(ordered, 4)
    ordered.acknowledge(messages[0])
    ordered.negative_acknowledge(messages[2])
    ahead = list(
        itertools.takewhile(lambda n: n != 1, (data(take(ordered, 1))[0] for _ in range(3)))
    )
    assert ahead == [4, 5][: len(ahead)]  # sent before the broker got the request for redelivery
    assert data(take(ordered, 4)) == [2, 3, 4, 5]
    ordered.redeliver_unacknowledged_messages()
    assert data(take(ordered, 5)) == [1, 2, 3, 4, 5]
    expect_none(ordered)


def test_a_client_may_be_there_before_the_server(tmp_path: Path) -> None:
    server = StandaloneProcess(tmp_path)
    with magnetar.Client(server.service_url, operation_timeout_seconds=30) as client:
        threading.Timer(0.5, server.launch).start()
        try:
            client.create_producer("t").send(b"x")
        finally:
            server.end()
            client.shutdown()


class Pauses(logging.Handler):
    """Lets each pause between two attempts of a client pass at once."""

    def __init__(self, loop: SteppedLoop) -> None:
        super().__init__(logging.INFO)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(("asking again", "attaching again")):
            pause_s = vars(record)["magnetar_fields"]["in_s"]
            self._loop.call_soon(self._loop.step, pause_s + 0.001)  # `in_s` is rounded


def test_subscribe_without_a_server_raises_connect_error(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()

    async def subscribe() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SteppedLoop)
        pauses = Pauses(loop)
        logging.getLogger("magnetar.client").addHandler(pauses)
        url = f"grpc://127.0.0.1:{port}"
        try:
            async with magnetar.asyncio.Client(url, operation_timeout_seconds=1) as client:
                with pytest.raises(magnetar.ConnectError, match=str(port)):
                    await client.subscribe("t", "s")
                assert loop.time() <= 1
                loop.go_on()
        finally:
            logging.getLogger("magnetar.client").removeHandler(pauses)

    with (
        caplog.at_level(logging.INFO, logger="magnetar.client"),
        asyncio.Runner(loop_factory=SteppedLoop) as runner,
    ):
        runner.run(subscribe())


def test_a_program_that_forgets_to_close_ends(server: StandaloneProcess) -> None:
    script = f"""
import magnetar
client = magnetar.Client({server.service_url!r})
consumer = client.subscribe("t", "s")
client.create_producer("t").send(b"x")
print(consumer.receive(20000).data())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'x'\n", "")


def test_a_client_survives_the_start_and_end_of_event_loops(server: StandaloneProcess) -> None:
    """Loops may also end without closing their client: grpc has one thread for all of them."""
    script = f"""
import asyncio, logging, magnetar, magnetar.asyncio
logging.basicConfig()

async def work(close):
    client = magnetar.asyncio.Client({server.service_url!r})
    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s")
    await producer.send(b"x")
    await consumer.acknowledge(await consumer.receive())
    if close:
        await close(client)

async def shut_down(client):
    client.shutdown()

with magnetar.Client({server.service_url!r}) as client:
    producer = client.create_producer("t")
    for close in (magnetar.asyncio.Client.close, shut_down, None) * 3:
        asyncio.run(work(close))
        producer.send(b"y")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.real_loop(deadline_s=240)
async def test_an_owner_that_stops_hands_over_at_once() -> None:
    """Two brokers; the one that owns the topic is stopped while a producer and a consumer work."""

    cluster = ClusterState()
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        one = await first.enter_async_context(running_broker(cluster, 0))
        other = await second.enter_async_context(running_broker(cluster, 1))
        urls = f"{one.grpc_url},{other.grpc_url.removeprefix('grpc://')}"
        async with magnetar.asyncio.Client(urls) as client:
            topics = [f"t{number}" for number in range(8)]
            producers = [await client.create_producer(topic) for topic in topics]
            consumers = [await client.subscribe(topic, "s") for topic in topics]
            for producer, consumer in zip(producers, consumers, strict=True):
                await producer.send(b"before")
                await consumer.acknowledge(await consumer.receive(TIMEOUT_MS))
            loop = asyncio.get_running_loop()
            await first.aclose()
            began = loop.time()
            for producer, consumer in zip(producers, consumers, strict=True):
                await producer.send(b"after")
                message = await consumer.receive(TIMEOUT_MS)
                assert message.data() == b"after"
                await consumer.acknowledge(message)
            assert loop.time() - began < HANDOVER_S


@pytest.mark.real_loop(deadline_s=240)
async def test_many_tasks_share_batches_and_connections(server: StandaloneProcess) -> None:
    async with magnetar.asyncio.Client(server.service_url) as client:
        producer = await client.create_producer("t", max_pending_messages=0)
        consumer = await client.subscribe("t", "s", SHARED, initial_position=EARLIEST)
        got: list[bytes] = []

        async def work(number: int) -> None:
            for index in range(20):
                await producer.send(b"%d-%d" % (number, index))

        async def listen() -> None:
            while True:
                message = await consumer.receive(TIMEOUT_MS)
                got.append(message.data())
                await consumer.acknowledge(message)

        async with asyncio.TaskGroup() as group:
            listeners = [group.create_task(listen()) for _ in range(3)]
            for number in range(100):
                group.create_task(work(number))
            await wait_until(lambda: len(got) >= 2000)
            for listener in listeners:
                listener.cancel()
        assert len(set(got)) == 2000
        last = await consumer.get_last_message_id()
        assert last.entry_id() < 500  # far fewer entries than messages
