"""A client's behaviour after seconds and minutes, with both interfaces over both transports, at a
real server. The clock of the client moves by hand, so that no test waits."""

from __future__ import annotations

import itertools
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pulsar
import pytest
from fakes.standalone_process import StandaloneProcess
from fakes.stepped_loop import stepped_client
from support import wait_for

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fakes.stepped_loop import SteppedLoop

pytestmark = pytest.mark.cluster

TIMEOUT_MS = 30_000
EARLIEST = magnetar.InitialPosition.Earliest
SHARED = magnetar.ConsumerType.Shared
ACK_TIMEOUT_MS = 10_000
BACKOFF = magnetar.MultiplierRedeliveryBackoff(1_000, 60_000, 2)
BACKOFF_S = (1, 2, 4, 8, 16, 32, 60, 60)
LOOK_FOR_PARTITIONS_S = 60.0
LOOK_FOR_MISSING_S = 5.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.start()
    yield process
    process.end()


@dataclass
class Place:
    """A client, the loop that has its clock, and a topic that nothing else uses."""

    client: Any
    loop: SteppedLoop
    topic: str
    admin_url: str

    def admin(self, method: str, path: str, body: object = None) -> Any:
        url = f"{self.admin_url}/admin/v2/{path}"
        answer = httpx.request(method, url, json=body, timeout=60)
        assert answer.is_success, (path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def partitions(self, topic: str, count: int, method: str = "PUT") -> None:
        self.admin(method, f"persistent/public/default/{topic}/partitions", count)

    def send(self, *values: bytes, topic: str = "") -> None:
        producer = self.client.create_producer(topic or self.topic, batching_enabled=False)
        for value in values:
            producer.send(value)
        producer.close()

    def subscribe(self, topic: Any = None, name: str = "s", **options: Any) -> Any:
        options = {"consumer_type": SHARED, "initial_position": EARLIEST} | options
        return self.client.subscribe(topic or self.topic, name, **options)

    def take(self, consumer: Any) -> Any:
        """Receive a message while the clock stands still."""
        return consumer.receive(TIMEOUT_MS)

    def take_later(self, consumer: Any) -> Any:
        """Receive a message. The clock moves meanwhile, because the client may pause and retry."""
        with ThreadPoolExecutor(1) as pool:
            taking = pool.submit(self.take, consumer)
            while not taking.done():
                self.loop.advance(0.1)
                wait([taking], timeout=0.05)
            return taking.result()

    def expect_none(self, consumer: Any) -> None:
        """Check that no redelivered message arrives before a message that is published now."""
        self.send(b"nothing before this")
        message = self.take(consumer)
        assert message.data() == b"nothing before this"
        consumer.acknowledge(message)

    def wait_until_stored(self, topic: str, name: str) -> None:
        """Let time pass until the subscription has no backlog."""

        def has_none() -> bool:
            self.loop.advance(0.2)  # the client sends the acknowledgements that it gathered
            stats = self.admin("GET", f"persistent/public/default/{topic}/stats")
            return bool(stats["subscriptions"][name]["msgBacklog"] == 0)

        wait_for(has_none)

    def set_clock(self, remainder_s: float, period_s: float) -> None:
        """Let time pass until the clock is `remainder_s` after a multiple of the period."""
        self.loop.advance((remainder_s - self.loop.time()) % period_s)


@pytest.fixture(scope="module", params=["over TCP", "over gRPC"])
def url(request: pytest.FixtureRequest, server: StandaloneProcess) -> str:
    return server.pulsar_url if request.param == "over TCP" else server.service_url


@pytest.fixture(params=["synchronous", "asyncio"])
def place(request: pytest.FixtureRequest, url: str, server: StandaloneProcess) -> Iterator[Place]:
    with stepped_client(request.param, url) as (client, loop):
        yield Place(client, loop, f"t{next(_numbers)}", f"http://localhost:{server.http_port}")


# Sending


def test_send_without_a_receipt_fails_after_its_timeout(
    place: Place, server: StandaloneProcess
) -> None:
    """The server is stopped. A later message is stored when the server continues."""
    producer = place.client.create_producer(place.topic, batching_enabled=False)
    producer.send(b"before")
    began = place.loop.time()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(producer.send, b"no receipt")
            while not sending.done():
                place.loop.advance(1.0)
                wait([sending], timeout=0.01)
            with pytest.raises(magnetar.Timeout, match="no receipt within 30 s"):
                sending.result()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert place.loop.time() - began >= 30
    producer.send(b"after")
    consumer = place.subscribe()
    got = [place.take(consumer).data()]
    while got[-1] != b"after":
        got.append(place.take(consumer).data())
    assert got in ([b"before", b"after"], [b"before", b"no receipt", b"after"])


def test_send_of_apaches_client_without_a_receipt_fails_after_its_timeout(
    server: StandaloneProcess,
) -> None:
    logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null")
    client = pulsar.Client(server.pulsar_url, logger=logger)
    topic = f"t{next(_numbers)}"
    client.create_producer(topic).send(b"before")  # a busy disk may need more than half a second
    producer = client.create_producer(topic, send_timeout_millis=500)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(pulsar.Timeout):
            producer.send(b"no receipt")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    client.close()


# Redelivery


def test_ack_timeout_ends_at_the_next_tick(place: Place) -> None:
    """Two messages that time out within one tick are redelivered together, at its end."""
    consumer = place.subscribe(
        unacked_messages_timeout_ms=ACK_TIMEOUT_MS, ack_timeout_tick_ms=4_000
    )
    place.send(b"a", b"b")
    place.set_clock(0.5, 4.0)
    first = place.take(consumer)
    place.loop.advance(1.0)
    second = place.take(consumer)
    place.loop.advance(10.4)  # at 11.9: both messages have timed out; the tick ends at 12
    place.expect_none(consumer)
    place.loop.advance(0.2)
    again = [place.take(consumer) for _ in range(2)]
    assert {it.data() for it in again} == {first.data(), second.data()}
    assert [it.redelivery_count() for it in again] == [1, 1]


def test_tick_is_a_second_without_a_setting(place: Place) -> None:
    consumer = place.subscribe(unacked_messages_timeout_ms=ACK_TIMEOUT_MS)
    place.send(b"a")
    place.set_clock(0.3, 1.0)
    place.take(consumer)
    place.loop.advance(10.5)
    place.expect_none(consumer)
    place.loop.advance(0.2)
    assert place.take(consumer).redelivery_count() == 1


def test_ack_timeout_grows_by_its_backoff(place: Place) -> None:
    consumer = place.subscribe(
        unacked_messages_timeout_ms=ACK_TIMEOUT_MS,
        ack_timeout_redelivery_backoff=BACKOFF,
        ack_timeout_tick_ms=100,
    )
    place.send(b"a")
    for count, seconds in enumerate(BACKOFF_S):
        assert place.take(consumer).redelivery_count() == count
        place.loop.advance(10 + seconds - 0.3)
        place.expect_none(consumer)
        place.loop.advance(0.5)
    assert place.take(consumer).redelivery_count() == len(BACKOFF_S)


def test_unacknowledged_messages_stay_without_an_ack_timeout(place: Place) -> None:
    """A dead-letter policy sets no ack timeout."""
    consumer = place.subscribe(dead_letter_policy=magnetar.ConsumerDeadLetterPolicy(1))
    place.send(b"a")
    place.take(consumer)
    place.loop.advance(3_600)
    place.expect_none(consumer)


def test_negative_acknowledgement_waits_a_minute_without_a_setting(place: Place) -> None:
    consumer = place.subscribe()
    place.send(b"a")
    consumer.negative_acknowledge(place.take(consumer))
    place.loop.advance(59.5)
    place.expect_none(consumer)
    place.loop.advance(0.6)
    assert place.take(consumer).redelivery_count() == 1


def test_delay_of_negative_acknowledgements_grows(place: Place) -> None:
    consumer = place.subscribe(negative_ack_redelivery_backoff=BACKOFF)
    place.send(b"a")
    for count, seconds in enumerate(BACKOFF_S):
        message = place.take(consumer)
        assert message.redelivery_count() == count
        consumer.negative_acknowledge(message)
        place.loop.advance(seconds - 0.3)
        place.expect_none(consumer)
        place.loop.advance(0.5)
    assert place.take(consumer).redelivery_count() == len(BACKOFF_S)


def test_negative_acknowledgement_ends_the_ack_timeout(place: Place) -> None:
    consumer = place.subscribe(unacked_messages_timeout_ms=ACK_TIMEOUT_MS)
    place.send(b"a")
    consumer.negative_acknowledge(place.take(consumer))
    place.loop.advance(30)
    place.expect_none(consumer)
    place.loop.advance(31)
    assert place.take(consumer).redelivery_count() == 1


def test_message_that_is_never_acknowledged_becomes_a_dead_letter(place: Place) -> None:
    policy = magnetar.ConsumerDeadLetterPolicy(2, initial_subscription_name="keep")
    consumer = place.subscribe(
        unacked_messages_timeout_ms=ACK_TIMEOUT_MS, dead_letter_policy=policy
    )
    place.send(b"a")
    for count in range(3):
        assert place.take(consumer).redelivery_count() == count
        place.loop.advance(11.1)
    dead = place.subscribe(f"{place.topic}-s-DLQ", "keep")
    assert place.take(dead).data() == b"a"
    place.wait_until_stored(place.topic, "s")


# Topics that are added


def receive_from(place: Place, consumer: Any, topic: str) -> None:
    """Send four messages to the topic, and check that all of them arrive from the first one on."""
    place.send(*[b"%d" % number for number in range(4)], topic=topic)
    for _ in range(4):
        message = place.take(consumer)
        assert message.topic_name().startswith(f"persistent://public/default/{topic}")
        consumer.acknowledge(message)


def growing(place: Place, listed: str) -> Any:
    """Subscribe to a topic with one partition, alone, in a list or by a pattern."""
    place.partitions(place.topic, 1)
    if listed == "alone":
        return place.subscribe()
    if listed == "in a list":
        return place.subscribe([f"{place.topic}x", place.topic])
    return place.subscribe(re.compile(f"public/default/{place.topic}.*"))


@pytest.mark.parametrize("listed", ["alone", "in a list", "by a pattern"])
def test_consumer_receives_from_partitions_that_are_added(place: Place, listed: str) -> None:
    """The first messages of the topics are published before the client finds the topics."""
    consumer = growing(place, listed)
    receive_from(place, consumer, place.topic)
    place.partitions(place.topic, 3, "POST")
    names = [f"{place.topic}-partition-{number}" for number in (1, 2)]
    for name in names:
        place.send(b"first", topic=name)
    place.loop.advance(LOOK_FOR_PARTITIONS_S + 0.1)
    got = [place.take(consumer) for _ in names]
    assert {it.topic_name().rpartition("/")[2] for it in got} == set(names)
    for message in got:
        consumer.acknowledge(message)
        assert message.data() == b"first"


def test_producer_uses_partitions_that_are_added(place: Place) -> None:
    place.partitions(place.topic, 1)
    producer = place.client.create_producer(place.topic, batching_enabled=False)
    assert {producer.send(b"x").partition() for _ in range(3)} == {0}
    place.partitions(place.topic, 3, "POST")
    place.loop.advance(LOOK_FOR_PARTITIONS_S + 0.1)
    wait_for(lambda: {producer.send(b"x").partition() for _ in range(3)} == {0, 1, 2})


def test_listed_topic_that_is_missing_is_joined_when_it_exists(place: Place) -> None:
    namespace = f"public/{place.topic}"
    place.admin("PUT", f"namespaces/{namespace}", {})
    no = {"allowAutoTopicCreation": False}
    place.admin("POST", f"namespaces/{namespace}/autoTopicCreation", no)
    names = [f"persistent://{namespace}/{letter}" for letter in "ab"]
    paths = [name.replace("://", "/") for name in names]
    place.admin("PUT", paths[0])
    consumer = place.subscribe(names)
    place.send(b"there", topic=names[0])
    assert place.take(consumer).data() == b"there"
    place.admin("PUT", paths[1])
    place.send(b"first", topic=names[1])
    place.loop.advance(LOOK_FOR_MISSING_S + 0.1)
    message = place.take(consumer)
    assert (message.data(), message.topic_name()) == (b"first", names[1])


def test_pattern_leaves_deleted_topics_and_joins_new_ones_again(place: Place) -> None:
    consumer = place.subscribe(re.compile(f"public/default/{place.topic}-.*"))
    name = f"{place.topic}-a"
    for _ in range(2):
        place.send(b"first", topic=name)
        message = place.take_later(consumer)
        assert message.data() == b"first"
        consumer.acknowledge(message)
        place.wait_until_stored(name, "s")
        place.admin("DELETE", f"persistent/public/default/{name}?force=true")
