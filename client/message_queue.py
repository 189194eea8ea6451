"""The queue between a consumer's core and the class from which the user takes messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.client.errors import PulsarException
    from magnetar.client.message import Message, MessageId

QUEUED_ERRORS_MAX: Final = 1000
"""Errors of corrupt entries that wait for the user."""


class MessageQueue(Protocol):
    """Received messages that wait for the user."""

    def put(self, messages: Sequence[Message]) -> None:
        """Append messages."""

    def put_error(self, error: PulsarException) -> None:
        """Let the next attempt to take a message raise `error`, once. Beyond QUEUED_ERRORS_MAX the
        error is dropped; the log has it."""

    generation: int
    """How often the queue was cleared."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """Put messages that the user took back at the front; drop those of older generations."""

    def clear(self) -> MessageId | None:
        """Drop all messages. Returns the last message taken since the previous `clear`, or None."""

    def fail(self, error: PulsarException) -> None:
        """End the queue: every current and later attempt to take a message raises `error`."""

    @property
    def last_taken(self) -> MessageId | None:
        """The last message taken since the previous `clear`; None: none was."""

    def __len__(self) -> int: ...


def of_generation(generation: int, messages: Sequence[Message]) -> list[Message]:
    """Return the messages of this generation; the broker redelivers the others."""
    return [message for message in messages if message.delivery.generation == generation]


class Drops:
    """Counts how often the messages of a topic were dropped from a queue of several topics."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def add(self, topic: str) -> None:
        self._times[topic] = self._times.get(topic, 0) + 1

    def fresh(self, generation: int, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that were not dropped; `generation` is that of the queue."""
        if not self._times:
            return of_generation(generation, messages)
        times = self._times
        return [
            message
            for message in messages
            if message.delivery.generation == generation + times.get(message.delivery.topic, 0)
        ]


class TopicQueue:
    """The part of a queue that belongs to one of several topics."""

    def __init__(self, topic: str, queue: DividedQueue) -> None:
        self._topic = topic
        self._queue = queue
        self.generation = 0

    def put(self, messages: Sequence[Message]) -> None:
        self._queue.put(messages)

    def put_error(self, error: PulsarException) -> None:
        self._queue.put_error(error)

    def put_back(self, messages: Sequence[Message]) -> None:
        self._queue.put_back(messages)

    def clear(self) -> MessageId | None:
        self.generation += 1
        return self._queue.drop(self._topic)

    def fail(self, error: PulsarException) -> None:
        self._queue.fail(error)

    @property
    def last_taken(self) -> MessageId | None:
        return None

    def __len__(self) -> int:
        return len(self._queue)


class DividedQueue(MessageQueue, Protocol):
    """A MessageQueue for the messages of several topics."""

    def drop(self, topic: str) -> MessageId | None:
        """Drop the messages of one topic. Messages of that topic taken before are not put back."""
