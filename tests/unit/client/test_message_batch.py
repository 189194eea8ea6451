"""A batch that the program decrypted itself, beside Apache's class for the same bytes."""

from __future__ import annotations

from typing import Any

import pulsar
import pytest

import magnetar
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_batch

BATCH = encode_batch(
    [OutgoingMessage(b"a", 1, {"k": "v"}), OutgoingMessage(b"", 2, partition_key="x")],
    EntryHeader("p", 1),
)[1]


def parts(messages: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (one.data(), one.properties(), one.partition_key(), str(one.message_id()))
        for one in messages
    ]


def test_split_messages_equal_those_of_apaches_client() -> None:
    theirs = pulsar.MessageBatch().with_message_id(pulsar.MessageId(1, 2, 3, -1))
    ours = magnetar.MessageBatch().with_message_id(magnetar.MessageId(1, 2, 3, -1))
    assert parts(ours.parse_from(BATCH, 2)) == parts(theirs.parse_from(BATCH, 2))


@pytest.mark.parametrize(("data", "size"), [(BATCH, 3), (BATCH, 1), (BATCH, 0), (b"\xff", 1)])
def test_a_batch_that_lies_is_refused(data: bytes, size: int) -> None:
    with pytest.raises(magnetar.InvalidMessage):
        magnetar.MessageBatch().parse_from(data, size)


def test_wrong_types_are_refused() -> None:
    wrong: Any = "x"
    with pytest.raises(TypeError):
        magnetar.MessageBatch().with_message_id(wrong)
    with pytest.raises(TypeError):
        magnetar.MessageBatch().parse_from(wrong, 1)
