"""The queue between a consumer's core and the class from which the user takes messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from magnetar.client.message import MessageId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.client.errors import PulsarException
    from magnetar.client.ids import Key
    from magnetar.client.message import Message

QUEUED_ERRORS_MAX: Final = 1000
"""The maximum number of waiting errors of messages that the client cannot read."""


Place = tuple["Key | None", int, int]
"""The place of a stored message: ledger and entry, the index in its batch, and the batch's size.

A queue keeps the place of the last message taken, not the message: on an idle topic, the message
would hold its whole batch in memory."""


def place_of(message: Message) -> Place:
    delivery = message.delivery
    return delivery.key, message.place, delivery.batch_size


def id_at(place: Place | None) -> MessageId | None:
    """Return the id of the message at a place. `place` None: return None."""
    if place is None:
        return None
    key, index, batch_size = place
    assert key is not None  # only programs create messages without a key
    return MessageId(-1, *key, index, batch_size)


class MessageQueue(Protocol):
    """Received messages that wait for the user."""

    def put(self, messages: Sequence[Message]) -> None:
        """Append messages."""

    def put_error(self, error: PulsarException) -> None:
        """Let the next attempt to take a message raise `error` once, even if messages wait.

        If the error waited until the queue is empty, the user might acknowledge later messages
        cumulatively first. The queue drops errors beyond QUEUED_ERRORS_MAX; the log has them.
        """

    generation: int
    """A number that grows each time that the queue is cleared."""

    def remove(self, unwanted: Callable[[Message], bool]) -> list[Message]:
        """Remove and return the messages for which `unwanted` is True, in order."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """Return taken messages to the front of the queue. Drops those of older generations."""

    def clear(self) -> MessageId | None:
        """Drop all messages. Returns `last_taken`, and resets it to None."""

    def fail(self, error: PulsarException) -> None:
        """End the queue: every current and later attempt to take a message raises `error`."""

    @property
    def last_taken(self) -> MessageId | None:
        """The id of the last message taken since the previous `clear`. None: none was taken."""

    def __len__(self) -> int: ...


class Sources:
    """The state of each topic in a queue that several topics share."""

    def __init__(self) -> None:
        self._taken: dict[str, Place] = {}  # topic -> place of the last message that the user took
        self._generations: dict[str, int] = {}  # topic -> generation of its next messages
        self._newest = 0

    def begin(self, topic: str) -> None:
        """Accept messages of this topic, until `forget`."""
        if topic not in self._generations:
            self._generations[topic] = self._new_generation()

    def forget(self, topic: str) -> None:
        """Accept no more messages of this topic: the consumer has left it and dropped them."""
        self._generations.pop(topic, None)
        self._taken.pop(topic, None)

    def generation(self, topic: str) -> int:
        """Return the generation of messages that arrive now. 0: the topic's messages are not
        accepted."""
        return self._generations.get(topic, 0)

    def on_dropped(self, topic: str) -> MessageId | None:
        """Note that the topic's messages were dropped. Returns the id of the last message taken."""
        self._generations[topic] = self._new_generation()
        taken = self.last_taken(topic)
        self._taken.pop(topic, None)
        return taken

    def on_taken(self, message: Message) -> None:
        self._taken[message.delivery.topic] = place_of(message)

    def last_taken(self, topic: str) -> MessageId | None:
        """Return the id of the last message taken since the topic's messages were dropped.

        None: none was taken.
        """
        return id_at(self._taken.get(topic))

    def _new_generation(self) -> int:
        self._newest += 1
        return self._newest

    def current(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that arrived after the last `on_dropped` of their topic."""
        return [
            message
            for message in messages
            if message.delivery.generation == self.generation(message.delivery.topic)
        ]


class SharedQueue(MessageQueue, Protocol):
    """A MessageQueue with messages of several topics."""

    def share(self) -> Sources:
        """Begin to keep the state of each topic, and return it. Called before the first message. A
        second call returns the same object."""

    def drop(self, topic: str) -> MessageId | None:
        """Drop the messages of one topic. Returns the id of its last message taken, or None.

        When a session ends, all its topics drop their messages, one after the other. So the queue
        removes the messages at its next use, in one pass for all these topics.
        """


class SourceQueue:
    """The MessageQueue of one topic's consumer: its part of a shared queue."""

    def __init__(
        self,
        topic: str,
        shared: SharedQueue,
        sources: Sources,
        on_failed: Callable[[str, PulsarException], None],
    ) -> None:
        self._topic = topic
        self._shared = shared
        self._sources = sources
        self._on_failed = on_failed
        sources.begin(topic)
        self.put = shared.put
        self.put_error = shared.put_error
        self.put_back = shared.put_back

    @property
    def generation(self) -> int:
        return self._sources.generation(self._topic)

    @generation.setter
    def generation(self, _: int) -> None:
        raise AttributeError("the queue counts its generations itself")

    def clear(self) -> MessageId | None:
        return self._shared.drop(self._topic)

    def remove(self, unwanted: Callable[[Message], bool]) -> list[Message]:
        """Remove messages of this topic only: `unwanted` may be wrong for other topics."""
        return self._shared.remove(lambda one: one.delivery.topic == self._topic and unwanted(one))

    def fail(self, error: PulsarException) -> None:
        """Report the end of the topic's consumer. The shared queue continues."""
        self._on_failed(self._topic, error)

    @property
    def last_taken(self) -> MessageId | None:
        return self._sources.last_taken(self._topic)

    def __len__(self) -> int:
        """Return the number of messages of all topics."""
        return len(self._shared)


def of_generation(generation: int, messages: Sequence[Message]) -> list[Message]:
    """Return the messages of this generation; the broker redelivers the others."""
    return [message for message in messages if message.delivery.generation == generation]
