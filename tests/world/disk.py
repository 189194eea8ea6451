"""A bookie's disk: what is durable on it, what a power cut removes, and the other faults of disks.

The disk outlives the processes that use it. The store on it is `MemoryStorage`. Its crash keeps a
prefix of the unsynced batches, as the contract of `Storage` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from fakes.memory_storage import MemoryStorage, _Deletion
from world.rot import TABLE, VALUES, Damage, Rot

from magnetar.bookie.disk import DiskLimits, Reserve, Usage
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import (
    ID_MAX,
    IDENTITY_KEY,
    decode_ledger_record,
    entry_key,
    key_entry,
    ledger_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from random import Random

    from world.trace import Trace

    from magnetar.bookie.storage.format import Identity
    from magnetar.bookie.storage.store import Put, Storage


DISK_BYTES = 64 << 20
LIMITS = DiskLimits()


@dataclass
class Health:
    """The present faults of the disk."""

    sync_s: float = 0.0003  # mean
    read_s: float = 0.0001  # mean
    read_errors: float = 0.0  # probability that a read fails
    write_fails: bool = False  # the next write fails
    sync_fails: bool = False  # the next sync fails
    full: bool = False  # writes fail although the free bytes suffice: a quota
    taken: int = 0  # bytes of the disk that other programs use


class SimDisk:
    def __init__(self, name: str, random: Random, trace: Trace) -> None:
        self.name = name
        self.health = Health()
        self.identity: Identity | None = None  # None: no identity file
        self.image: DiskImage | None = None  # None: no store
        self.watermark = 0  # the part of the log that the bookie has noted as durable
        self.opens = True  # False: opening the store fails
        self.rotten = ""  # the incarnation that noted an unreadable table
        self.reclaiming = Marker()
        # Keyed by incarnation. None: the store does not open.
        self.formers: dict[str, DiskImage | None] = {}
        self.on_durable: Callable[[int, int, bytes], None] = lambda *_: None
        self.on_delete: Callable[[int, bool], None] = lambda *_: None
        self.on_reopened: Callable[[DiskImage], None] = lambda _: None
        self.on_met: Callable[[], None] = lambda: None  # a compaction has met known damage again
        self.reserve = SimReserve(self)
        self._random = random
        self.trace = trace
        self._met = False  # a compaction has failed, and nothing went bad since
        self._generation = 0  # the number of openings; only the last opened store may write
        self._snapshots: list[tuple[Identity | None, DiskImage, int]] = []

    # -- what a bookie does ----------------------------------------------------------------------

    def open(self) -> SimStorage:
        assert self.image is not None, "nothing was formatted"
        self._generation += 1
        return SimStorage(self, self.image, self._generation)

    @property
    def whole(self) -> bool:
        """True when the store is sound.

        It opens, its log does not end before the watermark, and no note calls it rotten.
        """
        found = self.image
        if not self.opens or found is None or self.identity is None:
            return False
        return found.sequence() >= self.watermark and self.rotten != self.identity.incarnation

    def format(self) -> None:
        self.image, self.watermark, self.opens = DiskImage(), 0, True
        self.image.write([(IDENTITY_KEY, b"")])
        self.image.sync()

    def set_aside(self, incarnation: str) -> None:
        """Make the store that of a former incarnation. A store that was moved already is kept."""
        if self.image is not None:
            self.formers[incarnation] = self.image if self.opens else None
        self.image = None

    def open_formers(self) -> dict[str, Storage | None]:
        return {
            incarnation: None if image is None else SimStorage(self, image, self._generation)
            for incarnation, image in self.formers.items()
        }

    # -- faults ------------------------------------------------------------------------

    def crash(self, *, power: bool) -> None:
        """The process has ended. Only a power cut removes unsynced writes."""
        self._generation += 1
        if self.image is not None:
            unsynced = self.image.unsynced
            kept = self._random.randint(0, unsynced) if power else unsynced
            if kept < unsynced:
                self.trace.fault(self.name, "unsynced batches lost", unsynced - kept)
            self.image = self.image.crash(kept=kept)
            self.on_reopened(self.image)
            self.settle()

    def wipe(self) -> None:
        """Replace the disk by an empty one."""
        self._generation += 1
        self.identity, self.image, self.watermark, self.opens = None, None, 0, True
        self.reserve = SimReserve(self)
        self.reclaiming = Marker()
        self.formers.clear()

    def take_image(self) -> None:
        """Copy a disk that is in use, as an administrator's backup does."""
        if self.image is not None:
            copy = self.image.copy_as_on_disk()
            self._snapshots.append((self.identity, copy, self.watermark))

    @property
    def last_image(self) -> Identity | None:
        """The incarnation in the last backup. None: no backup, or one of an empty disk."""
        return self._snapshots[-1][0] if self._snapshots else None

    def restore_image(self) -> None:
        """Restore the last backup. The bookie must be down."""
        self.identity, self.image, self.watermark = self._snapshots.pop()

    def lose_tail(self, batches: int) -> bool:
        """Lose synced batches, like a device that lied about a sync. The bookie must be down.

        Returns whether the watermark shows the loss. If it does not, nothing is lost, because the
        watermark lags behind the last syncs.
        """
        assert self.image is not None
        shorter = self.image.without_tail(batches)
        if shorter.sequence() >= self.watermark:
            return False
        self.image = shorter
        return True

    def settle(self) -> None:
        """Report the entries that have become durable."""
        assert self.image is not None
        on_disk = self.image.on_disk
        for key in self.image.settle():
            if key.startswith(b"E"):
                self.on_durable(*key_entry(key), on_disk()[key])

    # -- damage --------------------------------------------------------------------------

    def damage(self, ledger: int, entry: int, damage: Damage) -> None:
        """Make a stored value unreadable. A later write of the same key is sound."""
        if self.image is not None and self.image.entry(ledger, entry) is not None:
            self._met = False
            self.image.rot.strike(entry_key(ledger, entry), damage)

    def damage_record(self, ledger: int) -> None:
        """Make the table that holds the key unreadable."""
        assert self.image is not None
        self.image.rot.strike(ledger_key(ledger), Damage.UNREADABLE)
        self.image.rot.table = True

    def meet(self) -> None:
        """A compaction met data that it cannot read."""
        self.trace.fault(self.name, "damage met by a compaction")
        if self._met:
            self.on_met()
        self._met = True

    @property
    def damaged(self) -> list[tuple[int, int]]:
        """Stored entries whose copy here is bad."""
        if self.image is None:
            return []
        keys = [key for key in self.image.rot.damaged if key.startswith(b"E")]
        return [each for each in map(key_entry, keys) if self.image.entry(*each) is not None]

    def sound(self, ledger: int, entry: int) -> bool:
        """Return whether the entry is durable here and reads as it was written."""
        if not self.durable(ledger, entry):
            return False
        assert self.image is not None
        if ledger_key(ledger) in self.image.rot.damaged:
            return False
        found = self.image.entry(ledger, entry)
        return found is not None and as_read(self.image, ledger, entry, found) == found

    # -- space -----------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        used = 0 if self.image is None else self.image.bytes
        return max(0, DISK_BYTES - self.health.taken - used - self.reserve.bytes)

    def usage(self) -> Usage:
        return Usage(DISK_BYTES, self.free)

    def leave_free(self, free: int) -> None:
        """Other programs fill the disk, except for this many bytes."""
        self.health.taken = max(0, self.health.taken + self.free - free)

    def is_current(self, generation: int) -> bool:
        return generation == self._generation

    def chance(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def durable(self, ledger: int, entry: int) -> bool:
        """Return whether the entry survives any power cut."""
        return self.image is not None and entry_key(ledger, entry) in self.image.on_disk()

    def durably_fenced(self, ledger: int) -> bool:
        record = None if self.image is None else self.image.on_disk().get(ledger_key(ledger))
        return record is not None and decode_ledger_record(record).fenced


class Marker:
    """A file that exists or not, in place of the bookie's file that says that it frees space."""

    def __init__(self) -> None:
        self._there = False

    def exists(self) -> bool:
        return self._there

    def touch(self) -> None:
        self._there = True

    def unlink(self, *, missing_ok: bool) -> None:
        assert missing_ok or self._there
        self._there = False


class SimReserve(Reserve):
    """A file of zeros, in place of the bookie's reserve."""

    def __init__(self, disk: SimDisk) -> None:
        self.bytes = 0
        self._disk = disk

    @property
    def held(self) -> bool:
        return self.bytes > 0

    def make(self, size: int) -> None:
        if not self.held and size <= self._disk.free:
            self.bytes = size

    def release(self) -> None:
        if self.held:
            self._disk.trace.fault(self._disk.name, "reserve given up")
        self.bytes = 0

    def release_if_short(self) -> None:
        """Make the reserve, as a bookie does before it opens its store."""
        if self._disk.free < LIMITS.reserve_of(DISK_BYTES):
            self.release()


class DiskImage(MemoryStorage):
    """A store that also knows which of its content is durable."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0  # used: deleted and replaced values count until they are reclaimed
        self.rot = Rot()
        self._on_disk: dict[bytes, bytes] = {}
        self._counted = 0  # the number of the log's batches that `_on_disk` has

    def on_disk(self) -> dict[bytes, bytes]:
        """The content after a power cut that removes all unsynced batches."""
        self.settle()
        return self._on_disk

    def settle(self) -> list[bytes]:
        """The keys that have become durable since the last call."""
        keys = []
        for batch in self._log[self._counted : self._durable]:
            for operation in batch:
                if isinstance(operation, _Deletion):
                    gone = [k for k in self._on_disk if operation.first <= k <= operation.last]
                    for key in gone:
                        del self._on_disk[key]
                else:
                    self._on_disk[operation[0]] = operation[1]
                    keys.append(operation[0])
        self._counted = self._durable
        return [key for key in keys if key in self._on_disk]

    def reclaim(self, first: int, last: int) -> None:
        if self.rot.met_by_compaction(self._span(entry_key(first, 0), entry_key(last, ID_MAX))):
            raise StorageFailed("compact", "the compaction failed")
        self.bytes = sum(len(key) + len(value) for key, value in self._values.items())

    def drop_replaced(self) -> None:
        self.rot.drop_replaced()

    def _append(self, batch: Sequence[Put | _Deletion]) -> None:
        super()._append(batch)
        puts = [each for each in batch if not isinstance(each, _Deletion)]
        self.bytes += _size_of(puts)
        if self.rot.damaged:
            self.rot.on_written([key for key, _ in puts], len(self._log) - 1)

    def crash(self, *, kept: int = 0) -> Self:
        opened = super().crash(kept=kept)
        opened.rot = self.rot.reopened(len(opened._log))
        return opened

    def entries(self) -> set[tuple[int, int]]:
        """All stored entries, durable or not."""
        return {key_entry(key) for key in self._values if key.startswith(b"E")}

    def copy_as_on_disk(self) -> DiskImage:
        return self._opened(self._durable)

    def without_tail(self, batches: int) -> DiskImage:
        return self._opened(max(0, self._durable - batches))

    def _opened(self, batches: int) -> DiskImage:
        opened = DiskImage()
        for batch in self._log[:batches]:
            opened._append(batch)
        opened._durable = batches
        opened.rot = self.rot.reopened(batches)
        return opened


def _size_of(puts: Sequence[Put]) -> int:
    return sum([len(key) + len(value) for key, value in puts])


class SimStorage:
    """An opened store: a `Storage` that fails when its disk does."""

    def __init__(self, disk: SimDisk, image: DiskImage, generation: int) -> None:
        self._disk = disk
        self._image = image
        self._generation = generation

    def write(self, puts: Sequence[Put]) -> None:
        self._check_write("write", _size_of(puts))
        self._image.write(puts)

    def delete_ledger(self, ledger: int, tombstone: bytes | None) -> None:
        self._check_write("delete a ledger")
        self._disk.on_delete(ledger, tombstone is not None)
        self._image.delete_ledger(ledger, tombstone)

    def delete_tombstones(self, ledgers: Sequence[int]) -> None:
        self._check_write("delete tombstones")
        self._image.delete_tombstones(ledgers)

    def reclaim(self, first: int, last: int) -> None:
        self._check_read("reclaim")
        try:
            self._image.reclaim(first, last)
        except StorageFailed:
            self._disk.meet()
            raise

    def sync(self) -> None:
        self._check("sync", fails=self._disk.health.sync_fails)
        self._image.sync()
        self._disk.settle()

    def sequence(self) -> int:
        return self._image.sequence()

    def entry(self, ledger: int, entry: int) -> bytes | None:
        self._check_read("read an entry")
        found = self._image.entry(ledger, entry)
        return None if found is None else self._as_read(ledger, entry, found)

    def last_entry(self, ledger: int) -> tuple[int, bytes] | None:
        self._check_read("read the last entry")
        found = self._image.last_entry(ledger)
        return None if found is None else (found[0], self._as_read(ledger, *found))

    def run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> list[bytes]:
        self._check_read("read a run")
        found: list[bytes] = []
        size, last = 0, min(last, first + entries_max - 1)
        for entry in range(first, last + 1):
            value = self._image.entry(ledger, entry)
            if value is None:
                break
            found.append(self._as_read(ledger, entry, value))
            size += len(found[-1])
            if size >= bytes_max:
                break
        return found

    def ledger_record(self, ledger: int) -> bytes | None:
        self._check_read("read a record")
        if self._image.rot.damaged.get(ledger_key(ledger)) is Damage.UNREADABLE:
            self._disk.trace.fault(self._disk.name, "unreadable record", ledger)
            raise StorageFailed("read a record", TABLE)
        return self._image.ledger_record(ledger)

    def entry_ids(self, ledger: int, first: int, *, entries_max: int) -> list[int]:
        self._check_read("entry_ids")
        found = self._image.entry_ids(ledger, first, entries_max=entries_max)
        self._check_keys((entry_key(ledger, entry) for entry in found), VALUES)
        return found

    def ledgers(self, after: int, *, ledgers_max: int) -> list[int]:
        self._check_read("ledgers")
        found = self._image.ledgers(after, ledgers_max=ledgers_max)
        self._check_keys(map(ledger_key, found), TABLE)
        return found

    def __getattr__(self, name: str) -> Any:
        """All other calls only read."""
        method = getattr(self._image, name)

        def read(*positional: Any, **named: Any) -> Any:
            self._check_read(name)
            return method(*positional, **named)

        return read

    def close(self) -> None:
        self._check("close", fails=False)
        self._image.close()

    def _as_read(self, ledger: int, entry: int, value: bytes) -> bytes:
        if not self._image.rot.damaged:
            return value
        found = as_read(self._image, ledger, entry, value)
        if found is None:
            self._disk.trace.fault(self._disk.name, "unreadable block", ledger, entry)
            raise StorageFailed("read an entry", VALUES)
        if found != value:
            damage = self._image.rot.damaged[entry_key(ledger, entry)]
            self._disk.trace.fault(self._disk.name, _NAMES[damage], ledger, entry)
        return found

    def _check_keys(self, keys: Iterable[bytes], reason: str) -> None:
        """A search reads every value that it passes."""
        rot = self._image.rot
        if rot.damaged and any(rot.damaged.get(key) is Damage.UNREADABLE for key in keys):
            self._disk.trace.fault(self._disk.name, "unreadable block in a search")
            raise StorageFailed("search", reason)

    def _check_write(self, operation: str, size: int = 0) -> None:
        health, rot = self._disk.health, self._image.rot
        if rot.refuses:
            self._disk.trace.fault(self._disk.name, "write refused after a compaction")
            raise StorageFailed(operation, rot.refuses)
        full = health.full or (health.taken > 0 and self._disk.free < size)
        if full:
            self._disk.trace.fault(self._disk.name, "disk full")
        self._check(operation, fails=health.write_fails or full)

    def _check_read(self, operation: str) -> None:
        self._check(operation, fails=self._disk.chance(self._disk.health.read_errors))

    def _check(self, operation: str, *, fails: bool) -> None:
        if not self._disk.is_current(self._generation):
            raise StorageFailed(operation, "the process has ended")
        if fails:
            self._disk.trace.fault(self._disk.name, f"{operation} fails")
            raise StorageFailed(operation, "input/output error")


_NAMES = {Damage.FLIPPED: "flipped bit", Damage.SWAPPED: "swapped entry"}


def as_read(image: DiskImage, ledger: int, entry: int, value: bytes) -> bytes | None:
    """The result of reading `value`, which is stored at this key. None: the read fails."""
    damage = image.rot.damaged.get(entry_key(ledger, entry))
    if damage is Damage.UNREADABLE:
        return None
    if damage is Damage.FLIPPED:
        return value[:-1] + bytes([value[-1] ^ 1])
    return value if damage is None else _another(image, ledger, entry, value)


def _another(image: DiskImage, ledger: int, entry: int, value: bytes) -> bytes:
    """The neighbour of the key; a single key is its own neighbour."""
    following, before = (ledger, entry + 1), (ledger, entry - 1)
    beside = [following, (ledger - 1, entry), before, (ledger + 1, entry)]
    turn = entry % len(beside)
    for other in [*beside[turn:], *beside[:turn]]:
        found = image.entry(*other) if min(other) >= 0 else None
        if found is not None:
            return found
    return value
