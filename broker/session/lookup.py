"""Which broker serves a topic, how many partitions it has, and which topics a namespace has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import NotAllowed
from magnetar.broker.session import reply, request
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import NamespaceName

if TYPE_CHECKING:
    from magnetar.broker.session.context import Context

LISTENER_SHOWN: Final = 200
"""Characters of an unknown listener's name in the answer."""


async def partitions(_: Context, body: pb.CommandPartitionedTopicMetadata) -> bytes:
    """No topic has partitions yet."""
    request.topic_name(body.topic)
    return reply.partitions(body.request_id, 0)


async def lookup(context: Context, body: pb.CommandLookupTopic) -> bytes:
    name = request.topic_name(body.topic)
    if body.advertised_listener_name:
        # Pulsar answers ServiceNotReady. Apache's C++ client then closes its connection, with all
        # that is open on it, and asks again until its operation times out; but a listener that is
        # not configured does not appear.
        listener = body.advertised_listener_name[:LISTENER_SHOWN]
        text = f"the broker do not have {listener} listener"  # clients look for these words
        raise NotAllowed("lookup", text)
    located = await context.broker.locate(name, authoritative=body.authoritative)
    return reply.lookup(
        body.request_id,
        context.url(located.broker),
        connect=located.serves,
        authoritative=not located.serves,
    )


async def topics_of_namespace(context: Context, body: pb.CommandGetTopicsOfNamespace) -> bytes:
    """Unfiltered: clients apply their pattern themselves."""
    namespace = NamespaceName.parse(body.namespace)
    persistent = body.mode != pb.CommandGetTopicsOfNamespace.NON_PERSISTENT
    names = await context.broker.topics_of(namespace) if persistent else []
    return reply.topics_of_namespace(body.request_id, names)
