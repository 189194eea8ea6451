"""AutoConsumeSchema: a consumer decodes each message with the schema of its producer.

The name follows `Schema.AUTO_CONSUME` of Apache's Java client.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.message import DecodeError

from magnetar.client.schema.avro import AvroLibraryMissing, AvroSchema
from magnetar.client.schema.key_value import decoder_of_parts, parts_of
from magnetar.client.schema.schema import Schema, SchemaInfo, SchemaType
from magnetar.protos.descriptors import pool_of

Decode = Callable[[bytes], Any]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_NANOS_PER_MICRO: Final = 1_000
_NANOS_PER_DAY: Final = 86_400 * 1_000_000_000


class GenericRecord(Mapping[str, Any]):
    """A record of a schema that the program does not know. `record["field"]` is a field's value.

    Nested records are dicts.
    """

    def __init__(self, fields: Mapping[str, Any], native: Any, info: SchemaInfo) -> None:
        self._fields = fields
        self._native = native
        self._info = info

    def schema_info(self) -> SchemaInfo:
        """Return the schema with which the record was written."""
        return self._info

    def native_object(self) -> Any:
        """Return the decoded object: a dict, or a Protobuf message for PROTOBUF_NATIVE."""
        return self._native

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"GenericRecord({dict(self._fields)!r})"


class AutoConsumeSchema(Schema):
    """Decodes each message with the schema of its producer. For consumers, readers and table views
    only.

    The value of an Avro record, a JSON object or a PROTOBUF_NATIVE message is a GenericRecord. The
    value of a key-value message is a KeyValue. The value of a primitive type has the corresponding
    Python type; DATE and TIME are datetimes, like TIMESTAMP. The value of a message without a
    schema is bytes.
    """

    def __init__(self) -> None:
        super().__init__(object, SchemaType.AUTO_CONSUME, None, "AutoConsume")
        self._schema_info = SchemaInfo(SchemaType.AUTO_CONSUME, "AutoConsume", b"")

    @property
    def reads_keys(self) -> bool:
        return True

    @property
    def needs_writer(self) -> bool:
        return True

    def encode(self, obj: Any) -> bytes:
        """Raises TypeError: this schema only reads."""
        raise TypeError("AutoConsumeSchema only reads; a producer needs the schema of its values")

    def decode(self, data: bytes) -> Any:
        return data

    def decode_message(self, msg: Any) -> Any:
        return None if msg.has_null_value() else msg.data()

    def decoder_of(self, writer: SchemaInfo) -> Decode:
        return _decoder_of(writer)

    def message_decoder_of(self, writer: SchemaInfo) -> Callable[[Any], Any] | None:
        if writer.schema_type() is not SchemaType.KEY_VALUE:
            return super().message_decoder_of(writer)
        key, value, encoding = parts_of(writer)
        return decoder_of_parts(_decoder_of(key), _decoder_of(value), encoding)


def _decoder_of(writer: SchemaInfo) -> Decode:
    """Return the decoder of payloads of this schema. Raises ValueError if there is none."""
    kind = writer.schema_type()
    primitive = _PRIMITIVES.get(kind)
    if primitive is not None:
        return _checked(primitive, kind)
    try:
        match kind:
            case SchemaType.AVRO:
                return _avro(writer)
            case SchemaType.JSON:
                return lambda data: _json(data, writer)
            case SchemaType.PROTOBUF_NATIVE:
                return _protobuf(writer)
    except (RecursionError, KeyError, TypeError, AvroLibraryMissing) as error:
        raise ValueError(f"the {kind.name} schema cannot be used: {error}") from error
    raise ValueError(f"AutoConsumeSchema does not support schemas of type {kind.name}")


def _checked(decode: Decode, kind: SchemaType) -> Decode:
    def checked(data: bytes) -> Any:
        try:
            return decode(data)
        except (struct.error, OverflowError, UnicodeDecodeError) as error:
            raise ValueError(f"the payload is no {kind.name}: {error}") from None

    return checked


def _avro(writer: SchemaInfo) -> Decode:
    decode = AvroSchema(None, schema_definition=json.loads(writer.data())).decode

    def record(data: bytes) -> Any:
        found = decode(data)
        return GenericRecord(found, found, writer) if isinstance(found, dict) else found

    return record


def _json(data: bytes, writer: SchemaInfo) -> GenericRecord:
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("the payload is too deeply nested") from None
    if not isinstance(found, dict):
        raise ValueError(f"the payload is a JSON {type(found).__name__}, not an object")
    return GenericRecord(found, found, writer)


def _protobuf(writer: SchemaInfo) -> Decode:
    definition = json.loads(writer.data())
    try:
        pool = pool_of(
            descriptor_pb2.FileDescriptorSet.FromString(
                base64.b64decode(definition["fileDescriptorSet"])
            )
        )
    except (DecodeError, ValueError) as error:
        raise ValueError(f"no valid PROTOBUF_NATIVE schema: {error}") from None
    root = message_factory.GetMessageClass(
        pool.FindMessageTypeByName(definition["rootMessageTypeName"])
    )

    def record(data: bytes) -> GenericRecord:
        try:
            found = root.FromString(data)
        except DecodeError as error:
            raise ValueError(f"the payload is no {root.DESCRIPTOR.full_name}: {error}") from None
        return GenericRecord(_fields(found), found, writer)

    return record


def _fields(message: Any) -> dict[str, Any]:
    """Return the fields of a message. An unset field is None if Protobuf tracks its
    presence; otherwise it has its default value."""
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.message_type.GetOptions().map_entry:
        # By number, as Protobuf does: a definition may give the fields other names.
        _, of_value = sorted(field.message_type.fields, key=lambda it: it.number)
        return {key: _plain(of_value, item) for key, item in value.items()}
    return [_fields(item) for item in value] if field.is_repeated else _fields(value)


def _number(form: str) -> Decode:
    unpack = struct.Struct(f">{form}").unpack
    return lambda data: unpack(data)[0]


def _moment(data: bytes) -> datetime:
    (millis,) = struct.unpack(">q", data)
    return _EPOCH + timedelta(milliseconds=millis)


def _instant(data: bytes) -> datetime:
    seconds, nanos = struct.unpack(">qi", data)
    return _EPOCH + timedelta(seconds=seconds, microseconds=nanos // _NANOS_PER_MICRO)


def _day(days: int) -> date:
    try:
        return date.fromordinal(_EPOCH_DAY + days)
    except ValueError as error:
        raise OverflowError(str(error)) from None


def _time(nanos: int) -> time:
    if not 0 <= nanos < _NANOS_PER_DAY:
        raise OverflowError(f"{nanos} ns are no time of a day")
    return (_EPOCH + timedelta(microseconds=nanos // _NANOS_PER_MICRO)).time()


def _local_date(data: bytes) -> date:
    (days,) = struct.unpack(">q", data)
    return _day(days)


def _local_time(data: bytes) -> time:
    (nanos,) = struct.unpack(">q", data)
    return _time(nanos)


def _local_date_time(data: bytes) -> datetime:
    days, nanos = struct.unpack(">qq", data)
    return datetime.combine(_day(days), _time(nanos))


_PRIMITIVES: Final[Mapping[SchemaType, Decode]] = {
    SchemaType.BYTES: bytes,
    SchemaType.STRING: bytes.decode,
    SchemaType.BOOLEAN: lambda data: struct.unpack(">B", data)[0] != 0,
    SchemaType.INT8: _number("b"),
    SchemaType.INT16: _number("h"),
    SchemaType.INT32: _number("i"),
    SchemaType.INT64: _number("q"),
    SchemaType.FLOAT: _number("f"),
    SchemaType.DOUBLE: _number("d"),
    SchemaType.DATE: _moment,
    SchemaType.TIME: _moment,
    SchemaType.TIMESTAMP: _moment,
    SchemaType.INSTANT: _instant,
    SchemaType.LOCAL_DATE: _local_date,
    SchemaType.LOCAL_TIME: _local_time,
    SchemaType.LOCAL_DATE_TIME: _local_date_time,
}
"""The formats of Pulsar's Java client. Numbers are big-endian. DATE, TIME and TIMESTAMP are
milliseconds since 1970."""
