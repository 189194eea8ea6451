"""`make mutants`: plant each bug in turn, and check that the world finds it.

A mutant is caught if one of its oracles is the first to report a violation, within its number of
seeds and after the bug has fired, and the right code passes with the same seed. Exits with 1 unless
all mutants are caught.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mutants import (
    balances,
    bookies,
    ledgers,
    lives,
    repairs,
    scrubs,
    silences,
    stores,
    subscriptions,
    topics,
)
from mutants.plant import MUTANTS, Firings, Mutant, planted
from world.scenario import play

if TYPE_CHECKING:
    from collections.abc import Sequence

    from world.scenario import Scenario

FIRST_SEED = 0
__all__ = [
    "Verdict",
    "balances",
    "bookies",
    "hunt",
    "ledgers",
    "lives",
    "main",
    "repairs",
    "scrubs",
    "silences",
    "stores",
    "subscriptions",
    "topics",
]


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    oracle: str  # the oracle that reported a violation; "": none
    seeds: int  # the number of seeds played
    firings: int
    clean: bool  # the right code passes with the seed that caught the mutant
    seconds: float
    why: str

    @property
    def caught(self) -> bool:
        return self.oracle in self.mutant.caught_by and self.firings > 0 and self.clean

    def describe(self) -> str:
        if self.caught:
            return "caught"
        if not self.firings:
            return "NEVER FIRED"
        if not self.oracle:
            return "SURVIVED"
        return f"CAUGHT BY ANOTHER ({self.why})" if self.clean else "FAILS WITHOUT THE BUG AS WELL"


def hunt(mutant: Mutant, *, first: int = FIRST_SEED) -> Verdict:
    """Play seeds until the bug is found."""
    begun_s = time.process_time()
    fired = Firings()
    seeds, oracle, why, clean = 0, "", "", True
    for seed in range(first, first + mutant.seeds):
        seeds += 1
        with planted(mutant, fired):
            oracle, why = _try(mutant.scene, seed)
        if oracle:
            clean = _try(mutant.scene, seed) == ("", "")
            break
    seconds = time.process_time() - begun_s
    return Verdict(mutant, oracle, seeds, fired.count, clean, seconds, why)


def _try(scene: Scenario, seed: int) -> tuple[str, str]:
    """The oracle that reports a violation, and its message."""
    violation = play(scene, seed).violation
    return ("", "") if violation is None else (violation.oracle, str(violation))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants.run", description=__doc__)
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="the first seed")
    parser.add_argument("--only", default="", help="a part of the mutant's name")
    options = parser.parse_args(arguments)
    print(f"{'mutant':55} {'oracle':7} {'seeds':>9} {'fired':>6} {'s':>6}")
    survivors = 0
    for name, mutant in MUTANTS.items():
        if options.only not in name:
            continue
        verdict = hunt(mutant, first=options.first)
        survivors += not verdict.caught
        print(
            f"{name:55} {verdict.oracle[:7]:7} {verdict.seeds:4}/{mutant.seeds:<4}"
            f" {verdict.firings:6} {verdict.seconds:6.1f}  {verdict.describe()}",
            flush=True,
        )
    print(f"{survivors} not caught" if survivors else "all were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
