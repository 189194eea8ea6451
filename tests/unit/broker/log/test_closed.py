"""The content of a topic is read without opening the topic. Some cases must open the topic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState

from magnetar.client.asyncio import Client
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_topic, encode_topic
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from magnetar.broker.log.chain import Chain

pytestmark = pytest.mark.real_loop(deadline_s=60)

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)
PATH = paths.topic(NAME.tenant, NAME.namespace, NAME.domain, NAME.topic)


async def publish(client: Client, count: int) -> None:
    producer = await client.create_producer(TOPIC, batching_max_messages=2)
    for number in range(count):
        await producer.send(b"%d" % number)
    await producer.close()


def facts(chain: Chain | None) -> tuple[object, ...] | None:
    if chain is None:
        return None
    return chain.records, chain.counts, chain.first_index, chain.next_index, chain.dropped


async def unloaded(broker: RunningBroker) -> Chain:
    """Unload the topic. Return the chain that the open topic had."""
    chain = (await broker.broker.stored_topic(NAME)).log.chain
    await broker.broker.unload_topic(NAME)
    return chain


async def test_a_closed_topic_is_read_as_its_owner_would_open_it() -> None:
    async with running_broker(ClusterState()) as it, Client(it.grpc_url) as client:
        await client.subscribe(TOPIC, "keeps")
        for _ in range(3):
            await publish(client, 3)
            kept = await unloaded(it)
            found = await it.broker.closed_chain(NAME)
            assert facts(found) == facts(kept)
        assert kept.next_index == 9
        assert not it.broker.is_open(NAME)
        topic = await it.broker.stored_topic(NAME, create=False)
        assert await it.broker.closed_chain(NAME) is None  # the topic is open at this broker
        await topic.truncate()
        kept = await unloaded(it)
        found = await it.broker.closed_chain(NAME)
        assert found is not None
        assert (found.records, found.first_index, found.next_index) == ((), 9, 9)
        assert facts(found) == facts(kept)


async def test_a_topic_without_messages_is_read_without_a_ledger() -> None:
    async with running_broker(ClusterState()) as it:
        await unloaded(it)
        found = await it.broker.closed_chain(NAME)
        assert found is not None
        assert (found.records, found.next_index) == ((), 0)


async def test_a_topic_that_its_owner_left_open_or_that_does_not_exist_must_be_opened() -> None:
    cluster = ClusterState()
    async with running_broker(cluster) as it:
        assert await it.broker.closed_chain(NAME) is None
        async with Client(it.grpc_url) as client:
            await publish(client, 2)
        async with running_broker(cluster, 1) as other:
            assert await other.broker.closed_chain(NAME) is None


@pytest.mark.parametrize("damage", ["deleted", "longer", "no ledger"])
async def test_a_topic_whose_record_contradicts_its_ledgers_must_be_opened(damage: str) -> None:
    cluster = ClusterState()
    async with running_broker(cluster) as it, Client(it.grpc_url) as client:
        await publish(client, 2)
        await unloaded(it)
        found = await it.store.get(PATH)
        assert found is not None
        record = decode_topic(found.value)
        [ledger] = record.ledgers
        if damage == "deleted":
            record = replace(record, ledgers=(), deleting=(ledger.ledger,), deleted=True)
        elif damage == "longer":
            record = replace(record, ledgers=(replace(ledger, entries=ledger.entries + 1),))
        else:
            cluster.ledgers.ledgers.pop(ledger.ledger)
        await it.store.put(PATH, encode_topic(record), expected=found.version)
        assert await it.broker.closed_chain(NAME) is None
