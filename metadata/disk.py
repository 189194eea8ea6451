"""The nodes of an embedded store on disk, in RocksDB. Only one thread uses them.

What a directory holds:

    format      one line, "magnetar metadata 1"; written first. A directory that has files but no
                format is refused.
    store/      RocksDB. A node's key is "N" + parent + NUL + name (so that the children of a node
                lie side by side). Its value is version u64 | next sequence u64 | the node's value.
                "Mboots" has the number of times the store was opened, u64. It is the id of the
                session.
    watermark   sequence number of the last synced change, u64, and its CRC32, u32
    *.new       format or watermark while it is written. After an interrupted first start, the next
                start writes it again.

RocksDB may open without an error after damage to its log, with synced changes missing. The
watermark detects that. It is written after each sync of changes, so it is never too high. Only
its first write is synced, so the watermark may be too low after a power failure.

Ephemeral nodes are kept in memory only: the one session ends with the process.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol, TypeVar

from rocksdict import DBRecoveryMode, Options, Rdict, WriteBatch

from magnetar.metadata.errors import (
    MetadataError,
    StoreBusy,
    StoreDamaged,
    StoreFailed,
    StoreForeign,
)
from magnetar.metadata.node import parent_of
from magnetar.metadata.tree import Node

T = TypeVar("T")

_FORMAT_LINE: Final = "magnetar metadata 1\n"
_NODE: Final = struct.Struct(">QQ")
_WATERMARK: Final = struct.Struct(">QI")
_BOOTS: Final = b"Mboots"
_COUNT: Final = struct.Struct(">Q")

_WRITE_BUFFER_BYTES: Final = 8 * 1024 * 1024
"""The buffer holds about 20,000 changes of 400 bytes between flushes. There are at most two
buffers, so 16 MiB of memory."""


class Files(Protocol):
    """The calls of `os` with which a store writes the files that are not RocksDB's. Tests pass in
    calls that fail."""

    def open(self, path: Path, flags: int, mode: int = ..., /) -> int: ...
    def write(self, descriptor: int, content: bytes, /) -> int: ...
    def pwrite(self, descriptor: int, content: bytes, offset: int, /) -> int: ...
    def fsync(self, descriptor: int, /) -> None: ...
    def replace(self, source: Path, target: Path, /) -> None: ...


class DiskNodes:
    """`tree.Nodes` over a directory. Changes are seen at once and are durable after `commit`."""

    def __init__(
        self, directory: Path, db: Rdict, watermark: int, session: int, *, files: Files
    ) -> None:
        self._directory = directory
        self._files = files
        self._db = db
        self._watermark = watermark  # file descriptor
        self.session = session
        self._changed: dict[str, Node | None] = {}  # not yet committed; None: removed
        self._ephemeral: dict[str, Node] = {}

    @classmethod
    def open(cls, directory: Path, *, files: Files = os) -> "DiskNodes":
        """Make or open the directory. Raises StoreBusy, StoreDamaged, StoreForeign, StoreFailed."""
        try:
            _claim(directory, files)
            durable = _read_watermark(directory)
        except OSError as error:
            raise StoreFailed(str(directory), str(error)) from error
        db = _open_rocksdb(directory, fresh=durable is None)
        try:
            return _door(directory, lambda: cls._begin(directory, db, durable, files))
        except BaseException:
            db.close()
            raise

    @classmethod
    def _begin(cls, directory: Path, db: Rdict, durable: int | None, files: Files) -> "DiskNodes":
        present = db.latest_sequence_number()
        if durable is not None and present < durable:
            missing = f"{present + 1} to {durable}"
            raise StoreDamaged(str(directory), f"synced changes {missing} are missing")
        stored = db.get(_BOOTS)
        boots = 1 if stored is None else _COUNT.unpack(stored)[0] + 1
        db.put(_BOOTS, _COUNT.pack(boots))
        db.flush_wal(True)
        return cls(directory, db, _open_watermark(directory, db, files), boots, files=files)

    def get(self, path: str) -> Node | None:
        if path in self._ephemeral:
            return self._ephemeral[path]
        if path in self._changed:
            return self._changed[path]
        stored = self._door(lambda: self._db.get(_key(path)))
        if stored is None:
            return Node(b"") if path == "/" else None
        version, next_sequence = _NODE.unpack_from(stored)
        return Node(stored[_NODE.size :], version, next_sequence=next_sequence)

    def put(self, path: str, node: Node) -> None:
        if node.session != 0:
            self._ephemeral[path] = node
        else:
            self._changed[path] = node

    def remove(self, path: str) -> None:
        if self._ephemeral.pop(path, None) is None:
            self._changed[path] = None

    def child_names(self, path: str) -> set[str]:
        return self._door(lambda: set(self._names(path)))

    def has_children(self, path: str) -> bool:
        return self._door(lambda: any(True for _ in self._names(path)))

    def of_session(self, session: int) -> list[str]:
        return [path for path, node in self._ephemeral.items() if node.session == session]

    def commit(self) -> None:
        """Write all changes in one batch, and sync it. Raises StoreFailed: then the content of the
        disk is unknown, and the store must not be used any more."""
        if not self._changed:
            return
        changed, self._changed = self._changed, {}
        batch = WriteBatch(raw_mode=True)
        for path, node in changed.items():
            if node is None:
                batch.delete(_key(path))
            else:
                head = _NODE.pack(node.version, node.next_sequence)
                batch.put(_key(path), head + node.value)
        self._door(lambda: self._write(batch))

    def close(self) -> None:
        os.close(self._watermark)
        self._door(self._db.close)

    def _write(self, batch: WriteBatch) -> None:
        self._db.write(batch)
        self._db.flush_wal(True)
        record = _watermark_record(self._db.latest_sequence_number())
        self._files.pwrite(self._watermark, record, 0)

    def _names(self, path: str) -> Iterator[str]:
        """The names of the children; a name may appear twice."""
        removed = {changed for changed, node in self._changed.items() if node is None}
        prefix = _key("" if path == "/" else path, name="")
        for key in self._db.keys(from_key=prefix):
            assert isinstance(key, bytes)
            if not key.startswith(prefix):
                break
            name = key[len(prefix) :].decode()
            # The root's own key equals the prefix of its children's keys.
            if name and f"{'' if path == '/' else path}/{name}" not in removed:
                yield name
        for added in (self._changed.keys() - removed) | self._ephemeral.keys():
            if parent_of(added) == path and added != "/":
                yield added.rpartition("/")[2]

    def _door(self, call: Callable[[], T]) -> T:
        return _door(self._directory, call)


def _door(directory: Path, call: Callable[[], T]) -> T:
    """Call rocksdict, and raise StoreFailed for its errors, which are plain `Exception`s. The store
    cannot be used any more then. A failed assertion is a bug and is not translated."""
    try:
        return call()
    except (AssertionError, MetadataError):
        raise
    except Exception as error:
        raise StoreFailed(str(directory), str(error)) from error


def _key(path: str, name: str | None = None) -> bytes:
    """The key of a node. With a name, the key of that child of `path`. An empty name gives the
    prefix of the keys of all children of `path`."""
    parent = path
    if name is None:
        parent, _, name = path.rpartition("/")
    return f"N{parent}\0{name}".encode()


# ---- opening -------------------------------------------------------------------------------------


def _claim(directory: Path, files: Files) -> None:
    """Check that the directory holds this format, or mark it if it is empty."""
    mark = directory / "format"
    _make_directory(directory, files)
    if mark.exists():
        found = mark.read_bytes()[:100]
        if found != _FORMAT_LINE.encode():
            raise StoreForeign(str(directory), f"its format is {found!r}")
    elif any(path != _new(mark) for path in directory.iterdir()):
        raise StoreForeign(str(directory), "it is not empty and has no metadata in it")
    else:
        _write(mark, _FORMAT_LINE.encode(), files)


def _make_directory(directory: Path, files: Files) -> None:
    """Make the directory and its parents durably."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        _sync(path.parent, files)


def _open_rocksdb(directory: Path, *, fresh: bool) -> Rdict:
    options = Options(raw_mode=True)
    options.create_if_missing(fresh)
    options.set_paranoid_checks(True)
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(2)
    options.set_keep_log_file_num(2)
    try:
        return Rdict(str(directory / "store"), options)
    except Exception as error:
        reason = str(error)
        if "LOCK" in reason and ("lock" in reason or "unavailable" in reason):
            raise StoreBusy(str(directory)) from error
        if reason.startswith(("IO error", "Permission denied", "No space", "Read-only")):
            raise StoreFailed(str(directory), reason) from error
        raise StoreDamaged(str(directory), reason) from error


def _watermark_record(sequence: int) -> bytes:
    return _WATERMARK.pack(sequence, zlib.crc32(sequence.to_bytes(8)))


def _read_watermark(directory: Path) -> int | None:
    """The sequence number in the watermark file. None: no start has completed in this directory."""
    path = directory / "watermark"
    if not path.exists():
        return None
    record = path.read_bytes()
    sequence: int = _WATERMARK.unpack(record)[0] if len(record) == _WATERMARK.size else -1
    if sequence < 0 or record != _watermark_record(sequence):
        raise StoreDamaged(str(directory), "the watermark file cannot be read")
    return sequence


def _open_watermark(directory: Path, db: Rdict, files: Files) -> int:
    """Open the watermark file and write the present sequence number. The first record of a new file
    is synced: it proves later that the directory held changes."""
    path = directory / "watermark"
    record = _watermark_record(db.latest_sequence_number())
    if not path.exists():
        _write(path, record, files)
    descriptor = files.open(path, os.O_WRONLY)
    files.pwrite(descriptor, record, 0)
    return descriptor


def _write(path: Path, content: bytes, files: Files) -> None:
    """Write a small new file. After a crash it exists complete or not at all."""
    descriptor = files.open(_new(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        files.write(descriptor, content)
        files.fsync(descriptor)
    finally:
        os.close(descriptor)
    files.replace(_new(path), path)
    _sync(path.parent, files)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _sync(path: Path, files: Files) -> None:
    descriptor = files.open(path, os.O_RDONLY)
    try:
        files.fsync(descriptor)
    finally:
        os.close(descriptor)
