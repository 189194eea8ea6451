"""Subscriptions under requests of administrators and clients: skip, expire, seek, limits.

The clients are Apache's client on Pulsar's protocol and ours on gRPC. They have the same names.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest
from fakes.standalone_process import StandaloneProcess
from support import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fakes.client_api import Api

pytestmark = pytest.mark.cluster

TIMEOUT_MS = 20_000
QUIET_MS = 300
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(
        tmp_path_factory.mktemp("server"), "--message-expiry-check-interval-in-minutes=0.01"
    )
    process.start()
    yield process
    process.end()


@pytest.fixture
def topic() -> str:
    return f"t{next(_numbers)}"


def take(source: Any, count: int) -> list[Any]:
    receive = source.receive if hasattr(source, "receive") else source.read_next
    return [receive(timeout_millis=TIMEOUT_MS) for _ in range(count)]


def values(messages: list[Any]) -> list[int]:
    return [int(message.data()) for message in messages]


@pytest.mark.parametrize("kind", ["Exclusive", "Shared"])
def test_skip_and_clear_move_the_backlog_of_a_connected_consumer(
    api: Api, topic: str, kind: str
) -> None:
    consumer = api.subscribe(topic, kind=kind, receiver_queue_size=10)
    api.publish(topic, range(30))
    assert values(take(consumer, 5)) == list(range(5))
    api.call(topic, "subscription/s/skip/20", method="POST")
    assert api.stats(topic)["msgBacklog"] == 10
    rest = values(take(consumer, 10))  # up to 15 were in the receiver queue before the skip
    while rest[-1] != 29:
        rest += values(take(consumer, 1))
    assert rest[-10:] == list(range(20, 30)), rest
    api.call(topic, "subscription/s/skip_all", method="POST")
    found = api.stats(topic)
    assert (found["msgBacklog"], found["unackedMessages"]) == (0, 0)
    api.publish(topic, range(100, 103))
    assert values(take(consumer, 3)) == [100, 101, 102]


def test_messages_expire_by_request_and_by_policy(api: Api, topic: str) -> None:
    api.call(topic, "subscription/s", {"ledgerId": -1, "entryId": -1}, method="PUT")
    api.publish(topic, range(5))
    api.call(topic, "subscription/s/expireMessages/3600", method="POST")
    assert api.stats(topic)["msgBacklog"] == 5
    time.sleep(2)
    began = time.monotonic()
    api.publish(topic, range(5, 8))
    # The age exceeds that of the last three messages by at least a second.
    age_s = int(time.monotonic() - began) + 2
    api.call(topic, f"all_subscription/expireMessages/{age_s}", method="POST")
    found = api.stats(topic)
    assert (found["msgBacklog"], found["totalMsgExpired"]) == (3, 5)
    api.call(topic, "messageTTL?messageTTL=1", method="POST")
    wait_for(lambda: api.stats(topic)["totalMsgExpired"] == 8)
    assert api.stats(topic)["msgBacklog"] == 0
    consumer = api.subscribe(topic)
    assert api.is_quiet(consumer)


@pytest.mark.parametrize("kind", ["Exclusive", "Shared"])
def test_seek_delivers_from_the_given_id_or_time(api: Api, topic: str, kind: str) -> None:
    ids = api.publish(topic, range(10))
    time.sleep(0.02)
    later_ms = time.time_ns() // 1_000_000
    api.publish(topic, range(10, 15))
    consumer = api.subscribe(topic, kind=kind, start_message_id_inclusive=True)
    for message in take(consumer, 15):
        consumer.acknowledge(message)
    consumer.seek(ids[4])
    assert sorted(values(take(consumer, 11))) == list(range(4, 15))
    consumer.seek(later_ms)
    assert sorted(values(take(consumer, 5))) == list(range(10, 15))
    consumer.seek(api.module.MessageId.latest)
    assert api.is_quiet(consumer)
    consumer.seek(api.module.MessageId.earliest)
    assert sorted(values(take(consumer, 15))) == list(range(15))


def test_reset_into_a_batch_delivers_from_that_message(api: Api, topic: str) -> None:
    producer = api.client.create_producer(
        topic, batching_enabled=True, batching_max_messages=6, batching_max_publish_delay_ms=10_000
    )
    for number in range(6):
        producer.send_async(b"%d" % number, lambda *_: None)
    producer.flush()
    consumer = api.subscribe(topic)
    messages = take(consumer, 6)
    one = messages[3].message_id()
    assert one.batch_index() == 3
    consumer.acknowledge_cumulative(messages[-1])
    consumer.close()
    at = {"ledgerId": one.ledger_id(), "entryId": one.entry_id(), "batchIndex": 3}
    for excluded, expected in ((False, [3, 4, 5]), (True, [4, 5])):
        api.call(topic, "subscription/s/resetcursor", {**at, "isExcluded": excluded}, method="POST")
        consumer = api.subscribe(topic)
        assert values(take(consumer, len(expected))) == expected
        consumer.close()


def test_a_reader_can_have_the_name_of_a_durable_subscription(api: Api, topic: str) -> None:
    api.publish(topic, range(5))
    consumer = api.subscribe(topic, subscription="both")
    reader = api.client.create_reader(
        topic, api.module.MessageId.earliest, subscription_role_prefix="x"
    )
    assert values(take(reader, 5)) == values(take(consumer, 5)) == list(range(5))
    found = api.call(topic, "stats")["subscriptions"]
    assert [each["isDurable"] for each in found.values()].count(False) == 1
    reader.close()
    wait_for(lambda: list(api.call(topic, "stats")["subscriptions"]) == ["both"])


def test_policies_limit_consumers_and_subscriptions(api: Api, topic: str) -> None:
    api.call(topic, "", method="PUT")
    api.call(topic, "maxConsumersPerSubscription", 1, method="POST")
    first = api.subscribe(topic, kind="Shared")
    busy = api.module.ConsumerBusy if hasattr(api.module, "ConsumerBusy") else Exception
    with pytest.raises(busy):
        api.subscribe(topic, kind="Shared")
    api.call(topic, "maxConsumersPerSubscription", 0, method="POST")
    api.subscribe(topic, kind="Shared")
    api.call(topic, "maxSubscriptionsPerTopic", 1, method="POST")
    with pytest.raises(Exception, match=r"(?i)not.?allowed|the policies allow"):
        api.subscribe(topic, subscription="another")
    first.close()


def test_the_dispatch_rate_of_a_policy_limits_deliveries(api: Api, topic: str) -> None:
    api.publish(topic, range(60))
    api.call(
        topic,
        "subscriptionDispatchRate",
        {"dispatchThrottlingRateInMsg": 20, "ratePeriodInSecond": 1},
    )
    begin_s = time.monotonic()
    consumer = api.subscribe(topic)
    assert values(take(consumer, 60)) == list(range(60))
    assert 1.8 <= time.monotonic() - begin_s <= 8


def test_redelivery_counts_survive_a_kill(server: StandaloneProcess, api: Api, topic: str) -> None:
    api.publish(topic, range(1))
    counts = []
    for number in range(3):
        consumer = api.subscribe(topic, kind="Shared", negative_ack_redelivery_delay_ms=50)
        for _ in range(2):
            [message] = take(consumer, 1)
            counts.append(message.redelivery_count())
            consumer.negative_acknowledge(message)
        [message] = take(consumer, 1)
        counts.append(message.redelivery_count())
        if number < 2:
            # The answer means that all earlier changes of the topic's cursors are stored, too.
            other = f"subscription/other{number}"
            api.call(topic, other, {"ledgerId": -1, "entryId": -1}, method="PUT")
            api.call(topic, f"{other}/skip_all", method="POST")
            server.kill()
            server.start()
        consumer.close()
    assert counts == sorted(counts)
    assert counts[-1] >= 6
