"""Delayed delivery by the Shared dispatcher."""

from __future__ import annotations

import random

import pytest
from fakes.dispatch_rig import DispatcherRig

from magnetar.broker.dispatch.delayed import CLOCK_LOOK_S, DelayPolicy, Delays
from magnetar.broker.dispatch.delayed_index import DelayedIndex
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import Position

LARGE = Limits(unacked_per_consumer=1_000, unacked_per_subscription=10_000, read_entries=100)


def world(
    *,
    strict: bool = False,
    enabled: bool = True,
    limits: Limits = LARGE,
    tick_ms: int = 1_000,
    delayed_max: int = 1_000,
    fixed_look_ahead: int = 0,
    make: type[Shared | KeyShared] = Shared,
) -> DispatcherRig:
    delay = DelayPolicy(
        enabled=enabled, strict=strict, tick_ms=tick_ms, fixed_look_ahead=fixed_look_ahead
    )
    return DispatcherRig(
        make,
        shared=True,
        limits=limits,
        delay=delay,
        delayed_max=delayed_max,
        key_shared=KeySharedSettings() if make is KeyShared else None,
    )


def entries(positions: list[Position]) -> list[int]:
    return [position.entry for position in positions]


@pytest.mark.parametrize("make", [Shared, KeyShared])
def test_entries_are_delivered_in_the_order_of_their_times(make: type[Shared | KeyShared]) -> None:
    it = world(make=make)
    member = it.join()
    it.flow(member, 100)
    for delay_ms in (9_000, 3_000, None, 6_000):
        it.append(delay_ms=delay_ms)
        it.settle()
    assert entries(member.inbox) == [2]
    it.wait(4)
    assert entries(member.inbox) == [2, 1]
    it.wait(10)
    assert entries(member.inbox) == [2, 1, 3, 0]


@pytest.mark.parametrize("strict", [False, True])
def test_strict_entry_is_never_early_and_another_is_never_late(strict: bool) -> None:
    it = world(strict=strict)
    member = it.join()
    it.flow(member, 100)
    due: list[int] = []
    for delay_ms in (2_000, 2_345, 5_001, 9_999, 10_000):
        it.append(delay_ms=delay_ms)
        due.append(it.log[-1].view.deliver_at_ms or 0)
        it.settle()
    for number, due_ms in enumerate(due):
        while len(member.inbox) <= number:
            at = it.machine.next_timer()
            assert at is not None
            it.wait(at - it.now + 0.000_1)
        late_ms = it.wall_ms(it.now) - due_ms
        assert (0 <= late_ms <= 1_001) if strict else (-1_001 <= late_ms <= 0)


def test_past_and_impossible_times_are_due_at_once() -> None:
    it = world(strict=True)
    member = it.join()
    it.flow(member, 100)
    for delay_ms in (-10_000, -(1 << 62), 0):
        it.append(delay_ms=delay_ms)
        it.settle()
    assert len(member.inbox) == 3


def test_time_in_the_far_future_is_explained() -> None:
    it = world()
    it.append(delay_ms=(1 << 62))
    member = it.join()
    it.flow(member, 100)
    it.settle()
    [reason] = [it for it in it.machine.explain(it.now) if it.why is Why.DELAYED]
    assert "1 entries are delayed; the next is due at 9999-12-31T23:59:59Z" in reason.detail
    assert it.machine.next_timer() == pytest.approx(it.now + CLOCK_LOOK_S, abs=1)


def test_entries_are_delivered_at_once_while_delays_are_disabled() -> None:
    it = world(enabled=False)
    it.append(delay_ms=60_000)
    member = it.join()
    it.flow(member, 100)
    it.settle()
    assert len(member.inbox) == 1
    it.delay.enabled = True
    it.append(delay_ms=60_000)
    it.settle()
    assert len(member.inbox) == 1
    it.delay.enabled = False  # the policy changes: all delayed entries are due
    it.flow(member, 1)
    it.settle()
    assert len(member.inbox) == 2


def test_acknowledged_entries_leave_the_index() -> None:
    it = world()
    member = it.join()
    it.flow(member, 100)
    for _ in range(10):
        it.append(delay_ms=60_000)
        it.settle()
    it.ack(member, Position(0, 7))
    assert len(it.delays.index) == 9
    it.skip_through(Position(0, 5))
    assert {position.entry for position, _ in it.delays.index} == {6, 8, 9}
    it.wait(100)
    assert entries(member.inbox) == [6, 8, 9]
    assert it.machine.next_timer() is None


def test_index_stays_when_the_last_consumer_leaves() -> None:
    it = world()
    member = it.join()
    it.flow(member, 100)
    it.append(delay_ms=60_000)
    it.append()
    it.settle()
    it.leave(member)
    assert it.machine.next_timer() is None, "no consumer waits"
    it.wait(100)
    second = it.join()
    it.flow(second, 100)
    it.settle()
    assert entries(second.inbox) == [1, 0]  # redeliveries first
    assert second.counts == [1, 0]


def test_new_dispatcher_skips_delayed_entries_in_its_reads() -> None:
    """A seek or a change of the subscription type makes a new dispatcher."""
    it = world()
    member = it.join()
    it.flow(member, 1_000)
    for number in range(50):
        it.append(delay_ms=None if number in (10, 30) else 60_000)
        it.settle()
    it.leave(member)
    it.owner.clear()
    it.given_back.clear()
    it.acks.redeliveries.drain()
    it.machine = Shared(it.environment)
    again = it.join()
    it.flow(again, 1_000)
    assert it.outstanding is not None
    assert getattr(it.outstanding, "first", None) == Position(0, 10)
    it.settle()
    assert entries(again.inbox) == [10, 30]
    assert len(it.delays.index) == 48


@pytest.mark.parametrize("make", [Shared, KeyShared])
def test_new_dispatcher_delivers_once_an_entry_that_became_due_before_its_read(
    make: type[Shared | KeyShared],
) -> None:
    """After a failover, a seek or a change of the type, the index names entries that the new
    dispatcher has not read yet."""
    it = world(make=make)
    for number in range(10):
        it.append(key=str(number), delay_ms=5_000 if number in (4, 6) else None)
    it.delays.index = DelayedIndex()
    for number in (4, 6):
        it.delays.index.add(it.log[number].position, it.wall_ms(it.now) + 5_000)
    it.sleep(10)
    member, other = it.join(), it.join()
    for _ in range(10):
        it.flow(member, 1)
        it.flow(other, 1)
        it.settle()
    assert sorted(member.inbox + other.inbox) == [entry.position for entry in it.log]
    assert not it.delays.index


def test_full_index_stops_reading_until_entries_leave() -> None:
    it = world(delayed_max=5)
    member = it.join()
    it.flow(member, 100)
    for _ in range(8):
        it.append(delay_ms=20_000)
        it.settle()
    it.append()
    it.settle()
    assert member.inbox == []
    assert len(it.delays.index) == 5
    assert {reason.why for reason in it.machine.explain(it.now)} == {Why.DELAYED}
    it.ack(member, Position(0, 0), Position(0, 1), Position(0, 2), Position(0, 3), Position(0, 4))
    it.settle()
    assert entries(member.inbox) == [8]


@pytest.mark.parametrize("make", [Shared, KeyShared])
def test_fixed_delays_stop_reading_until_the_first_one_is_due(
    make: type[Shared | KeyShared],
) -> None:
    it = world(make=make, fixed_look_ahead=4)
    member = it.join()
    it.flow(member, 100)
    for _ in range(8):
        it.append(delay_ms=20_000)
        it.settle()
    it.append()
    it.settle()
    assert len(it.delays.index) == 4
    assert it.machine.read_position == Position(0, 4)
    [reason] = [each for each in it.machine.explain(it.now) if each.why is Why.DELAYED]
    assert reason.detail.endswith("reads no new entries until then, because all delays are equal")
    it.wait(18)
    assert member.inbox == []
    it.wait(3)
    assert sorted(entries(member.inbox)) == list(range(9))


@pytest.mark.parametrize("second_ms", [None, 15_000], ids=["undelayed", "shorter"])
@pytest.mark.parametrize("make", [Shared, KeyShared])
def test_other_delays_do_not_stop_reading(
    make: type[Shared | KeyShared], second_ms: int | None
) -> None:
    it = world(make=make, fixed_look_ahead=4)
    member = it.join()
    it.flow(member, 100)
    it.append(delay_ms=20_000)
    it.append(delay_ms=second_ms)
    for _ in range(8):
        it.append(delay_ms=20_000)
    it.append()
    it.settle()
    assert 10 in entries(member.inbox)
    # When the index is empty, fixed delays count again.
    it.wait(30)
    assert len(member.inbox) == 11
    for _ in range(8):
        it.append(delay_ms=20_000)
    it.settle()
    assert len(it.delays.index) == 8, "one read took all delayed entries"
    it.append()
    it.settle()
    assert len(member.inbox) == 11


class Stored:
    """Indexes of subscriptions, as a topic has them."""

    def __init__(self) -> None:
        self.made: dict[str, DelayedIndex] = {}

    def find(self, subscription: str) -> DelayedIndex | None:
        return self.made.get(subscription)

    def index_of(self, subscription: str) -> DelayedIndex:
        return self.made.setdefault(subscription, DelayedIndex())


def test_the_index_of_a_former_owner_does_not_count_as_fixed_delays() -> None:
    stored = Stored()
    for number in range(8):
        stored.index_of("s").add(Position(0, number), 50_000)
    policy = DelayPolicy(fixed_look_ahead=4)
    delays = Delays(policy, lambda _: 0, indexes=stored, subscription="s")
    assert len(delays.index) == 8
    assert not delays.pauses(0.0)


def test_stored_index_is_made_for_the_first_delayed_entry() -> None:
    stored = Stored()
    it = world()
    it.delays = delays = Delays(it.delay, it.wall_ms, indexes=stored, subscription="s")
    it.append()
    assert delays.hold_back(it.log, it.acks, it.now) == it.log
    assert stored.made == {}, "no entry is delayed"
    it.append(delay_ms=5_000)
    assert delays.hold_back(it.log, it.acks, it.now) == it.log[:1]
    assert stored.made["s"] is delays.index
    assert [position for position, _ in delays.index] == [it.log[1].position]
    other = Delays(it.delay, it.wall_ms)
    assert not other.index, "the subscriptions do not share entries"


def test_due_entries_are_delivered_only_within_permits() -> None:
    it = world()
    member = it.join()
    it.flow(member, 3)
    for _ in range(10):
        it.append(delay_ms=5_000)
        it.settle()
    it.wait(10)
    assert entries(member.inbox) == [0, 1, 2]
    it.flow(member, 3)
    it.settle()
    assert entries(member.inbox) == [0, 1, 2, 3, 4, 5]


def test_due_entries_wait_at_the_limit_of_unacked_messages() -> None:
    limits = Limits(unacked_per_consumer=100, unacked_per_subscription=4, read_entries=4)
    it = world(limits=limits)
    member = it.join()
    it.flow(member, 100)
    for _ in range(10):
        it.append(delay_ms=5_000)
        it.settle()
    it.wait(10)
    assert len(member.inbox) == 4
    assert Why.UNACKED_BY_SUBSCRIPTION in {reason.why for reason in it.machine.explain(it.now)}
    it.ack(member, *member.inbox)
    it.settle()
    assert len(member.inbox) == 8


@pytest.mark.parametrize("make", [Shared, KeyShared])
def test_failed_read_of_due_entries_is_repeated(make: type[Shared | KeyShared]) -> None:
    it = world(make=make)
    member = it.join()
    it.flow(member, 100)
    it.append(delay_ms=2_000)
    it.settle()
    due = it.machine.next_timer()
    assert due is not None
    it.now = due
    it.carry_out(it.machine.on_timer(due))
    it.answer_read(fail=True)
    it.settle()
    assert entries(member.inbox) == [0]


def test_timer_delivers_due_entries_after_a_jump_of_the_wall_clock() -> None:
    jumped_ms = 0
    delays = Delays(DelayPolicy(), lambda now: int(now * 1_000) + jumped_ms)
    delays.index = DelayedIndex()
    delays.index.add(Position(1, 1), 1_000_000)
    assert delays.wake_s(0.0) == CLOCK_LOOK_S
    jumped_ms = 900_000
    assert delays.take_due(10, CLOCK_LOOK_S, read_position=Position(2, 0)) == []
    assert delays.wake_s(CLOCK_LOOK_S) == pytest.approx(99)
    assert delays.take_due(10, 99.0, read_position=Position(2, 0)) == [Position(1, 1)]


def test_clock_that_stands_still_causes_no_busy_timer() -> None:
    delays = Delays(DelayPolicy(strict=True), lambda now: 999_999)
    delays.index = DelayedIndex()
    delays.index.add(Position(1, 1), 1_000_000)
    assert delays.wake_s(5.0) == pytest.approx(5.001)
    assert delays.wake_s(5.001) == pytest.approx(5.002)


KINDS = ["append", "flow", "ack", "wait"] * 2 + (
    ["soon", "later", "later", "roll", "join", "leave", "fail", "short"]
    + ["other", "redeliver", "skip"]
)


def step(it: DispatcherRig, kind: str, a: int, b: int) -> None:
    member = it.members[a % len(it.members)] if it.members else None
    match kind:
        case "append":
            it.append(key=str(b % 4))
        case "soon":
            it.append(delay_ms=100 * b, key=str(a % 4))
        case "later":
            it.append(delay_ms=1_000 * a, new_ledger=b == 0, key=str(b % 4))
        case "roll":
            it.append(new_ledger=True)
        case "join" if len(it.members) < 4:
            it.join()
        case "fail" if it.outstanding:
            it.answer_read(fail=True)
        case "short" if it.outstanding:
            it.answer_read(entries_max=1 + b % 3)
        case "wait":
            it.settle()
            it.wait(b * b / 10)
        case "skip" if it.log and b < 3:
            it.skip_through(it.log[(a * 10 + b) % len(it.log)].position)
    if member is None:
        return
    mine = sorted(position for position, owner in it.owner.items() if owner is member)
    match kind:
        case "leave" if b < 5:
            it.leave(member)
        case "flow":
            it.flow(member, 1 + b)
        case "ack" if mine:
            it.ack(member, *mine[: 1 + b])
        case "other" if it.log:
            it.ack(member, it.log[(a * 10 + b) % len(it.log)].position)
        case "redeliver":
            it.redeliver(member)


@pytest.mark.parametrize("make", [Shared, KeyShared])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.night) for block in range(1, 4))]
)
def test_random_histories_deliver_every_entry_in_time(
    block: int, strict: bool, make: type[Shared | KeyShared]
) -> None:
    """The rig checks after every event that nothing is early, late, lost or delivered twice."""
    for seed in range(block * 10, block * 10 + 10):
        chance = random.Random(seed)
        it = world(
            strict=strict,
            delayed_max=12 if seed % 3 == 0 else 1_000,
            fixed_look_ahead=2 if seed % 4 == 0 else 0,
            make=make,
        )
        for _ in range(100):
            step(it, chance.choice(KINDS), chance.randrange(10), chance.randrange(10))
        finish(it)


def finish(it: DispatcherRig) -> None:
    if not it.members:
        it.join()
    for _ in range(200):
        it.settle()
        it.wait(1)
        if all(entry.position in it.acks.acked for entry in it.log):
            return
        for member in list(it.members):
            it.flow(member, 10)
            it.settle()
            it.ack(member, *[p for p, owner in it.owner.items() if owner is member])
    raise AssertionError("an entry was never delivered")
