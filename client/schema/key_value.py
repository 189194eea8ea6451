"""Schemas of a key and a value, as Pulsar's Java client encodes them.

INLINE: the payload is the length of the key (4 bytes, big-endian; -1: None), the key, the length of
the value, and the value. SEPARATED: the payload is the value, and the key is the message's
`partition_key`, in base64. So Key_Shared subscriptions, routing and table views use this key.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from magnetar.client.enums import NamedEnum
from magnetar.client.schema.schema import Schema, SchemaInfo, SchemaType

_LENGTH_BYTES: Final = 4
_NONE: Final = b"\xff\xff\xff\xff"
_WITHOUT_DEFINITION: Final = frozenset((SchemaType.STRING, SchemaType.BYTES))

Decode = Callable[[bytes], Any]


class KeyValueEncodingType(NamedEnum):
    """The place of the key in a message. INLINE: in the payload. SEPARATED: in `partition_key`."""

    INLINE = 0
    SEPARATED = 1


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key and a value; each may be None."""

    key: Any
    value: Any


class KeyValueSchema(Schema):
    """A key and a value, each with a schema of its own. The values are KeyValue objects.

    The name and the encodings are those of Apache's Java client. Apache's Python client does not
    have this class.

    With SEPARATED, the key of the KeyValue becomes the key of the message. `send` then raises
    InvalidMessage for a `partition_key`.

    Raises TypeError if `key_schema` or `value_schema` is not a Schema, or is a KeyValueSchema or an
    AutoConsumeSchema.
    """

    def __init__(
        self,
        key_schema: Schema,
        value_schema: Schema,
        encoding_type: KeyValueEncodingType = KeyValueEncodingType.INLINE,
    ) -> None:
        for name, part in (("key_schema", key_schema), ("value_schema", value_schema)):
            given: object = part
            if not isinstance(given, Schema) or part.schema_info().schema_type() in (
                SchemaType.KEY_VALUE,
                SchemaType.AUTO_CONSUME,
            ):
                raise TypeError(f"{name} must be a schema of one value, not {part}")
        if not isinstance(encoding_type, KeyValueEncodingType):
            raise TypeError(f"encoding_type must be a KeyValueEncodingType, not {encoding_type!r}")
        super().__init__(KeyValue, SchemaType.KEY_VALUE, None, "KeyValue")
        self.key_schema = key_schema
        self.value_schema = value_schema
        self.encoding_type = encoding_type
        self._schema_info = _joined(
            key_schema.schema_info(), value_schema.schema_info(), encoding_type
        )

    @property
    def is_separated(self) -> bool:
        return self.encoding_type is KeyValueEncodingType.SEPARATED

    @property
    def reads_keys(self) -> bool:
        return self.is_separated

    def encode(self, obj: Any) -> bytes:
        """Return the payload of a KeyValue. With SEPARATED, it contains the value only."""
        key, value = self.encode_parts(obj)
        if self.is_separated:
            return value or b""
        return _sized(key) + _sized(value)

    def encode_parts(self, obj: Any) -> tuple[bytes | None, bytes | None]:
        """Return the encoded key and the encoded value; None for None."""
        self._validate_object_type(obj)
        key = None if obj.key is None else self.key_schema.encode(obj.key)
        value = None if obj.value is None else self.value_schema.encode(obj.value)
        return key, value

    def decode(self, data: bytes) -> Any:
        """Return the KeyValue of a payload.

        With SEPARATED, raises ValueError, because the payload has no key: use `decode_message`.
        """
        if self.is_separated:
            raise ValueError("with SEPARATED, the payload has no key; use decode_message")
        return _read_inline(data, self.key_schema.decode, self.value_schema.decode)

    def decode_message(self, msg: Any) -> Any:
        if not self.is_separated:
            return self.decode(msg.data())
        return _read_separated(msg, self.key_schema.decode, self.value_schema.decode)

    @property
    def needs_writer(self) -> bool:
        return self.key_schema.needs_writer or self.value_schema.needs_writer

    def decoder_of(self, writer: SchemaInfo) -> Decode | None:
        parts = self._part_decoders(writer)
        return lambda data: _read_inline(data, *parts)

    def message_decoder_of(self, writer: SchemaInfo) -> Callable[[Any], Any] | None:
        if not self.is_separated:
            return super().message_decoder_of(writer)
        parts = self._part_decoders(writer)
        return lambda msg: _read_separated(msg, *parts)

    def _part_decoders(self, writer: SchemaInfo) -> tuple[Decode, Decode]:
        key, value, _ = parts_of(writer)
        return (
            self.key_schema.decoder_of(key) or self.key_schema.decode,
            self.value_schema.decoder_of(value) or self.value_schema.decode,
        )

    def __str__(self) -> str:
        return f"KeyValueSchema({self.encoding_type.name},{self.key_schema},{self.value_schema})"


def parts_of(info: SchemaInfo) -> tuple[SchemaInfo, SchemaInfo, KeyValueEncodingType]:
    """Return the schemas of the key and of the value, and the encoding.

    Raises ValueError for a schema of another type and for a malformed definition.
    """
    if info.schema_type() is not SchemaType.KEY_VALUE:
        found = info.schema_type().name
        raise ValueError(f"the message was written with a schema of type {found}, not KEY_VALUE")
    key, rest = _taken(info.data())
    value, rest = _taken(rest)
    if rest:
        raise ValueError(f"{len(rest)} bytes follow the value's definition")
    properties = info.properties()
    encoding = properties.get("kv.encoding.type") or KeyValueEncodingType.INLINE.name
    if encoding not in KeyValueEncodingType.__members__:
        raise ValueError(f"kv.encoding.type is {encoding!r}; expected INLINE or SEPARATED")
    return (
        _part("key", key or b"", properties),
        _part("value", value or b"", properties),
        KeyValueEncodingType[encoding],
    )


def decoder_of_parts(
    key: Decode, value: Decode, encoding: KeyValueEncodingType
) -> Callable[[Any], Any]:
    """Return the function that decodes a message. `key` and `value` decode its parts."""
    if encoding is KeyValueEncodingType.SEPARATED:
        return lambda msg: _read_separated(msg, key, value)
    return lambda msg: None if msg.has_null_value() else _read_inline(msg.data(), key, value)


def _joined(key: SchemaInfo, value: SchemaInfo, encoding: KeyValueEncodingType) -> SchemaInfo:
    properties = {"kv.encoding.type": encoding.name}
    for name, part in (("key", key), ("value", value)):
        properties[f"{name}.schema.name"] = part.name()
        properties[f"{name}.schema.type"] = part.schema_type().name
        properties[f"{name}.schema.properties"] = json.dumps(part.properties())
    definition = _sized(_definition(key)) + _sized(_definition(value))
    return SchemaInfo(SchemaType.KEY_VALUE, "KeyValue", definition, properties)


def _definition(part: SchemaInfo) -> bytes:
    return b"" if part.schema_type() in _WITHOUT_DEFINITION else part.data()


def _part(name: str, definition: bytes, properties: dict[str, str]) -> SchemaInfo:
    kind = properties.get(f"{name}.schema.type", SchemaType.BYTES.name)
    if kind not in SchemaType.__members__:
        raise ValueError(f"{name}.schema.type {kind!r} is unknown")
    return SchemaInfo(SchemaType[kind], properties.get(f"{name}.schema.name", ""), definition)


def _sized(part: bytes | None) -> bytes:
    return _NONE if part is None else len(part).to_bytes(_LENGTH_BYTES) + part


def _taken(data: bytes) -> tuple[bytes | None, bytes]:
    """Return the first part and the rest. Raises ValueError if the part is not complete."""
    length = int.from_bytes(data[:_LENGTH_BYTES], signed=True)
    end = _LENGTH_BYTES + max(length, 0)
    if length < -1 or len(data) < end:
        raise ValueError(
            f"no key and value: {len(data)} bytes cannot hold a part of length {length}"
        )
    return (None if length < 0 else data[_LENGTH_BYTES:end]), data[end:]


def _read_inline(data: bytes, key: Decode, value: Decode) -> KeyValue:
    first, rest = _taken(data)
    second, rest = _taken(rest)
    if rest:
        raise ValueError(f"{len(rest)} bytes follow the value")
    return KeyValue(_read(key, first), _read(value, second))


def _read_separated(msg: Any, key: Decode, value: Decode) -> KeyValue:
    payload = None if msg.has_null_value() else msg.data()
    return KeyValue(_read(key, _key_bytes(msg)), _read(value, payload))


def _read(decode: Decode, data: bytes | None) -> Any:
    return None if data is None else decode(data)


def _key_bytes(msg: Any) -> bytes | None:
    text: str | None = msg.received.partition_key
    if text is None:
        return None
    if not msg.received.partition_key_b64:
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the key is no base64: {error}") from None
