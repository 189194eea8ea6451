"""Chunked messages, dead letters, the retry topic and encryption against two brokers.

Apache's client (`pulsar-client`) goes over Pulsar's TCP protocol, ours over gRPC.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from fakes.services import Service, brokers_in_thread
from fakes.standalone_process import StandaloneProcess

import magnetar
import magnetar.asyncio
from magnetar import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_MS = 30_000
QUIET_MS = 500
LARGE = 12 * 1024 * 1024 + 5  # three chunks
NUMBERS = itertools.count()

Library = Any  # the module `pulsar` or `magnetar`: they have the same names


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with brokers_in_thread(2) as service:
        yield service


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    name = request.node.originalname.replace("_", "-")
    return f"persistent://public/default/{name}-{next(NUMBERS)}"


@contextmanager
def connected(service: Service, library: Library) -> Iterator[Any]:
    if library is pulsar:
        logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null")
        client = pulsar.Client(service.pulsar_url, operation_timeout_seconds=10, logger=logger)
    else:
        client = magnetar.Client(service.grpc_url, operation_timeout_seconds=10)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def ours(service: Service) -> Iterator[magnetar.Client]:
    with connected(service, magnetar) as client:
        yield client


@pytest.fixture
def apache(service: Service) -> Iterator[pulsar.Client]:
    with connected(service, pulsar) as client:
        yield client


@pytest.fixture(params=["ours-to-ours", "ours-to-apache", "apache-to-ours"])
def pair(
    request: pytest.FixtureRequest, ours: magnetar.Client, apache: pulsar.Client
) -> tuple[Any, Any, Library]:
    """A client that publishes, one that consumes, and the library of the latter."""
    sends, _, receives = request.param.partition("-to-")
    clients = {"ours": ours, "apache": apache}
    return clients[sends], clients[receives], pulsar if receives == "apache" else magnetar


def payload(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("kind", ["Exclusive", "Shared"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_chunked_message_is_joined_and_acknowledged_as_one(
    pair: tuple[Any, Any, Library], topic: str, kind: str, *, compressed: bool
) -> None:
    sender, receiver, library = pair
    sends = magnetar if isinstance(sender, magnetar.Client) else pulsar
    consumer_type = getattr(library.ConsumerType, kind)
    consumer = receiver.subscribe(topic, "s", consumer_type=consumer_type)
    codec = sends.CompressionType.ZLib if compressed else sends.CompressionType.NONE
    producer = sender.create_producer(
        topic, batching_enabled=False, chunking_enabled=True, compression_type=codec
    )
    content = payload(LARGE)
    sent = producer.send(content, properties={"a": "1"}, partition_key="k")
    producer.send(b"small")
    received = [consumer.receive(timeout_millis=TIMEOUT_MS) for _ in range(2)]
    if kind == "Shared":  # no order is promised
        received.sort(key=lambda one: -len(one.data()))
    message, small = received
    assert message.data() == content
    assert (message.properties(), message.partition_key()) == ({"a": "1"}, "k")
    assert message.message_id().entry_id() == sent.entry_id()
    assert message.message_id().serialize() == sent.serialize()
    assert small.data() == b"small"
    consumer.acknowledge(message)
    consumer.acknowledge(small)
    consumer.close()
    again = receiver.subscribe(topic, "s", consumer_type=consumer_type)
    with pytest.raises(library.Timeout):
        again.receive(timeout_millis=QUIET_MS)


def test_a_negatively_acknowledged_chunked_message_is_redelivered(
    ours: magnetar.Client, topic: str
) -> None:
    consumer = ours.subscribe(
        topic, "s", magnetar.ConsumerType.Shared, negative_ack_redelivery_delay_ms=100
    )
    producer = ours.create_producer(topic, chunking_enabled=True)
    producer.send(payload(LARGE))
    first = consumer.receive(TIMEOUT_MS)
    consumer.negative_acknowledge(first)
    second = consumer.receive(TIMEOUT_MS)
    assert (second.data(), second.redelivery_count()) == (first.data(), 1)
    assert second.message_id() == first.message_id()


def test_a_seek_to_a_chunked_message_begins_at_its_first_chunk(
    ours: magnetar.Client, topic: str
) -> None:
    producer = ours.create_producer(topic, chunking_enabled=True)
    producer.send(b"before")
    sent = producer.send(payload(LARGE))
    producer.send(b"after")
    stored = magnetar.MessageId.deserialize(sent.serialize())
    at = ours.create_reader(topic, magnetar.MessageId.earliest, start_message_id_inclusive=True)
    at.seek(stored)
    assert len(at.read_next(TIMEOUT_MS).data()) == LARGE
    assert at.read_next(TIMEOUT_MS).data() == b"after"
    behind = ours.create_reader(topic, stored)
    assert behind.read_next(TIMEOUT_MS).data() == b"after"


def test_a_message_that_compression_makes_small_is_not_chunked(
    ours: magnetar.Client, topic: str
) -> None:
    consumer = ours.subscribe(topic, "s")
    producer = ours.create_producer(
        topic, chunking_enabled=True, compression_type=magnetar.CompressionType.ZSTD
    )
    sent = producer.send(bytes(LARGE))
    assert sent.first_chunk is None
    assert consumer.receive(TIMEOUT_MS).data() == bytes(LARGE)


def test_batching_and_chunking_together_are_refused(ours: magnetar.Client, topic: str) -> None:
    with pytest.raises(magnetar.InvalidConfiguration, match="chunking_enabled"):
        ours.create_producer(topic, batching_enabled=True, chunking_enabled=True)


async def _take(consumer: magnetar.asyncio.Consumer) -> magnetar.Message:
    return await consumer.receive(TIMEOUT_MS)


@pytest.mark.real_loop
async def test_the_asyncio_client_joins_chunks(service: Service, topic: str) -> None:
    async with magnetar.asyncio.Client(service.grpc_url) as client:
        consumer = await client.subscribe(topic, "s")
        producer = await client.create_producer(topic, chunking_enabled=True)
        await producer.send(payload(LARGE))
        message = await _take(consumer)
        assert message.data() == payload(LARGE)
        await consumer.acknowledge(message)


def policy(library: Library, count: int, topic: str | None = None) -> Any:
    return library.ConsumerDeadLetterPolicy(count, topic, "keep")


@pytest.mark.parametrize("library", [magnetar, pulsar], ids=["ours", "apache"])
def test_a_message_is_delivered_once_more_than_redelivered_and_then_moved(
    service: Service, topic: str, library: Library, ours: magnetar.Client
) -> None:
    with connected(service, library) as client:
        consumer = client.subscribe(
            topic,
            "s",
            consumer_type=library.ConsumerType.Shared,
            consumer_name="me",
            negative_ack_redelivery_delay_ms=100,
            dead_letter_policy=policy(library, 2),
        )
        producer = ours.create_producer(topic)
        sent = producer.send(b"bad", properties={"a": "1"}, partition_key="k", ordering_key="o")
        counts = []
        for _ in range(3):
            message = consumer.receive(timeout_millis=TIMEOUT_MS)
            counts.append(message.redelivery_count())
            consumer.negative_acknowledge(message)
        assert counts == [0, 1, 2]
        dead = ours.subscribe(f"{topic}-s-DLQ", "keep", magnetar.ConsumerType.Shared)
        letter = dead.receive(TIMEOUT_MS)
        assert letter.data() == b"bad"
        assert letter.partition_key() == "k"
        assert letter.properties()["a"] == "1"
        assert letter.properties()["REAL_TOPIC"] == topic
        if library is magnetar:
            assert letter.ordering_key() == "o"
            place = f"{sent.ledger_id()}:{sent.entry_id()}:-1"
            assert letter.properties()["ORIGIN_MESSAGE_ID"] == place
            assert letter.producer_name().startswith(f"{topic}-s-me-")
            assert letter.producer_name().endswith("-DLQ")
        with pytest.raises(library.Timeout):
            consumer.receive(timeout_millis=QUIET_MS)
        consumer.close()
        again = client.subscribe(topic, "s", consumer_type=library.ConsumerType.Shared)
        with pytest.raises(library.Timeout):
            again.receive(timeout_millis=QUIET_MS)


def test_the_acknowledged_messages_of_a_batch_are_not_dead_letters(
    ours: magnetar.Client, topic: str
) -> None:
    consumer = ours.subscribe(
        topic,
        "s",
        magnetar.ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=100,
        dead_letter_policy=policy(magnetar, 1, f"{topic}-dead"),
    )
    producer = ours.create_producer(topic, batching_max_publish_delay_ms=10_000)
    for number in range(4):
        producer.send_async(b"%d" % number, None)
    producer.flush()
    for _ in range(2):
        for _ in range(4 if not consumer.get_stats().acknowledged else 2):
            message = consumer.receive(TIMEOUT_MS)
            if message.data() in (b"0", b"1"):
                consumer.acknowledge(message)
        consumer.negative_acknowledge(message)
    dead = ours.subscribe(f"{topic}-dead", "keep", magnetar.ConsumerType.Shared)
    letters = [dead.receive(TIMEOUT_MS).data() for _ in range(2)]
    assert sorted(letters) == [b"2", b"3"]
    with pytest.raises(magnetar.Timeout):
        dead.receive(QUIET_MS)
    assert consumer.get_stats().dead_lettered == 2


def test_a_message_whose_last_consumer_left_is_moved_when_it_arrives(
    ours: magnetar.Client, topic: str
) -> None:
    def subscribe() -> magnetar.Consumer:
        return ours.subscribe(
            topic,
            "s",
            magnetar.ConsumerType.Shared,
            negative_ack_redelivery_delay_ms=50,
            dead_letter_policy=policy(magnetar, 1, f"{topic}-dead"),
        )

    consumer = subscribe()
    ours.create_producer(topic).send(b"bad")
    consumer.negative_acknowledge(consumer.receive(TIMEOUT_MS))
    assert consumer.receive(TIMEOUT_MS).redelivery_count() == 1
    keeper = subscribe()  # while it stays, the broker keeps the redelivery counts
    consumer.close()
    with pytest.raises(magnetar.Timeout):
        keeper.receive(QUIET_MS)
    dead = ours.subscribe(f"{topic}-dead", "keep", magnetar.ConsumerType.Shared)
    assert dead.receive(TIMEOUT_MS).data() == b"bad"


def test_an_existing_legacy_dead_letter_topic_is_used(ours: magnetar.Client, topic: str) -> None:
    name = f"legacy{next(NUMBERS)}"
    dead = ours.subscribe(f"persistent://public/default/{name}-DLQ", "keep")
    consumer = ours.subscribe(
        topic,
        name,
        magnetar.ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=50,
        dead_letter_policy=magnetar.ConsumerDeadLetterPolicy(1),
    )
    ours.create_producer(topic).send(b"bad")
    for _ in range(2):
        consumer.negative_acknowledge(consumer.receive(TIMEOUT_MS))
    assert dead.receive(TIMEOUT_MS).data() == b"bad"


def test_the_delay_of_negative_acknowledgements_grows(ours: magnetar.Client, topic: str) -> None:
    consumer = ours.subscribe(
        topic,
        "s",
        magnetar.ConsumerType.Shared,
        negative_ack_redelivery_backoff=magnetar.MultiplierRedeliveryBackoff(200, 800, 2),
    )
    ours.create_producer(topic).send(b"x")
    times = []
    for _ in range(4):
        message = consumer.receive(TIMEOUT_MS)
        times.append(time.monotonic())
        consumer.negative_acknowledge(message)
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert waits[0] >= 0.15
    assert waits[1] >= 0.35
    assert waits[2] >= 0.75


def test_a_paused_consumer_requests_nothing(ours: magnetar.Client, topic: str) -> None:
    consumer = ours.subscribe(topic, "s", receiver_queue_size=1)
    producer = ours.create_producer(topic, batching_enabled=False)
    consumer.pause()
    for number in range(4):
        producer.send(b"%d" % number)
    assert consumer.receive(TIMEOUT_MS).data() == b"0"  # requested before
    with pytest.raises(magnetar.Timeout):
        consumer.receive(QUIET_MS)
    consumer.resume()
    assert [consumer.receive(TIMEOUT_MS).data() for _ in range(3)] == [b"1", b"2", b"3"]
    assert consumer.get_stats().messages_received == 4


def test_a_message_passes_the_retry_topic_and_then_goes_to_the_dead_letter_topic(
    ours: magnetar.Client, topic: str
) -> None:
    consumer = ours.subscribe(
        topic,
        "s",
        magnetar.ConsumerType.Shared,
        enable_retry=True,
        dead_letter_policy=policy(magnetar, 2),
    )
    sent = ours.create_producer(topic).send(
        b"bad", properties={"a": "1"}, partition_key="k", ordering_key="o"
    )
    origin = f"{sent.ledger_id()}:{sent.entry_id()}:-1"
    for times in range(3):
        message = consumer.receive(TIMEOUT_MS)
        properties = message.properties()
        if times:
            assert message.topic_name() == f"{topic}-s-RETRY"
            assert properties["RECONSUMETIMES"] == str(times)
            assert properties["REAL_TOPIC"] == topic
            assert properties["ORIGIN_MESSAGE_ID"] == origin
            assert properties["DELAY_TIME"] == "0"
            assert properties["why"] == f"pass {times - 1}"
        assert (message.partition_key(), message.ordering_key()) == ("k", "o")
        consumer.reconsume_later(message, timedelta(0), {"why": f"pass {times}"})
    dead = ours.subscribe(f"{topic}-s-DLQ", "keep", magnetar.ConsumerType.Shared)
    letter = dead.receive(TIMEOUT_MS)
    assert letter.data() == b"bad"
    assert letter.properties()["RECONSUMETIMES"] == "3"
    assert letter.properties()["REAL_TOPIC"] == topic
    stats = consumer.get_stats()
    assert (stats.reconsumed_later, stats.dead_lettered, stats.acknowledged) == (2, 1, 3)
    with pytest.raises(magnetar.Timeout):
        consumer.receive(QUIET_MS)
    consumer.close()
    again = ours.subscribe(topic, "s", magnetar.ConsumerType.Shared, enable_retry=True)
    with pytest.raises(magnetar.Timeout):
        again.receive(QUIET_MS)


@pytest.mark.real_loop
async def test_retry_and_dead_letters_over_asyncio(service: Service, topic: str) -> None:
    async with magnetar.asyncio.Client(service.grpc_url) as client:
        consumer = await client.subscribe(
            topic,
            "s",
            magnetar.ConsumerType.Shared,
            enable_retry=True,
            negative_ack_redelivery_delay_ms=50,
            dead_letter_policy=policy(magnetar, 1),
        )
        producer = await client.create_producer(topic)
        await producer.send(b"x")
        await consumer.reconsume_later(await _take(consumer), timedelta(0))
        again = await _take(consumer)
        assert again.properties()["RECONSUMETIMES"] == "1"
        await consumer.negative_acknowledge(again)
        last = await _take(consumer)
        assert last.redelivery_count() == 1
        await consumer.negative_acknowledge(last)
        dead = await client.subscribe(f"{topic}-s-DLQ", "keep", magnetar.ConsumerType.Shared)
        assert (await _take(dead)).data() == b"x"


class Bill(schema.Record):
    item = schema.String(required=True)


class PricedBill(schema.Record):
    item = schema.String(required=True)
    price = schema.Integer(default=7, required_default=True)


PricedBill.__name__ = "Bill"  # the name is a part of the schema


@pytest.mark.parametrize("moved_by", ["reconsume_later", "negative_acknowledge"])
@pytest.mark.parametrize("transport", ["grpc_url", "pulsar_url"])
def test_letters_carry_the_schemas_of_their_originals(
    service: Service, topic: str, moved_by: str, transport: str
) -> None:
    with magnetar.Client(getattr(service, transport)) as client:
        consumer = client.subscribe(
            topic,
            "s",
            magnetar.ConsumerType.Shared,
            schema=schema.AvroSchema(PricedBill),
            initial_position=magnetar.InitialPosition.Earliest,
            enable_retry=moved_by == "reconsume_later",
            negative_ack_redelivery_delay_ms=10,
            dead_letter_policy=policy(magnetar, 1),
        )
        old = client.create_producer(topic, schema=schema.AvroSchema(Bill))
        new = client.create_producer(topic, schema=schema.AvroSchema(PricedBill))
        raw = client.create_producer(topic)
        new.send(PricedBill(item="new", price=1))
        old.send(Bill(item="old"))
        raw.send(b"no schema, no value")
        for _ in range(6):
            message = consumer.receive(TIMEOUT_MS)
            if message.data() != b"no schema, no value":
                assert message.value().item in ("new", "old")
            if moved_by == "reconsume_later":
                consumer.reconsume_later(message, timedelta(0))
            else:
                consumer.negative_acknowledge(message)
        dead = client.subscribe(f"{topic}-s-DLQ", "keep", schema=schema.AvroSchema(PricedBill))
        letters = {}
        for _ in range(3):
            letter = dead.receive(TIMEOUT_MS)
            letters[letter.data()] = letter
        bare = letters.pop(b"no schema, no value")
        assert bare.schema_version() == ""
        values = {letter.value().item: letter for letter in letters.values()}
        assert values["new"].value() == PricedBill(item="new", price=1)
        assert values["old"].value() == PricedBill(item="old", price=7)
        assert values["new"].schema_version() != values["old"].schema_version()


def test_the_letters_of_a_consumer_without_a_schema_have_none(
    ours: magnetar.Client, topic: str
) -> None:
    consumer = ours.subscribe(
        topic,
        "s",
        magnetar.ConsumerType.Shared,
        enable_retry=True,
        dead_letter_policy=policy(magnetar, 1),
    )
    ours.create_producer(topic, schema=schema.StringSchema()).send("x")
    consumer.reconsume_later(consumer.receive(TIMEOUT_MS), timedelta(0))
    again = consumer.receive(TIMEOUT_MS)
    assert (again.data(), again.schema_version()) == (b"x", "")


def test_a_letter_whose_schema_is_refused_leaves_its_original_unacknowledged(
    ours: magnetar.Client, topic: str
) -> None:
    ours.create_producer(f"{topic}-s-RETRY", schema=schema.AvroSchema(Bill))
    consumer = ours.subscribe(
        topic, "s", magnetar.ConsumerType.Shared, schema=schema.StringSchema(), enable_retry=True
    )
    ours.create_producer(topic, schema=schema.StringSchema()).send("x")
    message = consumer.receive(TIMEOUT_MS)
    with pytest.raises(magnetar.IncompatibleSchema):
        consumer.reconsume_later(message, timedelta(0))
    consumer.close()
    again = ours.subscribe(topic, "s", magnetar.ConsumerType.Shared)
    assert again.receive(TIMEOUT_MS).data() == b"x"


def test_reconsume_later_needs_the_retry_topic(ours: magnetar.Client, topic: str) -> None:
    consumer = ours.subscribe(topic, "s", magnetar.ConsumerType.Shared)
    ours.create_producer(topic).send(b"x")
    with pytest.raises(magnetar.OperationNotSupported, match="enable_retry"):
        consumer.reconsume_later(consumer.receive(TIMEOUT_MS), timedelta(0))


ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("chunking", "connecting", "dead-letters", "retry", "topics")


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in PAGES)])
def test_the_example_of_a_page_runs(service: Service, ours: magnetar.Client, page: str) -> None:
    """The test runs the first Python program of the page."""
    program = PROGRAM.findall((ROOT / page).read_text())[0]
    program = program.replace("grpc://localhost:6660", service.grpc_url)
    program = program.replace("pulsar://localhost:6650", service.pulsar_url)
    # The program in docs/topics.md uses a `client` that it does not create.
    names = {} if "import magnetar" in program else {"client": ours, "magnetar": magnetar, "re": re}
    exec(program, names)


def test_a_retried_message_comes_after_its_delay(tmp_path: Path) -> None:
    """The test needs a standalone server: the clock of brokers in this process stands still."""
    server = StandaloneProcess(tmp_path)
    server.start()
    try:
        with magnetar.Client(server.service_url) as client:
            consumer = client.subscribe("t", "s", magnetar.ConsumerType.Shared, enable_retry=True)
            client.create_producer("t").send(b"x")
            consumer.reconsume_later(consumer.receive(TIMEOUT_MS), timedelta(seconds=3))
            begun = time.monotonic()
            again = consumer.receive(TIMEOUT_MS)
            assert time.monotonic() - begun >= 1.5  # the broker delivers up to a second early
            assert again.properties()["DELAY_TIME"] == "3000"
    finally:
        server.end()
