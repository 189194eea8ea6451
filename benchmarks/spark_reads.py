"""Measures Spark's batch read through the topic's owner and from the bookies (python -m
benchmarks.spark_reads).

A local cluster (ZooKeeper, three bookies, a broker) stores messages of 100 bytes at 3/3/2 in one
sealed ledger. Spark reads them in both ways in turns, and one process reads them without Spark.
Then the program asks the driver of a streaming query over idle topics for its latest offsets, 100
times a second, with polls and with pushes. All processes share the machine, so the CPU seconds are
more reliable than the rates.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import magnetar
from benchmarks.processes import alone, cpu_s
from magnetar.local_cluster import LocalCluster
from magnetar.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "rows"
VALUE_BYTES = 100
IDLE_TOPICS = 100
WARM_S, IDLE_S, LOOK_S = 2.0, 10.0, 0.01
WAYS = {"owner": "false", "bookies": "true"}


@dataclass(frozen=True, slots=True)
class Read:
    """One read of all rows. CPU in seconds per million rows."""

    rows_per_s: float
    broker_cpu_s: float
    bookies_cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="magnetar-bench-") as folder:
        asyncio.run(measure(Path(folder), options.rows, options.turns))


async def measure(folder: Path, rows: int, turns: int) -> None:
    async with LocalCluster(folder, zookeepers=1, bookies=3, brokers=1) as cluster:
        await asyncio.to_thread(alone, fill, cluster.service_url, cluster.admin_url, rows)
        reads = await asyncio.to_thread(in_turns, cluster, rows, turns)
        tasks = {
            way: await asyncio.to_thread(alone, executor_cpu_s, cluster.service_url, flag)
            for way, flag in WAYS.items()
        }
        await asyncio.to_thread(alone, make_idle_topics, cluster.service_url)
        [broker] = cluster.of_role("broker")
        idle = {
            how: await asyncio.to_thread(
                alone, idle_query, cluster.service_url, broker.pid or 0, streams
            )
            for how, streams in (("no query", None), ("polls", 0), ("pushes", 32))
        }
    for way, found in reads.items():
        print(
            f"{way:<8} {statistics.median(it.rows_per_s for it in found):>10,.0f} rows/s,"
            f" CPU of a million rows: broker"
            f" {statistics.median(it.broker_cpu_s for it in found):.2f} s, bookies"
            f" {statistics.median(it.bookies_cpu_s for it in found):.2f} s"
        )
    pairs = zip(reads["bookies"], reads["owner"], strict=True)
    ratios = [bookies.rows_per_s / owner.rows_per_s for bookies, owner in pairs]
    print(f"rows/s, bookies to owner: {statistics.median(ratios):.2f}", sorted(ratios))
    for way, cpu in tasks.items():
        print(f"{way:<8} CPU of a process that reads a million rows: {cpu * 1e6 / rows:.2f} s")
    for how, share in idle.items():
        print(f"{how:<8} CPU of the broker, {IDLE_TOPICS} idle topics: {share:.1%} of a core")


def fill(url: str, admin_url: str, rows: int) -> None:
    """Publish the rows and close their ledger."""
    with magnetar.Client(url) as client:
        client.subscribe(TOPIC, "keeps").close()
        producer = client.create_producer(TOPIC, block_if_queue_full=True)
        for number in range(rows):
            producer.send_async(number.to_bytes(8, "big") * (VALUE_BYTES // 8), _refuse_failure)
        producer.flush()
    connection = HTTPConnection(urlsplit(admin_url).netloc)
    connection.request("PUT", f"/admin/v2/persistent/public/default/{TOPIC}/unload")
    assert connection.getresponse().status < 300
    connection.close()


def in_turns(cluster: LocalCluster, rows: int, turns: int) -> dict[str, list[Read]]:
    spark = spark_session("benchmark", master="local[2]")
    try:
        for reads_from_bookies in WAYS.values():  # warms Spark, its workers and the caches
            read(spark, cluster, rows, reads_from_bookies)
        found: dict[str, list[Read]] = {way: [] for way in WAYS}
        for turn in range(turns):
            for way in sorted(WAYS, reverse=turn % 2 == 1):
                found[way].append(read(spark, cluster, rows, WAYS[way]))
                print(way, found[way][-1], flush=True)
        return found
    finally:
        spark.stop()


def read(spark: SparkSession, cluster: LocalCluster, rows: int, reads_from_bookies: str) -> Read:
    brokers = [it.pid or 0 for it in cluster.of_role("broker")]
    bookies = [it.pid or 0 for it in cluster.of_role("bookie")]
    frame = (
        spark.read.format("magnetar")
        .option("service.url", cluster.service_url)
        .option("topic", TOPIC)
        .option("readFromBookies", reads_from_bookies)
        .schema("value binary, __index bigint")
        .load()
    )
    before = [sum(map(cpu_s, pids)) for pids in (brokers, bookies)]
    began_s = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    took_s = time.perf_counter() - began_s
    after = [sum(map(cpu_s, pids)) for pids in (brokers, bookies)]
    broker_cpu_s, bookies_cpu_s = (end - begin for begin, end in zip(before, after, strict=True))
    return Read(rows / took_s, broker_cpu_s * 1e6 / rows, bookies_cpu_s * 1e6 / rows)


def executor_cpu_s(url: str, reads_from_bookies: str) -> float:
    """Return the CPU seconds in which this process reads all tasks, without its start."""
    from pyspark.sql.types import StructType

    from magnetar.spark.source.driver import plan_frame
    from magnetar.spark.source.options import parse_options
    from magnetar.spark.source.task_reader import read_task

    given = {"service.url": url, "topic": TOPIC, "readFromBookies": reads_from_bookies}
    options = parse_options(given)
    schema = StructType().add("value", "binary").add("__index", "long")
    tasks = plan_frame(options)
    for _ in read_task(options, schema, tasks[0]):
        pass
    before_s = time.process_time()
    for task in tasks:
        for _ in read_task(options, schema, task):
            pass
    return time.process_time() - before_s


def make_idle_topics(url: str) -> None:
    with magnetar.Client(url) as client:
        for number in range(IDLE_TOPICS):
            client.create_producer(f"idle-{number}").send(b"x")


def idle_query(url: str, broker: int, streams: int | None) -> float:
    """Return the share of a core that the broker uses while a query asks its driver for offsets.
    `streams`: the maximum number of streams with pushes; 0: the driver polls; None: no query."""
    from magnetar.spark.source.driver import StreamDriver
    from magnetar.spark.source.options import parse_options
    from magnetar.spark.source.position_watch import PositionWatch

    given = {"service.url": url, "topicsPattern": "public/default/idle-.*"}
    driver = StreamDriver(
        parse_options(given, streaming=True),
        now_ms=0,
        query="idle",
        watch=PositionWatch(streams_max=streams or 0),
    )
    at = driver.latest(driver.initial(), rows_max=None, bytes_max=None)
    began_s = before_s = float("inf")
    for look in range(int((WARM_S + IDLE_S) / LOOK_S)):
        if look == int(WARM_S / LOOK_S):
            began_s, before_s = time.perf_counter(), cpu_s(broker)
        if streams is not None:
            at = driver.latest(at, rows_max=None, bytes_max=None)
        time.sleep(LOOK_S)
    share = (cpu_s(broker) - before_s) / (time.perf_counter() - began_s)
    driver.close()
    return share


def _refuse_failure(result: magnetar.Result, message_id: object) -> None:
    assert result is magnetar.Result.Ok, f"a send failed: {result}"


if __name__ == "__main__":
    main()
