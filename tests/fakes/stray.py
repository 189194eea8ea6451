"""A call that ends as if somebody had cancelled what it waits for, and not its task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


def strays_once(call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """The call, the first time with a CancelledError that nobody asked this task for."""
    strayed = False

    async def straying(*args: object, **named: object) -> T:
        nonlocal strayed
        if not strayed:
            strayed = True
            waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waited_for.cancel()
            await waited_for
        return await call(*args, **named)

    return straying
