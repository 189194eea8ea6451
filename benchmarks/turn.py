"""One turn of benchmarks.versus: all loads, on a cluster of the tree on PYTHONPATH.

benchmarks.versus runs this file by its path, so that an older tree does not need the file. The
program prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks import load
from benchmarks.figures import Figure, Shape
from benchmarks.processes import alone
from magnetar.local_cluster import LocalCluster

ONE_AT_A_TIME: Final = Shape(1024, 1_500, 1)
UNBATCHED: Final = Shape(1024, 30_000, 1_000)
LARGE: Final = Shape(65_536, 1_500, 16)
BATCHED: Final = Shape(1024, 100_000, 1_000)
STEADY: Final = Shape(1024, 8_000, 1)
STEADY_PER_S: Final = 1_000.0


def apache_load(name: str, *arguments: Any) -> Any:
    """Call a function of apache.py beside this file: the tree under test may lack this module."""
    spec = importlib.util.spec_from_file_location("apache", Path(__file__).with_name("apache.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)(*arguments)


def loads(service_url: str, pulsar_url: str, servers: list[int]) -> dict[str, float]:
    """Return the figures by name. If a name ends in "ms", a lower figure is better."""
    found: dict[str, float] = {}

    def note(name: str, figure: Figure, *, latency: bool = False) -> None:
        if latency:
            found[f"{name}, p50 ms"] = figure.p50_ms
            found[f"{name}, p99 ms"] = figure.p99_ms
        else:
            found[f"{name}, messages/s"] = figure.per_s

    one = alone(load.publish_one_at_a_time, service_url, "one", ONE_AT_A_TIME)
    note("own client, one at a time", one, latency=True)
    figure = alone(load.publish, service_url, "unbatched", UNBATCHED, batched=False)
    note("own client, unbatched", figure)
    note("own client, 64 KB", alone(load.publish, service_url, "large", LARGE, batched=False))
    # One batched load takes 2 s, and its rate varies by 30 % on two cores: take the median.
    rates = [
        alone(load.publish, service_url, topic, BATCHED, batched=True).per_s
        for topic in ("batched", "batched-2", "batched-3")
    ]
    found["own client, batched, messages/s"] = statistics.median(rates)
    note("own client, tail", alone(load.tail, service_url, "tail", BATCHED, batched=True))
    note("own client, backlog", alone(load.read_backlog, service_url, "batched", BATCHED))
    figure = alone(apache_load, "publish_one_at_a_time", pulsar_url, "apache-one", ONE_AT_A_TIME)
    note("Apache's client, one at a time", figure, latency=True)
    arguments = (pulsar_url, "apache-steady", STEADY, STEADY_PER_S, servers)
    figure, cpu_ms = alone(apache_load, "publish_and_consume", *arguments)
    note("Apache's client, 1,000/s end to end", figure, latency=True)
    found["Apache's client, 1,000/s end to end, server CPU ms"] = cpu_ms
    return found


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="magnetar-turn-") as folder:
        directory = Path(folder) / "cluster"
        async with LocalCluster(directory, zookeepers=1, bookies=3, brokers=1) as cluster:
            servers = [
                process.pid
                for process in cluster.processes
                if process.role in ("broker", "bookie") and process.pid is not None
            ]
            urls = cluster.service_url, cluster.pulsar_url
            found = await asyncio.to_thread(loads, *urls, servers)
    json.dump(found, sys.stdout)
    print()


if __name__ == "__main__":
    asyncio.run(main())
