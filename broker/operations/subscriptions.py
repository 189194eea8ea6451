"""Administration of subscriptions: list, create, delete, move and peek.

Operations raise ServedElsewhere, BundleUnavailable and TopicNotFound, as operations on topics do.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import SubscriptionExists, SubscriptionNotFound
from magnetar.broker.log.position import LATEST
from magnetar.broker.operations.errors import MessageNotFound, PositionNotFound
from magnetar.broker.operations.model import PeekedMessage
from magnetar.broker.operations.topics import open_topic, require_owner
from magnetar.protos.errors import EntryError
from magnetar.protos.message import decode_messages, read_entry
from magnetar.protos.names import Domain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.broker.broker import Broker
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position
    from magnetar.broker.topic.protocol import Topic
    from magnetar.broker.topic.subscription import Subscription
    from magnetar.protos.batch import ReceivedMessage
    from magnetar.protos.message import ReceivedEntry
    from magnetar.protos.names import TopicName

PEEK_POSITION_MAX: Final = 10_000
"""The last place of a backlog that an administrator can look at: 1.2 us a place, so 12 ms at
most."""

AGE_S_MAX: Final = 1 << 40
"""The largest age of messages to expire: 34,000 years, far below the limit of 64-bit
milliseconds."""

PEEK_BYTES_MAX: Final = 16 << 20
"""The limit of an uncompressed entry. A larger entry is listed without its payload."""


async def list_subscriptions(broker: Broker, name: TopicName) -> list[str]:
    """Return the names of the topic's subscriptions, sorted, including those of readers."""
    await require_owner(broker, name)
    return sorted((await broker.topic(name, create=False)).subscription_names)


async def create_subscription(
    broker: Broker,
    name: TopicName,
    subscription: str,
    start: Position,
    *,
    batch_index: int = -1,
    excluded: bool = False,
    properties: Mapping[str, str] | None = None,
) -> None:
    """Create a durable subscription whose next message is the first at or after `start`.
    `batch_index` and `excluded`: see `reset_to_message`. Create a missing topic, too, as a
    subscribing consumer does. Raises SubscriptionExists, PositionNotFound.

    If `start` is inside a batch, the subscription is created at the batch and then moved. The move
    may raise SubscriptionFenced or ReadFailed. The subscription then exists, and begins with the
    first message of the batch."""
    await require_owner(broker, name)
    served = await broker.topic(name)
    if subscription in served.subscription_names:
        raise SubscriptionExists(subscription)
    if name.domain is Domain.NON_PERSISTENT:
        await served.ensure_subscription(subscription, start, properties)
        return
    topic = await open_topic(broker, name)
    _require_reached(topic, start)
    first, skipped = _first(topic, start, batch_index, excluded=excluded)
    await topic.ensure_subscription(subscription, first, properties)
    if skipped:
        await _found(topic, subscription).seek(first, batch_index=skipped)


async def delete_subscription(
    broker: Broker, name: TopicName, subscription: str, *, force: bool
) -> None:
    """Delete a subscription with its backlog. `force` disconnects its consumers. Raises
    SubscriptionNotFound, and ConsumersConnected unless `force`."""
    await require_owner(broker, name)
    topic = await broker.topic(name, create=False)
    await topic.unsubscribe(subscription, force=force)


async def reset_to_time(
    broker: Broker, name: TopicName, subscription: str, publish_time_ms: int
) -> None:
    """Deliver again from the first message published at that time or later. Disconnects the
    consumers, which reconnect by themselves. Raises SubscriptionNotFound, SubscriptionFenced,
    ReadFailed."""
    topic = await open_topic(broker, name)
    await _found(topic, subscription).seek_to_time(publish_time_ms)


async def reset_to_message(
    broker: Broker,
    name: TopicName,
    subscription: str,
    start: Position,
    *,
    batch_index: int = -1,
    excluded: bool = False,
) -> None:
    """Like `reset_to_time`, from the message at `start`, or from the next one if `excluded`. With a
    `batch_index`, the message is one of the batch at `start`. Also raises PositionNotFound."""
    topic = await open_topic(broker, name)
    found = _found(topic, subscription)
    _require_reached(topic, start)
    first, skipped = _first(topic, start, batch_index, excluded=excluded)
    await found.seek(first, batch_index=skipped)


async def skip(broker: Broker, name: TopicName, subscription: str, count: int) -> int:
    """Acknowledge the first `count` unacknowledged entries for all consumers. Returns the number of
    acknowledged entries. Raises SubscriptionNotFound, SubscriptionFenced, LogError."""
    topic = await open_topic(broker, name)
    return await _found(topic, subscription).skip(count)


async def skip_all(broker: Broker, name: TopicName, subscription: str) -> int:
    """Acknowledge the whole backlog, as `skip` does."""
    topic = await open_topic(broker, name)
    return await _found(topic, subscription).skip_all()


async def expire(
    broker: Broker, name: TopicName, subscription: str | None, older_than_s: int
) -> int:
    """Acknowledge the entries that are older than `older_than_s`, as `skip` does, in one
    subscription or in all (None). Returns the number of acknowledged entries of all these
    subscriptions. Also raises ReadFailed."""
    topic = await open_topic(broker, name)
    found = topic.all_subscriptions if subscription is None else [_found(topic, subscription)]
    return sum([await topic.expire(each, older_than_s=older_than_s) for each in found])


async def expire_through(
    broker: Broker,
    name: TopicName,
    subscription: str,
    last: Position,
    *,
    batch_index: int = -1,
    excluded: bool = False,
) -> int:
    """Acknowledge every entry up to `last`, as `skip` does; `excluded`: without `last` itself. With
    a `batch_index`, the last message is the one with this index in the batch at `last`. The batch
    stays if the request does not include all its messages. Also raises PositionNotFound,
    ReadFailed."""
    topic = await open_topic(broker, name)
    found = _found(topic, subscription)
    _require_reached(topic, last)
    if batch_index >= 0:
        whole = await _is_whole_batch(topic, last, batch_index + 1 - excluded)
    else:
        whole = not excluded
    through = last if whole else topic.log.chain.previous_position(last)
    return await topic.expire_through(found, through)


async def peek(
    broker: Broker, name: TopicName, subscription: str, number: int
) -> list[PeekedMessage]:
    """Return the unacknowledged messages of one entry, and change nothing. `number` counts the
    unacknowledged entries from 1 to PEEK_POSITION_MAX.

    Raises SubscriptionNotFound, MessageNotFound, ReadFailed.
    """
    assert 1 <= number <= PEEK_POSITION_MAX, number
    found = _found(await open_topic(broker, name), subscription)
    entry = await found.peek(number)
    if entry is None:
        raise MessageNotFound(subscription, number, found.cursor.backlog_entries)
    left = found.cursor.batch_ack_set(entry.position)
    return await asyncio.to_thread(_opened, entry, left)


def _found(topic: Topic, subscription: str) -> Subscription:
    found = topic.subscriptions.get(subscription)
    if found is None:
        raise SubscriptionNotFound(subscription)
    return found


def _require_reached(topic: Topic, start: Position) -> None:
    last = topic.log.confirmed
    if start > last and start != LATEST:
        raise PositionNotFound(str(topic.name), start, last)


def _first(
    topic: Topic, start: Position, batch_index: int, *, excluded: bool
) -> tuple[Position, int]:
    """Return the first entry to deliver, and how many of its messages to leave out."""
    if batch_index >= 0:
        return start, batch_index + excluded
    if excluded and start != LATEST:
        return topic.log.chain.next_position(start), 0
    return start, 0


async def _is_whole_batch(topic: Topic, position: Position, messages: int) -> bool:
    """Return whether the entry has at most this number of messages. Raises ReadFailed."""
    if not topic.log.chain.is_entry(position):
        return True  # the entry is deleted
    entries = await topic.log.read(position, entries_max=1, bytes_max=1)
    if not entries or entries[0].position != position:
        return True  # all bookies have lost the entry
    return entries[0].messages <= messages


def _opened(entry: StoredEntry, left: tuple[int, ...] | None) -> list[PeekedMessage]:
    """Decode the messages of an entry. `left`: the bits of the unacknowledged messages of a partly
    acknowledged batch; None: all."""
    chunk = entry.view.chunk
    if chunk is not None:
        return [_closed(entry, f"it is part {chunk.index + 1} of {chunk.count} of a large message")]
    try:
        received = read_entry(entry.data)
        messages = decode_messages(received, bytes_max=PEEK_BYTES_MAX)
    except EntryError as error:
        return [_closed(entry, str(error))]
    return [
        _shown(entry, received, message)
        for message in messages
        if left is None or _is_set(left, message.batch_index)
    ]


def _is_set(words: tuple[int, ...], bit: int) -> bool:
    """Return True if a bit is set. Last words that are 0 may be left out of the set."""
    word = bit // 64
    return word < len(words) and bool(words[word] >> bit % 64 & 1)


def _shown(entry: StoredEntry, received: ReceivedEntry, message: ReceivedMessage) -> PeekedMessage:
    suffix = f":{message.batch_index}" if received.is_batch else ""
    return PeekedMessage(
        message_id=f"{entry.position}{suffix}",
        producer_name=received.producer_name,
        sequence_id=message.sequence_id,
        publish_time=received.publish_time_ms,
        event_time=message.event_time_ms or None,
        key=message.partition_key,
        key_is_base64=message.partition_key_b64,
        properties=dict(message.properties),
        payload=b64encode(message.payload).decode(),
        problem=None,
    )


def _closed(entry: StoredEntry, problem: str) -> PeekedMessage:
    """Return the metadata of an entry whose payload cannot be shown."""
    view = entry.view
    return PeekedMessage(
        message_id=str(entry.position),
        producer_name=view.producer_name,
        sequence_id=view.sequence_id,
        publish_time=view.publish_time_ms,
        event_time=view.event_time_ms or None,
        key=view.partition_key,
        key_is_base64=view.partition_key_b64,
        properties={},
        payload=None,
        problem=problem,
    )
