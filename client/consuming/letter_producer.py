"""The producer of a retry topic or dead-letter topic. The first letter creates the producer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from magnetar.client.errors import AlreadyClosed, PulsarException, ends_producer

if TYPE_CHECKING:
    from magnetar.client.consuming.letter_schemas import LetterSchemas
    from magnetar.client.message import Message, MessageId
    from magnetar.client.options import ProducerOptions
    from magnetar.protos import pulsar_pb2 as pb
    from magnetar.protos.message import OutgoingMessage


class Sender(Protocol):
    """The methods that a letter producer uses of a producer."""

    async def forward(self, message: OutgoingMessage) -> MessageId: ...
    async def schema_version_of(self, schema: pb.Schema) -> bytes: ...
    async def close(self) -> None: ...
    def shut_down(self, error: PulsarException) -> None: ...


OpenProducer = Callable[["ProducerOptions"], Awaitable[Sender]]
"""Creates a producer of the client."""

Options = Callable[[], Awaitable["ProducerOptions"]]
"""Decides the topic and the name each time that a letter creates a producer."""


class LetterProducer:
    """Sends letters to one topic.

    The next letter creates a new producer if the creation failed, or if an error ended the
    producer. An example: the topic was terminated. After its deletion, the next letter can create
    it again.
    """

    def __init__(
        self, topic: str, options: Options, open_producer: OpenProducer, schemas: LetterSchemas
    ) -> None:
        self.topic = topic
        self._schemas = schemas
        self._options = options
        self._open_producer = open_producer
        self._turn = asyncio.Lock()  # held: the producer is being created
        self._producer: Sender | None = None  # None: the next letter creates it
        self._closed = False

    async def send(self, letter: OutgoingMessage, original: Message) -> None:
        """Publish a letter with the schema of its original, and wait until the letter is stored.

        Raises the errors of `Producer.send`, and IncompatibleSchema if the topic does not admit the
        schema.
        """
        async with self._turn:
            self._check_open()
            if self._producer is None:
                schema = await self._schemas.first(original)
                options = replace(await self._options(), schema=schema)
                self.topic = options.topic
                producer = await self._open_producer(options)
                try:
                    self._check_open()
                except AlreadyClosed as closed:
                    producer.shut_down(closed)
                    raise
                self._producer = producer
            producer = self._producer
        register = producer.schema_version_of
        try:
            letter.schema_version = await self._schemas.version(original, register)
            await producer.forward(letter)
        except PulsarException as error:
            if ends_producer(error):
                self._on_ended(producer, error)
            raise

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

    def _on_ended(self, producer: Sender, error: PulsarException) -> None:
        if self._producer is producer:
            self._producer = None
            self._schemas.forget()  # if the topic was deleted, its versions were deleted, too
            producer.shut_down(error)
