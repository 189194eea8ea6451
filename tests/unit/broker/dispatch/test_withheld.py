"""Key-ordered negative acknowledgements: the set against plain sets, and histories of the
dispatcher against the obvious rule: no delivery of an entry while an earlier entry of its key is
negatively acknowledged and not acknowledged."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fakes.dispatch_rig import DispatcherRig, Member

from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.dispatch.withheld import Withheld
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from magnetar.broker.dispatch.dispatcher import Deliver, Environment

ORDERED = KeySharedPolicy(ordered_nacks=True)
KEYS = [f"key-{number}" for number in range(5)]
LIMITS = Limits(unacked_per_consumer=9, unacked_per_subscription=16, read_entries=5)


@pytest.mark.parametrize("seed", range(20))
def test_set_withholds_what_is_later_than_the_earliest(seed: int) -> None:
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


class Judge(DispatcherRig):
    machine: KeyShared

    def __init__(
        self,
        make: Callable[[Environment], KeyShared],
        settings: KeySharedSettings = KeySharedSettings(ring_points=3),  # noqa: B008  # frozen
    ) -> None:
        super().__init__(make, shared=True, limits=LIMITS, key_shared=settings)
        self.nacked: set[Position] = set()
        self.withheld = 0  # deliveries of nacked entries while later ones waited

    def key(self, position: Position) -> str:
        key = next(it.view.partition_key for it in self.log if it.position == position)
        assert key is not None
        return key

    def _deliver(self, action: Deliver) -> None:
        for entry in action.entries:
            for nacked in self.nacked - self.acks.acked:
                late = nacked < entry.position and self.key(nacked) == entry.view.partition_key
                assert not late, f"{entry.position} overtakes {nacked}"
            self.withheld += entry.position in self.nacked
        super()._deliver(action)

    def leave(self, member: Member) -> None:
        if self.members == [member]:
            self.nacked.clear()
        super().leave(member)

    def negative_ack(self, member: Member, positions: Any, returned: Any) -> None:
        self.nacked.update(positions)
        super().negative_ack(member, positions, returned)


def history(seed: int, make: Callable[[Environment], KeyShared] = KeyShared) -> Judge:
    rng = random.Random(seed)
    it = Judge(make)
    for _ in range(120):
        draw = rng.random()
        member = rng.choice(it.members) if it.members else None
        mine = [position for position, owner in it.owner.items() if owner is member]
        if it.outstanding is not None and draw < 0.6:
            it.answer_read(entries_max=rng.randint(1, 5), fail=rng.random() < 0.1)
            draw = rng.random()
        if draw < 0.30:
            it.append(key=rng.choice(KEYS))
        elif draw < 0.40 and len(it.members) < 3:
            it.join(name=f"c{rng.randrange(3)}", policy=ORDERED)
        elif draw < 0.43 and member is not None:
            it.leave(member)
        elif draw < 0.60 and member is not None:
            it.flow(member, rng.randint(1, 9))
        elif draw < 0.72 and member is not None and mine:
            it.ack(member, *rng.sample(mine, rng.randint(1, len(mine))))
        elif draw < 0.88 and member is not None and mine:
            nacked = rng.choice(mine)
            key = it.key(nacked)
            later = [at for at in mine if at > nacked and it.key(at) == key]
            it.negative_ack(member, [nacked], rng.sample(later, rng.randint(0, len(later))))
        elif draw < 0.97 and member is not None:
            nacked_here = [at for at in mine if at in it.nacked]
            if nacked_here:
                it.redeliver(member, rng.sample(nacked_here, 1))
        elif it.log:
            it.skip_through(it.log[rng.randrange(len(it.log)) // 2].position)
    finish(it)
    return it


def finish(it: Judge) -> None:
    """Willing consumers get and acknowledge everything, in whatever order it comes."""
    if not it.members:
        it.join(policy=ORDERED)
    for _ in range(2_000):
        it.settle()
        if it.machine.next_timer() is not None:
            it.fire_timer()
            it.settle()
        for member in it.members:
            mine = [position for position, owner in it.owner.items() if owner is member]
            if mine:
                it.ack(member, *mine)
            if member.machine.permits < 10:
                it.flow(member, 20)
        if len(it.acks.acked) == len(it.log):
            break
    waiting = [entry.position for entry in it.log if entry.position not in it.acks.acked]
    assert not waiting, f"stuck: {waiting[:5]}; {it.machine.explain(it.now)}"
    assert not it.machine._withheld, "released by the acknowledgements"


@pytest.mark.parametrize("block", range(4))
def test_random_histories_keep_the_order(block: int) -> None:
    assert sum(history(seed).withheld for seed in range(block * 30, block * 30 + 30)) > 10


class SkipsTheSendTimeGate(KeyShared):
    def _dispatch(self, *args: Any) -> Any:
        withheld, self._withheld = self._withheld, Withheld()
        try:
            return super()._dispatch(*args)
        finally:
            self._withheld = withheld


class ReleasesAtTheRedelivery(KeyShared):
    def on_redeliver(self, consumer: Any, positions: Any, now: float) -> Any:
        for position in positions or ():
            self._withheld.on_acked(position)
        return super().on_redeliver(consumer, positions, now)


class ForgetsToQueue(KeyShared):
    def on_acked(self, consumer: Any, positions: Any, now: float) -> Any:
        for position in positions:
            self._withheld.on_acked(position)
        return super().on_acked(consumer, positions, now)


@pytest.mark.parametrize("bug", [SkipsTheSendTimeGate, ReleasesAtTheRedelivery, ForgetsToQueue])
def test_planted_bug_is_caught(bug: type[KeyShared]) -> None:
    for seed in range(200):
        try:
            history(seed, bug)
        except (AssertionError, KeyError):
            return
    raise AssertionError(f"{bug.__name__} was not caught")


def test_later_entries_wait_and_say_so_until_the_acknowledgement() -> None:
    it = Judge(KeyShared)
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
    assert [it.key(at) for at in member.inbox] == ["a", "a", "a", "b"], "other keys go on"
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


def test_skipping_a_lost_entry_releases_the_later_entries_of_its_hash() -> None:
    """The broker acknowledges what is lost for good, without an acknowledgement by a consumer."""
    it = Judge(KeyShared)
    member = it.join(policy=ORDERED)
    it.flow(member, 9)
    for _ in range(4):
        it.append(key="a")
    it.settle()
    first, second, third, fourth = member.inbox
    it.negative_ack(member, [first, second], [third, fourth])
    it.settle()
    it.redeliver(member, [first, second])
    assert it.outstanding is not None, "the broker reads them again"
    for lost in (first, second):
        it.acks.acknowledge(lost)
        it.given_back.pop(lost, None)
    it.answer_read(fail=True)
    it.settle()
    assert member.inbox[4:] == [third, fourth]
    it.ack(member, third, fourth)
    assert not it.machine._withheld


def test_negative_acks_beyond_the_limit_are_not_taken() -> None:
    it = Judge(KeyShared, KeySharedSettings(withheld_max=2))
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
