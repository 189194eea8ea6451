"""Archives several topics to Parquet. Each run adds the new messages, each exactly once.

    <path>/topic=<name>/date=<publish date>/part-*.parquet, such as
           topic=persistent%3A%2F%2Fpublic%2Fdefault%2Fclicks/date=2026-11-30
    <path>/_checkpoint     the archived position of each topic
    <path>/_spark_metadata the list of the archive's files

A run notes the end of each topic when the run starts. It reads each topic up to this end as a
stream, then stops. Spark writes the files of a batch, adds them to the list, then records the batch
as done. A run that is killed before it adds the files to the list leaves unlisted files, and the
next run repeats the batch. Read the archive with Spark, which reads only listed files. One run at a
time writes to an archive (flock).

At its end, a run compares the archive with the topics. It compares all messages that a topic still
has, up to the position in the checkpoint. So it also notices a topic whose messages are all missing
in the archive. The archive may hold more: messages that the topic has deleted, and messages of an
earlier topic of the same name, which was deleted and created again. The ledgers of these messages
have smaller ids than the ledgers that the topic still has, so the comparison leaves these messages
out. The index alone does not show this, because the indexes of the new topic begin at 0 again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

from magnetar.spark.offsets import parse_offsets
from magnetar.spark.pipelines.archive import Compared, compare
from magnetar.spark.pipelines.reading import ledger_column, messages, own_session, run_to_end
from magnetar.spark.pipelines.target import locked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from magnetar.spark.offsets import Place

BYTES_PER_BATCH: Final = 512 << 20
POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Archived:
    """The report of one run."""

    new: int  # messages that this run archived
    compared: list[Compared]  # one result for each topic, over the messages that it still has
    earlier: dict[str, int]
    """The number of archived messages of earlier topics of the same name, keyed by topic. They are
    not compared. Topics without such messages are left out."""


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

    Raises TargetBusy, TargetForeign, OSError, and Spark's exceptions, which wrap the source's
    errors.
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
        stored = messages(spark, connection, topics)
        firsts = _firsts(stored)
        return Archived(
            archived.count() - before,
            _compare(spark, stored, archived, firsts, _archived_to(path)),
            _earlier(archived, firsts),
        )


def count_earlier(ledgers: Iterable[tuple[int, int, int, int]]) -> int:
    """Return how many messages belong to earlier topics of the same name.

    `ledgers`: the id of each ledger, its first and last index, and the number of its messages. In
    the ledgers of one topic, indexes rise with the ids. So a ledger whose first index is not above
    the last index of the preceding ledger is the first known ledger of a topic that was created
    again.
    """
    earlier = before = 0
    highest = -1
    for _, first, last, count in sorted(ledgers):
        if first <= highest:
            earlier = before
        before += count
        highest = last
    return earlier


# Mechanics


def _placed(rows: DataFrame) -> DataFrame:
    return rows.withColumns({"topic": F.col("__topic"), "date": F.to_date("__publishTime")})


def _archive(spark: SparkSession, path: Path, schema: StructType) -> DataFrame:
    """The archived messages. Spark finds no schema in an archive without messages."""
    if not (path / "_spark_metadata").exists():
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(str(path))


def _archived_to(path: Path) -> Mapping[str, Place]:
    """The end of the last batch, for each topic. All batches of a run that has ended are done."""
    batches = path / "_checkpoint" / "offsets"
    last = max(int(it.name) for it in batches.iterdir() if it.name.isdigit())
    # Spark writes a version, then metadata, then the offsets of each source, a line for each.
    *_, offsets = (batches / str(last)).read_text().splitlines()
    parsed = parse_offsets(json.loads(offsets))
    return {} if parsed is None else parsed.places


def _compare(
    spark: SparkSession,
    stored: DataFrame,
    archived: DataFrame,
    firsts: Mapping[str, tuple[int, int]],
    ends: Mapping[str, Place],
) -> list[Compared]:
    """Compare the messages that the topics still have, up to `ends`, with the archived ones."""
    columns = stored.columns
    end = _table(spark, {topic: (end.ledger, end.index) for topic, end in ends.items()})
    ours = stored.withColumn("ledger", ledger_column()).join(end, "__topic")
    # A ledger after the end with smaller indexes belongs to a topic that was created again after
    # the run had noted the end.
    ours = ours.where("ledger <= at_ledger and __index < at_index").select(*columns)
    first = _table(spark, firsts)
    theirs = archived.withColumn("ledger", ledger_column()).join(first, "__topic")
    reached = "ledger > at_ledger or (ledger = at_ledger and __index >= at_index)"
    theirs = theirs.where(reached).select(*columns)
    return compare(ours, theirs, ["__topic"])


def _table(spark: SparkSession, places: Mapping[str, tuple[int, int]]) -> DataFrame:
    """The ledger and index of each topic, as a table that is joined without a shuffle."""
    rows = [(topic, *place) for topic, place in places.items()]
    table = spark.createDataFrame(rows, "__topic string, at_ledger bigint, at_index bigint")
    return F.broadcast(table)


def _firsts(stored: DataFrame) -> dict[str, tuple[int, int]]:
    """The ledger and index of the first message of each topic. Reads all messages."""
    placed = stored.select("__topic", ledger_column().alias("ledger"), "__index")
    first = F.min(F.struct("ledger", "__index"))
    return {topic: tuple(found) for topic, found in placed.groupBy("__topic").agg(first).collect()}


def _earlier(archived: DataFrame, firsts: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    ledgers = defaultdict(list)
    of_ledger = (F.min("__index"), F.max("__index"), F.count("*"))
    placed = archived.select("__topic", ledger_column().alias("ledger"), "__index")
    for topic, *found in placed.groupBy("__topic", "ledger").agg(*of_ledger).collect():
        ledgers[topic].append(tuple(found))
    for topic, (ledger, index) in firsts.items():
        # The archive may have no message yet of a topic that was created again.
        if all(ledger != known for known, *_ in ledgers[topic]):
            ledgers[topic].append((ledger, index, index, 0))
    counts = {topic: count_earlier(found) for topic, found in sorted(ledgers.items())}
    return {topic: count for topic, count in counts.items() if count}
