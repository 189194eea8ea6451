"""The survey shows an operator the true state of the bookies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fakes.ledger_bookies import BookieCluster, FakeBookie, bookie_cluster
from fakes.repairs import bake_cookies, drain, lose, written

from magnetar.bookie.ledger.errors import LedgerNotFound
from magnetar.bookie.repair.errors import NoSuchCluster
from magnetar.bookie.repair.survey import (
    BookieState,
    survey_bookies,
    survey_ledger,
    survey_under_replication,
)
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_cluster
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import NO_LEDGER, BookieAddress, LedgerId
from magnetar.metadata.store import ABSENT
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from magnetar.bookie.ledger.peer import BookiePeer
    from magnetar.metadata.model import Member


def opener(nodes: BookieCluster) -> object:
    def open_peer(member: Member, address: BookieAddress) -> BookiePeer:
        assert address == BookieAddress(f"{member.bookie}:3181", f"{member.bookie}:3182")
        return nodes.bookie(member)

    return open_peer


async def founded(nodes: BookieCluster) -> None:
    await nodes.store.put(paths.CLUSTER, encode_cluster("c" * 32), expected=ABSENT)
    await bake_cookies(nodes)


async def test_the_survey_shows_each_state_of_a_bookie() -> None:
    async with bookie_cluster(6) as nodes:
        await founded(nodes)
        async with nodes.process() as ledgers:
            made = [await written(ledgers, 2) for _ in range(8)]
            appender = await ledgers.create(newer_than=NO_LEDGER, custom={})
        members = [each.member for each in nodes.bookies]
        await drain(nodes, members[1].bookie, decommission=False)
        await drain(nodes, members[2].bookie, decommission=True)
        await nodes.register(nodes.bookies[3], read_only=True)
        await lose(nodes, nodes.bookies[4])
        await lose(nodes, nodes.bookies[5])
        stored = await nodes.store.get(paths.bookie_cookie(members[5].bookie))
        assert stored is not None
        await nodes.store.delete(paths.bookie_cookie(members[5].bookie), expected=stored.version)
        rows = {
            row.member.bookie: row
            for row in await survey_bookies(nodes.store, opener(nodes))  # type: ignore[arg-type]
        }
        assert [rows[f"b{n}"].state for n in range(5)] == [
            BookieState.WRITABLE,
            BookieState.DRAINING,
            BookieState.LEAVING,
            BookieState.READ_ONLY,
            BookieState.MISSING,
        ]
        for each in members[:5]:
            on_it = sum(each in ledger.segments[0].members for ledger in made)
            is_open = each in appender.metadata.segments[0].members
            assert rows[each.bookie].ledgers == on_it + is_open
            assert rows[each.bookie].open_ledgers == is_open
        if "b5" in rows:  # some ledger names it
            assert rows["b5"].state is BookieState.UNKNOWN
        assert rows["b0"].address == "b0:3181"
        assert rows["b0"].disk_total_bytes == 0
        assert (rows["b4"].address, rows["b4"].disk_total_bytes) == ("", None)


async def test_the_survey_shows_a_former_incarnation_while_a_ledger_names_it() -> None:
    async with bookie_cluster(3) as nodes:
        await founded(nodes)
        async with nodes.process() as ledgers:
            made = await written(ledgers, 2)
        old = nodes.bookies.pop(0)
        await lose(nodes, old)
        reborn = FakeBookie("b0", incarnation=2, group=nodes._group)
        nodes.bookies.append(reborn)
        await nodes.register(reborn)
        await bake_cookies(nodes)
        rows = await survey_bookies(nodes.store, opener(nodes))  # type: ignore[arg-type]
        found = [(row.member, row.state, row.ledgers) for row in rows[:2]]
        assert found == [
            (old.member, BookieState.FORMER, 1),
            (reborn.member, BookieState.WRITABLE, 0),
        ]
        assert old.member in made.segments[0].members
        reborn.kill()


async def test_the_survey_of_a_ledger_shows_its_present_copies() -> None:
    async with bookie_cluster(4) as nodes:
        await founded(nodes)
        async with nodes.process() as ledgers:
            made = await written(ledgers, 10)
        members = made.segments[0].members
        del nodes.bookie(members[0]).ledgers[made.ledger].entries[4]
        nodes.bookie(members[0]).entries_page = 3
        del nodes.bookie(members[1]).ledgers[made.ledger]
        nodes.bookie(members[2]).kill()
        await UnderReplicationRecords(nodes.store, SystemClock()).add_lost(
            made.ledger, [members[2]]
        )
        view = await survey_ledger(
            nodes.store,
            opener(nodes),  # type: ignore[arg-type]
            SystemClock(),
            made.ledger,
        )
        assert view.metadata == made
        assert view.record is not None
        assert [(row.member, row.expected, row.held) for row in view.copies] == [
            (members[0], 10, 9),
            (members[1], 10, 0),
            (members[2], 10, None),
        ]
        assert "CONNECTION_LOST" in view.copies[2].why
        damaged = paths.under_replicated(LedgerId(99))
        await nodes.store.put(damaged, b"what is this", expected=ABSENT)
        (record, working), (other, _) = await survey_under_replication(nodes.store, SystemClock())
        assert (record, working) == (view.record, False)
        assert other.ledger == 99
        assert "invalid under-replication record" in other.faults.failure


async def test_an_open_ledger_is_surveyed_and_not_changed() -> None:
    async with bookie_cluster(3) as nodes, nodes.process() as ledgers:
        await founded(nodes)
        appender = await ledgers.create(newer_than=NO_LEDGER, custom={})
        appender.append_nowait([[b"x"]])
        view = await survey_ledger(
            nodes.store,
            opener(nodes),  # type: ignore[arg-type]
            SystemClock(),
            appender.ledger,
        )
        assert [(row.last, row.expected) for row in view.copies] == [(None, None)] * 3
        record = paths.under_replicated(appender.ledger)
        await nodes.store.put(record, b"what is this", expected=ABSENT)
        view = await survey_ledger(
            nodes.store,
            opener(nodes),  # type: ignore[arg-type]
            SystemClock(),
            appender.ledger,
        )
        assert view.record is not None, "a record that cannot be read hides no ledger"
        assert "invalid under-replication record" in view.record.faults.failure
        appender.append_nowait([[b"x"]])
        assert (await appender.close()).last_entry == 1


async def test_missing_copies_are_named() -> None:
    async with bookie_cluster(1) as nodes:
        with pytest.raises(NoSuchCluster):
            await survey_bookies(MemoryStore(), opener(nodes))  # type: ignore[arg-type]
        await founded(nodes)
        with pytest.raises(LedgerNotFound):
            await survey_ledger(
                nodes.store,
                opener(nodes),  # type: ignore[arg-type]
                SystemClock(),
                LedgerId(99),
            )
