"""Runs measurements in separate processes, and reads the CPU and memory of processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import uvloop

from magnetar.runtime.process import settle_gc

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")


def alone(measure: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `measure` in a new process, so that it does not inherit threads and garbage."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *args, **kwargs).result()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` with the event loop and the garbage collector settings of the servers."""
    settle_gc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, in user and kernel mode, in steps of
    10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in megabytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError("no VmRSS in /proc")


def own_peak_mb() -> float:
    """Return the peak of this process's resident memory in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
