"""A whole bookie without its ports: directory, threads, group commit and service, opened and
closed.

Standalone runs one of these in its own process; `main.py` puts gRPC and HTTP in front of one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NoReturn

from magnetar.bookie.admission import Admission
from magnetar.bookie.service import BookieService
from magnetar.bookie.storage.commit import GroupCommit
from magnetar.bookie.storage.directory import OPEN_DEADLINE_S, open_directory
from magnetar.metadata.model import BookieId, BookieRegistration
from magnetar.runtime.log import get_logger
from magnetar.runtime.metrics import counter, gauge, histogram

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from prometheus_client import CollectorRegistry

    from magnetar.bookie.errors import StorageFailed
    from magnetar.bookie.storage.directory import DataDirectory
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

# What is written and not yet on disk. At 100 MB/s this is a third of a second of adds; a disk that
# falls behind by more makes the writers wait.
PENDING_BYTES_MAX: Final = 32 << 20
STOP_GRACE_S: Final = 5.0
EXIT_STORAGE_FAILED: Final = 74  # EX_IOERR of sysexits.h


def die(error: StorageFailed) -> NoReturn:
    """End the process: after a failed write or sync nobody knows what is on disk. What starts it
    again replays the log, and then knows."""
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
    open_deadline_s: float = OPEN_DEADLINE_S,
    stop_grace_s: float = STOP_GRACE_S,
    die: Callable[[StorageFailed], None] = die,
) -> AsyncIterator[BookieService]:
    """A bookie that serves while inside. Raises StartRefused, or what the metadata store raises.

    On leaving, whatever was written is made durable and acknowledged if that takes no longer than
    `stop_grace_s`; then the store is closed in good order.
    """
    directory = await open_directory(
        data_dir,
        bookie=bookie,
        metadata=metadata,
        chance=chance,
        open_deadline_s=open_deadline_s,
    )
    log.info(
        "store opened",
        bookie=bookie,
        incarnation=directory.identity.incarnation,
        boot_epoch=directory.identity.boot_epoch,
        directory=str(data_dir),
    )
    sync_thread = ThreadPoolExecutor(1, thread_name_prefix="bookie-sync")
    read_thread = ThreadPoolExecutor(1, thread_name_prefix="bookie-read")
    try:
        syncs = histogram(registry, "magnetar_bookie_sync_seconds", "How long a group's sync took.")
        commit = GroupCommit(
            directory.storage,
            note_durable=directory.watermark.advance,
            thread=sync_thread,
            die=die,
            pending_bytes_max=pending_bytes_max,
            observe_sync=syncs.observe,
        )
        service = _service(directory, commit, read_thread, clock)
        _export(registry, service, commit)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(service.run())
            yield service
            await service.stop(grace_s=stop_grace_s)
            running.cancel()
    finally:
        for thread in (sync_thread, read_thread):
            thread.shutdown(cancel_futures=True)
        directory.close()


def registration(
    service: BookieService, *, address: str, http_address: str = "", zone: str = ""
) -> BookieRegistration:
    """What the bookie tells of itself in the list of those that serve."""
    identity = service.identity
    return BookieRegistration(
        bookie=BookieId(identity.bookie),
        incarnation=identity.incarnation,
        boot_epoch=identity.boot_epoch,
        address=address,
        http_address=http_address,
        zone=zone,
        read_only=False,
    )


def _service(
    directory: DataDirectory, commit: GroupCommit, read_thread: ThreadPoolExecutor, clock: Clock
) -> BookieService:
    return BookieService(
        identity=directory.identity,
        data_dir=directory.path,
        storage=directory.storage,
        commit=commit,
        admission=Admission(directory.storage, write=commit.write, clock=clock),
        read_thread=read_thread,
    )


def _export(registry: CollectorRegistry, service: BookieService, commit: GroupCommit) -> None:
    counts = service.counts
    for name, text, read in (
        ("adds_stored", "Adds that were stored, duplicates included.", lambda: counts.adds_stored),
        ("adds_refused", "Adds that were refused.", lambda: counts.adds_refused),
        ("add_bytes", "Bytes of the frames of adds.", lambda: counts.add_bytes),
        (
            "conflicts",
            "Adds whose id is taken by other content: two writers, or corruption.",
            lambda: service.conflicts,
        ),
        ("reads", "Requests to read entries.", lambda: counts.reads),
        ("entries_read", "Entries given to readers.", lambda: counts.entries_read),
        (
            "fences",
            "Requests that fenced a ledger, again or for the first time.",
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
        "magnetar_bookie_disk_free_bytes",
        "Free space on the disk of the data directory.",
        lambda: service.info().disk_free_bytes,
    )
