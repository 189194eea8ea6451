"""A bookie's disk: what is on it for good, what a power cut takes away, and everything else that
disks do to people.

It outlives the processes that use it. The store on it is `MemoryStorage`, whose crash keeps a
prefix of what was not synced, by whole batches, as the contract of `Storage` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from magnetar.bookie.disk import DiskLimits, Reserve, Usage
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import (
    IDENTITY_KEY,
    decode_ledger_record,
    entry_key,
    key_entry,
    ledger_key,
)
from magnetar.bookie.storage.memory import MemoryStorage, _Deletion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from world.trace import Trace

    from magnetar.bookie.storage.format import Identity
    from magnetar.bookie.storage.store import Put, Storage


DISK_BYTES = 64 << 20
LIMITS = DiskLimits()


class Damage(Enum):
    UNREADABLE = "unreadable"  # reading it fails
    FLIPPED = "flipped"  # it reads as something else
    SWAPPED = "swapped"  # it reads as another entry, or another ledger's, as sound as any


@dataclass
class Health:
    """What is wrong with the disk at the moment."""

    sync_s: float = 0.0003  # mean
    read_s: float = 0.0001  # mean
    read_errors: float = 0.0  # probability that a read fails
    write_fails: bool = False  # the next write fails
    sync_fails: bool = False  # the next sync fails
    full: bool = False  # writes fail, and the figures do not tell: a quota
    taken: int = 0  # bytes of the disk that others use
    damaged: dict[tuple[int, int], Damage] = field(default_factory=dict)


class SimDisk:
    def __init__(self, name: str, random: Random, trace: Trace) -> None:
        self.name = name
        self.health = Health()
        self.identity: Identity | None = None  # None: no identity file
        self.image: DiskImage | None = None  # None: no store
        self.watermark = 0  # how far the log was durable, as the bookie noted it
        self.opens = True  # False: opening the store fails
        self.formers: dict[str, DiskImage | None] = {}  # by incarnation; None: it does not open
        self.on_durable: Callable[[int, int], None] = lambda *_: None
        self.on_delete: Callable[[int, bool], None] = lambda *_: None
        self.on_reopened: Callable[[DiskImage], None] = lambda _: None
        self.reserve = SimReserve(self)
        self._random = random
        self.trace = trace
        self._generation = 0  # counts the openings: only the last one may write
        self._snapshots: list[tuple[Identity | None, DiskImage, int]] = []

    # -- what a bookie does ----------------------------------------------------------------------

    def open(self) -> SimStorage:
        assert self.image is not None, "nothing was formatted"
        self._generation += 1
        return SimStorage(self, self.image, self._generation)

    @property
    def whole(self) -> bool:
        """Whether opening the store finds nothing wrong: it opens, and the end of its log is not
        before what the watermark says."""
        found = self.image
        return self.opens and found is not None and found.sequence() >= self.watermark

    def format(self) -> None:
        self.image, self.watermark, self.opens = DiskImage(), 0, True
        self.image.write([(IDENTITY_KEY, b"")])
        self.image.sync()

    def set_aside(self, incarnation: str) -> None:
        """The store becomes that of a former incarnation; one that was moved already stays."""
        if self.image is not None:
            self.formers[incarnation] = self.image if self.opens else None
        self.image = None

    def open_formers(self) -> dict[str, Storage | None]:
        return {
            incarnation: None if image is None else SimStorage(self, image, self._generation)
            for incarnation, image in self.formers.items()
        }

    # -- what befalls it -------------------------------------------------------------------------

    def crash(self, *, power: bool) -> None:
        """The process has ended. Only a power cut takes what was written and not synced."""
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
        """Another, empty disk."""
        self._generation += 1
        self.identity, self.image, self.watermark, self.opens = None, None, 0, True
        self.reserve = SimReserve(self)
        self.formers.clear()
        self.health.damaged.clear()

    def take_image(self) -> None:
        """As the administrator's backup does, of a disk that is in use."""
        if self.image is not None:
            copy = self.image.copy_as_on_disk()
            self._snapshots.append((self.identity, copy, self.watermark))

    @property
    def last_image(self) -> Identity | None:
        """Whose the last backup is. None: there is none, or of an empty disk."""
        return self._snapshots[-1][0] if self._snapshots else None

    def restore_image(self) -> None:
        """Put the last backup back. The bookie must be down."""
        self.identity, self.image, self.watermark = self._snapshots.pop()

    def lose_tail(self, batches: int) -> bool:
        """What was synced is gone after all: a device that lied. The bookie must be down. Returns
        whether the watermark can tell; else nothing was done: it lags by what was synced last."""
        assert self.image is not None
        shorter = self.image.without_tail(batches)
        if shorter.sequence() >= self.watermark:
            return False
        self.image = shorter
        return True

    def settle(self) -> None:
        """Tell of the entries that are on the disk for good now."""
        assert self.image is not None
        for key in self.image.settle():
            if key.startswith(b"E"):
                self.on_durable(*key_entry(key))

    # -- space -----------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        used = 0 if self.image is None else self.image.bytes
        return max(0, DISK_BYTES - self.health.taken - used - self.reserve.bytes)

    def usage(self) -> Usage:
        return Usage(DISK_BYTES, self.free)

    def leave_free(self, free: int) -> None:
        """Others take the disk, but for so much."""
        self.health.taken = max(0, self.health.taken + self.free - free)

    def is_current(self, generation: int) -> bool:
        return generation == self._generation

    def chance(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def durable(self, ledger: int, entry: int) -> bool:
        """Whether the entry would be there after a power cut, whatever it took."""
        return self.image is not None and entry_key(ledger, entry) in self.image.on_disk()

    def durably_fenced(self, ledger: int) -> bool:
        record = None if self.image is None else self.image.on_disk().get(ledger_key(ledger))
        return record is not None and decode_ledger_record(record).fenced


class SimReserve(Reserve):
    """A file of zeros, as the bookie's own."""

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
        """As a bookie does before it opens its store."""
        if self._disk.free < LIMITS.reserve_of(DISK_BYTES):
            self.release()


class DiskImage(MemoryStorage):
    """A store that also knows what of it is on the disk for good."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0  # that it takes: what is deleted or replaced stays until it is reclaimed
        self._on_disk: dict[bytes, bytes] = {}
        self._counted = 0  # how many batches of the log are in `_on_disk`

    def on_disk(self) -> dict[bytes, bytes]:
        """What there would be after a power cut that took everything it could."""
        self.settle()
        return self._on_disk

    def settle(self) -> list[bytes]:
        """The keys that have become durable since the last time."""
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
        self.bytes = sum(len(key) + len(value) for key, value in self._values.items())

    def _append(self, batch: Sequence[Put | _Deletion]) -> None:
        super()._append(batch)
        self.bytes += _size_of([each for each in batch if not isinstance(each, _Deletion)])

    def entries(self) -> set[tuple[int, int]]:
        """All that are there, durable or not."""
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
        if self._disk.health.damaged:  # what is written anew is sound, and stands elsewhere
            for key, _ in puts:
                if key.startswith(b"E"):
                    self._disk.health.damaged.pop(key_entry(key), None)

    def delete_ledger(self, ledger: int, tombstone: bytes | None) -> None:
        self._check_write("delete a ledger")
        self._disk.on_delete(ledger, tombstone is not None)
        self._image.delete_ledger(ledger, tombstone)

    def delete_tombstones(self, ledgers: Sequence[int]) -> None:
        self._check_write("delete tombstones")
        self._image.delete_tombstones(ledgers)

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

    def __getattr__(self, name: str) -> Any:
        """Everything else only reads."""
        method = getattr(self._image, name)

        def read(*positional: Any, **named: Any) -> Any:
            self._check_read(name)
            return method(*positional, **named)

        return read

    def close(self) -> None:
        self._check("close", fails=False)
        self._image.close()

    def _as_read(self, ledger: int, entry: int, value: bytes) -> bytes:
        damage = self._disk.health.damaged.get((ledger, entry))
        if damage is Damage.UNREADABLE:
            self._disk.trace.fault(self._disk.name, "unreadable block", ledger, entry)
            raise StorageFailed("read an entry", "block checksum mismatch")
        if damage is Damage.FLIPPED:
            self._disk.trace.fault(self._disk.name, "flipped bit", ledger, entry)
            return value[:-1] + bytes([value[-1] ^ 1])
        if damage is Damage.SWAPPED:
            return self._another(ledger, entry, value)
        return value

    def _another(self, ledger: int, entry: int, value: bytes) -> bytes:
        """What stands beside it; of an only one itself."""
        following, before = (ledger, entry + 1), (ledger, entry - 1)
        beside = [following, (ledger - 1, entry), before, (ledger + 1, entry)]
        turn = entry % len(beside)
        for other in [*beside[turn:], *beside[:turn]]:
            found = self._image.entry(*other) if min(other) >= 0 else None
            if found is not None:
                self._disk.trace.fault(self._disk.name, "swapped entry", ledger, entry, *other)
                return found
        return value

    def _check_write(self, operation: str, size: int = 0) -> None:
        health = self._disk.health
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
