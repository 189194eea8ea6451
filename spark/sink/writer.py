"""`df.write.format("magnetar")` and `df.writeStream.format("magnetar")`: rows become messages.

Spark sends a writer to the executors, where each task writes its rows (task.py). Consumers get the
rows at once, even if another task of the job fails later. There are no transactions, so `abort`
undoes nothing. When Spark repeats a task, an at-least-once sink stores the rows of the task again.
With dedup, the sink stores only the rows that no earlier attempt has stored.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from magnetar.spark.errors import DeduplicationOff, InvalidOption
from magnetar.spark.sink.columns import check_columns
from magnetar.spark.sink.identity import Identity
from magnetar.spark.sink.options import Guarantee, RowOrder, parse_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from magnetar.spark.sink.options import WriteOptions


def batch_writer(
    given: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    """Check options and columns on the driver, and return the writer.

    Raises InvalidOption, InvalidSchema, DeduplicationOff, WriteRefused, WriteStalled.
    """
    if overwrite:
        raise InvalidOption("mode", "overwrite: a topic is never emptied by a write; use append")
    options = parse_options(given)
    check_columns(schema, options)
    if options.guarantee is Guarantee.DEDUP and options.topic is not None:
        from magnetar.spark.sink.policies import policies_of

        if not policies_of(options, str(options.topic)).deduplication:
            raise DeduplicationOff(str(options.topic))
    return BatchWriter(options)


def stream_writer(
    given: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Check options and columns on the driver, and return the writer.

    Spark calls this function twice for each micro-batch, so it asks no broker. Raises
    InvalidOption, InvalidSchema.
    """
    if overwrite:
        raise InvalidOption("outputMode", "complete: a topic is never emptied; use append")
    options = parse_options(given, streaming=True)
    check_columns(schema, options)
    return StreamWriter(options)


class Written(WriterCommitMessage):
    """The result of a task: the rows that it wrote."""

    def __init__(
        self, rows: int, skipped: int, writer: str, digests: Mapping[str, tuple[int, int]]
    ) -> None:
        self.rows = rows
        self.skipped = skipped  # the number of these rows that an earlier attempt had stored
        self.writer = writer  # id of the query or of the job
        # The digest of the rows of each topic; empty: at least once, or no rows.
        self.digests = digests


class BatchWriter(DataSourceArrowWriter):
    """A batch job. Each attempt of a task has the same identity."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._job = options.job_id or f"{Random().getrandbits(64):016x}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write the rows of one task, on an executor. Raises SparkError."""
        return _write(self._options, iterator, f"job-{self._job}", 0)


class StreamWriter(DataSourceStreamArrowWriter):
    """A streaming query."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write the rows of one task of a micro-batch, on an executor. Raises SparkError."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        assert query is not None
        assert batch is not None
        sink = self._options.query_name or query
        return _write(self._options, iterator, query, int(batch), sink)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Note the batch at the owners of its topics (notes.py), before Spark records the batch in
        the checkpoint. Raises WriteRefused, WriteStalled."""
        tasks = [message for message in messages if isinstance(message, Written)]
        if any(task.digests for task in tasks):
            from magnetar.spark.sink.notes import joined, note_batch

            query = tasks[0].writer
            note_batch(
                self._options,
                sink=self._options.query_name or query,
                query=query,
                batch=batchId,
                digests=joined([task.digests for task in tasks]),
            )


def _write(
    options: WriteOptions,
    iterator: Iterator[pa.RecordBatch],
    writer: str,
    batch: int,
    sink: str = "",
) -> Written:
    import asyncio

    from pyspark import TaskContext

    from magnetar.spark.sink.ordering import sorted_rows
    from magnetar.spark.sink.policies import Policies, policies_of
    from magnetar.spark.sink.task import TaskWriter

    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    is_exact = options.guarantee is Guarantee.DEDUP
    identity = Identity(writer, batch, partition, options.division, sink) if is_exact else None

    if options.row_order is RowOrder.SORTED:
        iterator = sorted_rows(iterator)

    async def batches() -> AsyncIterator[pa.RecordBatch]:
        # The iterator blocks until the next rows are computed.
        while (batch := await asyncio.to_thread(next, iterator, None)) is not None:
            yield batch

    async def policies(topic: str) -> Policies:
        return await asyncio.to_thread(policies_of, options, topic, sink)

    async def run() -> Written:
        task = TaskWriter(options, identity, partition, policies=policies)
        await task.run(batches())
        digests = {topic: digest.value for topic, digest in task.digests.items()}
        return Written(task.rows, task.skipped, writer, digests)

    return asyncio.run(run())
