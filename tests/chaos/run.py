"""Chaos on real processes: `make chaos`, or from the top folder

    PYTHONPATH=tests .venv/bin/python -m chaos.run [--seed N] [--bookies 4] ...

A workload runs on a local cluster while the nemesis kills and stops brokers and kills bookies. Then
the cluster is healed and must recover, and checkers check all messages that it holds. The nemesis's
choices follow from the seed. Timing does not, so a seed gives the same faults but not the same run.

`make stops` only stops the owner and lets it continue, 100 times (`--stops 100`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Final

from chaos.administration import keep_everything
from chaos.nemesis import Nemesis, plan
from chaos.report import OUTAGE_TARGET_S, text, timeline
from chaos.workload import Consuming, Producing, read_all
from checkers.faults import check_faults
from checkers.history import History
from checkers.subscription import check_subscription
from checkers.topic import check_topic

from magnetar import ConsumerType, PulsarException
from magnetar.asyncio import Client
from magnetar.local_cluster import LocalCluster
from magnetar.metadata.zookeeper import ZooKeeperStore
from magnetar.runtime.log import configure_logging

if TYPE_CHECKING:
    from checkers.verdict import Anomaly

TOPIC: Final = "persistent://public/default/chaos"
QUIET_S: Final = 2.0
RECOVER_S: Final = 45.0
FINISH_S: Final = 180.0  # the rest of the messages, at a few thousand a second
DRAIN_S: Final = 60.0
REPORTS: Final = Path("reports")


@dataclass(frozen=True, slots=True)
class Setting:
    """The parameters of a run, besides the seed."""

    bookies: int
    subscription: ConsumerType
    messages: int = 100_000
    rate: float = 3_000.0  # messages a second
    kills: int = 3
    pauses: int = 2
    zookeepers: int = 3

    @property
    def name(self) -> str:
        return f"{self.bookies} bookies, {self.subscription.name}"


FULL: Final = (
    Setting(bookies=4, subscription=ConsumerType.Shared),
    Setting(bookies=3, subscription=ConsumerType.Exclusive),
)
STOPS_PER_S: Final = 500.0  # messages a second of a run of stops; 100 stops take about 20 minutes


@dataclass(slots=True)
class Run:
    """One run and its result."""

    setting: Setting
    seed: int
    history: History
    trouble: list[str]  # the phase that failed or did not end in time
    anomalies: list[Anomaly]

    @property
    def passed(self) -> bool:
        return not self.trouble and not self.anomalies

    @property
    def late(self) -> bool:
        """Whether a fault kept the topic from being served for longer than the target."""
        return any((fault.outage_s or 0.0) > OUTAGE_TARGET_S for fault in self.history.faults)

    @property
    def title(self) -> str:
        return f"chaos: seed {self.seed}, {self.setting.name}"

    def text(self) -> str:
        return text(self.title, self.history, self.anomalies, self.trouble)


async def run_chaos(setting: Setting, seed: int, directory: Path) -> Run:
    """Run the chaos. Raises only if the cluster does not start; the result contains all other
    failures."""
    run = Run(setting, seed, History(), [], [])
    async with LocalCluster(
        directory, zookeepers=setting.zookeepers, bookies=setting.bookies, brokers=2
    ) as cluster:
        await asyncio.to_thread(keep_everything, cluster)
        store = await ZooKeeperStore.connect(cluster.zookeeper)
        client = Client(cluster.service_url)
        try:
            await _phases(run, cluster, store, client)
        except* (TimeoutError, PulsarException) as failed:
            phase = run.history.phases[-1][0] if run.history.phases else "start"
            run.trouble.append(f"in phase {phase!r}: {failed.exceptions!r}")
        finally:
            client.shutdown()
            await store.close()
    planned = {"kill-owner": setting.kills, "pause-owner": setting.pauses}
    run.anomalies += check_faults(run.history, planned | {"kill-bookie": 1 if setting.kills else 0})
    if run.history.reads:
        run.anomalies += check_topic(run.history)
        run.anomalies += check_subscription(run.history)
    return run


async def _phases(run: Run, cluster: LocalCluster, store: ZooKeeperStore, client: Client) -> None:
    random, history, setting = Random(run.seed), run.history, run.setting
    faults = plan(
        random,
        kills=setting.kills,
        pauses=setting.pauses,
        bookie_first=setting.bookies == 3,
    )
    producing = Producing(history, topic=TOPIC, messages_min=setting.messages, rate=setting.rate)
    consuming = Consuming(
        history,
        topic=TOPIC,
        kind=setting.subscription,
        workers=1 if setting.subscription is ConsumerType.Exclusive else 2,
        random=random,
    )
    nemesis = Nemesis(cluster, store, producing, history)

    def begin(phase: str) -> None:
        history.phases.append((phase, time.monotonic_ns()))

    await consuming.subscribe_first(client)
    async with asyncio.TaskGroup() as group:
        producer = group.create_task(producing.run(client))
        consumer = group.create_task(consuming.run(client))
        begin("quiet")
        await asyncio.sleep(QUIET_S)
        begin("faults")
        await nemesis.run(faults)
        begin("heal")
        await nemesis.heal()
        begin("recover")
        async with asyncio.timeout(RECOVER_S):
            await producing.wait_acknowledged(len(history.sends))
        begin("finish")
        producing.ending.set()
        async with asyncio.timeout(FINISH_S):
            await producer
        begin("drain")
        consuming.draining.set()
        async with asyncio.timeout(DRAIN_S):
            await consumer
    begin("read")
    history.reads.append(await read_all(client, TOPIC))
    await nemesis.hand_over()
    history.reads.append(await read_all(client, TOPIC))
    begin("end")


def stops(rounds: int) -> Setting:
    """Return the setting of a run that stops the owner and lets it continue, `rounds` times. The
    workload runs until the last stop."""
    return Setting(
        bookies=3,
        subscription=ConsumerType.Exclusive,
        messages=0,
        rate=STOPS_PER_S,
        kills=0,
        pauses=rounds,
        zookeepers=1,
    )


def write(run: Run) -> Path:
    """Write the report's files (text, timeline, history). Returns their folder."""
    folder = REPORTS / f"chaos-{run.setting.bookies}-{run.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(run.text() + "\n")
    if run.history.sends:
        (folder / "timeline.svg").write_text(timeline(run.title, run.history))
    run.history.save(folder / "history.jsonl")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(1_000_000))
    parser.add_argument("--bookies", type=int, choices=(3, 4), help="one of the two settings")
    parser.add_argument("--messages", type=int, default=FULL[0].messages)
    parser.add_argument("--rate", type=float, default=FULL[0].rate)
    parser.add_argument(
        "--stops", type=int, help="instead of both settings: stop the owner this many times"
    )
    parser.add_argument(
        "--keep", action="store_true", help="the logs, also of a run that passes in time"
    )
    arguments = parser.parse_args()
    if arguments.stops is not None:
        settings = [stops(arguments.stops)]
    else:
        settings = [
            replace(setting, messages=arguments.messages, rate=arguments.rate)
            for setting in FULL
            if arguments.bookies in (None, setting.bookies)
        ]
    failed = False
    for setting in settings:
        with tempfile.TemporaryDirectory(
            prefix="magnetar-chaos-", ignore_cleanup_errors=True
        ) as folder:
            servers, client = Path(folder) / "cluster", Path(folder) / "client"
            client.mkdir()
            with (client / "client.log").open("w") as stream:
                configure_logging(stream=stream)
                run = asyncio.run(run_chaos(setting, arguments.seed, servers))
            reported = write(run)
            if arguments.keep or run.late or not run.passed:
                for log in [*servers.glob("*/*.log"), *client.glob("*.log")]:
                    (reported / f"{log.parent.name}.log").write_bytes(log.read_bytes())
        print(run.text(), f"  report in {reported}", sep="\n", flush=True)
        failed |= not run.passed
    if failed:
        same = "chaos" if arguments.stops is None else f"stops ROUNDS={arguments.stops}"
        print(f"again: make {same} SEED={arguments.seed}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
