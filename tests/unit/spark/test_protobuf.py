from __future__ import annotations

import base64
import json
import pickle
from datetime import UTC, datetime
from decimal import Decimal
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type

from magnetar.client.schema.protobuf import ProtobufNativeSchema
from magnetar.protos import pulsar_pb2
from magnetar.spark.protobuf import (
    InvalidProtobufSchema,
    ProtobufType,
    parse_protobuf_schema,
    protobuf_decoder,
)
from magnetar.spark.type_limits import LEVELS_MAX
from magnetar.spark.values import decode_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

KINDS = {
    "number": Field.TYPE_INT32,
    "big": Field.TYPE_SINT64,
    "count": Field.TYPE_UINT32,
    "huge": Field.TYPE_UINT64,
    "flag": Field.TYPE_BOOL,
    "ratio": Field.TYPE_DOUBLE,
    "single": Field.TYPE_FLOAT,
    "text": Field.TYPE_STRING,
    "data": Field.TYPE_BYTES,
}


def flight_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="air.proto", package="air", syntax="proto3")
    file.dependency.append(timestamp_pb2.DESCRIPTOR.name)
    state = file.enum_type.add(name="State")
    state.value.add(name="ON", number=0)
    state.value.add(name="OFF", number=1)
    stop = file.message_type.add(name="Stop")
    stop.field.add(name="code", number=1, type=Field.TYPE_STRING, label=1)
    flight = file.message_type.add(name="Flight")
    for number, (name, kind) in enumerate(KINDS.items(), 1):
        flight.field.add(name=name, number=number, type=kind, label=1)
    flight.oneof_decl.add(name="_maybe")
    flight.field.add(
        name="maybe", number=20, type=Field.TYPE_INT32, label=1, proto3_optional=True, oneof_index=0
    )
    enum = Field.TYPE_ENUM
    flight.field.add(name="state", number=21, type=enum, label=1, type_name=".air.State")
    message = Field.TYPE_MESSAGE
    flight.field.add(name="first", number=22, type=message, label=1, type_name=".air.Stop")
    flight.field.add(name="stops", number=23, type=message, label=3, type_name=".air.Stop")
    flight.field.add(name="delays", number=24, type=Field.TYPE_INT32, label=3)
    entry = flight.nested_type.add(name="PlacesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=Field.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=message, label=1, type_name=".air.Stop")
    of_map = ".air.Flight.PlacesEntry"
    flight.field.add(name="places", number=25, type=message, label=3, type_name=of_map)
    time = ".google.protobuf.Timestamp"
    flight.field.add(name="at", number=26, type=message, label=1, type_name=time)
    return file


def definition(root: str, *files: descriptor_pb2.FileDescriptorProto) -> str:
    described = base64.b64encode(descriptor_pb2.FileDescriptorSet(file=files).SerializeToString())
    return json.dumps({"fileDescriptorSet": described.decode(), "rootMessageTypeName": root})


def timestamp_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(file)
    return file


FLIGHT = parse_protobuf_schema(definition("air.Flight", timestamp_file(), flight_file()))


def decoded(kind: ProtobufType, *payloads: bytes | None) -> tuple[list[Any], dict[int, str]]:
    arrow = to_arrow_type(kind.spark, timezone="UTC")
    payload = pa.array(payloads, pa.binary())
    values, bad = decode_values(payload, protobuf_decoder(kind, arrow), arrow)
    assert values.type == arrow
    return values.to_pylist(), bad


def test_every_type_of_protobuf_becomes_a_value_of_spark() -> None:
    flight: Any = FLIGHT.message(
        number=-5, big=-(1 << 60), count=(1 << 32) - 1, huge=(1 << 64) - 1, flag=True, ratio=1.5,
        single=0.5, text="é", data=b"\xff", maybe=0, state=1, delays=[3, -4],
        first={"code": "JFK"}, stops=[{"code": "A"}, {}], places={"x": {"code": "B"}},
    )  # fmt: skip
    flight.at.FromDatetime(datetime(2013, 1, 1, 5, 15, tzinfo=UTC))
    [value, nothing, null], bad = decoded(FLIGHT, flight.SerializeToString(), b"", None)
    assert not bad
    assert value == {
        "number": -5, "big": -(1 << 60), "count": (1 << 32) - 1, "huge": Decimal((1 << 64) - 1),
        "flag": True, "ratio": 1.5, "single": 0.5, "text": "é", "data": b"\xff", "maybe": 0,
        "state": "OFF", "first": {"code": "JFK"}, "stops": [{"code": "A"}, {"code": ""}],
        "delays": [3, -4], "places": [("x", {"code": "B"})],
        "at": datetime(2013, 1, 1, 5, 15, tzinfo=UTC),
    }  # fmt: skip
    assert null is None
    assert (nothing["number"], nothing["text"], nothing["state"]) == (0, "", "ON")
    assert [nothing[name] for name in ("maybe", "first", "at")] == [None, None, None]
    assert nothing["stops"] == nothing["delays"] == nothing["places"] == []


def test_a_file_may_stand_before_the_files_that_it_imports() -> None:
    """Apache's Java client writes the files of a definition in any order."""
    kind = parse_protobuf_schema(definition("air.Flight", flight_file(), timestamp_file()))
    assert kind.spark == FLIGHT.spark


def test_a_number_without_a_name_in_its_enum_is_text() -> None:
    [value], _ = decoded(FLIGHT, FLIGHT.message(state=7).SerializeToString())  # type: ignore[call-arg]
    assert value["state"] == "7"


def test_the_definition_of_the_clients_schema_is_read() -> None:
    text = ProtobufNativeSchema(pulsar_pb2.KeyValue).schema_info().schema()
    kind = parse_protobuf_schema(text)
    pair = pulsar_pb2.KeyValue(key="k", value="v").SerializeToString()
    values, bad = decoded(kind, pair, pair[:3], b"\x0a\x01\xff\x12\x00")
    assert values == [{"key": "k", "value": "v"}, None, None]
    assert "required" in bad[1]
    assert 2 in bad  # a text that is not UTF-8


@given(st.lists(st.binary(max_size=30) | st.none(), max_size=20))
def test_any_bytes_are_a_value_or_a_bad_record(payloads: list[bytes | None]) -> None:
    values, bad = decoded(FLIGHT, *payloads)
    assert len(values) == len(payloads)
    for at, payload in enumerate(payloads):
        assert (values[at] is None) == (at in bad or payload is None)


def test_a_time_that_spark_does_not_support_is_a_bad_record() -> None:
    for seconds in (1 << 62, -62_135_596_801, 253_402_300_800):
        flight: Any = FLIGHT.message()
        flight.at.seconds = seconds
        assert list(decoded(FLIGHT, flight.SerializeToString())[1]) == [0]


def _recursive() -> str:
    file = descriptor_pb2.FileDescriptorProto(name="r.proto", syntax="proto3")
    node = file.message_type.add(name="Node")
    node.field.add(name="next", number=1, type=Field.TYPE_MESSAGE, label=1, type_name=".Node")
    return definition("Node", file)


def _doubling(depth: int = 20) -> str:
    """Each type has two fields of the next one: 2 to the power of `depth` in all."""
    file = descriptor_pb2.FileDescriptorProto(name="d.proto", syntax="proto3")
    for number in range(depth):
        kind = file.message_type.add(name=f"T{number}")
        for at in (1, 2):
            of = f".T{number + 1}"
            kind.field.add(name=f"f{at}", number=at, type=Field.TYPE_MESSAGE, label=1, type_name=of)
    file.message_type.add(name=f"T{depth}").field.add(name="x", number=1, type=5, label=1)
    return definition("T0", file)


def _chain(depth: int) -> str:
    """Each type has a list of the next one."""
    file = descriptor_pb2.FileDescriptorProto(name="c.proto", syntax="proto3")
    for number in range(1, depth):
        kind = file.message_type.add(name=f"T{number}")
        of = f".T{number + 1}"
        kind.field.add(name="f", number=1, type=Field.TYPE_MESSAGE, label=3, type_name=of)
    file.message_type.add(name=f"T{depth}").field.add(name="x", number=1, type=5, label=1)
    return definition("T1", file)


def test_types_of_the_maximum_depth_reach_spark() -> None:
    spark = parse_protobuf_schema(_chain(LEVELS_MAX // 2)).spark
    assert pickle.loads(pickle.dumps(spark)) == spark
    row = pa.struct([("value", to_arrow_type(spark, timezone="UTC"))])  # as PySpark sends it
    assert pa.record_batch([pa.array([None], row)], ["row"]).serialize()


def _map_without_value() -> str:
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", syntax="proto3")
    outer = file.message_type.add(name="M")
    entry = outer.nested_type.add(name="E")
    entry.options.map_entry = True
    for number, name in enumerate(("key", "other"), 1):
        entry.field.add(name=name, number=number, type=Field.TYPE_STRING, label=1)
    outer.field.add(name="f", number=1, type=Field.TYPE_MESSAGE, label=3, type_name=".M.E")
    return definition("M", file)


def _other_timestamp() -> str:
    file = timestamp_file()
    file.message_type[0].field[0].type = Field.TYPE_STRING
    return definition("air.Flight", file, flight_file())


def _cycle(length: int = 3000) -> list[descriptor_pb2.FileDescriptorProto]:
    """Each file imports the next one, the last one imports the first one."""
    return [
        descriptor_pb2.FileDescriptorProto(name=str(number), dependency=[str(number + 1)])
        for number in range(length - 1)
    ] + [descriptor_pb2.FileDescriptorProto(name=str(length - 1), dependency=["0"])]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a definition"),
        ("[]", "not a definition"),
        ('{"fileDescriptorSet": "*", "rootMessageTypeName": "a"}', "not a definition"),
        ('{"fileDescriptorSet": "AAAA", "rootMessageTypeName": "a"}', "not a definition"),
        ('{"rootMessageTypeName": "a"}', "fileDescriptorSet"),
        ('{"fileDescriptorSet": [], "rootMessageTypeName": "a"}', "not a definition"),
        ('{"fileDescriptorSet": "", "rootMessageTypeName": {}}', "not a definition"),
        ('{"fileDescriptorSet": "", "rootMessageTypeName": "\\ud800"}', "not a definition"),
        (definition("air.Train", timestamp_file(), flight_file()), "air.Train"),
        (definition("air.Flight", flight_file()), "'google/protobuf/timestamp.proto' is missing"),
        (definition("a.A", *_cycle()), "imports itself"),
        (_recursive(), "'Node' contains itself"),
        (_chain(LEVELS_MAX // 2 + 1), f"deeper than {LEVELS_MAX}"),
        (_chain(3000), f"deeper than {LEVELS_MAX}"),
        (_map_without_value(), "'M.f' has no key or no value"),
        (_other_timestamp(), "the fields of google.protobuf.Timestamp"),
        (_doubling(), "more than 10000 fields"),
    ],
)
def test_a_definition_that_cannot_be_read_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidProtobufSchema, match=reason):
        parse_protobuf_schema(text)


def test_fields_are_matched_by_name_with_the_columns_type() -> None:
    """The type of the column comes from another version of the definition."""
    kind = pa.struct({"text": pa.string(), "new": pa.list_(pa.int64()), "number": pa.int64()})
    payload = FLIGHT.message(text="a", number=3, flag=True).SerializeToString()  # type: ignore[call-arg]
    values = protobuf_decoder(FLIGHT, kind)(pa.array([payload, None], pa.binary()))
    assert values.to_pylist() == [{"text": "a", "new": None, "number": 3}, None]


TEXTS = [
    "", "x", "key", "value", ".air.Stop", ".air.State", ".air.Flight", ".air.Flight.PlacesEntry",
    ".google.protobuf.Timestamp", "air", "air.proto", "proto2", "proto3", "editions", "é", "a.b",
]  # fmt: skip
NUMBERS = [0, 1, 2, 3, -1, 19_000, 2**29 - 1, 2**31 - 1]


def parts(message: Message) -> Iterator[Message]:
    """The message, and all messages in it."""
    yield message
    for field, found in message.ListFields():
        if field.message_type is not None:
            for part in found if field.is_repeated else [found]:
                yield from parts(part)


def change(message: Any, chooser: Random) -> None:
    """Change one field of a message of `descriptor.proto`."""
    field = chooser.choice(message.DESCRIPTOR.fields)
    is_message = field.message_type is not None
    new = (
        chooser.choice(TEXTS)
        if field.type == field.TYPE_STRING
        else chooser.choice(field.enum_type.values).number
        if field.enum_type is not None
        else b"x"
        if field.type == field.TYPE_BYTES
        else chooser.choice(NUMBERS)
        if field.type in (field.TYPE_INT32, field.TYPE_INT64)
        else 1
    )
    found = getattr(message, field.name)
    match chooser.randrange(3):
        case 0:
            message.ClearField(field.name)
        case 1 if field.is_repeated and found:
            del found[chooser.randrange(len(found))]
        case _ if is_message and field.is_repeated:
            found.add().CopyFrom(chooser.choice([*found]))
        case _ if is_message:
            found.SetInParent()
        case _ if field.is_repeated:
            found.append(new)
        case _:
            setattr(message, field.name, new)


@settings(max_examples=500)
@given(st.integers(0))
def test_a_changed_definition_is_refused_or_decodes_any_bytes(seed: int) -> None:
    chooser = Random(seed)
    files = descriptor_pb2.FileDescriptorSet(file=[timestamp_file(), flight_file()])
    for _ in range(chooser.randint(1, 3)):
        change(chooser.choice([*parts(files)]), chooser)
    described = base64.b64encode(files.SerializePartialToString()).decode()
    text = json.dumps({"fileDescriptorSet": described, "rootMessageTypeName": "air.Flight"})
    try:
        kind = parse_protobuf_schema(text)
    except InvalidProtobufSchema:
        return
    places = b"\xca\x01\x06\x0a\x01x\x12\x01\x00"
    values, _ = decoded(kind, places, chooser.randbytes(20), None)
    assert len(values) == 3
