"""Which bookies sit in an ensemble: pure, and the same for the same `random`.

Seats are filled one after the other, each with the bookie whose zone occurs least among the seats
that share a write set with it, so that the copies of an entry lie in as many zones as there are.
Equals are drawn by lot, which spreads ledgers over bookies. No bookie sits twice, whatever its
incarnation (W7): it would acknowledge for two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.bookie.ledger.quorum import Quorum

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

    from magnetar.metadata.model import Member


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bookie and the failure domain it is in; all without a zone ("") count as one zone."""

    member: Member
    zone: str = ""


def choose_ensemble(
    candidates: Sequence[Candidate], quorum: Quorum, random: Random
) -> tuple[Member, ...] | None:
    """None: fewer candidates than seats."""
    seated = fill_seats([None] * quorum.ensemble_size, candidates, quorum, random)
    members = tuple(candidate.member for candidate in seated if candidate is not None)
    return members if len(members) == quorum.ensemble_size else None


def choose_replacements(
    ensemble: Sequence[Candidate],
    failed: Iterable[int],
    candidates: Sequence[Candidate],
    quorum: Quorum,
    random: Random,
) -> tuple[Member, ...] | None:
    """The ensemble with as many of the failed seats re-filled as there are bookies for.

    A wiped bookie may take the seat of its own former incarnation, and no other. Where candidates
    run out the failed seats keep their members; None: nothing could be replaced.
    """
    vacant = set(failed)
    seated = {candidate.member.bookie: candidate.member for candidate in ensemble}
    strangers = [candidate for candidate in candidates if candidate.member.bookie not in seated]
    reborn = {
        candidate.member.bookie: candidate
        for candidate in candidates
        if seated.get(candidate.member.bookie, candidate.member) != candidate.member
    }
    survivors = [None if seat in vacant else former for seat, former in enumerate(ensemble)]
    filled = fill_seats(survivors, strangers, quorum, random)
    chosen = tuple(
        (occupant or reborn.get(former.member.bookie, former)).member
        for occupant, former in zip(filled, ensemble, strict=True)
    )
    before = tuple(candidate.member for candidate in ensemble)
    return None if chosen == before else chosen


def fill_seats(
    seated: Sequence[Candidate | None],
    candidates: Sequence[Candidate],
    quorum: Quorum,
    random: Random,
) -> list[Candidate | None]:
    """The empty seats filled, in order, as far as the candidates go."""
    seats = list(seated)
    taken = {candidate.member.bookie for candidate in seats if candidate is not None}
    free = [candidate for candidate in candidates if candidate.member.bookie not in taken]
    random.shuffle(free)
    for seat, occupant in enumerate(seats):
        if occupant is not None or not free:
            continue
        sharing = _sharing(seat, quorum)
        zones = [other.zone for number, other in enumerate(seats) if other and number in sharing]
        best = min(free, key=lambda candidate: zones.count(candidate.zone))
        seats[seat] = best
        free = [candidate for candidate in free if candidate.member.bookie != best.member.bookie]
    return seats


def degraded_quorum(quorum: Quorum, writable: int, *, write_quorum_min: int) -> Quorum | None:
    """The sizes of a new ledger when `writable` bookies answer: those wanted, or else as many
    seats and copies as there are bookies. None: fewer than `write_quorum_min`."""
    if writable < write_quorum_min:
        return None
    return Quorum(
        min(quorum.ensemble_size, writable),
        min(quorum.write_quorum, writable),
        quorum.ack_quorum,
    )


def _sharing(seat: int, quorum: Quorum) -> set[int]:
    """The other seats that some entry lies on together with this one."""
    reach = range(1 - quorum.write_quorum, quorum.write_quorum)
    return {(seat + step) % quorum.ensemble_size for step in reach} - {seat}
