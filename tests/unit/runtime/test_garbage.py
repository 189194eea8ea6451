"""The garbage collector: short collections of young objects, and of all for a reason only."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING

import pytest

from magnetar.runtime.garbage import (
    CHECK_S,
    GARBAGE_MAX,
    GROWTH_BLOCKS_MAX,
    SMALL_BLOCKS,
    SMALL_GROWTH_BLOCKS,
    FullCollections,
    collect_when_due,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST = 300_000
"""Blocks of memory."""

PROGRAM = """
import gc
from magnetar.runtime.garbage import settle_gc

settle_gc()
assert gc.get_freeze_count() > 1000
sizes = {0: [], 1: [], 2: []}

def note(phase, info):
    if phase == "start":
        generation = info["generation"]
        sizes[generation].append(sum(len(gc.get_objects(it)) for it in range(generation + 1)))

gc.callbacks.append(note)
kept = [[number] for number in range(300_000)]
print(max(sizes[0]), max(sizes[1]), len(sizes[2]))
"""


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Switch automatic collections off, so that only the code under test collects garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_growing_process_collects_few_objects_at_a_time_and_never_all() -> None:
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    young, older, full = map(int, out.stdout.split())
    assert young < 15_000
    assert older < 35_000
    assert full == 0


def test_a_small_process_collects_all_objects_after_some_growth() -> None:
    collections = FullCollections(FIRST, made=0)
    assert collections.reason(FIRST + SMALL_GROWTH_BLOCKS - 1, made=0) == ""
    assert collections.reason(FIRST + SMALL_GROWTH_BLOCKS, made=0) == "growth of a small process"
    collections.on_collected(FIRST + SMALL_GROWTH_BLOCKS, made=0)
    assert collections.reason(FIRST + SMALL_GROWTH_BLOCKS, made=0) == ""
    assert collections.reason(FIRST + SMALL_BLOCKS, made=0) == "growth of a small process"


def test_a_large_process_waits_for_garbage_or_for_much_growth() -> None:
    collections = FullCollections(FIRST, made=5)
    assert collections.reason(FIRST + GROWTH_BLOCKS_MAX - 1, made=5 + GARBAGE_MAX - 1) == ""
    assert collections.reason(FIRST + GROWTH_BLOCKS_MAX, made=5) == "growth"
    assert collections.reason(FIRST + SMALL_BLOCKS + 1, made=5 + GARBAGE_MAX) == "garbage"


@pytest.mark.usefixtures("by_hand")
async def test_old_garbage_is_collected_when_enough_was_made() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    made = 0
    kept = Node()
    async with asyncio.TaskGroup() as group:
        collecting = group.create_task(collect_when_due(lambda: made))
        await asyncio.sleep(CHECK_S / 2)
        for _ in range(3):  # old: young collections do not find it
            gc.collect(1)
        dropped = weakref.ref(kept)
        del kept
        gc.collect(1)
        assert dropped() is not None
        made = GARBAGE_MAX
        await asyncio.sleep(CHECK_S)
        assert dropped() is None
        collecting.cancel()
