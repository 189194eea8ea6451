"""Archives several topics to Parquet. Each run adds the new messages, each exactly once.

    <path>/topic=<tenant%2F...>/date=<publish date>/part-*.parquet
    <path>/_checkpoint     the archived position of each topic
    <path>/_spark_metadata the list of the archive's files

A run notes the end of each topic when the run starts. It reads each topic up to this end as a
stream, then stops. Spark writes the files of a batch, adds them to the list, then records the batch
as done. A run that is killed before it adds the files to the list leaves unlisted files, and the
next run repeats the batch. Read the archive with Spark, which reads only listed files. One run at a
time writes to an archive (flock).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

from magnetar.spark.pipelines.archive import Compared, compare
from magnetar.spark.pipelines.reading import messages, own_session, run_to_end
from magnetar.spark.pipelines.target import locked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

BYTES_PER_BATCH: Final = 512 << 20
POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Archived:
    """The report of one run."""

    new: int  # messages that this run archived
    compared: list[Compared]  # one result for each topic, over the whole archive


def archive_new(
    spark: SparkSession,
    *,
    connection: Mapping[str, str],
    topics: Sequence[str],
    path: Path,
    subscription: str = "",
    skip_lost: bool = False,
    bytes_per_batch: int = BYTES_PER_BATCH,
) -> Archived:
    """Archive the messages published since the last run, and compare the archive with the topics.

    A `subscription` keeps the topics from deleting messages before they are archived. Without a
    subscription, a topic may delete messages between two runs. Then the run fails, unless
    `skip_lost` is true.

    Raises TargetBusy, OSError, and Spark's exceptions, which wrap the source's errors.
    """
    spark = own_session(spark)
    with locked(path):
        stream = spark.readStream.format("magnetar").options(**connection)
        stream = stream.option("topics", ",".join(topics)).option("startingOffsets", "earliest")
        stream = stream.option("failOnDataLoss", str(not skip_lost).lower())
        if subscription:
            stream = stream.option("subscription", subscription)
        rows = _placed(stream.option("maxBytesPerTrigger", str(bytes_per_batch)).load())
        before = _archive(spark, path, rows.schema).count()
        writer = (
            rows.writeStream.format("parquet")
            .partitionBy("topic", "date")
            .option("path", str(path))
            .option("checkpointLocation", str(path / "_checkpoint"))
            .trigger(availableNow=True)
        )
        run_to_end(writer.start)
        archived = _archive(spark, path, rows.schema)
        return Archived(archived.count() - before, _compare(spark, connection, topics, archived))


def _placed(rows: DataFrame) -> DataFrame:
    return rows.withColumns({"topic": F.col("__topic"), "date": F.to_date("__publishTime")})


def _archive(spark: SparkSession, path: Path, schema: StructType) -> DataFrame:
    """The archived messages. Spark finds no schema in an archive without messages."""
    if not (path / "_spark_metadata").exists():
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(str(path))


def _compare(
    spark: SparkSession, connection: Mapping[str, str], topics: Sequence[str], archived: DataFrame
) -> list[Compared]:
    """Compare the archived messages with the same messages of the topics.

    Messages that a topic has deleted, and messages after the last archived one, are not compared.
    """
    stored = messages(spark, connection, topics)
    parts = ["__topic", "__partition"]
    last = archived.groupBy(*parts).agg(F.max("__index").alias("last"))
    first = stored.groupBy(*parts).agg(F.min("__index").alias("first"))
    columns = stored.columns
    theirs = archived.join(first, parts).where("__index >= first").select(*columns)
    ours = stored.join(last, parts).where("__index <= last").select(*columns)
    return compare(ours, theirs, ["__topic"])
