"""The schema of a retry letter or dead letter: the schema with which its original was written.

As with Apache's Java client, a consumer with a schema passes the schema of each message on to its
letters. The client registers the definition on the letters' topic, where its version can have
another number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from magnetar.client.asking import asking
from magnetar.client.errors import TopicNotFound
from magnetar.client.schema.schema import Schema
from magnetar.client.schema.wire import VERSION_BYTES, schema_info
from magnetar.protos.names import TopicName
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.client.decoding import Decoder
    from magnetar.client.environment import Parts
    from magnetar.client.message import Message
    from magnetar.client.schema.schema import SchemaInfo
    from magnetar.protos import pulsar_pb2 as pb

VERSIONS_MAX: Final = 1_000
"""The number of schema versions that one consumer remembers. Beyond this number the client forgets
the oldest version, and asks for it again when a letter needs it."""

log = get_logger(__name__)

Key = tuple[str, bytes]


class StoredSchema(Schema):
    """A schema as the broker stores it, for a producer whose payloads are encoded already."""

    def __init__(self, info: SchemaInfo) -> None:
        super().__init__(bytes, info.schema_type(), None, info.name())
        self._schema_info = info

    def encode(self, obj: Any) -> bytes:
        assert isinstance(obj, bytes)
        return obj


class LetterSchemas:
    """Finds the schema of each original, and its version on the topic of the letters."""

    def __init__(self, parts: Parts, decoder: Decoder | None) -> None:
        """`decoder`: the consumer's decoder. None: the consumer has no schema."""
        self._parts = parts
        self._decoder = decoder
        self._versions: dict[Key, bytes] = {}
        # The decoder's generation that `_versions` belongs to. In another generation, the same
        # version number may mean another schema.
        self._generation = 0

    async def first(self, original: Message) -> StoredSchema | None:
        """Return the schema for the producer of the letters. None: the producer has no schema.

        Raises the errors of `asking`.
        """
        key = self._key_of(original)
        found = None if key is None else await self._definition(key)
        return None if found is None else StoredSchema(schema_info(found))

    async def version(
        self, original: Message, register: Callable[[pb.Schema], Awaitable[bytes]]
    ) -> bytes:
        """Return the schema version that the letter carries. b"": the letter carries no version.

        `register` returns the version of a definition on the letters' topic. Raises the errors of
        `register` and of `asking`.
        """
        key = self._key_of(original)
        if key is None:
            return b""
        versions = self._versions  # it may be replaced during the awaits
        known = versions.get(key)
        if known is not None:
            return known
        found = await self._definition(key)
        if found is None:
            return b""
        version = await register(found)
        if len(versions) >= VERSIONS_MAX:
            del versions[next(iter(versions))]
        versions[key] = version
        return version

    def forget(self) -> None:
        """Forget the versions: another topic may have the name of the letters' topic now."""
        self._versions = {}

    async def _definition(self, key: Key) -> pb.Schema | None:
        """Return the definition of a version. None: the broker says that it does not exist."""
        topic, version = key
        try:
            return await asking(
                lambda: self._parts.lookup.schema(topic, version), self._parts, topic
            )
        except TopicNotFound as error:
            log.warning(
                "a letter has no schema: the schema of its original is unknown",
                topic=topic,
                version=int.from_bytes(version, signed=True),
                error=str(error),
            )
            return None

    def _key_of(self, original: Message) -> Key | None:
        """Return topic and version of the original's schema. None: the letter needs no schema,
        because the consumer has no schema or the original has no schema version."""
        delivery = original.delivery
        if self._decoder is None or len(delivery.schema_version) != VERSION_BYTES:
            return None
        if self._decoder.generation != self._generation:
            self._generation = self._decoder.generation
            self._versions = {}
        return str(TopicName.parse(delivery.topic).base), delivery.schema_version
