"""Pulsar's compatibility strategies, for each family of types."""

from __future__ import annotations

import base64
import json
import time
from typing import TYPE_CHECKING

import pytest
from google.protobuf import descriptor_pb2

from magnetar.broker.errors import IncompatibleSchema, InvalidSchema
from magnetar.broker.schemas import protobuf as protobuf_module
from magnetar.broker.schemas.compatibility import for_consumer, require_compatible, to_compare
from magnetar.broker.schemas.schema import (
    PROPERTIES_MAX,
    SCHEMA_BYTES_MAX,
    Schema,
    SchemaType,
    parse,
)
from magnetar.metadata.policies import SchemaCompatibility as Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES = {it.name for it in Strategy}
Field = descriptor_pb2.FieldDescriptorProto


def avro(*fields: str, optional: tuple[str, ...] = (), kind: int = SchemaType.AVRO) -> Schema:
    tree = {
        "type": "record",
        "name": "R",
        "fields": [
            *({"name": it, "type": "string"} for it in fields),
            *({"name": it, "type": ["null", "string"], "default": None} for it in optional),
        ],
    }
    return parse(kind, json.dumps(tree).encode(), "", {})


def protobuf(*fields: tuple[str, int, int], root: str = "p.M", required: bool = False) -> Schema:
    label = Field.LABEL_REQUIRED if required else Field.LABEL_OPTIONAL
    message = descriptor_pb2.DescriptorProto(
        name=root.split(".")[1],
        field=[
            Field(name=name, number=number, type=Field.Type.ValueType(kind), label=label)
            for name, number, kind in fields
        ],
    )
    files = descriptor_pb2.FileDescriptorSet(
        file=[descriptor_pb2.FileDescriptorProto(name="m", package="p", message_type=[message])]
    )
    return parse(SchemaType.PROTOBUF_NATIVE, definition(files.SerializeToString(), root), "", {})


def definition(files: bytes, root: str) -> bytes:
    tree = {
        "fileDescriptorSet": base64.b64encode(files).decode(),
        "rootMessageTypeName": root,
        "rootFileDescriptorName": "m",
    }
    return json.dumps(tree).encode()


def cycle(length: int) -> Schema:
    """Messages each of which has the next one as its only field."""
    kind = Field.TYPE_MESSAGE
    messages = [
        descriptor_pb2.DescriptorProto(
            name=f"M{it}",
            field=[Field(number=1, type=kind, type_name=f".M{(it + 1) % length}")],
        )
        for it in range(length)
    ]
    file = descriptor_pb2.FileDescriptorProto(name="m", message_type=messages)
    files = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    return parse(SchemaType.PROTOBUF_NATIVE, definition(files, "M0"), "", {})


def key_value(key: Schema, value: Schema) -> Schema:
    data = b"".join(len(it.data).to_bytes(4) + it.data for it in (key, value))
    types = {"key.schema.type": key.type.name, "value.schema.type": value.type.name}
    return parse(SchemaType.KEY_VALUE, data, "", types)


ONE = avro("a")
TEXT = parse(SchemaType.STRING, b"null", "String", {})

# new, earlier, the strategies that refuse it besides ALWAYS_INCOMPATIBLE
NEEDS_BACKWARD = {it for it in NAMES if it.startswith(("BACKWARD", "FULL"))}
NEEDS_FORWARD = {it for it in NAMES if it.startswith(("FORWARD", "FULL"))}
CASES: dict[str, tuple[Schema, Schema, set[str]]] = {
    "an optional field is added": (avro("a", optional=("b",)), ONE, set()),
    "an optional field is removed": (ONE, avro("a", optional=("b",)), set()),
    "a field is added": (avro("a", "b"), ONE, NEEDS_BACKWARD),
    "a field is removed": (ONE, avro("a", "b"), NEEDS_FORWARD),
    "a field is renamed": (avro("b"), avro("a"), NEEDS_BACKWARD | NEEDS_FORWARD),
    "JSON as Avro": (
        avro("a", "b", kind=SchemaType.JSON),
        avro("a", kind=SchemaType.JSON),
        NEEDS_BACKWARD,
    ),
    "PROTOBUF as Avro": (
        avro("a", "b", kind=SchemaType.PROTOBUF),
        avro("a", kind=SchemaType.PROTOBUF),
        NEEDS_BACKWARD,
    ),
    "an old JSON schema": (
        avro("a", kind=SchemaType.JSON),
        parse(SchemaType.JSON, b'{"type": "object"}', "", {}),
        set(),
    ),
    "another type": (TEXT, ONE, NEEDS_BACKWARD | NEEDS_FORWARD),
    "the same primitive": (TEXT, parse(SchemaType.STRING, b"", "x", {"a": "b"}), set()),
    "a Protobuf field is added": (
        protobuf(("a", 1, Field.TYPE_INT32), ("b", 2, Field.TYPE_STRING)),
        protobuf(("a", 1, Field.TYPE_INT64)),
        set(),
    ),
    "a required Protobuf field is added": (
        protobuf(("a", 1, Field.TYPE_INT32), ("b", 2, Field.TYPE_STRING), required=True),
        protobuf(("a", 1, Field.TYPE_INT32), required=True),
        NEEDS_BACKWARD,
    ),
    "a Protobuf field changes its type": (
        protobuf(("a", 1, Field.TYPE_INT32)),
        protobuf(("a", 1, Field.TYPE_STRING)),
        NEEDS_BACKWARD | NEEDS_FORWARD,
    ),
    "the Protobuf message is another": (
        protobuf(root="p.N"),
        protobuf(),
        NEEDS_BACKWARD | NEEDS_FORWARD,
    ),
    "a field of a value is added": (
        key_value(TEXT, avro("a", "b")),
        key_value(TEXT, ONE),
        NEEDS_BACKWARD,
    ),
    "a key has another type": (
        key_value(ONE, ONE),
        key_value(TEXT, ONE),
        NEEDS_BACKWARD | NEEDS_FORWARD,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_strategy_admits_or_refuses(case: str) -> None:
    new, earlier, refused = CASES[case]
    for strategy in Strategy:
        if strategy in refused | {Strategy.ALWAYS_INCOMPATIBLE}:
            with pytest.raises(IncompatibleSchema):
                require_compatible(new, earlier, strategy)
        else:
            require_compatible(new, earlier, strategy)


def test_a_transitive_strategy_compares_with_all_versions() -> None:
    compared = {it: len(to_compare("abc", it)) for it in Strategy}
    assert {it for it, count in compared.items() if count == 3} == {
        it for it in NAMES if it.endswith("TRANSITIVE")
    }
    assert compared[Strategy.ALWAYS_COMPATIBLE] == 0
    assert compared[Strategy.FULL] == 1


def test_a_consumer_must_read_the_newest_version() -> None:
    assert for_consumer(Strategy.FORWARD) is Strategy.BACKWARD
    assert for_consumer(Strategy.FULL) is Strategy.BACKWARD
    assert for_consumer(Strategy.BACKWARD_TRANSITIVE) is Strategy.BACKWARD_TRANSITIVE
    assert for_consumer(Strategy.ALWAYS_COMPATIBLE) is Strategy.ALWAYS_COMPATIBLE


@pytest.mark.parametrize(
    ("kind", "data", "properties", "why"),
    [
        (99, b"", {}, "type 99 is unknown"),
        (SchemaType.AUTO_CONSUME, b"", {}, "AUTO_CONSUME cannot be stored"),
        (SchemaType.AVRO, b"{}", {}, "not a valid AVRO schema"),
        (SchemaType.JSON, b"[1]", {}, "not a valid JSON schema"),
        (SchemaType.JSON, b"{}", {}, "not a valid JSON schema"),
        (SchemaType.JSON, b'{"type": "record", "name": "R"}', {}, "R' has no list of fields"),
        (SchemaType.JSON, b'{"type": "record", "name": "R", "fields": [1]}', {}, "has no type"),
        (SchemaType.PROTOBUF_NATIVE, b"{}", {}, "not a valid PROTOBUF_NATIVE schema"),
        (SchemaType.PROTOBUF_NATIVE, b"[]", {}, "not a valid PROTOBUF_NATIVE schema"),
        (SchemaType.KEY_VALUE, b"\0", {}, "ends early"),
        (SchemaType.KEY_VALUE, bytes(8), {}, "key.schema.type is missing"),
        (SchemaType.KEY_VALUE, bytes(9), {}, "1 bytes after"),
        (SchemaType.STRING, bytes(SCHEMA_BYTES_MAX + 1), {}, f"limit is {SCHEMA_BYTES_MAX}"),
        (
            SchemaType.STRING,
            b"",
            {str(number): "" for number in range(PROPERTIES_MAX + 1)},
            f"limit is {PROPERTIES_MAX}",
        ),
        (
            SchemaType.KEY_VALUE,
            bytes(8),
            {"key.schema.type": "x" * 99, "value.schema.type": "STRING"},
            "more than 40 characters",
        ),
    ],
)
def test_an_invalid_definition_is_refused_by_name(
    kind: int, data: bytes, properties: Mapping[str, str], why: str
) -> None:
    with pytest.raises(InvalidSchema, match=why):
        parse(kind, data, "", properties)


def test_types_with_equal_definitions_differ() -> None:
    assert ONE.fingerprint != avro("a", kind=SchemaType.JSON).fingerprint
    assert parse(SchemaType.INT8, b"", "", {}).fingerprint != TEXT.fingerprint
    assert key_value(TEXT, ONE).fingerprint != key_value(ONE, TEXT).fingerprint


def test_protobuf_messages_in_two_cycles_are_not_compared_pair_by_pair() -> None:
    """Cycles of 2,000 and 1,999 messages have 4 million pairs."""
    new, earlier = cycle(2_000), cycle(1_999)
    began = time.thread_time()
    with pytest.raises(IncompatibleSchema, match=f"more than {protobuf_module.STEPS_MAX} steps"):
        require_compatible(new, earlier, Strategy.BACKWARD)
    assert time.thread_time() - began < 1.0
    require_compatible(new, cycle(2_000), Strategy.FULL)


def test_long_names_of_protobuf_messages_are_refused() -> None:
    """The full name of each of 2,000 nested messages contains the name of the outer message."""
    for file in (
        descriptor_pb2.FileDescriptorProto(
            package="p" * 600, message_type=[descriptor_pb2.DescriptorProto(name="M")]
        ),
        descriptor_pb2.FileDescriptorProto(
            message_type=[descriptor_pb2.DescriptorProto(name="M", field=[Field(name="f" * 600)])]
        ),
    ):
        files = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
        with pytest.raises(InvalidSchema, match="more than 512 characters"):
            parse(SchemaType.PROTOBUF_NATIVE, definition(files, "M"), "", {})


def test_protobuf_names_that_are_no_text_are_refused() -> None:
    files = b"\x0a\x06" + b"\x22\x04" + b"\x0a\x02\xff\xfe"
    with pytest.raises(InvalidSchema):
        parse(SchemaType.PROTOBUF_NATIVE, definition(files, "M"), "", {})


def test_an_invalid_stored_definition_refuses_a_schema_and_fails_nothing_else() -> None:
    stored = Schema(SchemaType.AVRO, b'{"type": "enum", "name": "E"}', "", {}, b"")
    with pytest.raises(IncompatibleSchema, match="the earlier schema is not valid"):
        require_compatible(ONE, stored, Strategy.FULL)


@pytest.mark.parametrize(
    ("new", "earlier", "strategy", "why"),
    [
        (
            avro("a", "b"),
            ONE,
            Strategy.BACKWARD,
            "new schema cannot read earlier messages: field b",
        ),
        (ONE, avro("a", "b"), Strategy.FORWARD, "earlier schema cannot read new messages: field b"),
        (
            protobuf(root="p.New"),
            protobuf(root="p.Old"),
            Strategy.FORWARD,
            "new messages: the root message is p.Old, in the messages p.New",
        ),
        (
            key_value(TEXT, ONE),
            key_value(ONE, ONE),
            Strategy.FORWARD,
            "new messages: the key has the type AVRO, in the messages STRING",
        ),
    ],
)
def test_a_refusal_tells_the_reader_from_the_messages(
    new: Schema, earlier: Schema, strategy: Strategy, why: str
) -> None:
    with pytest.raises(IncompatibleSchema, match=why):
        require_compatible(new, earlier, strategy)
