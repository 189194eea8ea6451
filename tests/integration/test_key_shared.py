"""Key_Shared subscriptions with both clients: order per key, draining, batches by key, refusals.

The clients are Apache's client on Pulsar's protocol and ours on gRPC. They have the same names.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from fakes.admin_port import invoke
from fakes.client_api import OURS, Api, client_api
from fakes.standalone_process import StandaloneProcess
from support import wait_for

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

TIMEOUT_MS = 20_000
QUIET_MS = 300
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(
        tmp_path_factory.mktemp("server"),
        "--subscription-key-shared-consistent-hashing-replica-points=10",
    )
    process.start()
    yield process
    process.end()


def sticky(api: Api, *ranges: tuple[int, int]) -> Any:
    module = api.module
    return module.ConsumerKeySharedPolicy(module.KeySharedMode.Sticky, sticky_ranges=list(ranges))


@pytest.fixture
def topic(api: Api) -> str:
    return f"persistent://public/default/keys-{api.module.__name__}-{next(_numbers)}"


def test_order_per_key_over_joins_and_leaves(api: Api, topic: str) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    consumers = [api.subscribe(topic, "KeyShared", "c0")]
    sent: dict[str, int] = defaultdict(int)
    seen: dict[str, list[int]] = defaultdict(list)
    at: dict[str, set[str]] = defaultdict(set)  # the consumers of this round

    def publish(count: int) -> None:
        for number in range(count):
            key = f"key-{number % 17}"
            producer.send(b"%d" % sent[key], partition_key=key)
            sent[key] += 1

    def work() -> None:
        at.clear()
        for consumer in consumers:
            for message in api.drain(consumer):
                key = message.partition_key()
                seen[key].append(int(message.data()))
                at[key].add(consumer.consumer_name())
                consumer.acknowledge(message)

    publish(60)
    work()
    consumers.append(api.subscribe(topic, "KeyShared", "c1"))
    consumers.append(api.subscribe(topic, "KeyShared", "c2"))
    publish(60)
    work()
    assert len({next(iter(names)) for names in at.values()}) > 1
    consumers.pop(0).close()
    publish(60)
    work()
    for key, count in sent.items():
        assert seen[key] == list(range(count)), key
        assert len(at[key]) == 1, "a key at two consumers"
    for consumer in consumers:
        consumer.close()
    producer.close()


def test_key_moves_only_after_its_messages_are_acknowledged(api: Api, topic: str) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    first = api.subscribe(topic, "KeyShared", "c1")
    keys = [f"key-{number}" for number in range(30)]
    for key in keys:
        producer.send(b"0", partition_key=key)
    held = api.drain(first)
    assert len(held) == 30
    second = api.subscribe(topic, "KeyShared", "c2")
    for key in keys:
        producer.send(b"1", partition_key=key)
    later = api.drain(first)
    assert api.drain(second) == []
    assert 0 < len(later) < 30, "some keys stay"
    stats = api.stats(topic)
    assert stats["drainingHashesCount"] == 30 - len(later)
    assert stats["keySharedMode"] == "AUTO_SPLIT"
    assert stats["allowOutOfOrderDelivery"] is False
    assert any(reason.startswith("draining") for reason in stats["waitingFor"])
    for message in held:
        first.acknowledge(message)
    moved = [second.receive(timeout_millis=TIMEOUT_MS) for _ in range(30 - len(later))]
    assert all(message.data() == b"1" for message in moved)
    wait_for(lambda: api.stats(topic)["drainingHashesCount"] == 0)
    first.close()
    second.close()
    producer.close()


def test_draining_hash_counts_what_is_unacknowledged_and_blocked(api: Api, topic: str) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    first = api.subscribe(topic, "KeyShared", "c1")
    keys = [f"key-{number}" for number in range(30)]
    for key in keys * 3:
        producer.send(b"0", partition_key=key)
    held = api.drain(first)
    assert len(held) == 90
    second = api.subscribe(topic, "KeyShared", "c2")

    def draining() -> dict[int, tuple[int, int]]:
        [one] = [it for it in api.stats(topic)["consumers"] if it["consumerName"] == "c1"]
        hashes = one["drainingHashes"]
        return {it["hash"]: (it["unackMsgs"], it["blockedAttempts"]) for it in hashes}

    for key in keys:
        producer.send(b"1", partition_key=key)
    assert api.drain(second) == []
    before = draining()
    assert before
    assert set(before.values()) == {(3, 1)}
    assert api.stats(topic)["drainingHashesClearedTotal"] == 0
    for message in held[:60]:  # two of each key
        first.acknowledge(message)
    wait_for(lambda: {unacked for unacked, _ in draining().values()} == {1})
    assert draining().keys() == before.keys()
    for message in held[60:]:
        first.acknowledge(message)
    moved = [second.receive(timeout_millis=TIMEOUT_MS) for _ in before]
    assert all(message.data() == b"1" for message in moved)
    wait_for(lambda: draining() == {})
    found = api.stats(topic)
    cleared = {it["consumerName"]: it["drainingHashesClearedTotal"] for it in found["consumers"]}
    assert cleared == {"c1": len(before), "c2": 0}
    assert found["drainingHashesClearedTotal"] == len(before)
    first.close()
    second.close()
    producer.close()


def test_joining_consumer_gets_new_keys_at_once(api: Api, topic: str) -> None:
    """The key does not wait until all earlier messages are acknowledged."""
    producer = api.client.create_producer(topic, batching_enabled=False)
    first = api.subscribe(topic, "KeyShared", "c1")
    for number in range(30):
        producer.send(b"old", partition_key=f"old-{number}")
    assert len(api.drain(first)) == 30
    second = api.subscribe(topic, "KeyShared", "c2")
    for number in range(30):
        producer.send(b"new", partition_key=f"new-{number}")
    got = [it.data() for consumer in (first, second) for it in api.drain(consumer)]
    assert got == [b"new"] * 30
    [share] = [it for it in api.stats(topic)["consumers"] if it["consumerName"] == "c2"]
    assert share["unackedMessages"] > 0
    assert api.stats(topic)["unackedMessages"] == 60
    first.close()
    second.close()
    producer.close()


def test_negatively_acknowledged_messages_return_to_the_consumer_of_their_key(
    api: Api, topic: str
) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    consumers = [
        api.subscribe(topic, "KeyShared", f"c{number}", negative_ack_redelivery_delay_ms=100)
        for number in range(3)
    ]
    for number in range(60):
        producer.send(b"%d" % number, partition_key=f"key-{number % 20}")
    at: dict[str, set[str]] = defaultdict(set)
    refused: set[bytes] = set()
    redelivered: dict[bytes, int] = {}
    acknowledged: set[bytes] = set()
    while len(acknowledged) < 60:
        for consumer in consumers:
            for message in api.drain(consumer):
                text = message.data()
                at[message.partition_key()].add(consumer.consumer_name())
                if int(text) < 40 and text not in refused:
                    refused.add(text)
                    consumer.negative_acknowledge(message)
                    continue
                if message.redelivery_count():
                    redelivered[text] = message.redelivery_count()
                acknowledged.add(text)
                consumer.acknowledge(message)
    assert redelivered == dict.fromkeys(refused, 1), "each one alone"
    assert len(refused) == 40
    assert {len(names) for names in at.values()} == {1}, "a key at two consumers"
    assert len({name for names in at.values() for name in names}) > 1
    for consumer in consumers:
        consumer.close()
    producer.close()


def test_key_that_returns_to_its_consumer_continues_at_once(api: Api, topic: str) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    first = api.subscribe(topic, "KeyShared", "c1")
    keys = [f"key-{number}" for number in range(30)]
    for key in keys:
        producer.send(b"0", partition_key=key)
    assert len(api.drain(first)) == 30
    second = api.subscribe(topic, "KeyShared", "c2")
    for key in keys:
        producer.send(b"1", partition_key=key)
    stayed = api.drain(first)
    assert api.drain(second) == []
    second.close()
    returned = [first.receive(timeout_millis=TIMEOUT_MS) for _ in range(30 - len(stayed))]
    assert sorted(it.partition_key() for it in (*stayed, *returned)) == sorted(keys)
    assert all(message.data() == b"1" for message in returned)
    found = api.stats(topic)
    assert (found["drainingHashesCount"], found["unackedMessages"]) == (0, 60)
    first.close()
    producer.close()


def test_keys_of_a_consumer_that_disconnects_while_they_drain_keep_their_order(
    api: Api, topic: str
) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    first = api.subscribe(topic, "KeyShared", "c1")
    keys = [f"key-{number}" for number in range(30)]
    for key in keys:
        producer.send(b"0", partition_key=key)
    assert len(api.drain(first)) == 30
    second = api.subscribe(topic, "KeyShared", "c2")
    for text in (b"1", b"2"):
        for key in keys:
            producer.send(text, partition_key=key)
    first.close()
    seen: dict[str, list[bytes]] = defaultdict(list)
    for _ in range(90):
        message = second.receive(timeout_millis=TIMEOUT_MS)
        seen[message.partition_key()].append(message.data())
    assert seen == {key: [b"0", b"1", b"2"] for key in keys}
    second.close()
    producer.close()


def test_key_based_batches_keep_each_key_at_one_consumer(api: Api, topic: str) -> None:
    producer = api.client.create_producer(
        topic,
        batching_enabled=True,
        batching_type=api.module.BatchingType.KeyBased,
        batching_max_publish_delay_ms=200,
    )
    consumers = [api.subscribe(topic, "KeyShared", f"c{number}") for number in range(3)]
    for number in range(120):
        producer.send_async(b"%d" % number, lambda *_: None, partition_key=f"key-{number % 12}")
    producer.flush()
    seen: dict[str, list[int]] = defaultdict(list)
    owners: dict[str, set[int]] = defaultdict(set)
    batched = False
    for index, consumer in enumerate(consumers):
        for message in api.drain(consumer):
            seen[message.partition_key()].append(int(message.data()))
            owners[message.partition_key()].add(index)
            batched |= message.message_id().batch_index() > 0
            consumer.acknowledge(message)
    assert batched
    assert sum(map(len, seen.values())) == 120
    for key, numbers in seen.items():
        assert numbers == sorted(numbers), key
        assert len(owners[key]) == 1, key
    for consumer in consumers:
        consumer.close()
    producer.close()


def test_messages_without_a_key_share_a_key_based_batch(api: Api, topic: str) -> None:
    producer = api.client.create_producer(
        topic,
        batching_enabled=True,
        batching_type=api.module.BatchingType.KeyBased,
        batching_max_publish_delay_ms=10_000,
    )
    consumers = [api.subscribe(topic, "KeyShared", f"c{number}") for number in range(3)]
    for number in range(12):
        key = None if number % 2 else "key"
        producer.send_async(b"%d" % number, lambda *_: None, partition_key=key)
    producer.flush()
    keyless = [
        found
        for consumer in consumers
        if (found := [it for it in api.drain(consumer) if not it.partition_key()])
    ]
    [at_one] = keyless
    assert [int(message.data()) for message in at_one] == [1, 3, 5, 7, 9, 11]
    assert len({message.message_id().entry_id() for message in at_one}) == 1
    for consumer in consumers:
        consumer.close()
    producer.close()


def test_ordering_key_decides_before_the_key(api: Api, topic: str) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    consumers = [api.subscribe(topic, "KeyShared", f"c{number}") for number in range(3)]
    for number in range(40):
        producer.send(b"%d" % number, partition_key=f"key-{number}", ordering_key="one")
    got = [len(api.drain(consumer)) for consumer in consumers]
    assert sorted(got) == [0, 0, 40]
    for consumer in consumers:
        consumer.close()
    producer.close()


def test_sticky_ranges_get_their_keys_and_must_not_overlap(api: Api, topic: str) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    low = api.subscribe(topic, "KeyShared", "low", key_shared_policy=sticky(api, (0, 32767)))
    with pytest.raises(api.module.ConsumerAssignError):
        api.subscribe(topic, "KeyShared", "overlap", key_shared_policy=sticky(api, (30000, 40000)))
    with pytest.raises(api.module.ConsumerBusy):
        api.subscribe(topic, "KeyShared", "other")
    high = api.subscribe(topic, "KeyShared", "high", key_shared_policy=sticky(api, (32768, 65535)))
    for number in range(40):
        producer.send(b"%d" % number, partition_key=f"key-{number}")
    one, two = api.drain(low), api.drain(high)
    assert len(one) + len(two) == 40
    assert one
    assert two
    assert api.stats(topic)["keySharedMode"] == "STICKY"
    for consumer in (low, high):
        consumer.close()
    producer.close()


def test_out_of_order_delivery_takes_keys_at_once(api: Api, topic: str) -> None:
    relaxed = api.module.ConsumerKeySharedPolicy(allow_out_of_order_delivery=True)
    producer = api.client.create_producer(topic, batching_enabled=False)
    first = api.subscribe(topic, "KeyShared", "c1", key_shared_policy=relaxed)
    for number in range(30):
        producer.send(b"0", partition_key=f"key-{number}")
    assert len(api.drain(first)) == 30
    second = api.subscribe(topic, "KeyShared", "c2", key_shared_policy=relaxed)
    for number in range(30):
        producer.send(b"1", partition_key=f"key-{number}")
    assert api.drain(second)
    assert api.stats(topic)["allowOutOfOrderDelivery"] is True
    first.close()
    second.close()
    producer.close()


def test_order_is_kept_until_every_consumer_allows_another_one(api: Api, topic: str) -> None:
    relaxed = api.module.ConsumerKeySharedPolicy(allow_out_of_order_delivery=True)
    producer = api.client.create_producer(topic, batching_enabled=False)

    def send_round(number: int) -> None:
        for key in range(30):
            producer.send(b"%d" % number, partition_key=f"key-{key}")

    first = api.subscribe(topic, "KeyShared", "c1")
    send_round(0)
    held = api.drain(first)
    assert len(held) == 30
    second = api.subscribe(topic, "KeyShared", "c2", key_shared_policy=relaxed)
    send_round(1)
    assert api.drain(second) == [], "the first consumer wants the order, and acknowledges nothing"
    assert api.stats(topic)["allowOutOfOrderDelivery"] is False
    third = api.subscribe(topic, "KeyShared", "c3", key_shared_policy=relaxed)
    first.close()
    wait_for(lambda: api.stats(topic)["allowOutOfOrderDelivery"] is True)
    got = {consumer: api.drain(consumer) for consumer in (second, third)}
    assert sorted(it.data() for each in got.values() for it in each) == [b"0"] * 30 + [b"1"] * 30
    # A consumer that wants the order waits for all entries that were delivered without order.
    last = api.subscribe(topic, "KeyShared", "c4")
    assert api.stats(topic)["allowOutOfOrderDelivery"] is False
    send_round(2)
    assert api.drain(last) == []
    reasons = [it for it in api.stats(topic)["waitingFor"] if it.startswith("draining")]
    assert "pending at several consumers" in str(reasons)
    for consumer, messages in got.items():
        for message in messages:
            consumer.acknowledge(message)
    rest = [it for consumer in (second, third, last) for it in api.drain(consumer)]
    assert [message.data() for message in rest] == [b"2"] * 30
    for consumer in (second, third, last):
        consumer.close()
    producer.close()


@pytest.mark.parametrize("kind", ["Shared", "KeyShared"])
def test_cumulative_acknowledgement_is_refused(api: Api, topic: str, kind: str) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    consumer = api.subscribe(topic, kind, "c1")
    producer.send(b"0", partition_key="k")
    message = consumer.receive(timeout_millis=TIMEOUT_MS)
    with pytest.raises(api.module.CumulativeAcknowledgementNotAllowedError):
        consumer.acknowledge_cumulative(message)
    consumer.close()
    producer.close()


def test_each_key_of_a_non_persistent_topic_is_at_one_consumer(api: Api, topic: str) -> None:
    topic = topic.replace("persistent://", "non-persistent://")
    consumers = [api.subscribe(topic, "KeyShared", f"c{number}") for number in range(2)]
    producer = api.client.create_producer(topic, batching_enabled=False)
    for number in range(40):
        producer.send(b"%d" % number, partition_key=f"key-{number % 10}")
    seen = [{message.partition_key() for message in api.drain(it)} for it in consumers]
    assert all(seen)
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == 10
    for consumer in consumers:
        consumer.close()
    producer.close()


def test_blocked_key_is_explained_by_the_command_line(api: Api, topic: str) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    first = api.subscribe(topic, "KeyShared", "c1")
    for number in range(20):
        producer.send(b"0", partition_key=f"key-{number}")
    held = api.drain(first)
    assert len(held) == 20
    second = api.subscribe(topic, "KeyShared", "c2")

    def ask(command: str, *more: str) -> Any:
        code, said, errors = invoke(
            api.admin, "subscriptions", command, topic, "s", *more, "--json"
        )
        assert code == 0, errors
        return json.loads(said)

    keys = {key: ask("key", key) for key in {message.partition_key() for message in held}}
    moved = {key: found for key, found in keys.items() if found["drainingConsumer"]}
    assert moved
    assert all(found["consumer"] == "c2" for found in moved.values())
    for key in moved:
        producer.send(b"1", partition_key=key)
    wait_for(lambda: api.stats(topic)["msgInReplay"] == len(moved))
    reasons = [it for it in ask("explain")["reasons"] if it["why"] == "draining"]
    assert {it["facts"]["hash"] for it in reasons[:10]} <= {it["hash"] for it in moved.values()}
    key, found = next(iter(moved.items()))
    [pending] = ask("pending", "--hash", str(found["hash"]))["entries"]
    assert (pending["key"], pending["consumer"], pending["redeliveryCount"]) == (key, "c1", 0)
    _, said, _ = invoke(api.admin, "subscriptions", "explain", topic, "s")
    assert "- draining: hash " in said
    assert "entries are pending at consumer 'c1'" in said
    _, said, _ = invoke(api.admin, "subscriptions", "key", topic, "s", key)
    assert f"key {key} has hash {found['hash']}; consumer c2 gets its new messages" in said
    assert "consumer c1 had the hash and drains it" in said
    assert len(ask("pending", "--consumer", "c1", "--limit", "7")["entries"]) == 7
    for message in held:
        first.acknowledge(message)
    assert {second.receive(timeout_millis=TIMEOUT_MS).partition_key() for _ in moved} == set(moved)
    first.close()
    second.close()
    producer.close()


# The fields of a consumer in Pulsar's documentation of topic statistics.
CONSUMER_FIELDS = {
    "msgRateOut",
    "msgThroughputOut",
    "bytesOutCounter",
    "msgOutCounter",
    "msgRateRedeliver",
    "messageAckRate",
    "chunkedMessageRate",
    "consumerName",
    "availablePermits",
    "unackedMessages",
    "avgMessagesPerEntry",
    "blockedConsumerOnUnackedMsgs",
    "drainingHashesCount",
    "drainingHashesClearedTotal",
    "drainingHashesUnackedMessages",
    "drainingHashes",
    "address",
    "connectedSince",
    "clientVersion",
    "lastAckedTimestamp",
    "lastConsumedTimestamp",
    "lastConsumedFlowTimestamp",
    "keyHashRangeArrays",
    "metadata",
    "lastAckedTime",
    "lastConsumedTime",
}

REMOVED_FIELDS = {
    "consumersAfterMarkDeletePosition",
    "individuallySentPositions",
    "lastSentPositionWhenJoining",
    "readPositionWhenJoining",
    "keyHashRanges",
}


def test_statistics_of_the_documentation_example(api: Api, topic: str) -> None:
    # Pulsar's documentation of draining hashes: c1 has two unacknowledged messages of each of five
    # hashes that c2 took over, on a ring with ten points for each consumer.
    attempts = {"9": 5, "4": 9, "8": 6, "7": 6, "3": 9}  # the number of attempts of each key
    producer = api.client.create_producer(topic, batching_enabled=False)
    first = api.subscribe(topic, "KeyShared", "c1", receiver_queue_size=100)
    staying = {"0": 4, "1": 4, "2": 4, "5": 4, "6": 4}
    for key, count in {**dict.fromkeys(attempts, 2), **staying}.items():
        for _ in range(count):
            producer.send(b"0", partition_key=key)
    assert len(api.drain(first)) == 30
    second = api.subscribe(topic, "KeyShared", "c2", receiver_queue_size=1_000)
    for key, count in attempts.items():
        for _ in range(count):
            producer.send(b"1", partition_key=key)
    assert api.drain(second) == []
    subscription = api.stats(topic)
    one, two = subscription["consumers"]
    for consumer in (one, two):
        assert set(consumer) >= CONSUMER_FIELDS
        assert not REMOVED_FIELDS & {*consumer, *subscription}
        assert consumer["lastAckedTimestamp"] == 0
        assert consumer["lastAckedTime"] == "1970-01-01T00:00:00.000+00:00"
        assert consumer["lastConsumedFlowTimestamp"] >= consumer["firstConsumedFlowTimestamp"] > 0
    assert one["lastConsumedTimestamp"] >= one["firstMessagesSentTimestamp"] > 0
    assert one["lastConsumedTime"].startswith("20")
    assert one["bytesOutCounter"] > 0
    assert subscription["drainingHashesCount"] == 5
    assert subscription["drainingHashesUnackedMessages"] == 10
    assert subscription["msgInReplay"] == sum(attempts.values())
    assert subscription["lastConsumedTimestamp"] == one["lastConsumedTimestamp"]
    assert subscription["nonContiguousDeletedMessagesRanges"] == 0
    hashes = [(2862, 5), (11707, 9), (15786, 6), (43539, 6), (45436, 9)]
    expected = {
        "msgOutCounter": 30,
        "consumerName": "c1",
        "unackedMessages": 30,
        "avgMessagesPerEntry": 1,
        "blockedConsumerOnUnackedMsgs": False,
        "drainingHashesCount": 5,
        "drainingHashesClearedTotal": 0,
        "drainingHashesUnackedMessages": 10,
        "drainingHashes": [
            {"hash": slot, "unackMsgs": 2, "blockedAttempts": count} for slot, count in hashes
        ],
        "keyHashRangeArrays": [[2960, 5968], [22258, 43033], [49261, 54464], [55155, 61273]],
    }
    assert {name: one[name] for name in expected} == expected
    expected = {
        "msgOutCounter": 0,
        "bytesOutCounter": 0,
        "consumerName": "c2",
        "availablePermits": 1_000,
        "unackedMessages": 0,
        "avgMessagesPerEntry": 0,
        "lastConsumedTimestamp": 0,
        "lastConsumedTime": "1970-01-01T00:00:00.000+00:00",
        "drainingHashesCount": 0,
        "drainingHashesClearedTotal": 0,
        "drainingHashesUnackedMessages": 0,
        "drainingHashes": [],
        "keyHashRangeArrays": [
            [1, 2959],
            [5969, 22257],
            [43034, 49260],
            [54465, 55154],
            [61274, 65535],
        ],
    }
    assert {name: two[name] for name in expected} == expected
    first.close()
    second.close()
    producer.close()


# ---- negative acknowledgements in the order of keys: an extension, so with our client only -------


@pytest.fixture(scope="module", params=OURS)
def ours(request: pytest.FixtureRequest, server: StandaloneProcess) -> Iterator[Api]:
    with client_api(server, request.param) as found:
        yield found


def test_negative_acks_keep_the_order_of_each_key(ours: Api) -> None:
    topic = f"persistent://public/default/nacks-{next(_numbers)}"
    policy = magnetar.ConsumerKeySharedPolicy(ordered_negative_acks=True)
    producer = ours.client.create_producer(topic, batching_enabled=False)
    options = {"key_shared_policy": policy, "negative_ack_redelivery_delay_ms": 200}
    first = ours.subscribe(topic, "KeyShared", "c1", **options)
    with pytest.raises(magnetar.ConsumerBusy):
        ours.subscribe(topic, "KeyShared", "plain")
    for number in range(60):
        producer.send(b"%d" % number, partition_key=f"key-{number % 3}")
    order: dict[str, list[int]] = defaultdict(list)
    refused: set[int] = set()
    second = None
    while sum(map(len, order.values())) < 60:
        for consumer in (first, second):
            if consumer is None:
                continue
            try:
                message = consumer.receive(timeout_millis=50)
            except magnetar.Timeout:
                continue
            number = int(message.data())
            if number % 7 == 3 and number not in refused:
                refused.add(number)
                consumer.negative_acknowledge(message)
                continue
            assert message.redelivery_count() == (number in refused), "a return is not counted"
            order[message.partition_key()].append(number)
            consumer.acknowledge(message)
        if second is None and sum(map(len, order.values())) > 30:
            second = ours.subscribe(topic, "KeyShared", "c2", **options)
    for key, numbers in order.items():
        assert numbers == sorted(numbers), key
        assert len(numbers) == 20
    assert len(refused) > 5
    assert second is not None
    for consumer in (first, second):
        consumer.close()
    producer.close()


def test_batches_of_a_key_keep_the_order_after_negative_acks(ours: Api) -> None:
    topic = f"persistent://public/default/nacks-{next(_numbers)}"
    policy = magnetar.ConsumerKeySharedPolicy(ordered_negative_acks=True)
    producer = ours.client.create_producer(
        topic, batching_type=magnetar.BatchingType.KeyBased, batching_max_publish_delay_ms=100
    )
    consumer = ours.subscribe(
        topic,
        "KeyShared",
        "c1",
        key_shared_policy=policy,
        negative_ack_redelivery_delay_ms=100,
        batch_index_ack_enabled=True,
    )
    for number in range(40):
        producer.send_async(b"%d" % number, lambda *_: None, partition_key=f"key-{number % 2}")
        if number % 10 == 9:
            producer.flush()
    order: dict[str, list[int]] = defaultdict(list)
    refused: set[int] = set()
    while sum(map(len, order.values())) < 40:
        message = consumer.receive(timeout_millis=TIMEOUT_MS)
        number = int(message.data())
        if number % 9 == 4 and number not in refused:
            refused.add(number)
            consumer.negative_acknowledge(message)
        elif number not in order[message.partition_key()]:
            order[message.partition_key()].append(number)
            consumer.acknowledge(message)
    assert {key: sorted(numbers) for key, numbers in order.items()} == order
    consumer.close()
    producer.close()
