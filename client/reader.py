"""The asyncio reader: a consumer without a subscription that outlives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from magnetar.client.consumer import LoopQueue, take
from magnetar.client.consuming.subscription import Subscription
from magnetar.client.errors import AlreadyClosed
from magnetar.client.message import MessageId
from magnetar.client.options import ConsumerType, InitialPosition, ReaderOptions

if TYPE_CHECKING:
    import random

    from magnetar.client.consuming.subscriber import Subscriber
    from magnetar.client.message import Message


class Reader:
    """Reads a topic from a place that the user chooses. Made by `Client.create_reader`."""

    def __init__(self, subscriber: Subscriber, queue: LoopQueue) -> None:
        self._subscriber = subscriber
        self._queue = queue

    async def read_next(self, timeout_millis: int | None = None) -> Message:
        """The next message, as soon as there is one. Raises Timeout, AlreadyClosed."""
        timeout_s = None if timeout_millis is None else timeout_millis / 1000
        return await take(self._subscriber, self._queue, timeout_s)

    async def has_message_available(self) -> bool:
        """Whether there is a message after the last that was read. Asks the broker if need be."""
        return await self._subscriber.has_message_available()

    async def seek(self, messageid: MessageId | int) -> None:
        """Go on after that message (at it, with `start_message_id_inclusive`), or with the first
        one that was published at that time in milliseconds or later."""
        await self._subscriber.seek(messageid)

    async def close(self) -> None:
        await self._subscriber.close()

    def topic(self) -> str:
        """The full name of the topic."""
        return self._subscriber.topic

    def is_connected(self) -> bool:
        """Whether a broker has it at the moment."""
        return self._subscriber.is_attached

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def reader_subscription(options: ReaderOptions, random: random.Random) -> Subscription:
    """The subscription of a reader: its name is made up, and it ends with the reader."""
    name = f"reader-{random.getrandbits(40):010x}"
    if options.subscription_role_prefix:
        name = f"{options.subscription_role_prefix}-{name}"
    return Subscription(
        name=name,
        type=ConsumerType.Exclusive,
        consumer_name=options.reader_name,
        properties={},
        initial_position=InitialPosition.Latest,
        start=options.start_message_id,
        inclusive=options.start_message_id_inclusive,
        queue_messages_max=options.receiver_queue_size,
        batch_indexes=True,
        nack_delay_s=0,
        unacked_timeout_s=None,
    )


async def begin_at_latest(subscriber: Subscriber) -> None:
    """For a reader that begins at `latest`: finds out where that is. Inclusively it is the last
    message there is."""
    if subscriber.subscription.start != MessageId.latest:
        return
    try:
        await _find_latest(subscriber)
    except BaseException:
        subscriber.shut_down(AlreadyClosed("it was not created", topic=subscriber.topic))
        raise


async def _find_latest(subscriber: Subscriber) -> None:
    if subscriber.subscription.inclusive:
        last, _ = await subscriber.last_message_id()
        if last.entry_id() >= 0:
            await subscriber.seek(last)
            return
    await subscriber.pin_start()
