"""Reads one task on an executor, as Arrow batches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np
from pyspark.sql.pandas.types import to_arrow_schema

from magnetar.protos.names import TopicName
from magnetar.spark.decode import Rows
from magnetar.spark.errors import DataLost, EntriesDeleted
from magnetar.spark.source.look_back import LookBack
from magnetar.spark.source.partition_reader import TopicReader
from magnetar.spark.source.value_stage import ValueStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from magnetar.spark.planner import Span
    from magnetar.spark.source.options import ReadOptions
    from magnetar.spark.source.partition_reader import RangeEntry
    from magnetar.spark.source.tasks import Task

# Spark works well with batches of 10,000 to 100,000 rows and a few MiB. A batch ends with the entry
# that reaches BATCH_BYTES, or with the group of entries that reaches BATCH_ROWS.
BATCH_ROWS: Final = 32_768
BATCH_BYTES: Final = 8 << 20

# Entries that are decoded together. More of them cost memory and gain nothing.
GROUP_BYTES: Final = 512 << 10
GROUP_ENTRIES: Final = 512

KEPT_BYTES: Final = 16 << 20
"""The size of the block that `_keep_freed_memory` frees. The process then keeps up to twice this
size in freed memory."""

log = logging.getLogger(__name__)


def read_task(options: ReadOptions, schema: StructType, task: Task) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task. A batch holds rows of one topic.

    Raises DataLost, BadRecord, UnreadableEntry, OutOfOrder, ReadRefused, ReadStalled. With mode
    dlq, also raises WriteRefused, WriteStalled, RowRefused.
    """
    _keep_freed_memory()
    stage = ValueStage(options, to_arrow_schema(schema, timezone="UTC"))
    if not task.sealed.ledgers:
        yield from _rows_of(options, stage, task, None)
        return
    # A local import: it takes 40 ms.
    from magnetar.spark.source.bookie_reader import reading_from_bookies

    with reading_from_bookies(task.sealed, turn=task.number) as bookies:
        yield from _rows_of(options, stage, task, bookies.entries)


def _keep_freed_memory() -> None:
    """Let the allocator keep memory that is freed. The decoder takes and frees some MB for each
    group of entries. By default glibc returns them to the system and requests them again, page by
    page, which took 40 % of a task's CPU. glibc stops doing so after it has freed a block of
    KEPT_BYTES once."""
    np.empty(KEPT_BYTES, np.uint8)


def _rows_of(
    options: ReadOptions,
    stage: ValueStage,
    task: Task,
    direct: Callable[[Span], Iterator[RangeEntry]] | None,
) -> Iterator[pa.RecordBatch]:
    pushed = options.pushed
    publish_ms = None if pushed is None else pushed.publish_ms_bounds()
    for topic, spans in _by_topic(task.spans):
        earlier = LookBack(options, topic, owner=task.owners[topic])
        rows = Rows(stage.stored, TopicName.parse(topic), earlier, publish_ms=publish_ms)
        first, end = task.indexes[topic]
        owner = task.owners[topic]
        reader = TopicReader(options, topic, owner=owner, direct=direct)
        for span in spans:
            for group in _groups(entries_of(reader, span, fails=options.fail_on_data_loss)):
                added = 0
                while added < len(group):
                    added += rows.add_all(
                        group[added:], first_index=first, end_index=end, bytes_max=BATCH_BYTES
                    )
                    if rows.rows >= BATCH_ROWS or rows.bytes >= BATCH_BYTES:
                        yield stage.take(rows, topic)
        if rows.rows:
            yield stage.take(rows, topic)


def _by_topic(spans: tuple[Span, ...]) -> Iterator[tuple[str, list[Span]]]:
    by_topic: dict[str, list[Span]] = {}
    for span in spans:
        by_topic.setdefault(span.topic, []).append(span)
    yield from by_topic.items()


def _groups(
    entries: Iterator[RangeEntry],
) -> Iterator[list[tuple[int, int, memoryview]]]:
    """Yield groups of consecutive entries. The entry that reaches GROUP_BYTES or GROUP_ENTRIES ends
    a group."""
    group: list[tuple[int, int, memoryview]] = []
    size = 0
    for stored in entries:
        group.append((stored.ledger, stored.entry, stored.data))
        size += len(stored.data)
        if size >= GROUP_BYTES or len(group) >= GROUP_ENTRIES:
            yield group
            group, size = [], 0
    if group:
        yield group


def entries_of(reader: TopicReader, span: Span, *, fails: bool) -> Iterator[RangeEntry]:
    """Yield the entries of a span. With `fails`, deleted entries raise DataLost; otherwise they are
    left out."""
    try:
        yield from reader.read((span,))
    except EntriesDeleted as error:
        what = (
            f"entries {span.first} to {span.last} of ledger {span.ledger} cannot be read: {error}"
        )
        if fails:
            raise DataLost(span.topic, what) from error
        log.warning("data lost, failOnDataLoss is false: %s: %s", span.topic, what)
