"""Message ids: Apache's bytes and order. (test_subscriber.py covers the methods of messages.)"""

from __future__ import annotations

import pickle
from dataclasses import replace

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consuming.delivery import messages_of
from magnetar.client.errors import InvalidMessage
from magnetar.client.message import Delivery, Message, MessageId
from magnetar.protos.batch import ReceivedMessage, open_batch
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch

NUMBER = st.integers(-1, 2**63 - 1)
SMALL = st.integers(-1, 3)


@given(st.integers(-1, 2**31 - 1), NUMBER, NUMBER, st.integers(-1, 999))
def test_the_bytes_of_an_id_equal_those_of_apaches_client(
    partition: int, ledger: int, entry: int, batch_index: int
) -> None:
    ours = MessageId(partition, ledger, entry, batch_index)
    theirs = pulsar.MessageId(partition, ledger, entry, batch_index)
    assert ours.serialize() == theirs.serialize()
    assert str(ours) == str(theirs)
    assert MessageId.deserialize(theirs.serialize()) == ours


@given(*[st.tuples(st.just(-1), SMALL, SMALL, SMALL)] * 2)
def test_the_order_of_ids_equals_that_of_apaches_client(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    ours = MessageId(*a), MessageId(*b)
    theirs = pulsar.MessageId(*a), pulsar.MessageId(*b)
    assert (ours[0] < ours[1]) == (theirs[0] < theirs[1])
    assert (ours[0] == ours[1]) == (theirs[0] == theirs[1])
    assert (ours[0] >= ours[1]) == (theirs[0] >= theirs[1])
    assert ours[0] != ours[1] or hash(ours[0]) == hash(ours[1])


def test_earliest_and_latest_are_those_of_apaches_client() -> None:
    assert MessageId.earliest.serialize() == pulsar.MessageId.earliest.serialize()
    assert MessageId.latest.serialize() == pulsar.MessageId.latest.serialize()
    assert MessageId.earliest < MessageId(-1, 0, 0) < MessageId.latest


def test_an_id_in_a_batch_keeps_the_size_of_the_batch() -> None:
    one = MessageId(-1, 3, 4, 5, 6)
    copies = MessageId.deserialize(one.serialize()), pickle.loads(pickle.dumps(one))
    for copy in copies:
        assert copy == one
        assert copy.batch_size() == 6
    assert one.batch_index() == 5


@pytest.mark.parametrize("garbage", [b"", b"\x08\x03", b"\xff\xff\xff", b"hello"])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(InvalidMessage):
        MessageId.deserialize(garbage)


def test_the_index_counts_back_from_the_last_message_of_the_entry() -> None:
    def indexes(last: int | None, size: int, *, batch: bool) -> list[int | None]:
        delivery = Delivery("t", -1, "p", 1, b"", 0, last, 0, key=(1, 2))
        if not batch:
            received = ReceivedMessage(b"", {}, None, False, None, 0, 0, False, -1)
            return [Message(received, None, delivery).index()]
        payload = encode_batch([OutgoingMessage(b"", n) for n in range(size)], EntryHeader("p", 1))
        delivery = replace(delivery, batch=open_batch(payload[1], 0, size, sequence_id=0))
        return [m.index() for m in messages_of(delivery, (1 << size) - 1)]

    assert indexes(9, 1, batch=False) == [9]
    assert indexes(9, 1, batch=True) == [9]
    assert indexes(9, 4, batch=True) == [6, 7, 8, 9]
    assert indexes(None, 2, batch=True) == [None, None]
