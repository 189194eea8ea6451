"""Play random histories of every subscription type: `make histories HISTORIES=200000`.

Each type gets the same number of histories. A failure prints the type, the seed and the command
that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from histories.model import Kind
from histories.play import Player


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="histories.run", description=__doc__)
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", default="", choices=["", *(kind.value for kind in Kind)])
    options = parser.parse_args(arguments)
    kinds = [kind for kind in Kind if options.kind in ("", kind.value)]
    begun_s = time.process_time()
    met: Counter[str] = Counter()
    each = -(-options.histories // len(kinds))
    for kind in kinds:
        for seed in range(options.first, options.first + each):
            try:
                met.update(Player(kind, seed).play().met)
            except Exception:
                traceback.print_exc()
                again = f"--kind {kind.value} --first {seed} --histories 1"
                print(f"FAILED {kind.value} {seed}\n  python -m histories.run {again}")
                return 1
        spent_s = time.process_time() - begun_s
        print(
            f"{kind.value}: {each} histories without a violation, {spent_s:.0f} s of CPU so far",
            flush=True,
        )
    for what, count in sorted(met.items()):
        print(f"  {count:9} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
