"""Schemas over HTTP."""

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path

from magnetar.broker.operations import schemas
from magnetar.broker.operations.arguments import INT64_MAX, topic_name
from magnetar.broker.operations.model import Refusal
from magnetar.broker.operations.schema_model import (
    Compatibility,
    SchemaBody,
    StoredSchema,
    StoredSchemas,
    Version,
)

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker

REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Refusal, "description": "A number, flag or body is not what was expected."},
    404: {"model": Refusal, "description": "The topic has no schema, or not this version."},
    412: {"model": Refusal, "description": "The name is invalid."},
    503: {"model": Refusal, "description": "The request cannot be carried out now: try again."},
}
INVALID: dict[int | str, dict[str, Any]] = {
    422: {"model": Refusal, "description": "The definition is not valid for its type."},
}
REFUSED: dict[int | str, dict[str, Any]] = {
    409: {"model": Refusal, "description": "The compatibility strategy does not admit the schema."},
    507: {"model": Refusal, "description": "There is no space for another version."},
}


def schemas_router(broker: "Broker") -> APIRouter:
    """Make the routes below `/admin/v2/schemas/{tenant}/{namespace}/{topic}`."""
    router = APIRouter(
        prefix="/admin/v2/schemas/{tenant}/{namespace}/{topic}",
        tags=["schemas"],
        responses=REFUSALS,
    )

    @router.get("/schema")
    async def get_schema(tenant: str, namespace: str, topic: str) -> StoredSchema:
        """Show the newest version of a topic's schema."""
        return await schemas.get_schema(broker, topic_name(tenant, namespace, topic))

    @router.get("/schema/{version}")
    async def get_version(
        tenant: str,
        namespace: str,
        topic: str,
        version: Annotated[int, Path(ge=0, le=INT64_MAX)],
    ) -> StoredSchema:
        """Show one version of a topic's schema, even a version from before a deletion."""
        return await schemas.get_schema(broker, topic_name(tenant, namespace, topic), version)

    @router.get("/schemas")
    async def list_schemas(tenant: str, namespace: str, topic: str) -> StoredSchemas:
        """List all versions since the last deletion, oldest first."""
        return await schemas.list_schemas(broker, topic_name(tenant, namespace, topic))

    @router.post("/schema", responses=INVALID | REFUSED)
    async def upload_schema(tenant: str, namespace: str, topic: str, body: SchemaBody) -> Version:
        """Add a version. If an equal version exists, return its number."""
        return await schemas.upload_schema(broker, topic_name(tenant, namespace, topic), body)

    @router.delete("/schema")
    async def delete_schema(
        tenant: str, namespace: str, topic: str, force: bool = False
    ) -> Version:
        """Delete the schema. Its versions stay readable by number, unless `force`."""
        name = topic_name(tenant, namespace, topic)
        return await schemas.delete_schema(broker, name, force=force)

    @router.post("/compatibility", responses=INVALID)
    async def check_schema(
        tenant: str, namespace: str, topic: str, body: SchemaBody
    ) -> Compatibility:
        """Check whether the schema could become a version."""
        return await schemas.check_schema(broker, topic_name(tenant, namespace, topic), body)

    @router.post("/version", responses=INVALID)
    async def version_of_schema(
        tenant: str, namespace: str, topic: str, body: SchemaBody
    ) -> Version:
        """Show the number of the version that equals this schema."""
        return await schemas.version_of_schema(broker, topic_name(tenant, namespace, topic), body)

    return router
