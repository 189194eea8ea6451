"""Loads on a running Magnetar server through its client: publish, tail, read a backlog."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import magnetar
import magnetar.asyncio
from benchmarks.figures import Figure, Shape

if TYPE_CHECKING:
    from magnetar.client.message import MessageId


def publish(url: str, topic: str, shape: Shape, *, batched: bool) -> Figure:
    """Publish by `send_async` with `shape.window` messages in flight until all are stored."""
    body = os.urandom(shape.bytes)
    latencies: list[float] = []
    with magnetar.Client(url) as client:
        producer = client.create_producer(
            topic,
            batching_enabled=batched,
            max_pending_messages=shape.window,
            block_if_queue_full=True,
        )
        producer.send(body)  # opens the topic and creates its ledger
        began_s = time.perf_counter()
        for _ in range(shape.count):
            producer.send_async(body, _refuse_failure)
        producer.flush()
        return Figure.of(shape, time.perf_counter() - began_s, latencies)


def publish_one_at_a_time(url: str, topic: str, shape: Shape) -> Figure:
    """Publish each message after the receipt of the preceding one.

    Uses the asyncio client, so that the figures do not include the wake-up of a thread.
    """

    async def main() -> Figure:
        body = os.urandom(shape.bytes)
        latencies = []
        async with magnetar.asyncio.Client(url) as client:
            producer = await client.create_producer(topic, batching_enabled=False)
            await producer.send(body)
            began_s = time.perf_counter()
            for _ in range(shape.count):
                sent_s = time.perf_counter()
                await producer.send(body)
                latencies.append(time.perf_counter() - sent_s)
            return Figure.of(shape, time.perf_counter() - began_s, latencies)

    return asyncio.run(main())


def read_backlog(url: str, topic: str, shape: Shape) -> Figure:
    """Read all messages that `publish` left in the topic, by a reader from the earliest one."""

    async def main() -> Figure:
        async with magnetar.asyncio.Client(url) as client:
            reader = await client.create_reader(topic, magnetar.MessageId.earliest)
            await reader.read_next()
            began_s = time.perf_counter()
            for _ in range(shape.count - 1):
                await reader.read_next()
            return Figure.of(shape, time.perf_counter() - began_s, [])

    return asyncio.run(main())


def tail(url: str, topic: str, shape: Shape, *, batched: bool) -> Figure:
    """Publish while a consumer of a Shared subscription receives and acknowledges the messages."""

    async def main() -> Figure:
        body = os.urandom(shape.bytes)
        async with magnetar.asyncio.Client(url) as client:
            consumer = await client.subscribe(
                topic, "tail", consumer_type=magnetar.ConsumerType.Shared
            )
            producer = await client.create_producer(
                topic, batching_enabled=batched, max_pending_messages=shape.window
            )
            began_s = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                group.create_task(_publish_all(producer, body, shape))
                for _ in range(shape.count):
                    await consumer.acknowledge(await consumer.receive())
            return Figure.of(shape, time.perf_counter() - began_s, [])

    return asyncio.run(main())


async def _publish_all(producer: magnetar.asyncio.Producer, body: bytes, shape: Shape) -> None:
    window = asyncio.Semaphore(shape.window)

    def done(result: magnetar.Result, message_id: MessageId) -> None:
        _refuse_failure(result, message_id)
        window.release()

    for _ in range(shape.count):
        await window.acquire()
        producer.send_async(body, done)
    await producer.flush()


def _refuse_failure(result: magnetar.Result, message_id: MessageId) -> None:
    assert result is magnetar.Result.Ok, f"a send failed: {result}"
