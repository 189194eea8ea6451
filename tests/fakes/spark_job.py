"""A program of a Spark user: reads the topic "in" as a DataFrame and as a stream, and writes both
elsewhere. In a process of its own, because a process has one kind of Spark session.

    python spark_job.py cluster|connect URL DIRECTORY

Prints the facts of the session as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from prometheus_client import CollectorRegistry

from magnetar.spark.progress import ProgressMetrics
from magnetar.spark.session import environment_for, fork_plainly, spark_session

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession

WAIT_S = 300


def session_of(kind: str) -> SparkSession:
    if kind == "cluster":
        # Spark's standalone master and two workers, each with an executor: five processes of Java.
        cluster = "local-cluster[2,1,1024]"
        return spark_session("cluster", master=cluster, spark_executor_memory="512m")
    from pyspark.sql import SparkSession

    for variable, value in environment_for("local[2]").items():
        os.environ.setdefault(variable, value)
    return SparkSession.builder.remote("local[2]").getOrCreate()


def where(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The command line of the Java process that has started this Python process."""
    daemon = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(") ")[2].split()
    command = Path(f"/proc/{daemon[1]}/cmdline").read_text()
    for _ in batches:
        yield pa.RecordBatch.from_pydict({"command": [command]})


def main(kind: str, url: str, directory: str) -> dict[str, Any]:
    spark = session_of(kind)
    given = {"service.url": url, "topic": "in", "startingOffsets": "earliest"}
    frame = spark.read.format("magnetar").options(**given, targetBytesPerTask="500").load()
    commands = [row["command"] for row in frame.mapInArrow(where, "command string").collect()]
    written = {"service.url": url, "deliveryGuarantee": "dedup"}
    writer = frame.select("value").write.format("magnetar").mode("append").options(**written)
    writer.option("topic", "persistent://public/exact/batch").save()

    registry = CollectorRegistry()
    metrics = ProgressMetrics(registry)
    spark.streams.addListener(metrics)
    stream = spark.readStream.format("magnetar").options(**given).load().select("value")
    out = stream.writeStream.format("magnetar").options(**written)
    out = out.option("topic", "persistent://public/exact/stream")
    query = out.option("checkpointLocation", directory).queryName("copy").start()
    give_up_s = time.monotonic() + WAIT_S
    behind = None
    while behind != 0 and query.isActive and time.monotonic() < give_up_s:
        time.sleep(0.1)
        labels = {"query": "copy", "source": "0", "topic": "persistent://public/default/in"}
        behind = registry.get_sample_value("magnetar_spark_rows_behind", labels)
    failure = query.exception()
    query.stop()
    spark.streams.removeListener(metrics)
    facts = {
        "session": type(spark).__module__,
        "rows": frame.count(),
        "tasks": len(commands),
        "tasks_in_executors": sum("CoarseGrainedExecutorBackend" in it for it in commands),
        "behind": behind,
        "failure": str(failure) if failure else None,
    }
    spark.stop()
    return facts


if __name__ == "__main__":
    fork_plainly()
    print(json.dumps(main(*sys.argv[1:])))
