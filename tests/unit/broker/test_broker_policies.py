"""A broker neither locates nor opens a topic whose policies or bundles are unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fakes.namespaces import create_namespaces
from fakes.place import place
from support import settle

from magnetar.broker.errors import PoliciesUnavailable
from magnetar.broker.refusal import code_of
from magnetar.broker.topic.contract import CloseReason
from magnetar.metadata import codec, paths
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import NamespaceBundles
from magnetar.metadata.policies import NamespaceRecord, Policies, TopicPolicies
from magnetar.metadata.store import ABSENT
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from fakes.place import Place

T = TopicName.parse("acme/orders/t")
NAMESPACE = paths.namespace("acme", "orders")
TOPIC = paths.topic("acme", "orders", "persistent", "t")
OWN = paths.topic_policies("acme", "orders", "persistent", "t")


def other_of(here: Place) -> MemoryStore:
    """The metadata store as another process sees it."""
    return MemoryStore(here.broker._store._shared)


async def test_a_topic_of_an_unreadable_namespace_is_neither_located_nor_opened() -> None:
    async with place() as here:
        other = other_of(here)
        await other.put(NAMESPACE, b"\xff\xff\xff", expected=ABSENT)
        with pytest.raises(PoliciesUnavailable):
            await here.broker.locate(T, authoritative=True)
        with pytest.raises(PoliciesUnavailable):
            await here.broker.topic(T)
        assert await other.get(TOPIC) is None, "the topic's epoch was raised"
        assert await other.children(f"{paths.OWNERSHIP}/acme") == [], "the broker took the bundle"


async def test_a_topic_whose_own_policies_are_unreadable_is_not_opened() -> None:
    async with place() as here:
        other = other_of(here)
        await create_namespaces(other, "acme/orders")
        await other.put(OWN, b"\xff\xff\xff", expected=ABSENT)
        with pytest.raises(PoliciesUnavailable):
            await here.broker.topic(T)
        assert await other.get(TOPIC) is None, "the topic's epoch was raised"
        value = codec.encode_topic_policies(TopicPolicies(Policies(message_ttl_s=4)))
        await other.put(OWN, value, expected=0)
        await here.broker.topic(T)
        assert here.broker.policies.policies_of(T).message_ttl_s == 4


async def test_without_metadata_a_lookup_of_an_unknown_namespace_gets_a_code_to_retry() -> None:
    async with place() as here:
        await create_namespaces(other_of(here), "acme/orders", "acme/other")
        await here.broker.topic(T)
        here.broker._store.suspend()
        located = await here.broker.locate(T, authoritative=False)
        assert located.serves, "what this broker holds is served"
        with pytest.raises(PoliciesUnavailable) as refused:
            await here.broker.locate(TopicName.parse("acme/other/t"), authoritative=False)
        assert code_of(refused.value) == pb.MetadataError
        here.broker._store.reconnect()


async def test_a_topic_is_unloaded_with_the_bundle_under_which_it_was_opened() -> None:
    """The namespace of the open topic has new bundles."""
    async with place() as here:
        broker, other = here.broker, other_of(here)
        await create_namespaces(other, "acme/orders")
        await broker.topic(T)
        bundle = broker.policies.bundle_of(T)
        stored = await other.get(NAMESPACE)
        assert stored is not None
        divided = NamespaceRecord(NamespaceBundles.divided(64))
        await other.put(NAMESPACE, codec.encode_namespace(divided), expected=stored.version)
        await settle()
        assert broker.policies.bundle_of(T) != bundle
        await broker._owners.release(bundle, broker._unload)
        assert broker.topics == []


async def test_a_closed_topic_is_not_followed_and_is_followed_again_when_it_opens() -> None:
    async with place() as here:
        broker, other = here.broker, other_of(here)
        await create_namespaces(other, "acme/orders")
        value = codec.encode_topic_policies(TopicPolicies(Policies(message_ttl_s=4)))
        await other.put(OWN, value, expected=ABSENT)
        await broker.topic(T)
        assert broker.policies.policies_of(T).message_ttl_s == 4
        await broker._close(T, CloseReason.UNLOADED)
        with pytest.raises(PoliciesUnavailable, match="not followed"):
            broker.policies.policies_of(T)
        await broker.topic(T)
        assert broker.policies.policies_of(T).message_ttl_s == 4
