"""Limits the number of topics that load at once, and of topics that wait to be loaded.

A load reads and writes the metadata store and recovers ledgers. After a failover clients ask for
thousands of topics at once: loads beyond the limit wait in FIFO order, and beyond the queue's limit
the broker answers TooManyRequests. A load that takes too long ends with TimeoutError, and the next
request begins another load.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import TooManyRequests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WAITING_MAX: Final = 50_000
"""The limit of waiting loads. Each needs about 1 KB."""


class TopicLoads:
    def __init__(self, *, loads_max: int, timeout_s: float, waiting_max: int = WAITING_MAX) -> None:
        self._loads_max = loads_max
        self._waiting_max = waiting_max
        self._timeout_s = timeout_s
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, topic: str) -> AsyncIterator[None]:
        """Wait for a place, then hold it while the load runs.

        The wait has no time limit. Raises TooManyRequests if too many loads wait, and TimeoutError
        if the load runs for `timeout_s`.
        """
        if self._running < self._loads_max:
            self._running += 1
        else:
            await self._wait_turn(topic)
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        finally:
            self._leave()

    async def _wait_turn(self, topic: str) -> None:
        """Wait until a load ends and passes its place on."""
        if len(self._waiting) >= self._waiting_max:
            raise TooManyRequests(topic, f"{len(self._waiting)} topics wait to be loaded")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place was passed on to a load that does not begin
            else:
                with suppress(ValueError):  # `_leave` has dropped the cancelled turn already
                    self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # the place is passed on
                return
        self._running -= 1
