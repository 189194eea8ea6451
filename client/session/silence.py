"""Detects a silent broker, and decides when the client asks another broker about it.

A broker that stands still (for example after SIGSTOP), or is cut off, keeps its connections open
and sends nothing. A client may await something from this broker: receipts, answers, or messages of
subscribed consumers. After PING_AFTER_S of silence, such a client sends a PING. A living broker
answers it at once. After ASK_AFTER_S, the client asks another broker of the service URL which
broker serves the topics now. If that is a different broker, the client ends the connection, and its
producers and consumers attach again. Otherwise the client keeps the connection, and asks again with
growing pauses. In any case, the keep-alive (connection.py) ends a silent connection.

If the service URL has one address only, the client sends and asks nothing of this: there is no
other broker to ask. Only the keep-alive then ends a silent connection.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PING_AFTER_S: Final = 1.0
"""The silence in seconds before the client sends a PING. A quiet connection with subscribed
consumers costs one PING and its answer each time this silence has passed."""

ASK_AFTER_S: Final = 2.0
"""The silence in seconds before the client asks another broker. The answer to a PING takes some
0.3 s around the world."""

ASK_AGAIN_S_FIRST: Final = 0.5
ASK_AGAIN_S_MAX: Final = 8.0
"""The first and the longest time in seconds between two questions. The time doubles with each
question. The first one is short: on a loaded machine, too few bookies may answer the first question
in time, and the topics are still served within 3 s if the second one succeeds. A lookup costs a
broker some 50 microseconds. With the longest time, ten thousand clients that are cut off from one
broker ask the other brokers 1,250 times a second."""


class Step(Enum):
    """The action after a time of silence."""

    WAIT = "nothing"
    PING = "send a PING"
    ASK = "ask another broker"


class Silence:
    """A machine for one connection. `now` is the loop's time in seconds.

    1. A question follows a PING that was not answered for at least ASK_AFTER_S - PING_AFTER_S.
    2. Two questions are at least ASK_AGAIN_S_FIRST apart.
    """

    def __init__(
        self, now: float, *, ping_after_s: float = PING_AFTER_S, ask_after_s: float = ASK_AFTER_S
    ) -> None:
        assert 0 < ping_after_s < ask_after_s
        self._ping_after_s = ping_after_s
        self._answer_s = ask_after_s - ping_after_s
        self._heard_at = now
        self._pinged = False  # whether the client sent a PING in this silence
        self._timer_at = now + ping_after_s
        self._again_s = ASK_AGAIN_S_FIRST

    @property
    def timer_at(self) -> float:
        """The time at which to call `on_timer` next."""
        return self._timer_at

    def silent_s(self, now: float) -> float:
        """Return the seconds for which the client has awaited something and received nothing."""
        return now - self._heard_at

    def on_heard(self, now: float) -> None:
        """Begin a new silence: something arrived, or this process itself stood still."""
        self._heard_at = now
        self._pinged = False

    def on_timer(self, now: float, awaits: Callable[[], bool]) -> Step:
        """Return the action to take now.

        `awaits` returns whether the client awaits something from the broker. It may be slow, so
        this method calls it only if the broker is silent.
        """
        due_at = self._timer_at if self._pinged else self._heard_at + self._ping_after_s
        if now >= due_at and not awaits():
            self.on_heard(now)
            due_at = now + self._ping_after_s
        if now < due_at:
            self._timer_at = due_at
            return Step.WAIT
        if not self._pinged:
            self._pinged = True
            self._timer_at = now + self._answer_s
            self._again_s = ASK_AGAIN_S_FIRST
            return Step.PING
        self._timer_at = now + self._again_s
        self._again_s = min(2 * self._again_s, ASK_AGAIN_S_MAX)
        return Step.ASK
