"""A whole broker in the test's process: real ports and sessions, ledgers and metadata in memory.

Several brokers share one `ClusterState`. Ownership, redirects and takeover use the real code, too.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fakes.ledgers import FakeLedgers
from fakes.witnesses import FakeWitnesses

from magnetar.broker.balance import BALANCE_DEFAULTS, BalanceRules
from magnetar.broker.broker import Broker
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.log import LogConfig
from magnetar.broker.session.access import AllowAll
from magnetar.broker.session.connection import Connection, Transport
from magnetar.broker.session.endpoint import Endpoint
from magnetar.broker.session.grpc import SERVICE, BrokerService
from magnetar.broker.session.limits import ConnectionLimits
from magnetar.broker.session.pulsar_tcp import PulsarServer, PulsarTcpStream
from magnetar.broker.topic.producer_admission import ProducerNames
from magnetar.metadata import codec, paths
from magnetar.metadata.model import BrokerId, BrokerRegistration
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.protos.framing import frame_bytes_max
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc_frames import grpc_server
from magnetar.runtime.listener import bind_port, port_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fakes.cluster_state import ClusterState

    from magnetar.broker.session.access import Authenticator
    from magnetar.metadata.memory import MemoryStore
    from magnetar.metadata.model import BookieRegistration, Member
    from magnetar.runtime.clock import Clock

GRPC_GRACE_S = 0.1  # sessions are closed before; the rest belongs to clients that died


@dataclass
class RunningBroker:
    broker: Broker
    store: MemoryStore
    registration: BrokerRegistration
    stop: asyncio.Event  # set: the broker stops cleanly and hands all topics over
    serving: asyncio.Task[None]
    ports: AsyncExitStack

    @property
    def grpc_url(self) -> str:
        return self.registration.grpc_url

    @property
    def pulsar_url(self) -> str:
        return self.registration.pulsar_url

    async def kill(self) -> None:
        """Kill the broker like a process: it hands nothing over, and its ports refuse connections.
        It stays registered until `store.expire()`."""
        self.serving.cancel()
        await self.ports.aclose()
        await asyncio.wait([self.serving])


@asynccontextmanager
async def running_broker(
    cluster: ClusterState,
    number: int = 0,
    *,
    log_config: LogConfig | None = None,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    limits: ConnectionLimits | None = None,
    balance: BalanceRules = BALANCE_DEFAULTS,
    find_bookie: Callable[[Member], BookieRegistration | None] | None = None,
    make_authenticator: Callable[[], Authenticator] = AllowAll,
    clock: Clock | None = None,
) -> AsyncIterator[RunningBroker]:
    """Run one broker. On leaving the context it stops cleanly, unless it was killed."""
    store = cluster.store()
    service, stop = BrokerService(), asyncio.Event()
    listener = bind_port("127.0.0.1", 0)
    async with AsyncExitStack() as ports, asyncio.TaskGroup() as group:
        grpc_port = await ports.enter_async_context(
            grpc_server({SERVICE: service.handlers}, host="127.0.0.1", port=0, grace_s=GRPC_GRACE_S)
        )
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
            ledgers=FakeLedgers(cluster.ledgers),
            witnesses=FakeWitnesses(),
            cache=EntryCache(64 << 20),
            log_config=log_config or LogConfig(),
            names=ProducerNames(f"test-{number}"),
            clock=clock or SystemClock(),
            random=random.Random(number),
            message_bytes_max=message_bytes_max,
            balance=balance,
            find_bookie=find_bookie,
        )
        endpoint = Endpoint(broker, make_authenticator, limits=limits or ConnectionLimits())

        async def serve_pulsar(stream: PulsarTcpStream) -> None:
            await Connection(
                stream, endpoint, Transport.PULSAR, on_connected=stream.on_connected
            ).run()

        pulsar = PulsarServer(serve_pulsar, frame_bytes_max=frame_bytes_max(message_bytes_max))
        path = paths.broker_available(me.broker)
        await store.create_ephemeral(path, codec.encode_broker_registration(me))
        serving = group.create_task(broker.run(stop))
        await broker.started.wait()
        service.serve(endpoint)
        await pulsar.start(listener, group)
        ports.push_async_callback(service.close_sessions)
        ports.push_async_callback(pulsar.stop)
        try:
            yield RunningBroker(broker, store, me, stop, serving, ports)
        finally:
            stop.set()
            await asyncio.wait([serving])
            await ports.aclose()
    await store.close()
