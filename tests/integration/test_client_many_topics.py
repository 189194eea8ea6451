"""Many topics with our client against a real server, beside Apache's client."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pulsar
import pytest
from fakes.standalone_process import StandaloneProcess

import magnetar
import magnetar.asyncio

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop]

EARLIEST = magnetar.InitialPosition.Earliest
KEYS = [f"key-{number}" for number in range(40)]
TIMEOUT_MS = 20_000
names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.start()
    yield process
    process.end()


@pytest.fixture
def client(server: StandaloneProcess) -> Iterator[magnetar.Client]:
    client = magnetar.Client(server.service_url)
    yield client
    client.shutdown()


@pytest.fixture
def apache(server: StandaloneProcess) -> Iterator[pulsar.Client]:
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(server.pulsar_url, logger=logger)
    yield client
    client.close()


@pytest.fixture
def topic() -> str:
    return f"t{next(names)}"


def set_partitions(
    server: StandaloneProcess, topic: str, count: int, *, more: bool = False
) -> None:
    url = (
        f"http://localhost:{server.http_port}/admin/v2/persistent/public/default/{topic}/partitions"
    )
    answer = (httpx.post if more else httpx.put)(url, json=count, timeout=60)
    assert answer.is_success, answer.text


def places(messages: list[Any]) -> dict[str, str]:
    return {message.partition_key(): message.topic_name() for message in messages}


def test_apaches_producer_and_ours_agree_on_the_partition_of_a_key(
    server: StandaloneProcess, client: magnetar.Client, apache: pulsar.Client, topic: str
) -> None:
    set_partitions(server, topic, 4)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    theirs = apache.create_producer(topic)
    sent = [theirs.send(b"x", partition_key=key) for key in KEYS]
    first = [consumer.receive(TIMEOUT_MS) for _ in KEYS]
    ids = {(one.partition(), one.ledger_id(), one.entry_id()) for one in sent}
    assert ids == {
        (one.partition(), one.ledger_id(), one.entry_id())
        for one in (message.message_id() for message in first)
    }
    for message in first:
        consumer.acknowledge(message)
    with client.create_producer(topic, hashing_scheme=magnetar.HashingScheme.BoostHash) as ours:
        for key in KEYS:
            ours.send(b"y", partition_key=key)
    second = [consumer.receive(TIMEOUT_MS) for _ in KEYS]
    assert places(second) == places(first)
    assert len(set(places(first).values())) == 4
    consumer.close()
    # The broker does not redeliver the messages that our client acknowledged.
    other = apache.subscribe(topic, "s")
    third = [other.receive(TIMEOUT_MS) for _ in KEYS]
    assert {message.data() for message in third} == {b"y"}
    assert places(third) == places(first)
    other.close()


def test_asyncio_client_produces_to_and_consumes_all_partitions(
    server: StandaloneProcess, topic: str
) -> None:
    set_partitions(server, topic, 3)

    async def run() -> None:
        async with magnetar.asyncio.Client(server.service_url) as client:
            consumer = await client.subscribe(topic, "s", initial_position=EARLIEST)
            producer = await client.create_producer(topic)
            async with asyncio.TaskGroup() as group:
                for number in range(300):
                    group.create_task(producer.send(b"%d" % number))
            got = []
            async for message in consumer:
                await consumer.acknowledge(message)
                got.append(int(message.data()))
                if len(got) == 300:
                    break
            assert sorted(got) == list(range(300))
            await consumer.seek(0)
            again = [int((await consumer.receive(TIMEOUT_MS)).data()) for _ in range(300)]
            assert sorted(again) == list(range(300))
            assert len(await consumer.get_last_message_ids()) == 3
            await consumer.unsubscribe()

    asyncio.run(run())


def test_listener_and_batch_receive_get_all_messages_of_partitions(
    server: StandaloneProcess, client: magnetar.Client, topic: str
) -> None:
    set_partitions(server, topic, 2)
    heard: list[bytes] = []

    def listen(consumer: magnetar.Consumer, message: magnetar.Message) -> None:
        heard.append(message.data())
        consumer.acknowledge_cumulative(message)

    listening = client.subscribe(topic, "l", message_listener=listen)
    policy = magnetar.ConsumerBatchReceivePolicy(10, -1, 5_000)
    consumer = client.subscribe(topic, "s", batch_receive_policy=policy)
    with client.create_producer(topic) as producer:
        for number in range(10):
            producer.send(b"%d" % number)
    batch = consumer.batch_receive()
    assert sorted(message.data() for message in batch) == [b"%d" % number for number in range(10)]
    end = time.monotonic() + 20
    while len(heard) < 10:
        assert time.monotonic() < end
        time.sleep(0.01)
    listening.close()
    assert client.get_topic_partitions(topic) == [
        f"persistent://public/default/{topic}-partition-{index}" for index in range(2)
    ]


def test_pattern_gets_the_first_message_of_a_new_topic(
    client: magnetar.Client, apache: pulsar.Client, topic: str
) -> None:
    consumer = client.subscribe(re.compile(f"public/default/{topic}-.*"), "s")
    time.sleep(0.5)  # until the consumer watches the namespace
    for number in range(3):
        producer = apache.create_producer(f"{topic}-{number}")
        producer.send(b"first")
        message = consumer.receive(TIMEOUT_MS)  # without a watch, the consumer asks once in 60 s
        assert message.topic_name().endswith(f"{topic}-{number}")
        consumer.acknowledge(message)
    consumer.close()


def test_a_consumer_of_a_list_receives_from_all_topics(
    server: StandaloneProcess, client: magnetar.Client, topic: str
) -> None:
    set_partitions(server, f"{topic}p", 2)
    consumer = client.subscribe([topic, f"{topic}p"], "s", initial_position=EARLIEST)
    for name in (topic, f"{topic}p", f"{topic}p"):
        with client.create_producer(name, batching_enabled=False) as producer:
            for _ in range(4):
                producer.send(b"x")
    got = [consumer.receive(TIMEOUT_MS) for _ in range(12)]
    assert len({message.topic_name() for message in got}) == 3
    for message in got:
        message_id = message.message_id().serialize()
        consumer.acknowledge(magnetar.MessageId.deserialize(message_id, topic=message.topic_name()))
    consumer.close()
    again = client.subscribe([topic, f"{topic}p"], "s")
    with pytest.raises(magnetar.Timeout):
        again.receive(500)


def test_reader_and_table_view_read_all_partitions(
    server: StandaloneProcess, client: magnetar.Client, topic: str
) -> None:
    set_partitions(server, topic, 3)
    producer = client.create_producer(topic)
    for key in KEYS:
        producer.send(key.encode(), partition_key=key)
    with client.create_reader(topic, magnetar.MessageId.earliest) as reader:
        count = 0
        while reader.has_message_available():
            reader.read_next(TIMEOUT_MS)
            count += 1
        assert count == len(KEYS)
    with client.create_table_view(topic) as table:
        assert (len(table), table.get("key-7")) == (len(KEYS), b"key-7")
        heard: list[tuple[str, bytes]] = []
        table.for_each_and_listen(lambda key, value: heard.append((key, value)))
        producer.send(b"new", partition_key="key-7")
        producer.send(None, partition_key="key-8")
        end = time.monotonic() + 20
        while len(heard) < len(KEYS) + 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert (len(table), table.get("key-7"), table.get("key-8")) == (39, b"new", None)


def test_added_partitions_are_produced_to_and_consumed(
    server: StandaloneProcess, topic: str
) -> None:
    from magnetar.client.environment import Environment
    from magnetar.client.options import ClientOptions

    set_partitions(server, topic, 1)
    client = magnetar.Client.in_environment(
        ClientOptions(server.service_url), Environment(partitions_update_s=0.2)
    )
    try:
        consumer = client.subscribe(topic, "s")
        producer = client.create_producer(topic, batching_enabled=False)
        set_partitions(server, topic, 3, more=True)
        seen: set[int] = set()
        end = time.monotonic() + 20
        while len(seen) < 3:
            assert time.monotonic() < end
            producer.send(b"x")
            seen.add(consumer.receive(TIMEOUT_MS).message_id().partition())
    finally:
        client.close()


def test_drained_consumer_of_partitions_leaves_nothing_to_redeliver(
    server: StandaloneProcess, client: magnetar.Client, topic: str
) -> None:
    set_partitions(server, topic, 3)
    shared = magnetar.ConsumerType.Shared
    consumer = client.subscribe(topic, "s", shared, initial_position=EARLIEST)
    with client.create_producer(topic, batching_enabled=False) as producer:
        for number in range(9):
            producer.send(b"%d" % number)
    taken = [consumer.receive(TIMEOUT_MS) for _ in range(9)]
    closing = threading.Thread(target=consumer.close, kwargs={"drain": True})
    closing.start()
    for message in taken:
        consumer.acknowledge(message)
    closing.join(TIMEOUT_MS / 1000)
    assert not closing.is_alive()
    other = client.subscribe(topic, "s", shared)
    with pytest.raises(magnetar.Timeout):
        other.receive(500)


def test_partitions_move_dead_letters_to_one_topic(
    server: StandaloneProcess, client: magnetar.Client, topic: str
) -> None:
    set_partitions(server, topic, 2)
    consumer = client.subscribe(
        topic,
        "s",
        magnetar.ConsumerType.Shared,
        initial_position=EARLIEST,
        negative_ack_redelivery_delay_ms=100,
        dead_letter_policy=magnetar.ConsumerDeadLetterPolicy(1, None, "keep"),
    )
    with client.create_producer(topic, batching_enabled=False) as producer:
        for number in range(4):
            producer.send(b"%d" % number)
    for _ in range(8):
        consumer.negative_acknowledge(consumer.receive(TIMEOUT_MS))
    dead = client.subscribe(f"{topic}-s-DLQ", "keep", magnetar.ConsumerType.Shared)
    letters = [dead.receive(TIMEOUT_MS) for _ in range(4)]
    assert {letter.data() for letter in letters} == {b"0", b"1", b"2", b"3"}
    assert len({letter.properties()["REAL_TOPIC"] for letter in letters}) == 2
