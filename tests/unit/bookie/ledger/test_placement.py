"""Placement seats no bookie twice and uses as many zones as possible. The same random numbers give
the same choice."""

from itertools import combinations_with_replacement, permutations, product
from random import Random

import pytest
from fakes.ledger_rig import member

from magnetar.bookie.ledger.health import Grade
from magnetar.bookie.ledger.placement import (
    Candidate,
    choose_ensemble,
    choose_replacements,
    degraded_quorum,
)
from magnetar.bookie.ledger.quorum import Quorum
from magnetar.metadata.model import Member


def bookies(zones: str) -> list[Candidate]:
    return [Candidate(member(number), zone) for number, zone in enumerate(zones)]


def zone_of(candidates: list[Candidate], chosen: tuple[Member, ...]) -> list[str]:
    zones = {candidate.member: candidate.zone for candidate in candidates}
    return [zones[each] for each in chosen]


def test_every_ensemble_has_distinct_bookies_and_all_zones() -> None:
    for sizes, zones, seed in product(
        [(3, 3, 2), (3, 2, 2), (5, 3, 2)], ["aabbcc", "aaabc", "abcde", "aaaaa"], range(20)
    ):
        quorum, candidates = Quorum(*sizes), bookies(zones)
        chosen = choose_ensemble(candidates, quorum, Random(seed))
        assert chosen is not None
        assert len({each.bookie for each in chosen}) == quorum.ensemble_size
        if quorum.write_quorum == quorum.ensemble_size:
            best = min(len(set(zones)), quorum.ensemble_size)
            assert len(set(zone_of(candidates, chosen))) == best


def test_striped_neighbours_lie_in_different_zones() -> None:
    quorum, candidates = Quorum(4, 2, 2), bookies("aaabbb")
    for seed in range(20):
        chosen = choose_ensemble(candidates, quorum, Random(seed))
        assert chosen is not None
        zones = zone_of(candidates, chosen)
        assert all(zones[seat] != zones[(seat + 1) % 4] for seat in range(4))


def test_too_few_bookies_make_no_ensemble() -> None:
    assert choose_ensemble(bookies("ab"), Quorum(3, 3, 2), Random(1)) is None


def test_choices_are_repeatable_and_spread() -> None:
    quorum, candidates = Quorum(3, 3, 2), bookies("......")
    chosen = [choose_ensemble(candidates, quorum, Random(seed)) for seed in range(30)]
    again = [choose_ensemble(candidates, quorum, Random(seed)) for seed in range(30)]
    assert chosen == again
    used = [each for ensemble in chosen if ensemble for each in ensemble]
    assert all(used.count(candidate.member) > 5 for candidate in candidates)


def test_only_failed_seats_are_refilled_and_the_zone_is_kept_apart() -> None:
    quorum, candidates = Quorum(3, 3, 2), bookies("abcab")
    ensemble = candidates[:3]
    for seed in range(20):
        chosen = choose_replacements(ensemble, [0], candidates, quorum, Random(seed))
        assert chosen == (member(3), member(1), member(2))  # zone "a" again, not "b"


def test_w7_a_bookie_is_never_seated_twice() -> None:
    quorum = Quorum(3, 3, 2)
    ensemble = bookies("...")
    reborn = Candidate(member(1, incarnation=9))
    # Bookie 1 with a new incarnation cannot replace seat 0, because bookie 1 has seat 1.
    assert choose_replacements(ensemble, [0], [*ensemble, reborn], quorum, Random(1)) is None
    # The new incarnation can replace the former incarnation in seat 1.
    chosen = choose_replacements(ensemble, [0, 1], [*ensemble, reborn], quorum, Random(1))
    assert chosen == (member(0), member(1, incarnation=9), member(2))


def test_one_spare_replaces_one_of_two_failed_members() -> None:
    quorum, candidates = Quorum(3, 3, 2), bookies("....")
    chosen = choose_replacements(candidates[:3], [0, 2], candidates, quorum, Random(1))
    assert chosen == (member(3), member(1), member(2))
    assert choose_replacements(candidates[:3], [0], candidates[:3], quorum, Random(1)) is None


def test_a_new_ledger_shrinks_to_the_bookies_that_answer() -> None:
    wanted = Quorum(3, 3, 2)
    assert degraded_quorum(wanted, 7, write_quorum_min=2) == wanted
    assert degraded_quorum(wanted, 2, write_quorum_min=2) == Quorum(2, 2, 2)
    assert degraded_quorum(wanted, 1, write_quorum_min=2) is None
    assert degraded_quorum(wanted, 2, write_quorum_min=3) is None
    assert degraded_quorum(Quorum(5, 3, 2), 4, write_quorum_min=2) == Quorum(4, 3, 2)


def crowding(zones: list[str], quorum: Quorum) -> int:
    """Sum, over all write sets, the squares of the numbers of copies that share a zone with
    another."""
    total = 0
    for entry in range(quorum.ensemble_size):
        lies_in = [zones[seat] for seat in quorum.write_order(entry)]
        total += (len(lies_in) - len(set(lies_in))) ** 2
    return total


@pytest.mark.parametrize("sizes", [(3, 3, 2), (3, 2, 2), (4, 2, 2), (4, 3, 2), (5, 3, 2)])
def test_placement_spreads_copies_as_well_as_the_best_arrangement(
    sizes: tuple[int, int, int],
) -> None:
    quorum = Quorum(*sizes)
    for count in range(sizes[0], sizes[0] + 3):
        for zones in combinations_with_replacement("abcd", count):
            arrangements = set(permutations(zones, sizes[0]))
            best = min(crowding(list(each), quorum) for each in arrangements)
            candidates = bookies("".join(zones))
            chosen = choose_ensemble(candidates, quorum, Random(len(zones)))
            assert chosen is not None
            assert crowding(zone_of(candidates, chosen), quorum) == best, zones


def test_the_healthy_come_first_then_the_slow_then_the_failing() -> None:
    quorum = Quorum(3, 3, 2)
    grades = [Grade.FAILING, Grade.HEALTHY, Grade.SLOW, Grade.FAILING, Grade.HEALTHY, Grade.SLOW]
    for size in range(3, 7):
        candidates = [Candidate(member(n), "", grade) for n, grade in enumerate(grades[:size])]
        for seed in range(20):
            chosen = choose_ensemble(candidates, quorum, Random(seed))
            assert chosen is not None
            by_grade = sorted(grades[:size])[:3]
            assert sorted(grades[int(each.bookie[1:])] for each in chosen) == by_grade


def test_health_comes_before_zones() -> None:
    """Two copies in one zone are better than a ledger that soon has to change its ensemble."""
    candidates = [*bookies("aaa"), Candidate(member(3), "b", Grade.FAILING)]
    for seed in range(20):
        assert member(3) not in (choose_ensemble(candidates, Quorum(3, 3, 2), Random(seed)) or ())


@pytest.mark.parametrize("seed", range(100))
def test_any_choice_has_distinct_bookies_and_keeps_healthy_seats(seed: int) -> None:
    random = Random(seed)
    quorum = Quorum(*random.choice([(1, 1, 1), (3, 3, 2), (4, 3, 2), (5, 2, 2), (6, 3, 2)]))
    size = quorum.ensemble_size
    ensemble = [Candidate(member(n), random.choice("abc")) for n in range(size)]
    others = [
        Candidate(
            member(random.randrange(12), incarnation=random.randrange(2)),
            random.choice("abc"),
            random.choice(list(Grade)),
        )
        for _ in range(random.randrange(8))
    ]
    failed = random.sample(range(size), random.randint(1, size))
    chosen = choose_replacements(ensemble, failed, [*ensemble, *others], quorum, random)
    strangers = {each.member.bookie for each in others} - {e.member.bookie for e in ensemble}
    if chosen is None:
        assert not strangers
        return
    assert len({each.bookie for each in chosen}) == size
    changed = [seat for seat in range(size) if chosen[seat] != ensemble[seat].member]
    assert set(changed) <= set(failed)
    fresh = [chosen[seat] for seat in changed]
    assert len([each for each in fresh if each.bookie in strangers]) == min(
        len(failed), len(strangers)
    )
