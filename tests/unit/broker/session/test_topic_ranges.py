"""FindTopics and HoldTopics with values that no connector of ours sends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest
from fakes.admin import admin_of
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState

from magnetar.broker.catalog.listing import NAMES_PER_TURN
from magnetar.broker.errors import NotAllowed
from magnetar.broker.session.topic_ranges import FOUND_MAX, TopicRanges
from magnetar.client.asyncio import Client
from magnetar.protos import broker_pb2 as pb
from magnetar.protos.names import NamespaceName, TopicName

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker

pytestmark = pytest.mark.real_loop(deadline_s=60)

TOPIC = "persistent://public/default/t"


async def test_an_answer_with_too_many_topics_is_refused_before_it_is_made() -> None:
    async with running_broker(ClusterState()) as it, admin_of(it) as admin:
        (await admin.put("public/default/wide/partitions", json=1_000)).raise_for_status()
        few = await TopicRanges().find(it.broker, pb.FindTopicsRequest(topics=["wide"] * 100))
        assert len(few.topics) == FOUND_MAX
        with pytest.raises(NotAllowed, match="there are 101000, more than 100000"):
            await TopicRanges().find(it.broker, pb.FindTopicsRequest(topics=["wide"] * 1_000))


class Wide:
    """A broker whose namespace has as many topics as an answer may name."""

    def __init__(self) -> None:
        self.names = [TopicName.parse(f"t-{at}") for at in range(FOUND_MAX)]

    async def topics_of(self, namespace: NamespaceName) -> list[TopicName]:
        return self.names


async def test_the_names_of_a_large_namespace_are_converted_in_many_turns_of_the_loop() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    wide = Wide()
    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        request = pb.FindTopicsRequest(namespaces=["public/default"])
        found = await TopicRanges().find(cast("Broker", wide), request)
        counting.cancel()
    assert list(found.topics) == list(map(str, wide.names))
    assert turns >= FOUND_MAX // NAMES_PER_TURN


async def test_a_query_with_a_clock_far_ahead_does_not_fence_later_queries_permanently() -> None:
    async with running_broker(ClusterState()) as it, Client(it.grpc_url) as client:
        producer = await client.create_producer(TOPIC)
        await producer.send(b"1")
        ranges = TopicRanges()

        async def hold(query: str, start_ms: int) -> str:
            request = pb.HoldTopicsRequest(subscription="s", query=query, query_start_ms=start_ms)
            request.topics.add(topic=TOPIC, place=pb.EntryPlace())
            (held,) = (await ranges.hold(it.broker, request)).topics
            return held.error

        now_ms = it.broker.now_ms()
        assert await hold("ahead", (1 << 63) - 1) == ""
        assert (await hold("now", now_ms)).startswith("QueryFenced")
        assert await hold("later", now_ms + 61_000) == ""


async def test_a_hold_is_a_use_of_its_subscription_also_if_it_moves_nothing() -> None:
    async with running_broker(ClusterState()) as it, Client(it.grpc_url) as client:
        producer = await client.create_producer(TOPIC)
        await producer.send(b"1")
        ranges, loop = TopicRanges(), asyncio.get_running_loop()
        request = pb.HoldTopicsRequest(subscription="s", query="q", query_start_ms=1)
        request.topics.add(topic=TOPIC, place=pb.EntryPlace())
        used_at = []
        for _ in range(2):
            (held,) = (await ranges.hold(it.broker, request)).topics
            assert held.error == ""
            topic = await it.broker.stored_topic(TopicName.parse(TOPIC), create=False)
            used_at.append(loop.time() - topic.subscriptions["s"].idle_s)
            await asyncio.sleep(0.1)
        assert used_at[1] - used_at[0] >= 0.1
