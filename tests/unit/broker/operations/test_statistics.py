"""Statistics of topics with thousands of clients do not stop the loop."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.topics import TopicRig, opened_topic
from pydantic import ValidationError

from magnetar.broker.log.position import EARLIEST
from magnetar.broker.operations import statistics, topics
from magnetar.broker.operations.model import (
    ConsumerStats,
    InternalStats,
    PublisherStats,
    TopicStats,
)
from magnetar.broker.operations.statistics import decoded, encoded, modelled
from magnetar.broker.operations.topics import CURSORS_PER_TURN
from magnetar.broker.topic.consumer import ConsumerHandle
from magnetar.broker.topic.contract import SubscriptionType
from magnetar.broker.topic.meter import CLIENTS_PER_TURN
from magnetar.broker.topic.producer import ProducerHandle
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import FrameType

pytestmark = pytest.mark.real_loop

CLIENTS = 3_000

CALLS_MAX = 150_000
"""The limit of calls in one turn of the loop. A call takes 0.15 us of CPU (measured), so the limit
is about half of STEP_CPU_S_MAX."""


async def connect(rig: TopicRig, clients: int) -> None:
    for number in range(clients):
        await rig.produce(f"p{number}")
        await rig.subscribe(kind=SubscriptionType.SHARED, permits=0)


async def calls_of_turns(work: Callable[[], Awaitable[Any]]) -> list[Counter[object]]:
    """The calls of each function in each turn of the loop until the work ends. Counts do not depend
    on the load of the machine, nor on the garbage collector."""
    turns: list[Counter[object]] = [Counter()]

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            turns[-1][frame.f_code] += 1
        elif event == "c_call":
            turns[-1][function.__name__] += 1

    async def separate() -> None:
        while True:
            await asyncio.sleep(0)
            turns.append(Counter())

    async with asyncio.TaskGroup() as group:
        separating = group.create_task(separate())
        await asyncio.sleep(0)
        sys.setprofile(note)
        try:
            await work()
        finally:
            sys.setprofile(None)
        separating.cancel()
    return turns


async def test_many_clients_are_described_in_slices() -> None:
    async with opened_topic(ClusterState()) as rig:
        await connect(rig, CLIENTS)
        found: dict[str, Any] = {}

        async def describe() -> None:
            found.update(await rig.topic.stats())

        turns = await calls_of_turns(describe)
        assert len(found["publishers"]) == CLIENTS
        assert len(found["subscriptions"]["s"]["consumers"]) == CLIENTS
    for described in (ProducerHandle.describe, ConsumerHandle.stats):
        calls = [turn[described.__code__] for turn in turns]
        assert sum(calls) == CLIENTS
        assert max(calls) == CLIENTS_PER_TURN
    assert max(turn.total() for turn in turns) < CALLS_MAX


async def test_many_cursors_are_described_in_slices() -> None:
    count = 3 * CURSORS_PER_TURN
    async with running_broker(ClusterState()) as broker:
        topic = await broker.broker.topic(TopicName.parse("t"))
        for number in range(count):
            await topic.ensure_subscription(f"s{number}", EARLIEST)
        found: list[InternalStats] = []

        async def describe() -> None:
            found.append(await topics.internal_stats(broker.broker, topic.name))

        turns = await calls_of_turns(describe)
    calls = [turn[topics._cursor_stats.__code__] for turn in turns]
    assert (sum(calls), max(calls)) == (count, CURSORS_PER_TURN)
    [stats] = found
    assert json.loads(encoded(stats)) == json.loads(stats.model_dump_json(by_alias=True))
    assert calls_of_pydantic(lambda: encoded(stats))["to_json"] > count


def calls_of_pydantic(work: Callable[[], object]) -> Counter[str]:
    """Count the calls of each function in Rust. Such a call holds the interpreter's lock to its
    end."""
    found: Counter[str] = Counter()

    def note(_: object, event: str, function: Any) -> None:
        if event == "c_call":
            found[function.__name__] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


async def test_no_call_checks_or_encodes_several_clients() -> None:
    async with opened_topic(ClusterState()) as rig:
        await connect(rig, 10)
        found = await rig.topic.stats()
    stats = modelled(found)
    assert calls_of_pydantic(lambda: modelled(found))["validate_python"] == 22
    assert calls_of_pydantic(lambda: encoded(stats))["to_json"] > 20


async def test_other_threads_can_run_after_each_client_that_is_decoded() -> None:
    async with opened_topic(ClusterState()) as rig:
        await connect(rig, 10)
        text = encoded(modelled(await rig.topic.stats()))
    called: Counter[object] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called[frame.f_code] += 1

    sys.setprofile(note)
    try:
        found = decoded(text)
    finally:
        sys.setprofile(None)
    assert found == json.loads(text)
    assert called[statistics._let_others_run.__code__] > 20


async def test_the_json_is_that_of_the_model() -> None:
    async with opened_topic(ClusterState()) as rig:
        await rig.publish("a", "b")
        await connect(rig, 2)
        await rig.subscribe('ü "quoted"', kind=SubscriptionType.KEY_SHARED)
        found = await rig.topic.stats()
    stats = modelled(found)
    assert all(isinstance(each, PublisherStats) for each in stats.publishers)
    assert all(isinstance(each, ConsumerStats) for each in stats.subscriptions["s"].consumers)
    assert stats == TopicStats.model_validate(found)
    assert json.loads(encoded(stats)) == json.loads(stats.model_dump_json(by_alias=True))


async def test_each_client_is_checked() -> None:
    async with opened_topic(ClusterState()) as rig:
        await connect(rig, 1)
        found = await rig.topic.stats()
    del found["subscriptions"]["s"]["consumers"][0]["consumerName"]
    with pytest.raises(ValidationError, match="consumerName"):
        modelled(found)
