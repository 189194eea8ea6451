"""Measures Magnetar's Spark source and sink beside Spark's own, with the same rows (python -m
benchmarks.spark_ceilings).

A local cluster (ZooKeeper, three bookies, a broker) stores JSON objects of 100 bytes at 3/3/2. One
Spark session (local[2]) reads and writes them. Magnetar's source and sink, Spark's own formats, and
Python data sources that only hand rows over, take turns. All processes share the machine: compare
ratios of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

import magnetar
from benchmarks.processes import alone
from magnetar.local_cluster import LocalCluster
from magnetar.spark.session import spark_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

TOPIC = "rows"
SCHEMA = "id bigint, name string, price double"
TASKS = 16
BATCH_ROWS = 32_768
LATENCY_ROWS, LATENCY_PAUSE_S = 20, 0.4


def payload(number: int) -> bytes:
    text = json.dumps({"id": number, "price": number / 4, "name": ""})
    return text.replace('"name": ""', f'"name": "{"x" * (100 - len(text))}"').encode()


class Ceiling(DataSource):
    """Hands over `rows` rows (an option) from memory: as prebuilt Arrow batches, or as tuples."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> str:
        return "value binary, __index bigint"

    def reader(self, schema: StructType) -> DataSourceReader:
        return CeilingReader(int(self.options["rows"]), self.options["as"] == "tuples")

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return CeilingWriter()


class CeilingReader(DataSourceReader):
    def __init__(self, rows: int, as_tuples: bool) -> None:
        self._rows = rows // TASKS
        self._as_tuples = as_tuples

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(TASKS)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        value = b"x" * 100
        if self._as_tuples:
            for number in range(self._rows):
                yield value, number
            return
        values = pa.array([value] * BATCH_ROWS, pa.binary())
        batch = pa.record_batch(
            {"value": values, "__index": pa.array(range(BATCH_ROWS), pa.int64())}
        )
        left = self._rows
        while left:
            part = min(left, BATCH_ROWS)
            yield batch.slice(0, part)
            left -= part


class CeilingWriter(DataSourceArrowWriter):
    """Takes all rows and keeps none."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="magnetar-bench-") as folder:
        asyncio.run(measure(Path(folder), options.rows // TASKS * TASKS, options.turns))


async def measure(folder: Path, rows: int, turns: int) -> None:
    async with LocalCluster(folder / "cluster", zookeepers=1, bookies=3, brokers=1) as cluster:
        await asyncio.to_thread(alone, fill, cluster.service_url, rows)
        await asyncio.to_thread(prepare, cluster.admin_url, folder, rows)
        await asyncio.to_thread(report, cluster.service_url, folder, rows, turns)


def fill(url: str, rows: int) -> None:
    with magnetar.Client(url) as client:
        for topic in (TOPIC, "latency"):
            client.subscribe(topic, "keeps").close()
        producer = client.create_producer(TOPIC, block_if_queue_full=True)
        for number in range(rows):
            producer.send_async(payload(number), _refuse_failure)
        producer.flush()


def prepare(admin_url: str, folder: Path, rows: int) -> None:
    """Write the same rows as files, and create a namespace with deduplication."""
    path = f"{admin_url}/admin/v2/namespaces/public/exact"
    httpx.put(path, timeout=60).raise_for_status()
    httpx.post(f"{path}/deduplication", json=True, timeout=60).raise_for_status()
    for kind in ("json", "parquet"):
        (folder / kind).mkdir()
    for task in range(TASKS):
        part = range(task * rows // TASKS, (task + 1) * rows // TASKS)
        values = [payload(number) for number in part]
        (folder / "json" / f"{task}.json").write_bytes(b"\n".join(values))
        table = pa.table({"value": pa.array(values, pa.binary()), "__index": pa.array(part)})
        pq.write_table(table, folder / "parquet" / f"{task}.parquet")


def report(url: str, folder: Path, rows: int, turns: int) -> None:
    spark = spark_session("ceilings", master="local[2]")
    spark.dataSource.register(Ceiling)
    try:
        rates: dict[str, list[float]] = {}
        cases = reads(spark, url, folder, rows) | writes(spark, url, folder, rows)
        for turn in range(-1, turns):  # the first turn warms Spark, its workers and the caches
            for name, case in cases.items():
                began_s = time.perf_counter()
                case()
                if turn >= 0:
                    rates.setdefault(name, []).append(rows / (time.perf_counter() - began_s))
        every = {name: statistics.median(found) for name, found in rates.items()}
        for name, rate in every.items():
            print(f"{name:<44} {rate:>10,.0f} rows/s", flush=True)
        for ours, theirs in (
            ("read bytes", "ceiling: prebuilt Arrow batches"),
            ("read bytes", "ceiling: tuples"),
            ("read bytes", "Spark's Parquet source"),
            ("read JSON", "Spark's JSON-lines source"),
            ("sink, dedup, 3/3/2", "ceiling: Arrow sink that keeps nothing"),
        ):
            print(f"{ours} to {theirs}: {every[ours] / every[theirs]:.2f}")
        for name, frame, fed in (
            ("rate source", spark.readStream.format("rate").option("rowsPerSecond", 2), None),
            ("magnetar", source(spark.readStream, url, topic="latency"), url),
        ):
            latency_ms = micro_batch_ms(frame.load(), folder / name, fed)
            print(f"micro-batch of few rows, {name}: {latency_ms:.0f} ms", flush=True)
    finally:
        spark.stop()


def source(reader: Any, url: str, *, topic: str = TOPIC, **options: str) -> Any:
    return reader.format("magnetar").options(**{"service.url": url, "topic": topic}, **options)


def reads(spark: SparkSession, url: str, folder: Path, rows: int) -> dict[str, Callable[[], None]]:
    columns = "value binary, __index bigint"
    ceiling = spark.read.format("ceiling").option("rows", rows)
    as_json = {"valueFormat": "json", "valueSchema": SCHEMA}
    struct = f"value struct<{SCHEMA.replace(' ', ':').replace(',:', ',')}>"
    frames: dict[str, Callable[[], DataFrame]] = {
        "read bytes": lambda: source(spark.read, url).schema(columns).load(),
        "read JSON": lambda: source(spark.read, url, **as_json).schema(struct).load(),
        "ceiling: prebuilt Arrow batches": lambda: ceiling.option("as", "arrow").load(),
        "ceiling: tuples": lambda: ceiling.option("as", "tuples").load(),
        "Spark's Parquet source": lambda: spark.read.parquet(str(folder / "parquet")),
        "Spark's JSON-lines source": lambda: spark.read.schema(SCHEMA).json(str(folder / "json")),
    }
    return {name: partial(_to_nothing, make) for name, make in frames.items()}


def writes(spark: SparkSession, url: str, folder: Path, rows: int) -> dict[str, Callable[[], None]]:
    frame = spark.read.parquet(str(folder / "parquet")).select("value")
    sink = {"service.url": url, "deliveryGuarantee": "dedup"}
    topic = "persistent://public/exact/written"

    def write() -> None:
        frame.write.format("magnetar").mode("append").options(**sink, topic=topic).save()

    def keep_nothing() -> None:
        frame.write.format("ceiling").mode("append").save()

    return {"sink, dedup, 3/3/2": write, "ceiling: Arrow sink that keeps nothing": keep_nothing}


def micro_batch_ms(frame: DataFrame, folder: Path, url: str | None) -> float:
    """Return the median duration of a micro-batch with rows. `url`: the service to which this
    function publishes the rows; None: the source makes rows itself."""
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(folder))
    query = writer.start()
    if url is not None:
        query.processAllAvailable()
        with magnetar.Client(url) as client:
            producer = client.create_producer("latency", batching_enabled=False)
            for _ in range(LATENCY_ROWS):
                producer.send(b"row")
                time.sleep(LATENCY_PAUSE_S)
    else:
        time.sleep(LATENCY_ROWS * LATENCY_PAUSE_S)
    durations: list[float] = [
        progress["durationMs"]["triggerExecution"]
        for progress in query.recentProgress
        if progress["numInputRows"]
    ]
    query.stop()
    return statistics.median(durations[1:])


def _to_nothing(make: Callable[[], DataFrame]) -> None:
    make().write.format("noop").mode("overwrite").save()


def _refuse_failure(result: magnetar.Result, message_id: object) -> None:
    assert result is magnetar.Result.Ok, f"a send failed: {result}"


if __name__ == "__main__":
    main()
