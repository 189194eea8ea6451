"""PRODUCER on the wire: the wait for exclusive access, the initial subscription."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fakes.place import place

from magnetar.metadata import codec, paths
from magnetar.metadata.policies import Policies, TopicPolicies
from magnetar.metadata.store import update
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.place import Place
    from fakes.wire import WireClient

TOPIC = "persistent://public/default/t"


async def unpinged(client: WireClient) -> object:
    """The next command that is no PING. Answers PINGs meanwhile."""
    while True:
        body = (await client.receive()).body
        if not isinstance(body, pb.CommandPing):
            return body
        await client.send(pb.CommandPong())


@asynccontextmanager
async def led(here: Place) -> AsyncIterator[WireClient]:
    """A client with an exclusive producer. The client answers PINGs."""

    async def live() -> None:
        while True:
            await unpinged(leader)

    leader = await here.client()
    await leader.produce(TOPIC, producer_access_mode=pb.Exclusive)
    async with asyncio.TaskGroup() as tasks:
        living = tasks.create_task(live())
        yield leader
        living.cancel()


async def test_a_waiting_producer_is_answered_twice_however_long_it_waits() -> None:
    async with place() as here, led(here) as leader:
        waiting = await here.client()
        first = await waiting.produce(
            TOPIC, producer_name="next", producer_access_mode=pb.WaitForExclusive
        )
        assert isinstance(first, pb.CommandProducerSuccess)
        assert not first.producer_ready
        again = await waiting.produce(TOPIC, producer_access_mode=pb.WaitForExclusive)
        assert not again.producer_ready, "the repeated request still waits"
        for _ in range(20):
            await asyncio.sleep(30)
            await waiting.send(pb.CommandPing())  # an honest client's sign of life
        assert here.topic.admission.waiting
        await leader.send(pb.CommandCloseProducer(producer_id=1, request_id=99))
        while isinstance(answer := await unpinged(waiting), pb.CommandPong):
            pass
        assert isinstance(answer, pb.CommandProducerSuccess)
        assert answer.producer_ready
        assert answer.request_id == again.request_id
        assert (answer.producer_name, answer.topic_epoch) == ("next", 1)


async def test_a_waiting_producer_can_be_closed() -> None:
    async with place() as here, led(here):
        waiting = await here.client()
        await waiting.produce(TOPIC, producer_access_mode=pb.WaitForExclusive)
        assert here.topic.admission.waiting
        closed = await waiting.ask(pb.CommandCloseProducer(producer_id=1, request_id=0))
        assert isinstance(closed, pb.CommandSuccess)
        assert not here.topic.admission.waiting


async def test_an_unload_ends_the_wait_with_an_error_that_clients_retry() -> None:
    async with place() as here, led(here):
        waiting = await here.client()
        first = await waiting.produce(TOPIC, producer_access_mode=pb.WaitForExclusive)
        await here.topic.close()
        error = await waiting.expect(pb.CommandError)
        assert (error.request_id, error.error) == (first.request_id, pb.ServiceNotReady)


async def test_the_initial_subscription_exists_before_the_producer_is_ready() -> None:
    async with place() as here:
        client = await here.client()
        answer = await client.produce(TOPIC, initial_subscription_name="first")
        assert isinstance(answer, pb.CommandProducerSuccess)
        assert list(here.topic.subscriptions) == ["first"]


async def test_an_initial_subscription_needs_auto_creation() -> None:
    async with place() as here:
        path = paths.topic_policies("public", "default", "persistent", "t")
        value = codec.encode_topic_policies(
            TopicPolicies(Policies(auto_subscription_creation=False))
        )
        await update(here.store, path, lambda _: value, deadline=1e9)
        client = await here.client()
        refused = await client.produce(TOPIC, initial_subscription_name="first")
        assert isinstance(refused, pb.CommandError)
        assert refused.error == pb.NotAllowedError
        assert "first" in refused.message
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)
