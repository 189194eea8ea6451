"""Metrics are read at a scrape. Two of them show the state of the process itself."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from prometheus_client import CollectorRegistry
from support import settle, wait_until

from magnetar.runtime.metrics import (
    LAG_PROBE_S,
    counter,
    gauge,
    gc_pauses,
    histogram,
    measure_process,
)


def test_numbers_are_read_when_they_are_asked_for() -> None:
    registry = CollectorRegistry()
    entries = 0
    counter(registry, "magnetar_entries_total", "Entries.", lambda: entries)
    gauge(registry, "magnetar_pending", "Pending.", lambda: -entries)
    assert registry.get_sample_value("magnetar_entries_total") == 0
    entries = 5
    assert registry.get_sample_value("magnetar_entries_total") == 5
    assert registry.get_sample_value("magnetar_pending") == -5


def test_names_carry_their_unit() -> None:
    with pytest.raises(AssertionError):
        counter(CollectorRegistry(), "magnetar_entries", "", lambda: 0)
    with pytest.raises(AssertionError):
        histogram(CollectorRegistry(), "magnetar_sync", "")


def test_a_collection_is_a_pause_of_its_generation() -> None:
    registry = CollectorRegistry()

    def count(generation: str) -> float | None:
        return registry.get_sample_value(
            "magnetar_gc_pause_seconds_count", {"generation": generation}
        )

    def most(generation: str) -> float:
        found = registry.get_sample_value(
            "magnetar_gc_pause_cpu_max_seconds", {"generation": generation}
        )
        assert found is not None
        return found

    with gc_pauses(registry):
        gc.collect()
        gc.collect(0)
        seen = count("2"), count("0")
        assert most("2") > most("1") == 0.0
    gc.collect()
    assert seen[0] is not None
    assert seen[0] >= 1
    assert seen[1] is not None
    assert seen[1] >= 1
    assert count("2") == seen[0], "callbacks were left behind"


@pytest.mark.real_loop
async def test_a_loop_that_is_held_up_shows() -> None:
    registry = CollectorRegistry()

    def seconds() -> float:
        return registry.get_sample_value("magnetar_event_loop_lag_seconds_sum") or 0.0

    def probes() -> float:
        return registry.get_sample_value("magnetar_event_loop_lag_seconds_count") or 0.0

    async with asyncio.TaskGroup() as group:
        measuring = group.create_task(measure_process(registry))
        await settle()
        time.sleep(LAG_PROBE_S + 0.1)  # noqa: ASYNC251
        await wait_until(lambda: probes() >= 1)
        measuring.cancel()
    assert seconds() >= 0.09
    assert registry.get_sample_value("process_resident_memory_bytes")
