"""A topic over fake ledgers: publishes, admission of producers, failures, close."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of, sends_of
from fakes.ledgers import FakeLedgers, FakeReader
from fakes.sessions import FakeConsumerSession, FakeProducerSession
from fakes.topics import opened_topic, publish
from support import settle, wait_until

from magnetar.broker.errors import (
    LogFenced,
    NotAllowed,
    ProducerBusy,
    ProducerFenced,
    SubscriptionFenced,
    SubscriptionNotFound,
    TopicClosing,
)
from magnetar.broker.log.log import LogConfig
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.topic.contract import AccessMode, CloseReason, SubscriptionType
from magnetar.broker.topic.meter import CLIENTS_PER_TURN
from magnetar.broker.topic.pipeline import Answer, Publish, Wait
from magnetar.broker.topic.producer_admission import BROUGHT_EPOCH_MAX, ProducerNames
from magnetar.broker.topic.topic import TopicState
from magnetar.protos.errors import ChecksumMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fakes.ledgers import FakeEntry, SharedLedgers

    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.metadata.model import EntryId, LedgerMetadata

SHARED = SubscriptionType.SHARED


async def test_each_of_several_producers_gets_its_receipts_in_order() -> None:
    async with opened_topic(ClusterState()) as it:
        one, one_session = await it.produce("one")
        two, two_session = await it.produce("two")
        for number in range(30):
            handle = one if number % 3 else two
            publish(handle, entry_of(str(number)), first=number)
        await wait_until(lambda: one.outstanding == two.outstanding == 0)
        assert one_session.receipted == [n for n in range(30) if n % 3]
        assert two_session.receipted == list(range(0, 30, 3))
        positions = [answer for _, answer in one_session.answers]
        assert positions == sorted(positions)
        assert len(one_session.batches) < 20, "receipts not in batches"
        _, consumer = await it.subscribe()
        await wait_until(lambda: len(consumer.texts) == 30)
        assert consumer.texts == [str(n) for n in range(30)]


async def test_the_topic_names_producers_without_a_name() -> None:
    async with opened_topic(ClusterState()) as it:
        first, _ = await it.produce()
        second, _ = await it.produce()
        assert (first.name, second.name) == ("test-1-1", "test-1-2")
        assert ProducerNames("other").next() == "other-1"


async def test_a_second_producer_of_the_same_name_is_refused() -> None:
    async with opened_topic(ClusterState()) as it:
        first, session = await it.produce("p")
        with pytest.raises(ProducerBusy):
            await it.produce("p")
        assert session.probes == 1
        session.alive = False
        second, _ = await it.produce("p")
        assert session.reason is CloseReason.REPLACED
        first.close_nowait()  # the dead connection is noticed at last
        assert it.topic.producers == {"p": second}
        await second.close()
        await it.produce("p")


async def test_a_reconnected_producer_replaces_its_former_connection() -> None:
    async with opened_topic(ClusterState()) as it:
        first, session = await it.produce()
        again = {"user_provided": False, "epoch": 1}
        with pytest.raises(ProducerBusy):
            await it.produce(first.name, **again)
        first.close_nowait()
        second, session = await it.produce(first.name, user_provided=False)
        assert second.name == first.name
        with pytest.raises(ProducerBusy):
            await it.produce(first.name, user_provided=False)
        assert session.probes == 1
        third, _ = await it.produce(first.name, **again)
        assert session.reason is CloseReason.REPLACED
        assert session.probes == 1
        assert it.topic.producers == {first.name: third}


async def test_an_exclusive_producer_excludes_other_producers() -> None:
    async with opened_topic(ClusterState()) as it:
        shared, _ = await it.produce("shared")
        with pytest.raises(ProducerFenced):
            await it.produce("alone", mode=AccessMode.EXCLUSIVE)
        shared.close_nowait()
        alone, _ = await it.produce("alone", mode=AccessMode.EXCLUSIVE)
        assert alone.topic_epoch == 0
        with pytest.raises(ProducerBusy):
            await it.produce("shared")
        with pytest.raises(ProducerFenced):
            await it.produce("alone too", mode=AccessMode.EXCLUSIVE)
        alone.close_nowait()
        shared, _ = await it.produce("shared")
        assert shared.topic_epoch is None


async def test_an_exclusive_producer_that_missed_another_one_stays_fenced() -> None:
    world = ClusterState()
    exclusive = AccessMode.EXCLUSIVE
    async with opened_topic(world) as it:
        first, _ = await it.produce("first", mode=exclusive)
        first.close_nowait()
        again, _ = await it.produce("first", mode=exclusive, topic_epoch=first.topic_epoch)
        assert again.topic_epoch == first.topic_epoch == 0
        again.close_nowait()
        second, _ = await it.produce("second", mode=exclusive)
        assert second.topic_epoch == 1
    async with opened_topic(world) as it:  # the next owner of the topic fences this producer, too
        with pytest.raises(ProducerFenced):
            await it.produce("first", mode=exclusive, topic_epoch=0)
        assert it.topic.producers == {}
        back, _ = await it.produce("second", mode=exclusive, topic_epoch=1)
        assert back.topic_epoch == 1


async def test_an_epoch_from_a_client_never_uses_up_the_epochs() -> None:
    exclusive = AccessMode.EXCLUSIVE
    async with opened_topic(ClusterState()) as it:
        for brought in ((1 << 64) - 1, BROUGHT_EPOCH_MAX + 1):
            with pytest.raises(NotAllowed, match=str(brought)):
                await it.produce("broken", mode=exclusive, topic_epoch=brought)
        assert it.topic.producers == {}
        first, _ = await it.produce("first", mode=exclusive)
        assert first.topic_epoch == 0
        first.close_nowait()
        # The topic's record may have been restored from an older copy.
        late, _ = await it.produce("late", mode=exclusive, topic_epoch=BROUGHT_EPOCH_MAX)
        assert late.topic_epoch == BROUGHT_EPOCH_MAX
        late.close_nowait()
        new, _ = await it.produce("new", mode=exclusive)
        assert new.topic_epoch == BROUGHT_EPOCH_MAX + 1
        new.close_nowait()
        again, _ = await it.produce("new", mode=exclusive, topic_epoch=new.topic_epoch)
        assert again.topic_epoch == new.topic_epoch


async def test_an_entry_that_is_too_large_is_refused_in_send_order() -> None:
    async with opened_topic(ClusterState()) as it:
        handle, session = await it.produce()
        publish(handle, entry_of("small"), first=0)
        publish(handle, replace(entry_of("large"), data=bytes(5_260_000)), first=1)
        publish(handle, entry_of("small"), first=2)
        await wait_until(lambda: len(session.answers) == 3)
        assert [number for number, _ in session.answers] == [0, 1, 2]
        assert session.receipted == [0, 2]


async def test_after_a_takeover_no_send_is_answered_and_all_clients_are_disconnected() -> None:
    world = ClusterState()
    async with opened_topic(world) as old:
        producer, session = await old.produce("p")
        publish(producer, entry_of("first"), first=0)
        await wait_until(lambda: session.receipted == [0])
        _, consumer = await old.subscribe()
        await wait_until(lambda: consumer.texts == ["first"])
        world.ledgers.hold()
        publish(producer, entry_of("unknown"), first=1)
        async with opened_topic(world) as new:
            world.ledgers.release()
            publish(producer, entry_of("never"), first=2)
            await wait_until(lambda: old.topic.state is TopicState.FAILED)
            assert session.receipted == [0]
            assert session.reason is CloseReason.TOPIC_FAILED
            assert consumer.reason is CloseReason.TOPIC_FAILED
            assert len(old.failures) == 1
            assert isinstance(old.failures[0], LogFenced)
            publish(producer, entry_of("ignored"), first=3)
            with pytest.raises(TopicClosing):
                await old.produce("q")
            with pytest.raises(TopicClosing):
                await old.subscribe()
            await new.publish("second")
            _, reader = await new.subscribe("t")
            await wait_until(lambda: reader.texts[-1:] == ["second"])
            assert reader.texts[0] == "first"
            assert "never" not in reader.texts
    assert len(old.failures) == 1


async def test_a_topic_that_is_only_consumed_notices_a_takeover_by_its_acknowledgements() -> None:
    world = ClusterState()
    async with opened_topic(world) as old:
        await old.publish("a", "b")
        handle, consumer = await old.subscribe()
        await wait_until(lambda: len(consumer.texts) == 2)
        handle.acknowledge(consumer.positions[:1])
        await old.topic.subscriptions["s"].flush()
        async with opened_topic(world) as new:
            handle.acknowledge(consumer.positions[1:])
            await wait_until(lambda: old.topic.state is TopicState.FAILED)
            assert consumer.reason is CloseReason.TOPIC_FAILED
            _, consumer = await new.subscribe()
            await wait_until(lambda: consumer.texts == ["b"])


async def test_close_waits_for_the_receipts_of_appended_entries() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        producer, session = await it.produce()
        _, consumer = await it.subscribe()
        await it.publish("a")
        world.ledgers.hold()
        publish(producer, entry_of("b"), first=0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(it.topic.close())
            tasks.create_task(it.topic.close())
            await settle()
            publish(producer, entry_of("late"), first=1)
            with pytest.raises(TopicClosing):
                await it.produce()
            assert session.reason is None
            world.ledgers.release()
        assert 0 in session.receipted
        assert session.reason is CloseReason.UNLOADED
        assert consumer.reason is CloseReason.UNLOADED
        assert it.topic.state is TopicState.CLOSED
        assert it.failures == []
    async with opened_topic(world) as it:
        _, consumer = await it.subscribe("t")
        await wait_until(lambda: len(consumer.texts) >= 2)
        assert consumer.texts[:2] == ["a", "b"]


async def test_close_disconnects_many_clients_in_several_turns_of_the_loop() -> None:
    """5,000 clients took 115 ms of one turn."""
    async with opened_topic(ClusterState()) as it:
        number = 250
        producers = [await it.produce() for _ in range(number)]
        consumers = [await it.subscribe(kind=SHARED) for _ in range(number)]
        await it.publish("a")
        sessions = [session for _, session in [*producers, *consumers]]
        told = [0]
        async with asyncio.TaskGroup() as tasks:
            closing = [tasks.create_task(it.topic.close()) for _ in range(2)]
            while told[-1] < len(sessions):
                assert not any(task.done() for task in closing), (
                    "the close ended before all clients were told"
                )
                await asyncio.sleep(0)
                told.append(sum(session.reason is not None for session in sessions))
        assert max(after - before for before, after in pairwise(told)) == CLIENTS_PER_TURN
        assert {session.reason for session in sessions} == {CloseReason.UNLOADED}
        assert it.topic.producers == {}
        assert it.failures == []


async def test_clients_of_a_topic_that_is_closing_find_it_closed() -> None:
    async with opened_topic(ClusterState()) as it:
        number = CLIENTS_PER_TURN + 1
        producers = [await it.produce() for _ in range(number)]
        consumers = [await it.subscribe(kind=SHARED, permits=0) for _ in range(number)]
        [position] = await it.publish("a")
        last_producer, unaware = producers[-1]
        last_consumer, also_unaware = consumers[-1]
        async with asyncio.TaskGroup() as tasks:
            closing = tasks.create_task(it.topic.close())
            for _ in range(10):
                if producers[0][1].reason is None:
                    await asyncio.sleep(0)
            assert unaware.reason is also_unaware.reason is None
            with pytest.raises(TopicClosing):
                await it.produce()
            with pytest.raises(TopicClosing):
                await it.subscribe(kind=SHARED)
            with pytest.raises(SubscriptionFenced):
                last_consumer.acknowledge([position])
            last_consumer.flow(10)
            last_consumer.redeliver(None)
            last_consumer.close_nowait()
            last_producer.close_nowait()
            assert not closing.done()
        assert unaware.reason is also_unaware.reason is None, (
            "both clients left before the broker told them"
        )
        assert also_unaware.texts == []
    assert it.failures == []


async def test_producers_that_wait_are_not_promoted_by_a_close() -> None:
    async with opened_topic(ClusterState()) as it:
        waits = AccessMode.WAIT_FOR_EXCLUSIVE
        sessions = [(await it.produce(f"p{number}", mode=waits))[1] for number in range(3)]
        epoch = it.topic.admission.epoch
        await it.topic.close()
        assert [session.reason for session in sessions] == [CloseReason.UNLOADED] * 3
        assert not any(session.is_ready for session in sessions[1:])
        assert it.topic.admission.epoch == epoch


async def test_close_does_not_wait_for_producers_that_keep_publishing() -> None:
    """The topic drops all publishes that arrive while it closes. The clients resend them to the
    next owner."""

    world = ClusterState()
    async with opened_topic(world) as it:
        producer, session = await it.produce()
        await it.publish("a")
        world.ledgers.hold()
        publish(producer, entry_of("b"), first=0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(it.topic.close())
            await settle()
            publish(producer, entry_of("late"), first=1)
            assert producer.outstanding == 1
            goodbye = tasks.create_task(producer.close())
            await settle()
            assert not goodbye.done(), "the client left before it had its receipts"
            world.ledgers.release()
        assert session.receipted == [0]
    async with opened_topic(world) as it:
        assert it.topic.log.chain.entry_count == 2


async def test_closing_is_bounded_when_bookies_are_silent() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        producer, session = await it.produce()
        await it.publish("a")
        world.ledgers.hold()
        publish(producer, entry_of("b"), first=0)
        await it.topic.close()
        assert session.receipted == []
        assert session.reason is CloseReason.UNLOADED
    world.ledgers.release()


async def test_subscriptions_are_found_again_and_deleted() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        await it.topic.ensure_subscription("s", EARLIEST)
        await it.topic.ensure_subscription("s", EARLIEST)
        await it.topic.ensure_subscription("t", EARLIEST)
    async with opened_topic(world) as it:
        assert sorted(it.topic.subscriptions) == ["s", "t"]
        await it.topic.unsubscribe("s")
        with pytest.raises(SubscriptionNotFound):
            await it.topic.unsubscribe("s")
        with pytest.raises(SubscriptionNotFound):
            it.topic.explain("s")
    async with opened_topic(world) as it:
        assert sorted(it.topic.subscriptions) == ["t"]


@pytest.mark.parametrize("name", ["", " ", "\t\u2003"])
async def test_a_subscription_without_a_name_is_refused(name: str) -> None:
    """An administrator could not delete such a subscription."""
    async with opened_topic(ClusterState()) as it:
        with pytest.raises(NotAllowed, match="a subscription"):
            await it.subscribe(name)
        with pytest.raises(NotAllowed, match="a subscription"):
            await it.topic.ensure_subscription(name, EARLIEST)
        assert it.topic.subscriptions == {}


async def test_stats_list_producers_and_subscriptions() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish("a", "b c d", "e", batches=True)
        handle, session = await it.subscribe(kind=SubscriptionType.SHARED, permits=3)
        await wait_until(lambda: len(session.texts) == 4)
        handle.acknowledge(session.positions[:1])
        stats = await it.topic.stats()
        assert stats["msgInCounter"] == 5
        assert stats["msgOutCounter"] == 4
        assert stats["bytesOutCounter"] == sum(len(e.data) for e in session.entries)
        assert stats["msgCount"] == 5
        assert stats["storageSize"] > stats["bytesInCounter"]
        (publisher,) = stats["publishers"]
        assert publisher["producerName"] == "publisher"
        subscription = stats["subscriptions"]["s"]
        assert subscription["type"] == "Shared"
        assert subscription["msgBacklog"] == 2
        assert subscription["msgBacklogMessages"] == 4
        assert subscription["unackedMessages"] == 3
        (consumer,) = subscription["consumers"]
        assert consumer["availablePermits"] == -1
        assert consumer["unackedMessages"] == 3
        assert consumer["consumerName"] == "c1"
        assert any("no_permits" in reason for reason in subscription["waitingFor"])


async def test_a_topic_that_was_taken_over_can_be_closed() -> None:
    world = ClusterState()
    async with opened_topic(world) as old:
        await old.publish("a")
        _, session = await old.produce()
        async with opened_topic(world) as new:
            await old.topic.close()
            await old.topic.close()
            assert old.topic.state is TopicState.CLOSED
            assert session.reason is CloseReason.UNLOADED
            await new.publish("b")


async def test_a_producer_waits_while_the_log_has_no_room() -> None:
    world = ClusterState()
    async with opened_topic(world, config=LogConfig(pending_bytes_max=1_000)) as it:
        handle, _ = await it.produce()
        await handle.wait_room()
        assert handle.has_room
        world.ledgers.hold()
        publish(handle, entry_of("x" * 2_000), first=0)
        assert not handle.has_room
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(handle.wait_room())
            await settle()
            assert not waiting.done()
            world.ledgers.release()


async def test_sessions_are_not_called_after_they_closed() -> None:
    async with opened_topic(ClusterState()) as it:
        producer, producer_session = await it.produce(session=FakeProducerSession())
        consumer, consumer_session = await it.subscribe(session=FakeConsumerSession())
        publish(producer, entry_of("a"), first=0)
        producer.close_nowait()
        consumer.close_nowait()
        await it.publish("b")
        await settle()
        assert producer_session.answers == []
        assert consumer_session.entries == []
    assert producer_session.reason is None
    assert consumer_session.reason is None


class WaitsFor:
    """A stage for tests: the publishes of one producer wait for the outcome of another producer's
    last publish."""

    def __init__(self, waiting: str, for_whom: str) -> None:
        self.waiting = waiting
        self.for_whom = for_whom
        self.last: Publish | None = None

    def decide(self, publish: Publish, now: float) -> Sequence[Answer]:
        if publish.publisher.name == self.for_whom:
            self.last = publish
        elif publish.publisher.name == self.waiting and self.last and not self.last.known:
            return [Wait(self.last)]
        return ()


async def test_a_publish_waits_for_the_outcome_of_another_and_is_then_appended() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        it.topic.pipeline.stages = [*it.topic.pipeline.stages, WaitsFor("late", "early")]
        early, _ = await it.produce("early")
        late, session = await it.produce("late")
        world.ledgers.hold()
        publish(early, entry_of("first"), first=0)
        publish(late, entry_of("second"), entry_of("third"), first=0)
        publish(late, entry_of("fourth"), first=2)
        assert late.outstanding == 3
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(late.wait_room())
            await settle()
            assert not reading.done(), "the session reads no more while publishes are held"
            world.ledgers.release()
        await wait_until(lambda: session.receipted == [0, 1, 2])
        _, consumer = await it.subscribe()
        await wait_until(lambda: len(consumer.texts) == 4)
        assert consumer.texts == ["first", "second", "third", "fourth"]


async def test_a_producer_that_closes_gets_the_answers_of_held_publishes() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        it.topic.pipeline.stages = [*it.topic.pipeline.stages, WaitsFor("late", "early")]
        early, _ = await it.produce("early")
        late, session = await it.produce("late")
        world.ledgers.hold()
        publish(early, entry_of("first"), first=0)
        publish(late, entry_of("second"), first=0)
        async with asyncio.TaskGroup() as tasks:
            closing = tasks.create_task(late.close())
            await settle()
            assert not closing.done()
            world.ledgers.release()
        assert session.receipted == [0]


async def test_a_corrupt_entry_is_refused_and_its_neighbours_are_appended() -> None:
    async with opened_topic(ClusterState()) as it:
        handle, session = await it.produce()
        sends = sends_of(entry_of("a"), entry_of("b"), entry_of("c"))
        sends.checksums[1] ^= 1
        handle.publish(sends, asyncio.get_running_loop().time())
        await wait_until(lambda: len(session.answers) == 3)
        assert session.receipted == [0, 2]
        assert isinstance(session.answers[1][1], ChecksumMismatch)


async def acknowledged(handle: ConsumerHandle, positions: Sequence[Position]) -> None:
    done = asyncio.Event()
    handle.acknowledge(positions, [], lambda _: done.set())
    await done.wait()


class SlowReader(FakeReader):
    """A reader that returns its second answer when the test permits it."""

    def __init__(self, world: SharedLedgers, metadata: LedgerMetadata) -> None:
        super().__init__(world, metadata)
        self.reads = 0
        self.may_answer = asyncio.Event()

    async def read(self, first: EntryId, last: EntryId, *, bytes_max: int) -> list[FakeEntry]:
        found = await super().read(first, last, bytes_max=bytes_max)
        self.reads += 1
        if self.reads == 2:
            await self.may_answer.wait()
        return found


class SlowLedgers(FakeLedgers):
    """The readers of all ledgers except one are slow."""

    def __init__(self, world: SharedLedgers, *, but: int) -> None:
        super().__init__(world)
        self.readers: list[SlowReader] = []
        self._but = but

    def reader(self, metadata: LedgerMetadata) -> FakeReader:
        if metadata.ledger == self._but:
            return super().reader(metadata)
        self.readers.append(SlowReader(self.world, metadata))
        return self.readers[-1]


async def test_a_topic_that_was_taken_over_while_it_opened_is_not_served() -> None:
    world = ClusterState()
    async with opened_topic(world, close=False) as it:
        handle, _ = await it.subscribe("s")
        positions = await it.publish("a", "b", "c")
        await acknowledged(handle, positions[:1])
    slow = SlowLedgers(world.ledgers, but=positions[0].ledger)

    async def open_slowly() -> None:
        with pytest.raises(ExceptionGroup) as failed:
            async with opened_topic(world, ledgers=slow):
                pass
        assert failed.group_contains(LogFenced)

    opening = asyncio.get_running_loop().create_task(open_slowly())
    await wait_until(lambda: any(reader.reads == 2 for reader in slow.readers))
    async with opened_topic(world) as it:
        handle, session = await it.subscribe("s")
        await wait_until(lambda: session.texts == ["b", "c"])
        await acknowledged(handle, positions[1:2])
        for reader in slow.readers:
            reader.may_answer.set()
        await opening
