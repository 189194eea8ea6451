"""Every cause of a stopped delivery, alone and in pairs: `explain` names it with its numbers.

Two consumers share the subscription. A cause of one consumer stops c1. c2 continues, so a cause of
the whole subscription can be added.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import sends_of
from fakes.policies import SettablePolicies
from fakes.sessions import FakeConsumerSession
from fakes.topics import CLIENT, opened_topic
from support import settle, wait_until

from magnetar.broker.dispatch.explain import Reason, Why
from magnetar.broker.dispatch.key_shared_policy import HashRange, KeySharedMode, KeySharedPolicy
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import EARLIEST
from magnetar.broker.topic.contract import SubscribeRequest, SubscriptionType
from magnetar.broker.topic.explanation import Snapshot, SubscriptionState, explain
from magnetar.metadata.policies import Rate
from magnetar.protos.entry import parse_entry
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fakes.topics import TopicRig

    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.subscription import Subscription

SHARED, KEY_SHARED = SubscriptionType.SHARED, SubscriptionType.KEY_SHARED
FAILOVER, EXCLUSIVE = SubscriptionType.FAILOVER, SubscriptionType.EXCLUSIVE
NOW_MS = 1_700_000_000_000
MESSAGES = 12


@dataclass
class Scene:
    """A topic with the consumers `one` and `two`, which have received all deliverable messages."""

    world: ClusterState
    rig: TopicRig
    kind: SubscriptionType
    limits: Limits
    causes: frozenset[Why]
    one: ConsumerHandle = field(init=False)
    two: ConsumerHandle = field(init=False)
    sessions: dict[str, FakeConsumerSession] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def subscription(self) -> Subscription:
        return self.rig.topic.subscriptions["s"]

    async def publish(self, *messages: OutgoingMessage) -> None:
        handle, session = await self.rig.produce(f"p{len(self.rig.topic.producers)}")
        header = EntryHeader("p", NOW_MS)
        views = [parse_entry(b"".join(encode_message(message, header))) for message in messages]
        handle.publish(sends_of(*views), asyncio.get_running_loop().time())
        await wait_until(lambda: len(session.answers) == len(messages), what="receipts")

    async def publish_keyed(self, count: int) -> None:
        await self.publish(
            *[
                OutgoingMessage(b"%d" % number, number, partition_key=f"key-{number % 6}")
                for number in range(count)
            ]
        )

    async def join(self, name: str, permits: int, **more: Any) -> ConsumerHandle:
        request = SubscribeRequest(
            len(self.sessions) + 1, "s", self.kind, CLIENT, consumer_name=name, **more
        )
        session = self.sessions[name] = FakeConsumerSession()
        handle = await self.rig.topic.subscribe(request, session)
        if permits:
            handle.flow(permits)
        await settle()
        return handle

    def reasons(self) -> list[Reason]:
        return self.rig.topic.explain("s")

    def named(self, why: Why) -> Reason:
        found = [it for it in self.reasons() if it.why is why and it.consumer in ("", "c1")]
        assert found, f"{why} is missing in {[str(it) for it in self.reasons()]}"
        return found[0]


@asynccontextmanager
async def scene(
    kind: SubscriptionType, *causes: Why, key_shared: KeySharedSettings | None = None
) -> AsyncIterator[Scene]:
    """A topic on which these causes can be arranged."""
    limits, policies, world = Limits(), SettablePolicies(), ClusterState()
    if Why.DISPATCH_RATE in causes:
        policies.set(subscription_dispatch_rate=Rate(5, 0, 1_000))
    async with opened_topic(
        world, limits=limits, policies=policies, cache_bytes=1, key_shared=key_shared
    ) as rig:
        it = Scene(world, rig, kind, limits, frozenset(causes))
        try:
            yield it
        finally:
            for task in it.tasks:
                task.cancel()
            world.ledgers.release()
            await settle()


async def arrange(it: Scene) -> None:
    """Arrange the causes, first those that need reads."""
    await it.rig.topic.ensure_subscription("s", EARLIEST)
    if Why.DELAYED in it.causes:
        await it.publish(OutgoingMessage(b"later", 0, deliver_at_ms=NOW_MS + 60_000))
    await it.publish_keyed(MESSAGES)
    if Why.READ_FAILED in it.causes:
        last = it.rig.topic.log.confirmed
        it.world.ledgers.unreadable.add((last.ledger, last.entry))
    it.one = await it.join("c1", 0)
    it.two = await it.join("c2", 0)
    it.one.flow(2 if Why.NO_PERMITS in it.causes else 1_000)
    await settle()
    it.two.flow(1_000)
    await asyncio.sleep(0.05)
    for why, cause in LATE.items():
        if why in it.causes:
            cause(it)
    await settle()


def shut(it: Scene) -> None:
    it.sessions["c1"].room = False


def limit_consumers(it: Scene) -> None:
    it.limits.unacked_per_consumer = 1
    it.subscription.on_policies(it.limits)


def limit_subscription(it: Scene) -> None:
    it.limits.unacked_per_subscription = 2
    it.subscription.on_policies(it.limits)


def leave(it: Scene) -> None:
    it.tasks.append(asyncio.get_running_loop().create_task(it.one.drain()))


LATE: dict[Why, Callable[[Scene], None]] = {
    Why.LEAVING: leave,
    Why.NOT_WRITABLE: shut,
    Why.UNACKED_BY_CONSUMER: limit_consumers,
    Why.UNACKED_BY_SUBSCRIPTION: limit_subscription,
}


def check_no_permits(it: Scene, found: Reason) -> None:
    have = it.one.machine.unacked
    assert have >= 2
    assert f"0 permits and {have} unacknowledged messages" in found.detail
    assert found.facts == {"permits": 0, "unacked": have}


def check_shut(it: Scene, found: Reason) -> None:
    assert "too many unsent bytes" in found.detail


def check_consumer_limit(it: Scene, found: Reason) -> None:
    have = it.one.machine.unacked
    assert f"{have} messages are unacknowledged, the limit is 1" in found.detail
    assert "resumes at 0" in found.detail
    assert found.facts == {"unacked": have, "limit": 1, "resumesAt": 0}


def check_subscription_limit(it: Scene, found: Reason) -> None:
    have = it.subscription.unacked
    assert f"{have} messages are unacknowledged, the limit of the subscription is 2" in found.detail
    assert found.facts == {"unacked": have, "limit": 2, "resumesAt": 1}


def check_leaving(it: Scene, found: Reason) -> None:
    have = it.one.machine.unacked
    assert f"leaves; it has {have} messages to acknowledge" in found.detail


def check_delayed(it: Scene, found: Reason) -> None:
    assert "1 entries are delayed" in found.detail
    assert "2023-11-14T22:14:20Z" in found.detail
    assert found.facts["delayed"] == 1
    assert found.next_s is not None
    assert 55 < found.next_s <= 60


def check_rate(it: Scene, found: Reason) -> None:
    assert (
        "the subscription may dispatch 5 messages in 1000 s, and this rate is used up"
        in found.detail
    )
    assert found.next_s is not None
    assert 150 < found.next_s <= 200, "a fifth of the period"
    assert found.facts == {"waitS": round(found.next_s, 3)}


def check_read_failed(it: Scene, found: Reason) -> None:
    assert "the broker retries a failed read" in found.detail
    assert found.next_s is not None
    assert 0 <= found.next_s <= 0.2, "the first retry is soon"


CHECKS = {
    Why.NO_PERMITS: check_no_permits,
    Why.NOT_WRITABLE: check_shut,
    Why.UNACKED_BY_CONSUMER: check_consumer_limit,
    Why.UNACKED_BY_SUBSCRIPTION: check_subscription_limit,
    Why.LEAVING: check_leaving,
    Why.DELAYED: check_delayed,
    Why.DISPATCH_RATE: check_rate,
    Why.READ_FAILED: check_read_failed,
}

# A failed read is not charged: the rate that let it begin is not used up.
APART = {frozenset((Why.DISPATCH_RATE, Why.READ_FAILED))}
PAIRS = [pair for pair in combinations(CHECKS, 2) if frozenset(pair) not in APART]
QUIET = {Why.NOTHING_TO_READ, Why.READING, Why.UNACKED_BY_CONSUMER, Why.UNBLOCKING}


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
@pytest.mark.parametrize("causes", [(why,) for why in CHECKS] + PAIRS, ids="+".join)
async def test_causes_are_explained_alone_and_in_pairs(
    kind: SubscriptionType, causes: tuple[Why, ...]
) -> None:
    async with scene(kind, *causes) as it:
        await arrange(it)
        for why in causes:
            CHECKS[why](it, it.named(why))
        others = {reason.why for reason in it.reasons()} - set(causes)
        assert others <= QUIET | ({Why.DRAINING} if Why.LEAVING in causes else set())


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER])
async def test_a_missing_consumer_and_an_empty_backlog_are_explained(
    kind: SubscriptionType,
) -> None:
    async with scene(kind) as it:
        await it.rig.topic.ensure_subscription("s", EARLIEST)
        assert [reason.why for reason in it.reasons()] == [Why.NO_CONSUMERS]
        one = await it.join("c1", 10)
        [reason] = it.reasons()
        assert reason.why is Why.NOTHING_TO_READ
        await it.publish_keyed(2)
        await settle()
        [reason] = it.reasons()
        assert "every entry up to" in reason.detail
        if kind in (SHARED, KEY_SHARED):
            assert reason.facts == {"pending": 2}
        one.close_nowait()
        assert it.reasons()[0].why is Why.NO_CONSUMERS


@pytest.mark.parametrize("more", ["", "no_permits", "not_writable", "delayed"])
async def test_draining_hashes_name_their_consumers_and_counts(more: str) -> None:
    async with scene(KEY_SHARED) as it:
        await it.rig.topic.ensure_subscription("s", EARLIEST)
        it.one = await it.join("c1", 1_000)
        await it.publish_keyed(6)
        await settle()
        it.two = await it.join("c2", 0 if more == "no_permits" else 1_000)
        if more == "not_writable":
            it.sessions["c2"].room = False
        if more == "delayed":
            await it.publish(OutgoingMessage(b"later", 0, deliver_at_ms=NOW_MS + 60_000))
        await it.publish_keyed(12)
        await settle()
        draining = [reason for reason in it.reasons() if reason.why is Why.DRAINING]
        assert draining, "no key has moved"
        for reason in draining:
            assert reason.facts["pending"] == 1
            assert reason.facts["pendingAt"] == "c1"
            assert reason.facts["waiting"] == 2
            assert (
                "1 entries are pending at consumer 'c1'; 2 entries wait for 'c2'" in reason.detail
            )
        whys = {reason.why.value for reason in it.reasons()}
        assert not more or more in whys
        it.one.acknowledge(it.sessions["c1"].positions)
        [unblocking] = [it for it in it.reasons() if it.why is Why.UNBLOCKING]
        assert f"{len(draining)} hashes have drained" in unblocking.detail
        assert unblocking.next_s == pytest.approx(0.01)


async def test_a_full_look_ahead_and_a_hash_without_a_consumer_are_explained() -> None:
    sticky = KeySharedPolicy(KeySharedMode.STICKY, ranges=(HashRange(0, 100),))
    settings = KeySharedSettings(look_ahead_per_consumer=5)
    async with scene(KEY_SHARED, key_shared=settings) as it:
        await it.rig.topic.ensure_subscription("s", EARLIEST)
        await it.join("c1", 1_000, key_shared=sticky)
        await it.publish_keyed(12)
        await settle()
        full = it.named(Why.LOOK_AHEAD)
        assert full.facts == {"waiting": 5, "limit": 5}
        unassigned = it.named(Why.UNASSIGNED)
        assert unassigned.facts["entries"] == 5
        assert "5 entries wait for a consumer with their hash" in unassigned.detail


async def test_standby_and_switch_of_a_failover_subscription_are_explained() -> None:
    async with scene(FAILOVER) as it:
        await it.rig.topic.ensure_subscription("s", EARLIEST)
        one = await it.join("c1", 2, priority=1)
        await it.publish_keyed(4)
        await it.join("c2", 10, priority=1)
        await settle()
        standby = it.named(Why.STANDBY)
        assert standby.facts == {"standby": 1, "active": "c1"}
        assert it.named(Why.NO_PERMITS).consumer == "c1"
        await it.join("c3", 10, priority=0)
        switch = it.named(Why.DRAINING)
        assert "consumer 'c3' becomes active when 'c1' has acknowledged" in switch.detail
        assert switch.next_s is not None
        assert 0 < switch.next_s <= 1
        one.acknowledge(it.sessions["c1"].positions)
        assert Why.DRAINING not in {reason.why for reason in it.reasons()}


async def test_a_seek_a_deletion_and_a_closed_topic_are_explained() -> None:
    async with scene(SHARED) as it:
        await it.rig.topic.ensure_subscription("s", EARLIEST)
        await it.publish_keyed(2)
        await it.join("c1", 10)
        subscription = it.subscription
        it.world.ledgers.hold()
        it.tasks.append(asyncio.get_running_loop().create_task(subscription.seek(EARLIEST)))
        await asyncio.sleep(0)
        assert [reason.why for reason in it.reasons()] == [Why.SEEKING, Why.NO_CONSUMERS]
        it.world.ledgers.release()
        await wait_until(lambda: subscription.state is SubscriptionState.OPEN, what="the seek")
        it.world.ledgers.hold()
        deletion = subscription.unsubscribe(None, force=True)
        it.tasks.append(asyncio.get_running_loop().create_task(deletion))
        await asyncio.sleep(0)
        assert [reason.why for reason in it.reasons()] == [Why.DELETING, Why.NO_CONSUMERS]
        it.world.ledgers.release()
        await wait_until(lambda: not it.rig.topic.subscriptions, what="the deletion")
        assert [reason.why for reason in subscription.explain()] == [Why.CLOSED]


async def test_entries_that_are_not_durable_are_counted() -> None:
    async with scene(SHARED) as it:
        await it.join("c1", 10)
        await it.rig.publish("a")
        it.world.ledgers.hold()
        handle, _ = await it.rig.produce("p")
        view = parse_entry(b"".join(encode_message(OutgoingMessage(b"b", 0), EntryHeader("p", 1))))
        handle.publish(sends_of(view), asyncio.get_running_loop().time())
        await settle()
        found = it.named(Why.NOT_DURABLE)
        assert found.detail == "1 published entries are not durable yet"
        assert found.facts == {"entries": 1}
        assert it.named(Why.NOTHING_TO_READ)


# ---- the function --------------------------------------------------------------------------------

NO_PERMITS = Reason(Why.NO_PERMITS, "0 permits", "c1")

FACTS: dict[Why, tuple[dict[str, Any], str]] = {
    Why.SEEKING: ({"state": SubscriptionState.SEEKING}, "a seek is moving the subscription"),
    Why.DELETING: ({"state": SubscriptionState.DELETING}, "deleting the subscription"),
    Why.READ_FAILED: ({"read_failure": "bookie b1 is away", "retry_in_s": 2.5}, "b1 is away"),
    Why.DISPATCH_RATE: ({"rate": "the topic may dispatch 5 messages in 1 s", "rate_wait_s": 0.2},
                        "and this rate is used up"),
    Why.NO_PERMITS: ({"dispatcher": (NO_PERMITS,)}, "0 permits"),
    Why.NOT_DURABLE: ({"unconfirmed": 3, "log_trouble": "b1 failed"},
                      "3 published entries are not durable yet: b1 failed"),
    Why.PUBLISH_BUDGET: ({"budget_waiting": 2, "budget_used": 90, "budget_max": 80},
                         "2 connections wait before they may publish: the broker holds 90 of 80"),
    Why.METADATA_AWAY: ({"metadata_session": "suspended"},
                        "the session with the metadata store is suspended"),
}  # fmt: skip


@pytest.mark.parametrize(
    "causes",
    [(why,) for why in FACTS]
    + [pair for pair in combinations(FACTS, 2) if set(pair) != {Why.SEEKING, Why.DELETING}],
    ids="+".join,
)
def test_snapshot_gives_each_of_its_reasons(causes: tuple[Why, ...]) -> None:
    facts: dict[str, Any] = {"dispatcher": ()}
    for why in causes:
        facts.update(FACTS[why][0])
    reasons = {reason.why: reason for reason in explain(Snapshot(**facts))}
    assert set(reasons) == set(causes)
    for why in causes:
        assert FACTS[why][1] in reasons[why].detail


def test_a_quarantined_topic_has_one_reason_with_its_end() -> None:
    [reason] = explain(Snapshot(quarantine="assertion failed", quarantine_s=12.4, unconfirmed=3))
    assert reason.why is Why.QUARANTINED
    assert "refuses the topic for 12 s more" in reason.detail
    assert reason.next_s == 12.4
