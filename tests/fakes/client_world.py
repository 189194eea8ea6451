"""A client among brokers in memory, on a loop whose clock jumps."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fakes.session_broker import Cluster
from support import ManualClock

from magnetar.client.asyncio import Client
from magnetar.client.options import ClientOptions
from magnetar.client.parts import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

A, B = "grpc://a:6660", "grpc://b:6660"
TOPIC = "persistent://public/default/t"


def world_of(cluster: Cluster, **more: Any) -> World:
    return World(dialer=lambda: cluster, clock=ManualClock(), random=random.Random(1), **more)


@asynccontextmanager
async def client_among(
    *urls: str, service_url: str = f"{A},b:6660", **options: Any
) -> AsyncIterator[tuple[Client, Cluster]]:
    """A client, and the cluster that it talks to. The client is shut down at the end."""
    async with Cluster(*(urls or (A, B))) as cluster:
        client = Client.in_world(ClientOptions(service_url, **options), world_of(cluster))
        try:
            yield client, cluster
        finally:
            client.shutdown()
