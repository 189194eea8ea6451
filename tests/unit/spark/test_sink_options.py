from __future__ import annotations

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from magnetar.client.enums import CompressionType
from magnetar.spark.errors import InvalidOption, InvalidSchema
from magnetar.spark.sink.columns import check_columns
from magnetar.spark.sink.options import Batching, Guarantee, ValueFormat, parse_options

GIVEN = {"service.url": "grpc://one:1,two", "topic": "flights"}


def test_given_options_override_the_defaults() -> None:
    given = {"deliveryguarantee": "DEDUP", "batching": "key", "compression": "zstd", "jobid": "a-1"}
    options = parse_options(GIVEN | given)
    assert options.brokers == ("grpc://one:1", "grpc://two:6660")
    assert str(options.topic) == "persistent://public/default/flights"
    assert options.guarantee is Guarantee.DEDUP
    assert options.batching is Batching.KEY
    assert options.compression is CompressionType.ZSTD
    assert options.value_format is ValueFormat.AUTO
    assert options.pending_bytes == 32 << 20
    assert options.send_timeout_s == 60.0
    assert options.job_id == "a-1"


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"topik": "t"}, "topik"),
        ({"path": "/tmp"}, "path"),
        ({"service.url": ""}, "service.url"),
        ({"service.url": "pulsar://one:6650"}, "service.url"),
        ({"topic": "non-persistent://t/n/x"}, "topic"),
        ({"deliveryGuarantee": "exactly-twice"}, "deliveryGuarantee"),
        ({"valueFormat": "xml"}, "valueFormat"),
        ({"batching": "none"}, "batching"),
        ({"compression": "rar"}, "compression"),
        ({"pendingBytes": "1000"}, "pendingBytes"),
        ({"pendingBytes": "9" * 30}, "pendingBytes"),
        ({"sendTimeoutMs": "-1"}, "sendTimeoutMs"),
        ({"jobId": "x"}, "jobId"),  # without dedup
        ({"jobId": "a/b", "deliveryGuarantee": "dedup"}, "jobId"),
    ],
)
def test_a_wrong_option_is_named(change: dict[str, str], option: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        parse_options(GIVEN | change)
    assert raised.value.option == option


def test_a_streaming_query_brings_options_of_spark_and_no_job_id() -> None:
    parse_options(GIVEN | {"checkpointLocation": "/tmp", "queryName": "q"}, streaming=True)
    with pytest.raises(InvalidOption, match="jobId"):
        parse_options(GIVEN | {"jobId": "x", "deliveryGuarantee": "dedup"}, streaming=True)


TEXT, BINARY, INT = StringType(), BinaryType(), IntegerType()


def columns(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


def struct(kind: DataType) -> StructType:
    return columns(a=kind)


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        (columns(value=BINARY), {}),
        (columns(value=TEXT, __key=TEXT, __index=LongType(), __messageId=BINARY), {}),
        (columns(value=struct(ArrayType(TEXT))), {"valueFormat": "json"}),
        (columns(a=INT, b=MapType(TEXT, DoubleType()), __key=BINARY), {}),
        (columns(value=TEXT, __topic=TEXT), {"topic": ""}),
    ],
)
def test_valid_columns_are_accepted(schema: StructType, given: dict[str, str]) -> None:
    check_columns(schema, parse_options(GIVEN | given))


@pytest.mark.parametrize(
    ("schema", "given", "named"),
    [
        (columns(value=BINARY, __key=INT), {}, "__key"),
        (columns(value=BINARY, __properties=MapType(TEXT, TEXT)), {}, "__properties"),
        (columns(value=BINARY, other=INT), {}, "other"),
        (columns(__key=TEXT), {}, "value"),
        (columns(value=INT), {}, "value"),
        (columns(value=struct(BINARY)), {}, "value.a"),
        (columns(value=struct(DecimalType(10, 2))), {}, "value.a"),
        (columns(value=MapType(INT, TEXT)), {}, "value"),
        (columns(a=BINARY), {}, "a"),
        (columns(value=BINARY), {"valueFormat": "json"}, "valueFormat"),
        (columns(a=INT), {"valueFormat": "bytes"}, "valueFormat"),
        (columns(value=struct(INT)), {"valueFormat": "bytes"}, "valueFormat"),
        (columns(value=BINARY), {"topic": ""}, "topic"),
    ],
)
def test_columns_that_cannot_be_written_are_named(
    schema: StructType, given: dict[str, str], named: str
) -> None:
    with pytest.raises((InvalidSchema, InvalidOption)) as raised:
        check_columns(schema, parse_options(GIVEN | given))
    error = raised.value
    assert named == (error.column if isinstance(error, InvalidSchema) else error.option)
