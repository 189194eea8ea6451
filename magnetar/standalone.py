"""A whole server in one process: a broker, a bookie and the metadata in a directory. No Java.

The parts are the parts of a cluster, with three differences: the metadata store is embedded, the
broker calls the bookie in the same process, and an entry has one copy (E/Qw/Qa 1/1/1). A program
that works with standalone works with a cluster. Standalone does not survive the loss of its
machine.

    <data_dir>/standalone   the claim file (magnetar/claim.py)
    <data_dir>/metadata/    metadata/disk.py
    <data_dir>/bookie/      bookie/storage/FORMAT.md
"""

from __future__ import annotations

import asyncio
import random
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

from prometheus_client import CollectorRegistry
from pydantic import Field

from magnetar.bookie.bookie import open_bookie, registration
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.local import LocalBookiePeer
from magnetar.bookie.registration import Registration
from magnetar.broker.config import BrokerConfig
from magnetar.broker.main import BrokerProcess
from magnetar.broker.settings import BrokerSettings
from magnetar.claim import claimed
from magnetar.metadata.embedded import EmbeddedStore
from magnetar.metadata.model import BookieAddress
from magnetar.metadata.paths import CLUSTER
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.supervise import is_bug

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.bookie.ledger.peer import BookiePeer
    from magnetar.bookie.service import BookieService
    from magnetar.metadata.model import BrokerRegistration, Member
    from magnetar.metadata.store import MetadataStore

IN_PROCESS: Final = BookieAddress(data="in-process:1", grpc="in-process:1")
NAME: Final = "standalone"  # the name of the broker, the bookie and the claim file

# The pause between two probes of the metadata store. After its failure, the next probe ends the
# process. A probe costs one hop to a thread.
PROBE_S: Final = 1.0

# Parts of the file names in a traceback. All files of the bookie's code have BOOKIE in their names.
# Those that read and write ledgers for the broker have LEDGER, too.
BOOKIE: Final = "/magnetar/bookie/"
LEDGER: Final = "/magnetar/bookie/ledger/"


class StandaloneConfig(BrokerSettings):
    """The settings of a standalone server, read from a TOML file, MAGNETAR_STANDALONE_<KEY> and
    flags. Port 0 means any free port."""

    role: ClassVar[str] = "standalone"

    data_dir: Path = Field(description="directory of all data; created if it is missing")
    cache_bytes: int = Field(
        default=64 << 20, ge=1 << 20, description="entries kept in memory for tailing consumers"
    )

    def survives(self, error: BaseException) -> bool:
        """Return False for a bug in the bookie's code outside of LEDGER, also inside groups and as
        the cause of another bug: the process ends before the bug damages data. After any other bug
        the process continues, like a broker.

        NOTE: the broker calls the bookie's reads and fences directly. A bug there that reaches the
        guard of a topic or of a connection is not judged here: that topic or connection fails.
        """
        return not any(
            BOOKIE in frame.filename and LEDGER not in frame.filename
            for bug in _bugs_of(error)
            for frame in traceback.extract_tb(bug.__traceback__)
        )


def _bugs_of(error: BaseException) -> list[BaseException]:
    """Return the error, its causes and the members of groups, as far as they are bugs."""
    found: dict[int, BaseException] = {}  # by id: exceptions may be equal
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in found:
            continue
        found[id(each)] = each
        left += (each.__cause__, each.__context__)
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
    return [each for each in found.values() if is_bug(each)]


async def run_standalone(
    config: StandaloneConfig,
    stop: asyncio.Event,
    on_ready: Callable[[BrokerRegistration], None] | None = None,
) -> None:
    """Serve until `stop` is set, then finish the requests that are under way. `on_ready` is called
    with the server's addresses when the server is ready.

    Raises DirectoryRefused, StartRefused (the bookie's directory), or an error of the metadata
    store. Raises PortInUse and AddressUnusable in an ExceptionGroup.
    """
    with claimed(config.data_dir, NAME):
        metadata = await EmbeddedStore.open(config.data_dir / "metadata")
        try:
            await _serve(config, metadata, stop, on_ready)
        finally:
            await metadata.close()


async def _serve(
    config: StandaloneConfig,
    metadata: MetadataStore,
    stop: asyncio.Event,
    on_ready: Callable[[BrokerRegistration], None] | None,
) -> None:
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
        entry = Registration(metadata, registration(bookie, address=IN_PROCESS))
        bookie.watch_read_only(entry.set_read_only)
        lasting = [
            group.create_task(entry.run()),
            group.create_task(_end_with(metadata)),
        ]
        await entry.wait_held()
        broker = _broker(config, metadata, bookie, group, registry)
        if on_ready is not None:
            lasting.append(group.create_task(_call_when_ready(broker, on_ready)))
        await broker.run(stop)
        for task in lasting:
            task.cancel()


def _broker(
    config: StandaloneConfig,
    metadata: MetadataStore,
    bookie: BookieService,
    group: asyncio.TaskGroup,
    registry: CollectorRegistry,
) -> BrokerProcess:
    def open_peer(member: Member, _: BookieAddress) -> BookiePeer:
        return LocalBookiePeer(member, bookie, group=group)

    return BrokerProcess(
        BrokerConfig(
            id=NAME,
            metadata_url="embedded",
            cluster_name=NAME,
            ensemble_size=1,
            write_quorum=1,
            ack_quorum=1,
            **config.shared,
        ),
        store=metadata,
        open_peer=open_peer,
        ledger_config=LedgerConfig(
            ensemble_size=1,
            write_quorum=1,
            ack_quorum=1,
            retained_bytes_max=config.max_message_publish_buffer_size_in_mb << 20,
        ),
        random=random.SystemRandom(),
        registry=registry,
        role=NAME,
        bookies_have_ports=False,
    )


async def _call_when_ready(
    broker: BrokerProcess, on_ready: Callable[[BrokerRegistration], None]
) -> None:
    await broker.ready.wait()
    on_ready(broker.registration)


async def _end_with(metadata: MetadataStore) -> NoReturn:
    """Raise StoreFailed when the metadata can no longer be written. Only a restart of the process
    repairs the store. Without this error, the users of the store would retry without end."""
    while True:
        await asyncio.sleep(PROBE_S)
        await metadata.sync(CLUSTER)
