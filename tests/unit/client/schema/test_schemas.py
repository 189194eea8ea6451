"""Schemas without a server: definitions, values, and what is refused. Apache's client is the model
where it has the same."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pulsar.schema as theirs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import magnetar.schema as ours


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
def test_the_definition_is_apaches(name: str) -> None:
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
def test_a_field_takes_what_apaches_takes(name: str, value: Any) -> None:
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
def test_values_of_dataclasses_and_models_come_back(kind: Any, value: Any) -> None:
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
