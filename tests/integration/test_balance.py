"""Real brokers spread bundles at a takeover, and move some to a broker that restarts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import httpx
import pulsar
import pytest
from fakes.cluster_process import ClusterProcess
from support import skip_without_zookeeper, wait_for

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper, pytest.mark.real_loop]

TIMEOUT_MS = 30_000
TOPICS = [f"persistent://public/default/spread-{number}" for number in range(8)]


def bundles(cluster: ClusterProcess) -> list[int]:
    """The number of bundles that each broker says it owns. -1: the broker does not answer."""
    found = []
    for broker in range(2):
        try:
            text = cluster.ask(broker, "GET", "/metrics").text
        except httpx.HTTPError:
            return [-1, -1]
        lines = [line for line in text.splitlines() if line.startswith("magnetar_bundles ")]
        found += [int(float(line.split()[1])) for line in lines] or [-1]
    return found


class Publisher(threading.Thread):
    """Publishes numbers to all topics in turn until it is told to stop."""

    def __init__(self, client: pulsar.Client) -> None:
        super().__init__()
        self.sent = [0] * len(TOPICS)
        self.done = threading.Event()
        self._producers = [
            client.create_producer(topic, send_timeout_millis=TIMEOUT_MS) for topic in TOPICS
        ]

    def run(self) -> None:
        while not self.done.is_set():
            for place, producer in enumerate(self._producers):
                producer.send(b"%d" % self.sent[place])
                self.sent[place] += 1


def stored(client: Any, topic: str) -> list[int]:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    found: list[int] = []
    while reader.has_message_available():
        found.append(int(reader.read_next(timeout_millis=TIMEOUT_MS).data()))
    reader.close()
    return found


def test_two_brokers_share_the_default_namespace_also_after_one_has_died(tmp_path: Path) -> None:
    skip_without_zookeeper()
    cluster = ClusterProcess(tmp_path, balances=True)
    client = pulsar.Client(
        cluster.pulsar_url,
        operation_timeout_seconds=30,
        logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null"),
    )
    try:
        publisher = Publisher(client)
        assert bundles(cluster) == [2, 2]
        publisher.start()
        pid = cluster.brokers[1]["pid"]
        cluster.kill(1)
        wait_for(lambda: cluster.ask(0, "GET", "/metrics").text.count("magnetar_bundles 4.0"))
        cluster.wait_back([pid])
        wait_for(lambda: bundles(cluster) == [2, 2], deadline_s=30.0)
        moved = publisher.sent[:]
        wait_for(lambda: all(now > then for now, then in zip(publisher.sent, moved, strict=True)))
        publisher.done.set()
        publisher.join(60.0)
        assert not publisher.is_alive()
        for topic, sent in zip(TOPICS, publisher.sent, strict=True):
            found = stored(client, topic)
            assert list(dict.fromkeys(found)) == list(range(sent)), topic
    finally:
        client.close()
        cluster.end()
