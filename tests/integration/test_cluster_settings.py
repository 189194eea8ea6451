"""Messaging features that depend on a broker's settings, against a cluster with such settings."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_api import CLIENTS, Api, api_of, take
from fakes.cluster_process import ClusterProcess
from support import skip_without_zookeeper, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper, pytest.mark.real_loop]

NUMBERS = itertools.count()
SETTINGS = {"enable_non_persistent_topics": False, "retention_check_interval_in_seconds": 1}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    skip_without_zookeeper()
    cluster = ClusterProcess(
        tmp_path_factory.mktemp("settings"), bookies=1, brokers=1, settings=SETTINGS
    )
    yield cluster
    cluster.end()


@pytest.fixture(scope="module", params=CLIENTS)
def api(request: pytest.FixtureRequest, cluster: ClusterProcess) -> Iterator[Api]:
    with api_of(cluster, request.param) as api:
        yield api


@pytest.fixture
def name() -> str:
    return f"t{next(NUMBERS)}"


def test_non_persistent_topics_are_refused_where_they_are_switched_off(
    api: Api, cluster: ClusterProcess, name: str
) -> None:
    topic = f"non-persistent://public/default/{name}"
    with pytest.raises(api.module.PulsarException):
        api.client.create_producer(topic)
    with pytest.raises(api.module.PulsarException):
        api.subscribe(topic)
    refused = cluster.ask(0, "PUT", f"/admin/v2/non-persistent/public/default/{name}")
    assert "non-persistent topics are switched off" in refused.json()["reason"]
    consumer = api.subscribe(name)
    api.client.create_producer(name).send(b"stored")
    assert take(consumer, 1) == [b"stored"]


def test_messages_are_deleted_without_a_durable_subscription(
    api: Api, cluster: ClusterProcess, name: str
) -> None:
    kept, deleted = f"{name}-kept", f"{name}-deleted"
    waiting = api.subscribe(kept)
    for topic in (kept, deleted):
        producer = api.client.create_producer(topic)
        producer.send(b"message")
        producer.close()
        # Its ledger is closed. The open ledger of a topic is never deleted.
        cluster.admin("PUT", f"persistent/public/default/{topic}/unload")

    def stored_bytes(topic: str) -> int:
        stats = cluster.admin("GET", f"persistent/public/default/{topic}/stats")
        return int(stats["storageSize"])

    wait_for(lambda: stored_bytes(deleted) == 0)
    assert api.is_quiet(api.subscribe(deleted))
    assert stored_bytes(kept) > 0
    assert take(waiting, 1) == [b"message"]
    wait_for(lambda: stored_bytes(kept) == 0)
