"""A wait that ends as if its awaitable were cancelled, and not its task."""

from __future__ import annotations

import asyncio


async def stray() -> None:
    waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waited_for.cancel()
    await waited_for
