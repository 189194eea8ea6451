"""`magnetar standalone` as a process that can be killed."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final, Self

from magnetar.runtime.ports import free_ports

if TYPE_CHECKING:
    from pathlib import Path

START_S_MAX: Final = 60.0  # it takes 2; this machine may be busy
STOP_S_MAX: Final = 20.0
POLL_S: Final = 0.02
LOG_LINES_SHOWN: Final = 10


class ServerFailed(Exception):
    """It ended, or did not serve in time."""

    definite = False

    def __init__(self, reason: str, log: str) -> None:
        tail = "\n".join(log.splitlines()[-LOG_LINES_SHOWN:])
        super().__init__(f"magnetar standalone {reason}. Its log ends:\n{tail}")
        self.reason = reason


class Server:
    """On free ports, which it keeps over a restart. `with` starts it, and ends it in the end."""

    def __init__(self, directory: Path) -> None:
        self._data = directory / "data"
        self._log = directory / "standalone.log"
        self._grpc_port, self._pulsar_port, self._http_port = free_ports(3)
        self._process: subprocess.Popen[bytes] | None = None  # None: not running

    @property
    def service_url(self) -> str:
        return f"grpc://127.0.0.1:{self._grpc_port}"

    def start(self) -> float:
        """Returns when it serves: how many seconds that took. Raises ServerFailed."""
        assert self._process is None
        began_s = time.monotonic()
        ports = {"grpc": self._grpc_port, "pulsar": self._pulsar_port, "http": self._http_port}
        command = [sys.executable, "-m", "magnetar.cli.main", "standalone"]
        command += [f"--data-dir={self._data}"]
        command += [f"--{kind}-port={port}" for kind, port in ports.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        while not self._serves():
            if self._process.poll() is not None:
                raise ServerFailed(f"ended with {self._process.returncode}", self._log.read_text())
            if time.monotonic() > began_s + START_S_MAX:
                raise ServerFailed("did not serve in time", self._log.read_text())
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    def kill(self) -> None:
        """`kill -9`: it writes nothing more, says nothing more."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/health", timeout=2):
                return True
        except OSError:  # urllib's errors are, also that of a status above 400
            return False
