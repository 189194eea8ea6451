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
