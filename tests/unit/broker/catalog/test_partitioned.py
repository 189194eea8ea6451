"""Partitioned topics in the metadata: creation, growth, deletion, and continuation after a
crash."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from support import settle

from magnetar.broker.catalog import partitioned
from magnetar.broker.catalog.partitioned import PARTITIONS_MAX, READS_MAX, PartitionedTopics
from magnetar.broker.cursor.replay import CursorReplay, number_of
from magnetar.broker.cursor.sequences import DEDUPLICATION
from magnetar.broker.errors import (
    InvalidPartitionCount,
    ReservedName,
    TopicExists,
    TopicNotFound,
)
from magnetar.broker.log.chain import Chain
from magnetar.broker.log.position import EARLIEST
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import Unavailable, ValueTooLarge
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import SubscriptionRecord, TopicRecord
from magnetar.protos.names import DEFAULT_NAMESPACE, Domain, TopicName
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.metadata.store import Versioned

NAME = TopicName.parse("persistent://public/default/t")


def path_of(name: TopicName) -> str:
    return paths.topic(name.tenant, name.namespace, name.domain, name.topic)


class World:
    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or ClusterState().store()
        self.topics = PartitionedTopics(self.store, SystemClock())

    async def record(self, index: int) -> TopicRecord | None:
        found = await self.store.get(path_of(NAME.with_partition(index)))
        return None if found is None else codec.decode_topic(found.value)

    async def put(self, name: TopicName, record: TopicRecord) -> None:
        path = path_of(name)
        found = await self.store.get(path)
        expected = -1 if found is None else found.version
        await self.store.put(path, codec.encode_topic(record), expected=expected)


async def test_create_writes_all_partitions() -> None:
    world = World()
    await world.topics.create(NAME, 3, {"owner": "me"})
    record = await world.topics.require(NAME)
    assert (record.partitions, dict(record.properties)) == (3, {"owner": "me"})
    assert [await world.record(index) for index in range(4)] == [TopicRecord(0)] * 3 + [None]
    assert await world.topics.names(DEFAULT_NAMESPACE, Domain.PERSISTENT) == [NAME]
    with pytest.raises(TopicExists):
        await world.topics.create(NAME, 3)


async def test_create_beside_a_plain_topic_is_refused() -> None:
    world = World()
    await world.put(NAME, TopicRecord(1))
    with pytest.raises(TopicExists):
        await world.topics.create(NAME, 3)
    assert await world.topics.find(NAME) is None


@pytest.mark.parametrize("count", [0, -1, PARTITIONS_MAX + 1])
async def test_create_with_an_impossible_number_is_refused(count: int) -> None:
    world = World()
    with pytest.raises(InvalidPartitionCount, match="expected 1 to 10000"):
        await world.topics.create(NAME, count)


async def test_create_above_the_configured_limit_is_refused() -> None:
    world = World()
    topics = PartitionedTopics(world.store, SystemClock(), partitions_max=2)
    with pytest.raises(InvalidPartitionCount, match="expected 1 to 2"):
        await topics.create(NAME, 3)


async def test_a_partition_cannot_be_partitioned() -> None:
    with pytest.raises(ReservedName):
        await World().topics.create(NAME.with_partition(1), 2)


async def test_growth_gives_new_partitions_all_subscriptions_at_their_beginning() -> None:
    world = World()
    await world.topics.create(NAME, 2)
    for index, name in enumerate(("a", "b")):
        subscription = SubscriptionRecord({"k": name}, b"state")
        kept = {name: subscription, DEDUPLICATION: subscription}  # sequence ids are not copied
        await world.put(NAME.with_partition(index), TopicRecord(5, subscriptions=kept))
    await world.topics.grow(NAME, 3)
    assert (await world.topics.require(NAME)).partitions == 3
    grown = await world.record(2)
    assert grown is not None
    assert grown.subscriptions.keys() == {"a", "b"}
    assert grown.subscriptions["b"].properties == {"k": "b"}
    replay = CursorReplay(Chain())
    for subscription in grown.subscriptions.values():
        replay.on_entry(subscription.inline)
        assert replay.state(number_of(subscription.inline)).mark_delete == EARLIEST
    assert len({number_of(it.inline) for it in grown.subscriptions.values()}) == 2


async def test_growth_with_an_old_view_writes_all_subscriptions_before_the_number() -> None:
    """A client that reads the new number may publish to the new partitions at once."""
    cluster = ClusterState()
    other = World(cluster.store())
    subscriptions: list[list[str]] = []

    class Watched(MemoryStore):
        async def put(self, path: str, value: bytes, *, expected: int) -> int:
            if path == paths.partitioned_topic("public", "default", NAME.domain, NAME.topic):
                record = await other.record(1)
                subscriptions.append(list(record.subscriptions if record is not None else ()))
            return await super().put(path, value, expected=expected)

    here = World(Watched(cluster.tree))
    await other.topics.create(NAME, 1)
    here.store.fall_behind()
    made = {"s": SubscriptionRecord({}, b"state")}
    await other.put(NAME.with_partition(0), TopicRecord(1, subscriptions=made))
    await here.topics.grow(NAME, 2)
    assert subscriptions == [["s"]]


async def test_growth_reads_many_partitions_at_the_same_time() -> None:
    reading = most = 0

    class Slow(MemoryStore):
        async def get(self, path: str) -> Versioned | None:
            nonlocal reading, most
            reading += 1
            most = max(most, reading)
            await asyncio.sleep(0.003)
            reading -= 1
            return await super().get(path)

    cluster = ClusterState()
    await World(cluster.store()).topics.create(NAME, 2 * READS_MAX)
    await World(Slow(cluster.tree)).topics.grow(NAME, 2 * READS_MAX + 1)
    assert most == READS_MAX


async def test_growth_continues_after_a_crash() -> None:
    world = World()
    await world.topics.create(NAME, 1)
    subscription = SubscriptionRecord({}, b"state")
    await world.put(NAME.with_partition(0), TopicRecord(1, subscriptions={"s": subscription}))
    await world.put(NAME.with_partition(1), TopicRecord(0))
    await world.topics.grow(NAME, 2)
    record = await world.record(1)
    assert record is not None
    assert record.subscriptions.keys() == {"s"}


@pytest.mark.parametrize("count", [0, 1, 2])
async def test_the_number_never_shrinks(count: int) -> None:
    world = World()
    await world.topics.create(NAME, 2)
    with pytest.raises(InvalidPartitionCount, match="expected 3 to 10000"):
        await world.topics.grow(NAME, count)


async def test_a_marked_deletion_can_be_finished_later() -> None:
    world = World()
    await world.topics.create(NAME, 2)
    await world.put(NAME.with_partition(7), TopicRecord(0))  # left by a growth that crashed
    await world.put(TopicName.parse("tt-partition-0"), TopicRecord(0))
    left = await world.topics.begin_deletion(NAME)
    assert left == [NAME.with_partition(index) for index in (0, 1, 7)]
    with pytest.raises(TopicNotFound):
        await world.topics.require(NAME)
    with pytest.raises(TopicNotFound):
        await world.topics.grow(NAME, 5)
    with pytest.raises(TopicExists):
        await world.topics.create(NAME, 2)
    assert await world.topics.begin_deletion(NAME) == left
    await world.topics.end_deletion(NAME)
    assert await world.topics.find(NAME) is None
    with pytest.raises(TopicNotFound):
        await world.topics.begin_deletion(NAME)


async def test_the_partitions_to_delete_are_parsed_in_slices_and_no_other_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, name = World(), TopicName.parse("a topic")
    await world.topics.create(name, 35)
    for index in range(50):
        await world.put(TopicName.parse(f"other-{index}"), TopicRecord(0))
    parsed, in_turn, original = [0], [0], partitioned._name_in

    def name_in(*arguments: object) -> TopicName:
        parsed[0] += 1
        return original(*arguments)

    monkeypatch.setattr(partitioned, "_name_in", name_in)
    monkeypatch.setattr(partitioned, "NAMES_PER_TURN", 10)
    async with asyncio.TaskGroup() as tasks:
        deletion = tasks.create_task(world.topics.begin_deletion(name))
        while not deletion.done():
            before = parsed[0]
            await asyncio.sleep(0)
            in_turn.append(parsed[0] - before)
    assert deletion.result() == [name.with_partition(index) for index in range(35)]
    assert sum(in_turn) == 35
    assert max(in_turn) == 10


async def test_partitions_that_were_never_opened_are_deleted_by_their_records() -> None:
    world = World()
    await world.topics.create(NAME, 100)
    await world.put(NAME.with_partition(3), TopicRecord(1))
    left = await world.topics.begin_deletion(NAME)
    assert await world.topics.delete_untouched(left) == [NAME.with_partition(3)]
    assert [n for n in range(100) if await world.record(n) is not None] == [3]
    assert await world.topics.delete_untouched(left) == [NAME.with_partition(3)]


async def test_the_policies_of_a_partitioned_topic_are_deleted_with_it() -> None:
    world = World()
    await world.topics.create(NAME, 1)
    path = paths.topic_policies(NAME.tenant, NAME.namespace, NAME.domain, NAME.topic)
    await world.store.put(path, b"policies", expected=-1)
    await world.topics.begin_deletion(NAME)
    await world.topics.end_deletion(NAME)
    assert await world.store.get(path) is None


async def test_a_second_request_to_delete_keeps_a_topic_that_was_created_meanwhile() -> None:
    world = World()
    await world.topics.create(NAME, 2)
    await world.topics.begin_deletion(NAME)
    await world.topics.begin_deletion(NAME)  # by the second request
    await world.topics.end_deletion(NAME)
    await world.topics.create(NAME, 3)
    policies = paths.topic_policies(NAME.tenant, NAME.namespace, NAME.domain, NAME.topic)
    schema = paths.schema(NAME.tenant, NAME.namespace, NAME.topic)
    for path in (policies, schema):
        await world.store.put(path, b"new", expected=-1)
    await world.topics.end_deletion(NAME)
    assert (await world.topics.require(NAME)).partitions == 3
    for path in (policies, schema):
        assert await world.store.get(path) is not None


@pytest.mark.parametrize("domain", Domain)
async def test_the_schema_stays_until_the_topics_of_both_domains_are_deleted(
    domain: Domain,
) -> None:
    world = World()
    other = Domain.PERSISTENT if domain is Domain.NON_PERSISTENT else Domain.NON_PERSISTENT
    first, second = replace(NAME, domain=domain), replace(NAME, domain=other)
    schema = paths.schema(NAME.tenant, NAME.namespace, NAME.topic)
    await world.store.put(schema, b"schema", expected=-1)
    for name in (first, second):
        await world.topics.create(name, 1)
    for name, stays in ((first, True), (second, False)):
        await world.topics.begin_deletion(name)
        await world.topics.end_deletion(name)
        assert (await world.store.get(schema) is not None) == stays


async def test_of_two_deletions_at_once_one_deletes_the_schema() -> None:
    world = World()
    names = [replace(NAME, domain=domain) for domain in Domain]
    schema = paths.schema(NAME.tenant, NAME.namespace, NAME.topic)
    await world.store.put(schema, b"schema", expected=-1)
    for name in names:
        await world.topics.create(name, 1)
        await world.topics.begin_deletion(name)
    await world.topics.end_deletion(names[0])
    assert await world.store.get(schema) is None


@pytest.mark.parametrize(
    ("value", "stays"),
    [
        (codec.encode_topic(TopicRecord(1)), True),
        (codec.encode_topic(TopicRecord(1, deleted=True)), False),
        (b"damaged", True),
    ],
    ids=["live", "deleted", "damaged"],
)
async def test_the_schema_of_a_persistent_topic_outlives_the_non_persistent_topic(
    value: bytes, stays: bool
) -> None:
    world = World()
    name = replace(NAME, domain=Domain.NON_PERSISTENT)
    schema = paths.schema(NAME.tenant, NAME.namespace, NAME.topic)
    await world.store.put(schema, b"schema", expected=-1)
    await world.store.put(path_of(NAME), value, expected=-1)
    await world.topics.create(name, 1)
    await world.topics.begin_deletion(name)
    await world.topics.end_deletion(name)
    assert (await world.store.get(schema) is not None) == stays
    assert await world.topics.find(name) is None


async def test_non_persistent_partitions_are_not_stored() -> None:
    world = World()
    name = TopicName.parse("non-persistent://public/default/t")
    await world.topics.create(name, 2)
    assert (await world.topics.require(name)).partitions == 2
    assert await world.store.get(path_of(name.with_partition(0))) is None


class HookedStore(MemoryStore):
    """Awaits `before_put` once, before the value at `path` is written."""

    path = ""
    before_put: Callable[[], Awaitable[None]]

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        if path == self.path:
            self.path = ""
            await self.before_put()
        return await super().put(path, value, expected=expected)


@pytest.mark.parametrize("change", ["create", "grow"])
async def test_a_change_during_a_deletion_leaves_no_partitions(change: str) -> None:
    """The deletion looks for partitions before the change writes the record of partition 4."""
    store = HookedStore(ClusterState().tree)
    world = World(store)

    async def delete() -> None:
        left = await world.topics.begin_deletion(NAME)
        assert await world.topics.delete_untouched(left) == []
        await world.topics.end_deletion(NAME)

    store.before_put = delete
    store.path = path_of(NAME.with_partition(4))
    if change == "create":
        await world.topics.create(NAME, 5)
    else:
        await world.topics.create(NAME, 2)
        with pytest.raises(TopicNotFound):
            await world.topics.grow(NAME, 5)
    assert store.path == ""
    assert await world.topics.find(NAME) is None
    assert [index for index in range(5) if await world.record(index) is not None] == []


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_creation_that_ends_during_a_deletion_leaves_no_partitions(end: str) -> None:
    """The deletion looks for partitions before the creation writes the record of partition 4. The
    write of partition 3 fails, or is cancelled."""
    looked = asyncio.Event()

    class Ordered(MemoryStore):
        async def put(self, path: str, value: bytes, *, expected: int) -> int:
            if path == path_of(NAME.with_partition(3)):
                await delete()
            if path == path_of(NAME.with_partition(4)):
                await looked.wait()
            return await super().put(path, value, expected=expected)

    world = World(Ordered(ClusterState().tree))

    async def delete() -> None:
        left = await world.topics.begin_deletion(NAME)
        assert await world.topics.delete_untouched(left) == []
        looked.set()
        await settle()
        await world.topics.end_deletion(NAME)
        assert await world.record(4) is not None
        if end == "failed":
            raise ValueTooLarge("", 2, 1)
        creating.cancel()
        await asyncio.Event().wait()

    async def create() -> None:
        with pytest.raises(ValueTooLarge if end == "failed" else asyncio.CancelledError):
            await world.topics.create(NAME, 5)

    async with asyncio.TaskGroup() as group:
        creating = group.create_task(create())
    assert await world.topics.find(NAME) is None
    assert [index for index in range(5) if await world.record(index) is not None] == []


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_creation_that_ends_after_its_writes_leaves_no_partitions(end: str) -> None:
    """The topic is deleted after the last write. The read of its record after that fails, or is
    cancelled."""
    synced = 0

    class Ended(MemoryStore):
        async def sync(self, path: str) -> None:
            nonlocal synced
            synced += 1
            if synced == 1:
                found = await self.get(path)
                assert found is not None
                await self.delete(path, expected=found.version)
                if end == "failed":
                    raise Unavailable("suspended")
                creating.cancel()
                await asyncio.Event().wait()
            await super().sync(path)

    world = World(Ended(ClusterState().tree))

    async def create() -> None:
        with pytest.raises(Unavailable if end == "failed" else asyncio.CancelledError):
            await world.topics.create(NAME, 5)

    async with asyncio.TaskGroup() as group:
        creating = group.create_task(create())
    assert synced > 1
    assert [index for index in range(5) if await world.record(index) is not None] == []


async def test_a_late_creation_keeps_the_partitions_of_the_next_topic() -> None:
    """The topic is deleted and created again before the creation writes partition 1."""
    store = HookedStore(ClusterState().tree)
    world = World(store)

    async def create_again() -> None:
        left = await world.topics.begin_deletion(NAME)
        await world.topics.delete_untouched(left)
        await world.topics.end_deletion(NAME)
        await world.topics.create(NAME, 2)

    store.before_put = create_again
    store.path = path_of(NAME.with_partition(1))
    await world.topics.create(NAME, 2)
    assert None not in [await world.record(index) for index in range(2)]


async def test_a_failed_write_of_a_partition_is_reported_as_it_is() -> None:
    """The admin API answers by the type of the error."""
    store = HookedStore(ClusterState().tree)
    world = World(store)

    async def fail() -> None:
        raise ValueTooLarge("", 2, 1)

    store.before_put = fail
    store.path = path_of(NAME.with_partition(1))
    with pytest.raises(ValueTooLarge):
        await world.topics.create(NAME, 2)
