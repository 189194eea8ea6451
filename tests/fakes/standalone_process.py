"""`magnetar standalone` as a process, for tests that kill it and start it again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from support import free_port

if TYPE_CHECKING:
    from pathlib import Path

READY_S = 60.0


class StandaloneProcess:
    """On ports of its own, which stay when it is started again."""

    def __init__(self, directory: Path) -> None:
        self.data_dir = directory / "data"
        self.log_file = directory / "log"
        self.grpc_port, self.pulsar_port, self.http_port = (free_port() for _ in range(3))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def service_url(self) -> str:
        return f"grpc://localhost:{self.grpc_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def launch(self) -> None:
        ports = {"grpc": self.grpc_port, "pulsar": self.pulsar_port, "http": self.http_port}
        flags = [f"--{kind}-port={port}" for kind, port in ports.items()]
        command = [sys.executable, "-m", "magnetar.cli.main", "standalone"]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, f"--data-dir={self.data_dir}", *flags], stdout=log, stderr=log
            )

    def start(self) -> float:
        """Returns when it serves, with the seconds that took."""
        began_s = time.monotonic()
        self.launch()
        assert self._process is not None
        while self.health()[0] != 200:
            assert self._process.poll() is None, self.log
            assert time.monotonic() < began_s + READY_S, self.log
            time.sleep(0.01)
        return time.monotonic() - began_s

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body; 0 while nobody listens."""
        url = f"http://127.0.0.1:{self.http_port}/health"
        try:
            with urllib.request.urlopen(url, timeout=2) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, {}

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """SIGTERM; its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(READY_S)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(READY_S)

    def end(self) -> None:
        """Whatever state it is in."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
