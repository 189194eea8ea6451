"""The one admin call: statistics of a topic, from any broker."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.wire import wire_to
from fastapi import FastAPI

from magnetar.broker.admin.topics import topics_router

pytestmark = pytest.mark.real_loop


async def get(broker: Any, path: str) -> httpx.Response:
    app = FastAPI()
    app.include_router(topics_router(broker.broker))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.get(f"/admin/v2/persistent/{path}/stats")


async def test_the_statistics_of_a_topic() -> None:
    async with running_broker(ClusterState()) as broker, wire_to(broker, "pulsar") as client:
        await client.produce("t", producer_name="me")
        await client.subscribe("t", "s")
        for number in range(3):
            await client.publish(sequence_id=number)
            await client.receive()
        found = await get(broker, "public/default/t")
        assert found.status_code == 200
        stats = found.json()
        assert stats["msgInCounter"] == 3
        assert [it["producerName"] for it in stats["publishers"]] == ["me"]
        assert stats["subscriptions"]["s"]["msgBacklog"] == 3


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [("public/default/nobody", 404, "nobody"), ("public/%20/t", 412, "name")],
)
async def test_a_topic_that_is_not_there(path: str, status: int, text: str) -> None:
    async with running_broker(ClusterState()) as broker:
        found = await get(broker, path)
        assert found.status_code == status
        assert text in found.json()["detail"]
        assert broker.broker.topics == [], "asking does not make it"


@pytest.mark.parametrize(("topic", "quoted"), [("t", "t"), ("a?b#50% ü", "a%3Fb%2350%25%20%C3%BC")])
async def test_another_brokers_topic_is_a_redirect(topic: str, quoted: str) -> None:
    cluster = ClusterState()
    async with (
        running_broker(cluster, 0) as first,
        running_broker(cluster, 1) as second,
        wire_to(first, "pulsar") as client,
    ):
        for number in range(50):
            name = f"persistent://public/n{number}/{topic}"
            answer = await client.produce(name, producer_id=number)
            if hasattr(answer, "producer_name"):
                break
        found = await get(second, f"public/n{number}/{quoted}")
        assert found.status_code == 307
        assert found.headers["location"].endswith(f"/persistent/public/n{number}/{quoted}/stats")
        first.stop.set()
        await asyncio.wait([first.serving])
        assert (await get(second, f"public/n{number}/{quoted}")).status_code == 200
