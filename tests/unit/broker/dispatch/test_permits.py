from __future__ import annotations

from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.permits import Consumer, Limits
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
