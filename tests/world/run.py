"""Play scenarios with seeds: `python -m world.run --first N --seeds M [--scenario T12] [--story]`.

A failed seed is printed with its story and the command that plays it again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING

from world.scenario import Outcome, Scenario, play
from world.scenarios import SCENARIOS
from world.scenarios.subscribing import SUBSCRIPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

STORY_LINES = 150
MAIN = "cluster"


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed when none is named: every fourth seed plays the whole cluster, every
    twelfth a subscription, the others the other scenarios in turn."""
    if seed % 4 == 0:
        return SCENARIOS[MAIN]
    number = seed // 12
    if seed % 12 == 7:
        return SCENARIOS[SUBSCRIPTIONS[number % len(SUBSCRIPTIONS)]]
    others = [name for name in SCENARIOS if name not in (MAIN, *SUBSCRIPTIONS)]
    place = (1, 2, 3, 5, 6, 9, 10, 11).index(seed % 12)
    return SCENARIOS[others[(8 * number + place) % len(others)]]


def run_seeds(
    scenario: str,
    seeds: Iterable[int],
    *,
    mutate: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[str, int] | None:
    """Play until a violation: (name of the oracle, seed). None: there was none.

    `mutate` is a context around each play: it plants a bug in the real code and removes it.
    """
    for seed in seeds:
        with mutate():
            outcome = play(SCENARIOS[scenario], seed)
        if outcome.violation is not None:
            return outcome.violation.oracle, seed
    return None


def outcomes(first: int, seeds: int, scenario: str = "") -> Iterator[Outcome]:
    for seed in range(first, first + seeds):
        chosen = SCENARIOS[scenario] if scenario else scenario_of(seed)
        try:
            yield play(chosen, seed)
        except Exception as error:  # a bug of the scenario
            error.add_note(f"{chosen.name} --first {seed} --seeds 1")
            raise


def command(outcome: Outcome) -> str:
    return (
        f"PYTHONPATH=tests .venv/bin/python -m world.run --scenario {outcome.scenario}"
        f" --first {outcome.seed} --seeds 1 --story"
    )


def report(outcome: Outcome) -> str:
    """A failure as text: the violation, the command that repeats it, and the story."""
    again = play(SCENARIOS[outcome.scenario], outcome.seed, tell=True)
    title = SCENARIOS[outcome.scenario].title
    lines = [
        f"seed {outcome.seed} of {outcome.scenario} ({title}), {outcome.quorum}:",
        f"  {outcome.violation}",
        f"  again: {command(outcome)}",
    ]
    if again.digest != outcome.digest:
        lines.append(f"  NOT REPEATABLE: {again.digest} instead of {outcome.digest}")
    return "\n".join([*lines, *again.story[-STORY_LINES:]])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="world.run", description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--scenario", default="", choices=["", *SCENARIOS])
    parser.add_argument("--story", action="store_true", help="print what happened, for each seed")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    options = parser.parse_args(arguments)
    begun_s = time.process_time()
    bitten: Counter[str] = Counter()
    played: Counter[str] = Counter()
    failed: list[Outcome] = []
    confirmed = reads = 0
    for outcome in outcomes(options.first, options.seeds, options.scenario):
        played[outcome.scenario] += 1
        bitten.update(outcome.bitten)
        confirmed += outcome.confirmed
        reads += outcome.reads
        if options.story:
            again = play(SCENARIOS[outcome.scenario], outcome.seed, tell=True)
            print("\n".join(again.story))
            print(f"{outcome.scenario} {outcome.seed} {outcome.quorum} {outcome.digest}")
        if outcome.violation is not None:
            failed.append(outcome)
            print(report(outcome) if not options.story else outcome.violation, flush=True)
            if not options.keep_going:
                break
    spent_s = time.process_time() - begun_s
    print(f"{played.total()} seeds from {options.first} in {spent_s:.1f} s of CPU;", end=" ")
    print(f"{confirmed} entries confirmed, {reads} read, {bitten.total()} faults had an effect")
    for what, count in sorted(bitten.items()):
        print(f"  {count:7} {what}")
    for outcome in failed:
        print(f"FAILED {outcome.violation}\n  {command(outcome)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
