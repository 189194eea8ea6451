"""Who is chosen: bookies that answer, the healthy ones first, in as many zones as there are."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fakes.ledger_bookies import Cluster, cluster
from support import run, settle, wait_until

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.ensembles import Ensembles
from magnetar.bookie.ledger.errors import NotEnoughBookies
from magnetar.bookie.ledger.quorum import Quorum

QUICK = LedgerConfig(connect_timeout_s=0.2, quarantine_s=60)
QUORUM = Quorum(3, 3, 2)


@asynccontextmanager
async def world(
    bookies: int, *, zones: str = "", config: LedgerConfig = QUICK
) -> AsyncIterator[tuple[Cluster, Ensembles]]:
    async with cluster(bookies, zones=zones) as nodes, nodes.process(config) as ledgers:
        yield nodes, ledgers._services.ensembles


def test_only_bookies_that_answer_are_chosen() -> None:
    async def main() -> None:
        async with world(6) as (nodes, ensembles):
            dead = nodes.bookies[:3]
            for bookie in dead:
                bookie.kill()
            for _ in range(10):
                quorum, members = await ensembles.found()
                assert quorum == QUORUM
                assert set(members) == {bookie.member for bookie in nodes.bookies[3:]}

    run(main())


def test_with_fewer_the_ensemble_shrinks_to_the_minimum() -> None:
    async def main() -> None:
        async with world(4) as (nodes, ensembles):
            nodes.bookies[0].kill()
            nodes.bookies[1].kill()
            quorum, members = await ensembles.found()
            assert quorum == Quorum(2, 2, 2)
            assert len(set(members)) == 2
            nodes.bookies[2].kill()
            with pytest.raises(NotEnoughBookies):
                await ensembles.found()

    run(main())


def test_those_in_quarantine_are_chosen_only_if_need_be() -> None:
    async def main() -> None:
        async with world(4) as (nodes, ensembles):
            bad = nodes.bookies[2].member
            assert ensembles.full_ensemble_possible()
            for _ in range(10):
                ensembles.quarantine(bad)
                assert bad not in (await ensembles.found())[1]
            nodes.bookies[0].kill()
            await settle()
            quorum, members = await ensembles.found()
            assert quorum == QUORUM  # better a doubtful third bookie than two
            assert bad in members
            assert not ensembles.full_ensemble_possible()
            ensembles.release(bad)
            assert ensembles.full_ensemble_possible()

    run(main())


def test_quarantine_ends() -> None:
    async def main() -> None:
        async with world(3, config=LedgerConfig(quarantine_s=0.05)) as (nodes, ensembles):
            ensembles.quarantine(nodes.bookies[0].member)
            assert not ensembles.full_ensemble_possible()
            await wait_until(ensembles.full_ensemble_possible)

    run(main())


def test_spares_come_from_outside_the_ensemble_and_are_alive() -> None:
    async def main() -> None:
        async with world(6) as (nodes, ensembles):
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

    run(main())


def test_zones_are_kept_apart() -> None:
    async def main() -> None:
        async with world(6, zones="aabbcc") as (nodes, ensembles):
            zone = {bookie.member: "aabbcc"[n] for n, bookie in enumerate(nodes.bookies)}
            for _ in range(10):
                _, members = await ensembles.found()
                assert {zone[member] for member in members} == {"a", "b", "c"}
                spares = await ensembles.spares(QUORUM, members, [1])
                assert zone[spares[1]] == zone[members[1]]

    run(main())
