"""Converts the arguments of `send` to a message, and limits the messages that wait for receipts."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from magnetar.client.errors import (
    InvalidMessage,
    MemoryBufferIsFull,
    NotAllowedError,
    ProducerQueueIsFull,
    PulsarException,
)
from magnetar.client.schema.key_value import KeyValueSchema
from magnetar.protos.message import OutgoingMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.client.callbacks import SendCallback
    from magnetar.client.schema.schema import Schema
    from magnetar.runtime.clock import Clock

UNASSIGNED: Final = -1
"""The sequence id of a message whose sequence id the producer has not chosen yet."""

MESSAGE_OVERHEAD_BYTES: Final = 16
"""The approximate bytes of a message in a batch besides payload, keys and properties."""

_U63_MAX = 2**63 - 1
_NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})


def outgoing_message(
    clock: Clock,
    /,
    content: bytes | None,
    properties: Mapping[str, str] | None = None,
    partition_key: str | None = None,
    ordering_key: str | None = None,
    sequence_id: int | None = None,
    replication_clusters: list[str] | None = None,
    disable_replication: bool = False,
    event_timestamp: int | None = None,
    deliver_at: int | None = None,
    deliver_after: timedelta | None = None,
) -> tuple[OutgoingMessage, int]:
    """Return the message for the arguments of `send`, and its size in bytes, for the limits.

    Raises InvalidMessage, and NotAllowedError for arguments of replication.
    """
    payload = b"" if content is None else content
    if type(payload) is not bytes:
        raise InvalidMessage(f"content must be bytes or None, not {type(content).__name__}")
    message = OutgoingMessage(payload, UNASSIGNED, _NO_PROPERTIES)
    size = len(payload) + MESSAGE_OVERHEAD_BYTES
    if content is None:
        message.null_value = True
    if properties:
        if not isinstance(properties, Mapping):
            raise InvalidMessage(f"properties must be a mapping, not {type(properties).__name__}")
        message.properties = dict(properties)
        for text in (*properties.keys(), *properties.values()):
            size += len(_encoded("properties", text))
        size += len(properties) * MESSAGE_OVERHEAD_BYTES
    if partition_key:
        message.partition_key = partition_key
        size += len(_encoded("partition_key", partition_key))
    if ordering_key:
        message.ordering_key = _encoded("ordering_key", ordering_key)
        size += len(message.ordering_key)
    if sequence_id is not None:
        message.sequence_id = _checked("sequence_id", sequence_id)
    if disable_replication is not False or replication_clusters is not None:
        _check_replication(disable_replication, replication_clusters)
    if event_timestamp is not None:
        message.event_time_ms = _checked("event_timestamp", event_timestamp)
    if deliver_at is not None:
        message.deliver_at_ms = _checked("deliver_at", deliver_at)
    if deliver_after is not None:
        if not isinstance(deliver_after, timedelta):
            raise InvalidMessage("deliver_after must be a timedelta")
        delay_ms = deliver_after // timedelta(milliseconds=1)
        message.deliver_at_ms = _checked("deliver_after", clock.now_ms() + delay_ms)
    return message, size


def message_maker(
    schema: Schema | None, clock: Clock
) -> Callable[..., tuple[OutgoingMessage, int]]:
    """Return `outgoing_message` with a clock, for values of the schema."""
    if schema is None:
        return partial(outgoing_message, clock)
    if isinstance(schema, KeyValueSchema) and schema.is_separated:
        return partial(_separated_message, schema, clock)

    def encoded(content: Any, *args: Any, **kwargs: Any) -> tuple[OutgoingMessage, int]:
        payload = None if content is None else schema.encode(content)
        return outgoing_message(clock, payload, *args, **kwargs)

    return encoded


def _separated_message(
    schema: KeyValueSchema,
    clock: Clock,
    content: Any,
    properties: Mapping[str, str] | None = None,
    partition_key: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[OutgoingMessage, int]:
    """Return the message for a KeyValue. The key of the KeyValue becomes the key of the message.

    Raises InvalidMessage for a `partition_key`, and the errors of `outgoing_message` and of the
    schema.
    """
    if partition_key is not None:
        raise InvalidMessage("partition_key: with SEPARATED, the KeyValue contains this key")
    key, payload = (None, None) if content is None else schema.encode_parts(content)
    message, size = outgoing_message(clock, payload, properties, None, *args, **kwargs)
    if key is not None:
        message.partition_key = base64.b64encode(key).decode()
        message.partition_key_b64 = True
        size += len(message.partition_key)
    return message, size


def send_async_parameters(
    clock: Clock,
    /,
    content: bytes | None,
    callback: SendCallback | None,
    properties: Mapping[str, str] | None = None,
    partition_key: str | None = None,
    ordering_key: str | None = None,
    sequence_id: int | None = None,
    replication_clusters: list[str] | None = None,
    disable_replication: bool = False,
    event_timestamp: int | None = None,
    deliver_at: int | None = None,
    deliver_after: timedelta | None = None,
) -> None:
    """Declare the parameters of `send_async` for `signature.sending`: the callback comes second.

    The client never calls this function; `sending` uses its signature only.
    """


class PendingLimit:
    """A machine that limits the messages and bytes that wait for their receipts.

    1. Reserved messages and bytes are within both limits, except for a single message that is
       larger than the limit of bytes.
    """

    def __init__(self, messages_max: int, bytes_max: int, *, topic: str) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._topic = topic
        self._messages = 0
        self._bytes = 0

    def maybe_reserve(self, size: int) -> bool:
        """Reserve a place for a message of `size` bytes. Returns False if a limit is reached."""
        if self._messages >= self._messages_max or (
            self._bytes + size > self._bytes_max and self._messages
        ):
            return False
        self._messages += 1
        self._bytes += size
        return True

    def release(self, messages: int, size: int) -> None:
        """Release messages whose outcome is known."""
        self._messages -= messages
        self._bytes -= size
        assert self._messages >= 0
        assert self._bytes >= 0

    def refusal(self) -> PulsarException:
        """Return the error for the limit that is reached."""
        if self._messages >= self._messages_max:
            return ProducerQueueIsFull(self._messages_max, topic=self._topic)
        return MemoryBufferIsFull(self._bytes_max, topic=self._topic)

    def check(self) -> None:
        assert 0 <= self._messages <= self._messages_max
        assert self._bytes <= self._bytes_max or self._messages == 1
        assert self._messages or not self._bytes


def _check_replication(disable: object, clusters: object) -> None:
    if not isinstance(disable, bool | None) or not isinstance(clusters, list | None):
        raise InvalidMessage("disable_replication must be bool, and replication_clusters a list")
    if disable or clusters:
        raise NotAllowedError("replication between clusters is not supported yet")


def _encoded(name: str, text: str) -> bytes:
    """Return the text in UTF-8, its form on the wire. Raises InvalidMessage."""
    if not isinstance(text, str):
        raise InvalidMessage(f"{name} must be str, not {text!r}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"{name} {text!r} cannot be encoded as UTF-8") from None


def _checked(name: str, value: int) -> int:
    if type(value) is not int or not 0 <= value <= _U63_MAX:
        raise InvalidMessage(f"{name} must be an integer from 0 to 2^63-1, not {value!r}")
    return value
