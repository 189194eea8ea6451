"""The statistics of thousands of subscriptions take several turns of the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fakes.cluster_state import ClusterState
from fakes.topics import opened_topic

from magnetar.broker.topic.description import CLIENTS_OF_SUBSCRIPTION, describe_all
from magnetar.broker.topic.meter import CLIENTS_PER_TURN
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    from magnetar.broker.topic.topic import PersistentTopic


class Described:
    def __init__(self, number: int, consumers: int, described: list[int]) -> None:
        self.number = number
        self.consumers = range(consumers)
        self._described = described

    async def describe(self, turns: Turns) -> dict[str, Any]:
        self._described.append(self.number)
        return {"number": self.number}


async def described_in_turns(number: int, consumers: int) -> list[int]:
    """Return the number of subscriptions that are described in each turn of the loop."""
    described: list[int] = []
    subscriptions = {f"s{n}": Described(n, consumers, described) for n in range(number)}
    in_turns = []
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(describe_all(subscriptions, Turns()))
        while not task.done():
            before = len(described)
            await asyncio.sleep(0)
            if len(described) > before:
                in_turns.append(len(described) - before)
    assert described == list(range(number))
    assert task.result() == {f"s{n}": {"number": n} for n in range(number)}
    return in_turns


@pytest.mark.parametrize("consumers", [0, 1, 20, 1_000])
async def test_a_slice_has_as_many_subscriptions_as_their_consumers_allow(consumers: int) -> None:
    each = -(-CLIENTS_PER_TURN // (CLIENTS_OF_SUBSCRIPTION + consumers))
    assert await described_in_turns(3 * each + 1, consumers) == [each, each, each, 1]


async def test_statistics_of_many_subscriptions_take_several_turns() -> None:
    async with opened_topic(ClusterState()) as it:
        for number in range(CLIENTS_PER_TURN):
            await it.topic.ensure_subscription(f"s{number}", it.topic.log.confirmed)
        assert await turns_of_stats(it.topic) >= CLIENTS_OF_SUBSCRIPTION


async def turns_of_stats(topic: PersistentTopic) -> int:
    turns = 0
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(topic.stats())
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
    assert len(task.result()["subscriptions"]) == CLIENTS_PER_TURN
    return turns
