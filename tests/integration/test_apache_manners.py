"""Unsuccessful calls with Apache's client and with ours: closed objects, wrong types, limits,
callbacks of failed sends, and clients that are dropped without a close."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from fakes.services import Service, brokers_in_thread
from support import wait_for

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_MS = 30_000
MESSAGE_BYTES_MAX = 5 * 1024 * 1024
DROPPED = 10


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with brokers_in_thread(1) as service:
        yield service


def client_of(module: Any, service: Service) -> Any:
    url = service.pulsar_url if module is pulsar else service.grpc_url
    return module.Client(url, logger=module.ConsoleLogger(module.LoggerLevel.Error))


@pytest.fixture(params=[pulsar, magnetar], ids=["apache", "ours"])
def module(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(module: Any, service: Service) -> Iterator[Any]:
    client = client_of(module, service)
    yield client
    client.close()


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"manners-{next(_numbers)}"


def test_a_second_close_raises(module: Any, service: Service, topic: str) -> None:
    client = client_of(module, service)
    producer = client.create_producer(topic)
    consumer = client.subscribe(topic, "s")
    reader = client.create_reader(topic, module.MessageId.earliest)
    for one in (producer, consumer, reader, client):
        one.close()
        with pytest.raises((module.AlreadyClosed, ValueError)):  # Apache's lists say ValueError
            one.close()
    for call in (lambda: producer.send(b"x"), lambda: client.create_producer(topic)):
        with pytest.raises(module.AlreadyClosed):
            call()


def test_a_closed_object_is_not_closed_again_by_its_block(service: Service, topic: str) -> None:
    with client_of(magnetar, service) as client:
        with client.create_producer(topic) as producer, client.subscribe(topic, "s") as consumer:
            producer.close()
            consumer.unsubscribe()
        with client.create_producer(topic), client.create_reader(topic, magnetar.MessageId.latest):
            client.close()


def test_an_unsubscribed_consumer_can_be_closed(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "s")
    consumer.unsubscribe()
    consumer.close()


def test_receive_of_a_consumer_with_a_listener_is_refused(
    module: Any, client: Any, topic: str
) -> None:
    consumer = client.subscribe(topic, "s", message_listener=lambda *_: None)
    with pytest.raises(module.InvalidConfiguration):
        consumer.receive(100)
    reader = client.create_reader(topic, module.MessageId.earliest, reader_listener=lambda *_: None)
    with pytest.raises(module.InvalidConfiguration):
        reader.read_next(100)


def test_wrong_types_are_refused_before_anything_is_sent(
    module: Any, client: Any, topic: str
) -> None:
    producer, consumer = client.create_producer(topic), client.subscribe(topic, "s")
    for call in (
        lambda: producer.send(5),
        lambda: producer.send("text"),
        lambda: producer.send(b"", properties=5),
        lambda: producer.send(b"", properties={"a": 1}),
        lambda: producer.send(b"", partition_key=5),
        lambda: producer.send(b"", sequence_id="x"),
        lambda: producer.send(b"", event_timestamp="x"),
        lambda: producer.send(b"", deliver_after=5),
        lambda: producer.send(b"", disable_replication="x"),
        lambda: producer.send(b"", replication_clusters="x"),
        lambda: producer.send_async(5, lambda *_: None),
        lambda: consumer.acknowledge("x"),
        lambda: consumer.acknowledge_cumulative(5),
        lambda: consumer.negative_acknowledge("x"),
        lambda: consumer.seek("x"),
        lambda: consumer.receive("x"),
        lambda: client.create_producer(5),
        lambda: client.create_producer(topic, batching_enabled="x"),
        lambda: client.create_producer(topic, max_pending_messages=-1),
        lambda: client.subscribe(5, "s"),
        lambda: client.subscribe(topic, "s", unacked_messages_timeout_ms=5),
        lambda: client.subscribe(topic, "s", properties=5),
        lambda: client.create_reader(topic, "earliest"),
        lambda: client.create_table_view(5),
        lambda: client.get_topic_partitions(5),
        lambda: module.Client(5),
        lambda: module.Client("x://a"),
        lambda: module.MessageId.deserialize(b"x"),
        lambda: module.MessageId.deserialize(5),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    producer.send(b"first")
    assert consumer.receive(TIMEOUT_MS).data() == b"first"


def test_a_payload_above_the_maximum_is_refused(module: Any, client: Any, topic: str) -> None:
    producer = client.create_producer(topic)
    with pytest.raises(module.MessageTooBig):
        producer.send(bytes(MESSAGE_BYTES_MAX + 1))
    producer.send(b"small")


def test_the_callback_of_a_failed_send_gets_the_id_of_no_message(
    module: Any, client: Any, topic: str
) -> None:
    producer = client.create_producer(topic)
    told: list[Any] = []
    producer.send_async(bytes(MESSAGE_BYTES_MAX + 1), lambda *outcome: told.append(outcome))
    wait_for(lambda: told)
    ((result, message_id),) = told
    assert result == module.Result.MessageTooBig
    assert str(message_id) == "(-1,-1,-1,-1)"


def test_a_message_has_the_names_and_the_version_of_its_origin(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "s")
    client.create_producer(topic).send(b"x")
    assert len(consumer.consumer_name()) >= 5
    message = consumer.receive(TIMEOUT_MS)
    assert message.schema_version() == ""
    assert message.encryption_context() is None


def test_service_info_names_the_url(client: Any) -> None:
    info = client.get_service_info()
    assert info.service_url.startswith(("pulsar://", "grpc://"))
    assert not info.use_tls


def test_a_client_fails_over_from_a_cluster_that_is_down(
    module: Any, service: Service, topic: str
) -> None:
    url = service.pulsar_url if module is pulsar else service.grpc_url
    dead = f"{url.partition('://')[0]}://127.0.0.1:1"
    failover = module.AutoClusterFailover(
        module.ServiceInfo(dead), [module.ServiceInfo(url)], check_interval_ms=100
    )
    client = module.Client(failover, logger=module.ConsoleLogger(module.LoggerLevel.Error))
    if module is pulsar:  # before the failover, producers of Apache's client do not work
        wait_for(lambda: client.get_service_info().service_url == url)
    client.create_producer(topic).send(b"x")
    assert client.get_service_info().service_url == url
    client.close()


def test_clients_that_are_dropped_unclosed_are_freed(service: Service) -> None:
    def use_one(number: int) -> None:
        client = client_of(magnetar, service)
        topic = f"dropped-{number}"
        got: list[bytes] = []
        client.subscribe(topic, "listens", message_listener=lambda _, m: got.append(m.data()))
        consumer = client.subscribe(topic, "receives")
        reader = client.create_reader(topic, magnetar.MessageId.earliest)
        view = client.create_table_view(topic)
        producer = client.create_producer(topic)
        del client  # its producers and consumers keep it running
        producer.send(b"x", partition_key="k")
        assert consumer.receive(TIMEOUT_MS).data() == b"x"
        assert reader.read_next(TIMEOUT_MS).data() == b"x"
        wait_for(lambda: got and view.get("k"))

    use_one(-1)  # gRPC starts some threads once in a process
    gc.collect()
    wait_for(lambda: not client_threads())
    sockets = count_sockets()
    for number in range(DROPPED):
        use_one(number)
    gc.collect()
    wait_for(lambda: not client_threads())
    gc.collect()  # collects the objects that ended with the threads
    wait_for(lambda: count_sockets() <= sockets)


def client_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("magnetar-")]


def count_sockets() -> int:
    count = 0
    for one in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(one).startswith("socket:")
        except OSError:  # the descriptor was closed meanwhile
            continue
    return count
