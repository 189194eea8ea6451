"""A bookie's data directory: one process opens it, replaces a damaged store in it, or refuses it.

A bookie with a damaged store starts, but it does not treat this store as intact. The bookie
continues as a new incarnation with an empty store, and keeps the damaged store for the former
incarnation (former.py). This change is a sequence of durable steps. The formatting of a directory
and each start are such sequences, too. The rules in identity.py say how the next start continues
from any step. The steps of a replacement are:

    identity file in the state *replacing*, cookie, store and watermark moved to former/,
    identity *formatting*, new store, new watermark, identity *ready*
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import (
    DamagedStore,
    DirectoryRolledBack,
    DirectoryUnusable,
    StorageFailed,
    TooManyFormers,
    WrongIncarnation,
)
from magnetar.bookie.storage.format import (
    IDENTITY_KEY,
    DirectoryState,
    FormatDamaged,
    Identity,
)
from magnetar.bookie.storage.former import (
    FORMERS_MAX,
    former_incarnations,
    move_to_former,
    open_formers,
    remove_former,
)
from magnetar.bookie.storage.identity import Wanted, plan_start, replace_incarnation
from magnetar.bookie.storage.layout import (
    STORE,
    WATERMARK,
    environment_error,
    find,
    lock_directory,
    sync_directory,
    unusable,
    write_identity,
)
from magnetar.bookie.storage.manifest import ManifestWatch
from magnetar.bookie.storage.opening import OPEN_DEADLINE_S, open_whole
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
    from magnetar.runtime.thread import Worker

log = get_logger(__name__)

METADATA_DEADLINE_S: Final = 30.0
# The sequence of a new store, which holds only the incarnation of its owner.
_FRESH_SEQUENCE: Final = 1


@dataclass(slots=True)
class DataDirectory:
    """An open data directory. The caller must `close` it."""

    path: Path
    identity: Identity  # the identity of this start
    storage: RocksStorage
    watermark: WatermarkFile
    manifest: ManifestWatch
    formers: dict[str, RocksStorage | None]  # keyed by incarnation; None: the store cannot be read
    lock: int  # file descriptor
    _cookie: BookieCookie  # the cookie that the metadata store holds
    _next: Identity | None = field(default=None, init=False)  # None: no epoch change is running

    async def count_up(
        self, metadata: MetadataStore, *, chance: random.Random, thread: Worker
    ) -> None:
        """Begin the next boot epoch, so that an earlier image of the disk can be recognised. May be
        called again after DirectoryUnusable or an error of the metadata store.

        Raises WrongIncarnation when another process has taken the bookie's name; this process must
        end.
        """
        if self._next is None:
            self._next = replace(
                self.identity,
                boot_epoch=self._cookie.boot_epoch + 1,
                start=_random_id(chance),
                intents=(),  # drops the intents of the last epoch
            )
        await thread.do(partial(write_identity, self.path, self._next))
        self._cookie = await _enter(self.path, metadata, self._next, self._cookie)
        self._next = None

    def remove_former(self, incarnation: str) -> None:
        """Delete a former incarnation's store. Raises OSError; may be called again. Blocks; no read
        of the store may be running."""
        storage = self.formers.pop(incarnation, None)
        if storage is not None:
            with suppress(StorageFailed):
                storage.close()
        remove_former(self.path, incarnation)

    def close(self) -> None:
        """Close cleanly; nothing may be running. Raises StorageFailed."""
        for former in self.formers.values():
            if former is not None:
                with suppress(StorageFailed):
                    former.close()
        sequence = self.storage.sequence()
        # fails if the disk is full, or if RocksDB's background work was cancelled
        with suppress(StorageFailed):
            self.storage.flush()
        try:
            self.manifest.look()
            self.storage.close()
            if self.manifest.settle():
                self.watermark.close(sequence=sequence)
            else:
                self.watermark.abandon()
        finally:
            self.manifest.close()
            os.close(self.lock)


async def open_directory(
    path: Path,
    *,
    bookie: str,
    metadata: MetadataStore,
    chance: random.Random,
    open_deadline_s: float = OPEN_DEADLINE_S,
    new_incarnation: bool = False,
) -> DataDirectory:
    """Open the directory and record this start in the bookie's cookie. Formats an empty directory,
    and replaces a damaged or outdated store.

    `new_incarnation`: also format an empty directory of a bookie that the cluster knows. Raises
    StartRefused and the errors of the metadata store.
    """
    deadline_s = asyncio.get_running_loop().time() + METADATA_DEADLINE_S
    cluster = await cluster_id(metadata, chance=chance, deadline=deadline_s)
    wanted = Wanted(
        bookie=bookie,
        cluster=cluster,
        fresh_incarnation=_random_id(chance),
        fresh_start=_random_id(chance),
        new_incarnation=new_incarnation,
    )
    lock = lock_directory(path)
    try:
        return await _open_locked(path, lock, wanted, metadata, open_deadline_s)
    except BaseException:
        os.close(lock)
        raise


async def _open_locked(
    path: Path, lock: int, wanted: Wanted, metadata: MetadataStore, deadline_s: float
) -> DataDirectory:
    cookie = await _read_cookie(metadata, wanted.bookie)
    start = plan_start(path, find(path), cookie, wanted)
    identity = start.identity
    storage: RocksStorage | None = None
    if start.rolled_back is not None:
        await _check_alone(metadata, start.rolled_back, wanted.bookie)
        _check_replaceable(path, identity, start.rolled_back.found)
    elif identity.state is DirectoryState.READY:
        assert cookie is not None
        try:
            storage = await open_whole(path, identity, deadline_s)
        except DamagedStore as damage:
            identity = replace_incarnation(identity, cookie, wanted)
            _check_replaceable(path, identity, damage.reason)
    try:
        write_identity(path, identity)
        entered = await _enter(path, metadata, identity, cookie)
        if storage is None:
            identity, storage = _make_store(path, identity)
        manifest = ManifestWatch(path / STORE, storage)
        watermark = _begin_watermark(path, identity, storage, manifest)
        if identity.state is not DirectoryState.READY:
            identity = replace(identity, state=DirectoryState.READY)
            write_identity(path, identity)
            log.info("directory formatted", directory=str(path), incarnation=identity.incarnation)
        formers = await open_formers(path, deadline_s=deadline_s)
    except BaseException:
        if storage is not None:
            with suppress(StorageFailed):
                storage.close()
        raise
    return DataDirectory(path, identity, storage, watermark, manifest, formers, lock, entered)


def _random_id(chance: random.Random) -> str:
    return f"{chance.getrandbits(128):032x}"


# -- A new store -------------------------------------------------------------------------------


def _check_replaceable(path: Path, identity: Identity, reason: str) -> None:
    kept = former_incarnations(path)
    if len(kept) >= FORMERS_MAX:
        raise TooManyFormers(
            path,
            found=f"a damaged store ({reason}), and the stores of {len(kept)} former incarnations",
            expected=f"at most {FORMERS_MAX}",
            remedy="Replace the disk, and start with --new-incarnation on an empty directory. "
            "Keep this directory until the entries are restored from the other bookies.",
        )
    log.error(
        "store damaged, continuing as a new incarnation with an empty store; the damaged store is "
        "served read-only",
        directory=str(path),
        reason=reason,
        former=identity.former,
        incarnation=identity.incarnation,
    )


async def _check_alone(
    metadata: MetadataStore, rolled_back: DirectoryRolledBack, bookie: str
) -> None:
    """Raise DirectoryRolledBack if the bookie is registered: an older image of its disk must not
    replace a bookie that runs elsewhere."""
    path = paths.bookie_available(BookieId(bookie))
    await metadata.sync(path)
    if await metadata.get(path) is not None:
        raise DirectoryRolledBack(
            rolled_back.directory,
            found=f"{rolled_back.found}, while the bookie is registered",
            expected=rolled_back.expected,
            remedy="If the bookie runs elsewhere, this is a copy of its directory: leave it. If "
            "the bookie has just ended, start again when its registration has expired.",
        )


def _make_store(path: Path, identity: Identity) -> tuple[Identity, RocksStorage]:
    """Make the store, from either state of an unfinished change. Return the identity in the state
    *formatting*, and the store."""
    if identity.state is DirectoryState.REPLACING:
        assert identity.former is not None
        move_to_former(path, identity.former)
        identity = replace(identity, state=DirectoryState.FORMATTING)
        write_identity(path, identity)
    _clear(path)
    try:
        storage = RocksStorage(path / STORE, create=True)
        try:
            storage.write([(IDENTITY_KEY, identity.incarnation.encode())])
            storage.sync()
        except StorageFailed:
            storage.close()
            raise
    except StorageFailed as error:
        raise _not_made(path, error) from error
    return identity, storage


def _not_made(path: Path, error: StorageFailed) -> DirectoryUnusable:
    trouble = environment_error(error.reason) or OSError(errno.EIO, error.reason)
    return unusable(path, trouble)


def _clear(path: Path) -> None:
    """Remove the remains of an interrupted formatting. Raises DirectoryRolledBack if the store was
    in use already."""
    with suppress(FormatDamaged, StorageFailed):
        watermark = read_watermark(path / WATERMARK)
        if watermark is not None and watermark.sequence > _FRESH_SEQUENCE:
            raise DirectoryRolledBack(
                path,
                found=f"a store of {watermark.sequence} operations and an older identity file",
                expected="the identity file that was written when the store was made",
                remedy="An older identity file was restored here; restore the right one.",
            )
    try:
        (path / WATERMARK).unlink(missing_ok=True)
        if os.path.lexists(path / STORE):
            shutil.rmtree(path / STORE)
    except OSError as error:
        raise unusable(path, error) from error


def _begin_watermark(
    path: Path, identity: Identity, storage: RocksStorage, manifest: ManifestWatch
) -> WatermarkFile:
    """Begin the watermark of this boot epoch. The replayed operations are durable now."""
    try:
        watermark = WatermarkFile(
            path / WATERMARK,
            boot_epoch=identity.boot_epoch,
            now_s=time.monotonic,
            look_at_manifest=manifest.look,
        )
        watermark.advance(storage.sequence())
        watermark.sync()
        sync_directory(path)
    except StorageFailed as error:
        raise _not_made(path, error) from error
    except OSError as error:
        raise unusable(path, error) from error
    return watermark


# -- The metadata ------------------------------------------------------------------------------


async def _read_cookie(metadata: MetadataStore, bookie: str) -> BookieCookie | None:
    path = paths.bookie_cookie(BookieId(bookie))
    await metadata.sync(path)
    stored = await metadata.get(path)
    return None if stored is None else decode_bookie_cookie(stored.value)


async def _enter(
    path: Path, metadata: MetadataStore, identity: Identity, before: BookieCookie | None
) -> BookieCookie:
    """Compare-and-set the cookie from `before` to this start."""
    ours = BookieCookie(
        bookie=BookieId(identity.bookie),
        incarnation=identity.incarnation,
        boot_epoch=identity.boot_epoch,
        cluster=identity.cluster,
        start=identity.start,
        unknown=b"" if before is None else before.unknown,
    )

    def change(value: bytes | None) -> bytes | Verdict:
        stored = None if value is None else decode_bookie_cookie(value)
        if stored == ours:
            return KEEP  # our own change; its reply was lost
        if stored != before:
            raise WrongIncarnation(
                path,
                found=f"incarnation {identity.incarnation}, boot epoch {identity.boot_epoch}, "
                f"start {identity.start}",
                expected=f"the only process of this bookie; the metadata names {stored}",
                remedy="Two processes run as this bookie; stop one of them.",
            )
        return encode_bookie_cookie(ours)

    deadline_s = asyncio.get_running_loop().time() + METADATA_DEADLINE_S
    await update(
        metadata, paths.bookie_cookie(BookieId(identity.bookie)), change, deadline=deadline_s
    )
    return ours
