"""The examples of Apache's documentation for its Python client, in our words.

Each is one program that takes a library and a service URL, and runs three times: with Apache's own
client, and with ours over both transports. So nothing but the import and the URL changes. Each
program subscribes before it publishes, because the server deletes what no subscription needs.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import queue
import re
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from fakes.standalone_process import StandaloneProcess

from magnetar.protos import pulsar_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster]

TIMEOUT_MS = 20_000
NAMES = itertools.count()

Library = Any  # the module `pulsar` or `magnetar`


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.start()
    yield process
    process.end()


LIBRARIES = {"apache": "pulsar", "ours, gRPC": "magnetar", "ours, Pulsar's TCP": "magnetar"}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def url(library: str, server: StandaloneProcess) -> str:
    return server.service_url if library == "ours, gRPC" else server.pulsar_url


@pytest.fixture
def pulsar(library: str) -> Library:
    return importlib.import_module(LIBRARIES[library])


@pytest.fixture
def topic() -> str:
    return f"example-{next(NAMES)}"


# Producers and consumers


def test_a_producer_sends_and_a_consumer_receives(pulsar: Library, url: str, topic: str) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe(topic, "my-subscription")
    producer = client.create_producer(topic)
    for number in range(10):
        producer.send(f"Hello-{number}".encode())
    received = []
    while len(received) < 10:
        message = consumer.receive(TIMEOUT_MS)
        try:
            received.append(message.data().decode())
            consumer.acknowledge(message)
        except Exception:
            consumer.negative_acknowledge(message)
            raise
    assert received == [f"Hello-{number}" for number in range(10)]
    assert message.topic_name() == f"persistent://public/default/{topic}"
    client.close()


def test_a_message_has_a_key_properties_and_an_event_time(
    pulsar: Library, url: str, topic: str
) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe(topic, "s", consumer_type=pulsar.ConsumerType.Failover)
    producer = client.create_producer(topic, producer_name="my-producer", properties={"a": "b"})
    sent = producer.send(
        b"x", properties={"k": "v"}, partition_key="key", ordering_key="o", event_timestamp=5
    )
    message = consumer.receive(TIMEOUT_MS)
    assert (message.properties(), message.partition_key()) == ({"k": "v"}, "key")
    assert (message.event_timestamp(), message.ordering_key()) == (5, "o")
    assert (message.producer_name(), message.redelivery_count()) == ("my-producer", 0)
    assert message.message_id().serialize() == sent.serialize()
    assert pulsar.MessageId.deserialize(sent.serialize()).entry_id() == sent.entry_id()
    assert (producer.last_sequence_id(), client.get_topic_partitions(topic)) == (
        0,
        [f"persistent://public/default/{topic}"],
    )
    client.close()


def test_messages_are_sent_with_a_callback(pulsar: Library, url: str, topic: str) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe(topic, "s")
    producer = client.create_producer(
        topic,
        block_if_queue_full=True,
        batching_enabled=True,
        batching_max_publish_delay_ms=10,
        compression_type=pulsar.CompressionType.ZSTD,
    )
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def callback(result: Any, message_id: Any) -> None:
        told.put((result, message_id))

    for number in range(100):
        producer.send_async(b"%d" % number, callback)
    producer.flush()
    assert all(told.get(timeout=20)[0] == pulsar.Result.Ok for _ in range(100))
    received = [consumer.receive(TIMEOUT_MS) for _ in range(100)]
    assert [message.data() for message in received] == [b"%d" % number for number in range(100)]
    consumer.acknowledge_cumulative(received[-1])
    client.close()


def test_a_listener_gets_the_messages(pulsar: Library, url: str, topic: str) -> None:
    got: queue.Queue[bytes] = queue.Queue()

    def listener(consumer: Any, message: Any) -> None:
        got.put(message.data())
        consumer.acknowledge(message)

    client = pulsar.Client(url, logger=logging.getLogger("example"))
    client.subscribe(topic, "s", message_listener=listener)
    producer = client.create_producer(topic)
    for number in range(3):
        producer.send(b"%d" % number)
    assert [got.get(timeout=20) for _ in range(3)] == [b"0", b"1", b"2"]
    client.close()


def test_a_shared_subscription_redelivers_and_then_moves_to_the_dead_letter_topic(
    pulsar: Library, url: str, topic: str
) -> None:
    client = pulsar.Client(url)
    dead = client.subscribe(f"{topic}-dead", "s")
    consumer = client.subscribe(
        topic,
        "s",
        consumer_type=pulsar.ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=100,
        dead_letter_policy=pulsar.ConsumerDeadLetterPolicy(1, f"{topic}-dead"),
    )
    client.create_producer(topic).send(b"bad")
    for times in range(2):
        message = consumer.receive(TIMEOUT_MS)
        assert message.redelivery_count() == times
        consumer.negative_acknowledge(message)
    letter = dead.receive(TIMEOUT_MS)
    assert letter.data() == b"bad"
    assert letter.properties()["REAL_TOPIC"].endswith(topic)
    client.close()


def test_messages_are_received_in_batches_and_none_in_time_is_a_timeout(
    pulsar: Library, url: str, topic: str
) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe(
        topic, "s", batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(3, 1024, 20_000)
    )
    producer = client.create_producer(topic)
    for number in range(3):
        producer.send(b"%d" % number)
    messages = consumer.batch_receive()
    assert [message.data() for message in messages] == [b"0", b"1", b"2"]
    for message in messages:
        consumer.acknowledge(message)
    with pytest.raises(pulsar.Timeout):
        consumer.receive(timeout_millis=100)
    consumer.seek(pulsar.MessageId.earliest)
    consumer.unsubscribe()
    client.close()


def test_keys_stay_with_their_consumer(pulsar: Library, url: str, topic: str) -> None:
    client = pulsar.Client(url)
    policy = pulsar.ConsumerKeySharedPolicy(pulsar.KeySharedMode.AutoSplit)
    consumers = [
        client.subscribe(topic, "s", pulsar.ConsumerType.KeyShared, key_shared_policy=policy)
        for _ in range(2)
    ]
    producer = client.create_producer(topic)
    for number in range(20):
        producer.send(b"%d" % number, partition_key=f"key-{number % 5}")
    keys: list[set[str]] = [set(), set()]
    left = 20
    while left:
        for consumer, seen in zip(consumers, keys, strict=True):
            try:
                message = consumer.receive(100)
            except pulsar.Timeout:
                continue
            seen.add(message.partition_key())
            consumer.acknowledge(message)
            left -= 1
    assert keys[0].isdisjoint(keys[1])
    assert len(keys[0] | keys[1]) == 5
    client.close()


# Several topics


def test_a_consumer_subscribes_to_a_list_and_to_a_pattern(
    pulsar: Library, url: str, topic: str
) -> None:
    client = pulsar.Client(url)
    names = [f"{topic}-{part}" for part in ("a", "b")]
    listed = client.subscribe(names, "listed")
    matching = client.subscribe(re.compile(f"persistent://public/default/{topic}-.*"), "matching")
    for name in names:
        client.create_producer(name).send(name.encode())
    for consumer in (listed, matching):
        received = [consumer.receive(TIMEOUT_MS) for _ in names]
        assert sorted(message.data().decode() for message in received) == names
        for message in received:
            consumer.acknowledge(message)
    client.close()


# Readers and table views


def test_a_reader_reads_from_a_chosen_message(pulsar: Library, url: str, topic: str) -> None:
    client = pulsar.Client(url)
    client.subscribe(topic, "keeps")
    producer = client.create_producer(topic)
    ids = [producer.send(b"%d" % number) for number in range(5)]
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    read = []
    while reader.has_message_available():
        read.append(reader.read_next(TIMEOUT_MS).data())
    assert read == [b"%d" % number for number in range(5)]
    after = client.create_reader(topic, pulsar.MessageId.deserialize(ids[2].serialize()))
    assert after.read_next(TIMEOUT_MS).data() == b"3"
    with_it = client.create_reader(topic, ids[2], start_message_id_inclusive=True)
    assert with_it.read_next(TIMEOUT_MS).data() == b"2"
    latest = client.create_reader(topic, pulsar.MessageId.latest)
    assert not latest.has_message_available()
    client.close()


def test_a_reader_has_a_listener(pulsar: Library, url: str, topic: str) -> None:
    got: queue.Queue[bytes] = queue.Queue()
    client = pulsar.Client(url)
    client.create_reader(
        topic,
        pulsar.MessageId.latest,
        reader_listener=lambda _reader, message: got.put(message.data()),
    )
    client.create_producer(topic).send(b"x")
    assert got.get(timeout=20) == b"x"
    client.close()


def test_a_table_view_has_the_last_values(pulsar: Library, url: str, topic: str) -> None:
    client = pulsar.Client(url)
    client.subscribe(topic, "keeps")
    producer = client.create_producer(topic, schema=pulsar.schema.StringSchema())
    for key, value in (("a", "1"), ("b", "2"), ("a", "3")):
        producer.send(value, partition_key=key)
    view = client.create_table_view(topic, schema=pulsar.schema.StringSchema())
    seen: dict[str, str] = {}
    view.for_each(seen.__setitem__)
    assert seen == {"a": "3", "b": "2"}
    assert (view.get("a"), view.get("missing"), len(view)) == ("3", None, 2)
    changes: queue.Queue[tuple[str, str]] = queue.Queue()
    view.for_each_and_listen(lambda key, value: changes.put((key, value)))
    producer.send("4", partition_key="c")
    assert {changes.get(timeout=20) for _ in range(3)} == {("a", "3"), ("b", "2"), ("c", "4")}
    view.close()
    client.close()


# Schemas


class Color(Enum):
    red = 1
    green = 2


def records(schema: Any) -> tuple[type, type]:
    class Address(schema.Record):
        street = schema.String()

    class Person(schema.Record):
        name = schema.String(required=True)
        age = schema.Integer(default=0)
        color = schema.CustomEnum(Color)
        address = Address()
        tags = schema.Array(schema.String())
        scores = schema.Map(schema.Double())

    return Address, Person


@pytest.mark.parametrize("kind", ["AvroSchema", "JsonSchema"])
def test_records_are_sent_and_received(pulsar: Library, url: str, topic: str, kind: str) -> None:
    address, person = records(pulsar.schema)
    client = pulsar.Client(url)
    schema = getattr(pulsar.schema, kind)(person)
    consumer = client.subscribe(topic, "s", schema=schema)
    producer = client.create_producer(topic, schema=schema)
    producer.send(
        person(
            name="Ada",
            color=Color.green,
            address=address(street="High Street"),
            tags=["first"],
            scores={"maths": 1.0},
        )
    )
    found = consumer.receive(TIMEOUT_MS).value()
    assert (found.name, found.age, found.color) == ("Ada", 0, Color.green)
    assert (found.address.street, found.tags, found.scores) == (
        "High Street",
        ["first"],
        {"maths": 1.0},
    )
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(topic, schema=pulsar.schema.StringSchema())
    client.close()


def test_values_are_text_dicts_and_protobuf_messages(pulsar: Library, url: str, topic: str) -> None:
    definition = {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "item", "type": "string"}, {"name": "count", "type": "int"}],
    }
    cases: list[tuple[Any, Any]] = [
        (pulsar.schema.StringSchema(), "text"),
        (pulsar.schema.BytesSchema(), b"bytes"),
        (
            pulsar.schema.AvroSchema(None, schema_definition=definition),
            {"item": "lens", "count": 2},
        ),
        (
            pulsar.schema.ProtobufNativeSchema(pulsar_pb2.KeyValue),
            pulsar_pb2.KeyValue(key="k", value="v"),
        ),
    ]
    client = pulsar.Client(url)
    for number, (schema, value) in enumerate(cases):
        consumer = client.subscribe(f"{topic}-{number}", "s", schema=schema)
        client.create_producer(f"{topic}-{number}", schema=schema).send(value)
        assert consumer.receive(TIMEOUT_MS).value() == value
    client.close()


# Encryption and large messages


def test_payloads_are_encrypted(pulsar: Library, url: str, topic: str, tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    public, private = tmp_path / "public.pem", tmp_path / "private.pem"
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    reader = pulsar.CryptoKeyReader(str(public), str(private))
    client = pulsar.Client(url)
    consumer = client.subscribe(topic, "s", crypto_key_reader=reader)
    producer = client.create_producer(topic, encryption_key="my-key", crypto_key_reader=reader)
    producer.send(b"encrypted message")
    message = consumer.receive(TIMEOUT_MS)
    assert message.data() == b"encrypted message"
    (used,) = message.encryption_context().keys()
    assert used.key == "my-key"
    client.close()


def test_a_large_message_is_sent_in_chunks(pulsar: Library, url: str, topic: str) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe(topic, "s")
    producer = client.create_producer(topic, chunking_enabled=True, batching_enabled=False)
    large = bytes(range(256)) * (6 << 12)  # 6 MB
    producer.send(large)
    message = consumer.receive(TIMEOUT_MS)
    assert message.data() == large
    consumer.acknowledge(message)
    client.close()


# asyncio


@pytest.mark.real_loop
async def test_the_asyncio_client_sends_receives_and_reads(
    pulsar: Library, url: str, topic: str
) -> None:
    pulsar_asyncio = importlib.import_module(f"{pulsar.__name__}.asyncio")
    client = pulsar_asyncio.Client(url)
    consumer = await client.subscribe(topic, "s", consumer_type=pulsar.ConsumerType.Shared)
    producer = await client.create_producer(topic)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(producer.send(b"%d" % number, partition_key="k"))
    await producer.flush()
    async with asyncio.timeout(60):
        received = [await consumer.receive() for _ in range(10)]
        reader = await client.create_reader(topic, pulsar.MessageId.earliest)
        read = []
        while await reader.has_message_available():
            read.append((await reader.read_next()).data())
    assert sorted(message.data() for message in received) == sorted(read)
    assert sorted(read) == [b"%d" % number for number in range(10)]
    for message in received:
        await consumer.acknowledge(message)
    assert await client.get_topic_partitions(topic) == [f"persistent://public/default/{topic}"]
    await reader.close()
    await consumer.close()
    await client.close()


@pytest.mark.real_loop
async def test_the_asyncio_client_has_schemas_lists_and_patterns(
    pulsar: Library, url: str, topic: str
) -> None:
    _, person = records(pulsar.schema)
    pulsar_asyncio = importlib.import_module(f"{pulsar.__name__}.asyncio")
    client = pulsar_asyncio.Client(url)
    names = [f"{topic}-{part}" for part in ("a", "b")]
    schema = pulsar.schema.AvroSchema(person)
    listed = await client.subscribe(names, "listed", schema=schema)
    matching = await client.subscribe(
        f"persistent://public/default/{topic}-.*", "matching", schema=schema, is_pattern_topic=True
    )
    for name in names:
        producer = await client.create_producer(name, schema=schema)
        await producer.send(person(name=name))
    async with asyncio.timeout(60):
        for consumer in (listed, matching):
            values = [(await consumer.receive()).value().name for _ in names]
            assert sorted(values) == names
    with pytest.raises(pulsar_asyncio.PulsarException) as refused:
        await client.create_producer(names[0], schema=pulsar.schema.StringSchema())
    assert refused.value.error() == pulsar.Result.IncompatibleSchema
    await client.close()
