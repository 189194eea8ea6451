"""Schemas in the commands of the protocol, over both transports: a broker with real sessions."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.wire import TRANSPORTS, wire_to

from magnetar.broker.schemas.registry import SchemaRegistry
from magnetar.broker.session.context import SCHEMAS_MAX
from magnetar.metadata import codec, paths
from magnetar.metadata.policies import Policies, SchemaCompatibility
from magnetar.metadata.store import update
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.broker import RunningBroker
    from fakes.wire import WireClient

    from magnetar.broker.schemas.schema import Schema

TOPIC = "persistent://public/default/t"

pytestmark = [pytest.mark.parametrize("transport", TRANSPORTS), pytest.mark.real_loop]


@asynccontextmanager
async def world(transport: str) -> AsyncIterator[tuple[WireClient, RunningBroker]]:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, transport) as client,
    ):
        yield client, broker


def version(number: int) -> bytes:
    return number.to_bytes(8)


def avro(*optional: str, required: str = "x", kind: Any = pb.Schema.Avro) -> pb.Schema:
    fields: list[Any] = [{"name": required, "type": "string"}]
    fields += [{"name": it, "type": ["null", "string"], "default": None} for it in optional]
    data = json.dumps({"type": "record", "name": "R", "fields": fields}).encode()
    return pb.Schema(name="R", schema_data=data, type=kind)


async def get(client: WireClient, topic: str, wanted: bytes | None = None) -> Any:
    return await client.ask(pb.CommandGetSchema(topic=topic, request_id=0, schema_version=wanted))


async def test_a_producer_adds_versions_that_everyone_can_get(transport: str) -> None:
    async with world(transport) as (client, _):
        first = await client.produce(TOPIC, 1, schema=avro())
        assert first.schema_version == version(0)
        evolved = await client.produce(TOPIC, 2, schema=avro("a"))
        assert evolved.schema_version == version(1)
        again = await client.produce(TOPIC, 3, schema=avro())
        assert again.schema_version == version(0)
        without = await client.produce(TOPIC, 4)
        assert without.schema_version == b""

        newest = await get(client, TOPIC)
        assert (newest.schema_version, newest.schema) == (version(1), avro("a"))
        old = await get(client, TOPIC, version(0))
        assert (old.schema_version, old.schema) == (version(0), avro())
        missing = await get(client, TOPIC, version(2))
        assert missing.error_code == pb.TopicNotFound
        assert "no schema of version 2" in missing.error_message


async def test_an_incompatible_producer_is_refused(transport: str) -> None:
    async with world(transport) as (client, _):
        await client.produce(TOPIC, 1, schema=avro())
        refused = await client.produce(TOPIC, 2, schema=avro(required="y"))
        assert refused.error == pb.IncompatibleSchema
        assert "field y of R has no default" in refused.message
        other = await client.produce(TOPIC, 2, schema=avro(kind=pb.Schema.Json))
        assert "exists schema type AVRO, new schema type JSON" in other.message
        assert (await get(client, TOPIC)).schema_version == version(0)


async def test_get_or_create_adds_a_version(transport: str) -> None:
    async with world(transport) as (client, _):
        body = pb.CommandGetOrCreateSchema(topic=TOPIC, request_id=0, schema=avro())
        assert (await client.ask(body)).error_code == pb.TopicNotFound
        await client.produce(TOPIC)
        assert (await client.ask(body)).schema_version == version(0)
        body.schema.CopyFrom(avro(required="y"))
        assert (await client.ask(body)).error_code == pb.IncompatibleSchema


async def test_get_or_create_of_bytes_is_refused_where_producers_need_a_schema(
    transport: str,
) -> None:
    async with world(transport) as (client, broker):
        await client.produce(TOPIC, 1, schema=avro())
        await set_policies(broker, Policies(schema_validation=True))
        answer = await client.ask(
            pb.CommandGetOrCreateSchema(
                topic=TOPIC,
                request_id=0,
                schema=pb.Schema(name="", schema_data=b"", type=pb.Schema.Bytes),
            )
        )
        assert answer.error_code == pb.IncompatibleSchema
        assert "without a schema" in answer.error_message


async def test_the_schemas_of_one_connection_are_parsed_a_bounded_number_at_a_time(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schemas of other clients wait for a few schemas of this connection, not for all of them."""
    under_way = most = 0
    parsed = SchemaRegistry.parsed

    async def counted(*args: Any) -> Schema:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return await parsed(*args)

    monkeypatch.setattr(SchemaRegistry, "parsed", counted)
    async with world(transport) as (client, _):
        await client.produce(TOPIC, 1)
        body = pb.CommandGetOrCreateSchema(topic=TOPIC, request_id=0, schema=avro())
        for body.request_id in range(50):
            await client.send(body)
        for _ in range(50):
            answer = await client.expect(pb.CommandGetOrCreateSchemaResponse)
            assert answer.schema_version == version(0)
    assert most == SCHEMAS_MAX


@pytest.mark.parametrize("topic", [TOPIC, "non-persistent://public/default/n"])
async def test_a_consumer_brings_the_first_schema_or_is_checked(transport: str, topic: str) -> None:
    async with world(transport) as (client, _):
        shared = pb.CommandSubscribe.Shared
        any_schema = pb.Schema(name="", schema_data=b"", type=pb.Schema.AutoConsume)
        consumers = [
            await client.subscribe(topic, consumer_id=1, subType=shared, schema=any_schema),
            await client.subscribe(topic, consumer_id=2, subType=shared, schema=avro()),
            await client.subscribe(topic, consumer_id=3, subType=shared, schema=avro("a")),
            await client.subscribe(topic, consumer_id=4, subType=shared),
            await client.subscribe(topic, consumer_id=5, subType=shared, schema=avro(required="y")),
            await client.subscribe(
                topic, consumer_id=6, subType=shared, schema=avro(kind=pb.Schema.Json)
            ),
        ]
        kinds = [type(it).__name__ for it in consumers]
        assert kinds == ["CommandSuccess"] * 4 + ["CommandError"] * 2
        assert {it.error for it in consumers[4:]} == {pb.IncompatibleSchema}
        assert (await get(client, topic)).schema == avro()


async def test_a_topic_of_bytes_takes_no_consumer_with_a_schema(transport: str) -> None:
    async with world(transport) as (client, _):
        await client.produce(TOPIC)
        refused = await client.subscribe(TOPIC, schema=avro())
        assert refused.error == pb.IncompatibleSchema
        assert "empty(BYTES) schema" in refused.message


async def test_partitions_share_the_schema_and_non_persistent_topics_have_one(
    transport: str,
) -> None:
    async with world(transport) as (client, broker):
        name = TopicName.parse(TOPIC)
        await broker.broker.create_partitioned_topic(name, 2, {})
        first = await client.produce(f"{TOPIC}-partition-0", 1, schema=avro())
        second = await client.produce(f"{TOPIC}-partition-1", 2, schema=avro("a"))
        assert (first.schema_version, second.schema_version) == (version(0), version(1))
        assert (await get(client, TOPIC)).schema == avro("a")
        passing = "non-persistent://public/default/n"
        assert (await client.produce(passing, 3, schema=avro())).schema_version == version(0)


async def test_the_schema_is_deleted_with_its_topic(transport: str) -> None:
    async with world(transport) as (client, broker):
        name = TopicName.parse(TOPIC)
        await client.produce(TOPIC, schema=avro())
        await client.ask(pb.CommandCloseProducer(producer_id=1, request_id=0))
        await broker.broker.delete_topic(name, force=False)
        assert (await get(client, TOPIC)).error_code == pb.TopicNotFound
        made_anew = await client.produce(TOPIC, 2, schema=avro(required="y"))
        assert made_anew.schema_version == version(0)


async def test_policies_of_the_namespace_change_what_producers_may_register(transport: str) -> None:
    async with world(transport) as (client, broker):
        await client.produce(TOPIC, 1, schema=avro())
        policies = Policies(
            schema_compatibility=SchemaCompatibility.ALWAYS_COMPATIBLE, schema_validation=True
        )
        await set_policies(broker, policies)
        changed = await client.produce(TOPIC, 2, schema=avro(required="y"))
        assert changed.schema_version == version(1)
        without = await client.produce(TOPIC, 3)
        assert without.error == pb.IncompatibleSchema
        assert "SchemaValidationEnforced" in without.message
        await set_policies(broker, Policies(schema_auto_update=False))
        refused = await client.produce(TOPIC, 4, schema=avro("b"))
        assert "auto updating is disabled" in refused.message
        assert (await client.produce(TOPIC, 5, schema=avro())).schema_version == version(0)


async def set_policies(broker: RunningBroker, policies: Policies) -> None:
    path = paths.namespace("public", "default")

    def change(value: bytes | None) -> bytes:
        assert value is not None
        return codec.encode_namespace(replace(codec.decode_namespace(value), policies=policies))

    loop: asyncio.AbstractEventLoop = broker.serving.get_loop()
    await update(broker.store, path, change, deadline=loop.time() + 10)
    await broker.broker.policies.ready(TopicName.parse(TOPIC).namespace_name)
    while broker.broker.policies.policies_of(TopicName.parse(TOPIC)).schema_validation != bool(
        policies.schema_validation
    ):
        await broker.store.sync(path)
