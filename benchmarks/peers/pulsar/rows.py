"""The rows of the comparison. Each row takes a running system and returns figures by name.

A name that ends in "/s" is a rate: higher is better. For all other figures lower is better. The
figures of Magnetar with each client are compared with those of Pulsar with Pulsar's client.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.pauses import pauses_of_cpus
from benchmarks.peers.pulsar import loads, perf
from benchmarks.processes import alone, cpu_s, together_mb

if TYPE_CHECKING:
    from pathlib import Path

PERF_S: Final = 15
PERF_CPU_S: Final = 6  # the part of it in which CPU is measured
BESIDE_S: Final = 60
# On a slow machine, the compilers of a JVM use 3.5 s of CPU in its first ten seconds, up to 2.3 s
# in the next ten, and at most 1 s in each of the following ones.
BESIDE_WARM_UP_S: Final = 30
PERF_SPARE_S: Final = 20  # on a busy machine, a JVM may begin this much later than another one
ONE_AT_A_TIME: Final = 1_500
BATCHED: Final = 200_000
BACKLOG: Final = 500_000
STEADY, STEADY_PER_S = 8_000, 1_000.0
SETTLE_S: Final = 10.0  # the pause after the start, and after a load


@dataclass(frozen=True)
class Target:
    """A running system. `own_url`: the URL for Magnetar's client; None: the system is Apache
    Pulsar."""

    pulsar_url: str
    own_url: str | None
    servers: list[int]
    folder: Path

    def clients(self) -> dict[str, tuple[str, str]]:
        """The Python clients for the system by name, with their URLs. Magnetar runs with both
        clients, Apache Pulsar only with pulsar-client."""
        apache = "pulsar", self.pulsar_url
        if self.own_url is None:
            return {"pulsar-client": apache}
        return {
            "pulsar-client": apache,
            "own client, grpc://": ("magnetar", self.own_url),
            "own client, pulsar://": ("magnetar", self.pulsar_url),
        }


Figures = dict[str, float]
Row = Callable[[Target], Figures]


def of_pulsar(name: str) -> str:
    """Return the name of Apache Pulsar's figure for the name of a figure of Magnetar."""
    return re.sub("own client, [a-z]+://", "pulsar-client", name)


def idle(target: Target) -> Figures:
    """Return the memory of all processes together, before any load."""
    time.sleep(SETTLE_S)
    return {"idle memory, MB": together_mb(target.servers)}


def perf_unbatched(target: Target) -> Figures:
    return _perf(target, "unbatched", batched=False)


def perf_batched(target: Target) -> Figures:
    return _perf(target, "batched", batched=True)


def _perf(target: Target, kind: str, *, batched: bool) -> Figures:
    """Publish by pulsar-perf. The CPU is that of the last seconds, when Java has compiled its code:
    it shows which process limits the rate."""
    run = perf.produce(
        target.folder / "perf",
        target.pulsar_url,
        f"perf-{kind}",
        seconds=PERF_S,
        batched=batched,
    )
    time.sleep(PERF_S - PERF_CPU_S)
    clients_s, servers_s = cpu_s(run.pid), sum(map(cpu_s, target.servers))
    began_s = time.monotonic()
    time.sleep(PERF_CPU_S - 1)
    clients_s, servers_s = cpu_s(run.pid) - clients_s, sum(map(cpu_s, target.servers)) - servers_s
    seconds = time.monotonic() - began_s
    per_s = run.result(PERF_S).per_s
    name = f"pulsar-perf, {kind} publish"
    return {
        f"{name}, messages/s": per_s,
        f"{name}, CPU of pulsar-perf per message, us": clients_s / seconds / per_s * 1e6,
        f"{name}, server CPU per message, us": servers_s / seconds / per_s * 1e6,
    }


def consumer_beside(target: Target) -> Figures:
    """Publish at full speed beside a Shared consumer. Return the time by which the consumer is
    behind, over the intervals of BESIDE_S. The intervals of BESIDE_WARM_UP_S do not count, because
    both JVMs compile their code in them. Print the longest time of each interval, and the pauses of
    the CPUs, which make any system late."""
    url, seconds = target.pulsar_url, BESIDE_WARM_UP_S + BESIDE_S + PERF_SPARE_S
    with pauses_of_cpus() as pauses:
        consumer = perf.consume(
            target.folder / "consumer", url, "perf-beside", seconds=seconds + PERF_SPARE_S
        )
        producer = perf.produce(
            target.folder / "producer", url, "perf-beside", seconds=seconds, batched=True
        )
        published, received = producer.result(seconds), consumer.result(seconds + PERF_SPARE_S)
    warm_up, counted = BESIDE_WARM_UP_S // perf.INTERVAL_S, BESIDE_S // perf.INTERVAL_S
    shown = received.received[: warm_up + counted]
    behind = shown[warm_up:]
    assert len(behind) == counted, shown
    print(
        f"    behind by at most {[round(it.max) for it in shown]} ms in each {perf.INTERVAL_S} s,"
        f" of which the first {warm_up} do not count;"
        f" CPUs paused for {[round(it.seconds * 1e3) for it in pauses]} ms",
        file=sys.stderr,
        flush=True,
    )
    return {
        "producer beside a Shared consumer, messages/s": published.per_s,
        "Shared consumer beside it, behind by p50 ms": statistics.median(it.p50 for it in behind),
        "Shared consumer beside it, p99 ms of the worst 10 s": max(it.p99 for it in behind),
        "Shared consumer beside it, behind by at most ms": max(it.max for it in behind),
    }


def end_to_end(target: Target) -> Figures:
    found: Figures = {}
    for place, (name, (client, url)) in enumerate(target.clients().items()):
        (p50_ms, p99_ms), servers_ms, client_ms = alone(
            loads.end_to_end, client, url, f"steady-{place}", STEADY, STEADY_PER_S, target.servers
        )
        found[f"1,000/s end to end, {name}, p50 ms"] = p50_ms
        found[f"1,000/s end to end, {name}, p99 ms"] = p99_ms
        found[f"1,000/s end to end, {name}, server CPU per message, ms"] = servers_ms
        found[f"1,000/s end to end, {name}, client CPU per message, ms"] = client_ms
    return found


def one_at_a_time(target: Target) -> Figures:
    found: Figures = {}
    for place, (name, (client, url)) in enumerate(target.clients().items()):
        (p50_ms, p99_ms), cpu_us = alone(
            loads.one_at_a_time, client, url, f"one-{place}", ONE_AT_A_TIME
        )
        found[f"one at a time, {name}, p50 ms"] = p50_ms
        found[f"one at a time, {name}, p99 ms"] = p99_ms
        found[f"one at a time, {name}, client CPU per message, us"] = cpu_us
    return found


def batched(target: Target) -> Figures:
    return {
        f"batched publish, {name}, messages/s": alone(
            loads.publish, client, url, f"batched-{place}", BATCHED, batched=True
        )
        for place, (name, (client, url)) in enumerate(target.clients().items())
    }


def backlog(target: Target) -> Figures:
    url = target.pulsar_url
    alone(loads.subscribe, "pulsar", url, "backlog", ["Exclusive", "Shared"])
    alone(loads.publish, "pulsar", url, "backlog", BACKLOG, batched=True)
    name, (client, url) = list(target.clients().items())[-1]
    return {
        f"backlog of {BACKLOG:,}, {name}, {kind}, messages/s": alone(
            loads.backlog, client, url, "backlog", BACKLOG, kind
        )
        for kind in ("Reader", "Exclusive", "Shared")
    }


STANDALONE: Final[tuple[Row, ...]] = (idle, perf_unbatched, consumer_beside, backlog)
CLUSTER: Final[tuple[Row, ...]] = (idle, end_to_end, one_at_a_time, batched, perf_batched)
