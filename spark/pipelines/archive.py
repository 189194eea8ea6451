"""Writes a topic to partitioned Parquet files, and verifies that they hold every message.

The job writes the archive to a staging directory and compares it with the topic. If both are equal
and the files are synced, the job moves the archive to `path`. So a new archive appears at `path`
only whole and verified. A job that is killed during this move may leave nothing at `path`; the next
run restores the earlier content (target.py).

The archive ends with the last message that existed at the start, so producers may keep publishing.
The comparison reads the topic and the files again. For each partition of the archive it compares
the number of messages and a digest over all columns of its rows. The digest does not depend on the
order of rows: it is the sum and the exclusive or of 64-bit hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never

from pyspark.sql import functions as F

from magnetar.spark.pipelines.reading import extents, key_column, messages, within
from magnetar.spark.pipelines.target import check_target, put_in_place, staged

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import Column, DataFrame, SparkSession

NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
"""Spark's name for the directory of rows whose value is null."""


KEY_BYTES_MAX: Final = 251
"""The limit of an escaped key: a file system limits the name of a directory, "key=...", to 255
bytes."""

_ESCAPED: Final = r"""[\x01-\x1f"#%'*/:=?\\\x7f{\[\]^]"""
"""The characters that Spark writes as % and two digits in the name of a directory."""


class PartitionBy(StrEnum):
    """The value by which an archive is divided into directories. Dates are in UTC."""

    PUBLISH_DATE = "publish-date"
    PUBLISH_HOUR = "publish-hour"
    EVENT_DATE = "event-date"
    KEY = "key"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of one partition of the archive."""

    partition: str  # "publish_date=2013-01-01"; empty if the archive has no partitions
    in_topic: int  # messages
    in_archive: int
    equal: bool  # whether the counts, ids, values and all other columns are equal


def archive(
    spark: SparkSession,
    *,
    connection: Mapping[str, str],
    topic: str,
    path: Path,
    partition_by: PartitionBy = PartitionBy.PUBLISH_DATE,
    overwrite: bool = False,
) -> list[Compared]:
    """Write the archive and return the comparison of its partitions, in order.

    If all partitions are equal, the archive is at `path`; otherwise `path` is unchanged. Raises
    TargetNotEmpty, TargetForeign, TargetBusy, OSError, and Spark's exceptions, which wrap the
    source's errors.
    """
    spark = _in_utc(spark)
    with staged(path) as new:
        check_target(path, overwrite=overwrite)
        # Spark may plan a DataFrame several times. Each plan must leave out the messages that were
        # published after the start.
        stored = extents(spark, connection, [topic])
        rows = within(messages(spark, connection, [topic]), stored)
        columns = _partition_columns(partition_by)
        placed = rows.withColumns(columns) if columns else rows
        placed.write.partitionBy(*columns).parquet(str(new))
        # Read with the topic's schema. Spark finds no schema in an archive without rows, and would
        # read directory names like "key=007" as numbers.
        archived = spark.read.schema(placed.schema).parquet(str(new))
        compared = compare(placed, archived, list(columns))
        if all(part.equal for part in compared):
            put_in_place(new, path)
        return compared


def compare(topic: DataFrame, archived: DataFrame, columns: list[str]) -> list[Compared]:
    """Compare the messages of the topic and of the archive, partitioned by `columns`."""
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
    """Return another session of the same Spark, in UTC: dates follow the session's time zone."""
    ours = spark.newSession()
    ours.conf.set("spark.sql.session.timeZone", "UTC")
    # All Parquet readers support this type. Spark's default is INT96.
    ours.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    return ours


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
            # A message whose key cannot be the value of a directory is stored with the messages
            # without a key.
            escaped = F.regexp_replace(key_column(), _ESCAPED, "%00")
            is_short = F.octet_length(escaped) <= KEY_BYTES_MAX
            has_nul = F.contains(key_column(), F.lit("\x00"))  # Spark does not escape it
            can_be = ~key_column().isin("", NO_VALUE) & is_short & ~has_nul
            return {"key": F.when(can_be, key_column())}
        case PartitionBy.NONE:
            return {}
    assert_never(partition_by)


def _digests(frame: DataFrame, columns: list[str]) -> list[tuple[str, int, object, object]]:
    """Return the name, the number of messages and two digests of each partition."""
    row = F.xxhash64(
        *(
            # Spark cannot hash a map, but can hash the list of the map's entries. The list has the
            # order of the map.
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
