"""A producer or consumer that comes and goes: what its broker does in the very moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import TOPIC, A, B, client_among
from fakes.session_broker import UNASKED, Session
from fakes.virtual_loop import run_virtual

from magnetar.client.errors import AlreadyClosed, Timeout
from magnetar.client.options import InitialPosition
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable


def once_after(
    monkeypatch: pytest.MonkeyPatch, method: str, then: Callable[[Session, Any], None]
) -> None:
    """The next time that a session of the fake has done `method`, it does `then` as well."""
    original = getattr(Session, method)
    left = [then]

    def do(self: Session, body: Any, entry: object) -> None:
        original(self, body, entry)
        if left:
            left.pop()(self, body)

    monkeypatch.setattr(Session, method, do)


def close_producer(session: Session, body: Any) -> None:
    del session.producers[body.producer_id]
    session.send(pb.CommandCloseProducer(producer_id=body.producer_id, request_id=UNASKED))


def close_consumer(session: Session, body: Any) -> None:
    session.remove(session.consumers[body.consumer_id])
    session.send(pb.CommandCloseConsumer(consumer_id=body.consumer_id, request_id=UNASKED))


def test_a_producer_that_is_closed_in_the_frame_that_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once_after(monkeypatch, "on_producer", close_producer)

    async def main() -> None:
        async with client_among() as (client, cluster):
            producer = await client.create_producer("t")
            await producer.send(b"x")
            await producer.close()
            assert len(cluster.brokers[A].commands(pb.CommandProducer)) == 2

    run_virtual(main())


def test_acknowledgements_outlive_a_consumer_that_is_closed_in_the_frame_that_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with client_among() as (client, cluster):
            producer = await client.create_producer("t")
            consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
            await producer.send(b"x")
            await consumer.acknowledge(await consumer.receive())
            subscription = cluster.topic(TOPIC).subscriptions["s"]
            once_after(monkeypatch, "on_subscribe", close_consumer)
            (held,) = subscription.consumers
            close_consumer(held.session, held)
            await consumer.close()
            assert not subscription.unacked

    run_virtual(main())


def test_a_broker_that_does_not_answer_lookups_is_asked_in_turn_only() -> None:
    async def main() -> None:
        async with client_among(operation_timeout_seconds=2) as (client, cluster):
            cluster.brokers[A].script(pb.CommandLookupTopic, *[None] * 3)
            cluster.owners[TOPIC] = B
            with pytest.raises(Timeout):
                await client.create_producer("t")
            await client.create_producer("t")
            assert len(cluster.brokers[A].commands(pb.CommandLookupTopic)) == 1

    run_virtual(main())


def test_a_client_that_is_closed_while_it_begins_makes_nobody_wait() -> None:
    async def main() -> None:
        async with client_among() as (client, _):
            creating = asyncio.get_running_loop().create_task(client.create_producer("t"))
            await asyncio.sleep(0)
            await client.close()
            async with asyncio.timeout(5):
                with pytest.raises(AlreadyClosed):
                    await creating

    run_virtual(main())
