"""BookieHealth: how well bookies served recently, as a score. Errors raise it; time and success
lower it.

No I/O, no clock, no tasks. The score excludes no bookie from the choice of an ensemble: the healthy
ones come first, and others are added when there are too few. A hard ban could leave a cluster
without bookies when all of them had a short fault, as in a rolling restart.

An error adds 1, up to SCORE_MAX, so that a bookie that fails repeatedly is avoided for longer.
Slowness raises the score to SLOW_SCORE and no further, however often it is noticed: a slow bookie
is not a broken one. The score halves every `half_life_s`, and a success divides it by four. So a
restarted bookie is a good choice once it answers. A bookie that fails again between its answers is
not.

All ledgers of a process notice the same fault at once, and each reports it. So after a counted
error, further errors within a tenth of a half-life do not count. The same holds for successes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from magnetar.metadata.model import Member

SCORE_MAX: Final = 8.0
"""The largest score. It decays to 0.5 within four half-lives: 40 s by default."""

FAILING_SCORE: Final = 0.5
"""From this score a bookie counts as failing. The score of a single error falls below it after one
half-life."""

SLOW_SCORE: Final = 0.4
HEALTHY_SCORE: Final = 0.25
"""Up to this score a bookie counts as healthy. A single error and then a success give this
score."""

_FORGOTTEN_SCORE: Final = 0.01


class Grade(IntEnum):
    """The order in which bookies are chosen."""

    HEALTHY = 0
    SLOW = 1
    FAILING = 2


@dataclass(slots=True)
class _Score:
    value: float
    at: float  # time of this value, in seconds
    error_at: float = float("-inf")  # time of the last counted error
    success_at: float = float("-inf")


class BookieHealth:
    """The scores of the bookies that one process uses. A bookie without a known fault uses no
    memory. `now` is in seconds of any clock that does not go backwards."""

    def __init__(self, *, half_life_s: float) -> None:
        assert half_life_s > 0
        self._half_life_s = half_life_s
        self._apart_s = half_life_s / 10
        self._scores: dict[Member, _Score] = {}

    def on_error(self, member: Member, now: float) -> None:
        """The member refused an add, could not be reached, or did not answer in time."""
        score = self._at(member, now)
        if now - score.error_at >= self._apart_s:
            score.value, score.error_at = min(score.value + 1.0, SCORE_MAX), now

    def on_slow(self, member: Member, now: float) -> None:
        """The member answers later than it should."""
        score = self._at(member, now)
        score.value = max(score.value, SLOW_SCORE)

    def on_success(self, member: Member, now: float) -> None:
        """The member could be reached."""
        if member not in self._scores:
            return
        score = self._at(member, now)
        if now - score.success_at >= self._apart_s:
            score.value, score.success_at = score.value / 4, now
        if score.value < _FORGOTTEN_SCORE:
            del self._scores[member]

    def score(self, member: Member, now: float) -> float:
        """Return the member's score, from 0 (no known fault) to SCORE_MAX."""
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
        graded = sorted((member.bookie, member) for member in self._scores)
        return ", ".join(
            f"{name}: {self.grade(member, now).name} {self.score(member, now):.2f}"
            for name, member in graded
        )

    def check(self) -> None:
        assert all(0 < score.value <= SCORE_MAX for score in self._scores.values())

    def _at(self, member: Member, now: float) -> _Score:
        """Return the member's score, with its value brought up to `now`."""
        score = self._scores.setdefault(member, _Score(0.0, now))
        score.value, score.at = self.score(member, now), now
        return score
