"""Whole clusters in one process, by seed: a range of seeds, and every seed that ever failed.

`make sim SIM_FIRST=1000 SIM_SEEDS=500` plays further seeds. SEEDS.md lists the seeds played so far.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from world.run import MAIN, outcomes, report
from world.scenario import Outcome, Scenario, play
from world.scenarios import SCENARIOS

if TYPE_CHECKING:
    from world.cluster import World

HERE = Path(__file__).parent
FIRST, SEEDS = 0, 120  # 35 s of one core
NIGHT_SEEDS = 180  # the next seeds, of `make night`

# Scenarios with a fault that no other scenario has and that less than half of their seeds meet. A
# scenario has only one or two of the 120 seeds, so these are played with further seeds.
FURTHER = {"ordered nacks": 6, "scrub": 24, "T50": 6}

# The events that a run of this length must have met.
FAULTS = (
    "add refused by a nearly full disk",
    "bundle moved to another broker",
    "call twice",
    "clock jumps",
    "conflicting add refused",
    "connection given up",
    "connection lost",
    "cut from metadata",
    "damage found by a scrub",
    "damage met by a compaction",
    "disk full",
    "disk nearly full",
    "end of a real log lost",
    "flipped bit",
    "idle topic unloaded",
    "killed",
    "ledger trimmed",
    "live owner replaced as silent",
    "message into a cut",
    "metadata: not sent",
    "metadata: reply lost",
    "metadata: request lost",
    "older image restored",
    "orphaned ledger deleted",
    "paused",
    "power cut",
    "read a run fails",
    "record of a later format",
    "record of a later version",
    "reserve given up",
    "store broken",
    "synced batches lost",
    "table found rotten",
    "topic deleted by its owner",
    "session expired",
    "session expired while paused",
    "slow message",
    "stale follower",
    "swapped entry",
    "sync fails",
    "unreadable block",
    "unreadable record",
    "unsynced batches lost",
    "wiped",
    "write fails",
    "write refused after a compaction",
    "wrong metadata shown",
)

# The events that subscriptions must have met: the minimum in the seeds of `make test`, and together
# with the seeds of the night. Each is at most a third of what was counted when it was written.
SUBSCRIPTIONS = {
    "batch acknowledged in part": (19, 27),
    "consumer crashed": (4, 4),
    "consumer drained before it left": (3, 6),
    "cumulative acknowledgement refused": (19, 20),
    "delayed entry delivered": (167, 282),
    "delivered in order beside a relaxed consumer": (46, 268),
    "delivered out of order": (8, 11),
    "delivery blocked by a draining hash": (23, 23),
    "entries expired": (3, 4),
    "entry replayed": (162, 317),
    "failover of a subscription": (20, 30),
    "joined under load": (38, 38),
    "negative ack in order": (24, 24),
    "subscription moved": (4, 5),
    "too many negative acks in order": (2, 2),
    "topic with consumers unloaded": (3, 7),
}


def kept() -> list[tuple[str, int]]:
    """Scenario and seed of each line. The text after a # is the reason of the former failure."""
    lines = (HERE / "kept_seeds.txt").read_text().splitlines()
    facts = [line.partition("#")[0].rstrip().rpartition(" ") for line in lines]
    return [(name.rstrip(), int(seed)) for name, _, seed in facts if name]


@pytest.fixture(scope="module")
def played() -> list[Outcome]:
    ranges = [outcomes(FIRST, SEEDS)]
    ranges += [outcomes(FIRST + SEEDS, seeds, name) for name, seeds in FURTHER.items()]
    found = []
    for outcome in chain.from_iterable(ranges):
        assert outcome.violation is None, report(outcome)
        found.append(outcome)
    return found


@pytest.mark.timeout(600)
def test_no_seed_violates_an_oracle(played: list[Outcome]) -> None:
    assert len(played) == SEEDS + sum(FURTHER.values())


@pytest.mark.timeout(600)
def test_every_fault_had_an_effect(played: list[Outcome]) -> None:
    bitten: Counter[str] = Counter()
    for outcome in played:
        bitten.update(outcome.bitten)
    assert not [fault for fault in FAULTS if not bitten[fault]]


def too_rare(played: list[Outcome], minima: dict[str, int]) -> dict[str, int]:
    """Return the number of each event that the runs met less often than its minimum."""
    met: Counter[str] = Counter()
    for outcome in played:
        met.update(outcome.bitten)
    print("\n".join(f"{met[what]:6} {what}, at least {least}" for what, least in minima.items()))
    return {what: met[what] for what, least in minima.items() if met[what] < least}


@pytest.mark.timeout(600)
def test_subscriptions_met_each_event_often_enough(played: list[Outcome]) -> None:
    assert not too_rare(played, {what: least for what, (least, _) in SUBSCRIPTIONS.items()})


@pytest.mark.night
@pytest.mark.timeout(600)
def test_seeds_of_the_night_hold_and_meet_each_event_often_enough(played: list[Outcome]) -> None:
    found = list(outcomes(FIRST + SEEDS, NIGHT_SEEDS))
    for outcome in found:
        assert outcome.violation is None, report(outcome)
    assert len(found) == NIGHT_SEEDS
    minima = {what: least for what, (_, least) in SUBSCRIPTIONS.items()}
    assert not too_rare(played + found, minima)


@pytest.mark.timeout(600)
def test_the_worlds_are_alive(played: list[Outcome]) -> None:
    """A world that confirms no entry would violate no rule either."""
    clusters = [outcome for outcome in played if outcome.scenario == MAIN]
    assert sum(outcome.confirmed for outcome in clusters) > 50 * len(clusters)
    assert sum(outcome.reads for outcome in clusters) > 50 * len(clusters)


@pytest.mark.parametrize(("scenario", "seed"), kept())
def test_seeds_that_failed_before_hold_now(scenario: str, seed: int) -> None:
    outcome = play(SCENARIOS[scenario], seed)
    assert outcome.violation is None, report(outcome)


REPEATED = (
    MAIN,
    "T21",
    "T32",
    "T43",
    "T47",
    "T49",
    "T50",
    "life",
    "silent",
    "balance",
    "scrub",
    "ordered nacks",
    "failover",
    "key_shared",
    "relaxed keys",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", REPEATED)
def test_a_seed_always_gives_the_same_run(scenario: str, played: list[Outcome]) -> None:
    """Between the two runs of a seed, this process played other seeds."""
    runs = [outcome for outcome in played if outcome.scenario == scenario]
    for first in runs[:2]:
        again = play(SCENARIOS[scenario], first.seed, tell=True)
        assert first.digest == again.digest
        assert again.story
    assert runs


def test_a_failure_that_no_code_looks_at_is_a_bug() -> None:
    async def story(world: World) -> None:
        world.loop.call_soon(lambda: 1 // 0)
        world.loop.create_task(stray())
        await asyncio.sleep(1)

    async def stray() -> None:
        raise ZeroDivisionError

    outcome = play(Scenario("stray", "", ("1/1/1",), story), 0)
    assert outcome.violation is not None
    assert outcome.violation.oracle == "bug"
    assert "ZeroDivisionError" in str(outcome.violation)


def test_another_seed_is_another_run(played: list[Outcome]) -> None:
    digests = [outcome.digest for outcome in played if outcome.scenario == MAIN]
    assert len(set(digests)) == len(digests)


@pytest.mark.timeout(600)
def test_the_hash_seed_of_the_interpreter_does_not_matter(played: list[Outcome]) -> None:
    """This process has another hash seed than the interpreter that plays the same seeds again."""
    names = (MAIN, "T32", "T43", "T50", "scrub", "ordered nacks")
    first = [next(outcome for outcome in played if outcome.scenario == name) for name in names]
    code = (
        "from world.scenario import play\n"
        "from world.scenarios import SCENARIOS\n"
        f"runs = {[(outcome.scenario, outcome.seed) for outcome in first]!r}\n"
        "print(hash('a'), *(play(SCENARIOS[name], seed).digest for name, seed in runs))\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    hashed, *digests = done.stdout.split()
    assert int(hashed) != hash("a"), "run the tests with another PYTHONHASHSEED than 1"
    assert digests == [outcome.digest for outcome in first]
