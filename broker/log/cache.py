"""The newest entries of all topics of a broker, in memory, for readers at the end of a log.

All topics share one budget. The cache evicts the oldest entry of all topics first, because readers
that follow the end have read it. An entry never changes, so a cached entry is never stale."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.broker.log.entry import StoredEntry

_NOTHING: Mapping[int, StoredEntry] = {}


class EntryCache:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._ledgers: dict[int, dict[int, StoredEntry]] = {}
        self._oldest_first: deque[StoredEntry] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._oldest_first)

    def of_ledger(self, ledger: int) -> Mapping[int, StoredEntry]:
        """The cached entries of one ledger, by entry id. Callers must not change this mapping or
        keep it across an await."""
        return self._ledgers.get(ledger, _NOTHING)

    def put(self, entry: StoredEntry) -> None:
        """Add an entry, which must not be in the cache yet. An entry that is larger than the whole
        budget is not added."""
        size = entry.held_bytes
        if size > self._bytes_max:
            return
        while self.bytes + size > self._bytes_max:
            self._evict()
        entries = self._ledgers.setdefault(entry.position.ledger, {})
        assert entry.position.entry not in entries, f"{entry.position} is cached already"
        entries[entry.position.entry] = entry
        self._oldest_first.append(entry)
        self.bytes += size

    def _evict(self) -> None:
        entry = self._oldest_first.popleft()
        entries = self._ledgers[entry.position.ledger]
        del entries[entry.position.entry]
        if not entries:
            del self._ledgers[entry.position.ledger]
        self.bytes -= entry.held_bytes

    def check(self) -> None:
        assert 0 <= self.bytes <= self._bytes_max
        assert self.bytes == sum(entry.held_bytes for entry in self._oldest_first)
        assert len(self) == sum(len(entries) for entries in self._ledgers.values())
        for entry in self._oldest_first:
            assert self._ledgers[entry.position.ledger][entry.position.entry] is entry
