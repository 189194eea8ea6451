"""Metrics with prometheus-client. The caller passes the registry in; there is no global registry.

A call of a metric object takes a microsecond. So a component counts messages in a plain number, and
each scrape reads that number.
"""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAG_PROBE_S = 0.25
"""The interval of the lag probe. 4 wake-ups a second cost about 0.02 % of a core. The probe sees
every stall of at least twice the interval, so also every stall after which a broker counts as
silent."""

_PAUSE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def counter(registry: CollectorRegistry, name: str, text: str, read: Callable[[], float]) -> None:
    """Export a number that only grows. Each scrape calls `read`. `name` ends in `_total`."""
    assert name.endswith("_total"), name
    registry.register(_Counter(name.removesuffix("_total"), text, read))


def gauge(registry: CollectorRegistry, name: str, text: str, read: Callable[[], float]) -> None:
    """Export a number that can rise and fall. Each scrape calls `read`."""
    Gauge(name, text, registry=registry).set_function(read)


def histogram(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    """Export durations in seconds. Use this only for events that happen at most a few thousand
    times a second."""
    assert name.endswith("_seconds"), name
    return Histogram(name, text, registry=registry, buckets=_PAUSE_BUCKETS_S)


async def measure_process(registry: CollectorRegistry) -> NoReturn:
    """Export facts about this process until cancelled: memory, CPU, open files, pauses of the
    garbage collector, and the lag of the event loop."""
    ProcessCollector(registry=registry)
    lag = histogram(
        registry, "magnetar_event_loop_lag_seconds", "Delay of a timer of the event loop."
    )
    loop = asyncio.get_running_loop()
    with gc_pauses(registry):
        while True:
            due_s = loop.time() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            lag.observe(max(0.0, loop.time() - due_s))


@contextmanager
def gc_pauses(registry: CollectorRegistry) -> Iterator[None]:
    """Export `magnetar_gc_pause_seconds` and `magnetar_gc_pause_cpu_max_seconds` until the context
    ends. The garbage collector stops the whole process during a pause. If the system runs other
    processes during a pause, the pause takes more time, but not more CPU time."""
    pauses = Histogram(
        "magnetar_gc_pause_seconds",
        "Time for which the garbage collector stopped the process, by generation.",
        ["generation"],
        registry=registry,
        buckets=_PAUSE_BUCKETS_S,
    )
    by_generation = [pauses.labels(str(generation)) for generation in range(3)]
    most = Gauge(
        "magnetar_gc_pause_cpu_max_seconds",
        "Maximum CPU time of one garbage collection since the process started, by generation.",
        ["generation"],
        registry=registry,
    )
    cpu_s_max = [0.0, 0.0, 0.0]
    for generation in range(3):
        most.labels(str(generation)).set_function(partial(cpu_s_max.__getitem__, generation))
    began_s = began_cpu_s = 0.0

    def observe(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s, began_cpu_s
        if phase == "start":
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            return
        generation, cpu_s = info["generation"], time.thread_time() - began_cpu_s
        cpu_s_max[generation] = max(cpu_s_max[generation], cpu_s)
        by_generation[generation].observe(time.perf_counter() - began_s)

    gc.callbacks.append(observe)
    try:
        yield
    finally:
        gc.callbacks.remove(observe)


class _Counter(Collector):
    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name = name
        self._text = text
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())
