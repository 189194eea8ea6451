"""Seeks that succeed, are refused, lose the connection, or get no answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import (
    EARLIEST,
    A,
    B,
    client_among,
    data,
    expect_none,
    publish,
    receive,
    subscription,
)
from support import settle, wait_until

from magnetar.client.errors import AlreadyClosed, NotAllowedError, Timeout
from magnetar.client.ids import key_of
from magnetar.client.message import MessageId
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Coroutine


def refusal() -> pb.CommandError:
    return pb.CommandError(request_id=0, error=pb.NotAllowedError, message="no")


async def refused(seek: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(NotAllowedError):
        await seek


async def unanswered(seek: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(Timeout):
        await seek


async def test_seek_begins_after_the_message_or_at_it() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 6, batch=3)
        exclusive = await client.subscribe("t", "s", initial_position=EARLIEST)
        messages = await receive(exclusive, 6)
        for message in messages:
            await exclusive.acknowledge(message)
        await exclusive.seek(messages[1].message_id())
        assert data(await receive(exclusive, 4)) == [2, 3, 4, 5]
        await expect_none(exclusive)
        # Skipped messages are acknowledged, so the next consumer does not get them.
        assert subscription(cluster).unacked == {(1, 0): 0b100, (1, 1): 0b111}
        await exclusive.close()
        inclusive = await client.subscribe("t", "s", start_message_id_inclusive=True)
        await inclusive.seek(messages[1].message_id())
        assert data(await receive(inclusive, 5)) == [1, 2, 3, 4, 5]
        await inclusive.seek(MessageId.earliest)
        assert data(await receive(inclusive, 6)) == list(range(6))
        await inclusive.seek(MessageId.latest)
        await expect_none(inclusive)


async def test_a_refused_seek_changes_nothing() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 3)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        error = pb.CommandError(request_id=0, error=pb.NotAllowedError, message="no")
        cluster.brokers[A].script(pb.CommandSeek, error)
        with pytest.raises(NotAllowedError):
            await consumer.seek(MessageId(-1, 1, 1))
        assert data(await receive(consumer, 3)) == [0, 1, 2]


async def test_a_reader_reads_from_the_target_of_a_seek() -> None:
    async with client_among() as (client, _):
        await publish(client, 6, batch=3)
        reader = await client.create_reader("t", MessageId.earliest)
        messages = [await reader.read_next(1000) for _ in range(4)]
        await reader.seek(messages[1].message_id())
        assert await reader.has_message_available()
        assert data([await reader.read_next(1000) for _ in range(4)]) == [2, 3, 4, 5]
        await reader.seek(MessageId.earliest)
        assert data([await reader.read_next(1000)]) == [0]
        await reader.close()
        with pytest.raises(AlreadyClosed):
            await reader.read_next()


async def test_refused_seek_keeps_acknowledgements() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 5)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        messages = await receive(consumer, 5)
        cluster.brokers[A].script(pb.CommandAck, None)  # the ack is lost with its broker
        await consumer.acknowledge(messages[0])
        await asyncio.sleep(0.2)
        await consumer.acknowledge(messages[1])
        cluster.brokers[A].script(pb.CommandAck, None)
        cluster.brokers[A].script(pb.CommandSeek, None)
        async with asyncio.TaskGroup() as group:
            seeking = group.create_task(refused(consumer.seek(messages[3].message_id())))
            await settle()
            await consumer.acknowledge(messages[2])
            await asyncio.sleep(0.2)
            assert len(cluster.brokers[A].commands(pb.CommandAck)) == 2  # the third waits
            session = cluster.brokers[A].sessions[-1]
            (asked,) = cluster.brokers[A].commands(pb.CommandSeek)
            answer = refusal()
            answer.request_id = asked.request_id
            session.send(answer)
        assert seeking.done()
        cluster.brokers[A].kill()
        cluster.take_over(B)
        assert data(await receive(consumer, 2)) == [3, 4]
        await consumer.close()
        assert sorted(subscription(cluster).unacked) == [(1, 3), (1, 4)]


async def test_acknowledgement_during_a_seek_is_dropped_after_success() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 3)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        messages = await receive(consumer, 3)
        async with asyncio.TaskGroup() as group:
            group.create_task(consumer.seek(MessageId.earliest))
            await asyncio.sleep(0)
            for message in messages:
                await consumer.acknowledge(message)
        assert data(await receive(consumer, 3)) == [0, 1, 2]
        await consumer.close()
        assert len(subscription(cluster).unacked) == 3


async def test_a_seek_that_was_cut_off_and_then_refused_skips_nothing() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 6, batch=6)
        cluster.brokers[A].script(pb.CommandSeek, None)
        cluster.brokers[B].script(pb.CommandSeek, refusal())
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, receiver_queue_size=0
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(refused(consumer.seek(MessageId(-1, 1, 0, 3, 6))))
            await settle()
            cluster.brokers[A].kill()
            cluster.take_over(B)
        assert data(await receive(consumer, 6)) == list(range(6))
        await consumer.close()
        assert subscription(cluster).unacked == {(1, 0): 0b111111}


async def test_a_seek_without_an_answer_leaves_a_subscription_where_its_broker_has_it() -> None:
    async with client_among(operation_timeout_seconds=2) as (client, cluster):
        await publish(client, 6, batch=6)
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, receiver_queue_size=0
        )
        (message,) = await receive(consumer, 1)
        await consumer.acknowledge(message)
        cluster.brokers[A].script(pb.CommandSeek, None)
        async with asyncio.TaskGroup() as group:
            group.create_task(unanswered(consumer.seek(MessageId(-1, 1, 0, 3, 6))))
            await settle()
            cluster.brokers[A].kill()
        cluster.take_over(B)
        assert data(await receive(consumer, 5)) == [1, 2, 3, 4, 5]
        await consumer.close()
        assert subscription(cluster).unacked == {(1, 0): 0b111110}


async def test_a_reader_whose_seek_fails_continues_at_its_place() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 6)
        reader = await client.create_reader("t", MessageId.earliest)
        assert [int((await reader.read_next(1000)).data()) for _ in range(2)] == [0, 1]
        cluster.brokers[A].script(pb.CommandSeek, None)
        cluster.brokers[B].script(pb.CommandSeek, refusal())
        async with asyncio.TaskGroup() as group:
            seeking = group.create_task(refused(reader.seek(MessageId(-1, 1, 4))))
            await settle()
            cluster.brokers[A].kill()
            cluster.take_over(B)
        assert seeking.done()
        assert [int((await reader.read_next(1000)).data()) for _ in range(4)] == [2, 3, 4, 5]


async def test_reader_attached_at_the_target_of_a_failed_seek_returns() -> None:
    async with client_among(operation_timeout_seconds=2) as (client, cluster):
        await publish(client, 6)
        reader = await client.create_reader("t", MessageId.earliest)
        assert [int((await reader.read_next(1000)).data()) for _ in range(2)] == [0, 1]
        cluster.brokers[A].script(pb.CommandSeek, None)
        cluster.brokers[B].script(pb.CommandSubscribe, None)  # the test answers it late
        async with asyncio.TaskGroup() as group:
            group.create_task(unanswered(reader.seek(MessageId(-1, 1, 4))))
            await settle()
            cluster.brokers[A].kill()
            cluster.take_over(B)
        session = cluster.brokers[B].sessions[-1]
        (asked,) = cluster.brokers[B].commands(pb.CommandSubscribe)
        assert key_of(asked.start_message_id) == (1, 4)
        session.on_subscribe(asked, None)
        assert [int((await reader.read_next(5000)).data()) for _ in range(4)] == [2, 3, 4, 5]


async def test_seeks_take_turns() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 4)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        async with asyncio.TaskGroup() as group:
            group.create_task(consumer.seek(MessageId(-1, 1, 0)))
            group.create_task(consumer.seek(MessageId(-1, 1, 2)))
        assert data(await receive(consumer, 1)) == [3]
        assert len(cluster.brokers[A].commands(pb.CommandSeek)) == 2


async def test_a_readers_seek_to_a_time_does_not_undo_the_seek_that_follows_at_once() -> None:
    async with client_among() as (client, _):
        producer = await client.create_producer("t", batching_enabled=False)
        ids = [await producer.send(b"%d" % number) for number in range(10)]
        reader = await client.create_reader("t", MessageId.earliest)
        assert (await reader.read_next()).data() == b"0"
        async with asyncio.TaskGroup() as group:
            group.create_task(reader.seek(1))
            group.create_task(reader.seek(ids[4]))
        assert (await reader.read_next(5000)).data() == b"5"


@pytest.mark.parametrize("losses", [1, 2])
async def test_reader_that_is_detached_during_a_seek_to_a_time_repeats_no_message(
    losses: int,
) -> None:
    async with client_among() as (client, cluster):
        await publish(client, 3, batch=3)
        reader = await client.create_reader("t", MessageId.earliest)
        broker = cluster.brokers[A]
        broker.script(pb.CommandGetLastMessageId, None)  # the seek waits for this answer
        async with asyncio.TaskGroup() as group:
            group.create_task(reader.seek(1))
            await wait_until(
                lambda: broker.commands(pb.CommandGetLastMessageId), what="the request"
            )
            assert [(await reader.read_next()).data() for _ in range(2)] == [b"0", b"1"]
            broker.kill()
            broker.alive = True
        for _ in range(losses - 1):
            broker.kill()
            broker.alive = True
            await settle()
        assert (await reader.read_next(5000)).data() == b"2"
