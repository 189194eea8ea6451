"""Damage of stored data on a bookie's disk, and what RocksDB does when it reads damaged data.

A bad value fails the reads of that value only. A rewritten value is sound and stored elsewhere. The
bad value stays behind it, where only compactions read it, until a compaction drops replaced values.
A compaction that cannot read its input fails, and from then on the store takes no write. A bad
table holds records of ledgers, and stays bad until the store is replaced.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# The errors of RocksDB for a table and for a blob file.
TABLE = "Corruption: block checksum mismatch: stored = 1, computed = 2  in store/000012.sst"
VALUES = "Corruption: checksum mismatch in store/000013.blob"


class Damage(Enum):
    UNREADABLE = "unreadable"  # reading it fails
    FLIPPED = "flipped"  # the entry reads as other bytes
    SWAPPED = "swapped"  # the entry reads as another sound entry, perhaps of another ledger


class Rot:
    """The rotten values of one store, by key. Batches are those of its log, by number."""

    def __init__(self) -> None:
        self.damaged: dict[bytes, Damage] = {}
        self.table = False
        self.refuses = ""  # the reason why the store takes no writes; "": it takes them
        self._replaced: dict[bytes, tuple[Damage, int]] = {}  # the batch that met the damage

    def strike(self, key: bytes, damage: Damage) -> None:
        self.damaged[key] = damage

    def on_written(self, keys: Iterable[bytes], batch: int) -> None:
        for key in keys:
            damage = self.damaged.pop(key, None)
            if damage is not None:
                self._replaced[key] = damage, batch

    def reopened(self, batches: int) -> Rot:
        """The damage of the store when it opens with this many batches. A lost batch may have
        replaced a bad value."""
        after = Rot()
        after.damaged, after.table = dict(self.damaged), self.table
        for key, (damage, batch) in self._replaced.items():
            if batch < batches:
                after._replaced[key] = damage, batch
            else:
                after.damaged[key] = damage
        return after

    def drop_replaced(self) -> None:
        self._replaced.clear()

    def met_by_compaction(self, keys: Iterable[bytes]) -> bool:
        """Read and rewrite the values of these keys. True: a value cannot be read."""
        if not self.damaged and not self._replaced:
            return False
        met = any(self._unreadable(key) for key in keys)
        if met and not self.refuses:
            self.refuses = VALUES
        return met

    def meet_table(self) -> None:
        """Let a compaction meet the rotten table: from then on, the store refuses writes."""
        self.refuses = TABLE

    def _unreadable(self, key: bytes) -> bool:
        behind = self._replaced.get(key)
        damages = [self.damaged.get(key), None if behind is None else behind[0]]
        return Damage.UNREADABLE in damages
