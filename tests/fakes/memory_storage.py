"""A store in memory whose crash may lose unsynced writes.

For tests and simulations. A crash keeps as little as the contract permits: a prefix of the unsynced
writes, in whole batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from sortedcontainers import SortedDict

from magnetar.bookie.storage.format import (
    ID_MAX,
    entry_key,
    key_after_ledger,
    key_entry,
    key_ledger,
    key_tombstone,
    ledger_key,
    tombstone_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from magnetar.bookie.storage.store import Put


class _Deletion(NamedTuple):
    first: bytes
    last: bytes  # inclusive


class MemoryStorage:
    """A `Storage`."""

    def __init__(self) -> None:
        self._values: SortedDict[bytes, bytes] = SortedDict()
        self._log: list[Sequence[Put | _Deletion]] = []  # every batch ever written
        self._durable = 0  # batches of the log that are on the disk
        self._sequence = 0

    def crash(self, *, kept: int = 0) -> Self:
        """The store as it opens after a power cut that keeps `kept` of the unsynced batches.

        The present object must not be used afterwards.
        """
        assert 0 <= kept <= self.unsynced
        opened = type(self)()
        for batch in self._log[: self._durable + kept]:
            opened._append(batch)
        opened._durable = len(opened._log)
        return opened

    @property
    def unsynced(self) -> int:
        """Number of batches that a crash could still lose."""
        return len(self._log) - self._durable

    def write(self, puts: Sequence[Put]) -> None:
        self._append(tuple(puts))

    def sync(self) -> None:
        self._durable = len(self._log)

    def sequence(self) -> int:
        return self._sequence

    def ledger_record(self, ledger: int) -> bytes | None:
        value: bytes | None = self._values.get(ledger_key(ledger))
        return value

    def entry(self, ledger: int, entry: int) -> bytes | None:
        value: bytes | None = self._values.get(entry_key(ledger, entry))
        return value

    def last_entry(self, ledger: int) -> tuple[int, bytes] | None:
        keys = self._span(entry_key(ledger, 0), entry_key(ledger, ID_MAX), reverse=True)
        key = next(keys, None)
        return None if key is None else (key_entry(key)[1], self._values[key])

    def run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> list[bytes]:
        found: list[bytes] = []
        size = 0
        while len(found) < min(entries_max, last - first + 1) and (not found or size < bytes_max):
            value = self.entry(ledger, first + len(found))
            if value is None:
                break
            found.append(value)
            size += len(value)
        return found

    def entry_ids(self, ledger: int, first: int, *, entries_max: int) -> list[int]:
        keys = self._span(entry_key(ledger, first), entry_key(ledger, ID_MAX))
        return [key_entry(key)[1] for key, _ in zip(keys, range(entries_max), strict=False)]

    def ledgers(self, after: int, *, ledgers_max: int) -> list[int]:
        keys = self._span(key_after_ledger(after), ledger_key(ID_MAX))
        return [key_ledger(key) for key, _ in zip(keys, range(ledgers_max), strict=False)]

    def delete_ledger(self, ledger: int, tombstone: bytes | None) -> None:
        entries = _Deletion(entry_key(ledger, 0), entry_key(ledger, ID_MAX))
        record = _Deletion(ledger_key(ledger), ledger_key(ledger))
        stone = [] if tombstone is None else [(tombstone_key(ledger), tombstone)]
        self._append((entries, record, *stone))

    def tombstone(self, ledger: int) -> bytes | None:
        value: bytes | None = self._values.get(tombstone_key(ledger))
        return value

    def tombstones(self, after: int, *, ledgers_max: int) -> list[tuple[int, bytes]]:
        keys = self._span(tombstone_key(max(after, 0)), tombstone_key(ID_MAX))
        found = (key for key in keys if key_tombstone(key) > after)
        return [
            (key_tombstone(key), self._values[key])
            for key, _ in zip(found, range(ledgers_max), strict=False)
        ]

    def delete_tombstones(self, ledgers: Sequence[int]) -> None:
        keys = map(tombstone_key, ledgers)
        self._append(tuple(_Deletion(key, key) for key in keys))

    def reclaim(self, first: int, last: int) -> None:
        """Does nothing: deleted values are not kept."""

    def drop_replaced(self) -> None:
        """Does nothing: replaced values are not kept."""

    def pressure(self) -> float:
        return 0.0

    def close(self) -> None:
        self.sync()

    def _span(self, first: bytes, last: bytes, *, reverse: bool = False) -> Iterator[bytes]:
        keys: Iterator[bytes] = self._values.irange(first, last, reverse=reverse)
        return keys

    def _append(self, batch: Sequence[Put | _Deletion]) -> None:
        self._log.append(batch)
        self._sequence += len(batch)
        for operation in batch:
            if isinstance(operation, _Deletion):
                for key in list(self._span(operation.first, operation.last)):
                    del self._values[key]
            else:
                key, value = operation
                self._values[key] = value
