"""Faults of a cluster: each fault is drawn by lot, lasts for a while, and ends.

A seed allows only some kinds of fault (a swarm): a run with only two kinds reaches states that a
run with all kinds never reaches.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from world.disk import DISK_BYTES, LIMITS
from world.net import Weather
from world.rot import Damage

from magnetar.bookie.storage.format import DirectoryState
from magnetar.metadata.model import LedgerId
from magnetar.metadata.store import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from random import Random

    from world.cluster import World
    from world.nodes import BookieNode, ClientNode, Process

    Fault = Callable[[], Coroutine[object, object, None]]


STRIKES_MAX = 200


class Nemesis:
    """`run` makes faults until it is cancelled. `World.heal` ends the faults that are left."""

    def __init__(self, world: World, *, pause_s: float) -> None:
        self.world = world
        self.random = world.draw("nemesis")
        self.pause_s = pause_s
        everything = self._everything()
        kinds = self.random.sample(sorted(everything), self.random.randint(2, 8))
        self.faults: list[Fault] = [everything[kind] for kind in kinds]
        world.trace.note("nemesis", "faults", kinds)

    def _everything(self) -> dict[str, Fault]:
        return {
            "kill a bookie": lambda: self._kill(power=False),
            "cut the power": lambda: self._kill(power=True),
            "kill all bookies": self._kill_all,
            "pause a bookie": lambda: self._pause(self._bookie()),
            "pause a client": lambda: self._pause(self._client()),
            "kill a client": self._kill_client,
            "cut one way": lambda: self._cut(both=False),
            "cut both ways": lambda: self._cut(both=True),
            "isolate a client": lambda: self._isolate(self._client(), 0.8),
            "isolate a bookie": lambda: self._isolate(self._bookie(), 1.0),
            "cut from metadata": self._cut_from_metadata,
            "expire a session": self._expire,
            "stale follower": self._fall_behind,
            "lose requests": self._lose_requests,
            "slow network": self._slow_network,
            "break connections": self._break_connections,
            "slow disk": self._slow_disk,
            "failing reads": self._failing_reads,
            "failing write": self._failing_write,
            "failing sync": self._failing_sync,
            "full disk": self._fill_disk,
            "filling disk": self._fill_slowly,
            "wipe a disk": self._wipe,
            "restore an image": self._restore,
            "lose synced writes": self._lose_synced,
            "break a store": self._break_store,
            "damage entries": self._damage,
            "rot": self._rot,
            "rot a table": self._rot_table,
            "jump the clock": self._jump_clock,
        }

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self.random.expovariate(1 / self.pause_s))
                group.create_task(self.random.choice(self.faults)())

    # -- processes ---------------------------------------------------------------------------------

    async def _kill(self, *, power: bool) -> None:
        bookie = self._bookie()
        await self._strike_in_the_midst([bookie])
        bookie.crash(power=power)
        await self._pass(2.0)
        await self._restart(bookie)

    async def _strike_in_the_midst(self, bookies: Sequence[BookieNode]) -> None:
        """Wait a little for a bookie that has a write on the way to its disk."""
        for _ in range(self.random.choice((0, STRIKES_MAX))):
            if any(each.disk.image and each.disk.image.unsynced for each in bookies):
                return
            await asyncio.sleep(0.002)

    async def _kill_all(self) -> None:
        power = self.random.random() < 0.5
        await self._strike_in_the_midst(list(self.world.bookies.values()))
        for bookie in self.world.bookies.values():
            bookie.crash(power=power)
        for bookie in self.world.bookies.values():
            await self._pass(0.5)
            await self._restart(bookie)

    async def _pause(self, process: Process) -> None:
        if process.alive and not process.host.paused:
            process.pause()
            await self._pass(3.0)
            process.resume()

    async def _kill_client(self) -> None:
        client = self._client()
        if client.alive:
            client.crash(power=self.random.random() < 0.5)
            await self._pass(1.0)
            await client.restart()
            self.world.on_client_restart(client)

    async def _restart(self, process: Process) -> None:
        await process.restart()

    async def _jump_clock(self) -> None:
        process = self.random.choice(self.world.processes)
        process.clock.skew_ms = self.random.choice((-3_600_000, 0, 3_600_000))
        self.world.trace.fault(process.name, "clock jumps", process.clock.skew_ms)

    # -- network -----------------------------------------------------------------------------------

    async def _cut(self, *, both: bool) -> None:
        ends = [self._client().host, self._bookie().host]
        self.random.shuffle(ends)
        source, target = ends
        network = self.world.network
        network.cut(source, target)
        if both:
            network.cut(target, source)
        await self._pass(3.0)
        network.heal(source, target)
        if both:
            network.heal(target, source)

    async def _isolate(self, process: Process, share: float) -> None:
        network, mine = self.world.network, process.host
        others = [each.host for each in self.world.processes if each is not process]
        others = [other for other in others if self.random.random() < share]
        for other in others:
            network.cut(mine, other)
            network.cut(other, mine)
        await self._pass(3.0)
        for other in others:
            network.heal(mine, other)
            network.heal(other, mine)

    async def _slow_network(self) -> None:
        weather = self.world.network.weather
        weather.spike = self.random.choice((0.02, 0.2))
        weather.duplicate = self.random.choice((0.0, 0.2))
        await self._pass(4.0)
        weather.spike = weather.duplicate = 0.0

    async def _break_connections(self) -> None:
        weather = self.world.network.weather
        weather.reset = self.random.choice((0.01, 0.1))
        await self._pass(3.0)
        weather.reset = Weather.reset

    # -- metadata ----------------------------------------------------------------------------------

    async def _cut_from_metadata(self) -> None:
        process = self.random.choice(self.world.processes)
        if process.store is None or not process.alive or process.host.paused:
            return
        self.world.meta.cut(process.host, process.store)
        await self._pass(5.0)
        self.world.meta.heal(process.host, process.store)

    async def _expire(self) -> None:
        process = self.random.choice(self.world.processes)
        if process.alive and not process.host.paused:
            assert process.store is not None
            self.world.meta.expire(process.host, process.store)

    async def _fall_behind(self) -> None:
        process = self.random.choice(self.world.processes)
        store = process.store
        if process.alive and store is not None and store.session_state is SessionState.CONNECTED:
            self.world.meta.fall_behind(process.host, store, self.random.expovariate(1 / 2.0))

    async def _lose_requests(self) -> None:
        troubles = self.world.meta.troubles
        troubles.reply_lost = self.random.choice((0.05, 0.3))
        troubles.request_lost = self.random.choice((0.0, 0.1))
        troubles.not_sent = self.random.choice((0.0, 0.1))
        await self._pass(3.0)
        troubles.reply_lost = troubles.request_lost = troubles.not_sent = 0.0

    # -- disks -------------------------------------------------------------------------------------

    async def _slow_disk(self) -> None:
        health = self._bookie().disk.health
        health.sync_s = self.random.choice((0.02, 0.3, 2.0))
        health.read_s = self.random.choice((0.0001, 0.1))
        await self._pass(4.0)
        health.sync_s, health.read_s = type(health).sync_s, type(health).read_s

    async def _failing_reads(self) -> None:
        health = self._bookie().disk.health
        health.read_errors = self.random.choice((0.1, 0.5, 1.0))
        await self._pass(3.0)
        health.read_errors = 0.0

    async def _failing_write(self) -> None:
        await self._fail_once("write_fails")

    async def _failing_sync(self) -> None:
        await self._fail_once("sync_fails")

    async def _fail_once(self, what: str) -> None:
        """The fault ends the process, which is started again on a sound disk."""
        bookie = self._bookie()
        setattr(bookie.disk.health, what, True)
        await self._pass(2.0)
        setattr(bookie.disk.health, what, False)
        await self._restart(bookie)

    async def _fill_disk(self) -> None:
        bookie = self._bookie()
        bookie.disk.health.full = True
        await self._pass(3.0)
        bookie.disk.health.full = False
        await self._restart(bookie)

    async def _fill_slowly(self) -> None:
        """Other programs fill the disk: first until the bookie refuses ordinary adds, then perhaps
        completely."""
        disk = self._bookie().disk
        disk.leave_free(int(0.04 * DISK_BYTES))
        await self._pass(3.0)
        if self.random.random() < 0.5:
            disk.leave_free(self.random.choice((0, 2_000, LIMITS.reserve_of(DISK_BYTES) // 2)))
            await self._pass(2.0)
        disk.health.taken = 0
        await self._restart(self.world.bookies[disk.name])

    async def _wipe(self) -> None:
        bookie = self._bookie()
        if not self.world.may_destroy(bookie):
            return
        self.world.destroyed[bookie.name] = None
        bookie.crash(power=True)
        bookie.disk.wipe()
        self.world.trace.fault(bookie.name, "wiped")
        await self._pass(1.0)
        await self._replace(bookie)

    async def _restore(self) -> None:
        """Back up the disk, and restore it after a later start of the bookie.

        Only such a start tells the cluster that the backup is old.
        """
        bookie = self._bookie()
        bookie.disk.take_image()
        await self._pass(3.0)
        bookie.crash()
        await bookie.restart()
        await self._pass(2.0)
        epoch = self.world.cookie_epoch(bookie)
        image = bookie.disk.last_image
        if image is None or epoch <= image.boot_epoch or not self.world.may_destroy(bookie):
            return
        self.world.destroyed[bookie.name] = None
        bookie.crash(power=True)
        bookie.disk.restore_image()
        self.world.trace.fault(bookie.name, "older image restored")
        await bookie.restart()
        if image.state is DirectoryState.REPLACING:
            # The bookie refuses the start, with advice to the operator.
            await self._pass(1.0)
            await self._replace(bookie)
            return
        await self._pass(3.0)
        # The operator may then give the bookie an empty disk.
        if self.random.random() < 0.3 and self.world.may_destroy(bookie):
            await self._replace(bookie)

    async def _lose_synced(self) -> None:
        """A power cut removes the synced end of the log, because the device lied about a sync."""
        bookie = self._bookie()
        disk = bookie.disk
        if not self.world.may_destroy(bookie) or disk.image is None:
            return
        bookie.crash(power=True)
        lost = self.random.randint(1, 20)
        if disk.lose_tail(lost):
            self.world.destroyed[bookie.name] = None
            self.world.trace.fault(bookie.name, "synced batches lost", lost)
        await self._pass(1.0)
        await self._restart(bookie)

    async def _break_store(self) -> None:
        """A bookie's store does not open any more."""
        bookie = self._bookie()
        if not self.world.may_destroy(bookie) or bookie.disk.image is None:
            return
        self.world.destroyed[bookie.name] = None
        bookie.crash(power=True)
        bookie.disk.opens = False
        self.world.trace.fault(bookie.name, "store broken")
        await self._pass(1.0)
        await self._restart(bookie)

    async def _replace(self, bookie: BookieNode) -> None:
        """The operator gives the bookie an empty disk."""
        bookie.crash()
        await bookie.replace()

    async def _damage(self) -> None:
        """Some entries of a bookie go bad on its disk permanently. The bookie takes no more entries
        of their ledgers, so the cluster has one more bookie than a ledger needs."""
        bookie = self._bookie()
        image = bookie.disk.image
        spare = len(self.world.bookies) > self.world.quorum.ensemble_size
        if not self.world.may_destroy(bookie) or image is None or not spare:
            return
        self.world.destroyed[bookie.name] = None
        for ledger in image.ledgers(-1, ledgers_max=100):
            for entry in image.entry_ids(ledger, 0, entries_max=100):
                if self.random.random() < 0.2:
                    kind = self.random.choice(list(Damage))
                    bookie.disk.damage(ledger, entry, kind)

    async def _rot(self) -> None:
        rot_entries(self.world, self._bookie(), self.random)

    async def _rot_table(self) -> None:
        bookie = self._bookie()
        if bookie.registered and self.world.may_destroy(bookie):
            rot_records(self.world, bookie, self.random)
            await self._pass(3.0)
            bookie.meet_rot()
            await self._pass(2.0)
            await self._restart(bookie)

    # -- targets
    # --------------------------------------------------------------------------------------

    def _bookie(self) -> BookieNode:
        return self.random.choice(list(self.world.bookies.values()))

    def _client(self) -> ClientNode:
        return self.random.choice(list(self.world.clients.values()))

    async def _pass(self, mean_s: float) -> None:
        await asyncio.sleep(self.random.expovariate(1 / mean_s))


def rot_entries(world: World, bookie: BookieNode, random: Random) -> None:
    """Some sealed entries of the bookie go bad, single ones or all of one file, as long as other
    bookies have good copies of each."""
    image = bookie.disk.image
    if image is None:
        return
    share = random.choice((0.1, 0.5, 1.0))
    for ledger in image.ledgers(-1, ledgers_max=100):
        if random.random() < 0.5:
            continue
        for entry in image.entry_ids(ledger, 0, entries_max=100):
            if random.random() < share and world.may_rot(bookie, LedgerId(ledger), entry):
                world.rotten[LedgerId(ledger), entry] = None
                bookie.disk.damage(ledger, entry, random.choice(list(Damage)))


def rot_records(world: World, bookie: BookieNode, random: Random) -> None:
    """Make a table with records of ledgers unreadable. When a compaction meets it, the bookie gives
    the store up, and then serves the readable rest of it as a former incarnation's."""
    image = bookie.disk.image
    ledgers = [] if image is None else image.ledgers(-1, ledgers_max=100)
    if ledgers:
        world.destroyed[bookie.name] = None
        begin = random.randrange(len(ledgers))
        for ledger in ledgers[begin : begin + random.choice((1, 5, 100))]:
            bookie.disk.damage_record(ledger)
