"""A whole broker in the test's process: real ports and sessions, ledgers and metadata in memory.

Several brokers share one `Cluster`, so that ownership, redirects and takeover are the real ones too.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fakes.ledgers import FakeLedgers, LedgerWorld

from magnetar.broker.broker import Broker
from magnetar.broker.connection import Connection, Transport
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.log import LogConfig
from magnetar.broker.topic import ProducerNames
from magnetar.broker.transport.grpc import SERVICE, BrokerService
from magnetar.broker.transport.pulsar_tcp import PulsarServer
from magnetar.metadata import codec, paths
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import BrokerId, BrokerRegistration
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc_frames import grpc_server
from magnetar.runtime.listener import bind_port, port_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.runtime.frames import FrameStream


@dataclass
class Cluster:
    """What outlives a broker."""

    tree: MemoryTree = field(default_factory=MemoryTree)
    world: LedgerWorld = field(default_factory=LedgerWorld)


@dataclass
class RunningBroker:
    broker: Broker
    store: MemoryStore
    registration: BrokerRegistration

    @property
    def grpc_url(self) -> str:
        return self.registration.grpc_url

    @property
    def pulsar_url(self) -> str:
        return self.registration.pulsar_url


@asynccontextmanager
async def running_broker(
    cluster: Cluster, number: int = 0, *, log_config: LogConfig | None = None
) -> AsyncIterator[RunningBroker]:
    """One broker; leaving stops it cleanly."""
    store = MemoryStore(cluster.tree)
    service, stop = BrokerService(), asyncio.Event()
    listener = bind_port("127.0.0.1", 0)
    async with grpc_server({SERVICE: service.handlers}, host="127.0.0.1", port=0) as grpc_port:
        me = BrokerRegistration(
            BrokerId(f"broker-{number}"),
            f"{number:032x}",
            f"grpc://127.0.0.1:{grpc_port}",
            f"pulsar://127.0.0.1:{port_of(listener)}",
            "",
        )
        broker = Broker(
            me,
            store=store,
            ledgers=FakeLedgers(cluster.world),
            cache=EntryCache(64 << 20),
            log_config=log_config or LogConfig(),
            names=ProducerNames(f"test-{number}"),
            clock=SystemClock(),
            random=random.Random(number),
        )

        async def serve_pulsar(stream: FrameStream) -> None:
            await Connection(stream, broker, Transport.PULSAR).run()

        pulsar = PulsarServer(serve_pulsar)
        path = paths.broker_available(me.broker)
        await store.create_ephemeral(path, codec.encode_broker_registration(me))
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(broker.run(stop))
            await broker.started.wait()
            service.serve(broker)
            await pulsar.start(listener)
            try:
                yield RunningBroker(broker, store, me)
            finally:
                stop.set()
                await serving
                await service.close_sessions()
                await pulsar.stop()
        await store.close()
