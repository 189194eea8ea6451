"""Unexpected exceptions fail one topic, are counted, and never end the broker."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from fakes.place import place
from fakes.policies import SettablePolicies
from support import settle, wait_until

from magnetar.broker.chores import Chore
from magnetar.broker.errors import TopicFailed
from magnetar.broker.guard import (
    FAILURES_MAX,
    FORGET_S,
    PAUSE_S_FIRST,
    PAUSE_S_MAX,
    TOPICS_MAX,
    WINDOW_S,
    Failures,
    Guard,
    Quarantine,
)
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from fakes.place import Place

TOPIC = "persistent://public/default/t"
OTHER = "persistent://public/default/other"
NAME = TopicName.parse(TOPIC)


def broken(*_: object, **__: object) -> Any:
    raise AssertionError("planted")


# ---- the guard -----------------------------------------------------------------------------------


async def test_a_guard_counts_logs_and_tells(caplog: pytest.LogCaptureFixture) -> None:
    failures, told = Failures(), []
    guard = Guard("t", failures=failures, on_failure=told.append)
    with caplog.at_level(logging.ERROR):
        guard.call("log", broken)

        async def work() -> None:
            broken()

        await guard.run("task", work)
    assert failures.counts == {"log": 1, "task": 1}
    assert [str(error) for error in told] == ["planted"] * 2
    assert "unexpected exception" in caplog.text


async def test_a_guard_does_not_catch_cancellation() -> None:
    guard = Guard("t", failures=Failures())
    with pytest.raises(asyncio.CancelledError):
        await guard.run("task", _cancelled)


async def _cancelled() -> None:
    raise asyncio.CancelledError


def test_without_failures_a_guard_catches_nothing() -> None:
    with pytest.raises(AssertionError):
        Guard("t").call("log", broken)


# ---- quarantine ----------------------------------------------------------------------------------


def test_three_failures_within_a_minute_quarantine_a_topic() -> None:
    quarantine = Quarantine()
    for now in (0.0, 10.0):
        quarantine.on_failure(NAME, "why", now)
        assert quarantine.refusal(NAME, now) is None
    quarantine.on_failure(NAME, "why", 20.0)
    assert quarantine.refusal(NAME, 20.0) == ("why", PAUSE_S_FIRST)
    assert quarantine.refusal(NAME, 20.0 + PAUSE_S_FIRST) is None
    assert quarantine.describe(20.0) == {TOPIC: {"reason": "why", "ends_in_s": 30}}
    quarantine.check()


def test_three_failures_over_more_than_a_minute_do_not() -> None:
    quarantine = Quarantine()
    for number in range(10):
        quarantine.on_failure(NAME, "why", number * (WINDOW_S / 2 + 1))
        assert quarantine.refusal(NAME, number * (WINDOW_S / 2 + 1)) is None


def test_the_pause_doubles_up_to_a_cap_and_an_hour_forgets() -> None:
    quarantine, now, pauses = Quarantine(), 0.0, []
    for _ in range(1_100):  # more than a float has powers of two
        while (refusal := quarantine.refusal(NAME, now)) is None:
            now += 1
            quarantine.on_failure(NAME, "why", now)
        pauses.append(refusal[1])
        now += refusal[1]
    assert pauses[:6] == [30, 60, 120, 240, 480, PAUSE_S_MAX]
    assert set(pauses[6:]) == {PAUSE_S_MAX}
    now += FORGET_S + 1
    for _ in range(FAILURES_MAX):
        quarantine.on_failure(NAME, "why", now)
    assert quarantine.refusal(NAME, now) == ("why", PAUSE_S_FIRST)


def test_each_failure_is_described_with_its_own_reason() -> None:
    quarantine = Quarantine()
    assert quarantine.failures_of(NAME, 0.0) == []
    for number in range(FAILURES_MAX + 1):
        quarantine.on_failure(NAME, f"why {number}", number * WINDOW_S)
    now = FAILURES_MAX * WINDOW_S + 5
    assert quarantine.failures_of(NAME, now) == [
        "125 s ago: why 1",
        "65 s ago: why 2",
        "5 s ago: why 3",
    ]
    for number in range(4, FAILURES_MAX + 3):
        quarantine.on_failure(NAME, f"why {number}", now)
    assert quarantine.refusal(NAME, now) == ("why 5", PAUSE_S_FIRST)
    assert quarantine.failures_of(NAME, now) == ["0 s ago: why 5"]
    assert quarantine.failures_of(NAME, now + FORGET_S + 1) == []


def test_a_quarantine_remembers_a_bounded_number_of_topics() -> None:
    quarantine = Quarantine()
    for number in range(TOPICS_MAX + 5):
        quarantine.on_failure(TopicName.parse(f"persistent://public/default/t{number}"), "", 0.0)
    quarantine.check()


# ---- in a broker ---------------------------------------------------------------------------------


async def check_served(here: Place) -> None:
    client = await here.client()
    await client.produce(OTHER)
    await client.publish("x", sequence_id=1)
    assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 1


def topic_of(here: Place) -> Any:
    [topic] = [topic for topic in here.broker.topics if str(topic.name) == TOPIC]
    return topic


def break_callback(here: Place) -> None:
    """Add a broken watcher to the log. The log calls its watchers when a bookie answers."""
    topic = topic_of(here)
    topic.log.watch(broken, read_position=lambda: topic.log.confirmed)


async def test_a_bug_in_a_callback_of_the_log_fails_only_the_topic() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        break_callback(here)
        await client.publish()
        closed = (await client.receive()).body
        while not isinstance(closed, pb.CommandCloseProducer):
            closed = (await client.receive()).body
        await wait_until(lambda: all(str(topic.name) != TOPIC for topic in here.broker.topics))
        assert here.broker.failures.counts["log"] >= 1
        assert isinstance(await client.produce(TOPIC, producer_id=2), pb.CommandProducerSuccess)
        await check_served(here)


async def test_a_topic_that_fails_three_times_is_refused_for_a_while() -> None:
    async with place() as here:
        client = await here.client()
        for number in range(FAILURES_MAX):
            answer = await client.produce(TOPIC, producer_id=number)
            assert isinstance(answer, pb.CommandProducerSuccess)
            break_callback(here)
            await client.publish(producer_id=number)
            body = (await client.receive()).body
            while not isinstance(body, pb.CommandCloseProducer):
                body = (await client.receive()).body
            await wait_until(lambda: all(str(topic.name) != TOPIC for topic in here.broker.topics))
        refused = await client.produce(TOPIC, producer_id=9)
        assert refused.error == pb.ServiceNotReady
        assert "quarantined" in refused.message
        now = asyncio.get_running_loop().time()
        assert list(here.broker.quarantine.describe(now)) == [TOPIC]
        await check_served(here)
        asked = client.wire  # the client stays connected
        del asked
        here.broker.quarantine = type(here.broker.quarantine)()  # as after the pause
        assert isinstance(await client.produce(TOPIC, producer_id=10), pb.CommandProducerSuccess)


async def test_a_bug_in_a_task_of_a_topic_fails_only_the_topic() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        topic = topic_of(here)

        async def work() -> None:
            broken()

        topic._spawn(work, "planted")
        await client.expect(pb.CommandCloseProducer)
        assert here.broker.failures.counts["task"] == 1
        await check_served(here)


async def test_a_bug_while_a_waiting_producer_becomes_exclusive_fails_only_the_topic() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC, producer_access_mode=pb.Exclusive)
        await client.produce(TOPIC, producer_id=2, producer_access_mode=pb.WaitForExclusive)
        [waits] = topic_of(here).admission.waiting.values()
        waits.events.ready = broken
        await client.send(pb.CommandCloseProducer(producer_id=1, request_id=9))
        await wait_until(lambda: all(str(topic.name) != TOPIC for topic in here.broker.topics))
        assert here.broker.failures.counts["task"] == 1
        await check_served(here)


async def test_a_bug_in_a_switch_of_deduplication_fails_only_the_topic() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        topic = topic_of(here)
        topic.deduplication._policies = SettablePolicies(deduplication=True)
        topic.deduplication._log = None
        topic._on_policies()
        await client.expect(pb.CommandCloseProducer)
        assert here.broker.failures.counts["task"] == 1
        await check_served(here)


async def test_a_bug_in_a_deletion_fails_only_the_deletion() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        here.broker._deletions.delete = broken  # type: ignore[method-assign]
        with pytest.raises(TopicFailed, match="internal error"):
            await here.broker.delete_topic(NAME, force=True)
        await client.expect(pb.CommandCloseProducer)
        assert here.broker.failures.counts["delete"] == 1
        assert isinstance(await client.produce(TOPIC, producer_id=2), pb.CommandProducerSuccess)
        await check_served(here)


async def test_a_bug_in_a_timer_of_a_subscription_fails_only_the_topic() -> None:
    async with place() as here:
        client = await here.client()
        await client.subscribe(TOPIC)
        subscription = topic_of(here).subscriptions["s"]
        subscription._guard.call("timer", broken)
        await client.expect(pb.CommandCloseConsumer)
        assert here.broker.failures.counts["timer"] == 1
        await check_served(here)


async def test_a_bug_while_a_connection_is_left_closes_the_other_producers() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC, producer_id=1)
        await client.produce(OTHER, producer_id=2)
        context = here.connections[0]._context
        context.producers[1].close_nowait = broken  # type: ignore[method-assign]
        await client.wire.break_off()
        await here.serving[0]
        assert here.broker.failures.counts["leave"] == 1
        for topic in here.broker.topics:
            assert str(topic.name) != OTHER or topic.producers == {}
        await check_served(here)


async def test_a_bug_in_a_chore_ends_its_visit_only() -> None:
    visited: list[str] = []

    async def visit(topic: Any) -> None:
        visited.append(str(topic.name))
        broken()

    chore = Chore("planted", 1.0, visit)
    async with place(chores=[chore]) as here:
        client = await here.client()
        await client.produce(TOPIC)
        await asyncio.sleep(2.5)
        assert visited == [TOPIC] * 2
        assert here.broker.failures.counts["chore planted"] == 2
        await check_served(here)


async def test_a_bug_in_a_policy_callback_is_counted_and_the_others_are_called() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        called: list[int] = []
        policies = topic_of(here).policies
        policies.subscribe(broken)
        policies.subscribe(lambda: called.append(1))
        cache = here.broker.policies
        entry = next(iter(cache._entries.values()))
        for node in list(entry.nodes.values()):
            cache._on_changed(entry, node)
        await settle(50)
        await check_served(here)
