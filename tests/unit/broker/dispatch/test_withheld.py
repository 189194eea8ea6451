"""Negative acknowledgements in key order. The set of withheld entries is compared with plain sets.
The dispatcher delivers no entry while an earlier entry of its key is negatively acknowledged.
test_histories.py plays random histories of this dispatcher."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from fakes.dispatch_rig import DispatcherRig

from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.key_shared import EXPLAINED_MAX, KeyShared
from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.dispatch.withheld import Withheld
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import Position
from magnetar.protos.entry import Chunk

ORDERED = KeySharedPolicy(ordered_nacks=True)
LIMITS = Limits(unacked_per_consumer=9, unacked_per_subscription=16, read_entries=5)


@pytest.mark.parametrize("seed", range(20))
def test_set_withholds_entries_after_the_earliest_returned_entry(seed: int) -> None:
    rng, it, plain = random.Random(seed), Withheld(), {}
    for _ in range(200):
        at = Position(rng.randrange(3), rng.randrange(20))
        draw = rng.random()
        if draw < 0.5:
            slot = 1 + (at.ledger * 20 + at.entry) % 4  # an entry has one slot
            it.add(at, slot)
            plain[at] = slot
        elif draw < 0.9:
            assert it.on_acked(at) == plain.pop(at, 0)
        else:
            gone = {slot for known, slot in plain.items() if known <= at}
            plain = {known: slot for known, slot in plain.items() if known > at}
            assert it.on_acked_through(at) == gone
        it.check()
        assert len(it) == len(plain)
        assert (at in it) == (at in plain)
        for slot in range(1, 5):
            mine = [known for known, of in plain.items() if of == slot]
            assert it.earliest(slot) == min(mine, default=None)
            assert it.has(slot) == bool(mine)
            other = Position(rng.randrange(3), rng.randrange(20))
            assert it.withholds(slot, other) == any(known < other for known in mine)


class Rig(DispatcherRig):
    machine: KeyShared

    def __init__(
        self, *, withheld_max: int = 100, part_entries: int = 2_000, limits: Limits = LIMITS
    ) -> None:
        settings = KeySharedSettings(
            ring_points=3, withheld_max=withheld_max, part_entries=part_entries
        )
        super().__init__(KeyShared, shared=True, limits=limits, key_shared=settings)

    def key(self, position: Position) -> str:
        key = next(it.view.partition_key for it in self.log if it.position == position)
        assert key is not None
        return key


def test_later_entries_wait_and_are_explained_until_the_acknowledgement() -> None:
    it = Rig()
    member = it.join(policy=ORDERED)
    it.flow(member, 9)
    for _ in range(3):
        it.append(key="a")
    it.settle()
    first, second, third = member.inbox
    it.negative_ack(member, [first], [third])
    it.append(key="a")
    it.append(key="b")
    it.settle()
    assert [it.key(at) for at in member.inbox] == ["a", "a", "a", "b"], "other keys continue"
    [reason] = [one for one in it.machine.explain(it.now) if one.why is Why.WITHHELD]
    assert reason.facts["waiting"] == 2
    assert f"the negatively acknowledged entry {first} is acknowledged" in reason.detail
    it.redeliver(member, [first])
    it.settle()
    assert member.inbox[-1] == first
    it.ack(member, first, second)
    it.settle()
    assert member.inbox[-2:] == [third, Position(third.ledger, third.entry + 1)]
    assert member.counts[-3:] == [1, 0, 0], "a returned entry is not redelivered"


def test_an_explanation_counts_the_withheld_hashes_that_it_does_not_name() -> None:
    it = Rig(limits=replace(LIMITS, unacked_per_consumer=99, unacked_per_subscription=99))
    member = it.join(policy=ORDERED)
    it.flow(member, 99)
    keys = [f"k{number}" for number in range(EXPLAINED_MAX + 3)]
    slots = {it.machine.slot_of_key(key.encode()) for key in keys}
    assert len(slots) == len(keys), "each key has a hash of its own"
    for key in keys:
        it.append(key=key)
    it.settle()
    it.negative_ack(member, list(member.inbox), [])
    for key in keys:
        it.append(key=key)
    it.settle()
    assert len(member.inbox) == len(keys), "the later entries wait"
    withheld = [one for one in it.machine.explain(it.now) if one.why is Why.WITHHELD]
    named = [one.facts["hash"] for one in withheld[:-1]]
    assert named == sorted(slots)[:EXPLAINED_MAX]
    assert withheld[-1].facts == {"hashes": 3}
    assert withheld[-1].detail.startswith("3 more hashes wait")


def test_returned_chunk_brings_all_chunks_of_its_message_again() -> None:
    """Found by `make histories` (ordered 18409): the broker still counted the other chunks as held
    by the consumer, so the returned chunk could not go to another consumer."""
    it = Rig()
    member = it.join(policy=ORDERED)
    it.flow(member, 9)
    it.append(key="a")
    for index in range(3):
        it.append(key="a", chunk=Chunk("u", index, 3, 30))
    it.settle()
    first, *chunks = member.inbox
    it.negative_ack(member, [first], chunks[2:])
    assert member.machine.unacked == 1
    it.ack(member, first)
    it.settle()
    assert member.inbox[-3:] == chunks


def test_skipping_a_lost_entry_releases_the_later_entries_of_its_hash() -> None:
    """The broker itself acknowledges entries that are lost permanently."""
    it = Rig()
    member = it.join(policy=ORDERED)
    it.flow(member, 9)
    for _ in range(4):
        it.append(key="a")
    it.settle()
    first, second, third, fourth = member.inbox
    it.negative_ack(member, [first, second], [third, fourth])
    it.settle()
    it.redeliver(member, [first, second])
    assert it.outstanding is not None, "the broker reads both entries again"
    for lost in (first, second):
        it.acks.acknowledge(lost)
        it.given_back.pop(lost, None)
    it.machine.on_skipped([first, second], it.tick())
    it.answer_read(fail=True)
    it.settle()
    assert member.inbox[4:] == [third, fourth]
    assert not it.machine._withheld


def test_negative_acknowledgement_of_a_skipped_entry_withholds_nothing() -> None:
    it = Rig()
    member = it.join(policy=ORDERED)
    it.flow(member, 9)
    it.append(key="a")
    it.append(key="a")
    it.settle()
    first, second = member.inbox
    it.acks.acknowledge(first)  # while the consumer has it
    del it.owner[first]
    it.machine.on_skipped([first], it.tick())
    it.negative_ack(member, [first], [second])
    it.redeliver(member, [first])
    it.settle()
    assert member.inbox[2:] == [second]
    assert member.machine.unacked == 1


def test_negative_acks_beyond_the_limit_are_refused() -> None:
    it = Rig(withheld_max=2)
    member = it.join(policy=ORDERED)
    it.flow(member, 9)
    for key in "abc":
        it.append(key=key)
    it.settle()
    first, second, third = member.inbox
    it.negative_ack(member, [first, second], [])
    takes = partial(it.machine.takes_negative_acks, member.machine)
    assert takes([first, second, Position(9, 9)]), "no further entry"
    assert not takes([third])
    it.ack(member, first)
    assert takes([third])


def test_expired_entries_do_not_count_as_negative_acks() -> None:
    it = Rig(withheld_max=1, part_entries=1)
    member = it.join(policy=ORDERED)
    it.flow(member, 9)
    for _ in range(3):
        it.append(key="a")
    it.settle()
    first, second, third = member.inbox
    it.join(policy=ORDERED)  # the dispatcher takes entries off this consumer first
    it.skip_through(second)
    assert member.machine.pending.get(second), "it is not taken off yet"
    assert it.machine.takes_negative_acks(member.machine, [first, second, third])
    it.negative_ack(member, [first, second, third], [])
    assert len(it.machine._withheld) == 1
