"""Non-persistent topics over HTTP, and the health check that uses one."""

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse

from magnetar.broker.admin.cluster import BundleRange
from magnetar.broker.admin.forwarding import open_elsewhere
from magnetar.broker.admin.paths import SUBSCRIPTION, SubscriptionPart
from magnetar.broker.admin.topics import REFUSALS, shown
from magnetar.broker.log.position import LATEST
from magnetar.broker.operations import cluster, health, subscriptions, topics
from magnetar.broker.operations.arguments import namespace_name, subscription_name, topic_name
from magnetar.broker.operations.model import Refusal, TopicStats
from magnetar.protos.names import Domain

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker

_DOMAIN = Domain.NON_PERSISTENT
_EXISTS = {"model": Refusal, "description": "The topic or subscription exists already."}
_Force = Annotated[bool, Query(description="disconnect producers and consumers")]


def health_router(broker: "Broker") -> APIRouter:
    """Make the route `/admin/v2/brokers/health`."""
    router = APIRouter(prefix="/admin/v2/brokers", tags=["cluster"], responses=REFUSALS)

    @router.get("/health", response_class=PlainTextResponse)
    async def check() -> str:
        """Publish a message to the heartbeat topic of this broker, and read it."""
        await health.check_health(broker)
        return "ok"

    return router


def non_persistent_router(broker: "Broker") -> APIRouter:
    """Make the routes below `/admin/v2/non-persistent/{tenant}/{namespace}`."""
    router = APIRouter(
        prefix=f"/admin/v2/{_DOMAIN}", tags=["non-persistent topics"], responses=REFUSALS
    )
    one = "/{tenant}/{namespace}/{topic}"
    subscription_path = one + SUBSCRIPTION

    @router.get("/{tenant}/{namespace}")
    async def list_topics(
        tenant: str,
        namespace: str,
        include_system_topic: Annotated[bool, Query(alias="includeSystemTopic")] = False,
    ) -> list[str]:
        """List the open topics, and all partitions of partitioned topics."""
        name = namespace_name(tenant, namespace)
        found = await topics.list_topics(broker, name, _DOMAIN, include_system=include_system_topic)
        return sorted({*found, *await open_elsewhere(broker, name)})

    @router.get("/{tenant}/{namespace}/{bundle}")
    async def list_bundle(tenant: str, namespace: str, bundle: BundleRange) -> list[str]:
        """List the open topics of a bundle. The owner of the bundle answers."""
        name = namespace_name(tenant, namespace)
        return await cluster.open_non_persistent(broker, name, bundle)

    @router.put(one, status_code=204, responses={409: _EXISTS})
    async def create(tenant: str, namespace: str, topic: str) -> None:
        """Open a topic. The broker closes it a minute after its last use."""
        await topics.create_topic(broker, topic_name(tenant, namespace, topic, _DOMAIN))

    @router.delete(one, status_code=204)
    async def delete(tenant: str, namespace: str, topic: str, force: _Force = False) -> None:
        """Close a topic."""
        name = topic_name(tenant, namespace, topic, _DOMAIN)
        await topics.delete_non_persistent(broker, name, force=force)

    @router.put(one + "/unload", status_code=204)
    async def unload(tenant: str, namespace: str, topic: str) -> None:
        """Close a topic. Its clients reconnect and open it again."""
        await cluster.unload_topic(broker, topic_name(tenant, namespace, topic, _DOMAIN))

    @router.get(one + "/stats", response_model=TopicStats)
    async def stats(tenant: str, namespace: str, topic: str) -> Response:
        """Show statistics of a topic: rates, drops, producers, subscriptions and consumers."""
        name = topic_name(tenant, namespace, topic, _DOMAIN)
        return await shown(await topics.topic_stats(broker, name))

    @router.get(one + "/subscriptions")
    async def list_subscriptions(tenant: str, namespace: str, topic: str) -> list[str]:
        """List the subscriptions of a topic."""
        name = topic_name(tenant, namespace, topic, _DOMAIN)
        return await subscriptions.list_subscriptions(broker, name)

    @router.put(subscription_path, status_code=204, responses={409: _EXISTS})
    async def create_subscription(
        tenant: str, namespace: str, topic: str, subscription: SubscriptionPart
    ) -> None:
        """Create a subscription. It counts the messages that are dropped while it has no
        consumer."""
        name = topic_name(tenant, namespace, topic, _DOMAIN)
        of = subscription_name(subscription)
        await subscriptions.create_subscription(broker, name, of, LATEST)

    @router.delete(subscription_path, status_code=204)
    async def delete_subscription(
        tenant: str,
        namespace: str,
        topic: str,
        subscription: SubscriptionPart,
        force: _Force = False,
    ) -> None:
        """Delete a subscription."""
        name = topic_name(tenant, namespace, topic, _DOMAIN)
        of = subscription_name(subscription)
        await subscriptions.delete_subscription(broker, name, of, force=force)

    return router
