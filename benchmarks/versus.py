"""Compares this tree with an older revision, in turns: `make bench-versus OLD=<revision>`.

Each turn runs the loads of turn.py on a new cluster (one ZooKeeper, three bookies at 3/3/2, one
broker). The two trees take turns to go first, because the machine may change its speed. The
program prints medians, the ratio new/old of each pair of turns, and the spread of these ratios. A
difference counts only if all turns agree on its direction.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).resolve().parents[1]
TURN: Final = Path(__file__).with_name("turn.py")
TURN_TIMEOUT_S: Final = 600.0


def turn(tree: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(TURN)],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TURN_TIMEOUT_S,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(old: list[dict[str, float]], new: list[dict[str, float]]) -> None:
    print(f"{'load':<52} {'old':>10} {'new':>10} {'new/old':>8}   per turn")
    for name in new[0]:
        ratios = [after[name] / before[name] for before, after in zip(old, new, strict=True)]
        medians = [statistics.median(found[name] for found in runs) for runs in (old, new)]
        spread = " ".join(f"{ratio:.2f}" for ratio in ratios)
        middle = statistics.median(ratios)
        print(f"{name:<52} {medians[0]:>10.2f} {medians[1]:>10.2f} {middle:>8.2f}   {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", help="revision to compare with")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    old: list[dict[str, float]] = []
    new: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="magnetar-old-") as folder:
        tree = Path(folder) / "old"
        git = ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), options.old], check=True)
        try:
            for number in range(options.turns):
                runs = [(tree, old), (TREE, new)]
                for side, found in runs if number % 2 == 0 else reversed(runs):
                    found.append(turn(side))
                print(f"turn {number + 1} of {options.turns}", file=sys.stderr, flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    report(old, new)


if __name__ == "__main__":
    main()
