from __future__ import annotations

import copy
import json
import pickle
import struct
from datetime import UTC, date, datetime
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type

from magnetar.spark.avro import (
    EMPTY_FREE,
    EMPTY_PER_BYTE,
    ROWS_MAX,
    InvalidAvroSchema,
    avro_decoder,
    parse_avro_schema,
)
from magnetar.spark.type_limits import LEVELS_MAX
from magnetar.spark.values import decode_values

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD = {
    "type": "record",
    "name": "Flight",
    "namespace": "air",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "carrier", "type": ["null", "string"]},
        {"name": "delay", "type": "double"},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["ON", "OFF"]}},
        {"name": "before", "type": "State"},
        {"name": "stops", "type": {"type": "array", "items": "int"}},
        {"name": "tags", "type": {"type": "map", "values": "boolean"}},
        {"name": "digest", "type": {"type": "fixed", "name": "D", "size": 2}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}


def number(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def text(value: str) -> bytes:
    return number(len(value.encode())) + value.encode()


def flight(flight_id: int = 7) -> bytes:
    return b"".join(
        [
            number(flight_id) + number(1) + text("AA") + struct.pack("<d", 1.5),
            number(0) + number(1),
            number(2) + number(3) + number(-4) + number(0),
            number(-1) + number(4) + text("x") + b"\x01" + number(0),  # a block with its size
            b"ab" + number(15_706) + number(1_356_998_400_000),
        ]
    )


def decoded(schema: Any, *payloads: bytes | None) -> tuple[list[Any], dict[int, str]]:
    avro = parse_avro_schema(json.dumps(schema))
    kind = to_arrow_type(avro.spark, timezone="UTC")
    payload = pa.array(payloads, pa.binary())
    values, bad = decode_values(payload, avro_decoder(avro, kind), kind)
    return values.to_pylist(), bad


def test_every_type_of_avro_becomes_a_value_of_spark() -> None:
    [row, null], bad = decoded(RECORD, flight(), None)
    assert not bad
    assert null is None
    assert row == {
        "id": 7,
        "carrier": "AA",
        "delay": 1.5,
        "state": "ON",
        "before": "OFF",
        "stops": [3, -4],
        "tags": [("x", True)],
        "digest": b"ab",
        "day": date(2013, 1, 1),
        "at": datetime(2013, 1, 1, tzinfo=UTC),
    }


@given(st.integers(-(2**63), 2**63 - 1))
def test_longs_of_every_size_are_decoded(value: int) -> None:
    assert decoded("long", number(value)) == ([value], {})


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_bad_record(payload: bytes) -> None:
    [first, last], bad = decoded(RECORD, payload, flight())
    assert last["id"] == 7
    assert (first is None) == (0 in bad)


@pytest.mark.parametrize(
    ("schema", "payload", "reason"),
    [
        ("string", number(-1), "longer than the payload"),
        ("bytes", number(2**40) + b"x", "longer than the payload"),
        ("string", number(1) + b"\xff", "utf-8"),
        ("long", b"\xff" * 11, "more than 64 bits"),
        ("long", b"", "ends within a value"),
        ("double", b"1234", "ends within a value"),
        ("int", number(2**40), "too large"),
        ("boolean", b"\x02", "not a boolean"),
        ("long", number(1) + b"x", "1 bytes are left"),
        (["null", "long"], number(2), "no branch"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, number(1), "no symbol"),
        ({"type": "fixed", "name": "F", "size": 9}, b"1", "longer than the payload"),
        ({"type": "array", "items": "null"}, number(2**50), "more than 1512 values without bytes"),
        ({"type": "long", "logicalType": "timestamp-millis"}, number(2**62), ""),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            number(-62_135_596_800_001),
            "outside of the years",
        ),
        (
            {"type": "long", "logicalType": "timestamp-micros"},
            number(253_402_300_800_000_000),
            "outside of the years",
        ),
        ({"type": "int", "logicalType": "date"}, number(-719_163), "outside of the years"),
        ({"type": "int", "logicalType": "date"}, number(2_932_897), "outside of the years"),
    ],
)
def test_a_bad_payload_is_named(schema: Any, payload: bytes, reason: str) -> None:
    _, bad = decoded(schema, payload)
    assert reason in bad[0]


def arrays_of(items: Any) -> Any:
    return {"type": "array", "items": {"type": "array", "items": items}}


WIDE = {
    "type": "record",
    "name": "W",
    "fields": [{"name": f"f{at}", "type": "null"} for at in range(500)],
}
"""A record of 501 values without bytes: itself, and its fields."""


@pytest.mark.parametrize(
    ("schema", "item", "empties"),
    [
        (arrays_of("null"), number(500) + number(0), 500),
        (arrays_of({"type": "fixed", "name": "F", "size": 0}), number(500) + number(0), 500),
        (arrays_of(WIDE), number(1) + number(0), 501),
        (arrays_of(["null", WIDE]), number(1) + number(1) + number(0), 501),
        ({"type": "array", "items": {"type": "map", "values": WIDE}},
         number(1) + text("k") + number(0), 501),
    ],
)  # fmt: skip
def test_the_values_without_bytes_of_one_message_are_limited(
    schema: Any, item: bytes, empties: int
) -> None:
    """Each inner array is small. The limit is for all of them together."""

    def payload(items: int) -> bytes:
        return number(items) + item * items + number(0)

    fitting = max(n for n in range(200) if n * empties <= limit(payload(n)))
    values, bad = decoded(schema, payload(fitting), payload(fitting + 1))
    assert len(values[0]) == fitting
    reason = f"the payload has more than {limit(payload(fitting + 1))} values without bytes"
    assert bad == {1: reason}


def limit(payload: bytes) -> int:
    return EMPTY_FREE + EMPTY_PER_BYTE * len(payload)


def test_an_array_of_values_with_bytes_has_no_other_limit_than_the_payload() -> None:
    count = 1_100_000
    avro = parse_avro_schema('{"type": "array", "items": "boolean"}')
    kind = to_arrow_type(avro.spark, timezone="UTC")
    payload = number(count) + b"\x01" * count + number(0)
    [value] = avro_decoder(avro, kind)(pa.array([payload], pa.binary()))
    assert len(value) == count


def test_records_of_the_maximum_depth_fit_the_limit_of_values_without_bytes() -> None:
    """Each record counts as a value without bytes."""
    schema = {"type": "array", "items": records(LEVELS_MAX - 3, optional=False)}
    count = 1_000
    values, bad = decoded(schema, number(count) + number(5) * count + number(0))
    assert not bad
    assert len(values[0]) == count


def test_the_rows_keep_their_order_beyond_the_rows_that_are_decoded_at_once() -> None:
    count = 2 * ROWS_MAX + 1
    values, bad = decoded("long", *(number(at) for at in range(count)))
    assert values == list(range(count))
    assert not bad


@pytest.mark.parametrize(
    "schema",
    [
        "strange",
        7,
        [],
        ["int", "string"],
        {"type": "record", "name": "R"},
        {"type": "record", "fields": []},
        {"type": "enum", "name": "E"},
        {"type": "fixed", "name": "F", "size": -1},
        {"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]},
        {"type": "record", "name": "R", "fields": [{"type": "int"}]},
        {"type": "record", "name": "R", "fields": [{"name": 7, "type": "int"}]},
        {"type": "record", "name": "R", "fields": [{"name": "\ud800", "type": "int"}]},
        {"type": "record", "name": "R", "fields": [{"name": "f", "type": "int"}] * 2},
        {"type": "record", "name": "R", "namespace": [], "fields": []},
        {"type": "strange", "logicalType": []},
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidAvroSchema):
        parse_avro_schema(json.dumps(schema))


@pytest.mark.parametrize("logical", [[], {}, None, 7, "strange"])
def test_an_unknown_logical_type_is_read_as_its_base_type(logical: Any) -> None:
    assert decoded({"type": "long", "logicalType": logical}, number(5)) == ([5], {})


def test_a_namespace_of_null_is_that_of_the_outer_type() -> None:
    inner = {"type": "enum", "name": "E", "namespace": None, "symbols": ["A"]}
    schema = record("R", inner, "air.E") | {"namespace": "air"}
    assert decoded(schema, number(0) * 2) == ([{"f0": "A", "f1": "A"}], {})


NOT_EXPECTED: Any = [
    None, True, 0, -1, 1.5, 2**70, "", "x", "null", "int", "State", "\ud800", [], {}, [[]],
    ["null"], ["null", "int"], ["int", "string"], {"type": []}, {"type": "array"}, {"type": "map"},
    {"type": "array", "items": "null"}, {"type": "fixed", "name": "Z", "size": 0},
]  # fmt: skip
KEYS = [
    "type", "name", "namespace", "symbols", "size", "items", "values", "fields", "logicalType",
]  # fmt: skip


def paths(tree: Any) -> Iterator[tuple[Any, ...]]:
    """The path of each part of a JSON tree."""
    yield ()
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        for path in paths(tree[key]):
            yield key, *path


def changed(tree: Any, chooser: Random) -> Any:
    """A copy of a JSON tree with one to three changes."""
    tree = copy.deepcopy({"root": tree})
    for _ in range(chooser.randint(1, 3)):
        *way, last = chooser.choice([path for path in paths(tree) if path])
        parent = tree
        for key in way:
            parent = parent[key]
        new = copy.deepcopy(chooser.choice(NOT_EXPECTED))
        match chooser.randrange(3):
            case 0 if way:
                del parent[last]
            case 1 if isinstance(parent, dict) and way:
                parent[chooser.choice(KEYS)] = new
            case _:
                parent[last] = new
    return tree["root"]


@settings(max_examples=500)
@given(st.integers(0))
def test_a_changed_schema_is_refused_or_decodes_any_bytes(seed: int) -> None:
    chooser = Random(seed)
    try:
        avro = parse_avro_schema(json.dumps(changed(RECORD, chooser)))
    except InvalidAvroSchema:
        return
    kind = to_arrow_type(avro.spark, timezone="UTC")
    payloads = pa.array([flight(), chooser.randbytes(20), None], pa.binary())
    values, _ = decode_values(payloads, avro_decoder(avro, kind), kind)
    assert len(values) == 3


def record(name: str, *kinds: Any) -> dict[str, Any]:
    fields = [{"name": f"f{at}", "type": kind} for at, kind in enumerate(kinds)]
    return {"type": "record", "name": name, "fields": fields}


def arrays(depth: int) -> Any:
    return {"type": "array", "items": arrays(depth - 1)} if depth else "int"


def maps(depth: int) -> Any:
    return {"type": "map", "values": maps(depth - 1)} if depth else "int"


def records(depth: int, *, optional: bool = True) -> Any:
    """Records that are defined beside each other, each with a field of the one before it."""
    if not optional:
        return record(f"R{depth}", records(depth - 1, optional=False)) if depth else "int"
    defined = [record(f"R{at}", ["null", f"R{at - 1}" if at else "int"]) for at in range(depth)]
    return record("R", *defined)


def doubling(depth: int) -> Any:
    """Each record has two fields of the next one."""
    if not depth:
        return record("R0", "int")
    return record(f"R{depth}", doubling(depth - 1), f"R{depth - 1}")


@pytest.mark.parametrize(
    "schema", [arrays(LEVELS_MAX - 1), maps(LEVELS_MAX // 2), records(LEVELS_MAX - 2)]
)
def test_types_of_the_maximum_depth_reach_spark(schema: Any) -> None:
    spark = parse_avro_schema(json.dumps(schema)).spark
    assert pickle.loads(pickle.dumps(spark)) == spark
    row = pa.struct([("value", to_arrow_type(spark, timezone="UTC"))])  # as PySpark sends it
    assert pa.record_batch([pa.array([None], row)], ["row"]).serialize()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (arrays(100), "nested deeper than 64"),
        (arrays(LEVELS_MAX), "nested deeper than 63 levels"),
        (maps(LEVELS_MAX // 2 + 1), "nested deeper than 63 levels"),
        (records(LEVELS_MAX - 1), "nested deeper than 63 levels"),
        (records(3000), "nested deeper than 63 levels"),
        (doubling(30), "more than 10000 fields"),
    ],
)
def test_a_schema_that_is_too_large_for_spark_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidAvroSchema, match=reason):
        parse_avro_schema(json.dumps(schema))
