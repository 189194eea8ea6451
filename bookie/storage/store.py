"""`Storage`: the interface between a bookie and its disk.

A `Storage` is an ordered store of entries and ledger records with one write-ahead log. A write is
visible at once. It is *durable* only when a `sync` that began after the write has returned. A crash
keeps a prefix of the unsynced writes, in the order of writing: never a later write without the
earlier ones. So one `sync` makes a whole group of writes durable. A durable fence implies that all
adds written before it are durable too.

Every method is synchronous and may block; all raise `StorageFailed`. `write` and the deletions are
called on the loop, `sync` and `pressure` on the sync thread, runs and listings on the read thread,
`reclaim` and `drop_replaced` on the compaction thread, and `sequence` and the lookups of one value
on any of the first three. An implementation accepts calls from these four threads at the same time.
An error never means "not there".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

Put = tuple[bytes, bytes]
"""A key and its value (format.py)."""

BATCH_BYTES_MAX: Final = 256 << 10
"""The size at which one `write` should end. RocksDB's call holds the interpreter's lock: 24 MB took
76 to 91 ms, so 256 KiB stops the loop for about 1 ms."""


class Storage(Protocol):
    def write(self, puts: Sequence[Put]) -> None:
        """Add or replace the values, atomically and in order. They are durable after a later
        sync."""

    def sync(self) -> None:
        """Make all writes durable that returned before the call."""

    def sequence(self) -> int:
        """Return a number that grows with each write and never decreases, also over restarts. A put
        adds one."""

    def ledger_record(self, ledger: int) -> bytes | None:
        """Return the bytes of the ledger's record. None: there is no record."""

    def entry(self, ledger: int, entry: int) -> bytes | None:
        """Return the entry's envelope. None: there is no such entry."""

    def last_entry(self, ledger: int) -> tuple[int, bytes] | None:
        """Return the highest id of the ledger's entries, and its envelope. None: the ledger has no
        entry."""

    def run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> list[bytes]:
        """Return the envelopes of the entries first, first + 1, ... up to the first missing entry.

        Ends at `last`, at `entries_max`, or with the entry that reaches `bytes_max`. If `first` is
        stored, it is always returned.
        """

    def entry_ids(self, ledger: int, first: int, *, entries_max: int) -> list[int]:
        """Return the ids of stored entries from `first` on, ascending. This reads each entry."""

    def ledgers(self, after: int, *, ledgers_max: int) -> list[int]:
        """Return the ids above `after` of ledgers with a record, ascending."""

    def delete_ledger(self, ledger: int, tombstone: bytes | None) -> None:
        """Remove the ledger's record and all its entries, and put the tombstone, in one write.
        `tombstone` None: write no tombstone, because the ledger may return."""

    def tombstone(self, ledger: int) -> bytes | None:
        """Return the ledger's tombstone. None: there is no tombstone."""

    def tombstones(self, after: int, *, ledgers_max: int) -> list[tuple[int, bytes]]:
        """Return (ledger, tombstone) of the ledgers above `after`, ascending."""

    def delete_tombstones(self, ledgers: Sequence[int]) -> None:
        """Delete the tombstones in one write."""

    def reclaim(self, first: int, last: int) -> None:
        """Reclaim the space of deleted ledgers among `first` to `last`, on a thread of its own.
        This may take as long as rewriting the ledgers that remain."""

    def drop_replaced(self) -> None:
        """Make sure that no later `reclaim` reads a replaced value. Runs on the thread of
        `reclaim`."""

    def pressure(self) -> float:
        """Return how much background work is pending, as a ratio: from 1 on, adds should be delayed
        before writes stop. Called on the sync thread."""

    def close(self) -> None:
        """Make everything written durable, and close. No call may follow."""
