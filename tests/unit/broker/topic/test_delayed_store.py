"""Stored indexes of delayed messages: recovery, deletion, compaction, crashes at any step."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.ledgers import BrokerDied, FakeLedgers, Steps
from fakes.topic_log import SteppingStore, opened, opened_cursors
from support import settle, wait_until

from magnetar.bookie.ledger.errors import LedgerRefused, NotEnoughBookies
from magnetar.broker.dispatch.delayed_index import DelayedIndex
from magnetar.broker.dispatch.delayed_segment import encode_segment
from magnetar.broker.errors import LogError
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.topic.delayed_store import LEDGERS_MAX, DelayedStore, DelayedStoreConfig
from magnetar.runtime.on_demand import spawner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.ledgers import FakeAppender
    from fakes.topic_log import TopicLog

    from magnetar.bookie.ledger.errors import LedgerError
    from magnetar.broker.cursor.cursor import Cursor
    from magnetar.broker.cursor.cursors import Cursors

RUN = 4  # entries
CONFIG = DelayedStoreConfig(run_entries=RUN)
THRIFTY = DelayedStoreConfig(run_entries=RUN, garbage_bytes_min=200, close_entries_min=2)


def due_of(position: Position) -> int:
    """The delivery time of an entry: what a slow model would read from the log."""
    return 1_000 + (position.ledger * 7_919 + position.entry * 104_729) % 997


@dataclass
class Life:
    """The life of one broker. `stored` has the entries that the broker knew as stored at its
    end."""

    topic: TopicLog
    cursors: Cursors
    store: DelayedStore
    stored: set[Position] = field(default_factory=set)

    @property
    def index(self) -> DelayedIndex:
        return self.store.index_of("s")

    @property
    def cursor(self) -> Cursor:
        found = self.cursors.get("s")
        assert found is not None
        return found

    @property
    def listed(self) -> tuple[int, ...]:
        return self.topic.log.owned_record.record.delayed_ledgers

    async def delay(self, count: int) -> list[Position]:
        """Append entries and hold them back."""
        before = len(self.topic.appended)
        await self.topic.append_and_wait(*["x"] * count)
        positions = [at for _, at in self.topic.appended[before:]]
        for at in positions:
            self.index.add(at, due_of(at))
        return positions

    def acknowledge(self, positions: list[Position]) -> None:
        if positions:
            self.cursor.acknowledge(positions)
            for at in positions:
                self.index.discard(at)

    async def settled(self) -> None:
        await wait_until(lambda: self.store.is_settled, what="the store")
        self.store.check()

    def positions(self) -> list[Position]:
        """All entries of the log."""
        chain, found = self.topic.log.chain, []
        position = chain.first
        while chain.is_entry(position):
            found.append(position)
            position = chain.next_position(position)
        return found


@asynccontextmanager
async def life(
    world: ClusterState,
    config: DelayedStoreConfig = CONFIG,
    *,
    steps: Steps | None = None,
    close: bool = True,
) -> AsyncIterator[Life]:
    steps = steps or Steps()
    store = SteppingStore(world.tree, steps)
    ledgers = FakeLedgers(world.ledgers, steps)
    async with (
        opened(world, store=store, ledgers=ledgers, close=close) as topic,
        opened_cursors(topic.log, close=close) as cursors,
    ):
        await cursors.ensure("s", EARLIEST)
        delayed = await DelayedStore.open(topic.log, cursors, config)
        it = Life(topic, cursors, delayed)
        async with asyncio.TaskGroup() as tasks:
            delayed.start(spawner(tasks))
            try:
                yield it
                if close:
                    await delayed.close()
                    delayed.check()
            finally:
                it.stored = {at for run in delayed._stored for at, _ in run.left()}
                delayed.abandon()


def contents(it: Life) -> dict[Position, int]:
    return dict(it.index)


async def test_a_few_delayed_messages_cost_no_ledger() -> None:
    world = ClusterState()
    async with life(world) as it:
        await it.delay(RUN - 1)
        await it.settled()
        assert it.listed == ()


async def test_sealed_entries_are_restored_after_a_crash_without_a_read_of_the_log() -> None:
    world = ClusterState()
    async with life(world, close=False) as it:
        positions = await it.delay(3 * RUN + 2)
        await it.settled()
        assert len(it.listed) == 1
        data = {at.ledger for at in positions}
    world.ledgers.reads.clear()
    async with life(world) as it:
        assert contents(it) == {at: due_of(at) for at in positions[: 3 * RUN]}
        read = {ledger for ledger, _, _ in world.ledgers.reads}
        assert not read & data - {max(data)}, "the backlog was read"
        first = it.index.first_absent(positions[0])
        assert first >= positions[4], "successive entries are not read again"


async def test_a_clean_close_stores_the_rest_and_closes_the_ledger() -> None:
    world = ClusterState()
    async with life(world, THRIFTY) as it:
        positions = await it.delay(RUN + 2)
    async with life(world, THRIFTY) as it:
        assert contents(it) == {at: due_of(at) for at in positions}


async def test_a_clean_close_seals_one_index_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic may have thousands of subscriptions. Sealing 1,000 entries takes 0.7 ms."""
    seal, turn, turns = DelayedIndex.seal, [0], list[int]()

    def noting(self: DelayedIndex) -> None:
        turns.append(turn[0])
        asyncio.get_running_loop().call_soon(next_turn)
        seal(self)

    def next_turn() -> None:
        turn[0] += 1

    world = ClusterState()
    async with life(world, THRIFTY) as it:
        for number in range(5):
            await it.cursors.ensure(f"t{number}", EARLIEST)
        positions = await it.delay(2)
        for number in range(5):
            for at in positions:
                it.store.index_of(f"t{number}").add(at, due_of(at))
        monkeypatch.setattr(DelayedIndex, "seal", noting)
    assert len(turns) == 6
    assert len(set(turns)) == 6
    async with life(world, THRIFTY) as it:
        assert [len(it.store.index_of(f"t{number}")) for number in range(5)] == [2] * 5


async def test_acknowledged_entries_stay_away_and_dead_ledgers_are_deleted() -> None:
    world = ClusterState()
    async with life(world, close=False) as it:
        positions = await it.delay(4 * RUN)
        it.acknowledge(positions[2:9])
        await it.cursor.flush()
        await it.settled()
    async with life(world, close=False) as it:
        left = positions[:2] + positions[9:]
        assert contents(it) == {at: due_of(at) for at in left}
        [ledger] = it.listed
        it.acknowledge(left)
        await it.cursor.flush()
        await it.settled()
        assert it.listed == ()
        await wait_until(lambda: ledger in world.ledgers.deleted)


async def test_entries_of_a_deleted_subscription_are_dead() -> None:
    world = ClusterState()
    async with life(world, close=False) as it:
        await it.delay(2 * RUN)
        await it.settled()
    async with life(world) as it:
        await it.cursors.delete("s")
        it.store.forget("s")
        await it.settled()
        assert it.listed == ()


async def test_delivered_entries_are_redelivered_at_once_after_a_crash() -> None:
    world = ClusterState()
    async with life(world, close=False) as it:
        positions = await it.delay(2 * RUN)
        await it.settled()
        assert len(it.index.take_due(5_000, 1)) == 1
    async with life(world) as it:
        assert contents(it) == {at: due_of(at) for at in positions}


async def test_a_seek_back_restores_the_delivery_times() -> None:
    world = ClusterState()
    async with life(world, close=False) as it:
        positions = await it.delay(2 * RUN)
        await it.settled()
        it.acknowledge(positions[:1])
        await it.cursor.reset(EARLIEST)
    async with life(world) as it:
        assert contents(it) == {at: due_of(at) for at in positions}


async def test_compaction_drops_dead_segments() -> None:
    world = ClusterState()
    async with life(world, THRIFTY, close=False) as it:
        kept = await it.delay(RUN)
        for _ in range(12):
            gone = await it.delay(RUN)
            await it.settled()
            it.acknowledge(gone)
            await it.settled()
        assert len(it.listed) == 1
        stored = world.ledgers.ledgers[it.listed[0]]
        assert len(stored.entries) < 8
    async with life(world, THRIFTY) as it:
        assert contents(it) == {at: due_of(at) for at in kept}


async def test_ledgers_of_many_owners_are_merged_into_one() -> None:
    world = ClusterState()
    positions: list[Position] = []
    for _ in range(LEDGERS_MAX + 2):
        async with life(world, close=False) as it:
            positions += await it.delay(RUN)
            await it.settled()
            assert len(it.listed) <= LEDGERS_MAX
    async with life(world) as it:
        assert contents(it) == {at: due_of(at) for at in positions}


async def test_an_open_ledger_moves_from_a_bookie_that_leaves() -> None:
    world = ClusterState()
    world.ledgers.full_ensemble = False
    async with life(world) as it:
        positions = await it.delay(RUN)
        await it.settled()
        [before] = it.listed
        it.store.tend()
        await it.settled()
        assert it.listed == (before,)
        world.ledgers.full_ensemble = True
        it.store.tend()
        await it.settled()
        assert len(it.listed) == 1
        assert it.listed != (before,)
    async with life(world) as it:
        assert contents(it) == {at: due_of(at) for at in positions}


async def test_the_topic_opens_without_a_ledger_that_cannot_be_read() -> None:
    world = ClusterState()
    async with life(world, close=False) as it:
        positions = await it.delay(2 * RUN)
        await it.settled()
        [ledger] = it.listed
    world.ledgers.unreadable.add((ledger, 0))
    async with life(world) as it:
        assert contents(it) == {}
        for at in positions:
            it.index.add(at, due_of(at))
        await it.settled()
        assert ledger not in it.listed
    async with life(world) as it:
        assert contents(it) == {at: due_of(at) for at in positions}


async def test_garbage_in_a_ledger_is_ignored() -> None:
    world = ClusterState()
    async with life(world, close=False) as it:
        positions = await it.delay(2 * RUN)
        await it.settled()
        [ledger] = it.listed
    world.ledgers.ledgers[ledger].entries[0] = b"\x63garbage"
    async with life(world) as it:
        assert contents(it) == {at: due_of(at) for at in positions[RUN:]}


async def fail_next_ledger(world: ClusterState, error: LedgerError) -> None:
    """Make the next ledger for segments fail before a segment is stored."""

    def writing() -> FakeAppender | None:
        for appender in world.ledgers.appenders:
            if appender.in_flight_bytes and appender.failure is None and not appender.closed:
                return appender
        return None

    await wait_until(writing, what="a write")
    appender = writing()
    assert appender is not None
    appender.fail(error)


async def test_ledgers_that_fail_at_once_do_not_gather() -> None:
    world = ClusterState()
    async with life(world, close=False) as it:
        positions = await it.delay(2 * RUN)
        world.ledgers.hold()
        for _ in range(3 * LEDGERS_MAX):
            await fail_next_ledger(world, NotEnoughBookies(needed=1, writable=0))
            assert len(it.listed) <= 2
        world.ledgers.release()
        await it.settled()
        assert len(it.listed) == 1
    async with life(world) as it:
        assert contents(it) == {at: due_of(at) for at in positions}


async def test_a_refused_segment_ends_the_store_and_not_the_topic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = ClusterState()
    async with life(world, close=False) as it:
        await it.delay(RUN)
        world.ledgers.hold()
        await fail_next_ledger(world, LedgerRefused(1, "malformed"))
        await wait_until(lambda: it.store.is_settled, what="the end of the store")
        assert len(it.listed) <= 1
        [line] = [each for each in caplog.messages if "a delayed ledger failed" in each]
        assert f"topic={it.topic.log.name} " in line
        assert it.topic.log.owned_record.lost is None
        world.ledgers.release()
        positions = await it.delay(1)
        assert positions[0] in it.index


async def test_stored_entries_that_the_log_does_not_have_are_ignored() -> None:
    """The store checks an entry number before the number decides the size of the memory."""
    world = ClusterState()
    async with life(world, close=False) as it:
        positions = await it.delay(RUN)
        await it.settled()
        [ledger] = it.listed
    at = positions[0]
    absent = [Position(at.ledger - 1, 0), Position(at.ledger, (1 << 32) - 1)]
    segment = encode_segment("s", [(it, 1_000) for it in sorted([*positions, *absent])])
    world.ledgers.ledgers[ledger].entries[0] = segment
    async with life(world) as it:
        assert contents(it).keys() == set(positions)


# ---- histories -----------------------------------------------------------------------------------


async def act(it: Life, chance: random.Random, waiting: list[Position]) -> None:
    match chance.choice(("delay", "delay", "ack", "ack", "due", "settle", "move")):
        case "delay":
            waiting += await it.delay(chance.randint(1, 2 * RUN))
        case "ack":
            some = chance.sample(waiting, min(len(waiting), chance.randint(1, 3 * RUN)))
            it.acknowledge(some)
            for at in some:
                waiting.remove(at)
        case "due":
            it.index.take_due(chance.randint(1_000, 1_400), chance.randint(1, RUN))
        case "settle":
            await it.settled()
        case "move":
            it.store._moving = True
            it.store._work.wake()
    if not it.store._ended:
        it.store.check()


async def live(world: ClusterState, steps: Steps, chance: random.Random) -> Life | None:
    """Run a broker, which may die at a step. Return the facts that are certain afterwards."""
    it: Life | None = None
    try:
        async with life(world, THRIFTY, steps=steps, close=chance.random() < 0.3) as it:
            acked = {at for at in it.positions() if it.cursor.is_acked(at)}
            waiting = [at for at in it.positions() if at not in acked]
            for at in waiting:
                it.index.add(at, due_of(at))
            async with asyncio.timeout(60):
                for _ in range(chance.randint(3, 15)):
                    await act(it, chance, waiting)
    except* (BrokerDied, LogError, TimeoutError, asyncio.CancelledError):
        pass
    except* AssertionError as group:
        # A dead broker gives no answer: the test has waited for its answer.
        rest = group.split(lambda error: "was not true within" in str(error))[1]
        if rest is not None or not steps.dead:
            raise
    return it


@pytest.mark.parametrize("seed", range(40))
async def test_a_crash_at_any_step_loses_nothing_and_invents_nothing(seed: int) -> None:
    chance = random.Random(seed)
    world = ClusterState()
    for _ in range(4):
        steps = Steps(chance.randint(5, 80), after=chance.random() < 0.5)
        former = await live(world, steps, chance)
        async with life(world, THRIFTY, close=False) as it:
            found = contents(it)
            acked = {at for at in it.positions() if it.cursor.is_acked(at)}
            assert all(due == due_of(at) for at, due in found.items())
            assert not found.keys() & acked
            assert found.keys() <= set(it.positions())
            if former is not None:
                assert former.stored - acked <= found.keys()
            for at in it.positions():  # what the dispatcher reads again
                if at not in acked:
                    it.index.add(at, due_of(at))
            assert contents(it).keys() == set(it.positions()) - acked
            assert set(it.listed) <= world.ledgers.ledgers.keys()
            await it.settled()
    async with life(world, THRIFTY) as it:
        it.acknowledge([at for at in it.positions() if not it.cursor.is_acked(at)])
        await settle()
        await it.settled()
    async with life(world, THRIFTY) as it:
        await it.settled()
        assert it.listed == ()
