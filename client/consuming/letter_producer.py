"""The producer of a retry topic or dead-letter topic. It is created with its first letter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from magnetar.client.errors import AlreadyClosed, PulsarException

if TYPE_CHECKING:
    from magnetar.client.message import MessageId
    from magnetar.client.options import ProducerOptions
    from magnetar.protos.message import OutgoingMessage


class Sender(Protocol):
    """What is needed of a producer."""

    async def forward(self, message: OutgoingMessage) -> MessageId: ...
    async def close(self) -> None: ...
    def shut_down(self, error: PulsarException) -> None: ...


OpenProducer = Callable[["ProducerOptions"], Awaitable[Sender]]
"""Creates a producer of the client."""

Options = Callable[[], Awaitable["ProducerOptions"]]
"""Decides the topic and the name when the first letter is sent."""


class LetterProducer:
    """Sends letters to one topic. A failed creation is tried again with the next letter."""

    def __init__(self, topic: str, options: Options, open_producer: OpenProducer) -> None:
        self.topic = topic
        self._options = options
        self._open_producer = open_producer
        self._turn = asyncio.Lock()  # held: the producer is being created
        self._producer: Sender | None = None  # None: no letter was sent yet
        self._closed = False

    async def send(self, letter: OutgoingMessage) -> None:
        """Publish a letter and wait until it is stored. Raises as `Producer.send`."""
        async with self._turn:
            self._check_open()
            if self._producer is None:
                options = await self._options()
                self.topic = options.topic
                producer = await self._open_producer(options)
                try:
                    self._check_open()
                except AlreadyClosed as closed:
                    producer.shut_down(closed)
                    raise
                self._producer = producer
        await self._producer.forward(letter)

    async def close(self) -> None:
        """Close the producer. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._producer is not None:
            await self._producer.close()

    def shut_down(self, error: PulsarException) -> None:
        """Close the producer at once."""
        self._closed = True
        if self._producer is not None:
            self._producer.shut_down(error)

    def _check_open(self) -> None:
        if self._closed:
            raise AlreadyClosed("the consumer was closed", topic=self.topic)
