"""Writes the newest message of each key of a topic into another topic.

A key whose newest message has no value, or an empty one, is left out: such a message deletes its
key. Messages without a key are left out, too. The messages keep their keys, properties and event
times, and their order within a task.

The newest message of a key is the one with the highest index of its partition. A key can be in
several partitions, for example if partitions were added. Among these, the publish time decides.

The job reads only the messages that exist at its start. With the guarantee dedup, the job's id is
made of the topics, the first and last messages, and the first ledger. So a job that was killed
and is run again continues, if no message was published or deleted meanwhile. Otherwise the job
begins again. In both cases, the newest message of a key comes last. If the topic was deleted and
created again, its ledgers differ, so the job begins again, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

from magnetar.spark.pipelines.reading import (
    TASKS,
    extents,
    job_id,
    messages,
    own_session,
    within,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

KEPT: Final = ("value", "__key", "__eventTime", "__messageProperties")


@dataclass(frozen=True, slots=True)
class Compacted:
    """The report of a compaction."""

    messages: int  # the number of the topic's messages
    without_key: int
    keys: int
    deleted: int  # keys whose newest message has no value
    job: str

    @property
    def written(self) -> int:
        return self.keys - self.deleted


def compact(
    spark: SparkSession,
    *,
    connection: Mapping[str, str],
    topic: str,
    into: str,
    guarantee: str = "dedup",
) -> Compacted:
    """Write the newest messages into the topic `into`. Raises Spark's exceptions, which wrap the
    errors of source and sink."""
    spark = own_session(spark)
    stored = extents(spark, connection, [topic])
    job = job_id("compact", topic, into, *sorted(stored.items()))
    if not stored:
        return Compacted(0, 0, 0, 0, job)
    source = within(messages(spark, connection, [topic]), stored)
    newest = newest_of(source).cache()
    try:
        counts = source.agg(F.count("*"), F.count(F.lit(1)) - F.count("__key")).first()
        assert counts is not None
        keys = newest.count()
        live = newest.where("length(value) > 0")
        kept = live.count()
        placed = live.repartition(TASKS, "__key").sortWithinPartitions("__partition", "__index")
        write(placed.select(*KEPT), connection, into, guarantee=guarantee, job=job)
    finally:
        newest.unpersist()
    return Compacted(counts[0], counts[1], keys, keys - kept, job)


def newest_of(source: DataFrame) -> DataFrame:
    """The newest message of each key. Clocks of producers differ, so within a partition the publish
    time does not count."""
    row = F.struct(*source.columns)
    of_partition = (
        source.where("__key is not null")
        .groupBy("__key", "__partition")
        .agg(F.max_by(row, "__index").alias("row"))
    )
    order = F.struct("row.__publishTime", "row.__partition")
    return of_partition.groupBy("__key").agg(F.max_by("row", order).alias("row")).select("row.*")
