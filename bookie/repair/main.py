"""The autorecovery process: an auditor that stands for election, and a replicator.

The process stores nothing locally and may be killed at any time. Any number of such processes share
the work.
"""

from __future__ import annotations

import asyncio
import random as chance
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.bookie.repair.auditor import Auditor
from magnetar.bookie.repair.replicator import Replicator
from magnetar.bookie.repair.reporting import report_bad_copies
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.store import SessionState
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.garbage import collect_when_due, settle_gc
from magnetar.runtime.http import BaseApp, Health, serve_http
from magnetar.runtime.listener import bind_port, is_loopback, port_of
from magnetar.runtime.log import get_logger
from magnetar.runtime.metrics import counter, gauge, measure_process
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from magnetar.bookie.ledger.peer import OpenPeer
    from magnetar.bookie.repair.settings import AutorecoveryConfig
    from magnetar.metadata.store import MetadataStore

log = get_logger(__name__)

RESTART_S_FIRST: Final = 0.5
RESTART_S_MAX: Final = 30.0


async def run_autorecovery(config: AutorecoveryConfig, stop: asyncio.Event) -> None:
    """Repair until `stop` is set. Raises PortInUse, AddressUnusable, and the errors of the
    metadata store."""
    from magnetar.bookie.ledger.connection import RemoteBookiePeer
    from magnetar.metadata.zookeeper import ZooKeeperStore

    store = await ZooKeeperStore.connect_url(
        config.metadata_url, session_timeout_s=config.session_timeout_s
    )
    try:
        await serve_autorecovery(
            config,
            stop,
            store=store,
            open_peer=RemoteBookiePeer,
            random=chance.SystemRandom(),
            on_ready=lambda _: None,
        )
    finally:
        await store.close()


async def serve_autorecovery(
    config: AutorecoveryConfig,
    stop: asyncio.Event,
    *,
    store: MetadataStore,
    open_peer: OpenPeer,
    random: random.Random,
    on_ready: Callable[[int], None],
) -> None:
    """Repair like `run_autorecovery`, with an open metadata store. Calls `on_ready` with the HTTP
    port once the bookies are known. The auditor keeps its leadership until the caller closes
    the store."""
    registry = CollectorRegistry()
    name = f"{config.id} {random.getrandbits(128):032x}"
    async with AsyncExitStack() as stack:
        listener = bind_port(config.host, config.http_port)
        stack.callback(listener.close)
        ledgers = _ledgers(config, store, open_peer, name, random)
        under_replication = UnderReplicationRecords(store, SystemClock())
        auditor = Auditor(
            store, under_replication, ledgers.services, config.repair, SystemClock(), name=name
        )
        replicator = Replicator(
            store,
            under_replication,
            ledgers.services,
            config.repair,
            SystemClock(),
            random,
            name=name,
            recover=ledgers.recover,
        )
        _export(registry, auditor, replicator)
        app = BaseApp(lambda: _health(config, store, auditor, replicator), registry)
        backoff = Backoff(RESTART_S_FIRST, RESTART_S_MAX, random)
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = [
                group.create_task(supervise("ledgers", ledgers.run, backoff=backoff))
            ]
            await ledgers.wait_ready()
            tasks += [
                group.create_task(serve_http(app, listener)),
                group.create_task(measure_process(registry)),
                # 0: Python's collections of young objects already free the garbage of this process
                group.create_task(collect_when_due(lambda: 0)),
                group.create_task(supervise("auditor", auditor.run, backoff=backoff)),
                group.create_task(supervise("replicator", replicator.run, backoff=backoff)),
                group.create_task(report_bad_copies(ledgers.bad_copies, under_replication)),
            ]
            settle_gc()
            _say_ready(config, port_of(listener))
            on_ready(port_of(listener))
            await stop.wait()
            for task in tasks:
                task.cancel()


def _ledgers(
    config: AutorecoveryConfig,
    store: MetadataStore,
    open_peer: OpenPeer,
    name: str,
    random: random.Random,
) -> Ledgers:
    ledger_config = LedgerConfig(
        ensemble_size=config.write_quorum,
        write_quorum=config.write_quorum,
        ack_quorum=config.write_quorum // 2 + 1,
    )
    directory = BookieRegistry(store)
    peers = PeerPool(
        directory,
        open_peer,
        client_name=name,
        random=random,
        connect_timeout_s=ledger_config.connect_timeout_s,
    )
    return Ledgers(store, directory, peers, LedgerIds(store), ledger_config, SystemClock(), random)


def _health(
    config: AutorecoveryConfig, store: MetadataStore, auditor: Auditor, replicator: Replicator
) -> Health:
    connected = store.session_state is SessionState.CONNECTED
    return Health(
        role="autorecovery",
        id=config.id,
        state="serving" if connected else "disconnected",
        ready=connected,
        details={
            "auditor": auditor.is_leader,
            "held": auditor.held,
            "paused": auditor.paused,
            "under_replicated": replicator.under_replicated,
        },
    )


def _say_ready(config: AutorecoveryConfig, http_port: int) -> None:
    log.info("autorecovery runs", id=config.id, host=config.host, http_port=http_port)
    if is_loopback(config.host):
        log.info(
            "listening on loopback only: reachable from this machine alone; set host to change it",
            host=config.host,
        )
    else:
        log.warning(
            "listening without TLS or authentication: any client can read the metrics",
            host=config.host,
        )


def _export(registry: CollectorRegistry, auditor: Auditor, replicator: Replicator) -> None:
    findings, counts = auditor.findings, replicator.counts
    for name, text, read in (
        ("audits", "Audits of all ledgers' metadata.", lambda: findings.audits),
        (
            "marked",
            "Under-replication records created or extended.",
            lambda: findings.recorded,
        ),
        ("compared", "Ledgers whose copies were compared.", lambda: findings.compared),
        (
            "missing_entries",
            "Missing copies found.",
            lambda: findings.missing_entries,
        ),
        (
            "repaired",
            "Ledgers repaired, with their records removed.",
            lambda: counts.ledgers_repaired,
        ),
        ("failed", "Failed attempts to repair a ledger.", lambda: counts.repairs_failed),
        ("copied_bytes", "Bytes of entries copied.", lambda: counts.copied_bytes),
        ("replaced", "Members of segments replaced.", lambda: counts.members_replaced),
        (
            "recovered",
            "Ledgers recovered because their writers kept a lost bookie.",
            lambda: counts.ledgers_recovered,
        ),
    ):
        counter(registry, f"magnetar_autorecovery_{name}_total", text, read)
    for name, text, value in (
        ("leads", "1 while this process is the elected auditor.", lambda: auditor.is_leader),
        (
            "held",
            "1 while the auditor declares no bookie lost because too many are missing at once.",
            lambda: auditor.held,
        ),
        ("paused", "1 while repair is paused.", lambda: auditor.paused),
        (
            "under_replicated",
            "Ledgers with an under-replication record.",
            lambda: replicator.under_replicated,
        ),
        ("ledgers", "Ledgers in the last audit.", lambda: findings.ledgers),
        (
            "unreadable",
            "Ledgers in the last audit whose metadata or under-replication record is unreadable.",
            lambda: findings.unreadable,
        ),
        (
            "audited_timestamp_seconds",
            "End of the last complete audit; 0: none in this process.",
            lambda: findings.audited_ms / 1000,
        ),
        (
            "compared_timestamp_seconds",
            "End of the last complete comparison of all copies; 0: unknown in this process.",
            lambda: findings.compared_ms / 1000,
        ),
    ):
        gauge(registry, f"magnetar_autorecovery_{name}", text, value)
