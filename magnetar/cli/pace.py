"""The pace of messages: the option `--rate` of `produce` and `consume`."""

from __future__ import annotations

import asyncio
import math


class Pace:
    """Limits the rate of messages."""

    def __init__(self, rate: float, *, saved_s: float = math.inf) -> None:
        """`rate`: messages per second; 0: no limit. After an idle time, as many messages as the
        rate allows in `saved_s` may come at once."""
        self._rate = rate
        self._saved_s = saved_s
        self._due_s: float | None = None  # loop time of the next message; None: the first one

    async def wait(self) -> None:
        """Return when the next message may come."""
        if self._rate:
            now = asyncio.get_running_loop().time()
            due_s = now if self._due_s is None else max(self._due_s, now - self._saved_s)
            self._due_s = due_s + 1 / self._rate
            await asyncio.sleep(due_s - now)
