"""What an administrator does with two brokers and three bookies, each a process of its own:
redirects between HTTP ports, deletions, growth, unloading, trims; also while the owner is killed.

Requests follow redirects from a broker of their choice. Apache's client publishes and consumes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pulsar
import pytest
from support import skip_without_zookeeper, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper, pytest.mark.real_loop]

TIMEOUT_MS = 30_000
NAMESPACE = "persistent/public/two"
BUNDLES = 8
SERVED_S = 60.0
NUMBERS = itertools.count()


class Cluster:
    """`magnetar local-cluster`, which starts a process again when it was killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "cluster"
        command = [sys.executable, "-m", "magnetar.cli.main", "local-cluster", "--restart"]
        counts = ["--zookeepers", "1", "--bookies", "3", "--brokers", "2"]
        with (directory / "launcher.log").open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(self.directory), *counts],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (directory / "launcher.log").read_text()
        self.pulsar_url: str = json.loads(line)["pulsar_url"]

    @property
    def brokers(self) -> list[dict[str, Any]]:
        """As they run now: pid and ports."""
        described = json.loads((self.directory / "cluster.json").read_text())
        return [each for each in described["processes"] if each["role"] == "broker"]

    def ask(
        self, broker: int, method: str, path: str, body: object = None, *, follow: bool = True
    ) -> httpx.Response:
        """Ask the broker with this number, over HTTP. Raises httpx.HTTPError."""
        return httpx.request(
            method,
            f"http://127.0.0.1:{self.brokers[broker]['ports']['http']}{path}",
            json=body,
            follow_redirects=follow,
            timeout=60.0,
        )

    def admin(self, method: str, path: str, body: object = None, *, broker: int = 0) -> Any:
        answer = self.ask(broker, method, f"/admin/v2/{path}", body)
        assert answer.is_success, (path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def owner(self, topic: str, *, first: int = 0, domain: str = "persistent") -> int:
        """Which broker serves the topic. The one that is asked takes a bundle without owner."""
        found = self.ask(first, "GET", f"/lookup/v2/topic/{domain}/public/two/{topic}").json()
        port = int(found["httpUrl"].rpartition(":")[2])
        [owner] = [n for n, each in enumerate(self.brokers) if each["ports"]["http"] == port]
        return owner

    def kill(self, broker: int) -> None:
        os.kill(self.brokers[broker]["pid"], signal.SIGKILL)

    def wait_back(self, pids: list[int]) -> None:
        """All brokers run and answer; none has a pid that was killed."""

        def is_back() -> bool:
            if any(each["pid"] in pids for each in self.brokers):
                return False
            try:
                return all(self.ask(n, "GET", "/health").is_success for n in range(2))
            except httpx.HTTPError:
                return False

        wait_for(is_back, deadline_s=SERVED_S)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    skip_without_zookeeper()
    cluster = Cluster(tmp_path_factory.mktemp("two-brokers"))
    cluster.admin("PUT", "namespaces/public/two", {"bundles": {"numBundles": BUNDLES}})
    yield cluster
    cluster.end()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[pulsar.Client]:
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


def topics_on_both(cluster: Cluster, client: pulsar.Client, prefix: str) -> list[str]:
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


def repeated(cluster: Cluster, method: str, path: str, body: object = None) -> int:
    """Ask until a broker has an answer: one of them may be dead. Returns the status."""
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


def killed_meanwhile(cluster: Cluster, topic: str, after_s: float, act: Any) -> None:
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
    cluster: Cluster, client: pulsar.Client, topic: str
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
    cluster: Cluster, client: pulsar.Client, topic: str
) -> None:
    for owner, name in enumerate(topics_on_both(cluster, client, topic)):
        path = f"{NAMESPACE}/{name}"
        cluster.admin("DELETE", path, broker=1 - owner)
        for broker in range(2):
            listed = cluster.admin("GET", NAMESPACE, broker=broker)
            assert f"persistent://public/two/{name}" not in listed
        publish(client, name, b"new")
        assert stored(client, name) == [b"new"]


def test_a_partitioned_topic_over_both_brokers_grows_and_goes(
    cluster: Cluster, client: pulsar.Client, topic: str
) -> None:
    path = f"{NAMESPACE}/{topic}"
    cluster.admin("PUT", f"{path}/partitions", 4, broker=1)
    consumer = client.subscribe(full(topic), "s", initial_position=pulsar.InitialPosition.Earliest)
    publish(client, topic, *(b"%d" % n for n in range(20)))
    cluster.admin("POST", f"{path}/partitions", 8, broker=0)
    parts = [f"{topic}-partition-{n}" for n in range(8)]
    assert {cluster.owner(part) for part in parts} == {0, 1}
    grown = pulsar.Client(cluster.pulsar_url)  # it has not seen four partitions
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
    cluster: Cluster, client: pulsar.Client, topic: str
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
    cluster: Cluster, client: pulsar.Client, topic: str
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
    cluster: Cluster, client: pulsar.Client, topic: str, after_s: float
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
    cluster: Cluster, client: pulsar.Client, topic: str
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
    cluster: Cluster, client: pulsar.Client, topic: str
) -> None:
    """One subscription has acknowledged all, another one half. Each unload closes a ledger."""
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
    # The last acknowledgement may not have been sent when the consumer was closed.
    assert list(dict.fromkeys(found))[-21:] == [b"%d" % number for number in range(20, 41)]
