"""Random histories of Key_Shared subscriptions, against the obvious rules.

The rig asserts what holds for every dispatcher. This adds, after every event:

    1. The entries of a slot are unacknowledged at one consumer at a time.
    2. The first deliveries of a slot come in order, and none while an earlier entry of the slot
       waits: it is acknowledged, or pending at the same consumer.
    3. At the end, with willing consumers, every entry is delivered.

Planted bugs must be caught: a test that finds nothing proves nothing.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from fakes.dispatch_rig import DispatcherRig, Member

from magnetar.broker.dispatch.draining import DrainingHashes
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.key_shared_policy import KeySharedPolicy
from magnetar.broker.dispatch.keyed_replay import KeyedReplay
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.dispatch.sticky_hash import hash_of
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.protos.entry import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.dispatch.dispatcher import Deliver, Environment
    from magnetar.broker.log.position import Position

KEYS = [f"key-{number}" for number in range(9)]
LIMITS = Limits(unacked_per_consumer=9, unacked_per_subscription=16, read_entries=5)


class Judge(DispatcherRig):
    """Knows keys, not slots: it must come to the same verdict without the dispatcher's state."""

    machine: KeyShared

    def __init__(
        self, make: Callable[[Environment], KeyShared], settings: KeySharedSettings
    ) -> None:
        super().__init__(make, shared=True, limits=LIMITS, key_shared=settings)
        self.first: dict[str, int] = defaultdict(lambda: -1)  # index of the last first delivery
        self.delivered: set[int] = set()
        self.at: dict[Position, int] = {}

    def _deliver(self, action: Deliver) -> None:
        member = self._member(action.consumer)
        for entry in action.entries:
            index = self.index(entry.position)
            key = entry.view.partition_key
            assert key is not None
            if index not in self.delivered:
                self.delivered.add(index)
                assert index > self.first[key], f"{key}: first deliveries out of order"
                self.first[key] = index
                for earlier in self.log[:index]:
                    if earlier.view.partition_key != key or earlier.position in self.acks.acked:
                        continue
                    here = self.owner.get(earlier.position) is member or earlier in action.entries
                    assert here, f"{key}: an earlier entry waits"
            for position, owner in self.owner.items():
                if self.log[self.index(position)].view.partition_key == key:
                    assert owner is member, f"{key}: unacknowledged at two consumers"
        super()._deliver(action)

    def index(self, position: Position) -> int:
        while len(self.at) < len(self.log):
            self.at[self.log[len(self.at)].position] = len(self.at)
        return self.at[position]

    def expire(self, count: int) -> None:
        """The broker acknowledges the oldest entries."""
        if count and self.log:
            through = self.log[min(count, len(self.log)) - 1].position
            for entry in self.log:
                if entry.position <= through:
                    self.acks.acknowledge(entry.position)
                    self.owner.pop(entry.position, None)
                    self.given_back.pop(entry.position, None)
            self.carry_out(self.machine.on_acked_through(through, self.tick()))


def history(
    seed: int,
    make: Callable[[Environment], KeyShared] = KeyShared,
    events: int = 120,
    *,
    chunks: bool = True,
) -> Judge:
    rng = random.Random(seed)
    settings = KeySharedSettings(
        ring_points=rng.choice((0, 1, 3, 10)),
        look_ahead_per_consumer=rng.choice((3, 100)),
        look_ahead_per_subscription=rng.choice((7, 1_000)),
    )
    it = Judge(make, settings)
    policy = KeySharedPolicy()
    started: list[tuple[str, str, int]] = []  # chunked messages under way: key, uuid, next chunk

    def any_member() -> Member | None:
        return rng.choice(it.members) if it.members else None

    for number in range(events):
        draw, member = rng.random(), any_member()
        if it.outstanding is not None and draw < 0.5:
            it.answer_read(entries_max=rng.randint(1, 5), fail=rng.random() < 0.1)
            draw = rng.random()
        if draw < 0.30:
            if chunks and rng.random() < 0.15:
                started.append((rng.choice(KEYS), f"u{number}", 0))
            if started and rng.random() < 0.5:
                key, uuid, index = started.pop(rng.randrange(len(started)))
                it.append(key=key, chunk=Chunk(uuid, index, 3, 30))
                if index < 2:
                    started.append((key, uuid, index + 1))
            else:
                batch = rng.random() < 0.2
                it.append(rng.randint(1, 4), batch=batch, key=rng.choice(KEYS))
        elif draw < 0.37:
            if len(it.members) < 4:
                it.join(name=f"c{rng.randrange(4)}", policy=policy)
        elif draw < 0.42:
            if member is not None:
                it.leave(member)
        elif draw < 0.55:
            if member is not None:
                it.flow(member, rng.randint(1, 9))
        elif draw < 0.75:
            if it.outstanding is not None:
                it.answer_read(entries_max=rng.randint(1, 5), fail=rng.random() < 0.1)
        elif draw < 0.84:
            mine = [position for position, owner in it.owner.items() if owner is member]
            if member is not None and mine:
                it.ack(member, *rng.sample(mine, rng.randint(1, len(mine))))
        elif draw < 0.88:
            mine = [position for position, owner in it.owner.items() if owner is member]
            if member is not None and mine:
                some = rng.sample(mine, rng.randint(1, len(mine)))
                it.redeliver(member, None if rng.random() < 0.3 else some)
        elif draw < 0.93:
            if it.owner and member is not None:
                position = rng.choice(list(it.owner))
                entry = it.log[it.index(position)]
                it.ack_index(it.owner[position], entry, rng.randrange(entry.view.num_messages))
        elif draw < 0.95:
            if member is not None:
                it.set_writable(member, not member.writable)
        elif draw < 0.97:
            if rng.random() < 0.3:
                it.expire(rng.randint(0, max(1, len(it.log) // 2)))
        elif it.machine.next_timer() is not None:
            it.fire_timer()
    finish(it, policy)
    return it


def finish(it: Judge, policy: KeySharedPolicy) -> None:
    """Willing consumers get and acknowledge everything."""
    if not it.members:
        it.join(policy=policy)
    for member in it.members:
        it.set_writable(member, writable=True)
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


@pytest.mark.parametrize(
    "block", [*range(3), *(pytest.param(block, marks=pytest.mark.night) for block in range(3, 8))]
)
def test_random_histories(block: int) -> None:
    blocked = replays = joins = 0
    for seed in range(block * 50, block * 50 + 50):
        it = history(seed, chunks=bool(seed % 2))
        joins += it.joined
        replays += sum(count > 0 for member in it.members for count in member.counts)
        blocked += it.machine.blocked_attempts
    assert joins > 200
    assert replays > 50
    assert blocked > 5


class SkipsTheSendTimeGate(KeyShared):
    """Delivers what it read again without asking whether the slot drains by now."""

    def on_replayed(self, *args: Any) -> Any:
        draining, self._draining = self._draining, _Permissive(self._draining)
        try:
            return super().on_replayed(*args)
        finally:
            _copy(self._draining, draining)
            self._draining = draining


def _copy(source: DrainingHashes, target: DrainingHashes) -> None:
    for name in DrainingHashes.__slots__:
        setattr(target, name, getattr(source, name))


class _Permissive(DrainingHashes):
    def __init__(self, real: DrainingHashes) -> None:
        _copy(real, self)

    def blocks(self, slot: int, consumer: Any) -> bool:
        return False


class _Blind(KeyedReplay):
    """Shares the state of another one, and finds no slot."""

    def __init__(self, real: KeyedReplay) -> None:
        super().__init__()
        self._by_slot, self._queues, self._real = real._by_slot, real._queues, real

    def __contains__(self, slot: object) -> bool:
        return False

    def add(self, position: Any, slot: int) -> bool:
        return self._real.add(position, slot)

    def __len__(self) -> int:
        return len(self._real)


class ForgetsGateOne(KeyShared):
    """New entries overtake the waiting ones."""

    def on_entries(self, *args: Any) -> Any:
        replay = self._replay
        self._replay = _Blind(replay)
        try:
            return super().on_entries(*args)
        finally:
            self._replay = replay


class ForgetsTheReturned(KeyShared):
    """Does not notice what came back during the second read."""

    def on_replayed(self, *args: Any) -> Any:
        self._returned = set()
        return super().on_replayed(*args)


class CountsTwice(KeyShared):
    def _astray(self, *args: Any) -> Any:
        return {slot: 2 * count for slot, count in super()._astray(*args).items()}


class UnblocksEarly(KeyShared):
    def _astray(self, *args: Any) -> Any:
        return dict.fromkeys(super()._astray(*args), 1)


class LosesTheLastAck(KeyShared):
    def next_timer(self) -> None:
        return None


class ForgetsToRegister(KeyShared):
    def _astray(self, *args: Any) -> Any:
        return {}


class ForgetsTheWaitingOnMove(KeyShared):
    def _queue(self, slots: Any) -> None:
        if not isinstance(slots, list):
            super()._queue(slots)


class KeepsThePins(KeyShared):
    def _refresh_pins(self) -> None:
        pass


class LosesWhatALeaverHad(KeyShared):
    def remove_consumer(self, consumer: Any, now: float) -> Any:
        for position in list(consumer.pending)[-1:]:
            self._forget(position, consumer, now)
        return super().remove_consumer(consumer, now)


@pytest.mark.parametrize(
    "bug",
    [
        SkipsTheSendTimeGate,
        ForgetsGateOne,
        ForgetsTheReturned,
        CountsTwice,
        UnblocksEarly,
        LosesTheLastAck,
        ForgetsToRegister,
        ForgetsTheWaitingOnMove,
        KeepsThePins,
        LosesWhatALeaverHad,
    ],
)
def test_planted_bug_is_caught(bug: type[KeyShared]) -> None:
    for seed in range(200):
        try:
            history(seed, bug)
        except (AssertionError, KeyError, StopIteration):
            return
    raise AssertionError(f"{bug.__name__} was not caught")


def test_the_judge_counts_slots_of_its_keys() -> None:
    # Keys of one slot would make the judge blind to an order between them.
    assert len({hash_of(key) % 65_535 for key in KEYS}) == len(KEYS)
