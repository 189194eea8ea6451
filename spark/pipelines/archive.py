"""A topic as partitioned Parquet, and the proof that it is all there.

The archive is written beside its place, compared with the topic, and moved into its place only if
the two are equal, and on disk: at `path` there is a whole, verified archive or what was there
before (target.py says how).

What is archived ends with the last message that was there at the start, so that a topic may be
written to meanwhile. The comparison reads topic and files anew, and per partition of the archive
sets side by side the number of messages and a digest over each row: its message id and everything
else. The digest does not depend on order: the sum and the exclusive or of 64-bit hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

from pyspark.sql import functions as F

from magnetar.spark.pipelines.target import check_target, put_in_place, staged

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession


class PartitionBy(StrEnum):
    """What the directories of an archive stand for. Dates are UTC."""

    PUBLISH_DATE = "publish-date"
    PUBLISH_HOUR = "publish-hour"
    EVENT_DATE = "event-date"
    KEY = "key"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Compared:
    """One partition of the archive."""

    partition: str  # "publish_date=2013-01-01"; empty when there are no partitions
    in_topic: int  # messages
    in_archive: int
    equal: bool  # and so are ids, values and all the rest


def archive(
    spark: SparkSession,
    *,
    service_url: str,
    topic: str,
    path: Path,
    partition_by: PartitionBy = PartitionBy.PUBLISH_DATE,
    overwrite: bool = False,
) -> list[Compared]:
    """Write the archive; its partitions in order. It is in its place if all of them are equal, and
    otherwise nothing has changed.

    Raises TargetNotEmpty, TargetForeign, TargetBusy, OSError, and what Spark makes of the source's
    errors.
    """
    spark = _in_utc(spark)
    with staged(path) as new:
        check_target(path, overwrite=overwrite)
        messages = _messages_until_now(spark, service_url, topic)
        columns = _partition_columns(partition_by)
        placed = messages.withColumns(columns) if columns else messages
        placed.write.partitionBy(*columns).parquet(str(new))
        # With the topic's schema: an archive without rows has none of its own, and the names of
        # directories are texts ("key=007").
        archived = spark.read.schema(placed.schema).parquet(str(new))
        compared = compare(placed, archived, list(columns))
        if all(part.equal for part in compared):
            put_in_place(new, path)
        return compared


def compare(topic: DataFrame, archived: DataFrame, columns: list[str]) -> list[Compared]:
    """The same messages, from the topic and from the archive, by these columns."""
    ours, theirs = ({row[0]: row[1:] for row in _digests(f, columns)} for f in (topic, archived))
    nothing = (0, None, None)
    return [
        Compared(
            partition,
            ours.get(partition, nothing)[0],
            theirs.get(partition, nothing)[0],
            ours.get(partition) == theirs.get(partition),
        )
        for partition in sorted(ours.keys() | theirs.keys())
    ]


def _in_utc(spark: SparkSession) -> SparkSession:
    """A session of our own on the same Spark: dates are the session's, whatever it was told."""
    ours = spark.newSession()
    ours.conf.set("spark.sql.session.timeZone", "UTC")
    # What every Parquet reader understands; Spark's default is INT96.
    ours.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    return ours


def _messages_until_now(spark: SparkSession, service_url: str, topic: str) -> DataFrame:
    """The messages that are there now, even if there are more when they are read."""
    reader = spark.read.format("magnetar").option("service.url", service_url).option("topic", topic)
    # Without payloads. Nothing makes Spark plan a DataFrame only once, so the end is a value.
    [(last,)] = reader.schema("__index bigint").load().agg(F.max("__index")).collect()
    messages = spark.read.format("magnetar").option("service.url", service_url)
    return messages.option("topic", topic).load().where(F.col("__index") <= F.lit(last))


# Mechanics


def _partition_columns(partition_by: PartitionBy) -> dict[str, Column]:
    match partition_by:
        case PartitionBy.PUBLISH_DATE:
            return {"publish_date": F.to_date("__publishTime")}
        case PartitionBy.PUBLISH_HOUR:
            hour = F.hour("__publishTime")
            return {"publish_date": F.to_date("__publishTime"), "publish_hour": hour}
        case PartitionBy.EVENT_DATE:
            return {"event_date": F.to_date("__eventTime")}
        case PartitionBy.KEY:
            # Text, or base64 of what is none. A directory cannot be told from another by "".
            text = "if(is_valid_utf8(cast(__key as string)), cast(__key as string), base64(__key))"
            return {"key": F.expr(f"nullif({text}, '')")}
        case PartitionBy.NONE:
            return {}
    assert_never(partition_by)


def _digests(frame: DataFrame, columns: list[str]) -> list[tuple[str, int, object, object]]:
    """Partition, messages, and two digests of its rows."""
    row = F.xxhash64(
        *(
            # A map has no hash, its entries have; it keeps their order.
            F.map_entries(name) if name == "__messageProperties" else F.col(name)
            for name in frame.columns
        )
    )
    parts = [
        F.concat(F.lit(f"{name}="), F.coalesce(F.col(name).cast("string"), F.lit("(none)")))
        for name in columns
    ]
    partition = F.concat_ws("/", *parts) if parts else F.lit("")
    digests = (
        frame.select(partition.alias("partition"), row.alias("row"))
        .groupBy("partition")
        .agg(F.count("*"), F.sum(F.col("row").cast("decimal(38,0)")), F.bit_xor("row"))
    )
    return [tuple(found) for found in digests.collect()]
