"""The columns of a DataFrame that is written, and the messages that its rows become.

The names are the same as in the source. The sink ignores the columns whose values the client or the
broker sets (`__index`, `__publishTime`, ...), so that a job can copy a topic. Without a column
`value`, the columns without a leading "__" become a JSON object.

Pure.
"""

from __future__ import annotations

import base64
import json
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import types as spark

from magnetar.protos.message import OutgoingMessage
from magnetar.spark.errors import InvalidOption, InvalidSchema, RowRefused
from magnetar.spark.sink.options import ValueFormat, topic_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from magnetar.spark.sink.options import WriteOptions

MESSAGE_OVERHEAD_BYTES: Final = 16
"""The approximate bytes of a message in an entry besides payload, keys and properties."""

TOPICS_MAX: Final = 1_000
"""Topics that one task writes to. Each of them needs a producer."""

UNASSIGNED: Final = -1  # the sequence id of a message that is not yet in an entry
TIME_MS_MAX: Final = (1 << 63) - 1

_TEXT: Final = ("string", "binary")
_TIME: Final = ("timestamp", "timestamp_ntz", "bigint")
METADATA: Final[dict[str, tuple[str, ...]]] = {
    "__key": _TEXT,
    "__orderingKey": _TEXT,
    "__eventTime": _TIME,
    "__messageProperties": ("map<string,string>",),
    "__topic": ("string",),
}
ASSIGNED: Final = frozenset(
    {
        "__partition",
        "__messageId",
        "__index",
        "__publishTime",
        "__producerName",
        "__sequenceId",
        "__schemaVersion",
        "__redeliveryCount",
    }
)
_JSON_SCALARS: Final = (
    spark.StringType,
    spark.BooleanType,
    spark.ByteType,
    spark.ShortType,
    spark.IntegerType,
    spark.LongType,
    spark.FloatType,
    spark.DoubleType,
    spark.DateType,
    spark.TimestampType,
    spark.TimestampNTZType,
    spark.NullType,
)


class Target(NamedTuple):
    """The topic or partition that a message goes to, by its full name."""

    topic: str


class Addressed(NamedTuple):
    """One row as a message."""

    target: Target
    message: OutgoingMessage
    size: int  # the approximate bytes of the message in an entry
    row: int  # number of the row in its task, from 0


def check_columns(schema: spark.StructType, options: WriteOptions) -> None:
    """Check the columns of a write, on the driver. Raises InvalidSchema, InvalidOption."""
    for field in schema:
        kinds = METADATA.get(field.name)
        if kinds is not None and field.dataType.simpleString() not in kinds:
            kind = field.dataType.simpleString()
            raise InvalidSchema(field.name, f"must be {' or '.join(kinds)}, not {kind}")
        if field.name.startswith("__") and kinds is None and field.name not in ASSIGNED:
            names = ", ".join(METADATA)
            raise InvalidSchema(
                field.name, f"is unknown; the metadata columns of a sink are {names}"
            )
    if options.topic is None and "__topic" not in schema.names:
        raise InvalidOption("topic", "is required without a column __topic")
    others = _record_columns(schema)
    if "value" not in schema.names:
        if not others:
            raise InvalidSchema("value", "is missing, and there are no columns for a JSON object")
        if options.value_format is ValueFormat.BYTES:
            raise InvalidOption("valueFormat", "bytes needs the column 'value' (binary or string)")
        for name in others:
            _check_json(name, schema[name].dataType)
        return
    if others:
        raise InvalidSchema(
            others[0],
            "cannot be written together with the column 'value': move it into 'value', or remove"
            " 'value'",
        )
    value = schema["value"].dataType
    if value.simpleString() in _TEXT:
        if options.value_format is ValueFormat.JSON:
            raise InvalidOption(
                "valueFormat", f"json needs a struct, map or array, not {value.simpleString()}"
            )
        return
    if options.value_format is ValueFormat.BYTES:
        raise InvalidOption(
            "valueFormat", f"bytes needs binary or string, not {value.simpleString()}"
        )
    if not isinstance(value, (spark.StructType, spark.MapType, spark.ArrayType)):
        raise InvalidSchema(
            "value", f"must be binary, string, struct, map or array, not {value.simpleString()}"
        )
    _check_json("value", value)


class Encoder:
    """Makes messages from the batches of rows of one task."""

    def __init__(self, topic: str | None, partition: int) -> None:
        """`topic` None: the column __topic has it. `partition`: the task's number, for errors."""
        self._target = None if topic is None else Target(topic)
        self._partition = partition
        self._targets: dict[str, Target] = {}  # keyed by the text in the column
        self.rows = 0  # the number of rows so far

    def messages(self, batch: pa.RecordBatch) -> Iterator[Addressed]:
        """Yield the messages of the next batch, in order. Raises RowRefused."""
        first, self.rows = self.rows, self.rows + batch.num_rows
        names = batch.schema.names
        values = self._values(batch, first)
        keys = _column(batch, "__key")
        ordering_keys = _column(batch, "__orderingKey")
        times = self._times(batch, first)
        properties = _column(batch, "__messageProperties")
        topics = _column(batch, "__topic") if self._target is None else None
        assert self._target is not None or "__topic" in names
        for at, value in enumerate(values):
            row = first + at
            message = OutgoingMessage(b"" if value is None else value, UNASSIGNED)
            size = len(message.payload) + MESSAGE_OVERHEAD_BYTES
            if value is None:
                message.null_value = True
            if keys is not None and keys[at] is not None:
                message.partition_key, message.partition_key_b64 = _key(keys[at])
                size += len(message.partition_key.encode())
            if ordering_keys is not None and ordering_keys[at] is not None:
                message.ordering_key = _bytes(ordering_keys[at])
                size += len(message.ordering_key)
            if times is not None and times[at] is not None:
                message.event_time_ms = times[at] or 0
            if properties is not None and properties[at]:
                pairs = self._properties(properties[at], row)
                message.properties = pairs
                size += sum(
                    len(key.encode()) + len(text.encode()) + 16 for key, text in pairs.items()
                )
            target = self._target
            if target is None:
                assert topics is not None
                target = self._targets.get(topics[at]) or self._new_target(topics[at], row)
            yield Addressed(target, message, size, row)

    def refused(self, row: int, column: str, reason: str) -> RowRefused:
        return RowRefused(self._partition, row, column, reason)

    def _values(self, batch: pa.RecordBatch, first: int) -> Sequence[bytes | None]:
        if "value" not in batch.schema.names:
            kept = [name for name in batch.schema.names if not name.startswith("__")]
            return self._json(self._plain(batch.select(kept), first), first)
        column = batch.column("value")
        if pa.types.is_struct(column.type) or pa.types.is_nested(column.type):
            return self._json(self._plain(column, first), first)
        values: list[Any] = column.to_pylist()
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            return [None if text is None else text.encode() for text in values]
        return values

    def _plain(self, rows: pa.RecordBatch | pa.Array, first: int) -> list[Any]:
        """The rows, with maps as dictionaries."""
        try:
            return _plain(rows)
        except OverflowError:  # a date or timestamp that Python does not have
            for at in range(len(rows)):
                try:
                    _plain(rows.slice(at, 1))
                except OverflowError as error:
                    raise self.refused(first + at, "value", f"is not JSON: {error}") from None
            raise

    def _json(self, records: list[Any], first: int) -> list[bytes | None]:
        encoded: list[bytes | None] = []
        for at, record in enumerate(records):
            if record is None:
                encoded.append(None)
                continue
            try:
                encoded.append(_ENCODE(record).encode())
            except (ValueError, TypeError) as error:
                raise self.refused(first + at, "value", f"is not JSON: {error}") from None
        return encoded

    def _times(self, batch: pa.RecordBatch, first: int) -> list[int | None] | None:
        if "__eventTime" not in batch.schema.names:
            return None
        column = batch.column("__eventTime")
        is_ms = pa.types.is_integer(column.type)
        if not is_ms:
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        times: list[int | None] = column.to_pylist()
        for at, found in enumerate(times):
            if found is not None and found < 0:
                raise self.refused(first + at, "__eventTime", "is before 1970")
        return times if is_ms else [None if us is None else us // 1_000 for us in times]

    def _properties(self, pairs: list[tuple[str, str | None]], row: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, text in pairs:
            if text is None:
                raise self.refused(row, "__messageProperties", f"property {name!r} is null")
            found[name] = text
        return found

    def _new_target(self, text: str | None, row: int) -> Target:
        if text is None:
            raise self.refused(row, "__topic", "is null")
        try:
            topic = topic_of(text)
        except InvalidOption as error:
            raise self.refused(row, "__topic", error.reason) from None
        target = Target(str(topic))
        self._targets[text] = target
        if len(self._targets) > TOPICS_MAX:
            raise self.refused(
                row, "__topic", f"is one topic too many: a task writes to at most {TOPICS_MAX}"
            )
        return target


# Mechanics


def _record_columns(schema: spark.StructType) -> list[str]:
    return [name for name in schema.names if name != "value" and not name.startswith("__")]


def _check_json(column: str, kind: spark.DataType) -> None:
    """Raise InvalidSchema if JSON has no form for this type."""
    if isinstance(kind, spark.StructType):
        for field in kind:
            _check_json(f"{column}.{field.name}", field.dataType)
    elif isinstance(kind, spark.ArrayType):
        _check_json(column, kind.elementType)
    elif isinstance(kind, spark.MapType):
        if not isinstance(kind.keyType, spark.StringType):
            raise InvalidSchema(
                column, "is a map whose keys are not strings: JSON needs string keys"
            )
        _check_json(column, kind.valueType)
    elif not isinstance(kind, _JSON_SCALARS):
        raise InvalidSchema(
            column, f"is {kind.simpleString()}, for which JSON has no form: cast it first"
        )


def _column(batch: pa.RecordBatch, name: str) -> list[Any] | None:
    """The values of a column; None: there is no such column."""
    found: list[Any] | None = None
    if name in batch.schema.names:
        found = batch.column(name).to_pylist()
    return found


def _plain(rows: pa.RecordBatch | pa.Array) -> list[Any]:
    values: list[Any] = rows.to_pylist(maps_as_pydicts="strict")
    return values


def _key(key: str | bytes) -> tuple[str, bool]:
    """The key as text, and whether the text is base64. It is base64 if the key is not UTF-8."""
    if isinstance(key, str):
        return key, False
    try:
        return key.decode(), False
    except UnicodeDecodeError:
        return base64.b64encode(key).decode(), True


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _json_form(value: object) -> str:
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_ENCODE: Final[Callable[[object], str]] = json.JSONEncoder(
    allow_nan=False, separators=(",", ":"), ensure_ascii=False, default=_json_form
).encode
