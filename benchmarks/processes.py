"""Measurements in processes of their own, and what processes take."""

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
    """In a process of its own, so that no client inherits the threads and garbage of another."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *args, **kwargs).result()


def run(main: Coroutine[Any, Any, T]) -> T:
    """On such a loop, and with such a garbage collector, as servers have."""
    settle_gc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def cpu_s(pid: int) -> float:
    """Of all its threads, in user and kernel mode, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError("no VmRSS in /proc")


def own_peak_mb() -> float:
    """The most that this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
