from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fakes.dispatch_rig import DispatcherRig, Member

from magnetar.broker.dispatch.active import Choice, FailoverRules
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.failover import Failover
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from magnetar.broker.dispatch.dispatcher import Action
    from magnetar.broker.dispatch.permits import Consumer


def world(
    entries: int = 0,
    *,
    partition: int | None = None,
    delay_s: float = 1.0,
    choice: Choice = Choice.SUBSCRIBE_ORDER,
    make: type[Failover] = Failover,
) -> DispatcherRig:
    it = DispatcherRig(
        make,
        shared=False,
        limits=Limits(read_entries=5),
        partition=partition,
        failover=FailoverRules(choice, delay_s),
    )
    for _ in range(entries):
        it.append()
    return it


def whys(it: DispatcherRig) -> set[Why]:
    return {reason.why for reason in it.machine.explain(it.now)}


def entries(member: Member) -> list[int]:
    return [position.entry for position in member.inbox]


def take(it: DispatcherRig, member: Member, permits: int = 100) -> None:
    it.flow(member, permits)
    it.settle()


def active(it: DispatcherRig) -> list[str]:
    return [member.name for member in it.members if member.active[-1]]


def test_standby_gets_nothing_until_the_active_consumer_leaves() -> None:
    it = world(4)
    first, second = it.join(), it.join()
    take(it, second)
    take(it, first)
    assert (entries(first), entries(second)) == ([0, 1, 2, 3], [])
    assert (first.active, second.active) == ([True], [False])
    it.ack(first, Position(0, 0), Position(0, 2))
    it.leave(first)
    it.settle()
    assert entries(second) == [1, 3]
    assert second.active == [False, True]


def test_next_active_consumer_starts_where_the_former_one_acknowledged() -> None:
    """The two examples of Pulsar's documentation for Failover."""
    it = world(8)
    first, second = it.join(), it.join()
    it.leave(first)  # without reading anything
    take(it, second)
    assert entries(second) == list(range(8))
    third = it.join()
    it.ack_cumulative(Position(0, 3))
    it.leave(second)
    take(it, third)
    assert entries(third) == [4, 5, 6, 7]


def test_without_partitions_the_first_subscriber_stays_active() -> None:
    it = world()
    one, two = it.join(name="b"), it.join(name="a")
    assert active(it) == ["b"]
    it.leave(one)
    assert active(it) == ["a"]
    it.join(name="b")
    assert active(it) == ["a"]  # a consumer that reconnects joins last
    assert two.active == [False, True]


def test_better_priority_takes_over_and_keeps_its_place_over_reconnects() -> None:
    it = world()
    it.join(name="low", priority=5)
    high = it.join(name="high", priority=1)
    assert active(it) == ["high"]
    it.leave(high)
    assert active(it) == ["low"]
    it.join(name="high", priority=1)
    assert active(it) == ["high"]


def test_partition_chooses_by_its_index() -> None:
    it = world(partition=1)
    for name in "ABCD":
        it.join(name=name)
    assert active(it) == ["B"]
    for member in list(it.members)[:2]:
        it.leave(member)
    assert active(it) == ["D"]


def test_active_consumer_that_has_acknowledged_everything_is_replaced_at_once() -> None:
    it = world(3)
    low = it.join(priority=1)
    take(it, low)
    it.ack_cumulative(Position(0, 2))
    high = it.join()
    assert (low.active, high.active) == ([True, False], [False, True])
    it.append()
    take(it, high)
    assert entries(high) == [3]


def test_active_consumer_drains_and_nothing_is_redelivered() -> None:
    it = world(6)
    low = it.join(priority=1)
    take(it, low, 4)
    high = it.join()
    take(it, high)
    it.flow(low, 10)
    it.settle()
    assert (entries(low), entries(high)) == ([0, 1, 2, 3], [])
    assert Why.DRAINING in whys(it)
    it.ack(low, Position(0, 0), Position(0, 1), Position(0, 3))
    assert low.active == [True]
    it.ack(low, Position(0, 2))
    it.settle()
    assert (low.active, high.active) == ([True, False], [False, True])
    assert entries(high) == [4, 5]


def test_switch_after_the_delay_rewinds_and_late_acks_count() -> None:
    it = world(4)
    low = it.join(priority=1)
    take(it, low, 4)
    high = it.join()
    it.flow(high, 2)
    it.sleep(0.9)
    it.ack(low, Position(0, 0))
    assert high.inbox == []
    it.sleep(0.2)
    it.settle()
    assert entries(high) == [1, 2]
    it.ack(low, Position(0, 1), Position(0, 3))  # late acknowledgements
    take(it, high)
    assert entries(high) == [1, 2]
    it.redeliver(high)
    it.settle()
    assert entries(high) == [1, 2, 2]


def test_delay_of_zero_switches_at_once() -> None:
    it = world(2, delay_s=0)
    low = it.join(priority=1)
    take(it, low)
    high = it.join()
    take(it, high)
    assert entries(high) == [0, 1]


def test_drain_ends_when_the_draining_consumer_leaves_or_returns_its_entries() -> None:
    for leaves in (True, False):
        it = world(2)
        low = it.join(priority=1)
        take(it, low)
        high = it.join()
        it.flow(high, 10)
        if leaves:
            it.leave(low)
        else:
            it.redeliver(low)
        it.settle()
        assert entries(high) == [0, 1]
        assert it.machine.next_timer() is None


def test_leaving_consumer_is_replaced_after_it_acknowledged_its_entries() -> None:
    it = world()
    for _ in range(4):
        it.append(2, batch=True)
    first, second = it.join(), it.join()
    it.flow(first, 2)
    it.answer_read()  # one entry is delivered, the others are held
    it.announce_leave(first)
    it.flow(first, 10)
    take(it, second)
    assert (len(first.inbox), second.inbox) == (1, [])
    assert {Why.DRAINING, Why.LEAVING} <= whys(it)
    it.sleep(30)
    it.ack(first, Position(0, 0))
    it.settle()
    assert entries(second) == [1, 2, 3]
    it.leave(first)
    it.announce_leave(second)  # the last consumer: none can take over
    it.append()
    assert second.active == [False, True]
    assert entries(second) == [1, 2, 3]


def test_drain_is_cancelled_when_the_better_consumer_leaves() -> None:
    it = world(6)
    low = it.join(priority=1)
    take(it, low, 3)
    high = it.join()
    it.flow(low, 10)
    it.leave(high)
    it.settle()
    assert entries(low) == [0, 1, 2, 3, 4, 5]
    assert low.active == [True]
    assert it.machine.next_timer() is None


def test_drain_with_held_entries_and_a_read_under_way_loses_none() -> None:
    it = world()
    for _ in range(9):
        it.append(2, batch=True)
    low = it.join(priority=1)
    it.flow(low, 4)
    it.answer_read()  # two entries are delivered, the others are held
    it.flow(low, 6)
    high = it.join()
    if it.outstanding:
        it.answer_read()  # the read began before the drain
    for position in list(low.inbox):
        it.ack(low, position)
    take(it, high)
    assert sorted(low.inbox + high.inbox) == [entry.position for entry in it.log]


def test_redelivery_request_of_a_standby_redelivers_nothing() -> None:
    it = world(3)
    first, second = it.join(), it.join()
    take(it, first)
    it.redeliver(second)
    it.settle()
    assert entries(first) == [0, 1, 2]
    it.redeliver(first, [Position(0, 2)])
    it.settle()
    assert entries(first) == [0, 1, 2, 0, 1, 2]


def test_reasons_name_drain_standby_and_their_numbers() -> None:
    it = world(3)
    low = it.join(priority=1, name="low")
    take(it, low, 3)
    it.join(priority=2, name="other")
    it.flow(it.members[1], 5)
    texts = [str(reason) for reason in it.machine.explain(it.now)]
    assert "standby: 'low' is active; consumers on standby: 1" in texts
    it.join(name="high")
    it.sleep(0.4)
    (drain, *_) = [str(reason) for reason in it.machine.explain(it.now)]
    assert drain == (
        "draining: consumer 'high' becomes active when 'low' has acknowledged the entries before "
        "0:3, or in 0.6 s"
    )


KINDS = ["append", "flow", "read", "ack"] * 2 + (
    ["batch", "batch", "roll", "join", "join", "leave", "short", "fail", "late", "sleep"]
    + ["cumulative", "index", "redeliver", "full", "room", "seek", "announce"]
)


class Twin:
    """A slow, simple model of the active consumer and the position of its next delivery.

    The model checks that exactly one consumer got the notice that it is active, and that no other
    consumer gets entries. The active consumer must get the entries in order, from the first
    unacknowledged entry."""

    def __init__(self, it: DispatcherRig, partition: int | None) -> None:
        self.it = it
        self.partition = partition
        self.active: Member | None = None
        self.sizes: dict[Member, int] = {}  # checked deliveries
        self.next = Position(-1, -1)  # entries before it are delivered or acknowledged
        self.switches = self.drains = 0
        self.draining: Member | None = None  # since the last check

    def wanted(self) -> Member:
        """The consumer that should be active."""
        members = [it for it in self.it.members if not it.machine.leaving] or self.it.members
        best = min(member.machine.priority for member in members)
        group = [member for member in members if member.machine.priority == best]
        if self.partition is None:
            return group[0]
        group.sort(key=lambda it: (it.name, it.machine.join_number))
        return group[self.partition % len(group)]

    def check(self, *, rewound: bool = False) -> None:
        it = self.it
        told = [member for member in it.members if member.active[-1]]
        assert len(told) == min(1, len(it.members)), "not one active consumer"
        if [self.active] != told or rewound:
            self.switches += 1
            self.next = Position(-1, -1)
        self.active = told[0] if told else None
        drains = self.active is not None and self.active is not self.wanted()
        drained, self.draining = self.draining, self.active if drains else None
        if drained is not self.draining:
            drained = None  # the drain ended during the event
        for member in it.members:
            fresh = member.inbox[self.sizes.get(member, 0) :]
            assert not fresh or member is self.active, "a standby got entries"
            assert not fresh or member is not drained, "delivered during a drain"
            for position in fresh:
                assert position >= self.next, "not in order"
                between = [e.position for e in it.log if self.next <= e.position < position]
                assert all(it.acks.is_acked(skipped) for skipped in between), "a gap"
                self.next = Position(position.ledger, position.entry + 1)
            self.sizes[member] = len(member.inbox)
        if self.active is not None:
            assert drains == (it.machine.next_timer() is not None), "the wrong one is active"
            self.drains += drains


def step(it: DispatcherRig, twin: Twin, kind: str, a: int, b: int) -> None:
    member = it.members[a % len(it.members)] if it.members else None
    rewound = False
    match kind:
        case "append":
            it.append()
        case "batch":
            it.append(1 + b, batch=True)
        case "roll":
            it.append(new_ledger=True)
        case "join" if len(it.members) < 4:
            it.join(priority=b % 3, name=f"{a % 3}")
        case "read" if it.outstanding:
            it.answer_read()
        case "short" if it.outstanding:
            it.answer_read(entries_max=1 + b % 3)
        case "fail" if it.outstanding:
            it.answer_read(fail=True)
        case "sleep":
            it.sleep(b / 5)
    if member is not None:
        match kind:
            case "announce" if b < 6 and not member.machine.leaving:
                it.announce_leave(member)
            case "leave" if b < 5:
                it.leave(member)
            case "flow":
                it.flow(member, 1 + b)
            case "full" | "room":
                it.set_writable(member, kind == "room")
            case "ack" if member.inbox:  # also late acknowledgements
                it.ack(member, *member.inbox[-1 - b :])
            case "late" if it.log:
                it.ack(member, it.log[(a * 10 + b) % len(it.log)].position)
            case "cumulative" if member.inbox:
                it.ack_cumulative(member.inbox[b % len(member.inbox)])
            case "index" if it.log:
                entry = it.log[(a * 7 + b) % len(it.log)]
                if entry.view.is_batch:
                    it.ack_index(member, entry, b % entry.view.num_messages)
            case "redeliver":
                it.redeliver(member)
                rewound = member is twin.active
            case "seek" if it.log and b < 3:
                it.seek(it.log[(a * 7 + b) % len(it.log)].position)
                rewound = True
    twin.check(rewound=rewound)


def history(seed: int, make: type[Failover] = Failover) -> Twin:
    chance = random.Random(seed)
    partition = chance.choice([None, 0, 1, 5])
    it = world(partition=partition, make=make)
    twin = Twin(it, partition)
    for _ in range(120):
        step(it, twin, chance.choice(KINDS), chance.randrange(10), chance.randrange(10))
    finish(it, twin)
    return twin


def finish(it: DispatcherRig, twin: Twin) -> None:
    """The active consumer takes everything."""
    for member in [member for member in it.members if member.machine.leaving]:
        it.leave(member)
    if not it.members:
        it.join()
    it.sleep(100)
    twin.check()
    active = twin.wanted()
    assert active is twin.active
    it.set_writable(active, True)
    it.flow(active, 10_000)
    it.settle()
    twin.check()
    left = [entry.position for entry in it.log if entry.position >= twin.next]
    assert all(it.acks.is_acked(position) for position in left), "an entry was not delivered"
    assert Why.NOTHING_TO_READ in whys(it)


@pytest.mark.parametrize("block", range(10))
def test_random_histories_have_one_active_consumer_and_lose_no_entry(block: int) -> None:
    twins = [history(seed) for seed in range(block * 40, block * 40 + 40)]
    assert sum(twin.switches for twin in twins) > 200
    assert sum(twin.drains for twin in twins) > 30


class SwitchesWithoutRewind(Failover):
    def _switch(self, now: float) -> list[Action]:
        position = self.read_position
        self._rewind = lambda: None  # type: ignore[method-assign]
        try:
            return super()._switch(now)
        finally:
            del self._rewind
            assert self.read_position >= position


class DeliversDuringTheDrain(Failover):
    def _receiver(self) -> Consumer | None:
        return self._active


class ForgetsTheDeadline(Failover):
    def next_timer(self) -> float | None:
        return None


class TellsOnlyTheNewOne(Failover):
    def _switch(self, now: float) -> list[Action]:
        return super()._switch(now)[1:]


class DropsHeldEntries(Failover):
    def _stop(self) -> None:
        self._rewinds += 1
        self._held = []


class ForgetsDrainsThatAreCalledOff(Failover):
    def _choose(self, now: float) -> list[Action]:
        drained_at, actions = self._drained_at, super()._choose(now)
        if self._active is not None and drained_at is not None and not actions:
            self._drained_at = drained_at
        return actions


@pytest.mark.parametrize(
    "broken",
    [
        SwitchesWithoutRewind,
        DeliversDuringTheDrain,
        ForgetsTheDeadline,
        TellsOnlyTheNewOne,
        DropsHeldEntries,
        ForgetsDrainsThatAreCalledOff,
    ],
)
def test_planted_bugs_are_caught(broken: type[Failover]) -> None:
    with pytest.raises(AssertionError):
        list(map(partial(history, make=broken), range(200)))
