"""Schemas, under the name of Apache's module `pulsar.schema`."""

from magnetar.client.schema.avro import AvroSchema
from magnetar.client.schema.definition import (
    Array,
    Boolean,
    Bytes,
    CustomEnum,
    Double,
    Field,
    Float,
    Integer,
    Long,
    Map,
    Null,
    Record,
    String,
)
from magnetar.client.schema.generic import AutoConsumeSchema, GenericRecord
from magnetar.client.schema.key_value import KeyValue, KeyValueEncodingType, KeyValueSchema
from magnetar.client.schema.protobuf import ProtobufNativeSchema
from magnetar.client.schema.schema import (
    BytesSchema,
    JsonSchema,
    Schema,
    SchemaInfo,
    SchemaType,
    StringSchema,
)

__all__ = [
    "Schema",
    "SchemaInfo",
    "SchemaType",
    "BytesSchema",
    "StringSchema",
    "JsonSchema",
    "AvroSchema",
    "ProtobufNativeSchema",
    "KeyValueSchema",
    "KeyValue",
    "KeyValueEncodingType",
    "AutoConsumeSchema",
    "GenericRecord",
    "Record",
    "Field",
    "Null",
    "Boolean",
    "Integer",
    "Long",
    "Float",
    "Double",
    "Bytes",
    "String",
    "Array",
    "Map",
    "CustomEnum",
]
