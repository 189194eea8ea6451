"""`magnetar local-cluster`: processes of a ZooKeeper server, three bookies and two brokers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
from support import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERVED_S = 60.0
BALANCING = "load_balancer_shedding_interval_minutes=0.01"
STAYING = "load_balancer_shedding_enabled=false"


class ClusterProcess:
    """`magnetar local-cluster`, which starts a process again when it was killed."""

    def __init__(
        self,
        directory: Path,
        *,
        balances: bool = False,
        bookies: int = 3,
        brokers: int = 2,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """`balances`: bundles move to the broker that owns fewer, within some seconds. Otherwise
        they stay, so that a test knows where they are. `settings`: further ones of the brokers."""
        self.directory = directory / "cluster"
        command = [sys.executable, "-m", "magnetar.cli.main", "local-cluster", "--restart"]
        command += ["--zookeepers", "1", "--bookies", str(bookies), "--brokers", str(brokers)]
        command += ["--broker-setting", BALANCING if balances else STAYING]
        for name, value in (settings or {}).items():
            command += ["--broker-setting", f"{name}={json.dumps(value)}"]
        with (directory / "launcher.log").open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(self.directory)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (directory / "launcher.log").read_text()
        ready = json.loads(line)
        self.pulsar_url: str = ready["pulsar_url"]
        self.service_url: str = ready["service_url"]

    @property
    def brokers(self) -> list[dict[str, Any]]:
        """The pid and the ports of each running process."""
        described = json.loads((self.directory / "cluster.json").read_text())
        return [each for each in described["processes"] if each["role"] == "broker"]

    def ask(
        self, broker: int, method: str, path: str, body: object = None, *, follow: bool = True
    ) -> httpx.Response:
        """Ask the broker with this number, over HTTP. Raises httpx.HTTPError."""
        return httpx.request(
            method,
            f"http://127.0.0.1:{self.brokers[broker]['ports']['http']}{path}",
            json=body,
            follow_redirects=follow,
            timeout=60.0,
        )

    def admin(self, method: str, path: str, body: object = None, *, broker: int = 0) -> Any:
        answer = self.ask(broker, method, f"/admin/v2/{path}", body)
        assert answer.is_success, (path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def owner(self, topic: str, *, first: int = 0, domain: str = "persistent") -> int:
        """The broker that serves the topic. A bundle without an owner goes to the broker that is
        asked."""
        found = self.ask(first, "GET", f"/lookup/v2/topic/{domain}/public/two/{topic}").json()
        port = int(found["httpUrl"].rpartition(":")[2])
        [owner] = [n for n, each in enumerate(self.brokers) if each["ports"]["http"] == port]
        return owner

    def kill(self, broker: int) -> None:
        os.kill(self.brokers[broker]["pid"], signal.SIGKILL)

    def wait_back(self, pids: list[int]) -> None:
        """Wait until all brokers run and answer. No broker still has the pid of a killed
        process."""

        def is_back() -> bool:
            if any(each["pid"] in pids for each in self.brokers):
                return False
            try:
                return all(self.ask(n, "GET", "/health").is_success for n in range(2))
            except httpx.HTTPError:
                return False

        wait_for(is_back, deadline_s=SERVED_S)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()
