"""The existing topics, and the rules for the creation of topics.

A topic exists if it has a record. A partition of a partitioned topic exists even without a record:
its first use creates the record. Non-persistent topics have no records. A non-persistent topic
exists if it is open or is a partition of a partitioned topic.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from magnetar.broker.catalog.partitioned import PartitionedTopics
from magnetar.broker.catalog.reserved import is_heartbeat, is_system
from magnetar.broker.errors import (
    IsPartitioned,
    ReservedName,
    TopicDeleted,
    TopicExists,
    TopicNotFound,
)
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_topic
from magnetar.protos.names import Domain, TopicName

if TYPE_CHECKING:
    from magnetar.broker.policies.cache import PolicyCache
    from magnetar.metadata.policies import AutoTopicCreation
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.names import NamespaceName
    from magnetar.runtime.clock import Clock

NAMES_PER_TURN: Final = 1_000
"""The number of names of persistent topics that `names` makes in one turn of the event loop, in
3 ms."""


class Catalog:
    """Reads the metadata store at each call, because the answers decide which topics are
    created."""

    def __init__(
        self, store: MetadataStore, policies: PolicyCache, clock: Clock, *, partitions_max: int = 0
    ) -> None:
        self.partitioned = PartitionedTopics(store, clock, partitions_max=partitions_max)
        self._store = store
        self._policies = policies

    async def exists(self, name: TopicName) -> bool:
        """Return True if the topic has a record and is not being deleted. Return False also for a
        partition whose first use has not created its record yet."""
        path = paths.topic(name.tenant, name.namespace, name.domain, name.topic)
        found = await self._store.get(path)
        return found is not None and not decode_topic(found.value).deleted

    async def names(self, namespace: NamespaceName, domain: Domain) -> list[TopicName]:
        """Return those persistent topics of a namespace that have records, including topics that
        are being deleted. For the non-persistent domain, return the partitions of the partitioned
        topics of the namespace that are not being deleted."""
        tenant, part = namespace.tenant, namespace.namespace
        names: list[TopicName] = []
        if domain is Domain.PERSISTENT:
            found = await self._store.children(paths.topics(tenant, part, domain))
            for number, child in enumerate(found, 1):
                names.append(TopicName(domain, tenant, part, paths.unquoted(child)))
                if number % NAMES_PER_TURN == 0:
                    await asyncio.sleep(0)
            return names
        for name in await self.partitioned.names(namespace, domain):
            record = await self.partitioned.find(name)
            if record is not None and not record.deleting:
                names += [name.with_partition(index) for index in range(record.partitions)]
        return names

    async def require_creatable(self, name: TopicName, *, by_user: bool) -> None:
        """Check that a topic without a record may be created: by an administrator's request
        (`by_user`), or by its first use. The policy cache must know the namespace.

        Raises ReservedName, IsPartitioned, TopicNotFound, PoliciesUnavailable, MetadataError.
        """
        if name.partition is not None:
            record = await self.partitioned.find(name.base)
            if record is not None and record.deleting:
                raise TopicNotFound(str(name))
            if record is None or name.partition >= record.partitions:
                count = 0 if record is None else record.partitions
                raise ReservedName(str(name), f"{name.base} has {count} partitions")
            return
        if is_system(name) and (by_user or not is_heartbeat(name)):
            raise ReservedName(str(name), "the name is reserved for the system")
        record = await self.partitioned.find(name)
        if record is not None:
            raise IsPartitioned(str(name), record.partitions)
        if not (by_user or is_heartbeat(name) or self._creation_of(name).enabled):
            raise TopicNotFound(str(name))

    async def partitions_of(self, name: TopicName, *, create: bool) -> int:
        """Return the number of partitions of the topic; 0: it is not partitioned. If the topic does
        not exist, and the policies create topics with partitions, create it (only if `create`).

        Raises TopicNotFound, TopicDeleted (only if `create`; another attempt may create the topic),
        and the errors of `require_creatable`.
        """
        if found := await self._recorded_partitions(name):
            return found
        if name.partition is not None or await self.exists(name):
            if name.partition is not None and not await self.exists(name):
                await self.require_creatable(name, by_user=False)
            return 0
        await self.require_creatable(name, by_user=False)
        if not create:
            raise TopicNotFound(str(name))
        count = 0 if is_system(name) else self._creation_of(name).partitions
        if count:
            count = min(count, self.partitioned.partitions_max)
            try:
                await self.partitioned.create(name, count)
            except TopicExists as error:
                # Another request created this topic, or a topic without partitions has a record.
                if found := await self._recorded_partitions(name):
                    return found
                if not await self.exists(name):
                    raise TopicDeleted(str(name)) from error
                return 0
        return count

    async def _recorded_partitions(self, name: TopicName) -> int:
        """Return the number of partitions in the topic's record; 0: the topic is not partitioned.
        Raises TopicNotFound if the partitioned topic is being deleted."""
        record = await self.partitioned.find(name)
        if record is None:
            return 0
        if record.deleting:
            raise TopicNotFound(str(name))
        return record.partitions

    def _creation_of(self, name: TopicName) -> AutoTopicCreation:
        return self._policies.policies_of_namespace(name.namespace_name).auto_topic_creation
