"""Ensembles: chooses the bookies of an ensemble from the bookies that are listed *and* answer.

The list of bookies is a hint. So the process connects to the chosen bookies, and chooses again
without the bookies that it cannot reach. A ledger is never created on a bookie that is only listed,
and no ensemble change uses such a bookie.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from magnetar.bookie.ledger.errors import NotEnoughBookies
from magnetar.bookie.ledger.health import Grade
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

    from magnetar.bookie.ledger.bookie_registry import BookieRegistry
    from magnetar.bookie.ledger.config import LedgerConfig
    from magnetar.bookie.ledger.health import BookieHealth
    from magnetar.bookie.ledger.pool import PeerPool
    from magnetar.bookie.ledger.quorum import Quorum
    from magnetar.metadata.model import Member

log = get_logger(__name__)


class Ensembles:
    def __init__(
        self,
        directory: BookieRegistry,
        pool: PeerPool,
        config: LedgerConfig,
        health: BookieHealth,
        random: Random,
    ) -> None:
        self._directory = directory
        self._pool = pool
        self._config = config
        self._health = health
        self._random = random

    def has_spare(self, ensemble: Sequence[Member]) -> bool:
        """Return whether a writable bookie that is not failing could replace a failed member."""
        return any(member not in ensemble for member in self._reliable())

    def full_ensemble_possible(self, quorum: Quorum | None = None) -> bool:
        """Return whether enough bookies for a whole ensemble are writable and not failing."""
        return len(self._reliable()) >= (quorum or self._config.quorum).ensemble_size

    async def found(self, quorum: Quorum | None = None) -> tuple[Quorum, tuple[Member, ...]]:
        """Return the quorum and the ensemble of a new ledger. They are smaller than `quorum` says
        when too few bookies answer. `quorum` None: the configured one. Raises NotEnoughBookies."""
        wanted = quorum or self._config.quorum
        is_configured = quorum is None or quorum == self._config.quorum
        least = self._config.write_quorum_min if is_configured else wanted.ack_quorum
        dead: set[Member] = set()
        while True:
            candidates = self._candidates(dead)
            possible = degraded_quorum(wanted, len(candidates), write_quorum_min=least)
            if possible is None:
                raise NotEnoughBookies(least, len(candidates))
            members = choose_ensemble(candidates, possible, self._random)
            assert members is not None, "there were enough candidates"
            refused = await self._refused(members)
            if not refused:
                return possible, members
            dead |= refused

    async def spares(
        self, quorum: Quorum, ensemble: Sequence[Member], failed: Iterable[int]
    ) -> dict[int, Member]:
        """Return new members for as many of the failed seats as possible, keyed by seat."""
        seats = set(failed)
        dead: set[Member] = set()
        while True:
            candidates = self._candidates({*dead, *ensemble})
            seated = [Candidate(member, self._zone(member)) for member in ensemble]
            chosen = choose_replacements(seated, seats, candidates, quorum, self._random)
            if chosen is None:
                return {}
            spares = {seat: chosen[seat] for seat in seats if chosen[seat] != ensemble[seat]}
            refused = await self._refused(spares.values())
            if not refused:
                return spares
            dead |= refused

    def _reliable(self) -> list[Member]:
        now = self._now()
        listed = [each.member for each in self._directory.writable]
        return [each for each in listed if self._health.grade(each, now) < Grade.FAILING]

    def _candidates(self, excluded: set[Member]) -> list[Candidate]:
        now = self._now()
        return [
            Candidate(each.member, each.zone, self._health.grade(each.member, now))
            for each in self._directory.writable
            if each.member not in excluded
        ]

    def _zone(self, member: Member) -> str:
        registration = self._directory.find(member)
        return "" if registration is None else registration.zone

    async def _refused(self, members: Iterable[Member]) -> set[Member]:
        """Connect to all members concurrently. Returns the members that cannot be reached."""
        streams = [self._pool.adds(member) for member in members]
        async with asyncio.TaskGroup() as group:
            attempts = {
                stream.member: group.create_task(stream.connect(self._config.connect_timeout_s))
                for stream in streams
                if stream.put is None
            }
        for member, attempt in attempts.items():
            note = self._health.on_success if attempt.result() else self._health.on_error
            note(member, self._now())
        refused = {member for member, attempt in attempts.items() if not attempt.result()}
        if refused:
            log.warning("bookies unreachable", bookies=[member.bookie for member in refused])
        return refused

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
