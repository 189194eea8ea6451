"""What goes bad in a store while it lies on its disk, and what RocksDB does when it meets it.

A value that is bad costs those who read it that one. What is written anew is sound and stands
elsewhere; the bad one lies behind it, where only compactions go, until what was replaced is
dropped. A compaction that cannot read what it moves fails, and from then on the store takes no
write. A table that is bad has ledgers' records in it and stays bad, until the store is replaced.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# As RocksDB says it of a table, and of a file of values.
TABLE = "Corruption: block checksum mismatch: stored = 1, computed = 2  in store/000012.sst"
VALUES = "Corruption: checksum mismatch in store/000013.blob"


class Damage(Enum):
    UNREADABLE = "unreadable"  # reading it fails
    FLIPPED = "flipped"  # it reads as something else
    SWAPPED = "swapped"  # it reads as another entry, or another ledger's, as sound as any


class Rot:
    """The rotten values of one store, by key. Batches are those of its log, by number."""

    def __init__(self) -> None:
        self.damaged: dict[bytes, Damage] = {}
        self.table = False
        self.refuses = ""  # why no write is taken any more; "": they are
        self._replaced: dict[bytes, tuple[Damage, int]] = {}  # and by which batch

    def strike(self, key: bytes, damage: Damage) -> None:
        self.damaged[key] = damage

    def on_written(self, keys: Iterable[bytes], batch: int) -> None:
        for key in keys:
            damage = self.damaged.pop(key, None)
            if damage is not None:
                self._replaced[key] = damage, batch

    def reopened(self, batches: int) -> Rot:
        """That of the store as it opens with so many batches: what had replaced something may be
        among those that are lost."""
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
        """The values of these are read and written anew. True: one cannot be."""
        if not self.damaged and not self._replaced:
            return False
        met = any(self._unreadable(key) for key in keys)
        if met and not self.refuses:
            self.refuses = VALUES
        return met

    def meet_table(self) -> None:
        """RocksDB compacts tables when it sees fit."""
        self.refuses = TABLE

    def _unreadable(self, key: bytes) -> bool:
        behind = self._replaced.get(key)
        damages = [self.damaged.get(key), None if behind is None else behind[0]]
        return Damage.UNREADABLE in damages
