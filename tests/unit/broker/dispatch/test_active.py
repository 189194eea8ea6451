"""The choice of the active consumer: the examples of Pulsar's documentation, and its rules."""

from __future__ import annotations

import pytest

from magnetar.broker.dispatch.active import POINTS, Candidates, Choice
from magnetar.broker.dispatch.permits import Consumer, Limits
from magnetar.protos.murmur3 import murmur3_32

TOPIC = "persistent://public/default/t"


def consumer(name: str, number: int = 0, priority: int = 0) -> Consumer:
    return Consumer(name, priority, lambda: True, Limits(), join_number=number)


def candidates(
    *consumers: Consumer,
    topic: str = TOPIC,
    partition: int | None = None,
    choice: Choice = Choice.SUBSCRIBE_ORDER,
) -> Candidates:
    it = Candidates(topic, partition, choice)
    for each in consumers:
        it.add(each)
    return it


def assigned(names: str, partitions: int) -> str:
    """The names of the active consumers of each partition."""
    chosen = [
        candidates(*[consumer(name) for name in names], partition=index).chosen().name
        for index in range(partitions)
    ]
    return "".join(chosen)


def test_four_consumers_of_two_partitions_have_two_active_ones() -> None:
    assert assigned("DCBA", 2) == "AB"
    assert assigned("DC", 2) == "CD"  # A and B have left


def test_nine_partitions_are_spread_over_three_consumers() -> None:
    assert assigned("BCA", 9) == "ABCABCABC"


def test_three_partitions_with_fifteen_consumers_have_three_active_consumers() -> None:
    assert assigned("ABCDEFGHIJKLMNO", 3) == "ABC"


def test_partitions_are_spread_over_the_best_priority_only() -> None:
    group = [consumer("a", priority=1), consumer("b"), consumer("c"), consumer("d", priority=2)]
    chosen = [candidates(*group, partition=index).chosen().name for index in range(4)]
    assert chosen == ["b", "c", "b", "c"]


def test_consumers_of_one_name_are_ordered_by_joining() -> None:
    group = [consumer("a", number) for number in (3, 1, 2)]
    chosen = [candidates(*group, partition=index).chosen().join_number for index in range(3)]
    assert chosen == [1, 2, 3]


def test_one_topic_without_partitions_takes_the_first_subscriber_of_the_best_priority() -> None:
    one, two, three = consumer("z", 0), consumer("a", 1), consumer("m", 2, priority=-1)
    it = candidates(one, two)
    assert it.chosen() is one
    it.add(three)
    assert it.chosen() is three
    it.remove(three)
    it.remove(one)
    assert it.chosen() is two


@pytest.mark.parametrize("partition", [None, 5])
def test_a_change_visits_one_of_a_thousand_consumers(partition: int | None) -> None:
    visits = 0

    class Visited(Consumer):
        def __getattribute__(self, name: str) -> object:
            nonlocal visits
            visits += name == "priority"
            return super().__getattribute__(name)

    group = [
        Visited(f"{number:03}", 0, lambda: True, Limits(), join_number=number)
        for number in range(1_000)
    ]
    it = candidates(partition=partition)
    for each in group:
        it.add(each)
        it.chosen()
    group[5].leaving = group[0].leaving = True
    it.on_leaving(group[5])
    it.on_leaving(group[0])
    assert it.chosen() is (group[1] if partition is None else group[7])
    for each in group[:-1]:
        it.remove(each)
        it.chosen()
    assert it.chosen() is group[-1]
    assert visits == 1_000


def test_a_leaving_consumer_is_chosen_if_all_are_leaving() -> None:
    one, two = consumer("a", 0), consumer("b", 1)
    it = candidates(one, two)
    for each, chosen in ((one, two), (two, one)):
        each.leaving = True
        it.on_leaving(each)
        assert it.chosen() is chosen


def ring_choice(topic: str, names: list[str]) -> str:
    """Pulsar's algorithm: a ring with 100 points of each consumer, and the ceiling of the topic."""

    def hash_of(text: str) -> int:
        return murmur3_32(text.encode()) & 0x7FFFFFFF

    ring = {hash_of(f"{name}{j}"): name for name in sorted(names) for j in range(POINTS)}
    later = [point for point in ring if point >= hash_of(topic)]
    return ring[min(later)] if later else ring[min(ring)]


@pytest.mark.parametrize("names", [["A", "B"], ["one", "two", "three", "four"]])
def test_several_topics_are_spread_by_the_hash_of_topic_and_consumer(names: list[str]) -> None:
    chosen = set()
    for number in range(40):
        topic = f"{TOPIC}-{number}"
        group = [consumer(name, at) for at, name in enumerate(names)]
        name = candidates(*group, topic=topic, choice=Choice.HASH).chosen().name
        assert name == ring_choice(topic, names)
        chosen.add(name)
    assert chosen == set(names)


def test_partitions_do_not_use_the_hash() -> None:
    group = [consumer("A"), consumer("B")]
    chosen = [
        candidates(*group, partition=index, choice=Choice.HASH).chosen().name for index in (0, 1, 2)
    ]
    assert chosen == ["A", "B", "A"]
