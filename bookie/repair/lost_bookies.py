"""LostBookies: decides which members are lost permanently. Pure.

An unlisted bookie may be restarting, so a delay passes before its entries are copied elsewhere.
When more than `at_once_max` bookies or more than a third of them are missing at once, the network
or the metadata store is the likelier cause. Copying everything would then only add load. So no
bookie is declared lost until enough return, or until an operator decommissions the missing ones.
After that the delay starts again for the bookies that are still missing and not decommissioned,
because they may be about to return, too. A former incarnation gets no delay: either its disk is
lost, or the bookie serves the entries of its damaged store.

Invariants; `check` asserts the first two:

1. A listed member is neither absent nor given up.
2. A member that is given up or awaited is absent, and no member is both.
3. While too many are missing at once, no further member is given up. Afterwards the full delay
   passes again before an awaited member is given up.
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
    AWAITED = auto()  # not listed, but expected to return
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
        self._awaited: set[Member] = set()  # absent, not given up, not decommissioned
        self.held = False  # too many are missing at once

    def on_bookies(
        self,
        known: Mapping[BookieId, str],
        listed: Collection[Member],
        decommissioned: Collection[BookieId],
        now: float,
    ) -> None:
        """Take the current state of the bookies. `known`: the current incarnation of each bookie of
        the cluster. `listed`: the members that are registered in the metadata store."""
        self._known, self._listed = dict(known), frozenset(listed)
        members = {Member(bookie, incarnation) for bookie, incarnation in known.items()}
        absent = members - self._listed
        self._absent_since = {member: self._absent_since.get(member, now) for member in absent}
        self._given_up &= absent
        self._awaited = {
            member for member in absent - self._given_up if member.bookie not in decommissioned
        }
        missing, was_held = len(self._awaited), self.held
        self.held = missing > self._at_once_max or 3 * missing > len(known)
        if was_held and not self.held:
            self._absent_since |= dict.fromkeys(self._awaited, now)
        if not self.held:
            overdue = {
                member
                for member in self._awaited
                if now >= self._absent_since[member] + self._delay_s
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
        """The members that were declared lost. Former incarnations are not among them."""
        return frozenset(self._given_up)

    @property
    def awaited(self) -> frozenset[Member]:
        """The missing members that were not given up, except decommissioned ones."""
        return frozenset(self._awaited)

    def timer_at(self) -> float | None:
        """Return the time at which to call `on_bookies` again without a change. None: not
        needed."""
        if self.held:
            return None
        return min(
            (self._absent_since[member] + self._delay_s for member in self._awaited), default=None
        )

    def check(self) -> None:
        assert not self._listed & (self._given_up | set(self._absent_since))
        assert self._given_up | self._awaited <= set(self._absent_since)
        assert not self._given_up & self._awaited
