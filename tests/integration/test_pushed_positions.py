"""A streaming query to which two real brokers push: messages, trimming, moves, a broker's death,
new and deleted topics."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from fakes.services import Service, brokers_in_thread
from support import wait_for

import magnetar
from magnetar.protos.names import TopicName
from magnetar.spark.errors import DataLost
from magnetar.spark.source.driver import StreamDriver
from magnetar.spark.source.options import parse_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fakes.broker import RunningBroker

pytestmark = pytest.mark.real_loop

HOUR_MS = "3600000"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with brokers_in_thread(2) as service:
        yield service


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"persistent://public/default/pushed-{next(_numbers)}"


class Query:
    """A query that reads from the earliest message on."""

    def __init__(self, service: Service, topic: str, **given: str) -> None:
        brokers = ",".join(it.grpc_url.removeprefix("grpc://") for it in service.brokers)
        every = {"service.url": f"grpc://{brokers}", "startingOffsets": "earliest"}
        named = {} if "topicsPattern" in given else {"topic": topic}
        options = parse_options(every | named | given, streaming=True)
        self.topic = topic
        self.driver = StreamDriver(options, now_ms=1, query="q")
        self.at: dict[str, Any] = self.driver.initial()

    def topics(self) -> set[str]:
        """Plan the next batch. Returns the topics that it has reached."""
        self.at = self.driver.latest(self.at, rows_max=None, bytes_max=None)
        return set(self.at["t"])

    def reached(self) -> int:
        """Plan the next batch. Returns the index after its last message."""
        self.at = self.driver.latest(self.at, rows_max=None, bytes_max=None)
        index: int = self.at["t"][self.topic][2]
        return index


@pytest.fixture
def begin(service: Service, topic: str) -> Iterator[Callable[..., Query]]:
    queries: list[Query] = []

    def begin(**given: str) -> Query:
        """Start a query that learns of later messages only by pushes."""
        query = Query(service, topic, **given)
        queries.append(query)
        query.reached()  # the first batch
        query.reached()  # the first poll, which begins the watch
        return query

    yield begin
    for query in queries:
        query.driver.close()


def publish(service: Service, topic: str, count: int = 1) -> None:
    with magnetar.Client(service.grpc_url) as client:
        producer = client.create_producer(topic)
        for _ in range(count):
            producer.send(b"x")


def owner(service: Service, topic: str) -> RunningBroker:
    name = TopicName.parse(topic)
    return next(it for it in service.brokers if name in {one.name for one in it.broker.topics})


NO_POLLS = {"pollIntervalMs": HOUR_MS, "discoveryIntervalMs": HOUR_MS}


def test_messages_of_an_idle_topic_arrive_without_a_poll(
    service: Service, topic: str, begin: Callable[..., Query]
) -> None:
    publish(service, topic)
    query = begin(**NO_POLLS)
    assert query.reached() == 1
    publish(service, topic, 2)
    wait_for(lambda: query.reached() == 3)
    name = TopicName.parse(topic)
    # The broker unloads an idle topic in the same way.
    service.call(owner(service, topic).broker.unload_topic(name))
    publish(service, topic)
    wait_for(lambda: query.reached() == 4)


def test_a_loss_is_noticed_without_a_poll(
    service: Service, topic: str, begin: Callable[..., Query]
) -> None:
    publish(service, topic, 3)
    query = begin(**NO_POLLS)
    behind = query.at | {"t": {topic: [*query.at["t"][topic][:1], 1, 1, 0]}}
    opened = next(it for it in owner(service, topic).broker.topics if str(it.name) == topic)
    service.call(opened.truncate())
    with pytest.raises(DataLost, match="messages 1 to 2 were deleted"):
        wait_for(lambda: query.driver.latest(behind, rows_max=1, bytes_max=None) is None)


def test_a_topic_that_was_created_again_is_read_without_a_poll(
    service: Service, topic: str, begin: Callable[..., Query]
) -> None:
    publish(service, topic, 3)
    query = begin(failOnDataLoss="false", **NO_POLLS)
    service.call(owner(service, topic).broker.delete_topic(TopicName.parse(topic), force=True))
    wait_for(lambda: topic not in query.topics())
    publish(service, topic, 2)
    wait_for(lambda: topic in query.topics())
    assert query.at["from"][topic][2] == 0
    wait_for(lambda: query.reached() == 2)


def test_a_query_follows_its_topic_to_another_broker(
    service: Service, topic: str, begin: Callable[..., Query]
) -> None:
    publish(service, topic)
    query = begin(discoveryIntervalMs=HOUR_MS)
    for count in range(2, 5):
        broker = owner(service, topic).broker
        service.call(broker.unload_bundle(broker.policies.bundle_of(TopicName.parse(topic))))
        publish(service, topic)
        wait_for(lambda count=count: query.reached() == count)


async def die(broker: RunningBroker) -> None:
    await broker.kill()
    broker.store.expire()


def test_a_query_survives_the_death_of_the_owner(topic: str) -> None:
    with brokers_in_thread(2) as service:
        publish(service, topic)
        query = Query(service, topic, pollIntervalMs="10")
        wait_for(lambda: query.reached() == 1)
        dying = owner(service, topic)
        survivor = next(it for it in service.brokers if it is not dying)
        service.call(die(dying))
        with magnetar.Client(survivor.grpc_url) as client:
            client.create_producer(topic).send(b"x")
        wait_for(lambda: query.reached() == 2)
        query.driver.close()


def begin_with_topics_pushed(service: Service, topic: str, **given: str) -> Query:
    """A query that learns of later topics by pushes alone."""
    query = Query(service, topic, discoveryIntervalMs=HOUR_MS, pollIntervalMs="10", **given)
    wait_for(lambda: query.topics() is not None and query.driver._topics.is_live)
    return query


def grow(service: Service, topic: str, count: int) -> None:
    service.call(service.brokers[0].broker.catalog.partitioned.grow(TopicName.parse(topic), count))


@pytest.mark.parametrize("by", ["topic", "topicsPattern"])
def test_new_partitions_and_topics_arrive_without_asking(
    service: Service, topic: str, by: str
) -> None:
    broker, short = service.brokers[0].broker, topic.rpartition("/")[2]
    service.call(broker.create_partitioned_topic(TopicName.parse(topic), 1, {}))
    pattern = {"topicsPattern": f"public/default/{short}(-new)?"}
    parts = [f"{topic}-partition-{number}" for number in range(2)]
    query = begin_with_topics_pushed(service, topic, **({} if by == "topic" else pattern))
    assert query.topics() == {parts[0]}
    grow(service, topic, 2)
    publish(service, f"{topic}-new")
    publish(service, f"{topic}-other")
    wanted = {*parts, *([] if by == "topic" else [f"{topic}-new"])}
    wait_for(lambda: query.topics() == wanted)
    query.driver.close()


def test_a_topic_that_is_waited_for_arrives_without_asking(service: Service, topic: str) -> None:
    query = begin_with_topics_pushed(service, topic, waitingForNonExistedTopic="true")
    assert query.topics() == set()
    publish(service, topic, 3)
    wait_for(lambda: query.topics() == {topic})
    wait_for(lambda: query.reached() == 3)
    query.driver.close()


def test_topics_are_pushed_by_another_broker_after_a_death() -> None:
    topic = f"persistent://public/default/pushed-{next(_numbers)}"
    with brokers_in_thread(2) as service:
        first, second = service.brokers
        service.call(second.broker.create_partitioned_topic(TopicName.parse(topic), 1, {}))
        # The first broker of the URL begins the query.
        query = begin_with_topics_pushed(service, topic)
        service.call(die(first))
        wait_for(lambda: query.topics() is not None and not query.driver._topics.is_live)
        service.call(second.broker.catalog.partitioned.grow(TopicName.parse(topic), 3))
        wait_for(lambda: len(query.topics()) == 3)
        assert query.driver._topics.is_live
        query.driver.close()
