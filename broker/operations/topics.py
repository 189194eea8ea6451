"""What an administrator can ask of topics: list them, create, delete and look at one.

Operations on one topic raise ServedElsewhere when another broker serves it, BundleUnavailable while
it is between brokers, and what opening it raises.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from magnetar.broker.operations.errors import ServedElsewhere
from magnetar.broker.operations.model import CursorStats, InternalStats, LedgerInfo, TopicStats

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker
    from magnetar.broker.topic.protocol import Topic
    from magnetar.broker.topic.subscription import Subscription
    from magnetar.protos.names import NamespaceName, TopicName

RANGES_SHOWN_MAX: Final = 1_000
"""Of acknowledged ranges for one cursor: a subscription may have a million holes."""


async def list_topics(broker: Broker, namespace: NamespaceName) -> list[str]:
    """Full names of the namespace's persistent topics, sorted. Raises MetadataError."""
    return sorted(await broker.topics_of(namespace))


async def create_topic(broker: Broker, name: TopicName) -> None:
    """Raises TopicExists."""
    await require_owner(broker, name)
    await broker.create_topic(name)


async def delete_topic(broker: Broker, name: TopicName, *, force: bool) -> None:
    """Its messages, subscriptions and own policies are deleted with it. Raises TopicNotFound;
    TopicInUse unless `force`, which disconnects producers and consumers."""
    await require_owner(broker, name)
    await broker.delete_topic(name, force=force)


async def topic_stats(broker: Broker, name: TopicName) -> TopicStats:
    """Raises TopicNotFound, ReadFailed."""
    topic = await open_topic(broker, name)
    return TopicStats.model_validate(await topic.stats())


async def internal_stats(broker: Broker, name: TopicName) -> InternalStats:
    """Raises TopicNotFound."""
    log = (topic := await open_topic(broker, name)).log
    chain = log.chain
    records = chain.records
    open_bytes = log.stored_bytes - sum(record.length for record in records)
    return InternalStats(
        state=log.state.value,
        epoch=log.owned_record.epoch,
        number_of_entries=chain.entry_count,
        total_size=log.stored_bytes,
        current_ledger_entries=chain.counts[records[-1].ledger] if records else 0,
        last_confirmed_entry=str(log.confirmed),
        ledgers=[
            LedgerInfo(
                ledger_id=record.ledger,
                entries=chain.counts[record.ledger],
                size=record.length if record.closed_ms else open_bytes,
            )
            for record in records
        ],
        cursors={
            subscription.name: _cursor_stats(subscription)
            for subscription in topic.subscriptions.values()
            if subscription.cursor.durable
        },
    )


async def open_topic(broker: Broker, name: TopicName, *, create: bool = False) -> Topic:
    """The topic, opened here. Raises TopicNotFound unless `create`."""
    await require_owner(broker, name)
    return await broker.topic(name, create=create)


async def require_owner(broker: Broker, name: TopicName) -> None:
    """Raises ServedElsewhere."""
    located = await broker.locate(name, authoritative=False)
    if located.broker != broker.me:
        raise ServedElsewhere(str(name), located.broker)


def _cursor_stats(subscription: Subscription) -> CursorStats:
    cursor, reads_at = subscription.cursor, subscription.read_position
    shown = list(islice(cursor.ranges(), RANGES_SHOWN_MAX + 1))
    return CursorStats(
        mark_delete_position=str(cursor.mark_delete),
        read_position=None if reads_at is None else str(reads_at),
        number_of_entries_in_backlog=cursor.backlog_entries,
        individually_deleted_messages=[
            f"{part.ledger}:{part.first}-{part.last}" for part in shown[:RANGES_SHOWN_MAX]
        ],
        individually_deleted_messages_complete=len(shown) <= RANGES_SHOWN_MAX,
        properties=dict(cursor.properties),
    )
