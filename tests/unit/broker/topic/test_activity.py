"""The times and rates in the statistics of consumers and subscriptions."""

from __future__ import annotations

import asyncio

import pytest
from fakes.cluster_state import ClusterState
from fakes.topics import opened_topic
from support import wait_until

from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.operations.model import TopicStats
from magnetar.broker.topic.activity import Activity
from magnetar.broker.topic.contract import SubscriptionType

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
FAILOVER, KEY_SHARED = SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED


def test_times_of_a_consumer_that_left_are_merged() -> None:
    first, second = Activity(), Activity()
    first.on_flow(10)
    first.on_sent(20)
    first.acked_ms = 30
    second.on_flow(15)
    second.on_flow(16)
    both = first.latest(second)
    assert both == second.latest(first)
    assert both == Activity(20, 10, 20, 30, 16)


def test_times_that_never_came_are_zero() -> None:
    described = Activity().describe_consumer()
    assert described["lastAckedTimestamp"] == 0
    assert described["lastAckedTime"] == "1970-01-01T00:00:00.000+00:00"


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER, SHARED, KEY_SHARED])
async def test_deliveries_and_acknowledgements_are_dated_and_counted(
    kind: SubscriptionType,
) -> None:
    world = ClusterState()
    async with opened_topic(world) as rig:
        handle, session = await rig.subscribe(kind=kind)
        await rig.publish("a", "b", "c")
        await wait_until(lambda: len(session.entries) == 3, what="deliveries")
        sent_ms = world.clock.now_ms()
        await asyncio.sleep(5)
        handle.acknowledge([session.positions[0], session.positions[2]])
        acked_ms = world.clock.now_ms()
        await asyncio.sleep(1)
        stats = TopicStats.model_validate(await rig.topic.stats()).subscriptions["s"]
        [consumer] = stats.consumers
        assert consumer.last_consumed_timestamp == stats.last_consumed_timestamp <= sent_ms
        assert consumer.last_consumed_timestamp >= consumer.first_messages_sent_timestamp > 0
        assert consumer.last_acked_timestamp == stats.last_acked_timestamp == acked_ms
        assert consumer.last_acked_time[:4] == "2023"
        assert consumer.message_ack_rate == stats.message_ack_rate > 0
        assert stats.last_mark_delete_advanced_timestamp == acked_ms
        assert stats.non_contiguous_deleted_messages_ranges == 1
        assert stats.non_contiguous_deleted_messages_ranges_serialized_size > 0
        handle.close_nowait()
        stats = TopicStats.model_validate(await rig.topic.stats()).subscriptions["s"]
        assert stats.last_acked_timestamp == acked_ms, "of a consumer that has left"
        assert stats.consumers == []


async def test_a_cumulative_acknowledgement_counts_what_it_covers() -> None:
    async with opened_topic(ClusterState()) as rig:
        handle, session = await rig.subscribe()
        await rig.publish("a b", "c d", "e f", batches=True)
        await wait_until(lambda: len(session.entries) == 3, what="deliveries")
        handle.acknowledge_cumulative(session.positions[1])
        handle.acknowledge_cumulative(session.positions[0])
        assert handle.machine.acked in (2, 3, 4), "two batches, of an average size"


async def test_a_subscription_at_its_limit_reports_the_limit() -> None:
    async with opened_topic(ClusterState()) as rig:
        _, session = await rig.subscribe(kind=SHARED)
        await rig.publish("a", "b", "c")
        await wait_until(lambda: len(session.entries) == 3, what="deliveries")
        stats = TopicStats.model_validate(await rig.topic.stats()).subscriptions["s"]
        assert not stats.blocked_subscription_on_unacked_msgs
        limits = Limits(unacked_per_consumer=2, unacked_per_subscription=3)
        rig.topic.subscriptions["s"].on_policies(limits)
        stats = TopicStats.model_validate(await rig.topic.stats()).subscriptions["s"]
        assert stats.blocked_subscription_on_unacked_msgs
        assert stats.consumers[0].blocked_consumer_on_unacked_msgs
