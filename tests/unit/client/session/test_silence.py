"""A client and a broker that is silent: stopped, cut off, or only slow."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fakes.client_world import EARLIEST, TOPIC, A, B, client_among, data, publish, receive
from support import settle

from magnetar.client.session.silence import (
    ASK_AFTER_S,
    ASK_AGAIN_S_FIRST,
    ASK_AGAIN_S_MAX,
    PING_AFTER_S,
    Silence,
    Step,
)
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakes.session_broker import Broker, FakeBrokers

STOP_S = ASK_AFTER_S + 1.0
"""The time until a client has left a stopped broker, with half a second for a lookup and a new
connection."""


def run(
    silence: Silence, until: float, *, awaits: Callable[[float], bool] = lambda _: True
) -> list[tuple[float, Step]]:
    """The steps of a broker that stays silent."""
    steps: list[tuple[float, Step]] = []
    while silence.timer_at <= until:
        now = silence.timer_at
        step = silence.on_timer(now, partial(awaits, now))
        if step is not Step.WAIT:
            steps.append((now, step))
    return steps


def test_a_ping_comes_first_and_questions_follow_with_growing_pauses() -> None:
    times = [(PING_AFTER_S, Step.PING)]
    at, pause = ASK_AFTER_S, ASK_AGAIN_S_FIRST
    while at <= 40.0:
        times.append((at, Step.ASK))
        at, pause = at + pause, min(2 * pause, ASK_AGAIN_S_MAX)
    assert run(Silence(0.0), 40.0) == times


def test_without_a_pending_answer_there_is_no_step() -> None:
    assert run(Silence(0.0), 100.0, awaits=lambda _: False) == []


def test_no_other_broker_is_asked_while_the_broker_answers() -> None:
    silence, asked = Silence(0.0), 0

    def awaits() -> bool:
        nonlocal asked
        asked += 1
        return True

    for second in range(1, 100):
        silence.on_heard(second - 0.01)
        assert silence.on_timer(float(second), awaits) is Step.WAIT
    assert asked == 0


def test_a_later_request_gets_its_own_ping_before_a_question() -> None:
    steps = run(Silence(0.0), 60.0, awaits=lambda now: now > 50.5)
    [(pinged, first), (asked, second), *_] = steps
    assert (first, second) == (Step.PING, Step.ASK)
    assert 50.5 < pinged <= 50.5 + 2 * PING_AFTER_S
    assert asked - pinged == ASK_AFTER_S - PING_AFTER_S


def test_a_broker_that_answers_again_gets_a_ping_before_the_next_question() -> None:
    silence = Silence(0.0)
    run(silence, 9.0)
    silence.on_heard(10.0)
    steps = run(silence, 10.0 + ASK_AFTER_S + 9.0)
    assert [step for _, step in steps][:2] == [Step.PING, Step.ASK]
    assert steps[0][0] >= 10.0 + PING_AFTER_S
    assert steps[2][0] - steps[1][0] == ASK_AGAIN_S_FIRST


@pytest.mark.parametrize("seed", range(50))
def test_no_question_without_an_unanswered_ping_whatever_arrives(seed: int) -> None:
    chance, now = random.Random(seed), 0.0
    silence, heard, pinged, asked = Silence(0.0), 0.0, None, -100.0
    for _ in range(500):
        if chance.random() < 0.3:
            now += chance.random()
            silence.on_heard(now)
            heard, pinged = now, None
            continue
        now = max(now, silence.timer_at)
        awaits = chance.random() < 0.9
        step = silence.on_timer(now, lambda awaits=awaits: awaits)
        if not awaits:
            pinged = None
        if step is Step.PING:
            assert pinged is None
            assert now - heard >= PING_AFTER_S - 1e-9
            pinged = now
        elif step is Step.ASK:
            assert pinged is not None
            assert now - pinged >= ASK_AFTER_S - PING_AFTER_S - 1e-9
            assert now - asked >= ASK_AGAIN_S_FIRST - 1e-9
            asked = now
        assert silence.timer_at >= now or step is Step.WAIT


def stop(broker: Broker) -> None:
    """Stop the broker like SIGSTOP: its connections stay, and new connections to it open."""
    broker.reads.clear()


def pings(cluster: FakeBrokers, url: str) -> int:
    return len(cluster.brokers[url].commands(pb.CommandPing))


def lookups(cluster: FakeBrokers, url: str) -> int:
    return len(cluster.brokers[url].commands(pb.CommandLookupTopic))


def stored(cluster: FakeBrokers) -> list[bytes]:
    return [payload for _, payload in cluster.sends]


async def test_pending_messages_move_to_the_broker_that_took_over_in_order() -> None:
    async with client_among() as (client, cluster):
        producer = await publish(client, 3)
        stop(cluster.brokers[A])
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(producer.send(b"%d" % n)) for n in range(3, 10)]
            await asyncio.sleep(1.0)
            cluster.take_over(B)
        assert asyncio.get_running_loop().time() - began < STOP_S
        ids = [task.result() for task in sent]
        assert ids == sorted(ids)
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        assert data(await receive(consumer, 10)) == list(range(10))


async def test_a_subscribed_consumer_moves_without_having_sent_anything() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        await asyncio.sleep(5.0)
        stop(cluster.brokers[A])
        cluster.take_over(B)
        await asyncio.sleep(STOP_S)
        await publish(client, 2)
        assert data(await receive(consumer, 2)) == [0, 1]


async def test_a_silent_owner_that_no_broker_replaced_keeps_its_connection() -> None:
    async with client_among() as (client, cluster):
        producer = await publish(client, 1)
        sessions = len(cluster.brokers[A].sessions)
        stop(cluster.brokers[A])
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(producer.send(b"1"))
            await asyncio.sleep(12.0)
            assert not sent.done()
            cluster.brokers[A].reads.set()
        assert len(cluster.brokers[A].sessions) == sessions
        # The client asks after 2, 2.5, 3.5, 5.5 and 9.5 s.
        assert lookups(cluster, B) == 5
        assert stored(cluster) == [b"0", b"1"] or len(cluster.sends) == 2


async def test_the_next_lookups_begin_with_the_broker_that_answered() -> None:
    async with client_among() as (client, cluster):
        producer = await publish(client, 1)
        stop(cluster.brokers[A])
        cluster.take_over(B)
        await producer.send(b"1")
        began = asyncio.get_running_loop().time()
        cluster.owners["persistent://public/default/other"] = B
        await client.create_producer("other")
        assert asyncio.get_running_loop().time() - began < 0.5


async def test_with_one_address_only_the_keepalive_ends_a_silent_connection() -> None:
    async with client_among(A, service_url=A) as (client, cluster):
        producer = await publish(client, 1)
        await client.subscribe("t", "s")
        stop(cluster.brokers[A])
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(producer.send(b"1"))
            await asyncio.sleep(20.0)
            cluster.brokers[A].reads.set()
            await sent
        await settle()
        assert pings(cluster, A) <= 2  # the keep-alive sends one for each session


async def test_an_idle_producer_causes_no_pings_and_a_subscribed_consumer_one_a_second() -> None:
    async with client_among() as (client, cluster):
        await publish(client, 1)
        before = pings(cluster, A)
        await asyncio.sleep(20.0)
        assert pings(cluster, A) == before
        await client.subscribe("t", "s")
        before = pings(cluster, A)
        await asyncio.sleep(20.0)
        assert 15 <= pings(cluster, A) - before <= 21
        assert lookups(cluster, B) == 0


async def test_while_no_other_broker_answers_the_client_stays() -> None:
    async with client_among() as (client, cluster):
        producer = await publish(client, 1)
        stop(cluster.brokers[A])
        stop(cluster.brokers[B])
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(producer.send(b"1"))
            await asyncio.sleep(10.0)
            cluster.brokers[A].reads.set()
            await sent
        assert len(cluster.sends) == 2


async def test_a_broker_that_answers_pings_slowly_is_not_asked_about() -> None:
    async with client_among() as (client, cluster):
        topic = cluster.topic(TOPIC)
        producer = await publish(client, 1)
        topic.hold_receipts = True
        producer.send_async(b"1", None)
        await asyncio.sleep(20.0)
        assert lookups(cluster, B) == 0


async def test_an_owner_that_stops_before_the_connection_opens_is_replaced() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC)
        stop(cluster.brokers[B])
        response = pb.CommandLookupTopicResponse
        named = response(brokerServiceUrl=B, response=response.Connect)
        cluster.brokers[A].script(pb.CommandLookupTopic, named)
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            made = group.create_task(client.create_producer("t"))
            await asyncio.sleep(1.0)
            cluster.take_over(A)
        assert asyncio.get_running_loop().time() - began < STOP_S
        assert made.result().is_connected()


async def test_a_first_broker_that_is_stopped_is_passed_over() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC)
        cluster.owners[TOPIC] = B
        stop(cluster.brokers[A])
        began = asyncio.get_running_loop().time()
        await client.create_producer("t")
        assert asyncio.get_running_loop().time() - began < 2 * STOP_S


async def test_questions_to_a_silent_broker_without_topics_go_to_the_next_one() -> None:
    async with client_among() as (client, cluster):
        await client.get_topic_partitions("t")
        stop(cluster.brokers[A])
        began = asyncio.get_running_loop().time()
        assert await client.get_topic_partitions("t") == [TOPIC]
        assert asyncio.get_running_loop().time() - began < 2 * STOP_S
