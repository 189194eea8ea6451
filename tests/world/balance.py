"""Brokers that own bundles and move them to each other. The bundles have no topics: the world plays
only the moves.

Each broker sends beats to the bookies, follows the registrations, and runs the real rules for
owners, for silent brokers and for balance, with short periods. The close of a bundle takes some
time, as if it had topics.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from world.net import Unreachable
from world.silent import LOOKUP_S, Cluster, ToldLiveness

from magnetar.bookie.ledger.presence import Presence
from magnetar.broker.balance import BalanceRules
from magnetar.broker.errors import BrokerError
from magnetar.broker.ownership.balancer import Balancer
from magnetar.broker.ownership.brokers import BrokerDirectory
from magnetar.broker.ownership.bundle import Bundle
from magnetar.broker.ownership.owners import Owners
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.lease import Lease
from magnetar.metadata.model import BrokerId, BrokerRegistration
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from world.nodes import ClientNode

    from magnetar.broker.ownership.owners import Located
    from magnetar.metadata.model import Ownership

QUARTERS = (
    "0x00000000_0x40000000",
    "0x40000000_0x80000000",
    "0x80000000_0xc0000000",
    "0xc0000000_0xffffffff",
)
BUNDLES = [Bundle("public", name, part) for name in ("default", "orders") for part in QUARTERS]
RULES = BalanceRules(period_s=2.0, grace_s=60.0)


class Balanced:
    """The ownership part of one broker."""

    def __init__(self, client: ClientNode, brokers: dict[str, Balanced]) -> None:
        self.client = client
        self._owners: Owners | None = None  # None: the broker does not run yet
        brokers[client.name] = self

    def begin(self) -> None:
        self.client.host.spawn(self._run())

    async def locate(self, bundle: Bundle, *, authoritative: bool) -> Located | None:
        """The answer of the broker. None: it refuses to answer at the moment."""
        if self._owners is None:
            return None
        try:
            return await self._owners.locate(bundle, authoritative=authoritative)
        except (BrokerError, MetadataError):
            return None

    async def _run(self) -> None:
        running = await self.client.wait_running()
        store, services = self.client.store, running.services
        random = self.client.world.draw(f"{self.client.name} balances {self.client.starts}")
        assert store is not None
        incarnation, name = f"{random.getrandbits(128):032x}", self.client.name
        me = BrokerRegistration(
            BrokerId(name), incarnation, f"grpc://{name}:1", f"pulsar://{name}:2", ""
        )
        presence = Presence(
            services.directory, services.pool, broker=name, incarnation=incarnation, random=random
        )
        brokers = BrokerDirectory(store)
        liveness = ToldLiveness(Cluster(), presence, self.client)
        owners = Owners(store, brokers, me, liveness=liveness, on_lost=self._on_lost)
        unload = partial(self._unload, random, {})
        balancer = Balancer(
            store, brokers, owners, me, liveness=liveness, unload=unload, rules=RULES
        )
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
                ("balancer", balancer.run),
            ):
                group.create_task(supervise(what, run, backoff=backoff))
            self._owners = owners
            await asyncio.Event().wait()

    async def _unload(self, random: Random, moved: dict[Bundle, float], bundle: Bundle) -> None:
        """`moved`: the times at which this run of the broker has moved each bundle."""
        world, now = self.client.world, asyncio.get_running_loop().time()
        world.trace.fault(self.client.name, "bundle moved to another broker", bundle)
        world.oracle.hold(
            now - moved.get(bundle, -RULES.grace_s) >= RULES.grace_s,
            "GRACE",
            lambda: f"{self.client.name} moves {bundle} again after {now - moved[bundle]} s",
        )
        moved[bundle] = now
        await asyncio.sleep(random.expovariate(1 / 0.1))

    async def _on_lost(self, bundle: Bundle) -> None:
        self.client.world.trace.note(self.client.name, "lost", bundle)


async def keep_looking_up(
    asker: ClientNode, brokers: dict[str, Balanced], *, pause_s: float
) -> None:
    """Repeatedly look bundles up at any broker, as clients do."""
    random, network = asker.world.draw("asker"), asker.world.network
    while True:
        await asyncio.sleep(random.expovariate(1 / pause_s))
        bundle, authoritative = random.choice(BUNDLES), False
        target = random.choice(list(brokers.values()))
        for _ in range(2):  # a redirect is followed once
            serve = partial(target.locate, bundle, authoritative=authoritative)
            try:
                async with asyncio.timeout(LOOKUP_S):
                    found = await network.call(asker.host, target.client.host, "lookup", serve)
            except (Unreachable, TimeoutError):
                break
            if found is None or found.serves:
                break
            target, authoritative = brokers[found.broker.broker], True


def records(asker: ClientNode) -> dict[Bundle, Ownership]:
    """The ownership records as they are stored now."""
    tree, found = asker.world.meta.tree.tree, {}
    for bundle in BUNDLES:
        stored = tree.get(paths.ownership(bundle.tenant, bundle.namespace, bundle.range))
        if stored is not None:
            found[bundle] = codec.decode_ownership(stored.value)
    return found


def counts(asker: ClientNode, names: Sequence[str]) -> list[int]:
    """The number of bundles that each broker owns."""
    owned = [record.owner for record in records(asker).values()]
    return [owned.count(BrokerId(name)) for name in names]
