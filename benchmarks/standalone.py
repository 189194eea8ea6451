"""Runs `magnetar standalone` as a process and measures its start-up time and idle cost."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.processes import cpu_s, resident_mb
from magnetar.local_process import standalone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Standalone:
    """A running server."""

    url: str
    started_s: float  # the time from the start of the process to its first healthy answer
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
    folder.mkdir(parents=True, exist_ok=True)
    process = standalone(folder)
    try:
        started_s = process.start()
        assert process.pid is not None
        yield Standalone(f"grpc://127.0.0.1:{process.ports['grpc']}", started_s, process.pid)
    finally:
        process.stop()
