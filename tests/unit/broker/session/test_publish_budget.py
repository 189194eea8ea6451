"""The producers of topics whose bookies are away share one budget and do not block other
clients."""

from __future__ import annotations

import asyncio

from fakes.place import place
from support import wait_until

from magnetar.broker.log.budget import PublishBudget
from magnetar.broker.session.connection import PROBE_TIMEOUT_S
from magnetar.metadata.policies import Rate
from magnetar.protos import pulsar_pb2 as pb

TOPICS = 40
TEXT = "x" * 2_000
LIMIT = 50_000


async def test_many_topics_without_bookies_hold_one_budget_and_all_are_served_later() -> None:
    budget = PublishBudget(LIMIT)
    async with place(publish_budget=budget) as here:
        reader = await here.client()
        await reader.subscribe("persistent://public/default/t0", subType=pb.CommandSubscribe.Shared)
        clients = [await here.client() for _ in range(TOPICS)]
        for number, client in enumerate(clients):
            await client.produce(f"persistent://public/default/t{number}")
        here.ledgers.bookies = False
        sent = 4

        async def publish(client: object) -> None:
            for number in range(sent):
                await client.publish(TEXT, sequence_id=number)  # type: ignore[attr-defined]
            # A control command behind the SENDs.
            await client.send(  # type: ignore[attr-defined]
                pb.CommandCloseProducer(producer_id=1, request_id=7)
            )

        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(publish(client))
            await wait_until(lambda: budget.waiting > 10, deadline_s=60)
            frame = len(TEXT) + 600
            assert budget.peak < LIMIT + TOPICS * frame
            await reader.flow(10)  # a connection that does not publish is read on
            await reader.send(pb.CommandPing())
            await reader.expect(pb.CommandPong)
            here.ledgers.bookies = True
            async with asyncio.timeout(600):
                for client in clients:
                    for number in range(sent):
                        receipt = await client.expect(pb.CommandSendReceipt)
                        assert receipt.sequence_id == number
                    await client.expect(pb.CommandSuccess)
        await wait_until(lambda: budget.used == 0)
        assert budget.waiting == 0


async def test_the_publish_rate_of_the_broker_counts_for_all_topics_together() -> None:
    async with place(publish_rate=Rate(10, 0, 1)) as here:
        loop = asyncio.get_running_loop()
        clients = [await here.client() for _ in range(3)]
        for number, client in enumerate(clients):
            await client.produce(f"persistent://public/default/t{number}")
        began = loop.time()
        for number in range(20):
            for client in clients:
                await client.publish(sequence_id=number)
                await client.expect(pb.CommandSendReceipt)
        assert 4.0 < loop.time() - began < 6.5  # 60 messages, of which 10 are there at once


async def test_a_client_that_vanishes_while_it_waits_leaves_the_queue() -> None:
    budget = PublishBudget(1_000)
    async with place(publish_budget=budget) as here:
        client = await here.client()
        await client.produce("persistent://public/default/t")
        here.ledgers.bookies = False
        await client.publish(TEXT)
        await wait_until(lambda: budget.waiting == 1)
        await client.wire.break_off()
        await here.serving[0]
        assert budget.waiting == 0


async def test_a_client_that_vanishes_while_it_waits_for_the_publish_rate_leaves_the_queue() -> (
    None
):
    async with place(publish_rate=Rate(0, 100, 1)) as here:
        client = await here.client()
        await client.produce("persistent://public/default/t")
        await client.publish(TEXT * 10)
        await client.expect(pb.CommandSendReceipt)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await client.wire.break_off()
        await here.serving[0]
        assert loop.time() - began < 3 * PROBE_TIMEOUT_S, "the producer's debt takes minutes"
