"""Reads one task on an executor, as Arrow batches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from magnetar.protos.names import TopicName
from magnetar.spark.decode import Rows
from magnetar.spark.errors import DataLost, OutOfOrder, ReadRefused, UnreadableEntry
from magnetar.spark.source.partition_reader import TopicReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from magnetar.spark.planner import Span
    from magnetar.spark.source.options import ReadOptions
    from magnetar.spark.source.partition_reader import RangeEntry
    from magnetar.spark.source.tasks import Task

# Spark works well with batches of 10,000 to 100,000 rows and a few MiB. A batch ends with the entry
# that reaches the first of the two limits.
BATCH_ROWS: Final = 32_768
BATCH_BYTES: Final = 8 << 20

log = logging.getLogger(__name__)


def read_task(options: ReadOptions, schema: pa.Schema, task: Task) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task. A batch holds rows of one topic.

    Raises DataLost, UnreadableEntry, OutOfOrder, ReadStalled.
    """
    for topic, spans in _by_topic(task.spans):
        rows = Rows(schema, TopicName.parse(topic))
        first, end = task.indexes[topic]
        reader = TopicReader(options, topic, owner=task.owners[topic])
        for span in spans:
            for stored in _entries(reader, span, fails=options.fail_on_data_loss):
                rows.add(stored.ledger, stored.entry, stored.data, first_index=first, end_index=end)
                if rows.rows >= BATCH_ROWS or rows.bytes >= BATCH_BYTES:
                    yield rows.take()
        if rows.rows:
            yield rows.take()


def _by_topic(spans: tuple[Span, ...]) -> Iterator[tuple[str, list[Span]]]:
    by_topic: dict[str, list[Span]] = {}
    for span in spans:
        by_topic.setdefault(span.topic, []).append(span)
    yield from by_topic.items()


def _entries(reader: TopicReader, span: Span, *, fails: bool) -> Iterator[RangeEntry]:
    """The entries of a span. Without `fails`, those that were deleted are left out."""
    try:
        yield from reader.read((span,))
    except (OutOfOrder, UnreadableEntry):
        raise
    except ReadRefused as error:
        what = (
            f"entries {span.first} to {span.last} of ledger {span.ledger} cannot be read: {error}"
        )
        if fails:
            raise DataLost(span.topic, what) from error
        log.warning("data lost, failOnDataLoss is false: %s: %s", span.topic, what)
