"""AutoConsumeSchema: values of schemas that the program does not know.

The bytes of primitive values are those of Apache's Java client 4.0: `Schema.INT16.encode(-300)`.
"""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime, time
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2
from google.protobuf.message import Message

from magnetar.client.errors import InvalidConfiguration
from magnetar.client.options import ProducerOptions
from magnetar.client.schema import avro
from magnetar.protos import pulsar_pb2 as pb
from magnetar.schema import (
    AutoConsumeSchema,
    AvroSchema,
    GenericRecord,
    Integer,
    JsonSchema,
    ProtobufNativeSchema,
    Record,
    SchemaInfo,
    SchemaType,
    String,
)

MOMENT = datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)


class Inner(Record):
    x = Integer(required=True)


class Order(Record):
    item = String(required=True)
    inner = Inner(required=True)


ORDER = Order(item="lens", inner=Inner(x=5))


def decoded(info: SchemaInfo, payload: bytes) -> Any:
    return AutoConsumeSchema().decoder_of(info)(payload)


@pytest.mark.parametrize(
    ("kind", "encoded", "value"),
    [
        (SchemaType.STRING, "c3b6", "ö"),
        (SchemaType.BYTES, "00ff", b"\0\xff"),
        (SchemaType.BOOLEAN, "01", True),
        (SchemaType.INT8, "fe", -2),
        (SchemaType.INT16, "fed4", -300),
        (SchemaType.INT32, "fffeee90", -70_000),
        (SchemaType.INT64, "0000010000000000", 1 << 40),
        (SchemaType.FLOAT, "3fc00000", 1.5),
        (SchemaType.DOUBLE, "c002000000000000", -2.25),
        (SchemaType.DATE, "0000018bcfe5687b", MOMENT),
        (SchemaType.TIME, "0000018bcfe5687b", MOMENT),
        (SchemaType.TIMESTAMP, "0000018bcfe5687b", MOMENT),
        (SchemaType.INSTANT, "000000006553f100075bcd15", MOMENT.replace(microsecond=123_456)),
        (SchemaType.LOCAL_DATE, "0000000000004d46", date(2024, 2, 29)),
        (SchemaType.LOCAL_TIME, "00002b5792b49315", time(13, 14, 15, 123_456)),
        (
            SchemaType.LOCAL_DATE_TIME,
            "ffffffffffffffff00004e941a197f88",
            datetime(1969, 12, 31, 23, 59, 58, 5),  # noqa: DTZ001 - Java's LocalDateTime
        ),
    ],
)
def test_primitive_values_are_those_of_the_java_client(
    kind: SchemaType, encoded: str, value: object
) -> None:
    found = decoded(SchemaInfo(kind, kind.name, ""), bytes.fromhex(encoded))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (SchemaType.STRING, b"\xff"),
        (SchemaType.BOOLEAN, b""),
        (SchemaType.INT32, b"123"),
        (SchemaType.TIMESTAMP, b"\x7f" + bytes(7)),
        (SchemaType.INSTANT, bytes(8)),
        (SchemaType.LOCAL_DATE, b"\x7f" + bytes(7)),
        (SchemaType.LOCAL_TIME, b"\x7f" + bytes(7)),
        (SchemaType.LOCAL_DATE_TIME, bytes(8)),
    ],
)
def test_invalid_payloads_raise_value_error(kind: SchemaType, payload: bytes) -> None:
    with pytest.raises(ValueError, match=f"the payload is no {kind.name}"):
        decoded(SchemaInfo(kind, kind.name, ""), payload)


@pytest.mark.parametrize("schema", [AvroSchema(Order), JsonSchema(Order)])
def test_records_are_mappings(schema: Any) -> None:
    found = decoded(schema.schema_info(), schema.encode(ORDER))
    assert isinstance(found, GenericRecord)
    assert found == {"item": "lens", "inner": {"x": 5}}
    assert (found["item"], list(found), len(found)) == ("lens", ["item", "inner"], 2)
    assert found.native_object() == {"item": "lens", "inner": {"x": 5}}
    assert found.schema_info() is not None
    assert "lens" in repr(found)
    with pytest.raises(KeyError):
        found["other"]


def file_of(name: str, *imports: str) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3", dependency=imports)
    file.message_type.add(name="M")
    return file


def definition_of(root: str, *files: descriptor_pb2.FileDescriptorProto) -> str:
    described = descriptor_pb2.FileDescriptorSet(file=files).SerializeToString()
    return json.dumps(
        {"fileDescriptorSet": base64.b64encode(described).decode(), "rootMessageTypeName": root}
    )


def test_protobuf_messages_are_mappings() -> None:
    schema = ProtobufNativeSchema(pb.CommandSubscribe)
    value = pb.CommandSubscribe(
        topic="t",
        subscription="s",
        subType=pb.CommandSubscribe.Shared,
        consumer_id=1,
        request_id=2,
        metadata=[pb.KeyValue(key="a", value="b")],
        start_message_id=pb.MessageIdData(ledgerId=5, entryId=6, ack_set=[1, 2]),
    )
    found = decoded(schema.schema_info(), schema.encode(value))
    assert (found["topic"], found["subType"]) == ("t", pb.CommandSubscribe.Shared)
    assert found["metadata"] == [{"key": "a", "value": "b"}]
    assert found["start_message_id"]["ack_set"] == [1, 2]
    assert found["consumer_name"] is None
    assert found["keySharedMeta"] is None
    assert found.native_object().topic == "t"
    with pytest.raises(ValueError, match=r"is no magnetar\.pulsar\.CommandSubscribe"):
        decoded(schema.schema_info(), b"\xff")


def test_a_protobuf_file_may_stand_before_the_files_that_it_imports() -> None:
    """Apache's Java client writes the files of a definition in any order."""
    imported = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(imported)
    file = file_of("m.proto", imported.name)
    field = file.message_type[0].field.add(name="at", number=1, label=1, type=11)
    field.type_name = ".google.protobuf.Timestamp"
    info = SchemaInfo(SchemaType.PROTOBUF_NATIVE, "x", definition_of("M", file, imported))
    assert decoded(info, b"\x0a\x02\x08\x05") == {"at": {"seconds": 5, "nanos": 0}}


def test_a_protobuf_map_with_other_names_of_key_and_value_is_decoded() -> None:
    file = file_of("m.proto")
    (message,) = file.message_type
    entry = message.nested_type.add(name="E")
    entry.options.map_entry = True
    entry.field.add(name="b", number=2, label=1, type=9)
    entry.field.add(name="a", number=1, label=1, type=9)
    message.field.add(name="map", number=1, label=3, type=11, type_name=".M.E")
    info = SchemaInfo(SchemaType.PROTOBUF_NATIVE, "x", definition_of("M", file))
    assert decoded(info, b"\x0a\x06\x0a\x01x\x12\x01y") == {"map": {"x": "y"}}


def test_avro_of_other_types_than_records_is_pythons() -> None:
    info = SchemaInfo(SchemaType.AVRO, "x", json.dumps("long"))
    assert decoded(info, b"\x0e") == 7


def test_avro_with_a_field_name_that_is_not_text_is_refused() -> None:
    """fastavro accepts the schema, and fails when it decodes a payload."""
    definition = {"type": "record", "name": "R", "fields": [{"name": [], "type": "long"}]}
    info = SchemaInfo(SchemaType.AVRO, "x", json.dumps(definition))
    with pytest.raises(ValueError, match="does not fit the Avro schema"):
        decoded(info, b"\x0e")


@pytest.mark.parametrize("payload", [b"", b"5", b"[" * 100_000])
def test_json_that_is_no_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"payload|Expecting"):
        decoded(JsonSchema(Order).schema_info(), payload)


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        (SchemaType.AVRO, "no json"),
        (SchemaType.AVRO, '{"type": "record"}'),
        (SchemaType.AVRO, "[" * 100_000),
        (SchemaType.PROTOBUF_NATIVE, "{}"),
        (SchemaType.PROTOBUF_NATIVE, "[]"),
        (SchemaType.PROTOBUF_NATIVE, '{"fileDescriptorSet": "/w==", "rootMessageTypeName": "x"}'),
        (SchemaType.PROTOBUF_NATIVE, '{"fileDescriptorSet": "", "rootMessageTypeName": "x"}'),
        (SchemaType.PROTOBUF_NATIVE, '{"fileDescriptorSet": 5, "rootMessageTypeName": "x"}'),
        (SchemaType.PROTOBUF_NATIVE, definition_of("M", file_of("m.proto", "missing.proto"))),
        (SchemaType.PROTOBUF_NATIVE, definition_of("M", file_of("m.proto", "m.proto"))),
        (SchemaType.PROTOBUF, '{"type": "string"}'),
        (SchemaType.NONE, ""),
    ],
)
def test_definitions_that_cannot_be_used_raise_value_error(
    kind: SchemaType, definition: str
) -> None:
    with pytest.raises(ValueError, match=r"schema|Expecting"):
        decoded(SchemaInfo(kind, "x", definition), b"")


def test_avro_without_its_library_raises_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = AvroSchema(Order).schema_info()
    monkeypatch.setattr(avro, "fastavro", None)
    with pytest.raises(ValueError, match=r"magnetar\[avro\]"):
        decoded(info, b"")


def test_auto_consume_refuses_to_encode() -> None:
    with pytest.raises(TypeError, match="only reads"):
        AutoConsumeSchema().encode({})
    with pytest.raises(InvalidConfiguration, match="AutoConsumeSchema only reads"):
        ProducerOptions("t", schema=AutoConsumeSchema())


@pytest.mark.parametrize("record", [Message, dict, 5])
def test_what_is_no_generated_protobuf_class_is_refused(record: object) -> None:
    with pytest.raises(TypeError, match="must be a protobuf Message subclass"):
        ProtobufNativeSchema(record)
