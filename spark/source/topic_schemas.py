"""The schemas of topics, for `valueFormat` `auto`.

The newest version of a schema gives the type of the column. An executor decodes each message with
the version with which the message was written.

Fields are matched by name, as in the rules of Avro. A field that a message lacks is null. A field
that the column lacks is left out. The driver asks for the newest versions once, in `load()`. An
executor process asks for each version that it meets, once for each read and ledger. If a topic is
deleted and created again, a version number may name another schema. The new topic has other
ledgers, so the process asks again. The process parses a schema once for all topics that have it
under the same version number.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql.types import BinaryType, StringType

from magnetar.client.asyncio import Client
from magnetar.client.environment import Environment
from magnetar.client.errors import PulsarException, Timeout, TopicNotFound, is_retriable
from magnetar.client.schema.schema import SchemaType
from magnetar.client.schema.wire import VERSION_BYTES
from magnetar.protos.names import TopicName
from magnetar.spark.avro import avro_decoder, parse_avro_schema
from magnetar.spark.errors import InvalidOption, ReadRefused, ReadStalled
from magnetar.spark.primitives import PRIMITIVES, primitive_decoder
from magnetar.spark.protobuf import parse_protobuf_schema, protobuf_decoder
from magnetar.spark.source.ddl import require_supported
from magnetar.spark.source.topic_view import TopicView
from magnetar.spark.values import json_decoder, text_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa
    from pyspark.sql.types import DataType

    from magnetar.client.schema.schema import SchemaInfo
    from magnetar.spark.source.options import ReadOptions

    Decode = Callable[[pa.Array], pa.Array]
    Content = tuple[bytes, SchemaType | None, bytes]  # version, type, digest; None: no schema

K = TypeVar("K")
V = TypeVar("V")

TOPICS_MAX: Final = 1_000
"""Topics whose newest schemas `load()` asks for. Each is a call of some milliseconds."""

ANSWERS_MAX: Final = 20_000
"""Answers that a process keeps, one for each read, ledger and version: some 300 bytes each. Beyond
this number it forgets the least recently used one, and asks again if it needs that one."""

SCHEMAS_MAX: Final = 1_000
"""Parsed schemas that a process keeps. Beyond this number it forgets the least recently used one,
and asks again if it needs that one."""

ASKED_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Writer:
    """The decoding of the messages of one version of a schema."""

    spark: DataType
    decoder: Callable[[pa.DataType], Decode | None]  # None: the bytes are the value


BYTES: Final = Writer(BinaryType(), lambda kind: None)


def newest_type(options: ReadOptions) -> DataType:
    """The type of the values of all topics. Raises InvalidOption if topics differ, or if Spark has
    no type for a schema. Raises TopicNotFound, ReadRefused and ReadStalled, too."""
    view = TopicView(options)
    view.discover()
    topics = sorted({str(TopicName.parse(it).base) for it in view.topics})
    if len(topics) > TOPICS_MAX:
        reason = f"auto: there are {len(topics)} topics, more than {TOPICS_MAX}"
        raise InvalidOption("valueFormat", reason)
    infos = _asked(options, [(topic, b"") for topic in topics])
    found: dict[str, DataType] = {}
    for topic, info in zip(topics, infos, strict=True):
        try:
            found[topic] = BYTES.spark if info is None else writer_of(info).spark
        except ValueError as error:
            raise InvalidOption("valueFormat", f"auto: {topic}: {error}") from None
    other = next((it for it in topics if found[it] != found[topics[0]]), None)
    if other is not None:
        shown = ", ".join(f"{it} has {found[it].simpleString()[:200]}" for it in (topics[0], other))
        raise InvalidOption("valueFormat", f"auto: topics have different schemas: {shown}")
    return found[topics[0]] if topics else BYTES.spark


class Versions:
    """Decodes the values of rows by the versions of their topic's schema. For one task."""

    def __init__(self, options: ReadOptions, kind: pa.DataType) -> None:
        """`kind`: the type of the column."""
        self._options = options
        self._kind = kind
        self._decoders: dict[tuple[str, bytes], Decode | None] = {}

    def decoder(self, topic: str, ledger: int, version: bytes | None) -> Decode | None:
        """The decoder of a version. None: the bytes are the value. A message without a version was
        written without a schema. `ledger` distinguishes the topic from earlier ones of its name.

        Raises ValueError if no decoder exists. Raises ReadRefused and ReadStalled, too.
        """
        key = str(TopicName.parse(topic).base), version or b""
        if key not in self._decoders:
            self._decoders[key] = _guarded(_writer(self._options, *key, ledger), self._kind)
        return self._decoders[key]


def writer_of(info: SchemaInfo) -> Writer:
    """The decoding of the values of a schema. Raises ValueError if Spark has no type for it."""
    kind = info.schema_type()
    match kind:
        case SchemaType.NONE | SchemaType.BYTES:
            return BYTES
        case SchemaType.STRING:
            return Writer(StringType(), lambda _: text_decoder())
        case SchemaType.AVRO:
            avro = parse_avro_schema(info.schema())
            return Writer(avro.spark, lambda kind: avro_decoder(avro, kind))
        case SchemaType.JSON:
            spark = parse_avro_schema(info.schema(), logical=False).spark
            require_supported(spark)
            return Writer(spark, json_decoder)
        case SchemaType.PROTOBUF_NATIVE:
            protobuf = parse_protobuf_schema(info.schema())
            return Writer(protobuf.spark, lambda kind: protobuf_decoder(protobuf, kind))
    name = kind.name.lower()
    if name not in PRIMITIVES:
        raise ValueError(f"a schema of type {kind.name} needs another valueFormat")
    return Writer(PRIMITIVES[name].spark, lambda kind: primitive_decoder(name, kind))


def _guarded(writer: Writer, kind: pa.DataType) -> Decode | None:
    """The decoder of a writer; None: the bytes are the value.

    If the types differ too much, Arrow raises several kinds of errors. They become ValueError.
    """
    reason = f"the message's schema, {writer.spark.simpleString()[:100]}, does not fit the column"
    try:
        decode = writer.decoder(kind)
    except (NotImplementedError, AttributeError, TypeError):
        raise ValueError(reason) from None
    if decode is None:
        return None

    def guarded(values: pa.Array) -> pa.Array:
        try:
            return decode(values)
        except (NotImplementedError, AttributeError, TypeError):
            raise ValueError(reason) from None

    return guarded


# Mechanics

# The state of this process. Spark forks its workers before they load this module, so each worker
# has a state of its own.

_answers: OrderedDict[tuple[object, ...], Content] = OrderedDict()  # the last used is the last
_writers: OrderedDict[Content, Writer | str] = OrderedDict()  # str: why there is no Writer
_lock = threading.Lock()


def _writer(options: ReadOptions, topic: str, version: bytes, ledger: int) -> Writer:
    """The decoding of a version. Raises ValueError, ReadRefused, ReadStalled."""
    if not version:
        return BYTES
    if len(version) != VERSION_BYTES:
        raise ValueError(f"a schema version has {VERSION_BYTES} bytes, not {len(version)}")
    read = _shared((options.read_id, options.access, options.brokers))
    key = read, sys.intern(topic), version, ledger
    with _lock:
        content = _answers.get(key)
        found = None if content is None else _writers.get(content)
        if content is None or found is None:
            [info] = _asked(options, [(topic, version)])
            content = _content(version, info)
            found = _writers.get(content) or _found(version, info)
        _keep(_answers, key, content, ANSWERS_MAX)
        _keep(_writers, content, found, SCHEMAS_MAX)
    if isinstance(found, str):
        raise ValueError(found)
    return found


@lru_cache(maxsize=16)
def _shared(read: tuple[object, ...]) -> tuple[object, ...]:
    """The same object for equal values: each task has options of its own."""
    return read


def _keep(kept: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """Add an item, or make it the last used one."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > limit:
        kept.popitem(last=False)


def _content(version: bytes, info: SchemaInfo | None) -> Content:
    if info is None:
        return version, None, b""
    return version, info.schema_type(), hashlib.sha256(info.data()).digest()


def _found(version: bytes, info: SchemaInfo | None) -> Writer | str:
    number = int.from_bytes(version, "big")
    if info is None:
        return f"the topic has no version {number} of a schema"
    try:
        return writer_of(info)
    except ValueError as error:
        return f"version {number} of the schema: {error}"


def _asked(options: ReadOptions, wanted: Sequence[tuple[str, bytes]]) -> list[SchemaInfo | None]:
    """Ask for versions (b"": the newest one). None: the version does not exist. Blocks. Raises
    ReadRefused, ReadStalled."""

    async def ask() -> list[SchemaInfo | None]:
        timeout_s = max(1, int(options.read_timeout_s))
        room = asyncio.Semaphore(ASKED_AT_ONCE)

        async def one(topic: str, version: bytes) -> SchemaInfo | None:
            async with room:
                try:
                    return await client.schema_of(topic, version)
                except TopicNotFound:
                    return None
                except PulsarException as error:
                    if isinstance(error, Timeout) or is_retriable(error):
                        raise ReadStalled(topic, options.read_timeout_s, str(error)) from None
                    raise ReadRefused(topic, -1, -1, str(error)) from None

        client = Client.in_environment(
            options.access.client_options(options.service_url, operation_timeout_s=timeout_s),
            Environment(),
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*it)) for it in wanted]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await client.close()
        return [task.result() for task in tasks]

    return asyncio.run(ask())
