"""BookieHealth: the events that raise and lower the score. No bookie is banned permanently."""

from random import Random

import pytest
from fakes.ledger_rig import member

from magnetar.bookie.ledger.health import SCORE_MAX, BookieHealth, Grade

A, B = member(0), member(1)


def health() -> BookieHealth:
    return BookieHealth(half_life_s=10.0)


def test_an_unknown_bookie_is_healthy() -> None:
    scores = health()
    scores.on_success(A, 1.0)
    assert scores.score(A, 2.0) == 0.0
    assert scores.grade(A, 2.0) is Grade.HEALTHY
    assert scores.describe(2.0) == ""


def test_an_error_is_forgiven_after_a_half_life() -> None:
    scores = health()
    scores.on_error(A, 100.0)
    assert scores.grade(A, 100.0) is Grade.FAILING
    assert scores.grade(A, 109.9) is Grade.FAILING
    assert scores.grade(A, 110.1) is Grade.SLOW
    assert scores.grade(A, 121.0) is Grade.HEALTHY
    assert scores.grade(B, 100.0) is Grade.HEALTHY
    assert scores.describe(100.0) == "b0: FAILING 1.00"


def test_errors_add_up_to_a_limit() -> None:
    scores = health()
    for second in range(1000):
        scores.on_error(A, float(second))
    assert scores.score(A, 999.0) == SCORE_MAX
    assert scores.grade(A, 999.0 + 39.0) is Grade.FAILING
    assert scores.grade(A, 999.0 + 41.0) is not Grade.FAILING
    assert scores.grade(A, 999.0 + 51.0) is Grade.HEALTHY


def test_a_failure_reported_by_every_ledger_counts_once() -> None:
    scores = health()
    for _ in range(1000):
        scores.on_error(A, 5.0)
    assert scores.score(A, 5.0) == 1.0
    for _ in range(1000):
        scores.on_success(A, 5.0)
    assert scores.score(A, 5.0) == 0.25


def test_a_success_clears_one_error_but_not_several() -> None:
    scores = health()
    scores.on_error(A, 0.0)
    scores.on_success(A, 0.0)
    assert scores.grade(A, 0.0) is Grade.HEALTHY
    for second in range(5):
        scores.on_error(B, float(second))
    scores.on_success(B, 5.0)
    assert scores.grade(B, 5.0) is Grade.FAILING
    scores.on_success(B, 7.0)
    assert scores.grade(B, 7.0) is Grade.HEALTHY


def test_any_number_of_slow_answers_ranks_between_healthy_and_failing() -> None:
    scores = health()
    for tick in range(1000):
        scores.on_slow(A, tick / 10)
    assert scores.grade(A, 100.0) is Grade.SLOW
    scores.on_error(B, 100.0)
    scores.on_slow(B, 100.0)
    assert scores.grade(B, 100.0) is Grade.FAILING
    assert scores.grade(A, 107.0) is Grade.HEALTHY


@pytest.mark.parametrize("seed", range(20))
def test_the_score_stays_in_bounds_and_time_always_heals(seed: int) -> None:
    random, scores, now = Random(seed), health(), 0.0
    for _ in range(300):
        now += random.choice([0.0, 0.5, 3.0])
        bookie = random.choice([A, B])
        before = scores.score(bookie, now)
        event = random.choice([scores.on_error, scores.on_slow, scores.on_success])
        event(bookie, now)
        after = scores.score(bookie, now)
        assert 0 <= after <= SCORE_MAX
        assert (after <= before) if event == scores.on_success else (after >= before)
        assert scores.score(bookie, now + 1.0) <= after
        scores.check()
    assert scores.grade(A, now + 60.0) is Grade.HEALTHY
