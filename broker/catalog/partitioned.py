"""Partitioned topics: their records, and the records of their partitions.

A partitioned topic is a record with the number of its partitions. Each partition is a topic of its
own, `<topic>-partition-<n>`, with an owner of its own. This module writes the records of new
partitions, although no broker owns them yet: they have no entries, so no owner is needed.

The order of the writes matters. After a crash between two writes, the topic must be usable, or
another request must be able to finish the change.

- Creation writes the record of the partitioned topic first, then the records of its partitions. If
  a partition's record was not written, the first use of the partition creates the record.
- Growth writes the records of the new partitions first, with all durable subscriptions of the other
  partitions. These subscriptions begin at the first message. Then growth writes the new number of
  partitions. So a consumer that learns of a new partition finds its subscription there, and misses
  no message. A crash may leave records of partitions above the number. The next growth completes
  these records, and a deletion of the topic deletes them.
- Deletion writes the mark `deleting` first. From then on, the topic cannot be used. Then the
  partitions are deleted, and last the record. To finish a deletion after a crash, repeat the
  request. A creation or growth at the same time may write records of partitions that the deletion
  does not find. So the creation or growth reads the topic's record after these writes, even if a
  write failed or the request was cancelled. If the topic is deleted, the creation or growth deletes
  those of the records that no broker has opened.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from magnetar.broker.calls import call_each
from magnetar.broker.cursor import format as stored
from magnetar.broker.cursor.acks import AckState
from magnetar.broker.cursor.sequences import DEDUPLICATION
from magnetar.broker.errors import (
    InvalidPartitionCount,
    ReservedName,
    TopicExists,
    TopicNotFound,
)
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.log.topic_deletion import same_or_keep, schema_path, shares_schema
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import MetadataError
from magnetar.metadata.model import PartitionedTopic, SubscriptionRecord, TopicRecord
from magnetar.metadata.store import DELETE, KEEP, Verdict, update
from magnetar.protos.names import Domain, TopicName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.metadata.store import Change, MetadataStore, Versioned
    from magnetar.protos.names import NamespaceName
    from magnetar.runtime.clock import Clock

PARTITIONS_MAX: Final = 10_000
"""The limit of partitions of a topic. The configuration can only lower it. A client opens a
producer for each partition. Writing the records of this many partitions takes 10 s with
ZooKeeper."""

METADATA_TIMEOUT_S: Final = 10.0
"""The time limit of one change of a record while the metadata store does not answer."""

NAMES_PER_TURN: Final = 1_000
"""The names of partitions that are parsed in one turn of the event loop, at 5 us each."""

WRITES_MAX: Final = 32
"""The number of partitions' records that are written at the same time."""

READS_MAX: Final = 32
"""The number of partitions' records that are read at the same time. A growth reads the records
twice. One by one, at 3 ms each, the records of 10,000 partitions would take a minute."""


class PartitionedTopics:
    """The records of partitioned topics. `partitions_max`: the limit of partitions of one topic. 0:
    PARTITIONS_MAX."""

    def __init__(self, store: MetadataStore, clock: Clock, *, partitions_max: int = 0) -> None:
        self._store = store
        self._clock = clock
        self.partitions_max = min(partitions_max or PARTITIONS_MAX, PARTITIONS_MAX)

    async def find(self, name: TopicName) -> PartitionedTopic | None:
        """Return the record, even of a topic that is being deleted. None: the topic is not
        partitioned. Raises MetadataError."""
        found = await self._store.get(_path(name))
        return None if found is None else codec.decode_partitioned_topic(found.value)

    async def find_fresh(self, name: TopicName) -> PartitionedTopic | None:
        """Like `find`, but sees every change that any broker made before this call."""
        await self._store.sync(_path(name))
        return await self.find(name)

    async def names(self, namespace: NamespaceName, domain: Domain) -> list[TopicName]:
        """Return the partitioned topics of a namespace, sorted, including topics that are being
        deleted."""
        folder = paths.partitioned_topics(namespace.tenant, namespace.namespace, domain)
        children = await self._store.children(folder)
        names = [_name_in(namespace, domain, child) for child in children]
        return sorted(names, key=lambda it: it.topic)  # the comparison of names is slow

    async def create(
        self, name: TopicName, partitions: int, properties: Mapping[str, str] | None = None
    ) -> None:
        """Create a partitioned topic. Raises InvalidPartitionCount, ReservedName, TopicExists,
        MetadataError.

        NOTE: a broker may look for this record before it is written, and write the record of a
        plain topic after the last check here. Then both topics exist. To exclude this, the broker
        would have to check again after its write, and delete its new topic."""
        if name.partition is not None:
            raise ReservedName(str(name), "names that end with -partition-<n> are for partitions")
        self._require_count(name, partitions)
        if await self._is_plain(name):
            raise TopicExists(str(name))
        record = PartitionedTopic(partitions, properties or {}, self._clock.now_ms())
        value = codec.encode_partitioned_topic(record)

        def add(stored: bytes | None) -> bytes:
            if stored is not None and stored != value:  # equal: our write; its reply was lost
                raise TopicExists(str(name))
            return value

        await self._update(_path(name), add)
        if await self._is_plain(name):  # a plain topic was created in the meantime: it stays
            await self._update(_path(name), lambda _: DELETE)
            raise TopicExists(str(name))
        await self._write_partitions(name, range(partitions), {})

    async def grow(self, name: TopicName, partitions: int) -> None:
        """Raise the number of partitions to `partitions`. Raises InvalidPartitionCount,
        TopicNotFound, MetadataError."""
        record = await self.require(name)  # its sync makes the reads of subscriptions fresh, too
        self._require_count(name, partitions, more_than=record.partitions)
        subscriptions = await self._subscriptions(name, record.partitions)
        await self._write_partitions(name, range(record.partitions, partitions), subscriptions)

        def raise_count(stored: bytes | None) -> bytes:
            found = None if stored is None else codec.decode_partitioned_topic(stored)
            if found is None or found.deleting:
                raise TopicNotFound(str(name), partitioned=True)
            if found.partitions > partitions:
                raise InvalidPartitionCount(str(name), partitions, f"more than {found.partitions}")
            return codec.encode_partitioned_topic(replace(found, partitions=partitions))

        await self._update(_path(name), raise_count)
        # The new partitions lack the subscriptions that were created in the meantime.
        newer = await self._subscriptions(name, record.partitions)
        if missing := {it: newer[it] for it in newer.keys() - subscriptions.keys()}:
            await self._write_partitions(name, range(record.partitions, partitions), missing)

    async def change_properties(
        self, name: TopicName, change: Callable[[Mapping[str, str]], Mapping[str, str]]
    ) -> None:
        """Change the properties of the topic. `change` may be called several times. Raises
        TopicNotFound, MetadataError, and the errors of `change`."""

        def changed(stored: bytes | None) -> bytes | Verdict:
            found = None if stored is None else codec.decode_partitioned_topic(stored)
            if found is None or found.deleting:
                raise TopicNotFound(str(name), partitioned=True)
            properties = change(found.properties)
            if properties == found.properties:
                return KEEP
            return codec.encode_partitioned_topic(replace(found, properties=properties))

        await self._update(_path(name), changed)

    async def begin_deletion(self, name: TopicName) -> list[TopicName]:
        """Write the mark `deleting`. Returns the partitions that have records, including those of
        an unfinished growth. Raises TopicNotFound, MetadataError."""

        def mark(stored: bytes | None) -> bytes:
            if stored is None:
                raise TopicNotFound(str(name), partitioned=True)
            record = codec.decode_partitioned_topic(stored)
            return codec.encode_partitioned_topic(replace(record, deleting=True))

        await self._update(_path(name), mark)
        folder = paths.topics(name.tenant, name.namespace, name.domain)
        await self._store.sync(folder)
        prefix = paths.quoted(f"{name.topic}-partition-0")[:-1]
        children = [it for it in await self._store.children(folder) if it.startswith(prefix)]
        found: dict[int, TopicName] = {}
        for number, child in enumerate(children, 1):
            one = _name_in(name.namespace_name, name.domain, child)
            if one.partition is not None and one.base == name:
                found[one.partition] = one
            if number % NAMES_PER_TURN == 0:
                await asyncio.sleep(0)
        return [found[index] for index in sorted(found)]

    async def delete_untouched(self, partitions: Sequence[TopicName]) -> list[TopicName]:
        """Delete the records of those partitions that no broker has opened. These partitions have
        no data besides the record. Returns the other partitions. If a broker opens a partition at
        the same time, the compare-and-set decides. Raises MetadataError."""
        left: list[TopicName] = []

        async def delete(partition: TopicName) -> None:
            touched = False

            def decide(value: bytes | None) -> Verdict:
                nonlocal touched
                touched = value is not None and not _is_untouched(codec.decode_topic(value))
                return KEEP if touched or value is None else DELETE

            await self._update(_topic_path(partition), decide)
            if touched:
                left.append(partition)

        await call_each(partitions, delete, at_once=WRITES_MAX)
        return sorted(left, key=lambda it: it.partition or 0)

    async def end_deletion(self, name: TopicName) -> None:
        """Delete the topic policies, the schema and the record of the topic. Call this when all
        partitions are deleted. The schema stays if a topic of the other domain uses it (see the
        NOTE of `shares_schema`). If another request has finished this deletion, and the topic was
        created again, the new topic stays."""
        policies_path = paths.topic_policies(name.tenant, name.namespace, name.domain, name.topic)
        await self._store.sync(policies_path)
        policies = await self._store.get(policies_path)
        schema = await self._store.get(schema_path(name))
        record = await self.find(name)
        if record is None or not record.deleting:
            return
        if policies is not None:
            await self._update(policies_path, same_or_keep(policies.value))
        if schema is not None and not await shares_schema(self._store, name):
            await self._update(schema_path(name), same_or_keep(schema.value))
        await self._update(_path(name), _delete_marked)

    async def require(self, name: TopicName) -> PartitionedTopic:
        """Return the record, as `find_fresh` does. Raises TopicNotFound if the topic is not
        partitioned or is being deleted."""
        record = await self.find_fresh(name)
        if record is None or record.deleting:
            raise TopicNotFound(str(name), partitioned=True)
        return record

    # ---- mechanics -------------------------------------------------------------------------------

    def _require_count(self, name: TopicName, partitions: int, *, more_than: int = 0) -> None:
        if not more_than < partitions <= self.partitions_max:
            expected = f"{more_than + 1} to {self.partitions_max}"
            raise InvalidPartitionCount(str(name), partitions, expected)

    async def _is_plain(self, name: TopicName) -> bool:
        return await self._store.get(_topic_path(name)) is not None

    async def _subscriptions(self, name: TopicName, partitions: int) -> dict[str, dict[str, str]]:
        """Return the durable subscriptions of all partitions, with their properties."""
        found: dict[str, dict[str, str]] = {}

        async def collect(index: int) -> None:
            stored_record = await self._store.get(_topic_path(name.with_partition(index)))
            if stored_record is not None:
                record = codec.decode_topic(stored_record.value)
                for subscription, part in record.subscriptions.items():
                    if subscription != DEDUPLICATION:  # each partition has its own sequence ids
                        found.setdefault(subscription, dict(part.properties))

        await call_each(range(partitions), collect, at_once=READS_MAX)
        return found

    async def _write_partitions(
        self, name: TopicName, indexes: range, subscriptions: Mapping[str, Mapping[str, str]]
    ) -> None:
        if name.domain is not Domain.PERSISTENT:
            return  # a non-persistent partition has no record

        async def write(index: int) -> None:
            await self._write_partition(name.with_partition(index), subscriptions)

        async def take_back(index: int) -> None:
            await self._take_back(name.with_partition(index))

        async def take_back_if_deleted() -> None:
            if await self._is_deleted(name):  # the deletion may have missed the new records
                await call_each(indexes, take_back, at_once=WRITES_MAX)

        try:
            await call_each(indexes, write, at_once=WRITES_MAX)
            await take_back_if_deleted()
        except (MetadataError, asyncio.CancelledError):  # some of the records may be written
            with suppress(MetadataError, TimeoutError):
                async with asyncio.timeout(METADATA_TIMEOUT_S):
                    await take_back_if_deleted()
            raise

    async def _write_partition(
        self, name: TopicName, subscriptions: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Create the partition's record, or add the subscriptions that the record lacks. If a
        broker has opened the partition, the record stays as it is: its owner creates the
        subscriptions that consumers ask for."""

        def write(value: bytes | None) -> bytes | Verdict:
            record = TopicRecord(epoch=0) if value is None else codec.decode_topic(value)
            missing = [it for it in subscriptions if it not in record.subscriptions]
            if value is not None and (record.epoch > 0 or not missing):
                return KEEP
            number = len(record.subscriptions)
            added = {
                it: _at_the_beginning(number + place, subscriptions[it])
                for place, it in enumerate(missing, 1)
            }
            return codec.encode_topic(
                replace(record, subscriptions={**record.subscriptions, **added})
            )

        await self._update(_topic_path(name), write)

    async def _take_back(self, partition: TopicName) -> None:
        """Delete the partition's record if no broker has opened the partition, and the partitioned
        topic was not created again.

        NOTE: if another request creates the topic again between the two reads and the deletion, an
        equal record of the new topic is deleted. The first use of the partition creates it
        again."""
        path = _topic_path(partition)
        found = await self._store.get(path)  # must be read before the partitioned topic's record
        if found is None or not _is_untouched(codec.decode_topic(found.value)):
            return
        if await self._is_deleted(partition.base):
            await self._update(path, same_or_keep(found.value))

    async def _is_deleted(self, name: TopicName) -> bool:
        """Return whether the topic has no record or is being deleted."""
        record = await self.find_fresh(name)
        return record is None or record.deleting

    async def _update(self, path: str, change: Change) -> Versioned | None:
        deadline = asyncio.get_running_loop().time() + METADATA_TIMEOUT_S
        return await update(self._store, path, change, deadline=deadline)


def _delete_marked(value: bytes | None) -> Verdict:
    is_marked = value is None or codec.decode_partitioned_topic(value).deleting
    return DELETE if is_marked else KEEP


def _is_untouched(record: TopicRecord) -> bool:
    return record.epoch == 0 and not (record.ledgers or record.cursor_ledgers or record.deleting)


def _at_the_beginning(number: int, properties: Mapping[str, str]) -> SubscriptionRecord:
    """Make the record of a subscription of a topic without entries."""
    state = AckState(Chain(), EARLIEST)
    return SubscriptionRecord(dict(properties), stored.inline(stored.snapshot(number, state)))


def _name_in(namespace: NamespaceName, domain: Domain, child: str) -> TopicName:
    return TopicName(domain, namespace.tenant, namespace.namespace, paths.unquoted(child))


def _path(name: TopicName) -> str:
    return paths.partitioned_topic(name.tenant, name.namespace, name.domain, name.topic)


def _topic_path(name: TopicName) -> str:
    return paths.topic(name.tenant, name.namespace, name.domain, name.topic)
