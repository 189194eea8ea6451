"""Producers, consumers, readers and table views over several topics, with fake brokers."""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from fakes.client_world import EARLIEST, TOPIC, A, B, client_among, expect_none
from fakes.session_broker import UNASKED
from support import settle, wait_until

from magnetar.client.consuming.many import OPENING_MAX, ManySubscriber
from magnetar.client.consuming.permits import QUEUE_BYTES_MAX
from magnetar.client.consuming.sources import NAMES_AT_ONCE_MAX, Pattern
from magnetar.client.consuming.subscriber import Subscriber
from magnetar.client.errors import (
    AlreadyClosed,
    ConsumerBusy,
    CryptoError,
    InvalidConfiguration,
    InvalidTopicName,
    NotAllowedError,
    OperationNotSupported,
    Result,
    Timeout,
    TopicNotFound,
    UnknownError,
)
from magnetar.client.message import MessageId
from magnetar.client.options import (
    ConsumerKeySharedPolicy,
    ConsumerType,
    ProducerAccessMode,
    RegexSubscriptionMode,
)
from magnetar.client.policies import ConsumerDeadLetterPolicy
from magnetar.client.schema.avro import AvroSchema
from magnetar.client.schema.definition import Record, String
from magnetar.client.schema.schema import BytesSchema
from magnetar.client.table_view import MESSAGES_AT_ONCE_MAX, TableRows
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_chunks, read_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from magnetar.client.asyncio import Client, Consumer, Producer, Reader
    from magnetar.client.message import Message

T = TypeVar("T")

SHARED = ConsumerType.Shared


class Earlier(Record):
    a = String(required=True)


class Later(Record):
    a = String(required=True)
    b = String(default="-", required_default=True)


def part(index: int, topic: str = TOPIC) -> str:
    return f"{topic}-partition-{index}"


def full(name: str) -> str:
    return f"persistent://public/default/{name}"


async def publish(client: Client, count: int, topic: str = "t", first: int = 0) -> list[MessageId]:
    async with await client.create_producer(topic, batching_enabled=False) as producer:
        return [await producer.send(b"%d" % (first + number)) for number in range(count)]


async def receive(consumer: Consumer, count: int) -> list[Message]:
    return [await consumer.receive(5000) for _ in range(count)]


def numbers(messages: list[Message]) -> list[int]:
    return sorted(int(message.data()) for message in messages)


def own_tasks() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if " of " in task.get_name()}


class Turns:
    """Counts the calls of a function in each turn of the loop."""

    def __init__(self) -> None:
        self.calls = [0]

    def count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.calls[-1] += 1
            return function(*args)

        return counted

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a task, and count the calls meanwhile."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            while not task.done():
                self.calls.append(0)
                await asyncio.sleep(0)
        return task.result()


# Producing


async def test_the_acknowledgements_of_all_topics_are_durable_when_the_client_is_closed() -> None:
    """The client closes the consumer and its parts in any order, the parts first in most cases."""
    names = [f"t{number}" for number in range(20)]
    async with client_among() as (client, cluster):
        for name in names:
            await publish(client, 1, name)
        consumer = await client.subscribe(names, "s", SHARED, initial_position=EARLIEST)
        for message in await receive(consumer, len(names)):
            await consumer.acknowledge(message)
        began = asyncio.get_running_loop().time()
        await client.close()
        assert asyncio.get_running_loop().time() - began < 1
        assert all(not cluster.topic(full(it)).subscriptions["s"].unacked for it in names)


async def test_a_list_acknowledges_messages_of_several_topics() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 1, "a")
        await publish(client, 1, "b")
        consumer = await client.subscribe(["a", "b"], "s", SHARED, initial_position=EARLIEST)
        await consumer.acknowledge(await receive(consumer, 2))
        with pytest.raises(OperationNotSupported, match="names no topic"):
            await consumer.acknowledge([MessageId(-1, 1, 1)])
        await consumer.close()
        for name in ("a", "b"):
            assert cluster.topic(full(name)).subscriptions["s"].unacked == {}


async def test_messages_go_round_the_partitions() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 3
        ids = await publish(client, 9)
        assert sorted(one.partition() for one in ids) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert {one.topic_name() for one in ids} == {part(0), part(1), part(2)}
        assert [len(cluster.topic(part(index)).entries) for index in range(3)] == [3, 3, 3]


async def test_lazy_producer_begins_partitions_with_their_first_message() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 8
        producer = await client.create_producer(
            "t", lazy_start_partitioned_producers=True, batching_enabled=False
        )
        assert len(cluster.brokers[A].commands(pb.CommandProducer)) == 1
        for _ in range(3):
            await producer.send(b"x")
        assert len(cluster.brokers[A].commands(pb.CommandProducer)) <= 4
        await producer.close()


async def test_lazy_producer_numbers_its_messages_after_those_that_the_broker_has() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 4
        cluster.last_sequence_ids["p"] = 100
        producer = await client.create_producer(
            "t",
            producer_name="p",
            lazy_start_partitioned_producers=True,
            message_router=lambda message, _: int(message.data()),
        )
        async with asyncio.TaskGroup() as group:
            sends = [group.create_task(producer.send(b"%d" % (i % 3 + 1))) for i in range(6)]
        assert all(send.result().entry_id() >= 0 for send in sends)
        assert {sequence_id for sequence_id, _ in cluster.sends} == {101}
        stored = [read_entry(entry) for _, entry in cluster.sends]
        assert [one.producer_name for one in stored] == ["p"] * 3


async def test_lazy_producer_flushes_closes_and_times_out_before_its_first_attachment() -> None:
    async with client_among(operation_timeout_seconds=30) as (client, cluster):
        cluster.partitions[TOPIC] = 2
        producer = await client.create_producer(
            "t",
            lazy_start_partitioned_producers=True,
            send_timeout_millis=5000,
            message_router=lambda message, _: 1,
        )
        told: list[Result] = []
        cluster.brokers[A].script(pb.CommandProducer, None)
        producer.send_async(b"x", lambda result, _: told.append(result))
        with pytest.raises(Timeout):
            await producer.send(b"y")
        assert told == [Result.Timeout]
        producer.send_async(b"z", lambda result, _: told.append(result))
        with pytest.raises(Timeout):
            await producer.flush()
        assert told[1] is Result.Timeout
        producer.send_async(b"last", lambda result, _: told.append(result))
        await producer.close()
        assert told[2] is Result.Ok
        assert len(cluster.topic(part(1)).entries) == 1


async def test_statistics_of_a_lazy_producer_count_a_partition_that_could_not_begin() -> None:
    async with client_among(A, service_url=A) as (client, cluster):
        cluster.partitions[TOPIC] = 2
        producer = await client.create_producer(
            "t", lazy_start_partitioned_producers=True, message_router=lambda *_: 1
        )
        refusal = pb.CommandError(error=pb.NotAllowedError, message="no")
        cluster.brokers[A].script(pb.CommandProducer, refusal)
        with pytest.raises(NotAllowedError):
            await producer.send(b"x")
        await producer.send(b"y")
        stats = producer.get_stats()
        assert (stats.messages_sent, stats.messages_failed, stats.messages_stored) == (2, 1, 1)
        assert stats.pending_messages == 0


@pytest.mark.parametrize("batching", [False, True])
async def test_time_limit_of_a_lazy_producers_message_includes_the_first_attachment(
    batching: bool,
) -> None:
    async with client_among(operation_timeout_seconds=30) as (client, cluster):
        cluster.partitions[TOPIC] = 2
        producer = await client.create_producer(
            "t",
            lazy_start_partitioned_producers=True,
            batching_enabled=batching,
            send_timeout_millis=40_000,
            message_router=lambda message, _: 1,
        )
        cluster.topic(part(1)).hold_receipts = True
        cluster.brokers[A].script(pb.CommandProducer, *[busy()] * 8)
        loop = asyncio.get_running_loop()
        begun, times = loop.time(), []

        async def send() -> None:
            with pytest.raises(Timeout):
                await producer.send(b"x")
            times.append(loop.time() - begun)

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            await asyncio.sleep(1)
            group.create_task(send())
            await wait_until(lambda: cluster.topic(part(1)).entries)
            attached_s = loop.time() - begun
        assert attached_s > 2
        assert 40 <= times[0] <= times[1] <= 42
        assert times[1] >= 41


def busy() -> pb.CommandError:
    return pb.CommandError(request_id=0, error=pb.ServiceNotReady, message="scripted")


async def test_exclusive_producer_is_never_lazy() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 3
        await client.create_producer(
            "t",
            lazy_start_partitioned_producers=True,
            access_mode=ProducerAccessMode.Exclusive,
        )
        topics = [body.topic for body in cluster.brokers[A].commands(pb.CommandProducer)]
        assert topics == [part(0), part(1), part(2)]


async def test_producer_uses_added_partitions() -> None:
    async with client_among(partitions_update_s=10) as (client, cluster):
        cluster.partitions[TOPIC] = 1
        producer = await client.create_producer("t", batching_enabled=False)
        cluster.partitions[TOPIC] = 3
        await asyncio.sleep(11)
        ids = [await producer.send(b"x") for _ in range(6)]
        assert sorted(one.partition() for one in ids) == [0, 0, 1, 1, 2, 2]


async def test_limit_of_pending_messages_counts_all_partitions() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 4
        for index in range(4):
            cluster.topic(part(index)).hold_receipts = True
        told: list[Any] = []
        producer = await client.create_producer(
            "t", batching_enabled=False, max_pending_messages_across_partitions=6
        )
        for _ in range(8):
            producer.send_async(b"x", lambda result, _: told.append(result.name))
        assert told == ["ProducerQueueIsFull"] * 2


async def test_failing_router_fails_only_its_message() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        producer = await client.create_producer(
            "t", message_router=lambda message, _: int(message.data()), max_pending_messages=1
        )
        with pytest.raises(UnknownError):
            await producer.send(b"7")
        assert (await producer.send(b"1")).partition() == 1
        await producer.flush()
        assert producer.topic() == TOPIC
        assert producer.is_connected()
        assert producer.last_sequence_id() == 0


async def test_refused_partition_refuses_the_producer_and_leaves_no_task() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 3
        cluster.owners[part(2)] = B
        error = pb.CommandError(request_id=0, error=pb.TopicNotFound, message="gone")
        cluster.brokers[B].script(pb.CommandProducer, error)
        with pytest.raises(TopicNotFound):
            await client.create_producer("t")
        await settle()
        assert not own_tasks()


CREATIONS: list[Callable[[Client], Coroutine[Any, Any, Producer | Consumer | Reader]]] = [
    lambda client: client.create_producer("t"),
    lambda client: client.subscribe("t", "s"),
    lambda client: client.subscribe(["t", "u"], "s"),
    lambda client: client.subscribe(re.compile(".*"), "s"),
    lambda client: client.create_reader("t", MessageId.latest),
]


@pytest.mark.parametrize("create", CREATIONS)
async def test_cancelled_creation_leaves_no_task(
    create: Callable[[Client], Coroutine[Any, Any, Producer | Consumer | Reader]],
) -> None:
    """Cancel it when one of its requests gets no answer."""
    requests = (
        pb.CommandPartitionedTopicMetadata,
        pb.CommandLookupTopic,
        pb.CommandProducer,
        pb.CommandSubscribe,
        pb.CommandGetTopicsOfNamespace,
        pb.CommandGetLastMessageId,
    )
    for kind in requests:
        async with client_among() as (client, cluster):
            cluster.partitions[TOPIC] = 3
            cluster.topic(TOPIC)
            cluster.brokers[A].script(kind, None)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(create(client), name="creation")
                await asyncio.sleep(0.5)
                task.cancel()
            if not task.cancelled():  # this creation sends no request of this kind
                await task.result().close()
            await settle()
            assert not own_tasks()


# Consuming partitions


async def test_consumer_gets_all_partitions_and_acknowledges_each() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 3
        cluster.owners[part(1)] = B
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        assert consumer.topic() == TOPIC
        sent = await publish(client, 9)
        messages = await receive(consumer, 9)
        assert numbers(messages) == list(range(9))
        assert {message.message_id() for message in messages} == set(sent)
        for message in messages[:5]:
            await consumer.acknowledge(message)
        for message in messages[5:]:
            stored = message.message_id().serialize()
            # A deserialized id has a partition but no topic.
            await consumer.acknowledge(MessageId.deserialize(stored))
        await consumer.close()
        left = [cluster.topic(part(index)).subscriptions["s"].unacked for index in range(3)]
        assert left == [{}, {}, {}]


async def test_cumulative_acknowledgement_covers_its_partition() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await publish(client, 6)
        messages = await receive(consumer, 6)
        last = max(
            (message for message in messages if message.message_id().partition() == 1),
            key=lambda message: message.message_id(),
        )
        await consumer.acknowledge_cumulative(last)
        await consumer.close()
        left = [len(cluster.topic(part(index)).subscriptions["s"].unacked) for index in range(2)]
        assert left == [3, 0]


async def test_permits_are_shared_among_the_partitions() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 4
        await client.subscribe(
            "t",
            "s",
            receiver_queue_size=10,
            max_total_receiver_queue_size_across_partitions=20,
        )
        await settle()
        flows = cluster.brokers[A].commands(pb.CommandFlow)
        assert [body.messagePermits for body in flows] == [5, 5, 5, 5]
        with pytest.raises(InvalidConfiguration, match="receiver_queue_size"):
            await client.subscribe("t", "x", receiver_queue_size=0)


async def test_redelivery_goes_to_each_partition() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe(
            "t",
            "s",
            SHARED,
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=100,
        )
        await publish(client, 4)
        first = await receive(consumer, 4)
        await consumer.negative_acknowledge(first[0])
        again = await consumer.receive(5000)
        assert again.message_id() == first[0].message_id()
        consumer.redeliver_unacknowledged_messages()
        assert numbers(await receive(consumer, 4)) == [0, 1, 2, 3]
        await expect_none(consumer)


async def test_ordered_negative_ack_withholds_no_message_of_another_topic() -> None:
    async with client_among() as (client, cluster):
        for name in ("a", "b"):
            cluster.topic(full(name))
        consumer = await client.subscribe(
            ["a", "b"],
            "s",
            ConsumerType.KeyShared,
            key_shared_policy=ConsumerKeySharedPolicy(ordered_negative_acks=True),
        )
        first, other = [
            await client.create_producer(name, batching_enabled=False) for name in ("a", "b")
        ]
        await first.send(b"0", partition_key="k")
        [bad] = await receive(consumer, 1)
        for number in (1, 2):  # the second entry has a higher id than the message in topic "a"
            await other.send(b"%d" % number, partition_key="k")
        await wait_until(lambda: len(consumer._queue) == 2)
        await consumer.negative_acknowledge(bad)
        assert numbers(await receive(consumer, 2)) == [1, 2]


async def test_partition_moves_its_dead_letters_to_the_topic_of_all() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe(
            "t",
            "s",
            SHARED,
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=100,
            dead_letter_policy=ConsumerDeadLetterPolicy(1),
        )
        sent = await publish(client, 2)
        for _ in range(4):
            await consumer.negative_acknowledge(await consumer.receive(5000))
        await expect_none(consumer)
        assert consumer.get_stats().dead_lettered == 2
        letters = await client.subscribe("t-s-DLQ", "s", initial_position=EARLIEST)
        found = await receive(letters, 2)
        assert numbers(found) == [0, 1]
        assert {one.properties()["REAL_TOPIC"] for one in found} == {part(0), part(1)}
        assert {one.properties()["ORIGIN_MESSAGE_ID"] for one in found} == {
            f"{one.ledger_id()}:{one.entry_id()}:{one.partition()}" for one in sent
        }
        await consumer.close()
        left = [cluster.topic(part(index)).subscriptions["s"].unacked for index in range(2)]
        assert left == [{}, {}]


async def test_pause_and_statistics_cover_all_topics() -> None:
    async with client_among(partitions_update_s=10.0) as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await publish(client, 4)
        for message in await receive(consumer, 4):
            await consumer.acknowledge(message)
        counts = consumer.get_stats()
        assert (counts.messages_received, counts.acknowledged) == (4, 4)
        consumer.pause()
        cluster.partitions[TOPIC] = 3
        await asyncio.sleep(11)  # the new partition is joined, and pauses, too
        flows = cluster.brokers[A].commands(pb.CommandFlow)
        assert len({flow.consumer_id for flow in flows}) == 2
        consumer.resume()
        await publish(client, 3)
        assert numbers(await receive(consumer, 3)) == [0, 1, 2]


async def test_lost_broker_redelivers_only_its_partitions() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        cluster.owners[part(1)] = B
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await publish(client, 6)
        await settle()  # all are in the queue
        taken = await consumer.receive(5000)
        cluster.owners[part(1)] = A
        cluster.brokers[B].kill()
        await settle()
        messages = [taken, *await receive(consumer, 5)]
        got = sorted(int(message.data()) for message in messages)
        if taken.topic_name() == part(1):  # not acknowledged, so it is redelivered
            messages.append(await consumer.receive(5000))
            got = sorted({int(message.data()) for message in messages})
        assert got == list(range(6))
        await expect_none(consumer)


async def test_seek_moves_all_partitions_or_one() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, start_message_id_inclusive=True
        )
        await publish(client, 4)
        messages = await receive(consumer, 4)
        await consumer.seek(MessageId.earliest)
        assert numbers(await receive(consumer, 4)) == [0, 1, 2, 3]
        of_one = sorted(one.message_id() for one in messages if one.topic_name() == part(1))
        await consumer.seek(of_one[0])
        again = await receive(consumer, 2)
        assert {message.topic_name() for message in again} == {part(1)}
        await expect_none(consumer)
        with pytest.raises(OperationNotSupported, match="names none"):
            await consumer.seek(MessageId(-1, 1, 0))


async def test_last_message_ids_has_one_id_for_each_topic() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await publish(client, 4)
        found = await consumer.get_last_message_ids()
        assert sorted((one.topic_name(), one.entry_id()) for one in found) == [
            (part(0), 1),
            (part(1), 1),
        ]
        with pytest.raises(OperationNotSupported):
            await consumer.get_last_message_id()


async def test_unsubscribe_and_close_end_all_partitions() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s")
        await consumer.unsubscribe()
        assert not cluster.topic(part(0)).subscriptions
        assert not cluster.topic(part(1)).subscriptions
        with pytest.raises(AlreadyClosed):
            await consumer.receive()
        other = await client.subscribe("t", "s")
        await other.close()
        assert not cluster.topic(part(0)).subscriptions["s"].consumers
        await settle()
        assert not own_tasks()


async def test_consumer_joins_added_partitions_at_their_beginning() -> None:
    async with client_among(partitions_update_s=10) as (client, cluster):
        cluster.partitions[TOPIC] = 1
        consumer = await client.subscribe("t", "s")
        cluster.partitions[TOPIC] = 2
        await publish(client, 1, part(1))
        await asyncio.sleep(11)
        assert (await consumer.receive(5000)).message_id().partition() == 1


@pytest.mark.parametrize("refusals", [1, 2])
async def test_consumer_joins_partitions_unless_its_unsubscribe_deleted_subscriptions(
    refusals: int,
) -> None:
    async with client_among(partitions_update_s=10) as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s")
        for index in range(refusals):
            cluster.topic(part(index)).unsubscribe_errors.append(pb.ConsumerBusy)
        with pytest.raises(ConsumerBusy):
            await consumer.unsubscribe()
        cluster.partitions[TOPIC] = 3
        await asyncio.sleep(11)
        joined = [index for index in range(3) if cluster.topic(part(index)).subscriptions]
        assert joined == ([0] if refusals == 1 else [0, 1, 2])


async def test_consumer_follows_its_topics_once_after_the_last_unsubscribe_was_refused() -> None:
    async with client_among(partitions_update_s=10) as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s")
        broker = cluster.brokers[A]
        broker.script(pb.CommandUnsubscribe, *[None] * 4)
        calls = [asyncio.get_running_loop().create_task(consumer.unsubscribe()) for _ in range(2)]
        await settle()
        asked = broker.commands(pb.CommandUnsubscribe)
        assert len(asked) == 4
        (session,) = [one for one in broker.sessions if asked[0] in one.commands]
        for call, commands, following in ((calls[0], asked[:2], 0), (calls[1], asked[2:], 1)):
            for command in commands:
                session.error(command, pb.ConsumerBusy, "busy")
            with pytest.raises(ConsumerBusy):
                await call
            await settle()
            assert len(followers()) == following
        await consumer.close()
        await settle()
        assert not followers()


def followers() -> list[asyncio.Task[Any]]:
    """The tasks that follow the topics of a consumer."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("topics of ")]


async def test_consumer_stays_away_from_new_topics_after_it_deleted_a_subscription() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s")
        for _ in range(2):  # the first call deletes the subscription of the other partition
            cluster.topic(part(0)).unsubscribe_errors.append(pb.ConsumerBusy)
            with pytest.raises(ConsumerBusy):
                await consumer.unsubscribe()
        assert not followers()


async def test_cancelled_unsubscribe_stays_cancelled_while_the_client_ends() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s")
        cluster.brokers[A].script(pb.CommandUnsubscribe, None, None)
        core = consumer._subscriber
        assert isinstance(core, ManySubscriber)
        call = asyncio.get_running_loop().create_task(core.unsubscribe())
        await settle()
        core._parts.scope.cancel()
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()


async def test_async_for_ends_with_the_consumer() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await publish(client, 4)
        got = []
        async for message in consumer:
            got.append(message)
            if len(got) == 4:
                await consumer.close()
        assert numbers(got) == [0, 1, 2, 3]


async def test_cancelled_batch_receive_returns_its_messages() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await publish(client, 3)
        assert numbers(await consumer.batch_receive()) == [0, 1, 2]
        await publish(client, 3, first=3)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(consumer.batch_receive())
            await asyncio.sleep(0.05)
            task.cancel()
        assert numbers(await receive(consumer, 3)) == [3, 4, 5]


# Lists and patterns


async def test_list_joins_a_missing_topic_once_it_exists() -> None:
    async with client_among() as (client, cluster):
        cluster.owners[full("u")] = B
        gone = pb.CommandError(request_id=0, error=pb.TopicNotFound, message="no such topic")
        cluster.brokers[B].script(pb.CommandSubscribe, gone, gone)
        consumer = await client.subscribe(["t", "u"], "s")
        await publish(client, 1)
        assert (await consumer.receive(5000)).topic_name() == TOPIC
        await publish(client, 1, "u", first=7)
        message = await consumer.receive(30_000)
        assert (message.topic_name(), message.data()) == (full("u"), b"7")
        with pytest.raises(OperationNotSupported, match="names no topic"):
            await consumer.acknowledge(MessageId(-1, 1, 0))
        stored = message.message_id().serialize()
        await consumer.acknowledge(MessageId.deserialize(stored, topic=message.topic_name()))
        await consumer.close()
        assert not cluster.topic(full("u")).subscriptions["s"].unacked


async def test_missing_topics_of_a_list_take_no_share_of_the_queue() -> None:
    async with client_among() as (client, cluster):
        missing = [full(f"u{number}") for number in range(9)]
        cluster.owners.update(dict.fromkeys(missing, B))
        gone = pb.CommandError(request_id=0, error=pb.TopicNotFound, message="no such topic")
        cluster.brokers[B].script(pb.CommandSubscribe, *[gone] * 9)
        consumer = await client.subscribe(
            ["t", *missing], "s", max_total_receiver_queue_size_across_partitions=1000
        )
        await asyncio.sleep(1)
        [core] = consumer._subscriber.cores
        assert core._permits._messages_max == 1000
        assert core._permits._bytes_max == QUEUE_BYTES_MAX


@pytest.mark.parametrize("closes", [False, True])
async def test_many_missing_topics_of_a_list_divide_the_queue_once(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More topics than the consumer joins at the same time, so that they fail in several turns."""
    divisions = 0
    divide = ManySubscriber._share_queue

    def counted(core: ManySubscriber) -> None:
        nonlocal divisions
        divisions += 1
        divide(core)

    monkeypatch.setattr(ManySubscriber, "_share_queue", counted)
    async with client_among() as (client, cluster):
        missing = [full(f"u{number}") for number in range(3 * OPENING_MAX)]
        cluster.owners.update(dict.fromkeys(missing, B))
        gone = pb.CommandError(request_id=0, error=pb.TopicNotFound, message="no such topic")
        cluster.brokers[B].script(pb.CommandSubscribe, *[gone] * len(missing))
        consumer = await client.subscribe(["t", *missing], "s")
        assert divisions == 1  # before the topics failed
        if closes:
            await consumer.close()
        await asyncio.sleep(1)
        assert divisions == (1 if closes else 2)


async def test_list_begins_although_a_lookup_says_that_a_topic_is_missing() -> None:
    async with client_among() as (client, cluster):
        missing = pb.CommandPartitionedTopicMetadataResponse(
            request_id=0,
            response=pb.CommandPartitionedTopicMetadataResponse.Failed,
            error=pb.TopicNotFound,
            message="no such topic",
        )
        cluster.brokers[A].script(pb.CommandPartitionedTopicMetadata, missing)
        gone = pb.CommandError(request_id=0, error=pb.TopicNotFound, message="no such topic")
        cluster.brokers[B].script(pb.CommandSubscribe, gone)
        cluster.owners[full("u")] = B
        consumer = await client.subscribe(["u", "t"], "s")
        cluster.partitions[full("u")] = 1
        await publish(client, 1, "u")
        message = await consumer.receive(30_000)
        assert message.topic_name() == f"{full('u')}-partition-0"


async def test_pattern_joins_new_topics_at_once_and_leaves_deleted_ones() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(full("a1"))
        cluster.topic(full("b1"))
        consumer = await client.subscribe(re.compile("public/default/a.*"), "s")
        assert consumer.topic() == "persistent://public/default/a.*"
        await settle()
        cluster.announce(new=[full("a2"), full("b2")])
        await publish(client, 1, "a2")
        message = await consumer.receive(1000)
        assert message.topic_name() == full("a2")
        assert not cluster.topic(full("b1")).subscriptions
        cluster.announce(deleted=[full("a1")])
        await asyncio.sleep(0.1)
        assert [body.topic for body in cluster.brokers[A].commands(pb.CommandSubscribe)] == [
            full("a1"),
            full("a2"),
        ]
        assert all(
            not body.force_topic_creation
            for body in cluster.brokers[A].commands(pb.CommandSubscribe)
        )
        assert full("a1") not in cluster.topics


async def test_a_topic_that_is_created_again_does_not_have_the_old_schema() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(full("a1"))
        consumer = await client.subscribe(
            re.compile("a.*"), "s", initial_position=EARLIEST, schema=AvroSchema(Later)
        )
        for kind, value in ((Earlier, Earlier(a="x")), (Later, Later(a="x", b="y"))):
            async with await client.create_producer("a1", schema=AvroSchema(kind)) as producer:
                await producer.send(value)
            message = await consumer.receive(5000)
            assert message.value().b == getattr(value, "b", "-")
            cluster.schemas.pop(full("a1"))
            cluster.announce(deleted=[full("a1")])
            cluster.announce(new=[full("a1")])
            await asyncio.sleep(0.1)
        await consumer.close()


@pytest.mark.parametrize("topics", ["t", ["t", "u"]], ids=["topic", "list"])
async def test_schema_of_a_topic_that_is_made_again_before_a_consumer_attaches_is_its_own(
    topics: str | list[str],
) -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe(
            topics, "s", initial_position=EARLIEST, schema=AvroSchema(Later)
        )
        for kind, value in ((Earlier, Earlier(a="x")), (Later, Later(a="x", b="y"))):
            async with await client.create_producer("t", schema=AvroSchema(kind)) as producer:
                await producer.send(value)
            message = await consumer.receive(5000)
            assert message.value().b == getattr(value, "b", "-")
            await consumer.acknowledge(message)
            cluster.schemas.pop(TOPIC)  # the topic is deleted, and the broker creates it again
            (attached,) = cluster.topic(TOPIC).subscriptions["s"].consumers
            attached.session.send(
                pb.CommandCloseConsumer(consumer_id=attached.consumer_id, request_id=UNASKED)
            )
            attached.session.remove(attached)
            await asyncio.sleep(1)
            assert message.value().b == getattr(value, "b", "-")
        await consumer.close()


async def test_pattern_ignores_a_topic_whose_name_is_not_supported() -> None:
    async with client_among() as (client, cluster):
        cluster.topic("persistent://public/cluster/default/a0")  # of Pulsar's first version
        cluster.topic(full("a1"))
        consumer = await client.subscribe(
            re.compile("a.*"), "s", initial_position=EARLIEST, pattern_auto_discovery_period=5
        )
        cluster.announce(new=["persistent://public/cluster/default/a2"])
        await publish(client, 1, "a1")
        await receive(consumer, 1)


async def test_pattern_finds_topics_that_were_created_while_no_broker_announced() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(full("a1"))
        consumer = await client.subscribe(re.compile("a.*"), "s")
        await settle()
        cluster.brokers[A].kill()
        cluster.take_over(B)
        cluster.brokers[A].sessions.clear()
        for name in ("a1", "a2"):
            cluster.topic(full(name))
            cluster.owners[full(name)] = B
        await publish(client, 1, "a2")
        assert (await consumer.receive(10_000)).topic_name() == full("a2")


async def test_pattern_polls_a_broker_that_announces_nothing() -> None:
    async with client_among() as (client, cluster):
        refusal = pb.CommandError(request_id=0, error=pb.NotAllowedError, message="no watches here")
        cluster.brokers[A].script(pb.CommandWatchTopicList, *[refusal] * 10)
        consumer = await client.subscribe(re.compile("a.*"), "s", pattern_auto_discovery_period=5)
        await publish(client, 1, "a1")
        assert (await consumer.receive(10_000)).topic_name() == full("a1")


@pytest.mark.parametrize(
    ("pattern", "topics"),
    [
        ("a1|b1", ["a1", "b1"]),
        ("public/default/a1|b1", ["a1", "b1"]),
        ("(?i)A.|c1", ["a1", "a2", "c1"]),
        ("(?i)persistent://public/default/A.", ["a1", "a2"]),
        ("^persistent://public/default/a1$", ["a1"]),
        ("(?x) a1|b1  # two of them", ["a1", "b1"]),
    ],
)
async def test_pattern_with_alternatives_and_flags_covers_whole_names(
    pattern: str, topics: list[str]
) -> None:
    async with client_among() as (client, cluster):
        for topic in ("a1", "a2", "b1", "c1"):
            cluster.topic(full(topic))
        await client.subscribe(re.compile(pattern), "s")
        subscribed = cluster.brokers[A].commands(pb.CommandSubscribe)
        assert sorted(body.topic for body in subscribed) == [full(topic) for topic in topics]


async def test_other_tasks_run_while_a_pattern_is_compared_with_many_names() -> None:
    async with client_among() as (client, _):
        count, turns = 3 * NAMES_AT_ONCE_MAX, Turns()
        await client.get_topic_partitions("t")  # begins the client's tasks
        pattern = Pattern(
            re.compile("a.*"),
            RegexSubscriptionMode.PersistentOnly,
            60.0,
            client.parts,
            turns.count(lambda *_: False),
        )
        names = [full(f"a{number}") for number in range(count)]

        async def listed() -> list[str]:
            return names

        pattern._list = listed  # type: ignore[method-assign]
        assert await turns.during(pattern.first()) == names
        assert sum(turns.calls) == count
        assert max(turns.calls) <= NAMES_AT_ONCE_MAX


async def test_other_tasks_run_while_a_consumer_begins_with_many_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 3 * OPENING_MAX
        turns = Turns()
        monkeypatch.setattr(ManySubscriber, "_add", turns.count(ManySubscriber._add))
        consumer = await turns.during(client.subscribe("t", "s"))
        assert consumer.is_connected()
        assert sum(turns.calls) == 3 * OPENING_MAX
        assert max(turns.calls) <= OPENING_MAX


async def test_consumer_that_is_closed_while_it_begins_with_many_topics_leaves_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 3 * OPENING_MAX
        turns = Turns()
        monkeypatch.setattr(ManySubscriber, "_add", turns.count(ManySubscriber._add))

        async def subscribe() -> None:
            with pytest.raises(AlreadyClosed):
                await client.subscribe("t", "s")

        async with asyncio.TaskGroup() as group:
            group.create_task(subscribe())
            while not sum(turns.calls):  # noqa: ASYNC110 - counts turns of the loop
                await asyncio.sleep(0)
            assert sum(turns.calls) < 3 * OPENING_MAX
            await client.close()
        assert not own_tasks()
        assert not cluster.brokers[A].commands(pb.CommandSubscribe)


@pytest.mark.parametrize("pattern", ["a/b", "x://a/b/c", "persistent://a"])
async def test_pattern_without_namespace_is_refused(pattern: str) -> None:
    async with client_among() as (client, _):
        with pytest.raises(InvalidTopicName):
            await client.subscribe(re.compile(pattern), "s")


# Readers and table views


async def read(reader: Reader, count: int) -> list[Message]:
    return [await reader.read_next(5000) for _ in range(count)]


async def test_reader_reads_all_partitions_and_survives_their_brokers() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        cluster.owners[part(1)] = B
        await publish(client, 6)
        reader = await client.create_reader("t", MessageId.earliest)
        first = await read(reader, 3)
        cluster.owners[part(1)] = A
        cluster.brokers[B].kill()
        rest = await read(reader, 3)
        assert numbers(first + rest) == list(range(6))  # none twice
        assert not await reader.has_message_available()
        with pytest.raises(OperationNotSupported, match="start_message_id"):
            await client.create_reader("t", MessageId(-1, 1, 0))


async def test_reader_at_latest_sees_only_what_follows() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        await publish(client, 4)
        reader = await client.create_reader("t", MessageId.latest)
        assert not await reader.has_message_available()
        await publish(client, 2, first=4)
        assert await reader.has_message_available()
        assert numbers(await read(reader, 2)) == [4, 5]


async def test_a_list_may_name_a_topic_and_one_of_its_partitions() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        consumer = await client.subscribe(
            ["t", part(1)], "s", SHARED, initial_position=EARLIEST, receiver_queue_size=2
        )
        await publish(client, 20)
        assert numbers(await receive(consumer, 20)) == list(range(20))
        assert len(cluster.topic(part(1)).subscriptions["s"].consumers) == 1
        await consumer.close()
        assert cluster.topic(part(1)).subscriptions["s"].consumers == []


async def test_a_queue_is_divided_once_after_many_topics_were_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 50
        consumer = await client.subscribe("t", "s")
        limits: list[int] = []
        monkeypatch.setattr(
            Subscriber, "limit_queue", lambda _, messages_max, bytes_max: limits.append(bytes_max)
        )
        core = consumer._subscriber
        assert isinstance(core, ManySubscriber)
        core.on_topics_changed([], [part(index) for index in range(40)])
        assert limits == [QUEUE_BYTES_MAX // 10] * 10


async def put(client: Client, **rows: bytes) -> None:
    async with await client.create_producer("t") as producer:
        for key, value in rows.items():
            await producer.send(value, partition_key=key)


@pytest.mark.parametrize("partitions", [0, 3])
async def test_table_view_holds_the_last_value_of_each_key(partitions: int) -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = partitions
        await put(client, a=b"1", b=b"2", c=b"3")
        await put(client, a=b"4", b=b"")
        table = await client.create_table_view("t", subscription_name="tv")
        assert (len(table), table.get("a"), table.get("b"), table.get("c")) == (2, b"4", None, b"3")
        assert str(table) == "TableView(topic=t, subscription=tv)"
        seen: list[tuple[str, bytes]] = []
        table.for_each(lambda key, value: seen.append((key, value)))
        assert sorted(seen) == [("a", b"4"), ("c", b"3")]
        heard: list[tuple[str, bytes]] = []
        await table.for_each_and_listen(lambda key, value: heard.append((key, value)))
        await put(client, c=b"", d=b"5")
        await asyncio.sleep(0.1)
        assert sorted(heard) == [("a", b"4"), ("c", b""), ("c", b"3"), ("d", b"5")]
        assert (len(table), table.get("d")) == (2, b"5")
        await table.close()
        await settle()
        assert not own_tasks()


@pytest.mark.parametrize("end", ["corrupt", "chunk"])
async def test_table_view_opens_although_the_last_entry_of_the_topic_holds_no_message(
    end: str,
) -> None:
    async with client_among() as (client, cluster):
        await put(client, a=b"1")
        if end == "corrupt":
            cluster.damage = lambda entry: entry[:-1] + b"?" if b"broken" in entry else entry
            await put(client, a=b"broken")
        else:  # the producer of the last entry died before its last chunk
            message = OutgoingMessage(b"12345678", 1)
            first, _ = encode_chunks(message, EntryHeader("p", 1), uuid="u", chunk_bytes_max=4)
            cluster.topic(TOPIC).append(b"".join(first))
        async with asyncio.timeout(100):
            table = await client.create_table_view("t")
        assert table.get("a") == b"1"
        reader = await client.create_reader("t", MessageId.earliest)
        assert (await reader.read_next()).data() == b"1"
        await asyncio.sleep(100)
        assert not await reader.has_message_available()
        await put(client, b=b"2")
        assert await reader.has_message_available()
        assert (await reader.read_next()).data() == b"2"
        assert table.get("b") == b"2"


@pytest.mark.parametrize("partitions", [0, 3])
async def test_table_view_of_a_busy_topic_opens_with_the_rows_of_that_time(partitions: int) -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = partitions
        await put(client, a=b"1", b=b"2", c=b"3")
        producer = await client.create_producer("t", batching_enabled=False)

        async def write() -> None:
            for number in range(2000):
                producer.send_async(b"%d" % number, None, partition_key=f"k{number % 10}")
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            writing = group.create_task(write())
            table = await client.create_table_view("t")
            assert not writing.done(), "the view does not wait for later messages"
            assert (table.get("a"), table.get("b"), table.get("c")) == (b"1", b"2", b"3")
        await asyncio.sleep(1)
        assert (len(table), table.get("k9")) == (13, b"1999")


@pytest.mark.parametrize("begins", [True, False], ids=["backlog", "later"])
async def test_other_tasks_run_while_a_table_view_reads_many_messages(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_among() as (client, _):
        turns = Turns()
        monkeypatch.setattr(TableRows, "_on_message", turns.count(TableRows._on_message))
        if not begins:
            table = await client.create_table_view("t")
        count = 5 * MESSAGES_AT_ONCE_MAX
        producer = await client.create_producer("t")

        async def publish() -> None:
            for number in range(count):  # a few batches, which arrive together
                producer.send_async(b"%d" % number, None, partition_key="k")
            await producer.flush()
            while not begins and table.get("k") != b"%d" % (count - 1):  # noqa: ASYNC110
                await asyncio.sleep(0)

        await turns.during(publish())
        if begins:
            table = await turns.during(client.create_table_view("t"))
        assert table.get("k") == b"%d" % (count - 1)
        assert sum(turns.calls) == count
        assert max(turns.calls) <= MESSAGES_AT_ONCE_MAX


class Strange(BytesSchema):
    """A schema that fails on some payloads in a way of its own."""

    def decode(self, data: bytes) -> bytes:
        if data == b"bad":
            raise RuntimeError("no idea")
        return data


async def test_table_view_continues_after_a_message_that_it_cannot_read() -> None:
    async with client_among() as (client, _):
        table = await client.create_table_view("t", schema=Strange())
        table._rows._queue.put_error(CryptoError("a message that cannot be decrypted"))
        await put(client, a=b"bad", b=b"2")
        await asyncio.sleep(1)
        assert (len(table), table.get("b")) == (1, b"2")
        producer = await client.create_producer("t")  # the client lives
        await producer.send(b"3", partition_key="b")
        await asyncio.sleep(0.1)
        assert table.get("b") == b"3"
        await table.close()
        await settle()
        assert not [task for task in own_tasks() if "table view" in task.get_name()]


async def test_consumed_batches_of_idle_topics_are_freed() -> None:
    """The client keeps no message that the program has dropped."""
    topics, size = 20, 1 << 20
    async with client_among() as (client, _):
        for number in range(topics):
            async with await client.create_producer(f"t{number}") as producer:
                for _ in range(4):
                    producer.send_async(bytes(size // 4), None)
        names = [full(f"t{number}") for number in range(topics)]
        tracemalloc.start()
        try:
            consumer = await client.subscribe(names, "s", initial_position=EARLIEST)
            for _ in range(4 * topics):
                await consumer.acknowledge(await consumer.receive(5000))
            await asyncio.sleep(1)
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert held < 4 * size, f"{held / size:.1f} of {topics} MiB are held"
