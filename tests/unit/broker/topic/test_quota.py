"""Backlog quotas of a topic over fake ledgers: limits of size and age, the three actions, and the
release of producers."""

from __future__ import annotations

import asyncio

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import sends_of
from fakes.policies import SettablePolicies
from fakes.topics import opened_topic
from support import wait_until

from magnetar.broker.cursor.backlog import bytes_after, position_with
from magnetar.broker.errors import BacklogQuotaHeld, BacklogQuotaRefused
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.topic.contract import CloseReason, SubscriptionType
from magnetar.metadata.policies import BacklogAction, BacklogQuota
from magnetar.protos.entry import parse_entry
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_message

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


async def test_only_durable_subscriptions_count() -> None:
    policies = SettablePolicies(backlog_quota_bytes=BacklogQuota(1, HOLD))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.subscribe("reader", durable=False, start=EARLIEST)
        await it.publish("a", "b")
        await it.topic.quotas.check()
        await it.produce("p")


async def test_a_long_delay_holds_the_backlog_and_trips_the_quota() -> None:
    """The messages after a delayed message are acknowledged, but only a prefix of the log counts as
    consumed."""
    world = ClusterState()
    policies = SettablePolicies(backlog_quota_bytes=BacklogQuota(500, HOLD))
    async with opened_topic(world, policies=policies) as it:
        consumer, received = await it.subscribe(kind=SubscriptionType.SHARED)
        handle, session = await it.produce("delaying")
        message = OutgoingMessage(b"later", sequence_id=0, deliver_at_ms=1_700_000_000_000 + 10**9)
        view = parse_entry(b"".join(encode_message(message, EntryHeader("p", 1_700_000_000_000))))
        handle.publish(sends_of(view), asyncio.get_running_loop().time())
        await wait_until(lambda: len(session.answers) == 1)
        texts = list("abcdefghijklmnopqrst")
        await it.publish(*texts)
        await wait_until(lambda: received.texts == texts)
        consumer.acknowledge(received.positions)
        await it.topic.quotas.check()
        with pytest.raises(BacklogQuotaHeld, match="500 bytes"):
            await it.produce("p")
        await it.topic.subscriptions["s"].skip_all()  # like a TTL, which ignores the delay
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


@pytest.mark.parametrize("action", [HOLD, EVICT])
async def test_an_unreadable_entry_does_not_keep_producers_away(
    action: BacklogAction, caplog: pytest.LogCaptureFixture
) -> None:
    world = ClusterState()
    policies = SettablePolicies(backlog_quota_age_s=BacklogQuota(60, action))
    async with opened_topic(world, policies=policies, cache_bytes=1) as it:
        await it.subscribe(permits=0)
        first, *_ = await it.publish("a", "b")
        world.clock.advance_ms(61_000)
        world.ledgers.unreadable.add((first.ledger, first.entry))
        await it.produce("p")
        assert "the age of a backlog is not known" in caplog.text
        world.ledgers.unreadable.clear()
        await it.topic.quotas.check()
        assert it.topic.producers == {} or action is EVICT


async def test_age_is_that_of_the_backlog_after_an_eviction_by_size() -> None:
    world = ClusterState()
    policies = SettablePolicies(
        backlog_quota_bytes=BacklogQuota(300, EVICT), backlog_quota_age_s=BacklogQuota(60, HOLD)
    )
    async with opened_topic(world, policies=policies) as it:
        await it.subscribe(permits=0)
        await it.publish(*"abcdefghij")
        world.clock.advance_ms(61_000)
        await it.publish(*"klmnopqrst")
        await it.topic.quotas.check()
        assert 0 < it.topic.subscriptions["s"].cursor.backlog_entries < 10
        assert it.topic.producers, "the old messages are evicted"


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
