"""`Storage`: the seam between a bookie and its disk.

An ordered store of entries and ledger records with one write-ahead log. What is written can be
read at once; it is *durable* only when a `sync` that began after the write has returned. A crash
keeps a prefix, in the order of writing, of what was not yet synced: never the later without the
earlier. So one `sync` makes a whole group of writes durable, and a durable fence implies that all
adds written before it are durable too.

Every method is synchronous and may block; all raise `StorageFailed`. `write`, `sequence` and the
small lookups are called on the loop, `sync` on a thread of its own, runs and listings on the read
thread: an implementation takes calls from all three at once. An error never means "not there".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

Put = tuple[bytes, bytes]
"""A key and its value (format.py)."""

BATCH_BYTES_MAX: Final = 256 << 10
"""Where one `write` should end. RocksDB's call holds the interpreter's lock throughout: 24 MB took
76 to 91 ms, so 256 KiB stops the loop for about 1 ms."""


class Storage(Protocol):
    def write(self, puts: Sequence[Put]) -> None:
        """Add or replace, all or nothing, in order. Visible at once, durable after a later sync."""

    def sync(self) -> None:
        """Make durable whatever was written before the call."""

    def sequence(self) -> int:
        """A number that grows by one with each put and never goes back, over restarts too."""

    def ledger_record(self, ledger: int) -> bytes | None:
        """The record's bytes. None: there is none."""

    def entry(self, ledger: int, entry: int) -> bytes | None:
        """The envelope. None: there is none."""

    def last_entry(self, ledger: int) -> tuple[int, bytes] | None:
        """The stored entry with the highest id, and its envelope. None: no entry is stored."""

    def run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> list[bytes]:
        """The envelopes of the entries first, first + 1, ... up to the first one that is missing.

        Ends at `last`, at `entries_max`, or with the entry that reaches `bytes_max`; if `first` is
        there, it is always given.
        """

    def entry_ids(self, ledger: int, first: int, *, entries_max: int) -> list[int]:
        """Ids of stored entries from `first` on, ascending. Costs a read of each."""

    def ledgers(self, after: int, *, ledgers_max: int) -> list[int]:
        """Ids greater than `after` of ledgers with a record, ascending."""

    def delete_ledger(self, ledger: int, tombstone: bytes | None) -> None:
        """Remove the ledger's record and all its entries, and put the tombstone, as one write.
        None: the ledger may come back, so nothing is put."""

    def tombstone(self, ledger: int) -> bytes | None:
        """None: there is none."""

    def tombstones(self, after: int, *, ledgers_max: int) -> list[tuple[int, bytes]]:
        """(ledger, tombstone), ascending, of ledgers greater than `after`."""

    def delete_tombstones(self, ledgers: Sequence[int]) -> None:
        """As one write."""

    def reclaim(self, first: int, last: int) -> None:
        """Give back the space of the deleted ones among the ledgers `first` to `last`, on a thread
        of its own: it may take as long as rewriting the others does."""

    def drop_replaced(self) -> None:
        """See to it that no `reclaim` reads a value that was replaced by another. On its thread."""

    def pressure(self) -> float:
        """How close writes are to being stopped by what the store has to do in the background: from
        1 on they should be held back. Called on the sync thread."""

    def close(self) -> None:
        """Everything written is durable afterwards. Nothing may be called any more."""
