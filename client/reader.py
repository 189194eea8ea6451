"""The asyncio reader: a consumer with a temporary subscription."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from magnetar.client.consumer import LoopQueue, seconds, seekable, take
from magnetar.client.consuming.retry import RetrySubscriber
from magnetar.client.consuming.subscription import Subscription
from magnetar.client.errors import AlreadyClosed
from magnetar.client.message import MessageId
from magnetar.client.options import ConsumerType, InitialPosition, ReaderOptions
from magnetar.client.together import together

if TYPE_CHECKING:
    import random

    from magnetar.client.consuming.retry import ConsumerCore
    from magnetar.client.consuming.subscriber import Subscriber
    from magnetar.client.message import Message


class Reader:
    """A reader reads a topic from a chosen message. `Client.create_reader` creates it."""

    def __init__(self, subscriber: ConsumerCore, queue: LoopQueue) -> None:
        self._subscriber = subscriber
        self._queue = queue
        self._closed = False

    async def read_next(self, timeout_millis: int | None = None) -> Message:
        """Return the next message; wait until there is one.

        `timeout_millis`: the time limit in milliseconds; None: no limit. Raises Timeout if no
        message arrives within that time, and AlreadyClosed if the reader is closed. Raises the
        broker's error if the client cannot fetch the schema of the message; the message then stays
        in the queue.
        """
        return await take(self._subscriber, self._queue, seconds(timeout_millis))

    async def has_message_available(self) -> bool:
        """Return whether there is a message after the last one that was read.

        If its queue is empty, the reader asks the broker. Raises Timeout if the broker does not
        answer within `operation_timeout_seconds`, and AlreadyClosed if the reader is closed.
        """
        return await self._subscriber.has_message_available()

    async def seek(self, messageid: MessageId | int) -> None:
        """Move the reader to a message id or to a publish time.

        - A message id: the reader next reads the message after this id. With
          `start_message_id_inclusive`, it next reads the message with this id.
        - A time in milliseconds since 1970: the reader next reads the first message
          that was published at that time or later.

        Raises Timeout if the broker does not answer within `operation_timeout_seconds`, and
        AlreadyClosed if the reader is closed.
        """
        await self._subscriber.seek(seekable(messageid))

    async def close(self) -> None:
        """Close the reader. The broker deletes its subscription.

        Raises AlreadyClosed if the reader was closed before.
        """
        if self._closed:
            raise AlreadyClosed("the reader was closed", topic=self.topic())
        self._closed = True
        await self._subscriber.close()

    def topic(self) -> str:
        """Return the full name of the topic."""
        return self._subscriber.topic

    def is_connected(self) -> bool:
        """Return whether the reader is attached to the brokers of all its topics now."""
        return self._subscriber.is_attached

    def __aiter__(self) -> Self:
        """Read messages with `async for`. The loop ends when the reader is closed."""
        return self

    async def __anext__(self) -> Message:
        try:
            return await self.read_next()
        except AlreadyClosed:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._closed:
            await self.close()


def reader_subscription(options: ReaderOptions, random: random.Random) -> Subscription:
    """Return the subscription of a reader. It has a random name and ends with the reader."""
    name = f"reader-{random.getrandbits(40):010x}"
    if options.subscription_role_prefix:
        name = f"{options.subscription_role_prefix}-{name}"
    return Subscription(
        name=name,
        type=ConsumerType.Exclusive,
        priority_level=0,
        consumer_name=options.reader_name,
        properties={},
        initial_position=InitialPosition.Latest,
        start=options.start_message_id,
        inclusive=options.start_message_id_inclusive,
        queue_messages_max=options.receiver_queue_size,
        batch_indexes=True,
        nack_delay_s=0,
        unacked_timeout_s=None,
        key_reader=options.crypto_key_reader,
        crypto_failure=options.crypto_failure_action,
    )


async def begin_at_latest(subscriber: ConsumerCore) -> None:
    """Ask the broker where a reader with `MessageId.latest` begins.

    With `start_message_id_inclusive`, the reader begins at the topic's last message. If the request
    fails, the function closes the reader and raises the error.
    """
    if subscriber.subscription.start != MessageId.latest:
        return
    assert not isinstance(subscriber, RetrySubscriber)  # a reader has no retry topic
    try:
        await together(_find_latest(core) for core in subscriber.cores)
    except BaseException:
        subscriber.shut_down(AlreadyClosed("the reader was not created", topic=subscriber.topic))
        raise


async def _find_latest(subscriber: Subscriber) -> None:
    if subscriber.subscription.inclusive:
        last, _ = await subscriber.last_message_id()
        if last.entry_id() >= 0:
            await subscriber.seek(last)
            return
    await subscriber.pin_start()
