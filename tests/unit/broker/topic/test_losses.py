"""Reads of entries that no bookie has any more. The broker skips these entries only if a setting
allows this and the loss is certain."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fakes.cluster_state import ClusterState
from fakes.policies import SettablePolicies
from fakes.topic_log import SMALL
from fakes.topics import TopicRig, opened_topic
from support import settle, wait_until

from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.topic.contract import SubscriptionType
from magnetar.metadata.policies import Retention

SKIPPING = replace(SMALL, auto_skip_non_recoverable_data=True)
TEXTS = [f"m{number}" for number in range(12)]
NO_CACHE = 1


def keeping() -> SettablePolicies:
    return SettablePolicies(retention=Retention(-1, -1))


async def reasons(it: TopicRig, name: str = "s") -> str:
    return " ".join(str(reason) for reason in it.topic.explain(name))


@pytest.mark.parametrize("kind", [SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED])
async def test_lost_entries_and_ledgers_are_skipped_and_named(kind: SubscriptionType) -> None:
    world = ClusterState()
    async with opened_topic(world, config=SKIPPING, cache_bytes=NO_CACHE, policies=keeping()) as it:
        positions = await it.publish(*TEXTS)
        world.ledgers.lost.add((positions[1].ledger, positions[1].entry))
        del world.ledgers.ledgers[positions[5].ledger]
        it.topic.log._reader.forget(positions[5].ledger)
        consumer, session = await it.subscribe(kind=kind)
        await wait_until(lambda: len(session.entries) == 6)
        assert session.texts == ["m0", "m2", "m3", "m4", "m10", "m11"]
        losses = it.topic.log.losses
        assert [str(lost) for lost in losses.ranges] == [
            f"{positions[1].ledger}:1-1",
            f"{positions[5].ledger}:0-4",
        ]
        assert losses.entries == 6
        consumer.acknowledge(session.positions)
        await settle()
        assert it.topic.subscriptions["s"].cursor.mark_delete == positions[11]
        await it.subscribe("other", kind=kind)
        await settle()
        assert losses.entries == 6, "a second subscription counts nothing twice"


async def test_skipping_releases_what_a_negative_acknowledgement_withholds() -> None:
    world = ClusterState()
    settings, policy = KeySharedSettings(spread_keyless=False), KeySharedPolicy(ordered_nacks=True)
    kind = SubscriptionType.KEY_SHARED
    async with opened_topic(
        world, config=SKIPPING, cache_bytes=NO_CACHE, policies=keeping(), key_shared=settings
    ) as it:
        positions = await it.publish(*TEXTS)
        consumer, session = await it.subscribe(kind=kind, policy=policy)
        await wait_until(lambda: len(session.entries) == 12)
        consumer.negative_ack(positions[:1], positions[1:])
        world.ledgers.lost.add((positions[0].ledger, positions[0].entry))
        consumer.redeliver(positions[:1])
        await wait_until(lambda: len(session.entries) == 23, what="the later messages of the key")
        assert session.texts[12:] == TEXTS[1:]


async def test_without_the_setting_a_lost_entry_is_explained_and_waited_for() -> None:
    world = ClusterState()
    async with opened_topic(world, cache_bytes=NO_CACHE, policies=keeping()) as it:
        positions = await it.publish(*TEXTS)
        world.ledgers.lost.add((positions[1].ledger, positions[1].entry))
        _, session = await it.subscribe()
        await asyncio.sleep(100)
        assert session.texts == ["m0"]
        assert f"entries {positions[1].ledger}:1-1 are lost" in await reasons(it)
        assert it.topic.log.losses.entries == 0
        world.ledgers.lost.clear()  # a bookie is back
        await wait_until(lambda: len(session.entries) == 12)


async def test_an_entry_that_may_be_readable_later_is_never_skipped() -> None:
    world = ClusterState()
    async with opened_topic(world, config=SKIPPING, cache_bytes=NO_CACHE, policies=keeping()) as it:
        positions = await it.publish(*TEXTS)
        world.ledgers.unreadable.add((positions[1].ledger, positions[1].entry))
        _, session = await it.subscribe()
        await asyncio.sleep(100)
        assert session.texts == ["m0"]
        assert "are lost" not in await reasons(it)
        world.ledgers.unreadable.clear()
        await wait_until(lambda: len(session.entries) == 12)
        assert it.topic.log.losses.entries == 0


async def test_a_stale_owner_skips_nothing() -> None:
    """The next owner has deleted the ledger, which is no loss for the topic."""
    world = ClusterState()
    async with opened_topic(world, config=SKIPPING, cache_bytes=NO_CACHE, policies=keeping()) as it:
        positions = await it.publish(*TEXTS)
        async with opened_topic(world):
            del world.ledgers.ledgers[positions[0].ledger]
            it.topic.log._reader.forget(positions[0].ledger)
            _, session = await it.subscribe("late", durable=False, start=positions[0])
            await asyncio.sleep(10)
            assert session.entries == []
            assert it.topic.log.losses.entries == 0
            assert it.failures != []
