"""The columns of a topic as Spark sees them, all nullable."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from magnetar.spark.errors import InvalidSchema

SCHEMA: Final = (
    StructType()
    .add("value", BinaryType())
    .add("__key", BinaryType())
    .add("__topic", StringType())
    .add("__partition", IntegerType())  # -1: the topic is not a partition
    .add("__messageId", BinaryType())  # as Apache's clients serialize it
    .add("__index", LongType())  # place in the topic, from 0, without gaps
    .add("__publishTime", TimestampType())
    .add("__eventTime", TimestampType())
    .add("__messageProperties", MapType(StringType(), StringType()))
)


def check_schema(schema: StructType) -> None:
    """A schema that a user gave: any of our columns, as they are. Raises InvalidSchema."""
    for field in schema:
        if field.name not in SCHEMA.names:
            raise InvalidSchema(field.name, f"a topic has the columns {', '.join(SCHEMA.names)}")
        expected = SCHEMA[field.name].dataType
        if field.dataType.simpleString() != expected.simpleString():
            raise InvalidSchema(
                field.name, f"is {expected.simpleString()}, not {field.dataType.simpleString()}"
            )
        if not field.nullable:
            raise InvalidSchema(field.name, "cannot be NOT NULL: no column of a topic is")
