"""GET_SCHEMA and GET_OR_CREATE_SCHEMA, as a broker without a schema registry answers them.

Messages of bytes have no schema. Apache's Java client asks for the version of that schema too (its
dead-letter producer does before each message), and expects an empty version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.errors import NoSchema
from magnetar.broker.session import reply, request

if TYPE_CHECKING:
    from magnetar.broker.session.context import Context
    from magnetar.protos import pulsar_pb2 as pb


async def get_schema(_: Context, body: pb.CommandGetSchema) -> bytes:
    """No topic has a schema."""
    raise NoSchema(str(request.topic_name(body.topic)))


async def get_or_create_schema(context: Context, body: pb.CommandGetOrCreateSchema) -> bytes:
    name = request.topic_name(body.topic)
    request.require_no_schema("GET_OR_CREATE_SCHEMA", body.schema)
    await context.broker.topic(name, create=False)
    return reply.schema_version(body.request_id, b"")
