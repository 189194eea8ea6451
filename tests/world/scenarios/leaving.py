"""A bookie leaves the cluster permanently: T32."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from world.cluster import quick_config
from world.loop import until
from world.nodes import ClientNode
from world.scenario import scenario
from world.scenarios.repairing import end_repaired
from world.stage import Stage

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.bookie.ledger.quorum import Quorum
from magnetar.bookie.repair.decommission import CHANGE_S, Progress, decommission
from magnetar.bookie.repair.decommission import Stage as Step
from magnetar.bookie.repair.errors import StillNeeded
from magnetar.metadata import paths
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import BookieId, LedgerId

if TYPE_CHECKING:
    from world.cluster import World
    from world.contender import Writer
    from world.nodes import BookieNode

    from magnetar.metadata.model import LedgerMetadata, Member

TWO_ACKS = ("2/2/2", "3/3/2", "3/2/2", "5/3/2", "3/3/3")
TIMEOUT_S = 60.0  # much longer than it takes to move all entries that can be moved


@dataclass
class Leaving:
    """An operator decommissions the bookie, and repeats the command until it succeeds."""

    world: World
    operator: ClientNode
    bookie: BookieNode
    member: Member
    told: list[Progress] = field(default_factory=list)

    async def attempt(self) -> StillNeeded | None:
        """T32: the command ends in time, with a report. None: the bookie is removed."""
        store, loop = self.operator.store, self.world.loop
        assert store is not None
        begun_s = loop.time()
        report: StillNeeded | None = None
        leaving = decommission(
            store,
            self.operator.clock,
            BookieId(self.bookie.name),
            timeout_s=TIMEOUT_S,
            on_progress=self.told.append,
        )

        async def run() -> None:
            nonlocal report
            try:
                await leaving
            except StillNeeded as error:
                report = error
                self.world.trace.note("operator", "is told", sorted(error.blockers.items()))

        await self.operator.host.spawn(run())
        took_s = loop.time() - begun_s
        self.world.oracle.hold(
            took_s <= TIMEOUT_S + 2 * CHANGE_S, "T32", lambda: f"no report after {took_s} s"
        )
        return report

    def named_by(self) -> list[LedgerId]:
        """Ledgers that name the bookie in their metadata."""
        return [
            ledger
            for ledger, life in self.world.oracle.lives.items()
            if not life.deleted and life.versions and self._names(life.versions[-1])
        ]

    def _names(self, metadata: LedgerMetadata) -> bool:
        members = [member for part in metadata.segments for member in part.members]
        return any(member.bookie == self.bookie.name for member in members)

    def check_report(self, report: StillNeeded | None, expected: set[LedgerId]) -> None:
        """Check that the report names all remaining ledgers, with the reasons."""
        named = set() if report is None else set(report.blockers)
        self.world.oracle.hold(
            named == expected == set(self.named_by()),
            "T32",
            lambda: (
                f"the report on {self.bookie.name} names {named}, metadata names {self.named_by()}"
            ),
        )
        for ledger, why in ({} if report is None else report.blockers).items():
            self.world.oracle.hold(
                bool(why) and "waits for a replicator" not in why,
                "T32",
                partial("ledger {} is left: {}".format, ledger, why),
            )


@scenario(
    "T32",
    "a bookie is decommissioned: its ledgers are closed, open, empty, or on no other bookie",
    TWO_ACKS,
)
async def sent_away(world: World) -> None:
    stage = await Stage.set(world, spares=2, clients=3)
    random = world.random
    lone = world.clients["lone"] = ClientNode(world, "lone", quick_config(Quorum(1, 1, 1)))
    lone.start()
    await lone.wait_running()
    stage.clients.append(lone)
    alone = await stage.write(random.randint(1, 4), client=3)
    await alone.close()
    [victim] = stage.seated()
    closed = await stage.write(random.randint(0, 6))
    await closed.close()
    idle = await stage.write(0)
    written = await stage.write(1)
    stage.meanwhile(stage.keep_appending(1.0, entries=10_000))
    world.add_repairer()
    leaving = Leaving(world, stage.clients[2], victim, victim.member)
    kind = random.choice(("serves", "is dead", "has lost everything"))
    if kind == "serves":
        await _while_it_serves(leaving, [idle, written])
    else:
        if kind == "has lost everything":
            victim.crash(power=True)
            victim.disk.wipe()
            world.destroyed[victim.name] = None
            world.trace.fault(victim.name, "wiped")
        await _while_it_is_dead(leaving, alone, stage, lost=kind == "has lost everything")
    for writer in (idle, written):
        with suppress(LedgerError):  # recovered meanwhile, because its bookie was down
            await writer.close()
    await _check_gone(leaving)
    await end_repaired(stage)


async def _while_it_serves(leaving: Leaving, writers: list[Writer]) -> None:
    """An open ledger stays until its writer leaves the bookie. Then the bookie has no ledgers, and
    waits for its stop."""
    open_there = {writer.ledger for writer in writers} & set(leaving.named_by())
    leaving.check_report(await leaving.attempt(), open_there)
    for writer in writers:
        await writer.close()

    def stop() -> None:
        if any(progress.stage is Step.SERVING for progress in leaving.told):
            leaving.bookie.crash()
        else:
            leaving.world.loop.later(0.5, stop)

    leaving.told.clear()
    stop()
    leaving.check_report(await leaving.attempt(), set())


async def _while_it_is_dead(leaving: Leaving, alone: Writer, stage: Stage, *, lost: bool) -> None:
    """Entries that only this bookie has block its removal, until it is back or an operator gives
    them up."""
    victim = leaving.bookie
    victim.crash()
    stage.append()  # the writer then looks for another bookie
    for _ in range(stage.random.randint(1, 2)):
        leaving.check_report(await leaving.attempt(), {alone.ledger})
    if lost:
        try:
            await stage.ledgers(1).delete(alone.ledger)
        except MetadataError as error:
            stage.world.trace.tell("operator", "not deleted:", error)
    else:
        await victim.restart()
        await stage.until(lambda: victim.registered)
        await stage.until(lambda: not leaving.named_by())
        victim.crash()
    leaving.check_report(await leaving.attempt(), set())


async def _check_gone(leaving: Leaving) -> None:
    """The cluster has no record of the bookie, and its directory cannot start again by mistake."""
    world, victim = leaving.world, leaving.bookie
    name, tree = BookieId(victim.name), world.meta.tree.tree
    left = [
        path for path in (paths.bookie_cookie(name), paths.bookie_draining(name)) if tree.get(path)
    ]
    world.oracle.hold(
        not left, "T32", lambda: f"{victim.name} was removed, but {left} still name it"
    )
    world.retire(victim, leaving.member)
    if victim.disk.identity is not None:
        await victim.restart()
        await until(lambda: victim.refused is not None or victim.registered)
        world.oracle.hold(
            victim.refused is not None,
            "T32",
            lambda: f"{victim.name} started again after its removal",
        )
    victim.crash()
