"""The three selectors, compared with the figures of Pulsar's documentation and with plain maps."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from magnetar.broker.dispatch.dispatcher import ConsumerRefused
from magnetar.broker.dispatch.halving import Halving
from magnetar.broker.dispatch.key_shared_policy import HashRange, KeySharedMode, KeySharedPolicy
from magnetar.broker.dispatch.permits import Consumer, Limits
from magnetar.broker.dispatch.ring import Ring
from magnetar.broker.dispatch.sticky_hash import hash_of, ring_slot
from magnetar.broker.dispatch.sticky_ranges import StickyRanges

if TYPE_CHECKING:
    from magnetar.broker.dispatch.selector import Selector

SLOTS = sorted({*range(1, 65_536, 61), *range(4095, 65_536, 4096), *range(1, 65_536, 4096), 65_535})


def consumer(name: str, *ranges: tuple[int, int]) -> Consumer:
    policy = KeySharedPolicy(KeySharedMode.STICKY, tuple(HashRange(*it) for it in ranges))
    return Consumer(name, 0, lambda: True, Limits(), key_shared=policy)


def bounds(it: Halving) -> dict[int, str]:
    return {bound: owner.name for bound, owner in it.bounds}


def pairs(it: Selector, who: Consumer) -> list[list[int]]:
    return [[span.first, span.last] for span in it.ranges(who)]


def test_halving_follows_the_pictures_of_the_documentation() -> None:
    it = Halving("s")
    c1, c2, c3, c4 = (consumer(f"C{n}") for n in (1, 2, 3, 4))
    it.add(c1)
    assert bounds(it) == {65536: "C1"}
    it.add(c2)
    assert bounds(it) == {32768: "C2", 65536: "C1"}
    it.add(c3)
    assert bounds(it) == {16384: "C3", 32768: "C2", 65536: "C1"}
    it.add(c4)
    assert bounds(it) == {16384: "C3", 32768: "C2", 49152: "C4", 65536: "C1"}
    assert it.select(it.slot_of(hash_of("Order-3459134"))) is c3
    assert it.select(16384) is c3, "the bound belongs to the range"
    it.remove(c4)
    assert bounds(it) == {16384: "C3", 32768: "C2", 65536: "C1"}
    it.remove(c1)
    assert bounds(it) == {16384: "C3", 65536: "C2"}
    assert pairs(it, c2) == [[16385, 65535]]


def test_halving_refuses_a_consumer_without_a_range() -> None:
    it = Halving("s")
    it._bounds = [*range(1, 65_536), 65_536]
    it._consumers = [consumer(str(n)) for n in range(65_536)]
    with pytest.raises(ConsumerRefused, match="no hash range is left"):
        it.add(consumer("last"))


def test_point_of_the_ring_is_the_hash_of_name_index_and_number() -> None:
    name = "orders-aggregator-pod-2345-consumer"
    assert hash_of(f"{name}\0000\0001") == 919851442
    it = Ring(1)
    first, second = consumer(name), consumer(name)
    it.add(first)
    point = ring_slot(hash_of(f"{name}\0000\0000"))
    assert it._points == [point]
    it.add(second)
    assert it._points == sorted([point, ring_slot(hash_of(f"{name}\0001\0000"))])
    it.remove(first)
    third = consumer(name)
    it.add(third)
    assert it.select(point) is third, "a consumer that reconnects gets its points back"


def test_ranges_of_the_documentation_example_with_ten_points() -> None:
    it = Ring(10)
    c1, c2 = consumer("c1"), consumer("c2")
    it.add(c1)
    it.add(c2)
    assert pairs(it, c1) == [[2960, 5968], [22258, 43033], [49261, 54464], [55155, 61273]]
    assert pairs(it, c2) == [
        [1, 2959],
        [5969, 22257],
        [43034, 49260],
        [54465, 55154],
        [61274, 65535],
    ]


def test_first_consumer_keeps_a_point_and_the_next_inherits_it() -> None:
    it = Ring(100)
    members = [consumer(f"c{number}") for number in range(200)]
    for member in members:
        it.add(member)
    contested = next(point for point, owners in it._owners.items() if len(owners) > 1)
    first, second = it._owners[contested][:2]
    assert it.select(contested) is first
    it.remove(first)
    assert it.select(contested) is second
    it.check()


def test_sticky_ranges_of_the_documentation_example() -> None:
    it = StickyRanges("s")
    c1 = consumer("C1", (0, 16383), (32768, 49151))
    c2 = consumer("C2", (16384, 32767), (49152, 65535))
    it.add(c1)
    it.add(c2)
    slot = it.slot_of(hash_of("Order-3459134"))
    assert slot == 6067
    assert it.select(slot) is c1
    assert it.select(65_535) is c2
    it.remove(c1)
    assert it.select(slot) is None


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([], "it has no hash ranges"),
        ([(0, 10), (10, 20)], "its own hash ranges overlap at 10"),
        ([(20, 10)], "is no hash range"),
        ([(-1, 10)], "is no hash range"),
        ([(0, 65_536)], "is no hash range"),
        ([(n, n) for n in range(10_001)], "more than 10000"),
    ],
)
def test_bad_sticky_ranges_are_refused(ranges: list[tuple[int, int]], problem: str) -> None:
    it = StickyRanges("s")
    with pytest.raises(ConsumerRefused, match=problem) as refused:
        it.add(consumer("c", *ranges))
    assert refused.value.incumbents == ()
    it.check()
    assert it.select(5) is None


def test_many_sticky_ranges_are_each_compared_with_one_other_range() -> None:
    """60,000 ranges of six consumers took 530 ms."""
    visits = 0

    class Pieces(list):
        def __getitem__(self, at: int | slice) -> object:
            nonlocal visits
            found = super().__getitem__(at)
            visits += len(found) if isinstance(at, slice) else 1
            return found

    it, number = StickyRanges("s"), 1_000
    it.add(consumer("first", *((slot, slot) for slot in range(0, 2 * number, 2))))
    it._pieces = Pieces(it._pieces)
    it.add(consumer("second", *((slot, slot) for slot in range(1, 2 * number, 2))))
    assert visits <= number
    it.check()


def test_overlapping_sticky_ranges_name_the_incumbent() -> None:
    it = StickyRanges("s")
    first = consumer("first", (100, 200), (400, 500))
    it.add(first)
    for overlap in ((0, 100), (150, 160), (200, 300), (0, 65535), (450, 460)):
        with pytest.raises(ConsumerRefused, match="of consumer 'first'") as refused:
            it.add(consumer("second", overlap))
        assert refused.value.incumbents == (first,)
    it.add(consumer("second", (0, 99), (201, 399), (501, 65535)))
    it.check()


@pytest.mark.parametrize("kind", ["ring-1", "ring-100", "halving", "sticky"])
@pytest.mark.parametrize("seed", range(2))
def test_moved_slots_are_exactly_the_difference(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    it: Selector = {
        "ring-1": lambda: Ring(1),
        "ring-100": Ring,
        "halving": lambda: Halving("s"),
        "sticky": lambda: StickyRanges("s"),
    }[kind]()
    members: list[Consumer] = []
    free = [(start, start + 4095) for start in range(0, 65_536, 4096)]
    owners: dict[int, Consumer | None] = dict.fromkeys(SLOTS)
    for _ in range(20):
        if members and (rng.random() < 0.4 or len(members) == 8):
            leaver = rng.choice(members)
            members.remove(leaver)
            moved = it.remove(leaver)
            assert leaver.key_shared is not None
            free += [(span.first, span.last) for span in leaver.key_shared.ranges]
        else:
            joiner = consumer(f"c{rng.randrange(5)}", *[free.pop() for _ in range(2)])
            members.append(joiner)
            moved = it.add(joiner)
        it.check()
        now = {slot: it.select(slot) for slot in SLOTS}
        for slot in SLOTS:
            if now[slot] is not owners[slot]:
                sources = [piece.source for piece in moved if piece.first <= slot <= piece.last]
                assert owners[slot] in sources
        for member in members:
            spans = it.ranges(member)
            mine = {slot for slot in SLOTS if any(it.first <= slot <= it.last for it in spans)}
            assert mine == {slot for slot in SLOTS if now[slot] is member}
            assert all(one.last + 1 < two.first for one, two in pairwise(spans))
        owners = now
