"""Avro schemas: the binary encoding of values, with fastavro."""

from __future__ import annotations

import io
import json
import struct
from typing import TYPE_CHECKING, Any, Final

from magnetar.client.schema import structure
from magnetar.client.schema.avro_bounds import payload_check
from magnetar.client.schema.schema import Schema, SchemaInfo, SchemaType

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    import fastavro
except ImportError:  # the extra is not installed
    fastavro = None

_REFUSALS: Final = (ValueError, AttributeError, KeyError, IndexError, OverflowError, struct.error)
"""The errors that fastavro raises for values that do not fit, besides TypeError."""


class AvroLibraryMissing(ImportError):
    """fastavro is not installed."""

    def __init__(self) -> None:
        super().__init__("AvroSchema needs fastavro: pip install 'magnetar[avro]'")


class AvroSchema(Schema):
    """Avro's binary encoding.

    - `record_cls`: the class of the values: a Record class, a dataclass or a Pydantic model.
    - `schema_definition`: with `record_cls` None, the Avro schema of values that are dicts.

    A consumer decodes a message with the schema version of its producer, then adapts the value to
    this schema: new fields get their defaults, and removed fields are dropped.

    Raises AvroLibraryMissing (an ImportError) if fastavro is not installed:
    `pip install 'magnetar[avro]'`. Raises ValueError if both parameters are None, or if the
    definition is not valid. Raises TypeError for a class or a field without an Avro type.
    """

    def __init__(self, record_cls: Any, schema_definition: Any = None) -> None:
        if fastavro is None:
            raise AvroLibraryMissing
        if record_cls is None and schema_definition is None:
            raise ValueError("AvroSchema needs a record_cls or a schema_definition")
        if record_cls is not None:
            schema_definition = structure.definition_of(record_cls)
        self._schema = schema_definition
        self._parsed = _parsed(schema_definition)
        self._check = payload_check(self._parsed, may_skip=False)
        super().__init__(record_cls, SchemaType.AVRO, schema_definition, "AVRO")

    def encode(self, obj: Any) -> bytes:
        if self._record_cls is not None:
            self._validate_object_type(obj)
        elif not isinstance(obj, dict):
            raise ValueError("If using the custom schema, the record data should be dict type.")
        buffer = io.BytesIO()
        try:
            fastavro.schemaless_writer(buffer, self._parsed, structure.plain(obj))
        except _REFUSALS as error:
            raise ValueError(f"the value does not fit the Avro schema: {error}") from error
        return buffer.getvalue()

    def encode_dict(self, d: Any) -> Any:
        """Return the dict in the form that fastavro encodes: records as dicts, enums by name (those
        of a Pydantic model by value)."""
        return structure.plain(d)

    def decode(self, data: bytes) -> Any:
        return self._decoded(data, self._parsed, self._parsed, self._check)

    @property
    def needs_writer(self) -> bool:
        return True

    def decoder_of(self, writer: SchemaInfo) -> Callable[[bytes], Any] | None:
        if writer.schema_type() is not SchemaType.AVRO:
            found = writer.schema_type().name
            raise ValueError(f"the message was written with a schema of type {found}, not AVRO")
        try:
            parsed = _parsed(json.loads(writer.schema()))
        except RecursionError:
            raise ValueError("the writer's schema is nested too deeply") from None
        reader = self._reader_of(parsed)
        check = payload_check(parsed, may_skip=reader != parsed)
        return lambda data: self._decoded(data, parsed, reader, check)

    def _reader_of(self, writer: Any) -> Any:
        """Return the schema to read with. It also reads a record that has another name, as in
        Apache's client."""
        if not (isinstance(writer, dict) and isinstance(self._schema, dict) and "name" in writer):
            return self._parsed
        if _last_part(writer["name"]) == _last_part(str(self._schema.get("name"))):
            return self._parsed
        aliases = [*self._schema.get("aliases", ()), writer["name"]]
        return _parsed({**self._schema, "aliases": aliases})

    def _decoded(
        self, data: bytes, writer: Any, reader: Any, check: Callable[[bytes], None] | None
    ) -> Any:
        try:
            if check is not None:
                check(data)
            found = fastavro.schemaless_reader(io.BytesIO(data), writer, reader)
        except (
            EOFError,
            RecursionError,
            TypeError,  # a writer's schema with a name of a field that is no string
            *_REFUSALS,
            fastavro.read.SchemaResolutionError,
        ) as error:
            raise ValueError(f"the payload does not fit the Avro schema: {error!r}") from error
        if self._record_cls is None:
            return found
        return structure.made(self._record_cls, found)


def _parsed(definition: Any) -> Any:
    try:
        return fastavro.parse_schema(definition)
    except (
        fastavro.schema.SchemaParseException,
        fastavro.schema.UnknownType,
        TypeError,
        *_REFUSALS,
    ) as error:
        raise ValueError(f"no valid Avro schema: {error!r}") from error


def _last_part(name: str) -> str:
    """Return the name without its namespace."""
    return name.rpartition(".")[2]
