"""The head of a log is dropped: its ledgers are listed as dropped, deleted, and then forgotten."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.ledgers import BrokerDied, FakeLedgers, SharedLedgers, Steps
from fakes.topic_log import SMALL, TOPIC, SteppingStore, opened, opened_cursors
from support import settle, wait_until

from magnetar.broker.errors import LogError
from magnetar.broker.log.deletion import LEDGERS_AT_CLOSE, LEDGERS_PER_PASS, RETRY_S_MAX
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.metadata.codec import decode_topic
from magnetar.metadata.errors import InvalidRecord, Unavailable

if TYPE_CHECKING:
    from magnetar.metadata.model import LedgerId, TopicRecord

NAMES = [f"m{number}" for number in range(12)]  # two full ledgers and two entries
TINY = replace(SMALL, ledger_entries_max=1)
CALM = replace(SMALL, check_interval_s=60.0)  # for tests in which much time passes
LONG_S = 600.0  # longer than all attempts in a row


async def record_of(world: ClusterState) -> TopicRecord:
    found = await world.store().get(topic_path(TOPIC))
    assert found is not None
    return decode_topic(found.value)


class Unwilling(FakeLedgers):
    """Ledgers that fail this number of deletions, and every deletion of the ledgers in
    `refused`."""

    def __init__(self, world: SharedLedgers, failures: int = 0) -> None:
        super().__init__(world)
        self.failures = failures
        self.asked = 0
        self.refused: set[int] = set()

    async def delete(self, ledger: LedgerId) -> None:
        self.asked += 1
        if ledger in self.refused:
            raise InvalidRecord("ledger metadata", "nonsense")
        if self.failures > 0:
            self.failures -= 1
            raise Unavailable("a fault")
        await super().delete(ledger)


async def test_closed_ledgers_of_the_head_are_deleted_and_forgotten() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
        first, second, third = (record.ledger for record in topic.log.chain.records)
        assert topic.log.drop_through(Position(second, 3)) == 1, "the second has entry 4 still"
        await wait_until(lambda: world.ledgers.deleted == [first])
        assert await topic.contents() == NAMES[5:]
        assert topic.log.first == Position(second, 0)
        assert topic.log.chain.first_index == 5
        assert topic.log.drop_through(Position(second, 4)) == 1
        await wait_until(lambda: world.ledgers.deleted == [first, second])
        assert topic.log.drop_through(LATEST) == 0, "the third is open"
        await topic.append_and_wait("more")
        assert await topic.contents() == [*NAMES[10:], "more"]
    record = await record_of(world)
    assert [part.ledger for part in record.ledgers] == [third]
    assert record.deleting == ()


async def test_indexes_and_positions_continue_after_everything_was_dropped() -> None:
    """The next owner may get smaller ledger ids. The next owner then requests other ids."""
    world = ClusterState()
    world.ledgers.next_id(1_000)
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
        before = topic.log.confirmed
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        cursor = await cursors.ensure("s", EARLIEST)
        await topic.log.wait_room()
        cursor.acknowledge_cumulative(topic.log.confirmed)
        await cursor.flush()
        assert topic.log.drop_through(LATEST) == 3
        assert topic.log.confirmed == before
        assert cursor.backlog_entries == 0
    assert world.ledgers.ledgers == {}
    assert (await record_of(world)).ledgers == ()
    world.ledgers._next = 0
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        assert topic.log.confirmed == before
        assert topic.log.last_index == 11
        assert await topic.contents() == []
        await topic.append_and_wait("next")
        [entry] = await topic.log.read(EARLIEST, entries_max=9, bytes_max=9_999)
        assert entry.index == 12
        assert entry.position > before
        cursor_again = cursors.get("s")
        assert cursor_again is not None
        assert cursor_again.backlog_entries == 1


async def test_a_cursor_at_the_end_of_the_dropped_head_keeps_its_backlog() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
        async with opened_cursors(topic.log) as cursors:
            cursor = await cursors.ensure("s", EARLIEST)
            first, _, _ = (record.ledger for record in topic.log.chain.records)
            cursor.acknowledge_cumulative(Position(first, 4))
            await cursor.flush()
            assert topic.log.drop_through(cursor.mark_delete) == 1
            assert cursor.backlog_entries == 7
            cursor.acknowledge([position for _, position in topic.appended[6:8]])
            await cursor.flush()
            assert cursor.backlog_entries == 5
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        found = cursors.get("s")
        assert found is not None
        assert found.backlog_entries == 5


@pytest.mark.parametrize("after", [False, True])
async def test_a_crash_at_any_call_leaves_each_ledger_listed_or_deleted(after: bool) -> None:
    number = 0
    while await dies_while_dropping(Steps(number, after=after)):
        number += 1
    assert number >= 5, "the script died at fewer than 5 calls"


async def dies_while_dropping(steps: Steps) -> bool:
    """Return True if the run reached this step."""
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
    store = SteppingStore(world.tree, steps)
    try:
        async with opened(world, steps=steps, store=store, close=False) as topic:
            topic.log.drop_through(LATEST)
            await wait_until(lambda: steps.dead or len(world.ledgers.deleted) == 3)
            await settle()
    except* BrokerDied:
        pass
    record = await record_of(world)
    listed = {part.ledger for part in record.ledgers} | set(record.deleting)
    assert set(world.ledgers.ledgers) <= listed, f"an orphan after {steps.taken}"
    async with opened(world) as topic:
        assert len(await topic.contents()) == (12 if record.ledgers else 0)
        await wait_until(lambda: not topic.log.owned_record.record.deleting)
        assert topic.log.last_index == 11
    record = await record_of(world)
    assert set(world.ledgers.ledgers) == {part.ledger for part in record.ledgers}
    return steps.dead


async def test_deletions_are_tried_again_while_appends_continue() -> None:
    world = ClusterState()
    ledgers = Unwilling(world.ledgers, failures=3)
    async with opened(world, ledgers=ledgers) as topic:
        await topic.append_and_wait(*NAMES)
        topic.log.drop_through(LATEST)
        await wait_until(lambda: ledgers.asked > 0)
        assert world.ledgers.deleted == []
        await topic.append_and_wait("meanwhile")
        await wait_until(lambda: len(world.ledgers.deleted) == 2)
        assert ledgers.asked == 3 + 2


async def test_deletions_that_fail_for_long_are_tried_again_with_growing_delays() -> None:
    world = ClusterState()
    ledgers = Unwilling(world.ledgers, failures=1_000_000)
    async with opened(world, ledgers=ledgers, config=CALM) as topic:
        await topic.append_and_wait(*NAMES)
        first = topic.log.chain.records[0].ledger
        topic.log.drop_through(Position(first, 4))
        await asyncio.sleep(LONG_S)
        assert 8 <= ledgers.asked <= 16
        assert topic.log.owned_record.record.deleting == (first,)
        ledgers.failures = 0
        await asyncio.sleep(1.5 * RETRY_S_MAX)
        assert world.ledgers.deleted == [first]


async def test_a_ledger_that_cannot_be_deleted_does_not_delay_the_others() -> None:
    world = ClusterState()
    ledgers = Unwilling(world.ledgers)
    async with opened(world, ledgers=ledgers, config=CALM) as topic:
        await topic.append_and_wait(*NAMES)
        first, second, _ = (record.ledger for record in topic.log.chain.records)
        ledgers.refused.add(first)
        topic.log.drop_through(LATEST)
        await wait_until(lambda: world.ledgers.deleted == [second])
        await asyncio.sleep(LONG_S)
        assert ledgers.asked == 2, "the broker does not repeat a refused deletion"
    assert (await record_of(world)).deleting == (first,)


async def test_a_long_list_of_deletions_does_not_delay_the_close() -> None:
    world = ClusterState()
    async with opened(world, config=TINY) as topic:
        await topic.append_and_wait(*[f"m{number}" for number in range(LEDGERS_PER_PASS + 20)])
    ledgers = Unwilling(world.ledgers, failures=1)
    async with opened(world, ledgers=ledgers, close=False) as topic:
        topic.log.drop_through(LATEST)
        await wait_until(lambda: ledgers.asked == 1)  # the next attempt comes after a second
        await topic.log.close()
        assert len(world.ledgers.deleted) == LEDGERS_AT_CLOSE
        assert len((await record_of(world)).deleting) == LEDGERS_PER_PASS + 20 - LEDGERS_AT_CLOSE
    async with opened(world) as topic:
        await wait_until(lambda: world.ledgers.ledgers == {})
    assert (await record_of(world)).deleting == ()


async def test_a_stale_owner_deletes_nothing() -> None:
    world = ClusterState()
    async with opened(world) as topic:
        await topic.append_and_wait(*NAMES)
        async with opened(world) as new:
            topic.log.drop_through(LATEST)
            await wait_until(lambda: topic.log.owned_record.lost is not None)
            await settle()
            assert world.ledgers.deleted == []
            assert await new.contents() == NAMES
            with pytest.raises(LogError):
                topic.append("late")
