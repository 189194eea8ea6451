"""Ledgers that another process recovers or reads: fencing, recovery, reading and memory."""

import asyncio
from dataclasses import replace
from random import Random

import pytest
from fakes.ledger_bookies import bookie_cluster
from fakes.ledger_lives import append, confirmed, create, ledger_cluster, payload, read_all, seated
from support import settle, wait_until

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.errors import (
    EntryUnreadable,
    LedgerFenced,
    RecoveryIncomplete,
)
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.metadata.errors import OutcomeUnknown, Unavailable
from magnetar.metadata.memory import Fault, MemoryStore
from magnetar.metadata.model import EntryId, LedgerState
from magnetar.protos.envelope import BookieCode

QUICK = LedgerConfig(
    add_timeout_s=0.3,
    quorum_timeout_s=1.5,
    read_timeout_s=0.3,
    speculative_read_s=0.05,
    connect_timeout_s=0.3,
    metadata_timeout_s=2.0,
    health_half_life_s=5.0,
)


# -- fencing and recovery ------------------------------------------------------------------------


async def test_recovery_takes_the_ledger_from_a_live_writer() -> None:
    async with ledger_cluster(4) as (nodes, ledgers), nodes.process(QUICK, seed=2) as others:
        appender = await create(ledgers)
        append(appender, 20)
        await wait_until(lambda: appender.confirmed >= 0)
        metadata = await others.recover(appender.ledger)
        assert metadata.state is LedgerState.CLOSED
        assert metadata.last_entry is not None
        assert metadata.last_entry >= appender.confirmed
        append_failed = False
        for _ in range(3):
            try:
                append(appender)
            except LedgerFenced:
                append_failed = True
            await settle()
        await wait_until(lambda: appender.failure)
        assert isinstance(appender.failure, LedgerFenced)
        assert append_failed
        assert appender.confirmed <= metadata.last_entry
        with pytest.raises(LedgerFenced):
            await appender.close()
        found = await read_all(others, appender.ledger)
        assert found == [payload(n) for n in range(metadata.last_entry + 1)]
        assert metadata.length == sum(map(len, found))
        assert await ledgers.recover(appender.ledger) == metadata  # idempotent


async def test_r4_every_read_of_a_recovery_fences() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 5)
        await confirmed(appender)
        appender.abandon()
        for bookie in nodes.bookies:
            bookie.reads.clear()
        await ledgers.recover(appender.ledger)
        requests = [request for bookie in nodes.bookies for request in bookie.reads]
        assert requests
        assert all(request.fence for request in requests)
        assert all(request.fence for b in nodes.bookies for request in b.fences)


async def test_t2_an_add_that_arrives_after_the_recovery_is_refused() -> None:
    """One bookie has the entry and is dead. The other two bookies receive the add only after the
    recoverer has closed the ledger without the entry."""

    async with ledger_cluster(3) as (nodes, ledgers), nodes.process(QUICK, seed=2) as others:
        appender = await create(ledgers)
        gone, *late = seated(nodes, appender)
        for bookie in late:
            bookie.may_take.clear()
        append(appender)
        await wait_until(lambda: gone.entries(appender.ledger) == [0])
        gone.kill()
        metadata = await others.recover(appender.ledger)
        assert metadata.last_entry == -1
        for bookie in late:
            bookie.may_take.set()
        await wait_until(lambda: appender.failure)
        assert isinstance(appender.failure, LedgerFenced)
        assert appender.confirmed == -1


async def test_t4_an_empty_ledger_is_recovered_as_empty_or_not_at_all() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        appender.abandon()
        for bookie in nodes.bookies[:2]:
            bookie.kill()
        with pytest.raises(RecoveryIncomplete) as caught:
            await ledgers.recover(appender.ledger)
        assert "CONNECTION_LOST" in caught.value.why
        assert not caught.value.definite
        stored = await ledgers.metadata(appender.ledger)
        assert stored is not None
        assert stored.state is LedgerState.IN_RECOVERY
        nodes.bookies[0].restart()
        closed = await ledgers.recover(appender.ledger)
        assert (closed.last_entry, closed.length) == (-1, 0)


async def test_t18_recovery_does_not_wait_for_a_hung_bookie() -> None:
    async with ledger_cluster(3, LedgerConfig()) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 5)
        await confirmed(appender)
        appender.abandon()
        nodes.bookies[1].may_read.clear()
        began = asyncio.get_running_loop().time()
        assert (await ledgers.recover(appender.ledger)).last_entry == 4
        assert asyncio.get_running_loop().time() - began < 1.0
        nodes.bookies[1].may_read.set()


async def test_t17_write_backs_go_to_a_spare_and_the_ensemble_is_recorded_with_the_close() -> None:
    async with ledger_cluster(4) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 3)
        await confirmed(appender)
        # An entry that only one bookie has, and a bookie that takes no write-backs.
        bookies = seated(nodes, appender)
        for bookie in bookies[1:]:
            bookie.judge_add = lambda _: BookieCode.IO_ERROR
        append(appender)
        await wait_until(lambda: bookies[0].entries(appender.ledger) == [0, 1, 2, 3])
        appender.abandon()
        bookies[2].judge_add = lambda _: None
        metadata = await ledgers.recover(appender.ledger)
        assert metadata.last_entry == 3
        members = [nodes.bookie(m) for m in metadata.segment_of(metadata.last_entry).members]
        holders = [b for b in members if 3 in b.entries(appender.ledger)]
        assert len(holders) >= 2
        assert await read_all(ledgers, appender.ledger) == [payload(n) for n in range(4)]


async def test_a_recovery_reports_entries_it_could_not_write_back_in_time() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 3)
        await confirmed(appender)
        appender.abandon()
        _, other, slow = seated(nodes, appender)
        for bookie in (other, slow):  # these bookies receive the last entry late
            del bookie.ledgers[appender.ledger].entries[2]
        slow.may_open.clear()
        closed = await ledgers.recover(appender.ledger)
        assert closed.last_entry == 2
        [(ledger, bad)] = ledgers.bad_copies.drain()
        assert (ledger, bad.member) == (appender.ledger, slow.member)
        assert bad.first_entry <= 2 <= bad.last_entry


async def test_a_recovery_without_a_spare_reports_what_the_dead_member_lacks() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        victim = seated(nodes, appender)[2]
        append(appender)
        await confirmed(appender)
        await wait_until(lambda: victim.entries(appender.ledger) == [0])
        for bookie in nodes.bookies:
            bookie.may_ack.clear()
        append(appender, 2)  # stored, and never confirmed
        others = [bookie for bookie in nodes.bookies if bookie is not victim]
        await wait_until(lambda: all(len(b.entries(appender.ledger)) == 3 for b in others))
        appender.abandon()
        victim.kill()
        for bookie in nodes.bookies:
            bookie.may_ack.set()
        ledgers.bad_copies.drain()
        assert (await ledgers.recover(appender.ledger)).last_entry == 2
        told = [(note.member, note.last_entry) for _, note in ledgers.bad_copies.drain()]
        assert told == [(victim.member, 2)]


async def test_concurrent_recoveries_agree() -> None:
    async def once(first: Ledgers, second: Ledgers) -> None:
        appender = await create(first)
        append(appender, 30)
        await wait_until(lambda: appender.confirmed >= 0)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(each.recover(appender.ledger))
                for each in (first, second, first, second)
            ]
        (end,) = {task.result().last_entry for task in tasks}
        assert end is not None
        assert end >= appender.confirmed

    async with ledger_cluster(5) as (nodes, first), nodes.process(QUICK, seed=2) as second:
        for _ in range(5):
            await once(first, second)


async def test_t16_a_second_recovery_succeeds_after_a_recoverer_died() -> None:
    async with ledger_cluster(3) as (nodes, ledgers), asyncio.TaskGroup() as group:
        for cut in range(1, 30, 2):
            appender = await create(ledgers)
            append(appender, 4)
            await confirmed(appender)
            appender.abandon()
            async with nodes.process(QUICK, seed=2) as dying:
                task = group.create_task(dying.recover(appender.ledger))
                await settle(cut)
                task.cancel()
            metadata = await ledgers.recover(appender.ledger)
            assert metadata.last_entry == 3
            assert len(await read_all(ledgers, appender.ledger)) == 4


async def test_a_caller_that_is_cancelled_does_not_stop_the_recovery() -> None:
    async with ledger_cluster(3) as (_, ledgers):
        appender = await create(ledgers)
        append(appender, 2)
        await confirmed(appender)
        appender.abandon()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await ledgers.recover(appender.ledger)
        stored = None
        for _ in range(100):
            stored = await ledgers.metadata(appender.ledger)
            assert stored is not None
            if stored.state is LedgerState.CLOSED:
                break
            await settle()
        assert stored is not None
        assert stored.last_entry == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_callers_of_a_recovery_get_an_error_when_the_process_stops(begun: bool) -> None:
    """The callers get RecoveryIncomplete and are not cancelled, also if the recovery had not
    begun."""

    async with bookie_cluster(3) as nodes:
        async with nodes.process(QUICK) as ledgers:
            appender = await create(ledgers)
            append(appender, 2)
            await confirmed(appender)
            appender.abandon()
        for bookie in nodes.bookies:
            bookie.may_read.clear()
        errors: list[BaseException] = []

        async def recover(stopping: Ledgers) -> None:
            try:
                await stopping.recover(appender.ledger)
            except RecoveryIncomplete as error:
                errors.append(error)

        async with asyncio.TaskGroup() as group, nodes.process(QUICK, seed=2) as stopping:
            for _ in range(2):
                group.create_task(recover(stopping))
            await settle(30 if begun else 1)
        assert [type(error) for error in errors] == [RecoveryIncomplete] * 2
        assert stopping._recovering == {}


async def test_a_ledger_is_recovered_in_the_process_that_still_writes_it() -> None:
    """A topic left this broker and returned before the first appender noticed the change."""

    async with ledger_cluster(3) as (_, ledgers):
        zombie = await create(ledgers)
        append(zombie, 10)
        await wait_until(lambda: zombie.confirmed >= 0)
        metadata = await ledgers.recover(zombie.ledger)
        await wait_until(lambda: zombie.failure or zombie.confirmed == zombie.appended)
        assert metadata.last_entry is not None
        assert metadata.last_entry >= zombie.confirmed
        assert len(await read_all(ledgers, zombie.ledger)) == metadata.last_entry + 1


async def live(seed: int) -> tuple[int, int]:
    """Write to bookies that die and return. Then two recoveries of another process run at once.

    Returns the number of confirmed entries and the number of ensemble changes.
    """
    random = Random(seed)
    sizes = random.choice([(3, 3, 2), (4, 3, 2), (3, 2, 2), (2, 2, 1)])
    config = replace(
        QUICK,
        ensemble_size=sizes[0],
        write_quorum=sizes[1],
        ack_quorum=sizes[2],
        # No bookie is silent in this test, so timeouts are long: a busy machine must not exceed
        # them.
        add_timeout_s=10.0,
        read_timeout_s=10.0,
        quorum_timeout_s=20.0,
    )
    async with (
        bookie_cluster(sizes[0] + random.randrange(3)) as nodes,
        nodes.process(config, seed=1) as ledgers,
        nodes.process(config, seed=2) as others,
    ):
        appender = await create(ledgers)
        for _ in range(60):
            bookie = random.choice(nodes.bookies)
            chance = random.random()
            if chance < 0.1 and sum(each.up for each in nodes.bookies) > sizes[0] - 1:
                bookie.kill()
            elif chance < 0.4 and not bookie.up:
                bookie.restart()
            elif appender.failure is None:
                append(appender, random.randrange(5))
            await settle(random.randrange(6))
        if random.random() < 0.5:
            appender.abandon()
        for bookie in nodes.bookies:
            bookie.restart()
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(each.recover(appender.ledger)) for each in (ledgers, others)]
        (metadata,) = {task.result().last_entry: task.result() for task in both}.values()
        assert metadata.last_entry is not None
        assert metadata.last_entry >= appender.confirmed
        assert len(await read_all(others, appender.ledger)) == metadata.last_entry + 1
        for entry in range(metadata.last_entry + 1):
            holders = metadata.segment_of(EntryId(entry)).members
            copies = sum(entry in nodes.bookie(each).entries(appender.ledger) for each in holders)
            assert copies >= sizes[2], entry
        return appender.confirmed + 1, len(appender.metadata.segments) - 1


@pytest.mark.virtual_loop(deadline_s=60)
@pytest.mark.parametrize("start", [0, 8])
async def test_writers_confirm_and_change_ensembles_while_bookies_die(start: int) -> None:
    lives = [await live(seed) for seed in range(start, start + 8)]
    assert sum(confirmed for confirmed, _ in lives) > 200
    assert sum(changes for _, changes in lives) > 3


# -- reading -------------------------------------------------------------------------------------


async def test_t36_a_damaged_replica_is_passed_over() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 3)
        await confirmed(appender)
        await appender.close()
        bookies = seated(nodes, appender)
        await wait_until(lambda: all(len(b.entries(appender.ledger)) == 3 for b in bookies))
        for bookie in bookies[:2]:
            stored = bookie.ledgers[appender.ledger].entries
            stored[1] = stored[1][:-1] + b"?"
        for _ in range(6):
            assert len(await read_all(ledgers, appender.ledger)) == 3


async def test_t37_a_copy_with_the_bytes_of_another_entry_is_rejected() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 3)
        await confirmed(appender)
        await appender.close()
        bookies = seated(nodes, appender)
        await wait_until(lambda: all(len(b.entries(appender.ledger)) == 3 for b in bookies))
        for bookie in bookies:
            stored = bookie.ledgers[appender.ledger].entries
            stored[1] = stored[2]
        reader = ledgers.reader(appender.metadata)
        with pytest.raises(EntryUnreadable) as caught:
            await reader.read(1, 1, bytes_max=100)
        assert set(caught.value.answers.values()) == {BookieCode.CORRUPT}
        assert not caught.value.missing


async def test_reads_fall_back_from_dead_and_hanging_bookies() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 3)
        await confirmed(appender)
        await appender.close()
        await wait_until(lambda: all(len(b.entries(appender.ledger)) == 3 for b in nodes.bookies))
        nodes.bookies[0].kill()
        nodes.bookies[1].may_read.clear()
        assert len(await read_all(ledgers, appender.ledger)) == 3
        nodes.bookies[2].kill()
        with pytest.raises(EntryUnreadable) as caught:
            await ledgers.reader(appender.metadata).read(0, 0, bytes_max=1)
        assert set(caught.value.answers.values()) == {
            BookieCode.CONNECTION_LOST,
            BookieCode.TIMEOUT,
        }
        nodes.bookies[1].may_read.set()


async def test_an_entry_on_no_bookie_is_reported_missing() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender)
        await confirmed(appender)
        await appender.close()
        await wait_until(lambda: all(b.entries(appender.ledger) for b in nodes.bookies))
        for bookie in nodes.bookies:
            del bookie.ledgers[appender.ledger].entries[0]
        with pytest.raises(EntryUnreadable) as caught:
            await ledgers.reader(appender.metadata).read(0, 0, bytes_max=1)
        assert caught.value.missing
        assert not caught.value.definite


async def test_t45_replicas_that_moved_are_found_by_reading_the_metadata_again() -> None:
    async with ledger_cluster(6) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 3)
        await confirmed(appender)
        before = await appender.close()
        old = seated(nodes, appender)
        await wait_until(lambda: all(len(b.entries(appender.ledger)) == 3 for b in old))
        new = [each for each in nodes.bookies if each not in old]
        for source, target in zip(old, new, strict=True):
            target.ledgers[appender.ledger] = source.ledgers[appender.ledger]
            source.kill()
        await nodes.move(appender.ledger, [each.member for each in new])
        reader = ledgers.reader(before)
        assert len(await reader.read(0, 2, bytes_max=1000)) == 3
        assert reader.metadata != before


async def test_striped_ledgers_are_read_across_their_stripes() -> None:
    config = LedgerConfig(ensemble_size=4, write_quorum=2, ack_quorum=2, connect_timeout_s=0.3)

    async with ledger_cluster(6, config) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 10)
        await confirmed(appender)
        seated(nodes, appender)[1].kill()
        append(appender, 10)
        await confirmed(appender)
        assert len(appender.metadata.segments) == 2
        found = await appender.read(2, 19, bytes_max=1 << 20)
        assert [entry.entry for entry in found] == list(range(2, 20))
        found = await appender.read(0, 19, bytes_max=30)
        assert 1 < len(found) < 20
        appender.abandon()
        assert (await ledgers.recover(appender.ledger)).last_entry == 19
        assert await read_all(ledgers, appender.ledger) == [payload(n) for n in range(20)]


# -- memory --------------------------------------------------------------------------------------


async def test_appenders_wait_for_room() -> None:
    config = LedgerConfig(unconfirmed_bytes_max=1 << 20)

    async with ledger_cluster(3, config) as (nodes, ledgers), asyncio.TaskGroup() as group:
        appender = await create(ledgers)
        for bookie in nodes.bookies:
            bookie.may_ack.clear()
        entry = bytes(300_000)
        for _ in range(4):
            await appender.wait_room()
            assert appender.has_room
            appender.append_nowait([[entry]])
        waiting = group.create_task(appender.wait_room())
        await settle()
        assert not waiting.done()
        assert not appender.has_room
        assert appender.in_flight_bytes > 1 << 20
        for bookie in nodes.bookies:
            bookie.may_ack.set()
        await waiting
        await confirmed(appender)
        assert appender.in_flight_bytes == 0


async def test_t33_a_bookie_that_lags_too_far_is_replaced_and_its_bytes_are_freed() -> None:
    config = LedgerConfig(lag_bytes_max=1 << 20, connect_timeout_s=0.3)

    async with ledger_cluster(4, config) as (nodes, ledgers):
        appender = await create(ledgers)
        slow = seated(nodes, appender)[0]
        slow.may_ack.clear()
        entry = bytes(100_000)
        budget = ledgers.services.budget
        for _ in range(30):
            appender.append_nowait([[entry]])
            await wait_until(lambda: appender.confirmed == appender.appended)
            assert budget.retained < 2 << 20
            budget.check()
        await wait_until(lambda: slow not in seated(nodes, appender))
        await wait_until(lambda: budget.retained == 0)
        slow.may_ack.set()


async def test_the_budget_of_the_process_makes_every_ledger_wait() -> None:
    config = LedgerConfig(retained_bytes_max=1 << 20)

    async with ledger_cluster(3, config) as (nodes, ledgers), asyncio.TaskGroup() as group:
        one, two = await create(ledgers), await create(ledgers)
        for bookie in nodes.bookies:
            bookie.may_ack.clear()
        large = bytes(1 << 20)
        await one.wait_room()
        one.append_nowait([[large]])
        waits = [group.create_task(each.wait_room()) for each in (one, two)]
        await settle()
        assert not any(wait.done() for wait in waits)
        for bookie in nodes.bookies:
            bookie.may_ack.set()
        for wait in waits:
            await wait
        assert ledgers.services.budget.retained == 0


async def test_stopping_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        for bookie in nodes.bookies:
            bookie.may_ack.clear()
        append(appender, 3)
        seated(nodes, appender)[0].kill()
        await settle()
    await settle()
    assert asyncio.all_tasks() == before
    with pytest.raises(RecoveryIncomplete):
        await ledgers.recover(appender.ledger)


async def test_create_raises_an_error_when_the_metadata_store_does_not_answer() -> None:
    async with bookie_cluster(3) as nodes:
        faults: list[Fault] = []
        store = MemoryStore(
            nodes.tree, faults=lambda op, _: faults[0] if faults and op == "put" else None
        )
        config = LedgerConfig(metadata_timeout_s=0.2)
        async with nodes.process(config, store=store) as ledgers:
            await create(ledgers)
            faults.append(Fault.REPLY_LOST)
            await create(ledgers)  # a second read shows that the ledger exists and is ours
            faults[0] = Fault.REQUEST_LOST
            with pytest.raises((OutcomeUnknown, Unavailable)):
                await create(ledgers)
