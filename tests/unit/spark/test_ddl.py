from __future__ import annotations

import json

import pytest

from magnetar.spark.source.ddl import parse_schema


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("carrier string, delay INT", "struct<carrier:string,delay:int>"),
        ("`odd name` bigint", "struct<odd name:bigint>"),
        (
            "a array<struct<x:double,y:array<long>>>, b decimal(10, 2), c timestamp",
            "struct<a:array<struct<x:double,y:array<bigint>>>,b:decimal(10,2),c:timestamp>",
        ),
        ("d decimal", "struct<d:decimal(10,0)>"),
    ],
)
def test_a_schema_is_parsed_as_spark_does(text: str, parsed: str) -> None:
    schema = parse_schema(text)
    assert schema.simpleString() == parsed
    assert parse_schema(schema.json()) == schema


def of_json(**field: object) -> str:
    """The JSON of a schema with one field."""
    field = {"nullable": True, "metadata": {}} | field
    return json.dumps({"type": "struct", "fields": [field]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a int,",
        "a int b",
        "a map<string,string>",
        "a binary",
        "a array<int",
        "a struct<b int>",
        "a decimal(40,2)",
        "a decimal(4,5)",
        "a int; drop",
        "{}",
        '{"type":"struct","fields":[{"name":"a","type":"binary","nullable":true,"metadata":{}}]}',
        of_json(name=None, type="long"),
        of_json(name="a", type="long", metadata="m"),
        of_json(name="a", type="decimal(39,2)"),
        of_json(name="a", type="decimal(3,-2)"),
        of_json(name="a", type={"type": "udt", "pyClass": "no_such_module.Class"}),
        "a " + "array<" * 100 + "int" + ">" * 100,
        "x" * 200_000,
        '{"type":"struct","fields":[' + '{"name":' * 10_000,
        '{"type":"struct","fields":[{"name":"a","nullable":true,"metadata":{},"type":'
        + '{"type":"array","containsNull":true,"elementType":' * 40
        + '"long"'
        + "}" * 40
        + "}]}",
    ],
)
def test_an_invalid_schema_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_schema(text)
