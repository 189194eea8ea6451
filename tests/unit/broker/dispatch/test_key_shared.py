from __future__ import annotations

import pytest
from fakes.dispatch_rig import DispatcherRig, Member

from magnetar.broker.dispatch.dispatcher import ConsumerRefused, Read
from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.key_shared import PART_PAUSE_S, KeyShared
from magnetar.broker.dispatch.key_shared_policy import (
    HashRange,
    KeySharedMode,
    KeySharedPolicy,
)
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.dispatch.ring import Ring
from magnetar.broker.dispatch.sticky_hash import hash_of
from magnetar.broker.errors import ConsumerAssignFailed, ConsumerBusy
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import Position
from magnetar.protos.entry import Chunk

RELAXED = KeySharedPolicy(allow_out_of_order=True)
LARGE = Limits(unacked_per_consumer=1_000, unacked_per_subscription=10_000, read_entries=100)


class World(DispatcherRig):
    """A rig of a Key_Shared dispatcher."""

    machine: KeyShared

    def keys(self, member: Member) -> list[str]:
        """The keys of the deliveries, in order."""
        return [self.log[self.at(position)].view.partition_key or "" for position in member.inbox]

    def at(self, position: Position) -> int:
        return next(n for n, entry in enumerate(self.log) if entry.position == position)

    def draining_of(self, member: Member) -> dict[str, object]:
        stats = dict(self.machine.describe_consumers())[member.machine]
        assert stats.pop("keyHashRangeArrays")
        return stats

    def whys(self) -> set[Why]:
        return {reason.why for reason in self.machine.explain(self.now)}

    def key_for(self, member: Member) -> str:
        """Return a key whose entries the consumer gets now."""
        for number in range(10_000):
            slot = self.machine.slot_of_key(f"key-{number}".encode())
            if self.machine.holder(slot)[0] is member.machine:
                return f"key-{number}"
        raise AssertionError("no key")

    def moving_keys(self, source: Member, target_name: str, count: int) -> list[str]:
        """Return keys of `source` that move to a consumer of this name when it joins."""
        ring = Ring()
        for member in self.members:
            ring.add(member.machine)
        slots = {f"key-{n}": ring.slot_of(hash_of(f"key-{n}")) for n in range(500)}
        mine = [key for key, slot in slots.items() if ring.select(slot) is source.machine]
        newcomer = type(source.machine)(target_name, 0, lambda: True, self.limits)
        ring.add(newcomer)
        moving = [key for key in mine if ring.select(slots[key]) is newcomer]
        assert len(moving) >= count
        return moving[:count]

    def handover(
        self, first: KeySharedPolicy | None = None, second: KeySharedPolicy | None = None
    ) -> tuple[Member, Member, str]:
        """Return the consumers `first` and `second`, with these policies, and a key. The first
        consumer has an entry of the key. The second consumer joined later and took over the key."""
        old = self.join(name="first", policy=first)
        self.flow(old, 100)
        [key] = self.moving_keys(old, "second", 1)
        self.append(key=key)
        self.settle()
        new = self.join(name="second", policy=second)
        self.flow(new, 100)
        return old, new, key


def world(limits: Limits | None = LARGE, settings: KeySharedSettings | None = None) -> World:
    return World(KeyShared, shared=True, limits=limits, key_shared=settings or KeySharedSettings())


def test_each_key_goes_to_one_consumer_in_order() -> None:
    it = world()
    members = [it.join(name=f"c{n}") for n in range(3)]
    for member in members:
        it.flow(member, 100)
    for number in range(60):
        it.append(key=f"key-{number % 12}")
        it.settle()
    assert sum(len(member.inbox) for member in members) == 60
    seen = [set(it.keys(member)) for member in members]
    assert sum(map(len, seen)) == 12
    for member in members:
        assert member.inbox == sorted(member.inbox)


def test_key_moves_after_its_pending_entries_are_acknowledged() -> None:
    it = world()
    first = it.join(name="first")
    it.flow(first, 100)
    [key] = it.moving_keys(first, "second", 1)
    it.append(key=key)
    it.append(key=key)
    it.settle()
    second = it.join(name="second")
    it.flow(second, 100)
    it.append(key=key)
    it.settle()
    assert second.inbox == []
    assert Why.DRAINING in it.whys()
    it.ack(first, Position(0, 0))
    assert it.machine.next_timer() is None
    it.ack(first, Position(0, 1))
    it.settle()
    assert second.inbox == [], "unblocked keys wait for the interval"
    assert it.machine.next_timer() == pytest.approx(it.now + 0.010)
    it.fire_timer()
    it.settle()
    assert second.inbox == [Position(0, 2)]


def test_key_moves_when_its_consumer_leaves() -> None:
    it = world()
    first, second, key = it.handover()
    it.append(key=key)
    it.settle()
    assert second.inbox == []
    it.leave(first)
    it.settle()
    assert second.inbox == [Position(0, 0), Position(0, 1)]
    assert second.counts == [1, 0]


def test_other_keys_continue_while_one_drains() -> None:
    it = world()
    first, second, key = it.handover()
    it.append(key=key)
    it.append(key=it.key_for(second) if it.key_for(second) != key else "x")
    it.append(key=it.key_for(first))
    it.settle()
    assert Position(0, 3) in first.inbox
    assert it.machine.waiting >= 1


def test_slot_that_returns_to_its_consumer_stops_draining() -> None:
    it = world()
    first, second, key = it.handover()
    it.append(key=key)
    it.settle()
    it.leave(second)
    it.settle()
    assert first.inbox == [Position(0, 0), Position(0, 1)]
    assert it.draining_of(first)["drainingHashesCount"] == 0


def test_new_entry_waits_behind_a_waiting_entry_of_its_key() -> None:
    it = world()
    first = it.join(name="first")
    it.flow(first, 1)
    for _ in range(3):
        it.append(key="k")
    it.settle()
    second = it.join(name="second")
    it.flow(second, 50)
    it.append(key="k")
    it.settle()
    it.flow(first, 50)
    it.settle()
    assert first.inbox + second.inbox == sorted(first.inbox + second.inbox)


def test_entry_returned_during_the_replay_goes_first() -> None:
    # PIP-379's race: the older entry is returned while the newer one is being read again.
    it = world()
    first = it.join(name="first")
    it.flow(first, 1)
    it.append(key="k")
    it.append(key="k")
    it.settle()
    it.flow(first, 1)
    it.answer_read()  # the second entry waited; now it is delivered
    it.redeliver(first, [Position(0, 1)])
    it.flow(first, 1)
    assert it.outstanding is not None
    it.redeliver(first, [Position(0, 0)])
    it.flow(first, 10)
    it.settle()
    assert first.inbox[-2:] == [Position(0, 0), Position(0, 1)]


def test_dispatcher_reads_past_waiting_entries_up_to_the_limit() -> None:
    settings = KeySharedSettings(look_ahead_per_consumer=5, look_ahead_per_subscription=8)
    it = world(settings=settings)
    slow, quick = it.join(name="slow"), it.join(name="quick")
    it.flow(quick, 1_000)
    for _ in range(20):
        it.append(key=it.key_for(slow))
        it.append(key=it.key_for(quick))
    it.settle()
    assert it.machine.waiting == 8
    assert len(quick.inbox) >= 7
    assert Why.LOOK_AHEAD in it.whys()
    it.flow(slow, 100)
    it.settle()
    assert len(slow.inbox) == len(quick.inbox) == 20


def test_sticky_entries_wait_for_a_consumer_with_their_slot() -> None:
    it = world()
    low = KeySharedPolicy(KeySharedMode.STICKY, (HashRange(0, 32767),))
    high = KeySharedPolicy(KeySharedMode.STICKY, (HashRange(32768, 65535),))
    first = it.join(policy=low)
    it.flow(first, 100)
    for number in range(20):
        it.append(key=f"key-{number}")
    it.settle()
    assert 0 < len(first.inbox) < 20
    assert Why.UNASSIGNED in it.whys()
    second = it.join(policy=high)
    it.flow(second, 100)
    it.settle()
    assert len(first.inbox) + len(second.inbox) == 20
    with pytest.raises(ConsumerRefused) as refused:
        it.join(policy=high)
    assert isinstance(refused.value.error, ConsumerAssignFailed)
    assert refused.value.incumbents == (second.machine,)


def test_other_policy_than_the_connected_consumers_is_refused() -> None:
    it = world()
    first = it.join()
    for policy in (
        KeySharedPolicy(KeySharedMode.STICKY, (HashRange(0, 10),)),
        KeySharedPolicy(ordered_nacks=True),
    ):
        with pytest.raises(ConsumerRefused) as refused:
            it.join(policy=policy)
        assert isinstance(refused.value.error, ConsumerBusy)
    it.leave(first)
    assert it.machine.can_serve(None)
    assert not it.machine.can_serve(KeySharedPolicy(KeySharedMode.STICKY, (HashRange(0, 10),)))


def test_out_of_order_delivery_does_not_drain() -> None:
    it = world()
    _, second, key = it.handover(RELAXED, RELAXED)
    it.append(key=key)
    it.settle()
    assert second.inbox == [Position(0, 1)]


def test_order_is_kept_while_one_consumer_requires_order() -> None:
    it = world()
    first, second, key = it.handover(second=RELAXED)
    assert it.machine.policy.allow_out_of_order is False
    it.append(key=key)
    it.settle()
    assert second.inbox == [], "the entry waits for the consumer that requires order"
    assert Why.DRAINING in it.whys()
    third = it.join(name="third", policy=RELAXED)
    it.leave(first)
    it.settle()
    assert it.machine.policy.allow_out_of_order is True
    assert Why.DRAINING not in it.whys()
    it.flow(third, 100)
    it.settle()
    assert sorted(second.inbox + third.inbox) == [Position(0, 0), Position(0, 1)]


def test_slots_drain_at_several_consumers_when_the_order_begins() -> None:
    it = world()
    first, second, key = it.handover(RELAXED, RELAXED)
    it.append(key=key)
    it.settle()
    assert (first.inbox, second.inbox) == ([Position(0, 0)], [Position(0, 1)])
    third = it.join(name="third")
    it.flow(third, 100)
    it.append(key=key)
    it.settle()
    slot = it.machine.slot_of_key(key.encode())
    assert it.machine.holder(slot)[1] is None, "two consumers have pending entries of the slot"
    [reason] = [it for it in it.machine.explain(it.now) if it.why is Why.DRAINING]
    assert "2 entries are pending at several consumers; 1 entries wait for" in reason.detail
    assert (reason.facts["pending"], reason.facts["pendingAt"]) == (2, None)
    for member in (first, second):
        assert it.draining_of(member) == {
            "drainingHashesCount": 1,
            "drainingHashesClearedTotal": 0,
            "drainingHashesUnackedMessages": 1,
            "drainingHashes": [{"hash": slot, "unackMsgs": 1, "blockedAttempts": 1}],
        }
    assert it.draining_of(third)["drainingHashesCount"] == 0
    it.leave(first)
    it.settle()
    assert len(third.inbox + second.inbox) == 1, "the second one still has an entry"
    it.ack(second, Position(0, 1))
    it.fire_timer()
    it.settle()
    assert sorted(third.inbox + second.inbox) == [Position(0, number) for number in range(3)]


def test_order_that_begins_amid_a_chunked_message_waits_for_its_end() -> None:
    it = world()
    first, second, key = it.handover(RELAXED, RELAXED)
    it.append(key=key, chunk=Chunk("u", 0, 2, 30))
    it.settle()
    assert second.inbox == [Position(0, 1)], "the chunk pins the slot"
    it.flow(it.join(name="third"), 100)
    it.append(key=key, chunk=Chunk("u", 1, 2, 30))
    it.append(key=key)
    it.settle()
    assert second.inbox == [Position(0, 1), Position(0, 2)], "the last chunk does not wait"
    it.ack(second, *second.inbox)
    assert it.machine.waiting == 1, "the first consumer still has an entry"
    it.ack(first, Position(0, 0))
    it.fire_timer()
    it.settle()
    assert it.machine.waiting == 0


def test_entries_of_a_departed_consumer_return_in_parts() -> None:
    it = world(settings=KeySharedSettings(part_entries=10))
    first = it.join(name="first")
    it.flow(first, 1_000)
    for number in range(35):
        it.append(key=f"key-{number}")
    it.settle()
    second = it.join(name="second")
    it.flow(second, 1_000)
    it.leave(first)
    it.settle()
    assert second.inbox == []
    [returning] = [it for it in it.machine.explain(it.now) if it.why is Why.RETURNING]
    assert returning.facts == {"entries": 35, "consumers": 1}
    assert returning.detail.startswith("35 entries of consumers that have left, or that asked")
    assert returning.next_s == pytest.approx(PART_PAUSE_S, abs=0.001)
    it.append(key="key-34")
    it.settle()
    assert Position(0, 35) not in second.inbox, "an earlier entry of the same key comes first"
    it.acks.acknowledge(Position(0, 33))  # a late acknowledgement
    it.carry_out(it.machine.on_acked(second.machine, [Position(0, 33)], it.tick()))
    it.fire_timer()
    it.settle()
    assert len(second.inbox) == 10
    it.wait(4 * PART_PAUSE_S)
    assert Why.RETURNING not in it.whys()
    wanted = [Position(0, number) for number in range(36) if number != 33]
    assert second.inbox == wanted
    assert second.counts == [1] * 34 + [0]


@pytest.mark.parametrize("policy", [None, RELAXED])
def test_all_entries_of_a_consumer_are_returned_in_parts(policy: KeySharedPolicy | None) -> None:
    """50,000 entries took 217 ms of one step."""
    it = world(settings=KeySharedSettings(part_entries=10))
    first = it.join(name="first", policy=policy)
    it.flow(first, 1_000)
    for number in range(35):
        it.append(key=f"key-{number}")
    it.settle()
    it.redeliver(first)
    assert first.machine.unacked == 0
    assert it.machine.waiting == 0
    assert len(it.acks.redeliveries) == 0
    [returning] = [it for it in it.machine.explain(it.now) if it.why is Why.RETURNING]
    assert returning.facts == {"entries": 35, "consumers": 1}
    assert returning.next_s == pytest.approx(PART_PAUSE_S, abs=0.001)
    it.ack(first, Position(0, 33))  # a late acknowledgement
    it.append(key="key-34")
    it.settle()
    assert (Position(0, 35) in first.inbox) == (policy is RELAXED), "an earlier entry is to come"
    it.fire_timer()
    assert len(it.acks.redeliveries) == 10
    it.settle()
    assert len([count for count in first.counts if count]) == 10
    it.wait(4 * PART_PAUSE_S)
    assert Why.RETURNING not in it.whys()
    again = [at for at, count in zip(first.inbox, first.counts, strict=True) if count]
    assert again == [Position(0, number) for number in range(35) if number != 33]
    assert set(first.counts) == {0, 1}
    it.ack(first, *again, Position(0, 35))
    assert first.machine.unacked == 0


def test_returned_entries_of_moved_keys_go_to_the_new_consumer() -> None:
    it = world(settings=KeySharedSettings(part_entries=10))
    first = it.join(name="first")
    it.flow(first, 1_000)
    keys = it.moving_keys(first, "second", 24)
    for key in keys:
        it.append(key=key)
        it.append(key=key)
    it.settle()
    second = it.join(name="second")
    it.flow(second, 1_000)
    assert it.draining_of(first)["drainingHashesCount"] == 24
    it.redeliver(first)
    it.settle()
    assert second.inbox == []
    slot = it.machine.slot_of_key(keys[-1].encode())
    assert [reason.why for reason in it.machine.explain_slot(slot, it.now)] == [Why.DRAINING]
    it.leave(first)
    it.wait(10 * PART_PAUSE_S)
    assert sorted(second.inbox) == [Position(0, number) for number in range(48)]
    assert it.keys(second)[::2] == it.keys(second)[1::2] == keys
    assert it.machine.next_timer() is None


def test_expired_entries_do_not_wait_any_more() -> None:
    """Each expired entry was left out when its turn came: 50,000 took 100 ms of one step."""
    it = world(settings=KeySharedSettings(part_entries=10))
    first = it.join(name="first")
    it.flow(first, 50)
    for number in range(50):
        it.append(key=f"key-{number % 20}", new_ledger=number == 25)
    it.settle()
    it.redeliver(first, first.inbox)
    assert it.machine.waiting == 50
    it.skip_through(it.log[34].position)
    assert it.machine.waiting < 50
    assert it.machine.next_timer() == pytest.approx(it.now + PART_PAUSE_S)
    it.flow(first, 50)
    it.settle()
    it.wait(1)
    assert it.machine.waiting == 0
    assert sorted(first.inbox[50:]) == [entry.position for entry in it.log[35:]]


@pytest.mark.parametrize(("through", "counted"), [(19, 0), (9, 1)])
def test_an_expiry_of_all_pending_entries_counts_none_of_them(
    monkeypatch: pytest.MonkeyPatch, through: int, counted: int
) -> None:
    it, calls, original = world(), 0, KeyShared._take_off

    def take_off(machine: KeyShared, counts: dict[int, int]) -> None:
        nonlocal calls
        calls += 1
        original(machine, counts)

    monkeypatch.setattr(KeyShared, "_take_off", take_off)
    member = it.join()
    it.flow(member, 100)
    for number in range(20):
        it.append(key=f"key-{number % 3}")
    it.settle()
    assert len(member.machine.pending) == 20
    it.skip_through(Position(0, through))
    it.machine.check()
    assert len(member.machine.pending) == 19 - through
    assert calls == counted


def expiring() -> tuple[World, list[Member]]:
    """Four consumers with 5 pending entries or more. All entries but the last have expired, and
    those of one consumer are taken off."""
    it = world(settings=KeySharedSettings(part_entries=5))
    members = [it.join() for _ in range(4)]
    for member in members:
        it.flow(member, 100)
        for key in [it.key_for(member)] * 5:
            it.append(key=key)
    it.append(key=it.key_for(members[0]))
    it.settle()
    assert all(len(member.machine.pending) >= 5 for member in members)
    it.skip_through(it.log[-2].position)
    it.machine.check()
    assert holding_expired(it, members) == 3
    return it, members


def holding_expired(it: World, members: list[Member]) -> int:
    """The number of consumers with pending entries that have expired."""
    return sum(any(map(it.acks.is_acked, member.machine.pending)) for member in members)


def test_pending_entries_that_expire_are_taken_off_some_consumers_in_each_part() -> None:
    """200,000 entries of draining hashes took 112 ms of one step."""
    it, members = expiring()
    for left in (2, 1, 0):
        assert it.machine.next_timer() == pytest.approx(it.now + PART_PAUSE_S)
        it.fire_timer()
        it.machine.check()
        assert holding_expired(it, members) == left
    assert it.machine.next_timer() is None
    assert [len(member.machine.pending) for member in members] == [1, 0, 0, 0]


def test_a_consumer_that_joins_meanwhile_gets_the_key_when_its_expired_entries_are_off() -> None:
    it = world(settings=KeySharedSettings(part_entries=1))
    first = it.join(name="first")
    it.flow(first, 100)
    [key] = it.moving_keys(first, "second", 1)
    it.append(key=key)
    it.settle()
    idle = [it.join(policy=None) for _ in range(3)]
    last = it.log[-1].position
    it.skip_through(last)
    assert first.machine.pending.get(last), "the consumers after it are first"
    second = it.join(name="second")
    it.flow(second, 100)
    it.machine.check()
    holder = it.machine.holder(it.machine.slot_of_key(key.encode()))[0]
    target = next(each for each in (first, second, *idle) if each.machine is holder)
    it.flow(target, 100)
    it.append(key=key)
    it.settle()
    it.wait(1)
    it.machine.check()
    assert not first.machine.pending.get(last)
    assert target.inbox[-1] == it.log[-1].position


@pytest.mark.parametrize("how", ["redelivery", "leave", "negative ack", "another dispatcher"])
def test_expired_entries_are_all_off_before_entries_return(how: str) -> None:
    it, members = expiring()
    if how == "redelivery":
        it.redeliver(members[0])
    elif how == "leave":
        it.leave(members[0])
    elif how == "negative ack":
        it.machine.policy = KeySharedPolicy(ordered_nacks=True)
        it.machine.on_negative_acks(members[0].machine, members[0].inbox, [], it.now)
        assert len(it.machine._withheld) == 1
    else:
        it.machine.on_dropped()
    it.machine.check()
    assert holding_expired(it, members) == 0
    assert not any(map(it.acks.is_acked, it.acks.redeliveries))


def test_expired_entries_are_removed_in_parts() -> None:
    """200,000 entries may wait after four consumers have left: they took 72 ms of one step."""
    it = world(settings=KeySharedSettings(part_entries=10))
    first = it.join(name="first")
    it.flow(first, 70)
    for number in range(70):
        it.append(key=f"key-{number % 35}")
    it.settle()
    it.redeliver(first, first.inbox)
    slots = list(it.machine._replay.slots())
    assert len(slots) == 35
    it.skip_through(it.log[34].position)
    waiting = [it.machine.waiting]
    while it.machine.next_timer() is not None:
        it.fire_timer()
        waiting.append(it.machine.waiting)
    assert waiting == [60, 50, 40, 35], "one entry of each hash has expired"
    it.skip_through(it.log[69].position)
    it.wait(1)
    assert it.machine.waiting == 0


def test_many_acknowledged_entries_are_left_out_in_parts() -> None:
    """Entries wait for permits and are acknowledged meanwhile: 50,000 took 110 ms of one step."""
    it = world(settings=KeySharedSettings(part_entries=10))
    first = it.join(name="first")
    it.flow(first, 35)
    for number in range(35):
        it.append(key=f"key-{number}")
    it.settle()
    it.redeliver(first, first.inbox)
    it.ack(first, *first.inbox[:34])
    it.flow(first, 100)
    assert it.machine.waiting == 25
    assert it.machine.next_timer() == pytest.approx(it.now + PART_PAUSE_S)
    it.wait(5 * PART_PAUSE_S)
    assert first.inbox[35:] == first.inbox[34:35]
    assert it.machine.next_timer() is None


@pytest.mark.parametrize("order_begins", ["after the leave", "before the leave"])
def test_pinned_hash_waits_for_the_entries_of_a_departed_consumer(order_begins: str) -> None:
    it = world(settings=KeySharedSettings(part_entries=1))
    first, second, key = it.handover(RELAXED, RELAXED)
    it.append(key=key)
    it.append(key=key, chunk=Chunk("u", 0, 3, 30))
    it.settle()
    assert second.inbox == [Position(0, 1), Position(0, 2)], "the chunk pins the hash"
    for number in range(20):
        it.append(key=f"other-{number}")
    it.settle()
    assert len(first.inbox) > 2, "the consumer leaves in several parts"
    if order_begins == "before the leave":
        it.join(name="third")
    it.leave(first)
    if order_begins == "after the leave":
        it.join(name="third")
    it.append(key=key, chunk=Chunk("u", 1, 3, 30))
    it.settle()
    last = it.log[-1].position
    assert last not in second.inbox, "an earlier entry of the same key comes first"
    slot = it.machine.slot_of_key(key.encode())
    assert [reason.why for reason in it.machine.explain_slot(slot, it.now)] == [Why.RETURNING]
    it.wait(100 * PART_PAUSE_S)
    mine = [
        position for position in second.inbox if it.log[it.at(position)].view.partition_key == key
    ]
    assert mine == [Position(0, 1), Position(0, 2), Position(0, 0), last]


def test_waiting_hashes_that_move_are_queued_in_parts() -> None:
    it = world(settings=KeySharedSettings(part_entries=10))
    first = it.join(name="first")
    it.flow(first, 24)
    for key in it.moving_keys(first, "second", 24):
        it.append(key=key)
    it.settle()
    it.redeliver(first, first.inbox)
    assert it.machine.waiting == 24
    second = it.join(name="second")
    [soon] = [each for each in it.machine.explain(it.now) if each.why is Why.UNBLOCKING]
    what = "moved, drained or had expired entries"
    assert soon.detail == f"14 hashes have {what}; the broker delivers them soon"
    assert soon.next_s == pytest.approx(PART_PAUSE_S, abs=0.001)
    it.flow(second, 100)
    it.settle()
    assert len(second.inbox) == 10
    it.fire_timer()
    it.settle()
    assert len(second.inbox) == 20
    it.fire_timer()
    it.settle()
    assert len(second.inbox) == 24
    assert it.machine.next_timer() is None


def test_entries_of_the_last_consumer_are_delivered_to_the_next_one() -> None:
    it = world(settings=KeySharedSettings(part_entries=10))
    first = it.join(name="first")
    it.flow(first, 1_000)
    for number in range(35):
        it.append(key=f"key-{number}")
    it.settle()
    it.leave(first)
    assert it.whys() == {Why.NO_CONSUMERS, Why.RETURNING}
    second = it.join(name="second")
    it.flow(second, 1_000)
    it.settle()
    it.wait(1)
    assert second.inbox == first.inbox


def test_entries_without_a_key_are_spread_or_go_to_one_consumer() -> None:
    for spread in (True, False):
        it = world(settings=KeySharedSettings(spread_keyless=spread))
        members = [it.join() for _ in range(3)]
        for member in members:
            it.flow(member, 1_000)
        for _ in range(60):
            it.append()
        it.settle()
        counts = sorted(len(member.inbox) for member in members)
        assert (counts[0] > 0) is spread
        assert sum(counts) == 60


def test_chunks_follow_the_first_one_although_their_key_moves() -> None:
    it = world()
    first = it.join(name="first")
    it.flow(first, 100)
    [key] = it.moving_keys(first, "second", 1)
    chunks = [Chunk("u", index, 3, 30) for index in range(3)]
    it.append(key=key, chunk=chunks[0])
    it.settle()
    second = it.join(name="second")
    it.flow(second, 100)
    it.append(key=key, chunk=chunks[1])
    it.append(key=key, chunk=chunks[2])
    it.append(key=key)
    it.settle()
    assert first.inbox == [Position(0, n) for n in range(3)]
    assert second.inbox == []
    it.ack(first, *first.inbox)
    it.fire_timer()
    it.settle()
    assert second.inbox == [Position(0, 3)]


def test_returned_chunk_brings_its_whole_message_back() -> None:
    it = world()
    first = it.join()
    it.flow(first, 100)
    for index in range(3):
        it.append(key="k", chunk=Chunk("u", index, 3, 30))
    it.settle()
    it.redeliver(first, [Position(0, 2)])
    it.settle()
    assert first.inbox == [Position(0, n) for n in (0, 1, 2, 0, 1, 2)]


@pytest.mark.parametrize("part_entries", [1, 10], ids=["in parts", "at once"])
def test_last_chunk_waits_for_the_chunks_of_a_consumer_that_left(part_entries: int) -> None:
    """The broker reads the last chunk while the consumer leaves. No slot drains: both consumers
    allow delivery out of order."""
    it = world(settings=KeySharedSettings(part_entries=part_entries))
    first = it.join(name="first", policy=RELAXED)
    it.flow(first, 100)
    chunks = [Chunk("u", index, 3, 30) for index in range(3)]
    for chunk in chunks[:2]:
        it.append(key="k", chunk=chunk)
    it.settle()
    second = it.join(name="second", policy=RELAXED)
    it.flow(second, 100)
    it.append(key="k", chunk=chunks[2])
    it.leave(first)
    it.settle()
    while it.machine.next_timer() is not None:
        it.fire_timer()
        it.settle()
    assert second.inbox == [Position(0, n) for n in range(3)]


def test_order_that_begins_while_a_chunk_waits_for_a_left_consumer_queues_its_slot() -> None:
    """The consumer that left has no entry of the slot any more, but one of another key."""
    it = world(settings=KeySharedSettings(part_entries=1))
    first = it.join(name="first", policy=RELAXED)
    it.flow(first, 100)
    it.append(key="k", chunk=Chunk("u", 0, 2, 20))
    it.append(key="other")
    it.settle()
    second = it.join(name="second", policy=RELAXED)
    it.flow(second, 100)
    it.append(key="k", chunk=Chunk("u", 1, 2, 20))
    it.leave(first)
    it.settle()
    it.fire_timer()  # returns the first chunk
    third = it.join(name="third")
    it.flow(third, 100)
    it.settle()
    while it.machine.next_timer() is not None:
        it.fire_timer()
        it.settle()
    message = [Position(0, 0), Position(0, 2)]
    inboxes = [[one for one in member.inbox if one in message] for member in (second, third)]
    assert sorted(inboxes) == [[], message]


def test_a_chunk_with_another_key_does_not_wait_for_its_message() -> None:
    """A producer gave the chunks of one message different keys. The first chunk waits for room."""
    it = world()
    first = it.join(name="first", policy=RELAXED)
    it.flow(first, 1)
    [moving] = it.moving_keys(first, "second", 1)
    it.append(key=moving, chunk=Chunk("u", 0, 2, 20))
    it.settle()
    second = it.join(name="second", policy=RELAXED)
    it.redeliver(first)
    it.settle()
    it.flow(first, 1)
    it.append(key=it.key_for(first), chunk=Chunk("u", 1, 2, 20))
    it.settle()
    assert Position(0, 1) in first.inbox
    assert second.inbox == []


def test_failed_read_is_requested_again() -> None:
    it = world()
    first = it.join()
    it.flow(first, 1)
    it.append(key="k")
    it.append(key="k")
    it.settle()
    it.redeliver(first)
    it.flow(first, 5)
    it.answer_read(fail=True)
    it.settle()
    assert first.inbox == [Position(0, 0), Position(0, 0), Position(0, 1)]


def test_no_permits_and_no_consumers_are_explained() -> None:
    it = world()
    it.append(key="k")
    assert it.whys() == {Why.NO_CONSUMERS}
    it.join()
    assert Why.NO_PERMITS in it.whys()


def test_subscription_limit_stops_reading_and_not_redelivery() -> None:
    it = world(Limits(unacked_per_consumer=1_000, unacked_per_subscription=10, read_entries=5))
    first = it.join()
    it.flow(first, 1_000)
    for _ in range(30):
        it.append(key="k")
    it.settle()
    assert len(first.inbox) == 10
    assert Why.UNACKED_BY_SUBSCRIPTION in it.whys()
    it.redeliver(first)
    it.settle()
    assert first.inbox[10:] == first.inbox[:10] + [
        Position(0, n) for n in range(10, len(first.inbox) - 10)
    ]


def test_a_consumer_that_leaves_while_the_others_are_described_is_left_out() -> None:
    it = world()
    members = [it.join(name=f"c{n}") for n in range(3)]
    for member in members:
        it.flow(member, 100)
    for number in range(60):
        it.append(key=f"key-{number}")
    it.settle()
    it.join(name="c4")
    described = it.machine.describe_consumers()
    consumer, _ = next(described)
    assert consumer is members[0].machine
    it.leave(members[1])
    it.leave(members[0])
    left = dict(described)
    assert list(left) == [members[2].machine, it.members[-1].machine]
    sums = it.machine.describe(left)
    hashes = [len(stats["drainingHashes"]) for stats in left.values()]  # type: ignore[arg-type]
    assert sums["drainingHashesCount"] == sum(hashes) > 0


def test_statistics_of_draining_hashes() -> None:
    it = world()
    first = it.join(name="first")
    it.flow(first, 100)
    [key] = it.moving_keys(first, "second", 1)
    it.append(3, batch=True, key=key)
    it.append(key=key)
    it.settle()
    second = it.join(name="second")
    it.flow(second, 100)
    slot = it.machine.slot_of_key(key.encode())
    it.append(key=key)
    it.append(key=key)
    it.settle()
    assert it.draining_of(first) == {
        "drainingHashesCount": 1,
        "drainingHashesClearedTotal": 0,
        "drainingHashesUnackedMessages": 4,
        "drainingHashes": [{"hash": slot, "unackMsgs": 4, "blockedAttempts": 2}],
    }
    it.ack(first, Position(0, 0), Position(0, 1))
    stats = it.draining_of(first)
    assert stats["drainingHashesCount"] == 0
    assert stats["drainingHashesClearedTotal"] == 1


def test_read_is_answered_with_nothing() -> None:
    it = world()
    first = it.join()
    it.append(key="k")
    it.flow(first, 1)
    assert isinstance(it.outstanding, Read)
    it.outstanding = None
    it.carry_out(it.machine.on_entries([], it.tick()))
    assert it.machine.read_position == Position(0, 1)
