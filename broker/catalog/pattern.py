"""Patterns of topic names, matched in time proportional to the length of the name. Pure.

Theory of operation. A client sends a regular expression of its own language. A backtracking matcher
such as Python's `re` may need exponential time for it, which would stop the broker for all clients.
So the broker compiles the pattern itself, into a nondeterministic automaton without backtracking
(Thompson's construction), and follows all its states at once. It keeps the sets of states that
occur, so that a character of a name usually costs one look-up in a dict.

The broker understands literals, `.`, escapes of punctuation, `\\d \\w \\s` and their complements
(ASCII, as in Java), `\\Q...\\E`, classes with ranges, groups, alternatives, `* + ? {m} {m,} {m,n}`
(greedy or lazy), `^` at the beginning and `$` at the end. A match covers the whole name. Anything
else raises UnsupportedPattern. Then the client filters the names itself, as all clients did before
Pulsar 2.11.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Final, NoReturn

from magnetar.broker.errors import UnsupportedPattern

PATTERN_CHARACTERS_MAX: Final = 1_024
STATES_MAX: Final = 1_000
"""The limit of states of one automaton: `.{250}` fits, `.{500}` does not. Making an automaton takes
up to 10 ms. The first step from a set of states by a character costs up to 2 us for each state."""

KEPT_MAX: Final = 50_000
"""The limit of members and steps in all kept sets of one pattern: some 64 bytes each, 3 MB in all.
At the limit the broker forgets all sets of the pattern."""

DEPTH_MAX: Final = 50
"""The limit of nested groups."""

States = frozenset[int]
"""The numbers of the states that the automaton is in."""


@dataclass(frozen=True, slots=True)
class _Characters:
    """A set of characters."""

    ranges: tuple[tuple[str, str], ...]  # both ends included
    negated: bool = False

    def __contains__(self, character: str) -> bool:
        found = any(low <= character <= high for low, high in self.ranges)
        return found is not self.negated


@dataclass(slots=True)
class _State:
    """A state that consumes a character, or, without `accepts`, leads on without a character."""

    accepts: _Characters | None = None  # None: the state consumes nothing
    follows: list[int] = field(default_factory=list)


_ANY: Final = _Characters((("\n", "\n"), ("\r", "\r")), negated=True)
_DIGIT: Final = (("0", "9"),)
_WORD: Final = (("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z"))
_SPACE: Final = ((" ", " "), ("\t", "\r"))
_KINDS: Final = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_LETTERS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class TopicPattern:
    """A compiled pattern. A domain before the pattern is ignored. The constructor raises
    UnsupportedPattern."""

    def __init__(self, pattern: str) -> None:
        compiler = _Compiler(pattern)
        self._states = compiler.states
        self._final = compiler.compile()
        self._sets: dict[States, dict[str, States]] = {}
        self._kept = 0  # the members of the kept sets, and the kept steps
        self.first: States = self._closure([compiler.first])

    def matches(self, text: str) -> bool:
        """Return True if the pattern covers the whole text."""
        states, _, _ = self.advance(self.first, text, 0, work_max=sys.maxsize)
        return self.is_final(states)

    def is_final(self, states: States) -> bool:
        """Return True if a text that ends in these states matches."""
        return self._final in states

    def advance(
        self, states: States, text: str, at: int, *, work_max: int
    ) -> tuple[States, int, int]:
        """Follow the text from `at` on. Returns the states, the place of the stop, and the work. A
        step costs 1. A step that is not kept yet also costs the number of states before and after
        it. The call stops early when the work reaches `work_max`, or when no states are left: then
        the text cannot match."""
        work = 0
        while at < len(text) and states and work < work_max:
            character = text[at]
            known = self._sets.get(states)
            if known is None:
                known = self._keep(states)
            following = known.get(character)
            if following is None:
                following = known[character] = self._step(states, character)
                work += len(states) + len(following)
                self._kept += 1
            states = following
            at += 1
            work += 1
        return states, at, work

    def _keep(self, states: States) -> dict[str, States]:
        if self._kept > KEPT_MAX:
            self._sets.clear()
            self._kept = 0
        self._kept += len(states)
        known = self._sets[states] = {}
        return known

    def _step(self, current: States, character: str) -> States:
        reached = []
        for number in current:
            state = self._states[number]
            if state.accepts is not None and character in state.accepts:
                reached += state.follows
        return self._closure(reached)

    def _closure(self, numbers: list[int]) -> States:
        """Return these states, and the states that follow them without a character."""
        seen: set[int] = set()
        while numbers:
            number = numbers.pop()
            if number not in seen:
                seen.add(number)
                state = self._states[number]
                if state.accepts is None:
                    numbers += state.follows
        return frozenset(seen)


class _Compiler:
    """Reads a pattern from left to right. A fragment is a pair of its first and last state. The
    last state consumes nothing and leads nowhere yet."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > PATTERN_CHARACTERS_MAX:
            why = f"it has {len(pattern)} characters, at most {PATTERN_CHARACTERS_MAX} are allowed"
            raise UnsupportedPattern(pattern, why)
        self._whole = pattern
        head, separator, rest = pattern.partition("://")
        self._text = (rest if separator else head).removeprefix("^")
        self._at = 0
        self._depth = 0
        self.states: list[_State] = []
        self.first = 0

    def compile(self) -> int:
        """Compile the pattern. Returns the number of the final state."""
        self.first, last = self._alternatives()
        if self._at < len(self._text):
            self._refuse(f"unexpected {self._text[self._at]!r}")
        return last

    def _alternatives(self) -> tuple[int, int]:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._refuse(f"more than {DEPTH_MAX} nested groups")
        parts = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._sequence())
        self._depth -= 1
        if len(parts) == 1:
            return parts[0]
        first, last = self._new(), self._new()
        for begin, end in parts:
            self.states[first].follows.append(begin)
            self.states[end].follows.append(last)
        return first, last

    def _sequence(self) -> tuple[int, int]:
        first = last = self._new()
        while self._peek() not in ("", "|", ")"):
            begin, end = self._repeated()
            self.states[last].follows.append(begin)
            last = end
        return first, last

    def _repeated(self) -> tuple[int, int]:
        start = self._at
        first, last = self._atom()
        counts = self._quantifier()
        if counts is None:
            return first, last
        if self._peek() == "?":
            self._at += 1  # lazy: the order of matches does not matter
        if self._peek() in ("*", "+", "{"):
            self._refuse("a repetition of a repetition, or a possessive one")
        after = self._at
        lowest, highest = counts
        first = last = self._new()
        for number in range(highest if highest is not None else max(lowest, 1)):
            self._at = start
            begin, end = self._atom()  # parse the atom again: each copy has its own states
            done = self._new()
            self.states[last].follows.append(begin)
            self.states[end].follows.append(done)
            if number >= lowest:
                self.states[last].follows.append(done)
            if highest is None and number >= lowest - 1:
                self.states[done].follows.append(begin)
            last = done
        self._at = after
        return first, last

    def _quantifier(self) -> tuple[int, int | None] | None:
        match self._peek():
            case "*":
                self._at += 1
                return 0, None
            case "+":
                self._at += 1
                return 1, None
            case "?":
                self._at += 1
                return 0, 1
            case "{":
                return self._counts()
        return None

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        low, comma, high = (
            self._text[self._at + 1 : end].partition(",") if end > 0 else ("", "", "")
        )
        self._at = end + 1
        for number in (low, high or low):
            if not (number.isascii() and number.isdigit() and len(number) <= 4):
                self._refuse("expected {m}, {m,} or {m,n} with numbers below 10,000")
        lowest = int(low)
        if not comma:
            return lowest, lowest
        if not high:
            return lowest, None
        if int(high) < lowest:
            self._refuse(f"{{{low},{high}}} has no meaning")
        return lowest, int(high)

    def _atom(self) -> tuple[int, int]:
        character = self._next()
        match character:
            case "(":
                if self._peek() == "?":
                    self._at += 1
                    if self._next() != ":":
                        self._refuse("only plain groups, ( and (?:, are understood")
                fragment = self._alternatives()
                if self._next() != ")":
                    self._refuse("a group has no end")
                return fragment
            case "[":
                return self._consuming(self._class())
            case ".":
                return self._consuming(_ANY)
            case "\\" if self._peek() == "Q":
                return self._quotation()
            case "\\":
                return self._consuming(self._escape())
            case "$" if self._at == len(self._text):
                end = self._new()
                return end, end
            case "*" | "+" | "?" | "{" | "^" | "$" | ")":
                self._refuse(f"unexpected {character!r}")
        return self._consuming(_Characters(((character, character),)))

    def _quotation(self) -> tuple[int, int]:
        """`\\Q...\\E`: literal text."""
        end = self._text.find("\\E", self._at)
        stop = len(self._text) if end < 0 else end
        first = last = self._new()
        for character in self._text[self._at + 1 : stop]:
            begin, done = self._consuming(_Characters(((character, character),)))
            self.states[last].follows.append(begin)
            last = done
        self._at = stop if end < 0 else stop + 2
        if self._peek() in ("*", "+", "?", "{"):
            self._refuse("a repetition after \\Q...\\E")
        return first, last

    def _escape(self) -> _Characters:
        character = self._next()
        ranges = _KINDS.get(character.lower())
        if ranges is not None:
            return _Characters(ranges, negated=character.isupper())
        character = _LETTERS.get(character, character)
        if character.isalnum():
            self._refuse(f"the escape \\{character} is not understood")
        return _Characters(((character, character),))

    def _class(self) -> _Characters:
        negated = self._peek() == "^"
        if negated:
            self._at += 1
        ranges: list[tuple[str, str]] = []
        while True:
            character = self._next()
            if character == "]" and ranges:
                return _Characters(tuple(ranges), negated=negated)
            if character in "[]^" or (character == "&" and self._peek() == "&"):
                self._refuse(f"{character!r} in a class must be escaped")
            if character == "\\":
                escaped = self._escape()
                if escaped.negated:
                    self._refuse("a complement in a class")
                ranges += escaped.ranges
                if len(escaped.ranges) > 1 or escaped.ranges == _DIGIT:
                    continue
                character = escaped.ranges[0][0]
                ranges.pop()
            ranges.append(self._range(character))

    def _range(self, low: str) -> tuple[str, str]:
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return low, low
        self._at += 1
        high = self._next()
        if high == "\\":
            escaped = self._escape()
            if len(escaped.ranges) != 1 or escaped.negated or escaped.ranges == _DIGIT:
                self._refuse("a range must end with a character")
            high = escaped.ranges[0][0]
        if high < low or high == "[":
            self._refuse(f"the range {low}-{high} has no meaning")
        return low, high

    # ---- mechanics -------------------------------------------------------------------------------

    def _consuming(self, characters: _Characters) -> tuple[int, int]:
        first = self._new(characters)
        last = self._new()
        self.states[first].follows.append(last)
        return first, last

    def _new(self, accepts: _Characters | None = None) -> int:
        if len(self.states) >= STATES_MAX:
            self._refuse("it is too long with its repetitions written out")
        self.states.append(_State(accepts))
        return len(self.states) - 1

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        character = self._peek()
        if not character:
            self._refuse("it ends too early")
        self._at += 1
        return character

    def _refuse(self, why: str) -> NoReturn:
        raise UnsupportedPattern(self._whole, why)
