"""Ledgers, appenders and recoveries with their shells, over fake bookies and in virtual time."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from fakes.ledger_bookies import bookie_cluster
from fakes.ledger_lives import append, confirmed, create, ledger_cluster, payload, read_all, seated
from support import settle, wait_until

from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.errors import (
    EntryTooLarge,
    LedgerClosed,
    LedgerFenced,
    LedgerNotFound,
    LedgerRefused,
    NotEnoughBookies,
    QuorumTimeout,
)
from magnetar.bookie.ledger.ledgers import TICKS_PER_TURN
from magnetar.metadata import paths
from magnetar.metadata.memory import Fault, MemoryStore
from magnetar.metadata.model import LedgerId, LedgerState
from magnetar.protos.envelope import ENTRY_BYTES_MAX, BookieCode
from magnetar.runtime.frames import FRAME_BYTES_MAX, Buffer, size_of
from magnetar.runtime.tcp_frames import FRAME_LIMIT_BYTES

QUICK = LedgerConfig(
    add_timeout_s=0.3,
    quorum_timeout_s=1.5,
    read_timeout_s=0.3,
    speculative_read_s=0.05,
    connect_timeout_s=0.3,
    metadata_timeout_s=2.0,
    health_half_life_s=5.0,
)


# -- create, append, read, close, delete ---------------------------------------------------------


async def test_a_ledger_is_created_written_read_closed_and_deleted() -> None:
    async with ledger_cluster(4) as (nodes, ledgers):
        appender = await ledgers.create(newer_than=LedgerId(41), custom={"topic": b"t"})
        assert appender.ledger == 42
        assert (appender.confirmed, appender.appended, appender.length) == (-1, -1, 0)
        append(appender, 10)
        assert appender.appended == 9
        await confirmed(appender)
        open_entries = await appender.read(3, 9, bytes_max=1 << 20)
        assert [bytes(e.payload) for e in open_entries] == [payload(n) for n in range(3, 10)]
        metadata = await appender.close()
        assert metadata.state is LedgerState.CLOSED
        assert metadata.last_entry == 9
        assert metadata.length == sum(len(payload(n)) for n in range(10))
        assert metadata.custom == {"topic": b"t"}
        assert not appender.degraded
        assert await ledgers.metadata(appender.ledger) == metadata
        assert await read_all(ledgers, appender.ledger) == [payload(n) for n in range(10)]
        assert await appender.close() == metadata  # idempotent
        await wait_until(lambda: all(len(b.entries(42)) == 10 for b in seated(nodes, appender)))
        await ledgers.delete(appender.ledger)
        assert await ledgers.metadata(appender.ledger) is None
        await ledgers.delete(appender.ledger)
        with pytest.raises(LedgerNotFound):
            await ledgers.recover(appender.ledger)


async def test_progress_comes_once_per_frame_and_never_from_inside_append() -> None:
    async with ledger_cluster(3) as (_, ledgers):
        appender = await create(ledgers)
        calls: list[int] = []
        appending = False

        def progress() -> None:
            assert not appending
            calls.append(appender.confirmed)

        appender.progress = progress
        appending = True
        append(appender, 50)
        appending = False
        await confirmed(appender)
        assert calls == sorted(set(calls))
        assert calls[-1] == 49
        assert len(calls) < 10


async def test_t34_an_oversized_entry_is_refused_before_it_takes_an_id() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        large = bytes(ENTRY_BYTES_MAX + 1)
        with pytest.raises(EntryTooLarge) as caught:
            appender.append_nowait([[large]])
        assert caught.value.definite
        assert appender.appended == -1
        appender.append_nowait([[large[1:]]])
        await confirmed(appender)
        assert appender.metadata.segments[0].members == appender.metadata.last_segment.members
        assert all(bookie.opened == 1 for bookie in nodes.bookies)


async def test_many_entries_in_one_call_equal_single_calls() -> None:
    async with ledger_cluster(3) as (_, ledgers):
        one, many = await create(ledgers), await create(ledgers)
        payloads = [[bytes([number]), b"x" * number] for number in range(40)]
        for payload in payloads:
            one.append_nowait([payload])
        many.append_nowait(payloads[:1])
        many.append_nowait(payloads[1:])
        assert one.describe().split(",", 1)[1] == many.describe().split(",", 1)[1]
        await confirmed(one)
        await confirmed(many)
        assert one.length == many.length
        stored = [await each.read(0, 39, bytes_max=1 << 20) for each in (one, many)]
        assert [e.payload for e in stored[0]] == [e.payload for e in stored[1]]


async def test_an_add_is_alone_when_all_earlier_ones_are_confirmed() -> None:
    async with ledger_cluster(3) as (_, ledgers):
        appender = await create(ledgers)
        stream, seen = appender._streams[0], list[bool]()
        put_out = stream.put
        assert put_out is not None

        def put(*parts: Buffer, items: int, alone: bool) -> None:
            seen.append(alone)
            put_out(*parts, items=items, alone=alone)

        stream.put = put
        appender.append_nowait([[b"first"]])
        appender.append_nowait([[b"second"]])
        await confirmed(appender)
        appender.append_nowait([[b"third"]])
        await confirmed(appender)
        assert seen == [True, False, True]


async def test_a_run_of_the_largest_entries_goes_in_frames_that_may_be_sent() -> None:
    async with ledger_cluster(3) as (_, ledgers):
        appender = await create(ledgers)
        stream, sizes, counts = appender._streams[0], [], []
        put_out = stream.put
        assert put_out is not None

        def put(*parts: Buffer, items: int, alone: bool) -> None:
            sizes.append(size_of(parts))
            counts.append(items)
            put_out(*parts, items=items, alone=alone)

        stream.put = put
        appender.append_nowait([[bytes(1000)], *[[bytes(ENTRY_BYTES_MAX)]] * 4, [bytes(1000)]])
        assert max(sizes) + FRAME_BYTES_MAX <= FRAME_LIMIT_BYTES
        assert sum(counts) == 6
        await confirmed(appender)


async def test_an_append_of_many_entries_takes_all_or_none() -> None:
    async with ledger_cluster(3) as (_, ledgers):
        appender = await create(ledgers)
        with pytest.raises(EntryTooLarge):
            appender.append_nowait([[b"a"], [bytes(ENTRY_BYTES_MAX + 1)]])
        assert appender.appended == -1
        appender.abandon()
        with pytest.raises(LedgerClosed):
            appender.append_nowait([[b"a"]])


async def test_an_append_to_a_closed_or_abandoned_ledger_raises_ledger_closed() -> None:
    async with ledger_cluster(3) as (_, ledgers), asyncio.TaskGroup() as group:
        appender, other = await create(ledgers), await create(ledgers)
        append(appender, 3)
        closing = group.create_task(appender.close())
        await settle(1)
        with pytest.raises(LedgerClosed):
            append(appender)
        assert (await closing).last_entry == 2  # entry 2 was in flight when close() was called
        append(other)
        other.abandon()
        with pytest.raises(LedgerClosed):
            append(other)
        with pytest.raises(LedgerClosed):
            await other.close()
        assert (await ledgers.recover(other.ledger)).last_entry == 0


async def test_a_new_ledger_id_exceeds_newer_than() -> None:
    async with ledger_cluster(3) as (_, ledgers):
        first = await create(ledgers)
        second = await ledgers.create(newer_than=LedgerId(5_000), custom={})
        third = await create(ledgers)
        assert first.ledger < 5_000 < second.ledger < third.ledger


# -- degraded creation ---------------------------------------------------------------------------


async def test_a_new_ledger_takes_fewer_bookies_when_fewer_answer() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        nodes.bookies[1].kill()  # the bookie is still listed
        appender = await create(ledgers)
        assert appender.metadata.ensemble_size == appender.metadata.write_quorum == 2
        assert appender.metadata.ack_quorum == 2
        assert appender.metadata.under_replicated
        assert appender.degraded
        append(appender)
        await confirmed(appender)
        nodes.bookies[0].kill()
        with pytest.raises(NotEnoughBookies) as caught:
            await create(ledgers)
        assert (caught.value.needed, caught.value.writable) == (2, 1)


async def test_a_full_ensemble_is_possible_again_after_bookies_return() -> None:
    config = replace(QUICK, health_half_life_s=3600.0)  # health scores do not fall during the test
    async with ledger_cluster(3, config) as (nodes, ledgers):
        victim = nodes.bookies[1]
        victim.kill()
        narrow = await create(ledgers)
        assert narrow.degraded
        assert not ledgers.full_ensemble_possible()
        victim.restart()
        await nodes.register(victim, boot_epoch=2)
        await wait_until(ledgers.full_ensemble_possible)
        wide = await create(ledgers)
        assert not wide.degraded
        assert wide.metadata.write_quorum == 3
        assert not wide.metadata.under_replicated


async def test_a_bookie_that_dies_while_the_ledger_is_created_is_noticed() -> None:
    async with bookie_cluster(3) as nodes:

        def kill(operation: str, path: str) -> None:
            if operation == "put" and path.startswith(paths.LEDGERS):
                nodes.bookies[1].kill()

        store = MemoryStore(nodes.tree, delay_s=lambda: 0.01, faults=kill)
        async with nodes.process(QUICK, store=store) as ledgers:
            appender = await create(ledgers)
            assert appender.metadata.ensemble_size == 3
            assert appender.degraded
            append(appender, 3)
            await confirmed(appender)


async def test_creation_fails_with_fewer_bookies_than_min_write_quorum() -> None:
    async with ledger_cluster(2, LedgerConfig(min_write_quorum=3)) as (_, ledgers):
        with pytest.raises(NotEnoughBookies):
            await create(ledgers)


async def test_read_only_bookies_are_not_chosen() -> None:
    async with bookie_cluster(4) as nodes:
        await nodes.register(nodes.bookies[2], read_only=True)
        async with nodes.process(QUICK) as ledgers:
            for _ in range(10):
                appender = await create(ledgers)
                assert nodes.bookies[2] not in seated(nodes, appender)


@pytest.mark.parametrize("value", [1, 4])
def test_an_impossible_min_write_quorum_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="min_write_quorum"):
        LedgerConfig(min_write_quorum=value)


# -- bookies that die, hang, refuse --------------------------------------------------------------


async def test_a_killed_bookie_is_replaced_at_once_and_nothing_is_lost() -> None:
    async with ledger_cluster(4) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 5)
        victim = seated(nodes, appender)[1]
        began = asyncio.get_running_loop().time()
        victim.kill()
        append(appender, 5)
        await confirmed(appender)
        await wait_until(lambda: victim not in seated(nodes, appender))
        assert asyncio.get_running_loop().time() - began < 1.0
        append(appender, 5)
        await confirmed(appender)
        assert not appender.degraded
        metadata = await appender.close()
        assert metadata.last_entry == 14
        assert await read_all(ledgers, appender.ledger) == [payload(n) for n in range(15)]


async def test_without_a_spare_appends_continue_and_a_returning_bookie_rejoins() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 3)
        await confirmed(appender)
        victim = seated(nodes, appender)[2]
        victim.kill()
        append(appender, 3)
        await confirmed(appender)
        assert appender.degraded
        victim.restart()
        await wait_until(lambda: not appender.degraded)
        append(appender, 3)
        await confirmed(appender)
        await wait_until(lambda: victim.entries(appender.ledger)[-1:] == [8])
        assert len(appender.metadata.segments) == 1
        # The entries that the member will never get from this ledger are reported for repair.
        told = [(note.member, note.last_entry) for _, note in ledgers.bad_copies.drain()]
        assert told == [(victim.member, 5)]


async def test_a_delayed_change_gives_a_restarted_bookie_its_seat_back() -> None:
    config = replace(QUICK, ensemble_change_delay_s=5.0)
    async with ledger_cluster(4, config) as (nodes, ledgers):
        appender = await create(ledgers)
        victim = seated(nodes, appender)[1]
        victim.kill()
        append(appender, 3)
        await confirmed(appender)
        victim.restart()
        await wait_until(lambda: not appender.degraded)
        append(appender, 3)
        await confirmed(appender)
        assert seated(nodes, appender)[1] is victim
        assert len((await appender.close()).segments) == 1
        assert [note.member for _, note in ledgers.bad_copies.drain()] == [victim.member]


async def test_a_ledger_that_ends_with_a_member_away_reports_its_missing_entries() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 3)
        await confirmed(appender)
        victim = seated(nodes, appender)[0]
        await wait_until(lambda: len(victim.entries(appender.ledger)) == 3)
        victim.kill()
        append(appender, 4)
        await confirmed(appender)
        await appender.close()
        ((ledger, note),) = ledgers.bad_copies.drain()
        assert (ledger, note.member, note.last_entry) == (appender.ledger, victim.member, 6)
        assert note.first_entry <= 3


async def test_a_rolling_restart_of_three_bookies_fails_no_append() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        for victim in nodes.bookies:
            victim.kill()
            append(appender, 3)
            await confirmed(appender)
            victim.restart()
            await wait_until(lambda: not appender.degraded)
        append(appender, 3)
        await confirmed(appender)
        assert (await appender.close()).last_entry == 11
        assert await read_all(ledgers, appender.ledger) == [payload(n) for n in range(12)]


async def test_t14_a_spare_that_registers_later_is_used() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        victim = seated(nodes, appender)[0]
        victim.kill()
        append(appender, 3)
        await confirmed(appender)
        newcomer = await nodes.add_bookie()
        append(appender)
        await wait_until(lambda: newcomer in seated(nodes, appender))
        await wait_until(lambda: not appender.degraded)
        append(appender, 3)
        await confirmed(appender)


async def test_an_idle_ledger_does_not_change_its_ensemble() -> None:
    async with ledger_cluster(4) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 2)
        await confirmed(appender)
        assert [b.entries(appender.ledger) for b in seated(nodes, appender)] == [[0, 1]] * 3
        await settle()
        victim = seated(nodes, appender)[0]
        victim.kill()
        await settle()
        assert victim in seated(nodes, appender)
        append(appender)
        await wait_until(lambda: victim not in seated(nodes, appender))
        await confirmed(appender)


async def test_with_too_few_bookies_left_appends_wait_and_then_fail() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender, 2)
        await confirmed(appender)
        for victim in nodes.bookies[:2]:
            victim.kill()
        append(appender, 2)
        told: list[int] = []
        appender.progress = lambda: told.append(appender.confirmed)
        await wait_until(lambda: appender.failure)
        assert isinstance(appender.failure, QuorumTimeout)
        assert not appender.failure.definite
        assert appender.failure.entry == 2
        assert told[-1] == 1
        with pytest.raises(QuorumTimeout):
            append(appender)
        # The ledger can be closed at its confirmed entry without its bookies.
        assert (await appender.close()).last_entry == 1


async def test_a_ledger_survives_two_dead_bookies_if_one_returns_in_time() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        for victim in nodes.bookies[:2]:
            victim.kill()
        append(appender, 4)
        await settle()
        assert appender.confirmed == -1
        nodes.bookies[0].restart()
        await confirmed(appender)


async def test_a_silent_bookie_is_replaced_after_the_add_timeout() -> None:
    async with ledger_cluster(4) as (nodes, ledgers):
        appender = await create(ledgers)
        silent = seated(nodes, appender)[0]
        silent.may_ack.clear()
        append(appender, 3)
        await confirmed(appender)
        await wait_until(lambda: appender.degraded)
        append(appender, 1)
        await wait_until(lambda: silent not in seated(nodes, appender))
        append(appender, 3)
        await confirmed(appender)


async def test_a_silent_bookie_without_a_spare_is_tried_again_later() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        silent = seated(nodes, appender)[0]
        silent.may_ack.clear()
        append(appender, 1)
        await wait_until(lambda: appender.degraded)
        silent.may_ack.set()
        await wait_until(lambda: not appender.degraded)
        append(appender, 1)
        await wait_until(lambda: silent.entries(appender.ledger) == [0, 1])
        await confirmed(appender)


@pytest.mark.parametrize("code", [BookieCode.READ_ONLY, BookieCode.IO_ERROR, BookieCode.OVERLOADED])
async def test_a_bookie_that_refuses_is_replaced(code: BookieCode) -> None:
    async with ledger_cluster(4) as (nodes, ledgers):
        appender = await create(ledgers)
        refuser = seated(nodes, appender)[1]
        refuser.judge_add = lambda _: code
        append(appender, 3)
        await confirmed(appender)
        await wait_until(lambda: refuser not in seated(nodes, appender))
        # The bookie counts as failing, so new ledgers do not use it either.
        for _ in range(5):
            assert refuser not in seated(nodes, await create(ledgers))


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (BookieCode.FENCED, LedgerFenced),
        (BookieCode.DELETED, LedgerFenced),
        (BookieCode.UNAUTHORIZED, LedgerFenced),
        (BookieCode.BAD_REQUEST, LedgerRefused),
    ],
)
async def test_a_lost_ledger_fails_everything_without_touching_metadata(
    code: BookieCode, failure: type[Exception]
) -> None:
    async with ledger_cluster(4) as (nodes, ledgers):
        appender = await create(ledgers)
        before = await ledgers.metadata(appender.ledger)
        for bookie in nodes.bookies:
            bookie.judge_add = lambda _: code
        append(appender, 3)
        await wait_until(lambda: appender.failure)
        assert isinstance(appender.failure, failure)
        assert appender.confirmed == -1
        assert appender.in_flight_bytes == 0
        assert await ledgers.metadata(appender.ledger) == before
        await appender.wait_room()


async def test_a_spare_that_is_listed_but_dead_is_passed_over() -> None:
    async with ledger_cluster(5) as (nodes, ledgers):
        appender = await create(ledgers)
        others = [each for each in nodes.bookies if each not in seated(nodes, appender)]
        others[0].kill()
        seated(nodes, appender)[0].kill()
        append(appender, 3)
        await wait_until(lambda: others[1] in seated(nodes, appender))
        await confirmed(appender)


# -- the metadata store misbehaves during the change ---------------------------------------------


@pytest.mark.parametrize("fault", [Fault.NOT_SENT, Fault.REQUEST_LOST, Fault.REPLY_LOST])
async def test_t12_an_ensemble_change_succeeds_although_its_reply_is_lost(fault: Fault) -> None:
    async with bookie_cluster(4) as nodes:
        faults: list[Fault] = []
        store = MemoryStore(
            nodes.tree,
            faults=lambda op, path: (
                faults.pop() if faults and op == "put" and "/ledgers/meta" in path else None
            ),
        )
        async with nodes.process(QUICK, store=store) as ledgers:
            appender = await create(ledgers)
            append(appender, 3)
            await confirmed(appender)
            faults += [fault] * (1 if fault is Fault.REPLY_LOST else 2)
            victim = seated(nodes, appender)[0]
            victim.kill()
            append(appender, 3)
            await wait_until(lambda: victim not in seated(nodes, appender))
            await confirmed(appender)
            assert not faults
            assert await ledgers.metadata(appender.ledger) == appender.metadata
            # T44: the reply to the close is lost, too.
            faults.append(fault)
            assert (await appender.close()).last_entry == 5


async def test_t12_an_ensemble_change_is_rejected_during_a_recovery() -> None:
    async with ledger_cluster(4) as (nodes, ledgers), nodes.process(QUICK, seed=2) as others:
        appender = await create(ledgers)
        append(appender, 3)
        await confirmed(appender)
        recovered = await others.recover(appender.ledger)
        assert recovered.last_entry == 2
        seated(nodes, appender)[0].kill()
        append(appender)
        await wait_until(lambda: appender.failure)
        assert isinstance(appender.failure, LedgerFenced)
        with pytest.raises(LedgerFenced):
            await appender.close()
        assert await ledgers.metadata(appender.ledger) == recovered


async def test_without_the_metadata_store_the_ledger_continues_at_the_ack_quorum() -> None:
    async with bookie_cluster(4) as nodes:
        store = MemoryStore(nodes.tree)
        config = LedgerConfig(metadata_timeout_s=0.2, connect_timeout_s=0.3)
        async with nodes.process(config, store=store) as ledgers:
            appender = await create(ledgers)
            append(appender, 1)
            await confirmed(appender)
            store.suspend()
            victim = seated(nodes, appender)[0]
            victim.kill()
            append(appender, 3)
            await confirmed(appender)
            assert victim in seated(nodes, appender)
            store.reconnect()
            append(appender, 1)
            await wait_until(lambda: victim not in seated(nodes, appender))
            await confirmed(appender)


async def test_close_without_entries_in_flight_does_not_wait_for_an_ensemble_change() -> None:
    """No entry is in flight, so the last entry does not depend on the outcome of the change."""

    async with bookie_cluster(4) as nodes, asyncio.TaskGroup() as group:
        faults: list[Fault] = []
        store = MemoryStore(
            nodes.tree,
            faults=lambda op, path: (
                faults[0] if faults and op == "put" and "/ledgers/meta" in path else None
            ),
        )
        async with nodes.process(QUICK, store=store) as ledgers:
            appender = await create(ledgers)
            faults.append(Fault.REQUEST_LOST)
            seated(nodes, appender)[0].kill()
            append(appender)
            await wait_until(lambda: "changing" in appender.describe())
            assert appender.confirmed == 0
            closing = group.create_task(appender.close())
            await wait_until(lambda: "sealed" in appender.describe())
            faults.clear()
            metadata = await closing
            assert metadata.last_entry == 0
            assert await ledgers.metadata(appender.ledger) == metadata


# -- many ledgers ----------------------------------------------------------------------------------


async def test_changes_in_a_row_tell_some_ledgers_in_one_turn_of_the_loop() -> None:
    class Told:
        times = 0

        def on_bookies_changed(self) -> None:
            self.times += 1

        def tick(self, now: float) -> bool:
            return True

    async with ledger_cluster(3) as (_, ledgers):
        await ledgers.wait_ready()
        await settle()
        appenders = [Told() for _ in range(2 * TICKS_PER_TURN + 1)]
        ledgers._busy.update(dict.fromkeys(appenders))  # type: ignore[arg-type]
        told = [0]
        for _ in range(6):
            if len(told) < 3:
                ledgers._on_bookies_changed()
            await asyncio.sleep(0)
            told.append(sum(each.times for each in appenders))
        steps = [after - before for before, after in pairwise(told)]
        # The second change comes after the first step, so its ledgers are told again.
        assert steps == [TICKS_PER_TURN] * 3 + [1, 0, 0]
        assert all(each.times >= 1 for each in appenders)
