"""A cluster on this machine: real ZooKeepers, bookies, brokers and what repairs, each a process of
its own.

For trying a cluster out, for tests, and for chaos. All of them listen on loopback, on ports that
were free when the cluster was first put together, and die with the process that started them. A
directory that was used before is used again: data and names stay, ports may change.

    <directory>/cluster.json            what `describe` says
    <directory>/env.sh                  where it is, for a shell: the variables that commands read
    <directory>/<role>-<n>/             data, configuration and log of one process
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from magnetar.claim import DirectoryRefused, claimed
from magnetar.local_process import LocalProcess, ProcessFailed, answers_health
from magnetar.runtime.log import get_logger
from magnetar.runtime.ports import free_ports
from magnetar.zookeeper_server import ZooKeeperEnsemble, ZooKeeperNode, ports_needed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

OWNER: Final = "local-cluster"
DESCRIPTION: Final = "cluster.json"
ENVIRONMENT: Final = "env.sh"
HOST: Final = "127.0.0.1"
RESTART_PAUSE_S: Final = 0.5  # before a process that ended is started again

log = get_logger(__name__)


class LocalCluster:
    """`async with LocalCluster(directory, ...) as cluster:` runs it; leaving stops all of it.

    Entering raises DirectoryRefused, JavaMissing, ZooKeeperJarsMissing, ProcessFailed; then nothing
    is left running. Enter it on a thread that lives as long as the cluster.

    Processes are named by role ("zookeeper", "bookie", "broker", "autorecovery") and id
    ("bookie-1", ...).
    """

    def __init__(
        self,
        directory: Path,
        *,
        zookeepers: int = 3,
        bookies: int = 3,
        brokers: int = 2,
        autorecoveries: int = 1,
    ) -> None:
        assert zookeepers >= 1, zookeepers
        assert bookies >= 1, bookies
        assert brokers >= 1, brokers
        assert autorecoveries >= 0, autorecoveries
        self.directory = directory.absolute()
        self.processes: tuple[LocalProcess, ...] = ()  # once entered
        self.zookeeper = ""  # "host:port,..."
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
        """Of all brokers: each one redirects to the broker that serves a topic."""
        return self._url("http", "http")

    @property
    def metadata_url(self) -> str:
        """What `magnetar bookies` asks for."""
        return f"zk://{self.zookeeper}/magnetar"

    def of_role(self, role: str) -> list[LocalProcess]:
        return [process for process in self.processes if process.role == role]

    def process(self, role: str, process_id: str) -> LocalProcess:
        """KeyError: there is none of that role and id."""
        for process in self.processes:
            if (process.role, process.id) == (role, process_id):
                return process
        raise KeyError((role, process_id))

    async def kill(self, role: str, process_id: str) -> None:
        """SIGKILL; returns when it is gone. It stays dead until `restart`."""
        await self.process(role, process_id).kill()

    async def restart(self, role: str, process_id: str) -> None:
        """Start it again, on its ports and its data, and return when it serves; one that runs is
        stopped first. Raises ProcessFailed."""
        process = self.process(role, process_id)
        await process.stop()
        await process.launch()
        self._write_description()
        await process.wait_ready()

    def describe(self) -> dict[str, object]:
        """What cluster.json holds."""
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
            self._put_together()
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
        for roles in (("zookeeper",), ("bookie", "broker", "autorecovery")):
            processes = [process for process in self.processes if process.role in roles]
            for process in processes:
                await process.launch()
            await _all([process.wait_ready for process in processes])
        self._write_description()

    async def _stop(self) -> None:
        """In the order in which they need one another."""
        for role in ("autorecovery", "broker", "bookie", "zookeeper"):
            await _all([process.stop for process in self.of_role(role)])

    def _check_ensemble(self) -> None:
        """New ZooKeepers among old ones could outvote them, and all metadata would be gone."""
        there = len(list(self.directory.glob("zookeeper-*")))
        if there not in (0, self._counts[0]):
            raise DirectoryRefused(
                self.directory,
                f"its cluster has {there} ZooKeepers, not {self._counts[0]}",
                "Give the same number again, or another directory",
            )

    def _put_together(self) -> None:
        zookeepers, bookies, brokers, autorecoveries = self._counts
        needed = ports_needed(zookeepers)
        found = free_ports(needed + 2 * bookies + 3 * brokers + autorecoveries)
        ensemble = ZooKeeperEnsemble(self.directory, size=zookeepers, ports=found[:needed])
        self.zookeeper = ensemble.hosts
        ports = iter(found[needed:])
        self.processes = (
            *(_zookeeper(node) for node in ensemble.nodes),
            *(self._bookie(n, next(ports), next(ports)) for n in range(1, bookies + 1)),
            *(
                self._broker(n, next(ports), next(ports), next(ports), bookies)
                for n in range(1, brokers + 1)
            ),
            *(self._autorecovery(n, next(ports), bookies) for n in range(1, autorecoveries + 1)),
        )

    def _bookie(self, number: int, grpc_port: int, http_port: int) -> LocalProcess:
        settings = {"data_dir": str(self.directory / f"bookie-{number}" / "data")}
        return self._server("bookie", number, {"grpc": grpc_port, "http": http_port}, settings)

    def _broker(
        self, number: int, grpc_port: int, pulsar_port: int, http_port: int, bookies: int
    ) -> LocalProcess:
        copies = _copies(bookies)
        return self._server(
            "broker",
            number,
            {"grpc": grpc_port, "pulsar": pulsar_port, "http": http_port},
            {
                "ensemble_size": copies,
                "write_quorum": copies,
                "ack_quorum": copies // 2 + 1,
            },
        )

    def _autorecovery(self, number: int, http_port: int, bookies: int) -> LocalProcess:
        settings = {"write_quorum": _copies(bookies)}
        return self._server("autorecovery", number, {"http": http_port}, settings)

    def _server(
        self, role: str, number: int, ports: Mapping[str, int], settings: Mapping[str, object]
    ) -> LocalProcess:
        name = f"{role}-{number}"
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
        # A JSON number or string is a TOML one as well.
        file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items()))
        return LocalProcess(
            role,
            name,
            directory,
            [sys.executable, "-m", "magnetar.cli.main", role, "--config", str(file)],
            ports,
            partial(answers_health, ports["http"]),
        )

    def _url(self, scheme: str, port: str) -> str:
        addresses = [f"{HOST}:{broker.ports[port]}" for broker in self.of_role("broker")]
        return f"{scheme}://{','.join(addresses)}"

    def _write_description(self) -> None:
        """Replace each file at once: whoever reads it sees the old one or the new one."""
        urls = {
            "SERVICE": self.service_url,
            "ADMIN": self.admin_url,
            "METADATA": self.metadata_url,
        }
        texts = {
            ENVIRONMENT: "".join(f"export MAGNETAR_{n}_URL={url}\n" for n, url in urls.items()),
            DESCRIPTION: json.dumps(self.describe()) + "\n",
        }
        for name, text in texts.items():
            new = self.directory / f"{name}.new"
            new.write_text(text)
            os.replace(new, self.directory / name)


def _copies(bookies: int) -> int:
    """Three where there are three bookies; with fewer, as many as can be."""
    return min(3, bookies)


def _zookeeper(node: ZooKeeperNode) -> LocalProcess:
    async def is_ready() -> bool:
        return await asyncio.to_thread(node.mode) is not None

    name = f"zookeeper-{node.number}"
    ports = {"client": node.client_port}
    return LocalProcess("zookeeper", name, node.directory, node.command, ports, is_ready)


async def _all(calls: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """All at once. Raises the first ProcessFailed, alone: the others follow from it, mostly."""
    failures: list[ProcessFailed] = []
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call())
    except* ProcessFailed as failed:
        failures = list(_failures(failed))
    if failures:
        raise failures[0]


def _failures(group: BaseExceptionGroup[ProcessFailed]) -> Iterator[ProcessFailed]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _failures(error)
        else:
            yield error


async def run_local_cluster(
    cluster: LocalCluster,
    stop: asyncio.Event,
    *,
    restart: bool,
    on_ready: Callable[[], None],
) -> None:
    """Run it until `stop` is set. A process that ends is started again only if `restart`.

    Raises what entering the cluster raises.
    """
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_run(cluster, restart=restart, on_ready=on_ready))
        await stop.wait()
        running.cancel()


async def _run(cluster: LocalCluster, *, restart: bool, on_ready: Callable[[], None]) -> None:
    async with cluster, asyncio.TaskGroup() as group:
        for process in cluster.processes:
            group.create_task(_watch(cluster, process, restart=restart))
        on_ready()


async def _watch(cluster: LocalCluster, process: LocalProcess, *, restart: bool) -> None:
    while True:
        status = await process.wait_ended()
        log.warning("process ended", process=process.id, how=status, restart=restart)
        if not restart:
            return
        await asyncio.sleep(RESTART_PAUSE_S)
        try:
            await cluster.restart(process.role, process.id)
        except ProcessFailed as error:
            log.error("process did not come back", process=process.id, error=str(error))
        else:
            log.info("process restarted", process=process.id, pid=process.pid)
