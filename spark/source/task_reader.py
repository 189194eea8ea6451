"""Reads one task on an executor, as Arrow batches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type

from magnetar.protos.names import TopicName
from magnetar.spark.avro import avro_decoder, parse_avro_schema
from magnetar.spark.decode import Rows
from magnetar.spark.errors import BadRecord, DataLost, EntriesDeleted
from magnetar.spark.source.options import Mode, ValueFormat
from magnetar.spark.source.partition_reader import TopicReader
from magnetar.spark.source.schema import CORRUPT, ERROR, value_type
from magnetar.spark.values import decode_values, json_decoder, text_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql.types import StructType

    from magnetar.spark.planner import Span
    from magnetar.spark.source.options import ReadOptions
    from magnetar.spark.source.partition_reader import RangeEntry
    from magnetar.spark.source.tasks import Task

# Spark works well with batches of 10,000 to 100,000 rows and a few MiB. A batch ends with the entry
# that reaches the first of the two limits.
BATCH_ROWS: Final = 32_768
BATCH_BYTES: Final = 8 << 20

# Entries that are decoded together. More of them cost memory and gain nothing.
GROUP_BYTES: Final = 512 << 10
GROUP_ENTRIES: Final = 512

log = logging.getLogger(__name__)


def read_task(options: ReadOptions, schema: StructType, task: Task) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task. A batch holds rows of one topic.

    Raises DataLost, BadRecord, UnreadableEntry, OutOfOrder, ReadRefused, ReadStalled.
    """
    stage = ValueStage(options, to_arrow_schema(schema, timezone="UTC"))
    for topic, spans in _by_topic(task.spans):
        rows = Rows(stage.stored, TopicName.parse(topic))
        first, end = task.indexes[topic]
        reader = TopicReader(options, topic, owner=task.owners[topic])
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


class ValueStage:
    """Decodes the payloads of rows as the options say."""

    def __init__(self, options: ReadOptions, schema: pa.Schema) -> None:
        """`schema` is what Spark expects."""
        self._schema = schema
        self._mode = options.mode
        self._decode: Callable[[pa.Array], pa.Array] | None = None
        names = [name for name in schema.names if name not in (CORRUPT, ERROR)]
        decodes = options.value_format is not ValueFormat.BYTES and (
            len(names) < len(schema.names) or "value" in names
        )
        # The columns that the rows have before the payloads are decoded.
        self.stored = schema
        if decodes:
            self._kind = to_arrow_type(value_type(options), timezone="UTC")
            self._decode = _decoder(options, self._kind)
            fields = [schema.field(name) for name in names if name != "value"]
            self.stored = pa.schema([*fields, pa.field("value", pa.binary())])

    def take(self, rows: Rows, topic: str) -> pa.RecordBatch:
        """Return the rows as Spark expects them. Raises BadRecord."""
        if self._decode is None:
            return rows.take()
        place_of = rows.places()
        batch = rows.take()
        payloads = batch.column("value")
        values, bad = decode_values(payloads, self._decode, self._kind)
        if bad and self._mode is Mode.FAILFAST:
            row = min(bad)
            ledger, entry, index = place_of(row)
            raise BadRecord(topic, ledger, entry, f"message {index} of the entry: {bad[row]}")
        columns = {name: batch.column(name) for name in batch.schema.names} | {"value": values}
        if self._mode is Mode.PERMISSIVE:
            columns |= _bad_columns(payloads, bad)
        arrays = [columns[field.name].cast(field.type) for field in self._schema]
        whole = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if bad and self._mode is Mode.DROPMALFORMED:
            row = min(bad)
            ledger, entry, index = place_of(row)
            log.warning(
                "%d of %d records dropped, mode is dropmalformed: %s, the first one is message %d"
                " of entry %d:%d: %s",
                *(len(bad), len(values), topic, index, ledger, entry, bad[row]),
            )
            kept = np.ones(len(values), dtype=bool)
            kept[list(bad)] = False
            whole = whole.filter(pa.array(kept))
        return whole


def _decoder(options: ReadOptions, kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    match options.value_format:
        case ValueFormat.STRING:
            return text_decoder()
        case ValueFormat.JSON:
            return json_decoder(kind)
        case _:
            return avro_decoder(parse_avro_schema(options.value_schema), kind)


def _bad_columns(payloads: pa.Array, bad: dict[int, str]) -> dict[str, pa.Array]:
    rows = len(payloads)
    errors = np.full(rows, None, dtype=object)
    for row, error in bad.items():
        errors[row] = error
    error = pa.array(errors, pa.string())
    return {CORRUPT: pc.if_else(error.is_valid(), payloads, _NO_PAYLOAD), ERROR: error}


_NO_PAYLOAD = pa.scalar(None, pa.binary())


def _by_topic(spans: tuple[Span, ...]) -> Iterator[tuple[str, list[Span]]]:
    by_topic: dict[str, list[Span]] = {}
    for span in spans:
        by_topic.setdefault(span.topic, []).append(span)
    yield from by_topic.items()


def _groups(
    entries: Iterator[RangeEntry],
) -> Iterator[list[tuple[int, int, memoryview]]]:
    """Consecutive entries, GROUP_BYTES of them or a little more."""
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
    """The entries of a span. Without `fails`, those that were deleted are left out."""
    try:
        yield from reader.read((span,))
    except EntriesDeleted as error:
        what = (
            f"entries {span.first} to {span.last} of ledger {span.ledger} cannot be read: {error}"
        )
        if fails:
            raise DataLost(span.topic, what) from error
        log.warning("data lost, failOnDataLoss is false: %s: %s", span.topic, what)
