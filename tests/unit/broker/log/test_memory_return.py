"""The broker returns the memory of a burst to the operating system."""

from __future__ import annotations

import asyncio

from support import wait_until

from magnetar.broker.log.budget import PublishBudget
from magnetar.broker.log.memory_return import BURST_BYTES, LOOK_S, MemoryReturn
from magnetar.broker.main import return_memory
from magnetar.runtime.memory import trim


def test_memory_is_returned_once_after_each_burst() -> None:
    memory = MemoryReturn()
    assert not memory.is_due(peak=BURST_BYTES - 1, used=0), "no burst"
    assert not memory.is_due(peak=BURST_BYTES, used=BURST_BYTES // 2), "the burst continues"
    assert memory.is_due(peak=BURST_BYTES // 2, used=BURST_BYTES // 4)
    assert not memory.is_due(peak=BURST_BYTES // 4, used=0)
    assert memory.is_due(peak=BURST_BYTES, used=0)


async def test_the_broker_returns_memory_after_a_burst() -> None:
    budget, calls = PublishBudget(), []

    async def give_back() -> None:
        calls.append(budget.used)

    task = asyncio.get_running_loop().create_task(return_memory(budget, give_back))
    budget.change(BURST_BYTES)
    await asyncio.sleep(LOOK_S + 1)
    assert calls == []
    budget.change(-BURST_BYTES)
    await wait_until(lambda: calls == [0], deadline_s=60)
    task.cancel()


def test_held_publishes_and_backlogs_read_ahead_count() -> None:
    budget = PublishBudget(1_000)
    budget.change(100)
    budget.hold(200)
    assert budget.may_read_ahead(100)
    budget.hold_ahead(100)
    assert budget.used == 400
    assert budget.take_peak() == 300
    assert not budget.may_read_ahead(100), "200 bytes exceed an eighth of the budget"
    budget.hold(-200)
    budget.hold_ahead(-100)
    assert budget.used == 100
    assert budget.take_peak() == 400
    budget.check()


def test_trim_of_the_c_library_does_not_fail() -> None:
    held = [b"x" * 100_000 for _ in range(300)]
    held.clear()
    assert trim() in (True, False)
