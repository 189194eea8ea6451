"""Administration of policies: read, set and remove a policy of a namespace or a topic.

Any broker carries these operations out by compare-and-set. The brokers that serve the topics see
the change by their watches, some milliseconds later. All partitions of a topic share the policies
of the topic.

Operations raise NamespaceNotFound, TopicNotFound and MetadataError.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.errors import TopicNotFound
from magnetar.broker.operations.namespaces import (
    WRITE_TIMEOUT_S,
    change_namespace,
    namespace_record,
    read,
)
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import BadVersion, NoNode, OutcomeUnknown, Unavailable
from magnetar.metadata.policies import Policies, TopicPolicies, effective
from magnetar.metadata.store import DELETE, KEEP, UPDATE_PAUSE_S, update
from magnetar.protos.names import Domain, NamespaceName, TopicName

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.broker import Broker
    from magnetar.metadata.store import Verdict, Versioned

Target = NamespaceName | TopicName

_UNSET: Final = Policies()


async def get_policies(broker: Broker, target: Target) -> Policies:
    """Return the policies that the namespace or topic itself sets."""
    if isinstance(target, NamespaceName):
        return (await namespace_record(broker, target)).policies
    await _require_topic(broker, target)
    stored = await read(broker, _path(target))
    return _UNSET if stored is None else codec.decode_topic_policies(stored).policies


async def get_policy(broker: Broker, target: Target, field: str, *, applied: bool) -> Any:
    """Return the policy that the namespace or topic itself sets; None: it does not set this policy.
    With `applied`, return the policy that is in effect: the topic's, the namespace's or the
    broker's."""
    own = await get_policies(broker, target)
    if not applied:
        return getattr(own, field)
    if isinstance(target, NamespaceName):
        return getattr(effective(broker.default_policies, own, _UNSET), field)
    namespace = await get_policies(broker, target.namespace_name)
    return getattr(effective(broker.default_policies, namespace, own), field)


async def set_policy(broker: Broker, target: Target, field: str, value: Any) -> None:
    """Set a policy. `value` None removes the policy at this level."""

    def change(policies: Policies) -> Policies:
        if getattr(policies, field) == value:
            return policies
        return replace(policies, version=policies.version + 1, **{field: value})

    if isinstance(target, NamespaceName):
        await change_namespace(
            broker, target, lambda record: replace(record, policies=change(record.policies))
        )
    else:
        await _change_topic(broker, target, change)


async def _change_topic(
    broker: Broker, name: TopicName, change: Callable[[Policies], Policies]
) -> None:
    writes = False

    def written(stored: bytes | None) -> bytes | Verdict:
        nonlocal writes
        record = TopicPolicies() if stored is None else codec.decode_topic_policies(stored)
        policies = change(record.policies)
        if policies == record.policies:
            return KEEP
        writes = True
        if replace(policies, version=0) == _UNSET and not policies.unknown:
            return DELETE  # a topic without policies of its own has no record
        return codec.encode_topic_policies(replace(record, policies=policies))

    await _require_topic(broker, name)
    deadline = asyncio.get_running_loop().time() + WRITE_TIMEOUT_S
    await broker.metadata.sync(_path(name))
    changed = await update(broker.metadata, _path(name), written, deadline=deadline)
    try:
        await _require_topic(broker, name)
    except TopicNotFound:  # a later topic of this name must not find these policies
        if writes and changed is not None:
            await _take_back(broker, name, changed)
        raise


async def _take_back(broker: Broker, name: TopicName, written: Versioned) -> None:
    """Remove the policies that this request wrote for a deleted topic. A later topic of the same
    name keeps its own policies, also if they are equal: their version differs. Raises
    OutcomeUnknown.

    NOTE: the version of a node begins at 0 again after the node was deleted. Equal policies that a
    later topic got in the first write of a new node are removed.
    """
    path = _path(name)
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            while True:
                try:
                    found = await broker.metadata.get(path)
                    if found is None or (found.value, found.version) != (
                        written.value,
                        written.version,
                    ):
                        return
                    await broker.metadata.delete(path, expected=written.version)
                    return
                except (BadVersion, NoNode):  # changed meanwhile: compare again
                    continue
                except (OutcomeUnknown, Unavailable):
                    await asyncio.sleep(UPDATE_PAUSE_S)
    except TimeoutError:
        reason = f"{name} was deleted, and its new policies may not be removed"
        raise OutcomeUnknown(path, reason) from None


async def _require_topic(broker: Broker, name: TopicName) -> None:
    """Raise TopicNotFound or NamespaceNotFound if the topic cannot have policies. A non-persistent
    topic needs no record for them."""
    await namespace_record(broker, name.namespace_name)
    if name.domain is Domain.NON_PERSISTENT:
        return
    if await broker.exists(name) or await broker.exists(name.base):
        return
    partitioned = await broker.catalog.partitioned.find(name.base)
    if partitioned is None or partitioned.deleting:
        raise TopicNotFound(str(name))


def _path(name: TopicName) -> str:
    base = name.base
    return paths.topic_policies(base.tenant, base.namespace, base.domain, base.topic)
