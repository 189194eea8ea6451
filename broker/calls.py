"""Calls about many items, a limited number at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from magnetar.broker.refusal import OPERATING_ERRORS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Item = TypeVar("Item")
Answer = TypeVar("Answer")


async def call_each(
    items: Sequence[Item], call: Callable[[Item], Awaitable[Answer]], *, at_once: int
) -> list[Answer]:
    """Call `call` for each item, at most `at_once` at a time. Returns the answers in the order of
    the items.

    After a call has failed with an operating error, no further call begins. When the calls in
    flight have ended, the first of these errors is raised.
    """
    left = iter(enumerate(items))
    answers: dict[int, Answer] = {}
    failures: list[Exception] = []

    async def work() -> None:
        for place, item in left:
            try:
                answers[place] = await call(item)
            except OPERATING_ERRORS as error:
                failures.append(error)
            if failures:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(items))):
            group.create_task(work())
    if failures:
        raise failures[0]
    return [answers[place] for place in range(len(items))]
