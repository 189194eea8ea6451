"""The metrics in Prometheus for a query's progress."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryTerminatedEvent,
    StreamingQueryProgress,
)

from magnetar.spark.offsets import Offsets, Place
from magnetar.spark.progress import OTHERS, TOPICS_MAX, ProgressMetrics

A, B = "persistent://t/n/a", "persistent://t/n/b"
QUERY = uuid.UUID(int=1)
RUN = uuid.UUID(int=2)


def source(end: Any, latest: Any) -> dict[str, Any]:
    return {
        "description": "",
        "startOffset": None,
        "endOffset": end,
        "latestOffset": latest,
        "numInputRows": 5,
        "inputRowsPerSecond": 10.0,
        "processedRowsPerSecond": 20.0,
    }


def event(
    *sources: dict[str, Any], name: str | None = "sales", run: uuid.UUID = RUN
) -> QueryProgressEvent:
    progress = {
        "id": str(QUERY),
        "runId": str(run),
        "name": name,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "batchId": 3,
        "batchDuration": 250,
        "durationMs": {},
        "stateOperators": [],
        "sources": list(sources),
        "sink": {"description": "", "numOutputRows": 5},
        "numInputRows": 5,
        "inputRowsPerSecond": 10.0,
        "processedRowsPerSecond": 20.0,
        "observedMetrics": {},
    }
    return QueryProgressEvent(StreamingQueryProgress.fromJson(progress))


def at(places: dict[str, Place]) -> dict[str, Any]:
    return Offsets(places).to_json()


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.listener = ProgressMetrics(self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"magnetar_spark_{name}", labels)

    def behind(self, topic: str, *, number: int = 0) -> tuple[float | None, float | None]:
        labels = {"query": "sales", "source": str(number), "topic": topic}
        return self.value("rows_behind", **labels), self.value("bytes_behind", **labels)


def test_rows_and_bytes_behind_are_the_differences_of_offsets() -> None:
    metrics = Metrics()
    end = at({A: Place(1, 2, 10, 100), B: Place(1, 0, 7, 70)})
    latest = at({A: Place(3, 0, 15, 180), B: Place(1, 0, 7, 70)})
    metrics.listener.onQueryProgress(event(source(end, latest)))
    metrics.listener.onQueryProgress(event(source(json.dumps(end), json.dumps(latest))))
    assert metrics.behind(A) == (5, 80)
    assert metrics.behind(B) == (0, 0)
    assert metrics.value("batch_duration_seconds", query="sales") == 0.25
    assert metrics.value("input_rows_per_second", query="sales") == 10
    assert metrics.value("processed_rows_per_second", query="sales") == 20
    assert metrics.value("input_rows_total", query="sales") == 10


def test_registry_that_has_the_metrics_refuses_a_second_listener() -> None:
    registry = CollectorRegistry()
    ProgressMetrics(registry)
    with pytest.raises(ValueError, match="magnetar_spark_rows_behind"):
        ProgressMetrics(registry)


def test_query_without_name_is_exported_by_its_id() -> None:
    metrics = Metrics()
    metrics.listener.onQueryProgress(event(name=None))
    assert metrics.value("input_rows_total", query=str(QUERY)) == 5


@pytest.mark.parametrize(
    "offset",
    [None, "null", "5", "text", '{"logOffset":0}', {"v": 1, "start": "latest"}, {"v": 2, "t": {}}],
)
def test_unknown_ends_and_other_sources_are_not_exported_as_zero(offset: Any) -> None:
    metrics = Metrics()
    ours = at({A: Place(1, 2, 10, 100)})
    sources = source(ours, offset), source(offset, ours), source(ours, ours)
    metrics.listener.onQueryProgress(event(*sources))
    assert metrics.behind(A, number=0) == (None, None)
    assert metrics.behind(A, number=1) == (None, None)
    assert metrics.behind(A, number=2) == (0, 0)


def test_topic_created_again_is_not_behind_by_a_negative_number() -> None:
    metrics = Metrics()
    offsets = at({A: Place(1, 2, 10, 100)}), at({A: Place(9, 0, 3, 30)})
    metrics.listener.onQueryProgress(event(source(*offsets)))
    assert metrics.behind(A) == (0, 0)


def test_idle_query_keeps_its_lag_and_has_no_rate() -> None:
    metrics = Metrics()
    offsets = at({A: Place(1, 2, 10, 100)}), at({A: Place(1, 3, 11, 110)})
    idle = QueryIdleEvent(QUERY, RUN, "2026-01-01T00:00:00.000Z")
    metrics.listener.onQueryIdle(idle)
    metrics.listener.onQueryProgress(event(source(*offsets)))
    metrics.listener.onQueryIdle(idle)
    assert metrics.behind(A) == (1, 10)
    assert metrics.value("input_rows_per_second", query="sales") == 0
    assert metrics.value("processed_rows_per_second", query="sales") == 0


def test_terminated_query_is_forgotten_and_its_error_counted() -> None:
    metrics = Metrics()
    later = uuid.UUID(int=3)
    metrics.listener.onQueryProgress(event())
    metrics.listener.onQueryProgress(event(run=later))
    metrics.listener.onQueryTerminated(QueryTerminatedEvent(QUERY, RUN, "DataLost", None))
    assert metrics.value("input_rows_total", query="sales") == 5, "the later run continues"
    assert metrics.value("query_failures_total") == 1
    metrics.listener.onQueryTerminated(QueryTerminatedEvent(QUERY, later, None, None))
    assert metrics.value("input_rows_total", query="sales") is None
    assert metrics.value("query_failures_total") == 1


def test_topics_over_the_limit_are_summed_up() -> None:
    metrics = Metrics()
    names = [f"persistent://t/n/{number}" for number in range(TOPICS_MAX + 2)]
    end = at({name: Place(1, 0, 0, 0) for name in names})
    latest = at({name: Place(1, 9, count, 10 * count) for count, name in enumerate(names, 1)})
    metrics.listener.onQueryProgress(event(source(end, latest)))
    assert metrics.behind(names[-1]) == (TOPICS_MAX + 2, 10 * (TOPICS_MAX + 2))
    assert metrics.behind(names[2]) == (3, 30)
    assert metrics.behind(names[1]) == (None, None)
    assert metrics.behind(OTHERS) == (3, 30)
