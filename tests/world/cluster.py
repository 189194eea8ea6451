"""A whole cluster in one process: bookies, clients, a metadata store, and the oracle over it."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING

from world.boot import CLUSTER
from world.later import LaterVersion
from world.logs import LIST
from world.loop import until
from world.meta import Ensemble
from world.net import Host, Network, Unreachable
from world.nodes import BookieNode, ClientNode, Process, RepairNode, VirtualClock
from world.oracle import Oracle, Violation
from world.trace import Trace

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.errors import EntryUnreadable, LedgerNotFound, RecoveryIncomplete
from magnetar.bookie.ledger.quorum import Quorum
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_cookie, encode_cluster
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import BookieId, EntryId, LedgerId, LedgerState
from magnetar.runtime.supervise import is_operating_error

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from world.loop import SimLoop

    from magnetar.metadata.model import LedgerMetadata, Member
    from magnetar.metadata.store import Versioned

SETTLE_S = 30.0  # the time until all bookies are registered again, after all faults are healed
RECOVER_S = 90.0  # the time in which every ledger can be closed and read
REPAIR_S = 300.0  # the time in which replicators, if any, restore all copies
PAUSE_S = 0.5
LEVELS = 6  # the number of slashes in a ledger's path


def quick_config(quorum: Quorum) -> LedgerConfig:
    """Short timeouts. Virtual time costs nothing, but frequent events in a long wait cost CPU."""
    return LedgerConfig(
        ensemble_size=quorum.ensemble_size,
        write_quorum=quorum.write_quorum,
        ack_quorum=quorum.ack_quorum,
        add_timeout_s=1.0,
        quorum_timeout_s=6.0,
        read_timeout_s=1.0,
        speculative_read_s=0.2,
        connect_timeout_s=0.5,
        metadata_timeout_s=3.0,
    )


class World:
    """Made on a running `SimLoop`. Each part has its own random source, so a change in one part
    does not change the random choices of the others."""

    def __init__(self, loop: SimLoop, seed: int, quorum: Quorum, *, tell: bool = False) -> None:
        self.loop = loop
        self.seed = seed
        self.quorum = quorum
        self.random = self.draw("world")
        self.trace = Trace(loop.time, tell=tell)
        self.oracle = Oracle(self.trace)
        self.network = Network(loop, self.draw("network"), self.trace)
        self.meta = Ensemble(loop, self.draw("metadata"), self.trace, self._on_path)
        self.meta.tree.tree.create(paths.CLUSTER, encode_cluster(CLUSTER), session=0)
        self.bookies: dict[str, BookieNode] = {}
        self.clients: dict[str, ClientNode] = {}
        self.known: dict[Member, None] = {}  # every incarnation that was ever formatted
        self.destroyed: dict[str, None] = {}  # bookies that lost copies permanently
        self.later = LaterVersion(self)
        self.config = quick_config(quorum)
        self.on_client_restart: Callable[[ClientNode], None] = lambda client: None
        self.scrubs = True  # bookies that start from now on scrub
        self.rotten: dict[tuple[LedgerId, int], None] = {}  # entries that have a bad copy
        self.healed = False  # True: a process starts again when an earlier fault ends it
        self._restarts: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[None] = loop.create_future()
        self.oracle.when_broken = self._end_with

    def draw(self, name: str) -> Random:
        return Random(f"{self.seed} {name}")

    # -- building ----------------------------------------------------------------------------------

    def add_bookie(self, *, zone: str = "") -> BookieNode:
        name = f"b{len(self.bookies)}"
        bookie = self.bookies[name] = BookieNode(self, name, zone)
        bookie.start()
        return bookie

    def add_client(self, name: str = "") -> ClientNode:
        name = name or f"c{len(self.clients)}"
        client = self.clients[name] = ClientNode(self, name, self.config)
        client.start()
        return client

    def add_repairer(self, *, audits: bool = True) -> RepairNode:
        name = f"r{sum(isinstance(each, RepairNode) for each in self.clients.values())}"
        repairer = RepairNode(self, name, self.config, audits=audits)
        self.clients[name] = repairer
        repairer.start()
        return repairer

    @property
    def staying(self) -> list[BookieNode]:
        """Bookies that were not decommissioned."""
        return [each for each in self.bookies.values() if not each.retired]

    def retire(self, bookie: BookieNode, member: Member) -> None:
        """Note that the bookie was decommissioned: no record may name it, and it stays down."""
        bookie.retired = True
        self.known.pop(member)

    @property
    def processes(self) -> list[Process]:
        return [*self.bookies.values(), *self.clients.values()]

    async def wait_registered(self, bookies: int | None = None) -> None:
        needed = len(self.staying) if bookies is None else bookies
        await until(lambda: sum(each.registered for each in self.staying) >= needed)

    def may_destroy(self, bookie: BookieNode) -> bool:
        """Return whether this bookie may lose copies permanently, after all losses so far."""
        enough = bookie.name in self.destroyed or len(self.destroyed) < self.quorum.ack_quorum - 1
        return enough and all(self._held_beside(bookie, *each) for each in self.rotten)

    def may_rot(self, bookie: BookieNode, ledger: LedgerId, entry: int) -> bool:
        """Return whether this copy may go bad.

        The copy must belong to a sealed segment, and another copy must be good.
        """
        life = self.oracle.life(ledger)
        if life.deleted or not life.versions:
            return False
        stored = life.versions[-1]
        sealed = stored.last_entry is not None or entry < stored.last_segment.first_entry
        return sealed and self._held_beside(bookie, ledger, entry)

    def _held_beside(self, bookie: BookieNode, ledger: LedgerId, entry: int) -> bool:
        """Return whether another bookie that metadata names has a good copy."""
        life = self.oracle.life(ledger)
        if life.deleted:
            return True
        stored = life.versions[-1]
        if stored.last_entry is not None and entry > stored.last_entry:
            return True
        members = stored.segment_of(EntryId(entry)).members
        quorum = Quorum(stored.ensemble_size, stored.write_quorum, stored.ack_quorum)
        for seat in quorum.write_order(entry):
            other = self.bookies[members[seat].bookie]
            if other is bookie or other.disk.identity is None or other.member != members[seat]:
                continue
            if other.disk.whole and other.disk.sound(ledger, entry):
                return True
        return False

    # -- running -----------------------------------------------------------------------------------

    async def run(self, story: Coroutine[object, object, None], *, deadline_s: float) -> None:
        """Run until the story ends. Raises the first violation or failure."""
        telling = asyncio.get_running_loop().create_task(story)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait({telling, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise self.oracle.broken(
                "I18", f"the scenario takes more than {deadline_s} s"
            ) from None
        finally:
            if not telling.done():
                telling.cancel()
                await asyncio.wait({telling})
        if self._failure.done():
            self._failure.result()
        telling.result()
        for stray in self.loop.stray:
            error = stray.get("exception")
            why = f"no code handled this failure: {stray['message']}: {error!r}"
            raise self.oracle.broken("bug", why) from error

    def on_failure(self, host: Host, error: BaseException) -> None:
        """A task of a process has failed."""
        if isinstance(error, Unreachable) or (not host.alive and is_operating_error(error)):
            self.trace.tell(host.name, "dying:", _drawn(error))
            return  # the caller of the task gets the error, or the host is ending
        found = _first_violation(error)
        if self.oracle.first is None and found is None:
            found = self.oracle.broken("bug", f"{host.name}: {_drawn(error)}")
            found.__cause__ = error
        self._end_with(self.oracle.first or found or error)

    def _end_with(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _on_path(self, path: str) -> None:
        stored = self.meta.tree.tree.get(path)
        value = None if stored is None else stored.value
        if self.later.on_path(path, value):
            return
        if path.startswith(paths.LEDGERS + "/") and path.count("/") == 6:
            self.oracle.on_metadata(path, value, self.known)
        elif path == LIST and value:
            self.oracle.logs.on_list(path, json.loads(value))
        elif path.startswith(paths.TOPICS + "/"):
            self.oracle.logs.lives.now_ms = VirtualClock(self.loop).now_ms()
            if value:
                self.oracle.logs.on_record(path, value)
            else:
                self.oracle.logs.lives.on_record(path, None)
        elif path.startswith(paths.BOOKIES_AVAILABLE + "/"):
            self._on_listed(path, stored)

    def _on_listed(self, path: str, stored: Versioned | None) -> None:
        """T21: a bookie that serves leaves the list only when its session ends."""
        bookie = self.bookies[path.rpartition("/")[2]]
        session = bookie.listed_by
        bookie.listed_by = None if stored is None else stored.ephemeral_session
        if stored is None and bookie.alive and session in self.meta.tree.sessions:
            assert bookie.store is not None
            ours = bookie.store.session_id == session
            self.oracle.hold(not ours, "T21", lambda: f"{bookie.name} serves and is not listed")

    # -- the end, without faults
    # -----------------------------------------------------------------------------

    async def heal(self) -> None:
        """End all faults, and start each process that is down."""
        self.trace.note("world", "healed")
        self.healed = True
        self.network.heal_all()
        self.network.weather = type(self.network.weather)()
        self.meta.troubles = type(self.meta.troubles)()
        for process in self.processes:
            process.resume()
            self.meta.heal(process.host, process.store)
            if process.store is not None and process.alive:
                self.meta.recover(process.store)
        for bookie in self.bookies.values():
            vars(bookie.disk.health).update(vars(type(bookie.disk.health)()))
        try:
            async with asyncio.timeout(SETTLE_S):
                for bookie in self.staying:
                    await self._bring_back(bookie)
                await self.wait_registered()
        except TimeoutError:
            missing = [bookie.name for bookie in self.staying if not bookie.registered]
            raise self.oracle.broken(
                "I18", f"{missing} not registered {SETTLE_S:g} s after the healing"
            ) from None

    def restart_soon(self, process: Process) -> None:
        self._restarts.append(self.loop.create_task(process.restart()))

    async def _bring_back(self, bookie: BookieNode) -> None:
        await bookie.restart()
        await until(lambda: bookie.registered or bookie.refused is not None)
        if bookie.refused is not None:
            self.oracle.hold(
                bookie.name in self.destroyed,
                "start",
                lambda: f"{bookie.name} does not start on its own disk: {bookie.refused}",
            )
            bookie.crash()
            await bookie.replace()

    def cookie_epoch(self, bookie: BookieNode) -> int:
        """The number of starts of the bookie that the cluster knows; 0: none."""
        stored = self.meta.tree.tree.get(paths.bookie_cookie(BookieId(bookie.name)))
        return 0 if stored is None else decode_bookie_cookie(stored.value).boot_epoch

    async def judge(self) -> None:
        """Close and read every ledger, so that the oracle can check them."""
        judge = self.add_client("judge")
        await judge.wait_running()
        for ledger, life in sorted(self.oracle.lives.items()):
            if not life.deleted and life.versions:
                await self._judge_ledger(judge, ledger)
        judge.crash()

    async def _judge_ledger(self, judge: ClientNode, ledger: LedgerId) -> None:
        why = ""
        try:
            async with asyncio.timeout(RECOVER_S):
                while True:
                    try:
                        closed = await self._close_and_read(judge, ledger)
                    except (RecoveryIncomplete, EntryUnreadable, MetadataError) as error:
                        why = str(error)
                        await asyncio.sleep(PAUSE_S)
                    except LedgerNotFound:
                        self.oracle.hold(
                            self.oracle.life(ledger).deleted, "I1", lambda: f"{ledger} is gone"
                        )
                        return
                    else:
                        break
        except TimeoutError:
            raise self.oracle.broken("I18", f"ledger {ledger} after the healing: {why}") from None
        self.oracle.on_closed_read(*closed)

    async def _close_and_read(
        self, judge: ClientNode, ledger: LedgerId
    ) -> tuple[LedgerMetadata, list[bytes]]:
        assert judge.ledgers is not None
        closed = await judge.ledgers.recover(ledger)
        assert closed.last_entry is not None
        reader, found = judge.ledgers.reader(closed), list[bytes]()
        while len(found) <= closed.last_entry:
            entries = await reader.read(len(found), closed.last_entry, bytes_max=1 << 16)
            found += [bytes(entry.payload) for entry in entries]
        return closed, found

    # -- what repair has to reach ----------------------------------------------------------------

    async def wait_repaired(self) -> None:
        """I16: when all bookies run again, every closed ledger has all its copies on present
        incarnations, and no under-replication record is left."""
        why = "no ledger was checked"

        def done() -> bool:
            nonlocal why
            why = self._unrepaired()
            return not why

        try:
            async with asyncio.timeout(REPAIR_S):
                await until(done, every_s=1.0)
        except TimeoutError:
            raise self.oracle.broken("I16", f"after {REPAIR_S:g} s: {why}") from None

    def _unrepaired(self) -> str:
        """The repair that is still missing; "": none."""
        for ledger, life in self.oracle.lives.items():
            if life.deleted or not life.versions:
                continue
            closed = life.versions[-1]
            for part in closed.segments:
                for member in part.members:
                    if self.bookies[member.bookie].member != member:
                        return f"ledger {ledger} names {member}, which no longer exists"
            if closed.state is LedgerState.OPEN and not life.payloads:
                continue  # the creation arrived after its creator and the oracle had finished
            if closed.state is not LedgerState.CLOSED:
                return f"ledger {ledger} is {closed.state.name}"
            missing = self._missing_copy(closed)
            if missing:
                return missing
        # Damage to copies that no ledger needs (beyond the end, or of a former stripe) is not
        # repaired, and keeps the bookie from freeing space.
        suspended = [
            each.name for each in self.staying if each.gives_no_space_back and not each.disk.damaged
        ]
        if suspended:
            return f"{suspended} free no space"
        marks = self._marks()
        return f"under-replication records are left: {marks}" if marks else ""

    def _missing_copy(self, closed: LedgerMetadata) -> str:
        quorum = Quorum(closed.ensemble_size, closed.write_quorum, closed.ack_quorum)
        assert closed.last_entry is not None
        for entry in range(closed.last_entry + 1):
            members = closed.segment_of(EntryId(entry)).members
            for seat in quorum.write_order(entry):
                disk = self.bookies[members[seat].bookie].disk
                if not disk.sound(closed.ledger, entry):
                    return f"{closed.ledger}:{entry} is not on {disk.name}, or bad"
        return ""

    def _marks(self) -> list[str]:
        nodes = self.meta.tree.nodes
        found: list[str] = []
        folders = [paths.UNDER_REPLICATED]
        while folders:
            folder = folders.pop()
            for name in sorted(nodes.child_names(folder)):
                path = f"{folder}/{name}"
                (folders if nodes.has_children(path) else found).append(path)
        return [path for path in found if path.count("/") == LEVELS]


def _first_violation(error: BaseException) -> Violation | None:
    if isinstance(error, Violation):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_first_violation, error.exceptions)), None)
    return None


def _drawn(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_drawn, error.exceptions))
    return f"{type(error).__name__}: {error}"
