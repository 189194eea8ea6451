"""Redelivery counts in memory, together with acknowledgements, and after failovers."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING

from fakes.cluster_state import ClusterState
from fakes.topic_log import QUICK, opened, opened_cursors
from fakes.topics import opened_topic
from support import wait_until

from magnetar.broker.cursor import format as stored
from magnetar.broker.cursor.journal import CursorConfig
from magnetar.broker.cursor.redeliveries import COUNT_MAX, COUNTS_MAX, Redeliveries
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.topic.contract import SubscriptionType

if TYPE_CHECKING:
    from fakes.topic_log import TopicLog

    from magnetar.broker.cursor.cursor import Cursor

SHARED = SubscriptionType.SHARED
dying_cursors = partial(opened_cursors, close=False)


def test_counts_agree_with_a_plain_dict() -> None:
    chance = random.Random(7)
    held, twin = Redeliveries(lambda: None), dict[Position, int]()
    stored_counts: dict[Position, int] = {}
    for _ in range(3_000):
        position = Position(chance.randrange(3), chance.randrange(12))
        match chance.randrange(8):
            case 0:
                held.pop(position)
                twin.pop(position, None)
            case 1 if chance.random() < 0.2:
                held.pop_through(position)
                twin = {it: count for it, count in twin.items() if it > position}
            case 2:
                for ledger, counts in held.take_unstored().items():
                    stored_counts |= {Position(ledger, it): n for it, n in counts.items()}
                assert not held.has_unstored
                assert {it: stored_counts[it] for it in twin} == twin
            case _:
                entries = chance.sample(range(12), chance.randrange(1, 5))
                held.count_again(position.ledger, entries)
                for each in (Position(position.ledger, entry) for entry in entries):
                    twin[each] = twin.get(each, 0) + 1
        held.check()
        assert {it: held.get(it) for it in held} == twin
        assert len(held) == len(twin)
        assert bool(held) == bool(twin)


def test_no_more_entries_than_the_limit_have_a_count() -> None:
    held = Redeliveries(lambda: None)
    held.count_again(1, range(COUNTS_MAX - 2))
    held.count_again(2, range(5))
    assert len(held) == COUNTS_MAX
    assert [held.get(Position(2, entry)) for entry in range(5)] == [1, 1, 0, 0, 0]
    held.count_again(1, [0])
    held.count_again(2, range(5))
    assert held.get(Position(1, 0)) == 2
    assert [held.get(Position(2, entry)) for entry in range(5)] == [2, 2, 0, 0, 0]
    assert held.take_unstored()[2] == {0: 2, 1: 2}
    held.check()


def test_count_that_has_reached_its_limit_stays() -> None:
    held = Redeliveries(lambda: None)
    held.restore({1: {0: COUNT_MAX, 1: 7}})
    held.count_again(1, [0, 1, 2])
    assert [held.get(Position(1, entry)) for entry in range(3)] == [COUNT_MAX, 8, 1]


def positions_of(topic: TopicLog) -> list[Position]:
    return [position for _, position in topic.appended]


def counts_of(cursor: Cursor | None) -> dict[Position, int]:
    assert cursor is not None
    return {position: cursor.redeliveries.get(position) for position in cursor.redeliveries}


async def test_counts_are_written_in_one_go_within_50_ms_and_survive_a_crash() -> None:
    world = ClusterState()
    async with (
        opened(world, close=False) as topic,
        dying_cursors(topic.log, config=CursorConfig()) as cursors,
    ):
        await topic.append_and_wait("a", "b", "c", "d")
        a, b, c, d = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        for _ in range(3):
            cursor.redeliveries.count_again(b.ledger, [b.entry])
        cursor.redeliveries.count_again(a.ledger, [a.entry, c.entry, d.entry])
        cursor.acknowledge([c])
        await asyncio.sleep(0.06)
        [number] = [it for it in world.ledgers.ledgers if it != a.ledger]
        assert len(world.ledgers.ledgers[number].entries) == 1
        cursor.redeliveries.count_again(d.ledger, [d.entry])
        await cursor.flush()
        cursor.acknowledge([a])
        await cursor.flush()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        cursor = cursors.get("s")
        assert counts_of(cursor) == {b: 3, d: 2}
        assert cursor is not None
        await cursor.reset(EARLIEST)
        assert counts_of(cursor) == {}
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        assert counts_of(cursors.get("s")) == {}


async def test_counts_survive_a_clean_close_and_a_roll_of_the_ledger() -> None:
    world = ClusterState()
    config = CursorConfig(gather_s=QUICK.gather_s, ledger_entries_max=2)
    async with opened(world) as topic, opened_cursors(topic.log, config=config) as cursors:
        await topic.append_and_wait("a", "b")
        a, b = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        for _ in range(7):
            cursor.redeliveries.count_again(b.ledger, [b.entry])
            await cursor.flush()
    async with opened(world, close=False) as topic, dying_cursors(topic.log, config=config) as them:
        cursor = them.get("s")
        assert counts_of(cursor) == {b: 7}
        assert cursor is not None
        for _ in range(7):
            cursor.redeliveries.count_again(a.ledger, [a.entry])
            await cursor.flush()
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        assert counts_of(cursors.get("s")) == {b: 7, a: 7}


async def test_state_of_version_1_is_read_and_written_as_version_2() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        await topic.append_and_wait("a", "b")
        a, b = positions_of(topic)
        cursor = await cursors.ensure("s", EARLIEST)
        cursor.acknowledge([a])
        await cursor.flush()
    [number] = [it for it in world.ledgers.ledgers if it != a.ledger]
    entries = world.ledgers.ledgers[number].entries
    entries[:] = [b"\x01" + entry[1:] for entry in entries]
    async with opened(world, close=False) as topic, dying_cursors(topic.log) as cursors:
        cursor = cursors.get("s")
        assert cursor is not None
        assert cursor.mark_delete == a
        cursor.redeliveries.count_again(b.ledger, [b.entry])
        await cursor.flush()
    [newest] = [it for it in world.ledgers.ledgers if it not in (a.ledger, number)]
    assert world.ledgers.ledgers[newest].entries[0][0] == stored.VERSION


async def poison_counts(world: ClusterState) -> list[int]:
    """Return the redelivery counts of "poison" at one broker, which is killed afterwards. The
    consumer returns the message twice and acknowledges "good"."""
    async with opened_topic(world, close=False) as it:
        if it.topic.log.chain.entry_count == 0:
            await it.publish("good", "poison")
        handle, session = await it.subscribe(kind=SHARED)
        for deliveries in (1, 2, 3):
            await wait_until(lambda: session.texts.count("poison") == deliveries)  # noqa: B023
            poison = session.entries[session.texts.index("poison")].position
            if deliveries < 3:
                handle.redeliver([poison])
        handle.acknowledge([position for position in session.positions if position != poison])
        await asyncio.sleep(0.2)
        return [
            count
            for count, position in zip(session.counts, session.positions, strict=True)
            if position == poison
        ]


async def test_the_count_of_a_poison_message_continues_over_kills_of_the_owner() -> None:
    world = ClusterState()
    counts = [count for _ in range(4) for count in await poison_counts(world)]
    assert counts == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8]
    async with opened_topic(world, close=False) as it:
        handle, session = await it.subscribe(kind=SHARED)
        await wait_until(lambda: session.texts == ["poison"])
        handle.acknowledge(session.positions)
        await handle.close()
        assert not it.topic.subscriptions["s"].cursor.redeliveries
