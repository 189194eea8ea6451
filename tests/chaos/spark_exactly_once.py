"""Spark's source and sink under kills: `make spark-kills`, or from the top folder

    PYTHONPATH=tests .venv/bin/python -m chaos.spark_exactly_once [--kills 20] [--seed N]

A client publishes numbers. A Spark driver of its own process copies them exactly once into two
topics: without a shuffle and with one. Meanwhile, Python workers of Spark, the driver with its
Java, brokers and bookies are killed, and a second driver runs with the same checkpoint. In the end
both topics are read: no number may be missing, and none may be stored twice.

A driver notes the end of a batch in its checkpoint before it runs the batch. It is killed up to
KILL_WITHIN_S after this note, so kills fall between any two of its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chaos import spark_driver
from chaos.administration import admin, keep_everything

import magnetar
from magnetar.local_cluster import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

RATE: Final = 100.0  # numbers a second
QUIET_S: Final = 4.0  # the longest wait before a kill, after a batch has begun
KILL_WITHIN_S: Final = 1.5
DOWN_S: Final = 3.0  # the longest absence of a broker or a bookie
TWINS_S: Final = 10.0  # the time in which two drivers run
WAIT_S: Final = 600.0  # the limit of the wait for a batch, or for the end
KINDS: Final = {"worker": 8, "driver": 4, "broker": 4, "bookie": 3, "twin driver": 1}


@dataclass(slots=True)
class Result:
    """The result of a run."""

    kills: list[str] = field(default_factory=list)
    sent: int = 0
    stored: dict[str, Counter[int]] = field(default_factory=dict)  # keyed by topic
    batches: dict[str, int] = field(default_factory=dict)  # keyed by topic
    failures: list[str] = field(default_factory=list)  # the errors of drivers that were not killed
    seconds: float = 0.0

    def lost(self, topic: str) -> list[int]:
        return sorted(set(range(self.sent)) - self.stored[topic].keys())

    def duplicated(self, topic: str) -> list[int]:
        return sorted(number for number, count in self.stored[topic].items() if count > 1)

    @property
    def passed(self) -> bool:
        wrong = any(self.lost(topic) or self.duplicated(topic) for topic in self.stored)
        return bool(self.stored and self.sent) and not wrong

    def text(self) -> str:
        kinds = Counter(kill.partition(":")[0] for kill in self.kills)
        lines = [
            f"Spark exactly once: {len(self.kills)} kills in {self.seconds:.0f} s: {dict(kinds)}"
        ]
        lines += [f"  {kill}" for kill in self.kills]
        for topic in self.stored:
            lines.append(
                f"  {topic}: {self.sent} sent, {sum(self.stored[topic].values())} stored in"
                f" {self.batches[topic]} batches, {len(self.lost(topic))} lost"
                f" {self.lost(topic)[:5]}, {len(self.duplicated(topic))} duplicated"
                f" {self.duplicated(topic)[:5]}"
            )
        lines += [f"  a driver ended by itself: {failure[-1_500:]}" for failure in self.failures]
        lines.append("  passed" if self.passed else "  FAILED")
        return "\n".join(lines)


class Driver:
    """A Spark driver, with its Java and its Python workers, in a process session of its own."""

    def __init__(self, url: str, folder: Path, number: int) -> None:
        self._errors = folder / f"driver-{number}.log"
        command = [sys.executable, "-m", spark_driver.__name__]
        self._finish = folder / "finish"
        command += [url, str(folder / "checkpoints"), str(self._finish)]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )

    @property
    def status(self) -> int | None:
        """The exit code; None: the driver runs."""
        return self._process.poll()

    @property
    def has_queries(self) -> bool:
        """True when the driver has started its queries."""
        return self._finish.with_suffix(f".{self._process.pid}").exists()

    @property
    def failure(self) -> str:
        return self._errors.read_text()

    def kill(self) -> None:
        for pid in (*_descendants(self._process.pid), self._process.pid):
            _kill(pid)
        self._process.wait()

    def kill_worker(self, draw: random.Random) -> bool:
        """Kill a Python process that runs tasks. Returns False if no such process exists."""
        workers = [
            worker
            for daemon in _descendants(self._process.pid)
            if b"pyspark.daemon" in _command(daemon) or b"pyspark/daemon.py" in _command(daemon)
            for worker in _children(daemon)
        ]
        if workers:
            _kill(draw.choice(workers))
        return bool(workers)


class Run:
    """One run, against a running cluster."""

    def __init__(self, cluster: LocalCluster, folder: Path, result: Result, seed: int) -> None:
        self._cluster = cluster
        self._folder = folder
        self._result = result
        self._draw = random.Random(seed)
        self._drivers = 0
        self._driver = self._new_driver()

    def _new_driver(self) -> Driver:
        self._drivers += 1
        return Driver(self._cluster.service_url, self._folder, self._drivers)

    async def run(self, kinds: list[str]) -> None:
        try:
            for kind in kinds:
                await self._next_batch()
                await asyncio.sleep(self._draw.uniform(0, QUIET_S))
                where = await self._carry_out(kind)
                self._result.kills.append(f"{kind}: {where}")
                print(f"  kill {len(self._result.kills)}: {kind}: {where}", flush=True)
        except BaseException:
            self._driver.kill()
            raise

    async def finish(self) -> None:
        """Let the driver read the rest and end."""
        (self._folder / "finish").touch()
        deadline = time.monotonic() + WAIT_S
        try:
            while self._driver.status != 0:
                assert time.monotonic() < deadline, self._driver.failure[-3_000:]
                self._restart_if_ended()
                await asyncio.sleep(0.2)
        finally:
            self._driver.kill()

    async def _carry_out(self, kind: str) -> str:
        """Kill a process of this kind, or run a twin driver. Return what the report says about
        it."""
        match kind:
            case "worker":
                while not self._driver.kill_worker(self._draw):
                    self._restart_if_ended()
                    await asyncio.sleep(0.01)
            case "driver":
                delay_s = self._draw.uniform(0, KILL_WITHIN_S)
                await self._next_batch()
                await asyncio.sleep(delay_s)
                where = f"{delay_s:.2f} s after the offsets, {self._progress()}"
                await asyncio.to_thread(self._driver.kill)
                self._driver = self._new_driver()
                return where
            case "twin driver":
                twin = self._new_driver()
                deadline = time.monotonic() + WAIT_S
                while not twin.has_queries and twin.status is None:
                    assert time.monotonic() < deadline, twin.failure[-3_000:]
                    await asyncio.sleep(0.1)
                await asyncio.sleep(TWINS_S)
                ended = [it.status is not None for it in (self._driver, twin)]
                await asyncio.to_thread(self._driver.kill)
                self._driver = twin
                return f"the first and the second had ended: {ended}"
            case _:
                process = self._draw.choice(self._cluster.of_role(kind))
                await self._cluster.kill(kind, process.id)
                await asyncio.sleep(self._draw.uniform(0, DOWN_S))
                await self._cluster.restart(kind, process.id)
        return self._progress()

    def _progress(self) -> str:
        parts = []
        for sink in spark_driver.SINKS:
            begun, done = self._last(sink, "offsets"), self._last(sink, "commits")
            parts.append(f"{sink} at batch {begun}, {'done' if begun == done else 'not done'}")
        return "; ".join(parts)

    def _last(self, sink: str, log: str) -> int:
        folder = self._folder / "checkpoints" / sink / log
        found = [int(it.name) for it in folder.glob("*") if it.name.isdigit()]
        return max(found, default=-1)

    async def _next_batch(self) -> None:
        """Wait until one of the queries has noted the end of its next batch."""
        begun = [self._last(sink, "offsets") for sink in spark_driver.SINKS]
        deadline = time.monotonic() + WAIT_S
        while begun == [self._last(sink, "offsets") for sink in spark_driver.SINKS]:
            assert time.monotonic() < deadline, self._driver.failure[-3_000:]
            self._restart_if_ended()
            await asyncio.sleep(0.01)

    def _restart_if_ended(self) -> None:
        """A query may fail because its tasks failed, or because another driver uses its
        checkpoint."""
        if self._driver.status not in (None, 0):
            self._result.failures.append(self._driver.failure)
            assert len(self._result.failures) <= len(self._result.kills) + 3, self._driver.failure
            self._driver = self._new_driver()

    def note_batches(self) -> None:
        for sink in spark_driver.SINKS:
            self._result.batches[sink] = self._last(sink, "commits") + 1


async def publish(url: str, result: Result, stop: asyncio.Event) -> None:
    """Publish numbers until `stop` is set. Return when all of them have receipts."""
    from magnetar.asyncio import Client

    async with Client(url) as client:
        producer = await client.create_producer(
            spark_driver.SOURCE, producer_name="numbers", send_timeout_millis=0
        )
        async with asyncio.TaskGroup() as sends:
            while not stop.is_set():
                for _ in range(int(RATE / 10)):
                    number = result.sent
                    result.sent += 1
                    key = str(number % 50)
                    sends.create_task(producer.send(b"%d" % number, partition_key=key))
                await asyncio.sleep(0.1)


def read(url: str, topic: str) -> Counter[int]:
    found: Counter[int] = Counter()
    with magnetar.Client(url) as client:
        name = f"persistent://public/default/{topic}"
        reader = client.create_reader(name, magnetar.MessageId.earliest)
        while reader.has_message_available():
            found[int(reader.read_next(60_000).data())] += 1
    return found


def kinds_of(kills: int, seed: int) -> list[str]:
    """The kinds of kills in their proportions, in random order."""
    whole = [kind for kind, count in KINDS.items() for _ in range(count)]
    draw = random.Random(seed)
    draw.shuffle(whole)
    return [whole[number % len(whole)] for number in range(kills)]


async def run_spark_kills(
    folder: Path, *, kills: int, seed: int, kinds: list[str] | None = None
) -> Result:
    """Run the kills on a new cluster. Raises ProcessFailed and httpx.HTTPError if the cluster
    cannot be used."""
    result = Result()
    begun = time.monotonic()
    async with LocalCluster(folder / "cluster", zookeepers=1, bookies=3, brokers=2) as cluster:

        def prepare() -> None:
            admin(cluster, "POST", "namespaces/public/default/deduplication", True)
            keep_everything(cluster)
            path = "persistent/public/default/numbers/partitions"
            admin(cluster, "PUT", path, 2)

        await asyncio.to_thread(prepare)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(publish(cluster.service_url, result, stop))
            run = Run(cluster, folder, result, seed)
            await run.run(kinds or kinds_of(kills, seed))
            stop.set()
        await run.finish()
        run.note_batches()
        for sink in spark_driver.SINKS:
            result.stored[sink] = await asyncio.to_thread(read, cluster.service_url, sink)
    result.seconds = time.monotonic() - begun
    return result


# Mechanics


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, children.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.spark_exactly_once", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", choices=list(KINDS), help="kills of this kind only")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="magnetar-spark-") as folder:
        result = asyncio.run(
            run_spark_kills(
                Path(folder),
                kills=arguments.kills,
                seed=arguments.seed,
                kinds=[arguments.only] * arguments.kills if arguments.only else None,
            )
        )
    print(result.text())
    return not result.passed


if __name__ == "__main__":
    sys.exit(main())
