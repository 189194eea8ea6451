"""The chosen bookies answer, are healthy if possible, and lie in as many zones as possible."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fakes.ledger_bookies import BookieCluster, bookie_cluster
from support import settle, wait_until

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.errors import NotEnoughBookies
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.bookie.ledger.quorum import Quorum
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_bookie_drain
from magnetar.metadata.model import LedgerId
from magnetar.metadata.store import ABSENT
from magnetar.metadata.under_replication import BookieDrain

QUICK = LedgerConfig(connect_timeout_s=0.2, health_half_life_s=60)
QUORUM = Quorum(3, 3, 2)


@asynccontextmanager
async def ledgers_among(
    bookies: int, *, zones: str = "", config: LedgerConfig = QUICK
) -> AsyncIterator[tuple[BookieCluster, Ledgers]]:
    async with bookie_cluster(bookies, zones=zones) as nodes, nodes.process(config) as ledgers:
        yield nodes, ledgers


async def test_only_bookies_that_answer_are_chosen() -> None:
    async with ledgers_among(6) as (nodes, ledgers):
        ensembles = ledgers.services.ensembles
        dead = nodes.bookies[:3]
        for bookie in dead:
            bookie.kill()
        for _ in range(10):
            quorum, members = await ensembles.found()
            assert quorum == QUORUM
            assert set(members) == {bookie.member for bookie in nodes.bookies[3:]}


async def test_with_fewer_bookies_the_ensemble_shrinks_to_the_minimum() -> None:
    async with ledgers_among(4) as (nodes, ledgers):
        ensembles = ledgers.services.ensembles
        nodes.bookies[0].kill()
        nodes.bookies[1].kill()
        quorum, members = await ensembles.found()
        assert quorum == Quorum(2, 2, 2)
        assert len(set(members)) == 2
        nodes.bookies[2].kill()
        with pytest.raises(NotEnoughBookies):
            await ensembles.found()


async def test_failing_bookies_are_chosen_only_if_needed() -> None:
    async with ledgers_among(4) as (nodes, ledgers):
        ensembles, health = ledgers.services.ensembles, ledgers.services.health
        bad, now = nodes.bookies[2].member, asyncio.get_running_loop().time
        assert ensembles.full_ensemble_possible()
        health.on_error(bad, now())
        for _ in range(10):
            assert bad not in (await ensembles.found())[1]
        nodes.bookies[0].kill()
        await settle()
        quorum, members = await ensembles.found()
        assert quorum == QUORUM  # a failing third bookie is better than none
        assert bad in members
        # A connection to `bad` succeeded and reduced its score. The killed bookie now has the
        # highest score.
        assert ensembles.full_ensemble_possible()
        health.on_error(bad, now() + 60)
        assert not ensembles.full_ensemble_possible()


async def test_failing_bookies_are_chosen_when_no_other_bookie_exists() -> None:
    async with ledgers_among(4) as (nodes, ledgers):
        for bookie in nodes.bookies:
            for hour in range(8):
                ledgers.services.health.on_error(bookie.member, 3600.0 * hour)
        quorum, members = await ledgers.services.ensembles.found()
        assert quorum == QUORUM
        assert len(set(members)) == 3
        ensemble = [bookie.member for bookie in nodes.bookies[:3]]
        assert not ledgers.services.ensembles.has_spare(ensemble)
        spares = await ledgers.services.ensembles.spares(QUORUM, ensemble, [1])
        assert spares == {1: nodes.bookies[3].member}


async def test_failures_are_forgiven_with_time() -> None:
    async with ledgers_among(3, config=LedgerConfig(health_half_life_s=0.05)) as (nodes, ledgers):
        now = asyncio.get_running_loop().time()
        ledgers.services.health.on_error(nodes.bookies[0].member, now)
        assert not ledgers.services.ensembles.full_ensemble_possible()
        await wait_until(ledgers.services.ensembles.full_ensemble_possible)


async def test_draining_bookies_get_no_new_seats() -> None:
    async with ledgers_among(4) as (nodes, ledgers):
        ensembles, leaving = ledgers.services.ensembles, nodes.bookies[3].member
        value = encode_bookie_drain(BookieDrain(leaving.bookie, 0, decommission=False))
        await nodes.store.put(paths.bookie_draining(leaving.bookie), value, expected=ABSENT)
        await wait_until(lambda: not ledgers.services.directory.is_writable(leaving))
        for _ in range(10):
            assert leaving not in (await ensembles.found())[1]
        ensemble = [bookie.member for bookie in nodes.bookies[:3]]
        assert await ensembles.spares(QUORUM, ensemble, [0]) == {}
        assert not ensembles.has_spare(ensemble)


async def test_spares_come_from_outside_the_ensemble_and_are_alive() -> None:
    async with ledgers_among(6) as (nodes, ledgers):
        ensembles = ledgers.services.ensembles
        ensemble = [bookie.member for bookie in nodes.bookies[:3]]
        nodes.bookies[3].kill()
        spares = await ensembles.spares(QUORUM, ensemble, [0, 2])
        assert set(spares) == {0, 2}
        assert set(spares.values()) == {b.member for b in nodes.bookies[4:]}
        nodes.bookies[4].kill()
        await settle()
        assert await ensembles.spares(QUORUM, ensemble, [0, 2]) in (
            {0: nodes.bookies[5].member},
            {2: nodes.bookies[5].member},
        )
        assert ensembles.has_spare(ensemble)
        nodes.bookies[5].kill()
        await settle()
        assert await ensembles.spares(QUORUM, ensemble, [0]) == {}
        assert not ensembles.has_spare(ensemble)


async def test_zones_are_kept_apart() -> None:
    async with ledgers_among(6, zones="aabbcc") as (nodes, ledgers):
        ensembles = ledgers.services.ensembles
        zone = {bookie.member: "aabbcc"[n] for n, bookie in enumerate(nodes.bookies)}
        for _ in range(10):
            _, members = await ensembles.found()
            assert {zone[member] for member in members} == {"a", "b", "c"}
            spares = await ensembles.spares(QUORUM, members, [1])
            assert zone[spares[1]] == zone[members[1]]


@pytest.mark.parametrize("decommission", [False, True], ids=["drained", "decommissioned"])
async def test_a_ledger_with_a_leaving_bookie_should_be_rolled(decommission: bool) -> None:
    async with ledgers_among(4) as (nodes, ledgers):
        appender = await ledgers.create(newer_than=LedgerId(-1), custom={})
        leaving = appender.metadata.last_segment.members[0].bookie
        assert not appender.degraded
        value = encode_bookie_drain(BookieDrain(leaving, 0, decommission=decommission))
        await nodes.store.put(paths.bookie_draining(leaving), value, expected=ABSENT)
        await wait_until(lambda: appender.degraded)
        assert ledgers.full_ensemble_possible()  # with the three other bookies
        other = await ledgers.create(newer_than=LedgerId(-1), custom={})
        assert not other.degraded
