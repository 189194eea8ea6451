"""A topic as partitioned Parquet, and the proof that it is all there.

The archive is written beside its place, compared with the topic, and moved into its place only if
the two are equal: at `path` there is a whole, verified archive or what was there before.

What is archived ends with the last message that was there at the start, so that a topic may be
written to meanwhile. The comparison reads topic and files anew, and per partition of the archive
sets side by side the number of messages and a digest over each row: its message id and everything
else. The digest does not depend on order: the sum and the exclusive or of 64-bit hashes.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never

from pyspark.sql import functions as F

from magnetar.spark.errors import TargetForeign, TargetNotEmpty

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

    Raises TargetNotEmpty, TargetForeign, and what Spark makes of the source's errors.
    """
    check_target(path, overwrite=overwrite)
    messages = _messages_until_now(spark, service_url, topic)
    columns = _partition_columns(partition_by)
    placed = messages.withColumns(columns) if columns else messages
    staging = path.with_name(f".{path.name}.archiving")
    shutil.rmtree(staging, ignore_errors=True)
    staging.parent.mkdir(parents=True, exist_ok=True)
    try:
        placed.write.partitionBy(*columns).parquet(str(staging))
        # With the topic's schema: an archive without rows has none of its own, and the names of
        # directories are texts ("key=007").
        archived = spark.read.schema(placed.schema).parquet(str(staging))
        compared = compare(placed, archived, list(columns))
        if all(part.equal for part in compared):
            if path.exists():
                shutil.rmtree(path)
            staging.rename(path)
        return compared
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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


def check_target(path: Path, *, overwrite: bool) -> None:
    """Whether an archive may be put there. Raises TargetNotEmpty, TargetForeign."""
    if not path.exists():
        return
    if not path.is_dir():
        raise TargetForeign(path, "it is a file")
    names = sorted(child.name for child in path.iterdir())
    if not names:
        return
    if not overwrite:
        raise TargetNotEmpty(path)
    for name in names:
        if not _OF_AN_ARCHIVE.fullmatch(name):
            raise TargetForeign(path, f"{name!r} in it is not part of an archive")


def _messages_until_now(spark: SparkSession, service_url: str, topic: str) -> DataFrame:
    """The messages that are there now, even if there are more when they are read."""
    reader = spark.read.format("magnetar").option("service.url", service_url).option("topic", topic)
    # Without payloads. Spark plans each action anew, so the end must be fixed by value.
    [(last,)] = reader.schema("__index bigint").load().agg(F.max("__index")).collect()
    messages = spark.read.format("magnetar").option("service.url", service_url)
    return messages.option("topic", topic).load().where(F.col("__index") <= F.lit(last))


# Mechanics

_OF_AN_ARCHIVE: Final = re.compile(
    r"_SUCCESS|\._SUCCESS\.crc|\.?part-.*\.parquet(\.crc)?"
    r"|(publish_date|publish_hour|event_date|key)=.*"
)


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
