from __future__ import annotations

import random

import pytest
from fakes.dispatch_rig import DispatcherRig, Member

from magnetar.broker.dispatch.dispatcher import ConsumerRefused, Read
from magnetar.broker.dispatch.exclusive import Exclusive
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.errors import ConsumerBusy
from magnetar.broker.log.position import Position


def world(entries: int = 0) -> DispatcherRig:
    it = DispatcherRig(Exclusive, shared=False, limits=Limits(read_entries=5))
    for _ in range(entries):
        it.append()
    return it


def whys(it: DispatcherRig) -> set[Why]:
    return {reason.why for reason in it.machine.explain(it.now)}


def test_entries_are_delivered_in_order_within_permits() -> None:
    it = world(12)
    assert whys(it) == {Why.NO_CONSUMERS}
    member = it.join()
    assert whys(it) == {Why.NO_PERMITS}
    it.flow(member, 7)
    assert whys(it) == {Why.READING}
    it.settle()
    assert [position.entry for position in member.inbox] == list(range(7))
    it.flow(member, 100)
    it.settle()
    assert [position.entry for position in member.inbox] == list(range(12))
    assert whys(it) == {Why.NOTHING_TO_READ}


def test_last_batch_may_exceed_permits() -> None:
    it = world()
    for _ in range(3):
        it.append(10, batch=True)
    member = it.join()
    it.flow(member, 11)
    it.settle()
    assert len(member.inbox) == 2
    assert member.machine.permits == -9
    it.flow(member, 10)
    it.settle()
    assert len(member.inbox) == 3


def test_read_size_follows_permits() -> None:
    it = world()
    for _ in range(200):
        it.append(10, batch=True)
    member = it.join()
    for _ in range(30):  # the dispatcher learns the size of batches
        it.flow(member, 10)
        it.settle()
    it.flow(member, 30)
    assert isinstance(it.outstanding, Read)
    assert it.outstanding.entries_max <= 4


def test_redelivery_rewinds_to_mark_delete() -> None:
    it = world(6)
    member = it.join()
    it.flow(member, 100)
    it.settle()
    it.ack(member, Position(0, 0), Position(0, 1), Position(0, 3))
    it.redeliver(member, [Position(0, 5)])
    it.settle()
    assert [position.entry for position in member.inbox[6:]] == [2, 4, 5]


def test_read_from_before_a_rewind_is_dropped() -> None:
    it = world(8)
    member = it.join()
    it.flow(member, 100)
    it.answer_read()
    assert isinstance(it.outstanding, Read)  # the read of entries 5 to 7
    it.redeliver(member)
    it.settle()
    entries = [position.entry for position in member.inbox]
    assert entries == [0, 1, 2, 3, 4, *range(8)]


def test_next_consumer_starts_after_mark_delete() -> None:
    it = world(6)
    first = it.join()
    it.flow(first, 3)
    it.settle()
    it.ack(first, Position(0, 0))
    it.leave(first)
    second = it.join()
    it.flow(second, 100)
    it.settle()
    assert [position.entry for position in second.inbox] == [1, 2, 3, 4, 5]


def test_cumulative_ack_beyond_read_position_skips_entries() -> None:
    it = world(10)
    member = it.join()
    it.flow(member, 2)
    it.settle()
    it.ack_cumulative(Position(0, 6))
    it.flow(member, 100)
    it.settle()
    assert [position.entry for position in member.inbox] == [0, 1, 7, 8, 9]


def test_partly_acked_batch_debits_only_unacked_messages() -> None:
    it = world()
    it.append(3, batch=True)
    member = it.join()
    it.ack_index(member, it.log[0], 1)
    it.flow(member, 2)
    it.settle()
    assert member.inbox == [Position(0, 0)]
    assert member.machine.permits == 0


def test_second_consumer_is_refused_and_the_first_one_named() -> None:
    it = world(3)
    first = it.join()
    it.flow(first, 1)
    it.settle()
    with pytest.raises(ConsumerRefused) as caught:
        it.join()
    assert isinstance(caught.value.error, ConsumerBusy)
    assert caught.value.incumbents == (first.machine,)
    it.flow(first, 10)
    it.settle()
    assert [position.entry for position in first.inbox] == [0, 1, 2]


def test_each_consumer_is_told_once_that_it_is_active() -> None:
    it = world(3)
    first = it.join()
    it.flow(first, 10)
    it.settle()
    it.leave(first)
    second = it.join()
    it.flow(second, 10)
    it.redeliver(second)
    it.settle()
    assert first.active == second.active == [True]


KINDS = ["append", "flow", "read"] * 2 + (
    ["batch", "batch", "roll", "join", "leave", "short", "fail"]
    + ["ack", "cumulative", "index", "redeliver", "full", "room"]
)


class Twin:
    """A simple model. Since the last rewind, deliveries ascend and every skipped entry is acked."""

    def __init__(self, it: DispatcherRig) -> None:
        self.it = it
        self.seen = 0  # checked deliveries of the inbox
        self.next = Position(-1, -1)  # every earlier entry was delivered or is acked

    def rewind(self, member: Member | None) -> None:
        self.seen = len(member.inbox) if member else 0
        self.next = Position(-1, -1)

    def check(self, member: Member) -> None:
        for position in member.inbox[self.seen :]:
            assert position >= self.next
            between = [e.position for e in self.it.log if self.next <= e.position < position]
            assert all(self.it.acks.is_acked(skipped) for skipped in between), "a gap"
            self.next = Position(position.ledger, position.entry + 1)
        self.seen = len(member.inbox)


def step(it: DispatcherRig, twin: Twin, kind: str, a: int, b: int) -> None:
    member = it.members[0] if it.members else None
    match kind:
        case "append":
            it.append()
        case "batch":
            it.append(1 + b, batch=True)
        case "roll":
            it.append(new_ledger=True)
        case "join" if member is None:
            twin.rewind(it.join())
        case "read" if it.outstanding:
            it.answer_read()
        case "short" if it.outstanding:
            it.answer_read(entries_max=1 + b % 3)
        case "fail" if it.outstanding:
            it.answer_read(fail=True)
    if member is None:
        return
    match kind:
        case "leave" if b < 5:
            it.leave(member)
            return
        case "flow":
            it.flow(member, 1 + b)
        case "full" | "room":
            it.set_writable(member, kind == "room")
        case "ack" if it.log:
            it.ack(member, it.log[(a * 10 + b) % len(it.log)].position)
        case "cumulative" if member.inbox:
            it.ack_cumulative(member.inbox[b % len(member.inbox)])
        case "index" if it.log:
            entry = it.log[(a * 7 + b) % len(it.log)]
            if entry.view.is_batch:
                it.ack_index(member, entry, b % entry.view.num_messages)
        case "redeliver":
            twin.check(member)
            twin.rewind(member)
            it.redeliver(member)
    twin.check(member)


@pytest.mark.parametrize("block", range(10))
def test_random_histories_deliver_in_order_without_gaps(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        chance = random.Random(seed)
        it = world()
        twin = Twin(it)
        for _ in range(100):
            step(it, twin, chance.choice(KINDS), chance.randrange(10), chance.randrange(10))
        if not it.members:
            twin.rewind(it.join())
        (member,) = it.members
        it.set_writable(member, True)
        it.flow(member, 10_000)
        it.settle()
        twin.check(member)
        left = [entry.position for entry in it.log if entry.position >= twin.next]
        assert all(it.acks.is_acked(position) for position in left), (
            "an unacked entry was not delivered"
        )
        assert whys(it) == {Why.NOTHING_TO_READ}
