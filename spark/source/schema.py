"""The columns of a topic in Spark. All are nullable."""

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
    .add("__index", LongType())  # number of the message in its topic, from 0, without gaps
    .add("__publishTime", TimestampType())
    .add("__eventTime", TimestampType())
    .add("__messageProperties", MapType(StringType(), StringType()))
)


def check_schema(schema: StructType) -> None:
    """Check a schema given by the user: it may leave out columns. Raises InvalidSchema."""
    for field in schema:
        if field.name not in SCHEMA.names:
            raise InvalidSchema(
                field.name, f"is unknown; a topic has the columns {', '.join(SCHEMA.names)}"
            )
        expected = SCHEMA[field.name].dataType
        if field.dataType.simpleString() != expected.simpleString():
            raise InvalidSchema(
                field.name,
                f"has the type {expected.simpleString()}, not {field.dataType.simpleString()}",
            )
        if not field.nullable:
            raise InvalidSchema(field.name, "cannot be NOT NULL: every column is nullable")
