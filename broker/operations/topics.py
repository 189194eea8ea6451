"""Administration of topics: list topics; create, delete and show a topic.

Operations on one topic raise ServedElsewhere when another broker serves the topic,
BundleUnavailable while its bundle moves between brokers, and the errors of opening it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from magnetar.broker.catalog.listing import texts_of, visible_of
from magnetar.broker.errors import IsPartitioned, TopicExists
from magnetar.broker.operations.errors import ServedElsewhere
from magnetar.broker.operations.model import (
    CursorStats,
    InternalStats,
    LedgerInfo,
    TerminatedAt,
)
from magnetar.broker.operations.namespaces import namespace_record
from magnetar.broker.operations.statistics import modelled
from magnetar.protos.names import Domain

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker
    from magnetar.broker.operations.model import TopicStats
    from magnetar.broker.topic.protocol import Topic
    from magnetar.broker.topic.subscription import Subscription
    from magnetar.protos.names import NamespaceName, TopicName

RANGES_SHOWN_MAX: Final = 1_000
"""The limit of acknowledged ranges that are shown for one cursor: a subscription may have a
million."""

RANGES_TOTAL_MAX: Final = 100_000
"""The limit of shown ranges of all cursors of a topic: 2 MB. The cursors get equal shares."""

CURSORS_PER_TURN: Final = 10
"""Cursors in one step of the loop: 15 ms with RANGES_SHOWN_MAX ranges each."""


async def list_topics(
    broker: Broker,
    namespace: NamespaceName,
    domain: Domain = Domain.PERSISTENT,
    *,
    include_system: bool = False,
) -> list[str]:
    """Return the full names of the namespace's topics of one domain, sorted, including partitions.
    `include_system`: include system topics. Raises NamespaceNotFound, MetadataError."""
    await namespace_record(broker, namespace)
    found = await broker.topics_of(namespace, (domain,))
    if not include_system:
        found = await visible_of(found, broker.turns)
    return sorted(await texts_of(found, broker.turns))


async def create_topic(broker: Broker, name: TopicName) -> None:
    """Create a topic. Raises TopicExists."""
    await require_owner(broker, name)
    try:
        await broker.create_topic(name)
    except IsPartitioned:
        raise TopicExists(str(name)) from None


async def delete_topic(broker: Broker, name: TopicName, *, force: bool) -> None:
    """Delete a topic with its messages, subscriptions and own policies. `force` disconnects
    producers and consumers. Raises TopicNotFound, and TopicInUse unless `force`."""
    await require_owner(broker, name)
    await broker.delete_topic(name, force=force)


async def topic_stats(broker: Broker, name: TopicName) -> TopicStats:
    """Return the statistics of a topic. Raises TopicNotFound, ReadFailed."""
    await require_owner(broker, name)
    topic = await broker.topic(name, create=False)
    failures = broker.quarantine.failures_of(name, asyncio.get_running_loop().time())
    found = {**await topic.stats(), "recentFailures": failures}
    return await asyncio.to_thread(modelled, found)


async def delete_non_persistent(broker: Broker, name: TopicName, *, force: bool) -> None:
    """Close the topic: a non-persistent topic has no stored data to delete. Raises TopicNotFound,
    and NonPersistentInUse unless `force`."""
    await require_owner(broker, name)
    await broker.close_non_persistent(name, force=force)


async def internal_stats(broker: Broker, name: TopicName) -> InternalStats:
    """Return the ledgers and cursors of a topic. Raises TopicNotFound."""
    log = (topic := await open_topic(broker, name)).log
    durable = [it for it in topic.subscriptions.values() if it.cursor.durable]
    ranges_max = min(RANGES_SHOWN_MAX, RANGES_TOTAL_MAX // max(len(durable), 1))
    cursors = await broker.turns.each(
        durable, partial(_cursor_stats, ranges_max=ranges_max), slice_items=CURSORS_PER_TURN
    )
    chain = log.chain
    records = chain.records
    is_open = bool(records) and records[-1].closed_ms == 0
    return InternalStats(
        state=log.state.value,
        epoch=log.owned_record.epoch,
        number_of_entries=chain.entry_count,
        total_size=log.stored_bytes,
        current_ledger_entries=chain.counts[records[-1].ledger] if is_open else 0,
        current_ledger_size=log.open_bytes,
        pending_add_entries_count=log.pending_appends,
        last_confirmed_entry=str(log.confirmed),
        terminated=None if log.terminated is None else str(log.terminated),
        cursor_ledgers=list(log.owned_record.record.cursor_ledgers),
        delayed_ledgers=list(log.owned_record.record.delayed_ledgers),
        ledgers_to_delete=len(log.owned_record.record.deleting),
        lost=[str(lost) for lost in log.losses.ranges],
        ledgers=[
            LedgerInfo(
                ledger_id=record.ledger,
                entries=chain.counts[record.ledger],
                size=record.length if record.closed_ms else log.open_bytes,
                first_index=record.first_index,
                closed_at=record.closed_ms,
            )
            for record in records
        ],
        cursors={it.name: shown for it, shown in zip(durable, cursors, strict=True)},
    )


async def terminate(broker: Broker, name: TopicName) -> TerminatedAt:
    """Terminate the topic: it accepts no more messages, permanently. Returns the id of the last
    message, or -1:-1 if the topic is empty. Raises TopicNotFound."""
    last = await (await open_topic(broker, name)).terminate()
    return TerminatedAt(ledger_id=last.ledger, entry_id=last.entry)


async def truncate(broker: Broker, name: TopicName) -> None:
    """Drop all messages published before this call, even those that retention would keep. Raises
    TopicNotFound, SubscriptionFenced, TooManyReceipts, LogError."""
    await (await open_topic(broker, name)).truncate()


async def open_topic(broker: Broker, name: TopicName, *, create: bool = False) -> Topic:
    """Open the persistent topic here, and return it. Raises TopicNotFound unless `create`, and
    NotAllowed for a non-persistent topic."""
    await require_owner(broker, name)
    return await broker.stored_topic(name, create=create)


async def require_owner(broker: Broker, name: TopicName) -> None:
    """Raise ServedElsewhere if another broker serves the topic."""
    located = await broker.locate(name, authoritative=False)
    if located.broker != broker.me:
        raise ServedElsewhere(str(name), located.broker)


def _cursor_stats(subscription: Subscription, *, ranges_max: int) -> CursorStats:
    cursor, reads_at = subscription.cursor, subscription.read_position
    shown = list(islice(cursor.ranges(), ranges_max + 1))
    return CursorStats(
        mark_delete_position=str(cursor.mark_delete),
        durable_mark_delete_position=str(cursor.durable_mark),
        read_position=None if reads_at is None else str(reads_at),
        number_of_entries_in_backlog=cursor.backlog_entries,
        individually_deleted_messages=[
            f"{part.ledger}:{part.first}-{part.last}" for part in shown[:ranges_max]
        ],
        individually_deleted_messages_complete=len(shown) <= ranges_max,
        properties=dict(cursor.properties),
    )
