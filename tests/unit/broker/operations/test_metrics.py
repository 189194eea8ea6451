"""Metrics of a broker, as Prometheus reads them."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.wire import wire_to
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from magnetar.broker.operations import metrics
from magnetar.broker.operations.metrics import BrokerMetrics
from magnetar.broker.operations.topics import create_topic
from magnetar.broker.topic.topic import PersistentTopic
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fakes.broker import RunningBroker
    from fakes.wire import WireClient

    from magnetar.broker.broker import Broker
    from magnetar.broker.topic.protocol import ServedTopic

pytestmark = pytest.mark.real_loop

PREFIX = "persistent://public/default/"
TOPIC = {"cluster": "c", "namespace": "public/default", "topic": f"{PREFIX}t"}


@dataclass
class Scene:
    broker: RunningBroker
    client: WireClient

    async def registry(self, **settings: object) -> CollectorRegistry:
        registry = CollectorRegistry()
        options = {"topic_level": True, "series_max": metrics.SERIES_MAX} | settings
        source = BrokerMetrics(
            self.broker.broker,
            cluster="c",
            connections=lambda: 5,
            now=asyncio.get_running_loop().time,
            **options,  # type: ignore[arg-type]
        )
        registry.register(await source.read())
        return registry


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """Three messages of the topic `t` are published, one is delivered and none acknowledged."""
    async with running_broker(ClusterState()) as broker, wire_to(broker, "pulsar") as client:
        await client.produce("t")
        await client.subscribe("t", "s", subType=pb.CommandSubscribe.Shared)
        for number in range(3):
            await client.publish(sequence_id=number)
            await client.receive()
        await client.flow(1)
        await client.message()
        yield Scene(broker, client)


async def test_a_topic_has_pulsars_metrics() -> None:
    async with scene() as it:
        value = (await it.registry()).get_sample_value
        topic = await it.broker.broker.topic(TopicName.parse("t"))
        for name, expected in {
            "pulsar_subscriptions_count": 1,
            "pulsar_producers_count": 1,
            "pulsar_consumers_count": 1,
            "pulsar_storage_size": topic.log.stored_bytes,
            "pulsar_msg_backlog": 3,
            "pulsar_in_messages_total": 3,
            "pulsar_in_bytes_total": topic.published.bytes,
            "pulsar_out_messages_total": 1,
            "pulsar_out_bytes_total": topic.published.bytes / 3,
        }.items():
            assert value(name, TOPIC) == expected, name
        assert value("pulsar_rate_in", TOPIC) == pytest.approx(
            topic.published.rates(asyncio.get_running_loop().time()).messages, rel=0.5
        )
        for name, expected in {
            "back_log": 3,
            "unacked_messages": 1,
            "msg_rate_redeliver": 0,
        }.items():
            labels = {**TOPIC, "subscription": "s"}
            assert value(f"pulsar_subscription_{name}", labels) == expected, name
        cluster = {"cluster": "c"}
        assert value("pulsar_topics_count", {**cluster, "namespace": "public/default"}) == 1
        assert value("pulsar_active_connections", cluster) == 5
        assert value("pulsar_broker_msg_backlog", cluster) == 3
        assert value("pulsar_broker_publish_latency_count", cluster) == 3
        assert value("pulsar_broker_publish_latency_bucket", {**cluster, "le": "+Inf"}) == 3


async def test_a_topic_counts_a_reader_with_the_name_of_a_durable_subscription() -> None:
    async with scene() as it:
        await it.client.subscribe("t", "s", consumer_id=2, durable=False)
        value = (await it.registry()).get_sample_value
        assert value("pulsar_consumers_count", TOPIC) == 2
        assert value("pulsar_subscriptions_count", TOPIC) == 2
        assert value("pulsar_msg_backlog", TOPIC) == 6
        assert value("pulsar_subscription_back_log", {**TOPIC, "subscription": "s"}) == 3


async def test_delivered_messages_never_count_down() -> None:
    async with scene() as it:
        topic = await it.broker.broker.topic(TopicName.parse("t"))
        await topic.unsubscribe("s", force=True)
        assert (await it.registry()).get_sample_value("pulsar_out_messages_total", TOPIC) == 1
        assert (await topic.stats())["msgOutCounter"] == 1


async def test_a_non_persistent_topic_has_metrics_and_counts_what_it_drops() -> None:
    async with running_broker(ClusterState()) as broker, wire_to(broker, "pulsar") as client:
        name = "non-persistent://public/default/live"
        await client.produce(name)
        await client.subscribe(name, "s", subType=pb.CommandSubscribe.Shared)
        await client.flow(2)
        for number in range(5):
            await client.publish(sequence_id=number)
        for _ in range(7):  # receipts and messages
            await client.receive()
        registry = await Scene(broker, client).registry()
        labels = {"cluster": "c", "namespace": "public/default", "topic": name}
        for metric, expected in {
            "pulsar_producers_count": 1,
            "pulsar_consumers_count": 1,
            "pulsar_subscriptions_count": 1,
            "pulsar_storage_size": 0,
            "pulsar_in_messages_total": 5,
            "pulsar_out_messages_total": 2,
            "magnetar_dropped_messages_total": 3,
            "pulsar_storage_backlog_age_seconds": None,
        }.items():
            assert registry.get_sample_value(metric, labels) == expected, metric
        dropped = registry.get_sample_value(
            "pulsar_subscription_msg_drop_rate", {**labels, "subscription": "s"}
        )
        assert dropped is not None
        assert dropped > 0
        namespace = {"cluster": "c", "namespace": "public/default"}
        assert registry.get_sample_value("pulsar_topics_count", namespace) == 1


async def test_namespaces_instead_of_topics() -> None:
    async with scene() as it:
        await create_topic(it.broker.broker, TopicName.parse("u"))
        registry = await it.registry(topic_level=False)
        namespace = {"cluster": "c", "namespace": "public/default"}
        assert registry.get_sample_value("pulsar_topics_count", namespace) == 2
        assert registry.get_sample_value("pulsar_msg_backlog", namespace) == 3
        assert "topic=" not in generate_latest(registry).decode()


async def test_topics_beyond_the_limit_of_series_are_counted_only_for_the_broker() -> None:
    async with scene() as it:
        for name in ("u", "v"):
            await create_topic(it.broker.broker, TopicName.parse(name))
        registry = await it.registry(series_max=27)  # 18 of t do not leave room for two of 13
        text = generate_latest(registry).decode()
        shown = {
            sample.labels["topic"]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "topic" in sample.labels
        }
        assert {name.rpartition("/")[2] for name in shown} == {"t"}
        cluster = {"cluster": "c"}
        assert registry.get_sample_value("pulsar_broker_topics_count", cluster) == 3
        assert registry.get_sample_value("magnetar_metrics_topics_left_out", cluster) == 2
        registry = await it.registry(
            series_max=17
        )  # a large topic does not keep out the smaller ones
        assert registry.get_sample_value("magnetar_metrics_topics_left_out", cluster) == 2
        assert registry.get_sample_value("pulsar_msg_backlog", TOPIC) is None
        assert (
            registry.get_sample_value("pulsar_msg_backlog", {**TOPIC, "topic": f"{PREFIX}u"}) == 0
        )


@dataclass
class Measured:
    registry: CollectorRegistry
    steps: list[float]  # CPU seconds


@asynccontextmanager
async def measured(served: Callable[[ServedTopic], list[ServedTopic]]) -> AsyncIterator[Measured]:
    """Read the metrics of the topic `t` from `served`, and measure each step of the loop."""
    async with scene() as it:
        topic = await it.broker.broker.topic(TopicName.parse("t"))
        latency = it.broker.broker.publish_latency
        broker = SimpleNamespace(served=served(topic), publish_latency=latency)
        source = BrokerMetrics(
            cast("Broker", broker),
            cluster="c",
            topic_level=True,
            connections=lambda: 5,
            now=asyncio.get_running_loop().time,
        )
        reading, steps = source.read(), []
        while True:  # the loop's part
            began = time.thread_time()
            try:
                reading.send(None)
            except StopIteration as end:
                found = end.value
                break
            finally:
                steps.append(time.thread_time() - began)
        registry = CollectorRegistry()
        registry.register(found)
        yield Measured(registry, steps)


@pytest.mark.usefixtures("no_collection")
async def test_ten_thousand_topics_are_read_in_steps_of_less_than_50_ms() -> None:
    async with measured(lambda topic: [topic] * 10_000) as it:
        assert max(it.steps) < 0.050
        assert len(it.steps) < 1_000, "slices of a few topics"
        cluster = {"cluster": "c"}
        assert it.registry.get_sample_value("pulsar_broker_topics_count", cluster) == 10_000
        assert it.registry.get_sample_value("pulsar_broker_msg_backlog", cluster) == 30_000


@pytest.mark.usefixtures("no_collection")
async def test_a_topic_of_ten_thousand_subscriptions_is_read_in_steps_of_less_than_50_ms() -> None:
    def with_subscriptions(topic: ServedTopic) -> list[ServedTopic]:
        assert isinstance(topic, PersistentTopic)
        real, one = topic._subscriptions, topic.subscriptions["s"]
        topic._subscriptions = {(f"s{number}", True): one for number in range(10_000)}
        kept.append((topic, real))
        return [topic]

    kept: list[tuple[PersistentTopic, Any]] = []
    async with measured(with_subscriptions) as it:
        for topic, real in kept:
            topic._subscriptions = real
        assert max(it.steps) < 0.050
        cluster = {"cluster": "c"}
        assert it.registry.get_sample_value("pulsar_broker_subscriptions_count", cluster) == 10_000
