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

from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState
from support import is_foreign

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

    from magnetar.protos.names import TopicName

T = TypeVar("T")

READY_S = 60.0


@dataclass
class Service:
    """Where a client goes, which is one broker, and what stands behind it."""

    pulsar_url: str
    grpc_url: str
    brokers: list[RunningBroker] = field(default_factory=list)  # of this process
    admin_urls: list[str] = field(default_factory=list)  # of a real cluster's brokers
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def brokers_count(self) -> int:
        return len(self.brokers) or len(self.admin_urls) or 1

    def owners(self, topic: TopicName) -> list[str]:
        """Who serves the topic now, of two brokers or more."""
        if self.brokers:
            serving = [it for it in self.brokers if topic in {one.name for one in it.broker.topics}]
            return [it.registration.broker for it in serving]
        return [url for url in self.admin_urls if _serves(url, topic)]

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something on the brokers' loop."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(READY_S)


@contextmanager
def brokers_in_thread(count: int) -> Iterator[Service]:
    """Brokers that share metadata and ledgers. The URLs are the first one's: whatever another one
    owns is reached by a redirect. Fails if something failed there where nobody looks."""
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
            brokers = [
                await stack.enter_async_context(running_broker(cluster, number))
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
    """`magnetar local-cluster` with real bookies and two brokers. The URLs are the first one's."""
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
    command = [sys.executable, "-m", "magnetar.cli.main", "standalone"]
    command += ["--data-dir", str(directory / "data")]
    command += [f"--{kind}-port=0" for kind in ("grpc", "pulsar", "http")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = _Log(process)
    try:
        ready = log.wait_for("broker is ready")
        yield Service(ready["pulsar"], ready["grpc"])
        process.terminate()
        assert process.wait(READY_S) == 0, log.lines
    finally:
        process.kill()
        process.wait()


def _serves(admin_url: str, topic: TopicName) -> bool:
    """Only the owner tells a topic's statistics; the others name it."""
    path = f"/admin/v2/persistent/{topic.tenant}/{topic.namespace}/{topic.topic}/stats"
    connection = HTTPConnection(urlsplit(admin_url).netloc, timeout=READY_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == HTTPStatus.OK
    finally:
        connection.close()


class _Log:
    """What a process logs, read as it comes: it would wait with a full pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._process = process
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, event: str) -> dict[str, Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._find(event) or self._ended, READY_S)
            found = self._find(event)
        assert found, self.lines
        return found

    def _find(self, event: str) -> dict[str, Any]:
        records: list[dict[str, Any]] = [json.loads(it) for it in self.lines if it[0] == "{"]
        return next((record for record in records if record["event"] == event), {})

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._note(line)
        self._note("")

    def _note(self, line: str) -> None:
        with self._changed:
            if line:
                self.lines.append(line)
            else:
                self._ended = True
            self._changed.notify_all()
