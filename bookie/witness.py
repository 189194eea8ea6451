"""A bookie's knowledge of the presence of brokers.

Each broker sends a beat every BEAT_S to every bookie. A broker cannot append while it stands still
or no bookie hears it. So other brokers ask the bookies about an owner that does not answer
(broker/ownership/liveness.py).

A bookie may itself stand still or be cut off. After DEAF_S without a beat of any broker, it is
*deaf*: the listening time in its answers is 0. The listening time starts again at the next beat of
any broker. About a broker that it never heard, the bookie answers "unknown".
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from magnetar.bookie.contract import BEAT_S, LastHeard

BROKERS_MAX: Final = 1_000
"""Incarnations of brokers that a bookie remembers. Beyond this limit the bookie forgets the
incarnation that has been silent longest, and answers "unknown" about it."""

DEAF_S: Final = 2.5 * BEAT_S
"""Two missed beats of every broker. The broker that asks sends beats as well, so a bookie that is
not cut off hears at least that broker."""


class Witness:
    """A machine. `now` is the loop's time in seconds.

    Invariant (see `check`): it remembers at most BROKERS_MAX incarnations of brokers, in the order
    of their last beats.
    """

    def __init__(self) -> None:
        self._heard: OrderedDict[tuple[str, str], float] = OrderedDict()
        # The time of the last beat of any broker; None: no beat yet.
        self._last_beat: float | None = None
        self._listening_since = 0.0  # has no meaning before the first beat

    def on_beat(self, broker: str, incarnation: str, now: float) -> None:
        """Record a beat of the broker."""
        if self._is_deaf(now):
            self._listening_since = now
        self._last_beat = now
        key = broker, incarnation
        self._heard[key] = now
        self._heard.move_to_end(key)
        if len(self._heard) > BROKERS_MAX:
            self._heard.popitem(last=False)

    def last_heard(self, broker: str, incarnation: str, now: float) -> LastHeard | None:
        """Return when this bookie last heard the broker; None: the bookie cannot tell."""
        heard_at = self._heard.get((broker, incarnation))
        if heard_at is None:
            return None
        listening_s = 0.0 if self._is_deaf(now) else now - self._listening_since
        return LastHeard(heard_s=now - heard_at, listening_s=listening_s)

    def check(self) -> None:
        assert len(self._heard) <= BROKERS_MAX
        times = list(self._heard.values())
        assert times == sorted(times)

    def _is_deaf(self, now: float) -> bool:
        return self._last_beat is None or now - self._last_beat > DEAF_S
