"""Large, chunked, compressed and encrypted messages, and the messages that the broker refuses, with
Apache's client and ours. The server has a maximum message size of 1 MiB."""

from __future__ import annotations

import itertools
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from fakes.standalone_process import StandaloneProcess

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 1 << 20
TIMEOUT_MS = 30_000
EARLIEST = pulsar.InitialPosition.Earliest
SHARED = pulsar.ConsumerType.Shared

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(
        tmp_path_factory.mktemp("server"),
        f"--max-message-size={LIMIT}",
        "--delayed-delivery-max-delay-in-millis=1000000",
    )
    process.start()
    yield process
    process.end()


@pytest.fixture(scope="module")
def apache(server: StandaloneProcess) -> Iterator[pulsar.Client]:
    client = pulsar.Client(
        f"pulsar://localhost:{server.pulsar_port}",
        operation_timeout_seconds=30,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    yield client
    client.close()


@pytest.fixture(scope="module")
def ours(server: StandaloneProcess) -> Iterator[magnetar.Client]:
    with magnetar.Client(server.service_url, operation_timeout_seconds=30) as client:
        yield client


@pytest.fixture
def topic() -> str:
    return f"values-{next(_numbers)}"


def test_apache_client_keeps_to_the_announced_size(apache: pulsar.Client, topic: str) -> None:
    consumer = apache.subscribe(topic, "s", initial_position=EARLIEST)
    producer = apache.create_producer(topic, batching_enabled=False)
    near = bytes(LIMIT - 1024)  # the limit includes metadata
    producer.send(near)
    with pytest.raises(pulsar.MessageTooBig):
        producer.send(bytes(LIMIT + 1))
    producer.send(b"after")
    assert consumer.receive(TIMEOUT_MS).data() == near
    assert consumer.receive(TIMEOUT_MS).data() == b"after"


@pytest.mark.parametrize("batching", [False, True])
def test_our_client_keeps_to_the_announced_size(
    ours: magnetar.Client, topic: str, batching: bool
) -> None:
    consumer = ours.subscribe(topic, "s", initial_position=magnetar.InitialPosition.Earliest)
    producer = ours.create_producer(
        topic, batching_enabled=batching, batching_max_allowed_size_in_bytes=4 * LIMIT
    )
    producer.send(bytes(LIMIT))
    told: list[Any] = []
    for _ in range(9):  # the client makes smaller batches than the option allows
        producer.send_async(bytes(300_000), lambda *outcome: told.append(outcome))
    producer.flush()
    assert [str(result) for result, *_ in told] == [str(magnetar.Result.Ok)] * 9
    with pytest.raises(magnetar.MessageTooBig, match=str(LIMIT)):
        producer.send(bytes(LIMIT + 1))
    sizes = [len(consumer.receive(TIMEOUT_MS).data()) for _ in range(10)]
    assert sizes == [LIMIT, *[300_000] * 9]


@pytest.mark.parametrize("codec", ["LZ4", "ZLib", "ZSTD", "SNAPPY"])
@pytest.mark.parametrize("batching", [False, True])
def test_messages_may_be_larger_before_compression(
    apache: pulsar.Client, topic: str, codec: str, batching: bool
) -> None:
    """In a batch, Apache's client compares each uncompressed message with the announced maximum."""
    consumer = apache.subscribe(topic, "s", initial_position=EARLIEST)
    producer = apache.create_producer(
        topic,
        compression_type=getattr(pulsar.CompressionType, codec),
        batching_enabled=batching,
        batching_max_allowed_size_in_bytes=16 * LIMIT,
        batching_max_publish_delay_ms=1_000,
    )
    size, count = (LIMIT, 4) if batching else (8 * LIMIT, 1)
    for _ in range(count):
        producer.send_async(bytes(size), None)
    producer.flush()
    found = [consumer.receive(TIMEOUT_MS) for _ in range(count)]
    assert [len(message.data()) for message in found] == [size] * count


def test_chunks_are_stored_unchanged(apache: pulsar.Client, topic: str) -> None:
    consumer = apache.subscribe(topic, "s", initial_position=EARLIEST)
    producer = apache.create_producer(topic, chunking_enabled=True)
    payload = os.urandom(5 * LIMIT + 17)
    producer.send(payload)
    producer.send(b"small")
    message = consumer.receive(TIMEOUT_MS)
    assert message.data() == payload
    consumer.acknowledge(message)
    assert consumer.receive(TIMEOUT_MS).data() == b"small"


def test_two_shared_consumers_get_chunked_messages_whole(apache: pulsar.Client, topic: str) -> None:
    consumers = [apache.subscribe(topic, "s", SHARED, initial_position=EARLIEST) for _ in range(2)]
    producers = [apache.create_producer(topic, chunking_enabled=True) for _ in range(3)]
    payloads = {os.urandom(3 * LIMIT + number) for number in range(12)}
    for producer, payload in zip(itertools.cycle(producers), payloads, strict=False):
        producer.send_async(payload, None)
    for producer in producers:
        producer.flush()
    received: list[list[bytes]] = [[], []]
    for _ in range(200):
        for number, consumer in enumerate(consumers):
            try:
                message = consumer.receive(100)
            except pulsar.Timeout:
                continue
            consumer.acknowledge(message)
            received[number].append(message.data())
        if sum(map(len, received)) == len(payloads):
            break
    assert {payload for each in received for payload in each} == payloads
    assert sum(map(len, received)) == len(payloads), "each once"
    assert all(received), "both get some"


def test_chunked_message_of_a_consumer_that_leaves_goes_to_another_whole(
    server: StandaloneProcess, apache: pulsar.Client, topic: str
) -> None:
    producer = apache.create_producer(topic, chunking_enabled=True)
    other = pulsar.Client(
        f"pulsar://localhost:{server.pulsar_port}",
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    leaving = other.subscribe(topic, "s", SHARED, initial_position=EARLIEST)
    payload = os.urandom(4 * LIMIT)
    producer.send(payload)
    assert leaving.receive(TIMEOUT_MS).data() == payload  # not acknowledged
    staying = apache.subscribe(topic, "s", SHARED)
    other.close()
    message = staying.receive(TIMEOUT_MS)
    assert message.data() == payload
    assert message.redelivery_count() > 0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> pulsar.CryptoKeyReader:
    directory: Path = tmp_path_factory.mktemp("keys")
    private, public = directory / "private.pem", directory / "public.pem"
    for command in (
        ["openssl", "genrsa", "-out", private, "2048"],
        ["openssl", "rsa", "-in", private, "-pubout", "-out", public],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return pulsar.CryptoKeyReader(str(public), str(private))


@pytest.mark.parametrize("form", ["single", "batch", "compressed", "chunked"])
def test_encrypted_messages_are_stored_unchanged(
    apache: pulsar.Client, topic: str, keys: pulsar.CryptoKeyReader, form: str
) -> None:
    consumer = apache.subscribe(topic, "s", initial_position=EARLIEST, crypto_key_reader=keys)
    options: dict[str, Any] = {
        "single": {},
        "batch": {"batching_enabled": True, "batching_max_publish_delay_ms": 1_000},
        "compressed": {"compression_type": pulsar.CompressionType.ZSTD},
        "chunked": {"chunking_enabled": True},
    }[form]
    producer = apache.create_producer(
        topic, encryption_key="key", crypto_key_reader=keys, **options
    )
    payloads = [os.urandom(2 * LIMIT)] if form == "chunked" else [b"secret", b"x" * 1_000, b""]
    for payload in payloads:
        producer.send_async(payload, None)
    producer.flush()
    assert [consumer.receive(TIMEOUT_MS).data() for _ in payloads] == payloads


def test_refused_message_fails_and_the_producer_continues(
    apache: pulsar.Client, topic: str, server: StandaloneProcess
) -> None:
    """With another error, Apache's client would reconnect and resend the message without end."""
    consumer = apache.subscribe(topic, "s", initial_position=EARLIEST)
    producer = apache.create_producer(topic)
    for _ in range(3):
        with pytest.raises(pulsar.PulsarException, match="ChecksumError"):
            producer.send(b"later", deliver_at=4_000_000_000_000)
    producer.send(b"now")
    assert consumer.receive(TIMEOUT_MS).data() == b"now"
    assert server.log.count("deliver_at_time") == 1


def test_refused_message_of_our_client_fails_with_its_reason(
    ours: magnetar.Client, topic: str
) -> None:
    consumer = ours.subscribe(topic, "s", initial_position=magnetar.InitialPosition.Earliest)
    producer = ours.create_producer(topic)
    with pytest.raises(magnetar.PulsarException, match="deliver_at_time"):
        producer.send(b"later", deliver_at=4_000_000_000_000)
    producer.send(b"now")
    assert consumer.receive(TIMEOUT_MS).data() == b"now"
