"""`make explore`: all that can happen within the full bounds, and the shortest way to each planted
bug.

Exits with 1 if the protocol can be broken, or a planted bug does not break it.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor

from explorer.cases import PLANTED, QUICK, THOROUGH
from explorer.search import explore


def main() -> int:
    failed = False
    for bug, planted in PLANTED.items():
        result = explore(planted.case)
        failed |= not planted.caught_by(result)
        print(f"planted: {bug.value}\n{result.describe()}\n", flush=True)
    states = 0
    with ProcessPoolExecutor(max_workers=2) as pool:
        for result in pool.map(explore, (*QUICK, *THOROUGH)):
            states += result.states
            failed |= result.violation is not None
            print(result.describe(), flush=True)
    print(f"{states:,} states in all: {'VIOLATED' if failed else 'the protocol holds'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
