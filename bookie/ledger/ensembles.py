"""Ensembles: who is to hold entries, out of the bookies that are listed *and* answer.

The list of bookies is a hint, so every bookie is connected to before it is chosen: a ledger is
never created on, nor an ensemble changed to, a bookie that is known to be dead only to the list.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from magnetar.bookie.ledger.errors import NotEnoughBookies
from magnetar.bookie.ledger.placement import (
    Candidate,
    choose_ensemble,
    choose_replacements,
    degraded_quorum,
)
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

    from magnetar.bookie.ledger.config import LedgerConfig
    from magnetar.bookie.ledger.directory import BookieDirectory
    from magnetar.bookie.ledger.pool import PeerPool
    from magnetar.bookie.ledger.quorum import Quorum
    from magnetar.metadata.model import Member

log = get_logger(__name__)


class Ensembles:
    def __init__(
        self, directory: BookieDirectory, pool: PeerPool, config: LedgerConfig, random: Random
    ) -> None:
        self._directory = directory
        self._pool = pool
        self._config = config
        self._random = random
        self._quarantine: dict[Member, float] = {}  # until when, in loop time

    def quarantine(self, member: Member) -> None:
        """It failed an add or cannot be reached: for a while it is chosen only if there is nobody
        else."""
        self._quarantine[member] = self._now() + self._config.quarantine_s

    def release(self, member: Member) -> None:
        """It can be reached again."""
        self._quarantine.pop(member, None)

    def has_spare(self, ensemble: Sequence[Member]) -> bool:
        """Whether a bookie that is listed and not in quarantine could take over from a failed
        member."""
        return any(member not in ensemble for member in self._healthy())

    def full_ensemble_possible(self) -> bool:
        """Whether as many bookies as a whole ensemble needs are listed and not in quarantine."""
        return len(self._healthy()) >= self._config.ensemble_size

    async def found(self) -> tuple[Quorum, tuple[Member, ...]]:
        """The ensemble of a new ledger, with fewer seats when fewer bookies answer. Raises
        NotEnoughBookies."""
        wanted, least = self._config.quorum, self._config.write_quorum_min
        dead: set[Member] = set()
        while True:
            candidates = self._candidates(wanted.ensemble_size, dead)
            quorum = degraded_quorum(wanted, len(candidates), write_quorum_min=least)
            if quorum is None:
                raise NotEnoughBookies(least, len(candidates))
            members = choose_ensemble(candidates, quorum, self._random)
            assert members is not None, "there were enough candidates"
            refused = await self._refused(members)
            if not refused:
                return quorum, members
            dead |= refused

    async def spares(
        self, quorum: Quorum, ensemble: Sequence[Member], failed: Iterable[int]
    ) -> dict[int, Member]:
        """New members for the failed seats, as many as there are."""
        seats = set(failed)
        dead: set[Member] = set()
        while True:
            candidates = self._candidates(len(seats), {*dead, *ensemble})
            seated = [Candidate(member, self._zone(member)) for member in ensemble]
            chosen = choose_replacements(seated, seats, candidates, quorum, self._random)
            if chosen is None:
                return {}
            spares = {seat: chosen[seat] for seat in seats if chosen[seat] != ensemble[seat]}
            refused = await self._refused(spares.values())
            if not refused:
                return spares
            dead |= refused

    def _healthy(self) -> list[Member]:
        now = self._now()
        listed = [each.member for each in self._directory.writable]
        return [member for member in listed if self._quarantine.get(member, now) <= now]

    def _candidates(self, needed: int, excluded: set[Member]) -> list[Candidate]:
        """Those listed; the ones in quarantine only as far as the others are too few."""
        now = self._now()
        self._quarantine = {who: end for who, end in self._quarantine.items() if end > now}
        listed = [each for each in self._directory.writable if each.member not in excluded]
        listed.sort(key=lambda each: self._quarantine.get(each.member, 0.0))
        healthy = sum(each.member not in self._quarantine for each in listed)
        return [Candidate(each.member, each.zone) for each in listed[: max(needed, healthy)]]

    def _zone(self, member: Member) -> str:
        registration = self._directory.find(member)
        return "" if registration is None else registration.zone

    async def _refused(self, members: Iterable[Member]) -> set[Member]:
        """Connect to all of them at once; who cannot be reached."""
        streams = [self._pool.adds(member) for member in members]
        async with asyncio.TaskGroup() as group:
            attempts = {
                stream.member: group.create_task(stream.connect(self._config.connect_timeout_s))
                for stream in streams
                if stream.put is None
            }
        refused = {member for member, attempt in attempts.items() if not attempt.result()}
        for member in refused:
            self.quarantine(member)
        if refused:
            log.warning("bookies not reached", bookies=[member.bookie for member in refused])
        return refused

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
