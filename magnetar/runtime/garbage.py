"""The garbage collector of a server: young objects often, all objects rarely.

Theory of operation. Python frees an object when nothing refers to it. Only objects that refer to
each other in a cycle wait for the garbage collector, for example those of a closed connection or an
unloaded topic. The collector stops the loop. A collection of all objects visits each object: 10,000
topics have 1.6 million objects, which takes 0.8 s of CPU (measured). By default Python starts such
a collection whenever the number of objects has grown by a quarter, even if there is no garbage, for
example because many topics were opened.

So this module lets Python collect young objects only, at most some 30,000 at a time: those of
requests and of short connections. Older objects wait for a collection of all objects.
`collect_when_due` starts it for a reason: the process has made much garbage, or its memory has
grown very much. In a small process a collection of all objects is short, so some growth is reason
enough.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from typing import TYPE_CHECKING, Final, NoReturn

from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

YOUNG_MAX: Final = 10_000
"""The number of allocated and not freed objects after which Python collects the youngest objects,
which takes 2 ms. Every third collection includes the survivors of the two before it. Python's
default of 700 would visit the messages under way many times."""

_NEVER: Final = 2**31 - 1

CHECK_S: Final = 10.0

SMALL_BLOCKS: Final = 100_000
"""A process is small while its blocks of memory have grown by no more than this since its start. A
block has 100 bytes on average. A collection of all objects then takes at most 20 ms of CPU: 0.2 us
a block (measured)."""

SMALL_GROWTH_BLOCKS: Final = 50_000
"""The growth in blocks after which a small process collects all objects."""

GARBAGE_MAX: Final = 1_000_000
"""The number of objects in garbage cycles that may wait for a collection: 100 MB."""

GROWTH_BLOCKS_MAX: Final = 4_000_000
"""The growth in blocks that is reason enough in any process: 400 MB. 10,000 topics take 2.4 million
blocks."""

log = get_logger(__name__)


def settle_gc() -> None:
    """Call this once, after the objects that live as long as the process have been created. From
    then on the collector ignores these objects, and collects young objects only."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_MAX, 1, _NEVER)


async def collect_when_due(made: Callable[[], int]) -> NoReturn:
    """Collect all objects when there is a reason, until cancelled. `made` estimates how many
    objects in cycles the process has dropped since its start."""
    collections = FullCollections(sys.getallocatedblocks(), made())
    while True:
        await asyncio.sleep(CHECK_S)
        blocks, dropped = sys.getallocatedblocks(), made()
        reason = collections.reason(blocks, dropped)
        if not reason:
            continue
        began_s = time.thread_time()
        found = gc.collect()
        cpu_ms = round((time.thread_time() - began_s) * 1_000)
        collections.on_collected(sys.getallocatedblocks(), dropped)
        log.info("all objects were collected", reason=reason, cpu_ms=cpu_ms, found=found)


class FullCollections:
    """Decides when to collect all objects. Pure."""

    def __init__(self, blocks: int, made: int) -> None:
        """`blocks`: the process's blocks of memory after its start. `made`: the number of objects
        in garbage cycles that the process has made."""
        self._first_blocks = blocks
        self._blocks = blocks  # the count after the last collection
        self._made = made

    def reason(self, blocks: int, made: int) -> str:
        """Return the reason why all objects should be collected now. "": there is none."""
        grown = blocks - self._blocks
        if made - self._made >= GARBAGE_MAX:
            return "garbage"
        if grown >= GROWTH_BLOCKS_MAX:
            return "growth"
        is_small = blocks - self._first_blocks <= SMALL_BLOCKS
        return "growth of a small process" if is_small and grown >= SMALL_GROWTH_BLOCKS else ""

    def on_collected(self, blocks: int, made: int) -> None:
        """Note that all objects were collected."""
        self._blocks, self._made = blocks, made
