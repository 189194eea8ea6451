"""`magnetar standalone` as a process, for tests that kill it and start it again."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from support import free_port

from magnetar.local_process import LocalProcess, answers_health, magnetar_command

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class StandaloneProcess:
    """The process keeps its ports over restarts. A test may set other ports and another data
    directory before a start."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self._flags = flags
        self.data_dir = directory / "data"
        self.grpc_port, self.pulsar_port, self.http_port = (free_port() for _ in range(3))
        self._process = LocalProcess(
            "standalone", "standalone", directory, [], {}, lambda: answers_health(self.http_port)
        )

    @property
    def variables(self) -> Mapping[str, str]:
        """The settings in the environment of the process, from the next start on."""
        return self._process.variables

    @variables.setter
    def variables(self, variables: Mapping[str, str]) -> None:
        self._process.variables = variables

    @property
    def service_url(self) -> str:
        return f"grpc://localhost:{self.grpc_port}"

    @property
    def pulsar_url(self) -> str:
        return f"pulsar://localhost:{self.pulsar_port}"

    @property
    def log_file(self) -> Path:
        return self._process.log

    @property
    def log(self) -> str:
        return self._process.log.read_text()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def launch(self) -> None:
        ports = {"grpc": self.grpc_port, "pulsar": self.pulsar_port, "http": self.http_port}
        flags = [f"--{kind}-port={port}" for kind, port in ports.items()]
        command = [
            *magnetar_command("standalone"),
            f"--data-dir={self.data_dir}",
            *flags,
            *self._flags,
        ]
        self._process.command = command
        self._process.launch()

    def start(self) -> None:
        """Start the process. Returns when it serves."""
        self.launch()
        self._process.wait_ready()

    def health(self) -> tuple[int, dict[str, Any]]:
        """The status and the body of the answer; 0 while there is no server."""
        url = f"http://127.0.0.1:{self.http_port}/health"
        try:
            with urllib.request.urlopen(url, timeout=2) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, {}

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> int:
        """Stop the process with SIGTERM. Returns its exit status."""
        self._process.signal(signal.SIGTERM)
        return self._process.wait()

    def wait(self) -> int:
        return self._process.wait()

    def end(self) -> None:
        """Kill the process if it runs."""
        self._process.kill()
