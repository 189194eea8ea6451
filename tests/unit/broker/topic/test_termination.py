"""Termination of a topic: it accepts no message after the last one."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.policies import SettablePolicies
from fakes.topic_log import TOPIC
from fakes.topics import opened_topic
from support import settle, wait_until

from magnetar.broker.errors import TopicTerminated
from magnetar.broker.log.log import LogState
from magnetar.broker.log.position import EARLIEST, LATEST
from magnetar.broker.topic.contract import CloseReason, SubscriptionType
from magnetar.broker.topic.meter import CLIENTS_PER_TURN
from magnetar.metadata.policies import Retention

if TYPE_CHECKING:
    from fakes.sessions import FakeConsumerSession
    from fakes.topics import TopicRig

    from magnetar.broker.topic.consumer import ConsumerHandle

KINDS = [SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED]


def keeping() -> SettablePolicies:
    return SettablePolicies(retention=Retention(-1, -1))


async def test_a_terminated_topic_refuses_messages_and_returns_its_last_one() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        producer, session = await it.produce("p")
        positions = await it.publish("a", "b")
        last = await it.topic.terminate()
        assert last == positions[-1]
        assert session.reason is CloseReason.TERMINATED
        with pytest.raises(TopicTerminated, match=str(TOPIC)):
            await it.produce("late")
        assert await it.topic.terminate() == last
        assert it.topic.log.state is LogState.TERMINATED
        assert it.topic.log.chain.has_closed
        with pytest.raises(TopicTerminated):
            it.topic.log.append([b"x"], {}, None, now=0.0)
        assert producer.outstanding == 0
    async with opened_topic(world, policies=keeping()) as it:
        with pytest.raises(TopicTerminated):
            await it.produce("later")
        assert await it.topic.terminate() == last
        _, session = await it.subscribe()
        await wait_until(lambda: session.texts == ["a", "b"])


async def test_an_empty_topic_can_be_terminated() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        assert await it.topic.terminate() == EARLIEST
        _, session = await it.subscribe()
        assert session.ends == 1, "there is nothing to acknowledge"
    async with opened_topic(world) as it:
        assert await it.topic.terminate() == EARLIEST


async def test_publishes_before_the_end_get_their_receipts() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        world.ledgers.hold()
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(it.publish("a", "b", "c"))
            await settle()
            ending = group.create_task(it.topic.terminate())
            await settle()
            assert not ending.done()
            world.ledgers.release()
        assert ending.result() == publishing.result()[-1]


@pytest.mark.parametrize("kind", KINDS)
async def test_consumers_learn_of_the_end_once_all_is_acknowledged(kind: SubscriptionType) -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        consumer, session = await it.subscribe("slow", kind=kind)
        fast, fast_session = await it.subscribe("fast", kind=kind)
        positions = await it.publish("a", "b")
        await wait_until(lambda: len(session.entries) == len(fast_session.entries) == 2)
        fast.acknowledge(positions)
        await it.topic.terminate()
        assert (session.ends, fast_session.ends) == (0, 1)
        consumer.acknowledge(positions[:1])
        assert session.ends == 0
        consumer.acknowledge(positions[1:])
        assert session.ends == 1
        consumer.flow(10)
        assert session.ends == 1, "a consumer is notified once"
        await it.topic.subscriptions["slow"].seek(EARLIEST)
        _, session = await it.subscribe("slow", kind=kind)
        await wait_until(lambda: session.texts == ["a", "b"])
        assert session.ends == 0


async def test_consumers_learn_of_the_end_also_if_the_request_was_cancelled() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        consumer, session = await it.subscribe()
        consumer.acknowledge(await it.publish("a"))
        world.ledgers.hold()
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(it.publish("b"))
            await settle()
            ending = group.create_task(it.topic.terminate())
            await settle()
            ending.cancel()
            await settle()
            assert it.topic.log.terminated is None
            world.ledgers.release()
        await wait_until(lambda: len(session.entries) == 2)
        consumer.acknowledge(publishing.result())
        await wait_until(lambda: session.ends == 1)


async def test_a_reader_with_the_name_of_a_durable_subscription_learns_of_the_end() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        await it.topic.ensure_subscription("s", EARLIEST)
        reader, session = await it.subscribe("s", durable=False, start=EARLIEST)
        reader.acknowledge(await it.publish("a"))
        await it.topic.terminate()
        assert session.ends == 1


async def test_a_consumer_that_subscribes_after_the_end_is_notified() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        await it.publish("a")
        await it.topic.terminate()
    async with opened_topic(world, policies=keeping()) as it:
        consumer, session = await it.subscribe(permits=0)
        assert session.ends == 0
        consumer.flow(1)
        await wait_until(lambda: session.texts == ["a"])
        assert session.ends == 0
        consumer.acknowledge_cumulative(session.positions[0])
        assert session.ends == 1


# -- thousands of consumers ------------------------------------------------------------------------

MANY = 2 * CLIENTS_PER_TURN + 50


async def many_consumers(
    it: TopicRig, kind: SubscriptionType
) -> list[tuple[ConsumerHandle, FakeConsumerSession]]:
    return [await it.subscribe(kind=kind) for _ in range(MANY)]


async def test_many_consumers_learn_of_the_end_in_several_turns_of_the_loop() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        consumers = await many_consumers(it, SubscriptionType.SHARED)
        [position] = await it.publish("a")
        await wait_until(lambda: any(session.texts for _, session in consumers))
        await it.topic.terminate()
        told = [sum(session.ends for _, session in consumers)]
        consumers[0][0].acknowledge([position])
        while told[-1] < MANY:
            told.append(sum(session.ends for _, session in consumers))
            consumers[0][0].acknowledge([position])  # it is acknowledged already
            assert len(told) < 1_000, "not all consumers are told"
            await asyncio.sleep(0)
        assert max(after - before for before, after in pairwise(told)) == CLIENTS_PER_TURN
        await settle(MANY)
        assert all(session.ends == 1 for _, session in consumers)


async def test_a_seek_in_the_meantime_delays_the_end_for_the_other_consumers() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        consumers = await many_consumers(it, SubscriptionType.FAILOVER)
        [position] = await it.publish("a")
        await wait_until(lambda: any(session.texts for _, session in consumers))
        await it.topic.terminate()
        active = it.topic.subscriptions["s"].active_name
        [handle] = [handle for handle, _ in consumers if handle.name == active]
        async with it.topic._turns._lock:  # no consumer has its turn yet
            handle.acknowledge([position])
            await it.topic.subscriptions["s"].seek(EARLIEST)
        await settle(MANY)
        standing_by = [(handle, session) for handle, session in consumers if handle.attached]
        assert len(standing_by) == MANY - 1
        assert {session.ends for _, session in standing_by} == {0}
        active = it.topic.subscriptions["s"].active_name
        [(handle, session)] = [each for each in standing_by if each[0].name == active]
        await wait_until(lambda: session.texts == ["a"])
        handle.acknowledge([position])
        await settle(MANY)
        assert {session.ends for _, session in standing_by} == {1}


async def test_standby_consumers_learn_of_the_end_after_a_seek_to_the_end() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        consumers = [await it.subscribe(kind=SubscriptionType.FAILOVER) for _ in range(4)]
        await it.publish("a")
        await wait_until(lambda: any(session.texts for _, session in consumers))
        await it.topic.terminate()
        await it.topic.subscriptions["s"].seek(LATEST)
        standing_by = [session for handle, session in consumers if handle.attached]
        assert [session.ends for session in standing_by] == [1, 1, 1]
        _, session = await it.subscribe(kind=SubscriptionType.FAILOVER)
        await it.topic.subscriptions["s"].seek(LATEST)
        assert sum(session.ends for _, session in consumers) == 3, "a consumer is notified once"
        assert session.ends == 1


async def test_consumers_learn_of_the_end_after_an_administrator_skips_the_rest() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        _, session = await it.subscribe()
        await it.publish("a")
        await it.topic.terminate()
        await it.topic.subscriptions["s"].skip_all()
        assert session.ends == 1
