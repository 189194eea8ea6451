"""A bookie's background work: watch the disk, delete unneeded data, scrub the entries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from magnetar.bookie.collector import Collector, CollectorConfig
from magnetar.bookie.disk import DiskLimits, DiskMonitor, Reserve, usage_of
from magnetar.bookie.reclaimer import Reclaimer
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.bookie.scrub import Scrub, ScrubConfig
from magnetar.bookie.storage.layout import RECLAIMING
from magnetar.metadata.model import BookieId, LedgerId, Member
from magnetar.runtime.metrics import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from prometheus_client import CollectorRegistry

    from magnetar.bookie.admission import Admission
    from magnetar.bookie.errors import StorageFailed
    from magnetar.bookie.service import BookieService
    from magnetar.bookie.storage.commit import GroupCommit
    from magnetar.bookie.storage.directory import DataDirectory
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.clock import Clock
    from magnetar.runtime.thread import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepConfig:
    disk: DiskLimits = field(default_factory=DiskLimits)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)


class Upkeep:
    def __init__(
        self,
        *,
        directory: DataDirectory,
        service: BookieService,
        admission: Admission,
        commit: GroupCommit,
        metadata: MetadataStore,
        clock: Clock,
        chance: Random,
        read_thread: Worker,
        compaction_thread: Worker,
        config: UpkeepConfig,
        die: Callable[[StorageFailed], None],
    ) -> None:
        """`die` ends the process."""
        identity = directory.identity
        self._member = Member(BookieId(identity.bookie), identity.incarnation)
        self._under_replication = UnderReplicationRecords(metadata, clock)
        self.disk = DiskMonitor(
            usage=partial(usage_of, directory.path),
            reserve=Reserve(directory.path),
            thread=read_thread,
            set_intake=service.set_intake,
            limits=config.disk,
        )
        self.reclaimer = Reclaimer(
            directory.storage, thread=compaction_thread, marker=directory.path / RECLAIMING
        )
        self.collector = Collector(
            identity=identity,
            storage=directory.storage,
            commit=commit,
            admission=admission,
            metadata=metadata,
            under_replication=self._under_replication,
            reclaimer=self.reclaimer,
            clock=clock,
            chance=chance,
            read_thread=read_thread,
            formers=directory.formers,
            remove_former=directory.remove_former,
            config=config.collector,
        )
        self.scrub = Scrub(
            directory.storage,
            report=self._record_bad,
            on_sound=self.reclaimer.resume,
            on_rot=die,
            chance=chance,
            read_thread=read_thread,
            config=config.scrub,
        )

    async def run(self) -> None:
        """Run until cancelled. Raises an exception group with StorageFailed when a write failed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.disk.run())
            group.create_task(self.collector.run())
            group.create_task(self.scrub.run())

    async def _record_bad(self, ledger: int, first: int, last: int) -> None:
        await self._under_replication.add_bad(LedgerId(ledger), self._member, first, last)

    def export(self, registry: CollectorRegistry) -> None:
        collected, scrubbed = self.collector.counts, self.scrub.counts
        for name, text, read in (
            ("collections", "Complete rounds of the collector.", lambda: collected.rounds),
            ("collections_aborted", "Aborted rounds of the collector.", lambda: collected.aborted),
            (
                "candidates",
                "Stored ledgers that a listing of the metadata lacked.",
                lambda: collected.candidates,
            ),
            ("ledgers_deleted", "Ledgers deleted.", lambda: collected.ledgers_deleted),
            ("copies_deleted", "Left-over copies deleted.", lambda: collected.copies_deleted),
            ("compaction_seconds", "Time spent compacting.", lambda: self.reclaimer.busy_s),
            ("scrub_entries", "Entries verified.", lambda: scrubbed.entries),
            ("scrub_bytes", "Bytes verified.", lambda: scrubbed.bytes),
            ("scrub_bad", "Damaged entries found.", lambda: scrubbed.bad),
            ("scrubs", "Complete rounds of the scrub.", lambda: scrubbed.rounds),
        ):
            counter(registry, f"magnetar_bookie_{name}_total", text, read)
        gauge(
            registry,
            "magnetar_bookie_ledgers_unreclaimed",
            "Deleted ledgers whose space is not reclaimed yet.",
            lambda: self.reclaimer.dead,
        )
        gauge(
            registry,
            "magnetar_bookie_records_never_handed_out",
            "Records in this bookie's store of ledgers whose ids were never handed out, in the last"
            " round of the collector.",
            lambda: collected.never_handed_out,
        )
        gauge(
            registry,
            "magnetar_bookie_disk_used_ratio",
            "Share of the disk in use.",
            lambda: 1 - self.disk.usage.free / (self.disk.usage.total or 1),
        )
        gauge(
            registry,
            "magnetar_bookie_collected_monotonic_seconds",
            "End of the last complete round of the collector; 0: none yet.",
            lambda: collected.finished_s,
        )
