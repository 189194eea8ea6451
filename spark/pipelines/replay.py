"""Writes Parquet files into a topic.

Files with a column `value` hold messages, for example an archive. Messages with a column `__index`
keep the order of their index within a key. Other files hold records: each row becomes a JSON
object.

With the guarantee dedup, the job's id is made of the topic and of the names and sizes of the files.
A job that was killed and is run again stores only what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

from magnetar.spark.errors import NothingToReplay
from magnetar.spark.pipelines.reading import TASKS, job_id, own_session, write

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

MESSAGE_COLUMNS: Final = ("value", "__key", "__orderingKey", "__eventTime", "__messageProperties")


@dataclass(frozen=True, slots=True)
class Replayed:
    """The report."""

    files: int
    rows: int
    job: str


def replay(
    spark: SparkSession, *, service_url: str, path: Path, topic: str, guarantee: str = "dedup"
) -> Replayed:
    """Write all rows of the Parquet files below `path` into the topic.

    Raises NothingToReplay, and Spark's exceptions, which wrap the sink's errors.
    """
    files = parquet_files(path)
    if not files:
        raise NothingToReplay(path)
    spark = own_session(spark)
    rows = spark.read.parquet(str(path))
    job = job_id("replay", topic, *(f"{name} {size}" for name, size in files))
    write(_arranged(rows), service_url, topic, guarantee=guarantee, job=job)
    return Replayed(len(files), rows.count(), job)


def parquet_files(path: Path) -> list[tuple[str, int]]:
    """The names below `path` and the sizes of the files that Spark reads, in order."""
    if path.is_file():
        return [(path.name, path.stat().st_size)]
    found = []
    for file in sorted(path.rglob("*.parquet")):
        name = file.relative_to(path)
        if file.is_file() and not any(part.startswith(("_", ".")) for part in name.parts):
            found.append((str(name), file.stat().st_size))
    return found


def _arranged(rows: DataFrame) -> DataFrame:
    """Divide the rows into tasks, in an order that does not depend on the run."""
    if "value" not in rows.columns:
        return rows
    kept = [name for name in MESSAGE_COLUMNS if name in rows.columns]
    if "__index" not in rows.columns:
        return rows.select(*kept)
    source = [name for name in ("__topic", "__partition") if name in rows.columns]
    index = F.col("__index").cast("string").cast("binary")
    key = F.coalesce(F.col("__key"), index) if "__key" in rows.columns else index
    placed = rows.repartition(TASKS, key).sortWithinPartitions(*source, "__index")
    return placed.select(*kept)
