"""Takes a part of each CPU away from the other processes, so that they run as on a slower machine.

One process on each CPU, with a real-time priority, runs for that part of every 2 ms and sleeps for
the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PERIOD_S: Final = 0.002
PART_MAX: Final = 0.9  # Linux leaves 5 % of each CPU to processes without a real-time priority


@contextmanager
def cpus_taken(part: float) -> Iterator[None]:
    """Take `part` of each CPU until the block ends.

    Raises ValueError for a part that is not from 0 to PART_MAX. Raises CalledProcessError if this
    user may not have processes with a real-time priority.
    """
    if not 0 <= part <= PART_MAX:
        raise ValueError(f"the part of each CPU must be from 0 to {PART_MAX}, not {part}")
    command = [sys.executable, "-m", "benchmarks.busy_cpus", str(part)]
    takers = [
        subprocess.Popen([*command, str(cpu)]) for cpu in sorted(os.sched_getaffinity(0)) if part
    ]
    try:
        yield
    finally:
        for taker in takers:
            taker.terminate()
            if taker.wait() != -signal.SIGTERM:
                raise subprocess.CalledProcessError(taker.returncode, taker.args)


def take(part: float, cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while True:
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + part * PERIOD_S:
            pass
        time.sleep((1 - part) * PERIOD_S)


if __name__ == "__main__":
    take(float(sys.argv[1]), int(sys.argv[2]))
