"""Calls about many items, a limited number at a time."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.broker.calls import call_each
from magnetar.broker.errors import TopicNotFound


async def test_answers_are_in_the_order_of_the_items_and_few_calls_run_at_once() -> None:
    running = most = 0

    async def call(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(10 - item)  # the last call ends first
        running -= 1
        return item * item

    assert await call_each(range(10), call, at_once=3) == [item * item for item in range(10)]
    assert most == 3
    assert await call_each([], call, at_once=3) == []


async def test_the_first_failure_is_raised_and_no_further_call_begins() -> None:
    begun: list[int] = []
    ended: list[int] = []

    async def call(item: int) -> None:
        begun.append(item)
        await asyncio.sleep(1 + item)
        ended.append(item)
        if item in (1, 2):
            raise TopicNotFound(f"t{item}")

    with pytest.raises(TopicNotFound, match="t1"):
        await call_each(range(10), call, at_once=3)
    assert begun == [0, 1, 2, 3]
    assert ended == [0, 1, 2, 3], "the calls in flight end"


async def test_a_cancelled_caller_ends_the_calls() -> None:
    ended = 0

    async def call(item: int) -> None:
        nonlocal ended
        try:
            await asyncio.sleep(item)
        finally:
            ended += 1

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await call_each([100, 200, 300], call, at_once=2)
    assert ended == 2
