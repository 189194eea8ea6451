"""Exports the progress of streaming queries to Prometheus, with a listener of Spark.

    from prometheus_client import REGISTRY, start_http_server

    spark.streams.addListener(ProgressMetrics(REGISTRY))
    start_http_server(9465)

The listener sees all queries of its session. For sources of the format "magnetar", it also
exports the rows and bytes that a query has not read yet. These are differences of offsets, so the
listener asks no broker. Spark reports the progress after each batch, and every ten seconds while a
query is idle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pyspark.sql.streaming.listener import StreamingQueryListener

from magnetar.spark.errors import InvalidOffsets
from magnetar.spark.offsets import Offsets, parse_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        SourceProgress,
        StreamingQueryProgress,
    )

TOPICS_MAX: Final = 1_000
"""At most this many topics of a source have a series: those furthest behind. The series OTHERS is
the sum of the other topics. A thousand topics are about 200 kB a scrape."""
OTHERS: Final = "others"


@dataclass(frozen=True, slots=True)
class Behind:
    """The part of a topic that a query has not read yet."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Query:
    """The exported figures of one running query."""

    name: str
    rows: int  # read since the listener saw the query
    input_rows_per_s: float
    processed_rows_per_s: float
    batch_s: float
    behind: tuple[dict[str, Behind], ...]  # one for each source, in the order of the query's plan


class ProgressMetrics(StreamingQueryListener, Collector):
    """A listener for `spark.streams.addListener`, in a classic or in a Connect session."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics. Raises ValueError if the registry has them already."""
        # Written by Spark's listener thread, read by scrapes. A query is replaced as a whole.
        self._queries: dict[str, _Query] = {}  # keyed by run id
        self._failures = 0
        registry.register(self)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: the query has not reported progress yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Keep the progress of a batch."""
        progress = event.progress
        run = str(progress.runId)
        before = self._queries.get(run)
        self._queries[run] = _query_of(progress, before.rows if before else 0)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Set the rates to 0. The query is as far behind as after its last batch."""
        run = str(event.runId)
        if run in self._queries:
            self._queries[run] = replace(
                self._queries[run], input_rows_per_s=0.0, processed_rows_per_s=0.0
            )

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget the query."""
        self._queries.pop(str(event.runId), None)
        if event.exception is not None:
            self._failures += 1

    def describe(self) -> Iterator[Metric]:
        """The metrics without values. The registry refuses a second collector with these names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """The metrics of the queries that run."""
        # When a query is started again, its old run may end after the new run has begun. Of two
        # runs with one name, the newer one counts.
        queries = {query.name: query for query in list(self._queries.values())}.values()
        by_topic = ["query", "source", "topic"]
        rows = GaugeMetricFamily(
            "magnetar_spark_rows_behind", "Rows that a query has not read yet.", labels=by_topic
        )
        size = GaugeMetricFamily(
            "magnetar_spark_bytes_behind",
            "Stored bytes that a query has not read yet (approximate).",
            labels=by_topic,
        )
        batch = GaugeMetricFamily(
            "magnetar_spark_batch_duration_seconds", "Duration of the last batch.", labels=["query"]
        )
        rate = GaugeMetricFamily(
            "magnetar_spark_input_rows_per_second",
            "Rows that arrived per second, at the last batch; 0 while the query is idle.",
            labels=["query"],
        )
        processed = GaugeMetricFamily(
            "magnetar_spark_processed_rows_per_second",
            "Rows that the last batch processed per second; 0 while the query is idle.",
            labels=["query"],
        )
        read = CounterMetricFamily(
            "magnetar_spark_input_rows", "Rows read from all sources.", labels=["query"]
        )
        for query in queries:
            batch.add_metric([query.name], query.batch_s)
            rate.add_metric([query.name], query.input_rows_per_s)
            processed.add_metric([query.name], query.processed_rows_per_s)
            read.add_metric([query.name], query.rows)
            for number, topics in enumerate(query.behind):
                for topic, behind in topics.items():
                    rows.add_metric([query.name, str(number), topic], behind.rows)
                    size.add_metric([query.name, str(number), topic], behind.bytes)
        yield from (rows, size, batch, rate, processed, read)
        yield CounterMetricFamily(
            "magnetar_spark_query_failures", "Queries that ended with an error.", self._failures
        )


def _query_of(progress: StreamingQueryProgress, rows_before: int) -> _Query:
    return _Query(
        name=progress.name or str(progress.id),
        rows=rows_before + progress.numInputRows,
        input_rows_per_s=progress.inputRowsPerSecond,
        processed_rows_per_s=progress.processedRowsPerSecond,
        batch_s=progress.batchDuration / 1_000,
        behind=tuple(_limited(_behind(source)) for source in progress.sources),
    )


def _behind(source: SourceProgress) -> dict[str, Behind]:
    """The part that the query has not read yet, keyed by topic. Empty: the source is of another
    format, or the ends of its topics are unknown."""
    end, latest = _offsets(source.endOffset), _offsets(source.latestOffset)
    if end is None or latest is None:
        return {}
    behind = {}
    for topic, place in latest.places.items():
        if topic in end.places:
            at = end.places[topic]
            # A topic that was created again may have fewer messages than the query has read.
            rows, size = place.index - at.index, place.bytes - at.bytes
            behind[topic] = Behind(max(rows, 0), max(size, 0))
    return behind


def _offsets(text: str | None) -> Offsets | None:
    """Parse offsets. None: the offsets are symbolic, unknown, or of another source."""
    try:
        parsed = json.loads(text or "null")
        return parse_offsets(parsed) if isinstance(parsed, dict) else None
    except (ValueError, InvalidOffsets):
        return None


def _limited(topics: dict[str, Behind]) -> dict[str, Behind]:
    if len(topics) <= TOPICS_MAX:
        return topics
    first = dict(nlargest(TOPICS_MAX, topics.items(), key=lambda it: it[1].rows))
    rest = [behind for topic, behind in topics.items() if topic not in first]
    first[OTHERS] = Behind(sum(it.rows for it in rest), sum(it.bytes for it in rest))
    return first
