"""The causes of a stopped delivery that a dispatcher knows, alone and in pairs. `explain` names
each cause. The numbers in the text equal a count over the rig. test_explanation.py tests the causes
of the shell."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from fakes.dispatch_rig import DispatcherRig, Member

from magnetar.broker.dispatch.active import Choice, FailoverRules
from magnetar.broker.dispatch.explain import Reason, Why
from magnetar.broker.dispatch.failover import Failover
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.key_shared_policy import HashRange, KeySharedMode, KeySharedPolicy
from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.key_shared_settings import KeySharedSettings
from magnetar.protos.entry import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from magnetar.broker.log.position import Position

KEYS = [f"key-{number}" for number in range(60)]
ORDERED = KeySharedPolicy(ordered_nacks=True)


class Scene(DispatcherRig):
    """`holder` has pending entries of keys that `other` gets now. `dry` has no permits, the
    connection of `shut` is not writable, and `gone` leaves."""

    machine: KeyShared

    def __init__(self, causes: Collection[Why], look_ahead: int = 40_000) -> None:
        limits = Limits(unacked_per_consumer=1_000, unacked_per_subscription=10_000)
        settings = KeySharedSettings(
            part_entries=2, look_ahead_per_consumer=40_000, look_ahead_per_subscription=look_ahead
        )
        super().__init__(KeyShared, shared=True, limits=limits, key_shared=settings)
        self.causes = causes
        self.named: dict[str, Member] = {}
        if Why.NO_PERMITS in causes:
            self.join_as("dry", 0)
        if Why.NOT_WRITABLE in causes:
            self.join_as("shut", 100)
            self.set_writable(self.named["shut"], writable=False)
        if Why.RETURNING in causes:
            self.join_as("gone", 100)
        self.holder = self.join_as("holder", 1_000)
        if Why.DELAYED in causes:
            self.append(key="delayed", delay_ms=60_000)
        self.append_all(*KEYS)
        self.other = self.join_as("other", 1_000)
        self.settle()
        self.wait(1)  # until the hashes that moved are queued
        slots = {key: self.slot(key) for key in KEYS if self.pending(key, self.holder)}
        self.moved = [
            key for key, slot in slots.items() if self.machine.holder(slot)[0] is self.other.machine
        ]
        self.staying = [
            key
            for key, slot in slots.items()
            if self.machine.holder(slot)[0] is self.holder.machine
        ]
        for why, build in BUILDS.items():
            if why in causes:
                build(self)

    def join_as(self, name: str, permits: int) -> Member:
        self.named[name] = self.join(name=name, policy=ORDERED)
        if permits:
            self.flow(self.named[name], permits)
        return self.named[name]

    def append_all(self, *keys: str) -> None:
        for key in keys:
            self.append(key=key)
        self.settle()

    def slot(self, key: str) -> int:
        return self.machine.slot_of_key(key.encode())

    def pending(self, key: str, member: Member) -> list[Position]:
        return [
            entry.position
            for entry in self.log
            if entry.view.partition_key == key and self.owner.get(entry.position) is member
        ]

    def waiting(self, key: str) -> int:
        return sum(
            entry.view.partition_key == key
            and entry.position not in self.acks.acked
            and entry.position not in self.owner
            for entry in self.log
        )

    def reason(self, why: Why, consumer: str = "", slot: int | None = None) -> Reason:
        reasons = self.machine.explain(self.now)
        [found] = [
            it
            for it in reasons
            if it.why is why and it.consumer == consumer and slot in (None, it.facts.get("hash"))
        ]
        return found


def drain(it: Scene) -> None:
    it.append_all(it.moved[0], it.moved[0])


def drained(it: Scene) -> None:
    it.append_all(it.moved[1])
    it.ack(it.holder, *it.pending(it.moved[1], it.holder))


def withhold(it: Scene) -> None:
    it.negative_ack(it.holder, it.pending(it.staying[0], it.holder), [])
    it.append_all(*[it.staying[0]] * 3)


def fill(it: Scene) -> None:
    it.append_all(*[it.moved[2]] * 9)


BUILDS: dict[Why, Callable[[Scene], None]] = {
    Why.DRAINING: drain,
    Why.WITHHELD: withhold,
    Why.UNBLOCKING: drained,
    Why.LOOK_AHEAD: fill,
    Why.LEAVING: lambda it: it.announce_leave(it.holder),
    Why.RETURNING: lambda it: it.leave(it.named["gone"]),
    Why.UNACKED_BY_CONSUMER: lambda it: limit_consumers(it),
    Why.UNACKED_BY_SUBSCRIPTION: lambda it: limit_subscription(it),
}
"""The events that must follow the joins, in this order."""


def limit_consumers(it: Scene) -> None:
    it.limits.unacked_per_consumer = it.holder.machine.unacked
    for member in it.members:
        member.machine.on_unacked(0)


def limit_subscription(it: Scene) -> None:
    it.limits.unacked_per_subscription = it.machine.unacked


def check_draining(it: Scene) -> None:
    key = it.moved[0]
    found = it.reason(Why.DRAINING, slot=it.slot(key))
    assert it.waiting(key) == 2
    assert found.detail == (
        f"hash {it.slot(key)} drains: 1 entries are pending at consumer 'holder'; 2 entries wait"
        " for 'other'"
    )
    assert {name: found.facts[name] for name in ("pending", "pendingAt", "waiting")} == {
        "pending": len(it.pending(key, it.holder)),
        "pendingAt": "holder",
        "waiting": 2,
    }
    assert found.facts["blockedAttempts"] in (1, 2)


def check_unblocking(it: Scene) -> None:
    found = it.reason(Why.UNBLOCKING)
    assert found.detail == "1 hashes have drained; the broker delivers them soon"
    assert found.next_s is not None
    assert 0 <= found.next_s <= 0.01


def check_withheld(it: Scene) -> None:
    key = it.staying[0]
    [nacked] = [entry.position for entry in it.log if entry.view.partition_key == key][:1]
    found = it.reason(Why.WITHHELD)
    assert it.waiting(key) == 3
    assert found.facts == {"hash": it.slot(key), "waiting": 3, "earliest": str(nacked)}
    assert found.detail.startswith(f"3 entries of hash {it.slot(key)} wait until")


def check_look_ahead(it: Scene) -> None:
    found, limit = it.reason(Why.LOOK_AHEAD), it.machine._look_ahead_max()
    waiting = sum(map(it.waiting, {entry.view.partition_key or "" for entry in it.log}))
    unread = sum(entry.position >= it.machine.read_position for entry in it.log)
    returning = sum(len(consumer.pending) for consumer in it.machine._departed)
    kept = waiting - unread - returning - (Why.DELAYED in it.causes)
    assert found.facts == {"waiting": kept, "limit": limit}
    assert found.detail.startswith(f"{kept} entries wait for their consumers; the broker reads on")


def check_leaving(it: Scene) -> None:
    have = it.holder.machine.unacked
    found = it.reason(Why.LEAVING, "holder")
    assert have == sum(owner is it.holder for owner in it.owner.values()) > 0
    assert found.facts == {"unacked": have}
    assert f"it has {have} messages to acknowledge" in found.detail


def check_returning(it: Scene) -> None:
    found = it.reason(Why.RETURNING)
    given_back = sum(count > 0 for count in it.given_back.values())
    assert given_back > 2
    assert found.facts == {"entries": given_back, "consumers": 1}
    assert found.detail.startswith(f"{given_back} entries of consumers that have left")


def check_no_permits(it: Scene) -> None:
    assert it.reason(Why.NO_PERMITS, "dry").facts == {"permits": 0, "unacked": 0}


def check_not_writable(it: Scene) -> None:
    assert "too many unsent bytes" in it.reason(Why.NOT_WRITABLE, "shut").detail


def check_unacked_by_consumer(it: Scene) -> None:
    have = sum(owner is it.holder for owner in it.owner.values())
    found = it.reason(Why.UNACKED_BY_CONSUMER, "holder")
    assert found.facts == {"unacked": have, "limit": have, "resumesAt": have // 2}
    assert f"{have} messages are unacknowledged, the limit is {have}" in found.detail


def check_unacked_by_subscription(it: Scene) -> None:
    have = len(it.owner)
    found = it.reason(Why.UNACKED_BY_SUBSCRIPTION)
    assert found.facts == {"unacked": have, "limit": have, "resumesAt": have // 2}


def check_delayed(it: Scene) -> None:
    found = it.reason(Why.DELAYED)
    assert found.detail.startswith("1 entries are delayed; the next is due at 1970-01-01T00:17:40Z")
    assert found.facts["delayed"] == 1


CHECKS: dict[Why, Callable[[Scene], None]] = {
    Why.DRAINING: check_draining,
    Why.UNBLOCKING: check_unblocking,
    Why.WITHHELD: check_withheld,
    Why.LOOK_AHEAD: check_look_ahead,
    Why.LEAVING: check_leaving,
    Why.RETURNING: check_returning,
    Why.NO_PERMITS: check_no_permits,
    Why.NOT_WRITABLE: check_not_writable,
    Why.UNACKED_BY_CONSUMER: check_unacked_by_consumer,
    Why.UNACKED_BY_SUBSCRIPTION: check_unacked_by_subscription,
    Why.DELAYED: check_delayed,
}


def scene(*causes: Why) -> Scene:
    if Why.LOOK_AHEAD not in causes:
        return Scene(causes)
    waiting = Scene([why for why in causes if why is not Why.LOOK_AHEAD]).machine.waiting
    return Scene(causes, look_ahead=waiting + 4)


@pytest.mark.parametrize(
    "causes", [(why,) for why in CHECKS] + list(combinations(CHECKS, 2)), ids="+".join
)
def test_causes_are_explained_alone_and_in_pairs(causes: tuple[Why, ...]) -> None:
    it = scene(*causes)
    for why in causes:
        CHECKS[why](it)
    expected = {*causes, Why.NOTHING_TO_READ}
    if Why.LOOK_AHEAD in causes:
        expected.add(Why.DRAINING)  # the filling entries wait for a draining hash
    assert {reason.why for reason in it.machine.explain(it.now)} <= expected


# ---- causes that need another policy or type -----------------------------------------------------

LIMITS_MORE = [None, Why.NO_PERMITS, Why.NOT_WRITABLE, Why.LEAVING, Why.DELAYED]
LIMITS_MORE += [Why.UNACKED_BY_CONSUMER, Why.UNACKED_BY_SUBSCRIPTION]


def add(it: DispatcherRig, member: Member, why: Why | None) -> None:
    """Add another cause."""
    match why:
        case Why.NO_PERMITS:
            member.machine.permits = 0
        case Why.NOT_WRITABLE:
            it.set_writable(member, writable=False)
        case Why.LEAVING:
            it.announce_leave(member)
        case Why.DELAYED:
            it.append(key="delayed", delay_ms=60_000)
            it.settle()
        case Why.UNACKED_BY_CONSUMER:
            it.limits.unacked_per_consumer = member.machine.unacked
            for each in it.members:
                each.machine.on_unacked(0)
        case Why.UNACKED_BY_SUBSCRIPTION:
            it.limits.unacked_per_subscription = len(it.owner)


@pytest.mark.parametrize("more", [*LIMITS_MORE, Why.LOOK_AHEAD])
def test_a_hash_without_a_consumer_is_explained_beside_another_cause(more: Why | None) -> None:
    look_ahead = 5 if more is Why.LOOK_AHEAD else 1_000
    it = DispatcherRig(
        KeyShared,
        shared=True,
        limits=Limits(unacked_per_consumer=1_000, unacked_per_subscription=10_000),
        key_shared=KeySharedSettings(look_ahead_per_consumer=look_ahead),
    )
    low = it.join(policy=KeySharedPolicy(KeySharedMode.STICKY, (HashRange(0, 32_767),)))
    it.flow(low, 1_000)
    for key in KEYS:
        it.append(key=key)
    it.settle()
    add(it, low, more)
    reasons = {reason.why: reason for reason in it.machine.explain(it.now)}
    waiting = sum(
        entry.position < it.machine.read_position and entry.position not in it.owner
        for entry in it.log
        if entry.view.deliver_at_ms is None
    )
    assert waiting > 3
    unassigned = reasons[Why.UNASSIGNED]
    assert unassigned.facts["entries"] == waiting
    assert unassigned.detail.startswith(f"{waiting} entries wait for a consumer with their hash")
    assert set(reasons) <= {Why.UNASSIGNED, Why.NOTHING_TO_READ, more}
    assert more is None or more in reasons


@pytest.mark.parametrize("more", LIMITS_MORE)
def test_chunks_of_a_busy_consumer_are_explained_beside_another_cause(more: Why | None) -> None:
    it = DispatcherRig(
        Shared,
        shared=True,
        limits=Limits(unacked_per_consumer=1_000, unacked_per_subscription=10_000),
    )
    busy = it.join(name="busy")
    it.flow(busy, 1)
    it.append(chunk=Chunk("u", 0, 3, 30))
    it.settle()
    idle = it.join(name="idle")
    it.flow(idle, 100)
    for index in (1, 2):
        it.append(chunk=Chunk("u", index, 3, 30))
    it.settle()
    add(it, busy, more)
    reasons = it.machine.explain(it.now)
    [chunks] = [reason for reason in reasons if reason.why is Why.CHUNKS]
    assert chunks.facts == {"chunks": 2}
    assert chunks.detail.startswith("2 chunks wait for the consumers that have the rest")
    [dry] = [reason for reason in reasons if reason.why is Why.NO_PERMITS]
    assert dry.consumer == "busy"
    assert more is None or more in {reason.why for reason in reasons}


@pytest.mark.parametrize("kind", [Shared, KeyShared])
@pytest.mark.parametrize("more", [None, Why.DELAYED, Why.RETURNING])
def test_missing_consumers_are_explained_beside_another_cause(
    kind: type[Shared | KeyShared], more: Why | None
) -> None:
    it = DispatcherRig(
        kind, shared=True, limits=Limits(), key_shared=KeySharedSettings(part_entries=2)
    )
    gone = it.join(name="gone")
    it.flow(gone, 100)
    if more is Why.DELAYED:
        it.append(key="delayed", delay_ms=60_000)
    if more is Why.RETURNING:
        for key in KEYS[:9]:
            it.append(key=key)
    it.settle()
    it.leave(gone)
    reasons = {reason.why: reason for reason in it.machine.explain(it.now)}
    assert reasons[Why.NO_CONSUMERS].detail == "no consumer is connected"
    if more is Why.RETURNING and kind is Shared:  # the consumer returns the entries at once
        more = None
    assert set(reasons) == {Why.NO_CONSUMERS} | ({more} if more else set())
    if more is Why.RETURNING:
        count = sum(it.given_back.values())
        assert 0 < reasons[more].facts["entries"] <= count == 9
    if more is Why.DELAYED:
        assert reasons[more].facts["delayed"] == 1


# ---- types with one active consumer --------------------------------------------------------------

SWITCH, ACTIVE = Why.DRAINING, [Why.NO_PERMITS, Why.NOT_WRITABLE, Why.DRAINING, Why.STANDBY]
ACTIVE_PAIRS = [pair for pair in combinations(ACTIVE, 2) if set(pair) != {SWITCH, Why.STANDBY}]


@pytest.mark.parametrize("causes", [(why,) for why in ACTIVE[:3]] + ACTIVE_PAIRS, ids="+".join)
def test_causes_of_an_active_consumer_are_explained_alone_and_in_pairs(
    causes: tuple[Why, ...],
) -> None:
    """STANDBY alone is no cause: the active consumer gets the messages."""
    it = DispatcherRig(
        Failover,
        shared=False,
        limits=Limits(),
        failover=FailoverRules(Choice.SUBSCRIBE_ORDER, 1.0),
    )
    active = it.join(name="active", priority=1)
    it.flow(active, 6)
    for _ in range(6):
        it.append()
    it.settle()
    if Why.STANDBY in causes:
        for name in ("two", "three"):
            it.flow(it.join(name=name, priority=1), 100)
    if Why.NO_PERMITS not in causes:
        it.flow(active, 100)
    if Why.NOT_WRITABLE in causes:
        it.set_writable(active, writable=False)
    if SWITCH in causes:
        it.join(name="better")
        it.wait(0.4)
    it.append()
    reasons = {reason.why: reason for reason in it.machine.explain(it.now)}
    assert set(causes) <= set(reasons) <= {*causes, Why.READING, Why.NOTHING_TO_READ}
    if Why.NO_PERMITS in causes:
        assert reasons[Why.NO_PERMITS].consumer == "active"
        assert reasons[Why.NO_PERMITS].facts["permits"] == 0
    if Why.NOT_WRITABLE in causes:
        assert reasons[Why.NOT_WRITABLE].consumer == "active"
    if Why.STANDBY in causes:
        assert reasons[Why.STANDBY].facts == {"standby": 2, "active": "active"}
        assert reasons[Why.STANDBY].detail == "'active' is active; consumers on standby: 2"
    if SWITCH in causes:
        found = reasons[SWITCH]
        assert found.next_s == pytest.approx(0.6, abs=0.05)
        assert found.detail.startswith(
            "consumer 'better' becomes active when 'active' has acknowledged the entries before"
            f" {it.machine.read_position}, or in 0.6 s"
        )
