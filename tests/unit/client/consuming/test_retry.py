"""Consumers with a retry topic over one topic, partitions, a list and a pattern; fake brokers."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import EARLIEST, TOPIC, A, client_among, expect_none
from support import settle

from magnetar.client.errors import (
    ConsumerBusy,
    InvalidConfiguration,
    OperationNotSupported,
    TopicTerminated,
)
from magnetar.client.message import MessageId
from magnetar.client.options import ConsumerType
from magnetar.client.policies import ConsumerDeadLetterPolicy
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.session_broker import FakeBrokers

    from magnetar.client.asyncio import Client, Consumer
    from magnetar.client.message import Message

SHARED = ConsumerType.Shared
NOW = timedelta(0)


def full(name: str) -> str:
    return f"persistent://public/default/{name}"


async def publish(client: Client, topic: str, *values: bytes) -> None:
    async with await client.create_producer(topic, batching_enabled=False) as producer:
        for value in values:
            await producer.send(value, {"a": "1"}, partition_key="k", ordering_key="o")


async def receive(consumer: Consumer, count: int) -> list[Message]:
    return [await consumer.receive(5000) for _ in range(count)]


def data(messages: list[Message]) -> list[bytes]:
    return sorted(message.data() for message in messages)


def unacknowledged(cluster: FakeBrokers, *topics: str) -> list[Any]:
    return [cluster.topic(it).subscriptions["s"].unacked for it in topics]


@asynccontextmanager
async def retrying(
    topics: Any, names: list[str], **options: Any
) -> AsyncIterator[tuple[Client, FakeBrokers, Consumer]]:
    """A consumer of `topics` with one pass of its retry topic. The topics `names` exist before."""
    async with client_among() as (client, cluster):
        for name in names:
            cluster.topic(full(name))
        options.setdefault("dead_letter_policy", ConsumerDeadLetterPolicy(1))
        consumer = await client.subscribe(
            topics, "s", SHARED, initial_position=EARLIEST, enable_retry=True, **options
        )
        yield client, cluster, consumer


async def dead_letters(client: Client, topic: str, count: int) -> list[Message]:
    consumer = await client.subscribe(topic, "inspect", initial_position=EARLIEST)
    found = await receive(consumer, count)
    await expect_none(consumer)
    return found


@pytest.mark.parametrize(
    ("topics", "letters"),
    [
        (["b", "a"], "a-s"),  # the first in alphabetical order, as in Apache's Java client
        (["b", full("a")], "a-s"),
        (["b", "non-persistent://public/default/a"], "b-s"),
        (re.compile("public/default/[ab]"), "s"),
    ],
)
async def test_several_topics_share_a_retry_topic_and_a_dead_letter_topic(
    topics: Any, letters: str
) -> None:
    async with retrying(topics, ["a", "b"]) as (client, cluster, consumer):
        second = "non-persistent://public/default/a" if letters == "b-s" else "a"
        await publish(client, second, b"1")
        await publish(client, "b", b"2")
        for message in await receive(consumer, 2):
            await consumer.reconsume_later(message, NOW, {"why": "x"})
        again = await receive(consumer, 2)
        assert data(again) == [b"1", b"2"]
        assert {one.topic_name() for one in again} == {full(f"{letters}-RETRY")}
        for one in again:
            assert (one.partition_key(), one.ordering_key()) == ("k", "o")
            properties = one.properties()
            assert (properties["a"], properties["why"]) == ("1", "x")
            assert (properties["RECONSUMETIMES"], properties["DELAY_TIME"]) == ("1", "0")
            await consumer.reconsume_later(one, NOW)
        dead = await dead_letters(client, full(f"{letters}-DLQ"), 2)
        assert data(dead) == [b"1", b"2"]
        origins = {one.properties()["REAL_TOPIC"].rpartition("/")[2] for one in dead}
        assert origins == {"a", "b"}
        stats = consumer.get_stats()
        assert (stats.reconsumed_later, stats.dead_lettered, stats.acknowledged) == (2, 2, 4)
        await expect_none(consumer)
        await consumer.close()
        left = unacknowledged(cluster, full("b"), full(f"{letters}-RETRY"))
        assert left == [{}, {}]


async def test_partitions_share_a_retry_topic() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe(
            "t", "s", SHARED, initial_position=EARLIEST, enable_retry=True
        )
        async with await client.create_producer("t", batching_enabled=False) as producer:
            sent = [await producer.send(b"%d" % number) for number in range(4)]
        for message in await receive(consumer, 4):
            await consumer.reconsume_later(message, NOW)
        again = await receive(consumer, 4)
        assert {one.topic_name() for one in again} == {f"{TOPIC}-s-RETRY"}
        assert {one.properties()["REAL_TOPIC"] for one in again} == {TOPIC}
        assert {one.properties()["ORIGIN_MESSAGE_ID"] for one in again} == {
            f"{one.ledger_id()}:{one.entry_id()}:{one.partition()}" for one in sent
        }
        await consumer.acknowledge(again)
        await consumer.close()
        parts = [f"{TOPIC}-partition-{index}" for index in range(2)]
        assert unacknowledged(cluster, *parts, f"{TOPIC}-s-RETRY") == [{}, {}, {}]


async def test_retry_topic_with_partitions_is_read_whole() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[full("later")] = 3
        consumer = await client.subscribe(
            ["t", "u"],
            "s",
            SHARED,
            initial_position=EARLIEST,
            enable_retry=True,
            dead_letter_policy=ConsumerDeadLetterPolicy(3, retry_letter_topic="later"),
        )
        await publish(client, "t", *(b"%d" % number for number in range(6)))
        for message in await receive(consumer, 6):
            await consumer.reconsume_later(message, NOW)
        again = await receive(consumer, 6)
        parts = {f"{full('later')}-partition-{index}" for index in range(3)}
        assert {one.topic_name() for one in again} <= parts
        assert data(again) == [b"%d" % number for number in range(6)]
        await consumer.negative_acknowledge(again[0])
        await consumer.acknowledge(again)
        await consumer.close()
        assert unacknowledged(cluster, full("t"), *parts) == [{}, {}, {}, {}]


async def test_pattern_leaves_the_letter_topics_of_its_subscription_out() -> None:
    """A consumer of its own dead letters would move them again without end."""
    names = ["a", "s-RETRY", "s-DLQ", "a-s-DLQ", "a-s-RETRY", "a-other-DLQ"]
    async with retrying(re.compile("public/default/.*"), names) as (client, cluster, consumer):
        for name in names:
            await publish(client, name, name.encode())
        got = await receive(consumer, 3)
        assert data(got) == [b"a", b"a-other-DLQ", b"s-RETRY"]
        await expect_none(consumer)
        cluster.announce(new=[full("b"), full("b-s-DLQ")])
        await publish(client, "b", b"b")
        await publish(client, "b-s-DLQ", b"dead")
        assert data(await receive(consumer, 1)) == [b"b"]
        await expect_none(consumer)


async def test_pattern_consumes_the_letter_topics_of_another_subscription() -> None:
    """The letters of `a-s` for the topic `t` look like letters of `s` for a topic `t-a`."""
    names = ["t", "t-s-DLQ", "t-a-s-DLQ", "t-a-s-RETRY"]
    pattern = re.compile("public/default/t(-.*-(DLQ|RETRY))?")
    async with retrying(pattern, names) as (client, _, consumer):
        for name in names:
            await publish(client, name, name.encode())
        assert data(await receive(consumer, 3)) == [b"t", b"t-a-s-DLQ", b"t-a-s-RETRY"]
        await expect_none(consumer)


async def test_pattern_with_a_dead_letter_policy_leaves_its_dead_letters_out() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(full("t1"))
        consumer = await client.subscribe(
            re.compile("public/default/t.*"),
            "s",
            SHARED,
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=10,
            dead_letter_policy=ConsumerDeadLetterPolicy(1, dead_letter_topic="trash"),
            pattern_auto_discovery_period=1,
        )
        await publish(client, "t1", b"bad")
        for _ in range(2):
            await consumer.negative_acknowledge(await consumer.receive(5000))
        await expect_none(consumer)
        assert data(await dead_letters(client, "trash", 1)) == [b"bad"]
        await expect_none(consumer)


async def test_no_message_arrives_before_the_retry_topic_has_its_subscription() -> None:
    async with retrying(["a", "b"], ["a", "b"]) as (_, cluster, consumer):
        await settle()
        kinds = [
            type(command)
            for session in cluster.brokers[A].sessions
            for command in session.commands
            if isinstance(command, pb.CommandSubscribe | pb.CommandFlow)
        ]
        first = kinds.index(pb.CommandFlow)
        assert kinds[:first].count(pb.CommandSubscribe) == 3
        assert kinds.count(pb.CommandFlow) == 3
        assert consumer.is_connected()


async def test_failed_copy_leaves_the_message_unacknowledged() -> None:
    async with retrying(["a", "b"], ["a", "b"]) as (client, cluster, consumer):
        await publish(client, "b", b"x")
        message = await consumer.receive(5000)
        refusal = pb.CommandError(error=pb.TopicTerminatedError, message="terminated")
        cluster.brokers[A].script(pb.CommandProducer, refusal)
        with pytest.raises(TopicTerminated):
            await consumer.reconsume_later(message, NOW)
        await consumer.close()
        assert len(cluster.topic(full("b")).subscriptions["s"].unacked) == 1


async def test_calls_cover_all_topics_and_seek_leaves_the_retry_topic() -> None:
    async with retrying(["a", "b"], ["a", "b"]) as (client, cluster, consumer):
        assert consumer.topic() == f"{full('a')},{full('b')}"
        await publish(client, "a", b"1")
        await publish(client, "b", b"2")
        first = await receive(consumer, 2)
        await consumer.reconsume_later(first[0], NOW)
        (again,) = await receive(consumer, 1)
        await consumer.acknowledge(again)
        await consumer.acknowledge(first[1])
        with pytest.raises(OperationNotSupported, match="names no topic"):
            await consumer.acknowledge(MessageId(-1, 1, 1))
        last = await consumer.get_last_message_ids()
        assert [one.topic_name() for one in last] == [
            full("a"),
            full("b"),
            full("a-s-RETRY"),
        ]
        await consumer.seek(MessageId.earliest)
        assert data(await receive(consumer, 2)) == [b"1", b"2"]
        await expect_none(consumer)
        consumer.pause()
        consumer.resume()
        await consumer.unsubscribe()
        for name in ("a", "b", "a-s-RETRY"):
            assert "s" not in cluster.topic(full(name)).subscriptions


@pytest.mark.parametrize("refused", ["a", "a-s-RETRY"])
async def test_letters_are_kept_until_the_subscriptions_of_all_topics_are_deleted(
    refused: str,
) -> None:
    async with retrying(["a", "b"], ["a", "b"]) as (client, cluster, consumer):
        await publish(client, "a", b"1")
        await consumer.reconsume_later(await consumer.receive(5000), timedelta(hours=1))
        cluster.topic(full(refused)).unsubscribe_errors.append(pb.ConsumerBusy)
        with pytest.raises(ConsumerBusy):
            await consumer.unsubscribe()
        assert "s" in cluster.topic(full("a-s-RETRY")).subscriptions
        await consumer.unsubscribe()
        for name in ("a", "b", "a-s-RETRY"):
            assert "s" not in cluster.topic(full(name)).subscriptions


async def test_a_cancelled_close_does_not_wait_for_the_producers_of_letters() -> None:
    async with retrying(["a", "b"], ["a", "b"]) as (client, cluster, consumer):
        await publish(client, "a", b"x")
        await consumer.reconsume_later((await receive(consumer, 1))[0], NOW)
        for command in (pb.CommandCloseConsumer, pb.CommandCloseProducer):
            cluster.brokers[A].script(command, *[None] * 9)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await consumer.close()
        assert loop.time() - began == pytest.approx(1)
        assert not client.parts.live


async def test_impossible_options_are_refused_and_leave_nothing() -> None:
    async with client_among() as (client, cluster):
        with pytest.raises(InvalidConfiguration, match="receiver_queue_size"):
            await client.subscribe(["a", "b"], "s", enable_retry=True, receiver_queue_size=0)
        with pytest.raises(InvalidConfiguration, match="only the retry topic"):
            await client.subscribe(
                ["later"],
                "s",
                enable_retry=True,
                dead_letter_policy=ConsumerDeadLetterPolicy(1, retry_letter_topic="later"),
            )
        await settle()
        assert not any(broker.commands(pb.CommandSubscribe) for broker in cluster.brokers.values())
