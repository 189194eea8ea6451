"""Runs a server as a local process: starts it, waits until it is ready, stops it or kills it.

The local cluster, the ZooKeeper launcher, the demo and the tests start servers with this module.
All methods but `wait_ended` block: call them on a thread, or where blocking is acceptable.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from magnetar import lifeline
from magnetar.runtime.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

READY_S: Final = 60.0  # a busy machine with two cores needs about 10 s for eight processes
STOP_S: Final = 40.0  # a broker hands its topics over within 30 s, a bookie ends within 5 s
POLL_S: Final = 0.02
ANSWER_S: Final = 2.0
LOG_TAIL_BYTES: Final = 2000

# The prefixes of the settings of roles in the environment. A started server does not inherit such
# variables from its parent.
_ROLE_SETTINGS: Final = tuple(
    f"MAGNETAR_{role}_" for role in ("BOOKIE", "BROKER", "AUTORECOVERY", "STANDALONE")
)


class ProcessFailed(Exception):
    """A process ended, or was not ready in time. `log_tail` is the end of its log."""

    definite = False

    def __init__(self, name: str, reason: str, log: Path) -> None:
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
        last = tail.strip().rpartition("\n")[2]
        super().__init__(f"{name} {reason}; its log {log} ends: {last}")
        self.name = name
        self.reason = reason
        self.log_tail = tail


@dataclass(eq=False)
class LocalProcess:
    """One server process. It can be started again after it has ended.

    A context manager: it starts the process on entry, and stops it on exit.
    """

    role: str
    id: str
    directory: Path  # the directory of its log
    command: Sequence[str]
    ports: Mapping[str, int]  # keyed by kind, for example {"grpc": 6660}
    is_ready: Callable[[], bool]
    variables: Mapping[str, str] = field(default_factory=dict)  # added to the environment
    ready_s: float = READY_S
    stop_s: float = STOP_S
    tied: bool = False  # the kernel kills the process when the thread that called `launch` ends
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def log(self) -> Path:
        return self.directory / f"{self.role}.log"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process id. None: the process does not run."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def status(self) -> int | None:
        """The exit status of the last run. None: the process runs, or was never started."""
        return None if self._process is None else self._process.poll()

    def launch(self) -> None:
        """Start the process, without waiting until it is ready."""
        assert not self.running, f"{self.id} is running"
        guard = [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid())]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*(guard if self.tied else ()), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**_environment(), **self.variables},
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
            )

    def wait_ready(self) -> None:
        """Wait until the process is ready. Raises ProcessFailed when the process ends, or is not
        ready after `ready_s`; in the second case the process keeps running."""
        end_s = time.monotonic() + self.ready_s
        while not self.is_ready():
            if not self.running:
                raise ProcessFailed(self.id, f"ended with {self._outcome()}", self.log)
            if time.monotonic() > end_s:
                raise ProcessFailed(self.id, f"was not ready after {self.ready_s:g} s", self.log)
            time.sleep(POLL_S)

    def start(self) -> float:
        """Launch the process and wait until it is ready. Returns the time in seconds that this
        took. Raises ProcessFailed."""
        began_s = time.monotonic()
        self.launch()
        self.wait_ready()
        return time.monotonic() - began_s

    async def wait_ended(self) -> str:
        """Wait until the process has ended. Returns a description of its end."""
        while self.running:  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(POLL_S)
        return self._outcome()

    def wait(self) -> int:
        """Wait until the process has ended, for at most `ready_s`. Returns its exit status. Raises
        subprocess.TimeoutExpired."""
        assert self._process is not None, f"{self.id} was never started"
        return self._process.wait(self.ready_s)

    def kill(self) -> None:
        """Send SIGKILL. Returns when the process has ended."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def pause(self) -> None:
        """Send SIGSTOP. Returns when the process is stopped."""
        assert self._process is not None
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM, without waiting. Resumes a paused process first, so that it handles
        SIGTERM."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)

    def wait_stopped(self) -> None:
        """Wait until the process has ended. Kill it after `stop_s`."""
        if self._process is None:
            return
        try:
            self._process.wait(self.stop_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def stop(self) -> None:
        """Terminate the process, and wait until it has ended. Does nothing if no process runs."""
        self.terminate()
        self.wait_stopped()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process. Does nothing if the process does not run."""
        if self._process is not None and self.running:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _outcome(self) -> str:
        status = self.status
        if status is not None and status < 0:
            return f"signal {signal.Signals(-status).name}"
        return f"status {status}"


def standalone(directory: Path, variables: Mapping[str, str] | None = None) -> LocalProcess:
    """Return a process for `magnetar standalone`, which is not started yet. It has free ports, and
    keeps them when it is started again. Its data is in `directory`/data. `variables` are added to
    its environment."""
    ports = dict(zip(("grpc", "pulsar", "http"), free_ports(3), strict=True))
    flags = [f"--{kind}-port={port}" for kind, port in ports.items()]
    return LocalProcess(
        "standalone",
        "standalone",
        directory,
        [*magnetar_command("standalone"), f"--data-dir={directory / 'data'}", *flags],
        ports,
        partial(answers_health, ports["http"]),
        variables=variables or {},
    )


def magnetar_command(role: str) -> list[str]:
    """Return the command line of `magnetar ROLE`, run by this Python interpreter."""
    return [sys.executable, "-m", "magnetar.cli.main", role]


def answers_health(port: int) -> bool:
    """Return whether GET /health on loopback answers with status 200."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            with connection.makefile("rb") as answer:
                return b" 200 " in answer.readline()
    except OSError:
        return False


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_ROLE_SETTINGS)
    }
