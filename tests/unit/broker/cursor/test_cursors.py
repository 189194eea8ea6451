"""Durable cursors on ledgers in memory. After a crash, the cursor has exactly the stored
acknowledgements. Every acknowledgement with a receipt is stored."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.topic_log import QUICK, SMALL, TOPIC, TopicLog, opened, opened_cursors
from support import settle, wait_until

from magnetar.bookie.ledger.errors import LedgerRefused, QuorumTimeout
from magnetar.broker.cursor import journal
from magnetar.broker.cursor.backlog import Backlog
from magnetar.broker.cursor.cursor import Cursor as CursorClass
from magnetar.broker.cursor.cursors import Cursors
from magnetar.broker.errors import (
    BrokerError,
    LogClosed,
    LogDamaged,
    LogFenced,
    LogUnavailable,
    SubscriptionNotFound,
    TooManyReceipts,
    TopicFull,
)
from magnetar.broker.log.owned_record import OwnedRecord, topic_path
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.metadata.codec import decode_topic
from magnetar.protos.entry import BATCH_MESSAGES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.cursor.cursor import Cursor
    from magnetar.metadata.model import TopicRecord

NAMES = [f"m{number}" for number in range(12)]


class Receipts:
    """Records the calls of `done`, in order."""

    def __init__(self) -> None:
        self.given: list[tuple[object, BrokerError | None]] = []

    def of(self, what: object) -> partial[None]:
        return partial(self._give, what)

    def _give(self, what: object, error: BrokerError | None) -> None:
        self.given.append((what, error))

    async def wait(self, count: int) -> None:
        await wait_until(lambda: len(self.given) >= count, what=f"{count} receipts")


dying_cursors = partial(opened_cursors, close=False)


async def record_of(world: ClusterState) -> TopicRecord:
    found = await world.store().get(topic_path(TOPIC))
    assert found is not None
    return decode_topic(found.value)


def positions_of(topic: TopicLog) -> list[Position]:
    return [position for _, position in topic.appended]


def left(cursor: Cursor, topic: TopicLog) -> list[Position]:
    chain = topic.log.chain
    found = []
    position = chain.first
    while chain.is_entry(position):
        if not cursor.is_acked(position):
            found.append(position)
        position = chain.next_position(position)
    return found


async def test_a_subscription_deleted_during_a_concurrent_creation_is_created_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One write creates the subscription for several requests. The last request gets the result
    some turns of the loop later. By then the first request may have deleted the subscription."""
    right, turns = OwnedRecord.change, 0

    async def late(self: OwnedRecord, make: Callable[[TopicRecord], TopicRecord]) -> None:
        nonlocal turns
        turns += 1
        is_last = turns == 2
        await right(self, make)
        if is_last:
            await wait_until(lambda: turns == 3 and not cursors.names)

    monkeypatch.setattr(OwnedRecord, "change", late)
    async with opened(ClusterState()) as topic, opened_cursors(topic.log) as cursors:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(cursors.ensure("s", EARLIEST))
            group.create_task(cursors.ensure("s", EARLIEST))
            await first
            await cursors.delete("s")
        assert list(topic.log.owned_record.record.subscriptions) == ["s"]
        assert cursors.names == ("s",)


async def test_new_subscription_is_durable_and_starts_at_its_initial_position() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        async with dying_cursors(topic.log) as cursors:
            await cursors.ensure("earliest", EARLIEST, {"team": "a"})
            await cursors.ensure("latest", LATEST)
            await cursors.ensure("third", positions[3])
            await cursors.ensure("third", EARLIEST)
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        assert cursors.names == ("earliest", "latest", "third")
        earliest, latest, third = (cursors.get(name) for name in cursors.names)
        assert earliest is not None
        assert latest is not None
        assert third is not None
        assert earliest.properties == {"team": "a"}
        assert left(earliest, topic) == positions
        assert left(latest, topic) == []
        assert left(third, topic) == positions[3:]
        assert third.first_unacked(EARLIEST) == positions[3]
        await topic.append_and_wait("next")
        assert latest.first_unacked(EARLIEST) == topic.log.confirmed


async def test_acknowledgements_with_receipt_survive_a_crash() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        shared = await cursors.ensure("shared", EARLIEST)
        exclusive = await cursors.ensure("exclusive", EARLIEST)
        assert world.ledgers.ledgers.keys() == {p.ledger for p in positions}
        assert shared.acknowledge([positions[7], positions[2]], receipts.of("shared")) == 2
        assert shared.acknowledge([positions[7], Position(77, 0)]) == 0
        exclusive.acknowledge_cumulative(positions[6], done=receipts.of("exclusive"))
        assert receipts.given == [], "the answer came before the ack was durable"
        await receipts.wait(2)
        assert receipts.given == [("shared", None), ("exclusive", None)]
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        restored = cursors.get("shared")
        assert restored is not None
        assert left(restored, topic) == [p for n, p in enumerate(positions) if n not in (2, 7)]
        restored = cursors.get("exclusive")
        assert restored is not None
        assert restored.mark_delete == positions[6]


async def test_partly_acked_batches_survive_a_crash() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        for _ in range(3):
            topic.append_view(entry_of("a", "b", "c"))
        await wait_until(lambda: len(topic.appended) == 3)
        first, second, third = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        assert cursor.batch_ack_set(second) is None
        other = await cursors.ensure("other", EARLIEST)
        other.acknowledge([first])
        await other.flush()  # later changes are written as deltas
        assert not cursor.acknowledge_batch(second, [0b101])
        assert not cursor.acknowledge_batch(second, [0b110])
        assert cursor.batch_ack_set(second) == (0b100,)
        assert cursor.acknowledge_batch(third, [], receipts.of("third"))
        await receipts.wait(1)
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        restored = cursors.get("s")
        assert restored is not None
        assert restored.batch_ack_set(second) == (0b100,)
        assert left(restored, topic) == [first, second]
        assert await restored.backlog() == Backlog(2, 3 + 1, exact=True)
        restored.acknowledge_cumulative(second, [0b100], receipts.of("cumulative"))
        await receipts.wait(2)
        assert left(restored, topic) == [second]
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        restored = cursors.get("s")
        assert restored is not None
        assert restored.batch_ack_set(second) == (0b100,)
        assert left(restored, topic) == [second]
        assert restored.acknowledge_batch(second, [0b011])
        assert left(restored, topic) == []


async def test_acknowledgements_during_a_write_share_the_next_write() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge([positions[1]], receipts.of(1))
        await receipts.wait(1)
        ledger = world.ledgers.stored((await record_of(world)).cursor_ledgers[0])
        before = len(ledger.entries)
        world.ledgers.hold()
        cursor.acknowledge([positions[3]], receipts.of(3))
        await settle()
        for number in (5, 7, 9):
            cursor.acknowledge([positions[number]], receipts.of(number))
        await settle()
        assert len(receipts.given) == 1
        world.ledgers.release()
        await receipts.wait(5)
        assert [what for what, _ in receipts.given] == [1, 3, 5, 7, 9]
        assert len(ledger.entries) == before + 2


async def test_acknowledgements_without_receipt_wait_for_others() -> None:
    world = ClusterState()
    config = replace(QUICK, gather_s=0.03)
    async with opened(world) as topic, opened_cursors(topic.log, config=config) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge([positions[0]])
        await cursor.flush()
        ledger = world.ledgers.stored((await record_of(world)).cursor_ledgers[0])
        before = len(ledger.entries)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for position in positions[1:6]:
            cursor.acknowledge([position])
            await settle(2)
        await wait_until(lambda: len(ledger.entries) > before)
        assert loop.time() - start_s >= config.gather_s
        await settle()
        assert len(ledger.entries) == before + 1


async def test_flush_without_changes_writes_nothing() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        cursor = await cursors.ensure("s", EARLIEST)
        await cursor.flush()
        assert (await record_of(world)).cursor_ledgers == ()
        cursor.acknowledge(positions_of(topic)[:1])
        await cursor.flush()
        cursor.acknowledge(positions_of(topic)[:1], receipts.of("again"))
        await receipts.wait(1)
        (number,) = (await record_of(world)).cursor_ledgers
        assert len(world.ledgers.stored(number).entries) == 1


async def test_clean_close_moves_state_inline_and_deletes_cursor_ledger() -> None:
    world = ClusterState()
    for acked in range(3):
        async with opened(world) as topic, opened_cursors(topic.log) as cursors:
            if acked == 0:
                await topic.append_and_wait(*NAMES)
                positions = positions_of(topic)
            cursor = await cursors.ensure("s", EARLIEST)
            assert left(cursor, topic) == positions[acked:]
            cursor.acknowledge([positions[acked]])
        record = await record_of(world)
        assert record.cursor_ledgers == ()
        assert record.deleting == ()
        assert set(world.ledgers.ledgers) == {part.ledger for part in record.ledgers}


async def test_clean_close_keeps_large_state_in_cursor_ledger() -> None:
    world = ClusterState()
    config = replace(QUICK, inline_bytes_max=10)
    async with opened(world) as topic, opened_cursors(topic.log, config=config) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge(positions[1:8:2])
    assert len((await record_of(world)).cursor_ledgers) == 1
    for _ in range(2):
        async with opened(world) as topic, opened_cursors(topic.log, config=config) as cursors:
            restored = cursors.get("s")
            assert restored is not None
            assert left(restored, topic) == [p for p in positions if p not in positions[1:8:2]]


@pytest.mark.parametrize("stored", [0, 1])
async def test_failed_cursor_ledger_is_replaced_without_loss(stored: int) -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge([positions[1]], receipts.of(1))
        await receipts.wait(1)
        world.ledgers.hold()
        cursor.acknowledge([positions[3]], receipts.of(3))
        await settle()
        appender = world.ledgers.live_appender()
        appender.fail(QuorumTimeout(appender.ledger, 1, 1.0), stored=stored)
        cursor.acknowledge([positions[5]], receipts.of(5))
        await settle()
        assert len(receipts.given) == 1
        world.ledgers.release()
        await receipts.wait(3)
        assert receipts.given == [(1, None), (3, None), (5, None)]
        assert appender.ledger in world.ledgers.deleted
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        restored = cursors.get("s")
        assert restored is not None
        assert left(restored, topic) == [p for n, p in enumerate(positions) if n not in (1, 3, 5)]


async def test_receipts_wait_without_bookies_up_to_their_limit() -> None:
    world = ClusterState()
    receipts = Receipts()
    config = replace(QUICK, receipts_max=3)
    async with opened(world) as topic, opened_cursors(topic.log, config=config) as cursors:
        await topic.append_and_wait(*NAMES)
        cursor = await cursors.ensure("s", EARLIEST)
        world.ledgers.bookies = False
        for number, position in enumerate(positions_of(topic)[:5]):
            cursor.acknowledge([position], receipts.of(number))
        refused = [(what, type(error)) for what, error in receipts.given]
        assert refused == [(3, TooManyReceipts), (4, TooManyReceipts)]
        await asyncio.sleep(0.02)
        world.ledgers.bookies = True
        await receipts.wait(5)
        assert receipts.given[2:] == [(0, None), (1, None), (2, None)]
        assert cursor.mark_delete == positions_of(topic)[4]


async def acknowledge_during_outage(
    cursor: Cursor, topic: TopicLog, receipts: Receipts, world: ClusterState
) -> None:
    world.ledgers.hold()
    for number, position in enumerate(positions_of(topic)[:5]):
        cursor.acknowledge([position], receipts.of(number))
    await settle()
    assert receipts.given == []


async def counts_of(receipts: Receipts, count: int) -> list[int]:
    """The numbers of receipts that were called by each turn of the loop, until there are
    `count`."""
    counts = [0]
    while counts[-1] < count:
        await asyncio.sleep(0)
        if len(receipts.given) != counts[-1]:
            counts.append(len(receipts.given))
    return counts


async def test_many_receipts_of_a_write_are_called_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "RECEIPTS_PER_TURN", 2)
    world, receipts = ClusterState(), Receipts()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        cursor = await cursors.ensure("s", EARLIEST)
        await acknowledge_during_outage(cursor, topic, receipts, world)
        world.ledgers.release()
        assert await counts_of(receipts, 2) == [0, 2]
        cursor.acknowledge(positions_of(topic)[5:6], receipts.of(5))
        assert await counts_of(receipts, 5) == [0, 4, 5]
        await receipts.wait(6)
        assert receipts.given == [(number, None) for number in range(6)]


@pytest.mark.parametrize("kind", ["snapshot", "take_delta"])
async def test_many_deltas_and_snapshots_are_made_in_turns(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A deletion and an acknowledgement between the turns are kept."""
    monkeypatch.setattr(journal, "STEP_BYTES", 1)
    right: Callable[[Cursor], list[bytes]] = getattr(CursorClass, kind)
    world, receipts, turn, turns = ClusterState(), Receipts(), [0], list[int]()

    def make(self: Cursor) -> list[bytes]:
        turns.append(turn[0])
        asyncio.get_running_loop().call_soon(next_turn)
        return right(self)

    def next_turn() -> None:
        turn[0] += 1

    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        kept = [await cursors.ensure(f"s{number}", EARLIEST) for number in range(4)]
        if kind == "take_delta":  # otherwise the first write begins a ledger, with snapshots
            await kept[3].flush()
            kept[3].acknowledge([positions[9]], receipts.of("first"))
            await receipts.wait(1)
        monkeypatch.setattr(CursorClass, kind, make)
        before = len(receipts.given)
        for cursor in kept:
            cursor.acknowledge([positions[0]], receipts.of(cursor.name))
        await wait_until(lambda: bool(turns))
        kept[0].acknowledge([positions[5]], receipts.of("later"))
        await cursors.delete("s3")
        await receipts.wait(before + 5)
        assert len(turns) >= 3
        assert len(set(turns)) == len(turns), "one in each turn"
        assert all(error is None for _, error in receipts.given)
        cursors.check()
        monkeypatch.setattr(CursorClass, kind, right)
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        assert cursors.names == ("s0", "s1", "s2")
        for name, acked in (("s0", (0, 5)), ("s1", (0,)), ("s2", (0,))):
            restored = cursors.get(name)
            assert restored is not None
            expected = [at for number, at in enumerate(positions) if number not in acked]
            assert left(restored, topic) == expected


async def test_an_end_between_turns_calls_the_receipts_of_durable_changes_with_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "RECEIPTS_PER_TURN", 2)
    world, receipts = ClusterState(), Receipts()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        cursor = await cursors.ensure("s", EARLIEST)
        await acknowledge_during_outage(cursor, topic, receipts, world)
        world.ledgers.release()
        assert await counts_of(receipts, 2) == [0, 2]
        cursor.acknowledge(positions_of(topic)[5:6], receipts.of(5))
        cursors.abandon()
        assert receipts.given[:5] == [(number, None) for number in range(5)]
        [(what, error)] = receipts.given[5:]
        assert what == 5
        assert isinstance(error, LogClosed)


@pytest.mark.parametrize("is_abandoned", [False, True])
async def test_many_receipts_of_a_failed_write_are_called_in_turns_until_the_end(
    monkeypatch: pytest.MonkeyPatch, is_abandoned: bool
) -> None:
    monkeypatch.setattr(journal, "RECEIPTS_PER_TURN", 2)
    world, receipts = ClusterState(), Receipts()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        cursor = await cursors.ensure("s", EARLIEST)
        await acknowledge_during_outage(cursor, topic, receipts, world)
        appender = world.ledgers.live_appender()
        appender.fail(LedgerRefused(appender.ledger, "BAD_REQUEST"))
        assert await counts_of(receipts, 2) == [0, 2]
        if is_abandoned:
            cursors.abandon()
        else:
            await cursors.close()
        assert [what for what, _ in receipts.given] == list(range(5))
        assert {type(error) for _, error in receipts.given} == {LogUnavailable}
        world.ledgers.release()


async def test_new_owner_fences_the_cursors_of_the_previous_owner() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with (
        opened(world, close=False) as old,
        dying_cursors(old.log) as old_cursors,
    ):
        await old.append_and_wait(*NAMES)
        positions = positions_of(old)
        zombie = await old_cursors.ensure("s", EARLIEST)
        zombie.acknowledge([positions[1]], receipts.of("before"))
        await receipts.wait(1)
        async with opened(world) as new, opened_cursors(new.log) as cursors:
            zombie.acknowledge([positions[2]], receipts.of("zombie"))
            await receipts.wait(2)
            what, error = receipts.given[1]
            assert what == "zombie"
            assert isinstance(error, LogFenced)
            await wait_until(lambda: old.error is not None or old.log.state == "fenced")
            with pytest.raises(LogFenced):
                await old_cursors.ensure("more", EARLIEST)
            with pytest.raises(LogFenced):
                await zombie.reset(EARLIEST)
            with pytest.raises(LogFenced):
                await zombie.flush()
            restored = cursors.get("s")
            assert restored is not None
            assert left(restored, new) == [p for p in positions if p != positions[1]]


async def test_stale_owner_without_cursor_ledger_is_fenced_by_the_record() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with (
        opened(world, close=False) as old,
        dying_cursors(old.log) as old_cursors,
    ):
        await old.append_and_wait(*NAMES)
        zombie = await old_cursors.ensure("s", EARLIEST)
        async with opened(world) as new, opened_cursors(new.log):
            zombie.acknowledge(positions_of(old)[:1], receipts.of("zombie"))
            await receipts.wait(1)
            assert isinstance(receipts.given[0][1], LogFenced)
            record = await record_of(world)
            assert set(world.ledgers.ledgers) == {part.ledger for part in record.ledgers}


async def test_recreated_subscription_does_not_inherit_acknowledgements() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        other = await cursors.ensure("other", EARLIEST)
        former = await cursors.ensure("s", EARLIEST)
        former.acknowledge(positions[:5], receipts.of(0))
        await receipts.wait(1)
        await cursors.delete("s")
        assert cursors.get("s") is None
        former.acknowledge(positions[:7], receipts.of("late"))
        assert isinstance(receipts.given[1][1], SubscriptionNotFound)
        with pytest.raises(SubscriptionNotFound):
            await cursors.delete("s")
        latter = await cursors.ensure("s", EARLIEST)
        latter.acknowledge([positions[9]], receipts.of(1))
        other.acknowledge([positions[8]], receipts.of(2))
        await receipts.wait(4)
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        restored = cursors.get("s")
        assert restored is not None
        assert left(restored, topic) == [p for p in positions if p != positions[9]]


async def test_subscription_numbers_are_not_reused_by_a_new_owner() -> None:
    """The records of a deleted subscription must not reach a subscription that the next owner
    creates before it has a cursor ledger of its own."""

    world = ClusterState()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        former = await cursors.ensure("former", EARLIEST)
        former.acknowledge(positions[:6])
        await former.flush()
        await cursors.delete("former")
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await cursors.ensure("latter", EARLIEST)
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        latter = cursors.get("latter")
        assert latter is not None
        assert left(latter, topic) == positions


async def test_subscription_created_during_ledger_creation_is_kept() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        one = await cursors.ensure("one", EARLIEST)
        world.ledgers.hold()
        one.acknowledge(positions[:2], receipts.of("one"))
        await settle()
        two = await cursors.ensure("two", EARLIEST)
        two.acknowledge(positions[2:4], receipts.of("two"))
        await cursors.ensure("three", positions[7])
        world.ledgers.release()
        await receipts.wait(2)
        cursors.check()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        kept = {name: cursors.get(name) for name in cursors.names}
        assert {name: left(cursor, topic) for name, cursor in kept.items() if cursor} == {
            "one": positions[2:],
            "two": [*positions[:2], *positions[4:]],
            "three": positions[7:],
        }


@pytest.mark.parametrize("crash", [True, False])
async def test_reset_durably_removes_acknowledgements(crash: bool) -> None:
    world = ClusterState()
    receipts = Receipts()
    async with (
        opened(world, close=not crash) as topic,
        opened_cursors(topic.log, close=not crash) as cursors,
    ):
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge(positions[:10], receipts.of(0))
        await receipts.wait(1)
        await cursor.reset(positions[4])
        assert left(cursor, topic) == positions[4:]
        cursor.acknowledge([positions[6]], receipts.of(1))
        await receipts.wait(2)
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        restored = cursors.get("s")
        assert restored is not None
        assert left(restored, topic) == [*positions[4:6], *positions[7:]]
        await restored.reset(LATEST)
        assert left(restored, topic) == []
        await restored.reset(EARLIEST)
        assert left(restored, topic) == positions


async def test_a_reset_into_a_batch_too_large_for_the_record_fails_alone() -> None:
    """The ack set of the largest batch takes 128 KiB, and the topic's record has 1,000 KiB."""
    world, receipts = ClusterState(), Receipts()
    remaining = (1 << BATCH_MESSAGES_MAX) - 2
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        refused = []
        for number in range(10):
            cursor = await cursors.ensure(f"s{number}", EARLIEST)
            try:
                await cursor.reset(positions[1], remaining)
            except TopicFull:
                refused.append(cursor)
                assert left(cursor, topic) == positions, "it has not moved"
        assert 0 < len(refused) < 10
        for cursor in refused:
            await cursor.reset(positions[5])
            assert left(cursor, topic) == positions[5:]
            cursor.acknowledge([positions[5]], receipts.of(cursor.name))
        await receipts.wait(len(refused))
        assert receipts.given == [(cursor.name, None) for cursor in refused]
        assert topic.log.owned_record.lost is None


async def test_cancelled_reset_is_atomic() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge(positions[:10], receipts.of(0))
        await receipts.wait(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await cursor.reset(EARLIEST)
        await settle()
        assert cursor.mark_delete == positions[9], "the caller gave up before the reset began"
        async with asyncio.TaskGroup() as tasks:
            reset = tasks.create_task(cursor.reset(EARLIEST))
            await settle(3)
            reset.cancel()
        await wait_until(lambda: cursor.mark_delete < positions[0])
        cursor.acknowledge(positions[:3], receipts.of(1))
        await receipts.wait(2)
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        restored = cursors.get("s")
        assert restored is not None
        assert left(restored, topic) == positions[3:]


async def test_non_durable_cursor_writes_nothing() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        positions = positions_of(topic)
        reader = cursors.open_non_durable("reader-1", positions[2])
        assert not reader.durable
        assert left(reader, topic) == positions[2:]
        reader.acknowledge([positions[3]], receipts.of(0))
        reader.acknowledge_batch(positions[5], [1], receipts.of(1))
        reader.acknowledge_cumulative(positions[4], done=receipts.of(2))
        assert receipts.given == [(0, None), (1, None), (2, None)]
        await reader.flush()
        await reader.reset(EARLIEST)
        assert left(reader, topic) == positions
        assert cursors.names == ()
    record = await record_of(world)
    assert record.subscriptions == {}
    assert record.cursor_ledgers == ()


async def test_cursor_ledger_size_is_bounded() -> None:
    """With many acknowledgements and little live state the journal writes snapshots and rolls."""

    world = ClusterState()
    config = replace(QUICK, tail_bytes_min=300, ledger_bytes_max=2000)
    async with (
        opened(world, config=replace(SMALL, ledger_entries_max=10_000)) as topic,
        opened_cursors(topic.log, config=config, close=False) as cursors,
    ):
        count = 400
        for _ in range(count):
            topic.append("x")
        await wait_until(lambda: len(topic.appended) == count)
        positions = positions_of(topic)
        one = await cursors.ensure("one", EARLIEST)
        two = await cursors.ensure("two", EARLIEST)
        replayed: list[int] = []
        for position in positions:
            one.acknowledge([position])
            two.acknowledge([positions[(7 * position.entry) % count]])
            await one.flush()
            cursors.check()
            (number,) = (await record_of(world)).cursor_ledgers
            stored = world.ledgers.stored(number)
            size = sum(map(len, stored.entries))
            assert size < 4000
            replay_from = int.from_bytes(stored.entries[-1][1:9], "little")
            replayed.append(sum(map(len, stored.entries[replay_from:])))
        assert max(replayed) < 1500
        assert len(world.ledgers.deleted) > 3
        assert left(two, topic) == []


async def test_degraded_cursor_ledger_is_replaced_when_bookies_return() -> None:
    world = ClusterState()
    world.ledgers.full_ensemble = False
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES[:2])
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge(positions_of(topic)[:1])
        await cursor.flush()
        (before,) = (await record_of(world)).cursor_ledgers
        world.ledgers.full_ensemble = True
        cursor.acknowledge(positions_of(topic)[1:])
        await cursor.flush()
        (after,) = (await record_of(world)).cursor_ledgers
        assert after != before


async def test_refused_cursor_record_fails_every_receipt() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge(positions_of(topic)[:1])
        await cursor.flush()
        world.ledgers.hold()
        cursor.acknowledge(positions_of(topic)[1:2], receipts.of(0))
        await settle()
        appender = world.ledgers.live_appender()
        appender.fail(LedgerRefused(appender.ledger, "BAD_REQUEST"))
        await receipts.wait(1)
        assert isinstance(receipts.given[0][1], LogUnavailable)
        await wait_until(lambda: topic.log.state == "fenced", what="the end of the log")
        world.ledgers.release()


async def test_missing_cursor_ledger_is_named_in_the_error() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge(positions_of(topic)[:1])
        await cursor.flush()
    (number,) = (await record_of(world)).cursor_ledgers
    kept = world.ledgers.ledgers.pop(number)
    async with opened(world, close=False) as topic:
        with pytest.raises(LogDamaged) as caught:
            await Cursors.open(topic.log)
        assert caught.value.ledger == number
        kept.entries[-1] = b"\x09" + kept.entries[-1][1:]
        world.ledgers.ledgers[number] = kept
        with pytest.raises(LogDamaged, match="format version 9"):
            await Cursors.open(topic.log)


async def test_cancelled_run_calls_every_receipt() -> None:
    world = ClusterState()
    receipts = Receipts()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait(*NAMES)
        cursor = await cursors.ensure("s", EARLIEST)
        world.ledgers.hold()
        cursor.acknowledge(positions_of(topic)[:1], receipts.of(0))
        await settle()
        cursor.acknowledge(positions_of(topic)[1:2], receipts.of(1))
    assert [type(error) for _, error in receipts.given] == [LogClosed, LogClosed]
    cursor.acknowledge(positions_of(topic)[2:3], receipts.of(2))
    assert isinstance(receipts.given[2][1], LogClosed)


async def test_backlog_counts_entries_and_messages() -> None:
    world = ClusterState()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        sizes = [1, 3, 2, 5, 1, 1, 4, 2, 1, 1, 1, 1]  # batches; ledgers of five entries
        for size in sizes:
            topic.append_view(entry_of(*["x"] * size))
        await wait_until(lambda: len(topic.appended) == len(sizes))
        positions = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        acked: set[int] = set()
        for number in (0, 3, 6, 7, 10):
            cursor.acknowledge([positions[number]])
            acked.add(number)
            messages = sum(size for n, size in enumerate(sizes) if n not in acked)
            assert cursor.backlog_entries == len(sizes) - len(acked)
            assert await cursor.backlog() == Backlog(cursor.backlog_entries, messages, True)
            rough = cursor.backlog_nowait()
            assert rough.entries == cursor.backlog_entries
            assert abs(rough.messages - messages) <= 5
        cursor.acknowledge_cumulative(positions[9])
        assert cursor.backlog_nowait() == Backlog(1, 1, exact=True), "one message in each entry"


async def test_an_idle_degraded_cursor_ledger_moves_without_a_change() -> None:
    """Otherwise the decommission of a bookie would wait until the next acknowledgement."""
    world = ClusterState()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        await topic.append_and_wait("a", "b", "c")
        await cursors.ensure("s", EARLIEST, {})
        cursor = cursors.get("s")
        assert cursor is not None
        world.ledgers.full_ensemble = False
        cursor.acknowledge([topic.appended[1][1]])
        await cursor.flush()
        [before] = topic.log.owned_record.record.cursor_ledgers
        cursors.tend()  # there are not enough bookies yet
        await wait_until(lambda: cursors.is_settled)
        assert topic.log.owned_record.record.cursor_ledgers == (before,)
        world.ledgers.full_ensemble = True
        cursors.tend()
        await wait_until(lambda: topic.log.owned_record.record.cursor_ledgers != (before,))
        await wait_until(lambda: cursors.is_settled)
        [after] = topic.log.owned_record.record.cursor_ledgers
        cursors.tend()
        await wait_until(lambda: cursors.is_settled)
        assert topic.log.owned_record.record.cursor_ledgers == (after,), (
            "the cursor ledger moved twice"
        )
        position = topic.appended[1][1]
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        cursor = cursors.get("s")
        assert cursor is not None
        assert cursor.is_acked(position)
