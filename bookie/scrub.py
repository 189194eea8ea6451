"""Reads and verifies all stored entries slowly, to find damage while other copies still exist.

The scrub reports an entry that is unreadable or wrong, and leaves the entry in place. A repair
replaces it. A missing file damages thousands of neighbouring entries, which the scrub reports as
one range.

If the table with the ledgers' records is damaged, the scrub cannot list the ledgers. A repair of
single ledgers is then impossible, and the other content of the table is unknown. So the bookie
ends, as after a compaction that meets such a table (storage/rot.py).

The first round begins after a random time, at most an hour. The time from the beginning of one
round to the next is `interval_s`. If a round takes longer, the next one begins a second after its
end. Each round begins at a random ledger. Otherwise a bookie that restarts often would check the
same ledgers each time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.repair.pace import Pace
from magnetar.bookie.storage.format import ID_MAX
from magnetar.bookie.storage.rot import is_rot
from magnetar.metadata.errors import MetadataError
from magnetar.protos.envelope import EnvelopeDamaged, decode_envelope
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from magnetar.bookie.storage.store import Storage
    from magnetar.runtime.thread import Worker

log = get_logger(__name__)
T = TypeVar("T")

# The limits of one read. A read keeps the read thread busy for about a millisecond.
RUN_BYTES: Final = 256 << 10
ENTRIES: Final = 1_000
LEDGERS_PAGE: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubConfig:
    # At this rate, 1 TB takes a day and a half. It costs about 1 % of a core and of a disk.
    bytes_per_s: float = 8 << 20
    interval_s: float = 86_400.0


@dataclass(slots=True)
class ScrubCounts:
    """Counts since the start of the process."""

    entries: int = 0
    bytes: int = 0
    bad: int = 0  # damaged entries; each round counts them again
    rounds: int = 0
    finished_s: float = 0.0  # end of the last round, in loop time; 0: none yet


class Scrub:
    def __init__(
        self,
        storage: Storage,
        *,
        report: Callable[[int, int, int], Awaitable[None]],
        on_sound: Callable[[], None],
        on_rot: Callable[[StorageFailed], None],
        chance: Random,
        read_thread: Worker,
        config: ScrubConfig,
    ) -> None:
        """`report` gets each range of bad entries: the ledger, the first and the last entry. The
        scrub logs metadata errors of `report` and continues, because the next round finds the
        entries again. `on_sound` is called after each round that read everything and found no
        damage. `on_rot` must end the process: a damaged table prevents a list of the ledgers."""
        self.counts = ScrubCounts()
        self._storage = storage
        self._report = report
        self._on_sound = on_sound
        self._on_rot = on_rot
        self._sound = True  # True: this round has found no damage so far
        self._bad: tuple[int, int] | None = None  # first and last entry not reported yet
        self._chance = chance
        self._read_thread = read_thread
        self._config = config
        self._pace = Pace(config.bytes_per_s)

    async def run(self) -> None:
        """Run rounds, until cancelled."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._chance.uniform(0, min(3600.0, self._config.interval_s)))
        while True:
            begun_s = loop.time()
            await self.round()
            await asyncio.sleep(max(1.0, begun_s + self._config.interval_s - loop.time()))

    async def round(self) -> None:
        """Verify all stored entries once."""
        self._sound = True
        begin = await self._begin()
        await self._ledgers(begin, None)
        await self._ledgers(-1, begin)
        self.counts.rounds += 1
        self.counts.finished_s = asyncio.get_running_loop().time()
        if self._sound:
            self._on_sound()

    async def _begin(self) -> int:
        """Return the id after which the round begins. The id is random within the span of the
        stored ledgers."""
        span = await self._list(self._span)
        return -1 if span is None else self._chance.randint(span[0] - 1, span[1] - 1)

    def _span(self) -> tuple[int, int] | None:
        """Return the lowest and the highest stored ledger; None: no ledger is stored. Runs on the
        read thread."""
        found = self._storage.ledgers(-1, ledgers_max=1)
        if not found:
            return None
        least = greatest = found[0]
        beyond = ID_MAX + 1  # higher than any ledger
        while greatest + 1 < beyond:
            middle = (greatest + beyond) // 2
            found = self._storage.ledgers(middle - 1, ledgers_max=1)
            greatest, beyond = (found[0], beyond) if found else (greatest, middle)
        return least, greatest

    async def _ledgers(self, after: int, until: int | None) -> None:
        """Verify the ledgers above `after`, up to `until` (None: all)."""
        while True:
            page = await self._list(partial(self._storage.ledgers, after, ledgers_max=LEDGERS_PAGE))
            for ledger in page or ():
                if until is not None and ledger > until:
                    return
                await self._ledger(ledger)
            if not page:
                return
            after = page[-1]

    async def _ledger(self, ledger: int) -> None:
        """Verify the ledger run by run. After each gap, search for the next entry."""
        at: int | None = 0
        while at is not None:
            at = await self._next_entry(ledger, await self._run(ledger, at))
        await self._tell(ledger)

    async def _run(self, ledger: int, first: int) -> int:
        """Verify the entries from `first` up to a gap. Returns the first missing entry."""
        at = first
        while True:
            size, count, bad = await self._on_thread(partial(self._verified, ledger, at, ENTRIES))
            for entry in bad:
                await self._found(ledger, entry)
            if count == 0:
                return at
            self.counts.entries += count
            self.counts.bytes += size
            at += count
            await asyncio.sleep(self._pace.delay_s(size, asyncio.get_running_loop().time()))

    async def _next_entry(self, ledger: int, absent: int) -> int | None:
        """Return the first stored entry from `absent` on. None: there is none, or the search
        failed."""
        return await self._read(partial(self._seek, ledger, absent))

    def _seek(self, ledger: int, absent: int) -> int | None:
        """Return the first stored entry from `absent` on. Runs on the read thread. If this entry is
        unreadable, the store's search fails. Then read up to ENTRIES ids one by one."""
        try:
            found = self._storage.entry_ids(ledger, absent, entries_max=1)
        except StorageFailed:
            for entry in range(absent, absent + ENTRIES):
                try:
                    if self._storage.entry(ledger, entry) is not None:
                        return entry
                except StorageFailed:
                    return entry
            raise
        return found[0] if found else None

    def _verified(self, ledger: int, first: int, entries: int) -> tuple[int, int, list[int]]:
        """Verify entries from `first` up to a gap or a limit. Returns the number of bytes, the
        number of entries, and the bad entries. Runs on the read thread."""
        try:
            found = self._storage.run(
                ledger, first, first + entries - 1, bytes_max=RUN_BYTES, entries_max=entries
            )
        except StorageFailed:
            if entries > 1:  # the bad entry is somewhere in the run
                return self._verified(ledger, first, entries // 2)
            return self._alone(ledger, first)
        bad = [first + at for at, each in enumerate(found) if not _sound(each, ledger, first + at)]
        return sum(map(len, found)), len(found), bad

    def _alone(self, ledger: int, entry: int) -> tuple[int, int, list[int]]:
        """Verify one entry, after a run that begins with it has failed. The unreadable entry is
        this one, or one after a gap."""
        try:
            value = self._storage.entry(ledger, entry)
        except StorageFailed:
            return 0, 1, [entry]
        if value is None:
            return 0, 0, []
        return len(value), 1, [] if _sound(value, ledger, entry) else [entry]

    async def _found(self, ledger: int, entry: int) -> None:
        self.counts.bad += 1
        self._sound = False
        if self._bad is not None and entry == self._bad[1] + 1:
            self._bad = self._bad[0], entry
        else:
            await self._tell(ledger)
            self._bad = entry, entry

    async def _tell(self, ledger: int) -> None:
        if self._bad is None:
            return
        (first, last), self._bad = self._bad, None
        log.error("stored entries damaged", ledger=ledger, first=first, last=last)
        try:
            await self._report(ledger, first, last)
        except MetadataError as error:
            log.warning("damage not reported", ledger=ledger, first=first, error=str(error))

    async def _list(self, read: Callable[[], T]) -> T | None:
        """Read a list of ledgers. None: the read failed, and the failure was logged."""
        try:
            return await self._on_thread(read)
        except StorageFailed as error:
            self._cannot_read(error)
            if is_rot(error):
                self._on_rot(error)
            return None

    async def _read(self, read: Callable[[], T]) -> T | None:
        """Return the result of `read`. None: `read` failed, and the failure was logged."""
        try:
            return await self._on_thread(read)
        except StorageFailed as error:
            self._cannot_read(error)
            return None

    def _cannot_read(self, error: StorageFailed) -> None:
        self._sound = False
        log.error("scrub cannot read", error=str(error))

    async def _on_thread(self, read: Callable[[], T]) -> T:
        return await self._read_thread.do(read)


def _sound(value: bytes, ledger: int, entry: int) -> bool:
    try:
        envelope = decode_envelope(value)
    except EnvelopeDamaged:
        return False
    return (envelope.ledger, envelope.entry) == (ledger, entry)
