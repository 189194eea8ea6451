"""Reclaims the space of deleted ledgers.

A deletion writes a range deletion into RocksDB and frees no space. A blob file holds values of
several ledgers. RocksDB removes a blob file when all its values are dead or were moved. This needs
a compaction, which rewrites the living values of the files that it visits. So the bookie divides
its ledgers into *regions* of neighbouring ids, and compacts a whole region when enough of it is
dead. A compaction of only the dead ids is not enough. An earlier compaction may have dropped the
keys of the dead values and the range deletions already. Then only the keys of living values still
refer to the shared blob files.

A compaction that meets an unreadable value fails, and RocksDB refuses all later writes, so the
process ends. To prevent that each start fails again, the bookie keeps a marker file while a
compaction runs. If the file exists at the start, the bookie reclaims no space until a scrub has
found no damage. A repair replaces the bad values that the scrub finds. The next
compaction first drops the replaced values, so that no compaction reads them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from magnetar.bookie.errors import StorageFailed
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from magnetar.bookie.storage.store import Storage
    from magnetar.runtime.thread import Worker

log = get_logger(__name__)

# If all ledgers have the same size, at most four bytes are rewritten for each reclaimed byte, and
# at most a fifth of the stored data stays dead.
DEAD_SHARE_MIN: Final = 0.2
# The ledgers of one compaction. Neighbouring ids were written at the same time, to the same files.
# The limit keeps a compaction short, so that adds and reads soon have the disk for themselves.
REGION_LEDGERS_MAX: Final = 256
# The regions that `reclaim` forms in one step of the loop: 2 ms. A bookie may have a million
# ledgers. Forming all their regions takes 0.25 s.
REGIONS_PER_STEP: Final = 32
# Share of the time for compactions. With 0.5, the pause after each compaction is as long as the
# compaction.
DUTY: Final = 0.5


class Region(NamedTuple):
    first: int
    last: int
    dead: Sequence[int]  # ascending
    alive: int

    @property
    def worth_it(self) -> bool:
        return len(self.dead) > 0 and len(self.dead) >= DEAD_SHARE_MIN * (
            len(self.dead) + self.alive
        )


class Reclaimer:
    """Belongs to the loop. `thread` runs only the compactions, one at a time."""

    def __init__(self, storage: Storage, *, thread: Worker, marker: Path | None = None) -> None:
        """`marker`: the file that exists while a compaction runs; None: no state outlives the
        process."""
        self.failures = 0
        self.suspended = marker is not None and marker.exists()
        self._marker = marker
        self._replaced = False  # True: drop the replaced values before the next compaction
        self.busy_s = 0.0  # spent compacting
        self._storage = storage
        self._thread = thread
        self._dead: set[int] = set()  # deleted, but their space is not reclaimed yet
        self._reclaimed: list[int] = []

    @property
    def dead(self) -> int:
        """Number of deleted ledgers that still take up space."""
        return len(self._dead)

    def note_dead(self, ledgers: Iterable[int]) -> None:
        self._dead.update(ledgers)

    def take_reclaimed(self) -> list[int]:
        """Return the ledgers whose space was reclaimed since the last call."""
        taken, self._reclaimed = self._reclaimed, []
        return taken

    async def reclaim(self, deleted: Iterable[int], alive: Sequence[int]) -> None:
        """Compact the regions with enough dead ledgers. `deleted`: the ledgers deleted since the
        last call. `alive`: the stored ledgers, ascending; it may still contain ledgers of
        `deleted`. After a failed compaction the method suspends compactions and returns. If
        RocksDB refuses writes now, the next write ends the process."""
        self._dead.difference_update(alive)  # a ledger that was copied to this bookie again
        self.note_dead(deleted)
        loop = asyncio.get_running_loop()
        if not self._dead:
            return
        if self.suspended:
            log.warning("space reclaim suspended until a scrub finds no damage")
            return
        dead = frozenset(self._dead)
        living = (ledger for ledger in alive if ledger not in dead)
        for number, region in enumerate(regions(sorted(dead), living), 1):
            if number % REGIONS_PER_STEP == 0:
                await asyncio.sleep(0)
            if not region.worth_it:
                continue
            begun_s = loop.time()
            compact = partial(self._compact, region.first, region.last)
            try:
                await self._thread.do(compact)
            except (StorageFailed, OSError) as error:
                self.failures += 1
                self.suspended = True
                log.error("space not reclaimed", error=str(error), ledgers=len(region.dead))
                return
            took_s = loop.time() - begun_s
            self.busy_s += took_s
            self._dead.difference_update(region.dead)
            self._reclaimed += region.dead
            log.info("space reclaimed", ledgers=len(region.dead), seconds=round(took_s, 3))
            await asyncio.sleep(took_s * (1 / DUTY - 1))

    def resume(self) -> None:
        """Compact again: a scrub has found no damage."""
        if self.suspended:
            self.suspended = False
            self._replaced = True

    def _compact(self, first: int, last: int) -> None:
        """Compact on the thread. The marker file remains if the compaction fails or the process
        ends."""
        if self._marker is not None:
            self._marker.touch()
        if self._replaced:  # the bad values are still stored, as older versions
            self._storage.drop_replaced()
            self._replaced = False
        self._storage.reclaim(first, last)
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)


def regions(dead: Iterable[int], alive: Iterable[int]) -> Iterator[Region]:
    """Divide all ledgers, in the order of their ids, into regions of at most REGION_LEDGERS_MAX.
    Both arguments are ascending; each region is formed only when it is needed."""
    everything = merge(((ledger, True) for ledger in dead), ((at, False) for at in alive))
    while part := list(islice(everything, REGION_LEDGERS_MAX)):
        gone = [ledger for ledger, is_dead in part if is_dead]
        yield Region(part[0][0], part[-1][0], gone, len(part) - len(gone))
