"""A topic disconnects thousands of clients in several turns of the event loop, and nothing happens
to those that are still connected meanwhile. 50,000 clients took more than a second of one turn."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.policies import SettablePolicies
from fakes.sessions import FakeConsumerSession, FakeProducerSession
from fakes.topics import opened_topic, publish
from support import settle, wait_until

from magnetar.broker.errors import ProducerFenced, SubscriptionFenced, TopicClosing, TopicInUse
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.log.topic_deletion import CLIENTS_MAX
from magnetar.broker.topic.contract import AccessMode, CloseReason, SubscriptionType
from magnetar.broker.topic.meter import CLIENTS_PER_TURN
from magnetar.broker.topic.topic import TopicState
from magnetar.metadata.policies import BacklogAction, BacklogQuota, Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fakes.topics import TopicRig

    from magnetar.broker.dispatch.dispatcher import Action
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.producer import ProducerHandle

SHARED, FENCING = SubscriptionType.SHARED, AccessMode.EXCLUSIVE_WITH_FENCING
NUMBER = 2 * CLIENTS_PER_TURN + 50

Producers = list[tuple["ProducerHandle", FakeProducerSession]]
Consumers = list[tuple["ConsumerHandle", FakeConsumerSession]]


async def many_producers(it: TopicRig) -> Producers:
    return [await it.produce(f"p{number}") for number in range(NUMBER)]


async def many_consumers(it: TopicRig) -> Consumers:
    return [await it.subscribe(kind=SHARED) for _ in range(NUMBER)]


async def refused(it: TopicRig, mode: AccessMode) -> None:
    with pytest.raises(TopicClosing):
        await it.produce("late", mode=mode)


def reasons(clients: Producers | Consumers) -> set[CloseReason | None]:
    return {session.reason for _, session in clients}


async def slices_until_told(sessions: Sequence[FakeProducerSession | FakeConsumerSession]) -> int:
    """Give turns to the loop until all clients are told. Returns the most that were told in one
    turn."""
    told = [sum(session.reason is not None for session in sessions)]
    while told[-1] < len(sessions):
        await asyncio.sleep(0)
        told.append(sum(session.reason is not None for session in sessions))
        assert len(told) < 1_000, "not all clients are told"
    return max(after - before for before, after in pairwise([0, *told]))


async def test_a_failed_topic_disconnects_its_clients_and_answers_nothing_more() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        producers, consumers = await many_producers(it), await many_consumers(it)
        last, unaware = producers[-1]
        world.ledgers.hold()
        publish(last, entry_of("a"), first=0)
        it.topic._on_bug(RuntimeError("a bug"))
        world.ledgers.release()
        publish(last, entry_of("b"), first=1)
        everyone = [session for _, session in [*producers, *consumers]]
        assert await slices_until_told(everyone) == CLIENTS_PER_TURN
        assert reasons(producers) == reasons(consumers) == {CloseReason.TOPIC_FAILED}
        await settle()
        assert unaware.answers == []
        assert not any(session.entries for _, session in consumers)
        assert len(it.failures) == 1
        assert it.topic.producers == {}
    async with opened_topic(world) as it:
        _, consumer = await it.subscribe("t")
        await wait_until(lambda: consumer.texts == ["a"])


async def test_the_deletion_of_a_topic_waits_until_all_clients_are_disconnected() -> None:
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        producers, consumers = await many_producers(it), await many_consumers(it)
        names = it.topic.begin_deletion(force=True)
        assert len(names) == 2 * NUMBER
        assert {"producer/p0", "consumer/s/c1"} <= names
        released = tasks.create_task(it.topic.wait_released())
        sessions = [session for _, session in [*producers, *consumers]]
        last, unaware = consumers[-1]
        assert unaware.reason is None
        with pytest.raises(SubscriptionFenced):
            last.acknowledge([EARLIEST])
        publish(producers[-1][0], entry_of("late"), first=0)
        assert not released.done()
        assert await slices_until_told(sessions) == CLIENTS_PER_TURN
        await released
        assert reasons(producers) == reasons(consumers) == {CloseReason.DELETED}
        assert it.topic.log.chain.messages == 0
        it.topic.end_deletion()


async def test_a_deletion_names_no_more_clients_than_its_record_can_store() -> None:
    """The names of 100,000 clients took 80 ms of one step."""
    async with opened_topic(ClusterState()) as it:
        for number in range(CLIENTS_MAX):
            await it.produce(f"p{number}")
        await it.subscribe()
        with pytest.raises(TopicInUse, match=f"{CLIENTS_MAX} connected producers"):
            it.topic.begin_deletion(force=False)
        names = it.topic.begin_deletion(force=True)
        assert len(names) == CLIENTS_MAX
        assert {"producer/p0", "consumer/s/c1"} <= names
        await it.topic.wait_released()
        it.topic.end_deletion()


async def test_a_quota_disconnects_producers_that_wait_for_the_rate_and_drops_what_they_hold() -> (
    None
):
    quota = BacklogQuota(1, BacklogAction.HOLD_PRODUCERS)
    policies = SettablePolicies(backlog_quota_bytes=quota, publish_rate=Rate(1, 0, 10.0))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.subscribe()
        producers = await many_producers(it)
        for number, (handle, _) in enumerate(producers):
            publish(handle, entry_of(str(number)), first=0)
        await wait_until(lambda: producers[0][1].receipted == [0])
        held = [handle for handle, _ in producers if handle.outstanding]
        assert len(held) > NUMBER // 2
        await it.topic.quotas.check()
        assert await slices_until_told([session for _, session in producers]) == CLIENTS_PER_TURN
        assert reasons(producers) == {CloseReason.QUOTA}
        assert it.topic.log.budget.held == 0
        await asyncio.sleep(1_000)
        assert it.topic.log.chain.messages == NUMBER - len(held)


async def test_a_terminated_topic_disconnects_its_producers_in_slices() -> None:
    async with opened_topic(ClusterState()) as it:
        producers = await many_producers(it)
        await it.topic.terminate()
        assert await slices_until_told([session for _, session in producers]) == CLIENTS_PER_TURN
        assert reasons(producers) == {CloseReason.TERMINATED}


async def test_a_fencing_producer_fences_also_those_that_connect_meanwhile() -> None:
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        producers = await many_producers(it)
        fencing = tasks.create_task(it.produce("winner", mode=FENCING))
        await asyncio.sleep(0)
        late = await it.produce("late")
        sessions = [session for _, session in [*producers, late]]
        assert await slices_until_told(sessions) <= CLIENTS_PER_TURN
        winner, _ = await fencing
        assert reasons([*producers, late]) == {CloseReason.FENCED}
        assert list(it.topic.producers) == ["winner"]
        assert winner.topic_epoch == 0


async def test_a_fencing_producer_is_admitted_instead_of_one_that_waits() -> None:
    async with opened_topic(ClusterState()) as it:
        producers = await many_producers(it)
        waiting, session = await it.produce("waiting", mode=AccessMode.WAIT_FOR_EXCLUSIVE)
        assert waiting.is_waiting
        await it.produce("winner", mode=FENCING)
        assert reasons(producers) == {CloseReason.FENCED}
        assert isinstance(session.refusal, ProducerFenced)
        assert not session.is_ready
        assert list(it.topic.producers) == ["winner"]


async def test_all_producers_are_fenced_even_if_the_fencing_client_goes_away() -> None:
    """Otherwise the rest would stay connected, and the topic would drop their publishes."""
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        producers = await many_producers(it)
        fencing = tasks.create_task(it.produce("winner", mode=FENCING))
        await asyncio.sleep(0)
        fencing.cancel()
        assert await slices_until_told([session for _, session in producers]) == CLIENTS_PER_TURN
        assert fencing.cancelled()
        assert it.topic.producers == {}
        await it.publish("a")


async def test_a_topic_that_fails_refuses_the_fencing_producer() -> None:
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        await many_producers(it)
        fencing = tasks.create_task(refused(it, FENCING))
        await asyncio.sleep(0)
        it.topic._on_bug(RuntimeError("a bug"))
        await fencing
        assert it.topic.state is TopicState.FAILED


@pytest.mark.parametrize("by_time", [False, True])
async def test_a_seek_disconnects_all_consumers_before_it_moves_the_cursor(by_time: bool) -> None:
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        [first, *_, last] = await it.publish("a", "b", "c")
        consumers = await many_consumers(it)
        await wait_until(lambda: sum(len(session.texts) for _, session in consumers) == 3)
        handle, unaware = consumers[-1]
        handle.acknowledge([first])
        seek = handle.seek_to_time(1) if by_time else handle.seek(EARLIEST)
        seeking = tasks.create_task(seek)
        await asyncio.sleep(0)
        assert unaware.reason is None
        with pytest.raises(SubscriptionFenced):
            handle.acknowledge([last])
        with pytest.raises(SubscriptionFenced):
            await it.subscribe(kind=SHARED)
        handle.flow(1)
        sessions = [session for _, session in consumers]
        assert await slices_until_told(sessions) == CLIENTS_PER_TURN
        await seeking
        assert reasons(consumers) == {CloseReason.SEEK}
        _, again = await it.subscribe(kind=SHARED)
        await wait_until(lambda: again.texts == ["a", "b", "c"])


async def test_a_seek_whose_client_goes_away_disconnects_all_consumers_nevertheless() -> None:
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        await it.publish("a", "b", "c")
        consumers = [consumer for _ in range(4) for consumer in await many_consumers(it)]
        await wait_until(lambda: sum(len(session.texts) for _, session in consumers) == 3)
        handle, _ = consumers[-1]
        seeking = tasks.create_task(handle.seek(EARLIEST))
        for _ in range(10):
            if reasons(consumers) == {None}:
                await asyncio.sleep(0)
        seeking.cancel()
        await asyncio.wait({seeking})
        assert None in reasons(consumers), "the client goes away too late for this test"
        with pytest.raises(SubscriptionFenced):
            handle.acknowledge([EARLIEST])
        await slices_until_told([session for _, session in consumers])
        await settle()
        assert reasons(consumers) == {CloseReason.SEEK}
        _, again = await it.subscribe(kind=SHARED)
        await wait_until(lambda: again.texts == ["a", "b", "c"])


async def test_a_returning_fencer_is_fenced_by_a_producer_that_was_promoted_meanwhile() -> None:
    """The topic's epoch would fall, and the promoted producer could write beside the returning
    one."""
    async with opened_topic(ClusterState()) as it:
        first, _ = await it.produce("first", mode=FENCING)
        waiting = [
            await it.produce(f"w{number}", mode=AccessMode.WAIT_FOR_EXCLUSIVE)
            for number in range(NUMBER)
        ]
        first.close_nowait()  # the first of the queue is promoted
        with pytest.raises(ProducerFenced, match="its epoch is 0"):
            await it.produce("first", mode=FENCING, topic_epoch=0)
        assert waiting[0][1].is_ready
        assert it.topic.log.properties["topic-epoch"] == "1"


async def test_a_forced_deletion_of_a_subscription_disconnects_its_consumers_in_slices() -> None:
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        consumers = await many_consumers(it)
        deleting = tasks.create_task(it.topic.unsubscribe("s", force=True))
        sessions = [session for _, session in consumers]
        assert await slices_until_told(sessions) == CLIENTS_PER_TURN
        await deleting
        assert reasons(consumers) == {CloseReason.UNSUBSCRIBED}
        assert it.topic.subscriptions == {}


class SlowProbe(FakeProducerSession):
    def __init__(self, answered: asyncio.Event) -> None:
        super().__init__()
        self.answered = answered

    async def probe(self) -> bool:
        await self.answered.wait()
        return True


async def test_a_producer_does_not_join_the_queue_of_a_topic_that_closed_during_the_probe() -> None:
    answered = asyncio.Event()
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        await it.produce("first", session=SlowProbe(answered), mode=AccessMode.EXCLUSIVE)
        queued = tasks.create_task(refused(it, AccessMode.WAIT_FOR_EXCLUSIVE))
        await settle()
        it.topic.begin_deletion(force=True)
        answered.set()
        await queued
        it.topic.end_deletion()


@pytest.mark.parametrize("mode", [AccessMode.WAIT_FOR_EXCLUSIVE, AccessMode.EXCLUSIVE])
async def test_a_producer_that_left_during_the_probe_blocks_no_other(mode: AccessMode) -> None:
    answered = asyncio.Event()
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        first, _ = await it.produce("first", session=SlowProbe(answered), mode=AccessMode.EXCLUSIVE)
        joining = tasks.create_task(it.produce("next", mode=mode))
        await settle()
        await first.close()
        answered.set()
        handle, _ = await joining
        assert not handle.is_waiting
        assert handle.topic_epoch == 1


async def test_a_consumer_that_has_left_passes_the_room_of_its_connection_on() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish("a")
        full = FakeConsumerSession(room=False)
        await it.subscribe(kind=SubscriptionType.FAILOVER, session=full)
        standby, _ = await it.subscribe(kind=SubscriptionType.FAILOVER)
        await settle()
        full.room = True
        standby.close_nowait()
        standby.on_writable()
        await wait_until(lambda: full.texts == ["a"])


async def test_a_change_of_the_policies_advances_some_subscriptions_in_each_turn() -> None:
    """A call for each of 10,000 readers took 68 ms of one step."""
    async with opened_topic(ClusterState()) as it:
        for number in range(NUMBER):
            await it.subscribe(f"reader-{number}", durable=False, start=EARLIEST)
        subscriptions = it.topic.all_subscriptions
        called: list[str] = []
        for subscription in subscriptions:
            dispatcher = subscription.dispatcher
            assert dispatcher is not None

            def advance(now: float, name: str = subscription.name) -> list[Action]:
                called.append(name)
                return []

            dispatcher.advance = advance  # type: ignore[method-assign]
        it.policies.set(unacked_per_consumer_max=7)
        counts = [len(called)]
        while counts[-1] < NUMBER:
            await asyncio.sleep(0)
            counts.append(len(called))
            assert len(counts) < 1_000, "not all subscriptions are called"
        assert max(after - before for before, after in pairwise([0, *counts])) == CLIENTS_PER_TURN
        assert called == [subscription.name for subscription in subscriptions]
