"""Chooses the partition of each message. The routers are machines: callers pass in the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from magnetar.client.errors import InvalidConfiguration, UnknownError
from magnetar.client.message import Delivery, Message, MessageId
from magnetar.client.options import PartitionsRoutingMode, ProducerOptions
from magnetar.client.producing.hashing import HASHES
from magnetar.protos.batch import ReceivedMessage

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from magnetar.protos.message import OutgoingMessage


class Router(Protocol):
    """Chooses the partition of each message of one producer."""

    def partition(self, message: OutgoingMessage, size: int, count: int, now: float) -> int:
        """Return the partition, from 0 to `count` - 1.

        `size`: the size of the message in bytes, as batches count it. `now`: the time in seconds.
        """


class KeyRouter:
    """Sends messages with the same key to the same partition. `without_key` routes the rest."""

    def __init__(self, hash_of: Callable[[str], int], without_key: Router) -> None:
        self._hash_of = hash_of
        self._without_key = without_key

    def partition(self, message: OutgoingMessage, size: int, count: int, now: float) -> int:
        if message.partition_key is not None:
            return self._hash_of(message.partition_key) % count
        return self._without_key.partition(message, size, count, now)


class SinglePartition:
    """Sends all messages to one partition. `number`: a random number that selects the partition."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._chosen: int | None = None  # None: no message yet

    def partition(self, _: OutgoingMessage, size: int, count: int, now: float) -> int:
        if self._chosen is None:  # the choice does not change when the topic gets more partitions
            self._chosen = self._number % count
        return self._chosen


class RoundRobin:
    """Sends one batch of messages to each partition in turn.

    1. With batching, the partition changes when a batch would be full, or when its time is over.
    2. Without batching, the partition changes with every message.
    """

    def __init__(self, number: int, messages_max: int, bytes_max: int, delay_s: float) -> None:
        """`number`: a random number that selects the first partition."""
        self._number = number
        self._messages_max = messages_max  # 1: no batching
        self._bytes_max = bytes_max
        self._delay_s = delay_s
        self._messages = 0  # sent to the current partition since its turn began
        self._bytes = 0
        self._since = 0.0

    def partition(self, _: OutgoingMessage, size: int, count: int, now: float) -> int:
        full = self._messages >= self._messages_max or self._bytes + size > self._bytes_max
        if self._messages and (full or now >= self._since + self._delay_s):
            self._number += 1
            self._messages = self._bytes = 0
        if not self._messages:
            self._since = now
        self._messages += 1
        self._bytes += size
        return self._number % count


class CustomRouter:
    """Calls the user's function `choose(message, count)`, which returns the partition."""

    def __init__(self, topic: str, choose: Callable[[Message, int], int]) -> None:
        self._choose = choose
        self._topic = topic

    def partition(self, message: OutgoingMessage, size: int, count: int, now: float) -> int:
        """Return the partition that the user's function chooses.

        Raises UnknownError, as Apache's client does, if the function fails or returns no partition.
        """
        try:
            index = int(self._choose(_shown(message, self._topic), count))
        except Exception as error:
            raise UnknownError(f"message_router failed: {error!r}", topic=self._topic) from error
        if not 0 <= index < count:
            reason = f"message_router returned partition {index}; the topic has {count}"
            raise UnknownError(reason, topic=self._topic)
        return index


def router_of(options: ProducerOptions, topic: str, random: random.Random) -> Router:
    """Return the router for a producer's options."""
    if options.message_router is not None:
        return CustomRouter(topic, options.message_router)
    number = random.getrandbits(31)
    match options.message_routing_mode:
        case PartitionsRoutingMode.CustomPartition:
            raise InvalidConfiguration("message_routing_mode CustomPartition needs message_router")
        case PartitionsRoutingMode.UseSinglePartition:
            without_key: Router = SinglePartition(number)
        case PartitionsRoutingMode.RoundRobinDistribution:
            without_key = RoundRobin(
                number,
                options.batching_max_messages if options.batching_enabled else 1,
                options.batching_max_allowed_size_in_bytes,
                options.batching_max_publish_delay_ms / 1000,
            )
    return KeyRouter(HASHES[options.hashing_scheme], without_key)


def _shown(message: OutgoingMessage, topic: str) -> Message:
    """Convert an outgoing message to the Message that the user's function gets."""
    received = ReceivedMessage(
        message.payload,
        message.properties,
        message.partition_key,
        message.partition_key_b64,
        message.ordering_key,
        message.event_time_ms,
        message.sequence_id,
        message.null_value,
        -1,
    )
    return Message(received, MessageId(), Delivery(topic, -1, "", 0, b"", 0, None, 0))
