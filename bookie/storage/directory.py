"""A bookie's data directory: opened undamaged and by one process, or refused with the reason.

    lock        held (flock) by the process that uses the directory
    identity    whose it is (format.py, identity.py)
    watermark   how far the log was durable (watermark.py)
    store/      RocksDB

Opening RocksDB holds the interpreter's lock, and on damaged files it may never return. After an
unclean end the opening is therefore tried in a child process first, with a deadline; the child also
does the replaying, so that the second opening is short.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import (
    DamagedStore,
    DirectoryLocked,
    DirectoryUnusable,
    StorageFailed,
    WrongIncarnation,
)
from magnetar.bookie.storage.format import (
    IDENTITY_KEY,
    FormatDamaged,
    Identity,
    Watermark,
    decode_identity,
    encode_identity,
)
from magnetar.bookie.storage.identity import Found, Wanted, plan_start
from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.bookie.storage.watermark import WatermarkFile, read_watermark
from magnetar.metadata import paths
from magnetar.metadata.cluster import cluster_id
from magnetar.metadata.codec import decode_bookie_cookie, encode_bookie_cookie
from magnetar.metadata.model import BookieCookie, BookieId
from magnetar.metadata.store import KEEP, update
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from magnetar.metadata.store import MetadataStore, Verdict

log = get_logger(__name__)

LOCK: Final = "lock"
IDENTITY: Final = "identity"
IDENTITY_NEW: Final = "identity.new"
WATERMARK: Final = "watermark"
STORE: Final = "store"
_IGNORED: Final = frozenset({LOCK, IDENTITY, IDENTITY_NEW, "lost+found"})

# Replaying what eight memtables of 64 MiB hold took 0.6 s per 100 MB when measured: 3 s. A slow
# disk may take ten times as long.
OPEN_DEADLINE_S: Final = 60.0
METADATA_DEADLINE_S: Final = 30.0

_REMEDY: Final = (
    "The bookie must not answer from it. Start it under a new id on an empty directory; its "
    "entries are restored from the other bookies. Keep this directory until that is done."
)


@dataclass(slots=True)
class DataDirectory:
    """An open one. `close` it."""

    path: Path
    identity: Identity
    storage: RocksStorage
    watermark: WatermarkFile
    lock: int  # file descriptor

    def close(self) -> None:
        """In good order: nothing may be under way any more. Raises StorageFailed."""
        sequence = self.storage.sequence()
        self.storage.close()
        self.watermark.close(sequence=sequence)
        os.close(self.lock)


async def open_directory(
    path: Path,
    *,
    bookie: str,
    metadata: MetadataStore,
    chance: random.Random,
    open_deadline_s: float = OPEN_DEADLINE_S,
) -> DataDirectory:
    """Open the directory, format it if it is empty, and enter this start in the metadata.

    Raises StartRefused, or what the metadata store raises.
    """
    deadline_s = asyncio.get_running_loop().time() + METADATA_DEADLINE_S
    cluster = await cluster_id(metadata, chance=chance, deadline=deadline_s)
    wanted = Wanted(
        bookie=bookie, cluster=cluster, fresh_incarnation=f"{chance.getrandbits(128):032x}"
    )
    lock = _lock(path)
    try:
        return await _open_locked(path, lock, wanted, metadata, open_deadline_s)
    except BaseException:
        os.close(lock)
        raise


async def _open_locked(
    path: Path, lock: int, wanted: Wanted, metadata: MetadataStore, open_deadline_s: float
) -> DataDirectory:
    stored = await metadata.get(paths.bookie_cookie(BookieId(wanted.bookie)))
    cookie = None if stored is None else decode_bookie_cookie(stored.value)
    identity = plan_start(path, _find(path), cookie, wanted)
    mark = None
    if identity.ready:
        mark = _check_whole(path)
        if not mark.closed:
            await _try_open(path, open_deadline_s)
    _write_identity(path, identity)
    storage = _open_store(path, identity, mark)
    try:
        await _enter(path, metadata, identity, cookie)
        watermark = _begin_watermark(path, identity, storage)
    except BaseException:
        with suppress(StorageFailed):
            storage.close()
        raise
    if not identity.ready:
        identity = replace(identity, ready=True)
        _write_identity(path, identity)
        log.info("directory formatted", directory=str(path), incarnation=identity.incarnation)
    return DataDirectory(path, identity, storage, watermark, lock)


def _lock(path: Path) -> int:
    """Make the directory if need be, and lock it against other processes."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise DirectoryLocked(
            path,
            found=f"that process {holder} uses it",
            expected="to be alone",
            remedy="Stop that process, or give this bookie a directory of its own.",
        ) from None
    except OSError as error:
        os.close(lock)
        raise _unusable(path, error) from error
    return lock


def _unusable(path: Path, error: OSError) -> DirectoryUnusable:
    number = error.errno or 0
    remedy = {
        errno.ENOSPC: "The disk is full: free some space, then start again.",
        errno.EDQUOT: "The quota is used up: raise it, then start again.",
        errno.EROFS: "The file system is mounted read-only: see the kernel's log, then remount it.",
        errno.EACCES: "Give the bookie's user write permission.",
        errno.EPERM: "Give the bookie's user write permission.",
    }.get(number, "Point data_dir to a directory that can be written.")
    return DirectoryUnusable(
        path, found=os.strerror(number), expected="a directory that can be written", remedy=remedy
    )


def _find(path: Path) -> Found:
    try:
        others = tuple(sorted(set(os.listdir(path)) - _IGNORED))
        text = (path / IDENTITY).read_bytes()
    except FileNotFoundError:
        return Found(None, others)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        return Found(decode_identity(text), others)
    except FormatDamaged as damage:
        return Found(damage, others)


def _write_identity(path: Path, identity: Identity) -> None:
    """Replace the file, durably and at once: after a crash it is the old one or the new one."""
    try:
        with open(path / IDENTITY_NEW, "wb") as file:
            file.write(encode_identity(identity))
            file.flush()
            os.fsync(file.fileno())
        os.replace(path / IDENTITY_NEW, path / IDENTITY)
        _sync_directory(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# -- The store ---------------------------------------------------------------------------------


def _check_whole(path: Path) -> Watermark:
    """The parts of a directory in use are all there; returns its watermark."""
    if not (path / STORE).is_dir():
        raise _damaged(path, "no store", "the one that was there")
    try:
        mark = read_watermark(path / WATERMARK)
    except (FormatDamaged, StorageFailed) as error:
        raise _damaged(path, f"a damaged watermark ({error})", "one that is intact") from error
    if mark is None:
        raise _damaged(path, "no watermark", "the one that was there")
    return mark


async def _try_open(path: Path, deadline_s: float) -> None:
    """Open and close the store in a child process."""
    command = [sys.executable, "-m", "magnetar.bookie.storage.probe", str(path / STORE)]
    log.info("store was not closed in good order: replaying its log", directory=str(path))
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await child.communicate()
    except TimeoutError:
        raise _damaged(
            path, f"a store that has not opened within {deadline_s:g} s", "one that opens"
        ) from None
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode != 0:
        reason = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise _refused(path, reason or f"the child process ended with status {child.returncode}")


def _open_store(path: Path, identity: Identity, mark: Watermark | None) -> RocksStorage:
    """`mark` None: the directory is being formatted."""
    try:
        storage = RocksStorage(path / STORE, create=mark is None)
    except StorageFailed as error:
        raise _refused(path, error.reason) from error
    try:
        if mark is None:
            storage.write([(IDENTITY_KEY, identity.incarnation.encode())])
            storage.sync()
        else:
            _check_store(path, storage, identity, mark)
    except BaseException as error:
        with suppress(StorageFailed):
            storage.close()
        if isinstance(error, StorageFailed):
            raise _refused(path, error.reason) from error
        raise
    return storage


def _check_store(path: Path, storage: RocksStorage, identity: Identity, mark: Watermark) -> None:
    owner = (storage.owner() or b"none").decode(errors="replace")
    if owner != identity.incarnation:
        raise WrongIncarnation(
            path,
            found=f"a store of incarnation {owner}",
            expected=f"one of incarnation {identity.incarnation}, as the identity file says",
            remedy="The store was copied from elsewhere; put the right one back.",
        )
    if mark.boot_epoch > identity.boot_epoch:
        raise _damaged(
            path,
            f"a watermark of boot epoch {mark.boot_epoch}",
            f"one of {identity.boot_epoch} or before, as the identity file says",
        )
    sequence = storage.sequence()
    if sequence < mark.sequence:
        raise _damaged(
            path,
            f"a store of {sequence} operations",
            f"the {mark.sequence} that were on disk: its log has lost its end",
        )


def _begin_watermark(path: Path, identity: Identity, storage: RocksStorage) -> WatermarkFile:
    """The watermark of this boot epoch: what was replayed is durable now."""
    try:
        watermark = WatermarkFile(
            path / WATERMARK, boot_epoch=identity.boot_epoch, now_s=time.monotonic
        )
        storage.sync()
        watermark.advance(storage.sequence())
        watermark.sync()
    except StorageFailed as error:
        raise _refused(path, error.reason) from error
    return watermark


def _damaged(path: Path, found: str, expected: str) -> DamagedStore:
    return DamagedStore(path, found=found, expected=expected, remedy=_REMEDY)


def _refused(path: Path, reason: str) -> DamagedStore | DirectoryUnusable:
    """Why RocksDB does not open. A full or read-only disk is no damage."""
    for number in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT):
        if os.strerror(number) in reason:
            return _unusable(path, OSError(number, reason))
    return _damaged(path, f"a store that does not open ({reason})", "one that opens")


# -- The metadata ------------------------------------------------------------------------------


async def _enter(
    path: Path, metadata: MetadataStore, identity: Identity, before: BookieCookie | None
) -> None:
    """Compare-and-set the cookie from `before` to this start."""
    ours = BookieCookie(
        bookie=BookieId(identity.bookie),
        incarnation=identity.incarnation,
        boot_epoch=identity.boot_epoch,
        cluster=identity.cluster,
        unknown=b"" if before is None else before.unknown,
    )

    def change(value: bytes | None) -> bytes | Verdict:
        stored = None if value is None else decode_bookie_cookie(value)
        if stored == ours:
            return KEEP  # our own change, whose answer was lost
        if stored != before:
            raise WrongIncarnation(
                path,
                found=f"incarnation {identity.incarnation}, boot epoch {identity.boot_epoch}",
                expected=f"to be alone; meanwhile the metadata names {stored}",
                remedy="Two processes start as this bookie at once; stop one of them.",
            )
        return encode_bookie_cookie(ours)

    deadline_s = asyncio.get_running_loop().time() + METADATA_DEADLINE_S
    await update(
        metadata, paths.bookie_cookie(BookieId(identity.bookie)), change, deadline=deadline_s
    )
