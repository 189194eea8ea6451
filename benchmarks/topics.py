"""Measures many topics: the rate at which they are created, and the cost of idle topics.

The benchmark can also run alone: `python -m benchmarks.topics --topics 10000`. One connection
subscribes to the topics, 500 at a time, which creates each topic and one durable subscription. Then
the connection closes, and the topics stay loaded without a client.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.processes import cpu_s, resident_mb
from magnetar.local_cluster import LocalCluster
from magnetar.local_process import standalone
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb

IN_FLIGHT = 500
SETTLE_S = 3.0
IDLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Created:
    per_s: float
    refused: int


async def subscribe(url: str, count: int, *, stem: str = "idle") -> Created:
    """Create `count` topics with a subscription each, over one connection."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    decoder, room = framing.FrameDecoder(), asyncio.Semaphore(IN_FLIGHT)
    answers = refused = 0
    finished = asyncio.Event()

    async def read() -> None:
        nonlocal answers, refused
        while data := await reader.read(1 << 20):
            for frame in decoder.feed(data):
                command = framing.parse_command(frame)
                if command.type == pb.BaseCommand.PING:
                    writer.write(framing.encode_command(pb.CommandPong()))
                elif command.type in (pb.BaseCommand.SUCCESS, pb.BaseCommand.ERROR):
                    answers += 1
                    refused += command.type == pb.BaseCommand.ERROR
                    room.release()
                    if answers == count:
                        finished.set()

    writer.write(framing.encode_command(pb.CommandConnect(client_version="b", protocol_version=20)))
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(read())
        # The first lookup takes the bundles of the namespace.
        for number in range(64):
            lookup = pb.CommandLookupTopic(topic=f"{stem}-{number}", request_id=1_000_000 + number)
            writer.write(framing.encode_command(lookup))
        await asyncio.sleep(1.0)
        began_s = time.perf_counter()
        for number in range(count):
            await room.acquire()
            body = pb.CommandSubscribe(
                topic=f"persistent://public/default/{stem}-{number}",
                subscription="s",
                subType=pb.CommandSubscribe.Shared,
                consumer_id=number,
                request_id=number,
            )
            writer.write(framing.encode_command(body))
        await finished.wait()
        spent_s = time.perf_counter() - began_s
        reading.cancel()
    writer.close()
    return Created(count / spent_s, refused)


def embedded(count: int) -> None:
    """Measure `magnetar standalone` with this many topics."""
    folder = Path(tempfile.mkdtemp(prefix="magnetar-bench-"))
    process = standalone(folder)
    try:
        process.start()
        assert process.pid is not None
        time.sleep(SETTLE_S)
        before_mb = resident_mb(process.pid)
        url = f"pulsar://127.0.0.1:{process.ports['pulsar']}"
        created = asyncio.run(subscribe(url, count))
        time.sleep(SETTLE_S)
        began_s, before_s = time.perf_counter(), cpu_s(process.pid)
        time.sleep(IDLE_S)
        share = (cpu_s(process.pid) - before_s) / (time.perf_counter() - began_s)
        after_mb = resident_mb(process.pid)
        print(
            f"{count} topics, embedded metadata: {created.per_s:,.0f} created/s (target: 2,000),"
            f" {created.refused} refused\n"
            f"    idle: {after_mb:.0f} MB resident (target: < 300 with 10,000 topics),"
            f" {before_mb:.0f} without, {(after_mb - before_mb) * 1e3 / count:.1f} KB each,"
            f" {share:.1%} of a core",
            flush=True,
        )
    finally:
        process.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def with_zookeeper(count: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="magnetar-bench-"))
    try:
        async with LocalCluster(folder, zookeepers=1, bookies=1, brokers=1) as cluster:
            created = await subscribe(cluster.pulsar_url, count)
            print(
                f"{count} topics, ZooKeeper: {created.per_s:,.0f} created/s (target: 200),"
                f" {created.refused} refused",
                flush=True,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(topics: int) -> None:
    print("\nmany topics")
    embedded(topics)
    asyncio.run(with_zookeeper(topics // 5))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=10_000)
    report(parser.parse_args().topics)
