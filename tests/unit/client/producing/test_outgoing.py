"""The arguments of `send` as a message, and the limit of pending messages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ManualClock

from magnetar.client.errors import (
    InvalidMessage,
    MemoryBufferIsFull,
    NotAllowedError,
    ProducerQueueIsFull,
)
from magnetar.client.producing.outgoing import (
    MESSAGE_OVERHEAD_BYTES,
    PendingLimit,
    outgoing_message,
)

CLOCK = ManualClock(1_000_000)


def make(content: Any = b"x", **given: Any) -> Any:
    return outgoing_message(CLOCK, content, **given)[0]


def test_a_message_has_all_the_parts_that_were_given() -> None:
    message = make(
        b"data",
        properties={"a": "1"},
        partition_key="k",
        ordering_key="ö",
        sequence_id=0,
        event_timestamp=5,
        deliver_at=9,
    )
    assert message.payload == b"data"
    assert message.properties == {"a": "1"}
    assert message.partition_key == "k"
    assert message.ordering_key == "ö".encode()
    assert message.sequence_id == 0
    assert message.event_time_ms == 5
    assert message.deliver_at_ms == 9
    assert not message.null_value
    assert make().sequence_id < 0
    assert make(None).null_value
    assert make(deliver_after=timedelta(seconds=1.5)).deliver_at_ms == 1_001_500


def test_limits_count_bytes_and_not_characters() -> None:
    def counted(**given: Any) -> int:
        return outgoing_message(CLOCK, b"xy", **given)[1]

    plain = counted()
    assert counted(partition_key="\N{EURO SIGN}") == plain + 3
    assert counted(ordering_key="\N{EURO SIGN}\N{GRINNING FACE}") == plain + 7
    texts = counted(properties={"ö": "\N{EURO SIGN}", "a": ""})
    assert texts == plain + 6 + 2 * MESSAGE_OVERHEAD_BYTES


@pytest.mark.parametrize(
    "given",
    [
        {"content": "text"},
        {"content": bytearray(b"x")},
        {"properties": {"a": 1}},
        {"properties": {"a": "\ud800"}},
        {"partition_key": b"bytes"},
        {"ordering_key": "\udfff"},
        {"sequence_id": -1},
        {"sequence_id": 2**63},
        {"event_timestamp": 1.5},
        {"deliver_at": -5},
        {"deliver_after": 3},
    ],
)
def test_invalid_messages_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        make(**given)


def test_replication_is_refused() -> None:
    with pytest.raises(NotAllowedError):
        make(replication_clusters=["b"])
    with pytest.raises(NotAllowedError):
        make(disable_replication=True)
    make(replication_clusters=[], disable_replication=False)


def test_size_counts_all_parts() -> None:
    _, plain = outgoing_message(CLOCK, b"1234")
    given = {"properties": {"a": "bb"}, "partition_key": "kk", "ordering_key": "ooo"}
    _, full = outgoing_message(CLOCK, b"1234", **given)  # type: ignore[arg-type]
    assert plain > 4
    assert full == plain + 2 + 3 + 3 + 16


@given(st.lists(st.integers(0, 60), max_size=50), st.data())
def test_pending_limit_against_a_list(sizes: list[int], data: st.DataObject) -> None:
    limit = PendingLimit(5, 100, topic="t")
    inside: list[int] = []
    for size in sizes:
        fits = len(inside) < 5 and (not inside or sum(inside) + size <= 100)
        assert limit.maybe_reserve(size) == fits
        limit.check()
        if fits:
            inside.append(size)
        else:
            full = len(inside) == 5
            assert isinstance(limit.refusal(), ProducerQueueIsFull if full else MemoryBufferIsFull)
            gone = data.draw(st.integers(1, len(inside)))
            limit.release(gone, sum(inside[:gone]))
            del inside[:gone]
            limit.check()


def test_one_message_may_exceed_the_bytes() -> None:
    limit = PendingLimit(5, 100, topic="t")
    assert limit.maybe_reserve(1000)
    assert not limit.maybe_reserve(1)
    limit.release(1, 1000)
    assert limit.maybe_reserve(1)
