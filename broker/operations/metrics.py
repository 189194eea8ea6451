"""Metrics of a broker under Pulsar's names, read from its topics at each scrape.

Topics count their messages and bytes for other purposes, too; only the publish latency is recorded
for these metrics alone. The broker reads the topics in slices, between which the event loop does
other work. So the figures of two topics may be some milliseconds apart. A thread makes the metrics
from the figures. The number of series is limited. Topics that were opened earlier get series of
their own first; topics whose series do not fit count only in the metrics of the broker and in
`pulsar_topics_count`.

When `exposeTopicLevelMetricsInPrometheus` is false, the broker exposes metrics of namespaces
instead of topics, as Pulsar does, but only the gauges. A namespace or a broker has no counters,
because they would go down whenever a topic moves to another broker.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from magnetar.broker.log.latency import BOUNDS_MS
from magnetar.broker.topic.live import NonPersistentTopic
from magnetar.broker.topic.topic import PersistentTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from magnetar.broker.broker import Broker
    from magnetar.broker.log.latency import LatencyHistogram
    from magnetar.broker.topic.protocol import ServedTopic
    from magnetar.broker.topic.subscription import Subscription

SERIES_MAX: Final = 10_000
"""The limit of series of topics and subscriptions together: 450 topics with a subscription each.
Prometheus stores and indexes each series."""

SLICE_S: Final = 0.002
"""The loop's time for one slice: 100 topics with a subscription each, at 20 us."""

# metric, help text
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
    ("storage_backlog_size", "Bytes that are not acknowledged in the largest backlog, estimated."),
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
    ("msg_rate_expired", "Entries expired per second."),
    ("total_msg_expired", "Entries expired since the topic was opened here."),
)
_AGE: Final = (
    "pulsar_storage_backlog_age_seconds",
    "Age of the oldest unacknowledged message of a durable subscription; -1: none. Updated once a"
    " minute.",
)
_TOPIC_SERIES: Final = len(_GAUGES) + len(_COUNTERS) + 1  # backlog age or dropped messages


@dataclass(frozen=True, slots=True)
class _Figures:
    """The figures of one topic at one moment."""

    namespace: str
    topic: str
    gauges: tuple[float, ...]  # in the order of `_GAUGES`
    subscriptions: list[tuple[str, tuple[float, ...]]]  # in the order of `_SUBSCRIPTION_GAUGES`
    backlog_age_s: int
    dropped: int | None  # None: a persistent topic drops nothing
    drops: list[tuple[str, float]]  # name of a subscription, and rate
    totals: tuple[int, ...]  # in the order of `_COUNTERS`
    lost_entries: int


class _Slices:
    """Gives the event loop a turn when the current slice has taken SLICE_S."""

    def __init__(self) -> None:
        self._ends = time.perf_counter() + SLICE_S

    async def maybe_yield(self) -> None:
        if time.perf_counter() >= self._ends:
            await asyncio.sleep(0)
            self._ends = time.perf_counter() + SLICE_S


class BrokerMetrics:
    """Reads the topics of a broker. `now` is the loop's time."""

    def __init__(
        self,
        broker: Broker,
        *,
        cluster: str,
        topic_level: bool,
        connections: Callable[[], int],
        now: Callable[[], float],
        series_max: int = SERIES_MAX,
    ) -> None:
        self._broker = broker
        self._cluster = cluster
        self._topic_level = topic_level
        self._connections = connections
        self._now = now
        self._series_max = series_max

    async def read(self) -> Collector:
        """Read all topics, one slice at a time. A thread may use the returned collector, which has
        copies of all figures."""
        slices = _Slices()
        figures = []
        for topic in self._broker.served:
            await slices.maybe_yield()
            figures.append(await _figures_of(topic, self._now(), slices))
        return _Reading(
            figures,
            self._broker.publish_latency.copy(),
            self._connections(),
            cluster=self._cluster,
            topic_level=self._topic_level,
            series_max=self._series_max,
        )


class _Reading(Collector):
    """The metrics of one reading."""

    def __init__(
        self,
        figures: Sequence[_Figures],
        latency: LatencyHistogram,
        connections: int,
        *,
        cluster: str,
        topic_level: bool,
        series_max: int,
    ) -> None:
        self._figures = figures
        self._latency = latency
        self._connections = connections
        self._cluster = cluster
        self._topic_level = topic_level
        self._series_max = series_max

    def describe(self) -> Iterable[Metric]:
        """Return nothing: otherwise the registry would collect once to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        figures = self._figures
        yield from self._of_broker(figures)
        yield _latency(self._latency, self._cluster)
        yield from self._topic_counts(figures)
        if self._topic_level:
            shown = _shown(figures, self._series_max)
            yield from self._of_topics(shown)
            rows = [
                ((each.namespace, each.topic), (each.backlog_age_s,))
                for each in shown
                if each.dropped is None
            ]
            name, text = _AGE
            labels = ("namespace", "topic")
            yield from self._gauges("pulsar", ((name.removeprefix("pulsar_"), text),), labels, rows)
            yield from self._totals(shown)
            yield from self._of_subscriptions(shown)
            yield from self._drops(shown)
            yield self._gauge(
                "magnetar_metrics_topics_left_out",
                f"Topics without series of their own, beyond {self._series_max} series.",
                len(figures) - len(shown),
            )
        else:
            yield from self._of_namespaces(figures)

    def _of_broker(self, figures: Sequence[_Figures]) -> Iterator[Metric]:
        yield self._gauge(
            "pulsar_active_connections", "Open client connections.", self._connections
        )
        yield self._gauge("pulsar_broker_topics_count", "Topics served here.", len(figures))
        for (name, text), value in zip(_GAUGES, _sums(figures), strict=True):
            yield self._gauge(f"pulsar_broker_{name}", text, value)
        yield self._gauge(
            "magnetar_broker_lost_entries",
            "Entries that subscriptions skipped because all bookies had lost them, since the topics"
            " were opened.",
            sum([each.lost_entries for each in figures]),
        )

    def _of_topics(self, figures: Sequence[_Figures]) -> Iterator[Metric]:
        rows = [((each.namespace, each.topic), each.gauges) for each in figures]
        return self._gauges("pulsar", _GAUGES, ("namespace", "topic"), rows)

    def _of_namespaces(self, figures: Sequence[_Figures]) -> Iterator[Metric]:
        by_namespace: defaultdict[str, list[_Figures]] = defaultdict(list)
        for each in figures:
            by_namespace[each.namespace].append(each)
        rows = [((namespace,), _sums(of)) for namespace, of in by_namespace.items()]
        return self._gauges("pulsar", _GAUGES, ("namespace",), rows)

    def _of_subscriptions(self, figures: Sequence[_Figures]) -> Iterator[Metric]:
        rows = [
            ((each.namespace, each.topic, name), gauges)
            for each in figures
            for name, gauges in each.subscriptions
        ]
        labels = ("namespace", "topic", "subscription")
        return self._gauges("pulsar_subscription", _SUBSCRIPTION_GAUGES, labels, rows)

    def _totals(self, figures: Sequence[_Figures]) -> Iterator[Metric]:
        for place, (name, text) in enumerate(_COUNTERS):
            labels = ("cluster", "namespace", "topic")
            counter = CounterMetricFamily(f"pulsar_{name}", text, labels=labels)
            for each in figures:
                counter.add_metric((self._cluster, each.namespace, each.topic), each.totals[place])
            yield counter

    def _drops(self, figures: Sequence[_Figures]) -> Iterator[Metric]:
        """Make the metrics of the dropped messages of non-persistent topics."""
        labels = ("cluster", "namespace", "topic")
        dropped = CounterMetricFamily(
            "magnetar_dropped_messages",
            "Dropped non-persistent messages: no consumer took them, or too many came at once.",
            labels=labels,
        )
        for each in figures:
            if each.dropped is not None:
                dropped.add_metric((self._cluster, each.namespace, each.topic), each.dropped)
        yield dropped
        rows = [
            ((each.namespace, each.topic, name), (rate,))
            for each in figures
            for name, rate in each.drops
        ]
        names = (("msg_drop_rate", "Messages dropped per second."),)
        subscription = ("namespace", "topic", "subscription")
        yield from self._gauges("pulsar_subscription", names, subscription, rows)

    def _topic_counts(self, figures: Sequence[_Figures]) -> Iterator[Metric]:
        counts = Counter(each.namespace for each in figures)
        rows = [((namespace,), (count,)) for namespace, count in counts.items()]
        names = (("topics_count", "Topics served here."),)
        return self._gauges("pulsar", names, ("namespace",), rows)

    def _gauges(
        self,
        prefix: str,
        names: Sequence[tuple[str, str]],
        labels: tuple[str, ...],
        rows: Sequence[tuple[tuple[str, ...], Sequence[float]]],
    ) -> Iterator[Metric]:
        """Make one metric for each name. A row has the labels of one series and its values for all
        metrics."""
        for place, (name, text) in enumerate(names):
            gauge = GaugeMetricFamily(f"{prefix}_{name}", text, labels=("cluster", *labels))
            for label, values in rows:
                gauge.add_metric((self._cluster, *label), values[place])
            yield gauge

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=("cluster",))
        gauge.add_metric((self._cluster,), value)
        return gauge


async def _figures_of(topic: ServedTopic, now: float, slices: _Slices) -> _Figures:
    if isinstance(topic, NonPersistentTopic):
        return await _live_figures_of(topic, now, slices)
    assert isinstance(topic, PersistentTopic)
    subscriptions: list[tuple[str, tuple[float, ...]]] = []
    every: list[tuple[float, ...]] = []  # also those that share the name of a durable subscription
    consumers = backlog_bytes = 0
    named = topic.subscriptions
    for each in topic.all_subscriptions:
        await slices.maybe_yield()
        figures = _gauges_of(each, now)
        every.append(figures)
        if named.get(each.name) is each:
            subscriptions.append((each.name, figures))
        consumers += len(each.consumers)
        backlog_bytes = max(backlog_bytes, each.cursor.backlog_bytes)
    rates_in = topic.published.rates(now)
    gauges = (
        len(every),
        len(topic.producers),
        consumers,
        rates_in.messages,
        sum([gauges[2] for gauges in every]),
        rates_in.bytes,
        sum([gauges[3] for gauges in every]),
        topic.log.stored_bytes,
        sum([gauges[0] for gauges in every]),
        backlog_bytes,
    )
    return _Figures(
        str(topic.name.namespace_name),
        str(topic.name),
        gauges,
        subscriptions,
        topic.backlog_age_s,
        None,
        [],
        _totals_of(topic),
        topic.log.losses.entries,
    )


async def _live_figures_of(topic: NonPersistentTopic, now: float, slices: _Slices) -> _Figures:
    """Return the figures of a topic whose messages are neither stored nor acknowledged."""
    subscriptions: list[tuple[str, tuple[float, ...]]] = []
    drops, consumers = [], 0
    for name, each in list(topic.subscriptions.items()):
        await slices.maybe_yield()
        rates = each.delivered.rates(now)
        subscriptions.append((name, (0, 0, rates.messages, rates.bytes, 0, 0, 0)))
        drops.append((name, each.dropped.rates(now).messages))
        consumers += len(each.consumers)
    rates_in = topic.published.rates(now)
    gauges = (
        len(subscriptions),
        len(topic.producers),
        consumers,
        rates_in.messages,
        sum([gauges[2] for _, gauges in subscriptions]),
        rates_in.bytes,
        sum([gauges[3] for _, gauges in subscriptions]),
        0,
        0,
        0,
    )
    return _Figures(
        str(topic.name.namespace_name),
        str(topic.name),
        gauges,
        subscriptions,
        -1,
        topic.dropped_total,
        drops,
        _totals_of(topic),
        0,
    )


def _totals_of(topic: ServedTopic) -> tuple[int, ...]:
    return (topic.published.messages, topic.published.bytes, *topic.delivered_total)


def _gauges_of(subscription: Subscription, now: float) -> tuple[float, ...]:
    rates = subscription.delivered.rates(now)
    return (
        subscription.cursor.backlog_entries,
        subscription.unacked,
        rates.messages,
        rates.bytes,
        subscription.redelivered.rates(now).messages,
        subscription.expired_rate(now),
        subscription.expired,
    )


def _sums(figures: Sequence[_Figures]) -> list[float]:
    """Return the sums of all topics, in the order of `_GAUGES`."""
    if not figures:
        return [0.0] * len(_GAUGES)
    return [sum(column) for column in zip(*[each.gauges for each in figures], strict=True)]


def _shown(figures: Sequence[_Figures], series_max: int) -> list[_Figures]:
    """Return the topics whose series fit into `series_max`. Topics that were opened first come
    first. A topic that does not fit is left out; a later topic with fewer series may still fit."""
    shown, left = [], series_max
    for each in figures:
        series = _TOPIC_SERIES + len(_SUBSCRIPTION_GAUGES) * len(each.subscriptions)
        series += len(each.drops)
        if series <= left:
            shown.append(each)
            left -= series
    return shown


def _latency(histogram: LatencyHistogram, cluster: str) -> Metric:
    found = HistogramMetricFamily(
        "pulsar_broker_publish_latency",
        "Milliseconds until a publish was durable, for the oldest entry of each run of entries that"
        " became durable together.",
        labels=("cluster",),
    )
    buckets, so_far = [], 0
    for bound, count in zip((*BOUNDS_MS, "+Inf"), histogram.counts, strict=True):
        so_far += count
        buckets.append((str(bound), float(so_far)))
    found.add_metric((cluster,), buckets, histogram.sum_ms)
    return found
