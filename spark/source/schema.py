"""The columns of topics in Spark. All are nullable.

The column `key` exists only with the option keyFormat. It holds the decoded key of a KeyValue
schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from magnetar.spark.avro import parse_avro_schema
from magnetar.spark.errors import InvalidOption, InvalidSchema
from magnetar.spark.source.ddl import parse_schema
from magnetar.spark.source.options import Mode, ReadOptions, ValueFormat

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

SCHEMA: Final = (
    StructType()
    .add("value", BinaryType())
    .add("__key", BinaryType())
    .add("__topic", StringType())
    .add("__partition", IntegerType())  # -1: the topic is not a partition
    .add("__messageId", BinaryType())  # in the form of Apache's clients
    .add("__index", LongType())  # place in the topic, from 0; each chunk of a message has one
    .add("__publishTime", TimestampType())
    .add("__eventTime", TimestampType())
    .add("__messageProperties", MapType(StringType(), StringType()))
)


CORRUPT: Final = "__corrupt"  # the payload of a bad record, mode permissive
ERROR: Final = "__error"  # the reason why the record is bad


def schema_of(options: ReadOptions, given: StructType | None = None) -> StructType:
    """The columns of a read. Raises InvalidOption if valueSchema is not a schema.

    With valueFormat auto, `given` has the type of `value`. If `given` is None, the topic's schema
    gives the type. Then the function may also raise TopicNotFound, ReadRefused and ReadStalled.
    """
    schema = StructType().add("value", _value_type(options, given))
    if options.key_format is not None:
        schema.add("key", _type_of(options.key_format, options.key_schema, "keySchema"))
    for field in SCHEMA.fields[1:]:
        schema.add(field)
    if options.mode is Mode.PERMISSIVE and options.decodes:
        schema.add(CORRUPT, BinaryType()).add(ERROR, StringType())
    return schema


def _value_type(options: ReadOptions, given: StructType | None) -> DataType:
    if options.value_format is ValueFormat.AUTO:
        if given is not None:
            return _given_type(given)
        # A local import: the module asks a broker.
        from magnetar.spark.source.topic_schemas import newest_type

        return newest_type(options)
    return _type_of(options.value_format, options.value_schema, "valueSchema")


def _given_type(given: StructType) -> DataType:
    """The type of `value` in a schema. Raises InvalidSchema."""
    if "value" in given.names:
        return given["value"].dataType
    for name in (CORRUPT, ERROR):
        if name in given.names:
            raise InvalidSchema(name, "needs the column value, too, with valueFormat auto")
    return BinaryType()  # the schema has no column `value`


def _type_of(found: ValueFormat, schema: str, option: str) -> DataType:
    try:
        match found:
            case ValueFormat.BYTES:
                return BinaryType()
            case ValueFormat.STRING:
                return StringType()
            case ValueFormat.JSON:
                return parse_schema(schema)
            case ValueFormat.AVRO:
                return parse_avro_schema(schema).spark
            case ValueFormat.PROTOBUF:
                from magnetar.spark.protobuf import parse_protobuf_schema

                return parse_protobuf_schema(schema).spark
    except ValueError as error:
        raise InvalidOption(option, str(error)) from None
    # A local import: the module loads numpy and pyarrow.
    from magnetar.spark.primitives import PRIMITIVES

    return PRIMITIVES[found.value].spark


def check_schema(schema: StructType, whole: StructType = SCHEMA) -> None:
    """Check a schema given by the user: it may leave out columns of `whole`. Raises
    InvalidSchema."""
    for field in schema:
        if field.name not in whole.names:
            raise InvalidSchema(
                field.name, f"is unknown; a topic has the columns {', '.join(whole.names)}"
            )
        expected = whole[field.name].dataType
        if field.dataType.simpleString() != expected.simpleString():
            raise InvalidSchema(
                field.name,
                f"has the type {expected.simpleString()}, not {field.dataType.simpleString()}",
            )
        if not field.nullable:
            raise InvalidSchema(field.name, "cannot be NOT NULL: every column is nullable")
