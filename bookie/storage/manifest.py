"""Checks, without RocksDB, that the files of a store match its watermark.

Why. RocksDB sometimes opens "successfully" with synced entries missing. A length field in the last
block of a log or of the MANIFEST may point past the end of the file. A log in the middle may end
early or be empty. The MANIFEST may have lost its end: RocksDB then deletes flushed tables as
unknown. RocksDB's sequence number and its consistency checks do not show all of this damage.

So each write of the watermark also records the size of the MANIFEST, and the last operation in the
tables that it names (`ManifestState`). When the store is opened, that part of the MANIFEST must be
intact, and the logs must hold all later operations up to the watermark. RocksDB may have added to
the MANIFEST after the last write of the watermark. That part must be intact, too. How far RocksDB
had flushed by then is unknown, so the logs are not checked in this case.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import ManifestState
from magnetar.bookie.storage.logfile import log_damage, read_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from magnetar.bookie.storage.format import Watermark
    from magnetar.bookie.storage.rocks import RocksStorage

_PREFIX: Final = "MANIFEST-"
_LOG_HEAD: Final = struct.Struct("<IHBQ")  # the first fragment's header, its first sequence


class ManifestWatch:
    """Watches the MANIFEST of an open store. A look blocks, and takes 2 microseconds if nothing has
    changed. Only one thread uses it at a time. Raises StorageFailed."""

    def __init__(
        self,
        directory: Path,
        storage: RocksStorage,
        *,
        sync: Callable[[int], None] = os.fdatasync,
    ) -> None:
        self._directory = directory
        self._storage = storage
        self._sync = sync
        self._file = -1  # -1: not open
        self._state = ManifestState(0, 0, 0)
        self._settled = False

    def settle(self) -> bool:
        """End the looks, after the store was closed. Return whether the last look is still
        valid."""
        self._settled = True
        return not self._changed()

    def look(self) -> ManifestState:
        try:
            while not self._settled and self._changed():
                self._state = self._measure()
        except OSError as error:
            raise StorageFailed("look at the manifest", str(error)) from error
        return self._state

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _changed(self) -> bool:
        if self._file < 0:
            return True
        found = os.fstat(self._file)
        return found.st_nlink == 0 or found.st_size != self._state.size_bytes

    def _measure(self) -> ManifestState:
        """Measure the MANIFEST. The size is read first. If RocksDB changes the MANIFEST before the
        other values are read, the size differs at the next check, and `look` measures again.

        RocksDB may not have synced its last append yet. If the watermark reached the disk first, a
        power cut would leave a record of a size that never was on disk. So this method syncs the
        MANIFEST, which costs one sync per flush or compaction.
        """
        self.close()
        number = current_manifest(self._directory)
        self._file = os.open(self._directory / f"{_PREFIX}{number:06}", os.O_RDONLY | os.O_CLOEXEC)
        size_bytes = os.fstat(self._file).st_size
        self._sync(self._file)
        sequence = self._storage.sequence()
        oldest = self._storage.oldest_log()
        first = 0
        for log in sorted(_numbers(self._directory, ".log")):
            if log >= oldest and not first:
                first = self._first_sequence(log)
        return ManifestState(number, size_bytes, first - 1 if first else sequence)

    def _first_sequence(self, log: int) -> int:
        """Return the sequence of the log's first operation. 0: the log is empty, or was removed."""
        try:
            with open(self._directory / f"{log:06}.log", "rb") as file:
                head = file.read(_LOG_HEAD.size)
        except FileNotFoundError:
            return 0
        if len(head) < _LOG_HEAD.size:
            return 0
        sequence: int = _LOG_HEAD.unpack(head)[3]
        return sequence


def current_manifest(directory: Path) -> int:
    """Return the number of the MANIFEST that CURRENT names. 0: it names none. Raises OSError."""
    name = (directory / "CURRENT").read_text(errors="replace").rstrip("\n")
    digits = name.removeprefix(_PREFIX)
    return int(digits) if name != digits and digits.isdecimal() else 0


def find_damage(directory: Path, watermark: Watermark) -> str:
    """Return what the store has lost compared with the watermark; "": nothing. Raises OSError."""
    noted = watermark.manifest
    if noted is None:
        return ""
    number = current_manifest(directory)
    if number < noted.number:
        return f"CURRENT names manifest {number}, expected at least {noted.number}"
    data = (directory / f"{_PREFIX}{number:06}").read_bytes()
    manifest = read_log(data, batches=False)
    if manifest.damage:
        return f"manifest {number}: {manifest.damage}"
    if not manifest.records:
        return f"manifest {number} is empty"
    if number > noted.number:
        return ""  # an interrupted opening wrote a new MANIFEST
    if manifest.whole_bytes < noted.size_bytes:
        return f"manifest {number} has {manifest.whole_bytes} bytes, had {noted.size_bytes}"
    if manifest.whole_bytes > noted.size_bytes:
        return ""
    logs = {
        log: read_log((directory / f"{log:06}.log").read_bytes(), batches=True)
        for log in _numbers(directory, ".log")
    }
    missing = log_damage(logs, flushed=noted.flushed, durable=watermark.sequence)
    return f"the log lost operations that were on disk: {missing}" if missing else ""


def _numbers(directory: Path, suffix: str) -> list[int]:
    names = (name.removesuffix(suffix) for name in os.listdir(directory) if name.endswith(suffix))
    return [int(name) for name in names if name.isdecimal()]
