"""The broker's process: its ports, its registration, and the stop that hands its topics over."""

from __future__ import annotations

import asyncio
import random as chance
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.bookie.ledger.presence import Presence
from magnetar.bookie.repair.reporting import report_bad_copies
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.broker.broker import Broker
from magnetar.broker.chores import Chore
from magnetar.broker.dispatch.active import Choice, FailoverRules
from magnetar.broker.log.budget import PublishBudget
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.log import LogConfig
from magnetar.broker.log.memory_return import LOOK_S, MemoryReturn
from magnetar.broker.operations.failures import FailureMetrics, health_details
from magnetar.broker.operations.metrics import BrokerMetrics
from magnetar.broker.session.connection import Connection, Transport
from magnetar.broker.session.endpoint import Endpoint
from magnetar.broker.session.grpc import SERVICE, BrokerService
from magnetar.broker.session.limits import ConnectionLimits
from magnetar.broker.session.pulsar_tcp import PulsarServer, PulsarTcpStream
from magnetar.broker.topic.deduplication import DeduplicationConfig
from magnetar.broker.topic.expiry import (
    BACKLOG_AGE_CHECK_INTERVAL_S,
    SUBSCRIPTION_EXPIRY_CHECK_INTERVAL_S,
    expire_messages,
    expire_subscriptions,
    look_up_backlog_ages,
)
from magnetar.broker.topic.producer_admission import ProducerNames
from magnetar.broker.topic.visits import check_backlog_quotas, tend_deduplication
from magnetar.metadata import codec, paths
from magnetar.metadata.election import Election
from magnetar.metadata.errors import InvalidRecord
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.lease import Lease
from magnetar.metadata.model import BrokerId, BrokerRegistration
from magnetar.metadata.policies import Rate
from magnetar.metadata.store import SessionState
from magnetar.protos.framing import frame_bytes_max
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.frames import FRAME_BYTES_MAX
from magnetar.runtime.garbage import collect_when_due, settle_gc
from magnetar.runtime.grpc_frames import STREAMS_MAX, grpc_server
from magnetar.runtime.http import BaseApp, Health, serve_http
from magnetar.runtime.listener import authority, bind_port, is_loopback, port_of
from magnetar.runtime.log import get_logger
from magnetar.runtime.memory import trim as trim_memory
from magnetar.runtime.metrics import counter, gauge, measure_process
from magnetar.runtime.steps import StepMetrics
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    import random
    import socket
    from collections.abc import Awaitable, Callable

    from prometheus_client.registry import Collector

    from magnetar.bookie.ledger.config import LedgerConfig
    from magnetar.bookie.ledger.peer import OpenPeer
    from magnetar.broker.config import BrokerConfig
    from magnetar.broker.ownership.liveness import Witnesses
    from magnetar.broker.topic.protocol import Topic
    from magnetar.metadata.policies import EffectivePolicies
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.http import App

log = get_logger(__name__)


async def run_broker(config: BrokerConfig, stop: asyncio.Event) -> None:
    """Run a broker of a cluster until `stop` is set and its topics are handed over.

    This function has the imports that only a broker of a cluster needs; a standalone server does
    not need them.
    """
    from magnetar.bookie.ledger.config import LedgerConfig
    from magnetar.bookie.ledger.connection import RemoteBookiePeer
    from magnetar.metadata.zookeeper import ZooKeeperStore

    store = await ZooKeeperStore.connect_url(
        config.metadata_url, session_timeout_s=config.session_timeout_s
    )
    try:
        await BrokerProcess(
            config,
            store=store,
            open_peer=RemoteBookiePeer,
            ledger_config=LedgerConfig(
                ensemble_size=config.ensemble_size,
                write_quorum=config.write_quorum,
                ack_quorum=config.ack_quorum,
                zone=config.zone,
                ensemble_change_delay_s=config.ensemble_change_delay_s,
                retained_bytes_max=config.max_message_publish_buffer_size_in_mb << 20,
            ),
            random=chance.SystemRandom(),
            registry=CollectorRegistry(),
        ).run(stop)
    finally:
        await store.close()


def log_config_of(config: BrokerConfig) -> LogConfig:
    return LogConfig(
        ledger_entries_max=config.managed_ledger_max_entries_per_ledger,
        ledger_bytes_max=config.managed_ledger_max_size_per_ledger_mbytes << 20,
        ledger_age_s_min=config.managed_ledger_min_ledger_rollover_time_minutes * 60,
        ledger_age_s_max=config.managed_ledger_max_ledger_rollover_time_minutes * 60,
        degraded_age_s_min=config.degraded_ledger_min_age_in_seconds,
        check_interval_s=config.open_ledger_check_interval_in_seconds,
        auto_skip_non_recoverable_data=config.auto_skip_non_recoverable_data,
    )


async def trim(topic: Topic) -> None:
    """Drop the ledgers that no durable subscription needs and retention does not keep. This is a
    periodic chore."""
    topic.trim()


def _garbage_of(broker: Broker, endpoint: Endpoint) -> int:
    """Estimate the number of objects in reference cycles that the broker has dropped."""
    closed_topics = broker.opened_topics - len(broker.topics)
    return CONNECTION_OBJECTS * endpoint.limits.ended + TOPIC_OBJECTS * closed_topics


async def _trim_memory() -> None:
    await asyncio.to_thread(trim_memory)


async def return_memory(
    budget: PublishBudget, give_back: Callable[[], Awaitable[object]] = _trim_memory
) -> None:
    """Repeat until cancelled: after a burst of publishes, give the freed memory back to the
    operating system."""
    memory = MemoryReturn()
    while True:
        await asyncio.sleep(LOOK_S)
        if memory.is_due(peak=budget.take_peak(), used=budget.used):
            await give_back()


CONNECTION_OBJECTS: Final = 50
TOPIC_OBJECTS: Final = 250
"""The objects in reference cycles that an ended connection leaves, and that an unloaded topic
leaves (measured)."""


class BrokerProcess:
    """A broker with its ports: in a process of its own, or beside a bookie in a standalone
    server."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        store: MetadataStore,
        open_peer: OpenPeer,
        ledger_config: LedgerConfig,
        random: random.Random,
        registry: CollectorRegistry,
        role: str = "broker",
        bookies_have_ports: bool = True,
    ) -> None:
        """`role`: the role that /health reports. `bookies_have_ports`: clients can read from
        bookies."""
        self.ready = asyncio.Event()  # set when registered and every port is served
        self.registration: BrokerRegistration  # set before `ready`
        self._config = config
        self._store = store
        self._open_peer = open_peer
        self._ledger_config = ledger_config
        self._random = random
        self._incarnation = f"{random.getrandbits(128):032x}"
        self._registry = registry
        self._readings: list[Callable[[], Awaitable[Collector]]] = []  # metrics of all topics
        self._role = role
        self._bookies_have_ports = bookies_have_ports
        self._registered = asyncio.Event()  # set while this broker is registered

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then hand the topics over.

        Raises PortInUse, AddressUnusable, MetadataError.
        """
        config, service = self._config, BrokerService()
        async with AsyncExitStack() as stack:
            pulsar_socket = bind_port(config.host, config.pulsar_port)
            stack.callback(pulsar_socket.close)
            http_socket = bind_port(config.host, config.http_port)
            stack.callback(http_socket.close)
            grpc_port = await stack.enter_async_context(
                grpc_server(
                    {SERVICE: service.handlers},
                    host=config.host,
                    port=config.grpc_port,
                    frame_bytes_max=frame_bytes_max(config.max_message_size) + FRAME_BYTES_MAX,
                    streams_max=STREAMS_MAX,
                )
            )
            self.registration = self._describe(
                grpc_port, port_of(pulsar_socket), port_of(http_socket)
            )
            async with asyncio.TaskGroup() as group:
                directory = BookieRegistry(self._store)
                peers = self._make_peers(directory)
                ledgers = self._make_ledgers(directory, peers)
                presence = Presence(
                    directory,
                    peers,
                    broker=self._config.id,
                    incarnation=self._incarnation,
                    random=self._random,
                )
                backoff = Backoff(0.1, 5.0, self._random)
                lasting: list[asyncio.Task[None]] = [
                    group.create_task(supervise("ledgers", ledgers.run, backoff=backoff)),
                    group.create_task(supervise("presence", presence.run, backoff=backoff)),
                ]
                await ledgers.wait_ready()
                broker = self._make_broker(ledgers, presence, directory)
                lasting += [
                    group.create_task(serve_http(self._app(broker, stop), http_socket)),
                    group.create_task(measure_process(self._registry)),
                    group.create_task(self._register()),
                    group.create_task(return_memory(broker.publish_budget)),
                    group.create_task(self._sweep(broker)),
                    group.create_task(
                        report_bad_copies(
                            ledgers.bad_copies, UnderReplicationRecords(self._store, SystemClock())
                        )
                    ),
                ]
                await self._serve(broker, service, pulsar_socket, stop)
                for task in lasting:
                    task.cancel()

    async def _serve(
        self,
        broker: Broker,
        service: BrokerService,
        pulsar_socket: socket.socket,
        stop: asyncio.Event,
    ) -> None:
        """Serve clients; returns when the topics are handed over and the clients are gone."""
        endpoint = Endpoint(
            broker,
            limits=ConnectionLimits(
                self._config.broker_max_connections, self._config.broker_max_connections_per_ip
            ),
        )
        self._registry.register(StepMetrics(broker.steps))
        self._registry.register(FailureMetrics(broker))
        counter(
            self._registry,
            "magnetar_connections_refused_total",
            "Client connections that the broker refused because of a limit.",
            lambda: endpoint.limits.refused,
        )
        counter(
            self._registry,
            "magnetar_connection_failures_total",
            "Client connections that the broker closed after an unexpected exception.",
            lambda: endpoint.failures,
        )

        counter(
            self._registry,
            "magnetar_silent_brokers_total",
            "Times that this broker found a registered broker silent. A silent broker's bundles"
            " are free.",
            lambda: broker.liveness.found_silent,
        )
        gauge(
            self._registry,
            "magnetar_bundles",
            "Bundles that this broker owns.",
            lambda: broker.bundles,
        )
        counter(
            self._registry,
            "magnetar_bundles_moved_total",
            "Bundles that this broker handed over to a broker that owned fewer.",
            lambda: broker.balancer.moved,
        )
        counter(
            self._registry,
            "magnetar_standstills_total",
            "Times that this broker's event loop stood still for a second or longer.",
            lambda: broker.standstill.count,
        )

        async def serve_pulsar(stream: PulsarTcpStream) -> None:
            await Connection(
                stream, endpoint, Transport.PULSAR, on_connected=stream.on_connected
            ).run()

        pulsar = PulsarServer(
            serve_pulsar, frame_bytes_max=frame_bytes_max(self._config.max_message_size)
        )
        metrics = BrokerMetrics(
            broker,
            cluster=self._config.cluster_name,
            topic_level=self._config.expose_topic_level_metrics_in_prometheus,
            connections=lambda: pulsar.connection_count + service.session_count,
            now=asyncio.get_running_loop().time,
        )
        self._readings.append(metrics.read)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(broker.run(stop))
            await broker.started.wait()
            service.serve(endpoint)
            await pulsar.start(pulsar_socket, group)
            announcing = group.create_task(self._announce())
            collecting = group.create_task(collect_when_due(lambda: _garbage_of(broker, endpoint)))
            await serving
            announcing.cancel()  # the broker may not be registered yet
            collecting.cancel()
            await service.close_sessions()
            await pulsar.stop()

    def _describe(self, grpc_port: int, pulsar_port: int, http_port: int) -> BrokerRegistration:
        host = self._config.advertised
        return BrokerRegistration(
            BrokerId(self._config.id),
            self._incarnation,
            f"grpc://{authority(host, grpc_port)}",
            f"pulsar://{authority(host, pulsar_port)}",
            f"http://{authority(host, http_port)}",
        )

    def _make_peers(self, directory: BookieRegistry) -> PeerPool:
        return PeerPool(
            directory,
            self._open_peer,
            client_name=f"broker {self._config.id}",
            random=self._random,
            connect_timeout_s=self._ledger_config.connect_timeout_s,
        )

    def _make_ledgers(self, directory: BookieRegistry, peers: PeerPool) -> Ledgers:
        return Ledgers(
            self._store,
            directory,
            peers,
            LedgerIds(self._store),
            self._ledger_config,
            SystemClock(),
            self._random,
        )

    def _make_broker(
        self, ledgers: Ledgers, witnesses: Witnesses, directory: BookieRegistry
    ) -> Broker:
        cache = EntryCache(self._config.cache_bytes)
        gauge(self._registry, "magnetar_entry_cache_bytes", "Bytes cached.", lambda: cache.bytes)
        budget = PublishBudget(
            self._config.max_message_publish_buffer_size_in_mb << 20, kept=ledgers.held_bytes
        )
        gauge(
            self._registry,
            "magnetar_publish_buffer_bytes",
            "Bytes held for producers: queued, in flight, or kept for a slow bookie.",
            lambda: budget.used,
        )
        gauge(
            self._registry,
            "magnetar_publish_buffer_waiting_connections",
            "Connections that are not read because the publish buffer is full.",
            lambda: budget.waiting,
        )
        return Broker(
            self.registration,
            store=self._store,
            ledgers=ledgers,
            witnesses=witnesses,
            silence_s=self._config.broker_silence_in_seconds,
            balance=self._config.balance,
            cache=cache,
            log_config=log_config_of(self._config),
            names=ProducerNames(f"{self._config.id}-{self._incarnation[:8]}"),
            clock=SystemClock(),
            random=self._random,
            namespace_bundles=self._config.default_number_of_namespace_bundles,
            default_policies=self._default_policies(),
            message_bytes_max=self._config.max_message_size,
            strict_delays=self._config.is_delayed_delivery_deliver_at_time_strict,
            fixed_delay_look_ahead=self._config.delayed_delivery_fixed_delay_detection_lookahead,
            publish_budget=budget,
            find_bookie=directory.find if self._bookies_have_ports else None,
            orphan_grace_s=60.0 * self._config.orphaned_ledger_grace_period_in_minutes,
            chores=self._chores(),
            cluster=self._config.cluster_name,
            life=self._config.life,
            key_shared=self._config.key_shared,
            publish_rate=Rate(
                self._config.broker_publisher_throttling_max_message_rate,
                self._config.broker_publisher_throttling_max_byte_rate,
                1,
            ),
            non_persistent=self._config.enable_non_persistent_topics,
            non_persistent_per_connection=(
                self._config.max_concurrent_non_persistent_message_per_connection
            ),
            partitions_max=self._config.max_num_partitions_per_partitioned_topic,
            deduplication=DeduplicationConfig(
                entries_interval=self._config.broker_deduplication_entries_interval,
                interval_s=self._config.broker_deduplication_snapshot_interval_seconds,
                inactivity_s=60.0
                * self._config.broker_deduplication_producer_inactivity_timeout_minutes,
                producers_max=self._config.broker_deduplication_max_number_of_producers,
            ),
            failover=FailoverRules(
                non_partitioned=Choice(self._config.failover_non_partitioned),
                delay_s=self._config.active_consumer_failover_delay_time_millis / 1_000,
            ),
        )

    def _chores(self) -> list[Chore]:
        """Return the periodic work on open topics."""
        config = self._config
        expiry_check_s = 60.0 * config.message_expiry_check_interval_in_minutes
        dedup_s = min(60.0, config.broker_deduplication_snapshot_interval_seconds / 2)
        return [
            Chore("trimming", self._config.retention_check_interval_in_seconds, trim),
            Chore(
                "backlog quotas",
                config.backlog_quota_check_interval_in_seconds,
                check_backlog_quotas,
            ),
            Chore("deduplication", dedup_s, tend_deduplication),
            Chore("message expiry", expiry_check_s, expire_messages),
            Chore(
                "subscription expiry", SUBSCRIPTION_EXPIRY_CHECK_INTERVAL_S, expire_subscriptions
            ),
            Chore("backlog ages", BACKLOG_AGE_CHECK_INTERVAL_S, look_up_backlog_ages),
        ]

    def _default_policies(self) -> EffectivePolicies:
        """Return the policies of the settings. The quorums of new ledgers are those of this
        process's ledger configuration."""
        ledger = self._ledger_config
        return self._config.default_policies(
            ensemble_size=ledger.ensemble_size,
            write_quorum=ledger.write_quorum,
            ack_quorum=ledger.ack_quorum,
        )

    async def _register(self) -> None:
        """Keep this broker's registration. Raises LeaseTaken if another broker has the same id."""
        lease = Lease(
            self._store,
            paths.broker_available(self.registration.broker),
            codec.encode_broker_registration(self.registration),
            replaces=self._is_leftover,
            on_change=self._on_registration,
        )
        await lease.run()

    async def _sweep(self, broker: Broker) -> None:
        """Delete the ledgers that belong to no topic, while this broker is elected for it."""
        election = Election(
            self._store,
            paths.LEDGER_SWEEPER,
            self._incarnation.encode(),
            on_change=lambda is_leader: log.info("ledger sweeper changed", leader=is_leader),
        )
        period_s = 60.0 * self._config.orphaned_ledger_check_interval_in_minutes
        async with asyncio.TaskGroup() as group:
            group.create_task(election.run())
            group.create_task(broker.orphans.run(period_s, is_chosen=lambda: election.is_leader))

    def _on_registration(self, held: bool) -> None:
        log.info("registration changed", broker=self.registration.broker, held=held)
        if held:
            self._registered.set()
        else:
            self._registered.clear()

    async def _announce(self) -> None:
        await self._registered.wait()
        settle_gc()
        registration = self.registration
        log.info(
            "broker is ready",
            broker=registration.broker,
            grpc=registration.grpc_url,
            pulsar=registration.pulsar_url,
            http=registration.http_url,
        )
        if is_loopback(self._config.host):
            log.info(
                "listening on loopback only: reachable from this machine alone; set host to change"
                " it",
                host=self._config.host,
            )
        else:
            log.warning(
                "listening without TLS or authentication: any host that reaches the ports can read"
                " and write",
                host=self._config.host,
            )
        self.ready.set()

    def _is_leftover(self, value: bytes) -> bool:
        """Return True if an earlier process of this broker left this registration, with the same
        gRPC port. That process is dead, because this process has bound the port."""
        try:
            stored = codec.decode_broker_registration(value)
        except InvalidRecord:
            return False
        return (
            stored.broker == self.registration.broker
            and stored.grpc_url == self.registration.grpc_url
        )

    def _app(self, broker: Broker, stop: asyncio.Event) -> BaseApp:
        def make_rest() -> App:
            from magnetar.broker.admin.app import admin_app  # FastAPI: 0.3 s and 30 MB

            return admin_app(broker, self._config.shown)

        return BaseApp(
            lambda: self._health(broker, stop), self._registry, make_rest, self._readings
        )

    def _health(self, broker: Broker, stop: asyncio.Event) -> Health:
        """Describe this broker for /health. A broker is "stopping" from `stop` on, also while it
        hands its topics over. Clients and brokers find the broker only while it is registered.
        Without a connection to the metadata store, the broker does not know whether it is still
        registered, and reports "unregistered"."""
        connected = self._store.session_state is SessionState.CONNECTED
        if stop.is_set():
            state = "stopping"
        elif not self.ready.is_set():
            state = "starting"
        elif not (connected and self._registered.is_set()):
            state = "unregistered"
        else:
            state = "serving"
        details = health_details(broker, asyncio.get_running_loop().time())
        return Health(self._role, self._config.id, state, state == "serving", details)
