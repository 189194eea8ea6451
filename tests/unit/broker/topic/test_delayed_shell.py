"""Delayed delivery through an open topic, on the virtual loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from fakes.cluster_state import ClusterState
from fakes.entries import sends_of
from fakes.topic_log import SMALL
from fakes.topics import opened_topic
from support import settle, wait_until

from magnetar.broker.dispatch.delayed_index import RUN_ENTRIES
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.topic.contract import SubscriptionType
from magnetar.broker.topic.delayed_store import DelayedStoreConfig
from magnetar.broker.topic.topic import CLOSE_TIMEOUT_S
from magnetar.metadata.policies import DelayedDelivery
from magnetar.protos.entry import parse_entry
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_message

if TYPE_CHECKING:
    from fakes.sessions import FakeConsumerSession
    from fakes.topics import TopicRig
    from support import ManualClock

SHARED, EXCLUSIVE = SubscriptionType.SHARED, SubscriptionType.EXCLUSIVE


async def pass_time(clock: ManualClock, seconds: float) -> None:
    """Let time pass on the clock of the loop and on the wall clock."""
    for _ in range(int(seconds * 10)):
        clock.advance_ms(100)
        await asyncio.sleep(0.1)
    await settle()


async def send(it: TopicRig, text: str, *, delay_ms: int) -> None:
    handle, session = await it.produce(f"producer of {text}")
    at_ms = 1_700_000_000_000 + delay_ms
    message = OutgoingMessage(text.encode(), sequence_id=0, deliver_at_ms=at_ms)
    view = parse_entry(b"".join(encode_message(message, EntryHeader("p", 1_700_000_000_000))))
    handle.publish(sends_of(view), asyncio.get_running_loop().time())
    await wait_until(lambda: len(session.answers) == 1, what="the receipt")


def delayed(it: TopicRig) -> int:
    return len(it.topic.subscriptions["s"].delays.index)


async def test_timer_delivers_in_the_order_of_the_times() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        _, session = await it.subscribe(kind=SHARED)
        for text, delay_ms in (("c", 9_000), ("a", 3_000), ("b", 6_000)):
            await send(it, text, delay_ms=delay_ms)
        await settle()
        assert (session.texts, delayed(it)) == ([], 3)
        assert Why.DELAYED in {reason.why for reason in it.topic.explain("s")}
        await pass_time(world.clock, 4)
        assert session.texts == ["a"]
        await pass_time(world.clock, 6)
        assert session.texts == ["a", "b", "c"]


async def test_the_next_broker_delivers_delayed_entries_in_time() -> None:
    world = ClusterState()
    async with opened_topic(world, close=False) as it:
        _, first = await it.subscribe(kind=SHARED)
        await send(it, "later", delay_ms=20_000)
        await send(it, "now", delay_ms=0)
        await wait_until(lambda: first.texts == ["now"], what="a message")
    async with opened_topic(world) as it:
        _, session = await it.subscribe(kind=SHARED)
        await wait_until(lambda: session.texts == ["now"], what="the unacknowledged message")
        assert delayed(it) == 1
        await pass_time(world.clock, 21)
        assert session.texts == ["now", "later"]


async def test_the_next_broker_does_not_read_entries_of_the_stored_index() -> None:
    world, count = ClusterState(), RUN_ENTRIES + 10
    config = replace(SMALL, ledger_entries_max=50_000)
    async with opened_topic(world, config=config, close=False) as it:
        await it.subscribe(kind=SHARED)
        handle, receipts = await it.produce("producer")
        at_ms = 1_700_000_000_000 + 1_000_000
        message = OutgoingMessage(b"later", sequence_id=0, deliver_at_ms=at_ms)
        view = parse_entry(b"".join(encode_message(message, EntryHeader("p", 1_700_000_000_000))))
        for first in range(0, count, 100):
            views = [view] * min(100, count - first)
            handle.publish(sends_of(*views, first=first), asyncio.get_running_loop().time())
        await wait_until(lambda: len(receipts.answers) == count, what="the receipts")
        await wait_until(lambda: delayed(it) == count, what="the index")
        await wait_until(lambda: it.topic.delayed.is_settled, what="the segments")
        [ledger] = it.topic.log.owned_record.record.delayed_ledgers
    world.ledgers.reads.clear()
    async with opened_topic(world, config=config, close=False) as it:
        assert delayed(it) == RUN_ENTRIES
        _, session = await it.subscribe(kind=SHARED, permits=5_000)
        await wait_until(lambda: delayed(it) == count, what="the rest")
        read = sum(last - first + 1 for at, first, last in world.ledgers.reads if at != ledger)
        assert read < 200, "the backlog was read again"
        world.clock.advance_ms(1_000_000)
        await asyncio.sleep(100)
        await wait_until(lambda: len(session.positions) == count, what="the messages")
        await it.topic.subscriptions["s"].skip_all()
        await wait_until(lambda: it.topic.log.owned_record.record.delayed_ledgers == ())


async def test_topic_closes_its_ledger_although_the_index_cannot_be_stored() -> None:
    """A lost index only costs reads. An open ledger would cost the next owner a recovery."""
    world, count = ClusterState(), DelayedStoreConfig().close_entries_min
    async with opened_topic(world) as it:
        await it.subscribe(kind=SHARED)
        handle, receipts = await it.produce("producer")
        at_ms = 1_700_000_000_000 + 1_000_000
        message = OutgoingMessage(b"later", sequence_id=0, deliver_at_ms=at_ms)
        view = parse_entry(b"".join(encode_message(message, EntryHeader("p", 1_700_000_000_000))))
        handle.publish(sends_of(*[view] * count), asyncio.get_running_loop().time())
        await wait_until(lambda: len(receipts.answers) == count, what="the receipts")
        await wait_until(lambda: delayed(it) == count, what="the index")
        world.ledgers.hold()
        began = asyncio.get_running_loop().time()
        await it.topic.close()
        assert asyncio.get_running_loop().time() - began < CLOSE_TIMEOUT_S
        assert all(part.closed_ms for part in it.topic.log.owned_record.record.ledgers)
        world.ledgers.release()
    async with opened_topic(world) as it:
        _, session = await it.subscribe(kind=SHARED)
        world.clock.advance_ms(1_000_000)
        await asyncio.sleep(100)
        await wait_until(lambda: len(session.positions) == count, what="the messages")


async def test_a_policy_that_disables_delays_delivers_all_delayed_entries() -> None:
    async with opened_topic(ClusterState()) as it:
        _, session = await it.subscribe(kind=SHARED)
        await send(it, "later", delay_ms=1_000_000)
        await settle()
        assert session.texts == []
        off = DelayedDelivery(enabled=False, tick_ms=1_000, delay_ms_max=0)
        it.policies.set(delayed_delivery=off)
        await wait_until(lambda: session.texts == ["later"], what="the message")


async def test_skip_seek_and_expiry_remove_delayed_entries() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        await it.subscribe(kind=SHARED)
        for text in "abcd":
            await send(it, text, delay_ms=1_000_000)
        await settle()
        subscription = it.topic.subscriptions["s"]
        await subscription.skip(1)
        assert delayed(it) == 3
        await subscription.expire_through(min(at for at, _ in subscription.delays.index), now_ms=0)
        assert delayed(it) == 2
        await subscription.seek(max(at for at, _ in subscription.delays.index))
        assert delayed(it) == 1
        await subscription.skip_all()
        assert delayed(it) == 0


async def test_exclusive_consumer_gets_what_a_shared_one_left_delayed() -> None:
    async with opened_topic(ClusterState()) as it:
        handle, _ = await it.subscribe(kind=SHARED)
        await send(it, "later", delay_ms=1_000_000)
        await settle()
        assert delayed(it) == 1
        await handle.close()
        session: FakeConsumerSession
        _, session = await it.subscribe(kind=EXCLUSIVE)
        await wait_until(lambda: session.texts == ["later"], what="the message")
