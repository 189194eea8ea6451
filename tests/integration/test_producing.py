"""Producers against two brokers of this process: access modes, deduplication, limits, quotas.

Apache's client (`pulsar-client`) goes over Pulsar's TCP protocol, ours over gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from fakes.services import Service, brokers_in_thread
from support import wait_for

import magnetar
from magnetar.metadata import codec, paths
from magnetar.metadata.policies import (
    BacklogAction,
    BacklogQuota,
    Policies,
    Rate,
    TopicPolicies,
)
from magnetar.metadata.store import update
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.broker.topic.topic import PersistentTopic

TIMEOUT_MS = 30_000
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


@pytest.fixture(params=["apache", "ours"])
def library(request: pytest.FixtureRequest) -> Library:
    return pulsar if request.param == "apache" else magnetar


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
def client(service: Service, library: Library) -> Iterator[Any]:
    with connected(service, library) as client:
        yield client


def opened(service: Service, topic: str) -> PersistentTopic:
    [found] = [
        each
        for broker in service.brokers
        for each in broker.broker.topics
        if str(each.name) == topic
    ]
    return found  # type: ignore[return-value]


def set_policies(service: Service, topic: str, **policies: Any) -> None:
    """Set the topic's own policies, and wait until its broker follows them."""
    name = TopicName.parse(topic)

    async def write() -> None:
        store = service.brokers[0].store
        path = paths.topic_policies(name.tenant, name.namespace, name.domain.value, name.topic)
        value = codec.encode_topic_policies(TopicPolicies(Policies(**policies)))
        deadline = asyncio.get_running_loop().time() + 5.0
        await update(store, path, lambda _: value, deadline=deadline)

    service.call(write())
    expected = policies.items()
    wait_for(
        lambda: all(
            getattr(opened(service, topic).policies.effective, key) == value
            for key, value in expected
        )
    )


def stats(service: Service, topic: str) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        return await opened(service, topic).stats()

    return service.call(ask())


def contents(client: Any, library: Library, topic: str, count: int) -> list[bytes]:
    """The first `count` messages. Checks that no message follows them."""
    reader = client.create_reader(topic, library.MessageId.earliest)
    found = [reader.read_next(timeout_millis=TIMEOUT_MS).data() for _ in range(count)]
    with pytest.raises(library.Timeout):
        reader.read_next(timeout_millis=300)
    reader.close()
    return found


# ---- access modes --------------------------------------------------------------------------------


def test_a_fencing_producer_takes_over_at_once(client: Any, library: Library, topic: str) -> None:
    modes = library.ProducerAccessMode
    old = client.create_producer(topic, access_mode=modes.Exclusive)
    old.send(b"old")
    new = client.create_producer(topic, access_mode=modes.ExclusiveWithFencing)
    new.send(b"new")
    with pytest.raises(Exception, match=r"(?i)fenced|closed"):
        old.send(b"too late")
    assert contents(client, library, topic, 2) == [b"old", b"new"]
    new.close()


def test_a_waiting_producer_becomes_ready_when_the_leader_leaves(
    service: Service, client: Any, library: Library, topic: str
) -> None:
    modes = library.ProducerAccessMode
    leader = client.create_producer(topic, access_mode=modes.WaitForExclusive)
    leader.send(b"leader")
    made: list[Any] = []
    waiting = threading.Thread(
        target=lambda: made.append(
            client.create_producer(topic, access_mode=modes.WaitForExclusive)
        )
    )
    waiting.start()
    wait_for(lambda: stats(service, topic)["waitingPublishers"] == 1)
    time.sleep(0.3)
    assert not made
    leader.close()
    waiting.join(TIMEOUT_MS / 1000)
    made[0].send(b"next")
    assert contents(client, library, topic, 2) == [b"leader", b"next"]
    made[0].close()


def test_a_producer_above_max_producers_per_topic_is_refused(
    service: Service, client: Any, library: Library, topic: str
) -> None:
    first = client.create_producer(topic)
    set_policies(service, topic, producers_max=1)
    with pytest.raises(library.ProducerBusy):
        client.create_producer(topic)
    first.close()
    client.create_producer(topic).close()


# ---- deduplication -------------------------------------------------------------------------------


def test_a_message_with_a_stored_sequence_id_is_counted_once(
    service: Service, client: Any, library: Library, topic: str
) -> None:
    client.create_producer(topic).close()
    set_policies(service, topic, deduplication=True)
    wait_for(lambda: stats(service, topic)["deduplicationStatus"] == "Enabled")
    options: dict[str, Any] = {"producer_name": "source", "batching_enabled": False}
    producer = client.create_producer(topic, **options)
    for number in (0, 1, 2, 1, 2, 3, 0):
        producer.send(b"%d" % number, sequence_id=number)
    assert producer.last_sequence_id() >= 0
    producer.close()
    again = client.create_producer(topic, **options)
    assert again.last_sequence_id() == 3
    for number in (2, 3, 4):
        again.send(b"%d" % number, sequence_id=number)
    again.close()
    assert contents(client, library, topic, 5) == [b"0", b"1", b"2", b"3", b"4"]


def test_deduplication_survives_the_owners_death(library: Library, topic: str) -> None:
    with brokers_in_thread(2) as service, connected(service, library) as client:
        # The client knows the address of the other broker, which stays alive.
        owner = service.brokers[1]
        for _ in range(20):
            client.create_producer(topic).close()
            if topic in {str(each.name) for each in owner.broker.topics}:
                break
            topic += "x"
        set_policies(service, topic, deduplication=True)
        wait_for(lambda: stats(service, topic)["deduplicationStatus"] == "Enabled")
        options: dict[str, Any] = {"producer_name": "source", "batching_enabled": False}
        producer = client.create_producer(topic, **options)
        for number in range(50):
            producer.send(b"%d" % number, sequence_id=number)

        async def kill() -> None:
            await owner.kill()
            owner.store.expire()

        service.call(kill())
        for number in range(40, 60):
            producer.send(b"%d" % number, sequence_id=number)
        producer.close()
        assert contents(client, library, topic, 60) == [b"%d" % n for n in range(60)]


# ---- limits --------------------------------------------------------------------------------------


def test_the_publish_rate_is_kept_and_can_be_lifted(
    service: Service, client: Any, library: Library, topic: str
) -> None:
    producer = client.create_producer(topic, batching_enabled=False)
    set_policies(service, topic, publish_rate=Rate(20, 0, 1))
    began = time.monotonic()
    for number in range(50):
        producer.send(b"%d" % number)
    assert time.monotonic() - began > 1.0
    set_policies(service, topic, publish_rate=Rate(0, 0, 1))
    began = time.monotonic()
    results: list[Any] = []
    for number in range(1_000):  # with the rate, they would take 49 s
        producer.send_async(b"%d" % number, lambda result, _: results.append(result))
    producer.flush()
    assert time.monotonic() - began < 24.0
    wait_for(lambda: len(results) == 1_000)
    assert set(results) == {library.Result.Ok}
    producer.close()


def test_a_message_above_the_topics_size_is_refused(service: Service, topic: str) -> None:
    """After the refusal, Apache's C++ client reconnects, and resends the message until its send
    timeout."""
    with connected(service, magnetar) as client:
        producer = client.create_producer(topic, batching_enabled=False)
        set_policies(service, topic, max_message_bytes=1_000)
        producer.send(bytes(1_000))
        with pytest.raises(magnetar.NotAllowedError, match="1000"):
            producer.send(bytes(1_001))
        producer.close()


# ---- backlog quotas ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "refusal"),
    [
        (BacklogAction.HOLD_PRODUCERS, "ProducerBlockedQuotaExceededError"),
        (BacklogAction.REFUSE_PRODUCERS, "ProducerBlockedQuotaExceededException"),
    ],
)
def test_producers_are_refused_while_the_backlog_exceeds_its_quota(
    service: Service,
    client: Any,
    library: Library,
    topic: str,
    action: BacklogAction,
    refusal: str,
) -> None:
    consumer = client.subscribe(topic, "s")
    producer = client.create_producer(topic, batching_enabled=False)
    for _ in range(20):
        producer.send(bytes(1_000))
    set_policies(service, topic, backlog_quota_bytes=BacklogQuota(10_000, action))
    service.call(opened(service, topic).quotas.check())
    assert opened(service, topic).producers == {}
    with pytest.raises(library.PulsarException) as refused:
        client.create_producer(topic)
    assert refusal in repr(refused.value) or refusal in type(refused.value).__name__
    for _ in range(20):
        consumer.acknowledge(consumer.receive(timeout_millis=TIMEOUT_MS))
    wait_for(lambda: stats(service, topic)["subscriptions"]["s"]["msgBacklog"] == 0)
    producer.send(b"the first producer is back")
    producer.close()


def test_an_evicted_backlog_is_skipped(
    service: Service, client: Any, library: Library, topic: str
) -> None:
    consumer = client.subscribe(topic, "s")
    consumer.close()
    reader = client.create_reader(topic, library.MessageId.earliest)
    producer = client.create_producer(topic, batching_enabled=False)
    for number in range(100):
        producer.send(b"%3d" % number + bytes(1_000))
    quota = BacklogQuota(50_000, BacklogAction.EVICT_BACKLOG)
    set_policies(service, topic, backlog_quota_bytes=quota)
    service.call(opened(service, topic).quotas.check())
    left = stats(service, topic)["subscriptions"]["s"]["msgBacklog"]
    assert 30 <= left <= 45
    assert stats(service, topic)["backlogQuotaEvictedEntries"] == 100 - left
    assert reader.read_next(timeout_millis=TIMEOUT_MS).data()[:3] == b"  0"
    producer.close()


# ---- statistics and counts -----------------------------------------------------------------------


def test_publisher_statistics_have_pulsars_fields(
    service: Service, client: Any, topic: str
) -> None:
    producer = client.create_producer(topic, producer_name="p", properties={"team": "a"})
    producer.send(b"0")
    [found] = stats(service, topic)["publishers"]
    assert found["producerName"] == "p"
    assert found["accessMode"] == "Shared"
    assert found["metadata"] == {"team": "a"}
    assert found["chunkedMessageRate"] == 0.0
    assert found["msgRateIn"] > 0
    assert {"address", "connectedSince", "clientVersion", "producerId"} <= found.keys()
    assert isinstance(found["supportsPartialProducer"], bool)
    producer.close()


def test_key_based_batches_are_all_stored_with_deduplication(service: Service, topic: str) -> None:
    with magnetar.Client(service.grpc_url) as client:
        client.create_producer(topic).close()
        set_policies(service, topic, deduplication=True)
        wait_for(lambda: stats(service, topic)["deduplicationStatus"] == "Enabled")
        consumer = client.subscribe(topic, "s")
        producer = client.create_producer(topic, batching_type=magnetar.BatchingType.KeyBased)
        for number in range(60):
            producer.send_async(b"%d" % number, None, partition_key=f"key-{number % 7}")
        producer.flush()
        found = {int(consumer.receive(timeout_millis=TIMEOUT_MS).data()) for _ in range(60)}
        assert found == set(range(60))


def test_chunks_are_counted_and_stored_with_deduplication(service: Service, topic: str) -> None:
    with connected(service, pulsar) as client:
        client.create_producer(topic).close()
        set_policies(service, topic, deduplication=True)
        producer = client.create_producer(topic, chunking_enabled=True, batching_enabled=False)
        payload = bytes(range(256)) * 30_000
        producer.send(payload)
        producer.send(payload)
        consumer = client.subscribe(topic, "s", initial_position=pulsar.InitialPosition.Earliest)
        assert consumer.receive(timeout_millis=TIMEOUT_MS).data() == payload
        assert consumer.receive(timeout_millis=TIMEOUT_MS).data() == payload
        assert stats(service, topic)["chunkedMessageRate"] > 0
        producer.close()
