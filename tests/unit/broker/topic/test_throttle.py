"""The publish rate as a machine and over a topic: the producers that wait, and the waiting
times."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fakes.cluster_state import ClusterState
from fakes.numbered import numbered
from fakes.policies import SettablePolicies
from fakes.topics import opened_topic

from magnetar.broker.log.budget import HELD_MAX_SHARE, HELD_SHARE
from magnetar.broker.log.log import LogConfig
from magnetar.broker.topic.producer import HELD_BYTES_MAX
from magnetar.broker.topic.throttle import Bucket
from magnetar.metadata.policies import Rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.broker.topic.producer import ProducerHandle

ROOMY = LogConfig()


def test_a_bucket_may_go_below_zero_and_fills_at_its_rate() -> None:
    bucket = Bucket(10, 1.0, now=0.0)
    assert bucket.has_tokens(0.0)
    bucket.take(25)
    assert not bucket.has_tokens(0.0)
    assert 1.5 <= bucket.wait_s() <= 1.61
    assert not bucket.has_tokens(1.5)
    assert bucket.has_tokens(1.61)
    assert bucket.has_tokens(100.0)
    bucket.take(10)
    assert not bucket.has_tokens(100.0), "the bucket holds the tokens of one period at most"


def test_a_bucket_without_a_limit_is_never_empty() -> None:
    bucket = Bucket(0, 1.0, now=0.0)
    bucket.take(1_000_000)
    assert bucket.has_tokens(0.0)


async def test_the_average_rate_is_kept_and_producers_take_turns() -> None:
    policies = SettablePolicies(publish_rate=Rate(10, 0, 1))
    async with opened_topic(ClusterState(), policies=policies, config=ROOMY) as it:
        loop = asyncio.get_running_loop()
        one, one_session = await it.produce("one")
        two, two_session = await it.produce("two")
        began = loop.time()
        for number in range(30):
            one.publish(numbered("one", number), loop.time())
            two.publish(numbered("two", number), loop.time())
        await asyncio.sleep(2.05)
        got = len(one_session.receipted), len(two_session.receipted)
        assert 28 <= sum(got) <= 32
        assert min(got) >= 10, "one producer starves the other"
        await one.wait_drained()
        await two.wait_drained()
        assert 4.9 <= loop.time() - began <= 5.3
        assert one_session.receipted == two_session.receipted == list(range(30))


async def test_a_held_producer_reads_until_it_holds_too_many_bytes() -> None:
    policies = SettablePolicies(publish_rate=Rate(0, 100_000, 1))
    async with opened_topic(ClusterState(), policies=policies, config=ROOMY) as it:
        now = asyncio.get_running_loop().time()
        handle, _ = await it.produce("p")
        for number in range(3):
            run = numbered("p", number)
            run.entries[0] += bytes(HELD_BYTES_MAX * 2 // 3)
            run.checksums[0] = -1
            run.views.clear()
            handle.publish(run, now)
            assert await has_room(handle) == (number < 2)
        policies.set(publish_rate=Rate(0, 0, 1))
        assert await has_room(handle)
        await handle.wait_drained()


class Looked(list[bytes]):
    """Counts the scans of all entries."""

    times = 0

    def __iter__(self) -> Iterator[bytes]:
        self.times += 1
        return super().__iter__()


async def test_a_closed_gate_scans_no_held_publishes() -> None:
    """A producer may be asked to continue at each confirmed append."""
    policies = SettablePolicies(publish_rate=Rate(1, 0, 100))
    async with opened_topic(ClusterState(), policies=policies, config=ROOMY) as it:
        now = asyncio.get_running_loop().time()
        handle, _ = await it.produce("p")
        runs = [numbered("p", number) for number in range(3)]
        for run in runs:
            handle.publish(run, now)
        size = sum(map(len, runs[2].entries))
        assert it.topic.log.budget.held >= size
        runs[2].entries = entries = Looked(runs[2].entries)
        assert not handle.resume(now)
        assert entries.times == 0
        handle.close_nowait()
        assert it.topic.log.budget.held == 0


async def has_room(handle: ProducerHandle) -> bool:
    try:
        async with asyncio.timeout(0.001):
            await handle.wait_room()
    except TimeoutError:
        assert not handle.has_room
        return False
    return True


async def test_a_held_producer_does_not_read_while_all_producers_hold_too_much() -> None:
    policies = SettablePolicies(publish_rate=Rate(1, 0, 100))
    async with opened_topic(ClusterState(), policies=policies, config=ROOMY) as it:
        now, budget = asyncio.get_running_loop().time(), it.topic.log.budget
        handle, _ = await it.produce("p")
        for number in range(2):
            handle.publish(numbered("p", number), now)
        assert await has_room(handle)
        others = budget.bytes_max // HELD_SHARE
        budget.hold(others)
        assert not await has_room(handle)
        budget.hold(-others)
        assert await has_room(handle)


async def test_publishes_over_the_rate_are_not_held_while_too_much_is_held() -> None:
    """The publishes pass, and their connections wait afterwards: the average is the same."""
    policies = SettablePolicies(publish_rate=Rate(10, 0, 1))
    async with opened_topic(ClusterState(), policies=policies, config=ROOMY) as it:
        loop, budget = asyncio.get_running_loop(), it.topic.log.budget
        handles = [await it.produce(f"p{number}") for number in range(3)]
        others = budget.bytes_max // HELD_MAX_SHARE
        budget.hold(others)
        began = loop.time()

        async def send(handle: ProducerHandle) -> None:
            for number in range(20):
                handle.publish(numbered(handle.name, number), loop.time())
                assert budget.held == others
                await handle.wait_room()

        async with asyncio.TaskGroup() as tasks:
            for handle, _ in handles:
                tasks.create_task(send(handle))
        for handle, session in handles:
            await handle.wait_drained()
            assert session.receipted == list(range(20))
        assert 4.5 <= loop.time() - began <= 6.5, "60 messages, of which 10 are there at once"
        budget.hold(-others)
        assert budget.turn() is None


async def test_no_timer_runs_while_the_rate_is_kept() -> None:
    policies = SettablePolicies(publish_rate=Rate(1_000, 0, 1))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.publish("a", "b")
        assert it.topic._rate_timer is None


async def test_a_new_rate_ends_the_timer_of_the_earlier_rate() -> None:
    policies = SettablePolicies(publish_rate=Rate(1, 0, 100))
    async with opened_topic(ClusterState(), policies=policies, config=ROOMY) as it:
        now = asyncio.get_running_loop().time()
        handle, _ = await it.produce("p")
        for number in range(2):
            handle.publish(numbered("p", number), now)
        earlier = it.topic._rate_timer
        policies.set(publish_rate=Rate(1, 0, 200))
        for number in range(2, 4):
            handle.publish(numbered("p", number), now)
        later = it.topic._rate_timer
        assert earlier is not None
        assert earlier.cancelled()
        assert later is not None
        assert later.when() > earlier.when()
        assert not later.cancelled()
