"""Administration of a standalone server by the command line, seen by both clients."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pulsar
import pytest
from fakes.standalone_process import StandaloneProcess

import magnetar
from magnetar.local_process import magnetar_command

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("policies"))
    process.start()
    yield process
    process.end()


def cli(server: StandaloneProcess, *words: str) -> str:
    first, *rest = words
    url = f"--admin-url=http://localhost:{server.http_port}"
    done = subprocess.run(
        [*magnetar_command(first), *rest, url], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_clients_use_a_namespace_from_creation_to_deletion(server: StandaloneProcess) -> None:
    cli(server, "tenants", "create", "acme")
    cli(server, "namespaces", "create", "acme/orders", "-b", "2")
    apache = pulsar.Client(
        f"pulsar://localhost:{server.pulsar_port}",
        operation_timeout_seconds=5,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    ours = magnetar.Client(server.service_url, operation_timeout_seconds=5)
    for number, client in enumerate((apache, ours)):
        topic = f"acme/orders/t{number}"
        producer = client.create_producer(topic)
        producer.send(b"before")
        cli(server, "topics", "unload", topic)
        producer.send(b"after")  # the client has found the topic again
        stats = json.loads(cli(server, "topics", "stats", topic, "--json"))
        assert stats["msgCount"] == 2
        found = json.loads(cli(server, "topics", "lookup", topic))
        assert found["brokerUrl"] == f"pulsar://127.0.0.1:{server.pulsar_port}"
        producer.close()
    topics = cli(server, "namespaces", "topics", "acme/orders").split()
    assert topics == [f"persistent://acme/orders/t{number}" for number in range(2)]
    cli(server, "namespaces", "delete", "acme/orders", "--force")
    with pytest.raises(pulsar.PulsarException):
        apache.create_producer("acme/orders/t0")
    with pytest.raises(magnetar.PulsarException):
        ours.create_producer("acme/orders/t0")
    cli(server, "tenants", "delete", "acme")
    apache.close()
    ours.close()


def test_a_policy_is_set_at_each_level_and_kept_over_a_restart(server: StandaloneProcess) -> None:
    cli(server, "topics", "create", "t")
    cli(server, "namespaces", "set-retention", "public/default", "-t", "3h", "-s", "10G")
    cli(server, "topics", "set-retention", "t", "-t", "-1", "-s", "-1")
    server.kill()
    server.start()
    in_namespace = json.loads(cli(server, "namespaces", "get-retention", "public/default"))
    assert in_namespace == {"retentionTimeInMinutes": 180, "retentionSizeInMB": 10240}
    applied = json.loads(cli(server, "topics", "get-retention", "t", "--applied"))
    assert applied == {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    cli(server, "topics", "remove-retention", "t")
    assert json.loads(cli(server, "topics", "get-retention", "t", "-ap")) == in_namespace
