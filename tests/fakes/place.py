"""A whole broker without ports: its clients' connections are in memory."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fakes.cluster_state import ClusterState
from fakes.gated_store import GatedStore
from fakes.ledgers import FakeLedgers
from fakes.wire import StreamWire, WireClient
from fakes.witnesses import FakeWitnesses

from magnetar.broker.broker import UNLIMITED_RATE, Broker
from magnetar.broker.life import LIFE_DEFAULTS, LifeConfig
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.log import LogConfig
from magnetar.broker.session.connection import Connection, Transport
from magnetar.broker.session.endpoint import Endpoint
from magnetar.broker.topic.producer_admission import ProducerNames
from magnetar.metadata import codec, paths
from magnetar.metadata.model import BrokerId, BrokerRegistration
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.memory_stream import memory_stream_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from magnetar.broker.chores import Chore
    from magnetar.broker.log.budget import PublishBudget
    from magnetar.metadata.policies import Rate

PENDING_BYTES_MAX = 10_000  # the limit of a topic in these tests
FRAMES_MAX = 2  # the frames that a peer buffers when it does not read


class Place:
    """A broker and its connections."""

    def __init__(
        self, broker: Broker, cluster: ClusterState, store: GatedStore, tasks: asyncio.TaskGroup
    ) -> None:
        self.broker = broker
        self.endpoint = Endpoint(broker)
        self.store = store
        self.ledgers = cluster.ledgers
        self.connections: list[Connection] = []
        self.serving: list[asyncio.Task[None]] = []
        self._tasks = tasks

    async def client(self, *, connected: bool = True) -> WireClient:
        here, there = memory_stream_pair("client", "broker", frames_max=FRAMES_MAX)

        async def break_off() -> None:
            here.abort("the client died")

        connection = Connection(there, self.endpoint, Transport.GRPC)
        self.connections.append(connection)
        self.serving.append(self._tasks.create_task(connection.run()))
        client = WireClient(StreamWire(here, break_off))
        client.wait_s = 3600.0
        if connected:
            await client.connect()
        return client

    @property
    def topic(self) -> Any:
        [topic] = self.broker.topics
        return topic


@asynccontextmanager
async def place(
    cluster: ClusterState | None = None,
    *,
    life: LifeConfig = LIFE_DEFAULTS,
    publish_budget: PublishBudget | None = None,
    chores: Sequence[Chore] = (),
    publish_rate: Rate = UNLIMITED_RATE,
) -> AsyncIterator[Place]:
    cluster = cluster or ClusterState()
    store, stop = GatedStore(cluster.tree), asyncio.Event()
    me = BrokerRegistration(BrokerId("b"), "0" * 32, "grpc://127.0.0.1:1", "pulsar://h:1", "")
    broker = Broker(
        me,
        store=store,
        ledgers=FakeLedgers(cluster.ledgers),
        witnesses=FakeWitnesses(),
        cache=EntryCache(64 << 20),
        log_config=LogConfig(pending_bytes_max=PENDING_BYTES_MAX),
        names=ProducerNames("test"),
        clock=SystemClock(),
        random=random.Random(0),
        publish_budget=publish_budget,
        publish_rate=publish_rate,
        life=life,
        chores=chores,
    )
    path = paths.broker_available(me.broker)
    await store.create_ephemeral(path, codec.encode_broker_registration(me))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(broker.run(stop))
        await broker.started.wait()
        here = Place(broker, cluster, store, tasks)
        yield here
        stop.set()
        await running
        for task in here.serving:
            task.cancel()
    await store.close()
