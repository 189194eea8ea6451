"""The format "magnetar": the source (source/) and the sink (sink/) together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.spark.source.datasource import MagnetarDataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
    from pyspark.sql.types import StructType


class MagnetarFormat(MagnetarDataSource):
    """The data source that Spark finds under the format's name.

    Raises InvalidOption and InvalidSchema. Spark passes the arguments of the writers by name.
    """

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the writer of a batch job. Also raises DeduplicationOff, WriteStalled."""
        from magnetar.spark.sink.writer import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of one micro-batch."""
        from magnetar.spark.sink.writer import stream_writer

        return stream_writer(self.options, schema, overwrite)
