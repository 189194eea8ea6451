"""After a standstill, makes the broker verify its ownership before it talks to clients again.

A broker that stood still does not know whether it was replaced: other brokers take the bundles of a
broker that is silent for 2 s (liveness.py). When the process continues, its sockets hold old
commands, and its consumers have old permits. Bookies refuse its writes, so no receipt and no
acknowledgement is wrong. But the broker still has messages in memory, and would deliver them after
consumers have acknowledged them at the new owner.

So after a standstill of STILL_S the broker first reads the records of all its bundles again and
closes the topics of lost bundles. Until then it neither reads from clients nor sends to them, so a
lost topic is closed before it delivers messages again. If the metadata store does not answer, the
broker continues after VERIFY_S: a short outage of the store must not stop a cluster, and messages
are delivered at least once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.metadata.errors import MetadataError
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TICK_S: Final = 0.25

STILL_S: Final = 1.0
"""A tick that is late by more than this makes the broker verify its ownership. So the broker
notices each standstill of more than STILL_S + TICK_S. By default, other brokers replace it 2.0 s
(SILENCE_S) after its last beat, and that beat may be 0.5 s old (BEAT_S) when the standstill begins.
So STILL_S + TICK_S must be less than 1.5 s."""

VERIFY_S: Final = 5.0
RETRY_S: Final = 0.1

log = get_logger(__name__)


class Standstill:
    """`sure` is False from the end of a standstill until the ownership is verified or VERIFY_S has
    passed. `run` does the work; without it `sure` is always True."""

    def __init__(self, verify: Callable[[], Awaitable[None]]) -> None:
        """`verify` returns when the topics of lost bundles are closed; it may raise
        MetadataError."""
        self.sure = True  # True: the broker may talk to clients
        self.count = 0  # standstills so far
        self._verify = verify
        self._timer: asyncio.TimerHandle | None = None  # None: `run` is not running
        self._still_s = 0.0
        self._doubtful = asyncio.Event()
        self._verified = asyncio.Event()

    async def wait_sure(self) -> None:
        """Wait until the broker may talk to clients."""
        while not self.sure:
            await self._verified.wait()

    async def run(self) -> None:
        """Detect standstills and verify the ownership after each, until cancelled."""
        self._tick()
        try:
            while True:
                await self._doubtful.wait()
                self._doubtful.clear()
                log.warning("the broker stood still", still_s=round(self._still_s, 2))
                await self._verify_all()
                if not self._doubtful.is_set():
                    self._be_sure()
        finally:
            assert self._timer is not None
            self._timer.cancel()
            self._timer = None
            self._be_sure()

    def _tick(self) -> None:
        """Detect a standstill. This is a callback of the loop, not a task: when the process
        continues, the loop calls `_tick` before the tasks that handle the old commands in the
        sockets."""
        loop = asyncio.get_running_loop()
        if self._timer is not None and loop.time() - self._timer.when() > STILL_S:
            self._still_s = loop.time() - self._timer.when() + TICK_S
            self.sure = False
            self.count += 1
            self._verified.clear()
            self._doubtful.set()
        self._timer = loop.call_later(TICK_S, self._tick)

    def _be_sure(self) -> None:
        self.sure = True
        self._verified.set()

    async def _verify_all(self) -> None:
        try:
            async with asyncio.timeout(VERIFY_S):
                while True:
                    try:
                        await self._verify()
                    except MetadataError as error:
                        log.info("ownership not verified yet", error=str(error))
                        await asyncio.sleep(RETRY_S)
                    else:
                        return
        except TimeoutError:
            log.warning("ownership not verified; the broker continues", after_s=VERIFY_S)
