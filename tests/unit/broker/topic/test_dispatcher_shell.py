"""A subscription as the shell of its dispatcher: order of actions, timer, refusal, attributes."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.cluster_state import ClusterState
from fakes.loops import loop_of
from fakes.sessions import FakeConsumerSession
from fakes.topics import CLIENT, opened_topic, publish
from support import settle, wait_until

from magnetar.broker.dispatch.dispatcher import Activate, ConsumerRefused, Deliver, EntryDetail
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.key_shared_policy import HashRange, KeySharedMode, KeySharedPolicy
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.errors import ConsumerBusy, NotAllowed
from magnetar.broker.guard import Guard
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import EARLIEST, Position
from magnetar.broker.topic.contract import CloseReason, SubscribeRequest, SubscriptionType
from magnetar.broker.topic.disconnector import Disconnector
from magnetar.broker.topic.subscription import Subscription
from magnetar.protos.entry import parse_entry
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_message
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from magnetar.broker.dispatch.dispatcher import Action, Environment
    from magnetar.broker.dispatch.explain import Reason
    from magnetar.broker.dispatch.permits import Consumer
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.topic.consumer import ConsumerHandle

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
FAILOVER, KEY_SHARED = SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED
HEADER = EntryHeader("p", 1_700_000_000_000)
REQUEST = SubscribeRequest(1, "s", EXCLUSIVE, CLIENT, consumer_name="c", durable=False)


class Scripted:
    """A dispatcher that records its events and returns the actions and times that the test sets."""

    cumulative_acks = True

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.read_position = EARLIEST
        self.events: list[tuple[str, float]] = []
        self.joined: list[Consumer] = []
        self.refuses: ConsumerRefused | None = None
        self.actions: list[Action] = []  # the actions of the next event
        self.due: float | None = None  # the answer of `next_timer`
        self.later: float | None = None  # its answer after `on_timer`

    def _on(self, event: str, now: float) -> list[Action]:
        self.events.append((event, now))
        actions, self.actions = self.actions, []
        return actions

    def times(self, event: str) -> list[float]:
        return [now for name, now in self.events if name == event]

    def add_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        if self.refuses is not None:
            raise self.refuses
        self.joined.append(consumer)
        return self._on("join", now)

    def remove_consumer(self, consumer: Consumer, now: float) -> list[Action]:
        return self._on("leave", now)

    def on_leaving(self, consumer: Consumer, now: float) -> list[Action]:
        return self._on("leaving", now)

    def on_flow(self, consumer: Consumer, permits: int, now: float) -> list[Action]:
        return self._on("flow", now)

    def on_redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, now: float
    ) -> list[Action]:
        return self._on("redeliver", now)

    def on_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        return self._on("acked", now)

    def on_partly_acked(
        self, consumer: Consumer, positions: Sequence[Position], now: float
    ) -> list[Action]:
        return self._on("partly acked", now)

    def on_acked_through(self, position: Position, now: float) -> list[Action]:
        return self._on(f"acked through {position}", now)

    def on_entries(self, entries: list[StoredEntry], now: float) -> list[Action]:
        return self._on("entries", now)

    def on_replayed(
        self, entries: list[StoredEntry], through: Position, now: float
    ) -> list[Action]:
        return self._on("replayed", now)

    def on_read_failed(self, now: float) -> list[Action]:
        return self._on("read failed", now)

    def advance(self, now: float) -> list[Action]:
        return self._on("advance", now)

    def next_timer(self) -> float | None:
        return self.due

    def on_timer(self, now: float) -> list[Action]:
        self.due, self.later = self.later, None
        return self._on("timer", now)

    def explain(self, now: float) -> list[Reason]:
        return []

    def check(self) -> None:
        pass


class Order(FakeConsumerSession):
    """Records the deliveries and notices to the client, in order."""

    def __init__(self, *, alive: bool = True) -> None:
        super().__init__(alive=alive)
        self.told: list[str] = []

    def deliver(self, entries: Sequence[StoredEntry], details: Mapping[int, EntryDetail]) -> None:
        self.told.append(f"{len(entries)} entries")

    def active_changed(self, active: bool) -> None:
        self.told.append(f"active {active}")


class Shell:
    """A subscription with scripted dispatchers, in the order in which it made them."""

    def __init__(self) -> None:
        self.subscription: Subscription
        self.made: list[Scripted] = []
        # The refusal of dispatchers that are made from now on.
        self.refuses: ConsumerRefused | None = None

    def make(self, environment: Environment) -> Scripted:
        machine = Scripted(environment)
        machine.refuses = self.refuses
        self.made.append(machine)
        return machine

    @property
    def machine(self) -> Scripted:
        return self.made[-1]

    def attach(
        self, session: FakeConsumerSession | None = None, kind: SubscriptionType = EXCLUSIVE
    ) -> ConsumerHandle:
        return self.subscription.attach(
            replace(REQUEST, type=kind), session or FakeConsumerSession(), connected_since=""
        )


@contextlib.asynccontextmanager
async def opened_shell() -> AsyncIterator[Shell]:
    shell = Shell()
    async with opened_topic(ClusterState()) as it, asyncio.TaskGroup() as tasks:
        await it.publish("a", "b", "c")
        shell.subscription = Subscription(
            "t",
            it.topic.cursors.open_non_durable("s", EARLIEST),
            it.topic.cursors,
            it.topic.log,
            limits=Limits(),
            spawn=tasks.create_task,
            disconnector=Disconnector(Turns(), tasks, Guard("t")),
            abandoned=lambda _: None,
            dispatchers={EXCLUSIVE: shell.make, SHARED: shell.make},
        )
        yield shell
        shell.subscription.close(CloseReason.UNLOADED)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_actions_are_executed_in_the_order_of_the_list() -> None:
    async with opened_shell() as it:
        session = Order()
        handle = it.attach(session)
        consumer = it.machine.joined[0]
        it.machine.actions = [
            Activate(consumer, True),
            Deliver(consumer, [], {}, 0),
            Activate(consumer, False),
        ]
        handle.flow(1)
        assert session.told == ["active True", "0 entries", "active False"]


async def test_another_key_shared_mode_begins_with_new_slots() -> None:
    """Entries that waited under the earlier mode follow the ranges of the new mode."""
    async with opened_topic(ClusterState()) as rig:
        producer, receipts = await rig.produce("p")
        view = parse_entry(
            b"".join(encode_message(OutgoingMessage(b"x", 0, partition_key="a"), HEADER))
        )
        first, _ = await rig.subscribe(kind=KEY_SHARED)
        publish(producer, view, first=0)  # "a" has slot 42456 on the ring, and 27058 of the ranges
        await wait_until(lambda: first.machine.unacked == 1, what="a delivery")
        first.close_nowait()
        sticky = [
            KeySharedPolicy(KeySharedMode.STICKY, (HashRange(*span),))
            for span in ((0, 30_000), (30_001, 65_535))
        ]
        (low, at_low), (_, at_high) = [
            await rig.subscribe(kind=KEY_SHARED, policy=policy) for policy in sticky
        ]
        publish(producer, view, first=1)
        await wait_until(lambda: len(receipts.answers) == 2, what="receipts")
        await settle()
        assert at_high.positions == []
        assert len(at_low.positions) == 2
        assert low.machine.unacked == 2


async def test_another_type_amid_the_return_of_entries_keeps_their_redelivery_counts() -> None:
    settings = KeySharedSettings(part_entries=2)
    async with opened_topic(ClusterState(), key_shared=settings) as rig:
        await rig.publish(*"abcdefg")
        first, _ = await rig.subscribe(kind=KEY_SHARED)
        await wait_until(lambda: first.machine.unacked == 7, what="deliveries")
        first.close_nowait()
        assert Why.RETURNING in {reason.why for reason in rig.topic.explain("s")}
        _, session = await rig.subscribe(kind=SHARED)
        await wait_until(lambda: len(session.positions) == 7, what="redeliveries")
        assert list(session.counts) == [1] * 7


async def test_every_event_carries_the_time_of_the_loop() -> None:
    async with opened_shell() as it:
        handle = it.attach()
        joined_s = now_s()
        await asyncio.sleep(5)
        handle.flow(1)
        handle.redeliver(None)
        handle.on_writable()
        handle.acknowledge([Position(0, 0)], [(Position(0, 1), (1,))])
        last = it.machine.environment.confirmed()
        handle.acknowledge_cumulative(last)
        handle.close_nowait()
        events = ["flow", "redeliver", "advance", "acked", "partly acked", f"acked through {last}"]
        assert it.machine.events == [
            ("join", joined_s),
            *((event, joined_s + 5) for event in [*events, "leave"]),
        ]


async def test_cumulative_ack_beyond_the_log_is_reported_up_to_its_end() -> None:
    async with opened_shell() as it:
        handle = it.attach()
        handle.acknowledge_cumulative(Position(1_000, 0))
        last = it.machine.environment.confirmed()
        assert [event for event, _ in it.machine.events] == ["join", f"acked through {last}"]


async def test_timer_calls_the_dispatcher_at_the_time_that_it_named() -> None:
    async with opened_shell() as it:
        handle = it.attach()
        first, second = now_s() + 10, now_s() + 25
        it.machine.due, it.machine.later = first, second
        handle.flow(1)
        await asyncio.sleep(60)
        assert it.machine.times("timer") == [pytest.approx(first), pytest.approx(second)]
        assert it.machine.times("timer")[0] >= first


async def test_moved_timer_fires_once_at_the_new_time() -> None:
    async with opened_shell() as it:
        handle = it.attach()
        began_s = now_s()
        for due in (began_s + 10, began_s + 5, began_s + 20):
            it.machine.due = due
            handle.flow(1)
        await asyncio.sleep(60)
        assert it.machine.times("timer") == [pytest.approx(began_s + 20)]


async def test_timer_that_is_no_longer_needed_is_cancelled() -> None:
    async with opened_shell() as it:
        handle = it.attach()
        it.machine.due = now_s() + 10
        handle.flow(1)
        it.machine.due = None
        handle.flow(1)
        await asyncio.sleep(60)
        assert it.machine.times("timer") == []


@pytest.fixture
def _uvloop() -> Iterator[None]:
    with loop_of("uvloop"):
        yield


@pytest.mark.real_loop
@pytest.mark.usefixtures("_uvloop")
async def test_timer_that_is_due_at_once_is_kept_on_the_loop_of_servers() -> None:
    async with opened_shell() as it:
        handle = it.attach()
        due = it.machine.due = now_s()
        for _ in range(2):  # uvloop gives a handle without a time
            handle.flow(1)
        await wait_until(lambda: it.machine.times("timer"))
        assert it.machine.times("timer")[0] >= due


@pytest.mark.parametrize("how", ["seek", "close", "other type"])
async def test_dropped_dispatcher_gets_no_timer(how: str) -> None:
    async with opened_shell() as it:
        handle = it.attach()
        old = it.machine
        old.due = now_s() + 10
        handle.flow(1)
        match how:
            case "seek":
                await it.subscription.seek(EARLIEST)
            case "close":
                it.subscription.close(CloseReason.UNLOADED)
            case _:
                handle.close_nowait()
                it.attach(kind=SHARED)
                assert it.machine is not old
        await asyncio.sleep(60)
        assert old.times("timer") == []


async def test_timer_survives_the_last_consumer() -> None:
    async with opened_shell() as it:
        handle = it.attach()
        it.machine.due = now_s() + 10
        handle.close_nowait()
        await asyncio.sleep(60)
        assert len(it.machine.times("timer")) == 1


async def test_refused_consumer_leaves_the_subscription_as_it_was() -> None:
    async with opened_shell() as it:
        it.attach().close_nowait()
        kept = it.machine
        kept.due = now_s() + 10
        it.attach().close_nowait()
        it.refuses = ConsumerRefused(NotAllowed("c", "it brings no ranges"))
        with pytest.raises(ConsumerRefused):
            it.attach(kind=SHARED)
        assert len(it.made) == 2
        assert it.subscription.consumers == {}
        assert it.subscription.type is None
        it.refuses = None
        it.attach()
        assert it.machine.joined == []
        assert len(kept.joined) == 3, "the dispatcher and its redelivery counts were dropped"
        await asyncio.sleep(60)
        assert len(kept.times("timer")) == 1


async def test_refusal_without_incumbents_raises_its_error() -> None:
    async with opened_shell() as it:
        refused = ConsumerRefused(NotAllowed("c", "it brings no ranges"))
        with pytest.raises(NotAllowed, match="it brings no ranges"):
            await it.subscription.evict_dead(refused)


async def test_only_incumbents_that_do_not_answer_are_evicted() -> None:
    async with opened_shell() as it:
        sessions = [FakeConsumerSession(alive=alive) for alive in (False, True, False)]
        handles = [it.attach(session) for session in sessions]
        one, two, three = it.machine.joined
        busy = ConsumerBusy("s", "c has the range")
        await it.subscription.evict_dead(ConsumerRefused(busy, [one]))
        with pytest.raises(ConsumerBusy, match="c has the range"):
            await it.subscription.evict_dead(ConsumerRefused(busy, [one, two, three]))
        assert [handle.attached for handle in handles] == [False, True, True]
        assert [session.reason for session in sessions] == [CloseReason.REPLACED, None, None]


async def test_dispatcher_knows_the_attributes_of_a_consumer() -> None:
    async with opened_shell() as it:
        policy = KeySharedPolicy(KeySharedMode.STICKY, (HashRange(0, 100),))
        request = replace(
            REQUEST, consumer_name="x", priority=3, metadata={"k": "v"}, key_shared=policy
        )
        it.subscription.attach(request, FakeConsumerSession(), connected_since="")
        (consumer,) = it.machine.joined
        assert (consumer.name, consumer.priority) == ("x", 3)
        assert (consumer.properties, consumer.key_shared) == ({"k": "v"}, policy)
        assert it.machine.environment.subscription == "s"


async def test_join_numbers_ascend_and_are_not_given_twice() -> None:
    async with opened_shell() as it:
        first, second = it.attach(), it.attach()
        second.close_nowait()
        it.machine.refuses = ConsumerRefused(NotAllowed("c", "no"))
        with pytest.raises(ConsumerRefused):
            it.attach()
        it.machine.refuses = None
        third = it.attach()
        assert [handle.machine.join_number for handle in (first, second, third)] == [0, 1, 2]


async def test_second_exclusive_consumer_joins_when_the_first_does_not_answer() -> None:
    async with opened_topic(ClusterState()) as it:
        await it.publish("a")
        _, dead = await it.subscribe(session=FakeConsumerSession(alive=False))
        _, session = await it.subscribe()
        assert dead.reason is CloseReason.REPLACED
        assert session.active == [True]
        await wait_until(lambda: session.texts == ["a"])
        with pytest.raises(ConsumerBusy, match="its only consumer is connected"):
            await it.subscribe()
        await settle()
        assert session.reason is None


async def test_a_seek_closes_only_the_active_consumer_of_a_single_active_type() -> None:
    async with opened_topic(ClusterState()) as rig:
        _, active = await rig.subscribe(kind=FAILOVER)
        (two, next_active), (three, standby), (four, gone) = [
            await rig.subscribe(kind=FAILOVER, permits=5) for _ in range(3)
        ]
        subscription = rig.topic.subscriptions["s"]
        former = subscription._begin_seek()
        await subscription._disconnect_holders()
        two.flow(7)  # kept: the client does not grant these permits again
        four.close_nowait()
        subscription._end_seek(former)
        assert active.reason is CloseReason.SEEK
        assert subscription.dispatcher is not former
        assert list(subscription.consumers) == [two.machine, three.machine]
        assert two.machine.permits == 12
        assert next_active.active == [False, True]
        assert standby.active == [False]  # one of thousands: not told again
        assert gone.active == [False]
        two.close_nowait()
        assert standby.active == [False, True]
