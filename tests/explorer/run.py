"""`make explore`: all interleavings within the full bounds, the shortest run to each planted bug,
and searches with reductions compared with searches without reductions.

Exits with 1 if an interleaving breaks the protocol, a planted bug does not break it, or the
reductions lose a state.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor

from explorer.cases import COMPARED, PLANTED, QUICK, THOROUGH
from explorer.outcomes import compare
from explorer.search import explore


def main() -> int:
    failed = False
    for bug, planted in PLANTED.items():
        result = explore(planted.case)
        failed |= not planted.caught_by(result)
        print(f"planted: {bug.value}\n{result.describe()}\n", flush=True)
    states = 0
    with ProcessPoolExecutor(max_workers=2) as pool:
        explored = pool.map(explore, (*QUICK, *THOROUGH))
        compared = pool.map(compare, COMPARED)
        for result in explored:
            states += result.states
            failed |= result.violation is not None
            print(result.describe(), flush=True)
        print()
        for comparison in compared:
            states += sum(result.states for result in comparison.results)
            failed |= not comparison.equal
            print(comparison.describe(), flush=True)
    print(f"{states:,} states in all: {'VIOLATED' if failed else 'the protocol holds'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
