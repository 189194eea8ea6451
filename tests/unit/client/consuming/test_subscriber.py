"""A consumer with fake brokers that deliver, redeliver, move subscriptions and die."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import (
    EARLIEST,
    TOPIC,
    A,
    B,
    client_among,
    data,
    expect_none,
    publish,
    receive,
    subscription,
)
from fakes.loops import loop_of
from fakes.session_broker import UNASKED
from support import settle, wait_until

from magnetar.client.consumer import LoopQueue
from magnetar.client.consuming.acks import (
    ACK_GROUPS_IN_FLIGHT_MAX,
    ACK_IDS_MAX,
    PENDING_IDS_MAX,
)
from magnetar.client.consuming.redelivery import REDELIVERY_IDS_MAX
from magnetar.client.errors import (
    AlreadyClosed,
    ConsumerBusy,
    CryptoError,
    CumulativeAcknowledgementNotAllowedError,
    NotAllowedError,
    OperationNotSupported,
    Timeout,
    WrongType,
)
from magnetar.client.ids import key_of
from magnetar.client.message import MessageId
from magnetar.client.options import (
    ConsumerBatchReceivePolicy,
    ConsumerKeySharedPolicy,
    ConsumerType,
)
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.framing import COMMAND_BYTES_MAX, encode_command
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_chunks, encode_message
from magnetar.schema import AutoConsumeSchema, StringSchema

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED = ConsumerType.Shared


async def test_received_message_has_all_its_parts() -> None:
    async with client_among() as (client, _):
        producer = await client.create_producer("t", producer_name="me")
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await producer.send(
            b"x",
            properties={"a": "1"},
            partition_key="k",
            ordering_key="ö",
            event_timestamp=5,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(producer.send(None))
            group.create_task(producer.send(b"y"))
        first, second, third = await receive(consumer, 3)
        assert (first.data(), first.value(), first.properties()) == (b"x", b"x", {"a": "1"})
        assert (first.partition_key(), first.ordering_key()) == ("k", "ö")
        assert (first.event_timestamp(), first.publish_timestamp()) == (5, 1_700_000_000_000)
        assert (first.topic_name(), first.producer_name()) == (TOPIC, "me")
        assert (first.redelivery_count(), first.schema_version()) == (0, "")
        assert first.message_id() == MessageId(-1, 1, 0)
        assert second.has_null_value()
        assert second.message_id() == MessageId(-1, 1, 1, 0)
        assert (third.partition_key(), third.ordering_key(), third.properties()) == ("", "", {})
        assert third.message_id() == MessageId(-1, 1, 1, 1)
        assert consumer.subscription_name() == "s"
        assert consumer.topic() == TOPIC
        assert len(consumer.consumer_name()) == 5  # generated


async def test_receive_times_out() -> None:
    async with client_among() as (client, _):
        consumer = await client.subscribe("t", "s")
        began = asyncio.get_running_loop().time()
        with pytest.raises(Timeout):
            await consumer.receive(timeout_millis=250)
        assert asyncio.get_running_loop().time() - began == pytest.approx(0.25, abs=0.01)


async def test_permits_bound_what_is_read_ahead() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 30)
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, receiver_queue_size=10
        )
        await settle()
        assert len(subscription(cluster).out) == 10
        assert data(await receive(consumer, 4)) == [0, 1, 2, 3]
        await settle()
        assert len(subscription(cluster).out) == 10
        await receive(consumer, 1)
        await settle()
        assert len(subscription(cluster).out) == 15
        assert data(await receive(consumer, 25)) == list(range(5, 30))
        flows = cluster.brokers[A].commands(pb.CommandFlow)
        assert [flow.messagePermits for flow in flows] == [10, 5, 5, 5, 5, 5]


async def test_queue_size_zero_requests_one_message_at_a_time() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 3)
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, receiver_queue_size=0
        )
        await settle()
        assert cluster.brokers[A].commands(pb.CommandFlow) == []
        assert data(await receive(consumer, 2)) == [0, 1]
        assert len(subscription(cluster).out) == 2


async def test_queue_size_zero_serves_every_waiting_call() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe("t", "s", receiver_queue_size=0)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(consumer.receive(5000)) for _ in range(3)]
            await settle()
            await publish(client, 5)
        assert sorted(data([call.result() for call in calls])) == [0, 1, 2]
        assert len(subscription(cluster).out) == 3, "no message is requested in advance"


async def test_a_long_list_of_returned_entries_goes_in_commands_of_bounded_size() -> None:
    count = REDELIVERY_IDS_MAX + 2
    async with client_among() as (client, cluster):
        producer = await client.create_producer(
            "t", batching_enabled=False, max_pending_messages=count
        )
        for number in range(count):
            producer.send_async(b"%d" % number, None, partition_key="k")
        await producer.flush()
        consumer = await client.subscribe(
            "t",
            "s",
            consumer_type=ConsumerType.KeyShared,
            initial_position=EARLIEST,
            receiver_queue_size=count,
            key_shared_policy=ConsumerKeySharedPolicy(ordered_negative_acks=True),
            negative_ack_redelivery_delay_ms=100,
        )
        [first] = await receive(consumer, 1)
        await wait_until(lambda: len(subscription(cluster).out) == count, what="deliveries")
        await settle()
        await consumer.negative_acknowledge(first)
        await settle()
        commands = cluster.brokers[A].commands(pb.CommandNegativeAck)
        sizes = [(len(it.message_ids), len(it.returned)) for it in commands]
        assert sizes == [(1, REDELIVERY_IDS_MAX - 1), (0, 2)]
        assert len({it.entryId for command in commands for it in command.returned}) == count - 1
        assert all(len(encode_command(command)) < COMMAND_BYTES_MAX for command in commands)
        assert sorted(data(await receive(consumer, count))) == list(range(count))


async def test_acknowledgements_go_together_and_are_answered() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 6, batch=2)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        for message in await receive(consumer, 6):
            await consumer.acknowledge(message)
        assert subscription(cluster).acks == []
        await asyncio.sleep(0.15)
        (ack,) = subscription(cluster).acks
        assert ack.HasField("request_id")
        assert [one.entryId for one in ack.message_id] == [0, 1, 2]
        assert subscription(cluster).unacked == {}


async def test_a_list_is_acknowledged_in_commands_of_bounded_size() -> None:
    async with client_among() as (client, cluster):
        await publish(client, ACK_IDS_MAX)
        await publish(client, 2)
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, receiver_queue_size=2000
        )
        messages = await receive(consumer, ACK_IDS_MAX + 2)
        await consumer.acknowledge([*messages[:2], *(it.message_id() for it in messages[2:])])
        await consumer.acknowledge([])
        await consumer.close()
        assert [len(ack.message_id) for ack in subscription(cluster).acks] == [ACK_IDS_MAX, 2]
        assert subscription(cluster).unacked == {}


async def test_a_list_with_an_id_that_cannot_be_acknowledged_acknowledges_nothing() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 2)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        messages = await receive(consumer, 2)
        wrong: Any = 5
        for bad, error in ((MessageId(-1, 1, 1, 2), OperationNotSupported), (wrong, WrongType)):
            with pytest.raises(error):
                await consumer.acknowledge([*messages, bad])
        await consumer.close()
        assert subscription(cluster).acks == []
        with pytest.raises(AlreadyClosed):
            await consumer.acknowledge([])


async def test_unacknowledged_rest_of_a_batch_is_redelivered() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 4, batch=4)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        messages = await receive(consumer, 4)
        await consumer.acknowledge(messages[0])
        await consumer.acknowledge(messages[2].message_id())
        await consumer.close()
        assert subscription(cluster).unacked == {(1, 0): 0b1010}
        again = await client.subscribe("t", "s")
        assert data(await receive(again, 2)) == [1, 3]
        await expect_none(again)


async def test_without_batch_indexes_only_whole_batches_are_acknowledged() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 4, batch=2)
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, batch_index_ack_enabled=False
        )
        for message in (await receive(consumer, 4))[:3]:
            await consumer.acknowledge(message)
        await consumer.close()
        assert subscription(cluster).unacked == {(1, 1): 0b11}


async def test_cumulative_acknowledgement_keeps_the_rest_of_the_batch() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 6, batch=3)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        messages = await receive(consumer, 6)
        await consumer.acknowledge_cumulative(messages[4])
        await consumer.close()
        assert subscription(cluster).unacked == {(1, 1): 0b100}
        assert subscription(cluster).acks[0].ack_type == pb.CommandAck.Cumulative


async def test_invalid_acknowledgements_are_refused() -> None:
    async with client_among() as (client, _):
        consumer = await client.subscribe("t", "s", SHARED)
        with pytest.raises(CumulativeAcknowledgementNotAllowedError):
            await consumer.acknowledge_cumulative(MessageId(-1, 1, 1))
        for unknown in (MessageId(-1, 1, 1, 2), MessageId(-1, 1, 1, 2, 2)):
            with pytest.raises(OperationNotSupported):
                await consumer.acknowledge(unknown)
        await consumer.close()
        with pytest.raises(AlreadyClosed):
            await consumer.acknowledge(MessageId(-1, 1, 1))


async def test_close_waits_until_acknowledgements_are_durable() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 1)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await consumer.acknowledge(await consumer.receive())
        cluster.brokers[A].hold_acks = True
        closing = asyncio.get_running_loop().create_task(consumer.close())
        await asyncio.sleep(1)
        assert not closing.done()
        (ack,) = subscription(cluster).acks
        answer = pb.CommandAckResponse(consumer_id=ack.consumer_id, request_id=ack.request_id)
        cluster.brokers[A].sessions[1].send(answer)
        await closing
        assert len(cluster.brokers[A].commands(pb.CommandCloseConsumer)) == 1


async def test_close_raises_the_refusal_of_an_acknowledgement() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 1)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await consumer.acknowledge(await consumer.receive())
        cluster.brokers[A].hold_acks = True
        closing = asyncio.get_running_loop().create_task(consumer.close())
        await asyncio.sleep(1)
        (ack,) = subscription(cluster).acks
        answer = pb.CommandAckResponse(
            consumer_id=ack.consumer_id,
            request_id=ack.request_id,
            error=pb.NotAllowedError,
            message="not like this",
        )
        cluster.brokers[A].sessions[1].send(answer)
        with pytest.raises(NotAllowedError, match="not like this"):
            await closing
        assert len(cluster.brokers[A].commands(pb.CommandCloseConsumer)) == 1


async def test_close_carries_acknowledgements_over_to_the_next_broker() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 2)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        messages = await receive(consumer, 2)
        cluster.brokers[A].hold_acks = True
        await consumer.acknowledge(messages[0])
        await asyncio.sleep(0.2)  # the acknowledgement is sent and has no answer
        cluster.brokers[A].kill()
        # The acknowledgement was lost with the broker.
        subscription(cluster).unacked = {(1, 0): 1, (1, 1): 1}
        await consumer.acknowledge(messages[1])  # no broker is connected
        cluster.take_over(B)
        await consumer.close()
        assert subscription(cluster).unacked == {}


async def test_close_raises_timeout_after_the_operations_time() -> None:
    async with client_among(operation_timeout_seconds=2) as (client, cluster):
        await publish(client, 1)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        cluster.brokers[A].hold_acks = True
        await consumer.acknowledge(await consumer.receive())
        with pytest.raises(Timeout, match="did not confirm all acknowledgements"):
            await consumer.close()
        with pytest.raises(AlreadyClosed):
            await consumer.receive()


@pytest.mark.parametrize("settled", [True, False])
async def test_close_says_whether_acknowledgements_are_missing(settled: bool) -> None:
    async with client_among(operation_timeout_seconds=2) as (client, cluster):
        await publish(client, 1)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await consumer.acknowledge(await consumer.receive())
        silent = pb.CommandCloseConsumer if settled else pb.CommandAck
        cluster.brokers[A].script(silent, None)
        match = "did not answer the request to close" if settled else "did not confirm all ack"
        with pytest.raises(Timeout, match=match):
            await consumer.close()


async def test_closing_consumer_that_the_broker_has_closed_neither_waits_nor_attaches() -> None:
    """A broker that hands the topic over closes the consumers, and may answer late or never."""
    async with client_among() as (client, cluster):
        consumer = await client.subscribe("t", "s", SHARED)
        broker = cluster.brokers[A]
        broker.script(pb.CommandCloseConsumer, None)
        async with asyncio.TaskGroup() as group:
            closing = group.create_task(consumer.close())
            await settle()
            (asked,) = broker.commands(pb.CommandCloseConsumer)
            (session,) = [one for one in broker.sessions if asked in one.commands]
            cluster.take_over(B)
            session.send(pb.CommandCloseConsumer(consumer_id=asked.consumer_id, request_id=UNASKED))
            await settle()
            assert closing.done()
        await asyncio.sleep(5)
        session.send(pb.CommandSuccess(request_id=asked.request_id))
        await settle()
        assert not subscription(cluster).consumers
        assert not cluster.brokers[B].commands(pb.CommandSubscribe)


async def test_close_wakes_a_waiting_receive() -> None:
    async with client_among() as (client, _):
        consumer = await client.subscribe("t", "s")
        waiting = asyncio.get_running_loop().create_task(consumer.receive())
        await settle()
        await consumer.close()
        with pytest.raises(AlreadyClosed):
            await waiting


async def test_unacknowledged_messages_are_redelivered_after_the_owners_death() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 5)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        messages = await receive(consumer, 3)
        await consumer.acknowledge(messages[0])
        await consumer.acknowledge(messages[2])
        cluster.brokers[A].kill()
        cluster.take_over(B)
        await settle()
        assert data(await receive(consumer, 3)) == [1, 3, 4]
        await expect_none(consumer)
        await asyncio.sleep(0.2)
        assert sorted(subscription(cluster).unacked) == [(1, 1), (1, 3), (1, 4)]


async def test_nacked_messages_are_redelivered_after_the_delay() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 3)
        consumer = await client.subscribe(
            "t", "s", SHARED, initial_position=EARLIEST, negative_ack_redelivery_delay_ms=1000
        )
        messages = await receive(consumer, 3)
        await consumer.negative_acknowledge(messages[1])
        await consumer.negative_acknowledge(messages[0].message_id())
        await consumer.acknowledge(messages[0])  # after its negative acknowledgement
        began = asyncio.get_running_loop().time()
        again = await consumer.receive()
        assert asyncio.get_running_loop().time() - began == pytest.approx(1, abs=0.06)
        assert (data([again]), again.redelivery_count()) == ([1], 1)
        (asked,) = cluster.brokers[A].commands(pb.CommandRedeliverUnacknowledgedMessages)
        assert [one.entryId for one in asked.message_ids] == [1]
        await expect_none(consumer)


async def test_a_nack_on_an_exclusive_subscription_starts_over() -> None:
    async with client_among() as (client, _):
        await publish(client, 4)
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, negative_ack_redelivery_delay_ms=1000
        )
        messages = await receive(consumer, 3)
        await consumer.acknowledge(messages[0])
        await consumer.negative_acknowledge(messages[1])
        await asyncio.sleep(1.1)
        assert data(await receive(consumer, 3)) == [1, 2, 3]


async def test_unacknowledged_messages_are_redelivered_after_the_timeout() -> None:
    async with client_among() as (client, _):
        await publish(client, 3)
        consumer = await client.subscribe(
            "t", "s", SHARED, initial_position=EARLIEST, unacked_messages_timeout_ms=10_000
        )
        messages = await receive(consumer, 2)
        await consumer.acknowledge(messages[0])
        await asyncio.sleep(10.2)
        assert data(await receive(consumer, 2)) == [2, 1]


async def test_many_nacks_are_divided_into_commands_within_the_limit() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe("t", "s", SHARED, negative_ack_redelivery_delay_ms=1)
        keys = [(2**63 - 1, 2**63 - 1 - number) for number in range(25_000)]
        for key in keys:
            await consumer.negative_acknowledge(MessageId(-1, *key))
        await asyncio.sleep(1)
        asked = cluster.brokers[A].commands(pb.CommandRedeliverUnacknowledgedMessages)
        assert [key_of(one) for body in asked for one in body.message_ids] == keys
        assert max(len(encode_command(body)) for body in asked) <= COMMAND_BYTES_MAX
        assert len(asked) == 3


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("stored", [4, 5, 6])
async def test_reader_gets_a_message_whose_first_chunk_is_before_its_place(
    stored: int, losses: int
) -> None:
    """The reader loses its session after it has read a message that is stored between two chunks.

    `stored`: the number of entries in the topic by then.
    """
    read, late = chunks_of(b"before", "p"), chunks_of(b"0123456", "q")
    between = b"".join(encode_message(OutgoingMessage(b"x", 1), EntryHeader("r", 1)))
    entries = [read[0], late[0], read[1], between, late[1], late[2]]
    async with client_among() as (client, cluster):
        topic = cluster.topic(TOPIC)
        for entry in entries[:stored]:
            topic.append(entry)
        reader = await client.create_reader("t", MessageId.earliest)
        assert (await reader.read_next(5000)).data() == b"before"
        assert (await reader.read_next(5000)).data() == b"x"
        await settle()
        for _ in range(losses):
            for session in list(cluster.brokers[A].sessions):
                session.stream.abort("connection lost")  # type: ignore[attr-defined]
                session.end()
            await wait_until(lambda: not reader.is_connected())
            await wait_until(reader.is_connected)
            await wait_until(reader.is_connected)
        for entry in entries[stored:]:
            topic.append(entry)
        assert (await reader.read_next(5000)).data() == b"0123456"
        assert not await reader.has_message_available()
        topic.append(between)
        assert (await reader.read_next(5000)).data() == b"x"
        await asyncio.sleep(100)
        assert reader._subscriber.stats.chunked_given_up == 0


async def test_a_reader_forgets_the_chunks_of_the_messages_that_it_has_read() -> None:
    async with client_among() as (client, cluster):
        for number in range(3):
            for entry in chunks_of(b"0123456", f"p{number}"):
                cluster.topic(TOPIC).append(entry)
        reader = await client.create_reader("t", MessageId.earliest)
        for left in (2, 1, 0):
            assert (await reader.read_next(5000)).data() == b"0123456"
            assert len(reader._subscriber.cores[0]._chunked) == left


def chunks_of(content: bytes, producer: str) -> list[bytes]:
    """The entries of a message: chunks of three bytes."""
    message, header = OutgoingMessage(content, 1), EntryHeader(producer, 1)
    chunks = encode_chunks(message, header, uuid=producer, chunk_bytes_max=3)
    return [b"".join(parts) for parts in chunks]


@pytest.mark.parametrize("is_magnetar", [True, False])
async def test_redeliver_all_drops_queued_and_stale_messages(is_magnetar: bool) -> None:
    async with client_among() as (client, cluster):
        cluster.brokers[A].drains_consumers = is_magnetar
        await publish(client, 4)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        messages = await receive(consumer, 2)
        await consumer.acknowledge(messages[0])
        consumer.redeliver_unacknowledged_messages()
        # Sent before the broker knows the new epoch, so the delivery is stale.
        (holder,) = subscription(cluster).consumers
        assert holder.epoch == (None if is_magnetar else 0)
        holder.deliver((1, 3), 1)
        assert data(await receive(consumer, 3)) == [1, 2, 3]
        await expect_none(consumer)


@pytest.mark.parametrize("is_magnetar", [True, False])
async def test_shared_consumer_receives_after_it_asked_for_redelivery_of_everything(
    is_magnetar: bool,
) -> None:
    """Apache Pulsar's brokers mark no delivery on Shared subscriptions with the epoch."""
    async with client_among() as (client, cluster):
        cluster.brokers[A].drains_consumers = is_magnetar
        await publish(client, 4)
        consumer = await client.subscribe("t", "s", SHARED, initial_position=EARLIEST)
        await consumer.acknowledge((await receive(consumer, 4))[0])
        for _ in range(2):
            consumer.redeliver_unacknowledged_messages()
            assert data(await receive(consumer, 3)) == [1, 2, 3]
        await publish(client, 1)
        assert data(await receive(consumer, 1)) == [0]
        await expect_none(consumer)


async def test_last_message_id_through_a_change_of_broker() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe("t", "s")
        assert await consumer.get_last_message_id() == MessageId(-1, -1, -1)
        await publish(client, 4, batch=2)
        assert await consumer.get_last_message_id() == MessageId(-1, 1, 1, 1)
        cluster.brokers[A].kill()
        cluster.take_over(B)
        assert await consumer.get_last_message_id() == MessageId(-1, 1, 1, 1)


async def test_unsubscribe_deletes_the_subscription_and_closes_the_consumer() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe("t", "s")
        await consumer.unsubscribe()
        assert cluster.topic(TOPIC).subscriptions == {}
        with pytest.raises(AlreadyClosed):
            await consumer.receive()
        with pytest.raises(AlreadyClosed):
            await consumer.unsubscribe()


@pytest.mark.parametrize("attached", [True, False])
async def test_late_answer_to_unsubscribe_leaves_no_subscription_at_the_next_broker(
    attached: bool,
) -> None:
    """The first broker deletes the subscription, hands the topic over, and then answers.

    `attached`: the next broker has answered the request to subscribe before.
    """
    async with client_among() as (client, cluster):
        consumer = await client.subscribe("t", "s", SHARED)
        broker, following = cluster.brokers[A], cluster.brokers[B]
        broker.script(pb.CommandUnsubscribe, None)
        if not attached:
            following.script(pb.CommandSubscribe, None)
        async with asyncio.TaskGroup() as group:
            group.create_task(consumer.unsubscribe())
            await settle()
            (asked,) = broker.commands(pb.CommandUnsubscribe)
            (session,) = [one for one in broker.sessions if asked in one.commands]
            cluster.take_over(B)
            del cluster.topic(TOPIC).subscriptions["s"]
            session.send(pb.CommandCloseConsumer(consumer_id=asked.consumer_id, request_id=UNASKED))
            await asyncio.sleep(5)
            (subscribe,) = following.commands(pb.CommandSubscribe)
            session.send(pb.CommandSuccess(request_id=asked.request_id))
            await settle()
            if not attached:
                (session,) = [one for one in following.sessions if subscribe in one.commands]
                session.handle(subscribe, None)
        await settle()
        assert not cluster.topic(TOPIC).subscriptions
        assert not any(one.consumers for one in following.sessions)


@pytest.mark.parametrize("closed", [True, False])
async def test_late_answer_to_unsubscribe_is_no_success_while_the_next_broker_is_silent(
    closed: bool,
) -> None:
    async with client_among(operation_timeout_seconds=10) as (client, cluster):
        consumer = await client.subscribe("t", "s", SHARED)
        broker = cluster.brokers[A]
        broker.script(pb.CommandUnsubscribe, None)
        cluster.brokers[B].script(pb.CommandSubscribe, None)
        loop = asyncio.get_running_loop()
        began = loop.time()
        asking = loop.create_task(consumer.unsubscribe())
        await settle()
        (asked,) = broker.commands(pb.CommandUnsubscribe)
        (session,) = [one for one in broker.sessions if asked in one.commands]
        cluster.take_over(B)
        session.send(pb.CommandCloseConsumer(consumer_id=asked.consumer_id, request_id=UNASKED))
        await asyncio.sleep(5)
        assert len(cluster.brokers[B].commands(pb.CommandSubscribe)) == 1
        session.send(pb.CommandSuccess(request_id=asked.request_id))
        await settle()
        assert not asking.done()
        if closed:
            await consumer.close()
        with pytest.raises(AlreadyClosed if closed else Timeout):
            await asking
        assert loop.time() - began == pytest.approx(5 if closed else 10, abs=0.1)


async def test_a_second_consumer_of_an_exclusive_subscription_is_refused() -> None:
    async with client_among() as (client, _):
        await client.subscribe("t", "s")
        with pytest.raises(ConsumerBusy):
            await client.subscribe("t", "s")


async def test_shared_consumers_divide_the_messages() -> None:
    async with client_among() as (client, _):
        consumers = [
            await client.subscribe("t", "s", SHARED, receiver_queue_size=5) for _ in range(2)
        ]
        await publish(client, 10)
        got = [data(await receive(consumer, 5)) for consumer in consumers]
        assert sorted(got[0] + got[1]) == list(range(10))


async def test_damaged_entry_is_reported_and_the_next_one_delivered() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 3)
        cluster.damage = lambda entry: (
            entry[:-1] + b"?" if entry is cluster.topic(TOPIC).entries[1, 1] else entry
        )
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        assert data(await receive(consumer, 2)) == [0, 2]
        await settle()
        (ack,) = subscription(cluster).acks
        assert ack.validation_error == pb.CommandAck.ChecksumMismatch
        assert [one.entryId for one in ack.message_id] == [1]


async def test_a_damaged_batch_costs_no_permits() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 80, batch=8)
        cluster.damage = lambda entry: (
            entry[:-1] + b"?" if entry is cluster.topic(TOPIC).entries[1, 0] else entry
        )
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, receiver_queue_size=8
        )
        assert data(await receive(consumer, 72)) == list(range(8, 80))


async def test_encrypted_entry_is_raised_and_left_unacknowledged() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 3)
        topic = cluster.topic(TOPIC)
        metadata = pb.MessageMetadata(producer_name="p", sequence_id=9, publish_time=1)
        metadata.encryption_keys.add(key="k", value=b"v")
        encoded = metadata.SerializeToString()
        topic.entries[1, 1] = len(encoded).to_bytes(4, "big") + encoded + b"secret"
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        raised = 0
        for _ in range(3):
            try:
                (message,) = await receive(consumer, 1)
            except CryptoError:
                raised += 1
            else:
                await consumer.acknowledge(message)
        assert raised == 1
        await consumer.close()
        acks = subscription(cluster).acks
        assert {one.entryId for ack in acks for one in ack.message_id} == {0, 2}


async def test_unanswered_request_leaves_no_state() -> None:
    queue = LoopQueue()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await queue.wait()
    assert not queue._waiters


async def test_batch_receive_returns_at_its_limit_or_timeout() -> None:
    async with client_among() as (client, _):
        await publish(client, 7)
        consumer = await client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            batch_receive_policy=ConsumerBatchReceivePolicy(5, -1, 100),
        )
        assert data(await consumer.batch_receive()) == [0, 1, 2, 3, 4]
        assert data(await consumer.batch_receive()) == [5, 6]
        assert await consumer.batch_receive() == []


async def test_batch_receive_raises_the_timeout_of_a_schema_that_is_not_fetched() -> None:
    async with client_among(operation_timeout_seconds=5) as (client, cluster):
        await publish(client, 1)
        async with await client.create_producer("t", schema=StringSchema()) as producer:
            await producer.send("x")
        consumer = await client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            schema=AutoConsumeSchema(),
            batch_receive_policy=ConsumerBatchReceivePolicy(2, -1, 100),
        )
        busy = pb.CommandGetSchemaResponse(error_code=pb.ServiceNotReady, error_message="busy")
        for broker in cluster.brokers.values():
            broker.script(pb.CommandGetSchema, *[busy] * 100)
        with pytest.raises(Timeout):
            await consumer.batch_receive()
        for broker in cluster.brokers.values():
            broker.scripted.clear()
        got = await consumer.batch_receive()
        assert [message.data() for message in got] == [b"0", b"x"]


async def test_a_batch_receive_that_is_cancelled_loses_nothing() -> None:
    async with client_among() as (client, cluster):
        producer = await publish(client, 7)
        consumer = await client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            receiver_queue_size=4,
            unacked_messages_timeout_ms=10_000,
            batch_receive_policy=ConsumerBatchReceivePolicy(100, -1, -1),
        )
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await consumer.batch_receive()
            consumer._subscriber._permits.check()
        assert data(await receive(consumer, 3)) == [0, 1, 2]
        await asyncio.sleep(9)
        assert len(subscription(cluster).deliveries) == 7
        assert max(subscription(cluster).deliveries.values()) == 1
        for number in range(7, 20):
            await producer.send(b"%d" % number)
        assert data(await receive(consumer, 17)) == list(range(3, 20))


async def test_cancelled_batch_receive_drops_messages_of_an_old_generation() -> None:
    async with client_among() as (client, _):
        await publish(client, 3)
        consumer = await client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            batch_receive_policy=ConsumerBatchReceivePolicy(100, -1, -1),
        )
        receiving = asyncio.get_running_loop().create_task(consumer.batch_receive())
        await settle()
        consumer.redeliver_unacknowledged_messages()
        await settle()
        receiving.cancel()
        await asyncio.wait([receiving])
        assert data(await receive(consumer, 3)) == [0, 1, 2]
        await expect_none(consumer)


async def test_receivers_are_served_in_order_and_a_cancelled_one_loses_nothing() -> None:
    async with client_among() as (client, _):
        consumer = await client.subscribe("t", "s")
        loop = asyncio.get_running_loop()
        waiting = [loop.create_task(consumer.receive()) for _ in range(3)]
        await settle()
        waiting[0].cancel()
        await publish(client, 2, batch=2)
        assert data([await waiting[1], await waiting[2]]) == [0, 1]


async def test_asyncio_client_refuses_listeners() -> None:
    async with client_among() as (client, _):
        with pytest.raises(NotAllowedError, match="message_listener"):
            await client.subscribe("t", "s", message_listener=print)


@pytest.mark.parametrize("batch", [1, 4])
async def test_readers_begin_at_the_start_message(batch: int) -> None:
    async with client_among() as (client, _):
        producer = await publish(client, 8, batch=batch)
        earliest = await client.create_reader("t", MessageId.earliest)
        messages = [await earliest.read_next(1000) for _ in range(8)]
        assert data(messages) == list(range(8))
        assert not await earliest.has_message_available()
        latest = await client.create_reader("t", MessageId.latest)
        assert not await latest.has_message_available()
        last = await client.create_reader("t", MessageId.latest, start_message_id_inclusive=True)
        assert await last.has_message_available()
        assert data([await last.read_next(1000)]) == [7]
        assert not await last.has_message_available()
        for inclusive in (False, True):
            reader = await client.create_reader(
                "t", messages[5].message_id(), start_message_id_inclusive=inclusive
            )
            rest = list(range(5 if inclusive else 6, 8))
            assert data([await reader.read_next(1000) for _ in rest]) == rest
            assert not await reader.has_message_available()
        await producer.send(b"8")
        assert await latest.has_message_available()
        assert data([await latest.read_next(1000)]) == [8]


@pytest.mark.parametrize("batch", [1, 4])
async def test_a_reader_continues_at_its_place_when_the_owner_dies(batch: int) -> None:
    async with client_among() as (client, cluster):
        await publish(client, 8, batch=batch)
        reader = await client.create_reader(
            "t", MessageId.earliest, start_message_id_inclusive=True
        )
        assert data([await reader.read_next(1000) for _ in range(3)]) == [0, 1, 2]
        cluster.brokers[A].kill()
        cluster.take_over(B)
        assert data([await reader.read_next(5000) for _ in range(5)]) == [3, 4, 5, 6, 7]
        assert not await reader.has_message_available()


async def test_a_reader_at_the_end_misses_nothing_when_the_owner_dies() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 4, batch=2)
        reader = await client.create_reader("t", MessageId.latest)
        cluster.brokers[A].kill()
        cluster.take_over(B)
        producer = await client.create_producer("t")
        await producer.send(b"4")  # before the reader is attached again
        assert not reader.is_connected()
        assert await reader.has_message_available()
        assert data([await reader.read_next(5000)]) == [4]


async def test_reader_acknowledges_what_it_has_read() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 6, batch=3)
        reader = await client.create_reader("t", MessageId.earliest)
        for _ in range(4):
            await reader.read_next(1000)
        await asyncio.sleep(0.2)
        (subscribed,) = cluster.topic(TOPIC).subscriptions.values()
        assert subscribed.unacked == {(1, 1): 0b111}
        assert subscribed.name.startswith("reader-")


@pytest.fixture
def _uvloop() -> Iterator[None]:
    with loop_of("uvloop"):
        yield


@pytest.mark.real_loop
@pytest.mark.usefixtures("_uvloop")
async def test_redeliveries_that_are_due_at_once_are_requested_on_uvloop() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe(
            "t",
            "s",
            ConsumerType.Shared,
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=0,
        )
        await publish(client, 3)
        for message in await receive(consumer, 3):  # due at once: uvloop's handle then has no time
            await consumer.negative_acknowledge(message)
        assert data(await receive(consumer, 3)) == [0, 1, 2]
        assert subscription(cluster).unacked


async def test_close_with_drain_continues_after_the_time_of_a_request() -> None:
    async with client_among() as (client, cluster):
        broker = cluster.brokers[A]
        broker.drains_consumers = True
        consumer = await client.subscribe("t", "s")
        late = [
            pb.CommandError(request_id=0, error=pb.ServiceNotReady, message="longer than 60 s")
            for _ in range(2)
        ]
        broker.script(pb.CommandDrainConsumer, *late, pb.CommandSuccess(request_id=0))
        await consumer.close(drain=True)
        assert len(broker.commands(pb.CommandDrainConsumer)) == 3


async def test_ordered_negative_acks_are_refused_with_a_broker_that_does_not_know_them() -> None:
    async with client_among() as (client, cluster):
        cluster.brokers[A].orders_negative_acks = False
        with pytest.raises(OperationNotSupported, match=r"ordered_negative_acks.*'fake'"):
            await client.subscribe(
                "t",
                "s",
                consumer_type=ConsumerType.KeyShared,
                key_shared_policy=ConsumerKeySharedPolicy(ordered_negative_acks=True),
            )
        assert not cluster.brokers[A].commands(pb.CommandSubscribe)


async def test_a_late_refusal_does_not_count_against_a_group_that_was_sent_again() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await producer.send(b"x")
        broker = cluster.brokers[A]
        broker.hold_acks = True
        await consumer.acknowledge(await consumer.receive(1000))
        await asyncio.sleep(0.2)
        held = subscription(cluster).consumers[0]
        held.session.remove(held)
        held.session.send(pb.CommandCloseConsumer(consumer_id=held.consumer_id, request_id=UNASKED))
        broker.hold_acks = False
        await asyncio.sleep(1)
        assert consumer.is_connected()
        first = subscription(cluster).acks[0]
        held.session.send(
            pb.CommandAckResponse(
                consumer_id=held.consumer_id,
                request_id=first.request_id,
                error=pb.ConsumerNotFound,
                message="closed",
            )
        )
        await settle()
        await consumer.close()


async def test_consumer_whose_acknowledgements_wait_requests_messages_when_they_are_confirmed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The broker confirms no acknowledgement: it can read the topic but not write the cursor."""
    async with client_among() as (client, cluster):
        broker = cluster.brokers[A]
        broker.hold_acks = True
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, receiver_queue_size=4
        )
        sent_max = ACK_GROUPS_IN_FLIGHT_MAX * ACK_IDS_MAX
        for entry in range(sent_max + PENDING_IDS_MAX):  # entries of an earlier ledger
            await consumer.acknowledge(MessageId(-1, 0, entry))
        await settle()
        await publish(client, 10)
        got = data(await receive(consumer, 4))  # permits for these four were sent before
        await expect_none(consumer)
        assert [it.getMessage() for it in caplog.records if "does not confirm" in it.getMessage()]
        broker.hold_acks = False
        acks = subscription(cluster).acks
        assert len(acks) == ACK_GROUPS_IN_FLIGHT_MAX
        for ack in list(acks):
            answer = pb.CommandAckResponse(consumer_id=ack.consumer_id, request_id=ack.request_id)
            broker.sessions[1].send(answer)
        got += data(await receive(consumer, 6))
        assert got == list(range(10))
        await consumer.close()
        assert (
            subscription(cluster).acks[-1].message_id[-1].entryId == sent_max + PENDING_IDS_MAX - 1
        )
