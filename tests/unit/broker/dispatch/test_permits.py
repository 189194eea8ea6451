from __future__ import annotations

import pytest
from fakes.dispatch_rig import DispatcherRig

from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.permits import (
    CONSUMERS_EXPLAINED_MAX,
    Consumer,
    Limits,
    explain_all,
    holders,
)
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.log.position import Position


def test_availability_follows_permits_and_connection() -> None:
    writable = [True]
    it = Consumer("c", 0, lambda: writable[0], Limits(unacked_per_consumer=10))
    assert [reason.why for reason in it.explain()] == [Why.NO_PERMITS]
    it.permits = 8
    assert it.available
    assert it.explain() == []
    assert (it.message_room, it.entry_room()) == (8, 8)
    it.messages_per_entry = 3.0
    assert it.entry_room() == 2
    it.messages_per_entry = 100.0
    assert it.entry_room() == 1
    writable[0] = False
    assert not it.available
    assert [reason.why for reason in it.explain()] == [Why.NOT_WRITABLE]


def test_consumer_is_blocked_from_the_unacked_limit_to_half() -> None:
    it = Consumer("c", 0, lambda: True, Limits(unacked_per_consumer=10))
    it.permits = 100
    for unacked, blocked in ((9, False), (10, True), (6, True), (5, False), (9, False)):
        it.on_unacked(unacked - it.unacked)
        it.pending.set(Position(0, 0), unacked)
        assert it.blocked is blocked
        assert it.available is not blocked
        it.check()
    assert it.message_room == 1


def test_messages_per_entry_follows_deliveries() -> None:
    it = Consumer("c", 0, lambda: True, Limits())
    for _ in range(100):
        it.on_given(2, 20)
    assert round(it.messages_per_entry) == 10
    assert it.permits == -2_000


def test_the_reasons_of_many_consumers_are_counted() -> None:
    writable, number = [False], CONSUMERS_EXPLAINED_MAX + 30
    group = [Consumer(f"c{n}", 0, lambda: writable[0], Limits()) for n in range(number)]
    assert [(it.why, it.consumer) for it in explain_all(group[:2])] == [
        (Why.NO_PERMITS, "c0"),
        (Why.NOT_WRITABLE, "c0"),
        (Why.NO_PERMITS, "c1"),
        (Why.NOT_WRITABLE, "c1"),
    ]
    for consumer in group[-20:]:
        consumer.permits = 1
        consumer.leaving = consumer.blocked = consumer is group[-1]
    *named, no_permits, not_writable, leaving, blocked = explain_all(group)
    assert {it.consumer for it in named} == {f"c{n}" for n in range(CONSUMERS_EXPLAINED_MAX)}
    assert [(it.why, it.facts) for it in (no_permits, not_writable, leaving, blocked)] == [
        (Why.NO_PERMITS, {"consumers": 10}),
        (Why.NOT_WRITABLE, {"consumers": 30}),
        (Why.LEAVING, {"consumers": 1}),
        (Why.UNACKED_BY_CONSUMER, {"consumers": 1}),
    ]
    for consumer in group:
        assert list(consumer.obstacles()) == [it.why for it in consumer.explain()]
        consumer.permits = 1
        consumer.leaving = consumer.blocked = False
    writable[0] = True
    assert explain_all(group) == []


class Visited(Consumer):
    """Counts the reads of `pending`."""

    __slots__ = ()
    visits = 0

    def __getattribute__(self, name: str) -> object:
        Visited.visits += name == "pending"
        return super().__getattribute__(name)


def test_holders_of_entries_are_found_in_any_ledger() -> None:
    one, two = (Consumer(name, 0, lambda: True, Limits()) for name in "ab")
    for owner, ledger, entry in ((one, 0, 5), (two, 0, 6), (two, 3, 5), (two, 3, 6)):
        owner.pending.set(Position(ledger, entry), 1)
    wanted = [Position(3, 5), Position(0, 6), Position(0, 5), Position(9, 9), Position(0, 5)]
    found = []
    for owner, position in holders((one, two, one), wanted):
        owner.pending.pop(position)
        found.append((owner.name, position))
    assert sorted(found) == [
        ("a", Position(0, 5)),
        ("b", Position(0, 6)),
        ("b", Position(3, 5)),
    ]
    assert list(two.pending) == [Position(3, 6)]


@pytest.mark.parametrize("make", [Shared, KeyShared])
@pytest.mark.parametrize("partly", [False, True])
def test_an_ack_of_many_foreign_entries_visits_each_consumer_once(
    make: type[Shared | KeyShared], partly: bool
) -> None:
    it, number = DispatcherRig(make, shared=True, limits=Limits()), 200
    for _ in range(60):
        it.append(2, batch=True, key=str(len(it.log)))
    consumers = [Visited(f"c{n}", 0, lambda: True, Limits(), join_number=n) for n in range(number)]
    for consumer in consumers:
        it.machine.add_consumer(consumer, it.tick())
    for consumer in consumers:
        it.machine.on_flow(consumer, 1, it.tick())
    it.machine.on_entries(it.log, it.tick())
    positions = [at for consumer in consumers[:-1] for at in consumer.pending]
    assert len(positions) > 20
    for entry in it.log:
        it.acks.acknowledge_index(entry, 0)
        if not partly:
            it.acks.acknowledge(entry.position)
    event = it.machine.on_partly_acked if partly else it.machine.on_acked
    absent = [Position(9, number) for number in range(100)]
    Visited.visits = 0
    event(consumers[-1], [*positions, *absent], it.tick())
    visits = Visited.visits
    unacked = sum(consumer.unacked for consumer in consumers[:-1])
    assert unacked == (len(positions) if partly else 0)
    assert visits < 2 * number + 6 * len(positions)
