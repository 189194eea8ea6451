"""Awake measures the time in which the event loop did not run.

A process that stood still (SIGSTOP, a suspended machine, an overloaded host) continues with old
deadlines. The data that its peers sent meanwhile waits in the sockets: the process has not read it,
and the peers were not silent. Code that judges a peer by its silence subtracts the growth of
`stalled_s` during this silence. `Awake` costs the process one timer a second.
"""

from __future__ import annotations

import asyncio
from typing import Final

TICK_S: Final = 1.0
STALL_S: Final = 1.0
"""A tick that is late by more than this is a stall. In a busy loop a tick is late by up to a
tenth of this."""


class Awake:
    """Sums up the stalls of the event loop while `run` is running."""

    def __init__(self) -> None:
        self.stalled_s = 0.0  # the sum of all stalls

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            late_s = loop.time() - due_s
            if late_s > STALL_S:
                self.stalled_s += late_s


async def sleep_until(due_s: float) -> None:
    """Sleep until the loop's time is `due_s`. After a stall, sleep for 2 * TICK_S more: `Awake` has
    then counted the stall, and the process has read the data that its peers sent meanwhile."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, due_s - loop.time()))
    if loop.time() - due_s > STALL_S:
        await asyncio.sleep(2 * TICK_S)
