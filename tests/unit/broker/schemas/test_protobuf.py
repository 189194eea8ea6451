"""Protobuf's rules for changes of a message type, and Protobuf itself as a witness."""

from __future__ import annotations

import base64
import json
import time
from typing import Any, NamedTuple

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    EnumValueDescriptorProto,
    FeatureSet,
    FieldDescriptorProto,
    FieldOptions,
    FileDescriptorProto,
    FileDescriptorSet,
    FileOptions,
    MessageOptions,
    OneofDescriptorProto,
)

from magnetar.broker.schemas import protobuf
from magnetar.protos.descriptors import pool_of

Field = FieldDescriptorProto
OPTIONAL, REQUIRED, REPEATED = Field.LABEL_OPTIONAL, Field.LABEL_REQUIRED, Field.LABEL_REPEATED
EDITION_2023 = 1000


def field(kind: str, number: int = 1, label: Any = OPTIONAL, **more: Any) -> FieldDescriptorProto:
    """A field of type `kind`, such as "int32", ".E" (the enum) or ".M.F1" (a group)."""
    found = Field(**{"name": f"f{number}", "number": number, "label": label, **more})
    if kind.startswith("."):
        found.type_name = kind
        kind = "enum" if kind == ".E" else "group" if kind == ".M.F1" else "message"
    found.type = Field.Type.Value(f"TYPE_{kind.upper()}")
    return found


def required(kind: str, number: int = 1) -> FieldDescriptorProto:
    return field(kind, number, REQUIRED)


def repeated(kind: str, *, packed: bool | None = None) -> FieldDescriptorProto:
    options = None if packed is None else FieldOptions(packed=packed)
    return field(kind, 1, REPEATED, options=options)


def file(
    *fields: FieldDescriptorProto,
    syntax: str = "proto2",
    values: int = 2,
    inner: tuple[FieldDescriptorProto, ...] = (),
    **features: Any,
) -> FileDescriptorSet:
    """A file with the message M, its message F1 with the fields `inner`, and the enum E with so
    many `values`. `features` are those of the file."""
    message = DescriptorProto(
        name="M",
        field=fields,
        nested_type=[DescriptorProto(name="F1", field=inner)],
        oneof_decl=[
            OneofDescriptorProto(name=f"o{it}")
            for it in sorted({it.oneof_index for it in fields if it.HasField("oneof_index")})
        ],
    )
    enum = EnumDescriptorProto(
        name="E",
        value=[EnumValueDescriptorProto(name=f"V{it}", number=it) for it in range(values)],
    )
    found = FileDescriptorProto(name="m", syntax=syntax, message_type=[message], enum_type=[enum])
    if syntax == "editions":
        found.edition = FileDescriptorProto(edition=EDITION_2023).edition  # type: ignore[arg-type]
        found.options.CopyFrom(FileOptions(features=FeatureSet(**features)))
    return FileDescriptorSet(file=[found])


def in_oneof(*numbers: int, oneof: int = 0) -> list[FieldDescriptorProto]:
    return [field("int32", it, oneof_index=oneof) for it in numbers]


def parsed(files: FileDescriptorSet, root: str = "M") -> protobuf.ProtobufSchema:
    encoded = base64.b64encode(files.SerializeToString()).decode()
    tree = {"fileDescriptorSet": encoded, "rootMessageTypeName": root}
    return protobuf.parse(json.dumps(tree).encode())


class Case(NamedTuple):
    reader: FileDescriptorSet
    writer: FileDescriptorSet
    written: dict[str, Any]
    """The values of the writer's message."""
    problem: str = ""  # a part of it


ONE = file(field("int32"))
GROUP = (field("int32", 2),)
CASES = {
    "a field is added": Case(file(field("int32"), field("string", 2)), ONE, {"f1": 1}),
    "a field is removed": Case(ONE, file(field("int32"), field("string", 2)), {"f1": 1, "f2": "a"}),
    "a required field is added": Case(
        file(field("int32"), required("int32", 2)), ONE, {"f1": 1}, "f2 is required"
    ),
    "a required field is removed": Case(ONE, file(field("int32"), required("bool", 2)), {"f2": 1}),
    "a field becomes required": Case(file(required("int32")), ONE, {}, "it is required"),
    "a field becomes optional": Case(ONE, file(required("int32")), {"f1": 1}),
    "a list becomes required": Case(
        file(required("string")), file(repeated("string")), {}, "it is required"
    ),
    "a required field stays": Case(file(required("int64")), file(required("int32")), {"f1": 7}),
    "a field without presence becomes required": Case(
        file(required("int32")), file(field("int32"), syntax="proto3"), {"f1": 0}, "it is required"
    ),
    "a field is required by its edition": Case(
        file(field("int32"), syntax="editions", field_presence=FeatureSet.LEGACY_REQUIRED),
        file(field("int32"), syntax="editions"),
        {},
        "it is required",
    ),
    "an int becomes a string": Case(
        file(field("string")), ONE, {"f1": 1}, "type string does not read int32"
    ),
    "an int becomes an int with zigzag": Case(file(field("sint32")), ONE, {"f1": 1}, "sint32"),
    "an int becomes fixed": Case(file(field("fixed32")), ONE, {"f1": 1}, "fixed32"),
    "an int becomes an enum": Case(file(field(".E")), ONE, {"f1": 1}),
    "an int becomes larger": Case(file(field("uint64")), ONE, {"f1": 1}),
    "fixed numbers get a sign": Case(file(field("sfixed64")), file(field("fixed64")), {"f1": 1}),
    "a float becomes a double": Case(
        file(field("double")), file(field("float")), {"f1": 1.5}, "double does not read float"
    ),
    "a group becomes a message": Case(
        file(field("message", type_name=".M.F1"), inner=GROUP),
        file(field(".M.F1"), inner=GROUP),
        {"f1": {"f2": 1}},
        "type message does not read group",
    ),
    "a group becomes delimited": Case(
        file(
            field("message", type_name=".M.F1"),
            inner=GROUP,
            syntax="editions",
            message_encoding=FeatureSet.DELIMITED,
        ),
        file(field(".M.F1"), inner=GROUP),
        {"f1": {"f2": 1}},
    ),
    "a field of a group changes its type": Case(
        file(field(".M.F1"), inner=(field("string", 2),)),
        file(field(".M.F1"), inner=GROUP),
        {"f1": {"f2": 1}},
        "message M.F1: field 2 (f2)",
    ),
    "a field of a group becomes required": Case(
        file(field(".M.F1"), inner=(required("int32", 2),)),
        file(field(".M.F1"), inner=GROUP),
        {"f1": {}},
        "message M.F1: field 2 (f2): it is required",
    ),
    "a packed list becomes single": Case(
        ONE, file(repeated("int32", packed=True)), {"f1": [1, 2]}, "packed in the messages"
    ),
    "a list of proto3 becomes single": Case(
        ONE, file(repeated("int32"), syntax="proto3"), {"f1": [1, 2]}, "packed in the messages"
    ),
    "a list of an edition becomes single": Case(
        ONE, file(repeated("int32"), syntax="editions"), {"f1": [1]}, "packed in the messages"
    ),
    "a list of an edition that does not pack becomes single": Case(
        ONE,
        file(
            repeated("int32"),
            syntax="editions",
            repeated_field_encoding=FeatureSet.EXPANDED,
        ),
        {"f1": [1, 2]},
    ),
    "a list becomes single": Case(ONE, file(repeated("int32")), {"f1": [1, 2]}),
    "a list of strings becomes single": Case(
        file(field("string")), file(repeated("string"), syntax="proto3"), {"f1": ["a", "b"]}
    ),
    "a field becomes a packed list": Case(file(repeated("int32", packed=True)), ONE, {"f1": 1}),
    "a packed list is packed no more": Case(
        file(repeated("int32")), file(repeated("int32", packed=True)), {"f1": [1, 2]}
    ),
    "a list becomes packed": Case(
        file(repeated("int32", packed=True)), file(repeated("int32")), {"f1": [1, 2]}
    ),
    "fields are moved into a oneof": Case(
        file(*in_oneof(1, 2)),
        file(field("int32"), field("int32", 2)),
        {"f1": 1, "f2": 2},
        "field 2 (f2): the messages may have another field of its oneof",
    ),
    "a field is moved into an existing oneof": Case(
        file(*in_oneof(1, 2, 3)),
        file(*in_oneof(1, 2), field("int32", 3)),
        {"f1": 1, "f3": 3},
        "field 3 (f3): the messages may have another field of its oneof",
    ),
    "two oneofs become one": Case(
        file(*in_oneof(1, 2)),
        file(*in_oneof(1), *in_oneof(2, oneof=1)),
        {"f1": 1, "f2": 2},
        "another field of its oneof",
    ),
    "one field is moved into a new oneof": Case(file(*in_oneof(1, 2)), ONE, {"f1": 1}),
    "a oneof is split": Case(
        file(*in_oneof(1), *in_oneof(2, oneof=1)), file(*in_oneof(1, 2)), {"f2": 2}
    ),
    "a oneof is dissolved": Case(
        file(field("int32"), field("int32", 2)), file(*in_oneof(1, 2)), {"f1": 1}
    ),
    "an enum gets a value": Case(file(required(".E"), values=3), file(required(".E")), {"f1": 1}),
    "a required enum loses a value": Case(
        file(required(".E")), file(required(".E"), values=3), {"f1": 2}, "lacks the value 2"
    ),
    "a required number becomes an enum": Case(
        file(required(".E")), file(required("int32")), {"f1": 9}, "may lack a value"
    ),
    "a required enum becomes a number": Case(
        file(required("int32")), file(required(".E"), values=3), {"f1": 2}
    ),
    "an open enum loses a value": Case(
        file(field(".E"), syntax="proto3"), file(required(".E"), values=3), {"f1": 2}
    ),
}


def class_of(files: FileDescriptorSet) -> Any:
    return message_factory.GetMessageClass(pool_of(files).FindMessageTypeByName("M"))


def read_by(case: Case) -> tuple[Any, Any]:
    """What Protobuf reads, and what it should read."""
    reader, writer = class_of(case.reader), class_of(case.writer)
    read = reader.FromString(writer(**case.written).SerializeToString())
    if not read.IsInitialized():
        return "a message that lacks a required field", case.written
    names = {it.name: it for it in reader.DESCRIPTOR.fields}
    wanted, found = {}, {}
    for name, value in case.written.items():
        if name in names:
            single = isinstance(value, list) and not names[name].is_repeated
            wanted[name] = value[-1] if single else value
            found[name] = getattr(read, name)
            if isinstance(value, dict):
                found[name] = {it.name: of for it, of in found[name].ListFields()}
            elif names[name].is_repeated:
                found[name] = list(found[name])
                wanted[name] = value if isinstance(value, list) else [value]
    return found, wanted


@pytest.mark.parametrize("name", CASES)
def test_a_schema_fits_if_protobuf_reads_the_values_with_it(name: str) -> None:
    case = CASES[name]
    problem = protobuf.unreadable(parsed(case.reader), parsed(case.writer))
    assert (case.problem in problem) if case.problem else problem == ""
    found, wanted = read_by(case)
    assert (found == wanted) == (problem == ""), (found, wanted)


def with_map(syntax: str, **features: Any) -> FileDescriptorSet:
    files = file(repeated(".M.F1Entry"), syntax=syntax, **features)
    pair = [field("string", 1, name="key"), field("int32", 2, name="value")]
    options = MessageOptions(map_entry=True)
    entry = DescriptorProto(name="F1Entry", field=pair, options=options)
    files.file[0].message_type[0].nested_type.append(entry)
    return files


def test_a_map_is_never_encoded_as_groups() -> None:
    reader = with_map("editions", message_encoding=FeatureSet.DELIMITED)
    writer = with_map("proto3")
    assert protobuf.unreadable(parsed(reader), parsed(writer)) == ""
    payload = class_of(writer)(f1={"a": 1}).SerializeToString()
    assert dict(class_of(reader).FromString(payload).f1) == {"a": 1}


def test_an_unknown_value_of_an_enum_that_is_not_required_is_no_problem() -> None:
    """Protobuf then reads the default of the field."""
    reader, writer = file(field(".E")), file(field(".E"), values=3)
    assert protobuf.unreadable(parsed(reader), parsed(writer)) == ""


@pytest.mark.usefixtures("no_collection")
def test_required_fields_with_large_enums_are_not_compared_value_by_value() -> None:
    values, fields = 4_000, 1_000
    large = file(*(required(".E", number + 1) for number in range(fields)), values=values)
    reader, writer = parsed(large), parsed(large)
    began = time.thread_time()
    assert "steps" in protobuf.unreadable(reader, writer)
    assert time.thread_time() - began < 0.5


def test_a_definition_with_too_many_enums_is_refused() -> None:
    enums = [EnumDescriptorProto(name=f"E{it}") for it in range(protobuf.TYPES_MAX)]
    [described] = ONE.file
    many = FileDescriptorProto(name="m", message_type=described.message_type, enum_type=enums)
    with pytest.raises(protobuf.NotProtobuf, match="messages and enums"):
        parsed(FileDescriptorSet(file=[many]))
