"""Writes Parquet files into a topic.

Files with a column `value` hold messages, for example an archive. If they also have a column
`__index`, the job writes the messages of each key in the order of topic, partition and index. An
archive can hold messages of two topics of one name, of which the first was deleted. So, with a
column `__messageId`, the order is topic, partition, ledger and index. Files without a column
`value` hold records: each row becomes a JSON object.

With the guarantee dedup, the job's id is made of the topic and of the names and contents of the
files. A job that was killed and is run again stores only the missing messages. Names and sizes are
not enough: other files of the same name and size would count as stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

from magnetar.spark.errors import NothingToReplay
from magnetar.spark.pipelines.reading import TASKS, job_id, ledger_column, own_session, write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

MESSAGE_COLUMNS: Final = ("value", "__key", "__orderingKey", "__eventTime", "__messageProperties")


@dataclass(frozen=True, slots=True)
class Replayed:
    """The report of a replay."""

    files: int
    rows: int
    job: str


def replay(
    spark: SparkSession,
    *,
    connection: Mapping[str, str],
    path: Path,
    topic: str,
    guarantee: str = "dedup",
) -> Replayed:
    """Write all rows of the Parquet files below `path` into the topic.

    Raises NothingToReplay, and Spark's exceptions, which wrap the sink's errors.
    """
    files = parquet_files(path)
    if not files:
        raise NothingToReplay(path)
    spark = own_session(spark)
    rows = spark.read.parquet(str(path))
    job = job_of(topic, path, files)
    write(_arranged(rows), connection, topic, guarantee=guarantee, job=job)
    return Replayed(len(files), rows.count(), job)


def parquet_files(path: Path) -> list[Path]:
    """The files that Spark reads, in order: `path` itself, or the files below it, whatever their
    names end with."""
    if path.is_file():
        return [path]
    return [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(map(_is_hidden, file.relative_to(path).parts))
    ]


def _is_hidden(name: str) -> bool:
    """Return whether Spark leaves out a file or folder of this name; it reads `_column=value`."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def job_of(topic: str, path: Path, files: Sequence[Path]) -> str:
    """The id of the job that writes these files below `path` into the topic. Reads the files."""
    parts = []
    for file in files:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        parts.append(f"{file.relative_to(path.parent if file == path else path)} {digest}")
    return job_id("replay", topic, *parts)


def _arranged(rows: DataFrame) -> DataFrame:
    """Divide the rows into tasks, in an order that does not depend on the run."""
    if "value" not in rows.columns:
        return rows
    kept = [name for name in MESSAGE_COLUMNS if name in rows.columns]
    if "__index" not in rows.columns:
        return rows.select(*kept)
    source = [F.col(name) for name in ("__topic", "__partition") if name in rows.columns]
    if ("__messageId", "binary") in rows.dtypes:
        source.append(ledger_column())
    index = F.col("__index").cast("string").cast("binary")
    key = F.coalesce(F.col("__key"), index) if "__key" in rows.columns else index
    placed = rows.repartition(TASKS, key).sortWithinPartitions(*source, "__index")
    return placed.select(*kept)
