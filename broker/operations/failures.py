"""Metrics of unexpected exceptions that the broker survived, and of quarantined topics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from magnetar.broker.broker import Broker


def health_details(broker: Broker, now: float) -> dict[str, object]:
    """Return the additional field of /health: the quarantined topics, if there are any."""
    quarantined = broker.quarantine.describe(now)
    return {"quarantined_topics": quarantined} if quarantined else {}


class FailureMetrics(Collector):
    """The metrics of this module. Register them with the registry of the process."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the values of the label `where` are not known before a failure."""
        return ()

    def collect(self) -> Iterator[Metric]:
        failures = CounterMetricFamily(
            "magnetar_unexpected_exceptions",
            "Unexpected exceptions that failed a topic, a chore or a task, but not the broker.",
            labels=["where"],
        )
        for where, count in list(self._broker.failures.counts.items()):
            failures.add_metric([where], count)
        yield failures
        now = asyncio.get_running_loop().time()
        yield GaugeMetricFamily(
            "magnetar_quarantined_topics",
            "Topics that are refused because they failed repeatedly; /health names them.",
            value=len(self._broker.quarantine.describe(now)),
        )
