"""The asyncio producer."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from magnetar.client.callbacks import SendCallback, report
from magnetar.client.producing.outgoing import (
    PENDING_BYTES_MAX,
    Room,
    outgoing_message,
    send_async_parameters,
)
from magnetar.client.signature import sending

if TYPE_CHECKING:
    from magnetar.client.errors import PulsarException
    from magnetar.client.message import MessageId
    from magnetar.client.options import ProducerOptions
    from magnetar.client.producing.publisher import Publisher
    from magnetar.protos.message import OutgoingMessage
    from magnetar.runtime.clock import Clock


class Producer:
    """Publishes messages on a topic. Made by `Client.create_producer`."""

    def __init__(self, publisher: Publisher, options: ProducerOptions, clock: Clock) -> None:
        publisher.face = self
        self._publisher = publisher
        self._clock = clock
        self._blocks = options.block_if_queue_full
        self._room = Room(options.pending_messages_max, PENDING_BYTES_MAX, topic=publisher.topic)
        self._waiting: deque[_Waiting] = deque()  # for room, in the order of their calls
        self._loop = asyncio.get_running_loop()
        self._let_in_is_due = False
        self._seal_is_due = False

    @sending(outgoing_message)
    async def send(self, *args: Any, **kwargs: Any) -> MessageId:
        """Publish a message and wait until it is stored; gives its id.

        Messages that several tasks send in the same turn of the loop share a batch. Cancelling does
        not take a message back that has been handed on. Raises Timeout (indefinite), MessageTooBig,
        AlreadyClosed, ...; with a full queue waits (`block_if_queue_full`) or raises
        ProducerQueueIsFull or MemoryBufferIsFull.
        """
        message, size = outgoing_message(self._clock, *args, **kwargs)
        outcome: asyncio.Future[MessageId] = self._loop.create_future()
        if self._take_room(size):
            self._submit(message, size, outcome)
            return await outcome
        if not self._blocks:
            raise self._room.refusal()
        waiting = _Waiting(message, size, outcome)
        self._waiting.append(waiting)
        try:
            return await outcome
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self.on_burst_end()  # there may be room for the next one, if not for this
            raise

    @sending(send_async_parameters)
    def send_async(
        self, content: bytes | None, callback: SendCallback | None, *args: Any, **kwargs: Any
    ) -> None:
        """Publish a message without waiting; `callback(result, message_id)` is called with the
        outcome. Never waits: with a full queue, or while others wait for room, the outcome is
        ProducerQueueIsFull or MemoryBufferIsFull at once.

        Not in Apache's asyncio client, but in its synchronous one.
        """
        message, size = outgoing_message(self._clock, content, *args, **kwargs)
        if self._take_room(size):
            self._publisher.submit(message, size, partial(report, callback))
        else:
            report(callback, self._room.refusal(), None)

    async def flush(self) -> None:
        """Send what has gathered and wait until all of it is stored. Raises the first error."""
        await self._publisher.flush()

    async def close(self) -> None:
        """Wait for the receipts of what was sent, and end. Raises Timeout if they do not come."""
        await self._publisher.close()

    def topic(self) -> str:
        """The full name of the topic."""
        return self._publisher.topic

    def producer_name(self) -> str:
        """The name that was given, or that the broker chose."""
        return self._publisher.name

    def last_sequence_id(self) -> int:
        """Of the last message that was stored; -1: none was."""
        return self._publisher.last_sequence_id

    def is_connected(self) -> bool:
        """Whether a broker has it at the moment."""
        return self._publisher.is_attached

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # What the publisher calls

    def on_released(self, messages: int, message_bytes: int) -> None:
        self._room.give(messages, message_bytes)

    def on_burst_end(self) -> None:
        """There may be room for who waits. Not in this very call: the publisher may be in the
        middle of sending what came before."""
        if self._waiting and not self._let_in_is_due:
            self._let_in_is_due = True
            self._loop.call_soon(self._let_in)

    def _let_in(self) -> None:
        self._let_in_is_due = False
        while self._waiting and self._room.maybe_take(self._waiting[0].size):
            waiting = self._waiting.popleft()
            self._submit(waiting.message, waiting.size, waiting.outcome)

    def _take_room(self, size: int) -> bool:
        """Whether there is room and nobody waits for it: a small message must not overtake a
        large one."""
        return not self._waiting and self._room.maybe_take(size)

    def _submit(
        self, message: OutgoingMessage, size: int, outcome: asyncio.Future[MessageId]
    ) -> None:
        self._publisher.submit(message, size, partial(_settle, outcome))
        if not self._seal_is_due:
            self._seal_is_due = True
            self._loop.call_soon(self._seal)

    def _seal(self) -> None:
        self._seal_is_due = False
        self._publisher.seal()


@dataclass(eq=False, slots=True)
class _Waiting:
    """A message for which there is no room yet."""

    message: OutgoingMessage
    size: int
    outcome: asyncio.Future[MessageId]


def _settle(
    outcome: asyncio.Future[MessageId],
    error: PulsarException | None,
    message_id: MessageId | None,
) -> None:
    if outcome.done():  # nobody waits any more
        return
    if error is not None:
        outcome.set_exception(error)
    else:
        assert message_id is not None
        outcome.set_result(message_id)
