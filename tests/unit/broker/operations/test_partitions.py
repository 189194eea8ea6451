"""Requests to all partitions of a topic: merged statistics, and failures after some partitions."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from fakes.admin import admin_of
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.wire import wire_to
from support import settle, wait_until

from magnetar.broker.admin import partitions
from magnetar.broker.admin.partitions import DECODED_BYTES_MAX, PartitionCalls, fanned_out
from magnetar.broker.catalog.partitioned import PartitionedTopics
from magnetar.broker.operations.errors import PartitionBusy, PartitionFailed
from magnetar.broker.operations.partitions import (
    ASKED_MAX,
    delete_partitioned_topic,
    merged,
    terminate_partitioned_topic,
)
from magnetar.broker.operations.statistics import decoded
from magnetar.metadata import codec, paths
from magnetar.metadata.model import TopicRecord
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker

T = "public/default/p"
NAME = TopicName.parse(f"persistent://{T}")
PARTITIONS = [f"persistent://{T}-partition-{index}" for index in range(3)]


def test_the_draining_hashes_of_a_consumer_are_merged_by_hash() -> None:
    parts = [
        {"drainingHashes": [{"hash": slot, "unackMsgs": 2, "blockedAttempts": 1}]}
        for slot in (7, 7, 9)
    ]
    assert merged(parts)["drainingHashes"] == [
        {"hash": 7, "unackMsgs": 4, "blockedAttempts": 2},
        {"hash": 9, "unackMsgs": 2, "blockedAttempts": 1},
    ]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("lastAckedTimestamp", (5, 9, 0), 9),
        ("lastExpireTimestamp", (0, 0), 0),
        ("lastConsumedTime", ("1970-01-01T00:00:00", "2026-01-01T00:00:00"), "2026-01-01T00:00:00"),
        ("oldestBacklogMessageAgeSeconds", (-1, -1), -1),
        ("oldestBacklogMessageAgeSeconds", (-1, 40, 30), 40),
        ("earliestMsgPublishTimeInBacklogs", (0, 9, 5), 5),
        ("firstMessagesSentTimestamp", (0, 0), 0),
        ("msgBacklog", (1, 2, 3), 6),
        ("keyHashRangeArrays", ([[0, 9]], [[0, 9], [20, 30]]), [[0, 9], [20, 30]]),
        ("waitingFor", (["permits"], ["permits"]), ["permits"]),
    ],
)
def test_statistics_of_partitions_are_merged_field_by_field(
    name: str, values: tuple[Any, ...], expected: Any
) -> None:
    assert merged([{name: value} for value in values]) == {name: expected}


@pytest.mark.parametrize(
    ("oldest", "expected"),
    [
        ([(-1, ""), (-1, "")], (-1, "")),
        ([(-1, ""), (7, "a")], (7, "a")),
        ([(5, "a"), (70, "b"), (60, "c")], (70, "b")),
        ([(70, "a"), (5, "b")], (70, "a")),
    ],
)
def test_the_subscription_with_the_oldest_backlog_is_that_of_the_oldest_message(
    oldest: list[tuple[int, str]], expected: tuple[int, str]
) -> None:
    names = ("oldestBacklogMessageAgeSeconds", "oldestBacklogMessageSubscriptionName")
    found = merged([dict(zip(names, each, strict=True)) for each in oldest])
    assert found == dict(zip(names, expected, strict=True))


def test_the_average_size_of_a_producer_is_that_of_its_partitions_with_messages() -> None:
    """A producer has no counters, so its partitions have equal weights, as in Pulsar."""
    parts = [
        {
            "averageMsgSize": size,
            "msgInCounter": count,
            "bytesInCounter": int(size * count),
            "publishers": [{"producerName": name, "averageMsgSize": size}],
        }
        for name, size, count in (("p", 10.0, 1), ("p", 0.0, 0), ("p", 40.0, 9), ("q", 0.0, 0))
    ]
    found = merged(parts)
    assert found["averageMsgSize"] == 37.0
    assert found["publishers"] == [
        {"producerName": "p", "averageMsgSize": 25.0},
        {"producerName": "q", "averageMsgSize": 0.0},
    ]
    assert merged([found])["publishers"] == found["publishers"]


@pytest.mark.parametrize(
    "name",
    ["lastAckedTime", "averageMsgSize", "oldestBacklogMessageSubscriptionName", "publishers"],
)
def test_a_subscription_or_property_may_have_the_name_of_a_statistic(name: str) -> None:
    part = {
        "subscriptions": {name: {"msgBacklog": 2, "consumers": []}},
        "publishers": [{"producerName": "p", "metadata": {name: "x"}}],
    }
    assert merged([part, part, part]) == {
        "subscriptions": {name: {"msgBacklog": 6, "consumers": []}},
        "publishers": [{"producerName": "p", "metadata": {name: "x"}}],
    }


@pytest.mark.real_loop
async def test_statistics_of_a_key_shared_consumer_of_several_partitions() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await admin.put(f"{T}/partitions", json=3)
        shared = pb.CommandSubscribe.Key_Shared
        for number, name in enumerate(PARTITIONS):
            await client.subscribe(name, consumer_id=number, consumer_name="c", subType=shared)
        found = await admin.get(f"{T}/partitioned-stats")
        assert found.status_code == 200
        [consumer] = found.json()["subscriptions"]["s"]["consumers"]
        assert consumer["consumerName"] == "c"
        assert consumer["keyHashRangeArrays"]


@pytest.mark.real_loop
@pytest.mark.parametrize("path", ["terminate", "terminate/partitions"])
async def test_terminate_also_terminates_a_partition_without_a_record(path: str) -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await admin.put(f"{T}/partitions", json=3)
        assert (await admin.delete(f"{T}-partition-1")).status_code == 204
        found = await admin.post(f"{T}/{path}")
        assert found.status_code == 200, found.text
        none = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
        assert found.json() == {"0": none, "1": none, "2": none}
        for number, name in enumerate(PARTITIONS):
            refused = await client.produce(name, producer_id=number)
            assert isinstance(refused, pb.CommandError)
            assert refused.error == pb.TopicTerminatedError


@pytest.mark.real_loop
@pytest.mark.parametrize("body", ["[" * 20_000, '{"ledgerId": [], "entryId": {}}', "{"])
async def test_a_body_that_is_no_message_id_is_refused(body: str) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(f"{T}/partitions", json=2)
        headers = {"content-type": "application/json"}
        for method, path in (("PUT", "s"), ("POST", "s/resetcursor")):
            found = await admin.request(
                method, f"{T}/subscription/{path}", content=body, headers=headers
            )
            assert 400 <= found.status_code < 500, (method, found.text)


@pytest.mark.real_loop
async def test_a_failure_names_its_partition_and_how_many_succeeded() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await admin.put(f"{T}/partitions", json=3)
        assert (await admin.put(f"{T}/subscription/s")).status_code == 204
        await client.subscribe(PARTITIONS[1])
        refused = await admin.delete(f"{T}/subscription/s")
        assert refused.status_code == 412
        assert refused.json() == {
            "reason": f"{PARTITIONS[1]}: subscription 's' has 1 connected consumers"
            " (2 of 3 partitions succeeded)",
            "error": "ConsumersConnected",
            "advice": "close them first, or use --force",
        }
        assert broker.broker.served
        topic = await broker.broker.topic(TopicName.parse(PARTITIONS[0]))
        assert "s" not in topic.subscription_names


@pytest.mark.real_loop
async def test_statistics_name_the_partition_whose_owner_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(f"{T}/partitions", json=2)
        right = PartitionCalls._exchange

        async def exchange(self: PartitionCalls, method: str, name: TopicName, *rest: Any) -> Any:
            if name.partition == 1:
                raise PartitionFailed(str(name), "http://away did not answer")
            return await right(self, method, name, *rest)

        monkeypatch.setattr(PartitionCalls, "_exchange", exchange)
        found = await admin.get(f"{T}/partitioned-stats")
        assert found.status_code == 503
        assert PARTITIONS[1] in found.json()["reason"]


@pytest.mark.real_loop
async def test_a_request_about_all_partitions_says_that_the_metadata_store_is_away() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(f"{T}/partitions", json=1)
        broker.store.suspend()
        refused = await admin.delete(f"{T}/truncate")
        broker.store.reconnect()
        assert refused.status_code == 503
        assert refused.json()["error"] == "Unavailable"
        assert refused.json()["advice"] == "try again in a moment"


@pytest.mark.real_loop
async def test_expire_up_to_a_message_is_for_one_partition() -> None:
    """Ledger ids are unique in the cluster. In another partition, the same id follows other
    messages."""
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await admin.put(f"{T}/partitions", json=2)
        assert (await admin.put(f"{T}/subscription/s")).status_code == 204
        receipts = []
        for number, name in enumerate(PARTITIONS[:2]):
            await client.produce(name, producer_id=number)
            await client.publish(producer_id=number)
            receipts.append((await client.expect(pb.CommandSendReceipt)).message_id)
        last = max(receipts, key=lambda it: it.ledgerId)
        body = {"ledgerId": last.ledgerId, "entryId": last.entryId}
        refused = await admin.post(f"{T}/subscription/s/expireMessages", json=body)
        stats = (await admin.get(f"{T}/partitioned-stats")).json()
        assert stats["subscriptions"]["s"]["msgBacklog"] == 2
        assert refused.status_code == 405
        assert "name one of them" in refused.json()["reason"]


@pytest.mark.real_loop
async def test_a_subscription_at_a_message_is_created_in_one_partition_only() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(f"{T}/partitions", json=2)
        body = {"ledgerId": 0, "entryId": 0, "partitionIndex": 1}
        refused = await admin.put(f"{T}/subscription/s", json=body)
        assert refused.status_code == 405
        assert refused.json()["error"] == "IsPartitioned"
        assert "name one of them" in refused.json()["reason"]
        assert (await admin.get(f"{T}/subscriptions")).json() == []
        # The beginning and the end are places of any partition.
        for end, name in ((-1, "first"), ((1 << 63) - 1, "last")):
            whole = {"ledgerId": end, "entryId": end}
            assert (await admin.put(f"{T}/subscription/{name}", json=whole)).status_code == 204
        assert (await admin.put(f"{T}/subscription/none")).status_code == 204
        found = (await admin.get(f"{T}/subscriptions")).json()
        assert found == ["first", "last", "none"]


@pytest.mark.real_loop
async def test_expiry_in_all_subscriptions_reaches_all_partitions() -> None:
    cluster = ClusterState()
    async with (
        running_broker(cluster, clock=cluster.clock) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await admin.put(f"{T}/partitions", json=2)
        for name in ("a", "b"):
            assert (await admin.put(f"{T}/subscription/{name}")).status_code == 204
        for number, name in enumerate(PARTITIONS[:2]):
            await client.produce(name, producer_id=number)
            await client.publish(producer_id=number)
            await client.expect(pb.CommandSendReceipt)

        async def expire(of: str, age_s: int) -> list[dict[str, int]]:
            """Expire, and return the backlogs of each partition."""
            expired = await admin.post(f"{T}/{of}/expireMessages/{age_s}")
            assert expired.status_code == 204, expired.text
            stats = (await admin.get(f"{T}/partitioned-stats")).json()["partitions"]
            return [
                {name: it["msgBacklog"] for name, it in stats[one]["subscriptions"].items()}
                for one in PARTITIONS[:2]
            ]

        cluster.clock.advance_ms(60_000)
        assert await expire("all_subscription", 61) == [{"a": 1, "b": 1}] * 2
        assert await expire("subscription/a", 59) == [{"a": 0, "b": 1}] * 2
        assert await expire("all_subscription", 59) == [{"a": 0, "b": 0}] * 2
        assert (await admin.post(f"{T}/all_subscription/expireMessages/0")).status_code == 400


@pytest.mark.real_loop
async def test_a_request_whose_body_is_cut_changes_nothing() -> None:
    """The body names the first message. Without it, the subscription would begin at the end."""
    asked: list[str] = []
    received = [
        {"type": "http.request", "body": b'{"ledgerId', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def serve(scope: Any, _receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def receive() -> Any:
        return received.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    path = f"/admin/v2/persistent/{T}/subscription/s"
    scope = {"method": "PUT", "path": path, "raw_path": path.encode(), "query_string": b""}
    calls = PartitionCalls()
    calls.serve = serve
    async with running_broker(ClusterState()) as broker:
        await broker.broker.create_partitioned_topic(NAME, 2, {})
        await fanned_out(serve, broker.broker, calls)(scope, receive, send)
    assert asked == []


@pytest.mark.real_loop
async def test_a_topic_without_partitions_is_no_partitioned_topic() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(T)
        for method, path in (("GET", "partitioned-stats"), ("DELETE", "partitions")):
            refused = await admin.request(method, f"{T}/{path}")
            assert refused.status_code == 404
            reason = f"partitioned topic persistent://{T} does not exist"
            assert refused.json()["reason"] == reason


@pytest.mark.real_loop
async def test_a_topic_with_the_name_of_a_partitioned_topic_exists_already() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        for domain in ("persistent", "non-persistent"):
            await admin.put(f"{domain}/{T}/partitions", json=2)
            refused = await admin.put(f"{domain}/{T}")
            assert refused.status_code == 409
            assert refused.json()["error"] == "TopicExists"


@pytest.mark.real_loop
async def test_the_partitioned_topics_of_a_missing_namespace_are_not_found() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker, "/admin/v2") as admin:
        for domain in ("persistent", "non-persistent"):
            assert (await admin.get(f"{domain}/public/default/partitioned")).json() == []
            missing = await admin.get(f"{domain}/public/none/partitioned")
            assert missing.status_code == 404
            assert missing.json()["error"] == "NamespaceNotFound"


@pytest.mark.real_loop
async def test_a_wrong_method_is_refused_also_if_no_partition_is_open() -> None:
    async with running_broker(ClusterState()) as broker, admin_of(broker) as admin:
        await admin.put(f"{T}/partitions", json=1)
        assert (await admin.put(f"{T}/unload")).status_code == 204
        assert (await admin.get(f"{T}/unload")).status_code == 405
        assert (await admin.get(f"{T}/terminate")).status_code == 405


class _Brokers:
    """Partitions with a producer each. A broker with an old view sends the requests."""

    def __init__(self) -> None:
        cluster = ClusterState()
        self.here, self.other = cluster.store(), cluster.store()
        self.topics = PartitionedTopics(self.here, SystemClock())
        self.asked: list[tuple[str, int | None]] = []

    @property
    def broker(self) -> Broker:
        async def perhaps_open(names: list[TopicName]) -> list[TopicName]:
            return names

        catalog = SimpleNamespace(partitioned=self.topics)
        return cast("Broker", SimpleNamespace(catalog=catalog, perhaps_open=perhaps_open))

    async def ask(self, method: str, name: TopicName, rest: str) -> tuple[int, Any]:
        self.asked.append((method, name.partition))
        if method == "GET":
            return 200, {"publishers": ["p"], "subscriptions": {}}
        return 200, {"ledgerId": 1, "entryId": 2}


@pytest.mark.real_loop
async def test_delete_finds_a_reader_that_has_the_name_of_a_durable_subscription() -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, "pulsar") as client,
        admin_of(broker) as admin,
    ):
        await admin.put(f"{T}/partitions", json=3)
        assert (await admin.put(f"{T}/subscription/s")).status_code == 204
        await client.subscribe(PARTITIONS[1], durable=False)
        refused = await admin.delete(f"{T}/partitions")
        assert refused.status_code == 412
        reason = f"{PARTITIONS[1]}: 1 producers and consumers use it"
        assert refused.json()["reason"] == reason
        assert (await admin.get(f"{T}/partitions")).json()["partitions"] == 3
        assert (await admin.get(f"{T}/partitioned-stats")).status_code == 200


async def test_delete_with_an_old_view_refuses_a_topic_in_use_and_leaves_it_usable() -> None:
    brokers = _Brokers()
    brokers.here.fall_behind()
    topics = PartitionedTopics(brokers.other, SystemClock())
    await topics.create(NAME, 2)
    with pytest.raises(PartitionBusy):
        await delete_partitioned_topic(brokers.broker, NAME, brokers.ask, force=False)
    assert (await topics.require(NAME)).partitions == 2


async def test_delete_stops_when_another_request_finished_it_and_the_topic_was_created_again() -> (
    None
):
    brokers, count = _Brokers(), 5 * ASKED_MAX
    await brokers.topics.create(NAME, count)
    for index in range(count):
        path = paths.topic(NAME.tenant, NAME.namespace, NAME.domain, f"p-partition-{index}")
        await brokers.here.put(path, codec.encode_topic(TopicRecord(1)), expected=0)

    async def ask(method: str, name: TopicName, rest: str) -> tuple[int, Any]:
        answer = await brokers.ask(method, name, rest)
        if len(brokers.asked) == 1:
            await brokers.topics.end_deletion(NAME)
            await brokers.topics.create(NAME, count)
        return answer

    await delete_partitioned_topic(brokers.broker, NAME, ask, force=True)
    assert len(brokers.asked) == ASKED_MAX
    assert (await brokers.topics.require(NAME)).partitions == count


async def test_terminate_with_an_old_view_terminates_partitions_that_were_added() -> None:
    brokers = _Brokers()
    topics = PartitionedTopics(brokers.other, SystemClock())
    await topics.create(NAME, 2)
    brokers.here.fall_behind()
    await topics.grow(NAME, 3)
    await terminate_partitioned_topic(brokers.broker, NAME, brokers.ask)
    assert sorted(brokers.asked) == [("POST", index) for index in range(3)]


def calls_to(port: int) -> PartitionCalls:
    """Requests that this broker's own API redirects to a local port."""

    async def redirect(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"location", b"http://127.0.0.1:%d/" % port)]
        await send({"type": "http.response.start", "status": 307, "headers": headers})

    calls = PartitionCalls()
    calls.serve = redirect
    return calls


@pytest.mark.real_loop
async def test_a_large_answer_is_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def decode(text: bytes) -> Any:
        threads.append(threading.current_thread())
        return decoded(text)

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    monkeypatch.setattr(partitions, "decoded", decode)
    calls = PartitionCalls()
    calls.serve = answer
    for size in (DECODED_BYTES_MAX, DECODED_BYTES_MAX + 1):
        body = b'{"a": "%b"}' % (b"x" * (size - 9))
        assert len(body) == size
        assert await calls("GET", NAME, "/stats") == (200, {"a": "x" * (size - 9)})
    here, other = threads
    assert here is threading.main_thread()
    assert other is not here


@pytest.mark.real_loop
async def test_lists_of_many_subscriptions_are_combined_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request to all partitions, whose answers have many subscriptions together."""
    threads: list[threading.Thread] = []
    combine = partitions._combined

    def combined(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return combine(*arguments)

    monkeypatch.setattr(partitions, "_combined", combined)
    subscriptions: list[str] = []
    told: list[Any] = []

    async def serve(_scope: Any, _receive: Any, send: Any) -> None:
        body = json.dumps(subscriptions).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        told.append(message)

    path = f"/admin/v2/persistent/{T}/subscriptions"
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode()}
    scope["query_string"] = b""
    calls = PartitionCalls()
    calls.serve = serve
    async with running_broker(ClusterState()) as broker:
        await broker.broker.create_partitioned_topic(NAME, 4, {})
        for count in (10, DECODED_BYTES_MAX // 40):  # 4 partitions, 12 bytes a name
            subscriptions[:] = [f"{number:08}" for number in range(count)]
            await fanned_out(serve, broker.broker, calls)(scope, receive, send)
            assert json.loads(told[-1]["body"]) == subscriptions
    here, other = threads
    assert here is threading.main_thread()
    assert other is not here


@pytest.mark.real_loop
async def test_large_answers_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a cancelled request, whose thread still decodes."""
    begun: list[int] = []
    may_end = [threading.Event() for _ in range(3)]

    def decode(_text: bytes) -> Any:
        begun.append(len(begun))
        may_end[number := begun[-1]].wait()
        return number

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b" " * (DECODED_BYTES_MAX + 1)})

    monkeypatch.setattr(partitions, "decoded", decode)
    calls = PartitionCalls()
    calls.serve = answer
    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(calls("GET", NAME, "/stats")) for _ in range(3)]
            await wait_until(lambda: begun)
            asked[0].cancel()
            await asyncio.wait(asked[:1])
            await settle()
            assert begun == [0]
            may_end[0].set()
            await wait_until(lambda: len(begun) > 1)
            await settle()
            assert begun == [0, 1]
            may_end[1].set()
            may_end[2].set()
    finally:
        for each in may_end:
            each.set()
    assert [task.result() for task in asked[1:]] == [(200, 1), (200, 2)]


@pytest.mark.real_loop
async def test_the_answer_of_another_broker_is_decoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: list[bytes] = []

    def decode(text: bytes) -> Any:
        texts.append(text)
        return decoded(text)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n" + b'{"a": 1}')
        writer.close()

    monkeypatch.setattr(partitions, "decoded", decode)
    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        calls = calls_to(server.sockets[0].getsockname()[1])
        assert await calls("GET", NAME, "/stats") == (200, {"a": 1})
    assert texts == [b'{"a": 1}']


@pytest.mark.real_loop
@pytest.mark.parametrize("answer", [b'{"a": ', b"<p>", b"[" * 99_999], ids=["cut", "page", "deep"])
async def test_an_owner_that_answers_without_json_is_a_failure_of_its_partition(
    answer: bytes,
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n" + answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        calls = calls_to(server.sockets[0].getsockname()[1])
        with pytest.raises(PartitionFailed, match=r"-partition-1: http://.* did not answer"):
            await calls("GET", NAME.with_partition(1), "/stats")
        with pytest.raises(PartitionFailed, match=r"-partition-1: http://.* did not answer"):
            await calls.send("PUT", NAME.with_partition(1), "/unload", b"", b"")


@pytest.mark.real_loop
async def test_a_broker_that_hangs_does_not_occupy_the_threads_of_others() -> None:
    """Schemas of clients and the metrics use the same threads."""
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        calls = calls_to(hangs.getsockname()[1])
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(calls.send("GET", NAME.with_partition(n), "/", b"", b""))
                for n in range(ASKED_MAX)
            ]
            await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await asyncio.to_thread(int)
            for task in asked:
                task.cancel()
