"""Every state that can be reached, breadth first; the shortest run to a violation."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from explorer.forgetting import Forgetting
from explorer.invariants import Violation
from explorer.protocol import Protocol
from explorer.reduced import NotReducible, Reduced
from explorer.state import Bookie, Case, State, Step, tell

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Result:
    case: Case
    reduced: bool
    states: int
    steps: int
    depth: int
    seconds: float  # the CPU time
    violation: Violation | None  # None: there is none
    trace: tuple[Step, ...]  # the shortest run to the violation

    def describe(self) -> str:
        head = (
            f"{self.case}{'' if self.reduced else ', not reduced'}: {self.states:,} states,"
            f" {self.steps:,} steps, depth {self.depth}, {self.seconds:.1f} s of CPU"
        )
        if self.violation is None:
            return f"{head}, no violation"
        lines = [f"{head}, violated: {self.violation.invariant}"]
        told = [*map(tell, self.trace), *self.violation.then]
        return "\n".join(lines + [f"  {number:2}. {line}" for number, line in enumerate(told, 1)])


def explore(case: Case, *, states_max: int = 100_000_000) -> Result:
    """All states that matter (`reduced.py`, `forgetting.py`), or the shortest run among them to a
    violation. If the protocol breaks an assumption of the reductions, search all its states."""
    try:
        return search(Forgetting(case), states_max=states_max)
    except NotReducible as why:
        print(f"{case}: everything is searched, because {why}")
        return search(Protocol(case), states_max=states_max)


def search(protocol: Protocol, *, states_max: int = 100_000_000) -> Result:
    """All states that the protocol's `moves` lead to. Raises NotReducible."""
    began = time.process_time()
    codec = _Codec()
    begin = codec.pack(protocol.canonical(protocol.begin()))
    ways = {begin: begin}  # every state that was reached, and the state before it
    level, depth, count = [begin], 0, 0

    def result(violation: Violation | None, trace: Sequence[Step]) -> Result:
        seconds = time.process_time() - began
        reduced = isinstance(protocol, Reduced)
        return Result(
            protocol.case, reduced, len(ways), count, depth, seconds, violation, tuple(trace)
        )

    while level:
        following: list[bytes] = []
        for key in level:
            state = codec.unpack(key)
            try:
                for _, after in protocol.steps(state):
                    count += 1
                    reached = codec.pack(protocol.canonical(after))
                    if reached not in ways:
                        ways[reached] = key
                        following.append(reached)
            except Violation:
                path = [key]
                while path[-1] != begin:
                    path.append(ways[path[-1]])
                steps, violation = _trace(protocol, [codec.unpack(each) for each in path[-2::-1]])
                return result(violation, steps)
        assert len(ways) <= states_max, f"{protocol.case}: more than {states_max:,} states"
        level, depth = following, depth + 1
    return result(None, ())


def _trace(protocol: Protocol, path: Sequence[State]) -> tuple[list[Step], Violation]:
    """The steps along these states, with bookies and recoverers by their own names. Kept states are
    sorted, so this repeats the run from the beginning."""
    state, steps = protocol.begin(), list[Step]()
    for wanted in path:
        found = (each for each in protocol.steps(state) if protocol.canonical(each[1]) == wanted)
        step, state = next(found)
        steps.append(step)
    try:
        for _ in protocol.steps(state):
            pass
    except Violation as named:
        return steps, named
    raise AssertionError("the run does not lead to the violation")


class _Codec:
    """Converts states to short byte strings and back. Unlike a hash it is exact: equal strings are
    equal states. There are few different bookies, and few different states apart from their
    bookies; each has a number."""

    def __init__(self) -> None:
        self._bookies: dict[Bookie, int] = {}
        self._rests: dict[State, int] = {}
        self._bookie_of: list[Bookie] = []
        self._rest_of: list[State] = []

    def pack(self, state: State) -> bytes:
        rest = state._replace(bookies=())
        numbers = array("I", [self._rests.setdefault(rest, len(self._rest_of))])
        if numbers[0] == len(self._rest_of):
            self._rest_of.append(rest)
        for bookie in state.bookies:
            number = self._bookies.setdefault(bookie, len(self._bookie_of))
            if number == len(self._bookie_of):
                self._bookie_of.append(bookie)
            numbers.append(number)
        return numbers.tobytes()

    def unpack(self, key: bytes) -> State:
        rest, *bookies = array("I", key)
        return self._rest_of[rest]._replace(
            bookies=tuple(self._bookie_of[number] for number in bookies)
        )
