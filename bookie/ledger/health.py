"""How well bookies have served lately: a score that errors raise and that time and success lower.

No I/O, no clock, no tasks. The score only orders: whoever chooses bookies prefers the healthy, and
takes the others where the healthy are too few. A hard ban would leave a cluster without bookies
just when all of them have had a hiccup, as in a rolling restart.

An error counts 1 and adds up, to SCORE_MAX at most, so that a bookie that fails again and again is
avoided for longer. Slowness raises the score to SLOW_SCORE and no further, however often it is
noticed: a slow bookie is a worse choice, not a broken one. The score halves every `half_life_s`,
and at a success it falls to a quarter: a bookie that was restarted is a good choice as soon as it
answers, one that keeps failing between its answers is not.

All ledgers of a process feel one mishap at once, and each of them tells: what follows within a
tenth of a half-life of an error (or of a success) is the same error (or success).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from magnetar.metadata.model import Member

SCORE_MAX: Final = 8.0
"""Forgiven after four half-lives (8 -> 0.5) at most: 40 s by default."""

FAILING_SCORE: Final = 0.5
"""From here on a bookie counts as failing: a single error is forgiven after one half-life."""

SLOW_SCORE: Final = 0.4
HEALTHY_SCORE: Final = 0.25
"""Up to here it counts as healthy: where a success leaves a single error."""

_FORGOTTEN_SCORE: Final = 0.01


class Grade(IntEnum):
    """The order in which bookies are chosen."""

    HEALTHY = 0
    SLOW = 1
    FAILING = 2


@dataclass(slots=True)
class _Score:
    value: float
    at: float  # when it had this value, in seconds
    error_at: float = float("-inf")  # when an error was counted last
    success_at: float = float("-inf")


class BookieHealth:
    """The scores of the bookies that one process uses; those of whom nothing bad is known cost
    nothing. `now` is in seconds of any clock that does not go backwards."""

    def __init__(self, *, half_life_s: float) -> None:
        assert half_life_s > 0
        self._half_life_s = half_life_s
        self._apart_s = half_life_s / 10
        self._scores: dict[Member, _Score] = {}

    def on_error(self, member: Member, now: float) -> None:
        """It refused an add, could not be reached, or did not answer in time."""
        score = self._at(member, now)
        if now - score.error_at >= self._apart_s:
            score.value, score.error_at = min(score.value + 1.0, SCORE_MAX), now

    def on_slow(self, member: Member, now: float) -> None:
        """It takes longer than it should."""
        score = self._at(member, now)
        score.value = max(score.value, SLOW_SCORE)

    def on_success(self, member: Member, now: float) -> None:
        """It could be reached."""
        if member not in self._scores:
            return
        score = self._at(member, now)
        if now - score.success_at >= self._apart_s:
            score.value, score.success_at = score.value / 4, now
        if score.value < _FORGOTTEN_SCORE:
            del self._scores[member]

    def score(self, member: Member, now: float) -> float:
        """From 0, nothing bad is known, to SCORE_MAX."""
        score = self._scores.get(member)
        if score is None:
            return 0.0
        half_lives = max(now - score.at, 0.0) / self._half_life_s
        return score.value * math.exp2(-half_lives)

    def grade(self, member: Member, now: float) -> Grade:
        score = self.score(member, now)
        if score <= HEALTHY_SCORE:
            return Grade.HEALTHY
        return Grade.SLOW if score < FAILING_SCORE else Grade.FAILING

    def describe(self, now: float) -> str:
        graded = sorted((who.bookie, who) for who in self._scores)
        return ", ".join(
            f"{name}: {self.grade(who, now).name} {self.score(who, now):.2f}"
            for name, who in graded
        )

    def check(self) -> None:
        assert all(0 < score.value <= SCORE_MAX for score in self._scores.values())

    def _at(self, member: Member, now: float) -> _Score:
        """The member's score, with its value of now."""
        score = self._scores.setdefault(member, _Score(0.0, now))
        score.value, score.at = self.score(member, now), now
        return score
