"""The cache of policies: loads, changes by other processes, and answers without the metadata store.

`other` is always another process with its own session.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.namespaces import create_namespaces, leave_topic
from support import settle, wait_until

from magnetar.broker.errors import NamespaceNotFound, PoliciesUnavailable
from magnetar.broker.policies.cache import NOTIFY_BATCH, READERS, PolicyCache
from magnetar.metadata import codec, paths
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.model import NamespaceBundles
from magnetar.metadata.policies import (
    BROKER_DEFAULTS,
    NamespaceRecord,
    Policies,
    TenantRecord,
    TopicPolicies,
)
from magnetar.metadata.store import ABSENT
from magnetar.protos.names import DEFAULT_NAMESPACE, NamespaceName, TopicName
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

N = NamespaceName("acme", "orders")
T = TopicName.parse("acme/orders/t")
RECORD = paths.namespace("acme", "orders")


class Cluster:
    """One ensemble, the caches of brokers, and another process."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tree = MemoryTree()
        self.other = MemoryStore(self.tree)
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []

    def cache(
        self,
        *,
        bundles: int = 4,
        namespaces_max: int = 100,
        delay_s: Callable[[], float] = lambda: 0.0,
        faults: Callable[[str, str], Fault | None] = lambda operation, path: None,
    ) -> tuple[PolicyCache, MemoryStore]:
        store = MemoryStore(self.tree, delay_s=delay_s, faults=faults)
        cache = PolicyCache(store, namespace_bundles=bundles, namespaces_max=namespaces_max)
        running = supervise("policies", cache.run, backoff=Backoff(0.1, 1.0, random.Random(0)))
        self._running.append(self._tasks.create_task(running))
        return cache, store

    async def write(self, path: str, value: bytes) -> None:
        stored = await self.other.get(path)
        await self.other.put(path, value, expected=ABSENT if stored is None else stored.version)

    async def set_namespace(self, policies: Policies, *, bundles: int = 4) -> None:
        record = NamespaceRecord(NamespaceBundles.divided(bundles), policies)
        await self.write(RECORD, codec.encode_namespace(record))

    async def set_topic(self, topic: TopicName, policies: Policies) -> None:
        path = paths.topic_policies(topic.tenant, topic.namespace, topic.domain, topic.topic)
        await self.write(path, codec.encode_topic_policies(TopicPolicies(policies)))

    async def delete(self, path: str) -> None:
        stored = await self.other.get(path)
        assert stored is not None
        await self.other.delete(path, expected=stored.version)

    def stop(self) -> None:
        for task in self._running:
            task.cancel()


@asynccontextmanager
async def cluster(*, left: bool = False) -> AsyncIterator[Cluster]:
    """`left`: the namespaces have no records but have topics of an earlier version."""
    async with asyncio.TaskGroup() as tasks:
        here = Cluster(tasks)
        for namespace in ("orders", "other", *(f"n{number}" for number in range(2 * READERS))):
            if left:
                await leave_topic(here.other, "acme", namespace)
            else:
                await create_namespaces(here.other, f"acme/{namespace}")
        yield here
        here.stop()


# ---- loading -------------------------------------------------------------------------------------


async def test_the_first_need_creates_tenant_and_namespace() -> None:
    async with cluster(left=True) as here:
        cache, _ = here.cache(bundles=3)
        await cache.ready(N)
        stored = await here.other.get(RECORD)
        assert stored is not None
        assert codec.decode_namespace(stored.value) == NamespaceRecord(NamespaceBundles.divided(3))
        assert cache.bundle_of(T).range == NamespaceBundles.divided(3).bundle_of(T.bundle_hash)
        assert cache.policies_of(T) == BROKER_DEFAULTS
        tenant = await here.other.get(paths.tenant("acme"))
        assert tenant is not None
        assert cache.tenant_of(N) == codec.decode_tenant(tenant.value) == TenantRecord()


async def test_the_default_namespace_exists_without_a_request() -> None:
    async with cluster() as here:
        here.cache()
        await settle()
        assert await here.other.get(paths.namespace("public", "default")) is not None
        assert await here.other.get(paths.tenant("public")) is not None


async def test_records_that_exist_are_used_as_they_are() -> None:
    async with cluster() as here:
        tenant = TenantRecord(frozenset({"west"}), frozenset({"admin"}))
        await here.write(paths.tenant("acme"), codec.encode_tenant(tenant))
        await here.set_namespace(Policies(version=3, message_ttl_s=60), bundles=16)
        cache, _ = here.cache()
        await cache.ready(N)
        assert cache.tenant_of(N) == tenant
        assert cache.policies_of(T).message_ttl_s == 60
        assert cache.bundle_of(T).range == NamespaceBundles.divided(16).bundle_of(T.bundle_hash)


async def test_two_brokers_that_create_a_namespace_at_once_agree_on_its_bundles() -> None:
    outcomes = set()
    for seed in range(20):
        async with cluster(left=True) as here:
            chance = random.Random(seed)
            caches = [here.cache(bundles=count, delay_s=chance.random)[0] for count in (4, 8)]
            async with asyncio.TaskGroup() as group:
                for cache in caches:
                    group.create_task(cache.ready(N))
            stored = await here.other.get(RECORD)
            assert stored is not None
            bundles = codec.decode_namespace(stored.value).bundles
            assert bundles in (NamespaceBundles.divided(4), NamespaceBundles.divided(8))
            for cache in caches:
                assert cache.bundle_of(T).range == bundles.bundle_of(T.bundle_hash)
            outcomes.add(len(bundles.names))
    assert outcomes == {4, 8}, "each count of bundles was stored first once"


async def test_the_cache_does_not_answer_for_a_namespace_that_is_not_loaded() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        for answer in (cache.bundle_of, cache.policies_of, cache.is_fresh):
            with pytest.raises(PoliciesUnavailable):
                answer(T)
        with pytest.raises(PoliciesUnavailable):
            cache.tenant_of(N)


async def test_a_request_that_ends_leaves_the_load_to_the_others() -> None:
    async with cluster() as here:
        cache, _ = here.cache(delay_s=lambda: 1.0)
        async with asyncio.TaskGroup() as group:
            impatient = group.create_task(cache.ready(N))
            patient = group.create_task(cache.ready(N))
            await asyncio.sleep(0.5)
            impatient.cancel()
            await patient
        assert impatient.cancelled()
        cache.bundle_of(T)


# ---- changes -------------------------------------------------------------------------------------


async def test_a_change_by_another_process_is_seen_and_announced() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        calls = []
        await cache.follow(T)
        cache.subscribe(T, lambda: calls.append(cache.policies_of(T).message_ttl_s))
        await here.set_namespace(Policies(version=1, message_ttl_s=5), bundles=8)
        await settle()
        assert calls == [5]
        assert cache.bundle_of(T).range == NamespaceBundles.divided(8).bundle_of(T.bundle_hash)
        assert cache.is_fresh(T)


async def test_a_topic_follows_the_policies_that_are_set_and_deleted_for_it() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        calls = []
        partition = TopicName.parse("acme/orders/t-partition-3")
        await cache.follow(T)
        await cache.follow(partition)
        cache.subscribe(T, lambda: calls.append(cache.policies_of(T).message_ttl_s))
        for ttl_s in (5, 6):
            await here.set_topic(T, Policies(version=ttl_s, message_ttl_s=ttl_s))
            await settle()
            assert cache.policies_of(partition).message_ttl_s == ttl_s
        await here.delete(paths.topic_policies("acme", "orders", "persistent", "t"))
        await settle()
        assert cache.policies_of(partition).message_ttl_s == 0
        assert calls == [5, 6, 0]


async def test_following_a_topic_reads_the_policies_that_it_sets() -> None:
    async with cluster() as here:
        await here.set_topic(T, Policies(message_ttl_s=5))
        cache, _ = here.cache(delay_s=lambda: 0.01)
        await cache.ready(N)
        with pytest.raises(PoliciesUnavailable, match="not followed"):
            cache.policies_of(T)
        await cache.follow(T)
        assert cache.policies_of(T).message_ttl_s == 5


async def test_a_change_while_the_record_is_read_is_not_missed() -> None:
    for delay_ms in range(1, 40):
        async with cluster() as here:
            cache, _ = here.cache(delay_s=lambda: 0.005)
            async with asyncio.TaskGroup() as group:
                group.create_task(cache.follow(T))
                await asyncio.sleep(delay_ms / 1_000)
                await here.set_topic(T, Policies(message_ttl_s=5))
                await here.set_namespace(Policies(producers_max=6))
            await settle()
            await asyncio.sleep(1)
            found = cache.policies_of(T)
            assert (found.message_ttl_s, found.producers_max) == (5, 6)
            assert cache.is_fresh(T)


async def test_a_topic_that_is_not_followed_any_more_costs_no_watch_and_no_call() -> None:
    async with cluster() as here:
        cache, store = here.cache()
        await cache.ready(N)
        watched = len(store._watches.paths)
        await here.set_topic(T, Policies(message_ttl_s=1))
        calls = []
        await cache.follow(T)
        end = cache.subscribe(T, lambda: calls.append("called"))
        assert len(store._watches.paths) == watched + 1
        cache.unfollow(T)
        end()
        assert len(store._watches.paths) == watched
        await here.set_topic(T, Policies(message_ttl_s=2))
        await here.set_namespace(Policies(message_ttl_s=2))
        await settle()
        assert calls == []


async def test_many_subscribers_are_called_in_steps_that_let_the_loop_run() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        called = 0
        between = set()

        def count() -> None:
            nonlocal called
            called += 1

        async def look() -> None:
            while called < 3 * NOTIFY_BATCH:
                between.add(called)
                await asyncio.sleep(0)

        for number in range(3 * NOTIFY_BATCH):
            topic = TopicName.parse(f"acme/orders/t{number}")
            await cache.follow(topic)
            cache.subscribe(topic, count)
        await here.set_namespace(Policies(message_ttl_s=1))
        await look()
        assert between >= {NOTIFY_BATCH, 2 * NOTIFY_BATCH}


# ---- without the store ---------------------------------------------------------------------------


async def test_during_a_cut_known_answers_stay_and_are_stale() -> None:
    async with cluster() as here:
        cache, store = here.cache()
        await cache.follow(T)
        calls = []
        cache.subscribe(T, lambda: calls.append(cache.policies_of(T).message_ttl_s))
        await settle()  # the watch reports that the record was created
        assert cache.is_fresh(T)
        store.suspend()
        await here.set_namespace(Policies(version=1, message_ttl_s=9), bundles=8)
        await settle()
        await cache.ready(N)
        assert cache.policies_of(T).message_ttl_s == 0
        assert not cache.is_fresh(T)
        store.reconnect()
        await settle()
        assert cache.policies_of(T).message_ttl_s == 9
        assert cache.is_fresh(T)
        assert calls == [9]


async def test_during_a_cut_an_unknown_namespace_is_refused_at_once() -> None:
    async with cluster() as here:
        cache, store = here.cache()
        await cache.ready(N)
        await here.set_topic(T, Policies(message_ttl_s=1))
        store.suspend()
        with pytest.raises(PoliciesUnavailable, match="suspended"):
            await cache.ready(NamespaceName("acme", "other"))
        with pytest.raises(PoliciesUnavailable, match="suspended"):
            await cache.follow(T)
        store.reconnect()
        await cache.ready(NamespaceName("acme", "other"))
        await cache.follow(T)
        assert cache.policies_of(T).message_ttl_s == 1


async def test_a_load_that_the_cut_interrupts_is_refused_and_made_again() -> None:
    async with cluster() as here:
        cache, store = here.cache(delay_s=lambda: 1.0)
        async with asyncio.TaskGroup() as group:

            async def refused() -> None:
                with pytest.raises(PoliciesUnavailable):
                    await cache.ready(N)

            group.create_task(refused())
            await asyncio.sleep(0.5)
            store.suspend()
        store.reconnect()
        await cache.ready(N)
        assert cache.policies_of(T) == BROKER_DEFAULTS


async def test_a_cut_refuses_the_loads_that_wait_for_a_reader_as_well() -> None:
    refused = []

    async def load(cache: PolicyCache, number: int) -> None:
        try:
            await cache.ready(NamespaceName("acme", f"n{number}"))
        except PoliciesUnavailable:
            refused.append(number)

    async with cluster() as here:
        cache, store = here.cache(delay_s=lambda: 1.0)
        async with asyncio.TaskGroup() as group:
            for number in range(2 * READERS):
                group.create_task(load(cache, number))
            await asyncio.sleep(0.5)
            store.suspend()
        assert sorted(refused) == list(range(2 * READERS))


async def test_a_failed_read_is_made_again_without_a_request() -> None:
    failing = [True] * 3

    def faults(operation: str, path: str) -> Fault | None:
        changed = path == RECORD and operation == "get" and ready.is_set()
        return Fault.REQUEST_LOST if changed and failing and failing.pop() else None

    ready = asyncio.Event()
    async with cluster() as here:
        cache, _ = here.cache(faults=faults)
        await cache.follow(T)
        await settle()
        ready.set()
        await here.set_namespace(Policies(message_ttl_s=9))
        await wait_until(lambda: cache.is_fresh(T) and not failing)
        assert cache.policies_of(T).message_ttl_s == 9


async def test_a_lost_session_is_followed_by_a_new_read() -> None:
    async with cluster() as here:
        cache, store = here.cache()
        await cache.follow(T)
        store.expire()
        await here.set_namespace(Policies(message_ttl_s=9))
        await settle()
        assert not cache.is_fresh(T)
        store.reconnect()
        await settle()
        assert cache.policies_of(T).message_ttl_s == 9
        assert cache.is_fresh(T)


@pytest.mark.parametrize("fault", list(Fault))
async def test_a_failed_read_is_refused_and_made_again(fault: Fault) -> None:
    failing = {paths.tenant("acme"), RECORD, paths.topic_policies_folder("acme", "orders")}

    def faults(operation: str, path: str) -> Fault | None:
        return fault if path in failing else None

    async with cluster() as here:
        cache, _ = here.cache(faults=faults)
        for path in sorted(failing):
            with pytest.raises(PoliciesUnavailable):
                await cache.ready(N)
            failing.discard(path)
        await cache.ready(N)
        assert cache.policies_of(T) == BROKER_DEFAULTS


async def test_a_creation_whose_reply_is_lost_creates_one_record() -> None:
    lost = [RECORD]

    def faults(operation: str, path: str) -> Fault | None:
        return Fault.REPLY_LOST if operation == "put" and path in lost and lost.pop() else None

    async with cluster(left=True) as here:
        cache, _ = here.cache(bundles=8, faults=faults)
        await cache.ready(N)
        assert lost == []
        stored = await here.other.get(RECORD)
        assert stored is not None
        assert stored.version == 0
        assert cache.bundle_of(T).range == NamespaceBundles.divided(8).bundle_of(T.bundle_hash)


# ---- records that cannot be used -----------------------------------------------------------------


async def test_an_unreadable_record_is_refused_with_its_reason_until_it_is_repaired() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        await here.write(RECORD, b"\xff\xff\xff")
        for _ in range(2):
            with pytest.raises(PoliciesUnavailable, match="invalid namespace record"):
                await cache.ready(N)
        await here.set_namespace(Policies(message_ttl_s=3))
        await settle()
        await cache.ready(N)
        assert cache.policies_of(T).message_ttl_s == 3


async def test_a_record_that_becomes_unreadable_leaves_the_last_answer_and_opens_no_topic() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        await here.set_namespace(Policies(message_ttl_s=3))
        await cache.follow(T)
        await here.write(RECORD, b"\xff\xff\xff")
        await settle()
        assert cache.policies_of(T).message_ttl_s == 3
        assert not cache.is_fresh(T)
        with pytest.raises(PoliciesUnavailable, match="invalid namespace record"):
            await cache.follow(TopicName.parse("acme/orders/u"))
        await here.set_namespace(Policies(message_ttl_s=4))
        await settle()
        assert cache.policies_of(T).message_ttl_s == 4
        assert cache.is_fresh(T)


async def test_unreadable_policies_of_a_topic_keep_it_from_being_followed() -> None:
    async with cluster() as here:
        cache, store = here.cache()
        path = paths.topic_policies("acme", "orders", "persistent", "t")
        await here.write(path, b"\xff\xff\xff")
        await cache.ready(N)
        watched = len(store._watches.paths)
        with pytest.raises(PoliciesUnavailable, match="invalid topic policies"):
            await cache.follow(T)
        assert len(store._watches.paths) == watched
        await here.set_topic(T, Policies(message_ttl_s=3))
        await cache.follow(T)
        assert cache.policies_of(T).message_ttl_s == 3


async def test_a_deleted_namespace_that_no_topic_uses_is_forgotten_and_not_created_again() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        await cache.ready(N)
        await here.delete(RECORD)
        await settle()
        assert set(cache._entries) == {DEFAULT_NAMESPACE}
        assert await here.other.get(RECORD) is None


async def test_deleting_a_namespace_and_its_tenant_together_does_not_end_the_reads() -> None:
    tree = MemoryTree()
    other, store = MemoryStore(tree), MemoryStore(tree, delay_s=lambda: 0.01)
    await create_namespaces(other, "lone/ns")
    cache, lone = PolicyCache(store), NamespaceName("lone", "ns")
    async with asyncio.TaskGroup() as group:
        run = group.create_task(cache.run())
        await cache.ready(lone)
        for path in (paths.namespace("lone", "ns"), paths.tenant("lone")):
            await other.delete(path, expected=0)
        await asyncio.sleep(1.0)  # both reads find no record
        with pytest.raises(NamespaceNotFound):
            await cache.ready(lone)
        assert not run.done()
        run.cancel()


async def test_a_namespace_that_is_deleted_below_a_topic_keeps_its_last_policies() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        await here.set_namespace(Policies(message_ttl_s=3))
        await cache.follow(T)
        await here.delete(RECORD)
        await settle()
        assert await here.other.get(RECORD) is None
        assert cache.policies_of(T).message_ttl_s == 3
        assert not cache.is_fresh(T)
        await here.set_namespace(Policies(message_ttl_s=4))
        await settle()
        assert cache.policies_of(T).message_ttl_s == 4
        assert cache.is_fresh(T)


async def test_a_namespace_that_is_deleted_below_a_topic_is_forgotten_after_the_topic() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        await cache.follow(T)
        await here.delete(RECORD)
        await settle()
        cache.unfollow(T)
        assert set(cache._entries) == {DEFAULT_NAMESPACE}
        with pytest.raises(NamespaceNotFound):
            await cache.ready(N)
        await here.set_namespace(Policies(message_ttl_s=4))
        await cache.follow(T)
        assert cache.policies_of(T).message_ttl_s == 4


async def test_a_namespace_that_is_deleted_while_a_topic_of_it_opens_is_forgotten() -> None:
    async with cluster() as here:
        cache, _ = here.cache(delay_s=lambda: 0.01)
        await cache.ready(N)
        await here.set_namespace(Policies(message_ttl_s=3))
        async with asyncio.TaskGroup() as group:
            following = group.create_task(refused_follow(cache))
            await here.delete(RECORD)
        assert following.result()
        assert set(cache._entries) == {DEFAULT_NAMESPACE}


async def refused_follow(cache: PolicyCache) -> bool:
    with pytest.raises(NamespaceNotFound):
        await cache.follow(T)
    return True


@pytest.mark.parametrize("name", ["missing/orders", "acme/unknown"])
async def test_an_unknown_tenant_or_namespace_is_refused_until_it_is_created(name: str) -> None:
    async with cluster() as here:
        cache, store = here.cache()
        watched = len(store._watches.paths)
        for _ in range(2):
            with pytest.raises(NamespaceNotFound, match=name):
                await cache.ready(NamespaceName.parse(name))
        assert set(cache._entries) == {DEFAULT_NAMESPACE}
        assert len(store._watches.paths) <= watched + 3  # of the default namespace
        await create_namespaces(here.other, name)
        await cache.ready(NamespaceName.parse(name))


async def test_an_upgrade_records_the_namespaces_of_existing_topics() -> None:
    async with cluster(left=True) as here:
        here.cache(bundles=8)
        await asyncio.sleep(1)
        for namespace in ("orders", "other"):
            stored = await here.other.get(paths.namespace("acme", namespace))
            assert stored is not None
            assert len(codec.decode_namespace(stored.value).bundles.names) == 8
        assert await here.other.get(paths.tenant("acme")) is not None


async def test_the_namespace_of_the_system_needs_no_administrator() -> None:
    async with cluster() as here:
        cache, _ = here.cache()
        await cache.ready(NamespaceName("pulsar", "system"))


# ---- the bound -----------------------------------------------------------------------------------


async def test_at_the_limit_the_least_recently_used_namespace_is_forgotten() -> None:
    async with cluster() as here:
        cache, store = here.cache(namespaces_max=3)
        first, second, third = (NamespaceName("acme", name) for name in ("n1", "n2", "n3"))
        await cache.ready(first)
        await cache.ready(second)
        watched = len(store._watches.paths)
        await cache.ready(first)
        await cache.ready(third)
        assert set(cache._entries) == {DEFAULT_NAMESPACE, first, third}
        assert len(store._watches.paths) == watched
        await cache.ready(second)
        assert set(cache._entries) == {DEFAULT_NAMESPACE, second, third}


async def test_at_the_limit_namespaces_in_use_stay_and_the_next_one_is_refused() -> None:
    async with cluster() as here:
        cache, _ = here.cache(namespaces_max=2)
        await cache.follow(T)
        other = NamespaceName("acme", "other")
        with pytest.raises(PoliciesUnavailable, match="other namespaces"):
            await cache.ready(other)
        assert cache.policies_of(T) == BROKER_DEFAULTS
        cache.unfollow(T)
        await cache.ready(other)
        assert set(cache._entries) == {DEFAULT_NAMESPACE, other}


async def test_a_namespace_that_is_being_loaded_is_not_forgotten() -> None:
    async with cluster() as here:
        cache, _ = here.cache(namespaces_max=2, delay_s=lambda: 1.0)
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(cache.ready(N))
            await asyncio.sleep(0.5)
            with pytest.raises(PoliciesUnavailable):
                await cache.ready(NamespaceName("acme", "other"))
            await loading
        cache.bundle_of(T)
