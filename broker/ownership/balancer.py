"""Hands bundles over to brokers that own fewer bundles, slowly: one round in each period.

A broker that joins owns no bundle, and a broker that was alone owns all of them. In each round a
broker reads the owners of all bundles and moves bundles of its own. All brokers compute the same
moves (census.py). A move is a clean hand-over: the broker closes the topics and tells their clients
the next owner.

After a move the clients must reconnect, so moves are limited:

- A round moves at most MOVES_PER_ROUND_MAX bundles, one after the other.
- A round moves no bundle if it sees other brokers, or other incarnations, than the previous round.
  So no bundle moves during a rolling restart.
- A broker does not move a bundle a second time within the grace period, even if the broker that got
  the bundle dies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.broker.balance import BALANCE_DEFAULTS
from magnetar.broker.ownership.census import owner_of, read_owners, targets_of
from magnetar.metadata.errors import InvalidRecord, MetadataError
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.broker.balance import BalanceRules
    from magnetar.broker.ownership.brokers import BrokerDirectory
    from magnetar.broker.ownership.bundle import Bundle
    from magnetar.broker.ownership.census import Owner
    from magnetar.broker.ownership.liveness import Liveness
    from magnetar.broker.ownership.owners import Owners
    from magnetar.metadata.model import BrokerRegistration
    from magnetar.metadata.store import MetadataStore

MOVES_PER_ROUND_MAX: Final = 10
"""Ten bundles in a minute from each broker. A broker that joins a cluster of two with 300 bundles
has a third of them after 5 minutes."""

log = get_logger(__name__)


class Balancer:
    """`run` counts the bundles for `owners`, and moves bundles of this broker."""

    def __init__(
        self,
        store: MetadataStore,
        brokers: BrokerDirectory,
        owners: Owners,
        me: BrokerRegistration,
        *,
        liveness: Liveness,
        unload: Callable[[Bundle], Awaitable[None]],
        rules: BalanceRules = BALANCE_DEFAULTS,
    ) -> None:
        self.moved = 0  # the number of bundles moved so far
        self._store = store
        self._brokers = brokers
        self._owners = owners
        self._me = me
        self._liveness = liveness
        self._unload = unload
        self._rules = rules
        self._seen: set[Owner] = set()  # the live brokers of the last round
        self._moved_s: dict[Bundle, float] = {}  # the loop time of each move

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            try:
                await self._round()
            except (MetadataError, InvalidRecord) as error:
                log.info("bundles were not counted", error=str(error))
            await asyncio.sleep(self._rules.period_s)

    async def _round(self) -> None:
        await self._brokers.refresh()
        live = {owner_of(it): it for it in self._brokers.live.values()}
        is_steady, self._seen = live.keys() == self._seen, set(live)
        me = owner_of(self._me)
        if live.keys() <= {me}:  # no other broker could get a bundle
            self._owners.recount({})
            return
        self._owners.recount(await read_owners(self._store))
        if not self._rules.enabled or not is_steady or me not in live:
            return
        counts = {owner: self._owners.census.count(owner) for owner in live}
        for target in targets_of(me, counts)[:MOVES_PER_ROUND_MAX]:
            await self._move(me, target, live[target])

    async def _move(self, me: Owner, target: Owner, to: BrokerRegistration) -> None:
        now = asyncio.get_running_loop().time()
        since = now - self._rules.grace_s
        self._moved_s = {bundle: at for bundle, at in self._moved_s.items() if at > since}
        movable = self._owners.held - self._moved_s.keys()
        bundle = self._owners.census.choose(movable, me, target)
        if bundle is None or not await self._liveness.responds(to):
            return
        log.info("moving a bundle", bundle=str(bundle), to=to.broker)
        self._moved_s[bundle] = now
        if await self._owners.release(bundle, self._unload, to=to):
            self.moved += 1
