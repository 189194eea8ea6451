"""Bookies over the real store: RocksDB, its directory, watermark and opening, in a world (T50).

Each store has a model, which gets the same writes and the same reads. Their answers must be equal
at any time and after each start. A kill leaves the files as they were at that moment: the store's
own closing does not reach them. A power cut also removes the end of the log, at any byte behind the
synced part.

RocksDB's background threads take no virtual time; they change files but not the stored content. The
probe, which production runs in a child process before it opens a store, runs in this process: a
loop in virtual time has no children.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
from contextlib import contextmanager, redirect_stderr, suppress
from typing import TYPE_CHECKING, Any

from world.boot import RETRY_S
from world.disk import DiskImage, SimDisk
from world.nodes import BookieNode

from magnetar.bookie.errors import DirectoryRolledBack, StorageFailed, WrongIncarnation
from magnetar.bookie.storage import opening, probe
from magnetar.bookie.storage.directory import open_directory
from magnetar.bookie.storage.layout import STORE
from magnetar.metadata.errors import MetadataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from world.cluster import World

    from magnetar.bookie.storage.directory import DataDirectory
    from magnetar.bookie.storage.format import Identity
    from magnetar.bookie.storage.store import Put


class RealDisk(SimDisk):
    """A disk whose `image` is the model. Its only faults are kills and power cuts."""

    def __init__(self, world: World, name: str, path: Path) -> None:
        super().__init__(name, world.draw(name + " disk"), world.trace)
        self.world = world
        self.path = path
        self.directory: DataDirectory | None = None  # None: no process has it open
        self.stops = False  # the next end is a clean stop
        self._ends: dict[int, int] = {}  # bytes of the log, by number of batches
        self._synced = Synced(self._log)

    def use(self, directory: DataDirectory) -> None:
        """A process has opened the store: check that it has exactly the expected content."""
        self.directory = directory
        self._synced.watch(directory)
        renewed = self.identity is not None and (
            self.identity.incarnation != directory.identity.incarnation
        )
        self.world.oracle.hold(not renewed, "T50", lambda: f"{self.name} calls its store damaged")
        self.identity = directory.identity
        if self.image is None:
            self.format()
        self._ends.clear()
        self.note_end()
        self._compare(directory)

    def open(self) -> Any:
        assert self.image is not None
        assert self.directory is not None
        self._generation += 1
        return TwinStorage(self, self.directory, self.image, self._generation)

    def crash(self, *, power: bool) -> None:
        self._generation += 1
        directory, self.directory = self.directory, None
        if directory is None:
            return  # not open yet: the task that was opening it releases it
        assert self.image is not None
        stops, self.stops = self.stops, False
        if stops:
            directory.close()
            self.image.sync()
        else:
            self._kill(directory)
        kept = self._cut_log(self.image) if power and not stops else self.image.unsynced
        self.image = self.image.crash(kept=kept)
        self.on_reopened(self.image)
        self.settle()

    def _kill(self, directory: DataDirectory) -> None:
        copy = self.path.with_name(f"{self.name} killed")
        _stand_still(directory)
        shutil.copytree(self.path, copy, copy_function=_copy_unless_gone)
        _abandon(directory)
        shutil.rmtree(self.path)
        copy.rename(self.path)

    def _cut_log(self, model: DiskImage) -> int:
        """Cut the log at any byte behind the synced part. Returns how many unsynced batches are
        left."""
        log = self._log()
        size = self._random.randint(self._synced.size, log.stat().st_size)
        with open(log, "r+b") as file:
            file.truncate(size)
        batches = max(batches for batches, end in self._ends.items() if end <= size)
        kept = batches - (len(model._log) - model.unsynced)
        self.world.oracle.hold(
            kept >= 0, "T50", lambda: f"{self.name} has not synced {-kept} batches"
        )
        if kept < model.unsynced:
            self.trace.fault(self.name, "end of a real log lost", model.unsynced - kept)
        return kept

    def let_go(self) -> None:
        """The world has ended: remove the files."""
        if self.directory is not None:
            _abandon(self.directory)
            self.directory = None

    def note_end(self) -> None:
        assert self.image is not None
        self._ends[len(self.image._log)] = self._log().stat().st_size

    def _log(self) -> Path:
        """The log file that is being written."""
        return max((self.path / STORE).glob("*.log"))

    def _compare(self, directory: DataDirectory) -> None:
        store, model = directory.storage, self.image
        assert model is not None
        hold = self.world.oracle.hold
        found, sequences = 0, (store.sequence(), model.sequence())
        hold(
            sequences[0] == sequences[1],
            "T50",
            lambda: f"{self.name} opens with {sequences[0]} operations instead of {sequences[1]}",
        )
        for ledger in model.ledgers(-1, ledgers_max=1_000):
            for entry in model.entry_ids(ledger, 0, entries_max=10_000):
                found += 1
                same = store.entry(ledger, entry) == model.entry(ledger, entry)
                hold(same, "T50", lambda at=(ledger, entry): f"{self.name} has lost {at}")  # type: ignore[misc]
        self.trace.note(self.name, "opens its store", sequences[0], found)


class Synced:
    """Wraps rocksdict's store and notes how much of the log was synced."""

    def __init__(self, log: Callable[[], Path]) -> None:
        self.size = 0
        self._log = log
        self._store: Any = None

    def watch(self, directory: DataDirectory) -> None:
        self.size = self._log().stat().st_size
        self._store = directory.storage._store
        directory.storage._store = self  # type: ignore[assignment]

    def flush_wal(self, sync: bool) -> None:
        self._store.flush_wal(sync)
        if sync:
            self.size = self._log().stat().st_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _stand_still(directory: DataDirectory) -> None:
    """Freeze the content of all files. RocksDB may still delete files that it does not need."""
    directory.storage._store.cancel_all_background(True)


def _copy_unless_gone(source: str, target: str) -> None:
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


def _abandon(directory: DataDirectory) -> None:
    """Abandon the directory of a killed process: what it held in memory is lost."""
    directory.manifest.close()
    directory.watermark.abandon()
    synced: Any = directory.storage._store
    del directory.storage._store, synced._store
    os.close(directory.lock)


class TwinStorage:
    """An opened store, and its model: a `Storage`."""

    def __init__(
        self, disk: RealDisk, directory: DataDirectory, model: DiskImage, generation: int
    ) -> None:
        self._disk = disk
        self._store = directory.storage
        self._model = model
        self._generation = generation

    def write(self, puts: Sequence[Put]) -> None:
        self._do("write", puts)

    def delete_ledger(self, ledger: int, tombstone: bytes | None) -> None:
        self._disk.on_delete(ledger, tombstone is not None)
        self._do("delete_ledger", ledger, tombstone)

    def delete_tombstones(self, ledgers: Sequence[int]) -> None:
        self._do("delete_tombstones", ledgers)

    def sync(self) -> None:
        self._check()
        self._store.sync()
        self._model.sync()
        self._disk.settle()

    def pressure(self) -> float:
        self._check()
        return self._store.pressure()

    def __getattr__(self, name: str) -> Any:
        """All other calls only read, or remove deleted data."""
        real, modelled = getattr(self._store, name), getattr(self._model, name)

        def read(*positional: Any, **named: Any) -> Any:
            self._check()
            found, expected = real(*positional, **named), modelled(*positional, **named)
            self._disk.world.oracle.hold(
                found == expected,
                "T50",
                lambda: f"{self._disk.name}: {name}{positional} is {found}, not {expected}",
            )
            return found

        return read

    def _do(self, name: str, *arguments: Any) -> None:
        self._check()
        getattr(self._store, name)(*arguments)
        getattr(self._model, name)(*arguments)
        self._disk.note_end()

    def _check(self) -> None:
        if not self._disk.is_current(self._generation):
            raise StorageFailed("use the store", "the process has ended")


class RealBookie(BookieNode):
    disk: RealDisk

    def __init__(self, world: World, name: str, path: Path) -> None:
        super().__init__(world, name)
        self.disk = RealDisk(world, name, path)

    async def _boot(self) -> Identity:
        assert self.store is not None
        while True:
            try:
                directory = await open_directory(
                    self.disk.path, bookie=self.name, metadata=self.store, chance=self.random
                )
            except (MetadataError, DirectoryRolledBack, WrongIncarnation) as error:
                self.world.trace.note(self.name, "cannot start yet", type(error).__name__)
                await asyncio.sleep(RETRY_S)  # the pause of the bookie's supervisor
            else:
                self.disk.use(directory)
                return directory.identity

    def stop(self) -> None:
        """Close the store cleanly."""
        self.disk.stops = self.disk.directory is not None
        self.crash()

    def _note_durable(self, sequence: int) -> None:
        super()._note_durable(sequence)
        if self.disk.directory is not None:
            self.disk.directory.watermark.advance(sequence)


@contextmanager
def probing_here() -> Iterator[None]:
    """Probe stores in this process, as the child process would."""

    async def run(
        path: Path, arguments: tuple[str | Path, ...], deadline_s: float, spinning_share: float
    ) -> tuple[int, str]:
        said = io.StringIO()
        with redirect_stderr(said):
            status = probe.main([str(each) for each in arguments])
        return status, said.getvalue().strip().rpartition("\n")[2]

    right = opening._run_probe
    opening._run_probe = run
    try:
        yield
    finally:
        opening._run_probe = right
