"""FindTopics and HoldTopics with values that no connector of ours sends."""

from __future__ import annotations

import pytest
from fakes.admin import admin_of
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState

from magnetar.broker.errors import NotAllowed
from magnetar.broker.session.topic_ranges import FOUND_MAX, TopicRanges
from magnetar.client.asyncio import Client
from magnetar.protos import broker_pb2 as pb

pytestmark = pytest.mark.real_loop(60)

TOPIC = "persistent://public/default/t"


async def test_an_answer_with_too_many_topics_is_refused_before_it_is_made() -> None:
    async with running_broker(ClusterState()) as it, admin_of(it) as admin:
        (await admin.put("public/default/wide/partitions", json=1_000)).raise_for_status()
        few = await TopicRanges().find(it.broker, pb.FindTopicsRequest(topics=["wide"] * 100))
        assert len(few.topics) == FOUND_MAX
        with pytest.raises(NotAllowed, match="there are 101000, more than 100000"):
            await TopicRanges().find(it.broker, pb.FindTopicsRequest(topics=["wide"] * 1_000))


async def test_a_query_with_a_clock_far_ahead_does_not_fence_later_ones_for_good() -> None:
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
