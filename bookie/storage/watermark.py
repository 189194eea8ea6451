"""The watermark: the last durable operation of the log, recorded outside of the log.

Why. After damage to its last log, RocksDB may open without an error although synced entries are
missing. One flipped bit in a record's length field is enough. The bookie would then answer "no such
entry" for an acknowledged entry. So after each sync of the log, and before the acknowledgements,
the bookie writes the number of the last synced operation to this file.

Guarantees. The number never leads the log, because it is written only after a sync of the log
returned. So a store that opens with fewer operations has always lost some. The kernel has
the number before any acknowledgement, so only a crash of the machine can let it lag. It then lags
by at most `LAG_S` of operations: it is synced to disk with the first group after that time, and on
close. Writing it costs 20 microseconds per group. Syncing the file each time would cover only one
more case: a power cut *and* damage within the log's last second. It would cost 180 microseconds
more; the sync of the log takes 260 for a group of one (measured).

The file also records the size of RocksDB's MANIFEST (manifest.py), because RocksDB does not notice
all damage to the MANIFEST either.

The file has two slots, written in turn, so that a torn write leaves the other slot intact.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import (
    WATERMARK_SLOT_BYTES,
    WATERMARK_SLOTS,
    FormatDamaged,
    Watermark,
    decode_watermark,
    encode_watermark,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from magnetar.bookie.storage.format import ManifestState

LAG_S: Final = 1.0


class WatermarkFile:
    """The open file. Its methods block for some microseconds, and longer when they sync. They raise
    StorageFailed. Only one thread uses it at a time."""

    def __init__(
        self,
        path: Path,
        *,
        boot_epoch: int,
        now_s: Callable[[], float],
        look_at_manifest: Callable[[], ManifestState | None] = lambda: None,
    ) -> None:
        """`now_s` is a monotonic clock. `look_at_manifest` is called before each write, and
        by `follow_manifest`. Creates the file if it is missing."""
        self._boot_epoch = boot_epoch
        self._look_at_manifest = look_at_manifest
        self._manifest: ManifestState | None = None  # None: not looked at yet
        self._now_s = now_s
        self._synced_s = now_s()
        self._slot = 0
        self._sequence = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            # Allocate the space now, so that a full disk cannot stop a later write.
            os.posix_fallocate(self._file, 0, WATERMARK_SLOTS * WATERMARK_SLOT_BYTES)
        except OSError as error:
            raise StorageFailed("open the watermark", str(error)) from error

    def advance(self, sequence: int) -> None:
        """Record that every operation up to `sequence` is on disk. Syncs the file if the last sync
        is LAG_S old."""
        assert sequence >= self._sequence, "the store's sequence went back"
        self._sequence = sequence
        self._write()
        if self._now_s() - self._synced_s >= LAG_S:
            self.sync()

    def follow_manifest(self) -> None:
        """Record changes that RocksDB made without an operation: flushes, compactions."""
        if self._look_at_manifest() != self._manifest:
            self._write()
            self.sync()

    def sync(self) -> None:
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise StorageFailed("sync the watermark", str(error)) from error
        self._synced_s = self._now_s()

    def close(self, *, sequence: int) -> None:
        """Record that the store was closed cleanly with this sequence."""
        self._sequence = sequence
        self._write(closed=True)
        self.sync()
        with suppress(OSError):  # the record is on disk already
            os.close(self._file)

    def abandon(self) -> None:
        """Close the file without a new record, as a kill of the process would."""
        with suppress(OSError):
            os.close(self._file)

    def _write(self, *, closed: bool = False) -> None:
        self._manifest = self._look_at_manifest()
        watermark = Watermark(self._boot_epoch, self._sequence, closed, self._manifest)
        try:
            os.pwrite(self._file, encode_watermark(watermark), self._slot * WATERMARK_SLOT_BYTES)
        except OSError as error:
            raise StorageFailed("write the watermark", str(error)) from error
        self._slot = (self._slot + 1) % WATERMARK_SLOTS


def read_watermark(path: Path) -> Watermark | None:
    """Return the watermark. None: there is no such file. Raises FormatDamaged, StorageFailed."""
    try:
        slots = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFailed("read the watermark", str(error)) from error
    if len(slots) != WATERMARK_SLOTS * WATERMARK_SLOT_BYTES:
        raise FormatDamaged(f"{len(slots)} bytes, not {WATERMARK_SLOTS * WATERMARK_SLOT_BYTES}")
    return decode_watermark(slots)
