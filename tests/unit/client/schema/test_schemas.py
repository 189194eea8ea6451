"""Schemas without a server: definitions, values and refusals. Definitions and values equal those of
Apache's client where that client has the schema."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import dataclass, field, make_dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

import fastavro
import pulsar.schema as theirs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, create_model

import magnetar.schema as ours
from magnetar.client.schema import avro_bounds
from magnetar.client.schema.avro_bounds import _Types, payload_check


class Level(Enum):
    LOW = 1
    HIGH = 2


def shapes(module: Any) -> dict[str, Any]:
    """Record classes that show each part of a definition."""

    class Plain(module.Record):
        a = module.String()
        b = module.Integer(required=True)
        c = module.Boolean(default=True, required_default=True)

    class Sorted(module.Record):
        _sorted_fields = True
        _avro_namespace = "a.b"
        z = module.Long()
        a = module.Float(default=0.5)

    class Nested(module.Record):
        one = Plain()
        two = Plain(required=True)
        level = Level
        again = module.CustomEnum(Level, default=Level.LOW, required_default=True)
        many = module.Array(Plain())
        named = module.Map(module.Array(module.String()))
        nothing = module.Null()
        raw = module.Bytes(default=b"x")

    return {"Plain": Plain, "Sorted": Sorted, "Nested": Nested}


@pytest.mark.parametrize("name", ["Plain", "Sorted", "Nested"])
def test_the_definition_of_a_record_equals_that_of_apaches_client(name: str) -> None:
    mine, their = shapes(ours)[name], shapes(theirs)[name]
    assert mine.schema() == their.schema()
    mine_text = ours.AvroSchema(mine).schema_info().schema()
    assert mine_text == theirs.AvroSchema(their).schema_info().schema()


VALUES: list[tuple[str, Any]] = [
    ("a", 5),
    ("a", b"x"),
    ("a", None),
    ("b", "x"),
    ("b", 7),
    ("c", 1),
    ("c", None),
    ("missing", 1),
]


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_a_field_accepts_and_refuses_values_as_apaches_client_does(name: str, value: Any) -> None:
    outcomes = []
    for module in (ours, theirs):
        made = shapes(module)["Plain"](a="t", b=1)
        try:
            setattr(made, name, value)
            outcomes.append(getattr(made, name))
        except (TypeError, AttributeError) as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


@given(st.text(), st.integers(-(2**31), 2**31 - 1), st.booleans())
def test_apaches_and_ours_write_the_same_bytes(text: str, number: int, flag: bool) -> None:
    mine = shapes(ours)["Plain"]
    their = shapes(theirs)["Plain"]
    for kind in ("JsonSchema", "AvroSchema"):
        my_schema, their_schema = getattr(ours, kind)(mine), getattr(theirs, kind)(their)
        payload = my_schema.encode(mine(a=text, b=number, c=flag))
        assert payload == their_schema.encode(their(a=text, b=number, c=flag))
        found = my_schema.decode(payload)
        assert found == mine(a=text, b=number, c=flag)


@dataclass
class Inner:
    x: int


@dataclass
class Outer:
    name: str
    inner: Inner
    many: list[Inner]
    by_name: dict[str, float]
    maybe: Inner | None = None
    level: Level = Level.LOW
    tags: list[str] = field(default_factory=list)
    note: str | None = "n"


class InnerModel(BaseModel):
    x: int


class OuterModel(BaseModel):
    name: str
    inner: InnerModel
    level: Level = Level.LOW
    maybe: InnerModel | None = None


def test_a_dataclass_has_an_avro_definition() -> None:
    definition = ours.JsonSchema(Outer)
    assert json.loads(definition.schema_info().schema()) == {
        "type": "record",
        "name": "Outer",
        "fields": [
            {"name": "name", "type": "string"},
            {
                "name": "inner",
                "type": {
                    "type": "record",
                    "name": "Inner",
                    "fields": [{"name": "x", "type": "long"}],
                },
            },
            {"name": "many", "type": {"type": "array", "items": "Inner"}},
            {"name": "by_name", "type": {"type": "map", "values": "double"}},
            {"name": "maybe", "default": None, "type": ["null", "Inner"]},
            {
                "name": "level",
                "default": "LOW",
                "type": {"type": "enum", "name": "Level", "symbols": ["LOW", "HIGH"]},
            },
            {"name": "tags", "default": [], "type": {"type": "array", "items": "string"}},
            {"name": "note", "default": "n", "type": ["string", "null"]},
        ],
    }


@pytest.mark.parametrize(
    "value",
    [
        Outer("a", Inner(1), [Inner(2)], {"k": 0.5}, Inner(3), Level.HIGH, ["t"], None),
        OuterModel(name="a", inner=InnerModel(x=1), level=Level.HIGH, maybe=InnerModel(x=2)),
    ],
)
@pytest.mark.parametrize("kind", [ours.JsonSchema, ours.AvroSchema])
def test_values_of_dataclasses_and_models_round_trip(kind: Any, value: Any) -> None:
    schema = kind(type(value))
    assert schema.decode(schema.encode(value)) == value


def test_keys_that_a_class_lacks_are_ignored_and_missing_ones_have_defaults() -> None:
    payload = b'{"name": "a", "inner": {"x": 1}, "many": [], "by_name": {}, "later": 5}'
    assert ours.JsonSchema(Outer).decode(payload) == Outer("a", Inner(1), [], {})


@dataclass
class Bad:
    x: complex


@pytest.mark.parametrize("cls", [Bad, int, "text", object])
def test_classes_without_an_avro_form_are_refused(cls: Any) -> None:
    with pytest.raises(TypeError):
        ours.JsonSchema(cls)


def named_item(kind: type, key: str) -> Any:
    if kind is Enum:
        return Enum("Item", key)
    if kind is BaseModel:
        return create_model("Item", **{key: (int, ...)})  # type: ignore[call-overload]
    return make_dataclass("Item", [(key, int)])


@pytest.mark.parametrize("kind", [object, BaseModel, Enum], ids=["dataclass", "model", "enum"])
def test_two_classes_of_one_name_in_a_schema_are_refused(kind: type) -> None:
    one, other = (named_item(kind, key) for key in "ab")
    one.__qualname__, other.__qualname__ = "One.Item", "Other.Item"
    one.__module__, other.__module__ = "m", "n"
    with pytest.raises(TypeError, match=r"m\.One\.Item and n\.Other\.Item .* rename one"):
        ours.JsonSchema(make_dataclass("Both", [("x", one), ("y", other)]))
    ours.JsonSchema(make_dataclass("Same", [("x", one), ("y", one)]))


def record_item(**fields: Any) -> Any:
    return type(ours.Record)("Item", (ours.Record,), fields)


@pytest.mark.parametrize("record_first", [True, False])
@pytest.mark.parametrize("kind", [object, BaseModel, Enum], ids=["dataclass", "model", "enum"])
def test_a_record_and_another_class_of_one_name_are_refused(kind: type, record_first: bool) -> None:
    pair = [record_item(a=ours.String()), named_item(kind, "a")]
    first, second = pair if record_first else reversed(pair)
    with pytest.raises(TypeError, match="have the same name in one schema"):
        ours.JsonSchema(make_dataclass("Both", [("x", first), ("y", second)]))


def test_records_of_one_name_with_other_fields_are_refused() -> None:
    one, other = record_item(a=ours.String()), record_item(b=ours.String())
    nested = record_item(a=one())
    both = {"x": one(), "y": other()}
    for cls in (
        make_dataclass("Both", [("x", one), ("y", other)]),
        type(ours.Record)("Both", (ours.Record,), both),
        nested,  # a record within another record of the same name
    ):
        with pytest.raises(TypeError, match="have the same name in one schema"):
            ours.JsonSchema(cls)


def test_records_of_one_name_with_the_same_fields_share_a_definition() -> None:
    one, other = record_item(a=ours.String()), record_item(a=ours.String())
    schema = ours.JsonSchema(make_dataclass("Both", [("x", one), ("y", other)]))
    assert json.loads(schema.schema_info().schema())["fields"][1] == {"name": "y", "type": "Item"}


def test_enums_of_one_name_with_the_same_symbols_share_a_definition() -> None:
    """An alias of a member is no symbol."""
    one, other = Enum("Item", {"a": 1}), Enum("Item", {"a": 1, "alias": 1})
    schema = ours.JsonSchema(make_dataclass("Both", [("x", one), ("y", other)]))
    assert json.loads(schema.schema_info().schema())["fields"] == [
        {"name": "x", "type": {"type": "enum", "name": "Item", "symbols": ["a"]}},
        {"name": "y", "type": "Item"},
    ]


@pytest.mark.parametrize(
    "schema", [ours.StringSchema(), ours.BytesSchema(), ours.JsonSchema(Inner)]
)
@pytest.mark.parametrize("value", [5, None, object()])
def test_values_of_another_type_are_refused(schema: ours.Schema, value: Any) -> None:
    with pytest.raises(TypeError):
        schema.encode(value)


@pytest.mark.parametrize(
    "schema",
    [
        ours.StringSchema(),
        ours.JsonSchema(Inner),
        ours.JsonSchema(InnerModel),
        ours.AvroSchema(Outer),
    ],
    ids=str,
)
@pytest.mark.parametrize("payload", [b"\xff", b"[1]\xff", b'"text\xff'])
def test_payloads_that_do_not_fit_are_refused(schema: ours.Schema, payload: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        schema.decode(payload)


def test_avro_needs_its_library_and_says_so() -> None:
    """In a process where fastavro cannot be imported."""
    program = (
        "import sys; sys.modules['fastavro'] = None\n"
        "from magnetar.schema import AvroSchema, JsonSchema, Record\n"
        "JsonSchema(type('R', (Record,), {}))\n"
        "try: AvroSchema(type('R', (Record,), {}))\n"
        "except ImportError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "magnetar[avro]" in said.stdout, said.stderr


@pytest.mark.parametrize(
    "definition",
    [
        None,
        {"type": "record"},
        "unknown",
        {"type": "record", "name": "R", "fields": [{"name": "a", "type": "X"}]},
    ],
)
def test_invalid_definitions_are_refused(definition: Any) -> None:
    with pytest.raises(ValueError):
        ours.AvroSchema(None, schema_definition=definition)


# ---- hostile payloads ----------------------------------------------------------------------------


@dataclass
class Node:
    number: int
    next: Node | None = None


NODE = {
    "type": "record",
    "name": "Node",
    "fields": [
        {"name": "number", "type": "long"},
        {"name": "next", "type": ["null", "Node"], "default": None},
    ],
}
HUGE = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"  # 2^62, as Avro writes it
NONE: dict[str, Any] = {"type": "record", "name": "None_", "fields": []}
DOUBLED: list[Any] = [
    {
        "type": "record",
        "name": f"D{it}",
        "fields": [{"name": name, "type": f"D{it - 1}"} for name in "ab"],
    }
    for it in range(1, 50)
]
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}


def with_field(kind: Any, payload: bytes) -> tuple[Any, bytes]:
    """A writer's schema with one field more than the reader's, and a payload of it."""
    fields = [{"name": "a", "type": "long"}, {"name": "x", "type": kind}]
    return {"type": "record", "name": "R", "fields": fields}, b"\x02" + payload


def within_records(kind: Any, levels: int, name: str = "W") -> Any:
    for it in range(levels):
        fields = [{"name": "f", "type": kind}]
        kind = {"type": "record", "name": f"{name}_{it}", "fields": fields}
    return kind


HOSTILE = {
    "values within values": with_field(NODE, b"\x00\x02" * 50_000),
    "an array of nulls": with_field({"type": "array", "items": "null"}, HUGE),
    "a map of empty records": with_field({"type": "array", "items": NONE}, HUGE),
    "records that double": with_field(
        [NONE | {"name": "D0"}, *DOUBLED],
        b"\x62",  # the last branch
    ),
    "a large decimal": with_field(DECIMAL, b"\x80\xb5\x18" + bytes(200_000)),
    "empty fixed": with_field(
        {"type": "map", "values": {"type": "fixed", "name": "F", "size": 0}}, HUGE
    ),
    "floats after the end of the payload": with_field(
        {
            "type": "array",
            "items": {
                **NONE,
                "fields": [{"name": "f", "type": "float"}, {"name": "n", "type": "null"}],
            },
        },
        HUGE,
    ),
    "nulls within records": with_field(
        {"type": "array", "items": within_records("null", 50)}, b"\xa0\x9c\x01" + bytes(1)
    ),
    "a record that contains itself": with_field(
        {"type": "record", "name": "S", "fields": [{"name": "s", "type": "S"}]}, b""
    ),
}


FIXED = {"type": "fixed", "name": "F", "size": 4}
ARRAYS = [
    with_field({"type": "array", "items": it}, HUGE) for it in ("float", "boolean", "double", FIXED)
]


def decode_in_a_process(program: str) -> str:
    """The output of a child process: a payload may end the process, or never return."""
    head = "import json, sys\nfrom magnetar.schema import AvroSchema, SchemaInfo, SchemaType\n"
    ended = subprocess.run(
        [sys.executable, "-"], input=head + program, capture_output=True, text=True, timeout=30
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "payloads", [*([it] for it in HOSTILE.values()), ARRAYS], ids=[*HOSTILE, "arrays of fixed size"]
)
@pytest.mark.parametrize("reads", ["the field", "another field"])
def test_hostile_payloads_neither_end_nor_hold_the_process(
    payloads: list[tuple[Any, bytes]], reads: str
) -> None:
    program = ""
    for writer, payload in payloads:
        reader = writer if reads == "the field" else {**writer, "fields": writer["fields"][:1]}
        program += (
            f"writer, reader = {writer!r}, {reader!r}\n"
            "schema = AvroSchema(None, schema_definition=reader)\n"
            "info = SchemaInfo(SchemaType.AVRO, '', json.dumps(writer))\n"
            f"try: schema.decoder_of(info)({payload!r})\n"
            "except ValueError as error: print('refused', error)\n"
        )
    said = decode_in_a_process(program).splitlines()
    assert [it.split()[0] for it in said] == ["refused"] * len(payloads)


PAIR = {**NONE, "fields": [{"name": name, "type": "double"} for name in "ab"]}
SKIPPED = {
    "booleans": with_field({"type": "array", "items": "boolean"}, HUGE + bytes(9)),
    "fixed": with_field({"type": "array", "items": FIXED}, HUGE + bytes(9)),
    "records of doubles": with_field({"type": "array", "items": PAIR}, HUGE),
    "records that double": with_field(
        [{**NONE, "name": "D0", "fields": [{"name": "f", "type": "float"}]}, *DOUBLED], b"\x62"
    ),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_values_that_are_skipped_end_with_the_payload(case: str) -> None:
    """fastavro skips them without an end."""
    schema, payload = SKIPPED[case]
    parsed = fastavro.parse_schema(schema)
    check = payload_check(parsed, may_skip=True)
    assert check is not None
    with pytest.raises(ValueError, match="ends within"):
        check(payload)
    assert payload_check(parsed, may_skip=False) is None


def test_an_array_of_records_of_a_fixed_size_is_one_step_of_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer whose schema only adds a field must not become slow."""
    inner = {**PAIR, "name": "Inner", "fields": [*PAIR["fields"], {"name": "f", "type": FIXED}]}
    fields = [{"name": "flag", "type": "boolean"}, {"name": "inner", "type": inner}]
    items = {"type": "record", "name": "Items", "fields": fields}
    schema = fastavro.parse_schema({"type": "array", "items": items})
    check = payload_check(schema, may_skip=True)
    assert check is not None
    buffer = io.BytesIO()
    item = {"flag": True, "inner": {"a": 0.5, "b": 1.5, "f": b"abcd"}}
    fastavro.schemaless_writer(buffer, schema, [item] * 3_000)
    leaves: list[str] = []
    skip = avro_bounds._skip_leaf

    def counted(data: bytes, at: int, found: Any) -> int:
        leaves.append(found.kind)
        return skip(data, at, found)

    monkeypatch.setattr(avro_bounds, "_skip_leaf", counted)
    check(buffer.getvalue())
    assert leaves == ["boolean", "double", "double", "fixed"]
    with pytest.raises(ValueError, match="ends within"):
        check(buffer.getvalue()[:-2])


@pytest.mark.parametrize("size", [-4, True, 4.0, "4", None])
def test_a_fixed_type_whose_size_is_no_natural_number_is_refused(size: Any) -> None:
    """With a negative size, the check would read the payload without end."""
    writer, _ = with_field({"type": "array", "items": {**FIXED, "size": size}}, b"")
    reader = ours.AvroSchema(None, schema_definition={**writer, "fields": writer["fields"][:1]})
    with pytest.raises(ValueError, match="has the size"):
        reader.decoder_of(ours.SchemaInfo(ours.SchemaType.AVRO, "", json.dumps(writer)))


def test_a_reader_may_lack_a_field_of_floats() -> None:
    vector = {"type": "array", "items": "float"}
    fields = [{"name": "v", "type": vector}, {"name": "a", "type": "long"}]
    writer = {"type": "record", "name": "R", "fields": fields}
    reader = ours.AvroSchema(None, schema_definition={**writer, "fields": fields[1:]})
    payload = ours.AvroSchema(None, schema_definition=writer).encode({"v": [0.5] * 1_000, "a": 7})
    decode = reader.decoder_of(ours.SchemaInfo(ours.SchemaType.AVRO, "", json.dumps(writer)))
    assert decode is not None
    assert decode(payload) == {"a": 7}
    for end in (3, 1_000, len(payload) - 1):
        with pytest.raises(ValueError):
            decode(payload[:end])


def test_honest_payloads_of_such_schemas_are_decoded() -> None:
    schema = ours.AvroSchema(Node)
    value = None
    for number in range(100):
        value = Node(number, value)
    assert schema.decode(schema.encode(value)) == value
    fields = {
        "nothing": "null",
        "empty": NONE,
        "nulls": {"type": "array", "items": "null"},
        "price": DECIMAL,
        "names": {"type": "map", "values": ["null", "string"]},
        "flag": "boolean",
        "one": "float",
        "two": "double",
        "raw": {"type": "fixed", "name": "F", "size": 3},
        "kind": {"type": "enum", "name": "E", "symbols": ["A", "B"]},
        "again": "E",
        "error": {"type": "error", "name": "X", "fields": [{"name": "n", "type": "int"}]},
    }
    shown = [{"name": name, "type": kind} for name, kind in fields.items()]
    mixed = ours.AvroSchema(
        None, schema_definition={"type": "record", "name": "R", "fields": shown}
    )
    values = {
        "nothing": None,
        "empty": {},
        "nulls": [None] * 1_000,
        "price": Decimal("12.50"),
        "names": {"a": None, "b": "text"},
        "flag": True,
        "one": 0.5,
        "two": -0.25,
        "raw": b"abc",
        "kind": "B",
        "again": "A",
        "error": {"n": -70_000},
    }
    payload = mixed.encode(values)
    assert mixed.decode(payload) == values
    for end in range(len(payload)):
        with pytest.raises(ValueError):
            mixed.decode(payload[:end])


class Shapes:
    """A random Avro schema, and a value of it."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.names = 0

    def of_any(self, depth: int = 0, *, leaf: bool = False) -> tuple[Any, Any]:
        """Return a type and a value. Only the part of an array must take bytes."""
        kinds = ["null", "int", "string", "float", "boolean", "decimal", "fixed", "enum", "nested"]
        if depth < 3 and not leaf:
            kinds += ["record"] * 3 + ["array", "map", "union"]
        kind = self.draw(st.sampled_from(kinds))
        name = self.name()
        match kind:
            case "null":
                return "null", None
            case "int":
                return "int", self.draw(st.integers(-(1 << 31), (1 << 31) - 1))
            case "string":
                return "string", self.draw(st.text(max_size=3))
            case "float":
                return "float", 0.5
            case "boolean":
                return "boolean", True
            case "decimal":
                return DECIMAL, Decimal(self.draw(st.integers(-999, 999))) / 4
            case "fixed":
                size = self.draw(st.integers(0, 3))
                return {"type": "fixed", "name": name, "size": size}, bytes(size)
            case "enum":
                return {"type": "enum", "name": name, "symbols": ["A", "B"]}, "B"
            case "nested":
                inner, value = self.of_any(depth, leaf=True)
                return self.within_records(inner, value)
            case "record":
                count = self.draw(st.integers(0, 4))
                return self.record([self.of_any(depth + 1) for _ in range(count)])
            case "array":
                inner, value = self.with_bytes(self.of_any(depth + 1))
                return {"type": "array", "items": inner}, [value] * self.draw(st.integers(0, 3))
            case "map":
                inner, value = self.of_any(depth + 1)
                named = {str(it): value for it in range(self.draw(st.integers(0, 3)))}
                return {"type": "map", "values": inner}, named
        inner, value = self.record([self.of_any(depth + 1)])
        return ["null", inner], self.draw(st.sampled_from([None, value]))

    def name(self) -> str:
        self.names += 1
        return f"N{self.names}"

    def record(self, parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        fields = [{"name": f"f{it}", "type": part[0]} for it, part in enumerate(parts)]
        value = {f"f{it}": part[1] for it, part in enumerate(parts)}
        return {"type": "record", "name": self.name(), "fields": fields}, value

    def within_records(self, inner: Any, value: Any) -> tuple[Any, Any]:
        """Put a value within up to 20 records of one field."""
        levels = self.draw(st.integers(0, 20))
        for _ in range(levels):
            value = {"f": value}
        return within_records(inner, levels, self.name()), value

    def with_bytes(self, shape: tuple[Any, Any]) -> tuple[Any, Any]:
        return self.record([shape, ("int", 1)])


@st.composite
def schemas_and_values(draw: st.DrawFn) -> tuple[Any, Any]:
    shapes = Shapes(draw)
    return shapes.within_records(*shapes.with_bytes(shapes.of_any()))


@settings(max_examples=60, deadline=None)
@given(schemas_and_values())
def test_no_payload_that_fastavro_wrote_is_refused(shape: tuple[Any, Any]) -> None:
    """The payload has a decimal, so that there is a check, and 3,000 equal items."""
    fields = [
        {"name": "price", "type": DECIMAL},
        {"name": "items", "type": {"type": "array", "items": shape[0]}},
    ]
    schema = fastavro.parse_schema({"type": "record", "name": "R", "fields": fields})
    check = payload_check(schema, may_skip=True)
    assert check is not None
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, schema, {"price": Decimal(1), "items": [shape[1]] * 3_000})
    check(buffer.getvalue())
    with pytest.raises(ValueError, match="ends within"):
        check(buffer.getvalue()[:-1])


def test_records_of_one_field_are_one_step_of_the_check() -> None:
    root = _Types().of(fastavro.parse_schema(within_records("int", 200)))
    assert (root.levels, [it.kind for it in root.parts]) == (200, ["int"])


def test_plain_schemas_have_no_payload_check() -> None:
    for cls in (Outer, OuterModel, *shapes(ours).values()):
        for may_skip in (False, True):
            assert payload_check(ours.AvroSchema(cls)._parsed, may_skip=may_skip) is None


@pytest.mark.parametrize("kind", [ours.JsonSchema, ours.AvroSchema])
@pytest.mark.parametrize("levels", [400, 100_000])
def test_deep_payloads_are_refused(kind: Any, levels: int) -> None:
    payload = b"\x00\x02" * levels + b"\x00\x00"
    if kind is ours.JsonSchema:
        payload = b'{"number": 0, "next": ' * levels + b"null" + b"}" * levels
    with pytest.raises(ValueError, match=r"deep|values"):
        kind(Node).decode(payload)


GOOD = {"name": "a", "inner": {"x": 1}, "many": [], "by_name": {}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": "UNKNOWN"},
        {"level": [1]},
        {"level": {}},
        {"inner": "x"},
        {"inner": ["x"]},
        {"many": 5},
        {"many": {"x": 1}},
        {"many": ["x"]},
        {"by_name": ["x"]},
        {"by_name": 5},
    ],
    ids=str,
)
def test_json_of_another_shape_is_refused_with_the_errors_that_value_names(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        ours.JsonSchema(Outer).decode(json.dumps(GOOD | wrong).encode())


@pytest.mark.parametrize("name", ["Node", "Other"])
def test_a_writer_in_a_namespace_may_use_full_names(name: str) -> None:
    writer = json.loads(json.dumps(NODE).replace("Node", f"shop.{name}"))
    value = {"number": 1, "next": {"number": 2, "next": None}}
    payload = ours.AvroSchema(None, schema_definition=writer).encode(value)
    info = ours.SchemaInfo(ours.SchemaType.AVRO, "", json.dumps(writer))
    decode = ours.AvroSchema(Node).decoder_of(info)
    assert decode is not None
    assert decode(payload) == Node(1, Node(2))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"type": {"type": {"type": "array"}}}'])
def test_a_writers_definition_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ours.AvroSchema(Node).decoder_of(ours.SchemaInfo(ours.SchemaType.AVRO, "", text))


class Within(ours.Record):
    default = ours.String()


class Named(ours.Record):
    """Its fields have the names of parameters of the constructor."""

    required = ours.Boolean()
    inner = Within()
    a = ours.String()


@pytest.mark.parametrize("kind", [ours.JsonSchema, ours.AvroSchema])
def test_fields_with_the_names_of_parameters_of_a_record_are_decoded(kind: Any) -> None:
    value = Named(a="x")
    value.required = True
    value.inner = Within()
    value.inner.default = "y"
    schema = kind(Named)
    found = schema.decode(schema.encode(value))
    assert (found.required, found.inner.default, found.a) == (True, "y", "x")


def test_json_ignores_unknown_keys_with_the_names_of_parameters() -> None:
    text = b'{"self": 1, "default": 2, "required_default": 3, "inner": {"self": 4}, "a": "x"}'
    found = ours.JsonSchema(Named).decode(text)
    assert (found.a, found.required, found.inner.default) == ("x", False, None)
