"""The schemas of retry letters and dead letters, with fake brokers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from fakes.client_world import EARLIEST, TOPIC, A, client_among, receive, subscription
from support import settle

from magnetar.client.consuming import letter_schemas
from magnetar.client.consuming.letter_schemas import LetterSchemas
from magnetar.client.decoding import Decoder
from magnetar.client.errors import TopicTerminated
from magnetar.client.message import Delivery, Message, MessageId
from magnetar.client.options import ConsumerType
from magnetar.client.policies import ConsumerDeadLetterPolicy
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.batch import ReceivedMessage
from magnetar.protos.message import read_entry
from magnetar.schema import JsonSchema, Record, String

if TYPE_CHECKING:
    from fakes.session_broker import FakeBrokers

    from magnetar.client.asyncio import Client, Consumer

SHARED = ConsumerType.Shared
RETRY, DEAD = f"{TOPIC}-s-RETRY", f"{TOPIC}-s-DLQ"


class Bill(Record):
    item = String(required=True)


class OtherBill(Record):
    item = String(required=True)


async def retrying(client: Client, schema: JsonSchema | None) -> Consumer:
    return await client.subscribe(
        "t", "s", SHARED, schema=schema, initial_position=EARLIEST, enable_retry=True
    )


def versions(cluster: FakeBrokers, topic: str) -> list[bytes | None]:
    return [read_entry(entry).schema_version for entry in cluster.topic(topic).entries.values()]


async def test_a_letter_has_the_version_of_its_schema_on_its_own_topic() -> None:
    async with client_among() as (client, cluster):
        cluster.schemas[RETRY] = [pb.Schema(name="x", schema_data=b"{}", type=pb.Schema.Json)]
        producer = await client.create_producer("t", schema=JsonSchema(Bill))
        consumer = await retrying(client, JsonSchema(OtherBill))
        for item in ("a", "b"):
            await producer.send(Bill(item=item))
        for message in await receive(consumer, 2):
            await consumer.reconsume_later(message, timedelta(0))
        assert versions(cluster, RETRY) == [(1).to_bytes(8)] * 2
        assert cluster.schemas[RETRY][1] == cluster.schemas[TOPIC][0]
        letters = [
            it for it in cluster.brokers[A].commands(pb.CommandProducer) if it.topic == RETRY
        ]
        assert letters[0].schema == cluster.schemas[TOPIC][0]
        assert len(cluster.brokers[A].commands(pb.CommandGetOrCreateSchema)) == 1
        await consumer.close()


async def test_originals_and_consumers_without_a_schema_make_letters_without_one() -> None:
    async with client_among() as (client, cluster):
        raw = await client.create_producer("t")
        typed = await client.create_producer("t", schema=JsonSchema(Bill))
        consumer = await retrying(client, JsonSchema(Bill))
        await raw.send(b"x")
        await consumer.reconsume_later((await receive(consumer, 1))[0], timedelta(0))
        await consumer.close()
        consumer = await retrying(client, None)
        await typed.send(Bill(item="a"))
        for message in await receive(consumer, 2):  # the original and the retry letter
            await consumer.reconsume_later(message, timedelta(0))
        assert versions(cluster, RETRY) == [None] * 3
        assert RETRY not in cluster.schemas
        await consumer.close()


async def test_a_version_that_the_broker_does_not_have_makes_a_letter_without_schema() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", schema=JsonSchema(Bill))
        consumer = await retrying(client, JsonSchema(Bill))
        await producer.send(Bill(item="a"))
        (message,) = await receive(consumer, 1)
        cluster.schemas.clear()
        await consumer.reconsume_later(message, timedelta(0))
        await consumer.close()
        assert versions(cluster, RETRY) == [None]
        assert not subscription(cluster).unacked


async def test_a_dead_letter_whose_schema_is_refused_is_tried_again() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", schema=JsonSchema(Bill))
        consumer = await client.subscribe(
            "t",
            "s",
            SHARED,
            schema=JsonSchema(Bill),
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=100,
            dead_letter_policy=ConsumerDeadLetterPolicy(1),
        )
        await producer.send(Bill(item="a"))
        refusal = pb.CommandGetOrCreateSchemaResponse(
            request_id=0, error_code=pb.IncompatibleSchema, error_message="scripted"
        )
        cluster.brokers[A].script(pb.CommandGetOrCreateSchema, refusal)
        for _ in range(2):
            await consumer.negative_acknowledge((await receive(consumer, 1))[0])
        await asyncio.sleep(0.15)
        assert not cluster.topic(DEAD).entries
        assert subscription(cluster).unacked
        await asyncio.sleep(0.5)
        assert versions(cluster, DEAD) == [bytes(8)]
        assert not subscription(cluster).unacked
        await consumer.close()


async def test_versions_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_schemas, "VERSIONS_MAX", 1)
    async with client_among() as (client, cluster):
        cluster.schemas[TOPIC] = [
            pb.Schema(name=str(n), schema_data=b"{}", type=pb.Schema.Json) for n in range(2)
        ]
        await client.create_producer("t")  # starts the client
        decoder = any_decoder()
        schemas = LetterSchemas(client.parts, decoder)
        registered: list[str] = []

        async def register(schema: pb.Schema) -> bytes:
            registered.append(schema.name)
            return b"12345678"

        for number in (0, 0, 1, 0):
            for partition in ("", "-partition-3"):
                original = written_with(number.to_bytes(8), TOPIC + partition)
                assert await schemas.version(original, register) == b"12345678"
        assert registered == ["0", "1", "0"]
        decoder.forget()  # the client moves to another cluster
        await schemas.version(written_with(bytes(8), TOPIC), register)
        assert registered == ["0", "1", "0", "0"]


async def test_a_version_that_was_asked_for_before_a_new_topic_is_not_remembered() -> None:
    async with client_among() as (client, cluster), asyncio.TaskGroup() as tasks:
        cluster.schemas[TOPIC] = [pb.Schema(name="s", schema_data=b"{}", type=pb.Schema.Json)]
        await client.create_producer("t")
        decoder = any_decoder()
        schemas = LetterSchemas(client.parts, decoder)
        original = written_with(bytes(8), TOPIC)
        answered = asyncio.Event()

        async def old(_: pb.Schema) -> bytes:
            await answered.wait()
            return b"oldtopic"

        async def new(_: pb.Schema) -> bytes:
            return b"newtopic"

        late = tasks.create_task(schemas.version(original, old))
        await settle()
        decoder.doubt(TOPIC)  # the consumer has attached again
        assert await schemas.version(original, new) == b"newtopic"
        answered.set()
        assert await late == b"oldtopic"
        assert await schemas.version(original, new) == b"newtopic"


async def test_an_original_whose_version_no_broker_gives_makes_a_letter_without_schema() -> None:
    """The broker would refuse a request for such a version, so the client sends none."""

    async def never(_: pb.Schema) -> bytes:
        raise AssertionError("it has no schema to register")

    async with client_among() as (client, cluster):
        await client.create_producer("t")
        schemas = LetterSchemas(client.parts, any_decoder())
        for version in (b"x", bytes(9)):
            original = written_with(version, TOPIC)
            assert await schemas.first(original) is None
            assert await schemas.version(original, never) == b""
        assert cluster.brokers[A].commands(pb.CommandGetSchema) == []


def any_decoder() -> Decoder:
    return Decoder(JsonSchema(Bill), fetch=None, wait=None)  # type: ignore[arg-type]


def written_with(version: bytes, topic: str) -> Message:
    delivery = Delivery(topic, -1, "p", 0, version, 0, None, 0)
    return Message(
        ReceivedMessage(b"", {}, None, False, None, 0, 0, False, -1), MessageId(), delivery
    )


async def test_letters_of_a_new_topic_have_its_versions_after_their_producer_ended() -> None:
    """The letters' topic is terminated and deleted while no letter is in flight. The next letter
    has a schema that the client does not know yet."""
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", schema=JsonSchema(Bill))
        consumer = await retrying(client, JsonSchema(Bill))
        await producer.send(Bill(item="a"))
        [message] = await receive(consumer, 1)
        await consumer.reconsume_later(message, timedelta(0))
        assert versions(cluster, RETRY) == [(0).to_bytes(8)]
        await receive(consumer, 1)
        terminated = pb.CommandError(
            request_id=0, error=pb.TopicTerminatedError, message="scripted"
        )
        cluster.brokers[A].script(pb.CommandProducer, terminated)
        close_producer(cluster, RETRY)
        await asyncio.sleep(1)  # the client attaches the producer again, which ends it
        other = pb.Schema(name="x", schema_data=b"{}", type=pb.Schema.Json)
        cluster.schemas[RETRY] = [other]
        producer = await client.create_producer("t", schema=JsonSchema(OtherBill))
        await producer.send(OtherBill(item="b"))
        [unknown] = await receive(consumer, 1)
        with pytest.raises(TopicTerminated):
            await consumer.reconsume_later(unknown, timedelta(0))
        await consumer.reconsume_later(unknown, timedelta(0))
        await consumer.reconsume_later(message, timedelta(0))
        assert versions(cluster, RETRY)[1:] == [(1).to_bytes(8), (2).to_bytes(8)]
        assert cluster.schemas[RETRY][1:] == cluster.schemas[TOPIC][::-1]
        await consumer.close()


def close_producer(cluster: FakeBrokers, topic: str) -> None:
    """The broker closes the producer of a topic."""
    for session in cluster.brokers[A].sessions:
        for number, (found, _) in list(session.producers.items()):
            if found.name == topic:
                session.send(pb.CommandCloseProducer(producer_id=number, request_id=0))
                del session.producers[number]
