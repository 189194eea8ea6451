"""The bookie's process: a bookie, its ports, and its registration."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from magnetar.bookie.bookie import open_bookie, registration
from magnetar.bookie.config import BookieConfig
from magnetar.bookie.data_port import data_server
from magnetar.bookie.registration import Registration
from magnetar.bookie.server import SERVICE, handlers
from magnetar.bookie.service import State
from magnetar.metadata.model import BookieAddress
from magnetar.metadata.store import SessionState
from magnetar.metadata.zookeeper import ZooKeeperStore
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.config import ConfigError, load_config
from magnetar.runtime.garbage import collect_when_due, settle_gc
from magnetar.runtime.grpc_frames import grpc_server
from magnetar.runtime.http import BaseApp, Health, serve_http
from magnetar.runtime.listener import authority, bind_port, is_loopback, port_of
from magnetar.runtime.log import configure_logging, get_logger
from magnetar.runtime.metrics import gauge, measure_process
from magnetar.runtime.process import report_failure, run_process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.bookie.service import BookieService
    from magnetar.metadata.store import MetadataStore

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """The ports on which a bookie listens."""

    data_port: int
    grpc_port: int
    http_port: int


async def run_bookie(config: BookieConfig, stop: asyncio.Event) -> None:
    """Run a bookie of a cluster until `stop` is set. The bookie then syncs and acknowledges the
    written entries, for at most `stop_grace_s`.

    Raises StartRefused, PortInUse, AddressUnusable, LeaseTaken, and the errors of the metadata
    store, alone or in exception groups.
    """
    store = await ZooKeeperStore.connect_url(
        config.metadata_url, session_timeout_s=config.session_timeout_s
    )
    try:
        await serve_bookie(config, stop, store=store, on_ready=lambda _: None)
    finally:
        await store.close()


async def serve_bookie(
    config: BookieConfig,
    stop: asyncio.Event,
    *,
    store: MetadataStore,
    on_ready: Callable[[Ready], None],
) -> None:
    """Run a bookie like `run_bookie`, on an open metadata store. Calls `on_ready` once the bookie
    serves and is registered. The caller closes the store, which ends the registration."""
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        data_socket = bind_port(config.host, config.data_port)
        stack.callback(data_socket.close)
        http_socket = bind_port(config.host, config.http_port)
        stack.callback(http_socket.close)
        service = await stack.enter_async_context(
            open_bookie(
                config.data_dir,
                bookie=config.id,
                metadata=store,
                clock=SystemClock(),
                chance=random.SystemRandom(),
                registry=registry,
                pending_bytes_max=config.pending_bytes_max,
                read_cache_bytes=config.read_cache_mb << 20,
                open_deadline_s=config.open_deadline_s,
                stop_grace_s=config.stop_grace_s,
                new_incarnation=config.new_incarnation,
                upkeep_config=config.upkeep,
            )
        )
        grpc_port = await stack.enter_async_context(
            grpc_server({SERVICE: handlers(service)}, host=config.host, port=config.grpc_port)
        )
        ready = Ready(port_of(data_socket), grpc_port, port_of(http_socket))
        entry = Registration(
            store,
            registration(
                service,
                address=BookieAddress(
                    data=authority(config.advertised, ready.data_port),
                    grpc=authority(config.advertised, grpc_port),
                ),
                http_address=authority(config.advertised, ready.http_port),
                zone=config.zone,
            ),
        )
        service.watch_read_only(entry.set_read_only)
        app = BaseApp(lambda: _health(service, entry, store), registry)
        gauge(registry, "magnetar_bookie_registered", "1 while registered.", lambda: entry.held)

        async def announce() -> None:
            await entry.wait_held()
            settle_gc()
            _say_ready(config, ready)
            on_ready(ready)

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(data_server(service).run(data_socket)),
                group.create_task(serve_http(app, http_socket)),
                group.create_task(measure_process(registry)),
                # 0: Python's collections of young objects already free the garbage of a bookie
                group.create_task(collect_when_due(lambda: 0)),
                group.create_task(entry.run()),
                group.create_task(announce()),
            ]
            await stop.wait()
            await service.stop(grace_s=config.stop_grace_s)
            for task in tasks:
                task.cancel()


def _say_ready(config: BookieConfig, ready: Ready) -> None:
    log.info(
        "bookie serves",
        bookie=config.id,
        host=config.host,
        data_port=ready.data_port,
        grpc_port=ready.grpc_port,
        http_port=ready.http_port,
    )
    if is_loopback(config.host):
        log.info(
            "listening on loopback only: set host to accept connections from other machines",
            host=config.host,
        )
    else:
        log.warning(
            "listening without TLS or authentication: every client that reaches the ports can read "
            "and write",
            host=config.host,
        )


def _health(service: BookieService, entry: Registration, store: MetadataStore) -> Health:
    """Return the health. The bookie is ready only while it is registered, because brokers find
    bookies by their registrations. Without a connection to the metadata store, the bookie does not
    know whether it is registered."""
    identity = service.identity
    registered = entry.held and store.session_state is SessionState.CONNECTED
    return Health(
        role="bookie",
        id=identity.bookie,
        state=service.state if registered else "unregistered",
        ready=service.state is State.SERVING and registered,
        details={"incarnation": identity.incarnation, "boot_epoch": identity.boot_epoch},
    )


def main(arguments: Sequence[str]) -> int:
    """Run as a program; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m magnetar.bookie.main", description=__doc__)
    parser.add_argument("--config", type=Path, help="a TOML file")
    options = parser.parse_args(arguments)
    configure_logging()
    try:
        config = load_config(BookieConfig, file=options.config, flags={})
    except ConfigError as error:
        return report_failure(error)
    return run_process(lambda stop: run_bookie(config, stop))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
