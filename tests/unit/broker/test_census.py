"""The counts of bundles for each broker, and the moves that the counts require."""

from __future__ import annotations

import random

import pytest

from magnetar.broker.ownership.bundle import Bundle
from magnetar.broker.ownership.census import Census, Owner, owner_of, read_owners, targets_of
from magnetar.metadata import codec, paths
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import BrokerId, BrokerRegistration, Ownership
from magnetar.metadata.store import ABSENT

RANGE = "0x00000000_0x40000000"


def registration(number: int, run: int = 0) -> BrokerRegistration:
    return BrokerRegistration(BrokerId(f"b{number}"), f"{run:032x}", "grpc://h:1", "", "")


def owner(number: int, run: int = 0) -> Owner:
    return owner_of(registration(number, run))


def bundle(number: int, namespace: str = "n") -> Bundle:
    return Bundle("t", f"{namespace}{number}", RANGE)


LIVE = {it.broker: it for it in map(registration, range(3))}


def test_a_note_replaces_the_previous_note() -> None:
    census = Census()
    for taker in (owner(0), owner(1), owner(1)):
        census.note(bundle(0), taker)
    assert (census.count(owner(0)), census.count(owner(1))) == (0, 1)
    assert census.count_in(bundle(0), owner(1)) == 1
    census.note(bundle(0), None)
    assert census.count(owner(1)) == 0


def test_another_incarnation_of_a_broker_owns_only_its_own_bundles() -> None:
    census = Census()
    census.note(bundle(0), owner(0, run=1))
    assert census.count(owner(0)) == 0


def test_replacing_forgets_the_rest() -> None:
    census = Census()
    census.note(bundle(0), owner(0))
    census.replace({bundle(1): owner(1)})
    assert (census.count(owner(0)), census.count(owner(1))) == (0, 1)


def test_a_free_bundle_goes_to_the_broker_with_the_fewest() -> None:
    census = Census()
    for number, taker in enumerate((0, 0, 1)):
        census.note(bundle(number), owner(taker))
    assert census.order(bundle(9), LIVE) == ["b2", "b1", "b0"]


def test_among_equal_brokers_the_one_with_fewest_bundles_of_the_namespace_is_first() -> None:
    census = Census()
    first, second = Bundle("t", "n", "0x0_0x1"), Bundle("t", "n", "0x1_0x2")
    census.note(first, owner(0))
    census.note(bundle(1), owner(1))
    census.note(bundle(2), owner(2))
    assert census.order(second, LIVE)[-1] == "b0"


def test_with_equal_numbers_all_brokers_choose_alike_and_each_gets_some() -> None:
    backwards = dict(reversed(LIVE.items()))
    first = [Census().order(bundle(number), LIVE)[0] for number in range(60)]
    assert first == [Census().order(bundle(number), backwards)[0] for number in range(60)]
    assert set(first) == set(LIVE)


@pytest.mark.parametrize(
    ("numbers", "moves"),
    [
        pytest.param([4, 0], {(0, 1): 2}, id="a broker has joined"),
        pytest.param([3, 2], {}, id="a difference of one"),
        pytest.param([2, 2, 1], {}, id="as even as can be"),
        pytest.param([2, 2, 0], {(1, 2): 1}, id="two have one too many together"),
        pytest.param([6, 6, 0, 0], {(0, 3): 3, (1, 2): 3}, id="two joined"),
        pytest.param([0, 0, 0], {}, id="nothing to move"),
        pytest.param([5], {}, id="alone"),
    ],
)
def test_moves_spread_the_bundles_evenly(
    numbers: list[int], moves: dict[tuple[int, int], int]
) -> None:
    counts = {owner(number): count for number, count in enumerate(numbers)}
    found: dict[tuple[int, int], int] = {}
    for source in range(len(numbers)):
        for target in targets_of(owner(source), counts):
            pair = source, int(target[0][1:])
            found[pair] = found.get(pair, 0) + 1
    assert found == moves


def test_the_moves_of_all_brokers_together_spread_evenly_and_call_for_no_more() -> None:
    chance = random.Random(0)
    for _ in range(300):
        counts = {owner(number): chance.randrange(20) for number in range(chance.randint(1, 8))}
        after = dict(counts)
        for source in counts:
            for target in targets_of(source, counts):
                after[source] -= 1
                after[target] += 1
                assert counts[source] >= counts[target] + 2
        assert max(after.values()) - min(after.values()) <= 1, counts
        assert not [source for source in after if targets_of(source, after)]


def test_the_namespace_that_is_spread_least_evenly_gives_the_bundle() -> None:
    census = Census()
    even = [Bundle("t", "even", part) for part in ("0x0_0x1", "0x1_0x2")]
    uneven = [Bundle("t", "uneven", part) for part in ("0x0_0x1", "0x1_0x2")]
    for each, taker in zip((*even, *uneven), (0, 1, 0, 0), strict=True):
        census.note(each, owner(taker))
    mine = [even[0], *uneven]
    assert census.choose(mine, owner(0), owner(1)) in uneven
    assert census.choose([], owner(0), owner(1)) is None


async def test_all_records_are_read() -> None:
    store = MemoryStore()
    odd = Bundle("te/nant", "näme", RANGE)
    for number, each in enumerate((bundle(0), bundle(1), odd)):
        record = Ownership(BrokerId(f"b{number}"), f"{number:032x}", 0)
        path = paths.ownership(each.tenant, each.namespace, each.range)
        await store.put(path, codec.encode_ownership(record), expected=ABSENT)
    found = await read_owners(store)
    assert found == {bundle(0): owner(0, 0), bundle(1): owner(1, 1), odd: owner(2, 2)}
