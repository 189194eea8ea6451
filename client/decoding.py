"""Decodes each message with the schema version with which its producer wrote it.

A consumer has one decoder. The decoder fetches each version once after an attachment, and keeps a
bounded number of versions. In the asyncio client it fetches a version before `receive` returns the
message, so that `value()` never waits. In the synchronous client it fetches when the program calls
`value()`. Each message keeps the decode function of its version (`delivery.decode`), as do the
other messages of its entry: later, the version may belong to a new topic of the same name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from magnetar.client.errors import InvalidMessage, PulsarException, TopicNotFound, without_frames
from magnetar.client.schema.wire import VERSION_BYTES
from magnetar.protos.names import TopicName
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from magnetar.client.message import Message
    from magnetar.client.schema.schema import Schema, SchemaInfo

VERSIONS_MAX: Final = 1_000
"""The maximum number of schema versions that a decoder keeps, for all topics of its consumer
together. Beyond it, the decoder forgets the version that it has kept longest."""

PARSED_AT_ONCE_MAX: Final = 8 << 10
"""The maximum length in characters of a definition that the decoder parses on the client's loop. It
parses a larger definition in a thread. An Avro definition of this size takes 6 ms. One of 128 KiB,
the maximum that a broker stores, takes 100 ms."""

log = get_logger(__name__)

Key = tuple[str, bytes]


class Decoder:
    """Decodes the messages of one consumer.

    `fetch(topic, version)` asks a broker for a version. `wait`, called in the user's thread, runs a
    coroutine on the client's loop and waits for it. The asyncio client has None instead.
    """

    def __init__(
        self,
        schema: Schema,
        fetch: Callable[[str, bytes], Awaitable[SchemaInfo]],
        wait: Callable[[Coroutine[Any, Any, None]], None] | None,
    ) -> None:
        self.schema = schema
        self.generation = 0  # counts the calls of `forget` and `doubt`
        self._fetch = fetch
        self._wait = wait
        self._known: dict[Key, Callable[[Message], Any] | PulsarException] = {}
        self._forgotten = 0  # counts the calls of `forget`
        self._turn = asyncio.Lock()

    def maybe_prepare(self, message: Message) -> bool:
        """Give the message the decode function of its version if it is known. Returns whether
        `decode` needs no broker."""
        delivery = message.delivery
        if len(delivery.schema_version) != VERSION_BYTES or not self.schema.needs_writer:
            return True
        found = self._found(message)
        if found is not None and not isinstance(found, PulsarException):
            delivery.decode = found
        return found is not None

    async def prepare(self, message: Message) -> None:
        """Fetch the schema version of a message if it is not known.

        If the broker does not know the version, or the version does not fit the schema, `decode`
        raises the reason later. Logs and raises every other error of the broker.
        """
        key = _topic_of(message), message.delivery.schema_version
        async with self._turn:
            if self.maybe_prepare(message):
                return
            generation, forgotten = self.generation, self._forgotten
            found: Callable[[Message], Any] | PulsarException
            try:
                decode = await self._decode_of(await self._fetch(*key))
            except (TopicNotFound, ValueError, TypeError) as error:  # permanent
                found = InvalidMessage(f"schema version {_number(key[1])}: {error}")
            except PulsarException as error:
                log.warning("a schema was not fetched", topic=key[0], error=str(error))
                raise
            else:
                found = decode or self.schema.decode_message
            if generation == self.generation:  # if not, `found` may be of a deleted topic
                self._keep(key, found)
            if forgotten == self._forgotten and not isinstance(found, PulsarException):
                message.delivery.decode = found

    def decode(self, message: Message) -> Any:
        """Return the value of a message.

        Raises InvalidMessage if its version is unknown or does not fit the schema. Raises the
        errors of the schema's `decode` and of the broker.
        """
        if message.has_null_value() and not self.schema.reads_keys:
            return None
        version = message.delivery.schema_version
        if not version or not self.schema.needs_writer:
            return self.schema.decode_message(message)
        if len(version) != VERSION_BYTES:
            raise InvalidMessage(f"a schema version has {VERSION_BYTES} bytes, not {len(version)}")
        found = self._found(message)
        if found is None and self._wait is not None:
            self._wait(self.prepare(message))
            found = self._found(message)
        if found is None:
            number = _number(version)
            raise InvalidMessage(
                f"schema version {number} is not known any more; acknowledge the message "
                "negatively, and decode it when it is delivered again"
            )
        if isinstance(found, PulsarException):
            raise without_frames(found)
        message.delivery.decode = found
        return found(message)

    def _found(self, message: Message) -> Callable[[Message], Any] | PulsarException | None:
        delivery = message.delivery
        return delivery.decode or self._known.get((_topic_of(message), delivery.schema_version))

    async def _decode_of(self, writer: SchemaInfo) -> Callable[[Message], Any] | None:
        """Call `Schema.message_decoder_of`, in a thread if the definition is large."""
        if len(writer.schema()) <= PARSED_AT_ONCE_MAX:
            return self.schema.message_decoder_of(writer)
        return await asyncio.to_thread(self.schema.message_decoder_of, writer)

    def forget(self, topic: str | None = None) -> None:
        """Forget the versions of a deleted topic, or of all topics (`topic` None).

        A new topic of the same name, or another cluster, gives the same numbers to other schemas.
        """
        if topic is None:
            self._known.clear()
        else:
            self._drop(topic)
        self.generation += 1
        self._forgotten += 1

    def doubt(self, topic: str) -> None:
        """Fetch the versions of a topic again when its next messages arrive.

        Called at each attachment: the broker does not report whether the topic was deleted and
        created again since the previous attachment.
        """
        self._drop(topic)
        self.generation += 1

    def _keep(self, key: Key, found: Callable[[Message], Any] | PulsarException) -> None:
        if len(self._known) >= VERSIONS_MAX:
            del self._known[next(iter(self._known))]
        self._known[key] = found

    def _drop(self, topic: str) -> None:
        base = str(TopicName.parse(topic).base)
        for key in [key for key in self._known if key[0] == base]:
            del self._known[key]


def _topic_of(message: Message) -> str:
    """Return the topic that has the versions. A partition has those of its partitioned topic."""
    topic = message.delivery.topic
    if message.delivery.partition >= 0:
        return topic.rpartition("-partition-")[0]
    return topic


def _number(version: bytes) -> int:
    return int.from_bytes(version, signed=True)
