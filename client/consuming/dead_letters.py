"""Moves messages to the dead-letter topic after too many redeliveries.

Theory of operation. The broker counts the redeliveries of an entry. A delivery with the count
`max_redeliver_count` is the last one that the program sees: its messages become candidates. If the
program asks for a redelivery, or does not acknowledge in time, the client publishes the messages on
the dead-letter topic. Then the client acknowledges the messages. A crash in between leads to a
duplicate letter, never to a loss. The client moves a delivery with a higher count at once: the
consumer that received the last delivery disconnected before it acknowledged, or forgot the
candidates.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.client.consuming.letters import (
    letter,
    letter_properties,
)
from magnetar.client.errors import PulsarException
from magnetar.client.guard import Guarded, guarded
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

    from magnetar.client.consuming.letter_producer import LetterProducer
    from magnetar.client.environment import Parts
    from magnetar.client.ids import Key
    from magnetar.client.message import Message

log = get_logger(__name__)

CANDIDATES_MAX: Final = 10_000
"""Entries whose messages are kept for the dead-letter topic. Beyond this limit, the client forgets
the oldest entry: the broker redelivers the entry once more, and the client moves it on arrival."""

CANDIDATE_BYTES_MAX: Final = 64 << 20
"""Payload bytes of the candidates. Beyond this limit, the client forgets the oldest entry, too."""

MOVING_MAX: Final = 10_000
"""Entries that wait for their publication. Beyond this limit an entry is not kept: the client asks
for it again after the redelivery delay."""

MOVING_BYTES_MAX: Final = 64 << 20
"""Payload bytes of the entries that wait for their publication. Beyond this limit an entry is not
kept either. A single entry may exceed the limit."""


class Candidates:
    """A machine: the messages of entries at their last delivery.

    1. The kept entries are within both limits; a single entry may exceed the bytes.
    """

    def __init__(self) -> None:
        self._messages: dict[Key, Sequence[Message]] = {}
        self._bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._messages

    def add(self, key: Key, messages: Sequence[Message]) -> None:
        self.discard(key)
        self._messages[key] = messages
        self._bytes += _size(messages)
        while len(self._messages) > CANDIDATES_MAX or (
            self._bytes > CANDIDATE_BYTES_MAX and len(self._messages) > 1
        ):
            self.discard(next(iter(self._messages)))

    def discard(self, key: Key) -> Sequence[Message]:
        """Remove and return the messages of an entry; none if it is not kept."""
        messages = self._messages.pop(key, ())
        self._bytes -= _size(messages)
        return messages

    def clear(self) -> None:
        self._messages.clear()
        self._bytes = 0

    def check(self) -> None:
        assert len(self._messages) <= CANDIDATES_MAX
        assert self._bytes == sum(_size(messages) for messages in self._messages.values())
        assert self._bytes <= CANDIDATE_BYTES_MAX or len(self._messages) == 1


def _size(messages: Sequence[Message]) -> int:
    return sum([message.payload_bytes for message in messages])


class OwningSubscriber(Guarded, Protocol):
    """The consumer whose messages are moved."""

    def on_dead_lettered(self, messages: Sequence[Message]) -> None:
        """Acknowledge the messages: they are stored on the dead-letter topic."""

    def on_dead_letter_failed(self, key: Key) -> None:
        """Request the entry again after the redelivery delay: it could not be moved now."""

    def unacknowledged(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that the program has not acknowledged."""


class DeadLetters:
    """Publishes the dead letters of one consumer, one entry after the other.

    A task runs only while there is something to publish.
    """

    def __init__(
        self,
        max_redeliver_count: int,
        producer: LetterProducer,
        owner: OwningSubscriber,
        parts: Parts,
    ) -> None:
        self.max_redeliver_count = max_redeliver_count
        self._producer = producer
        self._owner = owner
        self._parts = parts
        self._candidates = Candidates()
        self._moving: dict[Key, Sequence[Message]] = {}
        self._moving_bytes = 0
        self._order: deque[Key] = deque()
        self._task: asyncio.Task[None] | None = None  # None: nothing to publish
        self.moved = 0  # messages

    def on_delivered(self, key: Key, redelivery_count: int, messages: Sequence[Message]) -> bool:
        """Keep or move the messages of a delivery that reached the maximal count.

        Returns whether the program gets the messages.
        """
        if key in self._moving:
            return False  # redelivered while it is moved
        if redelivery_count < self.max_redeliver_count or not messages:
            self._candidates.discard(key)
            return True
        if redelivery_count == self.max_redeliver_count:
            self._candidates.add(key, messages)
            return True
        self._move(key, messages)
        return False

    def on_acknowledged(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._candidates.discard(key)

    def maybe_move(self, key: Key) -> bool:
        """Move an entry whose redelivery is due. Returns False if the entry is no candidate.

        After False, the caller requests the redelivery.
        """
        if key in self._moving:
            return True
        messages = self._candidates.discard(key)
        if messages:
            self._move(key, messages)
        return bool(messages)

    def on_detached(self) -> None:
        """Forget the candidates: the broker redelivers them. The publication continues."""
        self._candidates.clear()

    def shut_down(self) -> None:
        """End at once. Entries that were not moved are redelivered to another consumer."""
        if self._task is not None:
            self._task.cancel()
        self._order.clear()
        self._moving.clear()
        self._moving_bytes = 0

    def _move(self, key: Key, messages: Sequence[Message]) -> None:
        size = _size(messages)
        if len(self._moving) >= MOVING_MAX or (
            self._moving and self._moving_bytes + size > MOVING_BYTES_MAX
        ):
            self._owner.on_dead_letter_failed(key)
            return
        self._moving[key] = messages
        self._moving_bytes += size
        self._order.append(key)
        if self._task is None:
            work = guarded(self._owner, self._run)
            self._task = self._parts.scope.start(work, "dead letters")

    async def _run(self) -> None:
        try:
            while self._order:
                key = self._order[0]
                messages = self._moving[key]
                left = await self._publish(self._owner.unacknowledged(messages))
                self._order.popleft()
                self._moving_bytes -= _size(self._moving.pop(key))
                if left:
                    self._candidates.add(key, left)
                # A seek may have undone the acknowledgement of a message that was moved.
                if left or self._owner.unacknowledged(messages):
                    self._owner.on_dead_letter_failed(key)
        finally:
            self._task = None

    async def _publish(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Publish the messages of an entry, and let the owner acknowledge each message when it is
        stored. Returns the messages from the first failure on."""
        for index, message in enumerate(messages):
            try:
                await self._producer.send(letter(message, letter_properties(message)), message)
            except PulsarException as error:
                log.error(
                    "a message could not be moved to the dead-letter topic; the consumer tries "
                    "again after the redelivery delay",
                    message=str(message.message_id()),
                    topic=self._producer.topic,
                    error=str(error),
                )
                return messages[index:]
            self.moved += 1
            self._owner.on_dead_lettered([message])
        return ()
