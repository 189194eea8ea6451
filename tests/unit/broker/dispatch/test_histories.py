"""Random histories of all subscription types, compared with the simple model in tests/histories.
The histories must also find planted bugs: a test that finds no bug proves nothing. `make histories`
plays more histories."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from histories.bugs import BUGS
from histories.model import Kind
from histories.play import KEYS, Player

from magnetar.broker.dispatch.sticky_hash import hash_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.dispatch.dispatcher import Dispatcher, Environment

HISTORIES = 250  # the histories of each type
HISTORIES_OF_A_BUG = 1_000  # the rarest of the bugs shows in one of 65

KEPT = [(Kind.KEY_SHARED, 26_228)]
"""Histories that failed once. 26,228: the order began while a chunk pinned a hash, and a departed
consumer still had entries of it."""


@pytest.mark.parametrize("kind", Kind)
def test_random_histories_keep_the_rules_of_the_type(kind: Kind) -> None:
    met: Counter[str] = Counter()
    for seed in range(HISTORIES):
        met.update(Player(kind, seed).play().met)
    assert met["deliveries"] > 10 * HISTORIES
    assert met["joins"] > 2 * HISTORIES
    assert met["seeks"] > 20
    assert met["expiries"] > 100
    if kind is Kind.FAILOVER:
        assert met["switches"] > HISTORIES // 2
    if not kind.single_active:
        assert met["redeliveries"] > HISTORIES
        assert met["delayed entries"] > HISTORIES
        assert met["joins under load"] > HISTORIES // 2
    if kind.keyed:
        assert met["blocked attempts"] > 50
    if kind is Kind.KEY_SHARED:
        assert met["deliveries in order beside a relaxed consumer"] > HISTORIES
    if kind is Kind.ORDERED:
        assert met["negative acks"] > HISTORIES
        assert met["too many negative acks"] > 10


@pytest.mark.parametrize(("kind", "seed"), KEPT)
def test_a_history_that_failed_once_passes(kind: Kind, seed: int) -> None:
    Player(kind, seed).play()


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug: Callable[[Environment], Dispatcher]) -> None:
    for seed in range(HISTORIES_OF_A_BUG):
        try:
            Player(BUGS[bug], seed, bug).play()
        except (AssertionError, KeyError, StopIteration):
            return
    raise AssertionError(f"{bug} was not caught")


def test_the_keys_have_slots_of_their_own() -> None:
    # Keys of one slot would make the model blind to an order between them.
    assert len({hash_of(key) % 65_535 for key in KEYS}) == len(KEYS)
