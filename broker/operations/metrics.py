"""Metrics of a broker under Pulsar's names, read from its topics when somebody scrapes them.

Topics count what flows through them in any case; nothing is counted for these metrics but the
publish latency. A scrape is one step on the event loop, so the number of series is bounded:
SERIES_MAX series take 60 ms. Topics beyond it have no series of their own, the most recently opened
ones first; the metrics of the whole broker include them.

Of Pulsar's metrics of a namespace, which it exposes instead of those of topics when
`exposeTopicLevelMetricsInPrometheus` is false, there are the gauges. There are no counters for a
namespace or a broker: they would go down whenever a topic moves to another broker.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from magnetar.broker.log.latency import BOUNDS_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from magnetar.broker.broker import Broker
    from magnetar.broker.log.latency import LatencyHistogram
    from magnetar.broker.topic.topic import Topic

SERIES_MAX: Final = 10_000
"""Of topics and subscriptions: 6 us each to render."""

# metric, what it says
_GAUGES: Final = (
    ("subscriptions_count", "Subscriptions."),
    ("producers_count", "Connected producers."),
    ("consumers_count", "Connected consumers."),
    ("rate_in", "Messages published per second."),
    ("rate_out", "Messages delivered per second."),
    ("throughput_in", "Bytes published per second."),
    ("throughput_out", "Bytes delivered per second."),
    ("storage_size", "Bytes stored, one copy."),
    ("msg_backlog", "Entries that are not acknowledged, of all subscriptions."),
)
_COUNTERS: Final = (
    ("in_messages", "Messages published."),
    ("in_bytes", "Bytes published."),
    ("out_messages", "Messages delivered."),
    ("out_bytes", "Bytes delivered."),
)
_SUBSCRIPTION_GAUGES: Final = (
    ("back_log", "Entries that are not acknowledged."),
    ("unacked_messages", "Messages delivered and not acknowledged."),
    ("msg_rate_out", "Messages delivered per second."),
    ("msg_throughput_out", "Bytes delivered per second."),
    ("msg_rate_redeliver", "Messages delivered again per second."),
)
_TOPIC_SERIES: Final = len(_GAUGES) + len(_COUNTERS)


@dataclass(slots=True)
class _Figures:
    """Gauges of one topic, or the sums of several. Fields are in the order of `_GAUGES`."""

    subscriptions: int = 0
    producers: int = 0
    consumers: int = 0
    rate_in: float = 0.0
    rate_out: float = 0.0
    throughput_in: float = 0.0
    throughput_out: float = 0.0
    storage_size: int = 0
    backlog: int = 0

    def add(self, other: _Figures) -> None:
        for field in _FIELDS:
            setattr(self, field, getattr(self, field) + getattr(other, field))

    def values(self) -> list[float]:
        return [getattr(self, field) for field in _FIELDS]


_FIELDS: Final = tuple(field.name for field in fields(_Figures))


class BrokerMetrics(Collector):
    """Register it with the registry of the process. `now` is the loop's time."""

    def __init__(
        self,
        broker: Broker,
        *,
        cluster: str,
        topic_level: bool,
        connections: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        self._broker = broker
        self._cluster = cluster
        self._topic_level = topic_level
        self._connections = connections
        self._now = now

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would collect once to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        topics, now = self._broker.topics, self._now()
        figures = [_figures_of(topic, now) for topic in topics]
        yield from self._of_broker(figures)
        yield _latency(self._broker.publish_latency, self._cluster)
        if self._topic_level:
            shown = _shown(topics)
            yield from self._of_topics(topics[:shown], figures)
            yield from self._of_subscriptions(topics[:shown], now)
            yield self._gauge(
                "magnetar_metrics_topics_left_out",
                f"Topics without series of their own, beyond {SERIES_MAX} series.",
                len(topics) - shown,
            )
        else:
            yield from self._of_namespaces(topics, figures)

    def _of_broker(self, figures: Sequence[_Figures]) -> Iterator[Metric]:
        total = _Figures()
        for each in figures:
            total.add(each)
        yield self._gauge(
            "pulsar_active_connections", "Open client connections.", self._connections()
        )
        yield self._gauge("pulsar_broker_topics_count", "Topics served here.", len(figures))
        for (name, text), value in zip(_GAUGES, total.values(), strict=True):
            yield self._gauge(f"pulsar_broker_{name}", text, value)

    def _of_topics(self, topics: Sequence[Topic], figures: Sequence[_Figures]) -> Iterator[Metric]:
        labels = [
            (self._cluster, str(topic.name.namespace_name), str(topic.name)) for topic in topics
        ]
        names = ("cluster", "namespace", "topic")
        values = [each.values() for each in figures[: len(topics)]]
        for place, (name, text) in enumerate(_GAUGES):
            gauge = GaugeMetricFamily(f"pulsar_{name}", text, labels=names)
            for label, row in zip(labels, values, strict=True):
                gauge.add_metric(label, row[place])
            yield gauge
        totals = [
            (topic.published.messages, topic.published.bytes, *topic.delivered_total)
            for topic in topics
        ]
        for place, (name, text) in enumerate(_COUNTERS):
            counter = CounterMetricFamily(f"pulsar_{name}", text, labels=names)
            for label, total in zip(labels, totals, strict=True):
                counter.add_metric(label, total[place])
            yield counter
        yield from self._topic_counts(topics)

    def _of_subscriptions(self, topics: Sequence[Topic], now: float) -> Iterator[Metric]:
        names = ("cluster", "namespace", "topic", "subscription")
        gauges = [
            GaugeMetricFamily(f"pulsar_subscription_{name}", text, labels=names)
            for name, text in _SUBSCRIPTION_GAUGES
        ]
        for topic in topics:
            of_topic = (self._cluster, str(topic.name.namespace_name), str(topic.name))
            for subscription in topic.subscriptions.values():
                rates = subscription.delivered.rates(now)
                row = (
                    subscription.cursor.backlog_entries,
                    subscription.unacked,
                    rates.messages,
                    rates.bytes,
                    subscription.redelivered.rates(now).messages,
                )
                for gauge, value in zip(gauges, row, strict=True):
                    gauge.add_metric((*of_topic, subscription.name), value)
        yield from gauges

    def _of_namespaces(
        self, topics: Sequence[Topic], figures: Sequence[_Figures]
    ) -> Iterator[Metric]:
        sums: defaultdict[str, _Figures] = defaultdict(_Figures)
        for topic, each in zip(topics, figures, strict=True):
            sums[str(topic.name.namespace_name)].add(each)
        values = {namespace: total.values() for namespace, total in sums.items()}
        for place, (name, text) in enumerate(_GAUGES):
            gauge = GaugeMetricFamily(f"pulsar_{name}", text, labels=("cluster", "namespace"))
            for namespace, row in values.items():
                gauge.add_metric((self._cluster, namespace), row[place])
            yield gauge
        yield from self._topic_counts(topics)

    def _topic_counts(self, topics: Sequence[Topic]) -> Iterator[Metric]:
        counts: defaultdict[str, int] = defaultdict(int)
        for topic in topics:
            counts[str(topic.name.namespace_name)] += 1
        gauge = GaugeMetricFamily(
            "pulsar_topics_count", "Topics served here.", labels=("cluster", "namespace")
        )
        for namespace, count in counts.items():
            gauge.add_metric((self._cluster, namespace), count)
        yield gauge

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=("cluster",))
        gauge.add_metric((self._cluster,), value)
        return gauge


def _figures_of(topic: Topic, now: float) -> _Figures:
    subscriptions = topic.subscriptions.values()
    rates_in = topic.published.rates(now)
    rates_out = [subscription.delivered.rates(now) for subscription in subscriptions]
    return _Figures(
        subscriptions=len(subscriptions),
        producers=len(topic.producers),
        consumers=sum(len(subscription.consumers) for subscription in subscriptions),
        rate_in=rates_in.messages,
        rate_out=sum(rates.messages for rates in rates_out),
        throughput_in=rates_in.bytes,
        throughput_out=sum(rates.bytes for rates in rates_out),
        storage_size=topic.log.stored_bytes,
        backlog=sum(subscription.cursor.backlog_entries for subscription in subscriptions),
    )


def _shown(topics: Sequence[Topic]) -> int:
    """How many of the topics, the oldest ones first, stay within SERIES_MAX."""
    series = 0
    for count, topic in enumerate(topics):
        series += _TOPIC_SERIES + len(_SUBSCRIPTION_GAUGES) * len(topic.subscriptions)
        if series > SERIES_MAX:
            return count
    return len(topics)


def _latency(histogram: LatencyHistogram, cluster: str) -> Metric:
    found = HistogramMetricFamily(
        "pulsar_broker_publish_latency",
        "Milliseconds until a publish was durable: of the oldest entry of each run of entries that"
        " became durable together.",
        labels=("cluster",),
    )
    buckets, so_far = [], 0
    for bound, count in zip((*BOUNDS_MS, "+Inf"), histogram.counts, strict=True):
        so_far += count
        buckets.append((str(bound), float(so_far)))
    found.add_metric((cluster,), buckets, histogram.sum_ms)
    return found
