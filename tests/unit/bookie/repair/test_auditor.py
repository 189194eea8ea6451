"""The auditor finds ledgers to repair: lost bookies, missing entries, and too few members."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from fakes.ledger_bookies import BookieCluster, FakeBookie, bookie_cluster
from fakes.repairs import auditing, bake_cookies, drain, lose, metadata_of, replicating, written
from support import wait_until

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.repair.config import RepairConfig
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_check_progress, encode_ledger
from magnetar.metadata.model import EntryId, LedgerId
from magnetar.metadata.store import ABSENT
from magnetar.metadata.under_replication import BadCopy
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.bookie.repair.auditor import Auditor
    from magnetar.metadata.model import Member
    from magnetar.metadata.under_replication import UnderReplication

SOON = RepairConfig(lost_bookie_delay_s=600, check_period_s=1000, audit_period_s=100_000)


async def marked(nodes: BookieCluster) -> dict[LedgerId, UnderReplication]:
    records = UnderReplicationRecords(nodes.store, SystemClock())
    found = {}
    async for ledger in records.list():
        record = await records.get(ledger)
        assert record is not None
        found[ledger] = record.faults
    return found


async def lost(nodes: BookieCluster) -> dict[LedgerId, frozenset[Member]]:
    return {ledger: what.lost for ledger, what in (await marked(nodes)).items()}


async def until(condition: Callable[[], bool], *, within_s: float = 1000.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.5)


async def audited(auditor: Auditor, *, times: int = 1) -> None:
    await until(lambda: auditor.findings.audits >= times)


async def test_t29_a_bookie_that_stays_away_is_recorded_after_the_delay() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        made = [await written(ledgers, 3) for _ in range(12)]
        async with auditing(nodes, SOON) as auditor:
            await audited(auditor)
            assert auditor.findings.ledgers == 12
            dead = nodes.bookies[1]
            await lose(nodes, dead)
            await asyncio.sleep(590)
            assert await marked(nodes) == {}
            await audited(auditor, times=auditor.findings.audits + 1)
            touched = [e.ledger for e in made if dead.member in e.segments[0].members]
            assert await lost(nodes) == dict.fromkeys(touched, frozenset({dead.member}))


async def test_t29_a_bookie_that_returns_in_time_is_not_recorded() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        await written(ledgers, 3)
        async with auditing(nodes, SOON) as auditor:
            await audited(auditor)
            for _ in range(3):
                await lose(nodes, nodes.bookies[1])
                await asyncio.sleep(500)
                nodes.bookies[1].restart()
                await nodes.register(nodes.bookies[1])
                await asyncio.sleep(500)
            assert await marked(nodes) == {}


async def test_t29_mass_loss_records_nothing_until_it_is_over() -> None:
    async with bookie_cluster(6) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        for _ in range(6):
            await written(ledgers, 3)
        async with auditing(nodes, SOON) as auditor:
            await audited(auditor)
            for each in nodes.bookies[:2]:
                await lose(nodes, each)
            await until(lambda: auditor.held)
            await asyncio.sleep(2000)
            assert await marked(nodes) == {}
            nodes.bookies[0].restart()
            await nodes.register(nodes.bookies[0])
            await until(lambda: not auditor.held)
            await asyncio.sleep(590)
            assert await marked(nodes) == {}, "the last bookie may be about to return"
            await asyncio.sleep(20)
            members = {each for lost_ones in (await lost(nodes)).values() for each in lost_ones}
            assert members == {nodes.bookies[1].member}


async def test_a_former_incarnation_is_recorded_as_lost_at_once() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers, asyncio.TaskGroup() as group:
        await bake_cookies(nodes)
        made = await written(ledgers, 3)
        async with auditing(nodes, SOON) as auditor:
            await audited(auditor)
            old = nodes.bookies.pop(1)
            await lose(nodes, old)
            reborn = FakeBookie("b1", incarnation=2, group=group)
            nodes.bookies.append(reborn)
            await bake_cookies(nodes)
            await nodes.register(reborn)
            await audited(auditor, times=auditor.findings.audits + 1)
            assert await lost(nodes) == {made.ledger: frozenset({old.member})}
        nodes.bookies.append(old)
        async with replicating(nodes):
            await asyncio.sleep(20)
        assert await marked(nodes) == {}
        after = await metadata_of(nodes, made.ledger)
        assert reborn.member in after.segments[0].members
        reborn.kill()


async def test_an_unregistered_bookie_is_lost_and_a_newly_joined_one_is_not() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        made = await written(ledgers, 3)
        gone = nodes.bookie(made.segments[0].members[0])
        await lose(nodes, gone)
        await nodes.store.delete(paths.bookie_cookie(gone.member.bookie), expected=0)
        async with auditing(nodes, SOON) as auditor:
            await audited(auditor)
            assert await lost(nodes) == {made.ledger: frozenset({gone.member})}
            await nodes.add_bookie()
            await bake_cookies(nodes)
            new = await written(ledgers, 3)
            await asyncio.sleep(100)
            assert new.ledger not in await lost(nodes)


async def test_a_decommissioned_bookie_is_recorded_although_it_serves() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        made = await written(ledgers, 3)
        leaving = made.segments[0].members[0]
        async with auditing(nodes, SOON) as auditor, replicating(nodes) as replicator:
            await audited(auditor)
            await drain(nodes, leaving.bookie, decommission=True)
            await until(lambda: replicator.counts.ledgers_repaired == 1)
        after = await metadata_of(nodes, made.ledger)
        assert leaving not in after.segments[0].members


async def test_holes_are_found_in_the_midst_of_a_segment_and_filled() -> None:
    striped = LedgerConfig(ensemble_size=4, write_quorum=3, ack_quorum=2)
    async with bookie_cluster(4) as nodes, nodes.process(striped) as ledgers:
        await bake_cookies(nodes)
        made = [await written(ledgers, 30) for _ in range(3)]
        member, other = made[1].segments[0].members[2], made[2].segments[0].members[0]
        bookie = nodes.bookie(member)
        bookie.entries_page = 4
        stored = bookie.ledgers[made[1].ledger].entries
        for entry in (12, 13, 24):
            del stored[entry]
        del nodes.bookie(other).ledgers[made[2].ledger]
        async with auditing(nodes, SOON) as auditor:
            await until(lambda: auditor.findings.compared_ms > 0, within_s=3000)
            found = await marked(nodes)
            assert found.keys() == {made[1].ledger, made[2].ledger}
            assert found[made[1].ledger].bad == (
                BadCopy(member, EntryId(12), EntryId(13)),
                BadCopy(member, EntryId(24), EntryId(24)),
            )
            lacking = found[made[2].ledger].bad
            assert lacking == (BadCopy(other, EntryId(0), EntryId(28)),), "one for all stripes"
            assert auditor.findings.missing_entries >= 3
            async with replicating(nodes) as replicator:
                await until(lambda: replicator.counts.ledgers_repaired == 2)
        assert {12, 13, 24} <= set(stored)
        assert await marked(nodes) == {}


async def test_a_large_ledger_is_compared_in_short_steps() -> None:
    striped = LedgerConfig(ensemble_size=5, write_quorum=3, ack_quorum=2)
    async with bookie_cluster(5) as nodes, nodes.process(striped) as ledgers:
        await bake_cookies(nodes)
        made = await written(ledgers, 30)
        del nodes.bookie(made.segments[0].members[0]).ledgers[made.ledger]
        stored = await nodes.store.get(paths.ledger(made.ledger))
        assert stored is not None
        large = encode_ledger(replace(made, last_entry=EntryId(99_999)))
        await nodes.store.put(paths.ledger(made.ledger), large, expected=stored.version)
        async with auditing(nodes, SOON) as auditor:
            findings, counts = auditor.findings, [0]
            for bookie in nodes.bookies:
                bookie.may_read.clear()
            await audited(auditor)
            for bookie in nodes.bookies:
                bookie.may_read.set()
            while findings.compared == 0:
                counts.append(findings.missing_entries)
                await asyncio.sleep(0)
            counts.append(findings.missing_entries)
            assert counts[-1] == 3 * (100_000 - 30) + 18
            assert max(after - before for before, after in pairwise(counts)) <= 10_000


async def test_a_bookie_that_is_busy_or_away_is_not_suspected() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        await written(ledgers, 5)
        nodes.bookies[0].kill()  # the dead bookie is still listed
        nodes.bookies[1].may_read.clear()
        async with auditing(nodes, SOON) as auditor:
            await until(lambda: auditor.findings.compared_ms > 0, within_s=3000)
            assert await marked(nodes) == {}


async def test_a_new_auditor_continues_at_the_stored_position() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        made = [await written(ledgers, 1) for _ in range(10)]
        await nodes.store.put(paths.CHECKED, b"what is this", expected=ABSENT)
        async with auditing(nodes, SOON) as first:
            await until(lambda: first.findings.compared >= 6)
        stored = await nodes.store.get(paths.CHECKED)
        assert stored is not None
        progress = decode_check_progress(stored.value)
        assert made[0].ledger < progress.after < made[-1].ledger
        async with auditing(nodes, SOON, seed=10) as second:
            await until(lambda: second.findings.compared_ms > 0, within_s=3000)
            rest = sum(each.ledger > progress.after for each in made)
            assert second.findings.compared == rest


async def test_ledgers_that_appear_during_a_round_do_not_each_add_a_period() -> None:
    config = replace(SOON, audit_period_s=10)
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        await written(ledgers, 3)
        async with auditing(nodes, config) as auditor:
            await until(lambda: auditor.findings.compared == 1)
            for _ in range(19):
                await written(ledgers, 3)
            begun_s = asyncio.get_running_loop().time()
            await until(lambda: auditor.findings.compared == 20, within_s=30_000)
            assert asyncio.get_running_loop().time() - begun_s <= 1_100


async def test_a_round_over_no_ledgers_lasts_a_whole_period() -> None:
    async with bookie_cluster(3) as nodes:
        await bake_cookies(nodes)
        rounds: list[float] = []
        loop = asyncio.get_running_loop()
        nodes.store.watch(paths.CHECKED, lambda: rounds.append(loop.time()))
        async with auditing(nodes, SOON):
            await until(lambda: len(rounds) == 3, within_s=3000)
        first, second, third = rounds
        assert (round(second - first), round(third - second)) == (1000, 1000)


async def test_a_narrow_ledger_is_recorded_once_enough_bookies_are_writable() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        await lose(nodes, nodes.bookies[2])
        await wait_until(lambda: not ledgers.full_ensemble_possible())
        made = await written(ledgers, 5)
        assert made.under_replicated
        async with auditing(nodes, SOON) as auditor:
            await audited(auditor)
            assert await marked(nodes) == {}
            nodes.bookies[2].restart()
            await nodes.register(nodes.bookies[2])
            await audited(auditor, times=auditor.findings.audits + 1)
            assert (await marked(nodes))[made.ledger].narrow
            async with replicating(nodes) as replicator:
                await until(lambda: replicator.counts.ledgers_repaired == 1)
        assert (await metadata_of(nodes, made.ledger)).write_quorum == 3


async def test_a_narrow_ledger_is_recorded_when_one_more_copy_is_possible() -> None:
    """Three of the four wanted copies are better than two."""
    wanted = LedgerConfig(ensemble_size=4, write_quorum=4, ack_quorum=2)
    async with bookie_cluster(4) as nodes, nodes.process(wanted) as ledgers:
        await bake_cookies(nodes)
        for bookie in nodes.bookies[2:]:
            await lose(nodes, bookie)
        await wait_until(lambda: len(ledgers.services.directory.writable) == 2)
        made = await written(ledgers, 5)
        assert made.write_quorum == 2
        async with auditing(nodes, SOON, wanted=wanted) as auditor:
            await audited(auditor)
            nodes.bookies[2].restart()
            await nodes.register(nodes.bookies[2])
            await until(lambda: auditor.findings.recorded == 1, within_s=100.0)
            assert (await marked(nodes))[made.ledger].narrow


async def test_a_narrow_ledger_is_recorded_although_its_own_bookie_is_read_only() -> None:
    """The third bookie can take a copy. There are never more than two writable bookies."""
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        await lose(nodes, nodes.bookies[2])
        await wait_until(lambda: not ledgers.full_ensemble_possible())
        made = await written(ledgers, 5)
        await nodes.register(nodes.bookies[0], read_only=True)
        async with auditing(nodes, SOON) as auditor:
            await audited(auditor)
            assert await marked(nodes) == {}
            nodes.bookies[2].restart()
            await nodes.register(nodes.bookies[2])
            await until(lambda: auditor.findings.recorded == 1, within_s=100.0)
            async with replicating(nodes) as replicator:
                await until(lambda: replicator.counts.ledgers_repaired == 1)
        assert (await metadata_of(nodes, made.ledger)).write_quorum == 3


async def test_one_auditor_of_several_works_and_another_one_takes_over() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        await written(ledgers, 1)
        async with (
            auditing(nodes, SOON, seed=10) as second,
            auditing(nodes, SOON, seed=11) as third,
        ):
            await until(lambda: second.is_leader or third.is_leader)
            assert not (second.is_leader and third.is_leader)
            leader, other = (second, third) if second.is_leader else (third, second)
            await audited(leader)
            assert other.findings.audits == 0
            leader._store.expire()  # type: ignore[attr-defined]
            await audited(other)


async def test_a_new_term_restarts_the_lost_bookie_delay() -> None:
    """An auditor does not use the observations of its earlier term in a later term."""

    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        for _ in range(4):
            await written(ledgers, 3)
        async with auditing(nodes, SOON) as auditor:
            await audited(auditor)
            restarting = nodes.bookies[1]
            await lose(nodes, restarting)
            await until(lambda: auditor._lost_bookies.timer_at() is not None)
            store = auditor._store
            store.suspend()  # type: ignore[attr-defined]
            await until(lambda: not auditor.is_leader)
            restarting.restart()
            await nodes.register(restarting)
            await asyncio.sleep(500)
            await lose(nodes, restarting)
            store.reconnect()  # type: ignore[attr-defined]
            await until(lambda: auditor.is_leader)
            await asyncio.sleep(590)
            assert await marked(nodes) == {}
            await asyncio.sleep(20)
            assert auditor.findings.recorded > 0


async def test_an_audit_skipped_without_bookies_begins_when_a_bookie_is_listed() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        await written(ledgers, 3)
        for each in nodes.bookies:
            await lose(nodes, each)
        async with auditing(nodes, SOON) as auditor:
            await until(lambda: auditor.is_leader)
            await asyncio.sleep(10)
            assert auditor.findings.audits == 0, "no bookie is there to copy from or to"
            nodes.bookies[0].restart()
            await nodes.register(nodes.bookies[0])
            await audited(auditor)


async def test_an_unreadable_ledger_record_does_not_stop_an_audit() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        made = await written(ledgers, 3)
        await nodes.store.put(paths.ledger(LedgerId(7)), b"what is this", expected=ABSENT)
        dead = nodes.bookie(made.segments[0].members[0])
        await lose(nodes, dead)
        async with auditing(nodes, RepairConfig(lost_bookie_delay_s=0)) as auditor:
            await audited(auditor)
            assert auditor.findings.unreadable == 1
            assert made.ledger in await lost(nodes)


async def test_an_unreadable_under_replication_record_does_not_stop_an_audit() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        made = [await written(ledgers, 3) for _ in range(12)]
        path = paths.under_replicated(made[0].ledger)
        await nodes.store.put(path, b"junk", expected=ABSENT)
        leaving = made[0].segments[0].members[0]
        await drain(nodes, leaving.bookie, decommission=True)
        async with auditing(nodes, SOON) as auditor:
            await audited(auditor)
            assert auditor.findings.unreadable == 1
            stored = await nodes.store.get(path)
            assert stored is not None
            assert stored.value == b"junk"
            await nodes.store.delete(path, expected=stored.version)
            touched = [it.ledger for it in made[1:] if leaving in it.segments[0].members]
            assert await lost(nodes) == dict.fromkeys(touched, frozenset({leaving}))
            assert touched


async def test_an_unreadable_under_replication_record_does_not_stop_a_comparison() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        made = [await written(ledgers, 3) for _ in range(2)]
        bookie = nodes.bookies[0]
        for each in made:
            del bookie.ledgers[each.ledger].entries[1]
        path = paths.under_replicated(made[0].ledger)
        await nodes.store.put(path, b"junk", expected=ABSENT)
        async with auditing(nodes, SOON) as auditor:
            await until(lambda: auditor.findings.compared_ms > 0, within_s=5_000)
            stored = await nodes.store.get(path)
            assert stored is not None
            await nodes.store.delete(path, expected=stored.version)
            hole = BadCopy(bookie.member, EntryId(1), EntryId(1))
            assert {it: what.bad for it, what in (await marked(nodes)).items()} == {
                made[1].ledger: (hole,)
            }


async def test_an_audit_waits_while_the_metadata_store_is_away() -> None:
    async with bookie_cluster(4) as nodes, nodes.process() as ledgers:
        await bake_cookies(nodes)
        made = await written(ledgers, 3)
        async with auditing(nodes, RepairConfig(lost_bookie_delay_s=30)) as auditor:
            await audited(auditor)
            dead = nodes.bookie(made.segments[0].members[0])
            await lose(nodes, dead)
            await asyncio.sleep(20)
            store = auditor._store
            store.suspend()  # type: ignore[attr-defined]
            await asyncio.sleep(60)
            assert await marked(nodes) == {}
            store.reconnect()  # type: ignore[attr-defined]
            await until(lambda: auditor.findings.recorded > 0)
