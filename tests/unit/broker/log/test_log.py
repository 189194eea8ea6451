"""The log on ledgers in memory: appends, ledger rolls, failures and takeovers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.ledgers import FakeLedgers
from fakes.topic_log import SMALL, TOPIC, TopicLog, drawn_incarnation, opened
from support import settle, wait_until

from magnetar.bookie.ledger.errors import LedgerRefused, QuorumTimeout
from magnetar.broker.errors import LogClosed, LogDamaged, LogFenced, LogUnavailable
from magnetar.broker.log.cache import EntryCache
from magnetar.broker.log.log import Log, LogConfig, LogState
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.log.position import EARLIEST
from magnetar.metadata.codec import decode_topic, encode_topic
from magnetar.metadata.memory import Fault, MemoryStore
from magnetar.metadata.model import LedgerId, LedgerState, TopicRecord
from magnetar.runtime.on_demand import spawner

NAMES = [f"m{number}" for number in range(23)]


async def record_of(world: ClusterState) -> TopicRecord:
    found = await world.store().get(topic_path(TOPIC))
    assert found is not None
    return decode_topic(found.value)


async def test_appends_are_reported_in_order_in_batches_and_read_back() -> None:
    world = ClusterState()
    async with opened(world, config=replace(SMALL, ledger_entries_max=1000)) as topic:
        assert world.ledgers.ledgers == {}, "a ledger was created before the first append"
        topic.append(*NAMES)
        assert topic.appended == [], "reported while appending"
        await wait_until(lambda: len(topic.appended) == len(NAMES))
        assert [context for context, _ in topic.appended] == NAMES
        positions = [position for _, position in topic.appended]
        assert positions == sorted(set(positions))
        assert len(topic.batches) == 1, "one call for each progress of the ledger"
        assert await topic.contents() == NAMES
        assert topic.log.confirmed == positions[-1]
        assert topic.log.first == positions[0]


async def test_many_entries_at_once_fill_ledgers_as_single_ones_do() -> None:
    async def main(config: LogConfig, as_run: bool) -> tuple[list[list[bytes]], list[object]]:
        world = ClusterState()
        async with opened(world, config=config) as topic:
            append = topic.append_run if as_run else topic.append
            for names in (NAMES[:1], NAMES[1:4], NAMES[4:17], NAMES[17:]):
                append(*names)
                await settle(3)
            await wait_until(lambda: len(topic.appended) == len(NAMES))
            assert await topic.contents() == NAMES
            entries = [stored.entries for stored in world.ledgers.ledgers.values()]
            return entries, list(topic.appended)

    by_entries = SMALL
    by_bytes = replace(SMALL, ledger_entries_max=1000, ledger_bytes_max=300)
    too_young = replace(SMALL, ledger_age_s_min=600.0)
    for config in (by_entries, by_bytes, too_young):
        single, many = await main(config, False), await main(config, True)
        assert single == many
        assert (len(single[0]) == 1) == (config is too_young)


async def test_many_entries_at_once_survive_a_ledger_that_fails() -> None:
    world = ClusterState()
    async with opened(world, config=replace(SMALL, ledger_entries_max=1000)) as topic:
        topic.append_run(*NAMES[:4])
        await settle(5)
        [appender] = world.ledgers.appenders
        appender.failure = QuorumTimeout(appender.ledger, 0, 1.0)
        topic.append_run(*NAMES[4:])
        await wait_until(lambda: len(topic.appended) == len(NAMES))
        assert [context for context, _ in topic.appended] == NAMES
        assert await topic.contents() == NAMES


async def test_ledgers_roll_while_appends_continue() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        topic.append(*NAMES[:12])
        await settle(3)
        topic.append(*NAMES[12:])
        await wait_until(lambda: len(topic.appended) == len(NAMES))
        assert [context for context, _ in topic.appended] == NAMES
        assert await topic.contents() == NAMES
        sizes = [len(stored.entries) for stored in world.ledgers.ledgers.values()]
        assert sizes == [5, 5, 5, 5, 3]
        record = await record_of(world)
        assert [part.entries for part in record.ledgers] == [5, 5, 5, 5, 0]
        assert [part.first_index for part in record.ledgers] == [0, 5, 10, 15, 20]
    assert [part.entries for part in (await record_of(world)).ledgers] == [5, 5, 5, 5, 3]
    states = {stored.metadata.state for stored in world.ledgers.ledgers.values()}
    assert states == {LedgerState.CLOSED}


async def test_a_ledger_rolls_at_its_size_at_any_age() -> None:
    world = ClusterState()
    config = replace(SMALL, ledger_bytes_max=300, ledger_age_s_min=1e6)
    async with opened(world, config=config) as topic:
        for name in NAMES:
            topic.append(name)
            await settle(4)
        await wait_until(lambda: len(topic.appended) == len(NAMES))
        assert len(world.ledgers.ledgers) > 2
        sizes = [sum(map(len, stored.entries)) for stored in world.ledgers.ledgers.values()]
        assert all(300 <= size < 400 for size in sizes[:-1]), (
            "the entry that fills a ledger is the last"
        )


async def test_a_young_ledger_is_not_rolled_for_its_entries_and_an_old_one_for_its_age() -> None:
    world = ClusterState()
    async with opened(world, config=replace(SMALL, ledger_age_s_min=1e6)) as topic:
        await topic.append_and_wait(*NAMES)
        assert len(world.ledgers.ledgers) == 1
    async with opened(world, config=replace(SMALL, ledger_age_s_max=0.01)) as topic:
        await topic.append_and_wait("old")
        (ledger,) = set(world.ledgers.ledgers) - {1}
        stored = world.ledgers.stored(ledger)
        await wait_until(lambda: stored.metadata.state is LedgerState.CLOSED)
        await settle()
        assert len(world.ledgers.ledgers) == 2, "the next one is created with the next append"
        await topic.append_and_wait("new")
        assert await topic.contents() == [*NAMES, "old", "new"]


async def test_a_degraded_ledger_rolls_once_bookies_are_back() -> None:
    world = ClusterState()
    world.ledgers.full_ensemble = False
    async with opened(world) as topic:
        await topic.append_and_wait("a")
        await asyncio.sleep(5 * SMALL.check_interval_s)
        await topic.append_and_wait("b")
        assert len(world.ledgers.ledgers) == 1
        assert topic.log.describe()["degraded"] is True
        world.ledgers.full_ensemble = True
        await wait_until(lambda: topic.log.describe()["open_ledger"] is None)
        await topic.append_and_wait("c")
        assert topic.log.describe()["degraded"] is False
        assert await topic.contents() == ["a", "b", "c"]


@pytest.mark.parametrize("stored", [0, 1, 3])
async def test_a_failed_ledger_loses_nothing_and_repeats_nothing(stored: int) -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a", "b")
        world.ledgers.hold()
        topic.append("c", "d", "e")
        first = world.ledgers.live_appender()
        first.fail(QuorumTimeout(first.ledger, 2, 1.0), stored=stored)
        topic.append("f")
        await settle(3)
        topic.append("g")
        world.ledgers.release()
        await wait_until(lambda: len(topic.appended) == 7)
        assert [context for context, _ in topic.appended] == list("abcdefg")
        assert await topic.contents() == list("abcdefg")
        assert topic.error is None


async def test_entries_that_recovery_finds_in_a_failed_ledger_count_as_appended() -> None:
    """The writer cannot close the failed ledger at its last confirmed entry. The recovery then
    decides where the ledger ends."""

    async def world_closes_nothing() -> None:
        raise QuorumTimeout(1, 1, 1.0)

    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
        world.ledgers.hold()
        topic.append("b", "c", "d")
        appender = world.ledgers.live_appender()
        world.ledgers.bookies = False
        appender.fail(QuorumTimeout(appender.ledger, 1, 1.0), stored=2)
        await settle()
        assert topic.log.describe()["in_flight"] == 3, "unknown until the ledger is closed"
        appender.abandon()
        appender.close = world_closes_nothing  # type: ignore[method-assign]
        world.ledgers.bookies = True
        world.ledgers.release()
        await wait_until(lambda: len(topic.appended) == 4)
        ledgers = [position.ledger for _, position in topic.appended]
        assert ledgers == [1, 1, 1, 2]
        assert await topic.contents() == list("abcd")


async def test_appends_wait_in_order_while_there_are_no_bookies() -> None:
    world = ClusterState()
    world.ledgers.bookies = False
    async with opened(world) as topic:
        topic.append("a", "b")
        await asyncio.sleep(0.02)
        topic.append("c")
        assert topic.appended == []
        why = "creating a ledger failed: a ledger needs 1 writable bookies, 0 answer"
        assert topic.log.describe()["trouble"] == why
        world.ledgers.bookies = True
        await wait_until(lambda: len(topic.appended) == 3)
        assert topic.log.describe()["trouble"] == ""
        world.ledgers.live_appender().trouble = "bookie b1: READ_ONLY"
        assert topic.log.describe()["trouble"] == "bookie b1: READ_ONLY"
        assert await topic.contents() == ["a", "b", "c"]


async def test_a_ledger_that_refuses_an_entry_fails_the_log() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic:
        await topic.append_and_wait("a")
        world.ledgers.hold()
        topic.append("poison")
        appender = world.ledgers.live_appender()
        appender.fail(LedgerRefused(appender.ledger, "BAD_REQUEST"))
        await wait_until(lambda: topic.error is not None)
        assert isinstance(topic.error, LogUnavailable)
        assert topic.failed == ["poison"]
        assert topic.log.state is LogState.FAILED
        with pytest.raises(LogUnavailable):
            topic.append("more")


async def test_the_queue_is_bounded_and_admits_appends_when_it_drains() -> None:
    world = ClusterState()
    world.ledgers.bookies = False
    async with opened(world, config=replace(SMALL, pending_bytes_max=120)) as topic:
        await topic.log.wait_room()
        topic.append("a", "b", "c")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await topic.log.wait_room()
        world.ledgers.bookies = True
        await topic.log.wait_room()
        assert len(topic.appended) == 3


async def test_indexes_count_messages_and_survive_restarts() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic:
        topic.append_view(entry_of("a", "b", "c"))
        await topic.append_and_wait("d")
        topic.append_view(entry_of("e", "f"))
        await wait_until(lambda: topic.log.last_index == 5)
    for more in ("g", "h"):  # once after a crash, once after a clean close
        async with opened(world) as topic:
            before = topic.log.last_index
            await topic.append_and_wait(more)
            assert topic.log.last_index == before + 1
    async with opened(world) as topic:
        entries = await topic.log.read(EARLIEST, entries_max=100, bytes_max=1 << 20)
        assert [entry.index for entry in entries] == [2, 3, 5, 6, 7]
        assert [entry.messages for entry in entries] == [3, 1, 2, 1, 1]
        assert topic.log.chain.messages == 8
        found = [await topic.log.index_at(entry.position) for entry in entries]
        assert found == [2, 3, 5, 6, 7]
        assert await topic.log.index_at(EARLIEST) == -1


async def test_broker_time_never_goes_backwards() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        for step_ms in (5, -100, 3):
            world.clock.advance_ms(step_ms)
            await topic.append_and_wait("x")
        entries = await topic.log.read(EARLIEST, entries_max=9, bytes_max=1 << 20)
        times = [entry.broker_timestamp_ms for entry in entries]
        assert times == sorted(times)


# ---- taking over ---------------------------------------------------------------------------------


async def test_a_new_owner_fences_the_old_one_and_keeps_the_appended_entries() -> None:
    world = ClusterState()
    async with opened(world, close=False) as old:
        await old.append_and_wait("a", "b")
        async with opened(world) as new:
            assert await new.contents() == ["a", "b"]
            old.append("zombie", "ghost")
            await wait_until(lambda: old.error is not None)
            assert isinstance(old.error, LogFenced)
            assert old.failed == ["zombie", "ghost"]
            assert old.log.state is LogState.FENCED
            with pytest.raises(LogFenced):
                old.append("again")
            await new.append_and_wait("c")
            assert await new.contents() == ["a", "b", "c"]
    assert [context for context, _ in old.appended] == ["a", "b"]


async def test_an_owner_that_lost_the_race_deletes_the_ledger_it_could_not_record() -> None:
    world = ClusterState()
    async with opened(world, close=False) as old, opened(world) as new:
        old.append("late")  # no ledger yet: only the record stops this owner
        await wait_until(lambda: old.error is not None)
        assert isinstance(old.error, LogFenced)
        assert old.failed == ["late"]
        await new.append_and_wait("a")
        record = await record_of(world)
        assert set(world.ledgers.ledgers) == {part.ledger for part in record.ledgers}
        assert len(world.ledgers.deleted) == 1


async def test_a_ledger_that_may_be_in_the_new_owners_list_is_not_deleted() -> None:
    """Our last change took effect, but its reply is lost. Another owner takes the topic over at
    once."""

    world = ClusterState()
    puts = 0

    def second_put(operation: str, path: str) -> Fault | None:
        nonlocal puts
        puts += operation == "put"
        return Fault.REPLY_LOST if operation == "put" and puts == 2 else None

    store = MemoryStore(world.tree, faults=second_put)
    async with opened(world, store=store, close=False) as old:
        old.append("a")
        await wait_until(lambda: puts == 2)
        world.ledgers.bookies = False
        with pytest.raises(LogUnavailable):  # the new owner lists our ledger now
            await open_log(world)
        await wait_until(lambda: old.error is not None)
        assert isinstance(old.error, LogFenced)
        world.ledgers.bookies = True
        async with opened(world) as new:
            await new.append_and_wait("b")
            assert await new.contents() == ["b"]


async def test_a_fence_by_a_process_that_is_not_an_owner_costs_one_ledger() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a", "b")
        world.ledgers.hold()
        topic.append("c")
        await FakeLedgers(world.ledgers).recover(LedgerId(topic.log.confirmed.ledger))
        topic.append("d")
        world.ledgers.release()
        await wait_until(lambda: len(topic.appended) == 4)
        assert await topic.contents() == ["a", "b", "c", "d"]
        assert topic.error is None


async def test_entries_that_were_never_confirmed_keep_their_indexes_dense() -> None:
    """The old owner dies with two unacknowledged entries on the bookies."""

    world = ClusterState()
    async with opened(world, close=False) as old:
        await old.append_and_wait("a")
        world.ledgers.hold()
        old.append("b", "c", "d")
        appender = world.ledgers.live_appender()
        appender.fail(QuorumTimeout(appender.ledger, 1, 1.0), stored=2)
    world.ledgers.release()
    async with opened(world) as new:
        assert await new.contents() == ["a", "b", "c"]
        await new.append_and_wait("e")
        entries = await new.log.read(EARLIEST, entries_max=9, bytes_max=1 << 20)
        assert [entry.index for entry in entries] == [0, 1, 2, 3]


async def test_an_empty_ledger_is_dropped_and_ids_still_grow() -> None:
    world = ClusterState()
    async with opened(world, close=False) as old:
        await old.append_and_wait("a")
        world.ledgers.hold()
        for name in ("b", "c", "d", "e", "f"):
            old.append(name)
    # The first ledger is unchanged; the other ledgers have no entries.
    world.ledgers.release()
    async with opened(world, close=False) as second:
        world.ledgers.hold()
        second.append("x")
        await wait_until(lambda: len(world.ledgers.ledgers) == 2)
        newest = max(world.ledgers.ledgers)
    world.ledgers.release()
    async with opened(world) as third:
        assert await third.contents() == ["a"]
        await wait_until(lambda: newest in world.ledgers.deleted)
        await third.append_and_wait("y")
        assert third.log.confirmed.ledger > newest
        assert (await record_of(world)).deleting == ()


async def test_open_with_a_missing_ledger_raises_log_damaged_with_its_id() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
    (ledger,) = world.ledgers.ledgers
    del world.ledgers.ledgers[ledger]
    with pytest.raises(LogDamaged) as caught:
        async with opened(world):
            pass
    assert caught.value.ledger == ledger


async def test_a_record_that_cannot_be_read_is_refused() -> None:
    world = ClusterState()
    await world.store().put(topic_path(TOPIC), b"\xff\xff\xff", expected=-1)
    with pytest.raises(LogDamaged):
        async with opened(world):
            pass


async def test_open_without_bookies_raises_log_unavailable() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic:
        await topic.append_and_wait("a")
    world.ledgers.bookies = False
    with pytest.raises(LogUnavailable):
        async with opened(world):
            pass
    world.ledgers.bookies = True
    async with opened(world) as topic:
        assert await topic.contents() == ["a"]


# ---- failures of metadata ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", list(Fault))
async def test_lost_requests_and_replies_of_metadata_change_nothing(fault: Fault) -> None:
    world = ClusterState()
    chance = random.Random(7)
    bitten = 0

    def often(operation: str, path: str) -> Fault | None:
        nonlocal bitten
        bites = chance.random() < 0.3
        bitten += bites
        return fault if bites else None

    store = MemoryStore(world.tree, faults=often)
    async with opened(world, store=store) as topic:
        await topic.append_and_wait(*NAMES)
    assert bitten > 5
    async with opened(world) as topic:
        assert await topic.contents() == NAMES
        record = await record_of(world)
        assert {part.ledger for part in record.ledgers} == set(world.ledgers.ledgers)


async def test_a_change_by_another_process_under_our_epoch_is_kept() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait("a")
        store = world.store()
        found = await store.get(topic_path(TOPIC))
        assert found is not None
        changed = replace(decode_topic(found.value), properties={"by": "admin"})
        await store.put(topic_path(TOPIC), encode_topic(changed), expected=found.version)
        await topic.log.set_property("topic-epoch", "7")
        await topic.append_and_wait(*NAMES)
        assert topic.log.properties == {"by": "admin", "topic-epoch": "7"}
    assert (await record_of(world)).properties == {"by": "admin", "topic-epoch": "7"}


async def test_a_deleted_topic_fences_its_log() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic:
        await topic.append_and_wait(*NAMES[:4])
        store = world.store()
        found = await store.get(topic_path(TOPIC))
        assert found is not None
        await store.delete(topic_path(TOPIC), expected=found.version)
        topic.append(*NAMES[4:8])
        await wait_until(lambda: topic.error is not None)
        assert isinstance(topic.error, LogFenced)


# ---- closing -------------------------------------------------------------------------------------


async def test_close_waits_for_outstanding_appends() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        topic.append(*NAMES)
        await topic.log.close()
        assert [context for context, _ in topic.appended] == NAMES
        assert topic.log.state is LogState.CLOSED
        with pytest.raises(LogClosed):
            topic.append("late")
        await topic.log.close()
    assert topic.error is None
    record = await record_of(world)
    assert sum(part.entries for part in record.ledgers) == len(NAMES)


async def test_an_unused_log_closes_without_a_ledger() -> None:
    world = ClusterState()
    async with opened(world):
        pass
    assert world.ledgers.ledgers == {}
    assert (await record_of(world)).ledgers == ()


async def test_cancelling_run_reports_outstanding_appends_as_failed() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic:
        await topic.append_and_wait("a")
        world.ledgers.hold()
        topic.append("b", "c")
    assert topic.failed == ["b", "c"]
    assert isinstance(topic.error, LogClosed)


# ---- odds and ends -------------------------------------------------------------------------------


async def test_a_ledger_that_vanishes_under_the_writer_fences_it() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic:
        await topic.append_and_wait("a")
        del world.ledgers.ledgers[topic.log.confirmed.ledger]
        topic.append("b")
        await wait_until(lambda: topic.error is not None)
        assert isinstance(topic.error, LogFenced)


async def test_dropped_ledgers_that_are_gone_already_do_no_harm() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic:
        await topic.append_and_wait("a")
    store = world.store()
    found = await store.get(topic_path(TOPIC))
    assert found is not None
    record = replace(decode_topic(found.value), deleting=(4711,))
    await store.put(topic_path(TOPIC), encode_topic(record), expected=found.version)
    async with opened(world) as topic:
        await wait_until(lambda: topic.log.owned_record.record.deleting == ())
        assert (await record_of(world)).deleting == ()
        await topic.append_and_wait("b")
        assert topic.log.confirmed.ledger > 4711, "ids exceed every ledger the topic ever had"


async def open_log(world: ClusterState) -> Log:
    return await Log.open(
        TOPIC,
        store=world.store(),
        ledgers=FakeLedgers(world.ledgers),
        config=SMALL,
        clock=world.clock,
        cache=EntryCache(1000),
        incarnation=drawn_incarnation(),
    )


async def test_open_needs_no_running_task() -> None:
    log = await open_log(ClusterState())
    topic = TopicLog(log, EntryCache(1000))
    topic.append("early")
    async with asyncio.TaskGroup() as tasks:
        log.start(spawner(tasks))
        await log.close()
    assert [context for context, _ in topic.appended] == ["early"]


async def test_broker_time_goes_backwards_over_no_takeover_and_no_clock_step() -> None:
    world = ClusterState()
    times: list[int] = []
    for step_ms in (5_000, -60_000, -60_000, 10_000_000):
        world.clock.advance_ms(step_ms)
        async with opened(world) as topic:
            await topic.append_and_wait("before")
            world.clock.advance_ms(-1_000)
            await topic.append_and_wait("after")
    position = EARLIEST
    async with opened(world) as topic:
        while entries := await topic.log.read(position, entries_max=99, bytes_max=1 << 20):
            times += [entry.broker_timestamp_ms for entry in entries]
            position = topic.log.chain.next_position(entries[-1].position)
    assert len(times) == 8
    assert times == sorted(times)
    assert times[6] - times[5] == 10_000_000 - 2 * 60_000 - 3 * 1_000
