"""Our client over gRPC against two brokers, with the URL of one of them.

The cases are those of test_apache_client.py that test_client.py does not have."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from fakes.namespaces import SPREAD
from fakes.services import Service, brokers_in_thread

import magnetar
from magnetar import ConsumerType, InitialPosition, MessageId

if TYPE_CHECKING:
    from collections.abc import Iterator

EARLIEST, SHARED = InitialPosition.Earliest, ConsumerType.Shared
TIMEOUT_MS = 30_000
QUIET_MS = 300


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with brokers_in_thread(2) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[magnetar.Client]:
    with magnetar.Client(service.grpc_url, operation_timeout_seconds=30) as client:
        yield client


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    """A topic in a namespace of one broker or the other, in turn."""
    number = next(_numbers)
    return f"persistent://{SPREAD[number % len(SPREAD)]}/t{number}"


def publish(client: magnetar.Client, topic: str, count: int) -> list[MessageId]:
    """Publish all values in one batch."""
    producer = client.create_producer(topic, batching_max_publish_delay_ms=10_000)
    ids: list[MessageId] = []
    for number in range(count):
        producer.send_async(b"%d" % number, lambda _, message_id: ids.append(message_id))
    producer.close()
    assert len({it.entry_id() for it in ids}) == 1
    return ids


def take(consumer: magnetar.Consumer, count: int) -> list[magnetar.Message]:
    return [consumer.receive(timeout_millis=TIMEOUT_MS) for _ in range(count)]


def values(messages: list[magnetar.Message]) -> list[int]:
    return [int(message.data()) for message in messages]


def is_quiet(consumer: magnetar.Consumer) -> bool:
    try:
        consumer.receive(timeout_millis=QUIET_MS)
    except magnetar.Timeout:
        return True
    return False


def test_acknowledged_messages_of_a_batch_are_not_redelivered(
    client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 10)
    consumer = client.subscribe(topic, "s", SHARED, initial_position=EARLIEST)
    messages = take(consumer, 10)
    for number in (0, 3, 9):
        consumer.acknowledge(messages[number])
    consumer.close()
    again = client.subscribe(topic, "s", SHARED)
    rest = take(again, 7)
    assert values(rest) == [1, 2, 4, 5, 6, 7, 8]
    assert {message.redelivery_count() for message in rest} == {1}
    again.close()


def test_messages_have_the_index_that_the_broker_gave(client: magnetar.Client, topic: str) -> None:
    consumer = client.subscribe(topic, "s")
    producer = client.create_producer(topic, batching_enabled=True)
    producer.send(b"0")
    for number in range(1, 4):
        producer.send_async(b"%d" % number, None)
    producer.flush()
    received = [consumer.receive(TIMEOUT_MS) for _ in range(4)]
    assert [(message.data(), message.index()) for message in received] == [
        (b"%d" % number, number) for number in range(4)
    ]


def test_cumulative_acknowledgement_within_a_batch_keeps_later_messages(
    client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 10)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    consumer.acknowledge_cumulative(take(consumer, 10)[6])
    consumer.close()
    again = client.subscribe(topic, "s")
    rest = take(again, 3)
    assert values(rest) == [7, 8, 9]
    again.acknowledge_cumulative(rest[-1])
    again.close()
    assert is_quiet(client.subscribe(topic, "s"))


def test_a_negatively_acknowledged_message_is_redelivered_with_its_count(
    client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 3)
    consumer = client.subscribe(
        topic, "s", SHARED, initial_position=EARLIEST, negative_ack_redelivery_delay_ms=100
    )
    for message in take(consumer, 3):
        if message.data() == b"1":
            consumer.negative_acknowledge(message)
        else:
            consumer.acknowledge(message)
    for count in (1, 2):
        [again] = take(consumer, 1)
        assert (again.data(), again.redelivery_count()) == (b"1", count)
        consumer.negative_acknowledge(again)
    [last] = take(consumer, 1)
    consumer.acknowledge(last)
    assert is_quiet(consumer)
    with pytest.raises(magnetar.PulsarException):
        consumer.acknowledge_cumulative(last)


def test_messages_of_a_closed_shared_consumer_go_to_the_others(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 6)
    leaving = magnetar.Client(service.grpc_url)
    take(leaving.subscribe(topic, "s", SHARED, initial_position=EARLIEST), 6)
    leaving.shutdown()
    other = client.subscribe(topic, "s", SHARED)
    assert [(int(it.data()), it.redelivery_count()) for it in take(other, 6)] == [
        (number, 1) for number in range(6)
    ]


def test_a_busy_subscription_or_producer_name_is_refused(
    client: magnetar.Client, topic: str
) -> None:
    consumer = client.subscribe(topic, "s")
    with pytest.raises(magnetar.ConsumerBusy):
        client.subscribe(topic, "s")
    with pytest.raises(magnetar.ConsumerBusy):
        client.subscribe(topic, "s", SHARED)
    producer = client.create_producer(topic, producer_name="me")
    with pytest.raises(magnetar.ProducerBusy):
        client.create_producer(topic, producer_name="me")
    producer.close()
    consumer.close()
    client.create_producer(topic, producer_name="me").close()
    client.subscribe(topic, "s").close()


def test_unsubscribe_deletes_the_subscription(client: magnetar.Client, topic: str) -> None:
    publish(client, topic, 3)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    consumer.acknowledge_cumulative(take(consumer, 3)[-1])
    consumer.unsubscribe()
    assert values(take(client.subscribe(topic, "s", initial_position=EARLIEST), 3)) == [0, 1, 2]


def test_get_last_message_id_returns_the_id_of_the_last_message(
    client: magnetar.Client, topic: str
) -> None:
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    empty = consumer.get_last_message_id()
    assert (empty.ledger_id(), empty.entry_id()) == (-1, -1)
    assert consumer.get_last_message_id() < publish(client, topic, 4)[-1]
    assert values(take(consumer, 4)) == [0, 1, 2, 3]
    assert consumer.get_last_message_id().batch_index() == 3


def test_an_invalid_request_is_refused_by_name(client: magnetar.Client, topic: str) -> None:
    for name in ("a/b", "nothing://public/default/t", ""):
        with pytest.raises((magnetar.InvalidTopicName, ValueError)):
            client.create_producer(name)
    client.create_producer(topic).send(b"the connection is still good")
