"""A bookie without its ports: opens and closes directory, threads, group commit and service.

`magnetar standalone` runs this bookie in the process of its broker. `main.py` adds the ports.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

from magnetar.bookie.admission import Admission
from magnetar.bookie.disk import release_if_short
from magnetar.bookie.errors import DirectoryUnusable, StorageFailed
from magnetar.bookie.first_add_check import FirstAddCheck
from magnetar.bookie.service import READ_CACHE_BYTES, BookieService
from magnetar.bookie.storage.commit import GroupCommit
from magnetar.bookie.storage.directory import open_directory
from magnetar.bookie.storage.opening import OPEN_DEADLINE_S
from magnetar.bookie.storage.rot import note_rot
from magnetar.bookie.upkeep import Upkeep, UpkeepConfig
from magnetar.metadata.errors import OutcomeUnknown, Unavailable
from magnetar.metadata.model import BookieAddress, BookieId, BookieRegistration, Member
from magnetar.runtime.log import get_logger
from magnetar.runtime.metrics import counter, gauge, histogram
from magnetar.runtime.thread import WorkerThread

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from prometheus_client import CollectorRegistry

    from magnetar.bookie.storage.directory import DataDirectory
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.clock import Clock
    from magnetar.runtime.thread import Worker

log = get_logger(__name__)

# Limit of the bytes written and not yet synced. At the limit, writers wait for the disk. At 100
# MB/s the limit is a third of a second of adds.
PENDING_BYTES_MAX: Final = 32 << 20
STOP_GRACE_S: Final = 5.0
EXIT_STORAGE_FAILED: Final = 74  # EX_IOERR of sysexits.h
# The time after which a running bookie begins another boot epoch. The next start detects a restored
# disk image that is older than this.
EPOCH_S: Final = 3600.0
# The period in which the bookie looks for changes of RocksDB's MANIFEST, such as a flush, and
# records them in the watermark. A look takes 2 us. A bookie also looks for changes at each sync.
FOLLOW_MANIFEST_S: Final = 5.0
UPKEEP: Final = UpkeepConfig()


def die(error: StorageFailed) -> NoReturn:
    """End the process, because the contents of the disk are unknown after a failed write or sync.
    The next start reads them again."""
    log.error("storage failed; ending the process", operation=error.operation, reason=error.reason)
    logging.shutdown()
    os._exit(EXIT_STORAGE_FAILED)


@asynccontextmanager
async def open_bookie(
    data_dir: Path,
    *,
    bookie: str,
    metadata: MetadataStore,
    clock: Clock,
    chance: random.Random,
    registry: CollectorRegistry,
    pending_bytes_max: int = PENDING_BYTES_MAX,
    read_cache_bytes: int = READ_CACHE_BYTES,
    open_deadline_s: float = OPEN_DEADLINE_S,
    stop_grace_s: float = STOP_GRACE_S,
    new_incarnation: bool = False,
    epoch_s: float = EPOCH_S,
    upkeep_config: UpkeepConfig = UPKEEP,
    die: Callable[[StorageFailed], None] = die,
) -> AsyncIterator[BookieService]:
    """Run a bookie inside of the context. Raises StartRefused, or the errors of the metadata store.
    Later raises an exception group with WrongIncarnation, if another process takes the name.

    `new_incarnation`: take a new incarnation on an empty directory. A new boot epoch begins every
    `epoch_s` seconds. At the end of the context, the bookie syncs and acknowledges the written
    entries, within `stop_grace_s`, and then closes the store.
    """
    release_if_short(data_dir, upkeep_config.disk)
    directory = await open_directory(
        data_dir,
        bookie=bookie,
        metadata=metadata,
        chance=chance,
        open_deadline_s=open_deadline_s,
        new_incarnation=new_incarnation,
    )
    log.info(
        "store opened",
        bookie=bookie,
        incarnation=directory.identity.incarnation,
        boot_epoch=directory.identity.boot_epoch,
        directory=str(data_dir),
    )
    threads = _Threads()
    try:
        service, upkeep = _assemble(
            directory,
            threads,
            metadata=metadata,
            clock=clock,
            chance=chance,
            registry=registry,
            pending_bytes_max=pending_bytes_max,
            read_cache_bytes=read_cache_bytes,
            upkeep_config=upkeep_config,
            die=partial(_fail, directory, die),
        )
        await upkeep.disk.check()
        async with asyncio.TaskGroup() as group:
            lasting = [
                group.create_task(service.run()),
                group.create_task(upkeep.run()),
                group.create_task(_count_epochs(directory, metadata, chance, threads, epoch_s)),
                group.create_task(_follow_manifest(directory, threads.sync, die)),
            ]
            yield service
            await service.stop(grace_s=stop_grace_s)
            for task in lasting:
                task.cancel()
    finally:
        threads.end(directory)
        _close(directory)


def _fail(
    directory: DataDirectory, die: Callable[[StorageFailed], None], error: StorageFailed
) -> None:
    note_rot(directory.path, directory.identity.incarnation, error)
    die(error)


def _close(directory: DataDirectory) -> None:
    try:
        directory.close()
    except StorageFailed as error:
        note_rot(directory.path, directory.identity.incarnation, error)
        raise


class _Threads:
    def __init__(self) -> None:
        self.sync = WorkerThread("bookie-sync")
        self.read = WorkerThread("bookie-read")
        self.compaction = WorkerThread("bookie-compaction")

    def end(self, directory: DataDirectory) -> None:
        for thread in (self.sync, self.read):
            thread.shutdown()
        with suppress(StorageFailed):
            directory.storage.flush()  # the next start then has nothing to replay
        with suppress(StorageFailed):
            directory.storage.interrupt()
        self.compaction.shutdown()


def _assemble(
    directory: DataDirectory,
    threads: _Threads,
    *,
    metadata: MetadataStore,
    clock: Clock,
    chance: random.Random,
    registry: CollectorRegistry,
    pending_bytes_max: int,
    read_cache_bytes: int,
    upkeep_config: UpkeepConfig,
    die: Callable[[StorageFailed], None],
) -> tuple[BookieService, Upkeep]:
    syncs = histogram(registry, "magnetar_bookie_sync_seconds", "Time of the sync of one group.")
    commit = GroupCommit(
        directory.storage,
        note_durable=directory.watermark.advance,
        thread=threads.sync,
        die=die,
        pending_bytes_max=pending_bytes_max,
        observe_sync=syncs.observe,
    )
    admission = Admission(
        directory.storage, write=commit.write, delete=commit.delete_ledger, clock=clock
    )
    service = _service(directory, commit, admission, metadata, threads.read, read_cache_bytes)
    upkeep = Upkeep(
        directory=directory,
        service=service,
        admission=admission,
        commit=commit,
        metadata=metadata,
        clock=clock,
        chance=chance,
        read_thread=threads.read,
        compaction_thread=threads.compaction,
        config=upkeep_config,
        die=die,
    )
    _export(registry, service, commit, directory.formers)
    upkeep.export(registry)
    return service, upkeep


async def _count_epochs(
    directory: DataDirectory,
    metadata: MetadataStore,
    chance: random.Random,
    threads: _Threads,
    epoch_s: float,
) -> None:
    """Begin a boot epoch every `epoch_s`, until cancelled. Raises WrongIncarnation."""
    while True:
        await asyncio.sleep(epoch_s)
        try:
            await directory.count_up(metadata, chance=chance, thread=threads.sync)
        except (Unavailable, OutcomeUnknown, DirectoryUnusable) as error:  # for example a full disk
            log.warning("boot epoch not counted up; trying again later", error=str(error))


async def _follow_manifest(
    directory: DataDirectory, sync_thread: Worker, die: Callable[[StorageFailed], None]
) -> None:
    while True:
        await asyncio.sleep(FOLLOW_MANIFEST_S)
        try:
            await sync_thread.do(directory.watermark.follow_manifest)
        except StorageFailed as error:
            _fail(directory, die, error)
            raise


def registration(
    service: BookieService, *, address: BookieAddress, http_address: str = "", zone: str = ""
) -> BookieRegistration:
    """Return the bookie's registration, with its present `read_only`."""
    identity = service.identity
    return BookieRegistration(
        bookie=BookieId(identity.bookie),
        incarnation=identity.incarnation,
        boot_epoch=identity.boot_epoch,
        address=address,
        http_address=http_address,
        zone=zone,
        read_only=service.read_only,
    )


def _service(
    directory: DataDirectory,
    commit: GroupCommit,
    admission: Admission,
    metadata: MetadataStore,
    read_thread: Worker,
    read_cache_bytes: int,
) -> BookieService:
    identity = directory.identity
    return BookieService(
        identity=identity,
        data_dir=directory.path,
        storage=directory.storage,
        commit=commit,
        admission=admission,
        read_thread=read_thread,
        check_first_add=FirstAddCheck(
            metadata, Member(BookieId(identity.bookie), identity.incarnation)
        ),
        formers=directory.formers,
        read_cache_bytes=read_cache_bytes,
    )


def _export(
    registry: CollectorRegistry,
    service: BookieService,
    commit: GroupCommit,
    formers: Mapping[str, object],
) -> None:
    counts, cache = service.counts, service.read_cache
    for name, text, read in (
        ("adds_stored", "Adds that were stored, duplicates included.", lambda: counts.adds_stored),
        ("adds_refused", "Adds that were refused.", lambda: counts.adds_refused),
        ("add_bytes", "Bytes of the frames of adds.", lambda: counts.add_bytes),
        (
            "conflicts",
            "Adds with other content than the stored entry: two writers, or corruption.",
            lambda: service.conflicts,
        ),
        ("reads", "Requests to read entries.", lambda: counts.reads),
        ("entries_read", "Entries sent to readers.", lambda: counts.entries_read),
        ("read_cache_hits", "Frames of reads answered by the read cache.", lambda: cache.hits),
        ("read_cache_misses", "Frames of reads answered from disk.", lambda: cache.misses),
        (
            "fences",
            "New fences of ledgers, counted when they are on disk.",
            lambda: counts.fences,
        ),
    ):
        counter(registry, f"magnetar_bookie_{name}_total", text, read)
    gauge(
        registry,
        "magnetar_bookie_pending_bytes",
        "Bytes written and not yet synced.",
        lambda: commit.pending_bytes,
    )
    gauge(
        registry,
        "magnetar_bookie_read_cache_bytes",
        "Memory used by the read cache.",
        lambda: cache.bytes,
    )
    gauge(
        registry,
        "magnetar_bookie_formers",
        "Damaged stores of former incarnations that are kept.",
        lambda: len(formers),
    )
    gauge(
        registry,
        "magnetar_bookie_disk_free_bytes",
        "Free space on the disk of the data directory.",
        lambda: service.info().disk_free_bytes,
    )
