"""Decodes the payloads of rows as the options say; with a KeyValue schema also their keys."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_type

from magnetar.protos.names import TopicName
from magnetar.spark.avro import avro_decoder, parse_avro_schema
from magnetar.spark.decode import SCHEMA_VERSION
from magnetar.spark.errors import BadRecord
from magnetar.spark.key_value import split
from magnetar.spark.primitives import primitive_decoder
from magnetar.spark.protobuf import parse_protobuf_schema, protobuf_decoder
from magnetar.spark.source.options import KeyValueEncoding, Mode, ValueFormat
from magnetar.spark.source.schema import CORRUPT, ERROR, schema_of
from magnetar.spark.values import decode_values, json_decoder, text_decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from magnetar.spark.decode import Rows
    from magnetar.spark.source.options import ReadOptions
    from magnetar.spark.source.topic_schemas import Versions

    Decode = Callable[[pa.Array], pa.Array]
    DecoderOf = Callable[[bytes | None], Decode | None]  # of a schema version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """A decoded column."""

    column: str  # value or key
    kind: pa.DataType
    decode: Decode | None  # None: the bytes are the value


@dataclass(frozen=True, slots=True)
class _Auto:
    """The value, decoded by the versions of the topic's schema."""

    column: str
    kind: pa.DataType
    versions: Versions


class ValueStage:
    """Turns rows as they are stored into rows as Spark expects them."""

    def __init__(self, options: ReadOptions, schema: pa.Schema) -> None:
        """`schema`: the columns that Spark expects."""
        self._options = options
        self._schema = schema
        self._mode = options.mode
        self._pushed = options.pushed
        names = schema.names
        every = CORRUPT in names or ERROR in names  # both parts are decoded to find bad rows
        wanted = [name for name in ("value", "key") if every or name in names]
        self._parts = _parts(options, schema, wanted) if options.decodes else []
        self._inline = (
            options.key_format is not None and options.key_value_encoding is KeyValueEncoding.INLINE
        )
        # The columns that the rows have before the payloads are decoded.
        self.stored = schema
        if self._parts:
            kept = [name for name in names if name not in ("value", "key", CORRUPT, ERROR)]
            columns = [part.column for part in self._parts]
            sources = {"value"} if self._inline or every or "value" in columns else set()
            if not self._inline and "key" in columns:
                sources.add("__key")
            if options.mode is Mode.DLQ:
                sources |= {"value", "__key"}
            if any(isinstance(part, _Auto) for part in self._parts):
                sources.add(SCHEMA_VERSION)
            added = sorted(sources - set(kept))
            fields = [schema.field(name) for name in kept]
            self.stored = pa.schema([*fields, *(pa.field(name, pa.binary()) for name in added)])

    def take(self, rows: Rows, topic: str) -> pa.RecordBatch:
        """Return the rows as Spark expects them, without rows that a pushed filter excludes.

        Raises BadRecord with mode failfast, and WriteRefused, WriteStalled, RowRefused with mode
        dlq. With valueFormat auto, also raises ReadRefused, ReadStalled.
        """
        place_of = rows.places()
        ledger, _, _ = place_of(0)
        batch = rows.take()
        mask = None if self._pushed is None else self._pushed.mask(batch)
        if mask is not None:
            kept = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
            place_of = _of_kept(place_of, kept.tolist())
            batch = batch.filter(mask)
        if not self._parts:
            return batch
        columns = {name: batch.column(name) for name in batch.schema.names}
        stored = dict(columns)
        decoded, bad = self._decoded(columns, topic, ledger)
        if bad and self._mode is Mode.FAILFAST:
            row = min(bad)
            ledger, entry, index = place_of(row)
            why = f"message {max(index, 0)} of the entry: {bad[row]}"
            raise BadRecord(topic, ledger, entry, why)
        if bad:
            sound = np.ones(batch.num_rows, dtype=bool)
            sound[list(bad)] = False
            # A row with a bad key has no value either.
            decoded = {
                name: pc.if_else(pa.array(sound), found, pa.scalar(None, found.type))
                for name, found in decoded.items()
            }
        if self._mode is Mode.PERMISSIVE and "value" in columns:
            columns |= _bad_columns(columns["value"], bad)
        columns |= decoded
        arrays = [columns[field.name].cast(field.type) for field in self._schema]
        whole = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if bad and self._mode is Mode.DLQ:
            from magnetar.spark.source.dead_letters import send_letters  # loads the sink

            send_letters(self._options, TopicName.parse(topic), stored, bad, place_of)
            whole = whole.filter(pa.array(sound))
        if bad and self._mode is Mode.DROPMALFORMED:
            row = min(bad)
            ledger, entry, index = place_of(row)
            log.warning(
                "%d of %d records dropped while reading topic %s (mode dropmalformed); the first"
                " one is message %d of entry %d:%d: %s",
                *(len(bad), batch.num_rows, topic, max(index, 0), ledger, entry, bad[row]),
            )
            whole = whole.filter(pa.array(sound))
        return whole

    def _decoded(
        self, columns: dict[str, pa.Array], topic: str, ledger: int
    ) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """The decoded columns, and the reason for each row that is bad. `ledger`: of the first
        row."""
        bad: dict[int, str] = {}
        if self._inline:
            key, value, bad = split(columns["value"])
            sources = {"key": key, "value": value}
        else:
            sources = {"key": columns.get("__key"), "value": columns.get("value")}
        decoded = {}
        for part in self._parts:
            found = sources[part.column]
            if isinstance(part, _Auto):
                versions = columns[SCHEMA_VERSION]
                decoder_of = partial(part.versions.decoder, topic, ledger)
                found, bad = _by_version(part.kind, decoder_of, found, versions)
            elif part.decode is not None:
                found, reasons = decode_values(found, part.decode, part.kind)
                where = "key: " if part.column == "key" else ""
                bad = {row: where + reason for row, reason in reasons.items()} | bad
            decoded[part.column] = found
        return decoded, bad


def _of_kept(
    place_of: Callable[[int], tuple[int, int, int]], kept: list[int]
) -> Callable[[int], tuple[int, int, int]]:
    return lambda row: place_of(kept[row])


def _by_version(
    kind: pa.DataType, decoder_of: DecoderOf, values: pa.Array, versions: pa.Array
) -> tuple[pa.Array, dict[int, str]]:
    """Decode each value by the schema version of its message. Returns the decoded values, and the
    reason for each row that is bad."""
    found: list[pa.Array] = []
    rows: list[NDArray[np.int64]] = []
    bad: dict[int, str] = {}
    for version in versions.unique().to_pylist():
        is_of = versions.is_null() if version is None else pc.equal(versions, version)
        mask = pc.fill_null(is_of, fill_value=False)
        at = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
        some, reasons = _of_version(kind, decoder_of, values.filter(mask), version)
        found.append(some)
        rows.append(at)
        bad |= {int(at[row]): reason for row, reason in reasons.items()}
    if len(found) == 1:
        return found[0], bad
    order = np.argsort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)
    return pa.concat_arrays([pa.nulls(0, kind), *found]).take(pa.array(order)), bad


def _of_version(
    kind: pa.DataType, decoder_of: DecoderOf, values: pa.Array, version: bytes | None
) -> tuple[pa.Array, dict[int, str]]:
    try:
        decode = decoder_of(version)
    except ValueError as error:
        decode, reason = None, str(error)
    else:
        if decode is not None:
            return decode_values(values, decode, kind)
        if kind == pa.binary():
            return values, {}
        reason = "the message was written without a schema"
    given = values.is_valid().to_numpy(zero_copy_only=False)
    bad = dict.fromkeys(np.flatnonzero(given).tolist(), reason)
    return pa.nulls(len(values), kind), bad


def _parts(options: ReadOptions, expected: pa.Schema, wanted: list[str]) -> list[_Part | _Auto]:
    if options.value_format is ValueFormat.AUTO:
        if "value" not in expected.names:
            return []
        from magnetar.spark.source.topic_schemas import Versions  # loads the client

        kind = expected.field("value").type
        return [_Auto("value", kind, Versions(options, kind))]
    schema = schema_of(options)
    parts: list[_Part | _Auto] = []
    for column in wanted:
        is_value = column == "value"
        found = options.value_format if is_value else options.key_format
        if found is not None:
            kind = to_arrow_type(schema[column].dataType, timezone="UTC")
            text = options.value_schema if is_value else options.key_schema
            parts.append(_Part(column, kind, _decoder(found, text, kind)))
    return parts


def _decoder(found: ValueFormat, schema: str, kind: pa.DataType) -> Decode | None:
    match found:
        case ValueFormat.BYTES:
            return None
        case ValueFormat.STRING:
            return text_decoder()
        case ValueFormat.JSON:
            return json_decoder(kind)
        case ValueFormat.AVRO:
            return avro_decoder(parse_avro_schema(schema), kind)
        case ValueFormat.PROTOBUF:
            return protobuf_decoder(parse_protobuf_schema(schema), kind)
    return primitive_decoder(found.value, kind)


def _bad_columns(payloads: pa.Array, bad: dict[int, str]) -> dict[str, pa.Array]:
    rows = len(payloads)
    errors = np.full(rows, None, dtype=object)
    for row, error in bad.items():
        errors[row] = error
    error = pa.array(errors, pa.string())
    return {CORRUPT: pc.if_else(error.is_valid(), payloads, _NO_PAYLOAD), ERROR: error}


_NO_PAYLOAD: Final = pa.scalar(None, pa.binary())
