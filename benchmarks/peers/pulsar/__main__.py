"""Measures Magnetar and Apache Pulsar under the same loads, in turns: `make bench-pulsar`.

Both systems sync every entry before they acknowledge it. "standalone" is one process with one
bookie. "cluster" stores entries at 3/3/2: `magnetar local-cluster` has a process for each server,
Pulsar has its broker and three bookies in one JVM. The program prints medians and a ratio (above 1:
Magnetar is better) with the ratio of each turn. It also prints the CPU that processes outside of
the comparison used meanwhile, and the CPU time that the hypervisor of a virtual machine took.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.busy_cpus import cpus_taken
from benchmarks.peers.pulsar import rows
from benchmarks.peers.pulsar.server import PulsarProcess
from magnetar.local_cluster import LocalCluster
from magnetar.local_process import standalone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Pulsar's default, set here because the comparison depends on it: bookies sync their journal.
SYNCED: Final = {"journalSyncData": "true"}


def play(chosen: Sequence[rows.Row], target: rows.Target) -> rows.Figures:
    found: rows.Figures = {}
    for row in chosen:
        print(f"  {row.__name__}", file=sys.stderr, flush=True)
        found |= row(target)
    return found


def magnetar_standalone(chosen: Sequence[rows.Row], folder: Path) -> rows.Figures:
    (folder / "data").mkdir(parents=True)
    with standalone(folder / "data") as server:
        assert server.pid is not None
        pulsar_url = f"pulsar://127.0.0.1:{server.ports['pulsar']}"
        own_url = f"grpc://127.0.0.1:{server.ports['grpc']}"
        return play(chosen, rows.Target(pulsar_url, own_url, [server.pid], folder))


def magnetar_cluster(chosen: Sequence[rows.Row], folder: Path) -> rows.Figures:
    async def main() -> rows.Figures:
        async with LocalCluster(folder / "data", zookeepers=1, bookies=3, brokers=1) as cluster:
            pids = [process.pid for process in cluster.processes if process.pid is not None]
            target = rows.Target(cluster.pulsar_url, cluster.service_url, pids, folder)
            return await asyncio.to_thread(play, chosen, target)

    return asyncio.run(main())


def pulsar(chosen: Sequence[rows.Row], folder: Path, bookies: int) -> rows.Figures:
    process = PulsarProcess(folder / "data", settings=SYNCED, bookies=bookies, log_level="warn")
    process.start()
    try:
        return play(chosen, rows.Target(process.url, None, [process.pid], folder))
    finally:
        process.kill()


def busy_s() -> tuple[float, float]:
    """Return the CPU seconds that all processes of this machine have used, and the seconds in which
    they waited for a CPU because the hypervisor ran another machine on it."""
    user, nice, system, _, _, irq, softirq, stolen, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks_per_s, stolen / ticks_per_s


def ours_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def turns(
    name: str,
    chosen: Sequence[rows.Row],
    ours: Callable[[Sequence[rows.Row], Path], rows.Figures],
    theirs: Callable[[Sequence[rows.Row], Path], rows.Figures],
    count: int,
) -> None:
    found: tuple[list[rows.Figures], list[rows.Figures]] = ([], [])
    (busy_before_s, stolen_before_s), ours_before_s = busy_s(), ours_s()
    began_s = time.monotonic()
    for number in range(count):
        for system, figures in zip((ours, theirs), found, strict=True):
            print(f"{name}, turn {number + 1} of {count}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="magnetar-peers-") as folder:
                figures.append(system(chosen, Path(folder)))
    seconds = time.monotonic() - began_s
    busy_after_s, stolen_after_s = busy_s()
    others_s = (busy_after_s - busy_before_s) - (ours_s() - ours_before_s)
    report(name, *found)
    print(
        f"meanwhile others used {others_s / seconds:.2f} cores,"
        f" and the hypervisor took {stolen_after_s - stolen_before_s:.1f} s\n",
        flush=True,
    )


def report(name: str, ours: Sequence[rows.Figures], theirs: Sequence[rows.Figures]) -> None:
    print(f"{name:<66} {'Magnetar':>10} {'Pulsar':>10} {'ratio':>6}   per turn")
    for figure in ours[0]:
        higher = figure.endswith("/s")
        its_name = rows.of_pulsar(figure)
        pairs = [(mine[figure], its[its_name]) for mine, its in zip(ours, theirs, strict=True)]
        ratios = [mine / its if higher else its / mine for mine, its in pairs]
        medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
        spread = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{figure:<66} {medians[0]:>10,.2f} {medians[1]:>10,.2f}"
            f" {statistics.median(ratios):>6.2f}   {spread}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.pulsar", description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--only", default="", help='run the rows whose name contains this text, such as "backlog"'
    )
    parser.add_argument(
        "--taken",
        type=float,
        default=0,
        help="take this part of each CPU away (such as 0.5), as on a slower machine",
    )
    options = parser.parse_args()
    for name, chosen, ours, bookies in (
        ("standalone", rows.STANDALONE, magnetar_standalone, 1),
        ("cluster, 3/3/2", rows.CLUSTER, magnetar_cluster, 3),
    ):
        picked = [row for row in chosen if options.only in row.__name__]
        if picked:
            with cpus_taken(options.taken):
                turns(name, picked, ours, partial(pulsar, bookies=bookies), options.turns)


if __name__ == "__main__":
    main()
