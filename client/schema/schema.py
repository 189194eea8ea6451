"""The base class of schemas, and the schemas that need no library: bytes, text and JSON."""

from __future__ import annotations

import json
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from magnetar.client.schema import structure
from magnetar.client.schema.definition import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class SchemaType(IntEnum):
    """The types of schemas, with the names and numbers of Apache's client.

    The protocol has other numbers for some types, such as AUTO_CONSUME.
    """

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
    """The broker's information about a schema: type, name, definition and properties."""

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
        """Return the type of the schema."""
        return self._type

    def name(self) -> str:
        """Return the name of the schema."""
        return self._name

    def schema(self) -> str:
        """Return the definition as text.

        The definition of a key-value schema contains binary lengths: use `data` for it.
        """
        return self._data.decode("utf-8", "replace")

    def data(self) -> bytes:
        """Return the definition as bytes, as the broker stores it.

        Apache's client does not have this method.
        """
        return self._data

    def properties(self) -> dict[str, str]:
        """Return the properties of the schema."""
        return dict(self._properties)

    def __repr__(self) -> str:
        return f"SchemaInfo({self._type.name}, {self._name!r}, {self.schema()!r})"


class Schema:
    """The base class of schemas. `encode` converts a value to a payload, `decode` a payload to a
    value.

    A program can derive its own schema. The derived class passes to this constructor:

    - `record_cls`: the class of the values.
    - `schema_type`: the type that the broker registers.
    - `schema_definition`: the definition, which the constructor converts to JSON text.
    - `schema_name`: a name.
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
        """Return the value of a payload that a producer encoded with this version of the schema.

        Raises ValueError or TypeError for a payload that does not fit the schema.
        """
        raise NotImplementedError

    def decode_message(self, msg: Any) -> Any:
        """Return the value of a message whose producer used this version of the schema."""
        return self.decode(msg.data())

    def decoder_of(self, writer: SchemaInfo) -> Callable[[bytes], Any] | None:
        """Return the function that decodes payloads of another version of the schema.

        None: `decode` reads all versions. Raises ValueError if the schema cannot read the version.
        """
        return None

    def message_decoder_of(self, writer: SchemaInfo) -> Callable[[Any], Any] | None:
        """Return the function that decodes messages of another version of the schema.

        It differs from `decoder_of` if the value also depends on the message's key.
        """
        decode = self.decoder_of(writer)
        if decode is None:
            return None
        return lambda msg: None if msg.has_null_value() else decode(msg.data())

    @property
    def reads_keys(self) -> bool:
        """True when the key is part of the value: then a message without a payload has a value."""
        return False

    @property
    def needs_writer(self) -> bool:
        """True when the client must call `message_decoder_of` for each version."""
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
    """JSON objects of a Record class, a dataclass or a Pydantic model.

    The broker registers the Avro schema of the class. `decode` ignores keys that the class does not
    have, and uses the defaults of missing fields. Raises TypeError for a class or a field without
    an Avro type.
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
