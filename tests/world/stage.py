"""The parts of a scenario: a ledger with its bookies, and the usual steps.

Times are drawn, not fixed: a scenario says *what* happens around the critical moment, and the seed
says when.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from world.contender import Writer
from world.loop import until
from world.net import Host

from magnetar.bookie.ledger.errors import LedgerError, NotEnoughBookies, RecoveryIncomplete
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import LedgerId, LedgerState

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from world.cluster import World
    from world.nodes import BookieNode, ClientNode, Process

    from magnetar.bookie.ledger.ledgers import Ledgers
    from magnetar.metadata.model import LedgerMetadata, Member

PATIENCE_S = 60.0  # the time for changes that happen without a command


class Stage:
    """`clients[0]` writes; the others take over, or only read."""

    def __init__(self, world: World, clients: list[ClientNode]) -> None:
        self.world = world
        self.random = world.random
        self.clients = clients
        self.writer: Writer = None  # type: ignore[assignment]  # made by `write`
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def set(cls, world: World, *, spares: int = 1, clients: int = 2) -> Stage:
        """Start as many bookies as a ledger needs, and some more."""
        for number in range(world.quorum.ensemble_size + spares):
            world.add_bookie(zone=f"z{number % 3}" if world.random.random() < 0.3 else "")
        await world.wait_registered()
        stage = cls(world, [world.add_client() for _ in range(clients)])
        for client in stage.clients:
            await client.wait_running()
        return stage

    # -- a ledger ----------------------------------------------------------------------------------

    async def write(self, entries: int = 0, *, client: int = 0) -> Writer:
        """A new ledger with some confirmed entries."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    create = self.ledgers(client).create
                    appender = await create(newer_than=LedgerId(-1), custom={})
                except (NotEnoughBookies, MetadataError):
                    await asyncio.sleep(0.2)  # too many bookies, or the store, were too slow
                else:
                    break
        self.writer = Writer(self.clients[client], appender)
        if entries:
            self.append(entries)
            await self.writer.wait_confirmed()
        return self.writer

    async def wait_everywhere(self) -> None:
        """Wait until all members durably hold their entries."""
        quorum, seated = self.world.quorum, self.seated()
        await self.until(
            lambda: all(
                seated[seat].disk.durable(self.ledger, entry)
                for entry in range(self.writer.appender.appended + 1)
                for seat in quorum.write_order(entry)
            )
        )

    async def try_another_ledger(self, *, client: int) -> None:
        """Append entries of another ledger, so that bookies store them between this ledger's."""
        try:
            other = await self.ledgers(client).create(newer_than=self.ledger, custom={})
            writer = Writer(self.clients[client], other)
            for _ in range(3):
                writer.append(20)
            await writer.wait_confirmed()
        except (LedgerError, MetadataError) as error:
            self.world.trace.tell(self.clients[client].name, "no other ledger:", error)

    def append(self, entries: int = 1) -> None:
        """Append an entry. No effect if the ledger has failed."""
        for _ in range(entries):
            try:
                self.writer.append(self.random.choice((12, 40)))
            except LedgerError:
                return

    async def keep_appending(self, mean_s: float = 0.02, *, entries: int = 1_000) -> None:
        """Append until the ledger fails."""
        for _ in range(entries):
            if self.writer.appender.failure is not None or not self.writer_client.alive:
                return
            self.append()
            await self.lull(mean_s)

    @property
    def ledger(self) -> LedgerId:
        return self.writer.ledger

    @property
    def writer_client(self) -> ClientNode:
        return self.clients[0]

    def ledgers(self, client: int) -> Ledgers:
        found = self.clients[client].ledgers
        assert found is not None
        return found

    @property
    def stored(self) -> LedgerMetadata:
        """The ledger's record as it is stored now."""
        return self.world.oracle.life(self.ledger).versions[-1]

    def seated(self) -> list[BookieNode]:
        return [self.node(member) for member in self.stored.last_segment.members]

    def spares(self) -> list[BookieNode]:
        seated = self.seated()
        return [each for each in self.world.bookies.values() if each not in seated]

    def node(self, member: Member) -> BookieNode:
        return self.world.bookies[member.bookie]

    # -- taking over -------------------------------------------------------------------------------

    async def try_recover(self, client: int = 1) -> LedgerMetadata | None:
        """One attempt to recover. None: it failed, or the client died."""
        ledgers = self.clients[client].ledgers
        if ledgers is None:
            return None
        try:
            return await ledgers.recover(self.ledger)
        except (LedgerError, MetadataError) as error:
            self.world.trace.tell(self.clients[client].name, "not recovered:", error)
            return None

    async def recover(self, client: int = 1) -> LedgerMetadata:
        """Repeat attempts until one succeeds, within PATIENCE_S (I18)."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    closed = await self.try_recover(client)
                    if closed is not None:
                        assert closed.state is LedgerState.CLOSED
                        return closed
                    await asyncio.sleep(0.2)
        except TimeoutError:
            why = f"not recovered after {PATIENCE_S} s of attempts"
            raise self.world.oracle.broken("I18", why) from None

    async def must_not_close(self, client: int = 1) -> None:
        """An attempt that must give up and leave the ledger unchanged."""
        try:
            await self.ledgers(client).recover(self.ledger)
        except RecoveryIncomplete:
            self.world.oracle.hold(
                self.stored.state is not LedgerState.CLOSED,
                "I1",
                lambda: "the recovery closed the ledger",
            )
        else:
            raise self.world.oracle.broken("I1", "closed, though too few bookies could be asked")

    # -- faults ------------------------------------------------------------------------------------

    def cut(self, sources: Iterable[Process | Host], targets: Iterable[Process | Host]) -> None:
        """Cut all messages from each host of one group to each host of the other."""
        targets = list(targets)
        for source in sources:
            for target in targets:
                self.world.network.cut(_host(source), _host(target))

    def cut_off(self, one: Iterable[Process], other: Iterable[Process]) -> None:
        one, other = list(one), list(other)
        self.cut(one, other)
        self.cut(other, one)

    def restart_later(self, process: Process, mean_s: float = 0.5) -> None:
        async def bring_back() -> None:
            await self.lull(mean_s)
            await process.restart()

        self.meanwhile(bring_back())

    def fall_later(
        self, process: Process, delay_s: float, power: bool, *, mean_s: float = 0.5
    ) -> None:
        """Crash the process after `delay_s`, and start it again some time later."""

        async def fall() -> None:
            await asyncio.sleep(delay_s)
            process.crash_by(power)
            await self.lull(mean_s)
            await process.restart()

        self.meanwhile(fall())

    def some(self, nodes: list[BookieNode], count: int) -> list[BookieNode]:
        return self.random.sample(nodes, min(count, len(nodes)))

    # -- time --------------------------------------------------------------------------------------

    async def lull(self, mean_s: float) -> None:
        await asyncio.sleep(self.random.expovariate(1 / mean_s))

    def meanwhile(self, work: Coroutine[object, object, None]) -> None:
        """Run a task beside the story. `end` waits for it."""
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def until(self, condition: object) -> None:
        """Wait until the condition holds. Raises I18 if it does not."""
        assert callable(condition)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await until(condition, every_s=0.003)
        except TimeoutError:
            raise self.world.oracle.broken("I18", "an expected change does not happen") from None

    async def quiet(self) -> None:
        """End the tasks beside the story, and heal."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.result()
        self._tasks.clear()
        await self.world.heal()

    async def end(self, *, keep: Sequence[str] = ()) -> None:
        """Heal, close, read, check. The clients in `keep` stay alive."""
        await self.quiet()
        for client in list(self.world.clients.values()):
            if client.name not in keep:
                client.crash()
        await self.world.judge()


def _host(process: Process | Host) -> Host:
    return process if isinstance(process, Host) else process.host
