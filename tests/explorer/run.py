"""`make explore`: every state within the full bounds, and the shortest way to each planted bug.

Exits with 1 if the protocol can be broken, or a planted bug does not break it.
"""

from __future__ import annotations

import sys

from explorer.cases import PLANTED, QUICK, THOROUGH
from explorer.search import explore


def main() -> int:
    failed = False
    for bug, planted in PLANTED.items():
        result = explore(planted.case)
        violation = result.violation
        failed |= violation is None or violation.invariant != planted.invariant
        print(f"planted: {bug.value}\n{result.describe()}\n", flush=True)
    states = 0
    for case in (*QUICK, *THOROUGH):
        result = explore(case)
        states += result.states
        failed |= result.violation is not None
        print(result.describe(), flush=True)
    print(f"{states:,} states in all: {'VIOLATED' if failed else 'the protocol holds'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
