"""Subscriptions over fake ledgers and real cursors: deliveries, acknowledgements, seeks and
closes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.entries import claiming_entry, texts_of
from fakes.sessions import FakeConsumerSession
from fakes.topic_log import SMALL
from fakes.topics import opened_topic
from support import settle, wait_until

from magnetar.broker.cursor.acks import partial_bytes
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.errors import (
    BrokerError,
    ConsumerBusy,
    ConsumerNotFound,
    ConsumersConnected,
    InvalidAck,
    InvalidPermits,
    LogClosed,
    NotAllowed,
    ReadFailed,
    SubscriptionFenced,
)
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.log import TAIL_ENTRIES_MAX, LogConfig
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.broker.topic.ack_sets import PARTIAL_BYTES_MAX, UNKNOWN_WORDS_MAX
from magnetar.broker.topic.contract import CloseReason, InitialPosition, SubscriptionType
from magnetar.broker.topic.read_ahead import BACKLOG_ENTRIES_MIN
from magnetar.broker.topic.subscription import RETURN_S, all_of
from magnetar.protos.entry import BATCH_MESSAGES_MAX

if TYPE_CHECKING:
    from fakes.topics import TopicRig

    from magnetar.broker.topic.consumer import ConsumerHandle

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
TEXTS = [f"m{number}" for number in range(23)]


def whys(it: TopicRig, name: str = "s") -> set[Why]:
    return {reason.why for reason in it.topic.explain(name)}


async def delivered(session: FakeConsumerSession, texts: list[str]) -> None:
    await wait_until(lambda: len(session.texts) >= len(texts), what=f"{len(texts)} messages")
    await settle()
    assert session.texts == texts


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_consumer_gets_backlog_then_new_entries(kind: SubscriptionType) -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS)
        _, session = await it.subscribe(kind=kind)
        await delivered(session, TEXTS)
        assert whys(it) == {Why.NOTHING_TO_READ}
        for text in ("x", "y", "z"):
            await it.publish(text)
        await delivered(session, [*TEXTS, "x", "y", "z"])
        assert session.active == ([True] if kind is EXCLUSIVE else [])


async def test_catch_up_reads_ranges_from_bookies() -> None:
    world = ClusterState()
    config = replace(SMALL, ledger_entries_max=1_000)
    texts = [str(number) for number in range(500)]
    async with opened_topic(world, config=config) as it:
        await it.publish(*texts)
    async with opened_topic(world, config=config, cache_bytes=0) as it:
        _, session = await it.subscribe()
        await delivered(session, texts)
        assert len(world.ledgers.reads) <= 6, "not in ranges"


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_read_ahead_data_is_dropped_when_the_last_consumer_leaves(
    kind: SubscriptionType,
) -> None:
    world = ClusterState()
    config = replace(SMALL, ledger_entries_max=2_000)
    texts = [str(number) for number in range(BACKLOG_ENTRIES_MIN + 200)]
    async with opened_topic(world, config=config, cache_bytes=1) as it:
        await it.publish(*texts)
        budget = it.topic.log.budget
        for during_a_read in (False, True):
            name = f"s{during_a_read}"
            handle, session = await it.subscribe(name, kind=kind, permits=20)
            await delivered(session, texts[:20])
            await wait_until(lambda: budget.ahead > 0, what="a read ahead")
            await settle()
            if during_a_read:
                world.ledgers.may_read.clear()
                world.ledgers.reading.clear()
                handle.redeliver(None)  # the read begins elsewhere
                handle.flow(20)
                await asyncio.wait_for(world.ledgers.reading.wait(), 5)
            handle.close_nowait()
            world.ledgers.may_read.set()
            await settle()
            assert budget.ahead == 0


async def test_tailing_consumer_reads_nothing_from_bookies() -> None:
    """This holds for any number of messages before and during the reads."""
    world = ClusterState()
    texts = [str(number) for number in range(TAIL_ENTRIES_MAX + 100)]
    async with opened_topic(world, config=LogConfig()) as it:
        await it.publish(*texts)
        _, session = await it.subscribe(initial=InitialPosition.LATEST, permits=len(texts))
        for first in range(0, len(texts), 100):
            await it.publish(*texts[first : first + 100])
            await delivered(session, texts[: first + 100])
        assert world.ledgers.reads == []


async def test_read_is_bounded_in_bytes() -> None:
    async with opened_topic(ClusterState(), limits=Limits(read_bytes=2_500)) as it:
        texts = [str(number) * 1_000 for number in range(9)]
        await it.publish(*texts)
        _, session = await it.subscribe()
        await delivered(session, texts)
        assert session.deliveries >= 3


async def test_unwritable_connection_causes_no_read() -> None:
    world = ClusterState()
    async with opened_topic(world, cache_bytes=0) as it:
        await it.publish(*TEXTS)
        session = FakeConsumerSession(room=False)
        handle, _ = await it.subscribe(session=session)
        await settle()
        assert session.entries == []
        assert world.ledgers.reads == []
        assert whys(it) == {Why.NOT_WRITABLE}
        session.room = True
        handle.on_writable()
        await delivered(session, TEXTS)


async def test_permits_limit_deliveries() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS)
        handle, session = await it.subscribe(permits=0)
        assert whys(it) == {Why.NO_PERMITS}
        handle.flow(3)
        await delivered(session, TEXTS[:3])
        handle.flow(2)
        await delivered(session, TEXTS[:5])
        with pytest.raises(InvalidPermits):
            handle.flow(0)


async def test_acknowledged_entries_are_not_redelivered_after_reopen() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        await it.publish(*TEXTS)
        handle, session = await it.subscribe(kind=SHARED)
        await delivered(session, TEXTS)
        handle.acknowledge(session.positions[::2])
        await handle.close()
    async with opened_topic(world) as it:
        _, session = await it.subscribe(kind=SHARED)
        await delivered(session, TEXTS[1::2])


async def test_close_returns_when_acknowledgements_are_durable() -> None:
    world = ClusterState()
    async with opened_topic(world, close=False) as it:
        await it.publish(*TEXTS)
        handle, session = await it.subscribe()
        await delivered(session, TEXTS)
        handle.acknowledge_cumulative(session.positions[9])
        await handle.close()
    async with opened_topic(world) as it:  # after its broker died
        _, session = await it.subscribe()
        await delivered(session, TEXTS[10:])


async def test_ack_receipt_comes_once_when_every_part_is_durable() -> None:
    world = ClusterState()
    async with opened_topic(world, close=False) as it:
        await it.publish("a", "b c d", "e f", "g", batches=True)
        handle, session = await it.subscribe(kind=SHARED)
        await delivered(session, list("abcdefg"))
        done: list[BrokerError | None] = []
        one, three, two, last = session.positions
        handle.acknowledge([one, last], [(three, (0b101,)), (two, (0,))], done.append)
        await wait_until(lambda: done)
        handle.acknowledge([], (), done.append)
        await settle()
        assert done == [None, None]
    async with opened_topic(world) as it:
        _, session = await it.subscribe(kind=SHARED)
        await wait_until(lambda: session.entries)
        assert session.positions == [three]
        assert session.ack_sets == [(0b101,)]


def test_joint_receipt_waits_for_all_parts_and_reports_first_failure() -> None:
    failure = LogClosed("t")
    told: list[BrokerError | None] = []
    one = all_of(3, told.append)
    assert one is not None
    one(None)
    one(failure)
    assert told == []
    one(LogClosed("u"))
    assert told == [failure]
    assert all_of(0, told.append) is None
    assert told == [failure, None]


async def test_impossible_acknowledgements_are_refused() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish("a")
        handle, session = await it.subscribe(kind=SHARED)
        await delivered(session, ["a"])
        with pytest.raises(NotAllowed):
            handle.acknowledge_cumulative(session.positions[0])
        with pytest.raises(InvalidAck):
            handle.acknowledge([session.positions[0], Position(-1, -1)])
        assert handle.machine.unacked == 1
        handle.acknowledge([Position(1_000, 0), Position(0, 0)])  # unknown positions are ignored
        handle.close_nowait()
        failed: list[BrokerError | None] = []
        handle.acknowledge(session.positions, (), failed.append)
        assert isinstance(failed[0], ConsumerNotFound)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_ack_set_longer_than_its_batch_is_refused_before_it_is_stored(
    kind: SubscriptionType,
) -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish("a b", "c d", batches=True)
        handle, session = await it.subscribe(kind=kind)
        await delivered(session, list("abcd"))
        long = (-1,) * 40_000
        with pytest.raises(InvalidAck, match="40000 words; its batch of 2 messages has 1"):
            handle.acknowledge([session.positions[1]], [(session.positions[0], long)])
        if kind is EXCLUSIVE:
            with pytest.raises(InvalidAck):
                handle.acknowledge_cumulative(session.positions[1], long)
        cursor = it.topic.subscriptions["s"].cursor
        assert not cursor.has_partial
        assert cursor.backlog_entries == 2


async def test_bits_beyond_the_batch_are_ignored() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish("a b", "c d", batches=True)
        handle, session = await it.subscribe(kind=SHARED)
        await delivered(session, list("abcd"))
        handle.acknowledge([], [(session.positions[0], (-1,))])  # acknowledges nothing
        assert handle.machine.unacked == 4
        handle.acknowledge([], [(session.positions[0], (-3,))])
        assert handle.machine.unacked == 3
        handle.acknowledge([], [(session.positions[1], (-4,))])  # all of its two messages
        assert handle.machine.unacked == 1
        handle.redeliver(None)
        await wait_until(lambda: len(session.entries) == 3)
        assert session.ack_sets[2] == (0b01,)
        assert handle.machine.permits == 1_000 - 4 - 1


async def test_ack_set_of_a_single_message_adds_no_unacked_messages() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish("a", "b")
        handle, session = await it.subscribe(kind=SHARED)
        await delivered(session, ["a", "b"])
        handle.acknowledge([], [(session.positions[0], (-1,) * UNKNOWN_WORDS_MAX)])
        assert handle.machine.unacked == 2
        with pytest.raises(InvalidAck, match="at most 1024"):
            handle.acknowledge([], [(session.positions[1], (-1,) * (UNKNOWN_WORDS_MAX + 1))])


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_ack_set_stored_by_an_older_version_is_cut_at_delivery(
    kind: SubscriptionType,
) -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        await it.publish("a b", "c d", "e f", batches=True)
        handle, session = await it.subscribe(kind=kind)
        await delivered(session, list("abcdef"))
        cursor = it.topic.subscriptions["s"].cursor
        cursor.acknowledge_batch(session.positions[0], [-3] + [-1] * 40_000)
        cursor.acknowledge_batch(session.positions[1], [-4] + [-1] * 40_000)
        await handle.close()
    async with opened_topic(world) as it:
        handle, session = await it.subscribe(kind=kind)
        await wait_until(lambda: len(session.entries) == 2)
        assert session.ack_sets == [(0b01,), ()]
        assert session.texts == ["a", "b", "e", "f"]
        assert handle.machine.permits == 1_000 - 1 - 2
        if kind is SHARED:
            assert handle.machine.unacked == 3
        assert it.topic.subscriptions["s"].cursor.backlog_entries == 2


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_ack_sets_of_a_subscription_are_bounded_together(kind: SubscriptionType) -> None:
    async with opened_topic(ClusterState()) as it:
        claimed = BATCH_MESSAGES_MAX  # an ack set of 128 KiB for each batch
        words = (0,) * (claimed // 64 - 1) + (1 << 63,)
        count = PARTIAL_BYTES_MAX // partial_bytes(1, claimed) + 1
        await it.publish_entries(*[claiming_entry(claimed)] * count)
        handle, session = await it.subscribe(kind=kind, permits=claimed * count)
        cursor = it.topic.subscriptions["s"].cursor
        accepted: list[Position] = []
        while len(accepted) < count - 1:
            await wait_until(lambda: len(session.entries) > len(accepted))
            position = session.positions[len(accepted)]
            handle.acknowledge([], [(position, words)])
            accepted.append(position)
        await wait_until(lambda: len(session.entries) == count)
        assert cursor.partial_bytes == partial_bytes(count - 1, claimed * (count - 1))
        with pytest.raises(InvalidAck, match="the limit is 33,554,432"):
            handle.acknowledge([], [(session.positions[-1], words)])
        handle.acknowledge([], [(accepted[0], words)])  # a repeated request is no addition
        handle.acknowledge(accepted[:1])
        handle.acknowledge([], [(session.positions[-1], words)])
        assert cursor.partial_bytes == partial_bytes(count - 1, claimed * (count - 1))


async def test_ack_sets_of_one_acknowledgement_are_bounded_together() -> None:
    world = ClusterState()
    count = PARTIAL_BYTES_MAX // partial_bytes(1, 64 * UNKNOWN_WORDS_MAX)
    async with opened_topic(world, close=False) as it:
        await it.publish(*["a b"] * (count + 1), batches=True)
        _, session = await it.subscribe(permits=10_000)
        await wait_until(lambda: len(session.entries) == count + 1)
        positions = session.positions
    async with opened_topic(world) as it:  # the next owner has delivered no entry yet
        handle, session = await it.subscribe(permits=0)
        words = (-1,) * UNKNOWN_WORDS_MAX
        cursor = it.topic.subscriptions["s"].cursor
        with pytest.raises(InvalidAck, match="the limit is 33,554,432"):
            handle.acknowledge([], [(at, words) for at in positions])
        assert not cursor.has_partial
        handle.acknowledge([], [(at, words) for at in positions[:count]])
        handle.flow(10_000)
        await wait_until(lambda: len(session.entries) == count + 1)
        assert set(session.ack_sets) == {(), (0b11,)}
        assert cursor.partial_bytes == partial_bytes(count, 2 * count)


async def test_second_exclusive_consumer_replaces_only_a_dead_one() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS)
        first, session = await it.subscribe()
        with pytest.raises(ConsumerBusy):
            await it.subscribe()
        with pytest.raises(ConsumerBusy, match="Exclusive"):
            await it.subscribe(kind=SHARED)
        await delivered(session, TEXTS)
        first.acknowledge(session.positions[:1])
        session.alive = False
        _, second = await it.subscribe()
        assert session.reason is CloseReason.REPLACED
        await delivered(second, TEXTS[1:])
        first.flow(1)  # late commands of the dead consumer are dropped
        first.redeliver(None)
        first.on_writable()
        first.close_nowait()
        await settle()
        assert second.texts == TEXTS[1:]


async def test_subscription_type_changes_after_all_consumers_left() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS)
        handle, session = await it.subscribe(kind=SHARED)
        await delivered(session, TEXTS)
        handle.acknowledge(session.positions[3:])
        await handle.close()
        assert it.topic.subscriptions["s"].type is None
        handle, session = await it.subscribe(kind=EXCLUSIVE)
        await delivered(session, TEXTS[:3])
        assert it.topic.subscriptions["s"].type is EXCLUSIVE


async def test_unsupported_subscription_requests_are_not_allowed() -> None:
    async with opened_topic(ClusterState()) as it:
        for kind in (SHARED, SubscriptionType.KEY_SHARED):
            with pytest.raises(NotAllowed, match="read by one consumer"):
                await it.subscribe(kind=kind, compacted=True)
        with pytest.raises(NotAllowed):
            await it.subscribe("")
        assert it.topic.subscriptions == {}


async def test_failover_passes_unacknowledged_entries_to_the_next_consumer() -> None:
    failover = SubscriptionType.FAILOVER
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS)
        one, first = await it.subscribe(kind=failover)
        await delivered(first, TEXTS)
        two, second = await it.subscribe(kind=failover)
        assert (first.active, second.active) == ([True], [False])
        assert it.topic.subscriptions["s"].active_name == one.name
        with pytest.raises(ConsumerBusy, match="Failover"):
            await it.subscribe(kind=SHARED)
        one.acknowledge_cumulative(first.positions[1])
        one.close_nowait()
        await delivered(second, TEXTS[2:])
        assert second.active == [False, True]
        assert it.topic.subscriptions["s"].active_name == two.name


async def test_failover_switches_after_the_delay_and_accepts_late_acks() -> None:
    failover = SubscriptionType.FAILOVER
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS)
        low, first = await it.subscribe(kind=failover, priority=1)
        await delivered(first, TEXTS)
        began_s = asyncio.get_running_loop().time()
        _, second = await it.subscribe(kind=failover, permits=1)
        assert Why.DRAINING in whys(it)
        await wait_until(lambda: second.texts == TEXTS[:1])
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(1.0, abs=0.1)
        assert (first.active, second.active) == ([True, False], [False, True])
        low.acknowledge(first.positions[1:])
        it.topic.subscriptions["s"].advance()
        await settle()
        assert second.texts == TEXTS[:1]
        assert it.topic.subscriptions["s"].cursor.backlog_entries == 1


async def test_seek_closes_only_the_active_consumer_of_a_failover_subscription() -> None:
    failover = SubscriptionType.FAILOVER
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS)
        _, first = await it.subscribe(kind=failover)
        two, second = await it.subscribe(kind=failover)
        await delivered(first, TEXTS)
        await two.seek(first.positions[1])  # a standby consumer may also request the seek
        assert (first.reason, second.reason) == (CloseReason.SEEK, None)
        await delivered(second, TEXTS[1:])


async def test_seek_closes_a_standby_consumer_that_was_active_before() -> None:
    """It may still have entries that were sent before the seek. Its acknowledgement of them would
    move the cursor beyond the position of the seek."""
    failover = SubscriptionType.FAILOVER
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS)
        low, first = await it.subscribe(kind=failover, priority=1)
        await delivered(first, TEXTS)
        _, second = await it.subscribe(kind=failover, priority=0)
        _, third = await it.subscribe(kind=failover, priority=1)
        await delivered(second, TEXTS)  # after the delay: the first one has acknowledged nothing
        await it.topic.subscriptions["s"].seek(first.positions[1])
        assert (first.reason, second.reason, third.reason) == (
            CloseReason.SEEK,
            CloseReason.SEEK,
            None,
        )
        low.acknowledge_cumulative(first.positions[-1])
        await delivered(third, TEXTS[1:])


async def test_shared_consumer_gets_pending_entries_of_a_closed_one() -> None:
    async with opened_topic(ClusterState()) as it:
        texts = [str(number) for number in range(100)]
        one, first = await it.subscribe(kind=SHARED, permits=1_000)
        _, second = await it.subscribe(kind=SHARED, permits=1_000)
        await it.publish(*texts)
        await wait_until(lambda: len(first.texts) + len(second.texts) == 100)
        assert sorted(first.texts + second.texts, key=int) == texts
        assert first.texts
        assert second.texts
        mine = list(first.texts)
        one.acknowledge(first.positions[:5])
        one.close_nowait()
        await wait_until(lambda: len(second.texts) == 100 - 5)
        assert sorted(second.texts[-len(mine) + 5 :], key=int) == sorted(mine[5:], key=int)
        assert second.counts[-1] == 1


async def test_redelivery_request_redelivers_with_counts_and_epoch() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS[:6])
        shared, session = await it.subscribe(kind=SHARED)
        await delivered(session, TEXTS[:6])
        shared.redeliver([session.positions[4], session.positions[1]])
        await delivered(session, [*TEXTS[:6], "m1", "m4"])
        assert session.counts[-2:] == [1, 1]
        exclusive, other = await it.subscribe("t")
        await delivered(other, TEXTS[:6])
        exclusive.acknowledge(other.positions[:2])
        exclusive.redeliver(None, epoch=7)
        assert exclusive.epoch == 7
        await delivered(other, [*TEXTS[:6], *TEXTS[2:6]])


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_redelivery_leaves_out_entries_acknowledged_while_tailing(
    kind: SubscriptionType,
) -> None:
    async with opened_topic(ClusterState()) as it:
        handle, session = await it.subscribe(kind=kind)
        await it.publish("a", "b", "c")
        await delivered(session, list("abc"))
        _, two, three = session.positions
        handle.acknowledge([two, Position(1_000, 0)])
        handle.redeliver(None)
        await delivered(session, list("abcac"))
        acks = it.topic.subscriptions["s"]._acks
        assert acks.highest_acked <= three, "the dispatcher would look up every later entry"


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_redelivery_of_a_batch_carries_acks_made_while_tailing(
    kind: SubscriptionType,
) -> None:
    async with opened_topic(ClusterState()) as it:
        handle, session = await it.subscribe(kind=kind)
        await it.publish("a", "b c d", "e", batches=True)
        await delivered(session, list("abcde"))
        handle.acknowledge([], [(session.positions[1], (0b100,))])
        handle.redeliver(None)
        await wait_until(lambda: len(session.entries) == 6)
        assert session.ack_sets[3:] == [(), (0b100,), ()]
        assert handle.machine.permits == 1_000 - 5 - 3


async def test_redelivered_messages_of_a_batch_are_counted_one_by_one() -> None:
    async with opened_topic(ClusterState()) as it:
        handle, session = await it.subscribe(kind=SHARED)
        await it.publish("a", "b c d", "e f", batches=True)
        await delivered(session, list("abcdef"))
        handle.acknowledge([], [(session.positions[1], (0b100,))])
        handle.redeliver(session.positions[1:])
        await wait_until(lambda: len(session.entries) == 5)
        assert handle.redelivered.messages == 3
        assert it.topic.subscriptions["s"].redelivered.messages == 3


async def test_cumulative_ack_inside_a_batch_keeps_its_ack_set() -> None:
    async with opened_topic(ClusterState()) as it:
        handle, session = await it.subscribe()
        await it.publish("a", "b c d", "e", batches=True)
        await delivered(session, list("abcde"))
        handle.acknowledge_cumulative(session.positions[1], (0b110,))
        handle.redeliver(None)
        await wait_until(lambda: len(session.entries) == 5)
        assert session.positions[3:] == session.positions[1:3]
        assert session.ack_sets[3:] == [(0b110,), ()]


async def test_scattered_redelivery_reads_from_bookies_in_order() -> None:
    world = ClusterState()
    config = replace(SMALL, ledger_entries_max=50)
    texts = [str(number) for number in range(200)]
    async with opened_topic(world, config=config) as it:
        await it.publish(*texts)
    limits = Limits(read_bytes=1_000)
    async with opened_topic(world, config=config, cache_bytes=0, limits=limits) as it:
        handle, session = await it.subscribe(kind=SHARED)
        await delivered(session, texts)
        wanted = sorted(random.Random(1).sample(range(200), 60))
        handle.redeliver([session.positions[number] for number in reversed(wanted)])
        await delivered(session, [*texts, *map(str, wanted)])


async def test_unreadable_entry_is_retried_until_it_can_be_read() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        positions = await it.publish(*TEXTS)
    world.ledgers.unreadable.add(tuple(positions[7]))
    async with opened_topic(world, cache_bytes=0) as it:
        _, session = await it.subscribe()
        await delivered(session, TEXTS[:7])
        await wait_until(lambda: Why.READ_FAILED in whys(it))
        world.ledgers.unreadable.clear()
        await delivered(session, TEXTS)
        assert whys(it) == {Why.NOTHING_TO_READ}


async def test_seek_by_id_closes_all_consumers_and_moves_the_cursor() -> None:
    async with opened_topic(ClusterState()) as it:
        positions = await it.publish(*TEXTS)
        one, first = await it.subscribe(kind=SHARED)
        _, second = await it.subscribe(kind=SHARED, permits=0)
        await delivered(first, TEXTS)
        one.acknowledge(positions)
        await one.seek(positions[20])
        assert first.reason is second.reason is CloseReason.SEEK
        _, third = await it.subscribe(kind=SHARED)
        await delivered(third, TEXTS[20:])
        assert third.counts == [0, 0, 0]
        with pytest.raises(ConsumerNotFound):
            await one.seek(EARLIEST)
        for target, texts in ((EARLIEST, TEXTS), (LATEST, [])):
            handle, _ = await it.subscribe("t")
            await handle.seek(target)
            handle, session = await it.subscribe("t")
            await delivered(session, texts)
            handle.close_nowait()


async def test_seek_into_a_batch_delivers_the_rest_of_it_also_after_a_crash() -> None:
    world = ClusterState()
    async with opened_topic(world, close=False) as it:
        first, batch, _ = await it.publish("a b", "c d e f", "g", batches=True)
        cases: list[tuple[Position, int, tuple[int, ...], list[str], tuple[int, ...]]] = [
            (batch, 0, (), list("cdefg"), ()),
            (batch, 2, (), list("cdefg"), (0b1100,)),
            (batch, 0, (0b1010,), list("cdefg"), (0b1010,)),
            (batch, 0, (-1,), list("cdefg"), ()),
            (batch, 4, (), ["g"], ()),
            (batch, 2**31 - 1, (), ["g"], ()),
            (first, 1, (), list("abcdefg"), (0b10,)),
        ]
        for kind in (EXCLUSIVE, SHARED):
            for target, index, words, texts, ack_set in cases:
                handle, _ = await it.subscribe(kind=kind)
                await handle.seek(target, batch_index=index, ack_set=words)
                handle, session = await it.subscribe(kind=kind)
                await delivered(session, texts)
                assert session.ack_sets[0] == ack_set, (target, index, words)
                handle.close_nowait()
    async with opened_topic(world) as it:
        _, session = await it.subscribe()
        await delivered(session, list("abcdefg"))
        assert session.ack_sets[0] == (0b10,)


async def test_seek_by_publish_time_finds_the_first_entry_at_or_after_it() -> None:
    async with opened_topic(ClusterState()) as it:
        for number in range(20):
            await it.publish(str(number), time_ms=1_000 + 10 * number)
        texts = [str(number) for number in range(20)]
        for time_ms, rest in ((1_050, texts[5:]), (1_051, texts[6:]), (0, texts), (9_999, [])):
            handle, _ = await it.subscribe()
            await handle.seek_to_time(time_ms)
            handle, session = await it.subscribe()
            await delivered(session, rest)
            handle.close_nowait()


async def test_failed_seek_by_time_loses_no_entry() -> None:
    """Without this, the consumer would wait without entries, and the entry would never be
    redelivered."""

    async def failing(handle: ConsumerHandle) -> None:
        with pytest.raises(ReadFailed):
            await handle.seek_to_time(1)

    world = ClusterState()
    async with opened_topic(world, cache_bytes=0) as it:
        positions = await it.publish(*TEXTS)
        handle, session = await it.subscribe(kind=SHARED)
        await delivered(session, TEXTS)
        world.ledgers.may_read.clear()
        world.ledgers.reading.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(failing(handle))
            await world.ledgers.reading.wait()
            handle.acknowledge(session.positions)
            world.ledgers.unreadable.update(map(tuple, positions))
            world.ledgers.may_read.set()
        world.ledgers.unreadable.clear()
        _, session = await it.subscribe(kind=SHARED)
        await delivered(session, TEXTS)


async def test_seek_during_seek_returns_subscription_fenced() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish(*TEXTS)
        handle, session = await it.subscribe()
        await delivered(session, TEXTS)
        handle.acknowledge(session.positions)
        async with asyncio.TaskGroup() as tasks:
            seeking = tasks.create_task(handle.seek(EARLIEST))
            await settle(2)  # a task of the topic carries the seek out
            assert not seeking.done()
            assert session.reason is CloseReason.SEEK
            assert Why.SEEKING in whys(it)
            with pytest.raises(SubscriptionFenced):
                await it.topic.subscriptions["s"].seek(LATEST)
            with pytest.raises(SubscriptionFenced):
                await it.subscribe()
        _, session = await it.subscribe()
        await delivered(session, TEXTS)


async def test_unsubscribe_deletes_the_subscription() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        await it.publish(*TEXTS)
        one, _ = await it.subscribe(kind=SHARED)
        _, second = await it.subscribe(kind=SHARED)
        with pytest.raises(ConsumersConnected):
            await one.unsubscribe()
        await one.unsubscribe(force=True)
        assert second.reason is CloseReason.UNSUBSCRIBED
        assert it.topic.subscriptions == {}
        one.flow(1)
        one.close_nowait()
        handle, session = await it.subscribe()  # a new subscription, from the earliest entry
        await delivered(session, TEXTS)
        handle.acknowledge(session.positions)
        await handle.unsubscribe()
    async with opened_topic(world) as it:
        assert it.topic.subscriptions == {}


async def test_new_subscriptions_begin_at_their_initial_position() -> None:
    async with opened_topic(ClusterState()) as it:
        now = it.topic._clock.now_ms()
        positions = await it.publish(*TEXTS[:10], time_ms=now - 60_000)
        await it.publish(*TEXTS[10:], time_ms=now - 1_000)
        _, latest = await it.subscribe("a", initial=InitialPosition.LATEST)
        _, earliest = await it.subscribe("b")
        _, recent = await it.subscribe("c", rollback_s=30)
        _, reader = await it.subscribe("d", durable=False, start=positions[4])
        _, from_start = await it.subscribe("e", durable=False, start=EARLIEST)
        _, from_end = await it.subscribe("f", durable=False, start=LATEST)
        await it.publish("new")
        await delivered(latest, ["new"])
        await delivered(earliest, [*TEXTS, "new"])
        await delivered(recent, [*TEXTS[10:], "new"])
        await delivered(reader, [*TEXTS[4:], "new"])
        await delivered(from_start, [*TEXTS, "new"])
        await delivered(from_end, ["new"])


async def test_closed_reader_leaves_no_subscription() -> None:
    world = ClusterState()
    async with opened_topic(world) as it:
        positions = await it.publish(*TEXTS)
        handle, session = await it.subscribe("r", durable=False, start=positions[3])
        await delivered(session, TEXTS[3:])
        watchers = len(it.topic.log._watchers)
        await handle.close()
        assert it.topic.subscriptions == {}
        assert len(it.topic.log._watchers) == watchers - 1
        handle, session = await it.subscribe("r", durable=False, start=positions[20])
        await delivered(session, TEXTS[20:])
        session.alive = False
        handle, session = await it.subscribe("r", durable=False, start=positions[21])
        await delivered(session, TEXTS[21:])


async def test_reader_subscription_survives_a_seek_for_a_while() -> None:
    async with opened_topic(ClusterState()) as it:
        positions = await it.publish(*TEXTS)
        handle, session = await it.subscribe("r", durable=False, start=EARLIEST)
        await handle.seek(positions[20])
        assert session.reason is CloseReason.SEEK
        handle, session = await it.subscribe("r", durable=False, start=LATEST)
        await delivered(session, TEXTS[20:])
        await handle.seek(EARLIEST)
        assert it.topic.subscriptions != {}
        await asyncio.sleep(RETURN_S)
        await wait_until(lambda: it.topic.subscriptions == {}, what="given up")


async def test_last_message_id_names_entry_and_batch_index() -> None:
    async with opened_topic(ClusterState()) as it:
        handle, _ = await it.subscribe()
        last = await handle.last_message_id()
        assert (last.position, last.batch_index) == (EARLIEST, -1)
        (position,) = await it.publish("a")
        last = await handle.last_message_id()
        assert (last.position, last.batch_index) == (position, -1)
        (position,) = await it.publish("b c d", batches=True)
        last = await handle.last_message_id()
        assert (last.position, last.batch_index) == (position, 2)
        handle.acknowledge_cumulative(position)
        assert (await handle.last_message_id()).mark_delete == position


class Member:
    """A slow consumer: it acknowledges its deliveries in parts and grants as many permits."""

    def __init__(self, handle: ConsumerHandle, session: FakeConsumerSession) -> None:
        self.handle = handle
        self.session = session
        self.taken = 0  # the number of acknowledged deliveries

    def take(self, count: int) -> list[str]:
        entries = self.session.entries[self.taken : self.taken + count]
        self.taken += len(entries)
        if entries:
            self.handle.acknowledge([entry.position for entry in entries])
            self.handle.flow(len(entries))
        return [text for entry in entries for text in texts_of(entry.data)]

    def give_back(self) -> None:
        dropped = len(self.session.entries) - self.taken
        self.taken += dropped
        self.handle.redeliver(None)
        if dropped:
            self.handle.flow(dropped)


@pytest.mark.parametrize("seed", range(15))
async def test_random_joins_and_leaves_lose_no_message(seed: int) -> None:
    chance = random.Random(seed)
    limits = Limits(unacked_per_consumer=15, unacked_per_subscription=25, read_entries=7)
    async with opened_topic(ClusterState(), limits=limits, cache_bytes=5_000) as it:
        acked: Counter[str] = Counter()
        texts: list[str] = []
        members = [Member(*await it.subscribe(kind=SHARED, permits=10))]
        for _ in range(60):
            match chance.randrange(6):
                case 0 | 1:
                    count = chance.randrange(1, 8)
                    new = [str(len(texts) + number) for number in range(count)]
                    texts += new
                    await it.publish(*new)
                case 2 if len(members) < 4:
                    members.append(Member(*await it.subscribe(kind=SHARED, permits=10)))
                case 3 if len(members) > 1:
                    members.pop(chance.randrange(len(members))).handle.close_nowait()
                case 4:
                    chance.choice(members).give_back()
                case _:
                    await settle(3)
                    acked.update(chance.choice(members).take(chance.randrange(5)))
        for _ in range(400):
            await settle(3)
            for member in members:
                acked.update(member.take(100))
            if len(acked) == len(texts):
                break
        assert sorted(acked) == sorted(texts)
        assert set(acked.values()) == {1}
        assert whys(it) == {Why.NOTHING_TO_READ}
        assert (await it.topic.stats())["subscriptions"]["s"]["msgBacklog"] == 0


async def test_negative_acks_beyond_the_limit_close_the_consumer_and_lose_no_entry() -> None:
    policy = KeySharedPolicy(ordered_nacks=True)
    async with opened_topic(ClusterState(), key_shared=KeySharedSettings(withheld_max=2)) as it:
        positions = await it.publish("a", "b", "c")
        handle, session = await it.subscribe(kind=SubscriptionType.KEY_SHARED, policy=policy)
        await wait_until(lambda: len(session.entries) == 3)
        handle.negative_ack(positions[:2], [])
        assert session.reason is None
        handle.negative_ack(positions[2:], [])
        assert session.reason is CloseReason.NEGATIVE_ACKS
        again, session = await it.subscribe(kind=SubscriptionType.KEY_SHARED, policy=policy)
        await wait_until(lambda: len(session.entries) == 3)
        again.acknowledge(positions)
        assert it.topic.subscriptions["s"].cursor.backlog_entries == 0
