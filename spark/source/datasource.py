"""`spark.read.format("magnetar")` and `spark.readStream.format("magnetar")`.

    spark.read.format("magnetar").option("service.url", "grpc://host:6660").option("topic", "t")
        .load()

The driver asks the owners of the topics for their ledgers and divides them into tasks. For a
DataFrame it does so once: all actions read the same messages, even if producers publish more. For a
stream it does so for each batch (driver.py). Executors read sealed ledgers from the bookies that
the plan names, and the rest from the owners. They do not access ZooKeeper.

`.schema("value binary")` leaves out the other columns and saves their cost. Spark imports this
module into every session, so it imports little: the first plan loads grpc, the first read loads
pyarrow.
"""

from __future__ import annotations

from dataclasses import replace
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from magnetar.spark.source.options import ReadOptions, parse_options
from magnetar.spark.source.schema import check_schema, schema_of
from magnetar.spark.source.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import Filter, InputPartition
    from pyspark.sql.types import StructType

    from magnetar.spark.source.driver import StreamDriver


class MagnetarDataSource(DataSource):
    """The source. The sink is in magnetar.spark.datasource.

    Raises InvalidOption and InvalidSchema.
    """

    @classmethod
    def name(cls) -> str:
        return "magnetar"

    def schema(self) -> StructType:
        # Wrong options make `load()` fail, not only the first action.
        return schema_of(parse_options(self.options, streaming=None))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = _identified(parse_options(self.options))
        check_schema(schema, schema_of(options, schema))
        scan = FilteredScan if options.takes_filters else TopicScan
        return scan(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = _identified(parse_options(self.options, streaming=True))
        check_schema(schema, schema_of(options, schema))
        return TopicStream(options, schema)


class TopicScan(DataSourceReader):
    """Plans and reads one DataFrame. Spark sends it to the executors, so it holds only values."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks, on the driver. Raises TopicNotFound, ReadRefused, ReadStalled."""
        from magnetar.spark.source.driver import plan_frame

        return plan_frame(self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task, on an executor.

        Raises DataLost, UnreadableEntry, OutOfOrder, ReadRefused, ReadStalled. With mode dlq, also
        raises WriteRefused, WriteStalled, RowRefused.
        """
        yield from _read(self._options, self._schema, partition)


class FilteredScan(TopicScan):
    """A scan that takes filters. Spark refuses such a scan unless Spark's setting
    `spark.sql.python.filterPushdown.enabled` is on. So the source uses this scan only with the
    option `filterPushdown`."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Keep the filters that the read can use. Spark evaluates all filters again."""
        from magnetar.spark.source.filters import pushed

        self._options = replace(self._options, pushed=pushed(filters))
        yield from filters


class TopicStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads the batches of one streaming query.

    Spark creates one reader in a separate process, where it plans. Spark sends another reader to
    the executors. So a reader creates its planning state at the first use.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._planner: StreamDriver | None = None

    @property
    def _driver(self) -> StreamDriver:
        if self._planner is None:
            from magnetar.runtime.clock import SystemClock
            from magnetar.spark.source.driver import StreamDriver

            query = f"{SystemRandom().getrandbits(64):016x}"
            self._planner = StreamDriver(self._options, now_ms=SystemClock().now_ms(), query=query)
        return self._planner

    def initialOffset(self) -> dict[str, Any]:
        """The symbolic start: the first batch resolves it."""
        return self._driver.initial()

    def prepareForTriggerAvailableNow(self) -> None:
        """Note the ends of the topics. Raises TopicNotFound, ReadRefused, ReadStalled."""
        self._driver.freeze()

    def getDefaultReadLimit(self) -> ReadLimit:
        """One of the limits of the options; `latestOffset` applies the other one, too."""
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the batch that begins at `start`.

        Raises DataLost, QueryFenced, TopicNotFound, InvalidOffsets, ReadRefused, ReadStalled.
        """
        rows_max, bytes_max = self._options.rows_max, self._options.bytes_max
        match limit:
            case ReadAllAvailable():
                rows_max = bytes_max = None
            case ReadMaxRows(rows):
                rows_max = rows
            case ReadMaxBytes(size):
                bytes_max = size
        return self._driver.latest(start, rows_max=rows_max, bytes_max=bytes_max)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The ends of the topics, for the query's progress."""
        return self._driver.report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan the tasks of a batch. Raises DataLost, InvalidOffsets, ReadRefused, ReadStalled."""
        return self._driver.tasks(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task, on an executor.

        Raises DataLost, UnreadableEntry, OutOfOrder, ReadRefused, ReadStalled. With mode dlq, also
        raises WriteRefused, WriteStalled, RowRefused.
        """
        yield from _read(self._options, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Move the subscription to `end`. Raises QueryFenced."""
        self._driver.commit(end)

    def stop(self) -> None:
        """End the planning. Spark 4.3 ends the process instead, which has the same effect."""
        if self._planner is not None:
            self._planner.close()


def _identified(options: ReadOptions) -> ReadOptions:
    return replace(options, read_id=f"{SystemRandom().getrandbits(64):016x}")


def _read(
    options: ReadOptions, schema: StructType, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, Task):
        return  # there is nothing to read: Spark passes another object if there are no partitions
    from magnetar.spark.source.task_reader import read_task

    yield from read_task(options, schema, partition)
