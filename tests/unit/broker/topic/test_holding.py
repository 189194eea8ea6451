"""Thousands of producers hold publishes: the topic visits only those that may continue, and a few
hundred in one turn of the event loop. When 10,000 of them continued, one step took 0.5 s."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.policies import SettablePolicies
from fakes.topics import opened_topic, publish
from hypothesis import given
from hypothesis import strategies as st
from support import settle, wait_until

from magnetar.broker.log.log import LogConfig
from magnetar.broker.topic.holding import RESUMED_PER_TURN, Holding
from magnetar.broker.topic.pipeline import Held
from magnetar.metadata.policies import Rate

if TYPE_CHECKING:
    from magnetar.broker.topic.producer import ProducerHandle

ROOMY = LogConfig(ledger_entries_max=1_000_000)


class Waiter:
    """A producer that may continue the given number of times."""

    def __init__(self, name: str, times: int, holding: Holding, order: list[str]) -> None:
        self.name = name
        self.times = times
        self.holding = holding
        self.order = order
        self.visits = 0

    def resume(self, now: float) -> bool:
        self.visits += 1
        if not self.times:
            return False
        self.times -= 1
        self.order.append(self.name)
        self.holding.discard(self)
        return True


def test_no_producer_is_visited_while_the_rate_is_exceeded() -> None:
    exceeded = [True]
    holding, order = Holding(lambda: exceeded[0]), list[str]()
    waiters = [Waiter(str(number), 1, holding, order) for number in range(3)]
    for waiter in waiters:
        holding.add(waiter, for_rate=True)
    assert not holding.resume(0.0)
    assert [waiter.visits for waiter in waiters] == [0, 0, 0]
    exceeded[0] = False
    assert not holding.resume(0.0)
    assert order == ["0", "1", "2"]
    assert len(holding) == 0


def test_a_rate_that_admits_one_publish_visits_one_producer() -> None:
    tokens = [1]

    class Taking(Waiter):
        def resume(self, now: float) -> bool:
            tokens[0] -= 1
            return super().resume(now)

    holding, order = Holding(lambda: tokens[0] == 0), list[str]()
    waiters = [Taking(str(number), 1, holding, order) for number in range(1_000)]
    for waiter in waiters:
        holding.add(waiter, for_rate=True)
    assert not holding.resume(0.0)
    assert sum(waiter.visits for waiter in waiters) == 1
    assert order == ["0"]
    assert len(holding) == 999


def test_at_most_a_few_hundred_producers_continue_in_one_call() -> None:
    holding, order = Holding(), list[str]()
    number = 2 * RESUMED_PER_TURN + 10
    for name in range(number):
        waiter = Waiter(str(name), 1, holding, order)
        holding.add(waiter, for_rate=name % 2 == 0)
    calls = [len(order)]
    while holding.resume(0.0):
        calls.append(len(order))
    assert [after - before for before, after in pairwise(calls)] == [RESUMED_PER_TURN] * 2
    assert len(order) == number
    assert len(holding) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["rate", "outcome", "last", "discard"])),
        max_size=40,
    )
)
def test_a_producer_waits_in_one_queue_and_keeps_its_place(steps: list[tuple[int, str]]) -> None:
    holding = Holding()
    waiters = [Waiter(str(number), 1, holding, []) for number in range(5)]
    places: dict[int, tuple[bool, int]] = {}  # the queue, and the order of joining
    for count, (number, step) in enumerate(steps):
        if step == "discard":
            holding.discard(waiters[number])
            places.pop(number, None)
        else:
            for_rate, last = step != "outcome", step == "last"
            holding.add(waiters[number], for_rate=for_rate, last=last)
            if last or places.get(number, (None, 0))[0] != for_rate:
                places[number] = for_rate, count
        holding.check()
        assert {number for number in range(5) if waiters[number] in holding} == set(places)
    order: list[str] = []
    for waiter in waiters:
        waiter.order = order
    holding.resume(0.0)
    assert order == [str(number) for number in sorted(places, key=places.__getitem__)]


async def test_thousands_of_held_producers_continue_in_several_turns() -> None:
    number = 3 * RESUMED_PER_TURN
    policies = SettablePolicies(publish_rate=Rate(1, 0, 1_000.0))
    async with opened_topic(ClusterState(), policies=policies, config=ROOMY) as it:
        producers = [await it.produce(f"p{name}") for name in range(number)]
        for handle, _ in producers:
            publish(handle, entry_of("x"), first=0)
        held = [handle for handle, _ in producers if handle in it.topic.admission.holding]
        assert len(held) > number - 10
        policies.set(publish_rate=Rate(0, 0, 1.0))
        left = [len(it.topic.admission.holding)]
        while left[-1]:
            await asyncio.sleep(0)
            left.append(len(it.topic.admission.holding))
        assert max(before - after for before, after in pairwise(left)) <= RESUMED_PER_TURN
        await wait_until(lambda: all(session.receipted == [0] for _, session in producers))


async def test_held_producers_take_turns_at_a_slow_rate() -> None:
    policies = SettablePolicies(publish_rate=Rate(1, 0, 1.0))
    async with opened_topic(ClusterState(), policies=policies, config=ROOMY) as it:
        producers = [await it.produce(f"p{name}") for name in range(50)]
        for handle, _ in producers:
            for number in range(2):
                publish(handle, entry_of("x"), first=number)
        await asyncio.sleep(40)
        await settle()
        receipted = [len(session.receipted) for _, session in producers]
        assert receipted == sorted(receipted, reverse=True), "FIFO"
        assert 38 <= sum(receipted) <= 42
        gates = Counter(gate_of(handle) for handle, _ in producers if handle.outstanding)
        assert min(gates.values()) == 1, "a closed gate was met by more than one producer"
        policies.set(publish_rate=Rate(0, 0, 1.0))


def gate_of(handle: ProducerHandle) -> int:
    """Return the identity of the gate that the producer met last."""
    first = handle._held[0]
    assert isinstance(first, Held)
    return id(first.until)
