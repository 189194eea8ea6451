from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, cast

from fakes.entries import entry_of
from fakes.sessions import FakeProducerSession
from support import settle

from magnetar.broker.errors import EntryTooLarge, LogError, LogFenced
from magnetar.broker.log.position import Position
from magnetar.broker.topic.contract import ClientInfo, CloseReason, ProducerRequest
from magnetar.broker.topic.producer import REFUSALS_MAX, ProducerHandle, ProducerState, Publish

if TYPE_CHECKING:
    from magnetar.broker.log.log import Log
    from magnetar.protos.entry import EntryView

REFUSED = ValueError("refused")


class PlainLog:
    """Keeps what is appended until the test says that it is durable."""

    def __init__(self) -> None:
        self.pending: list[Publish] = []
        self.error: LogError | None = None
        self.entry = -1
        self.has_room = asyncio.Event()

    def append_nowait(self, view: EntryView, context: object) -> None:
        if self.error is not None:
            raise self.error
        assert isinstance(context, Publish)
        self.pending.append(context)

    async def wait_room(self) -> None:
        await self.has_room.wait()

    def confirm(self, count: int) -> None:
        done = self.pending[:count]
        del self.pending[:count]
        if done:
            first = self.entry + 1
            self.entry += len(done)
            handle = done[0].handle
            handle.on_appended(
                [(publish, Position(0, first + index)) for index, publish in enumerate(done)]
            )


class Setup:
    def __init__(self) -> None:
        self.log = PlainLog()
        self.session = FakeProducerSession()
        self.left: list[ProducerHandle] = []
        self.errors: list[LogError] = []
        self.handle = ProducerHandle(
            ProducerRequest(1, "p", ClientInfo("here", "1")),
            "p",
            self.session,
            cast("Log", self.log),
            connected_since="",
            leave=self.left.append,
            log_failed=self.errors.append,
            now=0.0,
        )

    def publish(self, *sequence_ids: int) -> None:
        for sequence_id in sequence_ids:
            self.handle.publish_nowait(sequence_id, sequence_id, entry_of("x"))


async def test_receipts_come_in_batches_in_order() -> None:
    it = Setup()
    it.publish(0, 1, 2, 3)
    assert it.handle.outstanding == 4
    it.log.confirm(3)
    it.log.confirm(3)
    assert it.session.answers == [(n, Position(0, n)) for n in range(4)]
    assert it.session.batches == [3, 1]
    assert it.handle.outstanding == 0
    assert it.handle.describe(1.0)["producerName"] == "p"


async def test_a_refusal_waits_for_what_was_sent_before_it() -> None:
    it = Setup()
    it.handle.refuse(0, REFUSED)
    it.publish(1, 2)
    it.handle.refuse(3, REFUSED)
    it.publish(4)
    it.handle.refuse(5, REFUSED)
    assert [number for number, _ in it.session.answers] == [0]
    it.log.confirm(1)
    assert [number for number, _ in it.session.answers] == [0, 1]
    it.log.confirm(2)
    assert [number for number, _ in it.session.answers] == [0, 1, 2, 3, 4, 5]


async def test_answers_are_in_send_order_whatever_happens() -> None:
    it = Setup()
    for seed in range(200):
        it = Setup()
        chance = random.Random(seed)
        for number in range(40):
            if chance.random() < 0.3:
                it.handle.refuse(number, REFUSED)
            else:
                it.publish(number)
            if chance.random() < 0.3:
                it.log.confirm(chance.randrange(5))
        it.log.confirm(100)
        assert [number for number, _ in it.session.answers] == list(range(40)), seed
        refused = {number for number, answer in it.session.answers if answer is REFUSED}
        assert len(refused) + len(it.session.receipted) == 40
        assert it.handle.outstanding == 0


async def test_what_the_log_refuses_is_an_error_in_its_turn() -> None:
    it = Setup()
    it.publish(0)
    it.log.error = EntryTooLarge(10, 5)
    it.publish(1)
    it.log.error = None
    it.publish(2)
    it.log.confirm(2)
    assert [number for number, _ in it.session.answers] == [0, 1, 2]
    assert it.session.answers[1][1].__class__ is EntryTooLarge


async def test_a_log_that_takes_nothing_is_reported_and_nothing_answered() -> None:
    it = Setup()
    it.publish(0)
    it.log.error = LogFenced("t", "test")
    it.publish(1)
    assert it.errors == [it.log.error]
    assert it.session.answers == []


async def test_endless_refusals_disconnect() -> None:
    it = Setup()
    it.publish(0)
    for number in range(1, REFUSALS_MAX + 2):
        assert it.session.reason is None
        it.handle.refuse(number, REFUSED)
    assert it.session.reason is CloseReason.LOG_FAILED
    assert it.left == [it.handle]
    it.log.confirm(1)
    assert it.session.answers == []


async def test_closing_waits_for_receipts_and_takes_nothing_more() -> None:
    it = Setup()
    it.publish(0, 1)
    async with asyncio.TaskGroup() as tasks:
        closing = tasks.create_task(it.handle.close())
        await settle()
        it.publish(2)
        it.log.confirm(1)
        await settle()
        assert not closing.done()
        it.log.confirm(5)
    assert it.session.receipted == [0, 1]
    assert it.session.reason is None
    assert it.left == [it.handle]
    await it.handle.close()
    assert it.left == [it.handle]


async def test_after_the_connection_nothing_is_answered() -> None:
    it = Setup()
    it.publish(0)
    it.handle.close_nowait()
    it.log.confirm(1)
    it.handle.refuse(1, REFUSED)
    it.publish(2)
    await it.handle.wait_room()
    assert it.session.answers == []
    assert it.log.pending == []
    assert it.handle.state is ProducerState.CLOSED


async def test_eviction_releases_who_waits() -> None:
    it = Setup()
    it.publish(0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it.handle.wait_drained())
        await settle()
        it.handle.evict(CloseReason.UNLOADED)
    assert it.session.reason is CloseReason.UNLOADED
    it.handle.close_nowait()
    assert it.left == []


async def test_room_is_the_logs() -> None:
    it = Setup()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(it.handle.wait_room())
        await settle()
        assert not waiting.done()
        it.log.has_room.set()
