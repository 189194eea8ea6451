"""The schemas that need no library: bytes, text and JSON, and the base of all schemas."""

from __future__ import annotations

import json
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from magnetar.client.schema import structure
from magnetar.client.schema.definition import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class SchemaType(IntEnum):
    """The types, with the names and numbers of Apache's client. The protocol has other numbers for
    some types, such as AUTO_CONSUME."""

    NONE = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    BOOLEAN = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FLOAT = 10
    DOUBLE = 11
    DATE = 12
    TIME = 13
    TIMESTAMP = 14
    KEY_VALUE = 15
    INSTANT = 16
    LOCAL_DATE = 17
    LOCAL_TIME = 18
    LOCAL_DATE_TIME = 19
    PROTOBUF_NATIVE = 20
    BYTES = -1
    AUTO_CONSUME = -3
    AUTO_PUBLISH = -4


class SchemaInfo:
    """The broker's information about a schema: its type, a name, and the definition as text."""

    def __init__(
        self,
        schema_type: SchemaType,
        name: str,
        schema: str | bytes,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self._type = schema_type
        self._name = name
        self._data = schema.encode() if isinstance(schema, str) else schema
        self._properties = dict(properties or {})

    def schema_type(self) -> SchemaType:
        return self._type

    def name(self) -> str:
        return self._name

    def schema(self) -> str:
        """Return the definition as text. That of a key-value schema has binary lengths before its
        parts: see `data`."""
        return self._data.decode("utf-8", "replace")

    def data(self) -> bytes:
        """Return the definition as it is stored. Apache's client does not have this method."""
        return self._data

    def properties(self) -> dict[str, str]:
        return dict(self._properties)

    def __repr__(self) -> str:
        return f"SchemaInfo({self._type.name}, {self._name!r}, {self.schema()!r})"


class Schema:
    """The base of schemas: `encode` makes the payload of a value, `decode` the reverse.

    A subclass of your own passes the class of its values, the type that the broker registers, the
    definition (JSON values) and a name.
    """

    def __init__(
        self,
        record_cls: Any,
        schema_type: SchemaType,
        schema_definition: Any,
        schema_name: str,
    ) -> None:
        self._record_cls = record_cls
        text = json.dumps(schema_definition, indent=True)
        self._schema_info = SchemaInfo(schema_type, schema_name, text)

    def encode(self, obj: Any) -> bytes:
        """Return the payload of a value. Raises TypeError or ValueError for a wrong value."""
        raise NotImplementedError

    def decode(self, data: bytes) -> Any:
        """Return the value of a payload that was written with this same schema."""
        raise NotImplementedError

    def decode_message(self, msg: Any) -> Any:
        """Return the value of a message that was written with this same schema."""
        return self.decode(msg.data())

    def decoder_of(self, writer: SchemaInfo) -> Callable[[bytes], Any] | None:
        """Return the function that decodes payloads of another version of the schema;
        None: `decode` reads all versions. Raises ValueError if the version cannot be decoded."""
        return None

    def message_decoder_of(self, writer: SchemaInfo) -> Callable[[Any], Any] | None:
        """Like `decoder_of`, for messages: the value may depend on the message's key."""
        decode = self.decoder_of(writer)
        if decode is None:
            return None
        return lambda msg: None if msg.has_null_value() else decode(msg.data())

    @property
    def reads_keys(self) -> bool:
        """Whether a message without a payload can have a value, because its key is a part of it."""
        return False

    @property
    def needs_writer(self) -> bool:
        """Whether `decoder_of` must be asked about each version."""
        return False

    def schema_info(self) -> SchemaInfo:
        """Return the schema as the client sends it to the broker."""
        return self._schema_info

    def attach_client(self, client: object) -> None:
        """Do nothing: consumers fetch the versions that they need. Apache's client needs this
        method."""

    def _validate_object_type(self, obj: Any) -> None:
        if not isinstance(obj, self._record_cls):
            raise TypeError(
                f"Invalid record obj of type {type(obj)} - expected type is {self._record_cls}"
            )

    def __str__(self) -> str:
        return type(self).__name__


class BytesSchema(Schema):
    """The payload is the value. The client sends no schema to the broker."""

    def __init__(self) -> None:
        super().__init__(bytes, SchemaType.BYTES, None, "BYTES")

    def encode(self, data: Any) -> bytes:
        self._validate_object_type(data)
        assert isinstance(data, bytes)
        return data

    def decode(self, data: bytes) -> Any:
        return data


class StringSchema(Schema):
    """Text in UTF-8. `decode` raises UnicodeDecodeError, a ValueError, for other bytes."""

    def __init__(self) -> None:
        super().__init__(str, SchemaType.STRING, None, "STRING")

    def encode(self, obj: Any) -> bytes:
        self._validate_object_type(obj)
        assert isinstance(obj, str)
        return obj.encode()

    def decode(self, data: bytes) -> Any:
        return data.decode()


class JsonSchema(Schema):
    """JSON of a Record class, a dataclass or a Pydantic model, which the broker knows by its Avro
    schema.

    `decode` ignores keys that the class does not have, and uses the defaults of missing fields.
    Raises TypeError for a class or a field without an Avro type.
    """

    def __init__(self, record_cls: Any) -> None:
        super().__init__(record_cls, SchemaType.JSON, structure.definition_of(record_cls), "JSON")

    def encode(self, obj: Any) -> bytes:
        self._validate_object_type(obj)
        if structure.is_model(self._record_cls):
            text: str = obj.model_dump_json()
            return text.encode()
        values = obj.fields() if isinstance(obj, Record) else structure.plain(obj)
        return json.dumps(values, default=_json_value, indent=True).encode()

    def decode(self, data: bytes) -> Any:
        if structure.is_model(self._record_cls):
            return self._record_cls.model_validate_json(data)
        try:
            tree = json.loads(data)
        except RecursionError:
            raise ValueError("the payload is nested too deeply") from None
        if not isinstance(tree, dict):
            raise ValueError(f"the payload is a JSON {type(tree).__name__}, not an object")
        return structure.made(self._record_cls, tree)


def _json_value(value: Any) -> Any:
    """Return the form in which Apache's client writes a value that JSON cannot express."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Record):
        return value.fields()
    raise TypeError(f"a value of {type(value)} has no form in JSON")
