"""Messages time out while the broker does not read, or reads and does not answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fakes.client_world import TOPIC, A, client_among
from support import settle

from magnetar.client.errors import Timeout
from magnetar.client.producing.publisher import EMPTIED_ENTRIES_MAX
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from magnetar.client.asyncio import Producer

SIZE = 100_000
BOUND_BYTES = 40 * SIZE


async def in_vain(producer: Producer, count: int = 20, *, size: int = SIZE) -> None:
    """Send messages that all time out."""
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(timing_out(producer, size))


async def timing_out(producer: Producer, size: int) -> None:
    with pytest.raises(Timeout):
        await producer.send(bytes(size))


async def test_a_broker_that_does_not_read_costs_a_bounded_number_of_bytes() -> None:
    async with client_among(pending_bytes_max=BOUND_BYTES) as (client, cluster):
        broker = cluster.brokers[A]
        producer = await client.create_producer(
            "t", send_timeout_millis=1000, batching_enabled=False
        )
        connection = producer._publisher._connection
        assert connection is not None
        broker.reads.clear()
        unsent = []
        while producer.is_connected() and len(unsent) < 20:
            await in_vain(producer)
            unsent.append(connection.unsent_bytes)
        assert connection.error is not None
        assert "does not read" in str(connection.error)
        assert max(unsent) < 80 * SIZE
        await settle()
        assert connection.unsent_bytes == 0
        assert broker.sessions[0].stream.ended
        broker.reads.set()
        await producer.send(b"x")
        assert len(broker.sessions) == 2


async def test_a_broker_that_reads_and_does_not_answer_keeps_its_session() -> None:
    async with client_among(pending_bytes_max=BOUND_BYTES) as (client, cluster):
        producer = await client.create_producer(
            "t", send_timeout_millis=1000, batching_enabled=False
        )
        cluster.topic(TOPIC).hold_receipts = True
        for _ in range(5):
            await in_vain(producer)
        assert len(cluster.sends) == 100
        assert len(cluster.brokers[A].commands(pb.CommandProducer)) == 1


async def test_too_many_owed_receipts_make_the_producer_attach_again() -> None:
    each = 2 * EMPTIED_ENTRIES_MAX // 3
    async with client_among() as (client, cluster):
        broker = cluster.brokers[A]
        producer = await client.create_producer(
            "t", send_timeout_millis=1000, batching_enabled=False
        )
        cluster.topic(TOPIC).hold_receipts = True
        await in_vain(producer, each, size=1)
        assert len(broker.commands(pb.CommandProducer)) == 1
        await in_vain(producer, each, size=1)
        cluster.topic(TOPIC).hold_receipts = False
        await producer.send(b"x")
        assert len(broker.commands(pb.CommandProducer)) == 2
        assert len(broker.sessions) == 1


async def test_timeout_error_reports_the_cause() -> None:
    async with client_among(A) as (client, cluster):
        broker = cluster.brokers[A]
        producer = await client.create_producer("t", send_timeout_millis=1000)
        cluster.topic(TOPIC).hold_receipts = True
        with pytest.raises(Timeout, match=r"within 1 s: the broker does not answer \(.*a:6660"):
            await producer.send(b"x")
        cluster.topic(TOPIC).send_errors.append(pb.PersistenceError)
        with pytest.raises(Timeout, match="the broker does not answer; last: scripted"):
            await producer.send(b"x")
        cluster.topic(TOPIC).hold_receipts = False
        await producer.send(b"x")
        cluster.topic(TOPIC).hold_receipts = True
        with pytest.raises(Timeout, match=r"the broker does not answer \("):
            await producer.send(b"x")
        broker.kill()
        with pytest.raises(
            Timeout, match=r"no broker accepts the producer; last: .*connection refused"
        ):
            await producer.send(b"x")
