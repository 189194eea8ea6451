"""Makes the records of namespaces that no administrator created.

Magnetar creates the built-in namespaces at their first use. Earlier versions created every tenant
and namespace at its first use, or kept no record of it. So a namespace can have topics but no
record.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.metadata import codec, paths
from magnetar.metadata.policies import NamespaceRecord, TenantRecord
from magnetar.metadata.store import KEEP, update
from magnetar.protos.names import DEFAULT_NAMESPACE, Domain, NamespaceName

if TYPE_CHECKING:
    from magnetar.metadata.model import NamespaceBundles
    from magnetar.metadata.store import MetadataStore

BUILT_IN: Final = frozenset({DEFAULT_NAMESPACE, NamespaceName("pulsar", "system")})

RECORD_TIMEOUT_S: Final = 10.0


async def has_topics(store: MetadataStore, namespace: NamespaceName) -> bool:
    folder = paths.topics(namespace.tenant, namespace.namespace, Domain.PERSISTENT)
    return bool(await store.children(folder))


async def record_namespaces(store: MetadataStore, bundles: NamespaceBundles) -> None:
    """Record the namespaces that have topics and no record, and their tenants. Raises
    MetadataError."""
    for tenant in await store.children(paths.TOPICS):
        recorded = set(await store.children(f"{paths.NAMESPACES}/{tenant}"))
        for child in await store.children(f"{paths.TOPICS}/{tenant}"):
            name = NamespaceName(paths.unquoted(tenant), paths.unquoted(child))
            if child in recorded or not await has_topics(store, name):
                continue
            record = codec.encode_namespace(NamespaceRecord(bundles))
            await _create(store, paths.namespace(name.tenant, name.namespace), record)
            await _create(store, paths.tenant(name.tenant), codec.encode_tenant(TenantRecord()))


async def _create(store: MetadataStore, path: str, new: bytes) -> None:
    deadline = asyncio.get_running_loop().time() + RECORD_TIMEOUT_S
    await update(store, path, lambda value: new if value is None else KEEP, deadline=deadline)
