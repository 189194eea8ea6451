"""Reads a log from the cache, or in ranges from the bookies. Searches the log by time and index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import LedgerError, LedgerNotFound, RecoveryIncomplete
from magnetar.broker.errors import ReadFailed
from magnetar.broker.log.entry import parse_payload
from magnetar.broker.log.position import Position
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import EntryId, LedgerId, LedgerState
from magnetar.protos.errors import EntryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.broker.log.cache import EntryCache
    from magnetar.broker.log.chain import Chain
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.ledgers import Appender, LedgerStore, ReadEntry, Reader

READERS_MAX: Final = 16
"""The maximum number of closed ledgers of one log whose readers are kept in memory. If
subscriptions read more old ledgers, a read of a further ledger reads its metadata first."""


class LogReader:
    """Reads the confirmed entries of `chain`. `writing` returns the appender of the open ledger."""

    __slots__ = ("_cache", "_chain", "_ledgers", "_readers", "_writing")

    def __init__(
        self,
        chain: Chain,
        ledgers: LedgerStore,
        cache: EntryCache,
        writing: Callable[[], Appender | None],
    ) -> None:
        self._chain = chain
        self._ledgers = ledgers
        self._cache = cache
        self._writing = writing
        self._readers: dict[int, Reader] = {}  # keyed by ledger, oldest first

    def keep(self, ledger: int, reader: Reader) -> None:
        """Keep the reader of a closed ledger."""
        self._readers.pop(ledger, None)
        self._readers[ledger] = reader
        if len(self._readers) > READERS_MAX:
            del self._readers[next(iter(self._readers))]

    def forget(self, ledger: int) -> None:
        """Forget the reader of a ledger that was dropped."""
        self._readers.pop(ledger, None)

    async def read(self, first: Position, *, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        """Read entries from `first` on, across ledgers, up to the last confirmed one; [] at the
        end.

        Before the end, the call returns at least one entry, of any size. If a read fails after some
        entries, the call returns these entries. Raises ReadFailed if the first read fails.
        """
        assert entries_max > 0, entries_max
        found: list[StoredEntry] = []
        position = self._chain.ceiling(first)
        while len(found) < entries_max and bytes_max > 0 and self._chain.is_entry(position):
            last = min(
                position.entry + entries_max - len(found), self._chain.counts[position.ledger]
            )
            part = self._cached(position, last - 1, bytes_max=bytes_max)
            if not part:
                try:
                    part = await self._stored(position, last - 1, bytes_max=bytes_max)
                except ReadFailed:
                    if found:
                        return found
                    raise
            if found and len(part[0].data) > bytes_max:
                return found
            found += part
            bytes_max -= sum(len(entry.data) for entry in part)
            position = self._chain.next_position(part[-1].position)
        return found

    async def search(self, is_past: Callable[[StoredEntry], bool]) -> Position:
        """The first entry for which `is_past` is true, or the place after the last entry. If
        `is_past` is true for an entry, it must be true for all later entries. Reads log2(entries)
        entries. Raises ReadFailed."""
        head = self._chain.dropped
        low, high = 1, self._chain.entry_count + 1
        while low < high:
            middle = (low + high) // 2
            past = is_past(await self.entry_at(self._chain.at_rank(middle)))
            if self._chain.dropped is not head:  # ledgers were trimmed, so the ranks changed
                head = self._chain.dropped
                low, high = 1, self._chain.entry_count + 1
            elif past:
                high = middle
            else:
                low = middle + 1
        known = low <= self._chain.entry_count
        return self._chain.at_rank(low) if known else self._chain.end

    async def index_at(self, position: Position) -> int:
        """The exact index of the last message at or before `position`. Reads one entry if the
        counts in memory do not suffice. Raises ReadFailed."""
        index, exact = self._chain.index_near(position)
        if exact:
            return index
        if not self._chain.is_entry(position):
            position = self._chain.previous_position(self._chain.ceiling(position))
        return (await self.entry_at(position)).index

    async def entry_at(self, position: Position) -> StoredEntry:
        return (await self.read(position, entries_max=1, bytes_max=1))[0]

    def _cached(self, first: Position, last: int, *, bytes_max: int) -> list[StoredEntry]:
        """The run of cached entries that begins at `first`."""
        held = self._cache.of_ledger(first.ledger)
        found: list[StoredEntry] = []
        for number in range(first.entry, last + 1):
            entry = held.get(number)
            if entry is None:
                break
            bytes_max -= len(entry.data)
            if bytes_max < 0 and found:
                break
            found.append(entry)
        return found

    async def _stored(self, first: Position, last: int, *, bytes_max: int) -> list[StoredEntry]:
        try:
            return [
                parse_payload(Position(first.ledger, part.entry), part.payload)
                for part in await self._fetch(first, last, bytes_max=bytes_max)
            ]
        except (LedgerError, MetadataError, EntryError) as error:
            # The metadata of this ledger may be out of date.
            self._readers.pop(first.ledger, None)
            raise ReadFailed(first, error) from error

    async def _fetch(self, first: Position, last: int, *, bytes_max: int) -> Sequence[ReadEntry]:
        ledger = LedgerId(first.ledger)
        writing = self._writing()
        if writing is not None and writing.ledger == ledger:
            source: Appender | Reader = writing
        else:
            source = self._readers.get(ledger) or await self._reader(ledger)
        return await source.read(EntryId(first.entry), EntryId(last), bytes_max=bytes_max)

    async def _reader(self, ledger: LedgerId) -> Reader:
        metadata = await self._ledgers.metadata(ledger)
        if metadata is None:
            raise LedgerNotFound(ledger)
        if metadata.state is not LedgerState.CLOSED:  # the topic's next owner is recovering it
            raise RecoveryIncomplete(ledger, metadata.state.name)
        reader = self._ledgers.reader(metadata)
        self.keep(ledger, reader)
        return reader
