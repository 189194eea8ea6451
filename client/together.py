"""Runs the same request for several topics at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable
    from typing import Any

Answer = TypeVar("Answer")


async def together(requests: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Run all requests to their ends. Returns the answers in order, or raises the first error.

    A cancellation cancels all requests.
    """
    errors: list[Exception] = []
    answers: dict[int, Answer] = {}

    async def run(number: int, request: Coroutine[Any, Any, Answer]) -> None:
        try:
            answers[number] = await request
        except Exception as error:  # a bug, too, must not cancel the other requests
            errors.append(error)

    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            group.create_task(run(number, request))
    if errors:
        raise errors[0]
    return [answers[number] for number in sorted(answers)]
