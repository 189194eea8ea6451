"""The nemesis: kills the broker that owns the topic, stops it for a while, and kills a bookie of
the topic's open ledger.

A seed decides the faults before the run begins. The nemesis finds each target by a lookup when it
acts, and records each fault with the observed effect.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from checkers.history import Fault, History

from magnetar.broker.ownership.bundle import bundle_in
from magnetar.metadata import codec, paths
from magnetar.metadata.model import LedgerState, NamespaceBundles
from magnetar.protos.names import TopicName
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from random import Random

    from chaos.workload import Producing

    from magnetar.local_cluster import LocalCluster
    from magnetar.metadata.model import LedgerId, LedgerMetadata, Ownership
    from magnetar.metadata.store import MetadataStore

SERVED_S: Final = 30.0  # if no broker serves the topic by then, the run fails
POLL_S: Final = 0.02

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill of the owner."""

    quiet_s: float  # the time without a fault, before this one
    bookie_before_s: float | None  # from a bookie's kill to this one; None: no bookie is killed
    restart_at_once: bool  # False: restart the broker when another one serves the topic
    pick: int  # chooses the bookie: the index in the ensemble, modulo its size


@dataclass(frozen=True, slots=True)
class Pause:
    """One stop of the owner (SIGSTOP), which continues later."""

    quiet_s: float  # the time without a fault, before this one
    stopped_s: float  # how long the stop lasts after another broker serves the topic


def plan(random: Random, *, kills: int, pauses: int, bookie_first: bool) -> list[Kill | Pause]:
    """Choose the faults. `bookie_first`: kill the bookie before the first kill of an owner, so that
    the bookie is down during all kills. Without kills of owners, no bookie is killed."""
    with_bookie = 0 if bookie_first or not kills else random.randrange(kills)
    faults: list[Kill | Pause] = [
        Kill(
            quiet_s=random.uniform(1.5, 3.5),
            bookie_before_s=random.uniform(0.0, 1.5) if number == with_bookie else None,
            restart_at_once=random.random() < 0.3,
            pick=random.randrange(12),
        )
        for number in range(kills)
    ]
    for _ in range(pauses):
        pause = Pause(random.uniform(1.5, 3.5), random.uniform(0.0, 12.0))
        faults.insert(random.randint(min(1, len(faults)), len(faults)), pause)
    return faults


class Nemesis:
    """Executes a plan against a cluster, while `producing` runs."""

    def __init__(
        self,
        cluster: LocalCluster,
        store: MetadataStore,
        producing: Producing,
        history: History,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._producing = producing
        self._history = history
        self._topic = TopicName.parse(producing.topic)
        self._dead: list[str] = []  # the killed bookies

    async def run(self, faults: list[Kill | Pause]) -> None:
        """Execute the faults. Raises TimeoutError if no broker serves the topic after a fault."""
        for fault in faults:
            await asyncio.sleep(fault.quiet_s)
            await self._producing.wait_acknowledged(len(self._history.sends))
            if isinstance(fault, Pause):
                await self._pause_owner(fault.stopped_s)
                continue
            if fault.bookie_before_s is not None:
                await self._kill_bookie(fault.pick)
                await asyncio.sleep(fault.bookie_before_s)
            await self._kill_owner(restart_at_once=fault.restart_at_once)

    async def heal(self) -> None:
        for bookie in self._dead:
            await self._cluster.restart("bookie", bookie)
            self._record("restart", bookie, bitten=True)
        self._dead.clear()

    async def hand_over(self) -> None:
        """Stop the owner with SIGTERM and start it again: the topic moves to the other broker."""
        owner = await self._owner()
        await self._cluster.restart("broker", owner.owner)
        self._record("stop-owner", owner.owner, bitten=True)

    async def _kill_owner(self, *, restart_at_once: bool) -> None:
        before, ledger = await self._owner(), await self._last_ledger()
        at_ns = time.monotonic_ns()
        await self._cluster.kill("broker", before.owner)
        async with asyncio.TaskGroup() as group:
            restarted = None
            if restart_at_once:
                restarted = group.create_task(self._cluster.restart("broker", before.owner))
            async with asyncio.timeout(SERVED_S):
                served_ns = await self._producing.wait_beyond(ledger)
                # That ledger may be one that the old owner began while it was being killed.
                after = await self._owner_after(before)
            if restarted is None:
                group.create_task(self._cluster.restart("broker", before.owner))
        self._record(
            "kill-owner",
            before.owner,
            at_ns=at_ns,
            bitten=after.epoch > before.epoch and after.incarnation != before.incarnation,
            effect=f"epoch {before.epoch} to {after.epoch}, owner now {after.owner}"
            + (", restarted at once" if restart_at_once else ""),
            outage_s=(served_ns - at_ns) / 1e9,
        )

    async def _pause_owner(self, stopped_s: float) -> None:
        """Send SIGSTOP, and SIGCONT some time after another broker serves the topic. The metadata
        session of the stopped broker may end meanwhile."""
        before, ledger = await self._owner(), await self._last_ledger()
        process = self._cluster.process("broker", before.owner)
        log.info("owner stopped", broker=before.owner)
        at_ns = time.monotonic_ns()
        process.pause()
        try:
            async with asyncio.timeout(SERVED_S):
                served_ns = await self._producing.wait_beyond(ledger)
                after = await self._owner_after(before)
            await asyncio.sleep(stopped_s)
        finally:
            process.resume()
        self._record(
            "pause-owner",
            before.owner,
            at_ns=at_ns,
            bitten=after.epoch > before.epoch and after.owner != before.owner,
            effect=f"epoch {before.epoch} to {after.epoch}, owner now {after.owner}, "
            f"stopped for {stopped_s:.1f} s more",
            outage_s=(served_ns - at_ns) / 1e9,
        )

    async def _kill_bookie(self, pick: int) -> None:
        metadata = await self._open_ledger()
        members = metadata.segments[-1].members
        victim = members[pick % len(members)].bookie
        at_ns = time.monotonic_ns()
        await self._cluster.kill("bookie", victim)
        self._dead.append(victim)
        self._record(
            "kill-bookie",
            victim,
            at_ns=at_ns,
            bitten=metadata.state is LedgerState.OPEN,
            effect=f"was in the ensemble of ledger {metadata.ledger}",
        )

    async def _owner(self) -> Ownership:
        bundle = bundle_in(self._topic, NamespaceBundles())
        path = paths.ownership(bundle.tenant, bundle.namespace, bundle.range)
        await self._store.sync(path)
        stored = await self._store.get(path)
        assert stored is not None, "a topic that is published on has an owner"
        return codec.decode_ownership(stored.value)

    async def _owner_after(self, before: Ownership) -> Ownership:
        while True:
            owner = await self._owner()
            if owner.epoch > before.epoch:
                return owner
            await asyncio.sleep(POLL_S)

    async def _last_ledger(self) -> LedgerId:
        name = self._topic
        path = paths.topic(name.tenant, name.namespace, name.domain, name.topic)
        await self._store.sync(path)
        stored = await self._store.get(path)
        assert stored is not None, "a topic that is published on has a record"
        return codec.decode_topic(stored.value).ledgers[-1].ledger

    async def _open_ledger(self) -> LedgerMetadata:
        path = paths.ledger(await self._last_ledger())
        await self._store.sync(path)
        stored = await self._store.get(path)
        assert stored is not None, "a topic's last ledger has metadata"
        return codec.decode_ledger(stored.value)

    def _record(
        self,
        what: str,
        target: str,
        *,
        bitten: bool,
        effect: str = "",
        at_ns: int | None = None,
        outage_s: float | None = None,
    ) -> None:
        log.info("fault ended", fault=what, target=target, effect=effect, outage_s=outage_s)
        at_ns = time.monotonic_ns() if at_ns is None else at_ns
        self._history.faults.append(Fault(what, target, at_ns, bitten, effect, outage_s))
