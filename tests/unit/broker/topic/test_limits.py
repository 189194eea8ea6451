"""Limits of consumers and subscriptions from the policies of a topic, and dispatch rates."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.policies import SettablePolicies
from fakes.topics import opened_topic
from support import settle, wait_until

from magnetar.broker.dispatch.explain import Why
from magnetar.broker.errors import ConsumerBusy, NotAllowed, SubscriptionNotFound
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.refusal import code_of
from magnetar.broker.topic.consumer_admission import SUBSCRIBERS_MAX, SubscribeRates
from magnetar.broker.topic.contract import SubscriptionType
from magnetar.broker.topic.dispatch_rate import DispatchRate
from magnetar.broker.topic.meter import CLIENTS_PER_TURN
from magnetar.metadata.policies import UNLIMITED, Rate, Retention, SubscribeRate
from magnetar.metadata.policies import SubscriptionType as Allowed
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from typing import Any

    from fakes.sessions import FakeConsumerSession

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
TEXTS = [f"m{number}" for number in range(100)]


def keeping(**changed: Any) -> SettablePolicies:
    """Policies under which nothing is trimmed."""
    return SettablePolicies(retention=Retention(UNLIMITED, UNLIMITED), **changed)


def now_s() -> float:
    return asyncio.get_running_loop().time()


# ---- admission -----------------------------------------------------------------------------------


async def test_consumers_of_a_subscription_and_of_a_topic_are_limited() -> None:
    policies = keeping(consumers_per_subscription_max=2, consumers_max=3)
    async with opened_topic(ClusterState(), policies=policies) as it:
        first, _ = await it.subscribe("a", kind=SHARED)
        await it.subscribe("a", kind=SHARED)
        with pytest.raises(ConsumerBusy, match="'a': it has 2 consumers") as busy:
            await it.subscribe("a", kind=SHARED)
        assert code_of(busy.value) == pb.ConsumerBusy
        await it.subscribe("b")
        with pytest.raises(ConsumerBusy, match="'c': its topic has 3 consumers"):
            await it.subscribe("c")
        with pytest.raises(ConsumerBusy, match="'r': its topic has 3 consumers"):
            await it.subscribe("r", durable=False)
        assert sorted(it.topic.subscriptions) == ["a", "b", "c"], "a refused reader left nothing"
        await first.close()
        await it.subscribe("c")
        policies.set(consumers_max=0, consumers_per_subscription_max=0)
        for _ in range(5):
            await it.subscribe("a", kind=SHARED)


async def test_subscriptions_of_a_topic_are_limited_also_for_concurrent_requests() -> None:
    policies = keeping(subscriptions_max=3)
    async with opened_topic(ClusterState(), policies=policies) as it:
        outcomes: list[object] = []

        async def create(name: str) -> None:
            try:
                await it.topic.ensure_subscription(name, EARLIEST)
                outcomes.append(name)
            except NotAllowed as error:
                outcomes.append(code_of(error))

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(create(f"s{number}"))
        assert outcomes.count(pb.NotAllowedError) == 3
        assert len(it.topic.subscriptions) == 3
        with pytest.raises(NotAllowed, match="has 3 subscriptions, and the policies allow 3"):
            await it.subscribe("reader", durable=False)
        await it.subscribe(next(iter(it.topic.subscriptions)))


async def test_a_subscription_type_that_is_not_allowed_is_refused_by_name() -> None:
    policies = keeping(subscription_types=frozenset({Allowed.SHARED}))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.subscribe("s", kind=SHARED)
        with pytest.raises(NotAllowed, match=r"type Exclusive: .* allow only Shared"):
            await it.subscribe("e")
        assert list(it.topic.subscriptions) == ["s"]


async def test_without_auto_creation_an_unknown_subscription_is_not_found() -> None:
    policies = keeping(auto_subscription_creation=False)
    async with opened_topic(ClusterState(), policies=policies) as it:
        with pytest.raises(SubscriptionNotFound) as missing:
            await it.subscribe("s")
        assert code_of(missing.value) == pb.SubscriptionNotFound
        await it.subscribe("reader", durable=False)
        await it.topic.ensure_subscription("s", EARLIEST)  # like an administrator
        await it.subscribe("s")


async def test_a_consumer_that_subscribes_too_often_is_refused() -> None:
    policies = keeping(subscribe_rate=SubscribeRate(2, 30))
    async with opened_topic(ClusterState(), policies=policies) as it:

        async def again(consumer: int) -> None:
            it._consumers = consumer
            handle, _ = await it.subscribe()
            await handle.close()

        await again(1)
        await again(1)
        with pytest.raises(NotAllowed, match="more than 2 times in 30 s"):
            await again(1)
        await again(2)  # another consumer
        await asyncio.sleep(15)
        await again(1)


def test_remembered_subscribers_are_bounded() -> None:
    rates, rate = SubscribeRates(), SubscribeRate(1, 30)
    for number in range(SUBSCRIBERS_MAX + 5):
        assert rates.take(("host", "c", number), rate, 1.0)
    assert len(rates) == SUBSCRIBERS_MAX
    assert not rates.take(("host", "c", SUBSCRIBERS_MAX), rate, 2.0)
    assert rates.take(("host", "c", 1), SubscribeRate(0, 30), 2.0)
    assert len(rates) == 0


# ---- unacknowledged messages ---------------------------------------------------------------------


async def test_limits_of_unacknowledged_messages_follow_the_policies_while_open() -> None:
    policies = keeping(unacked_per_consumer_max=5, unacked_per_subscription_max=100)
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.publish(*TEXTS)
        handle, session = await it.subscribe(kind=SHARED)
        await wait_until(lambda: len(session.texts) == 5)
        await settle()
        assert len(session.texts) == 5
        assert handle.stats()["blockedConsumerOnUnackedMsgs"]
        policies.set(unacked_per_consumer_max=20)
        await wait_until(lambda: len(session.texts) == 20)
        policies.set(unacked_per_consumer_max=0, unacked_per_subscription_max=40)
        await wait_until(lambda: len(session.texts) == len(TEXTS))  # the last read exceeds it
        await it.publish("later")
        await settle()
        assert len(session.texts) == len(TEXTS)
        assert {it.why for it in it.topic.explain("s")} == {Why.UNACKED_BY_SUBSCRIPTION}
        policies.set(unacked_per_subscription_max=0)
        await wait_until(lambda: session.texts == [*TEXTS, "later"])


@pytest.mark.parametrize("kind", [SHARED, SubscriptionType.KEY_SHARED])
async def test_a_lower_limit_applies_to_a_subscription_only_when_its_turn_comes(
    kind: SubscriptionType,
) -> None:
    """Before that, the dispatcher divided by zero: an available consumer had no room."""
    policies = keeping(unacked_per_consumer_max=50)
    async with opened_topic(ClusterState(), policies=policies) as it:
        for number in range(CLIENTS_PER_TURN):
            await it.topic.ensure_subscription(f"other-{number}", EARLIEST)
        await it.publish(*TEXTS)
        handle, session = await it.subscribe(kind=kind, permits=7)
        await wait_until(lambda: len(session.texts) == 7)
        policies.set(unacked_per_consumer_max=5)
        handle.flow(1)
        await wait_until(lambda: handle.machine.blocked)
        assert len(session.texts) <= 8
        handle.flow(100)
        await settle()
        assert len(session.texts) <= 8
        for position in session.positions:
            handle.acknowledge([position])
        await wait_until(lambda: len(session.texts) >= 12)


# ---- dispatch rates ------------------------------------------------------------------------------


def test_a_bucket_is_full_at_first_and_exact_on_average() -> None:
    rate = DispatchRate("topic")
    rate.set(Rate(10, 0, 2), 100.0)
    assert rate.limited
    assert rate.wait_s(100.0) == 0.0
    assert rate.room(100.0)[0] == 10
    rate.take(30, 7, 100.0)  # a batch
    assert rate.wait_s(100.0) == pytest.approx(21 / 5)
    rate.set(Rate(10, 0, 2), 101.0)
    assert rate.wait_s(101.0) == pytest.approx(21 / 5 - 1), (
        "an unchanged policy refilled the bucket"
    )
    rate.set(Rate(0, 1_000, 1), 101.0)
    assert rate.room(101.0)[1] == 1_000
    rate.take(1, 1_500, 101.0)
    assert rate.wait_s(101.0) == pytest.approx(0.6)
    rate.set(Rate(0, 0, 1), 101.0)
    assert not rate.limited
    assert rate.wait_s(101.0) == 0.0


async def taken(session: FakeConsumerSession, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return len(session.texts)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
@pytest.mark.parametrize("level", ["dispatch_rate", "subscription_dispatch_rate"])
async def test_messages_are_dispatched_at_the_rate(kind: SubscriptionType, level: str) -> None:
    policies = keeping(**{level: Rate(10, 0, 1)})
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.publish(*TEXTS)
        _, session = await it.subscribe(kind=kind)
        assert await taken(session, 0.05) == 10
        [reason] = [it for it in it.topic.explain("s") if it.why is Why.DISPATCH_RATE]
        assert "may dispatch 10 messages in 1 s" in reason.detail
        assert 29 <= await taken(session, 2.0) <= 31
        policies.set(**{level: Rate(0, 0, 1)})
        await taken(session, 1.1)
        assert session.texts == TEXTS
        assert Why.DISPATCH_RATE not in {it.why for it in it.topic.explain("s")}


async def test_subscriptions_share_the_rate_of_their_topic() -> None:
    policies = keeping(dispatch_rate=Rate(20, 0, 1))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.publish(*TEXTS)
        sessions = [(await it.subscribe(name))[1] for name in ("a", "b")]
        await asyncio.sleep(2.05)
        assert 55 <= sum(len(session.texts) for session in sessions) <= 70
        assert all(len(session.texts) > 10 for session in sessions)


async def test_bytes_are_dispatched_at_the_rate_and_redeliveries_count() -> None:
    policies = keeping(subscription_dispatch_rate=Rate(0, 4_000, 1))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.publish(*[text * 500 for text in TEXTS[:10]])  # about 1 KB each
        handle, session = await it.subscribe(kind=SHARED)
        before = await taken(session, 0.05)
        assert before <= 5
        handle.redeliver(None)
        assert await taken(session, 0.05) == before
        assert before < await taken(session, 1.0) <= before + 5
        await asyncio.sleep(4)
        assert len(set(session.positions)) == 10


async def test_a_consumer_that_leaves_while_the_rate_is_used_up_leaves_no_task() -> None:
    policies = keeping(dispatch_rate=Rate(1, 0, 3_600))
    async with opened_topic(ClusterState(), policies=policies) as it:
        await it.publish(*TEXTS)
        handle, session = await it.subscribe(durable=False, start=EARLIEST)
        assert await taken(session, 0.05) == 1
        await handle.close()
        await settle()
        assert it.topic.subscriptions == {}
