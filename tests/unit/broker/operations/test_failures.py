"""The answers of /health and of the metrics about topics that failed."""

from __future__ import annotations

import asyncio

from fakes.place import place
from prometheus_client import CollectorRegistry

from magnetar.broker.guard import FAILURES_MAX, PAUSE_S_FIRST
from magnetar.broker.operations.failures import FailureMetrics, health_details
from magnetar.protos.names import TopicName

NAME = TopicName.parse("persistent://public/default/t")


async def test_health_and_metrics_name_a_quarantined_topic_until_its_pause_ends() -> None:
    async with place() as here:
        broker, loop = here.broker, asyncio.get_running_loop()
        registry = CollectorRegistry()
        registry.register(FailureMetrics(broker))
        value = registry.get_sample_value
        assert health_details(broker, loop.time()) == {}
        assert value("magnetar_quarantined_topics") == 0
        for _ in range(FAILURES_MAX):
            broker.failures.note("task", str(NAME), ValueError("planted"))
            broker.quarantine.on_failure(NAME, "planted", loop.time())
        assert health_details(broker, loop.time()) == {
            "quarantined_topics": {
                str(NAME): {"reason": "planted", "ends_in_s": round(PAUSE_S_FIRST)}
            }
        }
        assert value("magnetar_quarantined_topics") == 1
        labels = {"where": "task"}
        assert value("magnetar_unexpected_exceptions_total", labels) == FAILURES_MAX
        await asyncio.sleep(PAUSE_S_FIRST + 1)
        assert health_details(broker, loop.time()) == {}
        assert value("magnetar_quarantined_topics") == 0
