"""The clients with which tests use a cluster of processes: Apache's, and both of ours.

All clients have the same interface, so one test can run with each.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pulsar
from fakes.blocking import blocking_client

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fakes.cluster_process import ClusterProcess

CLIENTS = ("apache", "ours over TCP", "asyncio over gRPC")
TIMEOUT_MS = 30_000
QUIET_MS = 300


@dataclass
class Api:
    """A client, and the module that has its names."""

    module: Any
    client: Any

    def subscribe(self, topic: Any, name: str = "s", **options: Any) -> Any:
        options.setdefault("initial_position", self.module.InitialPosition.Earliest)
        return self.client.subscribe(topic, name, **options)

    def is_quiet(self, consumer: Any) -> bool:
        try:
            consumer.receive(timeout_millis=QUIET_MS)
        except self.module.Timeout:
            return True
        return False


@contextmanager
def api_of(cluster: ClusterProcess, client: str) -> Iterator[Api]:
    """One of CLIENTS."""
    if client == "apache":
        logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null")
        apache = pulsar.Client(cluster.pulsar_url, operation_timeout_seconds=30, logger=logger)
        yield Api(pulsar, apache)
        apache.close()
    elif client == "ours over TCP":
        with magnetar.Client(cluster.pulsar_url, operation_timeout_seconds=30) as ours:
            yield Api(magnetar, ours)
    else:
        with blocking_client(cluster.service_url, operation_timeout_seconds=30) as ours:
            yield Api(magnetar, ours)


def take(consumer: Any, count: int) -> list[bytes]:
    """Receive and acknowledge this number of messages."""
    found = []
    for _ in range(count):
        message = consumer.receive(timeout_millis=TIMEOUT_MS)
        consumer.acknowledge(message)
        found.append(message.data())
    return found
