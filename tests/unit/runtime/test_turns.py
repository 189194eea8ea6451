"""Long computations take one slice at a time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from magnetar.runtime.turns import Turns, run_in_thread


async def test_at_most_one_slice_runs_in_a_turn_of_the_loop() -> None:
    turns, iterations = Turns(), 0
    slices: list[tuple[int, int]] = []

    async def count() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    async def compute(number: int) -> None:
        for _ in range(3):
            await turns.take()
            slices.append((iterations, number))

    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        computing = [group.create_task(compute(number)) for number in range(4)]
        await asyncio.wait(computing)
        counting.cancel()
    assert len({iteration for iteration, _ in slices}) == len(slices)
    assert [number for _, number in slices] == [0, 1, 2, 3] * 3


async def test_a_cancelled_wait_keeps_no_turn() -> None:
    turns = Turns()
    await turns.take()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(turns.take())
        await asyncio.sleep(0)
        waiting.cancel()
    async with asyncio.timeout(1):
        await turns.take()
        await turns.take()


async def test_each_takes_a_turn_for_a_slice_and_none_for_few_items() -> None:
    turns, iterations = Turns(), 0
    seen: list[int] = []

    async def count() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    def double(item: int) -> int:
        seen.append(iterations)
        return 2 * item

    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        await asyncio.sleep(0)
        assert await turns.each(range(3), double, slice_items=3) == [0, 2, 4]
        assert seen == [iterations] * 3
        seen.clear()
        assert await turns.each(range(7), double, slice_items=3) == [0, 2, 4, 6, 8, 10, 12]
        counting.cancel()
    assert seen[0] == seen[2] < seen[3] == seen[5] < seen[6]


@pytest.mark.real_loop
async def test_a_thread_that_cannot_start_leaves_the_turn_to_the_next_caller() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    asyncio.get_running_loop().set_default_executor(executor)
    turn = asyncio.Lock()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot schedule"):
            await run_in_thread(turn, lambda: 7)
    assert not turn.locked()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    assert await run_in_thread(turn, lambda: 7) == 7
