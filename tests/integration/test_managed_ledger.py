"""Trimming, truncate and terminate on a standalone server, with Apache's client and with ours."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from fakes.standalone_process import StandaloneProcess
from support import wait_for

import magnetar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop]

TIMEOUT_MS = 20_000
EARLIEST = pulsar.InitialPosition.Earliest
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.variables = {
        "MAGNETAR_STANDALONE_MANAGED_LEDGER_MAX_ENTRIES_PER_LEDGER": "10",
        "MAGNETAR_STANDALONE_MANAGED_LEDGER_MIN_LEDGER_ROLLOVER_TIME_MINUTES": "0",
        "MAGNETAR_STANDALONE_RETENTION_CHECK_INTERVAL_IN_SECONDS": "1",
    }
    process.start()
    yield process
    process.end()


@pytest.fixture(scope="module")
def apache(server: StandaloneProcess) -> Iterator[pulsar.Client]:
    client = pulsar.Client(f"pulsar://localhost:{server.pulsar_port}", operation_timeout_seconds=10)
    yield client
    client.close()


@pytest.fixture(scope="module")
def ours(server: StandaloneProcess) -> Iterator[magnetar.Client]:
    client = magnetar.Client(server.service_url, operation_timeout_seconds=10)
    yield client
    client.shutdown()


@pytest.fixture
def topic() -> str:
    return f"topic-{next(NUMBERS)}"


@pytest.fixture
def admin(server: StandaloneProcess) -> Callable[..., Any]:
    def ask(method: str, topic: str, what: str = "") -> Any:
        path = f"/admin/v2/persistent/public/default/{topic}/{what}"
        request = urllib.request.Request(
            f"http://localhost:{server.http_port}{path}", method=method
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    return ask


@pytest.fixture
def command(server: StandaloneProcess) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        environment = os.environ | {"MAGNETAR_ADMIN_URL": f"http://localhost:{server.http_port}"}
        done = subprocess.run(
            [sys.executable, "-m", "magnetar.cli.main", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def publish(client: Any, topic: str, count: int) -> None:
    producer = client.create_producer(topic, batching_enabled=False)
    for number in range(count):
        producer.send(b"%d" % number)
    producer.close()


def test_acknowledged_ledgers_are_trimmed_and_later_ones_kept(apache, topic, admin, server) -> None:
    consumer = apache.subscribe(topic, "s", initial_position=EARLIEST)
    publish(apache, topic, 35)
    assert len(admin("GET", topic, "internalStats")["ledgers"]) == 4
    for _ in range(25):
        consumer.acknowledge(consumer.receive(TIMEOUT_MS))
    wait_for(lambda: len(admin("GET", topic, "internalStats")["ledgers"]) == 2)
    stats = admin("GET", topic, "internalStats")
    assert [each["entries"] for each in stats["ledgers"]] == [10, 5]
    assert stats["ledgers"][0]["firstIndex"] == 20
    wait_for(lambda: admin("GET", topic, "internalStats")["ledgersToDelete"] == 0)
    reader = apache.create_reader(topic, pulsar.MessageId.earliest)
    assert reader.read_next(TIMEOUT_MS).data() == b"20", "earliest is the first kept entry"
    reader.seek(pulsar.MessageId(-1, 1, 0, -1))
    assert reader.read_next(TIMEOUT_MS).data() == b"20", "a trimmed message id is clamped"
    consumer.close()
    server.kill()
    server.start()
    reader = apache.create_reader(topic, pulsar.MessageId.earliest)
    assert reader.read_next(TIMEOUT_MS).data() == b"20"
    consumer = apache.subscribe(topic, "s", initial_position=EARLIEST)
    assert consumer.receive(TIMEOUT_MS).data() == b"25"
    reader.close()
    consumer.close()


def test_truncate_empties_the_topic_and_consumers_continue(
    apache, ours, topic, command, admin
) -> None:
    theirs = apache.subscribe(topic, "theirs", initial_position=EARLIEST)
    mine = ours.subscribe(topic, "mine", initial_position=magnetar.InitialPosition.Earliest)
    publish(apache, topic, 25)
    command("topics", "truncate", topic)
    stats = admin("GET", topic, "internalStats")
    assert stats["ledgers"] == []
    assert {each["numberOfEntriesInBacklog"] for each in stats["cursors"].values()} == {0}
    while True:  # receive the messages that were delivered before the truncation
        try:
            theirs.acknowledge(theirs.receive(500))
        except pulsar.Timeout:
            break
    publish(apache, topic, 1)
    assert theirs.receive(TIMEOUT_MS).data() == b"0"
    assert admin("GET", topic, "internalStats")["ledgers"][0]["firstIndex"] == 25
    theirs.close()
    mine.close()


def test_apaches_consumer_reads_a_terminated_topic_to_its_end(apache, topic, admin) -> None:
    consumer = apache.subscribe(topic, "s", initial_position=EARLIEST)
    producer = apache.create_producer(topic, batching_enabled=False)
    for number in range(3):
        last = producer.send(b"%d" % number)
    answer = admin("POST", topic, "terminate")
    assert (answer["ledgerId"], answer["entryId"]) == (last.ledger_id(), last.entry_id())
    assert admin("POST", topic, "terminate") == answer
    with pytest.raises(pulsar.TopicTerminated):
        apache.create_producer(topic)
    for number in range(3):
        message = consumer.receive(TIMEOUT_MS)
        assert message.data() == b"%d" % number
        consumer.acknowledge(message)
    with pytest.raises(pulsar.Timeout):
        consumer.receive(2_000)
    assert consumer.is_connected(), "the client takes REACHED_END_OF_TOPIC for an error"
    reader = apache.create_reader(topic, pulsar.MessageId.earliest)
    while reader.has_message_available():
        reader.read_next(TIMEOUT_MS)
    assert not reader.has_message_available()
    reader.close()
    consumer.close()


def test_terminate_refuses_later_sends_of_our_client(ours, topic, command, admin) -> None:
    consumer = ours.subscribe(topic, "s", initial_position=magnetar.InitialPosition.Earliest)
    producer = ours.create_producer(topic, batching_enabled=False)
    producer.send(b"0")
    said = command("topics", "terminate", topic)
    assert said.startswith(f"terminated {topic}: its last message is ")
    with pytest.raises(magnetar.TopicTerminated):
        producer.send(b"late")
    with pytest.raises(magnetar.TopicTerminated):
        ours.create_producer(topic)
    consumer.acknowledge(consumer.receive(TIMEOUT_MS))
    with pytest.raises(magnetar.Timeout):
        consumer.receive(500)
    assert consumer.is_connected()
    assert admin("GET", topic, "internalStats")["state"] == "terminated"
    assert "terminated" in command("topics", "stats-internal", topic)
    consumer.close()


def test_unknown_topics_are_refused(admin) -> None:
    for method, what in (("POST", "terminate"), ("DELETE", "truncate"), ("GET", "internalStats")):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            admin(method, "no-such-topic", what)
