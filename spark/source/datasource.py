"""`spark.read.format("magnetar")`: a topic as a DataFrame.

    spark.read.format("magnetar").option("service.url", "grpc://host:6660").option("topic", "t")
        .load()

The driver asks the owner of the topic for its ledgers and divides them into tasks, once for each
DataFrame. Thus all actions of a DataFrame read the same messages, even if producers publish more.
Executors read their parts from the owner. They do not access bookies or ZooKeeper.

`.schema("value binary")` leaves out columns and saves their cost. Spark imports this module into
every session, so it imports little: the first plan loads grpc, the first read loads pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from magnetar.spark.planner import Span, plan_tasks
from magnetar.spark.source.options import ReadOptions, parse_options
from magnetar.spark.source.schema import SCHEMA, check_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

# Spark works well with batches of 10,000 to 100,000 rows and a few MiB. A batch ends with the entry
# that reaches the first of the two limits.
BATCH_ROWS: Final = 32_768
BATCH_BYTES: Final = 8 << 20


class MagnetarDataSource(DataSource):
    """The data source that Spark finds under the format's name.

    Raises InvalidOption and InvalidSchema.
    """

    @classmethod
    def name(cls) -> str:
        return "magnetar"

    def schema(self) -> StructType:
        parse_options(self.options)  # so that `load()` fails, and not only the first action
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        check_schema(schema)
        return TopicScan(parse_options(self.options), schema)


class Task(InputPartition):
    """The entries that one task reads. Spark sends it to an executor."""

    def __init__(self, owner: str, spans: tuple[Span, ...]) -> None:
        super().__init__(None)
        self.owner = owner  # URL of the broker that owned the topic at planning time
        self.spans = spans


class TopicScan(DataSourceReader):
    """Plans and reads one DataFrame. Spark sends it to the executors, so it holds only values."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks, on the driver. Raises TopicNotFound, ReadRefused, ReadStalled."""
        from magnetar.spark.source.partition_reader import TopicReader

        reader = TopicReader(self._options)
        ledgers = reader.plan()
        assert reader.owner is not None
        tasks = plan_tasks(
            ledgers,
            target_bytes=self._options.target_bytes_per_task,
            tasks_max=self._options.tasks_max,
        )
        return [Task(reader.owner, spans) for spans in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task, on an executor.

        Raises ReadRefused, UnreadableEntry, OutOfOrder, ReadStalled.
        """
        if not isinstance(partition, Task):
            return  # the topic is empty: Spark passes another object if there are no partitions
        from pyspark.sql.pandas.types import to_arrow_schema

        from magnetar.spark.decode import Rows
        from magnetar.spark.source.partition_reader import TopicReader

        rows = Rows(to_arrow_schema(self._schema, timezone="UTC"), self._options.topic)
        reader = TopicReader(self._options, owner=partition.owner)
        for stored in reader.read(partition.spans):
            rows.add(stored.ledger, stored.entry, stored.data)
            if rows.rows >= BATCH_ROWS or rows.bytes >= BATCH_BYTES:
                yield rows.take()
        if rows.rows:
            yield rows.take()
