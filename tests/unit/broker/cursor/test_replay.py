"""The replay of a cursor's records restores its state from any valid start of the replay."""

from __future__ import annotations

import asyncio
import struct
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING, cast

import pytest
from fakes.cluster_state import ClusterState
from fakes.topic_log import opened, opened_cursors
from hypothesis import given, settings
from hypothesis import strategies as st
from support import wait_until

from magnetar.broker.cursor import format as stored
from magnetar.broker.cursor.acks import AckState
from magnetar.broker.cursor.cursor import Cursor
from magnetar.broker.cursor.redeliveries import COUNTS_MAX, Redeliveries
from magnetar.broker.cursor.replay import CursorReplay, number_of
from magnetar.broker.errors import InvalidCursorRecord
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.metadata.model import LedgerId, TopicLedger

if TYPE_CHECKING:
    from magnetar.broker.cursor.journal import CursorJournal
    from magnetar.broker.log.log import Log

COUNTS = (20, 9, 30)


class OnlyAChain:
    """The part of a log that a cursor uses to acknowledge."""

    def __init__(self) -> None:
        self.chain = Chain()
        for number, count in enumerate(COUNTS, start=1):
            if number > 1:
                self.chain.close_ledger(length=1, closed_ms=1)
            self.chain.open_ledger(TopicLedger(LedgerId(number), self.chain.next_index))
            self.chain.grow(count, next_index=self.chain.next_index + count)


class NotesNothing:
    def note(self, cursor: object, receipt: object) -> None:
        pass


positions = st.sampled_from(
    [Position(ledger, entry) for ledger, n in enumerate(COUNTS, start=1) for entry in range(n)]
)
steps = st.lists(
    st.tuples(st.just("ack"), st.lists(positions, max_size=8))
    | st.tuples(st.just("batch"), positions, st.integers(0, 1 << 70))
    | st.tuples(st.just("cumulative"), positions, st.integers(0, 7))
    | st.tuples(st.just("delta"))
    | st.tuples(st.just("snapshot")),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 100))
def test_deltas_and_snapshots_restore_the_state(script: list[tuple[object, ...]], cut: int) -> None:
    log = OnlyAChain()
    cursor = Cursor(
        "s",
        cast("Log", log),
        AckState(log.chain, EARLIEST),
        number=7,
        properties={},
        journal=cast("CursorJournal", NotesNothing()),
    )
    written: list[bytes] = []
    needed_from = 0
    for step in script:
        match step:
            case ("ack", list() as acked):
                cursor.acknowledge(acked)
            case ("batch", Position() as position, int() as left):
                cursor.acknowledge_batch(position, [left & (1 << 64) - 1, left >> 64])
            case ("cumulative", Position() as position, int() as left):
                cursor.acknowledge_cumulative(position, [left] if left else [])
            case ("delta",):
                assert cursor.changed or not cursor.take_delta()
                written += cursor.take_delta()
                assert not cursor.changed
            case ("snapshot",):
                needed_from = len(written)
                written += cursor.snapshot()
    written += cursor.take_delta()

    # Unneeded records may be there completely, partly or not at all.
    replay = CursorReplay(log.chain)
    for record in written[min(cut, needed_from) :]:
        replay.on_entry(stored.header(replay_from=0) + record)
    if not written:
        return
    state = replay.state(7)
    state.check()
    assert stored.snapshot(7, state) == cursor.snapshot()


def test_records_reach_only_the_subscription_of_their_number() -> None:
    chain = OnlyAChain().chain
    replay = CursorReplay(chain)
    for number, mark in ((3, Position(1, 4)), (9, Position(2, 1))):
        inline = stored.inline(stored.snapshot(number, AckState(chain, mark)))
        assert number_of(inline) == number
        replay.on_entry(inline)
    assert replay.newest_number == 9
    assert replay.state(3).mark_delete == Position(1, 4)
    assert replay.state(9).mark_delete == Position(2, 1)


def test_inline_value_without_a_record_is_refused() -> None:
    with pytest.raises(InvalidCursorRecord, match="empty"):
        number_of(stored.inline([]))
    with pytest.raises(InvalidCursorRecord):
        number_of(b"")


def test_ranges_beyond_the_end_of_the_log_are_cut() -> None:
    chain = OnlyAChain().chain
    replay = CursorReplay(chain)
    entry = stored.Ranges(1, 2, ((5, 4_000_000_000),))
    replay._on_record(entry)
    state = replay.state(1)
    state.check()
    assert list(state.acked_beyond_mark()) == [(2, 4)]


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("moves_the_mark", [True, False])
def test_time_of_a_replay_does_not_grow_with_deltas_times_ack_sets(moves_the_mark: bool) -> None:
    chain = Chain([TopicLedger(LedgerId(1), 0, entries=30_000, length=1, closed_ms=1)])
    state = AckState(chain, Position(1, -1))
    for entry in range(15_000, 25_000):
        state.on_ack_batch_index(Position(1, entry), 1)
    replay = CursorReplay(chain)
    replay.on_entry(stored.inline(stored.snapshot(1, state)))
    began_s = time.process_time()
    for entry in range(0, 10_000, 2):
        mark = Position(1, entry) if moves_the_mark else None
        acked = {} if moves_the_mark else {1: array("I", [entry + 1])}
        replay.on_entry(stored.inline(stored.delta(1, mark=mark, acked=acked, batches=())))
    assert time.process_time() - began_s < 1.0  # 0.1 s; the quadratic form took 5 to 12 s
    assert len(replay.state(1).partial) == 10_000
    replay.state(1).check()


@pytest.mark.parametrize("first", [0, 8])
def test_replayed_bits_and_marks_remove_the_ack_sets_of_acknowledged_entries(first: int) -> None:
    chain = OnlyAChain().chain
    for bits in (0b1, 0b11101, 0b1111_1111):
        for partly in ((1,), (2, 3), tuple(range(1, 20))):
            state, mark = AckState(chain, Position(1, 0)), AckState(chain, Position(1, 0))
            for entry in partly:
                state.on_ack_batch_index(Position(1, entry), 1)
                mark.on_ack_batch_index(Position(1, entry), 1)
            state.on_acked_bits(1, first, bytes([bits]))
            state.check()
            acked = {first + bit for bit in range(8) if bits >> bit & 1}
            assert {it.entry for it in state.partial} == set(partly) - acked
            mark.on_ack_cumulative(Position(1, first + 1))
            mark.check()
            assert {it.entry for it in mark.partial} == {it for it in partly if it > first + 1}


async def test_mark_in_an_empty_first_ledger_acknowledges_nothing() -> None:
    """The ledger of these records was dropped and forgotten. A later ledger may have a smaller id,
    because each broker takes ids from its own block."""

    world = ClusterState()
    world.ledgers.next_id(1_000)
    async with opened(world, close=False) as topic:
        world.ledgers.hold()
        topic.append("never stored")
        await wait_until(lambda: topic.log.describe()["in_flight"] == 1)
        async with opened_cursors(topic.log, close=False) as cursors:
            await cursors.ensure("s", EARLIEST)
    world.ledgers.release()
    async with opened(world) as topic, opened_cursors(topic.log):
        assert topic.log.chain.records == ()
    world.ledgers._next = 0
    async with opened(world) as topic, opened_cursors(topic.log):
        await topic.append_and_wait("a", "b", "c")
        assert topic.log.confirmed.ledger < 1_000
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        cursor = cursors.get("s")
        assert cursor is not None
        assert cursor.backlog_entries == 3


def test_replayed_counts_are_the_largest_ones_of_unacknowledged_entries() -> None:
    chain = OnlyAChain().chain
    replay = CursorReplay(chain)
    replay.on_entry(stored.inline(stored.snapshot(1, AckState(chain, Position(1, 3)))))
    twice = struct.pack("<BIIq6I", stored.Kind.REDELIVERIES, 1, 32, 1, 7, 5, 7, 9, 7, 2)
    for ledger, counts in (
        (1, {2: 1, 3: 1, 4: 1, 19: 3, 20: 1}),
        (1, {4: 6, 5: 1, 19: 2}),
        (2, {0: 4, 8: 1}),
        (3, {99: 1}),
        (9, {0: 1}),
    ):
        replay.on_entry(stored.inline(stored._redeliveries(1, {ledger: counts})))
    replay.on_entry(stored.inline([twice]))
    replay.on_entry(
        stored.inline(stored.delta(1, mark=None, acked={2: array("I", [8])}, batches=()))
    )
    assert replay.redeliveries(1) == {1: {4: 6, 19: 3, 5: 1, 7: 9}, 2: {0: 4}}


@pytest.mark.usefixtures("no_collection")
def test_the_most_redelivery_counts_are_restored_in_time() -> None:
    chain = Chain(
        TopicLedger(LedgerId(ledger), 0, entries=50_000, length=1, closed_ms=1)
        for ledger in range(1, 9)
    )
    counts = {ledger: dict.fromkeys(range(50_000), 3) for ledger in range(1, 9)}
    assert sum(map(len, counts.values())) == COUNTS_MAX
    records = stored.snapshot(1, AckState(chain, Position(1, -1)), counts)
    entries = [stored.inline(group) for group in stored.entries_of(records)]
    began_s = time.process_time()
    replay = CursorReplay(chain)
    for entry in entries:
        replay.on_entry(entry)
    held = Redeliveries(lambda: None)
    held.restore(replay.redeliveries(1))
    assert time.process_time() - began_s < 0.5  # 0.15 s; with a position for each, 0.9 s
    assert len(held) == COUNTS_MAX
    held.check()


@pytest.mark.real_loop
async def test_a_long_replay_takes_several_steps_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, loop, step = ClusterState(), asyncio.get_running_loop(), 0
    replayed: Counter[int] = Counter()
    on_entry = CursorReplay.on_entry

    def tick() -> None:
        nonlocal step, ticking
        step += 1
        ticking = loop.call_soon(tick)

    def counting(replay: CursorReplay, entry: bytes | memoryview) -> None:
        replayed[step] += len(entry)
        on_entry(replay, entry)

    async with opened(world, close=False) as topic:
        await topic.append_and_wait(*map(str, range(1_500)))
        async with opened_cursors(topic.log, close=False) as cursors:
            cursor = await cursors.ensure("s", EARLIEST)
            for entry in reversed(range(0, 1_500, 2)):
                cursor.acknowledge([topic.log.chain.at_rank(entry + 1)])
                await cursor.flush()
    monkeypatch.setattr(CursorReplay, "on_entry", counting)
    ticking = loop.call_soon(tick)
    async with opened(world) as topic, opened_cursors(topic.log) as cursors:
        ticking.cancel()
        restored = cursors.get("s")
        assert restored is not None
        assert restored.backlog_entries == 750
    assert sum(replayed.values()) > 24 << 10
    assert max(replayed.values()) < 17 << 10
