"""An administrator's work with two brokers and three bookies, each a process of its own:
redirects between HTTP ports, deletions, growth, unloading, trims; also while the owner is killed.

Requests follow redirects from a broker of their choice. Apache's client publishes and consumes.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pulsar
import pytest
from fakes.cluster_process import SERVED_S, ClusterProcess
from support import skip_without_zookeeper

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper, pytest.mark.real_loop]

TIMEOUT_MS = 30_000
NAMESPACE = "persistent/public/two"
BUNDLES = 8
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    skip_without_zookeeper()
    cluster = ClusterProcess(tmp_path_factory.mktemp("two-brokers"))
    cluster.admin("PUT", "namespaces/public/two", {"bundles": {"numBundles": BUNDLES}})
    yield cluster
    cluster.end()


@pytest.fixture
def client(cluster: ClusterProcess) -> Iterator[pulsar.Client]:
    client = pulsar.Client(
        cluster.pulsar_url,
        operation_timeout_seconds=30,
        logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null"),
    )
    yield client
    client.close()


@pytest.fixture
def topic() -> str:
    return f"two{next(NUMBERS)}"


def full(topic: str) -> str:
    return f"persistent://public/two/{topic}"


def stored(client: pulsar.Client, topic: str) -> list[bytes]:
    reader = client.create_reader(full(topic), pulsar.MessageId.earliest)
    found: list[bytes] = []
    while reader.has_message_available():
        found.append(reader.read_next(timeout_millis=TIMEOUT_MS).data())
    reader.close()
    return found


def publish(client: pulsar.Client, topic: str, *contents: bytes) -> None:
    producer = client.create_producer(full(topic), send_timeout_millis=TIMEOUT_MS)
    for content in contents:
        producer.send(content)
    producer.close()


def topics_on_both(cluster: ClusterProcess, client: pulsar.Client, prefix: str) -> list[str]:
    """One topic for each broker."""
    found: dict[int, str] = {}
    for number in range(40):
        topic = f"{prefix}-{number}"
        found.setdefault(cluster.owner(topic, first=number % 2), topic)
        if len(found) == 2:
            for topic in found.values():
                publish(client, topic, b"0")
            return [found[0], found[1]]
    raise AssertionError(f"all topics are at one broker: {found}")


def repeated(cluster: ClusterProcess, method: str, path: str, body: object = None) -> int:
    """Ask the brokers in turn until one answers, because one may be dead. Returns the status."""
    deadline = time.monotonic() + SERVED_S
    for broker in itertools.cycle((0, 1)):
        try:
            status = cluster.ask(broker, method, f"/admin/v2/{path}", body).status_code
        except httpx.HTTPError:
            status = 599
        if status < 500:
            return status
        assert time.monotonic() < deadline, (path, status)
        time.sleep(0.2)
    raise AssertionError


def killed_meanwhile(cluster: ClusterProcess, topic: str, after_s: float, act: Any) -> None:
    """Call `act` on a thread, and kill the topic's owner after a while."""
    owner = cluster.owner(topic)
    pid = cluster.brokers[owner]["pid"]
    thread = threading.Thread(target=act)
    thread.start()
    time.sleep(after_s)
    cluster.kill(owner)
    thread.join(SERVED_S * 2)
    assert not thread.is_alive()
    cluster.wait_back([pid])


def test_each_broker_redirects_to_the_other(
    cluster: ClusterProcess, client: pulsar.Client, topic: str
) -> None:
    for owner, name in enumerate(topics_on_both(cluster, client, topic)):
        path = f"/admin/v2/{NAMESPACE}/{name}/stats"
        assert cluster.ask(owner, "GET", path, follow=False).status_code == 200
        moved = cluster.ask(1 - owner, "GET", path, follow=False)
        assert moved.status_code == 307, moved.text
        port = cluster.brokers[owner]["ports"]["http"]
        assert moved.headers["location"] == f"http://127.0.0.1:{port}{path}"
        assert cluster.ask(1 - owner, "GET", path).json()["msgInCounter"] == 1


def test_a_topic_is_deleted_through_the_other_broker(
    cluster: ClusterProcess, client: pulsar.Client, topic: str
) -> None:
    for owner, name in enumerate(topics_on_both(cluster, client, topic)):
        path = f"{NAMESPACE}/{name}"
        cluster.admin("DELETE", path, broker=1 - owner)
        for broker in range(2):
            listed = cluster.admin("GET", NAMESPACE, broker=broker)
            assert f"persistent://public/two/{name}" not in listed
        publish(client, name, b"new")
        assert stored(client, name) == [b"new"]


def test_a_partitioned_topic_over_both_brokers_grows_and_is_deleted(
    cluster: ClusterProcess, client: pulsar.Client, topic: str
) -> None:
    path = f"{NAMESPACE}/{topic}"
    cluster.admin("PUT", f"{path}/partitions", 4, broker=1)
    consumer = client.subscribe(full(topic), "s", initial_position=pulsar.InitialPosition.Earliest)
    publish(client, topic, *(b"%d" % n for n in range(20)))
    cluster.admin("POST", f"{path}/partitions", 8, broker=0)
    parts = [f"{topic}-partition-{n}" for n in range(8)]
    assert {cluster.owner(part) for part in parts} == {0, 1}
    grown = pulsar.Client(cluster.pulsar_url)  # this client has not seen four partitions
    publish(grown, topic, *(b"%d" % n for n in range(20, 60)))
    assert sum(len(stored(grown, part)) > 0 for part in parts) > 4
    grown.close()
    consumer.close()
    for broker in range(2):
        assert cluster.admin("GET", f"{path}/partitions", broker=broker)["partitions"] == 8
    cluster.admin("DELETE", f"{path}/partitions", broker=1)
    for broker in range(2):
        listed = cluster.admin("GET", NAMESPACE, broker=broker)
        assert not [name for name in listed if f"/{topic}-partition-" in name]


def test_non_persistent_topics_of_both_brokers_are_listed_by_each(
    cluster: ClusterProcess, client: pulsar.Client, topic: str
) -> None:
    names = {f"non-persistent://public/two/{topic}-{number}" for number in range(8)}
    producers = [client.create_producer(name) for name in names]
    for broker in range(2):
        listed = cluster.admin("GET", "non-persistent/public/two", broker=broker)
        assert names <= set(listed)
        listed = cluster.admin(
            "GET", "namespaces/public/two/topics?mode=NON_PERSISTENT", broker=broker
        )
        assert names <= set(listed)
    assert {cluster.owner(f"{topic}-{number}", domain="non-persistent") for number in range(8)} == {
        0,
        1,
    }
    for producer in producers:
        producer.close()


def test_unloading_a_namespace_moves_topics_and_loses_nothing(
    cluster: ClusterProcess, client: pulsar.Client, topic: str
) -> None:
    names = topics_on_both(cluster, client, topic)
    producers = [
        client.create_producer(full(name), send_timeout_millis=TIMEOUT_MS) for name in names
    ]
    for number in range(1, 41):
        for producer in producers:
            producer.send(b"%d" % number)
        if number % 20 == 0:
            cluster.admin("PUT", "namespaces/public/two/unload", broker=number // 20 % 2)
    for name, producer in zip(names, producers, strict=True):
        producer.close()
        found = stored(client, name)
        assert list(dict.fromkeys(found)) == [b"%d" % number for number in range(41)]


@pytest.mark.parametrize("after_s", [0.0, 0.05])
def test_a_deletion_survives_the_owners_death(
    cluster: ClusterProcess, client: pulsar.Client, topic: str, after_s: float
) -> None:
    publish(client, topic, *(b"%d" % n for n in range(20)))
    path = f"{NAMESPACE}/{topic}"

    def delete() -> None:
        assert repeated(cluster, "DELETE", f"{path}?force=true") in (204, 404)

    killed_meanwhile(cluster, topic, after_s, delete)
    assert repeated(cluster, "DELETE", f"{path}?force=true") in (204, 404)
    publish(client, topic, b"new")
    assert stored(client, topic) == [b"new"]


def test_growth_survives_the_owners_death(
    cluster: ClusterProcess, client: pulsar.Client, topic: str
) -> None:
    path = f"{NAMESPACE}/{topic}"
    cluster.admin("PUT", f"{path}/partitions", 2)
    consumer = client.subscribe(full(topic), "s", initial_position=pulsar.InitialPosition.Earliest)
    publish(client, topic, b"0", b"1")
    consumer.close()

    def grow() -> None:
        repeated(cluster, "POST", f"{path}/partitions", 12)

    killed_meanwhile(cluster, f"{topic}-partition-0", 0.05, grow)
    assert repeated(cluster, "POST", f"{path}/partitions", 13) == 204
    assert cluster.admin("GET", f"{path}/partitions")["partitions"] == 13
    for number in range(13):
        stats = cluster.admin("GET", f"{path}-partition-{number}/stats")
        assert "s" in stats["subscriptions"], number
    again = pulsar.Client(cluster.pulsar_url, operation_timeout_seconds=30)
    consumer = again.subscribe(full(topic), "s")
    publish(again, topic, *(b"%d" % number for number in range(2, 60)))
    found = {consumer.receive(timeout_millis=TIMEOUT_MS).data() for _ in range(60)}
    assert found == {b"%d" % number for number in range(60)}
    again.close()


def test_trims_survive_the_owners_death(
    cluster: ClusterProcess, client: pulsar.Client, topic: str
) -> None:
    """One subscription has acknowledged all messages, another one half of them. Each unload closes
    a ledger."""
    path = f"{NAMESPACE}/{topic}"
    slow = client.subscribe(full(topic), "slow", initial_position=pulsar.InitialPosition.Earliest)
    fast = client.subscribe(full(topic), "fast", initial_position=pulsar.InitialPosition.Earliest)
    producer = client.create_producer(full(topic), send_timeout_millis=TIMEOUT_MS)
    for number in range(40):
        producer.send(b"%d" % number)
        if number % 10 == 9:
            cluster.admin("PUT", f"{path}/unload")
    for consumer, count in ((fast, 40), (slow, 20)):
        for _ in range(count):
            message = consumer.receive(timeout_millis=TIMEOUT_MS)
        consumer.acknowledge_cumulative(message)
        consumer.close()
    killed_meanwhile(cluster, topic, 0.1, lambda: None)
    producer.send(b"40")
    producer.close()
    found: list[bytes] = []
    slow = client.subscribe(full(topic), "slow")
    while b"40" not in found:
        found.append(slow.receive(timeout_millis=TIMEOUT_MS).data())
    # The consumer may have closed before it sent its last acknowledgement.
    assert list(dict.fromkeys(found))[-21:] == [b"%d" % number for number in range(20, 41)]
