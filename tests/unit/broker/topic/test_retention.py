"""Trims of an open topic: their triggers, and their effects on indexes, cursors and readers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fakes.cluster_state import ClusterState
from fakes.gated_store import GatedStore
from fakes.policies import SettablePolicies
from fakes.topic_log import SMALL
from fakes.topics import opened_topic
from support import settle, wait_until

from magnetar.broker.errors import SubscriptionFenced
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.broker.topic.explanation import SubscriptionState
from magnetar.metadata.policies import Persistence, Retention

TEXTS = [f"m{number}" for number in range(12)]  # two full ledgers of five, and two entries
KEEP = Retention(-1, -1)
CALM = replace(SMALL, check_interval_s=60.0)


def keeping() -> SettablePolicies:
    return SettablePolicies(retention=KEEP)


async def test_a_cursor_that_leaves_a_ledger_trims_it() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=SettablePolicies(retention=Retention(0, 0))) as it:
        consumer, _ = await it.subscribe()
        positions = await it.publish(*TEXTS)
        first, second = positions[0].ledger, positions[5].ledger
        consumer.acknowledge(positions[:4])
        await settle()
        assert world.ledgers.deleted == []
        consumer.acknowledge(positions[4:5])
        await wait_until(lambda: first in world.ledgers.deleted)
        assert it.topic.log.first == Position(second, 0)
        assert it.topic.log.chain.first_index == 5
        consumer.acknowledge_cumulative(positions[11])
        await wait_until(lambda: second in world.ledgers.deleted)
        assert it.topic.log.first == positions[10], "the open ledger stays"


async def test_an_acknowledgement_that_is_not_durable_trims_nothing() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=SettablePolicies(retention=Retention(0, 0))) as it:
        consumer, _ = await it.subscribe()
        positions = await it.publish(*TEXTS)
        world.ledgers.hold()
        consumer.acknowledge_cumulative(positions[11])
        await asyncio.sleep(1.0)
        it.topic.trim()
        await settle()
        assert it.topic.log.first == positions[0]
        world.ledgers.release()
        await wait_until(lambda: it.topic.log.first == positions[10])


async def test_without_durable_subscriptions_a_closed_ledger_is_trimmed_at_once() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=SettablePolicies(retention=Retention(0, 0))) as it:
        positions = await it.publish(*TEXTS)
        await wait_until(lambda: it.topic.log.first == positions[10])
        assert it.topic.log.last_index == 11


async def test_stale_policies_trim_nothing() -> None:
    world = ClusterState()
    policies = SettablePolicies(retention=Retention(0, 0))
    policies.is_fresh = False
    async with opened_topic(world, policies=policies) as it:
        positions = await it.publish(*TEXTS)
        it.topic.trim()
        await settle()
        assert it.topic.log.first == positions[0]
        policies.is_fresh = True
        it.topic.trim()  # the chore makes the same call
        await wait_until(lambda: it.topic.log.first == positions[10])


async def test_a_change_of_the_retention_trims_at_once_and_age_at_the_next_chore() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        positions = await it.publish(*TEXTS)
        await settle()
        assert it.topic.log.first == positions[0]
        it.policies.set(retention=Retention(60, -1))
        await settle()
        assert it.topic.log.first == positions[0]
        world.clock.advance_ms(61_000)
        it.topic.trim()
        await wait_until(lambda: it.topic.log.first == positions[10])


async def test_indexes_continue_after_everything_was_trimmed_and_a_restart() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        consumer, _ = await it.subscribe("s")
        positions = await it.publish(*TEXTS)
        consumer.acknowledge_cumulative(positions[11])
        await it.topic.subscriptions["s"].flush()
    async with opened_topic(world, policies=SettablePolicies(retention=Retention(0, 0))) as it:
        it.topic.trim()
        await wait_until(lambda: it.topic.log.chain.records == ())
        assert it.topic.log.confirmed == positions[11]
    async with opened_topic(world, policies=SettablePolicies(retention=Retention(0, 0))) as it:
        assert it.topic.log.last_index == 11
        [position] = await it.publish("next")
        assert position > positions[11]
        [entry] = await it.topic.log.read(EARLIEST, entries_max=5, bytes_max=10_000)
        assert entry.index == 12
        assert it.topic.subscriptions["s"].cursor.backlog_entries == 1


async def test_a_reader_in_trimmed_ledgers_continues_with_the_first_kept_entry() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        positions = await it.publish(*TEXTS)
        reader, session = await it.subscribe("r", durable=False, start=positions[0], permits=2)
        await wait_until(lambda: len(session.entries) == 2)
        reader.acknowledge([positions[1]])
        it.policies.set(retention=Retention(0, 0))
        await wait_until(lambda: it.topic.log.first == positions[10])
        subscription = it.topic.subscriptions["r"]
        assert subscription.cursor.backlog_entries == 2
        reader.flow(10)
        await wait_until(lambda: len(session.entries) >= 4)
        assert session.texts == ["m0", "m1", "m10", "m11"]
        reader.acknowledge(session.positions)
        assert subscription.cursor.backlog_entries == 0
        await subscription.seek(positions[3])
        assert subscription.cursor.backlog_entries == 2, "a trimmed position is the first kept one"
        await subscription.seek(EARLIEST)
        assert subscription.cursor.backlog_entries == 2


async def test_a_reader_with_the_name_of_a_durable_subscription_forgets_dropped_entries() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        await it.topic.ensure_subscription("s", EARLIEST)
        positions = await it.publish(*TEXTS)
        reader, session = await it.subscribe("s", durable=False, start=EARLIEST, permits=2)
        await wait_until(lambda: len(session.entries) == 2)
        reader.acknowledge([positions[1]])
        await it.topic.subscriptions["s"].skip_all()
        it.policies.set(retention=Retention(0, 0))
        await wait_until(lambda: it.topic.log.first == positions[10])
        cursor = it.topic.hidden_subscriptions["s"].cursor
        assert cursor.backlog_entries == 2


async def test_truncate_moves_a_reader_with_the_name_of_a_durable_subscription() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        await it.topic.ensure_subscription("s", EARLIEST)
        positions = await it.publish(*TEXTS)
        _, session = await it.subscribe("s", durable=False, start=EARLIEST)
        hidden = it.topic.hidden_subscriptions["s"]
        await it.topic.truncate()
        assert session.reason is not None, "the reader reconnects"
        assert hidden.cursor.mark_delete >= positions[-1]


async def test_truncate_drops_all_messages_published_before_it() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        _, session = await it.subscribe("s")
        await it.subscribe("r", durable=False, start=EARLIEST)
        await it.publish(*TEXTS)
        data = {record.ledger for record in it.topic.log.chain.records}
        await it.topic.truncate()
        assert it.topic.log.chain.records == ()
        assert session.reason is not None, "the consumer reconnects"
        await wait_until(lambda: data <= set(world.ledgers.deleted))
        [position] = await it.publish("after")
        assert it.topic.subscriptions["s"].cursor.backlog_entries == 1
        assert it.topic.subscriptions["r"].cursor.backlog_entries == 1
        [entry] = await it.topic.log.read(EARLIEST, entries_max=5, bytes_max=10_000)
        assert (entry.position, entry.index) == (position, 12)
        await it.topic.truncate()
        await it.topic.truncate()
        assert it.topic.log.chain.records == ()
    async with opened_topic(world, policies=SettablePolicies(retention=Retention(0, 0))) as it:
        assert it.topic.log.last_index == 12
        assert it.topic.subscriptions["s"].cursor.backlog_entries == 0


async def test_truncate_passes_a_subscription_that_is_deleted_meanwhile() -> None:
    async with opened_topic(ClusterState(), policies=keeping()) as it:
        await it.topic.ensure_subscription("first", EARLIEST)
        await it.topic.ensure_subscription("second", EARLIEST)
        await it.publish(*TEXTS)
        first, second = it.topic.all_subscriptions
        async with asyncio.TaskGroup() as group:
            group.create_task(it.topic.truncate())
            for _ in range(1_000):
                if first.state is SubscriptionState.SEEKING:
                    break
                await settle(1)
            else:
                pytest.fail("the truncation moves no subscription")
            assert second.state is SubscriptionState.OPEN
            await it.topic.unsubscribe("second")
        assert second.state is SubscriptionState.CLOSED
        assert it.topic.log.chain.records == ()
        assert set(it.topic.subscription_names) == {"first"}


async def test_truncate_refuses_while_a_seek_is_in_progress() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping(), cache_bytes=1) as it:
        await it.topic.ensure_subscription("s", EARLIEST)
        positions = await it.publish(*TEXTS)
        world.ledgers.may_read.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(it.topic.subscriptions["s"].seek_to_time(0))
            await world.ledgers.reading.wait()
            with pytest.raises(SubscriptionFenced):
                await it.topic.truncate()
            world.ledgers.may_read.set()
        assert it.topic.log.first == positions[0], "no message is dropped"


async def test_truncate_keeps_a_cursor_that_is_further_and_later_messages() -> None:
    world = ClusterState()
    async with opened_topic(world, policies=keeping()) as it:
        await it.topic.ensure_subscription("new", LATEST)
        await it.publish(*TEXTS)
        async with asyncio.TaskGroup() as group:
            group.create_task(it.topic.truncate())
            publishing = group.create_task(it.publish("meanwhile"))
        [position] = publishing.result()
        kept = it.topic.log.first <= position
        assert it.topic.subscriptions["new"].cursor.backlog_entries == int(kept)


async def test_new_ledgers_follow_the_persistence_policy() -> None:
    world = ClusterState()
    policies = SettablePolicies(persistence=Persistence(2, 2, 1, 1.0), retention=KEEP)
    async with opened_topic(world, policies=policies) as it:
        await it.publish(*TEXTS[:5])
        policies.set(persistence=Persistence(1, 1, 1, 1.0))
        await it.publish(*TEXTS[5:7])
        asked = [str(quorum) for quorum in it.ledgers.quorums]
        assert asked == ["2/2/1", "1/1/1"]


@pytest.mark.parametrize("first", ["subscribe", "trim"])
@pytest.mark.parametrize("how", ["new", "seek"])
async def test_a_trim_that_is_not_written_yet_keeps_ledgers_that_a_new_subscription_needs(
    first: str, how: str
) -> None:
    """A write of the topic's record is under way, and both changes wait for their turn."""
    world, policies = ClusterState(), keeping()
    store = GatedStore(world.tree)
    async with (
        opened_topic(world, policies=policies, store=store) as it,
        asyncio.TaskGroup() as group,
    ):
        await it.topic.ensure_subscription("s", LATEST)
        positions = await it.publish(*TEXTS)
        subscription = it.topic.subscriptions["s"]
        await subscription.skip_all()
        await settle()
        path, written = topic_path(it.topic.name), asyncio.Event()
        store.gates["put", path] = written
        group.create_task(it.topic.log.set_property("k", "v"))
        await wait_until(lambda: ("put", path) in store.held)
        for step in (first, {"subscribe": "trim", "trim": "subscribe"}[first]):
            if step == "trim":
                policies.set(retention=Retention(0, 0))
            elif how == "new":
                moving = group.create_task(it.topic.ensure_subscription("new", EARLIEST))
            else:
                moving = group.create_task(subscription.seek(EARLIEST))
            await settle()
        written.set()
        await moving
        await settle()
        assert it.topic.log.first == positions[0]
        name = "new" if how == "new" else "s"
        _, session = await it.subscribe(name)
        await wait_until(lambda: len(session.texts) == len(TEXTS))
        await it.topic.subscriptions[name].skip_all()
        await wait_until(lambda: it.topic.log.first == positions[10])
