"""Who is lost: which members will not come back, as far as anybody can tell. Pure.

A bookie that is not listed may be restarting, so it is awaited for a while before its entries are
copied elsewhere. When more than a few are missing at once it is rather the network, or the metadata
store, that is in trouble, and copying everything would only add to it: then nobody is given up
until enough are back, or an operator says which of them are gone (by decommissioning). Then
patience begins anew for those who are still missing: whatever it was, they may be about to return
as the others did. No patience is due to a former incarnation of a bookie: what it had is gone, or
can be read in any case.

Invariants (see `check`):

1. Nobody who is listed is absent or given up.
2. While too many are missing at once, nobody more is given up, nor sooner than the delay after.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from magnetar.metadata.model import Member

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from magnetar.metadata.model import BookieId


class Presence(Enum):
    PRESENT = auto()
    AWAITED = auto()  # not listed, and expected back
    LOST = auto()
    UNKNOWN = auto()  # no bookie of that name is known


class LostBookies:
    """`now` is in seconds of any clock that does not go backwards."""

    def __init__(self, *, delay_s: float, at_once_max: int) -> None:
        self._delay_s = delay_s
        self._at_once_max = at_once_max
        self._known: Mapping[BookieId, str] = {}
        self._listed: frozenset[Member] = frozenset()
        self._absent_since: dict[Member, float] = {}
        self._given_up: set[Member] = set()
        self._awaited: set[Member] = set()  # absent, not given up, not told to leave
        self.held = False  # too many are missing at once

    def on_bookies(
        self,
        known: Mapping[BookieId, str],
        listed: Collection[Member],
        decommissioned: Collection[BookieId],
        now: float,
    ) -> None:
        """`known`: the present incarnation of each bookie of the cluster; `listed`: who serves."""
        self._known, self._listed = dict(known), frozenset(listed)
        members = {Member(bookie, incarnation) for bookie, incarnation in known.items()}
        absent = members - self._listed
        self._absent_since = {who: self._absent_since.get(who, now) for who in absent}
        self._given_up &= absent
        self._awaited = {who for who in absent - self._given_up if who.bookie not in decommissioned}
        missing, was_held = len(self._awaited), self.held
        self.held = missing > self._at_once_max or 3 * missing > len(known)
        if was_held and not self.held:
            self._absent_since |= dict.fromkeys(self._awaited, now)
        if not self.held:
            overdue = {
                who for who in self._awaited if now >= self._absent_since[who] + self._delay_s
            }
            self._given_up |= overdue
            self._awaited -= overdue

    def presence(self, member: Member) -> Presence:
        if member in self._listed:
            return Presence.PRESENT
        incarnation = self._known.get(member.bookie)
        if incarnation is None:
            return Presence.UNKNOWN
        if incarnation != member.incarnation or member in self._given_up:
            return Presence.LOST
        return Presence.AWAITED

    @property
    def given_up(self) -> frozenset[Member]:
        """Of the present incarnations."""
        return frozenset(self._given_up)

    @property
    def awaited(self) -> frozenset[Member]:
        """Who is missing and was not given up, without those that an operator sends away."""
        return frozenset(self._awaited)

    def timer_at(self) -> float | None:
        """When to call `on_bookies` again though nothing has changed. None: no need."""
        if self.held:
            return None
        return min((self._absent_since[who] + self._delay_s for who in self._awaited), default=None)

    def check(self) -> None:
        assert not self._listed & (self._given_up | set(self._absent_since))
        assert self._given_up | self._awaited <= set(self._absent_since)
        assert not self._given_up & self._awaited
