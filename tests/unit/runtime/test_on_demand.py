"""A task that exists only while work is pending."""

from __future__ import annotations

import asyncio

from support import settle

from magnetar.runtime.on_demand import OnDemandTask, spawner


class Work:
    def __init__(self) -> None:
        self.calls = 0
        self.gate = asyncio.Event()

    async def __call__(self) -> None:
        self.calls += 1
        await self.gate.wait()


async def test_without_work_there_is_no_task() -> None:
    before = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        work = Work()
        task = OnDemandTask("t", work)
        task.start(spawner(group))
        assert asyncio.all_tasks() == before
        work.gate.set()
        task.wake()
        assert not task.is_idle
        await settle()
        assert task.is_idle
        assert asyncio.all_tasks() == before
        assert work.calls == 1


async def test_a_wake_during_the_work_causes_another_call() -> None:
    async with asyncio.TaskGroup() as group:
        work = Work()
        task = OnDemandTask("t", work)
        task.start(spawner(group))
        task.wake()
        await settle()
        task.wake()
        task.wake()
        work.gate.set()
        await settle()
        assert work.calls == 2


async def test_a_wake_before_the_start_counts() -> None:
    async with asyncio.TaskGroup() as group:
        work = Work()
        work.gate.set()
        task = OnDemandTask("t", work)
        task.wake()
        task.start(spawner(group))
        await settle()
        assert work.calls == 1


async def test_a_cancelled_runner_begins_no_work() -> None:
    async with asyncio.TaskGroup() as group:
        work = Work()
        task = OnDemandTask("t", work)
        task.start(spawner(group))
        task.wake()
        await settle()
        task.cancel()
        task.wake()
        await settle()
        assert work.calls == 1


async def test_a_group_that_shuts_down_begins_nothing() -> None:
    group = asyncio.TaskGroup()
    async with group:
        pass
    work = Work()
    task = OnDemandTask("t", work)
    task.start(spawner(group))
    task.wake()
    assert work.calls == 0
