"""Finds the moments in which a CPU of this machine did not run a process that was ready to run.

The hypervisor of a virtual machine can take a CPU away for hundreds of milliseconds. A server or a
client that needs this CPU is late then, whatever its code does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

SLEEP_S: Final = 0.005
SHORTEST_S: Final = 0.03  # shorter pauses are not reported


@dataclass(frozen=True, slots=True, order=True)
class Pause:
    """`end_s`: its end, by `time.monotonic`."""

    end_s: float
    seconds: float


@contextmanager
def pauses_of_cpus() -> Iterator[list[Pause]]:
    """Watch each CPU by a process that only sleeps, with a real-time priority: it runs before all
    ordinary processes. The list is empty until the block ends, and then has the pauses that
    occurred during the block."""
    found: list[Pause] = []
    command = [sys.executable, "-m", "benchmarks.pauses"]
    watchers = [
        subprocess.Popen([*command, str(cpu)], stdout=subprocess.PIPE, text=True)
        for cpu in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield found
    finally:
        for watcher in watchers:
            watcher.terminate()
            said, _ = watcher.communicate()
            found += [Pause(*map(float, line.split())) for line in said.splitlines()]
        found.sort()


def watch(cpu: int) -> None:
    """Print each pause of a CPU. Without the right to a real-time priority, this process also waits
    while others run, and reports such waits as pauses."""
    os.sched_setaffinity(0, {cpu})
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    before_s = time.monotonic()
    while True:
        time.sleep(SLEEP_S)
        now_s = time.monotonic()
        late_s = now_s - before_s - SLEEP_S
        if late_s > SHORTEST_S:
            print(now_s, late_s, flush=True)
        before_s = now_s


if __name__ == "__main__":
    watch(int(sys.argv[1]))
