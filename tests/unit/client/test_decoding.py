"""The decoder of a consumer: each version is fetched once, and failures keep no message back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from support import frames_of

from magnetar.client import decoding
from magnetar.client.decoding import Decoder
from magnetar.client.errors import (
    ConnectError,
    InvalidMessage,
    NotAllowedError,
    PulsarException,
    TopicNotFound,
)
from magnetar.client.message import Delivery, Message, MessageId
from magnetar.protos.batch import ReceivedMessage
from magnetar.schema import AvroSchema, JsonSchema, Record, SchemaInfo, SchemaType, String

if TYPE_CHECKING:
    from collections.abc import Callable

TOPIC = "persistent://public/default/t"


class Old(Record):
    a = String(required=True)


class New(Record):
    a = String(required=True)
    b = String(default="-", required_default=True)


def version(number: int) -> bytes:
    return number.to_bytes(8)


def message(
    value: Record, number: int | bytes | None, topic: str = TOPIC, partition: int = -1
) -> Message:
    payload = AvroSchema(type(value)).encode(value)
    wire = number if isinstance(number, bytes) else b"" if number is None else version(number)
    delivery = Delivery(topic, partition, "p", 0, wire, 0, None, 0)
    return Message(
        ReceivedMessage(payload, {}, None, False, None, 0, 0, False, -1), MessageId(), delivery
    )


class Registry:
    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.failures: list[PulsarException] = []
        self.versions: list[Any] = [Old, New]

    async def fetch(self, topic: str, wanted: bytes) -> SchemaInfo:
        self.asked.append((topic, wanted))
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop()
        found = self.versions[int.from_bytes(wanted)]
        if isinstance(found, SchemaInfo):
            return found
        return AvroSchema(found).schema_info()


async def test_a_version_is_fetched_once_for_all_partitions() -> None:
    registry = Registry()
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    messages = [message(Old(a="x"), 0, f"{TOPIC}-partition-{it}", it) for it in range(3)]
    async with asyncio.TaskGroup() as group:
        for each in messages:
            group.create_task(decoder.prepare(each))
    assert registry.asked == [(TOPIC, version(0))]
    assert [decoder.decode(it).b for it in messages] == ["-"] * 3


async def test_versions_of_a_deleted_topic_are_fetched_again() -> None:
    """A new topic of its name gives the same numbers to other schemas."""
    registry = Registry()
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    other = f"{TOPIC}2"
    for topic in (TOPIC, other):
        await decoder.prepare(message(Old(a="x"), 0, topic))
    registry.versions = [New]
    decoder.forget(f"{TOPIC}-partition-0")
    new = message(New(a="x", b="y"), 0)
    assert not decoder.maybe_prepare(new)
    await decoder.prepare(new)
    assert decoder.decode(new).b == "y"
    assert decoder.maybe_prepare(message(Old(a="x"), 0, other))
    assert len(registry.asked) == 3


async def test_a_doubted_version_is_fetched_again_for_the_next_message() -> None:
    registry = Registry()
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    old = message(Old(a="x"), 0)
    preparing = asyncio.get_running_loop().create_task(decoder.prepare(old))
    await asyncio.sleep(0)
    decoder.doubt(TOPIC)
    await preparing
    assert decoder.decode(old).b == "-"
    await decoder.prepare(message(Old(a="x"), 0))
    decoder.doubt(f"{TOPIC}-partition-0")
    assert decoder.decode(old).b == "-"
    registry.versions = [New]
    new = message(New(a="x", b="y"), 0)
    assert not decoder.maybe_prepare(new)
    await decoder.prepare(new)
    assert decoder.maybe_prepare(new)
    assert decoder.decode(new).b == "y"
    assert len(registry.asked) == 3


@pytest.mark.parametrize("failure", [ConnectError("no broker"), TopicNotFound("deleted")], ids=str)
async def test_a_failed_fetch_for_the_next_message_keeps_older_messages_decodable(
    failure: PulsarException,
) -> None:
    registry = Registry()
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    old = message(Old(a="x"), 0)
    await decoder.prepare(old)
    for _ in range(2):
        decoder.doubt(TOPIC)
        registry.failures = [failure]
        new = message(Old(a="y"), 0)
        with contextlib.suppress(ConnectError):
            await decoder.prepare(new)
        with pytest.raises(InvalidMessage):
            decoder.decode(new)
        assert decoder.decode(old).a == "x"
    decoder.doubt(TOPIC)
    await decoder.prepare(new)
    assert [decoder.decode(it).a for it in (old, new)] == ["x", "y"]
    assert len(registry.asked) == 4


async def test_error_of_an_unknown_version_keeps_no_messages_in_memory() -> None:
    registry = Registry()
    registry.failures = [TopicNotFound("no such version")]
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    await decoder.prepare(message(Old(a="x"), 0))
    frames = []
    for _ in range(3):
        with pytest.raises(InvalidMessage) as raised:
            decoder.decode(message(Old(a="x"), 0))
        frames.append(frames_of(raised.value))
    assert len(set(frames)) == 1, frames


@pytest.mark.parametrize("was_taken", [False, True])
async def test_messages_of_a_deleted_topic_keep_its_schema(was_taken: bool) -> None:
    """A new topic of the same name has another schema with the same number."""
    registry = Registry()
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    first, second = message(Old(a="x"), 0), message(Old(a="y"), 0)
    await decoder.prepare(first)
    assert decoder.maybe_prepare(second)
    if not was_taken:  # the message is in the entry of one that was taken
        second = Message(second.received, MessageId(), first.delivery)
    decoder.forget(TOPIC)
    registry.versions = [New]
    new = message(New(a="x", b="z"), 0)
    await decoder.prepare(new)
    assert [decoder.decode(it).b for it in (first, second, new)] == ["-", "-", "z"]


def test_a_synchronous_client_does_not_decode_with_a_doubted_version_after_a_failed_fetch() -> None:
    """The message may be of a new topic, whose version has another schema."""
    registry = Registry()
    decoder = Decoder(AvroSchema(New), registry.fetch, asyncio.run)
    old = message(Old(a="x"), 0)
    assert decoder.decode(old).b == "-"
    decoder.doubt(TOPIC)
    registry.failures = [ConnectError("no broker")]
    registry.versions = [New]
    new = message(New(a="x", b="y"), 0)
    with pytest.raises(ConnectError):
        decoder.decode(new)
    assert decoder.decode(new).b == "y"
    assert decoder.decode(old).b == "-"


async def test_version_that_was_asked_for_before_the_topic_was_deleted_is_not_kept() -> None:
    registry = Registry()
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    one = message(Old(a="x"), 0)
    preparing = asyncio.get_running_loop().create_task(decoder.prepare(one))
    await asyncio.sleep(0)
    decoder.forget(TOPIC)
    await preparing
    assert not decoder.maybe_prepare(one)


class ThreadsSchema(AvroSchema):
    """Notes the threads in which definitions are parsed."""

    def __init__(self, record_cls: type[Record]) -> None:
        super().__init__(record_cls)
        self.threads: list[threading.Thread] = []

    def message_decoder_of(self, writer: SchemaInfo) -> Callable[[Message], Any] | None:
        self.threads.append(threading.current_thread())
        return super().message_decoder_of(writer)


@pytest.mark.real_loop
async def test_a_large_definition_is_parsed_in_a_thread() -> None:
    registry, schema = Registry(), ThreadsSchema(New)
    large = json.loads(AvroSchema(Old).schema_info().schema())
    large["fields"][0]["doc"] = "x" * decoding.PARSED_AT_ONCE_MAX
    registry.versions[1] = SchemaInfo(SchemaType.AVRO, "Old", json.dumps(large))
    decoder = Decoder(schema, registry.fetch, None)
    for number in range(2):
        one = message(Old(a="x"), number)
        await decoder.prepare(one)
        assert decoder.decode(one).a == "x"
    small_in, large_in = schema.threads
    assert small_in is threading.current_thread()
    assert large_in is not threading.current_thread()


async def test_without_a_version_the_own_schema_decodes() -> None:
    registry = Registry()
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    plain = message(New(a="x", b="y"), None)
    assert decoder.maybe_prepare(plain)
    assert decoder.decode(plain).b == "y"
    assert Decoder(JsonSchema(New), registry.fetch, None).maybe_prepare(message(Old(a="x"), 5))
    assert registry.asked == []


async def test_value_raises_for_a_missing_version_which_is_not_asked_for_again() -> None:
    registry = Registry()
    registry.failures = [TopicNotFound("no schema of version 0")]
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    lost = message(Old(a="x"), 0)
    for _ in range(2):
        await decoder.prepare(lost)
        with pytest.raises(InvalidMessage, match="schema version 0"):
            decoder.decode(lost)
    assert len(registry.asked) == 1


async def test_a_temporary_failure_is_asked_again() -> None:
    registry = Registry()
    registry.failures = [ConnectError("no broker")]
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    late = message(Old(a="x"), 0)
    with pytest.raises(ConnectError):
        await decoder.prepare(late)
    with pytest.raises(InvalidMessage, match="is not known any more"):
        decoder.decode(late)
    await decoder.prepare(late)
    assert decoder.decode(late).a == "x"


@pytest.mark.parametrize(
    "stored",
    [
        SchemaInfo(SchemaType.JSON, "", "{}"),
        SchemaInfo(SchemaType.AVRO, "", "{"),
        SchemaInfo(SchemaType.AVRO, "", json.dumps("unknown")),
    ],
)
async def test_value_raises_for_a_version_that_is_no_avro_schema(stored: SchemaInfo) -> None:
    registry = Registry()
    registry.versions = [stored]
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    strange = message(Old(a="x"), 0)
    await decoder.prepare(strange)
    with pytest.raises(InvalidMessage):
        decoder.decode(strange)


@pytest.mark.parametrize("wrong", [b"x", bytes(9), bytes(1 << 20)], ids=len)
async def test_a_version_that_no_broker_gives_is_neither_asked_for_nor_kept(wrong: bytes) -> None:
    """The broker refuses the request, so the message would be redelivered repeatedly."""
    registry = Registry()
    registry.failures = [NotAllowedError("it has 8 bytes")]
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    strange = message(Old(a="x"), wrong)
    assert decoder.maybe_prepare(strange)
    await decoder.prepare(strange)
    with pytest.raises(InvalidMessage, match=f"8 bytes, not {len(wrong)}"):
        decoder.decode(strange)
    assert registry.asked == []
    assert not decoder._known


async def test_the_decoder_keeps_a_bounded_number_of_versions() -> None:
    registry = Registry()
    registry.versions = [Old] * (decoding.VERSIONS_MAX + 1)
    decoder = Decoder(AvroSchema(New), registry.fetch, None)
    for number in range(decoding.VERSIONS_MAX + 1):
        await decoder.prepare(message(Old(a="x"), number))
    assert not decoder.maybe_prepare(message(Old(a="x"), 0))
    assert decoder.maybe_prepare(message(Old(a="x"), 1))


def test_a_synchronous_client_waits_in_value() -> None:
    registry = Registry()
    decoder = Decoder(AvroSchema(New), registry.fetch, asyncio.run)
    assert decoder.decode(message(Old(a="x"), 0)).b == "-"
