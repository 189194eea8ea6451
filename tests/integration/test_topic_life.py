"""Topics are deleted below their clients, and unknown namespaces refused, by a standalone server:
with Apache's client, with ours and with the command line."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from fakes.standalone_process import StandaloneProcess

import magnetar
from magnetar.client import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RECONNECT_S = 4.0
"""In this time a client has tried to reconnect several times."""

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.start()
    yield process
    process.end()


@pytest.fixture
def topic() -> str:
    return f"persistent://public/default/life-{next(_numbers)}"


@pytest.fixture(scope="module", params=["apache", "ours"])
def clients(request: pytest.FixtureRequest, server: StandaloneProcess) -> Callable[[], Any]:
    """Opens a client."""

    def apache() -> pulsar.Client:
        return pulsar.Client(
            f"pulsar://localhost:{server.pulsar_port}",
            operation_timeout_seconds=10,
            logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
        )

    def ours() -> magnetar.Client:
        return magnetar.Client(server.service_url, operation_timeout_seconds=10)

    return apache if request.param == "apache" else ours


def admin(server: StandaloneProcess, method: str, path: str) -> tuple[int, Any]:
    url = f"http://localhost:{server.http_port}/admin/v2/{path}"
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            body = answer.read()
            return answer.status, json.loads(body) if body else None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def path_of(topic: str) -> str:
    return topic.replace("://", "/")


def listed(server: StandaloneProcess) -> list[str]:
    return admin(server, "GET", "persistent/public/default")[1]


def test_a_topic_with_clients_is_not_deleted(
    server: StandaloneProcess, clients: Callable[[], Any], topic: str
) -> None:
    client = clients()
    producer = client.create_producer(topic)
    producer.send(b"0")
    status, refusal = admin(server, "DELETE", path_of(topic))
    assert status == 412
    assert "1 connected producers" in refusal["reason"]
    producer.send(b"1")
    producer.close()
    assert admin(server, "DELETE", path_of(topic)) == (204, None)
    assert topic not in listed(server)
    assert admin(server, "DELETE", path_of(topic))[0] == 404
    client.close()


def test_clients_of_a_deleted_topic_do_not_create_it_again(
    server: StandaloneProcess, clients: Callable[[], Any], topic: str
) -> None:
    client, other = clients(), clients()
    producer = client.create_producer(topic)
    client.subscribe(topic, "s")
    producer.send(b"0")
    assert admin(server, "DELETE", f"{path_of(topic)}?force=true") == (204, None)
    until = time.monotonic() + RECONNECT_S
    while time.monotonic() < until:
        assert topic not in listed(server)
        time.sleep(0.2)
    fresh = other.create_producer(topic)  # a new client may create the topic
    fresh.send(b"1")
    is_apache = isinstance(other, pulsar.Client)
    earliest = pulsar.MessageId.earliest if is_apache else magnetar.MessageId.earliest
    reader = other.create_reader(topic, earliest)
    assert reader.read_next(timeout_millis=10_000).data() == b"1"
    client.close()
    other.close()


@pytest.mark.parametrize("action", ["produce", "subscribe"])
def test_an_unknown_namespace_is_refused_until_it_is_created(
    server: StandaloneProcess, clients: Callable[[], Any], action: str
) -> None:
    client = clients()
    namespace = f"acme{next(_numbers)}/orders"
    topic = f"persistent://{namespace}/t"

    def act() -> None:
        if action == "produce":
            client.create_producer(topic)
        else:
            client.subscribe(topic, "s")

    with pytest.raises((pulsar.TopicNotFound, errors.TopicNotFound)):
        act()
    command = [sys.executable, "-m", "magnetar.cli.main"]
    environment = os.environ | {"MAGNETAR_ADMIN_URL": f"http://localhost:{server.http_port}"}
    tenant = namespace.split("/")[0]
    for words in (("tenants", "create", tenant), ("namespaces", "create", namespace)):
        subprocess.run([*command, *words], env=environment, check=True, timeout=60)
    act()
    client.close()


def test_the_command_line_deletes_a_topic(server: StandaloneProcess, topic: str) -> None:
    environment = os.environ | {
        "MAGNETAR_ADMIN_URL": f"http://localhost:{server.http_port}",
        "MAGNETAR_SERVICE_URL": server.service_url,
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "magnetar.cli.main", *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    assert run("topics", "create", topic).returncode == 0
    done = run("topics", "delete", topic)
    assert (done.returncode, done.stdout) == (0, f"deleted {topic}\n")
    refused = run("topics", "delete", topic, "--force")
    assert refused.returncode == 1
    assert "does not exist" in refused.stderr
