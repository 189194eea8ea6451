"""Measures messages that are published, delivered and individually acknowledged, at 3/3/2.

One process with the asyncio client has a producer, and four consumers of a Shared or Key_Shared
subscription. Run it with `python -m benchmarks.subscriptions`. Every receipt and every
acknowledgement waits for fsync. The output has the messages per second, the messages per entry that
the consumers got, and the CPU of each message in the broker, in the bookies and in the client. It
also has the rate that two cores could carry if they did nothing else.

The reference (reference.py) publishes entries of the same size, and delivers no message. The loads
and the reference take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import magnetar
import magnetar.asyncio
from benchmarks import reference
from benchmarks.figures import Figure, Shape
from benchmarks.processes import alone, cpu_s
from magnetar.local_cluster import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

CONSUMERS: Final = 4
WINDOW: Final = 40_000  # messages without a receipt
KEYED_BYTES: Final = 20 * 1024 * 1024
REFERENCE_PORT: Final = 31_860


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    kind: magnetar.ConsumerType
    batch: int  # the maximum number of messages in an entry; 1: unbatched
    keys: int  # the number of keys; 0: the messages have no key, and batches are not by key
    count: int
    target: int  # messages per second


LOADS: Final = [
    Load("Shared, batches of 100", magnetar.ConsumerType.Shared, 100, 0, 100_000, 25_000),
    Load("Key_Shared, 1,000 keys", magnetar.ConsumerType.KeyShared, 100, 1_000, 100_000, 25_000),
    Load("Key_Shared, 1 M keys", magnetar.ConsumerType.KeyShared, 100, 1_000_000, 30_000, 12_000),
    Load("Shared, unbatched", magnetar.ConsumerType.Shared, 1, 0, 30_000, 12_000),
    Load("Key_Shared, unbatched", magnetar.ConsumerType.KeyShared, 1, 1_000, 30_000, 12_000),
]


@dataclass(frozen=True, slots=True)
class Carried:
    """The result of a load."""

    per_s: float
    per_entry: float  # messages of an entry on average
    client_us: float  # CPU of the client for a message
    broker_us: float
    bookies_us: float

    @property
    def two_cores_per_s(self) -> float:
        return 2e6 / (self.client_us + self.broker_us + self.bookies_us)


def carry(url: str, topic: str, load: Load, size: int, pids: Sequence[tuple[str, int]]) -> Carried:
    """Run a load on a new topic. `pids`: the roles and processes of the servers."""

    async def main() -> Carried:
        async with magnetar.asyncio.Client(url) as client:
            consumers = [
                await client.subscribe(topic, "s", consumer_type=load.kind, consumer_name=f"c{it}")
                for it in range(CONSUMERS)
            ]
            by_key = magnetar.BatchingType.KeyBased if load.keys else magnetar.BatchingType.Default
            producer = await client.create_producer(
                topic,
                batching_enabled=load.batch > 1,
                batching_type=by_key,
                batching_max_messages=load.batch * max(1, load.keys),
                # The limit of all open batches together. With keys, it decides the size of each
                # batch.
                batching_max_allowed_size_in_bytes=KEYED_BYTES if load.keys else 128 * 1024,
                batching_max_publish_delay_ms=500 if load.keys else 10,
                max_pending_messages=WINDOW + 1,
            )
            entries: set[tuple[int, int]] = set()
            left, done = load.count, asyncio.Event()

            async def consume(consumer: magnetar.asyncio.Consumer) -> None:
                nonlocal left
                while True:
                    message = await consumer.receive()
                    place = message.message_id()
                    entries.add((place.ledger_id(), place.entry_id()))
                    await consumer.acknowledge(message)
                    left -= 1
                    if not left:
                        done.set()

            began_s, client_s = time.perf_counter(), time.process_time()
            before = {pid: cpu_s(pid) for _, pid in pids}
            async with asyncio.TaskGroup() as group:
                consuming = [group.create_task(consume(consumer)) for consumer in consumers]
                await _publish(producer, load, size)
                await done.wait()
                for task in consuming:
                    task.cancel()
            for consumer in consumers:
                await consumer.close()  # returns when the acknowledgements are durable
            seconds, client_s = time.perf_counter() - began_s, time.process_time() - client_s
            spent = {"broker": 0.0, "bookie": 0.0}
            for role, pid in pids:
                spent[role] += cpu_s(pid) - before[pid]
            us = 1e6 / load.count
            return Carried(
                load.count / seconds,
                load.count / len(entries),
                client_s * us,
                spent["broker"] * us,
                spent["bookie"] * us,
            )

    return asyncio.run(main())


async def _publish(producer: magnetar.asyncio.Producer, load: Load, size: int) -> None:
    body, window = os.urandom(size), asyncio.Semaphore(WINDOW)

    def done(result: magnetar.Result, _: magnetar.MessageId) -> None:
        assert result is magnetar.Result.Ok, f"a send failed: {result}"
        window.release()

    for number in range(load.count):
        await window.acquire()
        key = f"key-{number * 7_919 % load.keys}" if load.keys else None
        producer.send_async(body, done, partition_key=key)
    await producer.flush()


async def round_of(
    folder: Path,
    size: int,
    loads: Sequence[Load],
    found: dict[str, list[Carried]],
    least: dict[str, list[Figure]],
) -> None:
    async with LocalCluster(folder, zookeepers=1, bookies=3, brokers=1) as cluster:
        pids = [
            (process.role, process.pid)
            for process in cluster.processes
            if process.role in ("broker", "bookie") and process.pid is not None
        ]
        for number, load in enumerate(loads):
            topic, url = f"load-{number}", cluster.service_url
            carried = await asyncio.to_thread(alone, carry, url, topic, load, size, pids)
            found.setdefault(load.name, []).append(carried)
    for load in loads:
        entry = max(1, round(found[load.name][-1].per_entry))
        shape = Shape(entry * size, max(300, load.count // entry), max(4, 1_000 // entry))
        [figure] = await asyncio.to_thread(
            alone, reference.measure, [shape], bookies=3, ack_quorum=2, port=REFERENCE_PORT
        )
        least.setdefault(load.name, []).append(figure)


def report(found: dict[str, list[Carried]], least: dict[str, list[Figure]]) -> None:
    for load in [it for it in LOADS if it.name in found]:
        runs = found[load.name]

        def of(name: str, runs: list[Carried] = runs) -> float:
            return median(float(getattr(run, name)) for run in runs)

        entries_per_s = median(figure.per_s for figure in least[load.name])
        print(
            f"{load.name:<24} {of('per_s'):>7,.0f}/s (target {load.target:,}),"
            f" {of('per_entry'):5.1f} messages an entry; CPU of a message: broker"
            f" {of('broker_us'):.0f} us, bookies {of('bookies_us'):.0f} us, client"
            f" {of('client_us'):.0f} us: {of('two_cores_per_s'):,.0f}/s on two idle cores"
            f" | reference, publishing alone: {entries_per_s * of('per_entry'):,.0f}/s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each load")
    parser.add_argument("--bytes", type=int, default=1_024, help="bytes of a message")
    parser.add_argument("--only", default="", help="run the loads whose name contains this text")
    options = parser.parse_args()
    loads = [load for load in LOADS if options.only in load.name]
    found: dict[str, list[Carried]] = {}
    least: dict[str, list[Figure]] = {}
    with tempfile.TemporaryDirectory(prefix="magnetar-subscriptions-") as folder:
        for number in range(options.rounds):
            directory = Path(folder) / str(number)
            asyncio.run(round_of(directory, options.bytes, loads, found, least))
    print(f"messages of {options.bytes} bytes, medians of {options.rounds} rounds")
    report(found, least)


if __name__ == "__main__":
    main()
