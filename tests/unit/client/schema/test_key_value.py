"""Key-value schemas. The docstrings name the calls of Apache's Java client 4.0 that made the
bytes."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from magnetar.client.errors import InvalidMessage
from magnetar.client.message import Delivery, Message, MessageId
from magnetar.client.producing.outgoing import message_maker
from magnetar.client.schema.key_value import parts_of
from magnetar.protos.batch import ReceivedMessage
from magnetar.runtime.clock import SystemClock
from magnetar.schema import (
    AutoConsumeSchema,
    AvroSchema,
    BytesSchema,
    Integer,
    JsonSchema,
    KeyValue,
    KeyValueEncodingType,
    KeyValueSchema,
    Record,
    Schema,
    SchemaInfo,
    SchemaType,
    String,
    StringSchema,
)

INLINE, SEPARATED = KeyValueEncodingType.INLINE, KeyValueEncodingType.SEPARATED


class Old(Record):
    a = String(required=True)


class New(Record):
    a = String(required=True)
    b = Integer(default=7, required_default=True)


def texts(encoding: KeyValueEncodingType = INLINE) -> KeyValueSchema:
    return KeyValueSchema(StringSchema(), BytesSchema(), encoding)


def message(payload: bytes, key: str | None, *, b64: bool = True, null: bool = False) -> Message:
    received = ReceivedMessage(payload, {}, key, b64, None, 0, 0, null, -1)
    return Message(received, MessageId(), Delivery("t", -1, "p", 0, b"", 0, None, 0))


def test_the_definition_is_that_of_the_java_client() -> None:
    """`Schema.KeyValue(Schema.STRING, Schema.BYTES, SEPARATED).getSchemaInfo()`"""
    info = texts(SEPARATED).schema_info()
    assert (info.schema_type(), info.name(), info.data()) == (
        SchemaType.KEY_VALUE,
        "KeyValue",
        bytes(8),
    )
    properties = info.properties()
    assert properties["key.schema.type"], properties["value.schema.type"] == ("STRING", "BYTES")
    assert properties["key.schema.properties"] == "{}"
    assert properties["kv.encoding.type"] == "SEPARATED"
    avro = KeyValueSchema(StringSchema(), AvroSchema(Old)).schema_info()
    definition = AvroSchema(Old).schema_info().data()
    assert avro.data() == bytes(4) + len(definition).to_bytes(4) + definition


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (KeyValue("k", b"\0\0\0\7"), "000000016b0000000400000007"),
        (KeyValue(None, b"\0\0\0\7"), "ffffffff0000000400000007"),
        (KeyValue("k", None), "000000016bffffffff"),
        (KeyValue("", b"\0\0\0\7"), "000000000000000400000007"),
    ],
)
def test_inline_payloads_are_those_of_the_java_client(value: KeyValue, encoded: str) -> None:
    """`kv.encode(new KeyValue<>("k", 7))` of `Schema.KeyValue(STRING, INT32, INLINE)`"""
    assert texts().encode(value).hex() == encoded
    assert texts().decode(bytes.fromhex(encoded)) == value
    assert texts().decode_message(message(bytes.fromhex(encoded), None)) == value


@pytest.mark.parametrize(
    "payload",
    ["", "00", "ffffffff", "fffffffe00000000", "000000026b00000000", "0000000000000000ff"],
)
def test_inline_payloads_with_false_lengths_are_refused(payload: str) -> None:
    with pytest.raises(ValueError, match="bytes"):
        texts().decode(bytes.fromhex(payload))


def test_a_separated_key_is_the_key_of_the_message() -> None:
    make = message_maker(texts(SEPARATED), SystemClock())
    made, size = make(KeyValue("k", b"v"), {"a": "1"})
    assert (made.payload, made.partition_key, made.partition_key_b64) == (b"v", "aw==", True)
    assert made.properties == {"a": "1"}
    assert size > len(b"v") + len("aw==")
    bare, _ = make(KeyValue(None, b"v"))
    assert bare.partition_key is None
    deletion, _ = make(KeyValue("k", None))
    assert (deletion.partition_key, deletion.null_value) == ("aw==", True)
    assert make(None)[0].null_value
    with pytest.raises(InvalidMessage, match="partition_key"):
        make(KeyValue("k", b"v"), partition_key="other")
    with pytest.raises(InvalidMessage, match="partition_key"):
        make(KeyValue("k", b"v"), None, "other")
    inline, _ = message_maker(texts(), SystemClock())(KeyValue("k", b"v"), partition_key="other")
    assert inline.partition_key == "other"


def test_a_separated_value_is_read_with_its_key() -> None:
    schema = texts(SEPARATED)
    key = base64.b64encode(b"k").decode()
    assert schema.decode_message(message(b"v", key)) == KeyValue("k", b"v")
    assert schema.decode_message(message(b"v", "k", b64=False)) == KeyValue("k", b"v")
    assert schema.decode_message(message(b"v", None)) == KeyValue(None, b"v")
    assert schema.decode_message(message(b"", key, null=True)) == KeyValue("k", None)
    with pytest.raises(ValueError, match="base64"):
        schema.decode_message(message(b"v", "no base64"))
    with pytest.raises(ValueError, match="decode_message"):
        schema.decode(b"v")


@pytest.mark.parametrize("encoding", [INLINE, SEPARATED])
def test_each_part_is_read_with_the_version_with_which_it_was_written(
    encoding: KeyValueEncodingType,
) -> None:
    written = KeyValueSchema(AvroSchema(Old), AvroSchema(Old), encoding)
    reads = KeyValueSchema(AvroSchema(New), JsonSchema(Old), encoding)
    with_avro = KeyValueSchema(AvroSchema(New), AvroSchema(New), encoding)
    assert with_avro.needs_writer
    assert reads.needs_writer
    assert not texts().needs_writer
    value = KeyValue(Old(a="1"), Old(a="2"))
    payload = written.encode(value)
    key = base64.b64encode(AvroSchema(Old).encode(Old(a="1"))).decode()
    expected = KeyValue(New(a="1", b=7), New(a="2", b=7))
    for reader in (with_avro, AutoConsumeSchema()):
        decode = reader.message_decoder_of(written.schema_info())
        assert decode is not None
        found = decode(message(payload, key))
        if isinstance(reader, AutoConsumeSchema):
            assert (found.key["a"], dict(found.value)) == ("1", {"a": "2"})
        else:
            assert found == expected
    if encoding is INLINE:
        by_bytes = with_avro.decoder_of(written.schema_info())
        assert by_bytes is not None
        assert by_bytes(payload) == expected


@pytest.mark.parametrize(
    ("data", "properties", "problem"),
    [
        (b"\0", {}, "no key and value"),
        (bytes(9), {}, "1 bytes follow"),
        (bytes(8), {"kv.encoding.type": "OTHER"}, "OTHER"),
        (bytes(8), {"key.schema.type": "OTHER"}, "OTHER"),
    ],
)
def test_an_invalid_definition_is_refused(
    data: bytes, properties: dict[str, str], problem: str
) -> None:
    info = SchemaInfo(SchemaType.KEY_VALUE, "KeyValue", data, properties)
    for schema in (texts(), AutoConsumeSchema()):
        with pytest.raises(ValueError, match=problem):
            schema.message_decoder_of(info) if schema.needs_writer else parts_of(info)


def test_the_definition_of_the_cpp_client_is_read() -> None:
    """Apache's Java client writes the length -1 for a part without a definition."""
    info = SchemaInfo(SchemaType.KEY_VALUE, "KeyValue", b"\xff" * 8, {"key.schema.type": "STRING"})
    key, value, encoding = parts_of(info)
    assert (key.schema_type(), value.schema_type()) == (SchemaType.STRING, SchemaType.BYTES)
    assert (key.data(), value.data(), encoding) == (b"", b"", INLINE)


def test_a_schema_of_another_type_raises_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="type AVRO, not KEY_VALUE"):
        KeyValueSchema(AvroSchema(Old), StringSchema()).message_decoder_of(
            AvroSchema(Old).schema_info()
        )


@pytest.mark.parametrize("part", [texts(), AutoConsumeSchema(), "text", None])
def test_key_value_parts_must_be_simple_schemas(part: Any) -> None:
    for pair in ((part, StringSchema()), (StringSchema(), part)):
        with pytest.raises(TypeError, match="must be a schema of one value"):
            KeyValueSchema(*pair)
    wrong: Any = "INLINE"
    with pytest.raises(TypeError, match="encoding_type"):
        KeyValueSchema(StringSchema(), StringSchema(), wrong)
    wrong_value: Schema = texts()
    for value in ("k", KeyValue(1, b""), KeyValue("k", "text")):
        with pytest.raises((TypeError, ValueError)):
            wrong_value.encode(value)
