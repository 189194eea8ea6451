"""The cluster, its brokers, lookups and unloading over HTTP.

A namespace's bundles are spread over the brokers. A broker that gets a request to unload a
namespace hands over its own bundles. For the other bundles it sends requests to the owners, one
after the other.
"""

from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Path
from fastapi.responses import PlainTextResponse

from magnetar.broker.admin.forwarding import forward
from magnetar.broker.admin.topics import REFUSALS
from magnetar.broker.operations import cluster
from magnetar.broker.operations.arguments import namespace_name, topic_name
from magnetar.broker.operations.cluster import BrokerInfo, ClusterData, LookupData
from magnetar.protos.names import Domain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.broker.broker import Broker

_NAMESPACE: Final = "/admin/v2/namespaces/{tenant}/{namespace}"
BundleRange = Annotated[
    str, Path(description="range of the bundle, for example 0x00000000_0x40000000")
]


def unload_router(broker: "Broker") -> APIRouter:
    """Make the routes that unload topics, bundles and namespaces."""
    router = APIRouter(responses=REFUSALS)

    @router.put(
        "/admin/v2/persistent/{tenant}/{namespace}/{topic}/unload",
        status_code=HTTPStatus.NO_CONTENT,
        tags=["topics"],
    )
    async def unload_topic(tenant: str, namespace: str, topic: str) -> None:
        """Close a topic. Its clients reconnect and open it again."""
        await cluster.unload_topic(broker, topic_name(tenant, namespace, topic))

    @router.put(f"{_NAMESPACE}/unload", status_code=HTTPStatus.NO_CONTENT, tags=["namespaces"])
    async def unload_namespace(tenant: str, namespace: str) -> None:
        """Hand all bundles of a namespace over to other brokers."""
        name = namespace_name(tenant, namespace)
        for part, owner in await cluster.unload_namespace(broker, name):
            path = f"/admin/v2/namespaces/{quote(tenant)}/{quote(namespace)}/{part}/unload"
            await forward(owner, "PUT", path)

    @router.put(
        f"{_NAMESPACE}/{{bundle}}/unload",
        status_code=HTTPStatus.NO_CONTENT,
        tags=["namespaces"],
    )
    async def unload_bundle(tenant: str, namespace: str, bundle: BundleRange) -> None:
        """Hand a bundle over to another broker, if another broker is running."""
        await cluster.unload_bundle(broker, namespace_name(tenant, namespace), bundle)

    return router


def lookup_router(broker: "Broker") -> APIRouter:
    """Make the routes below `/lookup/v2/topic`."""
    router = APIRouter(prefix="/lookup/v2/topic", tags=["lookup"], responses=REFUSALS)

    @router.get("/{domain}/{tenant}/{namespace}/{topic}")
    async def look_up(domain: Domain, tenant: str, namespace: str, topic: str) -> LookupData:
        """Show which broker serves a topic."""
        return await cluster.look_up(broker, topic_name(tenant, namespace, topic, domain))

    @router.get("/{domain}/{tenant}/{namespace}/{topic}/bundle")
    async def bundle_of(domain: Domain, tenant: str, namespace: str, topic: str) -> str:
        """Show the bundle of a topic."""
        return await cluster.bundle_of(broker, topic_name(tenant, namespace, topic, domain))

    return router


def cluster_router(broker: "Broker", settings: "Mapping[str, str]") -> APIRouter:
    """Make the routes below `/admin/v2/clusters` and `/admin/v2/brokers`. `settings`: the broker's
    settings, by Pulsar's names."""
    router = APIRouter(prefix="/admin/v2", tags=["cluster"], responses=REFUSALS)

    @router.get("/clusters")
    async def list_clusters() -> list[str]:
        """List the clusters: there is one."""
        return [broker.cluster]

    @router.get("/clusters/{name}")
    async def get_cluster(name: str) -> ClusterData:
        """Show the addresses of a cluster."""
        return cluster.cluster_data(broker, name)

    @router.get("/brokers")
    async def list_brokers() -> list[str]:
        """List the live brokers."""
        return await cluster.list_brokers(broker)

    @router.get("/brokers/configuration")
    async def list_settings() -> list[str]:
        """List the names of the settings of a broker."""
        return sorted(settings)

    @router.get("/brokers/configuration/runtime")
    async def get_settings() -> dict[str, str]:
        """Show the settings of this broker."""
        return dict(settings)

    @router.get("/brokers/leaderBroker")
    async def get_leader() -> BrokerInfo:
        """Show the broker that finishes incomplete deletions of topics for the cluster."""
        return await cluster.leader(broker)

    @router.get("/brokers/ready", response_class=PlainTextResponse)
    async def check_ready() -> str:
        """Check that this broker is registered, so that clients can find it."""
        await cluster.require_ready(broker)
        return "ok"

    @router.get("/brokers/version", response_class=PlainTextResponse)
    async def get_version() -> str:
        """Show the version of this broker."""
        return version("magnetar")

    @router.get("/brokers/{name}")
    async def list_brokers_of(name: str) -> list[str]:
        """List the live brokers of a cluster."""
        cluster.require_cluster(broker, name)
        return await cluster.list_brokers(broker)

    return router
