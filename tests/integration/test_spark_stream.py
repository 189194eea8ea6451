"""Streaming queries against a standalone server."""

from __future__ import annotations

import itertools
import json
import time
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from fakes.services import Service, standalone_process
from prometheus_client import CollectorRegistry
from pyspark.errors import StreamingQueryException

import magnetar
from magnetar.spark.progress import ProgressMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery
    from pyspark.sql.streaming.listener import QueryProgressEvent

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

WAIT_S = 120


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with standalone_process(tmp_path_factory.mktemp("standalone")) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[magnetar.Client]:
    with magnetar.Client(service.grpc_url) as client:
        yield client


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"stream-{next(_numbers)}"


def publish(client: magnetar.Client, topic: str, *values: bytes, batch: int = 1) -> None:
    producer = client.create_producer(
        topic, batching_enabled=batch > 1, batching_max_messages=batch, block_if_queue_full=True
    )
    for value in values:
        producer.send_async(value, lambda *_: None)
    producer.flush()
    producer.close()


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


class Sink:
    """Rows by batch, as foreachBatch got them."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Row]] = {}

    def __call__(self, frame: DataFrame, batch: int) -> None:
        self.batches[batch] = frame.collect()

    @property
    def rows(self) -> list[Row]:
        return [row for batch in sorted(self.batches) for row in self.batches[batch]]

    @property
    def values(self) -> list[bytes]:
        return [bytes(row["value"]) for row in self.rows]


def stream(spark: SparkSession, service: Service, **options: Any) -> DataFrame:
    reader = spark.readStream.format("magnetar").option("service.url", service.grpc_url)
    return reader.options(**options).load()


def has_begun(query: StreamingQuery) -> bool:
    return bool(query.recentProgress) or not query.isActive


def begin(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query, and again if its Python process does not connect within Spark's 10 s, which
    happens on an overloaded machine."""
    for _ in range(5):
        query = writer.start()
        wait_until(partial(has_begun, query))
        if "failed to connect back" not in str(query.exception()):
            return query
    raise AssertionError("Spark's Python process never connected")


def run(writer: DataStreamWriter, checkpoint: Path, sink: Sink) -> StreamingQuery:
    """Read everything that is there now."""
    writer = writer.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    query = begin(writer.trigger(availableNow=True))
    assert query.awaitTermination(WAIT_S)
    assert query.exception() is None
    return query


def truncate(service: Service, topic: str) -> None:
    connection = HTTPConnection(urlsplit(service.admin_urls[0]).netloc, timeout=WAIT_S)
    connection.request("DELETE", f"/admin/v2/persistent/public/default/{topic}/truncate")
    assert connection.getresponse().status == HTTPStatus.NO_CONTENT
    connection.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_available_now_reads_in_limited_batches_and_continues_from_the_checkpoint(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    publish(client, topic, *numbers(0, 100), batch=10)
    frame = stream(spark, service, topic=topic, startingOffsets="earliest", maxRowsPerTrigger="30")
    sink = Sink()
    query = run(frame.writeStream, tmp_path / "checkpoint", sink)
    assert [len(rows) for _, rows in sorted(sink.batches.items())] == [30, 30, 30, 10]
    assert sink.values == numbers(0, 100)
    progress = query.recentProgress[-1]["sources"][0]
    [end] = json.loads(progress["endOffset"])["t"].values()
    assert end[2] == 100
    publish(client, topic, *numbers(100, 105))
    later = Sink()
    run(frame.writeStream, tmp_path / "checkpoint", later)
    assert later.values == numbers(100, 105)
    nothing = Sink()
    run(frame.writeStream, tmp_path / "checkpoint", nothing)
    assert nothing.values == []


def test_a_running_query_reads_new_topics_decodes_and_fails_by_name(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    """The query starts at the latest message. Then a topic appears, a record is bad, and a
    ledger is deleted."""
    publish(client, f"{topic}-a", b'{"id":0}')
    options = {
        "topicsPattern": f"{topic}-[a-z]",
        "discoveryIntervalMs": "100",
        "subscription": "spark",
        "valueFormat": "json",
        "valueSchema": "id long",
        "mode": "permissive",
    }
    frame = stream(spark, service, **options).selectExpr("value.id", "__corrupt", "__topic")
    sink = Sink()
    writer = frame.writeStream.foreachBatch(sink)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = begin(writer)
    try:
        publish(client, f"{topic}-a", b'{"id":1}', b"bad")
        publish(client, f"{topic}-b", b'{"id":2}')
        wait_until(lambda: len(sink.rows) == 3 or not query.isActive)
    finally:
        query.stop()
    assert {(row["id"], bytes(row["__corrupt"] or b"")) for row in sink.rows} == {
        (None, b"bad"),
        (1, b""),
        (2, b""),
    }
    publish(client, f"{topic}-b", b'{"id":3}')
    truncate(service, f"{topic}-b")
    again = begin(writer)
    # The query begins at message 0 if it stopped before Spark committed the last batch.
    with pytest.raises(StreamingQueryException, match=f"{topic}-b: messages [01] to 1 were del"):
        again.awaitTermination(WAIT_S)


class NotingMetrics(ProgressMetrics):
    """Notes what is exported after each batch."""

    def __init__(self, query: str, topic: str) -> None:
        self.registry = CollectorRegistry()
        self.exported: list[tuple[float | None, ...]] = []
        self._labels = {"query": query}
        self._topic = {"source": "0", "topic": f"persistent://public/default/{topic}"}
        super().__init__(self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"magnetar_spark_{name}", self._labels | labels)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        super().onQueryProgress(event)
        behind = (self.value(f"{unit}_behind", **self._topic) for unit in ("rows", "bytes"))
        duration = self.value("batch_duration_seconds")
        self.exported.append((*behind, self.value("input_rows_total"), duration))


def test_progress_of_a_limited_query_is_exported_until_it_ends(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    publish(client, topic, *numbers(0, 30))
    metrics = NotingMetrics(f"{topic}-query", topic)
    frame = stream(spark, service, topic=topic, startingOffsets="earliest", maxRowsPerTrigger="10")
    spark.streams.addListener(metrics)
    try:
        run(frame.writeStream.queryName(f"{topic}-query"), tmp_path / "checkpoint", Sink())
        wait_until(lambda: len(metrics.exported) == 3 and metrics.value("input_rows_total") is None)
    finally:
        spark.streams.removeListener(metrics)
    rows, sizes, read, durations = zip(*metrics.exported, strict=True)
    assert (rows, read) == ((20, 10, 0), (10, 20, 30))
    assert sizes[0] > sizes[1] > sizes[2] == 0
    assert min(durations) > 0
    assert metrics.registry.get_sample_value("magnetar_spark_query_failures_total") == 0
