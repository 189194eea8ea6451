"""Partitioned, non-persistent and system topics, lists and watchers, over both transports."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from fakes.standalone_process import StandaloneProcess

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

TIMEOUT_MS = 20_000
EARLIEST = pulsar.InitialPosition.Earliest


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.start()
    yield process
    process.end()


@pytest.fixture(scope="module")
def client(server: StandaloneProcess) -> Iterator[pulsar.Client]:
    client = pulsar.Client(
        f"pulsar://localhost:{server.pulsar_port}",
        operation_timeout_seconds=15,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    yield client
    client.close()


@pytest.fixture(scope="module")
def ours(server: StandaloneProcess) -> Iterator[magnetar.Client]:
    with magnetar.Client(server.service_url, operation_timeout_seconds=15) as client:
        yield client


@pytest.fixture
def admin(server: StandaloneProcess):
    def call(method: str, path: str, body: object = None) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"http://localhost:{server.http_port}/admin/v2/{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                answer = reply.read()
                return reply.status, json.loads(answer) if answer else None
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return call


@pytest.fixture
def cli(server: StandaloneProcess):
    def run(*arguments: str, code: int = 0) -> str:
        url = f"--admin-url=http://localhost:{server.http_port}"
        done = subprocess.run(
            [sys.executable, "-m", "magnetar.cli.main", *arguments, url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done
        return done.stdout if code == 0 else done.stderr

    return run


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"kind{next(_numbers)}"


def path(topic: str) -> str:
    return f"persistent/public/default/{topic}"


def drain(consumer: Any, count: int) -> list[Any]:
    messages = [consumer.receive(timeout_millis=TIMEOUT_MS) for _ in range(count)]
    for message in messages:
        consumer.acknowledge(message)
    return messages


# ---- partitioned topics --------------------------------------------------------------------------


def test_keys_spread_over_four_partitions_and_all_arrive(
    client: pulsar.Client, admin: Any, topic: str
) -> None:
    assert admin("PUT", f"{path(topic)}/partitions", 4) == (204, None)
    assert client.get_topic_partitions(topic) == [
        f"persistent://public/default/{topic}-partition-{index}" for index in range(4)
    ]
    consumer = client.subscribe(topic, "all", initial_position=EARLIEST)
    producer = client.create_producer(topic)
    for number in range(40):
        producer.send(b"%d" % number, partition_key=f"key-{number % 10}")
    got = drain(consumer, 40)
    assert sorted(int(message.data()) for message in got) == list(range(40))
    places: dict[str, set[int]] = {}
    for message in got:
        places.setdefault(message.partition_key(), set()).add(message.message_id().partition())
    assert all(len(partitions) == 1 for partitions in places.values())
    assert len(set.union(*places.values())) > 1
    status, stats = admin("GET", f"{path(topic)}/partitioned-stats")
    assert status == 200
    assert stats["metadata"]["partitions"] == 4
    assert stats["msgInCounter"] == 40
    assert sum(part["msgInCounter"] for part in stats["partitions"].values()) == 40
    assert len(stats["partitions"]) == 4
    assert stats["subscriptions"]["all"]["msgOutCounter"] == 40
    consumer.close()
    producer.close()


def test_a_reader_of_one_partition_finds_its_end(
    client: pulsar.Client, admin: Any, topic: str
) -> None:
    """The last message's id names the partition, as the ids of delivered messages do."""
    admin("PUT", f"{path(topic)}/partitions", 2)
    partition = f"{topic}-partition-0"
    client.create_producer(partition).send(b"only")
    reader = client.create_reader(partition, pulsar.MessageId.earliest)
    assert reader.has_message_available()
    assert reader.read_next(timeout_millis=TIMEOUT_MS).data() == b"only"
    assert not reader.has_message_available()


def test_our_client_sees_the_partitions(ours: magnetar.Client, admin: Any, topic: str) -> None:
    admin("PUT", f"{path(topic)}/partitions", 3)
    names = ours.get_topic_partitions(topic)
    assert names == [f"persistent://public/default/{topic}-partition-{index}" for index in range(3)]
    with ours.create_producer(names[2]) as producer:
        producer.send(b"two")
    consumer = ours.subscribe(names[2], "s", initial_position=magnetar.InitialPosition.Earliest)
    assert consumer.receive(timeout_millis=TIMEOUT_MS).data() == b"two"
    consumer.close()


def test_new_partitions_have_the_subscriptions_at_their_beginning(
    client: pulsar.Client, admin: Any, topic: str
) -> None:
    admin("PUT", f"{path(topic)}/partitions", 2)
    client.subscribe(topic, "old").close()
    assert admin("POST", f"{path(topic)}/partitions", 4) == (204, None)
    producer = client.create_producer(topic, batching_enabled=False)
    for number in range(20):
        producer.send(b"%d" % number, partition_key=str(number))
    producer.close()
    # A new subscription would begin at the latest message; this one existed before.
    consumer = client.subscribe(topic, "old")
    got = drain(consumer, 20)
    assert {message.message_id().partition() for message in got} >= {2, 3}
    consumer.close()


def test_the_number_of_partitions_never_shrinks(admin: Any, topic: str) -> None:
    admin("PUT", f"{path(topic)}/partitions", 3)
    for count in (3, 2, 0, -1, 10_001):
        status, refusal = admin("POST", f"{path(topic)}/partitions", count)
        assert status == 406
        assert refusal["reason"].endswith("expected 4 to 10000")
    assert admin("GET", f"{path(topic)}/partitions")[1]["partitions"] == 3
    assert admin("PUT", f"{path(topic)}/partitions", 0)[0] == 406
    assert admin("PUT", f"{path(topic)}/partitions", 3)[0] == 409
    assert admin("PUT", path(topic))[0] == 409


def test_names_of_partitions_are_reserved(client: pulsar.Client, admin: Any, topic: str) -> None:
    status, refusal = admin("PUT", path(f"{topic}-partition-3"))
    assert status == 412
    assert f"{topic} has 0 partitions" in refusal["reason"]
    with pytest.raises(pulsar.PulsarException):
        client.create_producer(f"{topic}-partition-3")
    assert admin("PUT", f"{path(f'{topic}-partition-0')}/partitions", 2)[0] == 412
    admin("PUT", f"{path(topic)}/partitions", 2)
    client.create_producer(f"{topic}-partition-1").close()
    with pytest.raises(pulsar.PulsarException):
        client.create_producer(f"{topic}-partition-2")


def test_requests_for_a_subscription_reach_all_partitions(
    client: pulsar.Client, admin: Any, topic: str
) -> None:
    admin("PUT", f"{path(topic)}/partitions", 3)
    assert admin("PUT", f"{path(topic)}/subscription/made") == (204, None)
    assert admin("PUT", f"{path(topic)}/subscription/made")[0] == 409
    assert admin("GET", f"{path(topic)}/subscriptions") == (200, ["made"])
    for index in range(3):
        part = path(f"{topic}-partition-{index}")
        assert admin("GET", f"{part}/subscriptions") == (200, ["made"])
    producer = client.create_producer(topic)
    for number in range(9):
        producer.send(b"%d" % number)
    producer.close()
    consumer = client.subscribe(topic, "made")
    drain(consumer, 9)
    consumer.close()
    earliest = {"ledgerId": -1, "entryId": -1}
    assert admin("POST", f"{path(topic)}/subscription/made/resetcursor", earliest)[0] == 204
    somewhere = {"ledgerId": 3, "entryId": 1}
    assert admin("POST", f"{path(topic)}/subscription/made/resetcursor", somewhere)[0] == 405
    assert admin("GET", f"{path(topic)}/subscription/made/position/1")[0] == 405
    consumer = client.subscribe(topic, "made")
    drain(consumer, 9)
    consumer.close()
    assert admin("DELETE", f"{path(topic)}/subscription/made") == (204, None)
    assert admin("DELETE", f"{path(topic)}/subscription/made")[0] == 404


def test_a_partitioned_topic_is_deleted_with_its_partitions(
    client: pulsar.Client, admin: Any, cli: Any, topic: str
) -> None:
    admin("PUT", f"{path(topic)}/partitions", 3)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    publish(client, topic, b"x")
    status, refusal = admin("DELETE", f"{path(topic)}/partitions")
    assert status == 412
    assert "consumers use it" in refusal["reason"]
    assert drain(consumer, 1)[0].data() == b"x"
    consumer.close()
    assert cli("topics", "delete-partitioned-topic", topic) == f"deleted {topic}\n"
    assert admin("DELETE", f"{path(topic)}/partitions")[0] == 404
    listed = admin("GET", "persistent/public/default")[1]
    assert [name for name in listed if f"/{topic}-" in name] == []
    assert cli("topics", "create", topic, "-p", "2")
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    publish(client, topic, b"y")
    assert drain(consumer, 1)[0].data() == b"y"
    assert admin("DELETE", f"{path(topic)}/partitions?force=true")[0] == 204
    consumer.close()


def test_a_partitioned_topic_is_unloaded_truncated_and_terminated_by_its_own_name(
    client: pulsar.Client, admin: Any, cli: Any, topic: str
) -> None:
    admin("PUT", f"{path(topic)}/partitions", 3)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    publish(client, topic, *[b"%d" % number for number in range(6)])
    assert len(drain(consumer, 6)) == 6
    assert admin("PUT", f"{path(topic)}/unload") == (204, None)
    publish(client, topic, *[b"%d" % number for number in range(6)])
    consumer.close()
    assert admin("DELETE", f"{path(topic)}/truncate") == (204, None)
    assert admin("GET", f"{path(topic)}/partitioned-stats")[1]["msgCount"] == 0
    assert admin("POST", f"{path(topic)}-partition-1/terminate")[0] == 200
    status, last = admin("POST", f"{path(topic)}/terminate")
    assert (status, sorted(last)) == (200, ["0", "1", "2"])
    assert admin("POST", f"{path(topic)}/terminate/partitions") == (200, last)
    assert "partition" in cli("topics", "partitioned-terminate", topic)
    with pytest.raises(pulsar.PulsarException):
        client.create_producer(topic)


def test_open_non_persistent_topics_are_listed_and_unloaded(
    client: pulsar.Client, admin: Any, topic: str
) -> None:
    name = NON_PERSISTENT + topic
    producer = client.create_producer(name)
    assert name in admin("GET", "namespaces/public/default/topics?mode=NON_PERSISTENT")[1]
    assert name in admin("GET", "namespaces/public/default/topics?mode=ALL")[1]
    assert name not in admin("GET", "namespaces/public/default/topics")[1]
    assert name in admin("GET", "non-persistent/public/default")[1]
    bundles = admin("GET", "namespaces/public/default/bundles")[1]["boundaries"]
    ranges = [f"{a}_{b}" for a, b in itertools.pairwise(bundles)]
    listed = [admin("GET", f"non-persistent/public/default/{it}")[1] for it in ranges]
    assert [name in found for found in listed].count(True) == 1
    assert admin("PUT", f"non-persistent/public/default/{topic}/unload") == (204, None)
    producer.send(b"after")
    producer.close()


def test_system_topics_are_reserved_and_hidden(
    client: pulsar.Client, admin: Any, topic: str
) -> None:
    for name in ("__change_events", f"{topic}__transaction_pending_ack"):
        status, refusal = admin("PUT", path(name))
        assert status == 412
        assert "reserved for the system" in refusal["reason"]
        with pytest.raises(pulsar.PulsarException):
            client.create_producer(name)
    with pytest.raises(pulsar.PulsarException):
        client.create_producer("persistent://pulsar/system/transaction_coordinator_assign")


def test_the_health_check_uses_the_heartbeat_topic(server: StandaloneProcess, admin: Any) -> None:
    url = f"http://localhost:{server.http_port}/admin/v2/brokers/health"
    for _ in range(2):
        with urllib.request.urlopen(url, timeout=30) as reply:
            assert (reply.status, reply.read()) == (200, b"ok")
    # The namespace has the name by which the broker is reached on this host.
    answers = {
        name: admin(
            "GET", f"non-persistent/pulsar/{name}:{server.http_port}?includeSystemTopic=true"
        )
        for name in ("localhost", "127.0.0.1")
    }
    [(name, listed)] = [(name, body) for name, (status, body) in answers.items() if status == 200]
    assert listed == [f"non-persistent://pulsar/{name}:{server.http_port}/heartbeat"]
    assert admin("GET", f"non-persistent/pulsar/{name}:{server.http_port}") == (200, [])


def test_partitioned_topics_at_the_command_line(cli: Any, topic: str) -> None:
    assert cli("topics", "create", topic, "-p", "2") == f"created {topic} with 2 partitions\n"
    assert f"persistent://public/default/{topic}\n" in cli("topics", "list-partitioned-topics")
    assert f"persistent://public/default/{topic}-partition-1\n" in cli("topics", "list")
    assert cli("topics", "update-partitioned-topic", topic, "-p", "3")
    assert cli("topics", "get-partitioned-topic-metadata", topic) == "partitions: 3\n"
    said = cli("topics", "partitioned-stats", topic, "--per-partition")
    assert said.startswith("partitions: 3\n")
    assert f"{topic}-partition-2" in said
    assert "expected 4 to 10000" in cli(
        "topics", "update-partitioned-topic", topic, "-p", "1", code=1
    )


# ---- lists and watchers --------------------------------------------------------------------------


def test_a_pattern_consumer_reads_all_partitions(
    client: pulsar.Client, admin: Any, topic: str
) -> None:
    """Apache's Python client asks for new topics every 60 s, and has no setting for it."""
    admin("PUT", path(f"{topic}-one"))
    admin("PUT", f"{path(f'{topic}-two')}/partitions", 2)
    for name in (f"{topic}-one", f"{topic}-two", f"other-{topic}-x"):
        publish(client, name, name.encode())
    pattern = re.compile(f"persistent://public/default/{topic}-.*")
    consumer = client.subscribe(pattern, "pattern", initial_position=EARLIEST)
    got = {message.data().decode() for message in drain(consumer, 2)}
    assert got == {f"{topic}-one", f"{topic}-two"}
    consumer.close()


def publish(client: pulsar.Client, topic: str, *contents: bytes) -> None:
    producer = client.create_producer(topic)
    for content in contents:
        producer.send(content)
    producer.close()


# ---- non-persistent topics -----------------------------------------------------------------------

NON_PERSISTENT = "non-persistent://public/default/"
SHARED = pulsar.ConsumerType.Shared


@pytest.mark.parametrize("kind", [pulsar.ConsumerType.Exclusive, SHARED], ids=str)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "single"])
def test_non_persistent_messages_reach_connected_consumers(
    client: pulsar.Client, admin: Any, topic: str, kind: Any, batched: bool
) -> None:
    name = NON_PERSISTENT + topic
    consumers = [client.subscribe(name, f"s{number}", kind) for number in range(2)]
    producer = client.create_producer(name, batching_enabled=batched)
    for number in range(100):
        producer.send_async(b"%d" % number, None)
    producer.flush()
    for consumer in consumers:
        assert [int(message.data()) for message in drain(consumer, 100)] == list(range(100))
    status, stats = admin("GET", f"non-persistent/public/default/{topic}/stats")
    assert status == 200
    assert (stats["msgInCounter"], stats["msgOutCounter"], stats["msgDropRate"]) == (100, 200, 0)
    assert admin("GET", "non-persistent/public/default")[1].count(name) == 1
    for each in (producer, *consumers):
        each.close()


def test_non_persistent_messages_without_a_consumer_are_dropped_and_counted(
    client: pulsar.Client, admin: Any, topic: str
) -> None:
    name = NON_PERSISTENT + topic
    url = f"non-persistent/public/default/{topic}"
    client.subscribe(name, "s").close()
    producer = client.create_producer(name)
    for _ in range(5):
        producer.send(b"lost")
    consumer = client.subscribe(name, "s", initial_position=EARLIEST)
    producer.send(b"kept")
    assert drain(consumer, 1)[0].data() == b"kept"
    with pytest.raises(pulsar.Timeout):
        consumer.receive(timeout_millis=300)
    stats = admin("GET", f"{url}/stats")[1]
    assert stats["subscriptions"]["s"]["msgDropCount"] == 5
    assert stats["msgDropRate"] > 0
    assert admin("GET", f"{url}/internalStats")[0] == 404
    assert admin("DELETE", url)[0] == 412
    producer.close()
    consumer.close()
    assert admin("DELETE", url)[0] == 204
    assert admin("GET", f"{url}/stats")[0] == 404


def test_partitioned_non_persistent_topic_delivers_from_all_partitions(
    client: pulsar.Client, admin: Any, topic: str
) -> None:
    name = NON_PERSISTENT + topic
    url = f"non-persistent/public/default/{topic}"
    assert admin("PUT", f"{url}/partitions", 3)[0] == 204
    assert admin("GET", "non-persistent/public/default/partitioned")[1].count(name) == 1
    consumer = client.subscribe(name, "s")
    producer = client.create_producer(name)
    for number in range(30):
        producer.send(b"%d" % number, partition_key=str(number))
    got = drain(consumer, 30)
    assert {message.message_id().partition() for message in got} == {0, 1, 2}
    stats = admin("GET", f"{url}/partitioned-stats")[1]
    assert (stats["msgInCounter"], stats["msgOutCounter"]) == (30, 30)
    assert admin("DELETE", f"{url}/partitions")[0] == 412
    producer.close()
    consumer.close()
    assert admin("DELETE", f"{url}/partitions")[0] == 204
    assert admin("GET", f"{url}/partitions?checkAllowAutoCreation=false")[0] == 404


def test_our_client_uses_a_non_persistent_topic(ours: magnetar.Client, topic: str) -> None:
    name = NON_PERSISTENT + topic
    consumer = ours.subscribe(name, "s")
    producer = ours.create_producer(name)
    for number in range(20):
        producer.send(b"%d" % number)
    got = [int(consumer.receive(timeout_millis=TIMEOUT_MS).data()) for _ in range(20)]
    assert got == list(range(20))
    producer.close()
    consumer.close()
