"""Administration of tenants and namespaces: list, create, read, change and delete.

Any broker carries these operations out by compare-and-set. When a namespace is created while its
tenant is deleted, the namespace must not be left without a tenant. So the creator writes the
namespace first and then the tenant's record, unchanged, by compare-and-set. The deleter lists the
namespaces after it has read the tenant's record, and deletes the record at the version that it
read. One of the two fails: either the creator finds no tenant and deletes its namespace again, or
the deleter finds the namespace, possibly only after it has begun again.

NOTE: the creator may die before it deletes its namespace again, or the metadata store may not
answer that deletion. Then the namespace stays without a tenant until a client deletes it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.broker.catalog.listing import texts_of, visible_of
from magnetar.broker.errors import NamespaceNotFound, TenantNotFound
from magnetar.broker.log.topic_deletion import same_or_keep
from magnetar.broker.operations.errors import (
    NamespaceExists,
    NamespaceNotEmpty,
    Protected,
    TenantExists,
    TenantNotEmpty,
)
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import (
    BadVersion,
    Contended,
    NodeExists,
    NoNode,
    NotEmpty,
    OutcomeUnknown,
    Unavailable,
)
from magnetar.metadata.model import NamespaceBundles
from magnetar.metadata.policies import NamespaceRecord, Policies, TenantRecord
from magnetar.metadata.store import ABSENT, KEEP, UPDATE_PAUSE_S, update
from magnetar.protos.names import DEFAULT_NAMESPACE, Domain, NamespaceName

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.broker.broker import Broker
    from magnetar.metadata.store import MetadataStore, Verdict, Versioned

T = TypeVar("T")

WRITE_TIMEOUT_S: Final = 10.0
"""Time limit of a change by compare-and-set, with its retries."""

RACES_MAX: Final = 20
"""The number of lost races after which an operation over several records gives up."""

BUNDLES_MAX: Final = 128
"""The maximum number of bundles of a namespace, and of `default_number_of_namespace_bundles`."""


# ---- tenants -------------------------------------------------------------------------------------


async def list_tenants(broker: Broker) -> list[str]:
    """Return the names, sorted."""
    await broker.metadata.sync(paths.TENANTS)
    found = {paths.unquoted(child) for child in await broker.metadata.children(paths.TENANTS)}
    return sorted(found | {DEFAULT_NAMESPACE.tenant})


async def tenant_record(broker: Broker, tenant: str) -> TenantRecord:
    """Return the tenant's record. Raises TenantNotFound."""
    stored = await read(broker, paths.tenant(tenant))
    if stored is not None:
        return codec.decode_tenant(stored)
    if tenant == DEFAULT_NAMESPACE.tenant:  # always exists: its first use creates the record
        return TenantRecord()
    raise TenantNotFound(tenant)


async def create_tenant(broker: Broker, tenant: str, record: TenantRecord) -> None:
    """Create a tenant. Raises TenantExists."""
    try:
        await broker.metadata.put(
            paths.tenant(tenant), codec.encode_tenant(record), expected=ABSENT
        )
    except NodeExists:
        raise TenantExists(tenant) from None


async def update_tenant(
    broker: Broker, tenant: str, change: Callable[[TenantRecord], TenantRecord]
) -> None:
    """Change a tenant's record. `change` is called again after each lost race. Raises
    TenantNotFound."""

    def written(stored: bytes | None) -> bytes | Verdict:
        if stored is None and tenant != DEFAULT_NAMESPACE.tenant:
            raise TenantNotFound(tenant)
        record = TenantRecord() if stored is None else codec.decode_tenant(stored)
        changed = change(record)
        return KEEP if changed == record else codec.encode_tenant(changed)

    await _update(broker, paths.tenant(tenant), written)


async def delete_tenant(broker: Broker, tenant: str) -> None:
    """Delete a tenant without namespaces. Raises TenantNotFound, TenantNotEmpty, Protected."""
    if tenant == DEFAULT_NAMESPACE.tenant:
        raise Protected(f"tenant {tenant}")
    store, path = broker.metadata, paths.tenant(tenant)
    deadline = asyncio.get_running_loop().time() + WRITE_TIMEOUT_S
    for _ in range(RACES_MAX):
        await _sync(store, path, deadline)
        found = await store.get(path)
        if found is None:
            raise TenantNotFound(tenant)
        if namespaces := await _namespaces_of(broker, tenant):
            raise TenantNotEmpty(tenant, namespaces)
        try:
            await store.delete(path, expected=found.version)
        except BadVersion:
            continue
        except NoNode:
            raise TenantNotFound(tenant) from None
        except OutcomeUnknown:
            with suppress(Unavailable):
                await _sync(store, path, deadline)
                if await store.get(path) is None:
                    return
            # Do not try again: a record found now may be that of a tenant that another client has
            # created again, and may have the same version.
            raise
        return
    raise Contended(path, RACES_MAX)


# ---- namespaces ----------------------------------------------------------------------------------


async def list_namespaces(broker: Broker, tenant: str) -> list[str]:
    """Return the namespaces of a tenant as tenant/namespace, sorted. Raises TenantNotFound."""
    await tenant_record(broker, tenant)
    return [str(NamespaceName(tenant, name)) for name in await _namespaces_of(broker, tenant)]


async def namespace_record(broker: Broker, name: NamespaceName) -> NamespaceRecord:
    """Return the namespace's record. Raises NamespaceNotFound."""
    path = paths.namespace(name.tenant, name.namespace)
    stored = await read(broker, path)
    if stored is None and name == DEFAULT_NAMESPACE:
        await broker.policies.ready(name)  # always exists: its first use creates the record
        stored = await read(broker, path)
    if stored is None:
        raise NamespaceNotFound(str(name))
    return codec.decode_namespace(stored)


class TopicMode(StrEnum):
    """The topics of a namespace to list."""

    PERSISTENT = "PERSISTENT"
    NON_PERSISTENT = "NON_PERSISTENT"
    ALL = "ALL"


_DOMAINS: Final = {
    TopicMode.PERSISTENT: (Domain.PERSISTENT,),
    TopicMode.NON_PERSISTENT: (Domain.NON_PERSISTENT,),
    TopicMode.ALL: tuple(Domain),
}


async def list_topics(broker: Broker, name: NamespaceName, mode: TopicMode) -> list[str]:
    """Return the full names of the topics, sorted, without system topics. Raises NamespaceNotFound.

    A non-persistent topic without partitions is listed only if it is open at this broker.
    """
    await namespace_record(broker, name)
    found = await visible_of(await broker.topics_of(name, _DOMAINS[mode]), broker.turns)
    return sorted(await texts_of(found, broker.turns))


async def create_namespace(
    broker: Broker, name: NamespaceName, bundles: int | None, policies: Policies
) -> None:
    """Create a namespace. `bundles` None: the number in the broker's settings. Raises
    TenantNotFound, NamespaceExists."""
    path = paths.namespace(name.tenant, name.namespace)
    # `_restore` must not take the record for one that a broker made for an existing topic.
    policies = replace(policies, version=max(policies.version, 1))
    record = NamespaceRecord(
        NamespaceBundles.divided(bundles or broker.namespace_bundles), policies
    )
    await tenant_record(broker, name.tenant)
    value = codec.encode_namespace(record)
    tried = False

    def add(stored: bytes | None) -> bytes | Verdict:
        nonlocal tried
        if tried and stored == value:  # our write; its reply was lost
            return KEEP
        if stored is not None:
            raise NamespaceExists(str(name))
        tried = True
        return value

    written = await _update(broker, path, add)
    try:
        await _touch_tenant(broker, name.tenant)
    except TenantNotFound:  # the tenant was deleted meanwhile
        assert written is not None  # `add` deletes nothing
        # Try once: later, another client may have created the tenant and the namespace again, and
        # its record may have the same version.
        try:
            with suppress(BadVersion, NoNode):
                await broker.metadata.delete(path, expected=written.version)
        except Unavailable as error:
            raise OutcomeUnknown(path, str(error)) from error
        raise
    except Unavailable as error:  # the namespace's record is written already
        raise OutcomeUnknown(path, str(error)) from error


async def change_namespace(
    broker: Broker,
    name: NamespaceName,
    change: Callable[[NamespaceRecord], NamespaceRecord],
) -> None:
    """Change a namespace's record. `change` is called again after each lost race. Raises
    NamespaceNotFound."""
    if name == DEFAULT_NAMESPACE:
        await namespace_record(broker, name)

    def written(stored: bytes | None) -> bytes | Verdict:
        if stored is None:
            raise NamespaceNotFound(str(name))
        record = codec.decode_namespace(stored)
        changed = change(record)
        return KEEP if changed == record else codec.encode_namespace(changed)

    await _update(broker, paths.namespace(name.tenant, name.namespace), written)


def require_deletable(name: NamespaceName) -> None:
    """Raise Protected for the default namespace."""
    if name == DEFAULT_NAMESPACE:
        raise Protected(f"namespace {name}")


async def delete_namespace(broker: Broker, name: NamespaceName) -> None:
    """Delete a namespace without topics. Raises NamespaceNotFound, NamespaceNotEmpty, Protected.

    If a topic is created between the check for topics and the deletion, the namespace is restored
    with its settings. If the tenant was deleted meanwhile, the tenant is restored, too. After a
    failure, a repeated call deletes the topic policies, schemas and ownership records that the
    failed call has left, even if it then raises NamespaceNotFound. It deletes nothing if the
    namespace has a topic.

    NOTE: if such a topic was created, and the call is cancelled or the metadata store does not
    answer before the namespace is restored, the policies of the namespace are lost. The topic
    stays, and a repeated call raises NamespaceNotFound until the topic's next use records the
    namespace again.

    NOTE: a broker whose cache still has the namespace may write a topic after the last check here.
    The topic stays, and its next use records the namespace again, without policies. To exclude
    this, the broker would have to read the namespace after its write, and delete its new topic.
    """
    require_deletable(name)
    store, path = broker.metadata, paths.namespace(name.tenant, name.namespace)
    for _ in range(RACES_MAX):
        await store.sync(path)
        found = await store.get(path)
        if found is None:
            if not await _topics_of(broker, name):  # an earlier call may have failed half-way
                await _forget_rest(broker, name)
            raise NamespaceNotFound(str(name))
        if topics := await _topics_of(broker, name):
            raise NamespaceNotEmpty(str(name), topics)
        tenant = await store.get(paths.tenant(name.tenant))
        deadline = asyncio.get_running_loop().time() + WRITE_TIMEOUT_S
        left = await update(store, path, same_or_keep(found.value), deadline=deadline)
        if left is not None:
            continue
        if topics := await _retried(path, partial(_topics_of, broker, name)):
            try:
                await _restore(broker, name, found.value, None if tenant is None else tenant.value)
            except Unavailable as error:  # the namespace's record is deleted already
                raise OutcomeUnknown(path, str(error)) from error
            raise NamespaceNotEmpty(str(name), topics)
        await _retried(path, partial(_forget_rest, broker, name))
        return
    raise Contended(path, RACES_MAX)


async def _topics_of(broker: Broker, name: NamespaceName) -> list[str]:
    """Return the topics of the namespace. They include partitioned topics without partitions, which
    an unfinished creation or deletion has left."""
    found = [*await broker.topics_of(name, tuple(Domain))]
    for domain in Domain:
        found += await broker.catalog.partitioned.names(name, domain)
    return [str(topic) for topic in found]


async def _namespaces_of(broker: Broker, tenant: str) -> list[str]:
    folder = paths.namespaces(tenant)
    await broker.metadata.sync(folder)
    found = {paths.unquoted(child) for child in await broker.metadata.children(folder)}
    if tenant == DEFAULT_NAMESPACE.tenant:
        found.add(DEFAULT_NAMESPACE.namespace)
    return sorted(found)


async def _touch_tenant(broker: Broker, tenant: str) -> None:
    """Write the tenant's record unchanged, so that a deletion that has read the record fails.
    Raises TenantNotFound."""

    def unchanged(stored: bytes | None) -> bytes | Verdict:
        if stored is None and tenant != DEFAULT_NAMESPACE.tenant:
            raise TenantNotFound(tenant)
        return KEEP if stored is None else stored

    await _update(broker, paths.tenant(tenant), unchanged)


async def _restore(
    broker: Broker, name: NamespaceName, namespace: bytes, tenant: bytes | None
) -> None:
    """Write the record of a deleted namespace again, unless the namespace was created again. Then
    write the tenant's record unchanged, as `_touch_tenant` does. If the tenant was deleted, write
    its record `tenant`. None: it had no record."""

    def restored(stored: bytes | None) -> bytes | Verdict:
        # A broker that serves the new topic may have recorded the namespace without policies. Such
        # policies have the version 0. Those of `create_namespace` have a version above 0.
        is_bare = stored is None or codec.decode_namespace(stored).policies == Policies()
        return namespace if is_bare else KEEP

    def kept(stored: bytes | None) -> bytes | Verdict:
        value = tenant if stored is None else stored
        return KEEP if value is None else value

    await _update(broker, paths.namespace(name.tenant, name.namespace), restored)
    await _update(broker, paths.tenant(name.tenant), kept)


async def _forget_rest(broker: Broker, name: NamespaceName) -> None:
    """Delete what a deleted namespace has left. A new namespace of the same name must not find the
    topic policies and schemas. Without the ownership records, the owners forget their bundles. Stop
    when that namespace exists, because the rest may be its own.

    NOTE: a broker that still holds a bundle of the deleted namespace serves the new namespace
    without another write of the ownership record. If that record is deleted here in this moment,
    the broker closes the bundle's topics, and their clients reconnect. A lookup at a broker that
    does not yet know of the deletion may also write a record again, which then stays."""
    namespace = paths.namespace(name.tenant, name.namespace)
    for folder in (
        paths.topic_policies_folder(name.tenant, name.namespace),
        paths.schemas_folder(name.tenant, name.namespace),
        paths.ownership_folder(name.tenant, name.namespace),
    ):
        for child in await broker.metadata.children(folder):
            with suppress(BadVersion, NoNode, NotEmpty):
                found = await broker.metadata.get(f"{folder}/{child}")
                if await broker.metadata.get(namespace) is not None:  # read after `found`
                    return
                if found is not None:
                    await broker.metadata.delete(f"{folder}/{child}", expected=found.version)


# ---- records -------------------------------------------------------------------------------------


async def read(broker: Broker, path: str) -> bytes | None:
    """Return the stored value, which includes every change made before this call. None: no
    record."""
    await broker.metadata.sync(path)
    found = await broker.metadata.get(path)
    return None if found is None else found.value


async def _update(
    broker: Broker, path: str, change: Callable[[bytes | None], bytes | Verdict]
) -> Versioned | None:
    """Call `update` after a sync, both with retries until WRITE_TIMEOUT_S has passed."""
    deadline = asyncio.get_running_loop().time() + WRITE_TIMEOUT_S
    await _sync(broker.metadata, path, deadline)
    return await update(broker.metadata, path, change, deadline=deadline)


async def _retried(path: str, call: Callable[[], Awaitable[T]]) -> T:
    """Call `call`, which completes an operation that has changed `path` already. While the metadata
    store does not answer, repeat it. A call that fails after WRITE_TIMEOUT_S is not repeated, but
    raises OutcomeUnknown. The duration of one call is not limited here."""
    deadline = asyncio.get_running_loop().time() + WRITE_TIMEOUT_S
    while True:
        try:
            return await call()
        except (OutcomeUnknown, Unavailable) as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise OutcomeUnknown(path, str(error)) from error
            await asyncio.sleep(UPDATE_PAUSE_S)


async def _sync(store: MetadataStore, path: str, deadline: float) -> None:
    trouble = "the deadline passed"
    try:
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    await store.sync(path)
                    return
                except (OutcomeUnknown, Unavailable) as error:
                    trouble = str(error)
                    await asyncio.sleep(UPDATE_PAUSE_S)
    except TimeoutError:
        raise Unavailable(f"{path}: {trouble}") from None
