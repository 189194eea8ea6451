"""Gives back the space of deleted ledgers.

Deleting writes a marker and frees nothing: values lie in blob files with those of other ledgers,
and a file goes when all in it are dead or were moved elsewhere. That takes a compaction, which
rewrites what is alive in the files it meets. So ledgers are seen in *regions* of
neighbouring ids, and a region is compacted, as a whole, when enough of it is dead. The span of the
dead alone would not do: another compaction may have dropped their keys and markers already, and
then only the living in the same blob files are left to be found.

A compaction that meets a value that it cannot read fails, and RocksDB takes no write any more: the
process ends. So that it does not end again and again, a file says that a compaction is under way;
when it is there at the start, nothing is compacted before a scrub has found everything sound (what
it finds bad is repaired, and what was replaced is not read any more).
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
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from magnetar.bookie.storage.store import Storage
    from magnetar.runtime.thread import Worker

log = get_logger(__name__)

# At most four bytes are rewritten for each one that is given back, and of what is stored at most a
# fifth is dead, if ledgers are of one size.
DEAD_SHARE_MIN: Final = 0.2
# One compaction; neighbouring ids were written at the same time, to the same files. Between two of
# them others have their turn at the disk.
REGION_LEDGERS_MAX: Final = 256
# Of the time: what a compaction takes from the disk, it leaves to adds and reads as long again.
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
    """Owned by the loop. `thread` does the compactions and nothing else, one at a time."""

    def __init__(self, storage: Storage, *, thread: Worker, marker: Path | None = None) -> None:
        """`marker` None: nothing outlives the process."""
        self.failures = 0
        self.suspended = marker is not None and marker.exists()
        self._marker = marker
        self._replaced = False
        self.busy_s = 0.0  # spent compacting
        self._storage = storage
        self._thread = thread
        self._dead: set[int] = set()  # deleted, and their space not given back yet
        self._reclaimed: list[int] = []

    @property
    def dead(self) -> int:
        """How many ledgers were deleted and take up space still."""
        return len(self._dead)

    def note_dead(self, ledgers: Iterable[int]) -> None:
        self._dead.update(ledgers)

    def take_reclaimed(self) -> list[int]:
        """Those whose space has been given back since the last call."""
        taken, self._reclaimed = self._reclaimed, []
        return taken

    async def reclaim(self, deleted: Iterable[int], alive: Sequence[int]) -> None:
        """Give back what is worth it; `alive` are the ledgers that were there before, ascending,
        with or without those just deleted. A compaction
        that fails is logged: the next write says whether the store is still good."""
        self._dead.difference_update(alive)  # a copy that was made again
        self.note_dead(deleted)
        loop = asyncio.get_running_loop()
        if not self._dead:
            return
        if self.suspended:
            log.warning("no space is given back before a scrub has found everything sound")
            return
        living = [ledger for ledger in alive if ledger not in self._dead]
        for region in regions(sorted(self._dead), living):
            if not region.worth_it:
                continue
            begun_s = loop.time()
            compact = partial(self._compact, region.first, region.last)
            try:
                await self._thread.do(compact)
            except (StorageFailed, OSError) as error:
                self.failures += 1
                self.suspended = True
                log.error("space not given back", error=str(error), ledgers=len(region.dead))
                return
            took_s = loop.time() - begun_s
            self.busy_s += took_s
            self._dead.difference_update(region.dead)
            self._reclaimed += region.dead
            log.info("space given back", ledgers=len(region.dead), seconds=round(took_s, 3))
            await asyncio.sleep(took_s * (1 / DUTY - 1))

    def resume(self) -> None:
        """Everything that is stored was found sound."""
        if self.suspended:
            self.suspended = False
            self._replaced = True

    def _compact(self, first: int, last: int) -> None:
        """On the thread. The marker stays when that fails, or is never heard of again."""
        if self._marker is not None:
            self._marker.touch()
        if self._replaced:  # what was bad lies there still, behind what a repair wrote
            self._storage.drop_replaced()
            self._replaced = False
        self._storage.reclaim(first, last)
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)


def regions(dead: Sequence[int], alive: Sequence[int]) -> list[Region]:
    """All ledgers, in the order of their ids, in parts of REGION_LEDGERS_MAX."""
    everything = merge(((ledger, True) for ledger in dead), ((at, False) for at in alive))
    found: list[Region] = []
    while part := list(islice(everything, REGION_LEDGERS_MAX)):
        gone = [ledger for ledger, is_dead in part if is_dead]
        found.append(Region(part[0][0], part[-1][0], gone, len(part) - len(gone)))
    return found
