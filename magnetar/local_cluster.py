"""A cluster on this machine: real ZooKeepers, bookies, brokers and autorecovery processes.

A local cluster is for trials, tests and chaos tests. All processes listen on loopback, and end with
the process that started them. A later start in the same directory keeps data, names and ports.

    <directory>/ports.json              the ports of each process, for the next start
    <directory>/cluster.json            the result of `describe`; only while the cluster runs
    <directory>/env.sh                  variables for a shell; only while the cluster runs
    <directory>/<role>-<n>/             data, configuration and log of one process
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from magnetar.bookie.errors import CookieMissing, StartRefused
from magnetar.bookie.storage.identity import Wanted, plan_start
from magnetar.bookie.storage.layout import find
from magnetar.claim import DirectoryRefused, claimed
from magnetar.local_process import LocalProcess, ProcessFailed, answers_health, magnetar_command
from magnetar.metadata import paths
from magnetar.metadata.cluster import cluster_id
from magnetar.metadata.model import BookieId
from magnetar.metadata.zookeeper import CONNECT_TIMEOUT_S, ZooKeeperStore
from magnetar.runtime.errors import PortInUse
from magnetar.runtime.listener import bind_port
from magnetar.runtime.log import get_logger
from magnetar.runtime.ports import free_ports
from magnetar.watchdog import CHECK_S, SILENCE_S, Watchdog, answers
from magnetar.zookeeper_server import ZooKeeperEnsemble, port_kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

OWNER: Final = "local-cluster"
PORTS: Final = "ports.json"
DESCRIPTION: Final = "cluster.json"
ENVIRONMENT: Final = "env.sh"
HOST: Final = "127.0.0.1"
RESTART_PAUSE_S: Final = 0.5  # before an ended process is started again

log = get_logger(__name__)


class LocalCluster:
    """An asynchronous context manager that runs the cluster. Entering the context starts all
    processes. If this raises DirectoryRefused, JavaMissing, ZooKeeperJarsMissing or ProcessFailed,
    no process stays running. Leaving the context stops all processes. Enter the context on a thread
    that lives as long as the cluster: the kernel kills the processes when the thread ends.

    Processes are named by role ("zookeeper", "bookie", "broker", "autorecovery") and id
    ("bookie-1", ...). The cluster does not start a decommissioned bookie.
    """

    def __init__(
        self,
        directory: Path,
        *,
        zookeepers: int = 3,
        bookies: int = 3,
        brokers: int = 2,
        autorecoveries: int = 1,
        broker_settings: Mapping[str, str] | None = None,
        bookie_settings: Mapping[str, str] | None = None,
    ) -> None:
        """`broker_settings`, `bookie_settings`: further settings of all brokers or all bookies,
        keyed by name."""
        assert zookeepers >= 1, zookeepers
        assert bookies >= 1, bookies
        assert brokers >= 1, brokers
        assert autorecoveries >= 0, autorecoveries
        self.directory = directory.absolute()
        self.processes: tuple[LocalProcess, ...] = ()  # filled when the cluster is entered
        self.zookeeper = ""  # "host:port,..."
        self._broker_settings = broker_settings or {}
        self._bookie_settings = bookie_settings or {}
        self._counts = (zookeepers, bookies, brokers, autorecoveries)
        self._stack = AsyncExitStack()

    @property
    def service_url(self) -> str:
        return self._url("grpc", "grpc")

    @property
    def pulsar_url(self) -> str:
        return self._url("pulsar", "pulsar")

    @property
    def admin_url(self) -> str:
        """The URL with the addresses of all brokers. A broker redirects a request for a topic to
        the broker that serves the topic."""
        return self._url("http", "http")

    @property
    def metadata_url(self) -> str:
        """The URL for the option `--metadata-url` of `magnetar bookies`."""
        return f"zk://{self.zookeeper}/magnetar"

    def of_role(self, role: str) -> list[LocalProcess]:
        return [process for process in self.processes if process.role == role]

    def process(self, role: str, process_id: str) -> LocalProcess:
        """Return the process of this role and id. Raises KeyError if there is none."""
        for process in self.processes:
            if (process.role, process.id) == (role, process_id):
                return process
        raise KeyError((role, process_id))

    async def kill(self, role: str, process_id: str) -> None:
        """Send SIGKILL, and return when the process has ended. Only `restart` starts it again."""
        await asyncio.to_thread(self.process(role, process_id).kill)

    async def restart(self, role: str, process_id: str) -> None:
        """Start a process again, on its ports and its data, and return when it serves. Stops a
        running process first. Raises KeyError, ProcessFailed."""
        process = self.process(role, process_id)
        await asyncio.to_thread(process.stop)
        process.launch()  # on this thread: the process ends with the thread that launched it
        self._write_description()
        await asyncio.to_thread(process.wait_ready)

    def describe(self) -> dict[str, object]:
        """The content of cluster.json."""
        return {
            "service_url": self.service_url,
            "pulsar_url": self.pulsar_url,
            "admin_url": self.admin_url,
            "zookeeper": self.zookeeper,
            "metadata_url": self.metadata_url,
            "processes": [
                {
                    "role": process.role,
                    "id": process.id,
                    "pid": process.pid,
                    "data_dir": str(process.directory),
                    "ports": dict(process.ports),
                }
                for process in self.processes
            ],
        }

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(claimed(self.directory, OWNER))
            self._check_ensemble()
            for name in (DESCRIPTION, ENVIRONMENT):
                stack.callback((self.directory / name).unlink, missing_ok=True)
            stack.push_async_callback(self._stop)
            await self._start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        zookeepers, bookies, brokers, autorecoveries = self._counts
        ports = _Ports(self.directory)
        names = [f"zookeeper-{n}" for n in range(1, zookeepers + 1)]
        ensemble = ZooKeeperEnsemble(
            self.directory,
            size=zookeepers,
            ports=[ports.of(name, *port_kinds(zookeepers)) for name in names],
            tied=True,
        )
        self.zookeeper = ensemble.hosts
        self.processes = tuple(ensemble.nodes)
        await _launch(ensemble.nodes)

        members = await self._members([f"bookie-{n}" for n in range(1, bookies + 1)])
        # The number of copies of each entry: three if the cluster has three bookies or more.
        copies = min(3, len(members))
        servers = (
            *(self._bookie(name, ports) for name in members),
            *(self._broker(f"broker-{n}", ports, copies) for n in range(1, brokers + 1)),
            *(
                self._autorecovery(f"autorecovery-{n}", ports, copies)
                for n in range(1, autorecoveries + 1)
            ),
        )
        ports.save()
        self.processes = (*ensemble.nodes, *servers)
        await _launch(servers)
        self._write_description()

    async def _stop(self) -> None:
        """Stop each role before the roles that it depends on."""
        for role in ("autorecovery", "broker", "bookie", "zookeeper"):
            for process in self.of_role(role):
                process.terminate()
            for process in self.of_role(role):
                await asyncio.to_thread(process.wait_stopped)

    def _check_ensemble(self) -> None:
        """Refuse a number of ZooKeepers that differs from the last start. New, empty servers could
        outvote the old servers, and all metadata would be lost."""
        there = len(list(self.directory.glob("zookeeper-*")))
        if there not in (0, self._counts[0]):
            raise DirectoryRefused(
                self.directory,
                f"its cluster has {there} ZooKeepers, not {self._counts[0]}",
                "Give the same number again, or another directory",
            )

    async def _members(self, bookies: Sequence[str]) -> list[str]:
        """Return the bookies to start: all except decommissioned bookies. A decommissioned bookie
        refuses to start on its old data, and this failure would end the cluster."""
        if not any(self._data(name).exists() for name in bookies):
            return list(bookies)  # the first start
        members = []
        store = await ZooKeeperStore.connect_url(self.metadata_url)
        try:
            for name in bookies:
                if await self._was_removed(store, name):
                    log.warning(
                        "bookie left out: it was decommissioned; delete its directory to add it as"
                        " a new bookie",
                        bookie=name,
                        directory=str(self.directory / name),
                    )
                else:
                    members.append(name)
        finally:
            await store.close()
        if not members:
            raise DirectoryRefused(
                self.directory,
                f"all of its {len(bookies)} bookies were decommissioned",
                "Delete the directory of a bookie to add it as a new one, or give more --bookies",
            )
        return members

    async def _was_removed(self, store: ZooKeeperStore, name: str) -> bool:
        """Return whether the bookie was decommissioned: it has data, but the metadata of its
        cluster holds no cookie of it."""
        data, chance = self._data(name), random.SystemRandom()
        if not data.exists() or await store.get(paths.bookie_cookie(BookieId(name))) is not None:
            return False
        deadline_s = asyncio.get_running_loop().time() + CONNECT_TIMEOUT_S
        wanted = Wanted(
            bookie=name,
            cluster=await cluster_id(store, chance=chance, deadline=deadline_s),
            fresh_incarnation="",
            fresh_start="",
            new_incarnation=False,
        )
        try:
            plan_start(data, find(data), None, wanted)
        except CookieMissing:
            return True
        except StartRefused:
            return False  # the bookie reports the reason when it starts
        return False

    def _data(self, bookie: str) -> Path:
        return self.directory / bookie / "data"

    def _bookie(self, name: str, ports: _Ports) -> LocalProcess:
        settings = {"data_dir": str(self._data(name)), **self._bookie_settings}
        return self._server("bookie", name, ports.of(name, "data", "grpc", "http"), settings)

    def _broker(self, name: str, ports: _Ports, copies: int) -> LocalProcess:
        settings = {
            "ensemble_size": copies,
            "write_quorum": copies,
            "ack_quorum": copies // 2 + 1,
            **self._broker_settings,
        }
        return self._server("broker", name, ports.of(name, "grpc", "pulsar", "http"), settings)

    def _autorecovery(self, name: str, ports: _Ports, copies: int) -> LocalProcess:
        return self._server("autorecovery", name, ports.of(name, "http"), {"write_quorum": copies})

    def _server(
        self, role: str, name: str, ports: Mapping[str, int], settings: Mapping[str, object]
    ) -> LocalProcess:
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        config = {
            "id": name,
            "metadata_url": self.metadata_url,
            "host": HOST,
            **{f"{kind}_port": port for kind, port in ports.items()},
            **settings,
        }
        file = directory / f"{role}.toml"
        # Numbers and strings have the same form in JSON and in TOML, but TOML has no surrogates.
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in config.items()
        ]
        file.write_text("".join(lines), encoding="utf-8")
        return LocalProcess(
            role,
            name,
            directory,
            [*magnetar_command(role), "--config", str(file)],
            ports,
            partial(answers_health, ports["http"]),
            tied=True,
        )

    def _url(self, scheme: str, port: str) -> str:
        addresses = [f"{HOST}:{broker.ports[port]}" for broker in self.of_role("broker")]
        return f"{scheme}://{','.join(addresses)}"

    def _write_description(self) -> None:
        urls = {
            "SERVICE": self.service_url,
            "ADMIN": self.admin_url,
            "METADATA": self.metadata_url,
        }
        variables = [f"export MAGNETAR_{name}_URL={url}\n" for name, url in urls.items()]
        _replace(self.directory / ENVIRONMENT, "".join(variables))
        _replace(self.directory / DESCRIPTION, json.dumps(self.describe()) + "\n")


async def _launch(processes: Sequence[LocalProcess]) -> None:
    """Start the processes, and return when all are ready. Raises ProcessFailed."""
    for process in processes:
        process.launch()
    for process in processes:
        await asyncio.to_thread(process.wait_ready)


class _Ports:
    """The ports of the processes, recorded so that the next start uses the same ports."""

    def __init__(self, directory: Path) -> None:
        """Raises DirectoryRefused if the file with the recorded ports is damaged."""
        self._file = directory / PORTS
        try:
            self._by_process = _parse_ports(self._file)
        except ValueError as error:
            raise DirectoryRefused(
                directory, f"{PORTS} is damaged: {error}", "Delete it; the cluster takes new ports"
            ) from error

    def of(self, process: str, *kinds: str) -> dict[str, int]:
        """Return the ports of a process by kind: the recorded port if it is free, else a new port.
        Logs a recorded port that is in use."""
        recorded = self._by_process.get(process, {})
        found: dict[str, int] = {}
        for kind in kinds:
            port = recorded.get(kind)
            if port is None or not _is_free(port):
                found[kind] = self._fresh()
            else:
                found[kind] = port
            if port not in (None, found[kind]):
                log.warning(
                    "port is in use by another process; took a new port",
                    process=process,
                    kind=kind,
                    port=port,
                    new_port=found[kind],
                )
        self._by_process[process] = found
        return found

    def save(self) -> None:
        _replace(self._file, json.dumps(self._by_process, indent=1) + "\n")

    def _fresh(self) -> int:
        """Return a free port that no process of this cluster has."""
        known = {port for ports in self._by_process.values() for port in ports.values()}
        while True:
            [port] = free_ports(1)
            if port not in known:
                return port


def _parse_ports(file: Path) -> dict[str, dict[str, int]]:
    """Return the recorded ports by process and kind; {}: there is no file. Raises ValueError if the
    file is damaged."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    try:
        return {
            process: {kind: int(port) for kind, port in ports.items()}
            for process, ports in found.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError("it does not name a port by process and kind") from error


def _is_free(port: int) -> bool:
    try:
        bind_port(HOST, port).close()
    except PortInUse:
        return False
    return True


def _replace(file: Path, text: str) -> None:
    """Replace the file in one step: a reader sees the old or the new content."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    os.replace(new, file)


async def run_local_cluster(
    cluster: LocalCluster,
    stop: asyncio.Event,
    *,
    restart: bool,
    on_ready: Callable[[], None],
    watchdog: bool = False,
) -> None:
    """Run the cluster until `stop` is set. Call `on_ready` when all processes are ready.

    `restart`: True starts ended processes again. `watchdog`: True kills a process that stands still
    (watchdog.py); ZooKeepers are not watched. Raises the errors of entering the cluster, in an
    ExceptionGroup.
    """
    async with asyncio.TaskGroup() as group:
        running = group.create_task(
            _run(cluster, restart=restart, on_ready=on_ready, watchdog=watchdog)
        )
        await stop.wait()
        running.cancel()


async def _run(
    cluster: LocalCluster, *, restart: bool, on_ready: Callable[[], None], watchdog: bool
) -> None:
    async with cluster, asyncio.TaskGroup() as group:
        for process in cluster.processes:
            group.create_task(_watch(cluster, process, restart=restart))
            if watchdog and "http" in process.ports:
                group.create_task(_guard(process))
        on_ready()


async def _watch(cluster: LocalCluster, process: LocalProcess, *, restart: bool) -> None:
    while True:
        outcome = await process.wait_ended()
        log.warning("process ended", process=process.id, outcome=outcome, restart=restart)
        if not restart:
            return
        await asyncio.sleep(RESTART_PAUSE_S)
        try:
            await cluster.restart(process.role, process.id)
        except ProcessFailed as error:
            log.error("process was not restarted", process=process.id, error=str(error))
        else:
            log.info("process restarted", process=process.id, pid=process.pid)


async def _guard(process: LocalProcess) -> None:
    watchdog, port = Watchdog(), process.ports["http"]
    loop = asyncio.get_running_loop()
    watched: int | None = None
    while True:
        await asyncio.sleep(CHECK_S)
        pid = process.pid
        if pid != watched:  # a restart between two checks is an end, too
            watchdog.on_ended()
            watched = pid
        if pid is None:
            continue
        answered = await asyncio.to_thread(answers, port)
        if process.pid == pid and watchdog.on_check(loop.time(), answers=answered):
            log.warning(
                "server killed: its /health was silent",
                process=process.id,
                silent_s=SILENCE_S,
                kills=watchdog.kills,
            )
            process.signal(signal.SIGKILL)
