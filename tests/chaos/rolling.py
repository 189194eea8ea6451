"""Rolling restarts under load: `make rolling`, or from the top folder

    PYTHONPATH=tests .venv/bin/python -m chaos.rolling [--rounds 10]

Apache's client publishes to a partitioned topic with deduplication and retention, and consumes from
it. In each round, every broker and every bookie is stopped and started again, one after the other.
In the end all partitions are read: no message may be lost, and none may be stored twice.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pulsar
from chaos.administration import admin, keep_everything

from magnetar.local_cluster import LocalCluster

NAME: Final = "rolling"
TOPIC: Final = f"persistent://public/default/{NAME}"
PARTITIONS: Final = 3
RATE: Final = 400.0  # messages a second
PAUSE_S: Final = 0.5  # the pause between two restarts
DRAIN_S: Final = 60.0
READ_MS: Final = 30_000


@dataclass(slots=True)
class Result:
    """The result of a run."""

    rounds: int
    sent: int = 0
    failed: list[str] = field(default_factory=list)  # sends and reads that failed
    receipted: set[int] = field(default_factory=set)
    consumed: Counter[int] = field(default_factory=Counter)
    stored: Counter[int] = field(default_factory=Counter)
    disordered: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def lost(self) -> list[int]:
        return sorted(self.receipted - self.stored.keys())

    @property
    def unconsumed(self) -> list[int]:
        return sorted(self.receipted - self.consumed.keys())

    @property
    def duplicated(self) -> list[int]:
        return sorted(number for number, count in self.stored.items() if count > 1)

    @property
    def passed(self) -> bool:
        wrong = self.lost or self.unconsumed or self.duplicated or self.disordered or self.failed
        return not wrong and bool(self.receipted)

    def text(self) -> str:
        redelivered = sum(self.consumed.values()) - len(self.consumed)
        lines = [
            f"rolling restarts: {self.rounds} rounds in {self.seconds:.0f} s",
            f"  sent {self.sent}, {len(self.receipted)} with a receipt, {len(self.failed)} failed "
            f"{self.failed[:3]}",
            f"  stored {len(self.stored)}; consumed {len(self.consumed)}, "
            f"{redelivered} redelivered",
            f"  lost {self.lost[:10]}, not consumed {self.unconsumed[:10]}",
            f"  stored twice {self.duplicated[:10]}, out of order {self.disordered[:3]}",
            "  passed" if self.passed else "  FAILED",
        ]
        return "\n".join(lines)


class Load:
    """Apache's client in threads of its own."""

    def __init__(self, url: str, result: Result) -> None:
        self.result = result
        self._client = pulsar.Client(
            url,
            operation_timeout_seconds=30,
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null"),
        )
        self._stop = threading.Event()
        self._drained = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        consumer = self._client.subscribe(
            TOPIC, "all", initial_position=pulsar.InitialPosition.Earliest
        )
        producer = self._client.create_producer(
            TOPIC,
            producer_name="rolling",
            send_timeout_millis=0,
            block_if_queue_full=True,
            batching_enabled=True,
            batching_max_publish_delay_ms=5,
        )
        for work, client in ((self._produce, producer), (self._consume, consumer)):
            self._threads.append(threading.Thread(target=work, args=(client,), daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        """Wait until every message has an answer and was consumed."""
        self._stop.set()
        self._threads[0].join(DRAIN_S)
        deadline = time.monotonic() + DRAIN_S
        while self.result.unconsumed and time.monotonic() < deadline:
            time.sleep(0.1)
        self._drained.set()
        self._threads[1].join(DRAIN_S)

    def read(self) -> None:
        """Read every partition, from the first message to the last."""
        for partition in range(PARTITIONS):
            reader = self._client.create_reader(
                f"{TOPIC}-partition-{partition}", pulsar.MessageId.earliest
            )
            last = -1
            while reader.has_message_available():
                try:
                    message = reader.read_next(timeout_millis=READ_MS)
                except pulsar.Timeout:
                    self.result.failed.append(f"partition {partition}: nothing after {last}")
                    break
                number = int(message.data())
                if number <= last:
                    self.result.disordered.append(f"{number} after {last} in {partition}")
                last = number
                self.result.stored[number] += 1
            reader.close()
        self._client.close()

    def _produce(self, producer: Any) -> None:
        result, begun = self.result, time.monotonic()

        def on_sent(number: int, outcome: Any) -> None:
            if outcome == pulsar.Result.Ok:
                result.receipted.add(number)
            else:
                result.failed.append(f"{number}: {outcome}")

        while not self._stop.is_set():
            number = result.sent
            result.sent += 1
            producer.send_async(
                b"%d" % number,
                lambda outcome, _, number=number: on_sent(number, outcome),
                partition_key=str(number % 64),
            )
            time.sleep(max(0.0, begun + result.sent / RATE - time.monotonic()))
        producer.flush()
        producer.close()

    def _consume(self, consumer: Any) -> None:
        while not self._drained.is_set():
            try:
                message = consumer.receive(timeout_millis=200)
            except pulsar.Timeout:
                continue
            self.result.consumed[int(message.data())] += 1
            consumer.acknowledge(message)
        consumer.close()


async def run_rolling(
    directory: Path,
    *,
    rounds: int,
    zookeepers: int = 1,
    bookies: int = 3,
    keep: Path | None = None,
) -> Result:
    """Run the restarts under load. `keep`: the folder for the logs of a run that failed.

    Raises ProcessFailed, httpx.HTTPError if the cluster cannot be used.
    """
    result = Result(rounds)
    begun = time.monotonic()
    async with LocalCluster(
        directory, zookeepers=zookeepers, bookies=bookies, brokers=2
    ) as cluster:

        def prepare() -> None:
            admin(cluster, "POST", "namespaces/public/default/deduplication", True)
            keep_everything(cluster)
            admin(cluster, "PUT", f"persistent/public/default/{NAME}/partitions", PARTITIONS)

        await asyncio.to_thread(prepare)
        load = Load(cluster.pulsar_url, result)
        await asyncio.to_thread(load.start)
        for _ in range(rounds):
            for role in ("broker", "bookie"):
                for process in cluster.of_role(role):
                    await asyncio.sleep(PAUSE_S)
                    await cluster.restart(role, process.id)
        await asyncio.to_thread(load.end)
        await asyncio.to_thread(load.read)
        if not result.passed and keep is not None:
            for partition in range(PARTITIONS):
                path = f"persistent/public/default/{NAME}-partition-{partition}/internalStats"
                result.failed.append(str(await asyncio.to_thread(admin, cluster, "GET", path)))
            for log in directory.glob("*/*.log"):
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{log.parent.name}.log").write_bytes(log.read_bytes())
    result.seconds = time.monotonic() - begun
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.rolling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--zookeepers", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="magnetar-rolling-") as folder:
        result = asyncio.run(
            run_rolling(
                Path(folder),
                rounds=arguments.rounds,
                zookeepers=arguments.zookeepers,
                keep=Path("reports") / "rolling",
            )
        )
    print(result.text())
    return not result.passed


if __name__ == "__main__":
    sys.exit(main())
