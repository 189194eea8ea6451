"""Attachments that the broker ends or delays while the client makes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.client_world import TOPIC, A, B, client_among
from fakes.session_broker import UNASKED, Session
from support import wait_until

from magnetar.client.errors import AlreadyClosed, PulsarException
from magnetar.client.options import InitialPosition
from magnetar.client.producing.publisher import Publisher
from magnetar.protos import pulsar_pb2 as pb


def close_producer(session: Session, body: Any) -> None:
    del session.producers[body.producer_id]
    session.send(pb.CommandCloseProducer(producer_id=body.producer_id, request_id=UNASKED))


def close_consumer(session: Session, body: Any) -> None:
    session.remove(session.consumers[body.consumer_id])
    session.send(pb.CommandCloseConsumer(consumer_id=body.consumer_id, request_id=UNASKED))


async def test_a_producer_closed_in_the_frame_of_its_creation_attaches_again() -> None:
    async with client_among() as (client, cluster):
        cluster.afterwards[pb.CommandProducer] = close_producer
        producer = await client.create_producer("t")
        await producer.send(b"x")
        await producer.close()
        assert len(cluster.brokers[A].commands(pb.CommandProducer)) == 2


async def test_acknowledgements_are_sent_again_after_a_close_in_the_frame_of_the_creation() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
        await producer.send(b"x")
        await consumer.acknowledge(await consumer.receive())
        subscription = cluster.topic(TOPIC).subscriptions["s"]
        cluster.afterwards[pb.CommandSubscribe] = close_consumer
        (held,) = subscription.consumers
        close_consumer(held.session, held)
        await consumer.close()
        assert not subscription.unacked


@pytest.mark.parametrize("question", [pb.CommandPartitionedTopicMetadata, pb.CommandLookupTopic])
async def test_a_broker_that_does_not_answer_leaves_time_to_ask_another(question: type) -> None:
    async with client_among() as (client, cluster):
        cluster.brokers[A].script(question, *[None] * 9)
        cluster.owners[TOPIC] = B
        began = asyncio.get_running_loop().time()
        await client.create_producer("t")
        assert asyncio.get_running_loop().time() - began == pytest.approx(10, abs=0.1)
        await client.create_producer("t")  # B is asked first now
        assert len(cluster.brokers[A].commands(question)) == 1


async def test_creation_times_out_if_no_broker_answers_lookups() -> None:
    async with client_among(operation_timeout_seconds=2) as (client, cluster):
        for url in (A, B):
            cluster.brokers[url].script(pb.CommandLookupTopic, *[None] * 9)
        began = asyncio.get_running_loop().time()
        with pytest.raises(PulsarException, match="the broker did not answer within"):
            await client.create_producer("t")
        assert asyncio.get_running_loop().time() - began == pytest.approx(2, abs=0.01)


async def test_client_closed_while_it_opens_does_not_hang() -> None:
    async with client_among() as (client, _):
        creating = asyncio.get_running_loop().create_task(client.create_producer("t"))
        await asyncio.sleep(0)
        await client.close()
        async with asyncio.timeout(5):
            with pytest.raises(AlreadyClosed):
                await creating


@pytest.mark.parametrize("named", ["nonsense", "pulsar://b:6650", "grpc://b:6660,a:6660"])
async def test_an_assigned_broker_that_cannot_be_used_is_looked_up(named: str) -> None:
    def close(session: Session, body: Any) -> None:
        del session.producers[body.producer_id]
        session.send(
            pb.CommandCloseProducer(
                producer_id=body.producer_id, request_id=UNASKED, assignedBrokerServiceUrl=named
            )
        )

    async with client_among() as (client, cluster):
        cluster.afterwards[pb.CommandProducer] = close
        producer = await client.create_producer("t")
        await producer.send(b"x")
        assert len(cluster.brokers[A].commands(pb.CommandProducer)) == 2
        assert len(cluster.brokers[A].sessions) == 1


async def test_a_request_may_be_queued_in_the_turn_in_which_its_time_ends() -> None:
    async with client_among() as (client, cluster):
        loop = asyncio.get_running_loop()
        broker = cluster.brokers[A]
        broker.script(pb.CommandProducer, None)
        creating = loop.create_task(client.create_producer("t"))
        await wait_until(lambda: broker.commands(pb.CommandProducer), what="a request")
        (publisher,) = client.parts.live
        assert isinstance(publisher, Publisher)
        attachment = publisher._attachment
        assert attachment._limit is not None
        attachment._limit.reschedule(loop.time())
        await asyncio.sleep(0)
        assert attachment._limit.expired(), "the attempt is about to end"
        attachment.wait_without_limit()
        await creating
        assert len(broker.commands(pb.CommandProducer)) == 2
