"""The guards of keys, and which entries a client can return as a whole."""

from __future__ import annotations

import sys

from magnetar.client.consuming.nack_order import NackOrder, entries_of
from magnetar.client.message import ChunkedMessageId, Delivery, Message, MessageId
from magnetar.protos.batch import ReceivedMessage

DELIVERY = Delivery("t", -1, "p", 0, b"", 0, None, 0, None)


def message(key: str, entry: int, index: int = -1, *, ordering: bytes | None = None) -> Message:
    received = ReceivedMessage(b"", {}, key or None, False, ordering, 0, 0, False, index)
    return Message(received, MessageId(-1, 1, entry, index, 3, "t"), DELIVERY)


def test_later_messages_of_a_guarded_key_are_withheld_until_the_release() -> None:
    order = NackOrder()
    assert not order
    one, two = order.guard(message("a", 5)), order.guard(message("a", 3))
    assert order.withholds(message("a", 4))
    assert not order.withholds(message("a", 3)), "the message itself may come"
    assert not order.withholds(message("a", 2))
    assert not order.withholds(message("b", 9))
    assert not order.withholds(message("a", 9, ordering=b"a")), "an ordering key is another one"
    order.release(two)
    assert not order.withholds(message("a", 4))
    assert order.withholds(message("a", 6))
    order.release(one)
    assert not order


def test_the_guards_of_other_keys_cost_no_time() -> None:
    order, late = NackOrder(), message("late", 9)
    for number in range(1000):
        order.guard(message(f"k{number}", 5))
    order.guard(message("late", 5))
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count)
    try:
        assert order.withholds(late)
    finally:
        sys.setprofile(None)
    assert steps < 100


def test_later_messages_of_the_same_batch_are_withheld() -> None:
    order = NackOrder()
    order.guard(message("a", 5, 1))
    assert order.withholds(message("a", 5, 2))
    assert not order.withholds(message("a", 5, 0))


def test_messages_without_a_key_or_in_chunks_have_no_order() -> None:
    assert NackOrder.has_key(message("a", 1))
    assert NackOrder.has_key(message("", 1, ordering=b"o"))
    assert not NackOrder.has_key(message("", 1))
    whole = message("a", 1)
    first = MessageId(-1, 1, 1, -1, 0, "t")
    chunked = Message(whole._received, ChunkedMessageId(first, first), DELIVERY)
    assert not NackOrder.has_key(chunked)


def test_batches_of_which_the_user_has_seen_a_part_are_not_returned() -> None:
    late = [message("a", 4, 1), message("a", 4, 2), message("a", 5, 0), message("a", 6)]
    assert entries_of(late) == ([(1, 5), (1, 6)], [(1, 4)])
