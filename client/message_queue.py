"""The seam between a consumer's core and the face from which the user takes messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.client.errors import PulsarException
    from magnetar.client.message import Message, MessageId


class MessageQueue(Protocol):
    """Where received messages wait for the user. It belongs to the face."""

    def put(self, messages: Sequence[Message]) -> None: ...

    generation: int
    """How often it was cleared."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """They were taken, and are to be taken again before the others; those that a `clear` would
        have dropped are."""

    def clear(self) -> MessageId | None:
        """Drop what waits; gives the last that was taken since the last time. None: none was."""

    def fail(self, error: PulsarException) -> None:
        """No more will come: who waits, and whoever comes later, is told `error`."""

    @property
    def last_taken(self) -> MessageId | None:
        """Since the queue was cleared last. None: none was."""

    def __len__(self) -> int: ...


def of_generation(generation: int, messages: Sequence[Message]) -> list[Message]:
    """Those that came since the queue was cleared for the last time: others come again."""
    return [message for message in messages if message.delivery.generation == generation]
