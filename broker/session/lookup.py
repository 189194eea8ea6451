"""Lookups: the broker of a topic, the number of its partitions, and the topics of a namespace."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from magnetar.broker.catalog.listing import compiled, hash_of, matching, texts_of, visible_of
from magnetar.broker.errors import NotAllowed, UnsupportedPattern
from magnetar.broker.session import reply, request
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import Domain, NamespaceName

if TYPE_CHECKING:
    from magnetar.broker.session.context import Context

LISTENER_SHOWN: Final = 200
"""The characters of an unknown listener's name that the answer shows."""


async def partitions(context: Context, body: pb.CommandPartitionedTopicMetadata) -> bytes:
    """Answer the number of partitions. This may create a topic with partitions, if the policies
    allow it and the request does not forbid it."""
    name = request.topic_name(body.topic)
    create = body.metadata_auto_creation_enabled
    count = await context.broker.partitions_of(name, create=create)
    return reply.partitions(body.request_id, count)


async def lookup(context: Context, body: pb.CommandLookupTopic) -> bytes:
    name = request.topic_name(body.topic)
    if body.advertised_listener_name:
        # Pulsar answers ServiceNotReady. Apache's C++ client then closes its connection with
        # everything on it, and asks again until its operation times out. Asking again is useless,
        # because a listener that is not configured does not appear.
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
    """List the topics that match the pattern, if the broker understands it; otherwise list all
    topics. Clients apply their pattern to an answer that is not filtered."""
    namespace = NamespaceName.parse(body.namespace)
    turns = context.broker.turns
    found = await visible_of(await context.broker.topics_of(namespace, _DOMAINS[body.mode]), turns)
    filtered = False
    if body.HasField("topics_pattern"):
        with suppress(UnsupportedPattern):
            found = await matching(await compiled(body.topics_pattern, turns), found, turns)
            filtered = True
    names = await texts_of(found, turns)
    digest = hash_of(names)
    changed = not body.HasField("topics_hash") or body.topics_hash != digest
    return reply.topics_of_namespace(
        body.request_id, names if changed else (), digest, filtered=filtered, changed=changed
    )


_Mode = pb.CommandGetTopicsOfNamespace.Mode
_DOMAINS: Final = {
    _Mode.PERSISTENT: (Domain.PERSISTENT,),
    _Mode.NON_PERSISTENT: (Domain.NON_PERSISTENT,),
    _Mode.ALL: (Domain.PERSISTENT, Domain.NON_PERSISTENT),
}
