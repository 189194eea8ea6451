"""The versions of a schema in the metadata store."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes.cluster_state import ClusterState

from magnetar.broker.errors import IncompatibleSchema, NoSchema, TooManySchemas
from magnetar.broker.schemas import registry as module
from magnetar.broker.schemas.registry import (
    SchemaRegistry,
    SchemaRules,
    admit_consumer,
    admit_producer,
)
from magnetar.broker.schemas.schema import Schema, SchemaType, parse
from magnetar.metadata.policies import SchemaCompatibility as Strategy
from magnetar.protos.names import TopicName
from magnetar.runtime.clock import SystemClock

TOPIC = TopicName.parse("t")
FULL = SchemaRules(Strategy.FULL, auto_update=True, validation=False)


def schema(*optional: str, required: tuple[str, ...] = (), size: int = 0) -> Schema:
    tree = {
        "type": "record",
        "name": "R",
        "doc": "x" * size,
        "fields": [
            *({"name": it, "type": "string"} for it in required),
            *({"name": it, "type": ["null", "string"], "default": None} for it in optional),
        ],
    }
    return parse(SchemaType.AVRO, json.dumps(tree).encode(), "R", {"k": "v"})


def registry_in(cluster: ClusterState) -> SchemaRegistry:
    return SchemaRegistry(cluster.store(), SystemClock())


async def test_versions_count_from_0_and_equal_schemas_share_one() -> None:
    registry = registry_in(ClusterState())
    assert await registry.put(TOPIC, schema("a"), Strategy.FULL) == 0
    assert await registry.put(TOPIC, schema("a", "b"), Strategy.FULL) == 1
    assert await registry.put(TOPIC, schema("a", size=10), Strategy.FULL) == 0
    assert [it.version for it in await registry.versions(TOPIC)] == [0, 1]
    newest = await registry.get(TOPIC)
    assert (newest.version, newest.data, newest.name) == (1, schema("a", "b").data, "R")
    assert newest.properties == {"k": "v"}
    assert (await registry.get(TOPIC, 0)).data == schema("a").data
    with pytest.raises(NoSchema, match="version 7"):
        await registry.get(TOPIC, 7)


async def test_partitions_and_domains_share_the_schema() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC.with_partition(3), schema("a"), Strategy.FULL)
    for name in ("t", "non-persistent://public/default/t", "t-partition-9"):
        assert (await registry.get(TopicName.parse(name))).version == 0
    with pytest.raises(NoSchema):
        await registry.get(TopicName.parse("other"))


async def test_an_incompatible_schema_is_refused_and_stores_nothing() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    wrong = schema(required=("b",))
    with pytest.raises(IncompatibleSchema, match="field b of R is new"):
        await registry.put(TOPIC, wrong, Strategy.FULL)
    with pytest.raises(IncompatibleSchema):
        await registry.check(TOPIC, wrong, Strategy.FULL)
    assert len(await registry.versions(TOPIC)) == 1
    assert await registry.put(TOPIC, wrong, Strategy.ALWAYS_COMPATIBLE) == 1


async def test_transitive_compares_with_what_latest_does_not() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a", required=("x",)), Strategy.FORWARD)
    await registry.put(TOPIC, schema("a"), Strategy.ALWAYS_COMPATIBLE)
    with pytest.raises(IncompatibleSchema):
        await registry.put(TOPIC, schema("a", "b"), Strategy.FORWARD_TRANSITIVE)
    assert await registry.put(TOPIC, schema("a", "b"), Strategy.FORWARD) == 2


async def test_brokers_that_add_at_the_same_time_give_different_numbers() -> None:
    cluster = ClusterState()
    registries = [registry_in(cluster) for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(each.put(TOPIC, schema(f"f{number}"), Strategy.FULL))
            for number, each in enumerate(registries)
        ]
        same = [
            group.create_task(each.put(TopicName.parse("u"), schema("a"), Strategy.FULL))
            for each in registries
        ]
    assert sorted(it.result() for it in tasks) == [0, 1, 2, 3]
    assert [it.result() for it in same] == [0, 0, 0, 0]


async def test_deletion_leaves_a_mark_and_earlier_versions_readable() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    assert await registry.delete(TOPIC) == 1
    assert await registry.versions(TOPIC) == ()
    with pytest.raises(NoSchema):
        await registry.get(TOPIC)
    with pytest.raises(NoSchema):
        await registry.delete(TOPIC)
    assert (await registry.get(TOPIC, 0)).data == schema("a").data, "messages have this version"
    assert await registry.put(TOPIC, schema(required=("other",)), Strategy.FULL) == 2


async def test_forced_deletion_begins_again() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    assert await registry.delete(TOPIC, force=True) == 0
    with pytest.raises(NoSchema):
        await registry.get(TOPIC, 0)
    assert await registry.put(TOPIC, schema("b"), Strategy.FULL) == 0


@pytest.mark.real_loop  # large definitions are compared in a thread
async def test_the_record_has_a_limit_that_is_named() -> None:
    registry = registry_in(ClusterState())
    large = [schema(f"f{number}", size=120_000) for number in range(9)]
    for each in large[:-1]:
        await registry.put(TOPIC, each, Strategy.FULL)
    with pytest.raises(TooManySchemas, match=str(module.RECORD_BYTES_MAX)):
        await registry.put(TOPIC, large[-1], Strategy.FULL)


async def test_producers_without_a_schema_are_refused_where_it_is_enforced() -> None:
    registry = registry_in(ClusterState())
    enforced = SchemaRules(Strategy.FULL, auto_update=True, validation=True)
    assert await admit_producer(registry, TOPIC, None, enforced) is None, "there is no schema"
    assert await admit_producer(registry, TOPIC, schema("a"), enforced) == 0
    assert await admit_producer(registry, TOPIC, None, FULL) is None
    with pytest.raises(IncompatibleSchema, match="without a schema"):
        await admit_producer(registry, TOPIC, None, enforced)


async def test_without_automatic_updates_only_known_schemas_are_admitted() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    fixed = SchemaRules(Strategy.FULL, auto_update=False, validation=False)
    assert await admit_producer(registry, TOPIC, schema("a"), fixed) == 0
    with pytest.raises(IncompatibleSchema, match="auto updating is disabled"):
        await admit_producer(registry, TOPIC, schema("a", "b"), fixed)


async def test_the_first_consumer_of_an_unused_topic_brings_the_schema() -> None:
    registry = registry_in(ClusterState())
    with pytest.raises(IncompatibleSchema, match="active topic"):
        await admit_consumer(registry, TOPIC, schema("a"), FULL, in_use=True)
    await admit_consumer(registry, TOPIC, schema("a"), FULL, in_use=False)
    assert (await registry.get(TOPIC)).version == 0
    await admit_consumer(registry, TOPIC, schema("a", "b"), FULL, in_use=True)
    assert len(await registry.versions(TOPIC)) == 1, "a consumer's schema is only checked"
    with pytest.raises(IncompatibleSchema, match="cannot read"):
        await admit_consumer(registry, TOPIC, schema(required=("b",)), FULL, in_use=True)
    text = parse(SchemaType.STRING, b"", "", {})
    with pytest.raises(IncompatibleSchema, match="exists schema type AVRO"):
        await admit_consumer(registry, TOPIC, text, FULL, in_use=True)
