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

from magnetar.protos.names import TopicName
from magnetar.spark.errors import InvalidOption, InvalidSchema
from magnetar.spark.source.options import Edge, MessagePlace, parse_options
from magnetar.spark.source.schema import SCHEMA, check_schema, schema_of

GIVEN = {"service.url": "grpc://one:1,two", "topic": "flights"}


def test_given_options_override_the_defaults() -> None:
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
        ({"topics": "a,b"}, "topics"),
        ({"topic": "", "topicsPattern": "a"}, "topicsPattern"),
        ({"startingOffsets": '{"t":"5"}'}, "startingOffsets"),
        ({"startingOffsets": '{"t":{"a":"5:1"}}'}, "startingOffsets"),
        ({"startingOffsets": '{"t":{"%s":"5:1"}}' % ("9" * 9_999)}, "startingOffsets"),
        ({"startingOffsets": '{"t":{"1234567890":"5:1"}}'}, "startingOffsets"),
        ({"startingOffsets": '{"t":' * 100_000}, "startingOffsets"),
        ({"startingOffsets": "latest", "startingTime": "5"}, "startingTime"),
        ({"endingOffsets": "earliest"}, "endingOffsets"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss"),
        ({"valueFormat": "xml"}, "valueFormat"),
        ({"valueFormat": "json"}, "valueSchema"),
        ({"valueSchema": "a int"}, "valueSchema"),
        ({"keyFormat": "avro"}, "keySchema"),
        ({"keySchema": "a int"}, "keySchema"),
        ({"keyFormat": "string", "keySchema": "a int"}, "keySchema"),
        ({"keyValueEncoding": "inline"}, "keyValueEncoding"),
        ({"keyFormat": "string", "keyValueEncoding": "both"}, "keyValueEncoding"),
        ({"mode": "lenient"}, "mode"),
        ({"mode": "dlq"}, "deadLetterTopic"),
        ({"deadLetterTopic": "letters"}, "deadLetterTopic"),
        ({"mode": "dlq", "deadLetterTopic": GIVEN["topic"]}, "deadLetterTopic"),
        ({"mode": "dlq", "deadLetterTopic": "a/b"}, "deadLetterTopic"),
        ({"keyFormat": "auto"}, "keyFormat"),
        ({"keyFormat": "string", "valueFormat": "auto"}, "valueFormat"),
        ({"maxPartitions": "9" * 30}, "maxPartitions"),
        ({"maxPartitions": "0" * 19 + "1" + "9" * 9_999}, "maxPartitions"),
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


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"endingOffsets": "latest"}, "endingoffsets"),
        ({"maxRowsPerTrigger": "0"}, "maxRowsPerTrigger"),
        ({"minRowsPerTrigger": "9", "maxRowsPerTrigger": "8"}, "minRowsPerTrigger"),
        ({"maxTriggerDelay": "5s"}, "maxTriggerDelay"),
        ({"minRowsPerTrigger": "9", "maxTriggerDelay": "5"}, "maxTriggerDelay"),
        ({"minRowsPerTrigger": "9", "maxTriggerDelay": "0s"}, "maxTriggerDelay"),
        ({"minRowsPerTrigger": "9", "maxTriggerDelay": "999999d"}, "maxTriggerDelay"),
        ({"waitingForNonExistedTopic": "perhaps"}, "waitingForNonExistedTopic"),
        ({"subscription": "a/b"}, "subscription"),
    ],
)
def test_a_wrong_option_of_a_stream_is_refused_by_name(given: dict[str, str], option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_options(GIVEN | given, streaming=True)
    assert caught.value.option == option


def test_a_batch_may_wait_for_rows() -> None:
    given = {"minRowsPerTrigger": "9", "maxRowsPerTrigger": "9"}
    options = parse_options(GIVEN | given, streaming=True)
    assert (options.rows_min, options.trigger_delay_s) == (9, 900.0)
    options = parse_options(GIVEN | given | {"maxTriggerDelay": "1500 ms"}, streaming=True)
    assert options.trigger_delay_s == 1.5


def test_a_start_may_be_given_for_each_topic_and_partition() -> None:
    text = '{"t/n/a": "latest", "b": {"0": "12:5:3", "1": "earliest"}, "c": "7:0"}'
    bounds = parse_options(GIVEN | {"startingOffsets": text}).start
    of = {
        name: bounds.of(TopicName.parse(name))
        for name in ("t/n/a", "b-partition-0", "b-partition-1", "b-partition-2", "c", "d")
    }
    assert of == {
        "t/n/a": Edge.LATEST,
        "b-partition-0": MessagePlace(12, 5, 3),
        "b-partition-1": Edge.EARLIEST,
        "b-partition-2": Edge.EARLIEST,
        "c": MessagePlace(7, 0),
        "d": Edge.EARLIEST,
    }


def test_a_pattern_is_of_one_namespace_and_matches_partitions_by_their_topic() -> None:
    given = {"service.url": "grpc://one", "topicsPattern": "t/n/flights-[0-9]+"}
    pattern = parse_options(given).pattern
    assert pattern is not None
    assert str(pattern.namespace) == "t/n"
    names = ("flights-1", "flights-12-partition-3", "flights-", "my-flights-1", "flights-1x")
    matching = [name for name in names if pattern.matches(TopicName.parse(f"t/n/{name}"))]
    assert matching == ["flights-1", "flights-12-partition-3"]


def test_the_schema_follows_the_format_and_the_mode() -> None:
    json = parse_options(
        GIVEN | {"valueFormat": "json", "valueSchema": "a int", "mode": "permissive"}
    )
    assert schema_of(json)["value"].dataType.simpleString() == "struct<a:int>"
    assert schema_of(json).names[-2:] == ["__corrupt", "__error"]
    text = parse_options(GIVEN | {"valueFormat": "string"})
    assert schema_of(text).names == SCHEMA.names
    pair = parse_options(GIVEN | {"keyFormat": "json", "keySchema": "a int"})
    assert schema_of(pair).names[:3] == ["value", "key", "__key"]
    assert schema_of(pair)["key"].dataType.simpleString() == "struct<a:int>"
    bad = parse_options(GIVEN | {"valueFormat": "json", "valueSchema": "a map"})
    with pytest.raises(InvalidOption, match="valueSchema"):
        schema_of(bad)
