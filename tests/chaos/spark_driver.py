"""A Spark driver that copies a topic twice, exactly once: without a shuffle and with one.

    python -m chaos.spark_driver URL CHECKPOINTS FINISH

The driver follows the topic until the file FINISH exists. Then it reads the rest and exits with 0.
When its queries run, it creates the file FINISH.<pid>.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magnetar.spark.session import end_java, fork_plainly, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SOURCE = "persistent://public/default/numbers"
SINKS = ("plain", "shuffled")
ROWS = "2000"  # the limit of one batch


def frame_of(spark: SparkSession, url: str, sink: str) -> DataFrame:
    options = {
        "service.url": url,
        "topic": SOURCE,
        "startingOffsets": "earliest",
        "maxRowsPerTrigger": ROWS,
        "targetBytesPerTask": "2000",
        "maxPartitions": "3",
        "subscription": sink,
    }
    frame = spark.readStream.format("magnetar").options(**options).load()
    if sink == "shuffled":
        return frame.repartition(3, "__key")
    return frame


def start(spark: SparkSession, url: str, checkpoints: Path, sink: str, *, ends: bool) -> Any:
    frame = frame_of(spark, url, sink).select("value", "__key")
    writer = frame.writeStream.format("magnetar").queryName(sink)
    writer = writer.options(
        **{"service.url": url, "deliveryGuarantee": "dedup", "sendTimeoutMs": "180000"}
    )
    writer = writer.option("rowOrder", "sorted" if sink == "shuffled" else "arrival")
    writer = writer.option("topic", f"persistent://public/default/{sink}")
    writer = writer.option("checkpointLocation", str(checkpoints / sink))
    return (writer.trigger(availableNow=True) if ends else writer).start()


def main(url: str, checkpoints: Path, finish: Path) -> int:
    parent = os.getppid()
    spark = spark_session("exactly-once", master="local[3,8]", spark_sql_shuffle_partitions="3")
    if not finish.exists():
        running = [start(spark, url, checkpoints, sink, ends=False) for sink in SINKS]
        finish.with_suffix(f".{os.getpid()}").touch()
        while not finish.exists() and all(query.isActive for query in running):
            time.sleep(0.05)
            _end_with(parent)
        for query in running:
            failure = query.exception()
            if failure is not None:
                print(f"query {query.name}: {failure}"[:3_000], file=sys.stderr)
                return 1
            query.stop()
    ending = [start(spark, url, checkpoints, sink, ends=True) for sink in SINKS]
    while not all(query.awaitTermination(1) for query in ending):
        _end_with(parent)
    return 0


def _end_with(parent: int) -> None:
    """End this process when its parent process is killed."""
    if os.getppid() != parent:
        end_java()
        os._exit(1)


if __name__ == "__main__":
    fork_plainly()
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
