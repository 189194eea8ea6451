"""StepMeter measures the CPU time and the wall time of the steps of an event loop.

A step with a long computation stops all connections and timers, also those of a broker's beats.
uvloop has no `slow_callback_duration`, and that of asyncio needs the debug mode. So this module
measures the steps that handle input: a slice of a frame, a callback of a topic, a visit of a chore.
The CPU time is that of the loop's thread. If another process interrupts a step, only the wall time
grows.

Reading the CPU time is a system call, so the meter avoids it where it can. At the beginning of a
step, the meter uses the last reading if that is at most SHORT_S old. At the end, it reads the CPU
time only if the step took longer than SHORT_S. So the measured CPU time of such a long step is too
long by at most SHORT_S. For a short step, the meter takes the wall time as the CPU time: the real
CPU time is not longer. Measuring a short step takes 1.9 us instead of 6.2 us (measured in CPU time,
on a busy machine).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STEP_CPU_S_MAX: Final = 0.05
"""The limit for the CPU time of a step. A longer step is logged as slow."""

SHORT_S: Final = 0.0005
"""The wall time of a step up to which its CPU time is not read; the first bucket of the
histograms."""

LOG_PAUSE_S: Final = 10.0
"""The shortest pause between two log lines on slow steps of one kind."""

BOUNDS_S: Final = (SHORT_S, 0.001, 0.0025, 0.005, 0.01, 0.025, STEP_CPU_S_MAX, 0.1, 0.25, 1.0)

Began = tuple[float, float]
"""The CPU time when it was last read, and the wall time when the step began."""

log = get_logger(__name__)


class StepMeter:
    """Measures steps on the loop's thread: `began = meter.begin()`, the step, `meter.end(kind,
    began)`."""

    def __init__(self) -> None:
        self.kinds: dict[str, _Kind] = {}
        self._cpu_s = 0.0  # the CPU time when it was last read
        self._read_at = float("-inf")  # the wall time when the CPU time was last read

    def begin(self) -> Began:
        now = time.perf_counter()
        if now - self._read_at > SHORT_S:
            self._cpu_s, self._read_at = time.thread_time(), now
        return self._cpu_s, now

    def end(self, kind: str, began: Began) -> None:
        now = time.perf_counter()
        cpu_s = wall_s = now - began[1]
        if wall_s > SHORT_S:
            self._cpu_s, self._read_at = time.thread_time(), now
            cpu_s = min(self._cpu_s - began[0], wall_s)
        figures = self.kinds.get(kind)
        if figures is None:
            figures = self.kinds[kind] = _Kind()
        figures.cpu.add(cpu_s)
        figures.wall.add(wall_s)
        if cpu_s > STEP_CPU_S_MAX:
            self._note_slow(kind, figures, cpu_s, wall_s)

    @property
    def cpu_s_max(self) -> float:
        """The CPU time of the longest step of all kinds."""
        return max([figures.cpu.most for figures in self.kinds.values()], default=0.0)

    @staticmethod
    def _note_slow(kind: str, figures: _Kind, cpu_s: float, wall_s: float) -> None:
        now = time.perf_counter()
        if now >= figures.quiet_until:
            figures.quiet_until = now + LOG_PAUSE_S
            log.warning(
                "slow step of the loop",
                kind=kind,
                cpu_ms=round(cpu_s * 1_000),
                wall_ms=round(wall_s * 1_000),
            )


class StepMetrics(Collector):
    """Exports the measurements of a meter. Register it with the registry of the process."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the kinds of steps are not known before the first step of each kind."""
        return ()

    def collect(self) -> Iterator[Metric]:
        cpu = HistogramMetricFamily(
            "magnetar_loop_step_cpu_seconds", "CPU time of a step of the loop.", labels=["step"]
        )
        wall = HistogramMetricFamily(
            "magnetar_loop_step_seconds", "Wall time of a step of the loop.", labels=["step"]
        )
        most = GaugeMetricFamily(
            "magnetar_loop_step_cpu_max_seconds",
            "CPU time of the longest step of the loop since the start.",
            labels=["step"],
        )
        for kind, figures in list(self._meter.kinds.items()):
            cpu.add_metric([kind], figures.cpu.buckets(), figures.cpu.total)
            wall.add_metric([kind], figures.wall.buckets(), figures.wall.total)
            most.add_metric([kind], figures.cpu.most)
        yield from (cpu, wall, most)


class _Figures:
    __slots__ = ("counts", "most", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # indexed by bucket; the last one is unbounded
        self.total = 0.0
        self.most = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS_S, value)] += 1
        self.total += value
        if value > self.most:
            self.most = value

    def buckets(self) -> list[tuple[str, float]]:
        found, count = [], 0
        for bound, number in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            count += number
            found.append((bound, float(count)))
        return found


class _Kind:
    __slots__ = ("cpu", "quiet_until", "wall")

    def __init__(self) -> None:
        self.cpu = _Figures()
        self.wall = _Figures()
        self.quiet_until = float("-inf")  # no log line before this time
