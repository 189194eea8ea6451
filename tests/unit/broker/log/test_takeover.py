"""The owner of a topic dies, or another broker takes the topic over, at each call of the owner to
ledgers and metadata.

A script appends over several ledgers, acknowledges, resets, deletes, creates and closes. The first
run counts its calls. Then the script runs three times for each call: the owner is killed before the
call, the owner is killed after the call took effect, and a second broker takes over while the owner
continues as a zombie. Afterwards the topic must have every answered change, in order and once, and
no change that the script did not request."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.ledgers import BrokerDied, FakeLedgers, Steps
from fakes.topic_log import (
    QUICK,
    SMALL,
    TOPIC,
    SteppingStore,
    drawn_incarnation,
    opened,
    opened_cursors,
    reported,
)
from fakes.virtual_loop import run_virtual as run
from support import wait_until

from magnetar.broker.errors import LogError, LogFenced, LogUnavailable, ReadFailed
from magnetar.broker.log.log import LogState
from magnetar.broker.log.owned_record import OwnedRecord, topic_path
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.log.recovery import recover_log
from magnetar.metadata.codec import decode_topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from fakes.topic_log import TopicLog

    from magnetar.broker.cursor.cursor import Cursor
    from magnetar.broker.cursor.cursors import Cursors
    from magnetar.broker.errors import BrokerError

CONFIG = replace(SMALL, ledger_entries_max=3)
CURSORS = replace(QUICK, tail_bytes_min=60, ledger_bytes_max=250)


@dataclass(slots=True)
class Expected:
    """The expected state of one subscription."""

    exists: bool | None = None  # None: either is possible
    must: set[Position] = field(default_factory=set)  # acknowledgements with an answer
    may: set[Position] = field(default_factory=set)  # requested acknowledgements


@dataclass(slots=True)
class Told:
    """The requests of the script and their answers."""

    attempted: list[str] = field(default_factory=list)
    appended: list[tuple[str, Position]] = field(default_factory=list)
    subscriptions: dict[str, Expected] = field(default_factory=dict)
    finished: bool = False


class Script:
    """The life of one broker. `alive` ends every wait of a broker that is dead or fenced."""

    def __init__(self, topic: TopicLog, cursors: Cursors, steps: Steps, told: Told) -> None:
        self.topic = topic
        self.cursors = cursors
        self.steps = steps
        self.told = told
        topic.log.on_appended = lambda done: told.appended.extend(reported(done))  # type: ignore[arg-type]

    @property
    def ended(self) -> bool:
        return self.steps.dead or self.topic.log.state in (LogState.FENCED, LogState.FAILED)

    async def wait(self, predicate: Callable[[], bool]) -> None:
        await wait_until(lambda: predicate() or self.ended)
        if not predicate():
            raise BrokerDied("waiting")

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that never ends when the broker is dead."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            try:
                await self.wait(task.done)
            finally:
                task.cancel()

    async def contents(self) -> list[str]:
        try:
            return await self.topic.contents()
        except ReadFailed:
            return await self.topic.contents()

    async def append(self, *names: str) -> None:
        goal = len(self.told.appended) + len(names)
        for name in names:
            self.told.attempted.append(name)
            self.topic.append_view(entry_of(name), name)
        await self.wait(lambda: len(self.told.appended) == goal)

    async def ensure(self, name: str) -> Cursor:
        expected = self.told.subscriptions[name] = Expected()
        cursor = await self.cursors.ensure(name, EARLIEST)
        expected.exists = True
        return cursor

    async def delete(self, name: str) -> None:
        self.told.subscriptions[name].exists = None
        await self.cursors.delete(name)
        self.told.subscriptions[name].exists = False

    async def ack(self, cursor: Cursor, *numbers: int) -> None:
        expected = self.told.subscriptions[cursor.name]
        positions = {self.told.appended[number][1] for number in numbers}
        answers: list[BrokerError | None] = []
        expected.may |= positions
        cursor.acknowledge(sorted(positions), answers.append)
        await self.wait(lambda: bool(answers))
        if answers != [None]:
            raise BrokerDied("refused")
        expected.must |= positions

    def ack_without_receipt(self, cursor: Cursor, number: int) -> None:
        position = self.told.appended[number][1]
        self.told.subscriptions[cursor.name].may.add(position)
        cursor.acknowledge([position])

    async def reset(self, cursor: Cursor, number: int) -> None:
        start = self.told.appended[number][1]
        before = {position for _, position in self.told.appended if position < start}
        expected = self.told.subscriptions[cursor.name]
        expected.must &= before
        expected.may |= before
        await self.finish(cursor.reset(start))
        expected.must = before
        expected.may = set(before)

    async def live(self) -> None:
        await self.append("a", "b")
        one = await self.ensure("one")
        two = await self.ensure("two")
        await self.append("c", "d", "e", "f", "g")
        await self.ack(one, 1)
        await self.ack(two, 0, 1, 2, 5)
        for number in (3, 6, 4):
            await self.ack(one, number)
        self.ack_without_receipt(two, 6)
        await self.reset(two, 2)
        await self.delete("one")
        one = await self.ensure("one")
        await self.append("h", "i")
        await self.ack(one, 8)
        await self.ack(two, 7)
        for number in (0, 2, 4, 5):
            await self.ack(one, number)
        self.ack_without_receipt(one, 7)

    async def live_again(self) -> None:
        await self.append("j", "k")
        one = self.cursors.get("one")
        assert one is not None
        self.ack_without_receipt(one, 1)
        await self.ack(one, 9)


async def live_and_die(world: ClusterState, steps: Steps, told: Told) -> None:
    """Run the script. The first broker disappears without a close. The second broker takes over
    and closes. The run ends earlier if the broker dies or is fenced."""
    try:
        async with life(world, steps, told, close=False) as script:
            await script.live()
        async with life(world, steps, told, close=True) as script:
            # The outcome of the first broker's unanswered changes is fixed by now.
            script.told.attempted = await script.contents()
            await script.live_again()
        told.finished = True
    except (BrokerDied, LogError):
        pass
    except BaseExceptionGroup as group:
        rest = group.split((BrokerDied, LogError))[1]
        if rest is not None:
            raise rest from None


@contextlib.asynccontextmanager
async def life(
    world: ClusterState, steps: Steps, told: Told, *, close: bool
) -> AsyncIterator[Script]:
    store = SteppingStore(world.tree, steps)
    async with contextlib.AsyncExitStack() as stack:
        topic, cursors = await enter(stack, world, steps, store)
        script = Script(topic, cursors, steps, told)
        yield script
        if close:
            await script.finish(cursors.close())
            await script.finish(topic.log.close())


async def enter(
    stack: contextlib.AsyncExitStack, world: ClusterState, steps: Steps, store: SteppingStore
) -> tuple[TopicLog, Cursors]:
    """Take the topic over. Repeat the attempt if a later one can succeed."""
    for attempt in range(2):
        try:
            topic = await stack.enter_async_context(
                opened(world, config=CONFIG, steps=steps, store=store, close=False)
            )
            cursors = await stack.enter_async_context(
                opened_cursors(topic.log, config=CURSORS, close=False)
            )
        except LogUnavailable:
            if attempt > 0:
                raise
        else:
            return topic, cursors
    raise AssertionError("not reached")


def assert_kept(told: Told, texts: list[str]) -> None:
    """Check that the topic has the appended entries, in order and once, and no entry that the
    script did not append."""
    attempted = [name for name in told.attempted if name != "second"]
    assert texts == attempted[: len(texts)], "lost, repeated, reordered or made up"
    answered = [name for name, _ in told.appended]
    assert answered == [name for name in texts if name in answered], "an answered entry is lost"


async def inspect(world: ClusterState, told: Told) -> None:
    """Check the state that the next owner reads."""
    async with opened(world, config=CONFIG) as topic:
        assert_kept(told, await topic.contents())
        entries = await topic.log.read(EARLIEST, entries_max=100, bytes_max=1 << 20)
        assert [entry.index for entry in entries] == list(range(len(entries)))
        stored = {entry.position for entry in entries}
        assert {position for _, position in told.appended} <= stored
        async with opened_cursors(topic.log, config=CURSORS) as cursors:
            assert_subscriptions(told, cursors, stored)
            await topic.append_and_wait("after")
            assert (await topic.contents())[-1] == "after"
            for name in cursors.names:
                cursor = cursors.get(name)
                assert cursor is not None
                assert not cursor.is_acked(topic.log.confirmed)
                cursor.acknowledge([topic.log.confirmed])
                await cursor.flush()
    await assert_tidy(world)


def assert_subscriptions(told: Told, cursors: Cursors, stored: set[Position]) -> None:
    for name, expected in told.subscriptions.items():
        cursor = cursors.get(name)
        if expected.exists is not None:
            assert (cursor is not None) == expected.exists, f"subscription {name}"
        if cursor is not None and expected.exists:
            acked = {position for position in stored if cursor.is_acked(position)}
            assert expected.must <= acked, f"{name}: an answered acknowledgement is lost"
            assert acked <= expected.may, f"{name}: acknowledged by no client"


async def assert_tidy(world: ClusterState) -> None:
    """Check that the record lists every ledger, except one of each kind that a death left
    unrecorded."""
    found = await world.store().get(topic_path(TOPIC))
    assert found is not None
    record = decode_topic(found.value)
    assert record.deleting == ()
    listed = {part.ledger for part in record.ledgers} | set(record.cursor_ledgers)
    orphans = [
        stored.metadata.custom["kind"]
        for ledger, stored in world.ledgers.ledgers.items()
        if ledger not in listed
    ]
    assert listed <= world.ledgers.ledgers.keys()
    assert len(orphans) == len(set(orphans)), orphans


def steps_of_a_whole_life() -> list[str]:
    async def main() -> list[str]:
        world, steps, told = ClusterState(), Steps(), Told()
        await live_and_die(world, steps, told)
        assert told.finished
        await inspect(world, told)
        return steps.taken

    return run(main())


def test_the_script_reaches_every_kind_of_call() -> None:
    taken = steps_of_a_whole_life()
    assert set(taken) == {
        "metadata.get",
        "metadata.put",
        "ledgers.create",
        "ledgers.delete",
        "ledgers.recover",
        "ledgers.metadata",
        "appender.close",
        "bookies.write",
    }
    assert taken.count("ledgers.create") >= 7
    assert 50 < len(taken) < 400


@pytest.mark.parametrize("after", [False, True])
def test_a_broker_dies_at_any_call(after: bool) -> None:
    count = len(steps_of_a_whole_life())
    deaths = 0
    for number in range(count):

        async def main(number: int = number) -> bool:
            world, steps, told = ClusterState(), Steps(number, after=after), Told()
            await live_and_die(world, steps, told)
            await inspect(world, told)
            return steps.dead

        deaths += run(main())
    assert deaths >= count - 5, "the script ended too early"


@pytest.mark.parametrize("after", [False, True])
def test_a_call_that_fails_changes_nothing(after: bool) -> None:
    for number in range(len(steps_of_a_whole_life())):

        async def main(number: int = number) -> None:
            world, steps, told = ClusterState(), Steps(number, after=after, fails=True), Told()
            await live_and_die(world, steps, told)
            assert told.finished, f"the script stopped after the failure of {steps.taken[number]}"
            await inspect(world, told)

        run(main())


def test_a_broker_is_overtaken_at_any_call() -> None:
    """The second broker opens the topic while the first one continues. The first broker learns of
    the takeover from fences and epochs."""
    count = len(steps_of_a_whole_life())
    for number in range(count):

        async def main(number: int = number) -> None:
            world, told = ClusterState(), Told()
            overtake = asyncio.Event()
            steps = Steps(on_step=lambda step: overtake.set() if step == number else None)

            async def take_over() -> None:
                await overtake.wait()
                with contextlib.suppress(LogError):  # the second broker of the script may take over
                    async with (
                        opened(world, config=CONFIG, close=False) as topic,
                        opened_cursors(topic.log, config=CURSORS, close=False),
                    ):
                        topic.append("second")
                        await wait_until(lambda: topic.appended or topic.error)

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(take_over())
                await live_and_die(world, steps, told)
                overtake.set()
            async with opened(world, config=CONFIG) as topic:
                texts = await topic.contents()
                assert texts.count("second") <= 1
                assert_kept(told, [text for text in texts if text != "second"])
                entries = await topic.log.read(EARLIEST, entries_max=100, bytes_max=1 << 20)
                assert [entry.index for entry in entries] == list(range(len(entries)))
                stored = {entry.position for entry in entries}
                async with opened_cursors(topic.log, config=CURSORS) as cursors:
                    assert_subscriptions(told, cursors, stored)

        run(main())


async def test_a_ledger_that_the_next_owner_has_dropped_is_no_damage() -> None:
    world = ClusterState()
    async with opened(world, close=False) as topic:
        await topic.append_and_wait("a")
    slow = await OwnedRecord.take(TOPIC, world.store(), incarnation=drawn_incarnation())
    async with opened(world):  # another broker takes the topic meanwhile
        for ledger in list(world.ledgers.ledgers):
            del world.ledgers.ledgers[ledger]
        with pytest.raises(LogFenced):
            await recover_log(slow, FakeLedgers(world.ledgers), world.clock)
