"""A pool of workers on one Shared subscription: each job goes to one worker.

    python examples/worker_pool.py

A worker acknowledges a job after its work. A job that fails is negatively acknowledged, and the
broker redelivers it, possibly to another worker. A worker that dies loses nothing: its
unacknowledged jobs go to the other workers.
"""

from __future__ import annotations

import asyncio
import os

import magnetar
import magnetar.asyncio

SERVICE_URL = os.environ.get("MAGNETAR_SERVICE_URL", "grpc://localhost:6660")
TOPIC = os.environ.get("TOPIC", "jobs")
WORKERS = 4
JOBS = 40


async def submit(client: magnetar.asyncio.Client) -> None:
    # A whole batch goes to one worker, so jobs for several workers are sent without batching.
    producer = await client.create_producer(TOPIC, batching_enabled=False)
    async with asyncio.TaskGroup() as group:  # send all jobs at once
        for number in range(JOBS):
            group.create_task(producer.send(str(number).encode()))
    await producer.close()


async def work(
    client: magnetar.asyncio.Client, name: str, done: dict[int, str], all_done: asyncio.Event
) -> None:
    consumer = await client.subscribe(
        TOPIC,
        "workers",
        consumer_type=magnetar.ConsumerType.Shared,
        consumer_name=name,
        initial_position=magnetar.InitialPosition.Earliest,
        receiver_queue_size=5,  # a small queue shares the jobs evenly
        negative_ack_redelivery_delay_ms=200,
    )
    try:
        while True:
            message = await consumer.receive()
            job = int(message.data())
            if job % 10 == 3 and message.redelivery_count() == 0:
                await consumer.negative_acknowledge(message)  # the first attempt fails
                continue
            await asyncio.sleep(0.01)  # the work
            await consumer.acknowledge(message)
            done[job] = name
            if len(done) == JOBS:
                all_done.set()
    finally:
        await consumer.close()


async def main() -> None:
    done: dict[int, str] = {}
    all_done = asyncio.Event()
    async with magnetar.asyncio.Client(SERVICE_URL) as client:
        await submit(client)
        async with asyncio.TaskGroup() as group:
            workers = [
                group.create_task(work(client, f"worker-{number}", done, all_done))
                for number in range(WORKERS)
            ]
            await all_done.wait()
            for worker in workers:
                worker.cancel()
    for worker_name in sorted(set(done.values())):
        print(worker_name, "did", sum(name == worker_name for name in done.values()), "jobs")
    print(len(done), "jobs done")


if __name__ == "__main__":
    asyncio.run(main())
