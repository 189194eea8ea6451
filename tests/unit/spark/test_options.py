from __future__ import annotations

import pytest
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
)

from magnetar.spark.errors import InvalidOption, InvalidSchema
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.schema import SCHEMA, check_schema

GIVEN = {"service.url": "grpc://one:1,two", "topic": "flights"}


def test_what_is_given_and_what_is_not() -> None:
    options = parse_options(GIVEN | {"targetbytespertask": "5", "maxPartitions": "2"})
    assert options.brokers == ("grpc://one:1", "grpc://two:6660")
    assert list(map(str, options.topics)) == ["persistent://public/default/flights"]
    assert options.target_bytes_per_task == 5
    assert options.tasks_max == 2
    assert options.read_timeout_s == 60.0


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"startingOffsets": "first"}, "startingOffsets"),
        ({"maxRowsPerTrigger": "5"}, "maxrowspertrigger"),
        ({"path": "/tmp"}, "path"),
        ({"service.url": ""}, "service.url"),
        ({"service.url": "pulsar://one:6650"}, "service.url"),
        ({"service.url": "one:6660"}, "service.url"),
        ({"topic": " "}, "topic"),
        ({"topic": "a/b"}, "topic"),
        ({"topic": "non-persistent://t/n/x"}, "topic"),
        ({"maxPartitions": "0"}, "maxPartitions"),
        ({"maxPartitions": "-1"}, "maxPartitions"),
        ({"targetBytesPerTask": "16MB"}, "targetBytesPerTask"),
        ({"readTimeoutMs": "1.5"}, "readTimeoutMs"),
    ],
)
def test_a_wrong_option_is_refused_by_name(change: dict[str, str], option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_options(GIVEN | change)
    assert caught.value.option == option
    assert option in str(caught.value)


@pytest.mark.parametrize("missing", ["service.url", "topic"])
def test_a_missing_option_is_named(missing: str) -> None:
    with pytest.raises(InvalidOption, match=missing):
        parse_options({name: value for name, value in GIVEN.items() if name != missing})


def test_any_of_the_columns_may_be_asked_for() -> None:
    check_schema(SCHEMA)
    check_schema(StructType([SCHEMA["__index"], SCHEMA["value"]]))
    check_schema(StructType([SCHEMA["__messageProperties"]]))


@pytest.mark.parametrize(
    ("schema", "column"),
    [
        (StructType().add("carrier", LongType()), "carrier"),
        (StructType().add("__index", IntegerType()), "__index"),
        (StructType().add("value", StringType()), "value"),
        (StructType().add("__index", LongType(), nullable=False), "__index"),
        (
            StructType().add("__messageProperties", MapType(StringType(), BinaryType())),
            "__messageProperties",
        ),
    ],
)
def test_a_column_that_a_topic_does_not_have_is_refused(schema: StructType, column: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        check_schema(schema)
    assert caught.value.column == column
