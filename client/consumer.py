"""The asyncio consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from magnetar.client.consuming.acks import ACK_IDS_MAX
from magnetar.client.consuming.retry import RetrySubscriber, not_enabled
from magnetar.client.consuming.subscription import Subscription
from magnetar.client.errors import (
    AlreadyClosed,
    CumulativeAcknowledgementNotAllowedError,
    InvalidConfiguration,
    OperationNotSupported,
    PulsarException,
    Timeout,
    WrongType,
    without_frames,
)
from magnetar.client.message import Message, MessageId
from magnetar.client.message_queue import (
    QUEUED_ERRORS_MAX,
    Place,
    Sources,
    id_at,
    of_generation,
    place_of,
)
from magnetar.client.options import (
    ConsumerBatchReceivePolicy,
    ConsumerDecodeFailureAction,
    ConsumerOptions,
    ConsumerType,
)
from magnetar.client.policies import RECONSUME_TIMES_MAX, DeadLetterPolicy
from magnetar.client.rates import Rates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from magnetar.client.consuming.retry import ConsumerCore
    from magnetar.client.consuming.statistics import ConsumerStatistics
    from magnetar.client.interceptors import ConsumerHooks


class Consumer:
    """A consumer receives the messages of a subscription. `Client.subscribe` creates it."""

    def __init__(
        self,
        subscriber: ConsumerCore,
        queue: LoopQueue,
        policy: ConsumerBatchReceivePolicy,
        hooks: ConsumerHooks | None,  # None: no interceptors
    ) -> None:
        self._hooks = hooks
        self._subscriber = subscriber
        self._queue = queue
        self._policy = policy
        self._closed = False
        self._rates = Rates(asyncio.get_running_loop().time())

    async def receive(self, timeout_millis: int | None = None) -> Message:
        """Return the next message; wait until there is one.

        `timeout_millis`: the time limit in milliseconds; None: no limit. Raises Timeout if no
        message arrives within that time, and AlreadyClosed if the consumer is closed. Raises the
        broker's error if the client cannot fetch the schema of the message; the message then stays
        in the queue.
        """
        message = await take(self._subscriber, self._queue, seconds(timeout_millis))
        return self._shown(message)

    async def batch_receive(self) -> list[Message]:
        """Return messages as soon as one limit of the consumer's `batch_receive_policy` is reached.

        The list can be empty if the time limit of the policy is reached first. The limit does not
        apply to the time in which the client fetches the schema of a message that has arrived. If
        the call is cancelled or raises an error, its messages go back to the queue for the next
        call. Raises the errors of `receive`, except the Timeout for a message that does not arrive.
        """
        loop = asyncio.get_running_loop()
        policy = self._policy
        end_at = None if policy.timeout_s is None else loop.time() + policy.timeout_s
        messages: list[Message] = []
        size = 0
        while len(messages) < policy.messages_max and size < policy.bytes_max:
            left_s = None if end_at is None else max(end_at - loop.time(), 0)
            try:
                message = await maybe_take(self._subscriber, self._queue, left_s)
            except BaseException:
                self._queue.put_back(messages)
                self._subscriber.on_returned(messages)
                raise
            if message is None:
                break
            messages.append(message)
            size += message.payload_bytes
        return [self._shown(message) for message in messages]

    async def acknowledge(
        self, message: Message | MessageId | Sequence[Message | MessageId]
    ) -> None:
        """Acknowledge a message, or a list of messages, so that the broker does not deliver it
        again.

        The call does not wait for the broker. The client sends acknowledgements in groups within
        100 ms. After a reconnection, the client repeats the acknowledgements that the broker has
        not confirmed. `close` waits until all acknowledgements are durable.

        The client sends a list in commands of at most 1,000 ids. If one message of the list cannot
        be acknowledged, the client acknowledges none of them. Raises AlreadyClosed if the consumer
        is closed, and WrongType for a value of another type. Raises OperationNotSupported for an id
        that lacks its batch size, or that lacks its topic when the consumer has several topics.
        """
        self._subscriber.check_open()
        if isinstance(message, (Message, MessageId)):
            acknowledge(self._subscriber, acknowledgeable(message, self._subscriber))
        else:
            for some in slices_of(message, self._subscriber):
                acknowledge_each(self._subscriber, some)
                await asyncio.sleep(0)  # other tasks have their turn
        if self._hooks is not None:
            self._hooks.on_acknowledge(self, message)

    async def acknowledge_cumulative(self, message: Message | MessageId) -> None:
        """Acknowledge a message and all messages before it in its topic or partition.

        Raises CumulativeAcknowledgementNotAllowedError on Shared and Key_Shared subscriptions.
        Raises AlreadyClosed, WrongType and OperationNotSupported as `acknowledge` does.
        """
        self._subscriber.check_open()
        check_cumulative(self._subscriber.subscription)
        acknowledge_cumulative(self._subscriber, acknowledgeable(message, self._subscriber))
        if self._hooks is not None:
            self._hooks.on_acknowledge_cumulative(self, message)

    async def negative_acknowledge(self, message: Message | MessageId) -> None:
        """Ask the broker to redeliver a message after `negative_ack_redelivery_delay_ms`, or after
        the delay of `negative_ack_redelivery_backoff`.

        Raises AlreadyClosed if the consumer is closed, and WrongType for a value of another type.
        Raises OperationNotSupported for an id without a topic if the consumer has several topics.
        """
        self._subscriber.check_open()
        negative_acknowledge(self._subscriber, known(message, self._subscriber))
        if self._hooks is not None:
            self._hooks.on_negative_acknowledge(self, message)

    def pause(self) -> None:
        """Request no more messages from the broker. `receive` still returns queued messages."""
        self._subscriber.pause()

    def resume(self) -> None:
        """Request messages again after `pause`."""
        self._subscriber.resume()

    def get_stats(self) -> ConsumerStatistics:
        """Return the counts since the consumer was created, and the present rates."""
        stats = replace(self._subscriber.stats)
        stats.messages_per_second, stats.bytes_per_second = self._rates.rates(
            stats.messages_received, stats.bytes_received, asyncio.get_running_loop().time()
        )
        return stats

    async def reconsume_later(
        self,
        message: Message,
        delay: timedelta,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Publish a copy of the message on the retry topic, then acknowledge the message.

        The consumer receives the copy after `delay`. The copy has the properties of the message and
        `properties`. After `max_redeliver_count` copies, the message goes to the dead-letter topic.
        Raises OperationNotSupported unless the consumer has `enable_retry=True`. Raises the errors
        of `Producer.send`; the message then stays unacknowledged.
        """
        if not isinstance(self._subscriber, RetrySubscriber):
            raise not_enabled()
        await self._subscriber.reconsume_later(message, delay, properties)

    def redeliver_unacknowledged_messages(self) -> None:
        """Ask the broker to redeliver all messages that this consumer has not acknowledged."""
        self._subscriber.redeliver_unacknowledged()

    async def seek(self, messageid: MessageId | int) -> None:
        """Move the subscription to a message id or to a publish time.

        - A message id: the consumer next receives the message after this id. With
          `start_message_id_inclusive`, it next receives the message with this id.
        - A time in milliseconds since 1970: the consumer next receives the first
          message that was published at that time or later.

        With several topics, a time, `MessageId.earliest` and `MessageId.latest` apply to all
        topics. Any other id applies to its own topic only. Raises OperationNotSupported if the id
        does not name one of the topics, and InvalidConfiguration for a time out of range. Raises
        WrongType for a value of another type. Raises Timeout if the broker does not answer within
        `operation_timeout_seconds`, and AlreadyClosed if the consumer is closed.
        """
        await self._subscriber.seek(seekable(messageid))

    async def get_last_message_id(self) -> MessageId:
        """Return the id of the topic's last message. Ledger and entry are -1 if the topic is empty.

        Raises OperationNotSupported if the consumer has several topics or partitions, as in
        Apache's client. Raises Timeout if the broker does not answer within
        `operation_timeout_seconds`, and AlreadyClosed if the consumer is closed.
        """
        last, _ = await self._subscriber.last_message_id()
        return last

    async def get_last_message_ids(self) -> list[MessageId]:
        """Return the id of the last message of each topic. Each id has its `topic_name()`.

        With `enable_retry`, the ids of the retry topic come last.

        The method is named as in Apache's Java client; Apache's Python client does not have it.
        Raises Timeout and AlreadyClosed as `get_last_message_id` does.
        """
        return await self._subscriber.last_message_ids()

    async def unsubscribe(self) -> None:
        """Delete the subscription and close the consumer.

        Raises the broker's error if the subscription has other consumers.
        """
        await self._subscriber.unsubscribe()

    async def close(self, *, drain: bool = False) -> None:
        """Wait until all acknowledgements are durable, then close the consumer.

        With `drain`, the consumer first asks the broker for no more messages, and waits until the
        program has acknowledged all delivered messages. The broker then has nothing to redeliver.
        Other tasks or threads must receive and acknowledge the messages meanwhile. Without a
        connection, the consumer does not wait for the program: the broker redelivers the messages.

        Raises Timeout if one of these steps takes longer than `operation_timeout_seconds`:

        - with `drain`: the program acknowledges all delivered messages;
        - the broker confirms the acknowledgements and answers the request to close, and the
          producer of dead letters closes.

        Raises the broker's error if the broker rejected acknowledgements. Raises
        OperationNotSupported for `drain` if the broker is not Magnetar's. In all these cases the
        consumer is closed. Raises AlreadyClosed if `close` was called before.
        """
        if self._closed:
            raise AlreadyClosed("the consumer was closed", topic=self.topic())
        self._closed = True
        try:
            await close_core(self._subscriber, drain=drain)
        finally:
            if self._hooks is not None:
                self._hooks.close()

    def topic(self) -> str:
        """Return the full name of the topic. A consumer of a list returns all names, separated by
        commas; a consumer of a pattern returns the pattern."""
        return self._subscriber.topic

    def subscription_name(self) -> str:
        """Return the name of the subscription."""
        return self._subscriber.subscription.name

    def consumer_name(self) -> str:
        """Return the name given in `consumer_name`, or the name that the client generated."""
        return self._subscriber.subscription.consumer_name or ""

    def is_connected(self) -> bool:
        """Return whether the consumer is attached to the brokers of all its topics now."""
        return self._subscriber.is_attached

    def is_active(self) -> bool:
        """Return whether the broker delivers messages to this consumer now.

        A Failover subscription has one active consumer. Its other consumers stand by.
        """
        return self._subscriber.is_active

    def _shown(self, message: Message) -> Message:
        return message if self._hooks is None else self._hooks.before_consume(self, message)

    def __aiter__(self) -> Self:
        """Receive messages with `async for`. The loop ends when the consumer is closed."""
        return self

    async def __anext__(self) -> Message:
        try:
            return await self.receive()
        except AlreadyClosed:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._closed:
            await self.close()


class LoopQueue:
    """A MessageQueue for tasks of one event loop."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._failure: PulsarException | None = None  # None: further messages may arrive
        self._errors: deque[PulsarException] = deque()
        self._last_taken: Place | None = None  # None: no message taken since the last clear()
        self.generation = 0
        self._sources: Sources | None = None  # None: all messages are of one topic
        self._has_dropped = False  # the queue still has messages of topics that dropped them

    def share(self) -> Sources:
        if self._sources is None:
            self._sources = Sources()
        return self._sources

    def drop(self, topic: str) -> MessageId | None:
        assert self._sources is not None
        self._has_dropped = True
        return self._sources.on_dropped(topic)

    def put(self, messages: Sequence[Message]) -> None:
        self._remove_dropped()
        if self._failure is None:
            self._messages.extend(messages)
            self._wake(len(messages))

    def remove(self, unwanted: Callable[[Message], bool]) -> list[Message]:
        self._remove_dropped()
        removed = [one for one in self._messages if unwanted(one)]
        if removed:
            self._messages = deque(one for one in self._messages if not unwanted(one))
        return removed

    def put_back(self, messages: Sequence[Message]) -> None:
        self._remove_dropped()
        if self._failure is None:
            if self._sources is None:
                fresh = of_generation(self.generation, messages)
            else:
                fresh = self._sources.current(messages)
            self._messages.extendleft(reversed(fresh))
            self._wake(len(fresh))

    def put_error(self, error: PulsarException) -> None:
        if len(self._errors) < QUEUED_ERRORS_MAX:
            self._errors.append(error)
            self._wake(1)

    def clear(self) -> MessageId | None:
        self.generation += 1
        self._messages.clear()
        self._errors.clear()
        taken, self._last_taken = self.last_taken, None
        return taken

    @property
    def last_taken(self) -> MessageId | None:
        return id_at(self._last_taken)

    def fail(self, error: PulsarException) -> None:
        self._failure = self._failure or error
        self._messages.clear()
        self._wake(len(self._waiters))

    def __len__(self) -> int:
        self._remove_dropped()
        return len(self._messages)

    @property
    def is_awaited(self) -> bool:
        """Return whether a task waits for a message."""
        return bool(self._waiters)

    def first(self) -> Message | None:
        """Return the next message, which stays in the queue, or None if the queue is empty.

        Raises the error given to `fail`, and each error given to `put_error` once.
        """
        if self._failure is not None:
            raise without_frames(self._failure)
        if self._errors:
            raise self._errors.popleft()
        self._remove_dropped()
        return self._messages[0] if self._messages else None

    def take_first(self) -> Message:
        """Take the message that `first` has returned in this step of the loop."""
        message = self._messages.popleft()
        self._last_taken = place_of(message)
        if self._sources is not None:
            self._sources.on_taken(message)
        return message

    async def wait(self) -> None:
        """Wait until `first` may have a message or an error."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)  # otherwise cancelled waiters would accumulate
            elif not waiter.cancelled():
                self.pass_on()
            raise

    def _remove_dropped(self) -> None:
        if self._has_dropped:
            assert self._sources is not None
            self._messages = deque(self._sources.current(self._messages))
            self._has_dropped = False

    def pass_on(self) -> None:
        """Wake another waiter, because the waiter that was woken takes no message."""
        self._wake(1)

    def _wake(self, count: int) -> None:
        while count > 0 and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1


async def take(subscriber: ConsumerCore, queue: LoopQueue, timeout_s: float | None) -> Message:
    """Take a message out of the queue; wait until there is one.

    Raises Timeout if there is none within `timeout_s` seconds, and the errors of `maybe_take`.
    """
    message = await maybe_take(subscriber, queue, timeout_s)
    if message is None:
        raise Timeout(f"no message within {timeout_s} s", topic=subscriber.topic)
    return message


async def maybe_take(
    subscriber: ConsumerCore, queue: LoopQueue, timeout_s: float | None
) -> Message | None:
    """Take a message out of the queue. Returns None if there is none within `timeout_s` seconds.

    Raises the errors of `LoopQueue.first`. With a schema, raises the errors of `Decoder.prepare`,
    for example its Timeout; the message then stays in the queue.
    """
    decoder = subscriber.subscription.decoder
    while True:  # while this task fetches a schema, another task may take the message
        message = queue.first()
        if message is None:
            message = await next_message(subscriber, queue, timeout_s)
            if message is None:
                return None
        if decoder is None or decoder.maybe_prepare(message):
            break
        # Fetch the schema before taking the message: a reader that loses its broker continues
        # after the last message that it has taken.
        try:
            await decoder.prepare(message)
        except BaseException:
            queue.pass_on()
            raise
    taken = queue.take_first()
    subscriber.on_taken((taken.run,))
    if queue.is_awaited and subscriber.subscription.queue_messages_max == 0:
        subscriber.on_waiting()  # request the message of the next waiting call
    return taken


async def next_message(
    subscriber: ConsumerCore, queue: LoopQueue, timeout_s: float | None
) -> Message | None:
    """Wait until an empty queue has a message. Return this message, which stays in the queue.

    Returns None after `timeout_s` seconds. Raises the errors of `LoopQueue.first`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                subscriber.on_waiting()
                await queue.wait()
                message = queue.first()
                if message is not None:
                    return message
    except TimeoutError:
        return None


async def close_core(
    core: ConsumerCore, *, drain: bool, before_close: Callable[[], None] = lambda: None
) -> None:
    """Close a consumer. With `drain`, first wait until all delivered messages are acknowledged.

    The function calls `before_close` between draining and closing. Raises the errors of
    `core.drain` and `core.close`. The consumer is closed in every case.
    """
    try:
        if drain:
            await core.drain()
    finally:
        before_close()
        await core.close()


def subscription_of(options: ConsumerOptions) -> Subscription:
    """Return the subscription that a consumer with these options asks for."""
    timeout_ms = options.unacked_messages_timeout_ms
    return Subscription(
        name=options.subscription_name,
        type=options.consumer_type,
        consumer_name=options.consumer_name,
        priority_level=options.priority_level,
        properties=options.properties or {},
        initial_position=options.initial_position,
        start=None,
        inclusive=options.start_message_id_inclusive,
        queue_messages_max=options.queue_messages_max,
        batch_indexes=options.batch_index_ack_enabled,
        nack_delay_s=options.negative_ack_redelivery_delay_ms / 1000,
        unacked_timeout_s=timeout_ms / 1000 if timeout_ms else None,
        key_shared=options.key_shared_policy,
        nack_backoff=options.negative_ack_redelivery_backoff,
        unacked_backoff=options.ack_timeout_redelivery_backoff,
        unacked_tick_s=options.ack_timeout_tick_ms / 1000,
        chunked_max=options.max_pending_chunked_message,
        chunked_expire_s=options.expire_time_of_incomplete_chunked_message_ms / 1000,
        acknowledge_oldest_chunked=options.auto_ack_oldest_chunked_message_on_queue_full,
        dead_letters=dead_letter_policy(options),
        key_reader=options.crypto_key_reader,
        crypto_failure=options.crypto_failure_action,
        fails_on_corrupt=options.decode_failure_action is ConsumerDecodeFailureAction.FAIL,
    )


def dead_letter_policy(options: ConsumerOptions) -> DeadLetterPolicy | None:
    """Return the dead-letter policy of a consumer with these options. None: it has no policy.

    A consumer with a retry topic always has a policy.
    """
    if options.dead_letter_policy is not None:
        return options.dead_letter_policy.policy()
    return DeadLetterPolicy(RECONSUME_TIMES_MAX, "", "", "") if options.enable_retry else None


def known(message: Message | MessageId, core: ConsumerCore) -> Message | MessageId:
    """Check a message or id, and return it.

    Raises OperationNotSupported for an id without a topic if the consumer has several topics.
    Raises WrongType for a value of another type.
    """
    if isinstance(message, MessageId):
        core.check_id(message)
    elif not isinstance(message, Message):
        raise WrongType(f"expected Message or MessageId, not {type(message).__name__}")
    return message


def seekable(target: MessageId | int) -> MessageId | int:
    """Check the target of a seek, and return it.

    Raises WrongType for a value of another type, and InvalidConfiguration for a time out of range.
    """
    if isinstance(target, MessageId):
        return target
    if type(target) is not int:
        raise WrongType(f"expected MessageId or milliseconds, not {type(target).__name__}")
    if not 0 <= target < 1 << 63:
        raise InvalidConfiguration(f"a time to seek to must be 0 to 2^63-1 ms, not {target}")
    return target


def seconds(timeout_millis: int | None) -> float | None:
    """Convert a time limit to seconds. None: no limit. Raises WrongType for other types."""
    if timeout_millis is None:
        return None
    if type(timeout_millis) is not int:
        raise WrongType(f"timeout_millis must be int, not {type(timeout_millis).__name__}")
    return timeout_millis / 1000


def acknowledge(core: ConsumerCore, message: Message | MessageId) -> None:
    """Acknowledge a message or id that `acknowledgeable` has checked.

    Ignores a message from another cluster. Must be called on the event loop.
    """
    if isinstance(message, MessageId):
        core.acknowledge(message)
    elif message.was_delivered:
        core.on_acknowledged((message.run,))
    elif message.is_of(core.cluster):
        core.acknowledge(message.message_id())


def acknowledge_cumulative(core: ConsumerCore, message: Message | MessageId) -> None:
    """Acknowledge a message or id that `acknowledgeable` has checked, and all messages before it.

    Ignores a message from another cluster. Must be called on the event loop.
    """
    if isinstance(message, MessageId):
        core.acknowledge_cumulative(message)
    elif message.is_of(core.cluster):
        core.acknowledge_cumulative(message.message_id())


def negative_acknowledge(core: ConsumerCore, message: Message | MessageId) -> None:
    """Negatively acknowledge a message or id that `known` has checked.

    Ignores a message from another cluster. Must be called on the event loop.
    """
    if isinstance(message, MessageId) or message.is_of(core.cluster):
        core.negative_acknowledge(message)


def acknowledgeable(message: Message | MessageId, core: ConsumerCore) -> Message | MessageId:
    """Check a message or id that the program acknowledges, and return it.

    Raises OperationNotSupported for an id in a batch if the id lacks the batch size, and the errors
    of `known`.
    """
    if isinstance(message, Message) and message.was_delivered:
        return message
    known(message, core)
    message_id = message.message_id() if isinstance(message, Message) else message
    if message_id.batch_index() >= max(0, message_id.batch_size()):
        raise OperationNotSupported(
            f"{message_id} is in a batch of unknown size; use the id of a received message"
        )
    return message


def slices_of(
    messages: Sequence[Message | MessageId], core: ConsumerCore
) -> Sequence[Sequence[Message | MessageId]]:
    """Check a list of messages, and divide it into slices of at most ACK_IDS_MAX messages.

    The caller acknowledges one slice in each step of the event loop. Raises WrongType if `messages`
    is not a list or tuple, and the errors of `acknowledgeable` for the first message that cannot be
    acknowledged.
    """
    if not isinstance(messages, (list, tuple)):
        raise WrongType(
            f"expected Message, MessageId or a list of them, not {type(messages).__name__}"
        )
    given = [acknowledgeable(one, core) for one in messages]
    return [given[first : first + ACK_IDS_MAX] for first in range(0, len(given), ACK_IDS_MAX)]


def acknowledge_each(core: ConsumerCore, messages: Sequence[Message | MessageId]) -> None:
    for message in messages:
        acknowledge(core, message)


def check_cumulative(subscription: Subscription) -> None:
    if subscription.type in (ConsumerType.Shared, ConsumerType.KeyShared):
        raise CumulativeAcknowledgementNotAllowedError(
            f"cumulative acknowledgement is not allowed on type {subscription.type.name}",
            subscription=subscription.name,
        )
