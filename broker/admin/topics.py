"""Topics over HTTP."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Query, Response

from magnetar.broker.operations import properties, topics
from magnetar.broker.operations.arguments import namespace_name, topic_name
from magnetar.broker.operations.model import (
    PROPERTY_CHARACTERS_MAX,
    InternalStats,
    Properties,
    Refusal,
    TerminatedAt,
    TopicStats,
)
from magnetar.broker.operations.statistics import encoded

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker

REFUSALS: dict[int | str, dict[str, Any]] = {
    307: {"description": "Another broker serves the topic: ask it."},
    400: {"model": Refusal, "description": "A number, name or body is not what was expected."},
    404: {"model": Refusal, "description": "There is no such topic, subscription or message."},
    412: {"model": Refusal, "description": "The name is invalid, or the state does not allow it."},
    503: {"model": Refusal, "description": "The request cannot be carried out now: try again."},
}


GivenProperties = Annotated[Properties, Body(description="the properties; null: none")]
_Key = Annotated[
    str, Query(max_length=PROPERTY_CHARACTERS_MAX, description="the name of the property")
]
PROPERTIES_FULL: dict[str, Any] = {
    "model": Refusal,
    "description": "The properties of the topic would be too large.",
}


def topics_router(broker: "Broker") -> APIRouter:
    """Make the routes below `/admin/v2/persistent/{tenant}/{namespace}`."""
    router = APIRouter(prefix="/admin/v2/persistent", tags=["topics"], responses=REFUSALS)

    @router.get("/{tenant}/{namespace}")
    async def list_topics(
        tenant: str,
        namespace: str,
        include_system_topic: Annotated[
            bool, Query(alias="includeSystemTopic", description="also list system topics")
        ] = False,
    ) -> list[str]:
        """List the topics of a namespace, partitions included."""
        name = namespace_name(tenant, namespace)
        return await topics.list_topics(broker, name, include_system=include_system_topic)

    @router.put(
        "/{tenant}/{namespace}/{topic}",
        status_code=204,
        responses={409: _EXISTS, 507: PROPERTIES_FULL},
    )
    async def create_topic(
        tenant: str, namespace: str, topic: str, given: GivenProperties = None
    ) -> None:
        """Create a topic, with properties if the request has a body."""
        name = topic_name(tenant, namespace, topic)
        await properties.create_topic_with(broker, name, given or {})

    @router.get("/{tenant}/{namespace}/{topic}/properties")
    async def get_properties(tenant: str, namespace: str, topic: str) -> dict[str, str]:
        """Show the properties of a topic."""
        return await properties.topic_properties(broker, topic_name(tenant, namespace, topic))

    @router.put(
        "/{tenant}/{namespace}/{topic}/properties",
        status_code=204,
        responses={507: PROPERTIES_FULL},
    )
    async def set_properties(
        tenant: str, namespace: str, topic: str, given: GivenProperties = None
    ) -> None:
        """Add properties to a topic. The other properties stay."""
        name = topic_name(tenant, namespace, topic)
        await properties.set_topic_properties(broker, name, given or {})

    @router.delete("/{tenant}/{namespace}/{topic}/properties", status_code=204)
    async def remove_property(tenant: str, namespace: str, topic: str, key: _Key) -> None:
        """Remove a property of a topic, if the topic has it."""
        name = topic_name(tenant, namespace, topic)
        await properties.remove_topic_property(broker, name, key)

    @router.delete("/{tenant}/{namespace}/{topic}", status_code=204)
    async def delete_topic(tenant: str, namespace: str, topic: str, force: bool = False) -> None:
        """Delete a topic with its messages and subscriptions. The topic must have no producers and
        no consumers, unless `force`."""
        await topics.delete_topic(broker, topic_name(tenant, namespace, topic), force=force)

    @router.get("/{tenant}/{namespace}/{topic}/stats", response_model=TopicStats)
    async def stats(tenant: str, namespace: str, topic: str) -> Response:
        """Show statistics of a topic: rates, backlogs, producers, subscriptions and consumers."""
        return await shown(await topics.topic_stats(broker, topic_name(tenant, namespace, topic)))

    @router.get("/{tenant}/{namespace}/{topic}/internalStats", response_model=InternalStats)
    async def internal_stats(tenant: str, namespace: str, topic: str) -> Response:
        """Show how a topic is stored: its ledgers and cursors."""
        name = topic_name(tenant, namespace, topic)
        return await shown(await topics.internal_stats(broker, name))

    @router.post("/{tenant}/{namespace}/{topic}/terminate")
    async def terminate(
        tenant: str, namespace: str, topic: str
    ) -> TerminatedAt | dict[int, TerminatedAt]:
        """Terminate a topic: it accepts no more messages, permanently. The answer is the last
        message. For a partitioned topic, it is the last message of each partition, keyed by
        number."""
        return await topics.terminate(broker, topic_name(tenant, namespace, topic))

    @router.delete("/{tenant}/{namespace}/{topic}/truncate", status_code=204)
    async def truncate(tenant: str, namespace: str, topic: str) -> None:
        """Drop all messages published before this call, even those that retention would keep."""
        await topics.truncate(broker, topic_name(tenant, namespace, topic))

    return router


async def shown(stats: TopicStats | InternalStats) -> Response:
    """Make the answer with statistics, which may have several megabytes."""
    return Response(await asyncio.to_thread(encoded, stats), media_type="application/json")


_EXISTS = {"model": Refusal, "description": "The topic exists already."}
