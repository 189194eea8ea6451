"""Permits against a broker that uses them, and a user that takes messages, in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consuming.permits import QUEUE_BYTES_MAX, Permits


@given(st.integers(1, 50), st.data())
def test_the_queue_never_overflows_and_never_starves(queue_max: int, data: st.DataObject) -> None:
    permits = Permits(queue_max)
    permits.on_attached()
    granted = permits.grant(waiting=False)
    queued = returned = 0
    assert granted == queue_max
    for _ in range(data.draw(st.integers(0, 40))):
        if granted > 0 and data.draw(st.booleans()):
            batch = data.draw(st.integers(1, 7))
            shown = data.draw(st.integers(0, batch))
            permits.on_delivered(batch, shown, shown * 10)
            granted -= batch
            queued += shown
        elif queued and data.draw(st.booleans()):
            taken = data.draw(st.integers(1, queued))
            permits.on_taken(taken, taken * 10)
            queued -= taken
        else:
            for _ in range(data.draw(st.integers(0, 3))):
                permits.on_returned(10)
                queued += 1
                returned += 1
        granted += permits.grant(waiting=False)
        permits.check()
        assert granted <= queue_max
        assert granted + queued <= queue_max + 7 + returned
        assert granted > 0 or queued > 0


def test_grants_come_by_the_half() -> None:
    permits = Permits(1000)
    permits.on_attached()
    assert permits.grant(waiting=False) == 1000
    permits.on_delivered(1000, 1000, 1000)
    for _ in range(499):
        permits.on_taken(1, 1)
        assert permits.grant(waiting=False) == 0
    permits.on_taken(1, 1)
    assert permits.grant(waiting=False) == 500


def test_queue_size_zero_grants_one_permit_per_waiting_receive() -> None:
    permits = Permits(0)
    permits.on_attached()
    assert permits.grant(waiting=False) == 0
    assert permits.grant(waiting=True) == 1
    assert permits.grant(waiting=True) == 0
    permits.on_delivered(3, 3, 30)
    assert permits.grant(waiting=True) == 0
    for _ in range(3):
        permits.on_taken(1, 10)
    assert permits.grant(waiting=False) == 0
    # One permit brought a batch of three messages, so the next grant has two permits more.
    assert permits.grant(waiting=True) == 3


def test_large_messages_are_granted_by_bytes() -> None:
    permits = Permits(1000)
    permits.on_attached()
    permits.grant(waiting=False)
    size = 1 << 20
    permits.on_delivered(1000, 1000, 1000 * size)
    window = QUEUE_BYTES_MAX // size
    for taken in range(1, 1001):
        permits.on_taken(1, size)
        granted = permits.grant(waiting=False)
        left = 1000 - taken
        if left > window // 2:
            assert granted == 0
        elif left == window // 2:
            assert granted == window - left


def test_a_new_connection_starts_over() -> None:
    permits = Permits(10)
    permits.on_attached()
    assert permits.grant(waiting=False) == 10
    permits.on_delivered(4, 4, 4)
    permits.on_attached()
    assert permits.grant(waiting=False) == 10
    permits.on_delivered(10, 10, 10)
    permits.on_dropped()
    assert permits.grant(waiting=False) == 10


def test_returned_message_taken_again_is_not_counted() -> None:
    permits = Permits(10)
    permits.on_attached()
    permits.grant(waiting=False)
    permits.on_delivered(10, 10, 10)
    for _ in range(8):
        permits.on_taken(1, 1)
    assert permits.grant(waiting=False) == 8
    for _ in range(8):
        permits.on_returned(1)
    permits.check()
    permits.on_delivered(8, 8, 8)
    for _ in range(18):
        permits.on_taken(1, 1)
        permits.check()
    assert permits.grant(waiting=False) == 10


def test_resized_queue_grants_by_its_new_size() -> None:
    permits = Permits(1000)
    permits.on_attached()
    permits.resize(10, 1000)
    assert permits.grant(waiting=False) == 10
    permits.on_delivered(10, 10, 10)
    for _ in range(5):
        permits.on_taken(1, 1)
    permits.resize(4, 1000)  # five messages wait: more than the new size
    assert permits.grant(waiting=False) == 0
    for _ in range(5):
        permits.on_taken(1, 1)
    assert permits.grant(waiting=False) == 4
