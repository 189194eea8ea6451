"""Awake: how long the event loop did not run.

A process that was stopped (a signal, a suspended machine, a full host) wakes up with old deadlines.
What its peers sent meanwhile waits in the sockets: the process did not read, and the peers were not
silent. Code that judges a peer by its silence subtracts `stalled_s`. `Awake` costs the process one
timer a second.
"""

from __future__ import annotations

import asyncio
from typing import Final

TICK_S: Final = 1.0
STALL_S: Final = 1.0
"""A tick that is late by more than this is a stall. A busy loop is late by a tenth of it."""


class Awake:
    """`run` must be running."""

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
    """Sleep until the loop's time is `due_s`. After a stall it returns later by 2 * TICK_S, so that
    `Awake` has counted the stall, and the process has read what its peers sent meanwhile."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, due_s - loop.time()))
    if loop.time() - due_s > STALL_S:
        await asyncio.sleep(2 * TICK_S)
