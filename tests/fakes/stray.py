"""A wait that raises CancelledError although no task was cancelled: its future was cancelled."""

from __future__ import annotations

import asyncio


async def stray() -> None:
    waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waited_for.cancel()
    await waited_for
