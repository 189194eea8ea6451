"""A whole Magnetar in one process: metadata in a directory, one bookie, a broker. No Java.

The parts are those of a cluster. Only three seams differ: the metadata store is embedded, the
broker reaches the bookie by calling it, and an entry needs one copy (E/Qw/Qa 1/1/1). So what works
here works there, short of surviving the loss of this machine.

    <data_dir>/standalone   says whose the directory is; locked by the process that uses it
    <data_dir>/metadata/    metadata/disk.py
    <data_dir>/bookie/      bookie/storage/FORMAT.md
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn, Self

from prometheus_client import CollectorRegistry
from pydantic import Field, model_validator

from magnetar.bookie.bookie import open_bookie, registration
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.local import LocalBookiePeer
from magnetar.bookie.registration import Registration
from magnetar.broker.config import BrokerConfig
from magnetar.broker.main import BrokerProcess
from magnetar.metadata.embedded import EmbeddedStore
from magnetar.metadata.paths import CLUSTER
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.config import RoleConfig
from magnetar.runtime.listener import is_wildcard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.bookie.ledger.peer import BookiePeer
    from magnetar.bookie.service import BookieService
    from magnetar.metadata.model import Member
    from magnetar.metadata.store import MetadataStore

NAME: Final = "standalone"  # of the broker and of the bookie
MARK: Final = "standalone"  # the file that says whose the directory is
_MARK_LINE: Final = b"magnetar standalone 1\n"
_IGNORED: Final = frozenset({MARK, "lost+found"})

# How soon a process whose metadata cannot be written ends. A probe is one hop to a thread.
PROBE_S: Final = 1.0


class StandaloneConfig(RoleConfig):
    """Read from a TOML file, MAGNETAR_STANDALONE_<KEY> and flags. Ports may be 0: any free one."""

    role: ClassVar[str] = "standalone"

    data_dir: Path = Field(description="directory of all its data; made if it is not there")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    advertised_host: str = Field(
        default="", description="address that clients are told; empty: host"
    )
    grpc_port: int = Field(default=6660, ge=0, le=65535, description="for Magnetar's clients")
    pulsar_port: int = Field(
        default=6650, ge=0, le=65535, description="for Apache Pulsar's clients"
    )
    http_port: int = Field(
        default=8080, ge=0, le=65535, description="/health, /metrics, admin calls"
    )
    cache_bytes: int = Field(
        default=64 << 20, ge=1 << 20, description="entries kept in memory for tailing consumers"
    )

    @model_validator(mode="after")
    def advertised_is_reachable(self) -> Self:
        if is_wildcard(self.host) and not self.advertised_host:
            raise ValueError(
                f"host {self.host} is every address of this machine: advertised_host must say "
                "which one clients are to use"
            )
        return self


class DataDirRefused(Exception):
    """Standalone does not start on this directory. Nothing in it was changed."""

    definite = True

    def __init__(self, directory: Path, reason: str, remedy: str) -> None:
        super().__init__(f"data_dir {directory}: {reason}. {remedy}")
        self.directory = directory
        self.reason = reason


async def run_standalone(config: StandaloneConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, and until what was under way then is done.

    Raises DataDirRefused, PortInUse, StartRefused (the bookie's directory), or what the metadata
    store raises.
    """
    with claimed(config.data_dir):
        metadata = await EmbeddedStore.open(config.data_dir / "metadata")
        try:
            await _serve(config, metadata, stop)
        finally:
            await metadata.close()


async def _serve(config: StandaloneConfig, metadata: MetadataStore, stop: asyncio.Event) -> None:
    registry = CollectorRegistry()
    async with (
        open_bookie(
            config.data_dir / "bookie",
            bookie=NAME,
            metadata=metadata,
            clock=SystemClock(),
            chance=random.SystemRandom(),
            registry=registry,
        ) as bookie,
        asyncio.TaskGroup() as group,
    ):
        entry = Registration(metadata, registration(bookie, address="in-process:1"))
        lasting = [
            group.create_task(entry.run()),
            group.create_task(_end_with(metadata)),
        ]
        await entry.wait_held()
        await _broker(config, metadata, bookie, group, registry).run(stop)
        for task in lasting:
            task.cancel()


def _broker(
    config: StandaloneConfig,
    metadata: MetadataStore,
    bookie: BookieService,
    group: asyncio.TaskGroup,
    registry: CollectorRegistry,
) -> BrokerProcess:
    def open_peer(member: Member, address: str) -> BookiePeer:
        return LocalBookiePeer(bookie, group=group)

    return BrokerProcess(
        BrokerConfig(
            id=NAME,
            metadata_url="embedded",
            host=config.host,
            advertised_host=config.advertised_host,
            grpc_port=config.grpc_port,
            pulsar_port=config.pulsar_port,
            http_port=config.http_port,
            ensemble_size=1,
            write_quorum=1,
            ack_quorum=1,
            cache_bytes=config.cache_bytes,
        ),
        store=metadata,
        open_peer=open_peer,
        ledger_config=LedgerConfig(ensemble_size=1, write_quorum=1, ack_quorum=1),
        random=random.SystemRandom(),
        registry=registry,
        role=NAME,
    )


async def _end_with(metadata: MetadataStore) -> NoReturn:
    """Raise StoreFailed once the metadata can no longer be written: nothing heals that but a new
    start, while everybody who uses the store would go on trying."""
    while True:
        await asyncio.sleep(PROBE_S)
        await metadata.sync(CLUSTER)


# -- The data directory ------------------------------------------------------------------------


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Make the directory if need be, and hold it while inside. Raises DataDirRefused."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        others = set(os.listdir(directory)) - _IGNORED
        fresh = not (directory / MARK).exists()
        if fresh and others:
            raise _foreign(directory, f"it holds {', '.join(sorted(others)[:3])}")
        mark = os.open(directory / MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        _lock(directory, mark)
        _check_mark(directory, mark, others)
        yield
    finally:
        os.close(mark)


def _lock(directory: Path, mark: int) -> None:
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataDirRefused(
            directory,
            "another process uses it",
            "Stop that server first, or give this one a directory of its own",
        ) from None


def _check_mark(directory: Path, mark: int, others: set[str]) -> None:
    found = os.pread(mark, 64, 0)
    if found == _MARK_LINE:
        return
    if found or others:  # the mark is on disk before anything else is
        raise _foreign(directory, f"its file {MARK!r} does not say {_MARK_LINE.decode().strip()!r}")
    try:
        os.write(mark, _MARK_LINE)
        os.fsync(mark)
        listing = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(listing)
        finally:
            os.close(listing)
    except OSError as error:
        raise _unusable(directory, error) from error


def _foreign(directory: Path, found: str) -> DataDirRefused:
    return DataDirRefused(
        directory,
        f"it is not, or not only, a standalone server's: {found}",
        "Give an empty directory, or one that `magnetar standalone` has made",
    )


def _unusable(directory: Path, error: OSError) -> DataDirRefused:
    remedy = {
        errno.ENOSPC: "Free some space, then start again",
        errno.EDQUOT: "Raise the quota, then start again",
        errno.EROFS: "Give a directory on a file system that can be written",
        errno.EACCES: "Give a directory that this user can write",
        errno.EPERM: "Give a directory that this user can write",
        errno.EEXIST: "Give a directory",
        errno.ENOTDIR: "Give a directory",
    }.get(error.errno or 0, "Give a directory that can be written")
    reason = {errno.EEXIST: "it is not a directory"}.get(error.errno or 0, str(error.strerror))
    return DataDirRefused(directory, reason, remedy)
