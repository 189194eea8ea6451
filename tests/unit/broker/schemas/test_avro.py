"""Avro schemas: validity, equality, and which schema can read the data of another."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from magnetar.broker.schemas import avro
from magnetar.broker.schemas.avro import NotAvro


def parsed(tree: Any) -> avro.AvroSchema:
    return avro.parse(json.dumps(tree).encode())


def record(*fields: Any, name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
LARGER = {**ENUM, "symbols": ["A", "B", "C"]}
NODE = record(field("next", ["null", "Node"]), name="Node")
A = field("a", "int")


@pytest.mark.parametrize(
    ("reader", "writer", "reads"),
    [
        ("int", "int", True),
        ("long", "int", True),
        ("double", "float", True),
        ("int", "long", False),
        ("string", "bytes", True),
        ("string", "int", False),
        (["null", "int"], "int", True),
        ("int", ["null", "int"], False),
        (["null", "long"], ["int", "null"], True),
        ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}, True),
        ({"type": "map", "values": "int"}, {"type": "map", "values": "string"}, False),
        (LARGER, ENUM, True),
        (ENUM, LARGER, False),
        ({**ENUM, "default": "A"}, LARGER, True),
        ({**ENUM, "default": "unknown"}, LARGER, False),
        ({"type": "fixed", "name": "F", "size": 4}, {"type": "fixed", "name": "F", "size": 8}, 0),
        (record(A, field("b", {**ENUM, "default": "A"})), record(A), False),
        (record(A, name="a$B", namespace="com.my-shop$"), record(A, name="a$B"), True),
        (record(A), record(A, field("b", "string")), True),
        (record(A, field("b", "string")), record(A), False),
        (record(A, field("b", "string", default="")), record(A), True),
        (record(A, field("b", ["null", "string"])), record(A), False),
        (record(A, field("b", ["null", "string"], default=None)), record(A), True),
        (record(A, name="S"), record(A), False),
        (record(A, name="S", aliases=["R"]), record(A), True),
        (record(A, namespace="other"), record(A, namespace="one"), True),
        (record(field("b", "int", aliases=["a"])), record(A), True),
        (record(field("a", "string")), record(A), False),
        (NODE, NODE, True),
        (record(field("a", {"type": "int", "logicalType": "date"})), record(A), True),
    ],
)
def test_resolution_follows_the_specification(reader: Any, writer: Any, reads: bool) -> None:
    problem = avro.unreadable(parsed(reader), parsed(writer))
    assert (problem == "") == bool(reads), problem


def test_a_result_does_not_rely_on_a_pair_that_failed_later() -> None:
    """x.N cannot read w.N, so Mid cannot either, and y.N must not use the result for Mid."""

    def node(name: str, *more: Any) -> Any:
        return record(
            field("m", record(field("n", ["null", name]), name="p.Mid")), *more, name=name
        )

    y = record(field("m", "p.Mid"), name="y.N")
    w = node("w.N", field("v", "int"))
    x = node("x.N", field("v", "string"))
    assert avro.unreadable(parsed([x, y]), parsed(w)) == "no branch of a union reads w.N"
    assert avro.unreadable(parsed([node("x.N"), y]), parsed(w)) == ""


def test_the_problem_names_the_field() -> None:
    problem = avro.unreadable(parsed(record(A, field("b", "string"))), parsed(record(A)))
    assert problem == "field b of R has no default, and the messages lack it"


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (record(A), record({**A, "doc": "text"}, doc="text"), True),
        (record(A, namespace="n"), record(A, name="n.R"), True),
        (record(A), record(field("a", {"type": "int"})), True),
        (record(A), record({**A, "order": "ascending"}), True),
        (record(A), record({**A, "default": 0}), False),
        (record(A), record(field("a", "long")), False),
        (record(A, field("b", "int")), record(field("b", "int"), A), False),
        (record(field("a", {"type": "int", "logicalType": "date"})), record(A), False),
    ],
)
def test_equal_schemas_have_one_canonical_form(one: Any, other: Any, equal: bool) -> None:
    assert (parsed(one).canonical == parsed(other).canonical) == equal


def deep(levels: int) -> Any:
    tree: Any = "int"
    for _ in range(levels):
        tree = {"type": "array", "items": tree}
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        "Unknown",
        5,
        {"type": "record", "name": "R"},
        {"type": "record", "fields": []},
        {"type": "enum", "name": "E"},
        {"type": "fixed", "name": "F"},
        {"type": "array"},
        {"type": "object", "properties": {}},
        record(A, A),
        record(field("a b", "int")),
        record(A, name="5"),
        record(A, name="R", namespace="a b"),
        record(A, name="R" * (avro.NAME_CHARS_MAX + 1)),
        record(A, name="R", namespace="n" * avro.NAME_CHARS_MAX),
        record(A, aliases=["a"] * avro.NODES_MAX),
        record({**A, "aliases": "a"}),
        {**ENUM, "symbols": ["A", "A"]},
        {**ENUM, "symbols": ["\ud800"]},
        {"type": "fixed", "name": "F", "size": -1},
        {"type": "fixed", "name": "F", "size": 2**31},
        ["int", "int"],
        [["int"], "null"],
        record(field("x", record(A)), field("y", record(A))),
        deep(avro.DEPTH_MAX + 1),
        ["null"] + [record(field(f"f{i}", "int"), name=f"R{i}") for i in range(avro.NODES_MAX)],
    ],
    ids=lambda tree: repr(tree)[:40],
)
def test_an_invalid_schema_is_refused(tree: Any) -> None:
    with pytest.raises(NotAvro):
        parsed(tree)


def test_a_union_may_have_a_record_with_the_name_union() -> None:
    """As in Java, which looks at the kind of the branch."""
    schema = parsed(["null", record(A, name="union")])
    assert avro.unreadable(schema, schema) == ""


def with_default(levels: int) -> bytes:
    """A schema whose default has this many levels."""
    text = json.dumps(record(field("a", "int", default=0))).encode()
    return text.replace(b'"default": 0', b'"default": ' + b"[" * levels + b"]" * levels)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff", b"[" * 100_000, '"int"'.encode("utf-16"), with_default(300)],
    ids=["nothing", "a part", "no text", "brackets", "UTF-16", "a deep default"],
)
def test_a_definition_that_is_not_json_in_utf_8_is_refused(text: bytes) -> None:
    with pytest.raises(NotAvro):
        avro.parse(text)


def test_the_validity_of_a_schema_does_not_depend_on_the_stack_depth() -> None:
    """A schema that was stored from a short stack must be readable from a long stack."""

    def outcome(text: bytes, frames: int) -> type:
        if frames:
            return outcome(text, frames - 1)
        try:
            return type(avro.parse(text))
        except NotAvro as error:
            return type(error)

    for levels in range(50, 1_000, 50):
        text = with_default(levels)
        assert outcome(text, 0) is outcome(text, 400), levels


def test_a_long_chain_of_records_does_not_overflow_the_stack() -> None:
    chain: list[Any] = [record(A, name="R0")]
    chain += [record(field("a", f"R{i}"), name=f"R{i + 1}") for i in range(3_000)]
    last = field("l", "R3000")
    reader = parsed(record(field("x", chain, default={"a": 1}), last))
    assert "too many steps" in avro.unreadable(reader, parsed(record(field("y", chain), last)))


def test_large_unions_do_not_take_a_comparison_of_each_pair() -> None:
    many = [record(A, name=f"R{number}") for number in range(1_000)]
    assert avro.unreadable(parsed(many), parsed(many)) == ""
    others = [record(A, name=f"S{number}", aliases=["R0"]) for number in range(1_000)]
    problem = avro.unreadable(parsed(others), parsed(["null", *many][1:]))
    assert problem, "the schema is refused within COMPARISONS_MAX steps"


def seconds(reader: Any, writer: Any) -> float:
    """Seconds of CPU for one comparison."""
    one, other = parsed(reader), parsed(writer)
    began = time.thread_time()
    avro.unreadable(one, other)
    return time.thread_time() - began


@pytest.mark.usefixtures("no_collection")
def test_a_large_enum_is_compared_in_linear_time() -> None:
    symbols = [f"s{number:05}" for number in range(12_000)]
    assert seconds({**ENUM, "symbols": symbols}, {**ENUM, "symbols": symbols[::-1]}) < 0.5


@pytest.mark.usefixtures("no_collection")
def test_many_records_with_many_aliases_are_not_compared_field_by_field() -> None:
    names = [f"W{number}" for number in range(1_500)]
    written = [record(A, name=name) for name in names]
    sought = field("z", "int", default=0, aliases=[f"a{number}" for number in range(7_000)])
    reader = record(sought, aliases=names)
    assert seconds(reader, written) < 0.5
    assert "steps" in avro.unreadable(parsed(reader), parsed(written))


def test_the_canonical_form_of_long_names_stays_small() -> None:
    name = "R" * avro.NAME_CHARS_MAX
    fields = [field(f"f{number}", name) for number in range(150)]
    assert len(parsed(record(*fields, name=name)).canonical) < 150 * 600
