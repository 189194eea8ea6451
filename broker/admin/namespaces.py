"""Tenants and namespaces over HTTP."""

from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Body, Query

from magnetar.broker.admin.forwarding import CALLS_MAX, forward, open_elsewhere
from magnetar.broker.admin.topics import REFUSALS
from magnetar.broker.calls import call_each
from magnetar.broker.errors import NamespaceNotFound, TopicNotFound
from magnetar.broker.operations import namespaces, partitions, topics
from magnetar.broker.operations.arguments import namespace_name, tenant_name
from magnetar.broker.operations.errors import ServedElsewhere
from magnetar.broker.operations.model import Refusal
from magnetar.broker.operations.namespace_model import (
    Bundles,
    NewNamespace,
    TenantInfo,
    TenantShown,
    shown_policies,
)
from magnetar.broker.operations.namespaces import TopicMode
from magnetar.metadata.policies import TenantRecord
from magnetar.protos.names import Domain, TopicName

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker
    from magnetar.broker.operations.partitions import Ask
    from magnetar.protos.names import NamespaceName

DELETIONS_MAX: Final = CALLS_MAX // 2
"""The number of topics of a namespace that are deleted at the same time. A deletion waits for some
writes of the metadata store and of bookies. Half of the concurrent calls to other brokers stay free
for other requests."""

_CONFLICT: Final[dict[int | str, dict[str, Any]]] = {
    409: {
        "model": Refusal,
        "description": "The tenant or namespace exists already, or is not empty.",
    }
}
_Force = Annotated[
    bool, Query(description="true: also delete the namespace's topics with all messages")
]
_New = Annotated[
    NewNamespace | None, Body(description="bundles and policies; no body: the defaults")
]


def tenants_router(broker: "Broker") -> APIRouter:
    """Make the routes below `/admin/v2/tenants`."""
    router = APIRouter(prefix="/admin/v2/tenants", tags=["tenants"], responses=REFUSALS)

    @router.get("")
    async def list_tenants() -> list[str]:
        """List the tenants."""
        return await namespaces.list_tenants(broker)

    @router.get("/{tenant}")
    async def get_tenant(tenant: str) -> TenantShown:
        """Show a tenant."""
        record = await namespaces.tenant_record(broker, tenant_name(tenant))
        return TenantShown.of(record, broker.cluster)

    @router.put("/{tenant}", status_code=HTTPStatus.NO_CONTENT, responses=_CONFLICT)
    async def create_tenant(tenant: str, info: TenantInfo | None = None) -> None:
        """Create a tenant."""
        record = (info or TenantInfo()).changed(TenantRecord())
        await namespaces.create_tenant(broker, tenant_name(tenant), record)

    @router.post("/{tenant}", status_code=HTTPStatus.NO_CONTENT)
    async def update_tenant(tenant: str, info: TenantInfo) -> None:
        """Change a tenant. Fields that the body does not set keep their values."""
        await namespaces.update_tenant(broker, tenant_name(tenant), info.changed)

    @router.delete("/{tenant}", status_code=HTTPStatus.NO_CONTENT, responses=_CONFLICT)
    async def delete_tenant(tenant: str) -> None:
        """Delete a tenant, which must have no namespaces."""
        await namespaces.delete_tenant(broker, tenant_name(tenant))

    return router


def namespaces_router(broker: "Broker", ask: "Ask") -> APIRouter:
    """Make the routes below `/admin/v2/namespaces`, without those of policies (`policies.py`)."""
    router = APIRouter(prefix="/admin/v2/namespaces", tags=["namespaces"], responses=REFUSALS)

    @router.get("/{tenant}")
    async def list_namespaces(tenant: str) -> list[str]:
        """List the namespaces of a tenant."""
        return await namespaces.list_namespaces(broker, tenant_name(tenant))

    @router.get("/{tenant}/{namespace}")
    async def get_policies(tenant: str, namespace: str) -> dict[str, Any]:
        """Show the bundles of a namespace and the policies that it sets."""
        record = await namespaces.namespace_record(broker, namespace_name(tenant, namespace))
        return shown_policies(record, broker.cluster)

    @router.put("/{tenant}/{namespace}", status_code=HTTPStatus.NO_CONTENT, responses=_CONFLICT)
    async def create_namespace(tenant: str, namespace: str, new: _New = None) -> None:
        """Create a namespace."""
        new = new or NewNamespace()
        name, policies = namespace_name(tenant, namespace), new.policies(broker.cluster)
        await namespaces.create_namespace(broker, name, new.bundle_count, policies)

    @router.delete("/{tenant}/{namespace}", status_code=HTTPStatus.NO_CONTENT, responses=_CONFLICT)
    async def delete_namespace(tenant: str, namespace: str, force: _Force = False) -> None:
        """Delete a namespace, which must have no topics; `force`: with its topics. After a failure,
        repeat the request to continue the deletion."""
        name = namespace_name(tenant, namespace)
        namespaces.require_deletable(name)
        if force:
            with suppress(NamespaceNotFound):  # `delete_namespace` raises it, too
                await _delete_topics(broker, name, ask)
        await namespaces.delete_namespace(broker, name)

    @router.get("/{tenant}/{namespace}/bundles")
    async def get_bundles(tenant: str, namespace: str) -> Bundles:
        """Show the bundles of a namespace: the hash ranges by which brokers own its topics."""
        name = namespace_name(tenant, namespace)
        return Bundles.of(await namespaces.namespace_record(broker, name))

    @router.get("/{tenant}/{namespace}/topics")
    async def list_topics(
        tenant: str, namespace: str, mode: Annotated[TopicMode, Query()] = TopicMode.PERSISTENT
    ) -> list[str]:
        """List the topics of a namespace."""
        name = namespace_name(tenant, namespace)
        found = await namespaces.list_topics(broker, name, mode)
        if mode is TopicMode.PERSISTENT:
            return found
        return sorted({*found, *await open_elsewhere(broker, name)})

    return router


async def _delete_topics(broker: "Broker", name: "NamespaceName", ask: "Ask") -> None:
    """Delete all topics of a namespace, the partitioned topics first: clients cannot create the
    partitions of a topic whose record says that it is being deleted."""
    for domain in Domain:
        for partitioned in await broker.catalog.partitioned.names(name, domain):
            with suppress(TopicNotFound):  # the topic was deleted meanwhile
                await partitions.delete_partitioned_topic(broker, partitioned, ask, force=True)
    found = await namespaces.list_topics(broker, name, TopicMode.ALL)
    found += await open_elsewhere(broker, name)
    await call_each(found, partial(_delete_topic, broker), at_once=DELETIONS_MAX)


async def _delete_topic(broker: "Broker", text: str) -> None:
    """Delete a topic here, or at the broker that serves it."""
    name = TopicName.parse(text)
    delete = topics.delete_topic
    if name.domain is Domain.NON_PERSISTENT:
        delete = topics.delete_non_persistent
    try:
        await delete(broker, name, force=True)
    except TopicNotFound:  # the topic was deleted meanwhile
        pass
    except ServedElsewhere as error:
        parts = (name.domain, name.tenant, name.namespace, name.topic)
        path = "/".join(quote(part, safe="") for part in parts)
        await forward(error.owner, "DELETE", f"/admin/v2/{path}?force=true")
