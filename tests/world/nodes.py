"""Processes: a bookie on its disk, and a client with its ledgers. They start, crash and pause.

A crash first cuts the process off: what its tasks still do while they are cancelled reaches neither
network nor disk nor metadata.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from world.boot import boot
from world.disk import LIMITS, SimDisk, SimStorage
from world.loop import SimThread, until
from world.net import Host
from world.peer import PENDING_BYTES_MAX, SimPeer

from magnetar.bookie.admission import Admission, Intake
from magnetar.bookie.collector import Collector, CollectorConfig
from magnetar.bookie.disk import DiskMonitor
from magnetar.bookie.errors import StartRefused, StorageFailed
from magnetar.bookie.first_add_check import FirstAddCheck
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.pool import PeerPool
from magnetar.bookie.reclaimer import Reclaimer
from magnetar.bookie.registration import Registration
from magnetar.bookie.repair.auditor import Auditor
from magnetar.bookie.repair.config import RepairConfig
from magnetar.bookie.repair.replicator import Replicator
from magnetar.bookie.repair.reporting import report_bad_copies
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.bookie.scrub import Scrub, ScrubConfig
from magnetar.bookie.service import BookieService
from magnetar.bookie.storage.commit import GroupCommit
from magnetar.bookie.storage.rot import is_rot
from magnetar.metadata.errors import LeaseTaken
from magnetar.metadata.ids import LedgerIds
from magnetar.metadata.model import BookieAddress, BookieId, BookieRegistration, LedgerId, Member
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from world.cluster import World

    from magnetar.bookie.ledger.config import LedgerConfig
    from magnetar.bookie.storage.format import Identity
    from magnetar.bookie.storage.store import Storage
    from magnetar.metadata.memory import MemoryStore

BOOT_S = 0.05
COLLECT = CollectorConfig(interval_s=3.0, grace_s=3.0)
SCRUB = ScrubConfig(interval_s=6.0)


class VirtualClock:
    """Wall-clock time: the loop's time plus an error of `skew_ms`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.skew_ms = 0
        self._loop = loop

    def now_ms(self) -> int:
        return 1_700_000_000_000 + int(self._loop.time() * 1000) + self.skew_ms


class Process:
    """The common part of bookies and clients."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.host = Host(name, world.loop, world.on_failure)
        self.clock = VirtualClock(world.loop)
        self.store: MemoryStore | None = None
        self.starts = 0

    @property
    def alive(self) -> bool:
        return self.host.alive

    def start(self) -> None:
        assert not self.host.alive
        self.starts += 1
        self.world.trace.note(self.name, "starts")
        self.host.alive = True
        self.store = self.world.meta.open_store(self.host)
        self.host.spawn(self._main())

    def crash(self, *, power: bool = False) -> None:
        if not self.host.alive:
            return
        self.world.trace.fault(self.name, "power cut" if power else "killed")
        self.host.alive = False
        self.world.network.drop(self.host, told=not power)
        assert self.store is not None
        self.world.meta.abandon(self.store)
        self._on_crash(power=power)
        self.host.cancel_tasks()
        if self.host.paused:
            self.world.loop.resume(self.host)

    def crash_by(self, power: bool) -> None:
        """Crash, for a timer, which passes no keyword arguments."""
        self.crash(power=power)

    def crash_soon(self) -> None:
        self.world.loop.later(0.0, self.crash)

    async def restart(self) -> None:
        """Start again after the last task of the earlier process has ended."""
        await self.host.wait_end()
        if not self.host.alive:
            self.start()

    def pause(self) -> None:
        if self.host.alive and not self.host.paused:
            self.world.trace.fault(self.name, "paused")
            self.world.loop.pause(self.host)
            assert self.store is not None
            self.world.meta.freeze(self.host, self.store)

    def resume(self) -> None:
        if self.host.paused:
            self.world.trace.note(self.name, "continues")
            assert self.store is not None
            self.world.meta.thaw(self.host, self.store)
            self.world.loop.resume(self.host)

    def _on_crash(self, *, power: bool) -> None: ...

    async def _main(self) -> None:
        raise NotImplementedError


class BookieNode(Process):
    """A bookie: the real service, group commit, admission and registration, over `disk`."""

    def __init__(self, world: World, name: str, zone: str = "") -> None:
        super().__init__(world, name)
        self.zone = zone
        self.random: Random = world.draw(name)
        self.disk = SimDisk(name, world.draw(name + " disk"), world.trace)
        # Each of the next five is None while the bookie does not serve.
        self.service: BookieService | None = None
        self.commit: GroupCommit | None = None
        self.admission: Admission | None = None
        self.registration: Registration | None = None
        self.reclaimer: Reclaimer | None = None
        self.refused: StartRefused | None = None  # why the bookie refuses to start on its disk
        self.may_format_anew = False  # the operator's --new-incarnation
        self.retired = False  # decommissioned
        self.listed_by: int | None = None  # the session of its registration
        self._threads: list[SimThread] = []

    @property
    def member(self) -> Member:
        assert self.disk.identity is not None
        return Member(BookieId(self.name), self.disk.identity.incarnation)

    @property
    def registered(self) -> bool:
        return self.service is not None and self.registration is not None and self.registration.held

    @property
    def gives_no_space_back(self) -> bool:
        """True when the bookie frees no space until a scrub finds all entries sound."""
        return self.reclaimer is not None and self.reclaimer.suspended

    async def replace(self) -> None:
        """The operator gives the bookie an empty disk and permits a new incarnation."""
        await self.host.wait_end()
        if not self.alive:
            self.disk.wipe()
            self.refused = None
            self.may_format_anew = True
            self.start()

    def _on_crash(self, *, power: bool) -> None:
        self.service = self.commit = self.admission = self.registration = self.reclaimer = None
        for thread in self._threads:
            thread.kill()
        self.disk.crash(power=power)
        if self.world.healed and self.refused is None and not self.retired:
            self.world.restart_soon(self)

    async def _main(self) -> None:
        try:
            await asyncio.sleep(self.random.expovariate(1 / BOOT_S))
            identity = await self._boot()
            self.world.known[self.member] = None
            oracle, member = self.world.oracle, self.member
            self.disk.on_durable = lambda *what: oracle.on_durable(member, *what)
            self.disk.on_delete = lambda ledger, good: oracle.on_delete(
                member, ledger, for_good=good
            )
            self.disk.on_reopened = lambda image: oracle.on_reopened(
                member, lambda ledger: image.ledger_record(ledger) is not None
            )
            self.disk.on_met = lambda: oracle.reclaims_once(member)
            await self._serve(identity)
        except StartRefused as refused:
            self.refused = refused
            self.world.trace.note(self.name, "does not start", type(refused).__name__)
            self.crash_soon()
        except StorageFailed:
            self.crash_soon()
        except BaseExceptionGroup as group:
            rest = group.split((StorageFailed, LeaseTaken))[1]
            if rest is not None:
                raise rest from None
            self.crash_soon()

    async def _boot(self) -> Identity:
        assert self.store is not None
        return await boot(self, self.store, self.random)

    async def _serve(self, identity: Identity) -> None:
        loop, health, random = self.world.loop, self.disk.health, self.random
        self.disk.reserve.release_if_short()
        storage = self.disk.open()
        self.world.trace.note(self.name, "serves", identity.incarnation[:4], identity.boot_epoch)
        sync_thread = SimThread(loop, lambda: random.expovariate(1 / health.sync_s))
        read_thread = SimThread(loop, lambda: random.expovariate(1 / health.read_s))
        self._threads = [sync_thread, read_thread]
        commit = GroupCommit(
            storage,
            note_durable=self._note_durable,
            thread=sync_thread,
            die=self.end_by,
            pending_bytes_max=PENDING_BYTES_MAX,
        )
        assert self.store is not None
        formers = self.disk.open_formers()
        admission = Admission(
            storage, write=commit.write, delete=commit.delete_ledger, clock=self.clock
        )
        service = BookieService(
            identity=identity,
            data_dir=None,
            storage=storage,
            commit=commit,
            admission=admission,
            read_thread=read_thread,
            check_first_add=FirstAddCheck(
                self.store, Member(BookieId(identity.bookie), identity.incarnation)
            ),
            formers=formers,
        )
        monitor = DiskMonitor(
            usage=self.disk.usage,
            reserve=self.disk.reserve,
            thread=read_thread,
            set_intake=lambda intake: self._set_intake(service, admission, intake),
            limits=LIMITS,
        )
        await monitor.check()
        registration = Registration(self.store, self._told(identity, service.read_only))
        service.watch_read_only(registration.set_read_only)
        self.registration = registration
        async with asyncio.TaskGroup() as group:
            group.create_task(service.run())
            self.service, self.commit, self.admission = service, commit, admission
            group.create_task(registration.run())
            group.create_task(monitor.run())
            reclaimer = self._reclaimer(storage)
            group.create_task(
                self._collector(identity, storage, commit, admission, formers, reclaimer).run()
            )
            if self.world.scrubs:
                group.create_task(self._scrub(storage, reclaimer).run())

    def _set_intake(self, service: BookieService, admission: Admission, intake: Intake) -> None:
        assert self.disk.image is not None
        if intake is not admission.intake:
            if intake is Intake.ALL:
                self.world.trace.note(self.name, "takes all adds again")
            else:
                self.world.trace.fault(self.name, "disk nearly full", intake.value)
        service.set_intake(intake)
        every = intake is Intake.ALL
        self.world.oracle.on_intake(self.member, None if every else self.disk.image.entries())

    def _collector(
        self,
        identity: Identity,
        storage: SimStorage,
        commit: GroupCommit,
        admission: Admission,
        formers: dict[str, Storage | None],
        reclaimer: Reclaimer,
    ) -> Collector:
        assert self.store is not None

        def remove_former(incarnation: str) -> None:
            self.world.trace.note(self.name, "removes former", incarnation[:4])
            formers.pop(incarnation, None)
            self.disk.formers.pop(incarnation, None)

        return Collector(
            identity=identity,
            storage=storage,
            commit=commit,
            admission=admission,
            metadata=self.store,
            under_replication=UnderReplicationRecords(self.store, self.clock),
            reclaimer=reclaimer,
            clock=self.clock,
            chance=self.random,
            read_thread=self._threads[1],
            formers=formers,
            remove_former=remove_former,
            config=COLLECT,
        )

    def _reclaimer(self, storage: SimStorage) -> Reclaimer:
        disk_thread = SimThread(self.world.loop, lambda: self.random.expovariate(1 / 0.01))
        self._threads.append(disk_thread)
        marker = cast("Path", self.disk.reclaiming)
        self.reclaimer = reclaimer = Reclaimer(storage, thread=disk_thread, marker=marker)
        if reclaimer.suspended:
            self.world.trace.note(self.name, "gives no space back")
        return reclaimer

    def _scrub(self, storage: SimStorage, reclaimer: Reclaimer) -> Scrub:
        assert self.store is not None
        marks, member = UnderReplicationRecords(self.store, self.clock), self.member

        async def report(ledger: int, first: int, last: int) -> None:
            self.world.trace.fault(self.name, "damage found by a scrub", ledger, first, last)
            await marks.add_bad(LedgerId(ledger), member, first, last)

        def on_sound() -> None:
            if reclaimer.suspended:
                self.world.trace.note(self.name, "is sound again")
            reclaimer.resume()

        return Scrub(
            storage,
            report=report,
            on_sound=on_sound,
            on_rot=self.end_by,
            chance=self.world.draw(f"{self.name} scrub {self.starts}"),
            read_thread=self._threads[1],
            config=SCRUB,
        )

    def meet_rot(self) -> None:
        """RocksDB compacts its tables. If one is rotten, the store takes no more writes."""
        image = self.disk.image
        if image is not None and image.rot.table:
            image.rot.meet_table()

    def end_by(self, error: StorageFailed) -> None:
        """The store has failed: the process ends, and notes the rotten table for its next start."""
        if is_rot(error):
            assert self.disk.identity is not None
            self.disk.rotten = self.disk.identity.incarnation
            self.world.trace.fault(self.name, "table found rotten")
        self.crash()

    def _note_durable(self, sequence: int) -> None:
        self.disk.watermark = sequence

    def _told(self, identity: Identity, read_only: bool) -> BookieRegistration:
        return BookieRegistration(
            bookie=BookieId(self.name),
            incarnation=identity.incarnation,
            boot_epoch=identity.boot_epoch,
            address=BookieAddress(f"{self.name}:3181", f"{self.name}:3182"),
            http_address="",
            zone=self.zone,
            read_only=read_only,
        )


class ClientNode(Process):
    """A process with ledgers, as a broker is. Scenarios give it tasks: `spawn` on `host`."""

    def __init__(self, world: World, name: str, config: LedgerConfig) -> None:
        super().__init__(world, name)
        self.config = config
        self.random: Random = world.draw(name)
        self.ledgers: Ledgers | None = None  # None: the process does not run

    async def _main(self) -> None:
        ledgers = self._make_ledgers()
        assert self.store is not None
        marks = UnderReplicationRecords(self.store, self.clock)
        async with asyncio.TaskGroup() as group:
            group.create_task(ledgers.run())
            group.create_task(report_bad_copies(ledgers.bad_copies, marks))

    def _make_ledgers(self) -> Ledgers:
        assert self.store is not None
        store, random = self.store, self.random
        directory = BookieRegistry(store)
        pool = PeerPool(
            directory,
            self._open_peer,
            client_name=f"{self.name}-{self.starts}",
            random=random,
            connect_timeout_s=self.config.connect_timeout_s,
        )
        self.ledgers = Ledgers(
            store, directory, pool, LedgerIds(store), self.config, self.clock, random
        )
        return self.ledgers

    def _on_crash(self, *, power: bool) -> None:
        self.ledgers = None

    def _open_peer(self, member: Member, address: BookieAddress) -> SimPeer:
        world = self.world
        target = world.bookies[address.data.partition(":")[0]]
        return SimPeer(world.network, world.oracle, self.host, target, member)

    async def wait_running(self) -> Ledgers:
        await until(lambda: self.ledgers is not None, every_s=0.01)
        assert self.ledgers is not None
        return self.ledgers


class RepairNode(ClientNode):
    """A process that repairs: the real auditor and replicator, as `magnetar autorecovery` runs
    them."""

    repair = RepairConfig(
        lost_bookie_delay_s=2.0,
        audit_period_s=5.0,
        check_period_s=10.0,
        open_grace_s=5.0,
    )

    def __init__(
        self, world: World, name: str, config: LedgerConfig, *, audits: bool = True
    ) -> None:
        super().__init__(world, name, config)
        self.audits = audits

    async def _main(self) -> None:
        ledgers = self._make_ledgers()
        assert self.store is not None
        store, services = self.store, ledgers.services
        name = f"{self.name}-{self.starts}"
        marks = UnderReplicationRecords(store, self.clock)
        auditor = Auditor(store, marks, services, self.repair, self.clock, name=name)
        replicator = Replicator(
            store,
            marks,
            services,
            self.repair,
            self.clock,
            self.random,
            name=name,
            recover=ledgers.recover,
        )
        backoff = Backoff(0.5, 5.0, self.random)
        async with asyncio.TaskGroup() as group:
            group.create_task(supervise("ledgers", ledgers.run, backoff=backoff))
            if self.audits:
                group.create_task(supervise("auditor", auditor.run, backoff=backoff))
            group.create_task(supervise("replicator", replicator.run, backoff=backoff))
            group.create_task(report_bad_copies(ledgers.bad_copies, marks))
