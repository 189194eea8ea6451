"""Servers for clients that block: brokers on a loop in a thread, standalone as a process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import httpx
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState
from fakes.namespaces import SPREAD, create_namespaces
from support import is_foreign

from magnetar.broker.session.access import AllowAll
from magnetar.local_process import standalone

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from magnetar.broker.session.access import Authenticator
    from magnetar.local_process import LocalProcess
    from magnetar.protos.names import TopicName

T = TypeVar("T")

READY_S = 60.0
KEPT = {
    "MAGNETAR_STANDALONE_DEFAULT_RETENTION_TIME_IN_MINUTES": "-1",
    "MAGNETAR_STANDALONE_DEFAULT_RETENTION_SIZE_IN_MB": "-1",
}


@dataclass
class Service:
    """The addresses of a broker for a client, and the cluster behind the broker."""

    pulsar_url: str
    grpc_url: str
    brokers: list[RunningBroker] = field(default_factory=list)  # the brokers of this process
    admin_urls: list[str] = field(default_factory=list)  # the URLs of a real cluster's brokers
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def brokers_count(self) -> int:
        return len(self.brokers) or len(self.admin_urls) or 1

    def owners(self, topic: TopicName) -> list[str]:
        """The broker that serves the topic now, of two or more."""
        if self.brokers:
            serving = [it for it in self.brokers if topic in {one.name for one in it.broker.topics}]
            return [it.registration.broker for it in serving]
        return [url for url in self.admin_urls if _serves(url, topic)]

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a function on the brokers' loop."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(READY_S)


@contextmanager
def brokers_in_thread(
    count: int, make_authenticator: Callable[[], Authenticator] = AllowAll
) -> Iterator[Service]:
    """Brokers that share metadata and ledgers. The URLs are those of the first broker. Redirects
    lead to the topics of the other brokers. Fails if a failure in the brokers' loop was not
    noticed."""
    started, stop = threading.Event(), asyncio.Event()
    service = Service("", "")
    stray: list[dict[str, Any]] = []
    failures: list[BaseException] = []

    def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not is_foreign(context):
            stray.append(context)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(note)
        async with AsyncExitStack() as stack:
            cluster = ClusterState()
            await create_namespaces(cluster.store(), *SPREAD)
            brokers = [
                await stack.enter_async_context(
                    running_broker(cluster, number, make_authenticator=make_authenticator)
                )
                for number in range(count)
            ]
            service.loop, service.brokers = loop, brokers
            service.pulsar_url, service.grpc_url = brokers[0].pulsar_url, brokers[0].grpc_url
            started.set()
            await stop.wait()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(READY_S)
    try:
        if not failures:
            yield service
    finally:
        if service.loop is not None and thread.is_alive():
            service.loop.call_soon_threadsafe(stop.set)
        thread.join(READY_S)
    assert not failures, failures
    assert not stray, stray
    assert not thread.is_alive()


@contextmanager
def local_cluster(directory: Path) -> Iterator[Service]:
    """`magnetar local-cluster` with real bookies and two brokers. The URLs are those of the first
    broker."""
    command = [sys.executable, "-m", "magnetar.cli.main", "local-cluster"]
    command += ["--dir", str(directory / "cluster")]
    command += ["--zookeepers", "1", "--bookies", "3", "--brokers", "2"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, (directory / "log").read_text()
        cluster = json.loads(ready)
        brokers = [it["ports"] for it in cluster["processes"] if it["role"] == "broker"]
        for name in SPREAD:
            _create_namespace(brokers[0]["http"], name)
        yield Service(
            f"pulsar://127.0.0.1:{brokers[0]['pulsar']}",
            f"grpc://127.0.0.1:{brokers[0]['grpc']}",
            admin_urls=[f"http://127.0.0.1:{ports['http']}" for ports in brokers],
        )
        process.terminate()
        assert process.wait(READY_S) == 0, (directory / "log").read_text()
    finally:
        process.kill()
        process.wait()


@contextmanager
def standalone_process(directory: Path) -> Iterator[Service]:
    """`magnetar standalone` on free ports."""
    with standalone(directory) as process:
        ports = process.ports
        yield Service(
            f"pulsar://127.0.0.1:{ports['pulsar']}",
            f"grpc://127.0.0.1:{ports['grpc']}",
            admin_urls=[f"http://127.0.0.1:{ports['http']}"],
        )
        process.terminate()
        assert process.wait() == 0, process.log.read_text()


@contextmanager
def standalone_with_deduplication(directory: Path) -> Iterator[LocalProcess]:
    """`magnetar standalone`, which keeps all messages. In the namespace public/exact, deduplication
    is on."""
    with standalone(directory, KEPT) as process:
        admin = f"http://127.0.0.1:{process.ports['http']}/admin/v2/namespaces/public/exact"
        httpx.put(admin, timeout=READY_S).raise_for_status()
        httpx.post(f"{admin}/deduplication", json=True, timeout=READY_S).raise_for_status()
        yield process


def _create_namespace(port: int, name: str) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=READY_S)
    try:
        connection.request("PUT", f"/admin/v2/namespaces/{name}")
        assert connection.getresponse().status == HTTPStatus.NO_CONTENT
    finally:
        connection.close()


def _serves(admin_url: str, topic: TopicName) -> bool:
    """Only the owner returns a topic's statistics. The other brokers redirect to the owner."""
    path = f"/admin/v2/persistent/{topic.tenant}/{topic.namespace}/{topic.topic}/stats"
    connection = HTTPConnection(urlsplit(admin_url).netloc, timeout=READY_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == HTTPStatus.OK
    finally:
        connection.close()
