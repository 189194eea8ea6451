"""The client with a broker that lacks Magnetar's own features."""

from __future__ import annotations

import re

import pytest
from fakes.client_world import EARLIEST, A, client_among, data, publish, receive
from support import wait_until

from magnetar.client.errors import OperationNotSupported
from magnetar.protos import pulsar_pb2 as pb


async def test_close_with_drain_is_refused_by_name_and_still_closes() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe("t", "s")
        with pytest.raises(OperationNotSupported, match=r"drain=True.*'fake'"):
            await consumer.close(drain=True)
        await (await client.subscribe("t", "s")).close()  # the first consumer is closed
        assert cluster.brokers[A].commands(pb.CommandDrainConsumer) == []


async def test_topics_of_a_pattern_are_found_without_announcements() -> None:
    async with client_among(A) as (client, cluster):
        cluster.brokers[A].announces_topics = False
        consumer = await client.subscribe(
            re.compile("persistent://public/default/t.*"),
            "s",
            initial_position=EARLIEST,
            pattern_auto_discovery_period=1,
        )
        await publish(client, 3)
        assert data(await receive(consumer, 3)) == [0, 1, 2]
        await wait_until(lambda: cluster.brokers[A].commands(pb.CommandGetTopicsOfNamespace))
        assert cluster.brokers[A].commands(pb.CommandWatchTopicList) == []
