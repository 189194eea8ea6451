"""Operations on topics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.namespaces import create_namespaces
from fakes.wire import wire_to

from magnetar.broker.catalog.listing import NAMES_PER_TURN
from magnetar.broker.errors import NamespaceNotFound, TopicExists, TopicNotFound
from magnetar.broker.log.log import LogConfig
from magnetar.broker.operations.topics import create_topic, internal_stats, list_topics
from magnetar.protos.names import NamespaceName, TopicName
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker

pytestmark = pytest.mark.real_loop

TOPIC = TopicName.parse("t")


async def test_topics_are_listed_in_full_and_sorted() -> None:
    async with running_broker(ClusterState()) as broker:
        await create_namespaces(broker.store, "tenant/other")
        for name in ("b", "a?", "tenant/other/c"):
            await create_topic(broker.broker, TopicName.parse(name))
        default = await list_topics(broker.broker, NamespaceName.parse("public/default"))
        assert default == ["persistent://public/default/a?", "persistent://public/default/b"]
        other = await list_topics(broker.broker, NamespaceName.parse("tenant/other"))
        assert other == ["persistent://tenant/other/c"]


async def test_topics_of_a_namespace_that_does_not_exist_are_not_an_empty_list() -> None:
    async with running_broker(ClusterState()) as broker:
        with pytest.raises(NamespaceNotFound, match="tenant/missing"):
            await list_topics(broker.broker, NamespaceName.parse("tenant/missing"))


async def test_many_topics_are_listed_in_slices() -> None:
    """20,000 names take a quarter of a second."""
    names = [TopicName.parse(f"t{number:05}") for number in range(20_000)]
    store = ClusterState().store()
    await create_namespaces(store, "tenant/large")

    async def topics_of(*_: object) -> list[TopicName]:
        return names

    broker = cast("Broker", SimpleNamespace(topics_of=topics_of, turns=Turns(), metadata=store))
    listing = asyncio.create_task(  # noqa: TID251
        list_topics(broker, NamespaceName.parse("tenant/large"))
    )
    turns = 0
    while not listing.done():
        await asyncio.sleep(0)
        turns += 1
    assert listing.result() == list(map(str, names))
    assert turns > 2 * len(names) // NAMES_PER_TURN


async def test_one_of_two_creations_at_the_same_time_succeeds() -> None:
    async with running_broker(ClusterState()) as broker:
        outcomes: list[str] = []

        async def create() -> None:
            try:
                await create_topic(broker.broker, TOPIC)
                outcomes.append("created")
            except TopicExists:
                outcomes.append("exists")

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(create())
        assert sorted(outcomes) == ["created", *["exists"] * 4]


async def test_a_created_topic_survives_its_broker() -> None:
    cluster = ClusterState()
    async with running_broker(cluster) as broker:
        await create_topic(broker.broker, TOPIC)
    async with running_broker(cluster, 1) as broker:
        with pytest.raises(TopicExists, match="exists already"):
            await create_topic(broker.broker, TOPIC)


async def test_internal_stats_count_ledgers_and_acknowledged_ranges() -> None:
    small = LogConfig(ledger_entries_max=2, ledger_age_s_min=0.0)
    async with (
        running_broker(ClusterState(), log_config=small) as broker,
        wire_to(broker, "pulsar") as client,
    ):
        with pytest.raises(TopicNotFound):
            await internal_stats(broker.broker, TOPIC)
        await client.produce("t")
        await client.subscribe("t", "s")
        for number in range(5):
            await client.publish(sequence_id=number)
            await client.receive()
        topic = await broker.broker.topic(TOPIC)
        first, *_, last = (record.ledger for record in topic.log.chain.records)
        cursor = topic.subscriptions["s"].cursor
        cursor.acknowledge([type(cursor.mark_delete)(first, 1)])
        stats = await internal_stats(broker.broker, TOPIC)
        assert stats.number_of_entries == 5
        assert [ledger.entries for ledger in stats.ledgers] == [2, 2, 1]
        assert sum(ledger.size for ledger in stats.ledgers) == stats.total_size
        assert all(ledger.size > 0 for ledger in stats.ledgers)
        assert stats.current_ledger_entries == 1
        assert stats.last_confirmed_entry == f"{last}:0"
        found = stats.cursors["s"]
        assert found.number_of_entries_in_backlog == 4
        assert found.individually_deleted_messages == [f"{first}:1-1"]
        assert found.individually_deleted_messages_complete
