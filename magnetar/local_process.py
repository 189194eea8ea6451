"""One server process of a local cluster: started, watched until it is ready, stopped, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from magnetar import lifeline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

READY_S: Final = 60.0  # seconds; a busy machine with two cores needs about ten for eight processes
STOP_S: Final = 40.0  # a broker gives handing its topics over up after 30, a bookie syncs for five
POLL_S: Final = 0.05
ANSWER_S: Final = 2.0
LOG_TAIL_BYTES: Final = 2000


class ProcessFailed(Exception):
    """A process ended, or did not get ready in time."""

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
    """Belongs to the loop and the thread that start it: it is killed when that thread ends."""

    role: str
    id: str
    directory: Path  # its data, its configuration and its log
    command: Sequence[str]
    ports: Mapping[str, int]
    is_ready: Callable[[], Awaitable[bool]]
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)

    @property
    def log(self) -> Path:
        return self.directory / f"{self.role}.log"

    @property
    def pid(self) -> int | None:
        """Of the present run, or of the last one. None: it was never started."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def launch(self) -> None:
        """Start it, without waiting until it serves."""
        assert not self.running, f"{self.id} is running"
        guard = [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid())]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *guard,
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_environment(),
                start_new_session=True,  # a Ctrl-C in the terminal is for the launcher to act on
            )

    async def wait_ready(self) -> None:
        """Until it serves. Raises ProcessFailed; one that is only slow goes on running."""
        try:
            async with asyncio.timeout(READY_S):
                while not await self.is_ready():
                    if not self.running:
                        raise ProcessFailed(self.id, f"ended with {self._status()}", self.log)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ProcessFailed(self.id, f"was not ready after {READY_S:g} s", self.log) from None

    async def wait_ended(self) -> str:
        """Until it is no more; says how it ended."""
        assert self._process is not None, f"{self.id} was never started"
        await self._process.wait()
        return self._status()

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._signal(signal.SIGKILL)
        await self.wait_ended()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if it is still there after STOP_S; returns when it is gone."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)  # one that was paused would not hear the next
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await self.wait_ended()
        except TimeoutError:
            await self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self.running:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _status(self) -> str:
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"status {code}"


async def answers_health(port: int) -> bool:
    """Whether GET /health on loopback says 200."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(
                    b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                )
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _environment() -> dict[str, str]:
    """Ours, without settings of servers: what is meant for one would reach all."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAGNETAR_BOOKIE_", "MAGNETAR_BROKER_", "MAGNETAR_AUTORECOVERY_"))
    }
