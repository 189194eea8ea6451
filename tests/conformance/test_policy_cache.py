"""The cache of policies over every MetadataStore. The cache sees changes by another process, and
two brokers agree on the bundles. test_metadata_store.py tests the other properties of the stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from typing import TYPE_CHECKING

import pytest
from fakes.namespaces import create_namespaces, leave_topic
from support import wait_until

from magnetar.broker.policies.cache import PolicyCache
from magnetar.metadata import codec, paths
from magnetar.metadata.embedded import EmbeddedStore
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import NamespaceBundles
from magnetar.metadata.policies import NamespaceRecord, Policies, TopicPolicies
from magnetar.metadata.store import ABSENT, KEEP, update
from magnetar.protos.names import TopicName
from magnetar.runtime.supervise import Backoff, supervise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from magnetar.metadata.store import MetadataStore
    from magnetar.zookeeper_server import ZooKeeperEnsemble

    Stores = Callable[[], AbstractAsyncContextManager[tuple[MetadataStore, MetadataStore]]]

pytestmark = pytest.mark.real_loop

_numbers = itertools.count()


@pytest.fixture(
    params=["memory", "embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)]
)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """Opens two clients of one store."""
    server: ZooKeeperEnsemble | None = None
    if request.param == "zookeeper":
        server = request.getfixturevalue("zookeeper")
    return lambda: _stores(request.param, tmp_path, server)


@contextlib.asynccontextmanager
async def _stores(
    kind: str, tmp_path: Path, server: ZooKeeperEnsemble | None
) -> AsyncIterator[tuple[MetadataStore, MetadataStore]]:
    one: MetadataStore
    two: MetadataStore
    if kind == "memory":
        tree = MemoryTree()
        one, two = MemoryStore(tree), MemoryStore(tree)
    elif kind == "embedded":
        one = two = await EmbeddedStore.open(tmp_path / "metadata")
    else:
        from magnetar.metadata.zookeeper import ZooKeeperStore

        assert server is not None
        one = await ZooKeeperStore.connect(server.hosts)
        two = await ZooKeeperStore.connect(server.hosts)
    try:
        yield one, two
    finally:
        await one.close()
        await two.close()


@contextlib.asynccontextmanager
async def caches(*made: PolicyCache) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        backoff = Backoff(0.1, 1.0, random.Random(0))
        running = [
            tasks.create_task(supervise("policies", each.run, backoff=backoff)) for each in made
        ]
        yield
        for task in running:
            task.cancel()


def topic_of_a_new_namespace() -> TopicName:
    return TopicName.parse(f"acme/n{next(_numbers)}/t")


async def test_changes_by_another_process_are_seen(stores: Stores) -> None:
    topic = topic_of_a_new_namespace()
    record = paths.namespace(topic.tenant, topic.namespace)
    own = paths.topic_policies(topic.tenant, topic.namespace, topic.domain, topic.topic)
    async with stores() as (one, two):
        await create_namespaces(one, str(topic.namespace_name))
        cache = PolicyCache(one)
        async with caches(cache):
            await cache.follow(topic)
            called = asyncio.Event()
            cache.subscribe(topic, called.set)
            assert cache.bundle_of(topic).range in NamespaceBundles().names

            changed = NamespaceRecord(NamespaceBundles.divided(8), Policies(message_ttl_s=5))
            await two.sync(record)
            stored = await two.get(record)
            assert stored is not None
            await two.put(record, codec.encode_namespace(changed), expected=stored.version)
            await wait_until(lambda: cache.policies_of(topic).message_ttl_s == 5)
            assert called.is_set()
            assert cache.bundle_of(topic).range in NamespaceBundles.divided(8).names

            for ttl_s in (6, 7):
                value = codec.encode_topic_policies(TopicPolicies(Policies(message_ttl_s=ttl_s)))
                deadline = asyncio.get_running_loop().time() + 10
                await update(
                    two,
                    own,
                    lambda before, value=value: KEEP if before == value else value,
                    deadline=deadline,
                )
                await wait_until(
                    lambda ttl_s=ttl_s: cache.policies_of(topic).message_ttl_s == ttl_s
                )
            await two.delete(own, expected=1)
            await wait_until(lambda: cache.policies_of(topic).message_ttl_s == 5)
            await wait_until(lambda: cache.is_fresh(topic))


async def test_two_brokers_agree_on_the_bundles_of_a_new_namespace(stores: Stores) -> None:
    topic = topic_of_a_new_namespace()
    async with stores() as (one, two):
        await leave_topic(one, topic.tenant, topic.namespace)
        first = PolicyCache(one, namespace_bundles=4)
        second = PolicyCache(two, namespace_bundles=16)
        async with caches(first, second):
            async with asyncio.TaskGroup() as group:
                group.create_task(first.ready(topic.namespace_name))
                group.create_task(second.ready(topic.namespace_name))
            assert first.bundle_of(topic) == second.bundle_of(topic)


async def test_policies_that_exist_are_known_when_a_topic_is_followed(stores: Stores) -> None:
    topic = topic_of_a_new_namespace()
    own = paths.topic_policies(topic.tenant, topic.namespace, topic.domain, topic.topic)
    value = codec.encode_topic_policies(TopicPolicies(Policies(deduplication=True)))
    async with stores() as (one, two):
        await create_namespaces(two, str(topic.namespace_name))
        await two.put(own, value, expected=ABSENT)
        await one.sync(own)
        cache = PolicyCache(one)
        async with caches(cache):
            await cache.follow(topic)
            assert cache.policies_of(topic).deduplication
