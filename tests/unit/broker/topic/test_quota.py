"""Backlog quotas of a topic over fake ledgers: by size, by age, the three actions, the release."""

from __future__ import annotations

import pytest
from fakes.cluster_state import ClusterState
from fakes.policies import SettablePolicies
from fakes.topics import opened_topic

from magnetar.broker.cursor.backlog import bytes_after, position_with
from magnetar.broker.errors import BacklogQuotaHeld, BacklogQuotaRefused
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.topic.contract import CloseReason
from magnetar.metadata.policies import BacklogAction, BacklogQuota

HOLD, REFUSE = BacklogAction.HOLD_PRODUCERS, BacklogAction.REFUSE_PRODUCERS
EVICT = BacklogAction.EVICT_BACKLOG


@pytest.mark.parametrize(
    ("action", "error"), [(HOLD, BacklogQuotaHeld), (REFUSE, BacklogQuotaRefused)]
)
async def test_producers_are_kept_away_until_the_backlog_is_small_again(
    action: BacklogAction, error: type[Exception]
) -> None:
    policies = SettablePolicies(backlog_quota_bytes=BacklogQuota(500, action))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.subscribe()
        _, session = await it.produce("p")
        await it.publish(*"abcdefghijklmnopqrst")
        await it.topic.quotas.check()
        assert session.reason is CloseReason.QUOTA
        assert it.topic.producers == {}
        with pytest.raises(error, match="500 bytes"):
            await it.produce("p")
        subscription = it.topic.subscriptions["s"]
        await subscription.skip_through(it.topic.log.confirmed)
        await it.produce("p")


async def test_nothing_but_durable_subscriptions_counts() -> None:
    policies = SettablePolicies(backlog_quota_bytes=BacklogQuota(1, HOLD))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.subscribe("reader", durable=False, start=EARLIEST)
        await it.publish("a", "b")
        await it.topic.quotas.check()
        await it.produce("p")


async def test_the_age_of_the_oldest_message_counts() -> None:
    world = ClusterState()
    policies = SettablePolicies(backlog_quota_age_s=BacklogQuota(60, HOLD))
    async with opened_topic(world, policies=policies) as it:
        await it.subscribe()
        await it.publish("a")
        await it.topic.quotas.check()
        assert it.topic.producers
        world.clock.advance_ms(61_000)
        with pytest.raises(BacklogQuotaHeld, match="61 s old"):
            await it.produce("p")


@pytest.mark.parametrize("fresh", [True, False])
async def test_eviction_skips_the_oldest_to_nine_tenths(fresh: bool) -> None:
    policies = SettablePolicies(backlog_quota_bytes=BacklogQuota(700, EVICT))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.subscribe("slow")
        await it.publish(*"abcdefghijklmnopqrstuvwxyz")
        await it.subscribe("quick")
        await it.topic.subscriptions["quick"].skip_through(it.topic.log.confirmed)
        policies.is_fresh = fresh
        await it.topic.quotas.check()
        slow = it.topic.subscriptions["slow"].cursor
        size = bytes_after(it.topic.log, slow.mark_delete)
        if fresh:
            assert 500 <= size <= 630
            assert it.topic.quotas.evicted == 26 - slow.backlog_entries > 0
        else:
            assert it.topic.quotas.evicted == 0, "policies that may be old destroy nothing"
        await it.topic.quotas.check()
        assert bytes_after(it.topic.log, slow.mark_delete) == size


async def test_eviction_by_age_skips_what_is_older() -> None:
    world = ClusterState()
    policies = SettablePolicies(backlog_quota_age_s=BacklogQuota(60, EVICT))
    async with opened_topic(world, policies=policies) as it:
        await it.subscribe()
        await it.publish("a", "b", "c")
        world.clock.advance_ms(50_000)
        await it.publish("d", "e")
        world.clock.advance_ms(20_000)
        await it.topic.quotas.check()
        assert it.topic.subscriptions["s"].cursor.backlog_entries == 2


async def test_bytes_and_positions_are_inverse_over_ledgers() -> None:
    async with opened_topic(ClusterState()) as it:
        positions = await it.publish(*"abcdefghijklmnopq")
        log = it.topic.log
        total = bytes_after(log, EARLIEST)
        assert total == log.stored_bytes
        sizes = [bytes_after(log, position) for position in positions]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] == 0
        for size in range(0, total, 7):
            assert bytes_after(log, position_with(log, size)) <= size
