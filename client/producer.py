"""The asyncio producer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from magnetar.client.callbacks import SendCallback, report
from magnetar.client.errors import AlreadyClosed, Interrupted, without_frames
from magnetar.client.interceptors import ProducerHooks
from magnetar.client.producing.outgoing import (
    MESSAGE_OVERHEAD_BYTES,
    PendingLimit,
    message_maker,
    outgoing_message,
    send_async_parameters,
)
from magnetar.client.rates import Rates
from magnetar.client.signature import sending

if TYPE_CHECKING:
    from magnetar.client.errors import PulsarException
    from magnetar.client.message import MessageId
    from magnetar.client.options import ProducerOptions
    from magnetar.client.producing.batching import Done
    from magnetar.client.producing.partitions import ProducerCore
    from magnetar.client.producing.statistics import ProducerStatistics
    from magnetar.protos import pulsar_pb2 as pb
    from magnetar.protos.message import OutgoingMessage
    from magnetar.runtime.clock import Clock


class Producer:
    """A producer publishes messages on a topic. `Client.create_producer` creates it."""

    def __init__(self, publisher: ProducerCore, options: ProducerOptions, clock: Clock) -> None:
        publisher.producer = self
        self._publisher = publisher
        self._message = message_maker(options.schema, clock)
        self._blocks = options.block_if_queue_full
        self._limit = PendingLimit(
            publisher.pending_messages_max, publisher.pending_bytes_max, topic=publisher.topic
        )
        # Sends over the limit, in FIFO order. An OrderedDict removes a cancelled send in constant
        # time.
        self._waiting: OrderedDict[_Waiting, None] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self._let_in_is_due = False
        self._seal_is_due = False
        self._closed = False
        self._rates = Rates(self._loop.time())
        self._hooks = ProducerHooks(options.interceptors) if options.interceptors else None

    @sending(outgoing_message)
    async def send(self, *args: Any, **kwargs: Any) -> MessageId:
        """Publish a message and wait until it is stored. Returns its id.

        Messages that several tasks send in the same turn of the loop can share a batch.

        - `content`: the payload, or the value that the schema encodes. None: no value. On a
          compacted topic, a message without a value deletes its key.
        - `properties`: texts that the application attaches to the message.
        - `partition_key`: the key of the message.
        - `ordering_key`: the key that Key_Shared subscriptions use instead of `partition_key`.
        - `sequence_id`: the number of the message. None: the producer chooses the number.
        - `event_timestamp`: the application's own time, in milliseconds since 1970.
        - `deliver_at`: the time when Shared and Key_Shared subscriptions deliver the message, in
          milliseconds since 1970. Other subscriptions deliver it at once.
        - `deliver_after`: the delay from this call to the delivery, a `timedelta`.

        At the limit of pending messages, the call waits if the producer has `block_if_queue_full`.
        Otherwise it raises ProducerQueueIsFull or MemoryBufferIsFull. Raises Timeout if no receipt
        arrives within `send_timeout_millis`; the message may still be stored. Raises MessageTooBig,
        InvalidMessage, and AlreadyClosed if the producer is closed. Cancelling the call does not
        take back a message that the producer has accepted.
        """
        outcome: asyncio.Future[MessageId] = self._loop.create_future()
        done: Done = partial(_settle, outcome)
        if self._hooks is None:
            message, size = self._message(*args, **kwargs)
        else:
            message, size, done = self._hooks.prepared(self, self._message, done, *args, **kwargs)
        return await self._send(message, size, done, outcome)

    async def forward(self, message: OutgoingMessage) -> MessageId:
        """Publish a message that the client made, as `send` does. Internal to the client."""
        outcome: asyncio.Future[MessageId] = self._loop.create_future()
        size = len(message.payload) + MESSAGE_OVERHEAD_BYTES
        return await self._send(message, size, partial(_settle, outcome), outcome)

    async def schema_version_of(self, schema: pb.Schema) -> bytes:
        """Return the version of a schema on the topic. Internal to the client."""
        return await self._publisher.schema_version_of(schema)

    def shut_down(self, error: PulsarException) -> None:
        """Close the producer at once. Internal to the client."""
        self._publisher.shut_down(error)

    async def _send(
        self, message: OutgoingMessage, size: int, done: Done, outcome: asyncio.Future[MessageId]
    ) -> MessageId:
        """Publish a message when the limits admit it. `done` settles `outcome`."""
        if self._maybe_reserve(size):
            self._submit(message, size, done)
            return await outcome
        if not self._blocks:
            done(self._limit.refusal(), None)
            return await outcome
        waiting = _Waiting(message, size, done)
        self._waiting[waiting] = None
        try:
            return await outcome
        except asyncio.CancelledError:
            if waiting in self._waiting:
                del self._waiting[waiting]
                waiting.done(Interrupted("the call was cancelled", topic=self.topic()), None)
                self.on_burst_end()  # the next message may fit where this one did not
            raise

    @sending(send_async_parameters)
    def send_async(
        self, content: bytes | None, callback: SendCallback | None, *args: Any, **kwargs: Any
    ) -> None:
        """Publish a message without waiting, and call `callback(result, message_id)` later.

        The parameters are those of `send`. If the limit of pending messages is reached, the client
        calls the callback at once, with ProducerQueueIsFull or MemoryBufferIsFull. It does so also
        if other sends wait at the limit. Raises InvalidMessage if the message is invalid. Apache's
        asyncio client does not have this method; its synchronous client does.
        """
        done: Done = partial(report, callback)
        if self._hooks is None:
            message, size = self._message(content, *args, **kwargs)
        else:
            make = self._message
            message, size, done = self._hooks.prepared(self, make, done, content, *args, **kwargs)
        if self._maybe_reserve(size):
            self._publisher.submit(message, size, done)
        else:
            done(self._limit.refusal(), None)

    async def flush(self) -> None:
        """Send all pending messages and wait until they are stored.

        Raises the first error of a message that failed, and AlreadyClosed if the producer is
        closed. If an error such as ProducerFenced has ended the producer, raises this error.
        """
        await self._publisher.flush()

    async def close(self) -> None:
        """Wait for the receipts of all pending messages, and close the producer.

        Raises Timeout if receipts or the broker's answer are missing after
        `operation_timeout_seconds`; the producer is then closed nevertheless. Raises AlreadyClosed
        if the producer was closed before.
        """
        if self._closed:
            raise AlreadyClosed("the producer was closed", topic=self.topic())
        self._closed = True
        try:
            await self._publisher.close()
        finally:
            if self._hooks is not None:
                self._hooks.close()

    def get_stats(self) -> ProducerStatistics:
        """Return the producer's counts since its creation, and its rates."""
        stats = self._publisher.statistics()
        stats.messages_per_second, stats.bytes_per_second = self._rates.rates(
            stats.messages_sent, stats.bytes_sent, self._loop.time()
        )
        return stats

    def topic(self) -> str:
        """Return the full name of the topic."""
        return self._publisher.topic

    def producer_name(self) -> str:
        """Return the name given in `producer_name`, or the name that the broker chose."""
        return self._publisher.name

    def last_sequence_id(self) -> int:
        """Return the sequence id of the last stored message. Before the first one, return
        `initial_sequence_id`, or the last id that the broker has stored for the producer's name, or
        -1."""
        return self._publisher.last_sequence_id

    def is_connected(self) -> bool:
        """Return whether the producer is attached now; with partitions, to each that it uses."""
        return self._publisher.is_attached

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._closed:
            await self.close()

    # Called by the publisher

    def on_released(self, messages: int, message_bytes: int) -> None:
        """Release messages from the limit: their outcome is known. Internal to the client."""
        self._limit.release(messages, message_bytes)

    def on_burst_end(self) -> None:
        """Admit waiting sends in the next turn of the loop. Internal to the client.

        The call admits none itself, because the publisher may be sending earlier messages.
        """
        if self._waiting and not self._let_in_is_due:
            self._let_in_is_due = True
            self._loop.call_soon(self._let_in)

    def _let_in(self) -> None:
        self._let_in_is_due = False
        while self._waiting:
            waiting = next(iter(self._waiting))
            if not self._limit.maybe_reserve(waiting.size):
                return
            del self._waiting[waiting]
            self._submit(waiting.message, waiting.size, waiting.done)

    def _maybe_reserve(self, size: int) -> bool:
        """Reserve `size` bytes if the limit allows it and no other send waits.

        A small message must not overtake a large one.
        """
        return not self._waiting and self._limit.maybe_reserve(size)

    def _submit(self, message: OutgoingMessage, size: int, done: Done) -> None:
        self._publisher.submit(message, size, done)
        if not self._seal_is_due:
            self._seal_is_due = True
            self._loop.call_soon(self._seal)

    def _seal(self) -> None:
        self._seal_is_due = False
        self._publisher.seal()


@dataclass(eq=False, slots=True)
class _Waiting:
    """A message that waits because the limit is reached."""

    message: OutgoingMessage
    size: int
    done: Done


def _settle(
    outcome: asyncio.Future[MessageId],
    error: PulsarException | None,
    message_id: MessageId | None,
) -> None:
    if outcome.done():  # the call was cancelled
        return
    if error is not None:
        outcome.set_exception(without_frames(error))
    else:
        assert message_id is not None
        outcome.set_result(message_id)
