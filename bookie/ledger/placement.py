"""Chooses the bookies of an ensemble and their seats. Pure: all chance is in `random`.

First this module chooses *which* bookies: the healthy ones and, if these are too few, the best of
the others. `health.Grade` is a preference, never a ban. Then it chooses *where* they sit. The
copies of an entry lie on the Qw seats of its write set. So each window of Qw seats should cover as
many zones as possible. A zone that holds a whole window is the worst case: its loss loses all
copies of some entries.

The seats are filled one after another. Each gets the bookie whose zone is rarest among the seats
that share a window with it. Then bookies are exchanged as long as this spreads the copies better.
Several attempts begin differently, and the best is taken. Ties are broken at random, which spreads
ledgers over bookies. No bookie has two seats, whatever its incarnation, because it would
acknowledge for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.health import Grade
from magnetar.bookie.ledger.quorum import Quorum, seat_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

    from magnetar.metadata.model import Member

ATTEMPTS_MAX: Final = 8
"""Attempts to spread an ensemble. The first attempt is the best one, except for E > Qw with zones
of unequal size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bookie and its failure domain. All bookies without a zone ("") count as one zone."""

    member: Member
    zone: str = ""
    grade: Grade = Grade.HEALTHY


def choose_ensemble(
    candidates: Sequence[Candidate], quorum: Quorum, random: Random
) -> tuple[Member, ...] | None:
    """Return the members of a new ensemble. None: there are fewer candidates than seats."""
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
    """Return the ensemble with as many of the failed seats refilled as there are bookies.

    A wiped bookie may take only the seat of its own former incarnation. When the candidates run
    out, the remaining failed seats keep their members. None: nothing could be replaced.
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
    """Return the seats, with the empty ones filled in order as far as the candidates suffice."""
    taken = {candidate.member.bookie for candidate in seated if candidate is not None}
    vacant = [seat for seat, occupant in enumerate(seated) if occupant is None]
    free = preferred(
        [candidate for candidate in candidates if candidate.member.bookie not in taken],
        len(vacant),
        random,
    )
    vacant = vacant[: len(free)]
    filled = _fill_greedily(seated, vacant, free, quorum)
    if quorum.write_quorum == quorum.ensemble_size or _one_zone(seated, free):
        return filled  # optimal already: all seats share every window, or all bookies one zone
    best = _spread(filled, vacant, free, quorum)
    for _ in range(ATTEMPTS_MAX - 1):
        if crowding_of(best, quorum) == 0:
            break
        random.shuffle(free)
        again = _spread(_fill_greedily(seated, vacant, free, quorum), vacant, free, quorum)
        best = min(best, again, key=lambda seats: crowding_of(seats, quorum))
    return best


def preferred(candidates: Sequence[Candidate], needed: int, random: Random) -> list[Candidate]:
    """Return one candidate per bookie: all healthy ones and, if these are fewer than `needed`, the
    best of the others. Ties are broken at random."""
    order = list(candidates)
    random.shuffle(order)
    order.sort(key=lambda candidate: candidate.grade)
    unique = list({candidate.member.bookie: candidate for candidate in reversed(order)}.values())
    unique.sort(key=lambda candidate: candidate.grade)
    healthy = sum(candidate.grade is Grade.HEALTHY for candidate in unique)
    return unique[: max(needed, healthy)]


def crowding_of(seated: Sequence[Candidate | None], quorum: Quorum) -> int:
    """Return how unevenly copies are spread. Each window counts its bookies that share a zone with
    an earlier bookie of the window, and adds the square of this number. 0: every copy of every
    entry is in a zone of its own."""
    crowding = 0
    for window in quorum.windows:
        zones = [each.zone for seat in seat_numbers(window) if (each := seated[seat]) is not None]
        crowding += (len(zones) - len(set(zones))) ** 2
    return crowding


def degraded_quorum(quorum: Quorum, writable: int, *, write_quorum_min: int) -> Quorum | None:
    """Return the sizes of a new ledger when `writable` bookies answer: `quorum`, or as many seats
    and copies as there are bookies. None: there are fewer than `write_quorum_min`."""
    if writable < write_quorum_min:
        return None
    return Quorum(
        min(quorum.ensemble_size, writable),
        min(quorum.write_quorum, writable),
        quorum.ack_quorum,
    )


def _fill_greedily(
    seated: Sequence[Candidate | None],
    vacant: Sequence[int],
    free: Sequence[Candidate],
    quorum: Quorum,
) -> list[Candidate | None]:
    """Give each vacant seat the candidate whose zone is rarest around it; the first of equals."""
    seats, left = list(seated), list(free)
    for seat in vacant:
        sharing = _sharing(seat, quorum)
        zones = [other.zone for number, other in enumerate(seats) if other and number in sharing]
        best = min(left, key=lambda candidate: zones.count(candidate.zone))
        seats[seat] = best
        left.remove(best)
    return seats


def _spread(
    seats: list[Candidate | None],
    vacant: Sequence[int],
    free: Sequence[Candidate],
    quorum: Quorum,
) -> list[Candidate | None]:
    """Exchange newly seated bookies with each other or for unseated ones, while that lowers the
    crowding."""
    crowding = crowding_of(seats, quorum)
    improved = crowding > 0
    while improved:
        improved = False
        for attempt in _exchanges(seats, vacant, free):
            less = crowding_of(attempt, quorum)
            if less < crowding:
                seats, crowding, improved = attempt, less, True
                break
    return seats


def _exchanges(
    seats: list[Candidate | None], vacant: Sequence[int], free: Sequence[Candidate]
) -> Iterable[list[Candidate | None]]:
    for one, other in combinations(vacant, 2):
        swapped = list(seats)
        swapped[one], swapped[other] = seats[other], seats[one]
        yield swapped
    spares = {candidate.zone: candidate for candidate in free if candidate not in seats}
    for seat in vacant:
        for spare in spares.values():
            yield [*seats[:seat], spare, *seats[seat + 1 :]]


def _one_zone(seated: Sequence[Candidate | None], free: Sequence[Candidate]) -> bool:
    return len({each.zone for each in (*seated, *free) if each is not None}) <= 1


def _sharing(seat: int, quorum: Quorum) -> set[int]:
    """Return the other seats that share an entry's write set with this seat."""
    reach = range(1 - quorum.write_quorum, quorum.write_quorum)
    return {(seat + step) % quorum.ensemble_size for step in reach} - {seat}
