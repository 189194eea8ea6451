from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, cast

from fakes.entries import entry_of, sends_of
from fakes.sessions import FakeProducerSession
from support import settle

from magnetar.broker.errors import LogError, LogFenced
from magnetar.broker.log.outstanding import Appended, Outstanding
from magnetar.broker.log.position import Position
from magnetar.broker.topic.contract import ClientInfo, CloseReason, ProducerRequest
from magnetar.broker.topic.holding import Holding
from magnetar.broker.topic.pipeline import Answer, Append, Pipeline, Publish, Refuse
from magnetar.broker.topic.producer import ANSWERS_WAITING_MAX, ProducerHandle, ProducerState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.broker.log.log import Log
    from magnetar.protos.entry import EntryView

REFUSED = ValueError("refused")


class RefusesSome:
    """A stage that refuses the sequence ids of a set."""

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self.seen: list[Publish] = []

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        self.seen.append(publish)
        return [
            Refuse(1, REFUSED) if number in self.refused else Append(1)
            for number in publish.sends.sequence_ids
        ]


class PlainLog:
    """A log that keeps appended entries until the test confirms them."""

    def __init__(self) -> None:
        self.outstanding = Outstanding(next_index=0)
        self.error: LogError | None = None
        self.entry = 0
        self.room = asyncio.Event()

    @property
    def pending(self) -> int:
        return self.outstanding.in_flight

    def append(
        self,
        entries: Sequence[bytes],
        views: Mapping[int, EntryView],
        context: object,
        *,
        now: float,
    ) -> None:
        if self.error is not None:
            raise self.error
        self.outstanding.take(entries, views, context, now_ms=0)
        self.outstanding.on_sent(len(entries))

    async def wait_room(self) -> None:
        await self.room.wait()

    def confirm(self, count: int) -> list[Appended]:
        """Confirm the first `count` entries, and return the report of the log."""
        count = min(count, self.pending)
        parts = self.outstanding.confirm(count, ledger=0, first_entry=self.entry)
        self.entry += count
        return parts


class Setup:
    def __init__(self, *, stops_at_refusal: bool = False) -> None:
        self.log = PlainLog()
        self.session = FakeProducerSession()
        self.left: list[ProducerHandle] = []
        self.errors: list[LogError] = []
        self.stage = RefusesSome()
        self.handle = ProducerHandle(
            ProducerRequest(1, "p", ClientInfo("here", "1"), stops_at_refusal=stops_at_refusal),
            "p",
            self.session,
            cast("Log", self.log),
            Pipeline([self.stage]),
            Holding(),
            connected_since="",
            leave=self.left.append,
            log_failed=self.errors.append,
            now=0.0,
        )

    def publish(self, *sequence_ids: int) -> None:
        for sequence_id in sequence_ids:
            self.handle.publish(sends_of(entry_of("x"), first=sequence_id), 0.0)

    def refuse(self, sequence_id: int) -> None:
        self.stage.refused.add(sequence_id)
        self.publish(sequence_id)

    def confirm(self, count: int) -> None:
        parts = self.log.confirm(count)
        if parts:
            self.handle.on_appended(parts)


async def test_receipts_come_in_batches_in_order() -> None:
    it = Setup()
    it.publish(0, 1, 2, 3)
    assert it.handle.outstanding == 4
    it.confirm(3)
    it.confirm(3)
    assert it.session.answers == [(n, Position(0, n)) for n in range(4)]
    assert it.session.batches == [3, 1]
    assert it.handle.outstanding == 0
    assert it.handle.describe(1.0)["producerName"] == "p"


async def test_a_refusal_waits_for_the_earlier_sends() -> None:
    it = Setup()
    it.refuse(0)
    it.publish(1, 2)
    it.refuse(3)
    it.publish(4)
    it.refuse(5)
    assert [number for number, _ in it.session.answers] == [0]
    it.confirm(1)
    assert [number for number, _ in it.session.answers] == [0, 1]
    it.confirm(2)
    assert [number for number, _ in it.session.answers] == [0, 1, 2, 3, 4, 5]


async def test_answers_are_in_send_order_in_random_histories() -> None:
    it = Setup()
    for seed in range(200):
        it = Setup()
        chance = random.Random(seed)
        for number in range(40):
            if chance.random() < 0.3:
                it.refuse(number)
            else:
                it.publish(number)
            if chance.random() < 0.3:
                it.confirm(chance.randrange(5))
        it.confirm(100)
        assert [number for number, _ in it.session.answers] == list(range(40)), seed
        refused = {number for number, answer in it.session.answers if answer is REFUSED}
        assert len(refused) + len(it.session.receipted) == 40
        assert it.handle.outstanding == 0


async def test_a_run_is_answered_in_its_order() -> None:
    it = Setup()
    it.stage.refused = {1, 4}
    it.handle.publish(sends_of(*[entry_of("x")] * 5), 0.0)
    assert it.log.pending == 3
    it.confirm(2)
    assert [number for number, _ in it.session.answers] == [0, 1, 2]
    it.confirm(1)
    assert it.session.answers == [
        (0, Position(0, 0)),
        (1, REFUSED),
        (2, Position(0, 1)),
        (3, Position(0, 2)),
        (4, REFUSED),
    ]


async def test_a_log_that_refuses_appends_is_reported_and_no_send_is_answered() -> None:
    it = Setup()
    it.publish(0)
    it.log.error = LogFenced("t", "test")
    it.publish(1)
    assert it.errors == [it.log.error]
    assert it.session.answers == []


async def test_too_many_refusals_disconnect_the_producer() -> None:
    it = Setup()
    it.publish(0)
    for number in range(1, ANSWERS_WAITING_MAX + 2):
        assert it.session.reason is None
        it.refuse(number)
    assert it.session.reason is CloseReason.ANSWERS_WAITING
    assert it.left == [it.handle]
    it.confirm(1)
    assert it.session.answers == []


async def test_the_rest_of_a_run_gets_the_outcome_of_its_eviction() -> None:
    it = Setup()
    it.publish(0)
    it.stage.refused = set(range(1, ANSWERS_WAITING_MAX + 2))
    entries = [entry_of("x")] * (ANSWERS_WAITING_MAX + 3)
    it.handle.publish(sends_of(*entries, first=1), 0.0)
    assert it.session.reason is CloseReason.ANSWERS_WAITING
    assert it.log.pending == 1, "no send is accepted after the eviction"
    assert it.stage.seen[-1].known


async def test_a_producer_that_stops_at_a_refusal_stores_no_later_send() -> None:
    it = Setup(stops_at_refusal=True)
    it.stage.refused = {3}
    it.handle.publish(sends_of(*[entry_of("x")] * 6), 0.0)
    it.publish(6, 7)
    assert it.log.pending == 3
    assert it.session.answers == [], "the refusal waits for the entries before"
    it.confirm(3)
    assert [number for number, _ in it.session.answers] == [0, 1, 2, 3]
    assert it.session.answers[-1] == (3, REFUSED)
    assert it.stage.seen[0].unknown == 3, "the topic counts what the log has"
    assert it.handle.outstanding == 0
    await it.handle.close()
    assert it.left == [it.handle]


async def test_a_closing_producer_waits_for_receipts_and_accepts_no_more_sends() -> None:
    it = Setup()
    it.publish(0, 1)
    async with asyncio.TaskGroup() as tasks:
        closing = tasks.create_task(it.handle.close())
        await settle()
        it.publish(2)
        it.confirm(1)
        await settle()
        assert not closing.done()
        it.confirm(5)
    assert it.session.receipted == [0, 1]
    assert it.session.reason is None
    assert it.left == [it.handle]
    await it.handle.close()
    assert it.left == [it.handle]


async def test_no_answer_is_sent_after_the_connection_ended() -> None:
    it = Setup()
    it.publish(0)
    it.handle.close_nowait()
    it.confirm(1)
    it.refuse(1)
    it.publish(2)
    await it.handle.wait_room()
    assert it.session.answers == []
    assert it.log.pending == 0, "nothing was added"
    assert it.handle.state is ProducerState.CLOSED


async def test_an_eviction_ends_the_waits_for_receipts() -> None:
    it = Setup()
    it.publish(0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it.handle.wait_drained())
        await settle()
        it.handle.evict(CloseReason.UNLOADED)
    assert it.session.reason is CloseReason.UNLOADED
    assert it.left == [it.handle]
    it.handle.close_nowait()
    assert it.left == [it.handle], "the producer left the topic twice"


async def test_the_producer_has_room_while_the_log_has_room() -> None:
    it = Setup()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(it.handle.wait_room())
        await settle()
        assert not waiting.done()
        it.log.room.set()
