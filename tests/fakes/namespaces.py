"""Tenants and namespaces as an administrator creates them, or as an earlier version left them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.metadata import codec, paths
from magnetar.metadata.model import TopicRecord
from magnetar.metadata.policies import NamespaceRecord, TenantRecord
from magnetar.metadata.store import ABSENT
from magnetar.protos.names import Domain

if TYPE_CHECKING:
    from magnetar.metadata.store import MetadataStore

SPREAD: Final = tuple(f"public/n{number}" for number in range(16))
"""Enough namespaces that each of two brokers is preferred for the topics of some of them."""


async def create_namespaces(store: MetadataStore, *names: str) -> None:
    """Record namespaces and their tenants; each is given as tenant/namespace."""
    for name in names:
        tenant, namespace = name.split("/")
        path = paths.tenant(tenant)
        if await store.get(path) is None:
            await store.put(path, codec.encode_tenant(TenantRecord()), expected=ABSENT)
        record = codec.encode_namespace(NamespaceRecord())
        await store.put(paths.namespace(tenant, namespace), record, expected=ABSENT)


async def leave_topic(store: MetadataStore, tenant: str, namespace: str) -> None:
    """A topic of an earlier version, whose namespace has no record."""
    path = paths.topic(tenant, namespace, Domain.PERSISTENT, "left")
    await store.put(path, codec.encode_topic(TopicRecord(1)), expected=ABSENT)
