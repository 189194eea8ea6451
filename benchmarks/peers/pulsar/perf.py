"""Runs pulsar-perf, the load generator of Apache Pulsar, and reads its report."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.peers.pulsar.server import JARS, java_options
from magnetar.zookeeper_server import find_java

if TYPE_CHECKING:
    from pathlib import Path

UNLIMITED_PER_S: Final = 10_000_000
WINDOW: Final = 1_000  # messages without a receipt
GRACE_S: Final = 60.0  # the allowance for the start and the end of Java
INTERVAL_S: Final = 10  # the time between two lines of the report

_RATE: Final = re.compile(r"Aggregated throughput stats --- +(\d+) records \w+ --- +([\d.]+) msg/s")
_LATENCY: Final = re.compile(
    r"Aggregated latency stats --- Latency: mean: +[\d.]+ ms - med: +([\d.]+)"
    r".* - 99pct: +([\d.]+) .*- Max: +([\d.]+)"
)
_RECEIVED: Final = re.compile(
    r"Throughput received: .* - med: ([\d.]+) .* - 99pct: ([\d.]+) .* - Max: ([\d.]+)"
)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies in ms. The latencies of a consumer are from publish to receive."""

    p50: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Report:
    """The totals of a run, and the latencies of a consumer in each INTERVAL_S."""

    per_s: float
    latencies: Latencies
    received: tuple[Latencies, ...]


class Perf:
    """One run of pulsar-perf for `seconds`, in the background."""

    def __init__(self, folder: Path, command: str, url: str, topic: str, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log4j2.properties").write_text(
            "rootLogger.level = info\nrootLogger.appenderRef.console.ref = console\n"
            "appender.console.type = Console\nappender.console.name = console\n"
            "appender.console.layout.type = PatternLayout\n"
            "appender.console.layout.pattern = %msg%n\n"
        )
        # With 512 MB, a producer of 90 s ended with an OutOfMemoryError in its histogram.
        memory = ["-Xmx1g", "-XX:MaxDirectMemorySize=1g"]
        program = [str(find_java()), *memory, *java_options(folder), "-cp", f"{JARS}/*"]
        program += ["org.apache.pulsar.testclient.PulsarPerfTestTool", "/dev/null", command]
        self._running = subprocess.Popen(
            [*program, "--service-url", url, *options, topic],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._running.pid

    def result(self, seconds: float) -> Report:
        """Wait for the report. Raise RuntimeError with the output of pulsar-perf if it has no
        report."""
        try:
            said, _ = self._running.communicate(timeout=seconds + GRACE_S)
        finally:
            self._running.kill()
        rate, latency = _RATE.search(said), _LATENCY.search(said)
        if rate is None or latency is None:
            raise RuntimeError(f"pulsar-perf reported nothing:\n{said[-2_000:]}")
        received = tuple(_latencies(it) for it in _RECEIVED.finditer(said))
        return Report(float(rate[2]), _latencies(latency), received)


def _latencies(found: re.Match[str]) -> Latencies:
    return Latencies(float(found[1]), float(found[2]), float(found[3]))


def produce(folder: Path, url: str, topic: str, *, seconds: int, batched: bool) -> Perf:
    """Start a producer that publishes messages of 1 KB as fast as it can."""
    options = ["--rate", str(UNLIMITED_PER_S), "--size", "1024", "--max-outstanding", str(WINDOW)]
    options += ["--test-duration", str(seconds)]
    if not batched:
        options.append("--disable-batching")
    return Perf(folder, "produce", url, topic, *options)


def consume(folder: Path, url: str, topic: str, *, seconds: int) -> Perf:
    """Start a consumer of a Shared subscription."""
    options = ["--subscription-type", "Shared", "--test-duration", str(seconds)]
    return Perf(folder, "consume", url, topic, *options)
