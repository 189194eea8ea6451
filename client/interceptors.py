"""Interceptors: hooks of a program into sending and consuming, named as in Apache's Java client.

A program derives a class and overrides the hooks that it needs. If a hook raises an exception, the
client logs it and continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from magnetar.client.callbacks import call
from magnetar.client.message import Message, MessageId
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from magnetar.client.errors import PulsarException
    from magnetar.protos.message import OutgoingMessage

    Done = Callable[[PulsarException | None, MessageId | None], None]

log = get_logger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class MessageToSend:
    """The arguments of one `send`. A hook may change them. Units are those of `send`."""

    content: Any
    properties: Mapping[str, str] | None = None
    partition_key: str | None = None
    ordering_key: str | None = None
    sequence_id: int | None = None
    replication_clusters: list[str] | None = None
    disable_replication: bool = False
    event_timestamp: int | None = None
    deliver_at: int | None = None
    deliver_after: timedelta | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the fields as keyword arguments of `send`."""
        return {name: getattr(self, name) for name in self.__slots__}


class ProducerInterceptor:
    """Hooks of a producer. A program derives a class and overrides the hooks that it needs.

    If a hook raises an exception, the client logs it and continues. Changes that `before_send` made
    to the message before the exception remain. `producer` is the object that `create_producer`
    returned.
    """

    def before_send(self, producer: Any, message: MessageToSend) -> MessageToSend:
        """Return the message to send: `message`, which the hook may change, or another one.

        The client calls this hook in the thread or task that sends, before it checks the message.
        """
        return message

    def on_send_acknowledgement(
        self,
        producer: Any,
        message: MessageToSend,
        message_id: MessageId | None,
        error: PulsarException | None,
    ) -> None:
        """Called with the outcome of a send: `message_id` of the stored message, or `error`.

        The other argument is None. The client calls this hook on its event loop, before the
        callback of the send. At the limit of pending messages, the synchronous client calls the
        hook in the thread that sends. The hook must not wait.
        """

    def close(self) -> None:
        """Called when the producer has been closed."""


class ConsumerInterceptor:
    """Hooks of a consumer. A program derives a class and overrides the hooks that it needs.

    If a hook raises an exception, the client logs it and continues as if the hook did nothing.
    `consumer` is the object that `subscribe` returned.
    """

    def before_consume(self, consumer: Any, message: Message) -> Message:
        """Return the message that the program gets: `message` or another one.

        The client calls this hook in the thread or task that receives the message.
        """
        return message

    def on_acknowledge(self, consumer: Any, message_id: MessageId) -> None:
        """Called when the program has acknowledged a message, before the broker confirms it."""

    def on_acknowledge_cumulative(self, consumer: Any, message_id: MessageId) -> None:
        """Called when the program has acknowledged a message and all messages before it."""

    def on_negative_acknowledge(self, consumer: Any, message_id: MessageId) -> None:
        """Called when the program has negatively acknowledged a message."""

    def close(self) -> None:
        """Called when the consumer has been closed."""


class ProducerHooks:
    """Calls the interceptors of one producer, in their order."""

    def __init__(self, interceptors: Sequence[ProducerInterceptor]) -> None:
        self._interceptors = interceptors

    def before_send(self, producer: object, message: MessageToSend) -> MessageToSend:
        for one in self._interceptors:
            try:
                message = _returned(one.before_send(producer, message), MessageToSend)
            except Exception as error:
                log.error("an interceptor failed", exc_info=error, interceptor=repr(one))
        return message

    def prepared(
        self,
        producer: object,
        make: Callable[..., tuple[OutgoingMessage, int]],
        done: Done,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[OutgoingMessage, int, Done]:
        """Let the interceptors change the arguments of a send, and make the message.

        Returns the message, its size, and the function to call with the outcome instead of `done`.
        Raises the errors of `make`, and TypeError for wrong arguments.
        """
        asked = self.before_send(producer, MessageToSend(*args, **kwargs))
        message, size = make(**asked.arguments())
        return message, size, self.around(producer, asked, done)

    def around(self, producer: object, message: MessageToSend, done: Done) -> Done:
        """Return a function that passes the outcome to the interceptors, then calls `done`."""

        def tell(error: PulsarException | None, message_id: MessageId | None) -> None:
            for one in self._interceptors:
                call(one.on_send_acknowledgement, producer, message, message_id, error)
            done(error, message_id)

        return tell

    def close(self) -> None:
        for one in self._interceptors:
            call(one.close)


class ConsumerHooks:
    """Calls the interceptors of one consumer, in their order."""

    def __init__(self, interceptors: Sequence[ConsumerInterceptor]) -> None:
        self._interceptors = interceptors

    def before_consume(self, consumer: object, message: Message) -> Message:
        for one in self._interceptors:
            try:
                message = _returned(one.before_consume(consumer, message), Message)
            except Exception as error:
                log.error("an interceptor failed", exc_info=error, interceptor=repr(one))
        return message

    def on_acknowledge(
        self, consumer: object, message: Message | MessageId | Sequence[Message | MessageId]
    ) -> None:
        for given in (message,) if isinstance(message, (Message, MessageId)) else message:
            for one in self._interceptors:
                call(one.on_acknowledge, consumer, _id_of(given))

    def on_acknowledge_cumulative(self, consumer: object, message: Message | MessageId) -> None:
        for one in self._interceptors:
            call(one.on_acknowledge_cumulative, consumer, _id_of(message))

    def on_negative_acknowledge(self, consumer: object, message: Message | MessageId) -> None:
        for one in self._interceptors:
            call(one.on_negative_acknowledge, consumer, _id_of(message))

    def close(self) -> None:
        for one in self._interceptors:
            call(one.close)


def consumer_hooks(interceptors: Sequence[ConsumerInterceptor]) -> ConsumerHooks | None:
    """Return the hooks of a consumer. None: it has no interceptors."""
    return ConsumerHooks(interceptors) if interceptors else None


def _returned(result: T, kind: type[T]) -> T:
    """Return the result of a hook. Raises TypeError if the result is not a `kind`.

    For example, a hook without a `return` statement has the result None.
    """
    if not isinstance(result, kind):
        raise TypeError(f"expected {kind.__name__}, not {type(result).__name__}")
    return result


def _id_of(message: Message | MessageId) -> MessageId:
    return message.message_id() if isinstance(message, Message) else message
