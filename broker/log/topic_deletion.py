"""Deletes topics. After a crash, the topic is unchanged, or another broker finishes the deletion.

Theory of operation. A deletion has four steps, each of which may be repeated:
    1. The broker writes a *tombstone* beside the topic's record. The tombstone names the topic, so
       that the sweeper finds a deletion that has stopped half-way.
    2. The broker changes the topic's record by one compare-and-set. The record now says `deleted`
       and lists all ledgers of the topic as ledgers to delete. From now on the topic is deleted:
       every owner that reads the record is fenced, and no broker opens the topic.
    3. The broker deletes the ledgers. It also deletes the topic's own policies and schema, unless
       the topic is a partition. The schema stays if a topic of the other domain uses it.
    4. The broker deletes the record, if the record still has the deleted topic's `incarnation`.

The tombstone stays until all other brokers that were registered at the deletion have ended, for
RETURN_S_MAX at least and for TOMBSTONE_S_MAX at most. It has four uses:
    - The epochs of a new topic of the same name begin above the old epochs. This also fences a
      stale owner that does not know incarnations (an earlier version of Magnetar).
    - The versions of the new topic's record begin above those of the removed record. So a write
      that a stale owner began before the deletion fails.
    - The ids of the new topic's ledgers begin above those of the old ledgers. So a reader that
      still has a position in the old topic does not take new messages for messages already read.
    - The tombstone names the producers and consumers that were connected. When these reconnect,
      they do not create the topic again.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import LedgerError
from magnetar.broker.log.owned_record import (
    METADATA_TIMEOUT_S,
    dropping,
    forgetting,
    topic_path,
)
from magnetar.metadata import paths
from magnetar.metadata.codec import (
    decode_partitioned_topic,
    decode_tombstone,
    decode_topic,
    encode_tombstone,
    encode_topic,
)
from magnetar.metadata.errors import InvalidRecord, MetadataError, OutcomeUnknown, Unavailable
from magnetar.metadata.model import TopicRecord, TopicTombstone
from magnetar.metadata.store import DELETE, KEEP, Verdict, update
from magnetar.protos.errors import InvalidTopicName
from magnetar.protos.names import Domain, TopicName
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from magnetar.broker.log.ledgers import LedgerStore
    from magnetar.broker.log.owned_record import OwnedRecord
    from magnetar.metadata.model import LedgerId
    from magnetar.metadata.store import Change, MetadataStore, Versioned
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

LEDGERS_PER_PASS: Final = 100
"""The number of ledgers that the broker deletes between two changes of the topic's record. After a
crash, at most this many deletions are repeated."""

CLIENTS_MAX: Final = 1_000
"""The maximum number of connected clients that a tombstone names: about 60 KB. Further clients may
create the topic again when they reconnect over another connection."""

RETURN_S_MAX: Final = 600.0
"""The time for which a tombstone prevents reconnecting clients from creating the topic again. It is
ten times the longest pause between two attempts of Pulsar's clients."""

STALLED_S: Final = 30.0
"""The minimum age of a deletion that the sweeper finishes."""

TOMBSTONE_S_MAX: Final = 86_400.0
"""The sweeper removes a tombstone after a day, even if brokers that were registered at the deletion
still run. Tombstones must not accumulate, and the incarnation is enough to fence stale owners."""


class TopicDeletions:
    """Deletes topics, and finishes the deletions that other brokers have begun. Calls raise
    MetadataError, LedgerError and InvalidRecord: the sweeper then finishes the deletion later."""

    def __init__(self, store: MetadataStore, ledgers: LedgerStore, clock: Clock) -> None:
        self._store = store
        self._ledgers = ledgers
        self._clock = clock

    async def delete(
        self, owned: OwnedRecord, *, brokers: Mapping[str, str], clients: frozenset[str]
    ) -> None:
        """Delete a topic that this broker owns. `brokers`: the other registered brokers, with their
        incarnations. `clients`: the connected producers and consumers (see `client_key`). Also
        raises LogFenced, LogUnavailable, LogDamaged, TopicFull."""
        await self._bury(owned.name, owned.record, brokers, clients)
        try:
            await owned.change(deleted)
        finally:
            owned.lose("it is being deleted")
        await self.finish(owned.name)

    async def delete_unopened(
        self, name: TopicName, *, incarnation: str, brokers: Mapping[str, str]
    ) -> None:
        """Delete a topic that cannot be opened because its ledgers are damaged. A record without
        an incarnation gets `incarnation`."""
        stored = await self._store.get(topic_path(name))
        if stored is None:
            return
        found = decode_topic(stored.value)
        if not found.incarnation:
            found = replace(found, incarnation=incarnation)
        await self._bury(name, found, brokers, frozenset())

        def mark(value: bytes | None) -> bytes | Verdict:
            record = None if value is None else decode_topic(value)
            if record is None or record.incarnation not in ("", found.incarnation):
                return KEEP
            if record.deleted:
                return KEEP
            fenced = replace(record, epoch=record.epoch + 1, incarnation=found.incarnation)
            return encode_topic(deleted(fenced))

        await self._update(topic_path(name), mark)
        await self.finish(name)

    async def finish(self, name: TopicName) -> None:
        """Finish the deletion of a topic whose record says that it is deleted. Do nothing if the
        record does not say so, or does not exist. Several brokers may call this at once."""
        stored = await self._store.get(topic_path(name))
        if stored is None:
            return
        record = decode_topic(stored.value)
        if not record.deleted:
            return
        await self._delete_ledgers(name, record)
        if name == name.base:
            own = paths.topic_policies(name.tenant, name.namespace, name.domain, name.topic)
            await self._delete_with(name, record, own)
            await self._delete_with(name, record, schema_path(name))
        await self._complete_tombstone(name, record)
        await self._update(
            topic_path(name), lambda value: DELETE if _is_deleted(value, record) else KEEP
        )
        log.info("topic deleted", topic=str(name), incarnation=record.incarnation)

    async def _delete_with(self, name: TopicName, record: TopicRecord, path: str) -> None:
        """Delete the deleted topic's node at this path. Keep the node if another broker has removed
        the topic's record meanwhile: the node may then belong to a new topic of the same name."""
        found = await self._store.get(path)  # must be read before the record
        stored = await self._store.get(topic_path(name))
        if found is None or stored is None or not _is_deleted(stored.value, record):
            return
        if path != schema_path(name) or not await shares_schema(self._store, name):
            await self._update(path, same_or_keep(found.value))

    async def _complete_tombstone(self, name: TopicName, record: TopicRecord) -> None:
        """Write the record's version and epoch, and an id above its ledgers, into the tombstone,
        before the record is removed. Another broker may have taken the topic after the tombstone
        was written."""
        stored = await self._store.get(topic_path(name))
        if stored is None or not _is_deleted(stored.value, record):
            return

        def note(value: bytes | None) -> bytes | Verdict:
            if value is None:
                return KEEP
            tombstone = decode_tombstone(value)
            version = max(tombstone.version, stored.version)
            epoch = max(tombstone.epoch, record.epoch)
            ledger_min = max(tombstone.ledger_min, _above_ledgers(record))
            return encode_tombstone(
                replace(tombstone, version=version, epoch=epoch, ledger_min=ledger_min)
            )

        await self._update(paths.deleted_topic(str(name)), note)

    async def tombstone(self, name: TopicName) -> TopicTombstone | None:
        """Return the tombstone of an earlier topic of this name. None: there is no tombstone."""
        stored = await self._store.get(paths.deleted_topic(str(name)))
        return None if stored is None else decode_tombstone(stored.value)

    def refuses(self, tombstone: TopicTombstone, client: str, *, reconnects: bool) -> bool:
        """Return whether this client must not create the topic again, because it used the deleted
        topic."""
        age_s = (self._clock.now_ms() - tombstone.deleted_ms) / 1_000
        return age_s < RETURN_S_MAX and (reconnects or client in tombstone.clients)

    async def sweep(self, brokers: Mapping[str, str]) -> None:
        """Finish the deletions that are incomplete after STALLED_S, and remove tombstones that are
        no longer needed. `brokers`: all registered brokers, with their incarnations.

        An error of one topic does not stop the sweep of other topics. Raises OutcomeUnknown and
        Unavailable: the metadata store does not answer."""
        for child in await self._store.children(paths.DELETED_TOPICS):
            path = f"{paths.DELETED_TOPICS}/{child}"
            try:
                await self._sweep_one(path, TopicName.parse(paths.unquoted(child)), brokers)
            except (OutcomeUnknown, Unavailable):
                raise
            except (MetadataError, LedgerError, InvalidTopicName, UnicodeDecodeError) as error:
                log.error("a deleted topic cannot be swept", path=path, error=str(error))

    async def _sweep_one(self, path: str, name: TopicName, brokers: Mapping[str, str]) -> None:
        stored = await self._store.get(path)
        if stored is None:
            return
        tombstone = decode_tombstone(stored.value)
        age_s = (self._clock.now_ms() - tombstone.deleted_ms) / 1_000
        if age_s < STALLED_S:
            return
        found = await self._store.get(topic_path(name))
        if found is not None and _is_deleted(found.value, tombstone):
            log.warning("finishing the deletion of a topic", topic=str(name))
            await self.finish(name)
        if age_s < RETURN_S_MAX:
            return
        remaining = [id_ for id_, run in tombstone.brokers.items() if brokers.get(id_) == run]
        if not remaining or age_s >= TOMBSTONE_S_MAX:
            await self._update(path, lambda value: DELETE if value == stored.value else KEEP)

    async def _bury(
        self,
        name: TopicName,
        record: TopicRecord,
        brokers: Mapping[str, str],
        clients: frozenset[str],
    ) -> None:
        def bury(value: bytes | None) -> bytes:
            before = None if value is None else decode_tombstone(value)
            return encode_tombstone(
                TopicTombstone(
                    record.incarnation,
                    record.epoch if before is None else max(record.epoch, before.epoch),
                    self._clock.now_ms(),
                    {**({} if before is None else before.brokers), **brokers},
                    frozenset(sorted(clients)[:CLIENTS_MAX]),
                    0 if before is None else before.version,
                    0 if before is None else before.ledger_min,
                )
            )

        await self._update(paths.deleted_topic(str(name)), bury)

    async def _delete_ledgers(self, name: TopicName, record: TopicRecord) -> None:
        left = record.deleting
        while left:
            handled, left = left[:LEDGERS_PER_PASS], left[LEDGERS_PER_PASS:]
            for ledger in handled:
                try:
                    await self._ledgers.delete(ledger)
                except InvalidRecord as error:  # continue without this ledger
                    log.warning(
                        "cannot delete a ledger", topic=str(name), ledger=ledger, error=str(error)
                    )
            if left:
                await self._update(topic_path(name), _forgetting(record, handled))

    async def _update(self, path: str, change: Change) -> Versioned | None:
        deadline = asyncio.get_running_loop().time() + METADATA_TIMEOUT_S
        return await update(self._store, path, change, deadline=deadline)


def same_or_keep(seen: bytes) -> Change:
    """Return a change that deletes a node only if its value is still `seen`."""
    return lambda value: DELETE if value == seen else KEEP


def schema_path(name: TopicName) -> str:
    return paths.schema(name.tenant, name.namespace, name.topic)


async def shares_schema(store: MetadataStore, name: TopicName) -> bool:
    """Return whether the topic of this name in the other domain has a record: both topics have the
    same schema. A topic that is being deleted does not count: if both topics are marked, the first
    deletion that gets here deletes the schema. A non-persistent topic without partitions has no
    record, and no stored messages that need the schema.

    NOTE: the deletion of the schema after this check is not atomic with the check. If a topic of
    the other domain is created in between and adds no version to the schema, it loses the
    schema."""
    is_persistent = name.domain is Domain.PERSISTENT
    other = replace(name, domain=Domain.NON_PERSISTENT if is_persistent else Domain.PERSISTENT)
    path = paths.partitioned_topic(other.tenant, other.namespace, other.domain, other.topic)
    await store.sync(path)
    plain, partitioned = await store.get(topic_path(other)), await store.get(path)
    try:
        if plain is not None and not decode_topic(plain.value).deleted:
            return True
        return partitioned is not None and not decode_partitioned_topic(partitioned.value).deleting
    except InvalidRecord:  # its messages may still need the schema
        return True


def client_key(kind: str, *names: str) -> str:
    """Return the name of a producer or consumer in a tombstone."""
    return "/".join((kind, *names))


def deleted(record: TopicRecord) -> TopicRecord:
    """Return the record with the topic marked as deleted, and all its ledgers to be deleted."""
    used = [part.ledger for part in record.ledgers]
    used += [*record.cursor_ledgers, *record.delayed_ledgers]
    emptied = replace(
        record,
        deleted=True,
        ledgers=(),
        cursor_ledgers=(),
        delayed_ledgers=(),
        subscriptions={},
        properties={},
        dropped=None,
        ledger_min=_above_ledgers(record),
    )
    return dropping(emptied, used)


def _above_ledgers(record: TopicRecord) -> int:
    """Return an id above those of all ledgers of the topic, also of dropped ledgers with entries.
    The record of a deleted topic keeps this id, because its list of ledgers becomes shorter."""
    ledgers = [record.ledger_min - 1, *(part.ledger for part in record.ledgers)]
    ledgers += [*record.cursor_ledgers, *record.delayed_ledgers, *record.deleting]
    if record.dropped is not None:
        ledgers.append(record.dropped.ledger)
    return max(ledgers) + 1


def _is_deleted(value: bytes | None, of: TopicRecord | TopicTombstone) -> bool:
    """Return whether `value` is the record of the topic `of` and marks this topic as deleted."""
    if value is None:
        return False
    record = decode_topic(value)
    return record.deleted and record.incarnation == of.incarnation


def _forgetting(of: TopicRecord, ledgers: Collection[LedgerId]) -> Change:
    """Return a change that removes these ledgers from the deleted topic's list. The change takes
    time in proportion to the length of the list: 3 ms for 15,000 ledgers."""

    def forget(value: bytes | None) -> bytes | Verdict:
        if value is None or not _is_deleted(value, of):
            return KEEP
        return encode_topic(forgetting(decode_topic(value), ledgers))

    return forget
