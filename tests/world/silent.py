"""Brokers that replace each other by the rule for silent owners, with and without a reason.

Each broker beats to the bookies, whose witnesses are the real ones, and runs the real rule over
simulated ports. It serves the topic of owner.py while it believes that it holds the bundle. When
the cluster lies, bookies and ports say that the owner is silent, whatever is true: two brokers then
serve the topic, and both can reach everything.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from world.loop import until
from world.net import Unreachable
from world.owner import Clients, Owner
from world.topic import ToldLedgers

from magnetar.bookie.contract import LastHeard
from magnetar.bookie.ledger.presence import Presence
from magnetar.broker.errors import BrokerError
from magnetar.broker.ownership.brokers import BrokerDirectory
from magnetar.broker.ownership.bundle import Bundle
from magnetar.broker.ownership.liveness import (
    ANSWER_FRESH_S,
    PING_S,
    SILENCE_FRESH_S,
    Liveness,
    Port,
)
from magnetar.broker.ownership.owners import Located, Owners
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.lease import Lease
from magnetar.metadata.model import BrokerId, BrokerRegistration
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from world.nodes import ClientNode

BUNDLE = Bundle("public", "default", "0x00000000_0xffffffff")
LOOKUP_S = 5.0
LIE = LastHeard(heard_s=60.0, listening_s=60.0)


class Cluster:
    """The brokers of a world, and whether the cluster lies about them."""

    def __init__(self) -> None:
        self.brokers: dict[str, SilentOwner] = {}
        self.lies = False

    @property
    def owners(self) -> list[SilentOwner]:
        """The brokers that believe that they hold the bundle."""
        return [it for it in self.brokers.values() if it.holds]


class SilentOwner(Owner):
    """A broker that takes the topic over when lookups and the rule say so."""

    def __init__(self, client: ClientNode, clients: Clients, cluster: Cluster) -> None:
        super().__init__(client, clients, pause_s=0.3)
        self._cluster = cluster
        self._owners: Owners | None = None  # None: the broker does not run yet
        cluster.brokers[client.name] = self

    @property
    def holds(self) -> bool:
        return self.client.alive and self._owners is not None and self._owners.holds(BUNDLE)

    async def locate(self, *, authoritative: bool) -> Located:
        """The broker's answer to a lookup. Raises BrokerError, MetadataError, Unreachable."""
        if self._owners is None:
            raise Unreachable(f"{self.client.name} does not listen yet")
        return await self._owners.locate(BUNDLE, authoritative=authoritative)

    async def _run(self) -> None:
        running = await self.client.wait_running()
        store, services, random = self.client.store, running.services, self.random
        assert store is not None
        incarnation = f"{random.getrandbits(128):032x}"
        name = self.client.name
        me = BrokerRegistration(
            BrokerId(name), incarnation, f"grpc://{name}:1", f"pulsar://{name}:2", ""
        )
        presence = Presence(
            services.directory, services.pool, broker=name, incarnation=incarnation, random=random
        )
        brokers = BrokerDirectory(store)
        liveness = ToldLiveness(self._cluster, presence, self.client)
        owners = Owners(store, brokers, me, liveness=liveness, on_lost=self._on_lost)
        lease = Lease(
            store,
            paths.broker_available(me.broker),
            codec.encode_broker_registration(me),
            replaces=lambda _: True,
            on_change=lambda _: None,
        )
        backoff = Backoff(0.1, 1.0, random)
        async with asyncio.TaskGroup() as group:
            for what, run in (
                ("presence", presence.run),
                ("brokers", brokers.run),
                ("owners", owners.run),
                ("lease", lease.run),
            ):
                group.create_task(supervise(what, run, backoff=backoff))
            self._owners = owners
            await self._serve_what_it_holds(owners, ToldLedgers(running, self.client))

    async def _serve_what_it_holds(self, owners: Owners, ledgers: ToldLedgers) -> None:
        while True:
            await until(lambda: owners.holds(BUNDLE), every_s=0.05)
            await asyncio.sleep(self.random.expovariate(1 / self.pause_s))
            async with asyncio.TaskGroup() as tasks:
                await self._reign(ledgers, tasks)
            owners.doubt(BUNDLE)

    async def _on_lost(self, _: Bundle) -> None:
        self._trace.note(self.client.name, "was replaced")


class ToldLiveness(Liveness):
    """Notes which owner is replaced, and in which state."""

    def __init__(self, cluster: Cluster, presence: Presence, client: ClientNode) -> None:
        super().__init__(_Witnesses(cluster, presence), look_at_port=self._look)
        self._cluster = cluster
        self._client = client

    async def is_gone(self, broker: BrokerRegistration) -> bool:
        gone = await super().is_gone(broker)
        owner = self._client.world.clients[broker.broker]
        if gone and owner.alive:
            state = "stopped" if owner.host.paused else "live"
            self._client.world.trace.fault(self._client.name, f"{state} owner replaced as silent")
        return gone

    async def _look(self, broker: BrokerRegistration) -> tuple[Port, float]:
        world, target = self._client.world, self._client.world.clients[broker.broker].host
        if self._cluster.lies:
            await asyncio.sleep(PING_S)
            return Port.SILENT, SILENCE_FRESH_S

        async def answer() -> None:
            return None

        try:
            async with asyncio.timeout(PING_S):
                await world.network.call(self._client.host, target, "ping", answer)
        except TimeoutError:
            return Port.SILENT, SILENCE_FRESH_S
        except Unreachable:
            return (Port.SILENT if target.alive else Port.REFUSES), SILENCE_FRESH_S
        return Port.ANSWERS, ANSWER_FRESH_S


class _Witnesses:
    def __init__(self, cluster: Cluster, presence: Presence) -> None:
        self._cluster = cluster
        self._presence = presence

    async def ask(self, broker: str, incarnation: str) -> Sequence[LastHeard | None]:
        answers = await self._presence.ask(broker, incarnation)
        return [LIE for _ in answers] if self._cluster.lies else answers


async def keep_asking(asker: ClientNode, cluster: Cluster, *, pause_s: float) -> None:
    """Repeatedly look the topic up at any broker, as clients do."""
    random, network = asker.world.draw("asker"), asker.world.network
    while True:
        await asyncio.sleep(random.expovariate(1 / pause_s))
        target, authoritative = random.choice(list(cluster.brokers.values())), False
        for _ in range(2):  # a redirect is followed once
            serve = partial(target.locate, authoritative=authoritative)
            try:
                async with asyncio.timeout(LOOKUP_S):
                    located = await network.call(asker.host, target.client.host, "lookup", serve)
            except (BrokerError, MetadataError, Unreachable, TimeoutError):
                break
            if located.serves:
                break
            target, authoritative = cluster.brokers[located.broker.broker], True
