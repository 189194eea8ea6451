"""The store on RocksDB: the only module of a bookie that uses rocksdict.

Theory. RocksDB's write-ahead log is the bookie's journal. `write` appends to the log and the
memtable without a sync. `sync` is one `flush_wal(True)`: it makes every log with unsynced writes
durable, and releases the interpreter's lock meanwhile. The other calls for adds and reads hold that
lock. So the callers keep them short: a batch ends with the put that reaches 256 KiB, and a run with
the entry that reaches 512 KiB.

rocksdict raises plain `Exception`. Each call runs inside a `_Door`, which raises `StorageFailed`
instead. After deletions with DeleteRange, a store frees space only by a compaction with
blob garbage collection (`_options`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    BottommostLevelCompaction,
    Cache,
    CompactOptions,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    WriteBatch,
)

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.format import (
    ENTRY_KEY,
    ID_MAX,
    IDENTITY_KEY,
    LEDGER_KEY,
    entry_key,
    key_after_ledger,
    key_entry,
    key_ledger,
    key_tombstone,
    ledger_key,
    tombstone_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rocksdict import RdictIter

    from magnetar.bookie.storage.store import Put

# Writes must not stall: a stalled `write` holds the interpreter's lock and stops the whole bookie,
# including its ZooKeeper session. At 270 MB/s a memtable fills in 0.25 s, and its flush takes
# about as long. Eight memtables hold the writes of 2 s without a flush. They take at most 512 MiB,
# and almost nothing in an idle bookie.
_MEMTABLE_BYTES: Final = 64 << 20
_MEMTABLES_MAX: Final = 8
# By default RocksDB slows writes at 20 level-0 files and stops them at 36. Keys arrive nearly
# sorted by ledger, and a read needs keys of only one ledger. So a large number of files slows reads
# only a little.
_L0_SLOWDOWN_FILES: Final = 64
_L0_STOP_FILES: Final = 128
# From these values on, the bookie delays adds (`pressure`), before RocksDB slows or stops writes.
_MEMTABLES_HELD: Final = _MEMTABLES_MAX - 2  # leaves space for 64 MiB more
_L0_HELD: Final = _L0_SLOWDOWN_FILES * 3 // 4
# RocksDB stores values of at least this size in blob files. Compactions do not rewrite them.
_BLOB_BYTES_MIN: Final = 4096
_BLOB_FILE_BYTES: Final = 256 << 20
_BLOCK_CACHE_BYTES: Final = 32 << 20
_BLOOM_BITS_PER_KEY: Final = 10  # 1 % false positives: a check for duplicates rarely reads a block
# Leaves half of the usual limit of 1,024 file descriptors for connections.
_OPEN_FILES_MAX: Final = 512
# A background flush syncs its writes in steps of this size. Otherwise a log sync at the end of the
# flush waits until the disk has written the flush's 64 MiB. Measured with a quorum of 3/3/2 on one
# disk and 1,000 entries of 1 KB in flight: an add has a p99 of 32 ms instead of 100 ms, and 8 %
# more entries are added per second.
_SYNC_STEP_BYTES: Final = 1 << 20
# An OPTIONS file of RocksDB, for the settings for which rocksdict has no setter.
_OPTIONS_FOLDER: Final = Path(__file__).parent / "rocksdb"
_LOG_FILES_MAX: Final = 5
_LOG_FILE_BYTES_MAX: Final = 16 << 20


class RocksStorage:
    """A `Storage`. Only one process may have it open for writing."""

    _reclaiming = False
    _interrupted = False

    def __init__(self, directory: Path, *, create: bool) -> None:
        """Open the store and replay its write-ahead log. Holds the interpreter's lock.

        Raises StorageFailed: the store is missing (unless `create`), damaged, or open in another
        process.
        """
        if create:
            self._make_directory(directory)
        elif not (directory / "CURRENT").exists():
            raise StorageFailed("open", f"there is no store at {directory}")
        self._writable = True
        with _Door("open"):
            self._store = Rdict(
                str(directory), _options(create=create), access_type=AccessType.read_write()
            )

    @classmethod
    def open_read_only(cls, directory: Path, *, salvage: bool) -> Self:
        """Open the store and its log, and change none of RocksDB's files. rocksdict still replaces
        its own file "rocksdict-config.json". `salvage`: open everything that can be read in spite
        of damage. The caller must then verify every value, and an entry that is missing may have
        been stored.

        Raises StorageFailed.
        """
        if not (directory / "CURRENT").exists():
            raise StorageFailed("open", f"there is no store at {directory}")
        options = _options(create=False)
        if salvage:
            options.set_paranoid_checks(False)
            options.set_wal_recovery_mode(DBRecoveryMode.skip_any_corrupted_record())
        opened = cls.__new__(cls)
        opened._writable = False
        with _Door("open"):
            opened._store = Rdict(str(directory), options, access_type=AccessType.read_only(False))
        return opened

    def write(self, puts: Sequence[Put]) -> None:
        batch = WriteBatch(raw_mode=True)
        put = batch.put
        for key, value in puts:
            put(key, value)
        with _Door("write"):
            self._store.write(batch)

    def sync(self) -> None:
        with _Door("sync"):
            self._store.flush_wal(True)

    def sequence(self) -> int:
        with _Door("sequence"):
            return self._store.latest_sequence_number()

    def oldest_log(self) -> int:
        """Return the number of the oldest log that RocksDB still needs."""
        with _Door("read"):
            number: int = self._store.property_int_value("rocksdb.min-log-number-to-keep") or 0
            return number

    def owner(self) -> bytes | None:
        """Return the incarnation to which the store belongs. None: it was never written."""
        return self._get(IDENTITY_KEY)

    def ledger_record(self, ledger: int) -> bytes | None:
        return self._get(ledger_key(ledger))

    def entry(self, ledger: int, entry: int) -> bytes | None:
        return self._get(entry_key(ledger, entry))

    def last_entry(self, ledger: int) -> tuple[int, bytes] | None:
        with _Door("read"):
            cursor = self._store.iter()
            cursor.seek_for_prev(entry_key(ledger, ID_MAX))
            key = _key(cursor)
            if key is None or len(key) != ENTRY_KEY.size or key_entry(key)[0] != ledger:
                return None
            return key_entry(key)[1], _value(cursor)

    def run(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> list[bytes]:
        found: list[bytes] = []
        size, end = 0, min(last, first + entries_max - 1)
        with _Door("read"):
            cursor = self._store.iter()
            key_of, value_of, step, pack = cursor.key, cursor.value, cursor.next, ENTRY_KEY.pack
            cursor.seek(pack(b"E", ledger, first))
            for entry in range(first, end + 1):
                if key_of() != pack(b"E", ledger, entry):  # None: no key; `_key` checks why
                    _key(cursor)
                    break
                value: bytes = value_of()
                found.append(value)
                size += len(value)
                if size >= bytes_max or entry == end:
                    break  # continuing would read one more value
                step()
        return found

    def entry_ids(self, ledger: int, first: int, *, entries_max: int) -> list[int]:
        keys = self._keys(entry_key(ledger, first), entry_key(ledger, ID_MAX), keys_max=entries_max)
        return [key_entry(key)[1] for key in keys]

    def ledgers(self, after: int, *, ledgers_max: int) -> list[int]:
        keys = self._keys(key_after_ledger(after), ledger_key(ID_MAX), keys_max=ledgers_max)
        return [key_ledger(key) for key in keys if len(key) == LEDGER_KEY.size]

    def delete_ledger(self, ledger: int, tombstone: bytes | None) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.delete_range(entry_key(ledger, 0), entry_key(ledger, ID_MAX) + b"\0")
        batch.delete(ledger_key(ledger))
        if tombstone is not None:
            batch.put(tombstone_key(ledger), tombstone)
        with _Door("write"):
            self._store.write(batch)

    def tombstone(self, ledger: int) -> bytes | None:
        return self._get(tombstone_key(ledger))

    def tombstones(self, after: int, *, ledgers_max: int) -> list[tuple[int, bytes]]:
        first = tombstone_key(after) + b"\0" if after >= 0 else tombstone_key(0)
        last = tombstone_key(ID_MAX)
        found: list[tuple[int, bytes]] = []
        with _Door("read"):
            cursor = self._store.iter()
            cursor.seek(first)
            while len(found) < ledgers_max and (key := _key(cursor)) is not None and key <= last:
                found.append((key_tombstone(key), _value(cursor)))
                cursor.next()
        return found

    def delete_tombstones(self, ledgers: Sequence[int]) -> None:
        batch = WriteBatch(raw_mode=True)
        for ledger in ledgers:
            batch.delete(tombstone_key(ledger))
        with _Door("write"):
            self._store.write(batch)

    def reclaim(self, first: int, last: int) -> None:
        """Compact the ledgers `first`..`last` with blob garbage collection. The call releases the
        interpreter's lock; adds, flushes and other compactions continue. It also compacts the last
        level, which RocksDB skips by default. Keys at that level may refer to blob files that hold
        mostly deleted values, and RocksDB then keeps these files.

        rocksdict does not report a failed compaction, for example after an unreadable value.
        RocksDB counts the failure and refuses every later write.
        """
        how = CompactOptions()
        how.set_exclusive_manual_compaction(False)
        how.set_bottommost_level_compaction(BottommostLevelCompaction.force_optimized())
        self._reclaiming = True
        with _Door("compact"):
            self._store.set_options({"enable_blob_garbage_collection": "true"})
            try:
                self._store.compact_range(
                    entry_key(first, 0), entry_key(last, ID_MAX) + b"\0", compact_opt=how
                )
            finally:
                self._reclaiming = False
                failures = self._store.property_int_value("rocksdb.background-errors")
                self._store.set_options({"enable_blob_garbage_collection": "false"})
        if failures:
            raise StorageFailed("compact", "the compaction failed")

    def drop_replaced(self) -> None:
        how = CompactOptions()
        how.set_exclusive_manual_compaction(False)
        with _Door("compact"):
            self._store.flush(True)
            # This reads no blob file: blob garbage collection is off.
            self._store.compact_range(None, None, compact_opt=how)

    def interrupt(self) -> None:
        """End a running `reclaim` with an error. Call this only before `close`."""
        if self._reclaiming:
            self._interrupted = True
            with _Door("interrupt"):
                self._store.cancel_all_background(False)

    def pressure(self) -> float:
        with _Door("property"):
            value = self._store.property_int_value
            memtables = value("rocksdb.num-immutable-mem-table") or 0
            files = value("rocksdb.num-files-at-level0") or 0
        return max(memtables / _MEMTABLES_HELD, files / _L0_HELD)

    def flush(self) -> None:
        """Write the memtables to tables, so that no data is only in the log."""
        with _Door("flush"):
            self._store.flush(True)

    def close(self) -> None:
        with _Door("close"):
            if self._writable:
                self._store.flush_wal(True)
            if self._interrupted:
                del self._store  # `Rdict.close` would flush memtables, which is impossible now
            else:
                self._store.close()

    @staticmethod
    def _make_directory(directory: Path) -> None:
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageFailed("open", os.strerror(error.errno or 0)) from error

    def _get(self, key: bytes) -> bytes | None:
        with _Door("read"):
            value: bytes | None = self._store.get(key)
            return value

    def _keys(self, first: bytes, last: bytes, *, keys_max: int) -> list[bytes]:
        found: list[bytes] = []
        with _Door("read"):
            cursor = self._store.iter()
            cursor.seek(first)
            while len(found) < keys_max and (key := _key(cursor)) is not None and key <= last:
                found.append(key)
                cursor.next()
        return found


def _key(cursor: RdictIter) -> bytes | None:
    """Return the key under the cursor. None: the cursor is at the end.

    A cursor at an unreadable block looks like a cursor at the end; `status` raises the error.
    """
    if not cursor.valid():
        cursor.status()
        return None
    key: bytes = cursor.key()
    return key


def _value(cursor: RdictIter) -> bytes:
    value: bytes = cursor.value()
    return value


class _Door:
    """Raises StorageFailed when the rocksdict call inside it fails. A generator-based context
    manager would be slower, and a single add uses four doors."""

    __slots__ = ("_operation",)

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _: object, error: BaseException | None, __: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, Exception) and not isinstance(error, AssertionError):
            raise StorageFailed(self._operation, str(error)) from error
        return False


def _options(*, create: bool) -> Options:
    """Return the options of the store. With them, RocksDB never recycles log files, and keeps
    writes in order."""
    options, _ = Options.load_latest(str(_OPTIONS_FOLDER))  # raw: keys and values are bytes
    options.create_if_missing(create)
    options.set_paranoid_checks(True)
    # The default (point in time) silently drops everything after damage in the middle of the log.
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_recycle_log_file_num(0)
    options.set_unordered_write(False)

    options.set_enable_blob_files(True)
    options.set_min_blob_size(_BLOB_BYTES_MIN)
    options.set_blob_file_size(_BLOB_FILE_BYTES)
    options.set_blob_compression_type(DBCompressionType.none())
    # Blob garbage collection is configured but off. `reclaim` turns it on (`set_options`) only
    # around a `compact_range` of deleted ledgers. With three quarters of the entries deleted, the
    # store then shrank from 384 to 96 MB; without blob garbage collection it frees no space. If it
    # were always on, each compaction would rewrite all values that it visits. With entries of
    # 64 KB, RocksDB then wrote 3.4 bytes per stored byte instead of 1.95, with twice the CPU.
    options.set_enable_blob_gc(False)
    options.set_blob_gc_age_cutoff(1.0)
    options.set_blob_gc_force_threshold(0.5)
    options.set_compression_type(DBCompressionType.none())

    options.set_write_buffer_size(_MEMTABLE_BYTES)
    options.set_max_write_buffer_number(_MEMTABLES_MAX)
    options.set_level_zero_slowdown_writes_trigger(_L0_SLOWDOWN_FILES)
    options.set_level_zero_stop_writes_trigger(_L0_STOP_FILES)
    options.set_soft_pending_compaction_bytes_limit(0)  # no limit
    options.set_hard_pending_compaction_bytes_limit(0)
    options.set_max_background_jobs(max(2, min(4, os.cpu_count() or 2)))
    options.set_bytes_per_sync(_SYNC_STEP_BYTES)
    options.set_avoid_unnecessary_blocking_io(True)

    table = BlockBasedOptions()
    table.set_block_cache(Cache(_BLOCK_CACHE_BYTES))
    table.set_bloom_filter(_BLOOM_BITS_PER_KEY, False)
    options.set_block_based_table_factory(table)
    options.set_max_open_files(_OPEN_FILES_MAX)
    options.set_keep_log_file_num(_LOG_FILES_MAX)
    options.set_max_log_file_size(_LOG_FILE_BYTES_MAX)
    return options
