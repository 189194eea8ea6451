"""Measures how brokers share a load: `python -m benchmarks.brokers`.

Apache's client publishes to a topic of 64 partitions (`--partitions`) at a fixed rate and consumes
it, through one broker and through two. The program prints the CPU time of each broker and bookie,
divided by the number of messages of the whole load, and the number of partitions that each broker
serves. On a machine where clients and servers share the cores, CPU time is more reliable than a
rate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import httpx
import pulsar

from benchmarks.processes import cpu_s
from magnetar.local_cluster import LocalCluster

BUNDLES: Final = 64  # with few bundles, the brokers may get very different numbers of partitions
TOPIC: Final = "persistent://public/brokers/load"
LOADS = {"unbatched": 4_000.0, "batched": 20_000.0}  # messages per second
SECONDS, WARM_UP_S = 10, 2
BODY: Final = bytes(1024)
TIMEOUT_MS: Final = 60_000


def load(url: str, kind: str, pids: dict[str, int]) -> dict[str, float]:
    """Return the CPU per message of each process, in microseconds."""
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumer = client.subscribe(TOPIC, "s", pulsar.ConsumerType.Shared)
    producer = client.create_producer(
        TOPIC,
        batching_enabled=kind == "batched",
        block_if_queue_full=True,
        send_timeout_millis=0,  # on a busy machine the load takes longer
    )
    per_s = LOADS[kind]
    warm_up, count = int(WARM_UP_S * per_s), int(SECONDS * per_s)

    def receive() -> None:
        for _ in range(warm_up + count):
            consumer.acknowledge(consumer.receive(TIMEOUT_MS))

    def on_sent(result: Any, _: Any) -> None:
        assert result == pulsar.Result.Ok, result

    receiver = threading.Thread(target=receive)
    receiver.start()
    before: dict[str, float] = {}
    began_s = time.perf_counter()
    for number in range(warm_up + count):
        if number == warm_up:
            before = {name: cpu_s(pid) for name, pid in pids.items()}
        pause_s = began_s + number / per_s - time.perf_counter()
        if pause_s > 0:
            time.sleep(pause_s)
        producer.send_async(BODY, on_sent)
    receiver.join()
    spent = {name: (cpu_s(pid) - before[name]) / count * 1e6 for name, pid in pids.items()}
    client.close()
    return spent


def partitions_of(cluster: LocalCluster) -> dict[str, int]:
    """Return the number of partitions that each broker serves."""
    found = {}
    for broker in cluster.of_role("broker"):
        text = httpx.get(f"http://127.0.0.1:{broker.ports['http']}/metrics", timeout=30.0).text
        [line] = [it for it in text.splitlines() if it.startswith("pulsar_broker_topics_count{")]
        found[broker.id] = int(float(line.split()[-1]))
    return found


async def measure(
    brokers: int, kind: str, partitions: int
) -> tuple[dict[str, float], dict[str, int]]:
    with tempfile.TemporaryDirectory(prefix="magnetar-brokers-") as folder:
        async with LocalCluster(
            Path(folder), zookeepers=1, bookies=3, brokers=brokers, autorecoveries=0
        ) as cluster:
            pids = {it.id: it.pid for it in cluster.processes if it.pid is not None}
            await asyncio.to_thread(create_partitioned, cluster, partitions)
            spent = await asyncio.to_thread(load, cluster.pulsar_url, kind, pids)
            return spent, await asyncio.to_thread(partitions_of, cluster)


def create_partitioned(cluster: LocalCluster, partitions: int) -> None:
    address = cluster.admin_url.removeprefix("http://").split(",")[0]
    bundles = {"bundles": {"numBundles": BUNDLES}}
    for path, body in (
        ("namespaces/public/brokers", bundles),
        ("persistent/public/brokers/load/partitions", partitions),
    ):
        url = f"http://{address}/admin/v2/{path}"
        httpx.put(url, json=body, timeout=30.0).raise_for_status()


def report() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.brokers", description=__doc__)
    parser.add_argument("--partitions", type=int, default=64)
    options = parser.parse_args()
    for kind, brokers in itertools.product(LOADS, (1, 2)):
        spent, partitions = asyncio.run(measure(brokers, kind, options.partitions))
        figures = ", ".join(
            f"{name} {us:.0f}" for name, us in spent.items() if not name.startswith("zookeeper")
        )
        print(f"{kind}, {brokers} brokers: {figures} us a message", partitions, flush=True)


if __name__ == "__main__":
    report()
