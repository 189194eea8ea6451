"""Topics over HTTP."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Response

from magnetar.broker.operations import topics
from magnetar.broker.operations.arguments import namespace_name, topic_name
from magnetar.broker.operations.model import InternalStats, Refusal, TerminatedAt, TopicStats
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

    @router.put("/{tenant}/{namespace}/{topic}", status_code=204, responses={409: _EXISTS})
    async def create_topic(tenant: str, namespace: str, topic: str) -> None:
        """Create a topic."""
        await topics.create_topic(broker, topic_name(tenant, namespace, topic))

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
