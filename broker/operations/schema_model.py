"""The JSON of schemas, with the names of Pulsar's admin API."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from magnetar.broker.schemas.schema import PROPERTIES_MAX, SCHEMA_BYTES_MAX
from magnetar.metadata.policies import SchemaCompatibility


class SchemaBody(BaseModel):
    """A schema that an administrator presents."""

    model_config = ConfigDict(populate_by_name=True, frozen=True)

    type: str = Field(description="for example AVRO, JSON, PROTOBUF_NATIVE, STRING", max_length=40)
    definition: str = Field(
        default="",
        alias="schema",
        description="the definition, in the type's language",
        max_length=SCHEMA_BYTES_MAX,
    )
    properties: dict[str, str] = {}

    @field_validator("properties", mode="before")
    @classmethod
    def _few(cls, found: object) -> object:
        """Check the number of properties first: checking each of 27,000 wrong properties would take
        0.2 s. Null stands for no properties."""
        if found is None:
            return {}
        if isinstance(found, dict) and len(found) > PROPERTIES_MAX:
            raise ValueError(f"there are {len(found)}; the limit is {PROPERTIES_MAX}")
        return found


class StoredSchema(BaseModel):
    """One version of a schema."""

    version: int
    type: str
    timestamp: int = Field(description="milliseconds since 1970-01-01")
    data: str = Field(description="the definition, in the type's language")
    properties: dict[str, str]


class StoredSchemas(BaseModel):
    """The versions of a schema, oldest first."""

    getSchemaResponses: list[StoredSchema]


class Version(BaseModel):
    """The number of a version."""

    version: int


class Compatibility(BaseModel):
    """The result of a compatibility check, and the strategy that decided it."""

    isCompatibility: bool
    schemaCompatibilityStrategy: SchemaCompatibility
