"""Measures one message at a time, over both transports of Magnetar's client and with Apache's:
`python -m benchmarks.one_at_a_time`.

All clients talk to the same local cluster (3/3/2) in turns. The CPU is that of the client's process
for one message. Compare the ratios: absolute figures change with the machine and the day.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pulsar
import uvloop

import magnetar
import magnetar.asyncio
from benchmarks.figures import Figure, Shape
from benchmarks.processes import alone
from magnetar.local_cluster import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

SHAPE: Final = Shape(1024, 1_500, 1)
WARM_UP: Final = 100

Measured = tuple[Figure, float]  # the figure, and the microseconds of CPU per message


def _timed(send: Callable[[bytes], object]) -> Measured:
    body = os.urandom(SHAPE.bytes)
    for _ in range(WARM_UP):
        send(body)
    latencies = []
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(SHAPE.count):
        sent_s = time.perf_counter()
        send(body)
        latencies.append(time.perf_counter() - sent_s)
    cpu_us = (time.process_time() - cpu_s) / SHAPE.count * 1e6
    return Figure.of(SHAPE, time.perf_counter() - began_s, latencies), cpu_us


def synchronous(url: str, topic: str) -> Measured:
    with magnetar.Client(url) as client:
        return _timed(client.create_producer(topic, batching_enabled=False).send)


def apache(url: str, topic: str) -> Measured:
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        return _timed(client.create_producer(topic, batching_enabled=False).send)
    finally:
        client.close()


def on_asyncio(url: str, topic: str) -> Measured:
    return asyncio.run(_asynchronous(url, topic))


def on_uvloop(url: str, topic: str) -> Measured:
    main: Coroutine[Any, Any, Measured] = _asynchronous(url, topic)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _asynchronous(url: str, topic: str) -> Measured:
    body = os.urandom(SHAPE.bytes)
    async with magnetar.asyncio.Client(url) as client:
        producer = await client.create_producer(topic, batching_enabled=False)
        for _ in range(WARM_UP):
            await producer.send(body)
        latencies = []
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(SHAPE.count):
            sent_s = time.perf_counter()
            await producer.send(body)
            latencies.append(time.perf_counter() - sent_s)
        cpu_us = (time.process_time() - cpu_s) / SHAPE.count * 1e6
        return Figure.of(SHAPE, time.perf_counter() - began_s, latencies), cpu_us


def measure(grpc_url: str, pulsar_url: str, rounds: int) -> None:
    rows: list[tuple[str, Callable[[str, str], Measured], str]] = [
        ("pulsar-client", apache, pulsar_url),
        ("grpc://, synchronous", synchronous, grpc_url),
        ("grpc://, asyncio", on_asyncio, grpc_url),
        ("pulsar://, synchronous", synchronous, pulsar_url),
        ("pulsar://, asyncio", on_asyncio, pulsar_url),
        ("pulsar://, asyncio on uvloop", on_uvloop, pulsar_url),
    ]
    found: dict[str, list[Measured]] = {name: [] for name, _, _ in rows}
    for _ in range(rounds):
        for place, (name, load, url) in enumerate(rows):
            found[name].append(alone(load, url, f"one-{place}"))
    theirs = 0.0
    for name, _, _ in rows:
        p50_ms = statistics.median([figure.p50_ms for figure, _ in found[name]])
        p99_ms = statistics.median([figure.p99_ms for figure, _ in found[name]])
        cpu_us = statistics.median([cpu_us for _, cpu_us in found[name]])
        theirs = theirs or p50_ms
        print(
            f"{name:<30} p50 {p50_ms:.2f} ms  p99 {p99_ms:>5.2f} ms  client CPU {cpu_us:>4.0f} us"
            f"  p50 / pulsar-client {p50_ms / theirs:.2f}",
            flush=True,
        )


async def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="magnetar-one-") as folder:
        directory = Path(folder) / "cluster"
        async with LocalCluster(directory, zookeepers=1, bookies=3, brokers=1) as cluster:
            await asyncio.to_thread(measure, cluster.service_url, cluster.pulsar_url, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(main(parser.parse_args().rounds))
