"""Turns: long computations for clients take one slice at a time, in FIFO order.

A computation that gives the loop a turn after each slice of 10 ms is harmless alone. A thousand of
them are harmful: each has a slice in every turn of the loop. One turn takes ten seconds, and all
clients wait. So a slice begins with `await turns.take()`, and each turn of the loop has at most one
slice.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Item = TypeVar("Item")
Answer = TypeVar("Answer")


async def run_in_thread(turn: asyncio.Lock, work: Callable[[], Answer]) -> Answer:
    """Run `work` in a thread, for each `turn` one thread at a time. `turn` is held until the thread
    ends: a thread does not end when its caller is cancelled, for example by a disconnection. Raises
    the error of `work`, or RuntimeError if no thread can be started."""

    def end(ended: asyncio.Future[Answer]) -> None:
        turn.release()
        if not ended.cancelled():
            ended.exception()  # after a cancellation of the caller, no other code reads it

    await turn.acquire()
    try:
        running = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:
        turn.release()
        raise
    running.add_done_callback(end)
    return await asyncio.shield(running)


class Turns:
    def __init__(self) -> None:
        self._lock = asyncio.Lock()  # grants in FIFO order

    async def take(self) -> None:
        """Wait for a turn of the loop in which no other computation has a slice. The turn belongs
        to the caller until its next wait."""
        await asyncio.sleep(0)  # a lock that is free would be granted within this turn
        await self._lock.acquire()
        asyncio.get_running_loop().call_soon(self._lock.release)

    async def each(
        self, items: Iterable[Item], call: Callable[[Item], Answer], *, slice_items: int
    ) -> list[Answer]:
        """Return the answers for all items, in order. Each slice of `slice_items` items takes a
        turn. If all items fit into one slice, no turn is taken."""
        left = list(items)
        answers: list[Answer] = []
        for first in range(0, len(left), slice_items):
            if len(left) > slice_items:
                await self.take()
            answers += map(call, left[first : first + slice_items])
        return answers
