"""The versions of a schema in the metadata store."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes.cluster_state import ClusterState
from support import settle, wait_until

from magnetar.broker.errors import IncompatibleSchema, NoSchema, TooManySchemas
from magnetar.broker.schemas import registry as module
from magnetar.broker.schemas.compatibility import require_compatible
from magnetar.broker.schemas.registry import (
    SchemaRegistry,
    SchemaRules,
    admit_consumer,
    admit_producer,
)
from magnetar.broker.schemas.schema import Schema, SchemaType, parse
from magnetar.metadata import codec
from magnetar.metadata.errors import OutcomeUnknown
from magnetar.metadata.node import Versioned
from magnetar.metadata.policies import SchemaCompatibility as Strategy
from magnetar.protos.names import TopicName
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from magnetar.metadata.model import SchemaRecord

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
    with pytest.raises(IncompatibleSchema, match="field b of R has no default"):
        await registry.put(TOPIC, wrong, Strategy.FULL)
    with pytest.raises(IncompatibleSchema):
        await registry.check(TOPIC, wrong, Strategy.FULL)
    assert len(await registry.versions(TOPIC)) == 1
    assert await registry.put(TOPIC, wrong, Strategy.ALWAYS_COMPATIBLE) == 1


async def test_a_transitive_strategy_refuses_what_the_newest_version_allows() -> None:
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


async def test_after_a_forced_deletion_versions_begin_at_0() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    assert await registry.delete(TOPIC, force=True) == 0
    with pytest.raises(NoSchema):
        await registry.get(TOPIC, 0)
    assert await registry.put(TOPIC, schema("b"), Strategy.FULL) == 0


@pytest.mark.real_loop  # large definitions are compared in a thread
async def test_a_schema_beyond_the_limit_of_the_record_is_refused_with_the_limit() -> None:
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


async def test_the_first_consumer_of_an_unused_topic_adds_its_schema() -> None:
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


async def test_a_consumer_with_an_earlier_version_must_read_the_newest() -> None:
    registry = registry_in(ClusterState())
    backward = SchemaRules(Strategy.BACKWARD, auto_update=True, validation=False)
    await registry.put(TOPIC, schema(required=("a", "b")), Strategy.BACKWARD)
    await registry.put(TOPIC, schema(required=("a",)), Strategy.BACKWARD)
    with pytest.raises(IncompatibleSchema, match="field b of R has no default"):
        await admit_consumer(registry, TOPIC, schema(required=("a", "b")), backward, in_use=True)
    never = SchemaRules(Strategy.ALWAYS_INCOMPATIBLE, auto_update=True, validation=False)
    await admit_consumer(registry, TOPIC, schema(required=("a",)), never, in_use=True)


async def test_a_consumer_with_the_newest_version_must_read_all_if_transitive() -> None:
    registry = registry_in(ClusterState())
    for field in ("a", "b"):
        await registry.put(TOPIC, schema(required=(field,)), Strategy.ALWAYS_COMPATIBLE)
    newest = schema(required=("b",))
    latest = SchemaRules(Strategy.BACKWARD, auto_update=True, validation=False)
    await admit_consumer(registry, TOPIC, newest, latest, in_use=True)
    every = SchemaRules(Strategy.BACKWARD_TRANSITIVE, auto_update=True, validation=False)
    with pytest.raises(IncompatibleSchema, match="field b of R has no default"):
        await admit_consumer(registry, TOPIC, newest, every, in_use=True)


async def test_equal_consumers_of_a_transitive_topic_share_one_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a failover, hundreds of consumers would wait for each other's comparisons."""
    cluster = ClusterState()
    registry = registry_in(cluster)
    for number in range(5):
        await registry.put(TOPIC, schema(f"f{number}"), Strategy.FULL)
    every = SchemaRules(Strategy.FULL_TRANSITIVE, auto_update=True, validation=False)
    compared = 0

    def counted(new: Schema, earlier: Schema, strategy: Strategy) -> None:
        nonlocal compared
        compared += 1
        require_compatible(new, earlier, strategy)

    async def compared_for(*consumers: Schema, rules: SchemaRules = every) -> int:
        nonlocal compared
        compared = 0
        async with asyncio.TaskGroup() as group:
            for it in consumers:
                group.create_task(admit_consumer(registry, TOPIC, it, rules, in_use=True))
        return compared

    monkeypatch.setattr(module, "require_compatible", counted)
    mine, other = schema("mine"), schema("other")
    assert await compared_for(*[mine] * 20) == 5
    assert await compared_for(mine, other, mine) == 5, "only the other one"
    await registry.put(TOPIC, schema("f5"), Strategy.FULL)
    assert await compared_for(mine) == 6, "the topic has a new version"
    backward = SchemaRules(Strategy.BACKWARD_TRANSITIVE, auto_update=True, validation=False)
    assert await compared_for(mine, rules=backward) == 6, "the strategy is another one"
    monkeypatch.setattr(module, "ACCEPTED_MAX", 1)
    registry = registry_in(cluster)
    assert [await compared_for(it) for it in (mine, mine, other, mine)] == [6, 0, 6, 6]
    assert (len(registry._accepted), len(registry._checks)) == (1, 0)


async def test_an_accepted_consumer_does_not_admit_one_that_differs_only_in_aliases() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema(required=("old",)), Strategy.FULL)

    def renamed(*aliases: str) -> Schema:
        fields = [{"name": "new", "type": "string", "aliases": aliases}]
        tree = {"type": "record", "name": "R", "fields": fields}
        return parse(SchemaType.AVRO, json.dumps(tree).encode(), "R", {})

    backward = SchemaRules(Strategy.BACKWARD, auto_update=True, validation=False)
    assert renamed("old").fingerprint == renamed().fingerprint
    await admit_consumer(registry, TOPIC, renamed("old"), backward, in_use=True)
    for _ in range(2):
        with pytest.raises(IncompatibleSchema, match="field new of R has no default"):
            await admit_consumer(registry, TOPIC, renamed(), backward, in_use=True)


@pytest.mark.real_loop
async def test_a_cancelled_comparison_keeps_its_turn_until_its_thread_ends() -> None:
    """Otherwise clients that disconnect could occupy all threads."""
    registry = registry_in(ClusterState())
    begun, end = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        end.wait(10)

    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(registry._in_turn(slow, inline=False))
        await wait_until(begun.is_set)
        leaving.cancel()
        following = [
            group.create_task(registry._in_turn(lambda: 7, inline=it)) for it in (False, True)
        ]
        await settle()
        assert leaving.cancelled()
        assert not any(it.done() for it in following)
        end.set()
    assert [it.result() for it in following] == [7, 7]


@pytest.mark.real_loop
async def test_an_abandoned_comparison_that_fails_is_no_stray_error() -> None:
    registry = registry_in(ClusterState())
    begun, end = threading.Event(), threading.Event()
    strays: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, stray: strays.append(stray))

    def refuse() -> None:
        begun.set()
        end.wait(10)
        raise IncompatibleSchema("the client has left")

    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(registry._in_turn(refuse, inline=False))
        await wait_until(begun.is_set)
        leaving.cancel()
    del leaving
    end.set()
    await registry._in_turn(lambda: None, inline=False)
    gc.collect()
    assert strays == []


async def test_with_always_compatible_a_topic_of_bytes_admits_consumers_with_a_schema() -> None:
    registry = registry_in(ClusterState())
    always = SchemaRules(Strategy.ALWAYS_COMPATIBLE, auto_update=True, validation=False)
    await admit_consumer(registry, TOPIC, schema("a"), always, in_use=True)
    assert await registry.versions(TOPIC) == ()


async def test_a_stale_view_of_the_store_does_not_refuse_a_schema() -> None:
    """Apache's clients would treat the refusal as permanent."""
    cluster = ClusterState()
    here, there = registry_in(cluster), registry_in(cluster)
    fixed = SchemaRules(Strategy.FULL, auto_update=False, validation=False)
    calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: admit_producer(here, TOPIC, schema(required=("v0",)), fixed),
        lambda: admit_consumer(here, TOPIC, schema(required=("v1",)), FULL, in_use=True),
        lambda: here.check(TOPIC, schema("a", required=("v2",)), Strategy.FULL),
    ]
    for number, admit in enumerate(calls):
        old = await here._record(TOPIC)
        await there.put(TOPIC, schema(required=(f"v{number}",)), Strategy.ALWAYS_COMPATIBLE)
        with stale(here, old):
            await admit()


@contextmanager
def stale(registry: SchemaRegistry, record: SchemaRecord) -> Iterator[None]:
    """Until a sync, reads of the store return an older record."""
    store, value = registry._store, codec.encode_schema(record)
    get, sync = store.get, store.sync
    fresh = False

    async def stale_get(path: str) -> Versioned | None:
        return await get(path) if fresh else Versioned(value, 0)

    async def noted_sync(path: str) -> None:
        nonlocal fresh
        await sync(path)
        fresh = True

    store.get, store.sync = stale_get, noted_sync  # type: ignore[method-assign]
    yield
    store.get, store.sync = get, sync  # type: ignore[method-assign]


async def test_forced_deletion_removes_what_an_earlier_deletion_has_left() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    await registry.delete(TOPIC)
    assert await registry.delete(TOPIC, force=True) == 1
    with pytest.raises(NoSchema):
        await registry.get(TOPIC, 0)
    with pytest.raises(NoSchema):
        await registry.delete(TOPIC, force=True)


async def test_a_forced_deletion_whose_answer_is_lost_keeps_later_schemas() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    store, delete = registry._store, registry._store.delete

    async def lossy_delete(path: str, *, expected: int) -> None:
        store.delete = delete  # type: ignore[method-assign]
        await delete(path, expected=expected)
        await asyncio.sleep(0.01)
        assert await registry.put(TOPIC, schema("b"), Strategy.FULL) == 0
        raise OutcomeUnknown(path, "the reply was lost")

    store.delete = lossy_delete  # type: ignore[method-assign]
    await registry.delete(TOPIC, force=True)
    assert (await registry.get(TOPIC, 0)).data == schema("b").data


async def test_a_deletion_whose_answer_is_lost_is_recognised_below_a_new_version() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    store, put = registry._store, registry._store.put

    async def lossy_put(path: str, value: bytes, *, expected: int) -> int:
        store.put = put  # type: ignore[method-assign]
        await put(path, value, expected=expected)
        await registry.put(TOPIC, schema("b"), Strategy.FULL)
        raise OutcomeUnknown(path, "the reply was lost")

    store.put = lossy_put  # type: ignore[method-assign]
    assert await registry.delete(TOPIC) == 1
    assert [it.version for it in await registry.versions(TOPIC)] == [2]


async def test_many_comparisons_at_once_take_one_round_of_the_loop_each() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    compared, rounds = 0, 0
    most = 0

    def count() -> None:
        nonlocal compared
        compared += 1

    async def watch() -> None:
        nonlocal rounds, most
        while True:
            before = compared
            await asyncio.sleep(0)
            rounds += 1
            most = max(most, compared - before)

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        work = [group.create_task(registry._in_turn(count, inline=True)) for _ in range(50)]
        await asyncio.wait(work)
        watcher.cancel()
    assert compared == 50
    assert most <= 2


async def test_records_are_read_a_bounded_number_at_a_time() -> None:
    registry = registry_in(ClusterState())
    await registry.put(TOPIC, schema("a"), Strategy.FULL)
    store, get = registry._store, registry._store.get
    reading = most = 0

    async def counted(path: str) -> Versioned | None:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.01)
        reading -= 1
        return await get(path)

    store.get = counted  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(registry.get(TOPIC))
    assert most == module.RECORDS_MAX
