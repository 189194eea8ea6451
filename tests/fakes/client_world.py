"""A client and brokers in memory, on a loop with a virtual clock."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes.session_broker import FakeBrokers
from support import ManualClock

from magnetar.client.asyncio import Client
from magnetar.client.environment import PARTITIONS_UPDATE_S, PENDING_BYTES_MAX, Environment
from magnetar.client.errors import Timeout
from magnetar.client.options import ClientOptions, InitialPosition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.session_broker import Subscription

    from magnetar.client.asyncio import Consumer, Producer
    from magnetar.client.message import Message

A, B = "grpc://a:6660", "grpc://b:6660"
TOPIC = "persistent://public/default/t"
EARLIEST = InitialPosition.Earliest


def world_of(cluster: FakeBrokers, **more: Any) -> Environment:
    return Environment(dialer=lambda: cluster, clock=ManualClock(), random=random.Random(1), **more)


@asynccontextmanager
async def client_among(
    *urls: str,
    service_url: str = f"{A},b:6660",
    pending_bytes_max: int = PENDING_BYTES_MAX,
    partitions_update_s: float = PARTITIONS_UPDATE_S,
    **options: Any,
) -> AsyncIterator[tuple[Client, FakeBrokers]]:
    """A client, and the cluster that it talks to. The client is shut down at the end."""
    async with FakeBrokers(*(urls or (A, B))) as cluster:
        world = world_of(
            cluster, pending_bytes_max=pending_bytes_max, partitions_update_s=partitions_update_s
        )
        client = Client.in_environment(ClientOptions(service_url, **options), world)
        try:
            yield client, cluster
        finally:
            client.shutdown()


def subscription(cluster: FakeBrokers) -> Subscription:
    return cluster.topic(TOPIC).subscriptions["s"]


async def publish(client: Client, count: int, *, batch: int = 1) -> Producer:
    """Publish the messages 0, 1, 2, ... in entries of `batch` messages."""
    producer = await client.create_producer("t", batching_max_messages=batch)
    for number in range(count):
        producer.send_async(b"%d" % number, None)
    await producer.flush()
    return producer


async def receive(consumer: Consumer, count: int) -> list[Message]:
    return [await consumer.receive(5000) for _ in range(count)]


def data(messages: list[Message]) -> list[int]:
    return [int(message.data()) for message in messages]


async def expect_none(consumer: Consumer) -> None:
    with pytest.raises(Timeout):
        await consumer.receive(500)
