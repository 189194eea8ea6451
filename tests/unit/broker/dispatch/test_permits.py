from __future__ import annotations

from magnetar.broker.dispatch.explain import Why
from magnetar.broker.dispatch.permits import Consumer, Limits
from magnetar.broker.log.position import Position


def test_what_a_consumer_may_be_given() -> None:
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


def test_blocked_from_the_limit_to_half_of_it() -> None:
    it = Consumer("c", 0, lambda: True, Limits(unacked_per_consumer=10))
    it.permits = 100
    for unacked, blocked in ((9, False), (10, True), (6, True), (5, False), (9, False)):
        it.on_unacked(unacked - it.unacked)
        it.pending.set(Position(0, 0), unacked)
        assert it.blocked is blocked
        assert it.available is not blocked
        it.check()
    assert it.message_room == 1


def test_the_average_follows_what_was_given() -> None:
    it = Consumer("c", 0, lambda: True, Limits())
    for _ in range(100):
        it.on_given(2, 20)
    assert round(it.messages_per_entry) == 10
    assert it.permits == -2_000
