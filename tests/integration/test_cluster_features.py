"""Messaging features against a cluster of processes: Apache's client, and ours with both faces.

The cases of one feature are in the module of that feature; here each has its plain form.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from fakes.cluster_api import CLIENTS, TIMEOUT_MS, Api, api_of, take
from fakes.cluster_process import ClusterProcess
from fakes.promises import (
    OUR_PROMISES,
    PROMISES,
    Pair,
    publish_first_chunks,
    unacknowledged_messages_come_again_after_the_ack_timeout,
)
from support import skip_without_zookeeper, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper, pytest.mark.real_loop]

LIMIT = 5 << 20
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    skip_without_zookeeper()
    cluster = ClusterProcess(tmp_path_factory.mktemp("features"))
    cluster.admin("PUT", "namespaces/public/rows", {"bundles": {"numBundles": 4}})
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def apache(cluster: ClusterProcess) -> Iterator[Api]:
    with api_of(cluster, "apache") as api:
        yield api


@pytest.fixture(scope="module")
def over_tcp(cluster: ClusterProcess) -> Iterator[Api]:
    with api_of(cluster, "ours over TCP") as api:
        yield api


@pytest.fixture(scope="module")
def over_grpc(cluster: ClusterProcess) -> Iterator[Api]:
    """The asyncio client."""
    with api_of(cluster, "asyncio over gRPC") as api:
        yield api


APIS = dict(zip(CLIENTS, ("apache", "over_tcp", "over_grpc"), strict=True))


@pytest.fixture(scope="module", params=APIS)
def api(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(APIS[request.param])


PAIRS = {
    "ours over TCP": ("over_tcp", "over_tcp"),
    "asyncio over gRPC": ("over_grpc", "over_grpc"),
    "apache to ours": ("apache", "over_tcp"),
    "ours to apache": ("over_grpc", "apache"),
}
CASES = [
    pytest.param(pair, promise, id=f"{pair}: {promise.__name__}")
    for pair in PAIRS
    for promise in [*PROMISES, *([] if "apache" in pair else OUR_PROMISES)]
]


def owner_url(cluster: ClusterProcess, topic: str) -> str:
    path = topic.replace("://", "/")
    return str(cluster.ask(0, "GET", f"/lookup/v2/topic/{path}").json()["brokerUrl"])


def pair_of(request: pytest.FixtureRequest, pair: str) -> Pair:
    sends, consumes = (request.getfixturevalue(name) for name in PAIRS[pair])
    cluster: ClusterProcess = request.getfixturevalue("cluster")

    return Pair(
        sends.module,
        sends.client,
        consumes.module,
        consumes.client,
        f"persistent://public/rows/t{next(NUMBERS)}",
        cluster.admin,
        partial(owner_url, cluster),
    )


@pytest.mark.parametrize(("pair", "promise"), CASES)
def test_client_keeps_its_promises(
    request: pytest.FixtureRequest, pair: str, promise: Callable[[Pair], None]
) -> None:
    promise(pair_of(request, pair))


def test_unacknowledged_messages_are_redelivered_after_the_ack_timeout(
    request: pytest.FixtureRequest,
) -> None:
    """All pairs run at the same time, because the shortest ack timeout is ten seconds."""
    pairs = [pair_of(request, pair) for pair in PAIRS]
    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(unacknowledged_messages_come_again_after_the_ack_timeout, pairs))


@pytest.fixture
def name() -> str:
    return f"t{next(NUMBERS)}"


@pytest.fixture
def topic(name: str) -> str:
    return f"persistent://public/rows/{name}"


def test_largest_message_passes_and_a_larger_one_is_refused(api: Api, topic: str) -> None:
    consumer = api.subscribe(topic)
    producer = api.client.create_producer(topic, batching_enabled=False)
    with pytest.raises(api.module.MessageTooBig):
        producer.send(bytes(LIMIT + 1))
    producer.send(bytes(LIMIT - 1024))  # Apache's limit includes metadata
    assert [len(data) for data in take(consumer, 1)] == [LIMIT - 1024]


def test_access_modes_admit_one_producer_at_a_time(
    api: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    modes = api.module.ProducerAccessMode
    consumer = api.subscribe(topic)
    shared = [api.client.create_producer(topic) for _ in range(2)]
    for producer in shared:
        producer.send(b"shared")
        producer.close()
    old = api.client.create_producer(topic, access_mode=modes.Exclusive)
    old.send(b"exclusive")
    for refused in (modes.Exclusive, modes.Shared):
        with pytest.raises(Exception, match=r"(?i)fenced|busy|exclusive"):
            api.client.create_producer(topic, access_mode=refused)
    fencing = api.client.create_producer(topic, access_mode=modes.ExclusiveWithFencing)
    fencing.send(b"fencing")
    with pytest.raises(Exception, match=r"(?i)fenced|closed"):
        old.send(b"too late")
    made: list[Any] = []

    def wait() -> None:
        made.append(api.client.create_producer(topic, access_mode=modes.WaitForExclusive))

    waiting = threading.Thread(target=wait)
    waiting.start()
    path = f"persistent/public/rows/{name}/stats"
    wait_for(lambda: cluster.admin("GET", path)["waitingPublishers"] == 1)
    assert not made
    fencing.close()
    waiting.join(TIMEOUT_MS / 1000)
    made[0].send(b"next")
    expected = [b"shared", b"shared", b"exclusive", b"fencing", b"next"]
    assert take(consumer, 5) == expected
    made[0].close()


OLD_LEADER = """
import {module}, {module}.asyncio, asyncio, inspect, sys

async def outcome(value):
    return await value if inspect.isawaitable(value) else value

async def main():
    logger = {module}.FileLogger({module}.LoggerLevel.Error, "/dev/null")
    client = {client}({url!r}, logger=logger)
    mode = {module}.ProducerAccessMode.Exclusive
    producer = await outcome(client.create_producer({topic!r}, access_mode=mode))
    await outcome(producer.send(b"old"))
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        await outcome(producer.send(b"too late"))
    except {module}.PulsarException as error:
        print(type(error).__name__, error)
    else:
        print("stored")

asyncio.run(main())
"""


def replace_a_leader_that_stands_still(api: Api, program: str, topic: str) -> None:
    """Stop the leader's process, so that the broker hears nothing of it. Continue the process after
    another producer has taken its place."""
    kept = api.subscribe(topic)
    old = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert old.stdout is not None
        assert old.stdout.readline() == "ready\n"
        old.send_signal(signal.SIGSTOP)
        made: list[Any] = []

        def has_taken_over() -> bool:
            with suppress(api.module.PulsarException):
                mode = api.module.ProducerAccessMode.Exclusive
                made.append(api.client.create_producer(topic, access_mode=mode))
            return bool(made)

        wait_for(has_taken_over, deadline_s=150.0)
        made[0].send(b"new")
        old.send_signal(signal.SIGCONT)
        told, _ = old.communicate("go on\n", timeout=60)
        assert re.search("(?i)fenced|closed", told), told
        assert take(kept, 2) == [b"old", b"new"]
        assert api.is_quiet(kept)
    finally:
        old.kill()


def test_exclusive_producer_that_stands_still_is_replaced_and_learns_it_at_its_next_send(
    request: pytest.FixtureRequest, cluster: ClusterProcess
) -> None:
    """The broker pings the old producer when another one comes, and waits five seconds for the
    answer. All clients run at the same time."""
    kinds = {
        "apache": ("pulsar", "pulsar.Client", cluster.pulsar_url),
        "over_tcp": ("magnetar", "magnetar.Client", cluster.pulsar_url),
        "over_grpc": ("magnetar", "magnetar.asyncio.Client", cluster.service_url),
    }

    def replace(fixture: str) -> None:
        module, client, url = kinds[fixture]
        topic = f"persistent://public/rows/t{next(NUMBERS)}"
        program = OLD_LEADER.format(module=module, client=client, url=url, topic=topic)
        replace_a_leader_that_stands_still(apis[fixture], program, topic)

    apis = {fixture: request.getfixturevalue(fixture) for fixture in kinds}
    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(replace, kinds))


def test_interwoven_chunked_messages_are_joined_and_acknowledged(
    api: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    consumer = api.subscribe(topic)
    options: dict[str, Any] = {"batching_enabled": False, "chunking_enabled": True}
    producers = [api.client.create_producer(topic, **options) for _ in range(2)]
    payloads = [bytes([number]) * (LIMIT + 1_000_000) for number in range(2)]
    for producer, payload in zip(producers, payloads, strict=True):
        producer.send_async(payload, None)
    for producer in producers:
        producer.flush()
    assert sorted(take(consumer, 2)) == payloads
    path = f"persistent/public/rows/{name}/stats"
    wait_for(lambda: cluster.admin("GET", path)["subscriptions"]["s"]["msgBacklog"] == 0)
    stats = cluster.admin("GET", path)
    assert stats["publishers"][0]["chunkedMessageRate"] > 0
    for producer in producers:
        producer.close()
    with pytest.raises(Exception, match=r"(?i)batch|chunk"):
        api.client.create_producer(topic, batching_enabled=True, chunking_enabled=True)


def backlog(cluster: ClusterProcess, name: str) -> int:
    stats = cluster.admin("GET", f"persistent/public/rows/{name}/stats")
    return int(stats["subscriptions"]["s"]["msgBacklog"])


def test_oldest_incomplete_message_is_given_up_at_the_limit(
    api: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    consumer = api.subscribe(
        topic,
        max_pending_chunked_message=1,
        auto_ack_oldest_chunked_message_on_queue_full=True,
    )
    asyncio.run(publish_first_chunks(owner_url(cluster, topic), topic, 2))
    assert backlog(cluster, name) > 0
    options: dict[str, Any] = {"batching_enabled": False, "chunking_enabled": True}
    producer = api.client.create_producer(topic, **options)
    payload = bytes(LIMIT + 1_000)
    producer.send(payload)
    assert take(consumer, 1) == [payload]
    wait_for(lambda: backlog(cluster, name) == 0)


@pytest.mark.night
def test_incomplete_message_expires_at_apaches_client_after_its_minute(
    apache: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    """Apache's client has no setting for the time; our clients have one."""
    consumer = apache.subscribe(topic)
    asyncio.run(publish_first_chunks(owner_url(cluster, topic), topic, 1))
    assert apache.is_quiet(consumer)
    assert backlog(cluster, name) == 1
    wait_for(lambda: backlog(cluster, name) == 0, deadline_s=150.0)


@pytest.mark.night
def test_apaches_client_finds_new_topics_and_partitions_within_its_minute(
    apache: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    """Apache's client searches every 60 s, whatever `pattern_auto_discovery_period` says. The
    broker notifies our client."""
    partitions = f"persistent/public/rows/{name}/partitions"
    cluster.admin("PUT", partitions, 1)
    matching = apache.subscribe(re.compile(f"{topic}-new.*"), pattern_auto_discovery_period=1)
    whole, listed = apache.subscribe(topic), apache.subscribe([topic], "listed")
    cluster.admin("POST", partitions, 3)
    for each in (f"{topic}-partition-2", f"{topic}-new"):
        apache.client.create_producer(each).send(b"first")
    for consumer in (matching, whole, listed):
        assert consumer.receive(timeout_millis=150_000).data() == b"first"


def test_names_of_topics_are_completed_and_partitions_reserved(api: Api, name: str) -> None:
    consumer = api.subscribe(f"short-{name}")
    producer = api.client.create_producer(f"persistent://public/default/short-{name}")
    producer.send(b"same topic")
    assert take(consumer, 1) == [b"same topic"]
    for refused in (
        f"persistent://public/rows/{name}-partition-0",
        f"persistent://public/nowhere/{name}",
        "persistent://pulsar/system/transaction_coordinator_assign",
        f"persistent://public/rows/{name}__transaction_pending_ack",
    ):
        with pytest.raises(api.module.PulsarException):
            api.client.create_producer(refused)


def test_durable_subscription_keeps_what_a_reader_of_its_name_does_not(
    api: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    producer = api.client.create_producer(topic)
    producer.send(b"before the subscription")
    consumer = api.subscribe(topic, initial_position=api.module.InitialPosition.Latest)
    reader = api.client.create_reader(topic, api.module.MessageId.latest)
    producer.send(b"1")
    producer.send(b"2")
    assert reader.read_next(timeout_millis=TIMEOUT_MS).data() == b"1"
    assert take(consumer, 1) == [b"1"]
    reader.close()
    consumer.close()
    cluster.admin("PUT", f"persistent/public/rows/{name}/unload")
    again = api.subscribe(topic)
    assert take(again, 1) == [b"2"]
    path = f"persistent/public/rows/{name}/stats"
    wait_for(lambda: list(cluster.admin("GET", path)["subscriptions"]) == ["s"])


def test_retained_messages_are_read_without_a_durable_subscription(
    api: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    path = f"persistent/public/rows/{name}"
    producer = api.client.create_producer(topic)
    forever = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    cluster.admin("POST", f"{path}/retention", forever)
    producer.send(b"read later")
    producer.close()
    cluster.admin("PUT", f"{path}/unload")
    assert take(api.subscribe(topic), 1) == [b"read later"]


def test_message_ttl_expires_what_is_not_acknowledged(
    api: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    consumer = api.subscribe(topic)
    producer = api.client.create_producer(topic)
    producer.send(b"old")
    path = f"persistent/public/rows/{name}"
    consumer.close()
    cluster.admin("POST", f"{path}/messageTTL?messageTTL=1")
    wait_for(
        lambda: (
            cluster.admin("POST", f"{path}/subscription/s/expireMessages/1") is None
            and cluster.admin("GET", f"{path}/stats")["subscriptions"]["s"]["msgBacklog"] == 0
        )
    )


def test_deduplication_stores_a_sequence_id_once(
    api: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    consumer = api.subscribe(topic)
    path = f"persistent/public/rows/{name}"
    cluster.admin("POST", f"{path}/deduplicationEnabled", True)
    wait_for(lambda: cluster.admin("GET", f"{path}/stats")["deduplicationStatus"] == "Enabled")
    options: dict[str, Any] = {"producer_name": "source", "batching_enabled": False}
    producer = api.client.create_producer(topic, **options)
    for number in (0, 1, 1, 0, 2):
        producer.send(b"%d" % number, sequence_id=number)
    producer.close()
    again = api.client.create_producer(topic, **options)
    assert again.last_sequence_id() == 2
    assert take(consumer, 3) == [b"0", b"1", b"2"]
    assert api.is_quiet(consumer)


def test_partitioned_topic_over_both_brokers_delivers_all(
    api: Api, cluster: ClusterProcess, name: str, topic: str
) -> None:
    cluster.admin("PUT", f"persistent/public/rows/{name}/partitions", 4)
    assert len(api.client.get_topic_partitions(topic)) == 4
    consumer = api.subscribe(topic)
    producer = api.client.create_producer(topic)
    for number in range(40):
        producer.send_async(b"%02d" % number, None, partition_key=str(number))
    producer.flush()
    assert sorted(take(consumer, 40)) == [b"%02d" % number for number in range(40)]


@pytest.mark.parametrize("kind", ["Exclusive", "Shared", "Failover", "KeyShared"])
def test_non_persistent_topic_serves_connected_consumers_of_every_type(
    api: Api, cluster: ClusterProcess, name: str, kind: str
) -> None:
    topic = f"non-persistent://public/rows/{name}"
    producer = api.client.create_producer(topic, batching_enabled=False)
    producer.send(b"dropped")
    consumer = api.subscribe(topic, consumer_type=getattr(api.module.ConsumerType, kind))
    # The permits of a consumer may arrive at the broker after a message, which is dropped then.
    received: list[bytes] = []
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take, consumer, 1)
        while not taking.done():
            producer.send(b"live", partition_key="k")
            wait([taking], timeout=0.1)
        received = taking.result()
    assert received == [b"live"]
    assert topic not in cluster.admin("GET", "persistent/public/rows")
    consumer.close()
    producer.close()
