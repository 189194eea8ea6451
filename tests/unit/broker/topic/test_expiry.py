"""Skipping, clearing and expiring a backlog, with and without connected consumers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.policies import SettablePolicies
from fakes.topics import opened_topic
from support import settle, wait_until

from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.errors import ReadFailed, SubscriptionFenced
from magnetar.broker.log.position import EARLIEST, LATEST
from magnetar.broker.topic.contract import InitialPosition, SubscriptionType
from magnetar.broker.topic.expiry import (
    expire_messages,
    expire_subscriptions,
    look_up_backlog_ages,
)
from magnetar.metadata.policies import UNLIMITED, Retention

if TYPE_CHECKING:
    from typing import Any

    from fakes.topics import TopicRig

    from magnetar.broker.topic.subscription import Subscription

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
TEXTS = [f"m{number}" for number in range(23)]


def keeping(**changed: Any) -> SettablePolicies:
    """Policies under which nothing is trimmed."""
    return SettablePolicies(retention=Retention(UNLIMITED, UNLIMITED), **changed)


def found(it: TopicRig, name: str = "s") -> Subscription:
    return it.topic.subscriptions[name]


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_skip_counts_unacknowledged_entries_and_survives_a_crash(
    kind: SubscriptionType,
) -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping(), close=False) as it:
        positions = await it.publish(*TEXTS)
        handle, session = await it.subscribe(kind=kind)
        await wait_until(lambda: len(session.texts) == len(TEXTS))
        handle.acknowledge([positions[1], positions[3]])
        await handle.close()
        assert await found(it).skip(4) == 4
        assert found(it).cursor.mark_delete == positions[5]
        assert await found(it).skip(2) == 2
    async with opened_topic(world, policies=keeping()) as it:
        _, session = await it.subscribe(kind=kind)
        await wait_until(lambda: len(session.texts) == len(TEXTS) - 8)
        assert session.texts == TEXTS[8:]


async def test_skip_of_more_than_the_backlog_clears_it() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        await it.publish(*TEXTS)
        await it.subscribe(permits=0)
        assert await found(it).skip(1_000_000) == len(TEXTS)
        assert await found(it).skip_all() == 0
        assert found(it).cursor.backlog_entries == 0


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_a_connected_consumer_continues_after_a_skip(kind: SubscriptionType) -> None:
    limits = Limits(unacked_per_consumer=6, unacked_per_subscription=8, turn_messages=2)
    async with opened_topic(ClusterState(), policies=keeping(), limits=limits) as it:
        await it.publish(*TEXTS)
        _, session = await it.subscribe(kind=kind, permits=6)
        await wait_until(lambda: len(session.texts) == 6)
        await settle()
        assert await found(it).skip(10) == 10
        assert found(it).unacked == 0
        it.topic.subscriptions["s"]._machine().check()  # type: ignore[attr-defined]
        next(iter(found(it).consumers.values())).flow(3)
        await wait_until(lambda: len(session.texts) == 9)
        assert session.texts == TEXTS[:6] + TEXTS[10:13]
        await found(it).skip_all()
        await it.publish("after")
        next(iter(found(it).consumers.values())).flow(5)
        await wait_until(lambda: session.texts[-1] == "after")
        assert {reason.why for reason in it.topic.explain("s")} == {Why.NOTHING_TO_READ}


async def test_a_skip_unblocks_a_consumer_at_its_limit_of_unacknowledged_messages() -> None:
    limits = Limits(unacked_per_consumer=4, unacked_per_subscription=100)
    async with opened_topic(ClusterState(), policies=keeping(), limits=limits) as it:
        await it.publish(*TEXTS)
        _, session = await it.subscribe(kind=SHARED)
        await wait_until(lambda: len(session.texts) == 4)
        await settle()
        assert await found(it).skip(4) == 4
        await wait_until(lambda: len(session.texts) == 8)
        assert session.texts == TEXTS[:8]


async def test_skip_releases_partly_acknowledged_batches_and_redeliveries() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        positions = await it.publish("a b c", "d e", "f", batches=True)
        handle, session = await it.subscribe(kind=SHARED)
        await wait_until(lambda: len(session.texts) == 6)
        handle.acknowledge([], [(positions[0], (0b110,))])
        handle.redeliver([positions[1]])
        await wait_until(lambda: len(session.texts) == 8)
        assert await found(it).skip(2) == 2
        assert found(it).unacked == 1
        handle.redeliver(None)
        await wait_until(lambda: len(session.texts) == 9)
        await settle()
        assert session.texts[8:] == ["f"]


async def test_skip_during_a_seek_is_refused() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        await it.publish(*TEXTS)
        await it.subscribe(permits=0)
        found(it)._begin_seek()
        with pytest.raises(SubscriptionFenced):
            await found(it).skip(1)


async def test_messages_expire_by_the_time_of_the_broker() -> None:
    world, policies = ClusterState(), keeping(message_ttl_s=60)
    async with opened_topic(world, policies=policies) as it:
        await it.subscribe(permits=0)
        await it.publish("old", "older", time_ms=1)  # the clock of the client is wrong
        await expire_messages(it.topic)
        assert found(it).cursor.backlog_entries == 2
        world.clock.advance_ms(40_000)
        positions = await it.publish("new")
        world.clock.advance_ms(30_000)
        policies.is_fresh = False
        await expire_messages(it.topic)
        assert found(it).cursor.backlog_entries == 2 + 1, "expired while policies are not fresh"
        policies.is_fresh = True
        await expire_messages(it.topic)
        assert found(it).cursor.first_unacked(found(it).cursor.mark_delete) == positions[0]
        stats = (await it.topic.stats())["subscriptions"]["s"]
        assert stats["totalMsgExpired"] == 2
        assert stats["msgRateExpired"] > 0
        assert stats["lastExpireTimestamp"] == world.clock.now_ms()


async def test_without_a_time_to_live_nothing_expires() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        await it.publish(*TEXTS)
        await it.subscribe(permits=0)
        world.clock.advance_ms(10**12)
        await expire_messages(it.topic)
        assert found(it).cursor.backlog_entries == len(TEXTS)


async def test_an_expired_message_is_not_delivered_and_the_consumer_gets_the_next() -> None:
    world, policies = ClusterState(), keeping(message_ttl_s=60)
    async with opened_topic(world, policies=policies) as it:
        handle, session = await it.subscribe(kind=SHARED, permits=2)
        await it.publish(*TEXTS)
        await wait_until(lambda: len(session.texts) == 2)
        world.clock.advance_ms(61_000)
        await expire_messages(it.topic)
        await it.publish("fresh")
        handle.flow(10)
        await wait_until(lambda: session.texts[-1] == "fresh")
        assert session.texts == [*TEXTS[:2], "fresh"]
        assert found(it).unacked == 1


async def test_an_unused_subscription_expires_but_not_one_with_a_consumer_or_a_query() -> None:
    policies = keeping(subscription_expiration_time_minutes=10)
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.subscribe("used")
        for name in ("unused", "held"):
            handle, _ = await it.subscribe(name)
            await handle.close()
        await asyncio.sleep(9 * 60)
        it.topic.subscriptions["held"].note_use()
        await expire_subscriptions(it.topic)
        assert sorted(it.topic.subscriptions) == ["held", "unused", "used"]
        await asyncio.sleep(2 * 60)
        policies.is_fresh = False
        await expire_subscriptions(it.topic)
        assert sorted(it.topic.subscriptions) == ["held", "unused", "used"]
        policies.is_fresh = True
        await expire_subscriptions(it.topic)
        assert sorted(it.topic.subscriptions) == ["held", "used"]
        assert sorted(it.topic.cursors.names) == ["held", "used"]


async def test_a_subscription_that_is_moved_does_not_stop_the_expiry_of_others() -> None:
    policies = keeping(subscription_expiration_time_minutes=10)
    async with opened_topic(ClusterState(), policies=policies) as it:
        for name in ("a", "b", "c"):
            unused, _ = await it.subscribe(name)
            await unused.close()
        await asyncio.sleep(11 * 60)
        it.topic.subscriptions["b"]._begin_seek()
        await expire_subscriptions(it.topic)
        assert sorted(it.topic.subscriptions) == ["b"]


async def test_a_durable_and_a_non_durable_subscription_of_one_name_are_independent() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping(), close=False) as it:
        positions = await it.publish(*TEXTS)
        reader, read = await it.subscribe("s", durable=False, start=positions[0])
        durable, session = await it.subscribe("s")
        other, others = await it.subscribe("s2", durable=False, initial=InitialPosition.LATEST)
        await wait_until(lambda: len(read.texts) == len(session.texts) == len(TEXTS))
        durable.acknowledge_cumulative(positions[4])
        reader.acknowledge_cumulative(positions[20])
        assert found(it) is durable.subscription
        stats = await it.topic.stats()
        assert stats["subscriptions"]["s"]["msgBacklog"] == len(TEXTS) - 5
        assert stats["subscriptions"]["s2"]["isDurable"] is False
        assert stats["hiddenSubscriptions"]["s"]["msgBacklog"] == len(TEXTS) - 21
        await reader.seek(LATEST)
        assert session.reason is None
        assert read.reason is not None
        await durable.unsubscribe()
        assert found(it).cursor.durable is False
        assert others.texts == []
        await other.close()
    async with opened_topic(world, policies=keeping()) as it:
        assert it.topic.cursors.names == ()


async def test_age_and_size_of_a_backlog_in_statistics() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        await it.topic.ensure_subscription("s", EARLIEST)
        await it.topic.ensure_subscription("t", EARLIEST)
        stats = await it.topic.stats()
        assert stats["oldestBacklogMessageAgeSeconds"] == -1
        assert stats["oldestBacklogMessageSubscriptionName"] == ""
        assert stats["earliestMsgPublishTimeInBacklogs"] == stats["backlogSize"] == 0
        positions = await it.publish("a" * 100, "b" * 100, time_ms=5_000)
        world.clock.advance_ms(30_000)
        positions += await it.publish(*["c" * 100] * 10, time_ms=9_000)
        world.clock.advance_ms(12_000)
        await found(it, "t").skip_through(positions[1])
        assert it.topic.backlog_age_s == -1, "not looked up yet"
        await look_up_backlog_ages(it.topic)
        assert it.topic.backlog_age_s == 42
        stats = await it.topic.stats()
        assert stats["oldestBacklogMessageAgeSeconds"] == 42
        assert stats["oldestBacklogMessageSubscriptionName"] == "s"
        assert stats["earliestMsgPublishTimeInBacklogs"] == 5_000
        of = {name: each["backlogSize"] for name, each in stats["subscriptions"].items()}
        assert of["s"] == stats["backlogSize"] == pytest.approx(stats["storageSize"], rel=0.01)
        assert of["t"] == pytest.approx(stats["storageSize"] * 10 / 12, rel=0.05)
        found(it).cursor.acknowledge(positions[:6])
        assert found(it).cursor.backlog_bytes == pytest.approx(of["s"] / 2, rel=0.05)
        await look_up_backlog_ages(it.topic)
        assert it.topic.backlog_age_s == 12
        reads = len(world.ledgers.reads)
        for _ in range(5):
            await look_up_backlog_ages(it.topic)
        assert len(world.ledgers.reads) == reads
        assert found(it, "t").oldest.known() is not None
        await found(it).skip_all()
        await found(it, "t").skip_all()
        assert it.topic.backlog_age_s == -1
        assert (await it.topic.stats())["backlogSize"] == 0


async def test_an_unreadable_entry_of_one_subscription_does_not_stop_the_others() -> None:
    world, policies = ClusterState(), keeping(message_ttl_s=60)
    async with opened_topic(world, policies=policies, cache_bytes=1) as it:
        positions = await it.publish(*TEXTS)
        await it.subscribe("a", permits=0)
        await it.subscribe("b", permits=0)
        await found(it, "b").skip(3)
        world.ledgers.unreadable.add((positions[0].ledger, positions[0].entry))
        with pytest.raises(ReadFailed):
            await look_up_backlog_ages(it.topic)
        oldest = found(it, "b").oldest.known()
        assert oldest is not None
        assert oldest.position == positions[3]
        world.clock.advance_ms(61_000)
        with pytest.raises(ReadFailed):
            await expire_messages(it.topic)
        assert found(it, "b").cursor.backlog_entries == 0
        assert found(it, "a").cursor.backlog_entries == len(TEXTS)
