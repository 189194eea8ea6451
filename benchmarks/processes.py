"""Runs measurements in separate processes, and reads the CPU and memory of processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import uvloop

from magnetar.runtime.garbage import settle_gc

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

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


def together_mb(pids: Sequence[int]) -> float:
    """Return the resident memory of several processes together in megabytes.

    Several processes that map the same file share one copy of its pages in memory. So each file
    counts once, for the process with most of its pages. The sum of `resident_mb` would count the
    file for every process.
    """
    anonymous_kb, files_kb = 0, dict[str, int]()
    for pid in pids:
        mapped_kb, own_kb = _mapped_kb(pid)
        anonymous_kb += own_kb
        for file, size_kb in mapped_kb.items():
            files_kb[file] = max(files_kb.get(file, 0), size_kb)
    return (anonymous_kb + sum(files_kb.values())) * 1024 / 1e6


def _mapped_kb(pid: int) -> tuple[dict[str, int], int]:
    """Return the resident KB of each file that a process maps, and its anonymous KB."""
    mapped_kb, anonymous_kb, file = dict[str, int](), 0, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):  # address permissions offset device inode [path]
            file = " ".join(fields[4:])
        elif name == "Rss:":
            mapped_kb[file] = mapped_kb.get(file, 0) + int(fields[0])
        elif name == "Anonymous:":
            mapped_kb[file] -= int(fields[0])
            anonymous_kb += int(fields[0])
    return mapped_kb, anonymous_kb


def own_peak_mb() -> float:
    """Return the peak of this process's resident memory in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
