"""Every state that can be reached, breadth first; the shortest way to a violation."""

from __future__ import annotations

import time
from dataclasses import dataclass

from explorer.invariants import Violation
from explorer.protocol import Protocol
from explorer.state import Case, State, Step, tell


@dataclass(frozen=True)
class Result:
    case: Case
    states: int
    steps: int
    depth: int
    seconds: float
    violation: Violation | None  # None: there is none
    trace: tuple[Step, ...]  # the shortest way to the violation

    def describe(self) -> str:
        head = (
            f"{self.case}: {self.states:,} states, {self.steps:,} steps, depth {self.depth},"
            f" {self.seconds:.1f} s"
        )
        if self.violation is None:
            return f"{head}, no violation"
        lines = [f"{head}, violated: {self.violation.invariant}"]
        told = [*map(tell, self.trace), *self.violation.then]
        return "\n".join(lines + [f"  {number:2}. {line}" for number, line in enumerate(told, 1)])


def explore(case: Case, *, states_max: int = 100_000_000) -> Result:
    """All states, or the shortest way to the first violation. With a bug, ways are remembered."""
    protocol = Protocol(case)
    begun = time.perf_counter()
    begin = protocol.canonical(protocol.begin())
    seen: set[State] = {begin}
    ways: dict[State, State] | None = {} if case.bugs else None
    level, depth, count = [begin], 0, 0
    while level:
        following: list[State] = []
        for state in level:
            try:
                if case.crashes and not case.bugs:
                    protocol.recoverable(state)
                for _, after in protocol.steps(state):
                    count += 1
                    key = protocol.canonical(after)
                    if key not in seen:
                        seen.add(key)
                        following.append(key)
                        if ways is not None:
                            ways[key] = state
            except Violation as violation:
                seconds = time.perf_counter() - begun
                trace, violation = _trace(protocol, ways, state, violation)
                return Result(case, len(seen), count, depth, seconds, violation, trace)
        assert len(seen) <= states_max, f"{case}: more than {states_max:,} states"
        level, depth = following, depth + 1
    return Result(case, len(seen), count, depth, time.perf_counter() - begun, None, ())


def _trace(
    protocol: Protocol, ways: dict[State, State] | None, end: State, violation: Violation
) -> tuple[tuple[Step, ...], Violation]:
    """The steps to `end` with bookies and recoverers by their own names: kept states are sorted, so
    the way is gone once more from the beginning."""
    if ways is None:
        return (), violation
    path = [end]
    while path[-1] in ways:
        path.append(ways[path[-1]])
    state, steps = protocol.begin(), list[Step]()
    for wanted in reversed(path[:-1]):
        found = (each for each in protocol.steps(state) if protocol.canonical(each[1]) == wanted)
        step, state = next(found)
        steps.append(step)
    try:
        for _ in protocol.steps(state):
            pass
    except Violation as named:
        return tuple(steps), named
    raise AssertionError("the way does not lead to the violation")
