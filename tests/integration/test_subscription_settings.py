"""The effect of broker settings and policies on subscriptions, with both clients: the other
choices of Failover and of Key_Shared, and delayed delivery that is not strict, off, or fixed."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_api import CLIENTS, Api, client_api
from fakes.standalone_process import StandaloneProcess
from support import wait_for

from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

TIMEOUT_MS = 20_000
QUIET_MS = 300
TICK_S = 1.0
LOOK_AHEAD = 5
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(
        tmp_path_factory.mktemp("server"),
        "--failover-non-partitioned=hash",
        "--no-subscription-key-shared-use-consistent-hashing",
        "--no-subscription-key-shared-spread-keyless",
        "--key-shared-unblocking-interval-ms=1000",
        f"--delayed-delivery-tick-time-millis={int(TICK_S * 1_000)}",
        f"--delayed-delivery-fixed-delay-detection-lookahead={LOOK_AHEAD}",
    )
    process.start()
    yield process
    process.end()


@pytest.fixture
def topic() -> str:
    return f"settings-{next(_numbers)}"


def texts(api: Api, consumer: Any) -> list[bytes]:
    """The payloads that the consumer gets until no more come for a while."""
    return [message.data() for message in api.drain(consumer)]


def now_s() -> float:
    return SystemClock().now_ms() / 1_000


def test_active_consumers_of_several_topics_are_spread_by_hash(api: Api, topic: str) -> None:
    topics = [f"{topic}-{number}" for number in range(8)]
    consumers = [api.subscribe(each, "Failover", name) for each in topics for name in ("A", "B")]
    active = [api.stats(each)["activeConsumerName"] for each in topics]
    assert set(active) == {"A", "B"}, "the first subscriber would be A everywhere"
    for consumer in consumers:
        consumer.close()


def test_hash_ranges_are_split_and_merged(api: Api, topic: str) -> None:
    def ranges() -> dict[str, list[list[int]]]:
        return {
            it["consumerName"]: it["keyHashRangeArrays"] for it in api.stats(topic)["consumers"]
        }

    one, two, three, four = (api.subscribe(topic, "KeyShared", f"C{n}") for n in (1, 2, 3, 4))
    assert ranges() == {
        "C3": [[1, 16_384]],
        "C2": [[16_385, 32_768]],
        "C4": [[32_769, 49_152]],
        "C1": [[49_153, 65_535]],
    }
    producer = api.client.create_producer(topic, batching_enabled=False)
    for key in ("key-1", "a", "你好", "Order-3459134"):  # slots 5536, 27058, 43556, 6067
        producer.send(key.encode(), partition_key=key)
    found = [sorted(texts(api, consumer)) for consumer in (one, two, three, four)]
    assert found == [[], [b"a"], [b"Order-3459134", b"key-1"], ["你好".encode()]]
    four.close()
    one.close()
    assert ranges() == {"C3": [[1, 16_384]], "C2": [[16_385, 65_535]]}
    for consumer in (two, three):
        consumer.close()
    producer.close()


def test_keys_that_have_drained_are_collected_for_the_interval(api: Api, topic: str) -> None:
    producer = api.client.create_producer(topic, batching_enabled=False)
    first = api.subscribe(topic, "KeyShared", "a")
    keys = [f"key-{number}" for number in range(30)]
    for key in keys:
        producer.send(key.encode(), partition_key=key)
    held = [first.receive(timeout_millis=TIMEOUT_MS) for _ in keys]
    second = api.subscribe(topic, "KeyShared", "b")
    for key in keys:
        producer.send(key.encode(), partition_key=key)
    stayed = texts(api, first)
    assert 0 < len(stayed) < 30
    for message in held:
        first.acknowledge(message)
    assert texts(api, second) == []
    moved = [second.receive(timeout_millis=TIMEOUT_MS).data() for _ in range(30 - len(stayed))]
    assert sorted((*stayed, *moved)) == sorted(key.encode() for key in keys)
    first.close()
    second.close()
    producer.close()


def test_messages_without_a_key_go_to_one_consumer(api: Api, topic: str) -> None:
    consumers = [api.subscribe(topic, "KeyShared", f"C{number}") for number in range(3)]
    producer = api.client.create_producer(topic, batching_enabled=False)
    for _ in range(10):
        producer.send(b"x")
    assert sorted(len(texts(api, consumer)) for consumer in consumers) == [0, 0, 10]
    for consumer in consumers:
        consumer.close()
    producer.close()


def test_all_messages_of_a_negatively_acknowledged_batch_are_redelivered(
    api: Api, topic: str
) -> None:
    consumer = api.subscribe(topic, "Shared", "c", negative_ack_redelivery_delay_ms=100)
    producer = api.client.create_producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=200
    )
    for number in range(4):
        producer.send_async(b"%d" % number, lambda *_: None)
    producer.flush()
    messages = [consumer.receive(timeout_millis=TIMEOUT_MS) for _ in range(4)]
    consumer.negative_acknowledge(messages[2])
    again = [consumer.receive(timeout_millis=TIMEOUT_MS) for _ in range(4)]
    assert [it.data() for it in again] == [b"0", b"1", b"2", b"3"]
    assert {it.redelivery_count() for it in again} == {1}
    consumer.close()
    producer.close()


def test_delayed_message_may_be_early_by_a_tick_at_most(api: Api, topic: str) -> None:
    consumer = api.subscribe(topic, "Shared", "c")
    producer = api.client.create_producer(topic)
    due = now_s() + 2.5
    producer.send(b"later", deliver_at=int(due * 1_000))
    assert consumer.receive(timeout_millis=TIMEOUT_MS).data() == b"later"
    assert now_s() >= due - TICK_S - 0.01
    consumer.close()
    producer.close()


def test_policy_turns_delayed_delivery_off(api: Api, topic: str) -> None:
    consumer = api.subscribe(topic, "Shared", "c")
    producer = api.client.create_producer(topic)
    api.call(topic, "delayedDelivery", {"active": False, "tickTime": 1_000}, method="POST")
    producer.send(b"later", deliver_after=timedelta(seconds=600))
    assert consumer.receive(timeout_millis=TIMEOUT_MS).data() == b"later"
    assert api.stats(topic)["msgDelayed"] == 0
    consumer.close()
    producer.close()


def test_fixed_delays_stop_the_reading_until_the_first_one_is_due(api: Api, topic: str) -> None:
    consumer = api.subscribe(topic, "Shared", "c")
    producer = api.client.create_producer(topic)
    for number in range(LOOK_AHEAD):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=4))
    wait_for(lambda: api.stats(topic)["msgDelayed"] == LOOK_AHEAD)
    producer.send(b"behind them")
    assert texts(api, consumer) == []
    assert "all delays are equal" in str(api.stats(topic)["waitingFor"])
    found = {consumer.receive(timeout_millis=TIMEOUT_MS).data() for _ in range(LOOK_AHEAD + 1)}
    assert found == {b"0", b"1", b"2", b"3", b"4", b"behind them"}
    consumer.close()
    producer.close()


def test_key_shared_and_delayed_delivery_can_be_turned_off(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    process = StandaloneProcess(
        tmp_path_factory.mktemp("without"),
        "--no-subscription-key-shared-enable",
        "--no-delayed-delivery-enabled",
    )
    process.start()
    try:
        for client in CLIENTS:
            with client_api(process, client) as api:
                with pytest.raises(api.module.PulsarException):
                    api.subscribe("t", "KeyShared")
                topic = f"without-{client}"
                consumer = api.subscribe(topic, "Shared")
                producer = api.client.create_producer(topic)
                producer.send(b"later", deliver_after=timedelta(seconds=600))
                assert consumer.receive(timeout_millis=TIMEOUT_MS).data() == b"later"
                consumer.close()
                producer.close()
    finally:
        process.end()
