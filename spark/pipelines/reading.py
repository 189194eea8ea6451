"""Shared parts of the pipelines: a session with fixed settings, and frames of topics."""

from __future__ import annotations

import hashlib
from functools import reduce
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.errors import StreamingQueryException
from pyspark.sql import Column
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

START_ATTEMPTS: Final = 5
WORKER_LATE: Final = "Python worker failed to connect back"  # Spark waits 10 s for a worker

TASKS: Final = 4
"""The number of tasks that write. A job that is run again must divide its rows in the same way, so
the number is fixed."""

_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    # All Parquet readers support this type; Spark's default is INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Otherwise the division of rows would depend on sizes and on the number of cores.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": str(TASKS),
    "spark.sql.files.minPartitionNum": str(TASKS),
}


def own_session(spark: SparkSession) -> SparkSession:
    """Return another session of the same Spark, with the settings that the pipelines need."""
    ours = spark.newSession()
    for name, value in _SETTINGS.items():
        ours.conf.set(name, value)
    return ours


def messages(
    spark: SparkSession,
    connection: Mapping[str, str],
    topics: Sequence[str],
    schema: str | None = None,
) -> DataFrame:
    """Return the messages that are in the topics when Spark plans the frame."""
    reader = spark.read.format("magnetar").options(**connection)
    reader = reader.option("topics", ",".join(topics))
    return (reader if schema is None else reader.schema(schema)).load()


class Extent(NamedTuple):
    """The messages that a topic or partition has at a moment."""

    first: int  # the index of the first message
    last: int
    ledger: int  # of the first message; another one after the topic was created again


def extents(
    spark: SparkSession, connection: Mapping[str, str], topics: Sequence[str]
) -> dict[tuple[str, int], Extent]:
    """Return the messages of each topic and partition, by (topic, partition).

    An empty topic is left out.
    """
    columns = "__topic string, __partition int, __messageId binary, __index bigint"
    found = messages(spark, connection, topics, columns).groupBy("__topic", "__partition")
    first_id = F.min_by("__messageId", "__index").alias("__messageId")
    ends = found.agg(F.min("__index").alias("first"), F.max("__index").alias("last"), first_id)
    rows = ends.select("__topic", "__partition", "first", "last", ledger_column()).collect()
    return {(row[0], row[1]): Extent(*row[2:]) for row in rows}


def within(frame: DataFrame, extents: dict[tuple[str, int], Extent]) -> DataFrame:
    """Return the messages of these extents. A frame that Spark plans again has the same rows."""
    kept: Column = F.lit(False)
    for (topic, _), extent in extents.items():
        is_in = F.col("__index").between(extent.first, extent.last)
        kept = kept | ((F.col("__topic") == topic) & is_in)
    return frame.where(kept)


def key_column() -> Column:
    """Return the key as text, or in base64 if it is not UTF-8. Null: no key."""
    return F.expr("if(is_valid_utf8(cast(__key as string)), cast(__key as string), base64(__key))")


def ledger_column() -> Column:
    """Return the ledger of a message. A message id begins with a tag byte, then has the ledger as a
    varint: seven bits in each byte, the lowest ones first. The last byte is below 128.

    The expression has no loop over the bytes, so Spark compiles it to Java.
    """
    parts = [
        F.conv(F.rpad(F.hex(F.substring("__messageId", at, 5)), 10, "0"), 16, 10).cast("bigint")
        for at in (2, 7)
    ]
    read = [
        F.shiftright(part, 8 * at).bitwiseAND(0xFF) for part in parts for at in reversed(range(5))
    ]
    ledger = F.lit(None).cast("bigint")
    for last in reversed(range(9)):  # 63 bits
        bits = [F.shiftleft(read[at].bitwiseAND(0x7F), 7 * at) for at in range(last + 1)]
        ledger = F.when(read[last] < 0x80, reduce(Column.bitwiseOR, bits)).otherwise(ledger)
    return ledger


def job_id(job: str, *parts: object) -> str:
    """Return an id of a job, the same for the same parts."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
    return f"{job}-{digest[:24]}"


def run_to_end(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Run a query that ends by itself. Raises Spark's exceptions.

    On a busy machine, the Python process of a streaming source can miss Spark's fixed limit for its
    start. The query's checkpoint makes it safe to begin again.
    """
    attempt = 1
    while True:
        query = start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            if attempt == START_ATTEMPTS or WORKER_LATE not in str(error):
                raise
            attempt += 1
        else:
            return query


def write(
    frame: DataFrame, connection: Mapping[str, str], topic: str, *, guarantee: str, job: str
) -> None:
    """Write messages to a topic. With the guarantee dedup, a job that is run again with the same id
    continues where it stopped."""
    writer = frame.write.format("magnetar").mode("append").options(**connection)
    writer = writer.option("topic", topic).option("deliveryGuarantee", guarantee)
    (writer.option("jobId", job) if guarantee == "dedup" else writer).save()
