"""Runs `magnetar standalone` as a process and measures its start-up time and idle cost."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.processes import cpu_s, resident_mb
from magnetar.runtime.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_TIMEOUT_S = 60.0
SETTLE_S = 2.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Standalone:
    """A running server."""

    url: str
    started_s: float  # from the start of the process to its first healthy answer
    pid: int

    def idle(self) -> tuple[float, float]:
        """Return the resident megabytes, and the share of one core, of the idle server."""
        time.sleep(SETTLE_S)
        before_s, began_s = cpu_s(self.pid), time.perf_counter()
        time.sleep(SETTLE_S)
        share = (cpu_s(self.pid) - before_s) / (time.perf_counter() - began_s)
        return resident_mb(self.pid), share


@contextmanager
def running(folder: Path) -> Iterator[Standalone]:
    """Run a server for the block, with its data in `folder`."""
    grpc_port, pulsar_port, http_port = free_ports(3)
    command = [sys.executable, "-m", "magnetar.cli.main", "standalone"]
    flags = [
        f"--data-dir={folder / 'data'}",
        f"--grpc-port={grpc_port}",
        f"--pulsar-port={pulsar_port}",
        f"--http-port={http_port}",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.perf_counter()
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
    try:
        while not _is_healthy(http_port):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.perf_counter() - began_s < START_TIMEOUT_S, "standalone does not start"
            time.sleep(POLL_S)
        started_s = time.perf_counter() - began_s
        yield Standalone(f"grpc://127.0.0.1:{grpc_port}", started_s, process.pid)
    finally:
        process.terminate()
        process.wait()


def _is_healthy(http_port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:  # also a status that is not 200
        return False
